"""Who waits for whom: a graph of ranks and of the calls they wait in, and where all its paths end.

A rank points at the calls that it waits in, a call at the members that have not come to it. What others wait for and
that itself waits for nothing (or only for what waits for it) is where a hang begins.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diagnosis.flight.calls import peer_of
from diagnosis.flight.dumps import COMPLETED, STARTED, Channel
from diagnosis.flight.picture import Joined, Picture

MAX_STEPS: Final = 64
"""Different collectives of one group that ranks wait in."""
MAX_P2P: Final = 64


class Wait(NamedTuple):
    """A rank waits in a call that others have not come to."""

    rank: int
    group: Joined
    seq: int
    p2p: bool
    since: int = 0
    """Unix nanoseconds when it called; 0: not told."""


@dataclass(slots=True)
class Waits:
    """The graph. Nodes below `base` are ranks, the others are calls."""

    base: int
    edges: dict[int, set[int]] = field(default_factory=dict)
    why: dict[int, list[Wait]] = field(default_factory=dict)
    """Rank that is waited for -> who waits for it, one of each call."""
    waiting: dict[int, Wait] = field(default_factory=dict)
    """Rank -> what it waits in."""
    only_p2p: set[int] = field(default_factory=set)
    """Ranks that are only waited for to send or to receive."""
    lagging: Counter[int] = field(default_factory=Counter)
    """Rank -> how many of its peers completed what it has called and does not complete."""
    stale: int = 0
    """Pairs of ranks where one completed what the other has not called: their dumps are not of one moment."""

    def add(self, source: int, target: int) -> None:
        self.edges.setdefault(source, set()).add(target)

    def blame(self, target: int, wait: Wait) -> None:
        if not wait.p2p:
            self.only_p2p.discard(target)
        elif target not in self.why:
            self.only_p2p.add(target)
        if len(self.why.setdefault(target, [])) < MAX_P2P:
            self.why[target].append(wait)


def build(picture: Picture) -> Waits:
    waits = Waits(base=max(picture.world, default=0) + 1)
    node = waits.base
    for group in picture.groups:
        node = _collectives(picture, group, waits, node)
        if group.p2p:
            _point_to_point(picture, group, waits)
    _queued(picture, waits)
    return waits


def _collectives(picture: Picture, group: Joined, waits: Waits, node: int) -> int:
    at = {rank: step for rank, one in group.calls.items() if (step := one.waits_at) is not None}
    for step in sorted(set(at.values()))[:MAX_STEPS]:
        here = [Wait(rank, group, step, False, _since(group.calls[rank])) for rank, one in at.items() if one == step]
        waiters = [one.rank for one in here]
        for one in here:
            waits.waiting.setdefault(one.rank, one)
        wait = min(here, key=lambda one: one.since)
        for member in group.members:
            if picture.absent(member) or group.enqueued(member) < step or at.get(member, step) < step:
                waits.add(node, member)
                waits.blame(member, wait)
            elif at.get(member, step + 1) > step and group.calls.get(member) is not None:
                for rank in waiters:
                    waits.lagging[rank] += 1
        if node in waits.edges:
            for rank in waiters:
                waits.add(rank, node)
            waits.stale += _stale(group, step, waits.edges[node])
            node += 1
    return node


def _since(channel: Channel) -> int:
    return channel.times[channel.pending or 0]


def _stale(group: Joined, step: int, behind: set[int]) -> int:
    """Members that completed what those behind have not even called, though it takes all of them."""
    done = sum(1 for one in group.calls.values() if one.seqs[-1] >= step and (one.waits_at or step + 1) > step)
    return done if any(member in group.calls for member in behind) else 0


def _point_to_point(picture: Picture, group: Joined, waits: Waits) -> None:
    open_calls = {rank: _open(picture, group, rank, one) for rank, one in group.p2p.items() if one.pending is not None}
    for rank, mine in open_calls.items():
        for (sends, peer), (count, seq) in mine.items():
            wait = Wait(rank, group, seq, True, _since(group.p2p[rank]))
            waits.waiting.setdefault(rank, wait)
            theirs = open_calls.get(peer, {}).get((not sends, rank), (0, 0))[0]
            if theirs < count:
                waits.add(rank, peer)
                waits.blame(peer, wait)


def _open(picture: Picture, group: Joined, rank: int, channel: Channel) -> dict[tuple[bool, int], tuple[int, int]]:
    """(sends, partner) -> how many such calls are not completed, and the number of the first."""
    found: dict[tuple[bool, int], tuple[int, int]] = {}
    known = picture.dumps[rank].known
    begin = channel.pending or 0
    for at in range(begin, min(len(channel.seqs), begin + MAX_P2P)):
        told = known.get(channel.calls[at])
        partner = peer_of(told.op) if told and channel.states[at] != COMPLETED else None
        if partner and partner[1] < len(group.members):
            key = (partner[0], group.members[partner[1]])
            count, first = found.get(key, (0, channel.seqs[at]))
            found[key] = (count + 1, first)
    return found


def _queued(picture: Picture, waits: Waits) -> None:
    """Whose oldest open call all members have called: it waits for those that are still busy with an older one."""
    fronts = {rank: dump.front() for rank, dump in picture.dumps.items()}
    numbers = {
        id(channel): group for group in picture.groups for channel in (*group.calls.values(), *group.p2p.values())
    }
    for rank, front in fronts.items():
        if front is None or rank in waits.edges or front.p2p:
            continue
        group = numbers[id(front)]
        for member, channel in group.calls.items():
            if channel.waits_at == front.waits_at and fronts[member] is not channel:
                waits.add(rank, member)
                waits.blame(member, Wait(rank, group, front.waits_at or 0, False, _since(front)))


def unstarted(waits: Waits, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `ranks` whose GPU has not begun what others in the same call have."""
    begun: dict[tuple[int, int], set[int]] = {}
    for rank in ranks:
        wait = waits.waiting.get(rank)
        channel = wait.group.calls.get(rank) if wait else None
        if wait and channel and channel.pending is not None:
            begun.setdefault((id(wait.group), wait.seq), set()).add(rank)
    late: list[int] = []
    for members in begun.values():
        states = {rank: _state_there(waits, rank) for rank in members}
        if STARTED in states.values():
            late += [rank for rank, state in states.items() if state != STARTED]
    return tuple(sorted(late))


def _state_there(waits: Waits, rank: int) -> int:
    wait = waits.waiting[rank]
    channel = wait.group.calls[rank]
    return channel.states[channel.pending or 0]


class Sink(NamedTuple):
    """Ranks that others wait for and that wait for nobody but each other."""

    ranks: tuple[int, ...]
    waited_by: int
    """How many ranks wait for them, over any number of others."""


def sinks(waits: Waits) -> list[Sink]:
    """Where the paths end, most waited for first."""
    found = []
    backwards: dict[int, list[int]] = {}
    for source, targets in waits.edges.items():
        for target in targets:
            backwards.setdefault(target, []).append(source)
    for part in _components(waits.edges):
        members = set(part)
        ranks = tuple(sorted(node for node in part if node < waits.base))
        if ranks and all(waits.edges.get(node, set()) <= members for node in part):
            reached = _reached(backwards, members)
            found.append(Sink(ranks, sum(1 for node in reached - members if node < waits.base)))
    return sorted(found, key=lambda one: (-one.waited_by - len(one.ranks) * (len(one.ranks) > 1), one.ranks))


def _reached(backwards: dict[int, list[int]], start: set[int]) -> set[int]:
    seen, todo = set(start), list(start)
    while todo:
        for source in backwards.get(todo.pop(), ()):
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return seen


def _components(edges: dict[int, set[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan), without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in list(edges):
        if root in index:
            continue
        work = [(root, iter(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(edges.get(target, ()))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    found.append(_popped(stack, on_stack, node))
    return found


def _popped(stack: list[int], on_stack: set[int], node: int) -> list[int]:
    part = []
    while True:
        top = stack.pop()
        on_stack.discard(top)
        part.append(top)
        if top == node:
            return part
