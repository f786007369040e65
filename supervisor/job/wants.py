"""What a part of the job wants done that is not its own to do.

A part changes only its own fields. For all else its methods yield wants; `Job.handle` carries out each one, with what
it leads to, before the part goes on. A part may ask other parts anything (queries change nothing).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from diagnosis.incident import HangReport
from diagnosis.signals import Finding, NodeEvidence
from recovery.cordon import Cordon
from recovery.policy import Mode
from supervisor.job.core import TimerName, Trigger
from supervisor.messages import (
    LauncherEnded,
    Note,
    OperatorCommand,
    Outcome,
    SchedulerComment,
    SchedulerRequest,
    WorkersStarted,
)
from supervisor.view import JobStateName

if TYPE_CHECKING:
    from supervisor.job.incidents import IncidentRecord


class Want(msgspec.Struct, frozen=True):
    """Base of all."""


Wants: TypeAlias = Iterator[Want | Note]
T = TypeVar("T")
WantsAnd: TypeAlias = Generator[Want | Note, None, T]
"""Wants, and then an answer for the caller within the same part."""

FAILURE_GRACE_S = 5.0
"""After a failure nothing is left to be saved; a stop on request gets `STOP_GRACE_S`."""
STOP_GRACE_S = 30.0
"""For the workers of a job that is stopped on request."""


# ----- what the job itself does -----


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


class Send(Want, frozen=True):
    """Have the scheduler told."""

    action: SchedulerRequest | SchedulerComment


class Reassign(Want, frozen=True):
    """Work out the assignments of these nodes again."""

    nodes: tuple[str, ...]


class ReassignAll(Want, frozen=True):
    """Work out every assignment again."""


class ReassignMembers(Want, frozen=True):
    """As `ReassignAll`, where these members were exchanged and nothing else has changed."""

    nodes: tuple[str, ...]


class Pause(Want, frozen=True):
    command: OperatorCommand


class ResumeJob(Want, frozen=True):
    """Neither paused nor held any more."""


class SetMode(Want, frozen=True):
    mode: Mode


class EndJob(Want, frozen=True):
    """The job has ended: every node is told, and the controller goes when all are done."""

    outcome: Outcome
    note: Note
    grace_s: float = FAILURE_GRACE_S


class StopJob(Want, frozen=True):
    """Somebody asked for it. `signal`: what the workers get."""

    signal: str
    line: str


class ReplaceOutcome(Want, frozen=True):
    """Only the words, or the state, of an end that has been told: the scheduler has answered."""

    outcome: Outcome


class LetControllerGo(Want, frozen=True):
    """Nobody is waited for any more."""


class Leave(Want, frozen=True):
    """Let the controller go as soon as nobody is waited for."""

    even_so: bool = False
    """Whoever has not answered."""


# ----- attempts -----


class Form(Want, frozen=True):
    """A new attempt: no worker of an older one may live from now on."""

    members: tuple[str, ...]


class Refresh(Want, frozen=True):
    """Checkpoints or nodes changed while an attempt is being formed."""


class Proceed(Want, frozen=True):
    """Start the next attempt, if nothing stands in its way."""

    by_operator: bool = False


class RefreshAndProceed(Want, frozen=True):
    """Nodes changed: bring the attempt that is being formed up to date, and start it if that is possible now."""


class NextAttempt(Want, frozen=True):
    """End what is left of the current attempt and start the next, after `delay_s`."""

    delay_s: float = 0.0
    by_operator: bool = False


class CountRestart(Want, frozen=True):
    """One more for the counter."""


class AttemptBegins(Want, frozen=True):
    """The attempt that was formed is given out."""

    number: int


class StepsSeen(Want, frozen=True):
    """Evidence may tell a later step than the newest heartbeat."""

    evidence: NodeEvidence


class ForgetAttempt(Want, frozen=True):
    """The journal has lost how it went on: nodes are left as they are until they have told what they have."""

    why: str


class AttemptsBeen(Want, frozen=True):
    """Attempts up to this number have been: the journal may have lost some."""

    number: int


class BeginAdopted(Want, frozen=True):
    """Ranks of an attempt run of which the journal does not tell: it goes on as it is."""

    number: int


class AdoptRanks(Want, frozen=True):
    event: WorkersStarted


class ActAgain(Want, frozen=True):
    """The job need not be paused any more: nothing can have been lost."""


class ProgressMade(Want, frozen=True):
    """The run got further than ever before."""


# ----- incidents -----


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


class OpenWithPlan(Want, frozen=True):
    """An incident that stops nothing: it is diagnosed at once, and nothing more is done. `IncidentLog.newest` then."""

    trigger: Trigger
    text: str
    failed_at: float
    why: str
    """Why nothing is done."""
    then: Literal["degraded", "left_to_people", "cured"]
    """It lasts and the run goes on; it lasts until somebody acts; what it needed is done already."""
    hang: HangReport | None = None
    further: int = 0
    """Failures of the same kind that it takes along."""


class DegradedFurther(Want, frozen=True):
    """More of the same within an open incident that stops nothing."""

    record: IncidentRecord
    count: int
    text: str


class TakeStacks(Want, frozen=True):
    """Of all members, those with these ranks first."""

    ranks: tuple[int, ...]


class AskForEvidence(Want, frozen=True):
    """The number of the request is `Nodes.request_number` afterwards."""

    nodes: tuple[str, ...]
    budget_s: float
    flight: bool = False


class AddFinding(Want, frozen=True):
    """To be looked at when something fails near its time."""

    finding: Finding


class Mark(Want, frozen=True):
    """A phase of the recovery has ended."""

    phase: str


class Recovered(Want, frozen=True):
    """The attempt does what it should: what it was restarted for is closed."""

    text: str


class Close(Want, frozen=True):
    record: IncidentRecord
    text: str
    loud: bool = False


class CloseFailures(Want, frozen=True):
    text: str


class GoOn(Want, frozen=True):
    """The active incident, if there is one, was a false alarm: the attempt goes on."""

    text: str


class Hold(Want, frozen=True):
    """An operator has to say how to go on."""

    why: str


class WaitForOperator(Want, frozen=True):
    """From now on, for as long as a hold may last."""


class RestartByOperator(Want, frozen=True):
    """An operator restarts the run, whatever the diagnosis would say."""


class CarryOut(Want, frozen=True):
    """An operator's word lets the plan of the active incident be carried out."""

    by_operator: bool = False


class RejectPlan(Want, frozen=True):
    why: str


class Reevaluate(Want, frozen=True):
    """An operator lets policy act again: evidence that came meanwhile may want another plan."""


class HangRestarted(Want, frozen=True):
    """A restart is ordered because of this hang."""

    report: HangReport


# ----- nodes, disks, checkpoints -----


class ContinueRanks(Want, frozen=True):
    """Have stopped ranks continued with SIGCONT."""

    ranks: tuple[int, ...]


class LeaveStopped(Want, frozen=True):
    """These ranks are stopped, and not to be continued now."""

    attempt: int
    ranks: tuple[int, ...]


class ForgetStopped(Want, frozen=True):
    """Progress is back: no rank is left stopped."""


class WaitForSpace(Want, frozen=True):
    """Nothing is prepared, moved or started before disks have room."""

    folders: tuple[str, ...]
    """Where something could not be written."""


class EndWaitForSpace(Want, frozen=True):
    """An operator starts the next attempt although there may be no room."""


class SuspectFrom(Want, frozen=True):
    """Checkpoints that are written from `at` on are suspect."""

    at: float
    step: int | None


class TrustAgain(Want, frozen=True):
    """Checkpoints that are written from now on are as good as before."""


# ----- the scheduler -----


class AddCordon(Want, frozen=True):
    """Leave a node out from now on, and have the scheduler drain it. `approved`: by an operator's own word."""

    cordon: Cordon
    approved: bool = False


class LiftCordon(Want, frozen=True):
    """An operator's word about a node, or about one GPU's cordon of it."""

    name: str
    gpu: str


class Comment(Want, frozen=True):
    """Put it into the scheduler's record of the job, too."""

    text: str


class StartBreakerAnew(Want, frozen=True):
    """An operator lets policy cordon again."""


class EndRequeued(Want, frozen=True):
    """The scheduler starts the job again."""

    how: str = ""
    """As it says."""


class LookWhetherAgain(Want, frozen=True):
    """A signal that ends the job may be the scheduler's way to start it again."""


class ShortOfNodes(Want, frozen=True):
    """Only `found` can be used."""

    found: int


class ApproveRequeue(Want, frozen=True):
    approved: bool


class TakeBackRequeue(Want, frozen=True):
    """An operator stops a job that is being started again: cancel it, so that it does not come back."""
