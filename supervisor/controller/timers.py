"""The job's timers: wanted for a time on the controller's clock, over controller restarts too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from supervisor.messages import SetTimer


class Clock:
    """Unix time that never runs backwards, over controller restarts neither."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._base = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()


class Timers:
    """`fire(name)` is called when a timer is due, at once for one that was due while there was no controller."""

    def __init__(self, now: Callable[[], float], fire: Callable[[str], None]) -> None:
        self._now = now
        self._fire = fire
        self._wanted: dict[str, float] = {}
        self._running: dict[str, asyncio.TimerHandle] = {}

    def want(self, action: SetTimer) -> None:
        """Take note; nothing runs yet."""
        if action.at is None:
            self._wanted.pop(action.timer, None)
        else:
            self._wanted[action.timer] = action.at

    def forget(self, timer: str) -> None:
        self._wanted.pop(timer, None)

    def arm(self, timer: str) -> None:
        """Let `timer` run as it is wanted now."""
        running = self._running.pop(timer, None)
        if running is not None:
            running.cancel()
        at = self._wanted.get(timer)
        if at is not None:
            delay_s = max(0.0, at - self._now())
            self._running[timer] = asyncio.get_running_loop().call_later(delay_s, self._due, timer)

    def arm_all(self) -> None:
        for timer in list(self._wanted):
            self.arm(timer)

    def stop(self) -> None:
        for handle in self._running.values():
            handle.cancel()
        self._running.clear()

    def _due(self, timer: str) -> None:
        del self._running[timer]
        self.forget(timer)
        self._fire(timer)
