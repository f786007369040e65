"""The restart budget: how often a job may be started again, and how long to wait before.

The first restart comes at once, because most failures do not repeat. Repeats without progress in between wait longer
and longer, and after `max_restarts` of them the budget is spent. Progress gives the whole budget back; a limit for
the hour stands even so, because a job that fails every minute is not kept alive but kept broken.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0
FIRST_DELAY_S = 1.0
"""Back-off before the second restart without progress; it doubles from there."""
LONGEST_DELAY_S = 300.0
HOUR_FACTOR = 10
"""Restarts within the window, progress or not: `HOUR_FACTOR` times `max_restarts`."""


class RestartBudget:
    """Restarts charged so far. Mutable; owned by the job. Times are Unix seconds."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.used = 0
        """Restarts since the last progress."""
        self._charged: deque[float] = deque(maxlen=max(1, HOUR_FACTOR * max_restarts))

    def in_window(self, now: float) -> int:
        while self._charged and self._charged[0] <= now - WINDOW_S:
            self._charged.popleft()
        return len(self._charged)

    def next_delay_s(self, now: float) -> float | None:
        """Back-off before the next restart, or None when the budget is spent."""
        if self.used >= self.max_restarts or self.in_window(now) >= HOUR_FACTOR * self.max_restarts:
            return None
        if self.used == 0:
            return 0.0
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.used - 1, 20)))

    def charge(self, now: float) -> None:
        """One more restart. The caller has asked `next_delay_s` first."""
        assert self.next_delay_s(now) is not None, "a spent budget was charged"
        self.used += 1
        self._charged.append(now)

    def progressed(self) -> None:
        """The run got further than ever before."""
        self.used = 0
