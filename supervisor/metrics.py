"""What Prometheus is told: the table of all metrics, and the job's numbers at the moment of a scrape.

Nothing is kept for it: every number is read from the state that is there anyway, so a daemon that nobody scrapes pays
nothing. Labels hold names from closed lists (states, classes, phases, checks), nodes, GPUs and ranks; never text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from diagnosis.signals import clean_line
from diagnosis.taxonomy import FailureClass
from recovery.actions import Mode
from recovery.cordon import breaker_limit
from supervisor.casebook import Case
from supervisor.dealings import NOT_DRAINED
from supervisor.show_job import ettr
from supervisor.view import PHASES, JobStateName, NodeStateName

if TYPE_CHECKING:
    from supervisor.control_loop import ControlLoop
    from supervisor.job import Job

CORDONS_NAMED: Final = 64
"""Cordons with series of their own; all of them are counted."""
NAME_LIMIT: Final = 100
_SAFE: Final = re.compile(r"[\w.:/-]{1,64}")

Kind = Literal["gauge", "counter", "info", "stateset", "summary"]


class Family(NamedTuple):
    """One metric: a row of docs/metrics.md."""

    name: str
    """As in a query; a summary's without `_sum` and `_count`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Beyond those that all metrics of its daemon have (`CONTROLLER_LABELS`, `AGENT_LABELS`). Of a stateset the last
    one has the metric's own name, as OpenMetrics wants it."""


class Sample(NamedTuple):
    name: str
    value: float
    labels: tuple[str, ...] = ()
    """Values, in the order of the family's labels."""
    suffix: str = ""
    """`_sum` or `_count` of a summary."""


CONTROLLER_LABELS: Final = ("job",)
AGENT_LABELS: Final = ("job", "node")

BUILD: Final = Family("unbroken_build_info", "info", "The version of unbroken that answers.", ("version",))
PROCESSES: Final = (
    Family("unbroken_process_cpu_seconds_total", "counter", "CPU time of our own processes.", ("kind",)),
    Family("unbroken_process_resident_memory_bytes", "gauge", "Resident memory of our own processes.", ("kind",)),
)

OUTCOMES: Final = ("succeeded", "failed", "stopped", "requeued")
WAITING: Final = ("nodes", "backoff", "approval", "operator", "evidence")
CONTROLLER: Final = (
    BUILD,
    *PROCESSES,
    Family("unbroken_job_state", "stateset", "The state of the job.", ("unbroken_job_state",)),
    Family("unbroken_job_outcome", "stateset", "How the job ended; all 0 before.", ("unbroken_job_outcome",)),
    Family("unbroken_job_mode", "stateset", "What we may do.", ("unbroken_job_mode",)),
    Family("unbroken_job_paused", "gauge", "1 while an operator has paused us: we watch and do nothing."),
    Family(
        "unbroken_job_waiting",
        "gauge",
        "1 for what the job waits for: nodes, backoff, approval of a plan, an operator (it is held), evidence.",
        ("kind",),
    ),
    Family("unbroken_job_attempts_total", "counter", "Attempts begun, the current one included."),
    Family("unbroken_job_restarts_total", "counter", "Restarts ordered, by policy or by operators."),
    Family("unbroken_job_restarts_without_progress", "gauge", "Restarts since the run last got further than ever."),
    Family("unbroken_job_restarts_allowed", "gauge", "Restarts without progress after which the job is given up."),
    Family("unbroken_job_step", "gauge", "Newest training step of the current attempt."),
    Family("unbroken_job_last_step", "gauge", "Step at which the run will be complete, where its output tells."),
    Family("unbroken_job_step_seconds", "gauge", "Mean time of a step in the current attempt."),
    Family("unbroken_job_progress_timestamp_seconds", "gauge", "Unix time of the newest step (10 s coarse)."),
    Family("unbroken_job_start_timestamp_seconds", "gauge", "Unix time at which the first attempt was formed."),
    Family("unbroken_job_end_timestamp_seconds", "gauge", "Unix time at which the job ended."),
    Family(
        "unbroken_job_incidents_total",
        "counter",
        "Incidents by the failure class of their verdict; every class has a row, so that its first one is an increase.",
        ("failure_class",),
    ),
    Family(
        "unbroken_job_open_incidents",
        "gauge",
        "Incidents that are not closed, by failure class (empty until there is a verdict).",
        ("failure_class",),
    ),
    Family(
        "unbroken_job_recovery_seconds",
        "summary",
        "Incidents that ended in a new attempt's first step: the time they took, by phase of the recovery.",
        ("phase",),
    ),
    Family("unbroken_job_lost_steps_total", "counter", "Steps that were done again after restarts."),
    Family(
        "unbroken_job_badput_seconds_total",
        "counter",
        "Time in which nothing was trained that counts: startup (until the first step), a phase of a closed incident, "
        "redo (steps done again), other (until the incident was closed).",
        ("kind",),
    ),
    Family(
        "unbroken_job_ettr_ratio",
        "gauge",
        "Effective training time ratio since the first attempt: 1 is no time lost.",
    ),
    Family(
        "unbroken_job_checkpoint_timestamp_seconds",
        "gauge",
        "Unix time at which the newest complete checkpoint that is not suspect was written.",
    ),
    Family("unbroken_job_checkpoint_step", "gauge", "Step of that checkpoint, where it tells."),
    Family(
        "unbroken_job_checkpoints",
        "gauge",
        "Checkpoints that are seen: complete, incomplete, or suspect (written after the numbers went wrong).",
        ("kind",),
    ),
    Family("unbroken_job_nodes", "gauge", "Nodes by state.", ("state",)),
    Family("unbroken_job_nodes_wanted", "gauge", "Most nodes that an attempt uses."),
    Family("unbroken_job_spares", "gauge", "Healthy idle nodes that could take a place now."),
    Family("unbroken_job_spares_wanted", "gauge", "Spares that the job was started with (--spares)."),
    Family(
        "unbroken_job_cordons",
        "gauge",
        "Cordons in force: kind node or gpu, by whom (policy, operator), and why.",
        ("kind", "by", "failure_class"),
    ),
    Family(
        "unbroken_job_cordon_start_timestamp_seconds",
        "gauge",
        f"Unix time at which a cordon began; at most {CORDONS_NAMED} nodes of the job.",
        ("node", "gpu", "failure_class"),
    ),
    Family(
        "unbroken_job_drains",
        "gauge",
        "Cordoned nodes that the scheduler was asked to drain: asked (done or under way), or refused.",
        ("kind",),
    ),
    Family("unbroken_job_cordons_proposed", "gauge", "Cordons in a plan that waits for approval."),
    Family("unbroken_job_breaker_cordons", "gauge", "Nodes that policy has cordoned within the last hour."),
    Family("unbroken_job_breaker_limit", "gauge", "Nodes that policy may cordon within an hour."),
    Family("unbroken_job_breaker_tripped", "gauge", "1 while the job is held because policy wanted to cordon more."),
    Family("unbroken_controller_epoch", "gauge", "Grows by one with each start of a controller of this job."),
    Family("unbroken_controller_agents", "gauge", "Agents that are connected."),
    Family("unbroken_controller_events_waiting", "gauge", "Events that wait for the journal."),
    Family(
        "unbroken_controller_journal_ok", "gauge", "0 while the journal cannot be written: nothing is decided then."
    ),
)


def controller_samples(loop: ControlLoop, job: Job) -> list[Sample]:
    """Everything that a controller tells now; some hundred rows, whatever the number of nodes."""
    now = loop.clock.now()
    return [
        *job_samples(job, now),
        Sample("unbroken_controller_epoch", loop.epoch),
        Sample("unbroken_controller_agents", len(loop.connections)),
        Sample("unbroken_controller_events_waiting", loop.waiting),
        Sample("unbroken_controller_journal_ok", not loop.stall),
    ]


def job_name(name: str) -> str:
    """The label `job`."""
    return clean_line(name, NAME_LIMIT) or "unnamed"


def job_samples(job: Job, now: float) -> Iterator[Sample]:
    """`now`: Unix seconds."""
    yield from _state(job)
    yield from _progress(job, now)
    yield from _incidents(job)
    yield from _checkpoints(job)
    yield from _nodes(job, now)
    yield from _cordons(job, now)


def states(name: str, known: tuple[str, ...], current: str, labels: tuple[str, ...] = ()) -> Iterator[Sample]:
    """A stateset: a row for each state."""
    for state in known:
        yield Sample(name, state == current, (*labels, state))


def _state(job: Job) -> Iterator[Sample]:
    yield from states("unbroken_job_state", get_args(JobStateName), job.state)
    yield from states("unbroken_job_outcome", OUTCOMES, job.outcome.state if job.outcome is not None else "")
    yield from states("unbroken_job_mode", get_args(Mode), job.mode)
    yield Sample("unbroken_job_paused", job.paused)
    waits_for = _waits_for(job)
    for kind in WAITING:
        yield Sample("unbroken_job_waiting", kind == waits_for, (kind,))
    yield Sample("unbroken_job_attempts_total", job.attempt.number if job.attempt is not None else 0)
    yield Sample("unbroken_job_restarts_total", job.restarts)
    yield Sample("unbroken_job_restarts_without_progress", job.budget.used)
    yield Sample("unbroken_job_restarts_allowed", job.budget.max_restarts)


def _waits_for(job: Job) -> str:
    if job.is_over:
        return ""
    if job.held or (job.paused and job.state in ("IDLE", "RECOVERING")):
        return "operator"
    if job.approval_wanted:
        return "approval"
    if job.state in ("IDLE", "RECOVERING"):
        return "backoff" if "backoff" in job.timers else "nodes"
    return "evidence" if job.state == "DIAGNOSING" else ""


def _progress(job: Job, now: float) -> Iterator[Sample]:
    attempt = job.attempt
    if attempt is not None and attempt.step is not None:
        yield Sample("unbroken_job_step", attempt.step)
        yield Sample("unbroken_job_progress_timestamp_seconds", attempt.step_at)
    if attempt is not None and attempt.last_step is not None:
        yield Sample("unbroken_job_last_step", attempt.last_step)
    pace = attempt.seconds_per_step if attempt is not None else None
    if pace is not None:
        yield Sample("unbroken_job_step_seconds", pace)
    ratio = ettr(job)
    if ratio is not None:
        yield Sample("unbroken_job_ettr_ratio", ratio)
    if job.started_at is None:
        return
    yield Sample("unbroken_job_start_timestamp_seconds", job.started_at)
    if job.ended_at is not None:
        yield Sample("unbroken_job_end_timestamp_seconds", job.ended_at)
    first_step_at = job.first_step_at or job.ended_at or now
    yield Sample("unbroken_job_badput_seconds_total", max(0.0, first_step_at - job.started_at), ("startup",))


def _incidents(job: Job) -> Iterator[Sample]:
    sums = job.casebook.sums()
    for failure_class in FailureClass:
        yield Sample("unbroken_job_incidents_total", sums.incidents[failure_class], (failure_class.value,))
    for name, count in Counter(map(_class, job.casebook.unclosed())).items():
        yield Sample("unbroken_job_open_incidents", count, (name,))
    for phase in PHASES:
        yield Sample("unbroken_job_recovery_seconds", sums.recoveries[phase], (phase,), "_count")
        yield Sample("unbroken_job_recovery_seconds", sums.recovery_s.get(phase, 0.0), (phase,), "_sum")
    for kind in (*PHASES, "redo", "other"):
        yield Sample("unbroken_job_badput_seconds_total", sums.badput_s.get(kind, 0.0), (kind,))
    yield Sample("unbroken_job_lost_steps_total", sums.redo_steps)
    plans = [case.plan for case in job.casebook.unclosed() if case.plan is not None]
    proposed = sum(len(plan.cordons) for plan in plans) if job.approval_wanted else 0
    yield Sample("unbroken_job_cordons_proposed", proposed)


def _class(case: Case) -> str:
    return case.verdict.failure_class.value if case.verdict is not None else ""


def _checkpoints(job: Job) -> Iterator[Sample]:
    seen = job.candidates()
    kinds = Counter("suspect" if one.suspect else "complete" if one.complete else "incomplete" for one in seen)
    for kind in ("complete", "incomplete", "suspect"):
        yield Sample("unbroken_job_checkpoints", kinds[kind], (kind,))
    good = [one for one in seen if one.complete and not one.suspect]
    newest = max(good, key=lambda one: one.modified_at, default=None)
    if newest is not None:
        yield Sample("unbroken_job_checkpoint_timestamp_seconds", newest.modified_at)
        if newest.step is not None:
            yield Sample("unbroken_job_checkpoint_step", newest.step)


def _nodes(job: Job, now: float) -> Iterator[Sample]:
    """One pass over the nodes: `Job.view()` makes ten objects of each."""
    members = set(job.attempt.members) if job.attempt is not None else set()
    cordons = job.cordons.all(now)
    cordoned = {cordon.node for cordon in cordons}
    verdicts = [case.verdict for case in job.casebook.unclosed() if case.verdict is not None]
    suspects = {culprit.node for verdict in verdicts for culprit in verdict.culprits}
    counts: Counter[NodeStateName] = Counter()
    for node in job.roster:
        name = node.name
        if not node.standing:
            counts["LOST"] += 1
        elif name in cordoned:
            counts["CORDONED"] += 1
        elif name in suspects:
            counts["SUSPECT"] += 1
        else:
            counts["ACTIVE" if name in members else "SPARE"] += 1
    for state in get_args(NodeStateName):
        yield Sample("unbroken_job_nodes", counts[state], (state,))
    yield Sample("unbroken_job_nodes_wanted", job.spec.nodes_max)
    yield Sample("unbroken_job_spares", counts["SPARE"])
    yield Sample("unbroken_job_spares_wanted", job.spec.spares)


def _cordons(job: Job, now: float) -> Iterator[Sample]:
    cordons = job.cordons.all(now)
    by_reason = Counter(
        (
            "gpu" if cordon.gpu else "node",
            "policy" if cordon.by == "policy" else "operator",
            cordon.failure_class.value if cordon.failure_class is not None else "",
        )
        for cordon in cordons
    )
    for labels, count in by_reason.items():
        yield Sample("unbroken_job_cordons", count, labels)
    known = [cordon for cordon in cordons if job.roster.get(cordon.node) is not None]
    named: dict[tuple[str, str, str], float] = {}
    for cordon in known[-CORDONS_NAMED:]:
        gpu = cordon.gpu if _SAFE.fullmatch(cordon.gpu) else ""  # an operator may have typed anything
        labels = (cordon.node, gpu, cordon.failure_class.value if cordon.failure_class is not None else "")
        named[labels] = cordon.at
    for labels, at in named.items():
        yield Sample("unbroken_job_cordon_start_timestamp_seconds", at, labels)
    drains = Counter("refused" if told.startswith(NOT_DRAINED) else "asked" for told in job.drains.values())
    for kind in ("asked", "refused"):
        yield Sample("unbroken_job_drains", drains[kind], (kind,))
    members = len(job.attempt.members) if job.attempt is not None else job.spec.nodes_max
    yield Sample("unbroken_job_breaker_cordons", job.cordons.taken(now))
    yield Sample("unbroken_job_breaker_limit", breaker_limit(members))
    yield Sample("unbroken_job_breaker_tripped", job.tripped)


def as_markdown(families: tuple[Family, ...]) -> str:
    """A table of docs/metrics.md (a test keeps the two equal)."""
    head = ["| metric | type | labels | meaning |", "| --- " * 4 + "|"]
    rows = []
    for family in families:
        names = f"{family.name}_sum`, `{family.name}_count" if family.kind == "summary" else family.name
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{names}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join([*head, *rows]) + "\n"
