"""Who came when to the collectives of each group, in one time for all: clocks corrected, and whether anybody waited."""

from __future__ import annotations

import bisect
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.signals import Frozen

LEAST: Final = 16
"""Collectives that anything is told from at least."""
MAX_ENTRIES: Final = 600_000
"""The newest are looked at: some 5 s of CPU."""
CLOCK_NS: Final = 30_000_000
"""Clocks that differ by less are as good as equal."""
HIDDEN_NS: Final = 50_000_000
"""Collectives that end so much later than their last ranks come, and later than these are late, are not held up."""


P2P: Final = re.compile(r"p2p (\d{1,9})->(\d{1,9})")
"""Name of a group of two ranks that send to each other: their calls have other numbers, only their times count."""


LINK: Final = "link"
"""Kind of a group of two ranks whose sends and receives were put together: their times tell of the way between them."""


class RankTiming(Frozen, frozen=True, kw_only=True):
    """When one rank came to the collectives of one process group (flight recorder), oldest first.

    The sequences are of one length, or empty (tuples, or arrays: nothing is copied). Times are of the rank's own clock;
    0 is a time not known.
    """

    rank: int
    group: str
    """Equal on every member (by its ranks, else its name)."""
    seqs: Sequence[int]
    """`collective_seq_id`; ascending. Point-to-point entries are a group of their own: `p2p 3->4`, told by both."""
    created_ns: Sequence[int]
    """Enqueued by the CPU."""
    completed_ns: Sequence[int] = ()
    """Seen to be complete; empty where no entry tells."""
    duration_us: Sequence[int] = ()
    """As the GPU measured it (`duration_ms`); empty where timing was off."""
    kind: str = ""
    """Equal for groups that do the same in the job: all tensor-parallel ones, all data-parallel ones."""


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    seqs: list[int]
    """Those that all its known ranks have come to."""
    late: dict[int, list[float]]
    """Of each rank and collective, seconds after the median of the ranks; 0 where nobody waited."""
    shortest: list[float]
    """Of each collective, the shortest duration in seconds; empty where none is known."""
    kind: str
    since: int | None = None
    """The first collective looked at, where earlier ones were left out."""


class Meetings(NamedTuple):
    """What is asked of groups."""

    groups: list[Group]
    span_s: float
    """Seconds that all of it took."""
    unsure: frozenset[int]
    """Ranks whose clocks were corrected."""
    all_groups: frozenset[str]
    """Names, also of those that are not told from."""


def read(timings: Iterable[RankTiming]) -> Meetings:
    """Groups of two ranks and more with enough collectives that all of these ranks came to."""
    by_group: dict[str, list[RankTiming]] = {}
    known = list(timings)
    newest = max(LEAST * 2, MAX_ENTRIES // max(1, len(known)))
    for timing in known:
        if len(timing.seqs) == len(timing.created_ns):
            by_group.setdefault(timing.group, []).append(timing)
    offsets = _clock_offsets(by_group)
    following = _Following(known, offsets, newest)
    groups = [
        group
        for name, members in sorted(by_group.items())
        if len(members) >= 2 and not P2P.fullmatch(name)
        if (group := _group(name, members, offsets, following, newest)) is not None
    ]
    return Meetings(groups, _span_s(known, newest), frozenset(offsets), frozenset(by_group))


def _span_s(timings: Sequence[RankTiming], newest: int) -> float:
    """Seconds that the looked at collectives took, of the rank in the middle."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for timing in timings:
        part = [at for at in timing.created_ns[-newest:] if at > 0]
        if part:
            first[timing.rank] = min(first.get(timing.rank, part[0]), part[0])
            last[timing.rank] = max(last.get(timing.rank, 0), part[-1])
    return statistics.median(last[rank] - first[rank] for rank in first) / 1e9 if first else 0.0


def _clock_offsets(by_group: Mapping[str, Sequence[RankTiming]]) -> dict[int, float]:
    """How far each rank's clock is ahead, in ns: a collective ends everywhere at once. Larger groups count more."""
    found: dict[int, float] = {}
    for members in sorted(by_group.values(), key=len, reverse=True):
        if len(members) < 2 or not all(one.completed_ns for one in members) or all(m.rank in found for m in members):
            continue
        ends = [{seq: at for seq, at in zip(one.seqs, one.completed_ns, strict=False) if at > 0} for one in members]
        shared = sorted(set.intersection(*map(set, ends)))[-200:]
        if len(shared) < LEAST:
            continue
        middle = {seq: statistics.median(of[seq] for of in ends) for seq in shared}
        ahead = [statistics.median(of[seq] - middle[seq] for seq in shared) for of in ends]
        agreed = [found[one.rank] - by for one, by in zip(members, ahead, strict=True) if one.rank in found]
        shift = statistics.median(agreed) if agreed else 0.0
        for one, by in zip(members, ahead, strict=True):
            found.setdefault(one.rank, by + shift)
    return {rank: offset for rank, offset in found.items() if abs(offset) > CLOCK_NS}


class _Following:
    """When each rank came to whatever it did next."""

    def __init__(self, timings: Sequence[RankTiming], offsets: Mapping[int, float], newest: int) -> None:
        self._times: dict[int, list[float]] = {}
        for timing in timings:
            offset = offsets.get(timing.rank, 0.0)
            times = self._times.setdefault(timing.rank, [])
            times.extend(at - offset for at in timing.created_ns[-newest:] if at > 0)
        for times in self._times.values():
            times.sort()

    def waited(self, ranks: Sequence[int], came: Sequence[float]) -> bool:
        """Most of those that came earlier did nothing more until the last one was there."""
        last = max(came)
        early = [(rank, at) for rank, at in zip(ranks, came, strict=True) if at < last]
        return 2 * sum(self._after(rank, at) >= last for rank, at in early) >= len(early)

    def _after(self, rank: int, came: float) -> float:
        times = self._times.get(rank, [])
        at = bisect.bisect_right(times, came)
        return times[at] if at < len(times) else 0.0


def _group(
    name: str, members: Sequence[RankTiming], offsets: Mapping[int, float], following: _Following, newest: int
) -> Group | None:
    timed = all(one.duration_us and len(one.duration_us) == len(one.seqs) for one in members)
    came: list[dict[int, float]] = []
    for one in members:
        offset = offsets.get(one.rank, 0.0)
        times = (-1000.0 * took for took in one.duration_us[-newest:]) if timed else None
        values = times or (at - offset if at > 0 else 0.0 for at in one.created_ns[-newest:])
        came.append({seq: at for seq, at in zip(one.seqs[-newest:], values, strict=False) if at})
    seqs = sorted(set.intersection(*map(set, came)))
    if len(seqs) < LEAST:
        return None
    ranks = tuple(one.rank for one in members)
    rows = [[of[seq] for of in came] for seq in seqs]
    hidden = not timed and _hidden(seqs, rows, _first_end(members, offsets, newest))
    late: dict[int, list[float]] = {rank: [] for rank in ranks}
    for row in rows:
        middle = statistics.median(row)
        counts = timed or (not hidden and following.waited(ranks, row))
        for rank, at in zip(ranks, row, strict=True):
            late[rank].append((at - middle) / 1e9 if counts else 0.0)
    shortest = [-max(row) / 1e9 for row in rows] if timed else []
    return Group(name, ranks, seqs, late, shortest, members[0].kind)


def _hidden(seqs: Sequence[int], rows: Sequence[Sequence[float]], ends: Mapping[int, float]) -> bool:
    """Collectives end long after their last call: GPUs have work queued, and the lateness of a CPU holds nobody up."""
    known = [
        (ends[seq] - max(row), max(row) - statistics.median(row))
        for seq, row in zip(seqs, rows, strict=True)
        if seq in ends
    ]
    if not known:
        return False
    after = statistics.median(one for one, _ in known)
    lateness = statistics.median(one for _, one in known)
    return after > max(HIDDEN_NS, lateness)


def _first_end(members: Sequence[RankTiming], offsets: Mapping[int, float], newest: int) -> dict[int, float]:
    """When the first rank saw a collective complete."""
    ends: dict[int, float] = {}
    for one in members:
        offset = offsets.get(one.rank, 0.0)
        for seq, at in zip(one.seqs[-newest:], one.completed_ns[-newest:], strict=False):
            if at > 0:
                ends[seq] = min(ends.get(seq, at - offset), at - offset)
    return ends
