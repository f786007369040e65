"""Which ranks wait for data, and for how much of their time: told, never acted on.

By the step clock's share of each rank (`RankClock.input_share`). A rank that waits for data holds all others up, so the
one that waits longest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from diagnosis.signals import RankSample

LOOK_S: Final = 30.0
MUCH, LITTLE = 0.2, 0.1
"""Shares of the time: from the one on it is told, below the other it is over."""
AGREE: Final = 3
"""So many looks in a row must agree."""
CHANGED: Final = 0.2
"""It is told again when the share differs by so much."""
NAMED: Final = 16


class InputWait(NamedTuple):
    """Ranks that wait for data; none: not any more."""

    share: float = 0.0
    """Of the time of the rank that waits longest."""
    ranks: tuple[int, ...] = ()
    """Those that wait at least half as long; at most 16."""
    many: int = 0
    """How many these are."""
    since: float = 0.0


class InputWatch:
    """Watches one attempt at a time."""

    def __init__(self) -> None:
        self.start(0.0)

    def start(self, now: float) -> None:
        """A new attempt."""
        self._shares: dict[int, float] = {}
        self._looked_at = self._since = now
        self._agreed = 0
        self._told = InputWait()

    def observe(self, samples: Iterable[RankSample]) -> None:
        """The ranks of one heartbeat."""
        for sample in samples:
            if sample.clock is not None and sample.clock.input_share is not None and sample.exit is None:
                self._shares[sample.rank] = sample.clock.input_share
            else:
                self._shares.pop(sample.rank, None)

    def tick(self, now: float) -> InputWait | None:
        """A change."""
        if now - self._looked_at < LOOK_S:
            return None
        looked_at, self._looked_at = self._looked_at, now
        worst = max(self._shares.values(), default=0.0)
        over = bool(self._told.ranks) and worst < LITTLE
        other = worst >= MUCH and abs(worst - self._told.share) >= CHANGED
        if not (over or other):
            self._agreed = 0
            return None
        self._since = looked_at if self._agreed == 0 else self._since
        self._agreed += 1
        if self._agreed < AGREE:
            return None
        self._agreed = 0
        ranks = sorted(rank for rank, share in self._shares.items() if share >= worst / 2)
        since = self._told.since if self._told.ranks else self._since
        self._told = InputWait() if over else InputWait(worst, tuple(ranks[:NAMED]), len(ranks), since)
        return self._told
