"""What people and programs are shown of a job: `Job.view()`, the `--json` of `unbroken status` and `incidents`.

Times are UTC datetimes (RFC 3339 in JSON), durations seconds. A field that is not known is None or empty.
"""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec

from diagnosis.incident import Opinion, Verdict, WaitGraph
from diagnosis.signals import Frozen
from recovery.checkpoint import Judgement, RankLayout, Resume
from recovery.incident_memory import Correction, Recurrence
from recovery.ledger import TestResult
from recovery.policy import Mode, Plan
from recovery.swaps import Cause
from recovery.tiers import Tier
from supervisor.messages import Outcome, OutsideAlert, Stage, SuiteName
from supervisor.node_diff import Difference

PHASES = ("detect", "diagnose", "decide", "stop", "rendezvous", "start", "first_step")
"""The phases of a recovery. `detect`: failure to incident; `diagnose`: to the verdict; `decide`: to the assignments for
the next attempt (back-off, tests of suspects, nodes and approval are waited for here); `stop`: until the first launcher
is back in rendezvous; `rendezvous`: until all are; `start`: until all workers have started; `first_step`: until the
first step."""

JobStateName = Literal["IDLE", "STARTING", "RUNNING", "DIAGNOSING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"]
"""STOPPED: somebody asked for it (an operator, a signal, the scheduler): no failure."""
NodeStateName = Literal["ACTIVE", "SPARE", "SUSPECT", "CORDONED", "LOST"]


def utc(at: float) -> datetime.datetime:
    """Unix seconds as a UTC datetime."""
    return datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc)


def rfc3339(at: datetime.datetime | float) -> str:
    """`2026-01-31T12:00:00.123Z`."""
    if not isinstance(at, datetime.datetime):
        at = datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class NodeView(Frozen, frozen=True, kw_only=True):
    node: str
    host: str
    address: str
    state: NodeStateName
    spare: bool = False
    """Registered as a spare (it may have become a member since)."""
    ranks: tuple[int, ...] = ()
    """Of the current attempt."""
    why: str = ""
    """Why it is suspect, cordoned or lost."""
    clock_offset_s: float | None = None
    """Its clock minus the controller's; only a live controller knows it."""


class SuspectTestsView(Frozen, frozen=True, kw_only=True):
    """Active tests of the nodes that a verdict suspects, before the next attempt."""

    suspects: tuple[str, ...]
    partners: tuple[str, ...] = ()
    """At most 16 of them."""
    rounds: int = 0
    took_s: float | None = None
    """None: they are under way."""
    failed: dict[str, str] = {}
    """Node -> how, with which two partners that do well with others."""
    passed: tuple[str, ...] = ()
    between: tuple[tuple[str, ...], ...] = ()
    """Who does well with others, and fails together."""
    unknown: str = ""
    """Why nobody could be named, in words."""
    text: str = ""
    """All of it, in words."""


class IncidentView(Frozen, frozen=True, kw_only=True):
    id: str
    trigger: str
    attempt: int
    opened_at: datetime.datetime
    closed_at: datetime.datetime | None = None
    closed_why: str = ""
    what: str = ""
    """What was seen first, in a sentence."""
    step: int | None = None
    verdict: Verdict | None = None
    plan: Plan | None = None
    revised: str = ""
    """Verdict and plan before evidence that came late changed them, in words."""
    tests: SuspectTestsView | msgspec.UnsetType = msgspec.UNSET
    """Only where suspects were tested."""
    next_attempt: int | None = None
    seconds: dict[str, float] = {}
    """Phase (`PHASES`) -> seconds; phases not reached are absent."""
    lost_s: float = 0.0
    """Down time plus the estimated time of the steps that are done again."""
    folders: tuple[str, ...] = ()
    """`node:folder` where agents kept the whole evidence."""
    opinion: Opinion | None = None
    """A language model's, beside the verdict."""
    opinions: int = 0
    """How many came, failed tries included; of those that say something the newest is kept."""
    opinion_failed: Opinion | None = None
    """A later try that gave none, and why (`problem`)."""
    opinion_wanted: bool = False
    """A model is asked and has not answered."""
    recurrences: tuple[Recurrence, ...] | msgspec.UnsetType = msgspec.UNSET
    """What it has in common with earlier incidents (docs/incident-memory.md); only where there are any."""
    corrections: tuple[Correction, ...] | msgspec.UnsetType = msgspec.UNSET
    """What operators say that it was, the newest last; only where there are any."""
    waits: WaitGraph | msgspec.UnsetType = msgspec.UNSET
    """Of a hang: who waits for whom; only where somebody does."""
    alerts: tuple[OutsideAlert, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of others' monitoring, that fired beside it; only where there are any."""


class HoldView(Frozen, frozen=True, kw_only=True):
    """The job waits for an operator: it is held, or a plan waits for approval."""

    at: datetime.datetime
    """Since when."""
    ends_at: datetime.datetime | None
    """When that ends the job; None: it does not."""
    why: str
    """Why it is held; empty: a plan waits for approval."""
    approves: str = ""
    """What `approve` is given to approve this very plan; empty: none waits."""


class CordonView(Frozen, frozen=True, kw_only=True):
    node: str
    gpu: str = ""
    reason: str
    by: str
    failure_class: str = ""
    incident: str = ""
    at: datetime.datetime
    until: datetime.datetime | None = None
    scheduler: str = ""
    """What became of the request for a drain: `asked for`, `drained`, `not drained: why`; empty: there was none."""
    scope: Literal["cluster"] | msgspec.UnsetType = msgspec.UNSET
    """Only where the ledger of all jobs says so, and not this job."""


class BreakerView(Frozen, frozen=True, kw_only=True):
    """The circuit breaker: how many nodes policy may take out of use within an hour."""

    used: int
    """Nodes that policy cordoned within the last hour."""
    limit: int
    tripped: bool
    """The job is held because policy wanted to cordon more; `unbroken resume` starts the count from zero."""


class CheckpointView(Frozen, frozen=True, kw_only=True):
    path: str
    step: int | None
    format: str
    complete: bool
    why: str = ""
    modified_at: datetime.datetime
    size_bytes: int = 0
    suspect: bool = False
    verdict: Judgement = "whole"
    where: tuple[str, ...] = ()
    """`in place`: where the script looks; `copy`: a safe copy of ours. With `--publish-to`: `local`, `mirrored`,
    `published`, where all of it is."""
    copy_of: str = ""
    """For a safe copy: the file it was copied from."""
    layout: RankLayout | None = None
    """Over how many ranks it is spread, as far as it tells."""


class RestartView(Frozen, frozen=True, kw_only=True):
    """What a restart would do now."""

    path: str
    """What it would resume from; empty: from the beginning, or the script decides (`why`)."""
    step: int | None
    loses_steps: int | None
    """Steps that would be made again; None where one of the two steps is not known."""
    loses_s: float | None
    """Seconds since that checkpoint was written; without one, since the attempt began."""
    why: str = ""
    from_memory: bool = False
    """It would start from a newer snapshot in memory, of that `step`; `path` is empty."""
    after_node_loss: RestartView | None = None
    """The same if a node were lost, with what only its memory has, and with `--publish-to` what only its disk has.
    None: that makes no difference."""


class TierView(Frozen, frozen=True, kw_only=True):
    """The newest checkpoint of which all is in this tier."""

    tier: Tier
    path: str
    step: int | None
    modified_at: datetime.datetime


class SnapshotMirrorView(Frozen, frozen=True, kw_only=True):
    """A snapshot in memory that the loss of one node leaves."""

    attempt: int
    step: int
    ranks: int
    at: datetime.datetime
    """When it was written."""


class LeftView(Frozen, frozen=True, kw_only=True):
    """Mirrors that other jobs have left on a node's disk: this one does not use them, and does not remove them."""

    node: str
    path: str
    jobs: int
    size_bytes: int


class BudgetView(Frozen, frozen=True, kw_only=True):
    max_restarts: int
    used: int
    """Restarts since the last progress."""
    in_window: int
    """Restarts within the last hour."""
    next_delay_s: float | None
    """Back-off before the next restart; None when the budget is spent."""


class PauseView(Frozen, frozen=True, kw_only=True):
    """The operator's pause that holds now."""

    at: datetime.datetime
    by: str
    reason: str


class StoryLine(Frozen, frozen=True, kw_only=True):
    """One line of the job's story (`unbroken timeline`)."""

    at: datetime.datetime
    text: str
    incident: str = ""
    loud: bool = False


class StragglersView(Frozen, frozen=True, kw_only=True):
    ranks: tuple[int, ...]
    cost_percent: float
    """Of every step: so much less time it would take without them."""
    since: datetime.datetime
    text: str
    """In words."""


class InputWaitView(Frozen, frozen=True, kw_only=True):
    ranks: tuple[int, ...]
    """At most 16 of them."""
    share_percent: float
    """Of the time of the rank that waits longest."""
    since: datetime.datetime
    text: str
    """In words."""


class SilenceView(Frozen, frozen=True, kw_only=True):
    """No progress, and nothing proves a hang."""

    since: datetime.datetime
    ranks: tuple[int, ...]
    """Those that the others wait for, or all."""
    place: str
    """Where the first of them is."""
    waiting: int
    acts_at: datetime.datetime | None
    """When the job restarts for it; None: it does not."""
    text: str
    """In words."""


class SwapView(Frozen, frozen=True, kw_only=True):
    """A node that should leave at a checkpoint."""

    node: str
    state: Literal["planned", "recommended", "blocked"]
    """`planned`: it leaves at the next checkpoint; `recommended`: `unbroken swap` or `approve` decides; `blocked`: it
    cannot leave now (`because`)."""
    cause: Cause
    why: str
    because: str = ""
    since: datetime.datetime
    about: datetime.datetime | None = None
    """About when the next checkpoint is complete."""
    cost_s: float | None = None
    """What a swap takes."""
    share_percent: float | None = None
    """What the node costs of each step, where that is known."""
    asked_by: str = ""
    text: str = ""
    """In words."""


class NodeTestsView(Frozen, frozen=True, kw_only=True):
    """Active tests that a node makes, or has made, by itself (`unbroken qualify`)."""

    node: str
    suite: SuiteName
    by: str
    running: bool
    problem: str = ""
    """Why they were not made, or not to the end, in words."""
    results: tuple[TestResult, ...] = ()


class HungView(Frozen, frozen=True, kw_only=True):
    """A diagnosed hang that lasts and that nobody acts on."""

    since: datetime.datetime
    incident: str
    ranks: tuple[int, ...]
    proven: bool
    text: str


class CurvePoint(Frozen, frozen=True, kw_only=True):
    at: datetime.datetime
    attempt: int
    step: int | None
    loss: float | None
    """None: none was told since the point before."""


class CurveMark(Frozen, frozen=True, kw_only=True):
    at: datetime.datetime
    kind: str
    """`attempt`: another one goes on; `back`: the same, from an earlier step; `nan`, `spike`, `divergence`: what is
    wrong with the loss from then on; `well`: nothing any more."""
    step: int | None
    text: str
    """In words."""


class CurveView(Frozen, frozen=True, kw_only=True):
    """Steps and loss of the whole job."""

    points: tuple[CurvePoint, ...]
    """Oldest first, at most 720: of a long job the lowest and highest losses stay."""
    marks: tuple[CurveMark, ...]
    """At most the newest 200."""


class JobView(Frozen, frozen=True, kw_only=True, omit_defaults=False):
    schema: int = 1
    name: str
    state: JobStateName | Literal["REQUEUED", "HUNG"]
    """REQUEUED: it has ended here as FAILED does, and the scheduler starts it again. HUNG: the ranks of a RUNNING job
    hang, that is diagnosed, and nobody acts on it (mode observe, or a restart did not help)."""
    paused: bool
    pause: PauseView | None
    """Since when, by whom and why it is paused."""
    hold: HoldView | None
    """That it waits for an operator's decision, since and until when."""
    waiting: str
    """What the job waits for (nodes, back-off, approval, an operator), in words; empty when for nothing."""
    forming: str | msgspec.UnsetType = msgspec.UNSET
    """What an attempt waits for while it starts, and since when, in words; only then."""
    mode: Mode
    epoch: int
    attempt: int
    stage: Stage
    step: int | None
    last_step: int | None
    resume: Resume | None
    """Where the current attempt started."""
    defined_at: datetime.datetime | None
    started_at: datetime.datetime | None
    """When the first attempt was formed."""
    ended_at: datetime.datetime | None
    now: datetime.datetime
    """The time of the newest event."""
    nodes: tuple[NodeView, ...]
    incidents: tuple[IncidentView, ...]
    """Oldest first; at most the newest 200."""
    incidents_total: int
    cordons: tuple[CordonView, ...]
    budget: BudgetView
    checkpoints: tuple[CheckpointView, ...]
    restarts: int
    lost_s: float
    """Seconds lost to incidents so far, open ones included."""
    ettr: float | None
    """Effective training time ratio so far: 1 - (time before the first step + time lost) / wall time."""
    outcome: Outcome | None
    breaker: BreakerView
    requeues: int = 0
    """How often the scheduler has started the job again."""
    ends_at: datetime.datetime | None = None
    """When the scheduler ends it (its time limit), as it was known at the start."""
    skew: tuple[Difference, ...] = ()
    """What is not the same on all nodes: versions of driver, firmware, kernel, torch, ..."""
    stragglers: StragglersView | None = None
    """The ranks that all others of the attempt wait for at each step."""
    counted: int = 0
    """Steps of the optimizers since the ranks of this attempt started, by the step clock; 0: not counted."""
    step_from: Literal["", "output", "clock"] = ""
    """What tells `step`; empty: nothing does."""
    input_wait: InputWaitView | None = None
    """The ranks that wait for data."""
    degraded: tuple[str, ...] = ()
    """What is wrong while training goes on, in words: incidents that stopped nothing and last."""
    silence: SilenceView | None = None
    """No progress since, and nothing proves a hang."""
    tiers: tuple[TierView, ...] | msgspec.UnsetType = msgspec.UNSET
    """Only with `--publish-to`: what is local, mirrored, published."""
    left: tuple[LeftView, ...] | msgspec.UnsetType = msgspec.UNSET
    """Only where there is some: what other jobs have left on the nodes' disks."""
    mirrored_snapshot: SnapshotMirrorView | msgspec.UnsetType = msgspec.UNSET
    """Only where there is one: the newest snapshot of which other nodes have copies in memory."""
    hung: HungView | None = None
    """A diagnosed hang that lasts: also one whose restart waits for an operator."""
    alerts: tuple[OutsideAlert, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of others' monitoring, that fire now for nodes of the job; only where there are any."""
    swaps: tuple[SwapView, ...] | msgspec.UnsetType = msgspec.UNSET
    """Nodes that should leave, and when; only where there are any."""
    tests: tuple[NodeTestsView, ...] | msgspec.UnsetType = msgspec.UNSET
    """Of idle nodes by themselves, the newest of each; only where there were any."""
    restart: RestartView | None = None
    """What a restart would resume from now, and lose; None: the job has ended."""
    loss: float | msgspec.UnsetType = msgspec.UNSET
    """The newest finite loss of this attempt; only where the output tells one."""
