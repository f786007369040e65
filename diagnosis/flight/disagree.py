"""Ranks of one group that do not call the same, and who is right: the majority, what sibling groups do, or habit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from diagnosis.flight.calls import Call, peer_of
from diagnosis.flight.dumps import COMPLETED, Channel
from diagnosis.flight.picture import Joined, Picture

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
    votes = {seq: told for seq in seqs[:LOOKED_AT] if len(set((told := _votes(group, seq)).values())) > 1}
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
