"""`Job.view()`: the job as people and programs are shown it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recovery.actions import Checkpoint, Cordon
from recovery.cordon import breaker_limit
from supervisor.roster import Node
from supervisor.view import BreakerView, BudgetView, CheckpointView, CordonView, JobView, NodeStateName, NodeView, utc

if TYPE_CHECKING:
    from supervisor.job import Job


def job_view(job: Job) -> JobView:
    attempt = job.attempt
    now = job.now
    return JobView(
        name=job.spec.name,
        state=job.state,
        paused=job.paused,
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
        ettr=ettr(job),
        outcome=job.outcome,
        skew=job.skew,
    )


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
        state, why = "CORDONED", cordon.reason
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


def ettr(job: Job) -> float | None:
    """Share of the wall time since the first attempt that went into steps which counted."""
    if job.started_at is None:
        return None
    end = job.ended_at if job.ended_at is not None else job.now
    wall_s = end - job.started_at
    if wall_s <= 0:
        return None
    before_first_step = (job.first_step_at if job.first_step_at is not None else end) - job.started_at
    return round(max(0.0, 1.0 - (max(0.0, before_first_step) + job.casebook.lost_s(end)) / wall_s), 4)
