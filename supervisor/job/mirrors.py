"""Snapshots in memory that other nodes have a copy of: which step is copied, what is kept, what is brought back.

Nothing here happens unless the user asked for it (`JobSpec.mirror_snapshots`). The rules are in
`recovery.snapshot_mirrors`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from recovery.snapshot_mirrors import CommonStep, Mirrored, MirrorTarget, bring_to, joined, next_target
from recovery.tiers import SnapshotBring, SnapshotOrders
from supervisor import messages as m
from supervisor.job.core import Core, Wants
from supervisor.job.nodes import Nodes
from supervisor.job.tiers import Tiers

EVERY_S, NODE_S = 10.0, 0.2
"""A step is named at most so often, and later by so much for each node: while the run is young. Each one costs the
journal some kilobytes a node."""
CALM_EVERY_S, CALM_NODE_S = 60.0, 1.0
"""The same, once it has run for long."""
CALM_SHARE: Final = 1 / 60
"""In between: this part of the time since the first step was named."""


class SnapshotPlan(NamedTuple):
    """What nodes are asked, worked out once for all."""

    base: SnapshotOrders
    """What all are told alike."""
    ranks: Mapping[str, tuple[int, int]]
    """Of members whose snapshots are to be copied: their first rank, and how many."""
    bring: Mapping[str, SnapshotBring]

    def of(self, node: str) -> SnapshotOrders:
        first, count = self.ranks.get(node, (0, 0))
        return msgspec.structs.replace(self.base, first_rank=first, ranks=count, bring=self.bring.get(node))


class SnapshotMirrors:
    """What nodes have copied, and the orders that follow."""

    def __init__(self, core: Core, nodes: Nodes, tiers: Tiers) -> None:
        self._core, self._nodes, self._tiers = core, nodes, tiers
        self._before: CommonStep | None = None
        self._seen: CommonStep | None = None
        self._target: MirrorTarget | None = None
        self._left = (0, -1)
        """Attempt and step: the script has gone back from it by itself, and may make steps up to it once more. Copies
        of those are of two runs."""
        self._named_at = 0.0
        self._first_named_at: float | None = None
        self._told: tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]] = (None, ())

    @property
    def are_on(self) -> bool:
        return self._core.spec.mirror_snapshots and self._tiers.are_on

    def candidates(self) -> list[Mirrored]:
        """Of the nodes that are there, the newest first."""
        if not self.are_on:
            return []
        found = joined({node: report.snapshots for node, report in self._tiers.reports().items()})
        return [one for one in found if not self._is_left(one.attempt, one.step)]

    def _is_left(self, attempt: int, step: int) -> bool:
        return attempt == self._left[0] and step <= self._left[1]

    @property
    def _have_peers(self) -> bool:
        """There is somebody to mirror for another."""
        return sum(report.port > 0 and not report.shared for report in self._tiers.reports().values()) > 1

    @property
    def newest(self) -> Mirrored | None:
        """The newest of which the loss of any node leaves all."""
        return next((one for one in self.candidates() if one.safe), None)

    def _kept(self, attempt: int) -> tuple[tuple[int, int], ...]:
        """Older copies of that attempt which are not replaced yet."""
        found = [one for one in self.candidates() if one.attempt == attempt]
        kept = next((one for one in found if one.safe), found[0] if found else None)
        return ((kept.attempt, kept.step),) if kept is not None else ()

    # ----- orders -----

    def plan(
        self, members: Sequence[str], sizes: Sequence[int], last: int, chosen: Mirrored | None
    ) -> SnapshotPlan | None:
        """`members`: in the order of their ranks. `sizes`: how many ranks each has; none where that is not known, or
        they have not begun. `last`: the newest attempt that had ranks. `chosen`: what the next one may start from.
        None: snapshots are not mirrored."""
        if not self.are_on:
            return None
        if self._core.is_over:
            return SnapshotPlan(SnapshotOrders(), {}, {})
        target, kept = self._target or MirrorTarget(0, 0), self._kept(last)
        sizes = sizes if self._target is not None else ()
        base = SnapshotOrders(
            attempt=target.attempt,
            from_step=target.from_step,
            world=sum(sizes),
            keep=kept if chosen is None else tuple(sorted({*kept, (chosen.attempt, chosen.step)})),
        )
        firsts = itertools.accumulate(sizes, initial=0)
        ranks = dict(zip(members, zip(firsts, sizes, strict=False), strict=False))
        addresses = self._addresses() if chosen is not None else {}
        bring = {name: bring_to(chosen, place, addresses) for place, name in enumerate(members)} if chosen else {}
        return SnapshotPlan(base, ranks, bring)

    def _addresses(self) -> Mapping[str, tuple[str, int, bool]]:
        reports = self._tiers.reports()
        return {
            node.name: (node.address, report.port, report.tls)
            for node in self._nodes
            if (report := reports.get(node.name)) is not None and report.port
        }

    # ----- changes -----

    def seen(self, event: m.SnapshotSeen) -> Wants:
        if self.are_on:
            self._before, self._seen = self._seen, CommonStep(event.attempt, event.step, event.at)
            self._note_going_back()
            self.work_out(event.attempt)
        yield from ()

    def _note_going_back(self) -> None:
        """While no ranks run, an older step is one that was brought."""
        before, seen = self._before, self._seen
        if before is None or seen is None or self._core.state not in ("RUNNING", "DIAGNOSING"):
            return
        if seen.attempt == before.attempt and seen.step < before.step:
            self._left, self._target = max(self._left, (before.attempt, before.step)), None

    def work_out(self, attempt: int) -> None:
        """What nodes have, or what their ranks wrote, has changed."""
        if not self.are_on:
            return
        seen = self._seen
        if seen is not None and seen.attempt == attempt and not self._is_left(attempt, seen.step):
            candidates = self.candidates()
            target = next_target(self._target, self._before, seen, candidates, self._core.now)
            self._aim(target if self._have_peers else None)
        target = self._target
        told = (target.attempt, target.from_step) if target is not None else None, self._kept(attempt)
        if told != self._told:
            self._told = told
            self._nodes.touch_all()

    def _aim(self, target: MirrorTarget | None) -> None:
        """Each step costs all nodes some reports: on many nodes, and in long runs, it is named less often."""
        held, now = self._target, self._core.now
        anew = target is not None and (held is None or target[:2] != held[:2])
        soon = held is not None and target is not None and held.attempt == target.attempt
        if anew and soon and now - self._named_at < self._pause_s():
            return
        if anew and self._first_named_at is None:
            self._first_named_at = now
        self._named_at = now if anew else self._named_at
        self._target = target

    def _pause_s(self) -> float:
        nodes = len(self._nodes)
        since = 0.0 if self._first_named_at is None else self._core.now - self._first_named_at
        return min(max(EVERY_S + NODE_S * nodes, since * CALM_SHARE), CALM_EVERY_S + CALM_NODE_S * nodes)

    def begin_life(self) -> None:
        self._before = self._seen = self._target = None
