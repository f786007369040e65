"""What every part of the job reads (`Core`), and what a part wants done that no part below it can do (`Want`).

A part changes only its own fields. It calls the parts that it was given; each of them is made before it, so calls go
one way. What it wants of the job, or of a part that is made after it, it yields as a want. `Job.handle` carries out
each want, with all that it leads to, before the part goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Literal, TypeAlias, TypeVar

import msgspec

from diagnosis.incident import HangReport
from diagnosis.signals import Finding
from recovery.group_tests import PairConclusion
from recovery.policy import Mode
from supervisor.messages import (
    JobSpec,
    LauncherEnded,
    LedgerWrite,
    Note,
    OperatorCommand,
    Outcome,
    SchedulerComment,
    SchedulerRequest,
)
from supervisor.view import JobStateName

LOCAL = "local"
"""The scheduler of jobs that have none."""

FAILURE_GRACE_S = 5.0
"""After a failure nothing is left to be saved; a stop on request gets `STOP_GRACE_S`."""
STOP_GRACE_S = 30.0
"""For the workers of a job that is stopped on request."""
EARLY_S = 0.001
"""A timer may fire so much early."""

Trigger = Literal["exit", "hang", "node_lost", "launcher", "signal", "setup", "device", "loss", "replicas", "swap"]
"""How an incident began. `signal` (numbers) and `device` stop nothing: the attempt goes on. `loss`, `replicas`:
a guard acts. `swap`: a node leaves as it was planned."""

TimerName = Literal[
    "again", "backoff", "degraded", "device", "end", "evidence", "finish", "form", "gather", "hold", "last_orders",
    "nodes", "orders", "requeue", "settle", "silence", "stacks", "start", "step_end", "stood",
    "tests", "tiers",
]  # fmt: skip
"""`Job` says what each is for, in its table of timers."""


@dataclasses.dataclass
class Core:
    """Times are Unix seconds. `Job` changes it; `Operator` changes mode, pause and stop signal."""

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
    grace_s: float = STOP_GRACE_S
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


# ----- wants -----


class Want(msgspec.Struct, frozen=True):
    """Base of all."""


AnyWant: TypeAlias = Want | Note | SchedulerRequest | SchedulerComment | LedgerWrite
"""Notes, what the scheduler is asked, and records for the ledger are wants, too: they leave as they are."""
Wants: TypeAlias = Iterator[AnyWant]
T = TypeVar("T")
WantsAnd: TypeAlias = Generator[AnyWant, None, T]
"""Wants, and then an answer for the caller."""


class Enter(Want, frozen=True):
    """Change the state. Raises InvalidTransition."""

    state: JobStateName


class Timer(Want, frozen=True):
    """`at`: Unix seconds. Replaces a timer of this name."""

    name: TimerName
    at: float


class Cancel(Want, frozen=True):
    names: tuple[TimerName, ...]


def cancel(*names: TimerName) -> Cancel:
    return Cancel(names)


class EndJob(Want, frozen=True):
    """The job has ended: every node is told, and the controller goes when all are done."""

    outcome: Outcome
    why: str = ""
    """What is told; empty: the outcome's line."""
    grace_s: float = FAILURE_GRACE_S


class ReplaceOutcome(Want, frozen=True):
    """Only the words, or the state, of an end that has been told: the scheduler has answered."""

    outcome: Outcome


class LetControllerGo(Want, frozen=True):
    """Nobody is waited for any more."""


class Form(Want, frozen=True):
    """A new attempt: no worker of an older one may live from now on."""

    members: tuple[str, ...]


class Proceed(Want, frozen=True):
    """Start the next attempt, if nothing stands in its way."""

    by_operator: bool = False


class RefreshAndProceed(Want, frozen=True):
    """Nodes changed: bring the attempt that is being formed up to date, and start it if that is possible now."""


class NextAttempt(Want, frozen=True):
    """End what is left of the current attempt and start the next, after `delay_s`."""

    delay_s: float = 0.0
    by_operator: bool = False


class ProgressMade(Want, frozen=True):
    """The run got further than ever before."""


class OpenIncident(Want, frozen=True):
    """Something broke the current attempt. One incident takes all that belongs together."""

    trigger: Trigger
    text: str
    failed_at: float
    node: str = ""
    """Of a rank that ended badly."""
    nodes: tuple[str, ...] = ()
    """Those that were lost."""
    launcher: LauncherEnded | None = None
    hang: HangReport | None = None
    quiet: bool = False
    """The terminal shows already what is wrong."""


class Mark(Want, frozen=True):
    """A phase of the recovery has ended."""

    phase: str


class Recovered(Want, frozen=True):
    """The attempt does what it should: what it was restarted for is closed."""

    text: str


class CloseFailures(Want, frozen=True):
    text: str


class GoOn(Want, frozen=True):
    """The active incident, if there is one, was a false alarm: the attempt goes on."""

    text: str


class ProposeSwap(Want, frozen=True):
    """A device has failed, and its ranks train on: its node should leave at a checkpoint."""

    finding: Finding
    node: str
    """Whose agent has found it."""


class SuspectsTested(Want, frozen=True):
    """The active tests of an incident's suspects are over."""

    incident: str
    suspects: tuple[str, ...]
    partners: tuple[str, ...]
    took_s: float
    conclusion: PairConclusion | None
    """None: no test was made."""
    unknown: str = ""
    """Why not, or why no more of them were, in words."""


class RanksSaved(Want, frozen=True):
    """Asked for a checkpoint, the ranks have saved and ended."""


class Hold(Want, frozen=True):
    """An operator has to say how to go on."""

    why: str
