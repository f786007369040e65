"""How long honest silence lasts in this job, by phase: what the limits of the hang watch come from."""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

Phase = Literal["start", "first", "steady", "checkpoint", "evaluation", "data", "end"]

SUSPECT_FLOOR_S: Final[dict[Phase, float]] = {"start": 30.0, "first": 10.0}
"""Before the first step minutes may pass honestly; a stopped rank is seen by its state then too."""
STEADY_FLOOR_S: Final = 1.8
"""Beacon, agent and heartbeat add up to a second each way: this is under 3 s after the fault."""
SUSPECT_FACTOR: Final = 5.0
GRANULARITY_S: Final = 1.0
"""By how much the age of a sample overstates a gap (the beacon's period and the agent's)."""
RECENT: Final = 50
OUTLIER_FACTOR: Final = 12.0
"""A gap that much longer than usual was a pause, not a step ..."""
RECURS: Final = 3
"""... unless there are so many of them: a step may be many quick collectives and one long computation."""
LIMIT_FLOOR_S: Final = 600.0
END_LIMIT_FLOOR_S: Final = 120.0
LIMIT_FACTOR: Final = 10.0
LEARN_FROM_S: Final = 2.5
SETTLED_GAPS: Final = 5


class Pace:
    """Recent gaps between signs of progress. `longest_s`: the longest honest pause by phase, over attempts."""

    def __init__(self, longest_s: dict[str, float] | None = None) -> None:
        self.longest_s: dict[str, float] = dict(longest_s or {})
        self.restart()

    def restart(self) -> None:
        """A new attempt: its gaps may differ, what was learned of pauses stays."""
        self._gaps: dict[str, deque[float]] = {}
        self._slowest: dict[str, float] = {}

    def note_gap(self, phase: Phase, seconds: float) -> None:
        """An honest gap, as the oldest age seen within it."""
        gap = max(0.0, seconds - GRANULARITY_S)
        gaps = self._gaps.setdefault(phase, deque(maxlen=RECENT))
        gaps.append(gap)
        ordered = sorted(gaps)  # at most 50
        usual = ordered[len(ordered) // 2] + GRANULARITY_S
        far = sum(one > OUTLIER_FACTOR * usual for one in ordered)
        if far >= RECURS:
            self._slowest[phase] = ordered[-1]
        else:
            self._slowest[phase] = next(one for one in reversed(ordered) if one <= OUTLIER_FACTOR * usual)

    def settled(self, phase: Phase) -> bool:
        """Enough gaps of the phase were seen to know its pace."""
        return phase in ("steady", "end") and sum(map(len, self._gaps.values())) >= SETTLED_GAPS

    def suspect_limit_s(self, phase: Phase) -> float:
        """Quiet seconds after which a hang is suspected."""
        slowest = self._slowest.get(phase, 0.0)
        if phase == "end":
            slowest = max(slowest, self._slowest.get("steady", 0.0))
        elif phase == "steady" and len(self._gaps.get(phase, ())) < SETTLED_GAPS:
            slowest = max(slowest, self._slowest.get("first", 0.0))
        return max(SUSPECT_FLOOR_S.get(phase, STEADY_FLOOR_S), SUSPECT_FACTOR * slowest)

    def phase_limit_s(self, phase: Phase) -> float:
        """Quiet seconds after which a phase counts as hung when nothing else is known."""
        floor = END_LIMIT_FLOOR_S if phase == "end" else LIMIT_FLOOR_S
        return max(floor, LIMIT_FACTOR * self.longest_s.get(phase, 0.0))

    def learn(self, phase: str, pause_s: float) -> bool:
        """An honest pause has ended; True when it is notably longer than any before."""
        if pause_s <= 1.2 * self.longest_s.get(phase, LEARN_FROM_S):
            return False
        self.longest_s[phase] = round(pause_s, 2)
        return True
