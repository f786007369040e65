"""When the probes of a station look: together, and then one after the other.

A process that sleeps for long finds cold caches when it wakes up, which takes more than most looks do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final

BEAT_S: Final = 5.0
"""Looks that are rare enough are due at multiples of this, from a moment that is the station's own: not all nodes look
at one time."""
TURN_S: Final = 0.2
"""So long a look waits for the one before it, which may never return."""


def part() -> float:
    """Somewhere in [0, 1)."""
    return os.urandom(1)[0] / 256


class Turns:
    def __init__(self) -> None:
        self._phase = part() * BEAT_S
        self._lock = threading.Lock()

    def due(self, after: float, every_s: float) -> float:
        """Monotonic time of the look that follows one which ended at `after`."""
        if every_s < 2 * BEAT_S:
            return after + every_s * (0.9 + 0.2 * part())
        return self._phase + round((after + every_s - self._phase) / BEAT_S) * BEAT_S

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """While it is one's turn: threads that look at the same time wait for each other at every call."""
        mine = self._lock.acquire(timeout=TURN_S)
        try:
            yield
        finally:
            if mine:
                self._lock.release()
