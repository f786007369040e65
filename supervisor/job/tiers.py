"""Checkpoints on the nodes' own disks: what all nodes have together, and what each is asked to do with it.

Nothing here happens unless the user gave a folder to publish to (`JobSpec.publish_to`). The rules are in
`recovery.tiers`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import msgspec

from recovery.checkpoint import Checkpoint
from recovery.tiers import (
    SINGLE_FILES,
    TIERS,
    BringBack,
    JoinedSave,
    NodePlace,
    NodeTiers,
    PartSource,
    Save,
    SaveKey,
    SnapshotOrders,
    Tier,
    TierOrders,
    bring_back,
    choose_peers,
    join,
    judged,
)
from supervisor.job.core import Core, Timer, Wants
from supervisor.job.nodes import Nodes
from supervisor.messages import SnapshotCopiesSeen, TiersSeen

SETTLE_S = 5.0
"""So long after a node has called a save whole, parts of others may still come."""
NEWS_S = 0.5
ATTEMPTS_KEPT = 64
REPORTS_KEPT = 4096
GONE_REPORTED = 256
SEEN_KEPT = 256


class Tiers:
    """What nodes reported of their tiers, and the orders that follow."""

    def __init__(self, core: Core, nodes: Nodes) -> None:
        self._core, self._nodes = core, nodes
        self._reports: dict[str, NodeTiers] = {}
        """Of every node, lost ones included."""
        self._members: dict[int, frozenset[str]] = {}
        """Attempt -> its nodes."""
        self._seen: dict[SaveKey, float] = {}
        """When a save was called whole first, by any node."""
        self._settled: set[SaveKey] = set()
        self._peers: dict[str, str] = {}
        self._saves: tuple[int, list[JoinedSave]] = (-1, [])
        self._revision = 0
        """Grows with each change."""
        self.has_news = False
        """`work_out` is due."""
        self._ring: tuple[list[NodePlace], tuple[tuple[str, int], ...]] = ([], ())
        """What the peers were chosen from."""
        self._told: dict[str, tuple[SaveKey, ...]] = {}
        """Node -> the saves that it was told to commit."""
        self._drained = False
        self._out_of_use: dict[SaveKey, None] = {}
        """What a rollback took out of use: also the copies that lie on other nodes, and in the shared folder."""
        self.is_bad: Callable[[str], bool] | None = None
        """Whether the checkpoint of that path is suspect, or its bytes have changed."""
        self._present: frozenset[str] = frozenset()

    # ----- queries -----

    @property
    def are_on(self) -> bool:
        return bool(self._core.spec.publish_to) and bool(self._core.spec.checkpoint_dirs)

    @property
    def folder(self) -> str:
        """Where the script writes."""
        return self._core.spec.checkpoint_dirs[0].rstrip("/")

    def saves(self) -> list[JoinedSave]:
        """Of all nodes, the newest first."""
        present = frozenset(node.name for node in self._nodes if node.present)
        if present != self._present:
            self._present, self._revision = present, self._revision + 1
        if self._saves[0] != self._revision:
            self._saves = (self._revision, self._joined(present))
        return self._saves[1]

    def _joined(self, present: frozenset[str]) -> list[JoinedSave]:
        numbers = self._members.keys() | {
            part.attempt for report in self._reports.values() for part in (*report.parts, *report.mirrors)
        }
        opened = frozenset(number for number in numbers if self._is_open(number))
        rested = frozenset(number for number in numbers - opened if self._has_rested(number))
        settled = self._settled | {
            part.key
            for report in self._reports.values()
            for part in (*report.parts, *report.mirrors)
            if part.attempt in rested
        }
        return join(self._reports, present, settled, opened, numbers - opened - rested)

    @property
    def _are_shared(self) -> bool:
        """Nodes write to the same checkpoint folder: each sees all of it by itself, and nothing is brought to it."""
        return any(report.shared for node, report in self._reports.items() if self._nodes.is_present(node))

    def reports(self) -> dict[str, NodeTiers]:
        """Of the nodes that are there."""
        return {node: report for node, report in self._reports.items() if self._nodes.is_present(node)}

    def judged(self, candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The candidates as all nodes together have them."""
        if not self.are_on or not self._reports or self._are_shared:
            first: dict[str, Checkpoint] = {}
            for one in candidates:
                first.setdefault(one.path, one)
            return list(first.values())
        saves = self.saves()
        left = frozenset(node.name for node in self._nodes if node.done) - self._present
        if left:  # at its end a node leaves, and what it has is where it was
            saves = self._joined(self._present | left)
        return [self._marked(one) for one in judged(candidates, saves, self.folder)]

    def _marked(self, found: Checkpoint) -> Checkpoint:
        same = [one for one in self.saves() if self._out_of_use and f"{self.folder}/{one.save.name}" == found.path]
        newest = max(same, key=lambda one: (one.usable, one.save.attempt, one.save.stamp), default=None)
        if newest is None or newest.save.key not in self._out_of_use:
            return found
        return msgspec.structs.replace(found, suspect=True)

    def take_out_of_use(self, paths: Container[str]) -> None:
        """What is known now under these paths. What a later attempt writes there is another save."""
        if not self.are_on:
            return
        for one in self.saves():
            if f"{self.folder}/{one.save.name}" in paths:
                self._out_of_use[one.save.key] = None
        while len(self._out_of_use) > SEEN_KEPT:
            del self._out_of_use[next(iter(self._out_of_use))]

    def use_again(self, paths: Container[str]) -> None:
        for key in [key for key in self._out_of_use if f"{self.folder}/{key.name}" in paths]:
            del self._out_of_use[key]

    def _may_be_published(self, one: JoinedSave) -> bool:
        bad = self.is_bad is not None and self.is_bad(f"{self.folder}/{one.save.name}")
        return one.save.key not in self._out_of_use and not bad

    def not_brought(self) -> dict[str, str]:
        """Paths of saves that a node could not get, and why."""
        if not self.are_on or self._are_shared:
            return {}
        return {f"{self.folder}/{one.save.name}": one.not_brought for one in self.saves() if one.not_brought}

    def tiers_of(self, path: str) -> tuple[Tier, ...]:
        """Where all of a checkpoint is; of one with several versions the newest that can be had."""
        if not self.are_on or not path.startswith(f"{self.folder}/"):
            return ()
        name = path[len(self.folder) + 1 :]
        found = [one for one in self.saves() if one.save.name == name and one.usable]
        return max(found, key=lambda one: (one.save.attempt, one.save.stamp)).tiers if found else ()

    def newest(self) -> dict[Tier, Save]:
        """Tier -> the newest save of which all is there."""
        found: dict[Tier, Save] = {}
        for one in self.saves() if self.are_on else []:
            for tier in one.tiers if one.usable else ():
                found.setdefault(tier, one.save)
        return {tier: found[tier] for tier in TIERS if tier in found}

    def bring(self, path: str) -> BringBack | None:
        """How nodes get all of the save that the next attempt resumes from."""
        if not self.are_on or not path.startswith(f"{self.folder}/"):
            return None
        addresses = {node.name: node.address for node in self._nodes if node.present}
        return bring_back(self.saves(), path[len(self.folder) + 1 :], self._reports, addresses)

    def _is_there(self, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and node.present and not node.done

    def _is_open(self, attempt: int) -> bool:
        """Whether a node of it, which is there, has not told all that it has of it."""
        there = (node.name for node in self._nodes if node.present)
        members = self._members.get(attempt, there)
        return any(self._nodes.is_present(name) and not self._rested(name, attempt) for name in members)

    def _has_rested(self, attempt: int) -> bool:
        """Whether every node of it has told all. Of an attempt from before the job, or long ago, the nodes are not
        known: those that are there count."""
        return all(self._rested(name, attempt) for name in self._members.get(attempt, ()))

    def _rested(self, name: str, attempt: int) -> bool:
        report = self._reports.get(name)
        return report is not None and report.rested >= attempt

    # ----- orders -----

    def orders(self, node: str, bring: BringBack | None, snapshots: SnapshotOrders | None = None) -> TierOrders | None:
        """None: there are no tiers."""
        if not self.are_on:
            return None
        peer = self._reports.get(self._peers.get(node, ""))
        found = self._nodes.get(self._peers.get(node, ""))
        source = None
        if peer is not None and found is not None and peer.port and not peer.shared and not self._core.is_over:
            source = PartSource(owner=node, node=found.name, address=found.address, port=peer.port, tls=peer.tls)
        gone = tuple(sorted(name for name in self._reports if name and not self._nodes.is_present(name)))[
            :GONE_REPORTED
        ]
        commit = self._to_commit().get(node, ())
        return TierOrders(
            peer=source, commit=commit, bring=bring, gone=gone, drained=self.are_drained, snapshots=snapshots
        )

    def _to_commit(self) -> dict[str, tuple[Save, ...]]:
        """Node -> whole saves whose parts are all staged. The first node that wrote it commits; another one where all
        of them are gone."""
        found: dict[str, tuple[Save, ...]] = {}
        for one in self.saves():
            waits = one.whole and one.staged and not one.rewritten and "published" not in one.tiers
            if waits and self._may_be_published(one):
                there = [name for name in one.save.owners if self._is_there(name)]
                node = there[0] if there else next((node.name for node in self._nodes if self._is_there(node.name)), "")
                found[node] = (*found.get(node, ()), one.save)
        return found

    @property
    def are_drained(self) -> bool:
        """The newest save that can be had is published; at the end of the job, every node has told its last one."""
        last = max(self._members, default=0)
        if self._core.is_over and any(
            self._is_there(n) and not self._rested(n, last) for n in self._members.get(last, ())
        ):
            return False
        usable = (one for one in self.saves() if one.usable)
        newest = next((one for one in usable if "published" in one.tiers or self._may_be_published(one)), None)
        waits = any(one.open and not one.rewritten for one in self.saves())
        return not waits and (newest is None or "published" in newest.tiers)

    # ----- changes -----

    def add(self, event: TiersSeen) -> Wants:
        """What a node has now. What follows is worked out a moment later, for the news of many nodes at once."""
        if not self.are_on:
            return
        self._reports.pop(event.node, None)
        self._reports[event.node] = event.tiers
        while len(self._reports) > REPORTS_KEPT:
            del self._reports[next(iter(self._reports))]
        self._revision += 1
        self.has_news = True
        for part in event.tiers.parts:
            if part.whole and not part.needs and part.format not in SINGLE_FILES:
                self._seen.setdefault(part.key, self._core.now)
        while len(self._seen) > SEEN_KEPT:
            self._settled.discard(next(iter(self._seen)))
            del self._seen[next(iter(self._seen))]
        yield from self._work_out_soon()

    def add_snapshots(self, event: SnapshotCopiesSeen) -> Wants:
        """Of what else the node has nothing has changed."""
        if self.are_on and (before := self._reports.get(event.node)) is not None:
            self._reports[event.node] = msgspec.structs.replace(before, snapshots=event.snapshots)
            self.has_news = True
            yield from self._work_out_soon()

    def _work_out_soon(self) -> Wants:
        if "tiers" not in self._core.timers:
            yield Timer("tiers", self._core.now + NEWS_S)

    def work_out(self) -> Wants:
        """Whatever news there are: who mirrors for whom, what is whole, what is to be published."""
        self.has_news = False
        if not self.are_on:
            return
        self._settle()
        self._choose_peers()
        told = {node: tuple(save.key for save in saves) for node, saves in self._to_commit().items()}
        drained = self.are_drained
        if drained != self._drained or self._core.is_over:
            self._nodes.touch_all()
        elif told != self._told:
            self._nodes.touch(*told, *self._told)
        self._told, self._drained = told, drained
        waiting = [at for key, at in self._seen.items() if key not in self._settled and at + SETTLE_S > self._core.now]
        if waiting:
            yield Timer("tiers", min(waiting) + SETTLE_S)

    def _settle(self) -> None:
        """A save was called whole a while ago, and every node of its attempt is there and writes none of it: no part
        is missing."""
        for key, at in self._seen.items():
            members = self._members.get(key.attempt, frozenset())
            waited = self._core.now >= at + SETTLE_S or len(members) == 1
            there = bool(members) and all(self._nodes.is_present(name) and name in self._reports for name in members)
            writing = any(key.name in self._reports[name].writing for name in members if name in self._reports)
            if key not in self._settled and waited and there and not writing:
                self._settled.add(key)
                self._revision += 1

    def _choose_peers(self) -> None:
        known = sorted(self._nodes, key=lambda node: (node.index is None, node.index or 0, node.joined))
        places = [NodePlace(node.name, node.host, node.domain) for node in known]
        able = frozenset(
            node.name
            for node in known
            if node.present and (report := self._reports.get(node.name)) is not None and report.port
        )
        ports = tuple((name, self._reports[name].port) for name in sorted(able))
        if (places, ports) == self._ring:
            return
        self._ring = (places, ports)
        self._peers = choose_peers(places, able)
        self._nodes.touch_all()

    def begin(self, attempt: int, members: Sequence[str]) -> None:
        """The ranks of an attempt are let go."""
        self._members[attempt] = frozenset(members)
        while len(self._members) > ATTEMPTS_KEPT:
            del self._members[next(iter(self._members))]
        self._revision += 1

    def begin_life(self) -> None:
        """The scheduler has started the job again on other nodes: only what is published is left."""
        published = {one.key: one for report in self._reports.values() for one in report.published}
        self._reports = {"": NodeTiers(published=tuple(published.values()))} if published else {}
        self._members.clear()
        self._revision += 1
