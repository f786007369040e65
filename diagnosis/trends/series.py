"""Robust statistics of a series of numbers: where its level changes, told from noise, spikes and single pauses."""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

LEAST: Final = 8
"""Values that make a level."""
MAX_VALUES: Final = 500
"""A longer series is taken in blocks, each by its median."""
PENALTY: Final = 5.0
"""A change must explain so many times the noise, times the logarithm of the length."""


class Level(NamedTuple):
    """The values from `start` to before `end` lie around `value`."""

    start: int
    end: int
    value: float
    spread: float
    """Median distance from `value`."""


def noise(values: Sequence[float]) -> float:
    """Median distance of neighbours, as a mean absolute deviation: neither a trend nor a few leaps move it."""
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    return statistics.median(steps) * 0.84 if steps else 0.0


def levels(values: Sequence[float], floor: float) -> list[Level]:
    """The series as levels, in order. `floor`: differences below it are noise whatever the values say.

    Binary segmentation on absolute deviations from medians. Raises nothing; an empty series has no level.
    """
    block = max(1, math.ceil(len(values) / MAX_VALUES))
    short = [statistics.median(values[at : at + block]) for at in range(0, len(values), block)]
    scale = max(noise(short), floor)
    cuts = sorted(_cuts(short, scale))
    ends = [*cuts, len(short)]
    found = []
    for start, end in zip([0, *cuts], ends, strict=True):
        part = short[start:end]
        if part:
            middle = statistics.median(part)
            spread = statistics.median(abs(one - middle) for one in part)
            found.append(Level(start * block, min(end * block, len(values)), middle, spread))
    return found


def _cuts(values: Sequence[float], scale: float) -> list[int]:
    found = []
    parts = [(0, len(values))]
    while parts:
        start, end = parts.pop()
        if end - start < 2 * LEAST:
            continue
        before = _costs(values[start:end])
        after = _costs(values[start:end][::-1])[::-1]
        whole = before[-1]
        split = min(range(LEAST, end - start - LEAST + 1), key=lambda at: before[at - 1] + after[at])
        gain = whole - before[split - 1] - after[split]
        if gain > PENALTY * scale * math.log(len(values)):
            found.append(start + split)
            parts += [(start, start + split), (start + split, end)]
    return found


def _costs(values: Sequence[float]) -> list[float]:
    """Of each beginning of the series, the sum of distances from its median."""
    low: list[float] = []  # negated
    high: list[float] = []
    low_sum = high_sum = 0.0
    costs = []
    for value in values:
        if not low or value <= -low[0]:
            heapq.heappush(low, -value)
            low_sum += value
        else:
            heapq.heappush(high, value)
            high_sum += value
        if len(low) > len(high) + 1:
            moved = -heapq.heappop(low)
            heapq.heappush(high, moved)
            low_sum, high_sum = low_sum - moved, high_sum + moved
        elif len(high) > len(low):
            moved = heapq.heappop(high)
            heapq.heappush(low, -moved)
            low_sum, high_sum = low_sum + moved, high_sum - moved
        middle = -low[0]
        costs.append(high_sum - low_sum + middle * (len(low) - len(high)))
    return costs


def spread(values: Sequence[float]) -> float:
    """Median distance from the median; 0 for no values."""
    if not values:
        return 0.0
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
