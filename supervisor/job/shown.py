"""`Job.view()`: the job as people and programs are shown it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from diagnosis.signals import clean_line
from diagnosis.stragglers.live import SLOWS
from diagnosis.stuck import names
from recovery.actions import Checkpoint, Cordon
from recovery.cordon import breaker_limit
from supervisor.job.casebook import Case
from supervisor.job.roster import Node
from supervisor.messages import StragglersSeen
from supervisor.view import (
    BreakerView,
    BudgetView,
    CheckpointView,
    CordonView,
    HoldView,
    HungView,
    JobStateName,
    JobView,
    NodeStateName,
    NodeView,
    PauseView,
    SilenceView,
    StragglersView,
    utc,
)

if TYPE_CHECKING:
    from supervisor.job.job import Job

SAID = 160
"""Characters of a finding."""


def job_view(job: Job, now: float | None = None) -> JobView:
    """`now`: a live controller's clock; without it the job as of its newest event."""
    attempt = job.attempt
    now = job.now if now is None else max(now, job.now)
    return JobView(
        name=job.spec.name,
        state=shown_state(job),
        paused=job.paused,
        pause=PauseView(at=utc(job.pause.at), by=job.pause.by, reason=job.pause.reason) if job.pause else None,
        hold=_hold(job),
        waiting=job.waiting,
        mode=job.mode,
        epoch=job.epoch,
        attempt=attempt.number if attempt else 0,
        stage=job.stage,
        step=attempt.step if attempt else None,
        last_step=attempt.last_step if attempt else None,
        resume=attempt.resume if attempt else None,
        defined_at=None if job.defined_at is None else utc(job.defined_at),
        started_at=None if job.started_at is None else utc(job.started_at),
        ended_at=None if job.ended_at is None else utc(job.ended_at),
        now=utc(now),
        nodes=tuple(_node(job, node) for node in job.roster),
        incidents=tuple(case.view(now) for case in job.casebook.cases),
        incidents_total=job.casebook.total,
        cordons=tuple(_cordon(job, cordon) for cordon in job.cordons.all(now)),
        breaker=BreakerView(
            used=job.cordons.taken(now),
            limit=breaker_limit(len(attempt.members) if attempt else job.spec.nodes_max),
            tripped=job.tripped,
        ),
        requeues=job.spec.requeues,
        ends_at=None if job.spec.ends_at is None else utc(job.spec.ends_at),
        budget=BudgetView(
            max_restarts=job.budget.max_restarts,
            used=job.budget.used,
            in_window=job.budget.in_window(now),
            next_delay_s=job.budget.next_delay_s(now),
        ),
        checkpoints=tuple(
            _checkpoint(c) for c in sorted(job.candidates(), key=lambda c: c.modified_at, reverse=True)[:16]
        ),
        restarts=job.restarts,
        lost_s=round(job.casebook.lost_s(now), 3),
        ettr=ettr(job, now),
        outcome=job.outcome,
        skew=job.skew,
        stragglers=_stragglers(job),
        degraded=tuple(f"{case.id}: {case.what}" for case in job.casebook.standing()),
        silence=_silence(job, now),
        hung=_hung(job),
    )


def shown_state(job: Job) -> JobStateName | Literal["REQUEUED", "HUNG"]:
    """The state as people and metrics are told it."""
    if job.outcome is not None and job.outcome.state == "requeued":
        return "REQUEUED"
    return "HUNG" if job.hung is not None and job.state == "RUNNING" else job.state


def hung_case(job: Job) -> Case | None:
    """The open incident of a hang that nobody acts on, or that waits for somebody's word."""
    if job.hung is not None:
        return job.hung
    waits = job.approval_wanted or job.held
    return next((case for case in job.casebook.unclosed() if case.hang is not None and waits), None)


def _hung(job: Job) -> HungView | None:
    case = hung_case(job)
    if case is None or case.hang is None:
        return None
    why = case.verdict.why if case.verdict is not None else case.hang.why
    return HungView(
        since=utc(case.failed_at), incident=case.id, ranks=case.hang.ranks, proven=case.hang.proven, text=why
    )


def _silence(job: Job, now: float) -> SilenceView | None:
    silence, attempt = job.silence, job.attempt
    if silence is None or attempt is None or attempt.over or attempt.number != silence.attempt or job.is_over:
        return None
    limit_s = job.silence_limit.seconds
    return SilenceView(
        since=utc(silence.since),
        ranks=silence.report.ranks,
        place=silence.report.place,
        waiting=silence.report.waiting,
        acts_at=None if limit_s is None else utc(silence.since + limit_s),
        text=silence.text(now),
    )


def _hold(job: Job) -> HoldView | None:
    if job.is_over or not (job.held or job.approval_wanted):
        return None
    ends_at = None if job.paused else job.timers.get("hold")
    return HoldView(at=utc(job.asked_at), ends_at=None if ends_at is None else utc(ends_at), why=job.held)


def slow_text(event: StragglersSeen, rank_nodes: Mapping[int, str] | None = None) -> str:
    """`rank 3 (n1) holds the others up: 22 % of every step since 14:02 UTC`."""
    since = utc(event.since).strftime("%H:%M")
    holds = "holds" if len(event.ranks) == 1 else "hold"
    nodes = sorted({(rank_nodes or {}).get(rank, "") for rank in event.ranks})
    on = f" ({nodes[0]})" if len(nodes) == 1 and nodes[0] else ""
    return f"{names(event.ranks)}{on} {holds} the others up: {100 * event.cost:.0f} % of every step since {since} UTC"


def slow_why(job: Job, event: StragglersSeen) -> str:
    """`: its GPU 0000:c1:00 is slowed down by heat or power (...)`, where a check told something of a rank's GPU."""
    near = (one for at in (job.now, event.since) for one in job.casebook.findings_near(at, event.attempt))
    for one in near:
        if one.rank in event.ranks and one.scope == "gpu" and one.failure_class in SLOWS:
            whose = "its" if len(event.ranks) == 1 else f"rank {one.rank}'s"
            said = clean_line(one.evidence.text, SAID)
            return f": {whose} GPU{f' {one.gpu}' if one.gpu else ''} {SLOWS[one.failure_class]} ({said})"
    return ""


def _stragglers(job: Job) -> StragglersView | None:
    event, attempt = job.stragglers, job.attempt
    if event is None or not event.ranks or attempt is None or attempt.over or event.attempt != attempt.number:
        return None
    text = slow_text(event, attempt.rank_nodes) + slow_why(job, event)
    return StragglersView(ranks=event.ranks, cost_percent=round(100 * event.cost, 1), since=utc(event.since), text=text)


def _node(job: Job, node: Node) -> NodeView:
    attempt = job.attempt
    member = attempt is not None and node.name in attempt.members
    cordon = job.cordons.of(node.name, job.now)
    blamed = job.blamed_now(node.name)
    state: NodeStateName = "ACTIVE" if member else "SPARE"
    why = ""
    if not node.standing:
        state, why = "LOST", node.why
    elif cordon is not None:
        state, why = "CORDONED", cordon.reason if cordon.by == "policy" else f"{cordon.reason} (by {cordon.by})"
    elif blamed:
        state, why = "SUSPECT", blamed
    return NodeView(
        node=node.name,
        host=node.host,
        address=node.address,
        state=state,
        spare=node.spare,
        ranks=attempt.ranks.get(node.name, ()) if attempt is not None else (),
        why=why,
    )


def _cordon(job: Job, cordon: Cordon) -> CordonView:
    return CordonView(
        node=cordon.node,
        gpu=cordon.gpu,
        reason=cordon.reason,
        by=cordon.by,
        failure_class=cordon.failure_class.value if cordon.failure_class is not None else "",
        incident=cordon.incident,
        at=utc(cordon.at),
        until=None if cordon.until is None else utc(cordon.until),
        scheduler=job.drains.get(cordon.node, ""),
    )


def _checkpoint(checkpoint: Checkpoint) -> CheckpointView:
    return CheckpointView(
        path=checkpoint.path,
        step=checkpoint.step,
        format=checkpoint.format,
        complete=checkpoint.complete,
        why=checkpoint.why,
        modified_at=utc(checkpoint.modified_at),
        size_bytes=checkpoint.size_bytes,
        suspect=checkpoint.suspect,
    )


def ettr(job: Job, now: float | None = None) -> float | None:
    """Share of the wall time since the first attempt that went into steps which counted."""
    if job.started_at is None:
        return None
    end = job.ended_at if job.ended_at is not None else max(job.now, now or 0.0)
    wall_s = end - job.started_at
    if wall_s <= 0:
        return None
    return round(max(0.0, 1.0 - (startup_s(job, end) + job.casebook.lost_s(end)) / wall_s), 4)


def startup_s(job: Job, now: float) -> float:
    """From the first attempt to its first step, or to what stopped it before that."""
    if job.started_at is None:
        return 0.0
    ends = [end for end in (job.trains_since, job.casebook.down_since, job.ended_at, now) if end is not None]
    return max(0.0, min(ends) - job.started_at)
