"""What probes remember: values kept in this boot, counters as they were first seen, and how fast counters grow."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Hashable, Mapping
from typing import TypeVar

import msgspec

from supervisor.node_health.contract import ProbeContext

_T = TypeVar("_T")
_ONE_AT_A_TIME = threading.Lock()
"""msgspec may crash when two threads make the first conversion to a type at once."""


def recall(place: ProbeContext, name: str, kind: type[_T], *, any_boot: bool = False) -> _T:
    """What `ProbeContext.keep` kept, as a `kind`; an empty one when nothing was, or another version of ours kept it."""
    kept = place.load(name, any_boot=any_boot)
    try:
        with _ONE_AT_A_TIME:
            return kind() if kept is None else msgspec.convert(kept, kind)
    except msgspec.ValidationError:
        return kind()


class Baseline:
    """Counters as they were when they were first looked at in this boot. One that became smaller was reset."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: dict[str, int] | None = None

    def of(self, place: ProbeContext, counts: Mapping[str, int]) -> dict[str, int]:
        before = recall(place, self._name, dict[str, int]) if self._first is None else self._first
        first = before | {key: min(before.get(key, value), value) for key, value in counts.items()}
        if first != self._first:
            place.keep(self._name, first)
        self._first = first
        return first


class Rates:
    """Increases of counters over the last minutes. A counter that became smaller was reset: it starts anew."""

    def __init__(self, longest_s: float = 3600.0) -> None:
        self._longest = longest_s
        self._last: dict[Hashable, tuple[float, int]] = {}
        self._steps: dict[Hashable, deque[tuple[float, float, int]]] = {}
        """Counter -> (from, until, by how much it grew), monotonic seconds."""

    def add(self, key: Hashable, value: int, mono: float) -> None:
        since, last = self._last.get(key, (mono, value))
        self._last[key] = mono, value
        if value < last:
            self._steps.pop(key, None)
        elif value > last:
            self._steps.setdefault(key, deque(maxlen=512)).append((since, mono, value - last))

    def increase(self, key: Hashable, window_s: float, mono: float) -> int:
        """How much it grew in the last `window_s` seconds; of a longer time between two looks, the share that is in."""
        steps = self._steps.get(key)
        if not steps:
            return 0
        while steps and mono - steps[0][1] > self._longest:
            steps.popleft()
        start = mono - window_s
        grown = (
            by * min(1.0, (until - start) / max(until - since, 1e-9)) for since, until, by in steps if until > start
        )
        return math.ceil(sum(grown) - 1e-6)
