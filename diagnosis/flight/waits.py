"""Who waits for whom: a graph of ranks and of the calls they wait in, and where all its paths end.

A rank points at the calls that it waits in, a call at the members that have not come to it. What others wait for and
that itself waits for nothing (or only for what waits for it) is where a hang begins. `join` makes one `Picture` of the
dumps of many ranks: which group is which, who belongs to it, and how far everybody is. `find_ring` proves that ranks
wait for each other, and so will never go on; it is stricter: a rank counts only where its recorder
tells of exactly one open call, and groups whose members nobody tells do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from diagnosis.flight import dumps as flight_dumps
from diagnosis.flight.dumps import COMPLETED, NEVER, STARTED, Channel, ProcessGroup, RankDump, Status, merged, peer_of
from diagnosis.signals import RankFlight, rank_names

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
    _queued(picture, waits, node, fronts)
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
        wait, done = min(here, key=lambda one: one.since), 0
        for member in group.members:
            if picture.absent(member) or group.enqueued(member) < step or at.get(member, step) < step:
                waits.add(node, member)
                waits.blame(member, wait)
            else:
                done += at.get(member, step + 1) > step
        if done:
            waits.lagging.update({one.rank: done for one in here})
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
        which = known.get(channel.calls[at])
        partner = peer_of(which.op) if which and channel.states[at] != COMPLETED else None
        if partner and partner[1] < len(group.members):
            key = (partner[0], group.members[partner[1]])
            count, first = found.get(key, (0, channel.seqs[at]))
            found[key] = (count + 1, first)
    return found


def _queued(picture: Picture, waits: Waits, node: int, fronts: dict[int, int]) -> None:
    """Whose oldest open call all others have called, too: it waits for those that are still busy with an older one."""
    stands: dict[int, tuple[int, int]] = {}
    here: dict[tuple[int, int], list[Wait]] = {}
    for rank, at in fronts.items():
        front, number = picture.dumps[rank].channels[at], picture.of[rank, at]
        wait = Wait(rank, picture.groups[number], front.waits_at or 0, front.p2p, _since(front))
        if not front.p2p:
            stands[rank] = number, wait.seq
        if rank in waits.edges:
            continue
        if not front.p2p:
            here.setdefault((number, wait.seq), []).append(wait)
            continue
        partner = _partner(picture, wait.group, rank, front)
        if partner is not None and not picture.absent(partner) and not _meets(picture, fronts, partner, number, rank):
            waits.add(rank, partner)
            waits.blame(partner, wait)
    called: dict[tuple[int, int], list[int]] = {}
    for number in {number for number, _ in here}:
        for member, channel in picture.groups[number].calls.items():
            called.setdefault((number, channel.waits_at or 0), []).append(member)
    for (number, step), waiting in here.items():
        first = min(waiting, key=lambda one: one.since)
        for member in called.get((number, step), ()):
            if stands.get(member) != (number, step):
                waits.add(node, member)
                waits.blame(member, first)
        if node in waits.edges:
            for one in waiting:
                waits.add(one.rank, node)
            node += 1


def _meets(picture: Picture, fronts: dict[int, int], partner: int, number: int, rank: int) -> bool:
    """Whether the oldest open call of `partner` is the other end of that of `rank`."""
    at = fronts.get(partner)
    if at is None or picture.of[partner, at] != number:
        return False
    front = picture.dumps[partner].channels[at]
    return front.p2p and _partner(picture, picture.groups[number], partner, front) == rank


def _partner(picture: Picture, group: Joined, rank: int, channel: Channel) -> int | None:
    which = picture.dumps[rank].known.get(channel.calls[channel.pending or 0])
    partner = peer_of(which.op) if which else None
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


_DIGITS: Final = re.compile(r"\d+")
MAX_RANKS: Final = 65_536


@dataclass(slots=True)
class Joined:
    """One process group with what each member's dump says of it."""

    group: ProcessGroup
    members: tuple[int, ...]
    calls: dict[int, Channel] = field(default_factory=dict)
    """Rank -> its collectives in this group."""
    p2p: dict[int, Channel] = field(default_factory=dict)
    status: dict[int, Status] = field(default_factory=dict)
    """Of ranks that told how far they are, but have no call of this group in the ring."""
    kind: str = ""
    """Equal for groups that do the same for other ranks: all tensor-parallel ones, all data-parallel ones."""

    def __str__(self) -> str:
        """As people know it: `TP_1 (ranks 2, 3)`."""
        name = self.group.desc if self.group.desc not in ("", "undefined") else f"group {self.group.name}"
        if not self.members:
            return name
        listed = ", ".join(map(str, self.members[:8])) + (", ..." if len(self.members) > 8 else "")
        return f"{name} (rank{'s' if len(self.members) > 1 else ''} {listed})"

    def enqueued(self, rank: int) -> int:
        """The last collective that it is known to have called; -1: none in what its dump tells."""
        channel = self.calls.get(rank)
        return channel.enqueued if channel else self.status.get(rank, NEVER).enqueued


@dataclass(slots=True)
class Picture:
    dumps: dict[int, RankDump]
    groups: list[Joined]
    world: tuple[int, ...]
    """All ranks that any dump knows of."""
    of: dict[tuple[int, int], int]
    """(rank, its channel) -> number of the group."""
    problems: list[str]

    def absent(self, rank: int) -> bool:
        return rank not in self.dumps


def join(dumps: Iterable[RankDump]) -> Picture:
    """Puts them together. Of a rank that came twice the newest dump counts, of each backend."""
    problems: list[str] = []
    by_rank = _by_rank(dumps, problems)
    listed = {id(group.members): group.members for dump in by_rank.values() for group in dump.config}
    world = set(by_rank).union(*listed.values())
    everyone = tuple(sorted(world))[:MAX_RANKS]
    numbers: dict[ProcessGroup, int] = {}
    groups: list[Joined] = []
    of: dict[tuple[int, int], int] = {}
    same: dict[int, int] = {}
    for rank, dump in by_rank.items():
        for at, channel in enumerate(dump.channels):
            number = same.get(id(channel.group), -1)
            if number < 0:  # the hash of a large group takes long
                number = same[id(channel.group)] = _number_of(channel.group, numbers, groups, everyone)
            of[rank, at] = number
            known = groups[number].p2p if channel.p2p else groups[number].calls
            known.setdefault(rank, channel)
    _name_numbers(by_rank, numbers, groups)
    for joined in groups:
        if not joined.members:
            joined.members = tuple(sorted({*joined.calls, *joined.p2p}))
        step = joined.members[1] - joined.members[0] if len(joined.members) > 1 else 0
        joined.kind = f"{_DIGITS.sub('#', joined.group.desc)}/{len(joined.members)}/{step}"
    return Picture(dumps=by_rank, groups=groups, world=everyone, of=of, problems=problems)


def _number_of(
    group: ProcessGroup, numbers: dict[ProcessGroup, int], groups: list[Joined], everyone: tuple[int, ...]
) -> int:
    number = numbers.get(group)
    if number is None:
        number = numbers[group] = len(groups)
        is_world = group.desc == "default_pg" or (group.name == "0" and group.desc in ("", "undefined"))
        members = group.members or (everyone if is_world else ())
        groups.append(Joined(group=group, members=members))
    return number


def _by_rank(dumps: Iterable[RankDump], problems: list[str]) -> dict[int, RankDump]:
    found: dict[int, RankDump] = {}
    nameless: list[RankDump] = []
    for dump in dumps:
        if dump.rank is None:
            nameless.append(dump)
        elif dump.rank not in found:
            found[dump.rank] = dump
        elif not dump.backends & found[dump.rank].backends:
            found[dump.rank] = merged(found[dump.rank], dump)
        else:
            problems.append(f"rank {dump.rank} has several dumps: the newest is used")
            found[dump.rank] = max(found[dump.rank], dump, key=lambda one: (one.newest, len(one.order)))
    for dump in nameless:
        shared = [set(group.members) for group in dump.config if group.members]
        only = set.intersection(*shared) - found.keys() if shared else set()
        if len(only) == 1:
            found[only.pop()] = dump
        else:
            problems.append("a dump does not tell of which rank it is")
    problems[:] = list(dict.fromkeys(problems))
    return dict(sorted(found.items()))


def _name_numbers(dumps: dict[int, RankDump], numbers: dict[ProcessGroup, int], groups: list[Joined]) -> None:
    """Statuses that only have a rank's own number of a group: other ranks tell what that number stands for.

    All ranks make their groups in one order, so the number of the tensor-parallel group is the same everywhere.
    """
    meant: dict[int, set[str]] = {}
    for dump in dumps.values():
        for channel in dump.channels:
            meant.setdefault(channel.pg_id, set()).add(_DIGITS.sub("#", channel.group.desc))
    for rank, dump in dumps.items():
        for pg_id, status in dump.unnamed.items():
            descs = meant.get(pg_id, set())
            fits = [group for group in dump.config if {_DIGITS.sub("#", group.desc)} == descs and group in numbers]
            if len(fits) == 1 and rank not in groups[numbers[fits[0]]].calls:
                groups[numbers[fits[0]]].status[rank] = status


class WaitRing(NamedTuple):
    ranks: tuple[int, ...]
    """They wait for each other, in a ring or in several."""
    odd: tuple[int, ...]
    """Those that most others wait for; nobody where it is one against one."""
    why: str


class _OpenCall(NamedTuple):
    group: Joined
    seq: int
    here: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that have not come."""


def find_ring(
    flights: Iterable[RankFlight], standing: Collection[int], unrecorded: Collection[int] = ()
) -> WaitRing | None:
    """`standing`: ranks that stand in a collective and do nothing else. `unrecorded`: those of them that stand in a
    send or receive, which gloo does not record: for whom they wait is not known.
    """
    picture = join(flight_dumps.from_rank_flights(flights))
    stands = {rank for rank in standing if rank in picture.dumps}
    calls = _calls(picture, stands)
    edges: dict[int, set[int]] = {}
    for call in calls:
        for rank in call.here:
            edges[rank] = {one for one in call.missing if one in stands}
    _add_unrecorded(picture, edges, [rank for rank in unrecorded if rank in stands], set(standing))
    ring = {rank for part in components(edges) if len(part) > 1 for rank in part}
    if not ring:
        return None
    involved = [call for call in calls if ring & set(call.here)]
    first = min(involved, key=lambda call: len(call.missing))
    fewest = [call for call in involved if len(call.missing) == len(first.missing)]
    odd = first.missing if len(fewest) == 1 and len(first.missing) < len(first.here) else ()
    calls_text = "; ".join(f"{rank_names(one.here)} in collective {one.seq} of {one.group}" for one in involved[:3])
    more = f"; and {len(involved) - 3} others" if len(involved) > 3 else ""
    who = rank_names(ring)
    why = f"{who} wait for each other in different collectives: {calls_text}{more}"
    alone = ring - {rank for call in calls for rank in call.here}
    return WaitRing(tuple(sorted(ring)), odd, why + (f"; {rank_names(alone)} in a send or receive" if alone else ""))


def _calls(picture: Picture, stands: set[int]) -> list[_OpenCall]:
    """The calls that standing ranks stand in, and who has not come to them."""
    here: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(stands):
        at = _only_open(picture.dumps[rank])
        if at is not None:
            here.setdefault((picture.of[rank, at[0]], at[1]), []).append(rank)
    calls = []
    for (number, seq), ranks in here.items():
        group = picture.groups[number]
        missing = tuple(one for one in group.members if not picture.absent(one) and group.enqueued(one) < seq)
        calls.append(_OpenCall(group, seq, tuple(ranks), missing))
    return calls


def _only_open(dump: RankDump) -> tuple[int, int] | None:
    """Channel and number of the one call that is not completed; None for none, for several, and for sends."""
    found = [
        (number, seq)
        for number, channel in enumerate(dump.channels)
        for seq, state in zip(channel.seqs, channel.states, strict=True)
        if state != COMPLETED
    ]
    if len(found) != 1 or dump.channels[found[0][0]].p2p:
        return None
    return found[0]


def _add_unrecorded(picture: Picture, edges: dict[int, set[int]], ranks: list[int], everyone: set[int]) -> None:
    """It waits for some other rank: where all others wait for it, for one that waits for it."""
    if len(ranks) != 1 or ranks[0] in edges or any(_opens(picture.dumps[ranks[0]])):
        return
    reached, todo = {ranks[0]}, [ranks[0]]
    while todo:
        target = todo.pop()
        for source, targets in edges.items():
            if target in targets and source not in reached:
                reached.add(source)
                todo.append(source)
    if len(everyone) > 1 and reached == everyone:
        edges[ranks[0]] = everyone - {ranks[0]}


def _opens(dump: RankDump) -> Iterable[bool]:
    return (state != COMPLETED for channel in dump.channels for state in channel.states)
