"""Who comes last, again and again, to collectives that the others wait in: a straggler, while the job goes on."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from typing import Final, NamedTuple

from diagnosis import arrivals
from diagnosis.flight.picture import Joined, Picture
from diagnosis.meetings import RankTiming

NEWEST: Final = 64
"""So many collectives of each group are looked at."""
AT_LEAST: Final = 4
LAST_IN: Final = 0.6
"""Share of its collectives in which a straggler is the last."""
OF_INTERVAL: Final = 0.2
"""What it costs, as a share of the time between two collectives of its group."""
NOISE_S: Final = 0.002


class Late(NamedTuple):
    rank: int
    mean_s: float
    """How much later than the last of the others it comes, on average."""
    share: float
    """Share of the collectives of its groups to which it came last."""
    of_interval: float
    """The same delay as a share of the time between two of them."""
    group: Joined
    sure: bool = False
    """Also by clocks that were corrected (`diagnosis.arrivals`): one that is ahead looks like a rank that is late."""


def find(picture: Picture) -> Late | None:
    """The rank whose delays cost most."""
    gaps: dict[int, list[float]] = defaultdict(list)
    looked_at: Counter[int] = Counter()
    intervals: dict[int, list[float]] = defaultdict(list)
    where: dict[int, Joined] = {}
    for group in picture.groups:
        if len(group.members) < 2 or len(group.calls) < len(group.members):
            continue
        before = None
        for ordered in _arrivals(group):
            (second, _), (last, rank) = ordered[-2:]
            looked_at.update(rank for _, rank in ordered)
            gaps[rank].append((last - second) / 1e9)
            if before is not None:
                intervals[rank].append((last - before) / 1e9)
            before = last
            where.setdefault(rank, group)
    found = []
    for rank, its in gaps.items():
        interval = statistics.median(intervals[rank]) if intervals[rank] else 0.0
        late = Late(rank, sum(its) / len(its), len(its) / looked_at[rank], 0.0, where[rank])
        if len(its) >= AT_LEAST and late.share >= LAST_IN and late.mean_s >= NOISE_S and interval > 0:
            late = late._replace(of_interval=min(1.0, late.mean_s / interval))
            if late.of_interval >= OF_INTERVAL:
                found.append(late)
    worst = max(found, key=lambda one: one.mean_s * one.share, default=None)
    return worst._replace(sure=_is_sure(picture, worst.rank)) if worst else None


def _is_sure(picture: Picture, rank: int) -> bool:
    timings = [
        RankTiming(
            rank=member,
            group=str(group),
            seqs=one.seqs,
            created_ns=one.times,
            completed_ns=one.ended,
            duration_us=one.durations_us,
        )
        for group in picture.groups
        for member, one in group.calls.items()
    ]
    return any(rank in one.ranks for one in arrivals.judge(timings))


def _arrivals(group: Joined) -> list[list[tuple[int, int]]]:
    """For each of the newest collectives that all members came to: (when, rank), sorted."""
    by_seq: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, channel in group.calls.items():
        for seq, time in zip(channel.seqs[-NEWEST:], channel.times[-NEWEST:], strict=True):
            if time:
                by_seq[seq].append((time, rank))
    size = len(group.members)
    return [sorted(by_seq[seq]) for seq in sorted(by_seq) if len(by_seq[seq]) == size]
