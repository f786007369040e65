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
MAX_WORK: Final = 4_000_000
"""Members times steps, of all groups: 4,096 ranks need some 100,000. More is a lie, and is not followed to its end."""


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


def build(picture: Picture, *, fronts_only: bool = False) -> Waits:
    """The graph of all open calls, or of the oldest open call of each rank only.

    A rank may honestly have several calls open: some that it posted early (then any may be what it waits for), or all
    that its CPU is ahead of its GPU (then only the oldest).
    """
    waits = Waits(base=max(picture.world, default=0) + 1)
    fronts = {rank: at for rank, dump in picture.dumps.items() if (at := dump.front_at()) is not None}
    node, work = waits.base, 0
    for number, group in enumerate(picture.groups):
        work += len(group.members) * (1 + len({one.waits_at for one in group.calls.values()}))
        if work > MAX_WORK:
            picture.problems.append(
                "dumps tell of more groups and members than any job has: the rest was not looked at"
            )
            break
        counted = _counted(picture, number, group, fronts) if fronts_only else None
        node = _collectives(picture, group, waits, node, counted)
        if group.p2p:
            _point_to_point(picture, group, waits, counted)
    _queued(picture, waits, fronts)
    return waits


def _counted(picture: Picture, number: int, group: Joined, fronts: dict[int, int]) -> set[int]:
    """The ranks whose oldest open call is in this group."""
    return {rank for rank in {*group.calls, *group.p2p} if rank in fronts and picture.of[rank, fronts[rank]] == number}


def _collectives(picture: Picture, group: Joined, waits: Waits, node: int, counted: set[int] | None) -> int:
    at = {rank: step for rank, one in group.calls.items() if (step := one.waits_at) is not None}
    for step in sorted(set(at.values()))[:MAX_STEPS]:
        here = [Wait(rank, group, step, False, _since(group.calls[rank])) for rank, one in at.items() if one == step]
        here = [one for one in here if counted is None or one.rank in counted]
        for one in here:
            waits.waiting.setdefault(one.rank, one)
        if not here:
            continue
        wait = min(here, key=lambda one: one.since)
        for member in group.members:
            if picture.absent(member) or group.enqueued(member) < step or at.get(member, step) < step:
                waits.add(node, member)
                waits.blame(member, wait)
            elif at.get(member, step + 1) > step:
                for one in here:
                    waits.lagging[one.rank] += 1
        if node in waits.edges:
            for one in here:
                waits.add(one.rank, node)
            waits.stale += _stale(group, step, waits.edges[node])
            node += 1
    return node


def _since(channel: Channel) -> int:
    return channel.times[channel.pending or 0]


def _stale(group: Joined, step: int, behind: set[int]) -> int:
    """Members that completed what those behind have not even called, though it takes all of them."""
    done = sum(1 for one in group.calls.values() if one.seqs[-1] >= step and (one.waits_at or step + 1) > step)
    return done if any(member in group.calls for member in behind) else 0


def _point_to_point(picture: Picture, group: Joined, waits: Waits, counted: set[int] | None) -> None:
    open_calls = {rank: _open(picture, group, rank, one) for rank, one in group.p2p.items() if one.pending is not None}
    for rank, mine in open_calls.items():
        if counted is not None:  # of the oldest one only, and any call of the partner's may answer it
            mine = dict(list(mine.items())[:1]) if rank in counted else {}
            mine = {key: (1, seq) for key, (_, seq) in mine.items()}
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


def _queued(picture: Picture, waits: Waits, fronts: dict[int, int]) -> None:
    """Whose oldest open call all others have called, too: it waits for those that are still busy with an older one."""
    for rank, at in fronts.items():
        if rank in waits.edges:
            continue
        front, group = picture.dumps[rank].channels[at], picture.groups[picture.of[rank, at]]
        wait = Wait(rank, group, front.waits_at or 0, front.p2p, _since(front))
        for member in _partners(picture, group, rank, front):
            there = fronts.get(member)
            if there is None or (picture.of[member, there], *_front_key(picture, member, there, rank)) != (
                picture.of[rank, at],
                *_front_key(picture, rank, at, member),
            ):
                waits.add(rank, member)
                waits.blame(member, wait)


def _partners(picture: Picture, group: Joined, rank: int, front: Channel) -> list[int]:
    """Those that have called the same and not completed it."""
    if not front.p2p:
        return [member for member, one in group.calls.items() if one.waits_at == front.waits_at and member != rank]
    partner = _partner(picture, group, rank, front)
    return [] if partner is None or picture.absent(partner) else [partner]


def _front_key(picture: Picture, rank: int, at: int, other: int) -> tuple[bool, int]:
    """Equal for two ranks that are in the same call: its number, or that each is the other's partner."""
    channel = picture.dumps[rank].channels[at]
    if not channel.p2p:
        return False, channel.waits_at or 0
    return True, int(_partner(picture, picture.groups[picture.of[rank, at]], rank, channel) == other)


def _partner(picture: Picture, group: Joined, rank: int, channel: Channel) -> int | None:
    told = picture.dumps[rank].known.get(channel.calls[channel.pending or 0])
    partner = peer_of(told.op) if told else None
    return group.members[partner[1]] if partner and partner[1] < len(group.members) else None


def unstarted(picture: Picture, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `ranks` whose GPU has not begun what others have begun: the oldest open call of each is looked at."""
    begun: dict[tuple[int, int], dict[int, int]] = {}
    for rank in ranks:
        dump = picture.dumps[rank]
        at = dump.front_at()
        channel = dump.channels[at] if at is not None else None
        if at is not None and channel and channel.pending is not None and not channel.p2p:
            states = begun.setdefault((picture.of[rank, at], channel.seqs[channel.pending]), {})
            states[rank] = channel.states[channel.pending]
    return tuple(
        sorted(
            rank
            for states in begun.values()
            if STARTED in states.values()
            for rank, state in states.items()
            if state != STARTED
        )
    )


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
    for part in components(waits.edges):
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


def components(edges: dict[int, set[int]]) -> list[list[int]]:
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
