"""What the flight recorders of several ranks say together: who holds the others up, and in which collective.

`find_mismatch` compares the calls of one group: the majority is right, else what sibling groups do, else habit.
`judge_order` compares the whole sequence of a rank with those of ranks that run the same program: order bugs, calls
skipped or made twice. A rank that is only behind has made the same calls, and fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from msgspec import structs

from diagnosis import stacks as stack_reading
from diagnosis.flight import waits
from diagnosis.flight.dumps import COMPLETED, Call, Channel, RankDump, peer_of
from diagnosis.flight.waits import Joined, Picture, Wait, Waits, join
from diagnosis.incident import FlightKind, FlightReport, Slowdown
from diagnosis.signals import Evidence, Frame, RankStack, rank_names

MismatchKind = Literal["collective_type_mismatch", "size_mismatch", "dtype_mismatch", "order_inversion"]
LOOKED_AT: Final = 64
HABITUAL: Final = 2
CONTEXT: Final = 3


class Mismatch(NamedTuple):
    """At this collective of this group the ranks `odd` called something else than the others."""

    kind: MismatchKind
    group: Joined
    seq: int
    odd: tuple[int, ...]
    """Empty: nobody can say who is right."""
    usual: Call | None
    other: Call | None
    usual_rank: int
    other_rank: int
    by: Literal["majority", "siblings", "habit", "nobody"]
    hot: bool
    """It did not complete: what hangs hangs here."""
    p2p: bool = False


def find_mismatch(picture: Picture) -> Mismatch | None:
    """The first one that matters; None where all ranks agree."""
    found = [one for group in picture.groups for one in (*_of_group(picture, group), *_of_pairs(picture, group))]
    found.sort(key=lambda one: (not one.hot, _began(one)))
    return found[0] if found else None


def _began(one: Mismatch) -> int:
    channel = (one.group.p2p if one.p2p else one.group.calls)[one.other_rank]
    return channel.times[_index(channel, one.seq) or 0]


def _of_group(picture: Picture, group: Joined) -> Iterator[Mismatch]:
    seqs = _differing(list(group.calls.values()))
    if not seqs:
        return
    votes = {seq: verdict for seq in seqs[:LOOKED_AT] if len(set((verdict := _votes(group, seq)).values())) > 1}
    hot = [seq for seq in votes if any(_unfinished(group.calls[rank], seq) for rank in votes[seq])]
    cold = [seq for seq in votes if seq not in hot]
    for seq in hot:
        # Where they differed in sizes before, and it worked, they may.
        if len(cold) < HABITUAL or len(set(_votes(group, seq, bare=True).values())) > 1:
            yield _judge(picture, group, seq, votes[seq], hot=True)
            return
    if len(cold) < HABITUAL and cold:
        yield _judge(picture, group, cold[0], votes[cold[0]], hot=False)


def _of_pairs(picture: Picture, group: Joined) -> Iterator[Mismatch]:
    """One sends what the other does not expect: both wait for each other, with tensors of other sizes or types."""
    for rank, channel in group.p2p.items():
        mine = _front(picture, rank, channel)
        partner = peer_of(mine.op) if mine else None
        if not mine or not partner or not partner[0] or partner[1] >= len(group.members):
            continue
        other = group.members[partner[1]]
        its = group.p2p.get(other)
        answer = _front(picture, other, its) if its else None
        back = peer_of(answer.op) if answer else None
        if not its or not answer or not back or back[0] or group.members[min(back[1], len(group.members) - 1)] != rank:
            continue
        if (mine.sizes, mine.dtypes) == (answer.sizes, answer.dtypes):
            continue
        odd = tuple(one for one, its_calls in ((rank, channel), (other, its)) if _unusual(its_calls))
        odd = odd if len(odd) == 1 else ()
        if not odd and _done_before(picture, rank, channel) != _done_before(picture, other, its):
            continue  # not the same message: one is seen to be complete sooner than the other
        first, second = ((rank, mine), (other, answer)) if odd == (other,) else ((other, answer), (rank, mine))
        seq = (channel if second[0] == rank else its).waits_at or 0
        by: Literal["habit", "nobody"] = "habit" if odd else "nobody"
        kind = _kind(Call("", first[1].sizes, "", first[1].dtypes), Call("", second[1].sizes, "", second[1].dtypes))
        yield Mismatch(kind, group, seq, odd, first[1], second[1], first[0], second[0], by, hot=True, p2p=True)


def _front(picture: Picture, rank: int, channel: Channel) -> Call | None:
    return None if channel.pending is None else picture.dumps[rank].known.get(channel.calls[channel.pending])


def _done_before(picture: Picture, rank: int, channel: Channel) -> int:
    """How often it has completed what it waits in; less than 0, and never equal, where that cannot be told."""
    at = channel.pending or 0
    wrapped = picture.dumps[rank].first_record > 0
    return -1 - rank if wrapped else channel.ops[:at].count(channel.ops[at])


def _unusual(channel: Channel) -> bool:
    at = channel.pending or 0
    usual = habit(channel.calls, at, least=2)
    return usual is not None and usual != channel.calls[at]


def _differing(channels: Sequence[Channel]) -> list[int]:
    """The sequence numbers at which not all that have one have the same, sorted."""
    if len(channels) < 2:
        return []
    longest = max(channels, key=lambda one: len(one.seqs))
    found: set[int] = set()
    for one in channels:
        first, last = max(one.seqs[0], longest.seqs[0]), min(one.seqs[-1], longest.seqs[-1])
        if one is longest or first > last:
            continue
        if not _same(one, longest, first, last):
            there = dict(zip(longest.seqs, longest.calls, strict=True))
            found.update(seq for seq, call in zip(one.seqs, one.calls, strict=True) if there.get(seq, call) != call)
    return sorted(found)


def _same(one: Channel, other: Channel, first: int, last: int) -> bool:
    """Both have the same calls from `first` to `last`; quick where nothing is left out between."""
    begin, end = _index(one, first), _index(one, last)
    there, until = _index(other, first), _index(other, last)
    if begin is None or end is None or there is None or until is None:
        return False
    same_numbers = one.seqs[begin : end + 1] == other.seqs[there : until + 1]
    return same_numbers and one.calls[begin : end + 1] == other.calls[there : until + 1]


def _index(channel: Channel, seq: int) -> int | None:
    """Where the call with this number is; numbers grow by one as a rule."""
    guess = seq - channel.seqs[0]
    if 0 <= guess < len(channel.seqs) and channel.seqs[guess] == seq:
        return guess
    try:
        return channel.seqs.index(seq)
    except ValueError:
        return None


def _votes(group: Joined, seq: int, *, bare: bool = False) -> dict[int, int]:
    """Rank -> digest of what it called, `bare`: without the sizes."""
    found = {}
    for rank, channel in group.calls.items():
        at = _index(channel, seq)
        if at is not None:
            found[rank] = (channel.ops if bare else channel.calls)[at]
    return found


def _unfinished(channel: Channel, seq: int) -> bool:
    at = _index(channel, seq)
    return at is not None and channel.states[at] != COMPLETED


def _judge(picture: Picture, group: Joined, seq: int, votes: dict[int, int], *, hot: bool) -> Mismatch:
    ranked = Counter(votes.values()).most_common()
    by: Literal["majority", "siblings", "habit", "nobody"] = "majority"
    usual: int | None = ranked[0][0]
    if ranked[0][1] == ranked[1][1]:
        leading = {call for call, count in ranked if count == ranked[0][1]}
        usual, by = _by_siblings(picture, group, seq, leading), "siblings"
        if usual is None:
            usual, by = _by_habit(group, seq, votes), "habit"
    odd = () if usual is None else tuple(sorted(rank for rank, call in votes.items() if call != usual))
    if usual is None:
        by, usual = "nobody", ranked[0][0]
    usual_rank = next(rank for rank, call in votes.items() if call == usual)
    other_rank = next(rank for rank, call in votes.items() if call != usual)
    called = picture.dumps[usual_rank].known.get(usual), picture.dumps[other_rank].known.get(votes[other_rank])
    kind = _kind(*called)
    if _swapped(group.calls[usual_rank], group.calls[other_rank], seq):
        kind = "order_inversion"
    return Mismatch(kind, group, seq, odd, *called, usual_rank, other_rank, by, hot)


def _by_siblings(picture: Picture, group: Joined, seq: int, leading: set[int]) -> int | None:
    """What the groups that do the same for other ranks called there; sizes count where they have the same ones."""
    siblings = [other for other in picture.groups if other is not group and other.kind == group.kind]
    exact = Counter(call for other in siblings for call in _votes(other, seq).values() if call in leading)
    ops = {call: _op_of(group, seq, call) for call in leading}
    bare = Counter(op for other in siblings for op in _votes(other, seq, bare=True).values())
    for votes, of in ((exact, {call: call for call in leading}), (bare, ops)):
        ranked = sorted(((votes[of[call]], call) for call in leading), reverse=True)
        if len({of[call] for call in leading}) == len(leading) and ranked[0][0] > ranked[1][0]:
            return ranked[0][1]
    return None


def _op_of(group: Joined, seq: int, call: int) -> int:
    """The bare operation of a call that some rank made there."""
    places = ((channel, _index(channel, seq)) for channel in group.calls.values())
    return next((channel.ops[at] for channel, at in places if at is not None and channel.calls[at] == call), 0)


def _by_habit(group: Joined, seq: int, votes: dict[int, int]) -> int | None:
    """What came next whenever the same calls came before: the call of whoever keeps to it."""
    keeping = set()
    for rank, call in votes.items():
        channel = group.calls[rank]
        at = _index(channel, seq)
        if at is not None and habit(channel.calls, at) == call:
            keeping.add(call)
    return keeping.pop() if len(keeping) == 1 else None


def habit(calls: Sequence[int], at: int, least: int = 1) -> int | None:
    """What always followed the calls just before index `at`, when they came before; None: not always the same.

    Where nothing like it came before: what was called all the time, if that was one thing.

    `least`: so often they must have come before.
    """
    for context in range(CONTEXT, -1, -1):
        if at < context:
            continue
        before = calls[at - context : at]
        next_ones = [calls[end] for end in range(context, at) if calls[end - context : end] == before]
        if next_ones:
            return next_ones[0] if len(next_ones) >= least and len(set(next_ones)) == 1 else None
    return None


def _swapped(usual: Channel, other: Channel, seq: int) -> bool:
    """The same two calls, the other way round."""
    here, there = _index(usual, seq), _index(other, seq)
    if here is None or there is None or here + 1 >= len(usual.calls) or there + 1 >= len(other.calls):
        return False
    return usual.calls[here] == other.calls[there + 1] and usual.calls[here + 1] == other.calls[there]


def _kind(usual: Call | None, other: Call | None) -> MismatchKind:
    if usual is None or other is None or usual.kind != other.kind:
        return "collective_type_mismatch"
    return "dtype_mismatch" if (usual.sizes, usual.outputs) == (other.sizes, other.outputs) else "size_mismatch"


SIBLINGS: Final = 24
MOST_JUDGED: Final = 512
ALIKE: Final = 3
"""So many calls in common make two ranks comparable."""

OrderVerdict = Literal["deviates", "behind", "unknown"]


class CallSequence(NamedTuple):
    """All calls of a rank in their order."""

    places: list[tuple[str, bool, int]]
    """Kind of group, is it point-to-point, number."""
    calls: list[int]
    """Digest of the operation and the kind of group, without sizes: siblings may work on batches of other sizes."""
    wrapped: bool


def judge_order(picture: Picture, ranks: tuple[int, ...]) -> dict[int, OrderVerdict]:
    """For each of `ranks`: does it go another way than its siblings, is it behind them, or cannot that be told?"""
    judged = [rank for rank in ranks[:MOST_JUDGED] if rank in picture.dumps]
    roles = _roles(picture)
    known: dict[int, CallSequence] = {}
    found: dict[int, OrderVerdict] = {}
    for rank in judged:
        siblings = _some(roles[_role(picture, rank)], rank)
        for one in (rank, *siblings):
            known.setdefault(one, sequence(picture, one))
        found[rank] = _against(known[rank], [known[other] for other in siblings])
    odd = [rank for rank, verdict in found.items() if verdict == "deviates"]
    if len(odd) != 1 and len(odd) in (0, len(found)):  # no siblings, or one another's only: what did they do before?
        suspects = odd or [rank for rank, verdict in found.items() if verdict == "unknown"]
        leaving = [rank for rank in suspects if _leaves_habit(known[rank])]
        if leaving and (len(leaving) < len(found) or not odd):
            found.update(dict.fromkeys(suspects, "unknown"))
            found.update(dict.fromkeys(leaving, "deviates"))
    return found


def next_call(picture: Picture, rank: int) -> tuple[str, bool] | None:
    """(kind of group, is it point-to-point) of what a rank that is only behind has to call next, as siblings did."""
    if rank not in picture.dumps:
        return None
    mine = sequence(picture, rank)
    for other in _some(_roles(picture)[_role(picture, rank)], rank):
        theirs = sequence(picture, other)
        start = _aligned(mine, theirs)
        if start is not None:
            size = len(mine.calls) - start[0]
            if size >= ALIKE and size == _common(mine.calls, theirs.calls, *start) < len(theirs.calls) - start[1]:
                return theirs.places[start[1] + size][:2]
    return None


def _roles(picture: Picture) -> dict[object, list[int]]:
    found: dict[object, list[int]] = {}
    for rank in picture.dumps:
        found.setdefault(_role(picture, rank), []).append(rank)
    return found


def _role(picture: Picture, rank: int) -> object:
    """Equal for ranks that run the same program: in the same kinds of groups, at the same stage of a pipeline."""
    places = set()
    for at, channel in enumerate(picture.dumps[rank].channels):
        group = picture.groups[picture.of[rank, at]]
        if group.p2p:
            places.add((group.kind, group.members.index(rank) if rank in group.members else -1))
        elif not channel.p2p:
            places.add((group.kind, -1))
    return frozenset(places)


def _some(ranks: list[int], but: int) -> list[int]:
    """A few of them, the whole range of them, without one."""
    return [rank for rank in ranks[:: max(1, len(ranks) // SIBLINGS)] if rank != but][: SIBLINGS + 1]


def sequence(picture: Picture, rank: int) -> CallSequence:
    dump: RankDump = picture.dumps[rank]
    if dump.partial:
        return CallSequence([], [], True)
    kinds = [picture.groups[picture.of[rank, at]].kind for at in range(len(dump.channels))]
    salts = [hash((kind, one.p2p)) & 0xFFFFFFFF for kind, one in zip(kinds, dump.channels, strict=True)]
    taken = [0] * len(dump.channels)
    places, calls = [], []
    for number in dump.order:
        channel, at = dump.channels[number], taken[number]
        taken[number] += 1
        places.append((kinds[number], channel.p2p, channel.seqs[at]))
        calls.append(channel.ops[at] ^ salts[number])
    return CallSequence(places, calls, dump.first_record > 0)


def _against(mine: CallSequence, others: list[CallSequence]) -> OrderVerdict:
    compared = []
    for other in others:
        start = _aligned(mine, other)
        if start is not None:
            common = _common(mine.calls, other.calls, *start)
            whole_of_mine, whole_of_other = common == len(mine.calls) - start[0], common == len(other.calls) - start[1]
            compared.append((common, whole_of_mine, whole_of_other))
    longest = max((one[0] for one in compared), default=0)
    siblings = [one for one in compared if one[0] >= max(ALIKE, longest // 2)]
    behind = sum(1 for _, of_mine, _ in siblings if of_mine)
    apart = sum(1 for _, of_mine, of_other in siblings if not of_mine and not of_other)
    if behind and behind >= apart:
        return "behind"
    return "deviates" if apart * 2 > len(siblings) and apart > behind else "unknown"


def _aligned(mine: CallSequence, other: CallSequence) -> tuple[int, int] | None:
    """Where both rings have the same call: their beginning, or the first of one that the other still has."""
    if not mine.places or not other.places:
        return None
    if not mine.wrapped and not other.wrapped:
        return 0, 0
    try:
        return 0, other.places.index(mine.places[0])
    except ValueError:
        pass
    try:
        return mine.places.index(other.places[0]), 0
    except ValueError:
        return None


def _common(mine: list[int], other: list[int], at: int, there: int) -> int:
    """How many calls are the same from there on."""
    size = min(len(mine) - at, len(other) - there)
    if mine[at : at + size] == other[there : there + size]:
        return size
    return next(step for step in range(size) if mine[at + step] != other[there + step])


def _leaves_habit(mine: CallSequence) -> bool:
    """Somewhere near its end it does what it never did after the same calls."""
    last = len(mine.calls)
    for at in range(max(0, last - 16), last):
        usual = habit(mine.calls, at, least=2)
        if usual is not None and usual != mine.calls[at]:
            return True
    return False


MOST = 0.15
"""A place where waiting ends counts as an origin, too, when so much of the most waited-for one's ranks wait for it."""
MOST_OF_GLOO = 0.75
"""gloo records no send and no receive: there innocent ranks seem to wait for nobody, too."""
MAX_NAMED = 64
SURE = 0.5


class _Found(NamedTuple):
    kind: FlightKind
    culprits: tuple[int, ...]
    wait: Wait | None
    why: str
    confidence: float


def analyse(
    dumps: Iterable[RankDump], stacks: Sequence[RankStack] = (), slow: Sequence[Slowdown] = ()
) -> FlightReport | None:
    """The origin of a hang, or a straggler; None when nothing is wrong: no rank waits, and none is always late.

    `stacks` (py-spy's, of some or all ranks) tell who waits in a call that no recorder has: gloo's send and receive.
    `slow`: what `diagnosis.flight.timings` says of the same dumps.
    """
    picture = join(dumps)
    if not picture.dumps:
        return None
    activities = {one.rank: stack_reading.activity(one) for one in stacks if one.frames}
    mismatch = find_mismatch(picture)
    graph = waits.build(picture)
    if mismatch and mismatch.p2p and not mismatch.odd:
        wait = Wait(mismatch.usual_rank, mismatch.group, mismatch.seq, True)
        if skipped := _of_skipped(picture, wait):
            return _report(picture, skipped, graph, stacks)
    if mismatch and mismatch.hot:
        return _of_mismatch(picture, mismatch, graph, stacks)
    found = _origin(picture, graph, activities)
    if mismatch and (found is None or found.confidence < 0.5) and graph.waiting:
        return _of_mismatch(picture, mismatch, graph, stacks)
    found = _of_late(slow, found) or found
    return _report(picture, found, graph, stacks) if found else None


def _of_late(slow: Sequence[Slowdown], now: _Found | None) -> _Found | None:
    """A rank that always comes late, where nobody waits just now, or for that one only."""
    late = next((one for one in slow if one.kind in ("rank", "node")), None)
    if late is None or (now and not (now.kind == "missing_rank" and set(now.culprits) <= set(late.ranks))):
        return None
    return _Found("straggler", late.ranks, now.wait if now else None, late.why, min(late.confidence, 0.8))


def _of_mismatch(picture: Picture, found: Mismatch, graph: Waits, stacks: Sequence[RankStack]) -> FlightReport:
    confidence = {"majority": 0.92, "siblings": 0.85, "habit": 0.7, "nobody": 0.6}[found.by] - (0 if found.hot else 0.3)
    who = rank_names(found.odd) if found.odd else "the ranks"
    usual, other = (str(one) if one else "another call" for one in (found.usual, found.other))
    what = "point-to-point call" if found.p2p else "collective"
    because = {"siblings": ", as all groups of its kind did", "habit": ", as always before"}.get(found.by, "")
    why = (
        f"{who} disagreed on {what} {found.seq} of {found.group}: "
        f"{other} (rank {found.other_rank}) against {usual} (rank {found.usual_rank}{because})"
    )
    wait = Wait(found.usual_rank, found.group, found.seq, found.p2p)
    report = _report(picture, _Found(found.kind, found.odd, wait, why, round(confidence, 2)), graph, stacks)
    calls = tuple(
        Evidence(
            text=f"rank {rank} called {call or 'something else'} as {what} {found.seq} of {found.group}",
            source="flight recorder",
            rank=rank,
        )
        for rank, call in ((found.other_rank, found.other), (found.usual_rank, found.usual))
    )
    return structs.replace(report, evidence=(*calls, *report.evidence)[:6])


def _origin(
    picture: Picture, graph: Waits, activities: Mapping[int, str], *, fronts_only: bool = False
) -> _Found | None:
    ends = waits.sinks(graph)
    ends = [one for one in ends if one.waited_by or len(one.ranks) > 1]
    ends = _through_unrecorded(ends, graph, activities)
    if not ends:
        return _lost(picture, graph) or _all_there(picture, graph)
    score = max(_weight(one) for one in ends)
    least = (MOST_OF_GLOO if _is_gloo(picture) else MOST) * score
    chief = [one for one in ends if _weight(one) >= least]
    cycles = [one for one in chief if len(one.ranks) > 1]
    if cycles:
        found = _of_cycle(picture, graph, cycles[0])
        if found.confidence < SURE and not fronts_only:
            graph = waits.build(picture, fronts_only=True)
            return _origin(picture, graph, activities, fronts_only=True) or found
        return found
    return _of_ends(picture, graph, chief, activities)


def _is_gloo(picture: Picture) -> bool:
    return any(one.op.startswith("gloo") for dump in picture.dumps.values() for one in dump.known.values())


def _weight(one: waits.Sink) -> int:
    return one.waited_by + (len(one.ranks) if len(one.ranks) > 1 else 0)


def _through_unrecorded(ends: list[waits.Sink], graph: Waits, activities: Mapping[int, str]) -> list[waits.Sink]:
    """Without those whose stacks show them waiting in a call that is not recorded, where others do not wait."""
    idle = {one.ranks[0] for one in ends if len(one.ranks) == 1 and one.ranks[0] not in graph.waiting}
    waiting = {rank for rank in idle if activities.get(rank) == "collective"}
    busy = {rank for rank, doing in activities.items() if doing not in ("collective", "unknown")}
    if not waiting or not busy - graph.waiting.keys():
        return ends
    kept = [one for one in ends if one.ranks[0] not in waiting]
    known = {rank for one in kept for rank in one.ranks}
    more = [waits.Sink((rank,), len(waiting)) for rank in sorted(busy - graph.waiting.keys() - known)]
    return [*kept, *more]


def _of_cycle(picture: Picture, graph: Waits, cycle: waits.Sink) -> _Found:
    orders = judge_order(picture, cycle.ranks)
    odd = tuple(rank for rank in cycle.ranks if orders.get(rank) == "deviates")
    involved = [graph.waiting[rank] for rank in cycle.ranks if rank in graph.waiting]
    wait = _wait_for(picture, graph, odd) or (involved[0] if involved else None)
    p2p = any(one.p2p for one in involved)
    kind: FlightKind = "p2p_missing" if p2p else "order_inversion"
    if not odd:
        why = f"{rank_names(cycle.ranks)} wait for each other in a ring, and none is known to call out of order"
        return _Found(kind, cycle.ranks if len(cycle.ranks) <= 2 else (), wait, why, 0.4)
    where = f" while rank {wait.rank} waits in {_call(wait)}" if wait else ""
    what = "skipped or added a point-to-point call" if p2p else "made calls in another order than ranks alike"
    why = f"{rank_names(odd)} {what}{where}; {rank_names(cycle.ranks)} wait for each other"
    return _Found(kind, odd, wait, why, 0.85 if len(odd) == 1 else 0.6)


def _of_ends(
    picture: Picture, graph: Waits, chief: Sequence[waits.Sink], activities: Mapping[int, str]
) -> _Found | None:
    alive = tuple(sorted(rank for one in chief for rank in one.ranks if not picture.absent(rank)))
    dead = tuple(sorted(rank for one in chief for rank in one.ranks if picture.absent(rank)))
    lagging = _lagging(picture, graph) if dead and not alive else None
    if lagging and lagging.wait and not any(picture.absent(member) for member in lagging.wait.group.members):
        return lagging  # else its call waits for one that is gone
    if dead and not _rather_alive(picture, chief):
        return _of_absent(picture, graph, dead, alive)
    if lost := _lost(picture, graph, alive):
        return lost
    ranks = alive
    wait = _wait_for(picture, graph, ranks)
    stuck = tuple(rank for rank in ranks if rank in graph.waiting)
    if stuck and len(stuck) == len(ranks):
        return _of_stuck(picture, graph, ranks)
    ranks = tuple(rank for rank in ranks if rank not in graph.waiting) or ranks
    orders = judge_order(picture, ranks)
    skipped = tuple(rank for rank in ranks if orders.get(rank) == "deviates" and rank in graph.only_p2p)
    if skipped:
        why = f"{rank_names(skipped)} went on without the call that rank {wait.rank if wait else '?'} waits for"
        return _Found("p2p_missing", skipped, wait, why, 0.75)
    waiters = len(graph.waiting)
    confidence = 0.9 if len(ranks) <= max(1, waiters // 2) else 0.6 if len(ranks) <= waiters else 0.4
    confidence *= 0.8 if graph.stale or len(picture.dumps) < len(picture.world) else 1.0
    idle = sorted(picture.dumps.keys() - graph.waiting.keys() - set(ranks))
    perhaps = ""
    if _is_gloo(picture) and idle and not all(rank in activities for rank in ranks):
        confidence *= 0.4  # others wait for nobody, either: in sends and receives, which gloo does not record
        perhaps = f"; it may wait for {rank_names(idle)} itself, in a send or receive, which gloo does not record"
    if any(activities.get(rank) == "collective" for rank in ranks):
        confidence = 0.3  # waits in what is not recorded, and nobody knows for whom
    doing = {activities[rank] for rank in ranks if rank in activities} - {"unknown"}
    seen = f", seen in {' or '.join(sorted(doing))}" if doing else ""
    who = f"{waiters} others wait" if waiters > 1 else "another waits"
    why = f"{rank_names(ranks)} did not come to {_call(wait)}{seen}: {who} for that, directly or not{perhaps}"
    return _Found("missing_rank", ranks, wait, why, round(confidence, 2))


def _lost(picture: Picture, graph: Waits, ended: tuple[int, ...] = ()) -> _Found | None:
    """A rank without a dump explains why nobody else stands out, or why the ranks `ended` did not go on."""
    gone = _gone(picture, ended or tuple(graph.waiting))
    if not gone:
        return None
    why = f"{rank_names(gone)} left no dump, and all others did"
    why += f": {rank_names(ended)} may have lost it in a call that gloo does not record" if ended else ""
    return _Found("dead_rank", gone, _wait_for(picture, graph, ended or gone), why, 0.6)


def _gone(picture: Picture, ended: Sequence[int]) -> tuple[int, ...]:
    """The few ranks without a dump, if all others have one and `ended` may have waited for them in a send or receive.

    On gloo a call fails at once when a peer dies. Its rank then waits for nobody, and seems to have stopped by itself.
    """
    world = {*picture.world, *range(max(picture.world, default=-1) + 1)}
    gone = {rank for rank in world if picture.absent(rank)}
    few = 0 < len(gone) <= max(1, len(world) // 8)
    if not few or not ended or not _is_gloo(picture):
        return ()
    groups = [set(group.members) for dump in picture.dumps.values() for group in dump.config]
    known = [members for members in groups if gone & members]
    return tuple(sorted(gone)) if not known or any(members & set(ended) for members in known) else ()


def _rather_alive(picture: Picture, chief: Sequence[waits.Sink]) -> bool:
    """A rank that has a dump, and in it waits for nobody: that another died, or lost its dump, does not explain it.

    Unless it runs on gloo, where a rank's end makes the calls of its peers fail at once: they wait no longer.
    """
    weights = {picture.absent(one.ranks[0]): one.waited_by for one in reversed(chief)}
    return not _is_gloo(picture) and 2 * weights.get(False, 0) >= weights.get(True, 0)


def _of_absent(picture: Picture, graph: Waits, dead: tuple[int, ...], alive: tuple[int, ...]) -> _Found:
    """Only who is waited for: a rank without a dump may be well, and a set of dumps may be part of one."""
    gone = sum(1 for rank in picture.world if picture.absent(rank))
    wait = _wait_for(picture, graph, dead)
    many = gone > max(1, len(picture.world) // 4)
    confidence = 0.35 if many else 0.8 if len(dead) == 1 and not alive else 0.4
    why = f"{rank_names(dead)} left no dump, and {_call(wait)} waits for it"
    if many:
        why += f" (there are dumps of {len(picture.dumps)} of {len(picture.world)} ranks only)"
    return _Found("dead_rank", dead, wait, why, confidence)


def _of_stuck(picture: Picture, graph: Waits, ranks: tuple[int, ...]) -> _Found:
    lagging = tuple(rank for rank in ranks if graph.lagging[rank])
    if not lagging and (idle := waits.unstarted(picture, ranks)) and len(idle) < len(ranks):
        return _unstarted(graph, idle)
    culprits = lagging or ranks
    own = graph.waiting[culprits[0]]
    if own.p2p and not lagging and (skipped := _of_skipped(picture, own)):
        return skipped
    why = f"{rank_names(culprits)} did not complete {_call(own)}"
    why += ", which its peers completed" if lagging else "; all members have called it, and older calls wait for nobody"
    return _Found("stalled_rank", culprits, own, why, 0.75 if lagging and len(lagging) <= 2 else 0.45)


def _of_skipped(picture: Picture, wait: Wait) -> _Found | None:
    orders = judge_order(picture, wait.group.members[:MAX_NAMED])
    ranks = tuple(rank for rank, one in orders.items() if one == "deviates")
    why = f"{rank_names(ranks)} made calls in another order than ranks alike, and {_call(wait)} has no answer"
    return _Found("p2p_missing", ranks, wait, why, 0.6) if ranks else None


def _unstarted(graph: Waits, ranks: tuple[int, ...]) -> _Found:
    wait = graph.waiting[ranks[0]]
    why = f"{rank_names(ranks)} called {_call(wait)}, and the GPU has not begun it; those of others have"
    return _Found("stalled_rank", ranks, wait, why, 0.7 if len(ranks) <= 2 else 0.5)


def _lagging(picture: Picture, graph: Waits) -> _Found | None:
    """A few ranks whose GPUs do not complete what those of their peers completed."""
    most = max(graph.lagging.values(), default=0)
    ranks = tuple(sorted(rank for rank, count in graph.lagging.items() if count == most))
    if not ranks or len(ranks) > max(2, len(picture.dumps) // 8):
        return None
    wait = graph.waiting[ranks[0]]
    why = f"{rank_names(ranks)} did not complete {_call(wait)}, which its peers completed"
    return _Found("stalled_rank", ranks, wait, why, 0.7)


def _all_there(picture: Picture, graph: Waits) -> _Found | None:
    """Nobody is missed anywhere; what is not completed is with the GPUs and the network."""
    if not graph.waiting:
        return None
    if lagging := _lagging(picture, graph):
        return lagging
    unstarted = waits.unstarted(picture, tuple(graph.waiting))
    first = min(graph.waiting.values(), key=lambda one: one.rank)
    if unstarted and 2 * len(unstarted) <= len(graph.waiting):
        return _unstarted(graph, unstarted)
    why = f"all ranks have called {_call(first)}, and it does not complete: no rank stands out"
    return _Found("stalled_rank", (), first, why, 0.25)


def _wait_for(picture: Picture, graph: Waits, ranks: Sequence[int]) -> Wait | None:
    """The call that the first of `ranks` has to come to next, where siblings tell; else what was called first."""
    rank = next((rank for rank in ranks if rank in graph.why), None)
    if rank is None:
        return None
    expected = next_call(picture, rank)
    calls = [one for one in graph.why[rank] if (one.group.kind, one.p2p) == expected] or graph.why[rank]
    return min(calls, key=lambda one: one.since)


def _call(wait: Wait | None) -> str:
    if wait is None:
        return "a call"
    return f"{'point-to-point call' if wait.p2p else 'collective'} {wait.seq} of {wait.group}"


def _report(picture: Picture, found: _Found, graph: Waits, stacks: Sequence[RankStack]) -> FlightReport:
    wait = found.wait
    waiting = tuple(sorted(rank for rank in graph.waiting if rank not in found.culprits))
    shown = (*found.culprits[:1], *((wait.rank,) if wait else ()), *waiting[:1])
    texts = [_place(picture, rank, found, stacks) for rank in dict.fromkeys(shown)]
    problems = [*picture.problems]
    for rank, dump in picture.dumps.items():
        problems += [f"rank {rank}: {problem}" for problem in dump.problems]
    return FlightReport(
        kind=found.kind,
        culprit_ranks=found.culprits[:MAX_NAMED],
        process_group=str(wait.group) if wait else "",
        collective_seq=wait.seq if wait and wait.seq >= 0 and not wait.p2p else None,
        why=found.why,
        confidence=found.confidence,
        waiting_ranks=waiting[:MAX_NAMED],
        evidence=tuple(one for one in texts if one)[:2],
        ranks_seen=len(picture.dumps),
        problems=tuple(problems[:20]),
    )


def _place(picture: Picture, rank: int, found: _Found, stacks: Sequence[RankStack]) -> Evidence | None:
    """Where the rank is, by its stack if there is one, else by the last call that its recorder has."""
    stack = next((one for one in stacks if one.rank == rank and one.frames), None)
    role = "held up the others" if rank in found.culprits else "waits"
    if stack:
        where = f"{stack_reading.activity(stack)} in {stack_reading.place(stack)}, at {stack.frames[0].function}"
        return Evidence(text=f"rank {rank} ({role}): {where}", source="stacks", rank=rank)
    dump = picture.dumps.get(rank)
    if dump is None:
        return Evidence(text=f"rank {rank} left no flight recorder dump", source="flight recorder", rank=rank)
    at = dump.front_at()
    if at is None and dump.order:
        at = dump.order[-1]
    if at is None:
        return None
    channel = dump.channels[at]
    index = channel.pending if channel.pending is not None else len(channel.seqs) - 1
    called = dump.known.get(channel.calls[index])
    doing = "waits in" if channel.pending is not None else "last completed"
    frames = dump.frames.get((at, index), ())
    where = f", called in {_own(frames)}" if frames else ""
    group = picture.groups[picture.of[rank, at]]
    text = f"rank {rank} ({role}): {doing} {called or 'call'}, number {channel.seqs[index]} of {group}{where}"
    return Evidence(text=text[:500], source="flight recorder", rank=rank)


def _own(frames: tuple[Frame, ...]) -> str:
    return stack_reading.place(RankStack(rank=0, frames=frames))
