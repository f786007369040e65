"""What every part of the job reads, and only `Job` changes: the state, the clock, the spec, who is in charge."""

from __future__ import annotations

import dataclasses
from typing import Literal

from recovery.policy import Mode
from supervisor.messages import JobSpec, OperatorCommand, Outcome
from supervisor.view import JobStateName

LOCAL = "local"
"""The scheduler of jobs that have none."""

EARLY_S = 0.001
"""A timer may fire so much early."""

Trigger = Literal["exit", "hang", "node_lost", "launcher", "signal", "setup", "device"]
"""How an incident began. `signal` (numbers) and `device` stop nothing: the attempt goes on."""

TimerName = Literal[
    "again",  # a hang that was left alone is examined again
    "backoff",  # the pause before the next attempt is over
    "degraded",  # no device has failed for so long that the attempt counts as healthy
    "device",  # device failures of one moment become one incident
    "end",  # the end of the job waits for no node any more
    "evidence",  # an incident is diagnosed without the evidence that is missing
    "finish",  # launchers did not end although every rank did
    "form",  # not all launchers came to rendezvous
    "gather",  # the job starts with fewer nodes than it may have
    "hold",  # no operator decided
    "last_orders",  # the end of the job waits for no scheduler any more
    "nodes",  # too few nodes came
    "orders",  # a scheduler request is due
    "requeue",  # no lost node came back: the scheduler is asked to start the job again
    "settle",  # the attempt has run for so long that incidents close without a step
    "silence",  # no progress for so long that it is told again, or acted on
    "stacks",  # stacks are collected again during a suspected hang
    "start",  # not all workers were started
    "step_end",  # the scheduler is asked to end the step
    "stood",  # workers have stood for so long that the attempt counts as running
]


@dataclasses.dataclass
class Core:
    """Times are Unix seconds."""

    state: JobStateName = "IDLE"
    spec: JobSpec = dataclasses.field(default_factory=lambda: JobSpec(name=""))
    now: float = 0.0
    """The time of the newest event."""
    previous_event_at: float = 0.0
    epoch: int = 0
    mode: Mode = "enforce"
    pause: OperatorCommand | None = None
    """The operator's command that holds now; None: not paused."""
    defined_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    grace_s: float = 30.0
    """What workers get to end by themselves."""
    stop_signal: str = "SIGTERM"
    controller_may_go: bool = False
    """`End` was given out."""
    timers: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def paused(self) -> bool:
        return self.pause is not None

    @property
    def is_over(self) -> bool:
        return self.outcome is not None

    @property
    def has_scheduler(self) -> bool:
        return self.spec.scheduler != LOCAL
