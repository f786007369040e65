"""The clocks of several logs, aligned by what all of them saw: a step is made by all ranks at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from diagnosis.story import LogStory

_Timed = TypeVar("_Timed", bound=msgspec.Struct)

LEAST_SHARED: Final = 3
"""Steps that two logs must share for their clocks to be compared."""
NOISE_S: Final = 2.0
"""Steps are printed some time after they were made: smaller differences are no clock's fault."""


def offsets(stories: Sequence[LogStory]) -> dict[str, float]:
    """Source -> seconds its clock is ahead of the log with the most steps; 0 where nothing tells.

    A log without steps (the kernel's) has the clock of its node.
    """
    seen = {story.source: _steps(story) for story in stories}
    reference = max(seen.values(), key=len, default={})
    found: dict[str, float] = {}
    for source, steps in seen.items():
        shared = [steps[step] - reference[step] for step in steps.keys() & reference.keys()]
        if len(shared) >= LEAST_SHARED:
            ahead = statistics.median(shared)
            found[source] = ahead if abs(ahead) > NOISE_S else 0.0
    by_node = {story.node: found[story.source] for story in stories if story.node and story.source in found}
    return {story.source: found.get(story.source, by_node.get(story.node, 0.0)) for story in stories}


def _steps(story: LogStory) -> dict[int, float]:
    return {
        point.step: point.at
        for curve in story.curves
        for point in curve.points
        if point.step is not None and point.at is not None
    }


def aligned(stories: Sequence[LogStory]) -> list[LogStory]:
    """The stories with all times on one clock."""
    ahead = offsets(stories)
    return [_shifted(story, ahead[story.source]) if ahead[story.source] else story for story in stories]


def _shifted(story: LogStory, ahead: float) -> LogStory:
    return msgspec.structs.replace(
        story,
        matches=tuple(_back(one, ahead) for one in story.matches),
        tracebacks=tuple(_back(one, ahead) for one in story.tracebacks),
        events=tuple(_back(one, ahead) for one in story.events),
    )


def _back(one: _Timed, seconds: float) -> _Timed:
    at = getattr(one, "at", None)
    return one if at is None else msgspec.structs.replace(one, at=at - seconds)
