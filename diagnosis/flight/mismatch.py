"""Ranks that call something else than others: in one collective, or in another order.

`find` compares the calls of one group: the majority is right, else what sibling groups do, else habit. `judge_order`
compares the whole sequence of a rank with those of ranks that run the same program: order bugs, calls skipped or made
twice. A rank that is only behind has made the same calls, and fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from diagnosis.flight.dumps import COMPLETED, Call, Channel, RankDump, peer_of
from diagnosis.flight.waits import Joined, Picture

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


def find(picture: Picture) -> Mismatch | None:
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
