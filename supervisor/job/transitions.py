"""Which state of a job may follow which (docs/architecture.md has it in words).

`Job` sets the state past this table in three places, where no step of the job happens but its past changes: a scheduler
has started it again (`_job_requeued`), an attempt is forgotten (`_forget_attempt`) or adopted (`_begin_adopted`).
"""

from __future__ import annotations

from collections.abc import Iterable

from supervisor.messages import AnyEvent
from supervisor.view import JobStateName, StoryLine

TRANSITIONS: dict[JobStateName, frozenset[JobStateName]] = {
    "IDLE": frozenset({"STARTING", "FAILED", "STOPPED"}),
    "STARTING": frozenset({"RUNNING", "DIAGNOSING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "RUNNING": frozenset({"DIAGNOSING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "DIAGNOSING": frozenset({"RUNNING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "RECOVERING": frozenset({"STARTING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "SUCCEEDED": frozenset(),
    "FAILED": frozenset(),
    "STOPPED": frozenset(),
}


class InvalidTransition(Exception):
    """The job was about to do what its table does not allow: a defect of ours. Its text tells the story so far."""

    def __init__(self, before: JobStateName, after: JobStateName, event: AnyEvent, story: Iterable[StoryLine]) -> None:
        self.before, self.after = before, after
        lines = "".join(f"\n  {line.at:%H:%M:%S} {line.text}" for line in list(story)[-10:])
        super().__init__(f"{before} -> {after} on {event!r}; before that:{lines}")
