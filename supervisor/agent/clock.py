"""How far this node's clock is from the controller's, from four times as in NTP (RFC 5905, section 8). Pure.

Each answer bounds the offset for certain: it lies within half a round trip of the estimate, however lopsided the way
was. The best of the last eight answers counts; one that contradicts it says that a clock was set, and all starts anew.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

ASK_EVERY_S: Final = 60.0
"""Between two questions on one connection."""
ASK_AT_FIRST_S: Final = 2.0
FIRST_QUESTIONS: Final = 3
"""So many questions on a new connection come quickly: the first is slow, for everybody connects at once."""
SAMPLES: Final = 8
DRIFT: Final = 100e-6
"""Seconds per second that two clocks may part; a clock chip is good for about 50e-6."""

ROUNDING_S: Final = 1e-6
"""Seconds since 1970 are kept to some 2e-7 of a second: an answer at once may seem to come before its question."""


class Sample(NamedTuple):
    offset_s: float
    error_s: float
    """The true offset is at most this far from `offset_s`."""
    mono: float


class ClockOffset:
    """`offset_s`: this node's clock minus the controller's; None before the first answer."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._asked = 0
        self._next_at = 0.0

    def connected(self) -> None:
        """A new connection: perhaps another controller, on another host."""
        self._samples.clear()
        self._asked, self._next_at = 0, 0.0

    def due(self, mono: float) -> bool:
        """Whether the next heartbeat should ask; it is taken as asked."""
        if mono < self._next_at:
            return False
        self._asked += 1
        self._next_at = mono + (ASK_AT_FIRST_S if self._asked < FIRST_QUESTIONS else ASK_EVERY_S)
        return True

    def answered(self, asked_at: float, heard_at: float, told_at: float, now: float, mono: float) -> None:
        """Take an answer: `asked_at` and `now` by this node's clock, `heard_at` and `told_at` by the controller's."""
        round_trip_s = (now - asked_at) - (told_at - heard_at)
        if round_trip_s < -ROUNDING_S or told_at < heard_at:
            return  # a clock was set while the question was on its way
        round_trip_s = max(round_trip_s, 0.0)
        offset_s = ((asked_at - heard_at) + (now - told_at)) / 2
        sample = Sample(offset_s, round_trip_s / 2, mono)
        if any(abs(s.offset_s - offset_s) > sample.error_s + _error_s(s, mono) for s in self._samples):
            self._samples.clear()
        self._samples.append(sample)

    def best(self, mono: float) -> tuple[float, float] | None:
        """Offset and how far off it may be, in seconds."""
        if not self._samples:
            return None
        best = min(self._samples, key=lambda sample: _error_s(sample, mono))
        return best.offset_s, _error_s(best, mono)


def _error_s(sample: Sample, mono: float) -> float:
    return sample.error_s + DRIFT * (mono - sample.mono)
