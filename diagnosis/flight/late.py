"""Who comes last, again and again, to collectives that the others wait in: a straggler, while the job goes on."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from typing import Final, NamedTuple

from diagnosis.flight.picture import Joined, Picture

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


def find(picture: Picture) -> Late | None:
    """The rank whose delays cost most. As far as clocks agree: a clock that is ahead looks the same."""
    gaps: dict[int, list[float]] = defaultdict(list)
    looked_at: Counter[int] = Counter()
    intervals: dict[int, list[float]] = defaultdict(list)
    where: dict[int, Joined] = {}
    for group in picture.groups:
        if len(group.members) < 2 or len(group.calls) < len(group.members):
            continue
        before = None
        for arrivals in _arrivals(group):
            (second, _), (last, rank) = arrivals[-2:]
            looked_at.update(rank for _, rank in arrivals)
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
    return max(found, key=lambda one: one.mean_s * one.share, default=None)


def _arrivals(group: Joined) -> list[list[tuple[int, int]]]:
    """For each of the newest collectives that all members came to: (when, rank), sorted."""
    by_seq: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, channel in group.calls.items():
        for seq, time in zip(channel.seqs[-NEWEST:], channel.times[-NEWEST:], strict=True):
            if time:
                by_seq[seq].append((time, rank))
    size = len(group.members)
    return [sorted(by_seq[seq]) for seq in sorted(by_seq) if len(by_seq[seq]) == size]
