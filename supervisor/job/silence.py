"""Silence that nothing proves to be a hang, and what earlier silences of the job turned out to be."""

from __future__ import annotations

import dataclasses

from diagnosis.hang.proof import describe
from diagnosis.incident import HangReport

TELL_S = 30.0
"""A silence is told on the terminal at once, unless its place has needed as long before or the run just begins; then
after this, and whenever it has lasted twice as long."""
PLACES_KEPT = 128
NEAR_STEPS = 1
"""Ranks are not seen at the very same moment: a step of the same number may be one off."""


@dataclasses.dataclass
class Silence:
    """Mutable; `Hangs` owns it. Times are Unix seconds."""

    attempt: int
    since: float
    report: HangReport
    tell_after_s: float = TELL_S
    loud: bool = False
    """It was reported on the user's terminal."""
    left: bool = False
    """A person was told that nothing more will be done about it."""

    def text(self, now: float) -> str:
        return describe(self.report, max(now - self.since, 0.0))


class Lessons:
    """What earlier silences turned out to be, by place. Kept over attempts; replaying the journal brings them back.

    `Hangs` owns them.
    """

    def __init__(self) -> None:
        self._needed_s: dict[str, float] = {}
        self._no_help: dict[tuple[str, int | None], int] = {}

    def was_honest(self, report: HangReport, seconds: float) -> None:
        """Progress came back by itself."""
        for place in report.places:
            self._needed_s[place] = round(max(seconds, self._needed_s.pop(place, 0.0)), 1)
        _forget_oldest(self._needed_s)

    def needed_s(self, report: HangReport) -> float:
        """The longest honest wait at this place; 0: there was none."""
        return max((self._needed_s.get(place, 0.0) for place in report.places), default=0.0)

    def restarted(self, report: HangReport) -> None:
        """A restart is ordered. If the next attempt stops at this place again, the restart did not help."""
        for place in _where(report):
            key = (place, report.step)
            self._no_help[key] = self._no_help.pop(key, 0) + 1
        _forget_oldest(self._no_help)

    def did_not_help(self, report: HangReport) -> int:
        """Restarts at this place and step."""
        step = report.step
        steps = [None] if step is None else range(step - NEAR_STEPS, step + NEAR_STEPS + 1)
        return max(sum(self._no_help.get((place, one), 0) for one in steps) for place in _where(report))


def _where(report: HangReport) -> tuple[str, ...]:
    """The places of a silence. For a proven hang, each place with what is proven: another proof is another problem."""
    if not report.proven:
        return report.places or ("",)
    return tuple(f"{report.kind}: {place}" for place in report.places or (report.place,))


def _forget_oldest(kept: dict[str, float] | dict[tuple[str, int | None], int]) -> None:
    while len(kept) > PLACES_KEPT:
        del kept[next(iter(kept))]  # type: ignore[arg-type]
