"""How long a job is silent between two signs of progress: when more silence than that is worth a look."""

from __future__ import annotations

from collections import deque
from typing import Final

FLOOR_S: Final = 1.8
"""Beacon, agent and heartbeat add up to a second each way: this is under 3 s after the fault."""
UNSETTLED_S: Final = 3.0
"""The same while the pace is not known yet."""
FACTOR: Final = 5.0
GRANULARITY_S: Final = 1.0
"""By how much the age of a sample overstates a gap (the beacon's period and the agent's)."""
RECENT: Final = 50
OUTLIER_FACTOR: Final = 12.0
"""A gap that much longer than usual was a pause, not a step ..."""
RECURS: Final = 3
"""... unless there are so many of them: a step may be many quick collectives and one long computation."""
SETTLED_GAPS: Final = 5


class Pace:
    """Recent gaps between signs of progress of one attempt."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=RECENT)
        self._slowest = 0.0

    def note_gap(self, seconds: float) -> None:
        """An honest gap, as the oldest age seen within it."""
        self._gaps.append(max(0.0, seconds - GRANULARITY_S))
        ordered = sorted(self._gaps)  # at most 50
        usual = ordered[len(ordered) // 2] + GRANULARITY_S
        far = sum(one > OUTLIER_FACTOR * usual for one in ordered)
        if far >= RECURS:
            self._slowest = ordered[-1]
        else:
            self._slowest = next(one for one in reversed(ordered) if one <= OUTLIER_FACTOR * usual)

    @property
    def settled(self) -> bool:
        """Enough gaps were seen to know the pace."""
        return len(self._gaps) >= SETTLED_GAPS

    @property
    def suspect_limit_s(self) -> float:
        """Silent seconds after which it is looked for the reason."""
        return max(FLOOR_S, FACTOR * self._slowest) if self.settled else UNSETTLED_S
