"""The nodes of a job, the cordons in force, and which nodes make the next attempt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from recovery.cordon import Cordon, Cordons
from recovery.fewer_processes import BadGpu, NodeGpus, bad_gpu
from recovery.swaps import SwapSignal
from supervisor.job.core import Core
from supervisor.messages import EvidenceRequest, NodeJoined


@dataclasses.dataclass
class Node:
    """One registered node. Mutable; `Nodes` owns it."""

    name: str
    host: str
    address: str
    index: int | None
    """Preferred position among the nodes."""
    spare: bool
    joined: int
    """Position in the order of registration."""
    present: bool = True
    """False: lost."""
    why: str = ""
    """Why it was lost."""
    front_ended: bool = False
    """Its agent said that `unbroken run` was killed: the node itself is there, and as good as before."""
    quiet_since: float | None = None
    """It has missed heartbeats since then; None: it has missed none."""
    done: bool = False
    """It knows the outcome and has ended everything."""
    request: EvidenceRequest | None = None
    wake: tuple[int, ...] = ()
    """Ranks to be continued with SIGCONT."""
    wake_number: int = 0
    ask: SwapSignal = ""
    """The signal with which its ranks are asked for a checkpoint."""
    ask_number: int = 0
    evidence_seen: int = -1
    findings_seen: int = 0
    scheduler_name: str = ""
    """What the scheduler calls it."""
    domain: str = ""
    """Its switch or rack; empty: not known."""
    can_test: bool = True
    """Its agent makes active tests."""
    gpus: NodeGpus = dataclasses.field(default_factory=NodeGpus)
    """Those of its processes, where it may be started without one."""
    whole: bool = False
    """It did not do without one: while it is cordoned it is not used at all."""


class Nodes:
    """All nodes that ever registered, in order of registration."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._nodes: dict[str, Node] = {}
        self._unfinished: set[str] = set()
        """Nodes that are present and not done."""
        self._ordinary: set[str] = set()
        """Nodes that are no spares."""
        self.cordons = Cordons()
        self._revision = 0
        """Grows with each change of which nodes there are, and which may be used."""
        self._chosen: tuple[object, tuple[str, ...]] = (None, ())
        """What the newest choice was made from, and the choice: it is asked for again at every event."""
        self._kept: frozenset[str] = frozenset()
        """Those of the newest choice that keep their places, heard lately or not."""
        self.last_choice: frozenset[str] = frozenset()
        """Nodes that are used where there are no others: on probation, or with a bad score (`ClusterLedger`)."""
        self._unwell: set[str] = set()
        """Idle nodes whose hardware is proven bad, until they come back, or an operator vouches for them."""
        self._doubted: frozenset[str] = frozenset()
        self.request_number = 0
        """Of the newest evidence request."""
        self._left_stopped: tuple[int, tuple[int, ...]] = (0, ())
        """An attempt, and its stopped ranks that were not to be continued."""
        self._continued = 0
        """The attempt whose stopped ranks were continued with SIGCONT, until progress resumes."""
        self.save_awaited = False
        """A planned swap waits for the next checkpoint."""
        self.touched: set[str] = set()
        """Nodes whose assignment is to be worked out again."""
        self.touched_all = False
        self.touched_members = False
        """Members were exchanged, and nothing else has changed for any node."""

    # ----- queries -----

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def ordinary(self) -> int:
        """How many are no spares."""
        return len(self._ordinary)

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def is_present(self, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and node.present

    def named(self, name: str) -> str:
        """The node of this name, or the only one of this host or address; else the name as it is."""
        if name in self._nodes:
            return name
        found = [node.name for node in self._nodes.values() if name in (node.host, node.address)]
        return found[0] if len(found) == 1 else name

    def usable(self) -> list[Node]:
        """The nodes that may take part in the next attempt, in order of registration."""
        cordoned = self.cordoned()
        return [node for node in self if node.present and not node.done and node.name not in cordoned]

    @property
    def all_done(self) -> bool:
        """Every node that is not lost has ended everything."""
        return not self._unfinished

    def cordoned(self) -> set[str]:
        return {cordon.node for cordon in self.cordons.all(self._core.now)}

    def bad_gpu(self, name: str, *more: Cordon) -> BadGpu | None:
        """The only reason why the node is cordoned, where it may go on without that GPU. `more`: would come."""
        node = self._nodes.get(name)
        if not self._core.spec.fewer_processes or node is None or not node.present or node.done or node.whole:
            return None
        held = [one for one in self.cordons.all(self._core.now) if one.node == name]
        return bad_gpu([*held, *more], node.gpus)

    def with_bad_gpu(self) -> tuple[str, ...]:
        """Nodes that can go on without a GPU, in order of registration."""
        if not self._core.spec.fewer_processes:
            return ()
        cordoned = self.cordoned()
        return tuple(node.name for node in self if node.name in cordoned and self.bad_gpu(node.name) is not None)

    def is_unwell(self, name: str) -> bool:
        return name in self._unwell or name in self._doubted

    def left_stopped(self, attempt: int) -> tuple[int, ...]:
        """Stopped ranks of this attempt that were not to be continued."""
        number, ranks = self._left_stopped
        return ranks if number == attempt else ()

    def choose(self, previous: tuple[str, ...], size: int, fewer: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The members of the next attempt, at most `size`, in the order of their ranks.

        Members of the previous attempt keep their places; a node that replaces a lost one takes its place, so that
        ranks move as little as possible. Ordinary nodes come before spares, and both before those on probation or with
        a bad score, or a bad device. Those that are silent just now come last, and of them first the one that was heard
        last. Nodes of `fewer` run fewer processes: they fill up what the others leave.
        """
        made_from = (self._revision, previous, size, self.cordoned(), self.last_choice, fewer)
        if self._chosen[0] != made_from:
            self._chosen = (made_from, self._choose(previous, size, fewer))
        return self._chosen[1]

    def _choose(self, previous: tuple[str, ...], size: int, fewer: tuple[str, ...]) -> tuple[str, ...]:
        usable = {node.name: node for node in self.usable()}
        ones = sorted(fewer, key=lambda name: name not in previous)
        usable |= {name: self._nodes[name] for name in ones[: max(0, size - len(usable))]}
        self._kept = known = frozenset(previous)
        free = [node for node in usable.values() if node.name not in known]
        last = self.last_choice
        free.sort(
            key=lambda node: (
                -math.inf if node.quiet_since is None else -node.quiet_since,
                self.is_unwell(node.name),
                node.name in last,
                *_place(node),
            )
        )
        if not previous:
            return tuple(node.name for node in sorted(free[:size], key=_place))
        replacements = iter([node.name for node in free])
        members: list[str] = []
        for name in previous:
            if name in usable:
                members.append(name)
            elif (other := next(replacements, None)) is not None:
                members.append(other)
        members += list(replacements)[: max(0, size - len(members))]
        return tuple(members[:size])

    # ----- changes -----

    def touch(self, *names: str) -> None:
        """Their assignments may have changed (`Assignments.settle` works them out)."""
        self.touched.update(names)

    def touch_all(self) -> None:
        self.touched_all = True

    def touch_members(self, names: Iterable[str]) -> None:
        """As `touch_all`, where these members were exchanged and nothing else has changed."""
        self.touched.update(names)
        self.touched_members = True

    def join(self, event: NodeJoined) -> Node:
        """Register a node, or record that it is back. It keeps its place; without a host nothing else is known."""
        node = self._nodes.get(event.node)
        before = None if node is None else self._place_in_choice(node)
        if node is None:
            node = Node(event.node, event.host, event.address, event.index, event.spare, joined=len(self._nodes))
            self._nodes[event.node] = node
        elif not node.present:
            node.findings_seen = 0
            self.well_again(node.name)
        if event.host:
            node.host, node.address = event.host, event.address
            node.index, node.spare = event.index, event.spare
            node.scheduler_name, node.domain = event.scheduler_node or node.name, event.domain
            node.can_test = event.can_test
        node.present, node.why, node.front_ended, node.quiet_since = True, "", False, None
        if not node.done:
            self._unfinished.add(node.name)
        (self._ordinary.discard if node.spare else self._ordinary.add)(node.name)
        self._revision += before != self._place_in_choice(node)
        return node

    def _place_in_choice(self, node: Node) -> tuple[object, ...]:
        """All of it that the next choice depends on."""
        quiet_since = None if node.name in self._kept else node.quiet_since
        return node.present, quiet_since, node.index, node.spare

    def set_unwell(self, name: str) -> bool:
        """False: that was known, or nobody knows the node."""
        if name not in self._nodes or name in self._unwell:
            return False
        self._unwell.add(name)
        self._revision += 1
        return True

    def set_doubted(self, names: frozenset[str]) -> None:
        """Alerts want these out: one of them is taken last."""
        self._revision += names != self._doubted
        self._doubted = names

    def well_again(self, name: str) -> None:
        if name in self._unwell:
            self._unwell.discard(name)
            self._revision += 1

    def set_gpus(self, name: str, gpus: NodeGpus) -> None:
        """An agent that was started again does not see a GPU that has gone, and then counts the others anew: what was
        known before still holds.
        """
        node = self._nodes.get(name)
        if node is not None and set(node.gpus.gpus) <= set(gpus.gpus):
            node.gpus = gpus

    def use_whole(self, name: str, whole: bool = True) -> None:
        """`whole`: it is not started without a GPU any more."""
        node = self._nodes.get(name)
        if node is not None:
            node.whole = whole

    def lose(self, node: Node, why: str, *, front_ended: bool = False) -> None:
        node.present, node.why, node.gpus = False, why, NodeGpus()
        self._revision += 1
        self._unfinished.discard(node.name)
        node.front_ended |= front_ended

    def set_quiet(self, name: str, since: float | None) -> None:
        node = self._nodes.get(name)
        if node is not None and node.quiet_since != since:
            node.quiet_since = since
            self._revision += name not in self._kept

    def set_done(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            return
        node.done = self._core.is_over
        self._revision += 1
        if node.done:
            self._unfinished.discard(name)
        elif node.present:
            self._unfinished.add(name)

    def expect_all(self) -> None:
        """A new controller has not been told anything yet: no node is a first choice until it comes."""
        for node in self:
            node.quiet_since = self._core.now if node.quiet_since is None else node.quiet_since
        self._revision += 1

    def acknowledge_evidence(self, name: str, request: int) -> None:
        """The node's assignment says that its evidence of this request has arrived."""
        node = self._nodes[name]
        if request > node.evidence_seen:
            node.evidence_seen = request
            self.touch(name)

    def acknowledge_findings(self, name: str, end: int) -> bool:
        """The node's findings before number `end` have arrived. False: they did before, or nobody knows the node."""
        node = self._nodes.get(name)
        if node is None or end <= node.findings_seen:
            return False
        node.findings_seen = end
        self.touch(name)
        return True

    def ask_for_evidence(self, names: Iterable[str], budget_s: float, flight: bool) -> int:
        """The number of the request."""
        self.request_number += 1
        request = EvidenceRequest(number=self.request_number, budget_s=budget_s, flight=flight)
        for name in names:
            if (node := self._nodes.get(name)) is not None:
                node.request = request
                self.touch(name)
        return self.request_number

    def wake(self, ranks: tuple[int, ...], attempt: int, ranks_of: dict[str, tuple[int, ...]]) -> None:
        """Have stopped ranks continued with SIGCONT. Progress that resumes then does not prove that it was no hang."""
        self._left_stopped, self._continued = (0, ()), attempt
        for name, its_ranks in ranks_of.items():
            node = self._nodes.get(name)
            wake = tuple(rank for rank in ranks if rank in its_ranks)
            if node is not None and wake:
                node.wake, node.wake_number = wake, node.wake_number + 1
                self.touch(name)

    def await_save(self, awaited: bool) -> None:
        """Have all nodes look for checkpoints more often, or as usual again."""
        if awaited != self.save_awaited:
            self.save_awaited = awaited
            self.touch_all()

    def ask_to_save(self, signal: SwapSignal, names: Iterable[str]) -> None:
        """Have the ranks of these nodes asked for a checkpoint, once."""
        for name in names:
            node = self._nodes.get(name)
            if node is not None:
                node.ask, node.ask_number = signal, node.ask_number + 1
                self.touch(name)

    def leave_stopped(self, attempt: int, ranks: tuple[int, ...]) -> None:
        self._left_stopped = (attempt, ranks)

    def progress_resumed(self, attempt: int) -> bool:
        """No rank is left stopped. True: ranks of this attempt were continued by us."""
        by_us = self._continued == attempt
        self._left_stopped, self._continued = (0, ()), 0
        return by_us

    def forget_wakes(self) -> None:
        """Nobody is to be continued any more."""
        for node in self:
            node.wake = ()

    def begin_attempt(self) -> None:
        """What was asked of the nodes was about the attempt before."""
        for node in self:
            node.request, node.wake, node.ask, node.evidence_seen = None, (), "", -1

    def begin_life(self) -> None:
        """The scheduler has started the job again on other nodes. Cordons stay."""
        self._nodes = {}
        self._unfinished.clear()
        self._ordinary.clear()
        self._unwell.clear()
        self._revision += 1


def _place(node: Node) -> tuple[bool, int, int]:
    return (node.spare, node.index if node.index is not None else 1 << 30, node.joined)
