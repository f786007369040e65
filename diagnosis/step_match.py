"""Which step of the run it is, from the step clock's count and the steps that the output tells.

The output may tell every hundredth step, count batches where the optimizer steps once in four, or count what two
optimizers do in turn as one. Scaled losses may overflow, and skip the optimizer. A run that resumes counts on where it
was; the clock begins at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

LEAST: Final = 3
"""So many lines must have told a step."""
MOST_EACH: Final = 64
"""One step of the one is at most so many of the other."""
UNSURE: Final = 0.2
"""Of the way that was seen: what differs more has nothing to do with each other."""


class StepMatch(NamedTuple):
    """`counted` steps of the clock are `told` ones of the output; one of the two is 1."""

    counted: int
    told: int
    offset: int

    def step(self, count: int) -> int:
        """The run's step when the clock has counted so far."""
        return (count * self.told + self.offset) // self.counted


def match(pairs: Sequence[tuple[int, int]]) -> StepMatch | None:
    """`pairs`: (count of the clock, step of the output), oldest first, each count read after its line. None: they do
    not go together, or too little was seen.

    A count may be late, never early: of all offsets the greatest is the right one.
    """
    if len(pairs) < LEAST:
        return None
    counts, steps = pairs[-1][0] - pairs[0][0], pairs[-1][1] - pairs[0][1]
    if min(counts, steps) <= 0:
        return None
    counted, told = (round(counts / steps), 1) if counts >= steps else (1, round(steps / counts))
    offsets = [step * counted - count * told for count, step in pairs]
    if max(counted, told) > MOST_EACH or max(offsets) - min(offsets) > UNSURE * counts * told:
        return None
    return StepMatch(counted, told, max(offsets))
