"""Whose calls go another way than those of ranks that run the same program: order bugs, calls skipped or made twice.

Who is only behind has made the same calls, and fewer of them: its sequence is a beginning of a sibling's.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from diagnosis.flight.disagree import habit
from diagnosis.flight.dumps import RankDump
from diagnosis.flight.picture import Picture

SIBLINGS: Final = 24
MOST_JUDGED: Final = 512
ALIKE: Final = 3
"""So many calls in common make two ranks comparable."""

Told = Literal["deviates", "behind", "unknown"]


class Sequence(NamedTuple):
    """All calls of a rank in their order."""

    places: list[tuple[str, bool, int]]
    """Kind of group, is it point-to-point, number."""
    calls: list[int]
    """Digest of the operation and the kind of group, without sizes: siblings may work on batches of other sizes."""
    wrapped: bool


def judge(picture: Picture, ranks: tuple[int, ...]) -> dict[int, Told]:
    """For each of `ranks`: does it go another way than its siblings, is it behind them, or cannot that be told?"""
    judged = [rank for rank in ranks[:MOST_JUDGED] if rank in picture.dumps]
    roles = _roles(picture)
    known: dict[int, Sequence] = {}
    found: dict[int, Told] = {}
    for rank in judged:
        siblings = _some(roles[_role(picture, rank)], rank)
        for one in (rank, *siblings):
            known.setdefault(one, sequence(picture, one))
        found[rank] = _against(known[rank], [known[other] for other in siblings])
    odd = [rank for rank, told in found.items() if told == "deviates"]
    if len(odd) != 1 and len(odd) in (0, len(found)):  # no siblings, or one another's only: what did they do before?
        suspects = odd or [rank for rank, told in found.items() if told == "unknown"]
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


def sequence(picture: Picture, rank: int) -> Sequence:
    dump: RankDump = picture.dumps[rank]
    if dump.partial:
        return Sequence([], [], True)
    kinds = [picture.groups[picture.of[rank, at]].kind for at in range(len(dump.channels))]
    salts = [hash((kind, one.p2p)) & 0xFFFFFFFF for kind, one in zip(kinds, dump.channels, strict=True)]
    taken = [0] * len(dump.channels)
    places, calls = [], []
    for number in dump.order:
        channel, at = dump.channels[number], taken[number]
        taken[number] += 1
        places.append((kinds[number], channel.p2p, channel.seqs[at]))
        calls.append(channel.ops[at] ^ salts[number])
    return Sequence(places, calls, dump.first_record > 0)


def _against(mine: Sequence, others: list[Sequence]) -> Told:
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


def _aligned(mine: Sequence, other: Sequence) -> tuple[int, int] | None:
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


def _leaves_habit(mine: Sequence) -> bool:
    """Somewhere near its end it does what it never did after the same calls."""
    last = len(mine.calls)
    for at in range(max(0, last - 16), last):
        usual = habit(mine.calls, at, least=2)
        if usual is not None and usual != mine.calls[at]:
            return True
    return False
