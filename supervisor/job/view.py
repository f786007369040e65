"""The job as people and programs are shown it (`Job.view()`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from diagnosis.signals import clean_line, rank_names
from diagnosis.stragglers import SLOWS, price
from recovery.checkpoint import Checkpoint, judgement, newest
from recovery.cordon import Cordon, breaker_limit
from recovery.snapshot_choice import NodeSnapshot
from recovery.snapshot_mirrors import of_all
from recovery.tiers import MIRRORS
from supervisor.job.alerts import Alerts
from supervisor.job.assignments import Assignments
from supervisor.job.attempts import Attempt, Attempts
from supervisor.job.core import Core
from supervisor.job.curve import TrainingCurve
from supervisor.job.hangs import Hangs
from supervisor.job.incidents import Incidents
from supervisor.job.node_tests import NodeTests
from supervisor.job.nodes import Node, Nodes
from supervisor.job.operator import Operator
from supervisor.job.scheduler import SchedulerRequests
from supervisor.job.swaps import Swaps
from supervisor.job.tiers import Tiers
from supervisor.messages import InputWaitSeen, StragglersSeen
from supervisor.node_diff import Difference
from supervisor.view import (
    BreakerView,
    BudgetView,
    CheckpointView,
    CordonView,
    HoldView,
    HungView,
    InputWaitView,
    JobStateName,
    JobView,
    LeftView,
    NodeStateName,
    NodeView,
    PauseView,
    RestartView,
    SilenceView,
    SnapshotMirrorView,
    StragglersView,
    TierView,
    utc,
)

TEXT_LIMIT = 160
"""Characters of a finding."""
CHECKPOINTS_SHOWN = 16


class Parts(Protocol):
    """What is shown of a job."""

    core: Core
    nodes: Nodes
    tiers: Tiers
    attempts: Attempts
    incidents: Incidents
    hangs: Hangs
    scheduler: SchedulerRequests
    operator: Operator
    swaps: Swaps
    tests: NodeTests
    alerts: Alerts
    assignments: Assignments
    skew: tuple[Difference, ...]
    stragglers: StragglersSeen | None
    input_wait: InputWaitSeen | None
    curve: TrainingCurve


def job_view(job: Parts, now: float | None = None, held: NodeSnapshot | None = None) -> JobView:
    """`now`: a live controller's clock; without it the job as of its newest event."""
    core, attempts, attempt, incidents = job.core, job.attempts, job.attempts.current, job.incidents
    cordons, budget, spec = job.nodes.cordons, incidents.budget, core.spec
    now = core.now if now is None else max(now, core.now)
    candidates = sorted(attempts.checkpoints.candidates(), key=lambda one: one.modified_at, reverse=True)
    suspects = incidents.suspects()
    return JobView(
        name=spec.name,
        state=shown_state(job),
        paused=core.paused,
        pause=PauseView(at=utc(core.pause.at), by=core.pause.by, reason=core.pause.reason) if core.pause else None,
        hold=_hold(job),
        waiting=job.operator.waiting,
        forming=job.operator.forming or msgspec.UNSET,
        mode=core.mode,
        epoch=core.epoch,
        attempt=attempt.number if attempt else 0,
        stage=job.assignments.stage,
        step=attempt.newest_step if attempt else None,
        last_step=attempt.last_step if attempt else None,
        resume=attempt.resume if attempt else None,
        defined_at=None if core.defined_at is None else utc(core.defined_at),
        started_at=None if attempts.started_at is None else utc(attempts.started_at),
        ended_at=None if core.ended_at is None else utc(core.ended_at),
        now=utc(now),
        nodes=tuple(_node(job, node, suspects.get(node.name, "")) for node in job.nodes),
        incidents=tuple(record.view(now) for record in incidents.log.records),
        incidents_total=incidents.log.total,
        cordons=tuple(_cordon(job, cordon) for cordon in cordons.all(now)),
        breaker=BreakerView(
            used=cordons.taken(now),
            limit=breaker_limit(len(attempt.members) if attempt else spec.nodes_max),
            tripped=incidents.breaker_tripped,
        ),
        requeues=spec.requeues,
        ends_at=None if spec.ends_at is None else utc(spec.ends_at),
        budget=BudgetView(
            max_restarts=budget.max_restarts,
            used=budget.used,
            in_window=budget.in_window(now),
            next_delay_s=budget.next_delay_s(now),
        ),
        checkpoints=tuple(_checkpoint(one, job.tiers) for one in candidates[:CHECKPOINTS_SHOWN]),
        restarts=attempts.restarts,
        lost_s=round(incidents.log.lost_s(now), 3),
        ettr=ettr(job, now),
        outcome=core.outcome,
        skew=job.skew,
        stragglers=_stragglers(job),
        counted=attempt.counted if attempt else 0,
        step_from=_step_from(attempt),
        input_wait=_input_wait(job),
        degraded=tuple(f"{record.id}: {record.what}" for record in incidents.log.open_degradations()),
        silence=_silence(job, now),
        hung=_hung(job),
        tests=job.tests.view() or msgspec.UNSET,
        alerts=tuple(job.alerts.firing.values()) or msgspec.UNSET,
        swaps=job.swaps.view(now) if job.swaps.proposed and not core.is_over else msgspec.UNSET,
        restart=_restart(job, now, held),
        loss=job.curve.loss_of(attempt.number if attempt else 0),
        tiers=_tiers(job.tiers) if job.tiers.are_on else msgspec.UNSET,
        left=_left(job.tiers) or msgspec.UNSET,
        mirrored_snapshot=_mirrored(attempts),
    )


def shown_state(job: Parts) -> JobStateName | Literal["REQUEUED", "HUNG"]:
    """The state as people and metrics are told it."""
    state, outcome = job.core.state, job.core.outcome
    if outcome is not None and outcome.state == "requeued":
        return "REQUEUED"
    return "HUNG" if job.incidents.hung is not None and state == "RUNNING" else state


def _hung(job: Parts) -> HungView | None:
    record = job.incidents.hung_or_waiting
    if record is None or record.hang is None:
        return None
    hang, why = record.hang, record.verdict.why if record.verdict is not None else record.hang.why
    return HungView(since=utc(record.failed_at), incident=record.id, ranks=hang.ranks, proven=hang.proven, text=why)


def _silence(job: Parts, now: float) -> SilenceView | None:
    silence = job.hangs.shown_silence
    if silence is None or job.core.is_over:
        return None
    limit_s = job.hangs.silence_limit.seconds
    return SilenceView(
        since=utc(silence.since),
        ranks=silence.report.ranks,
        place=silence.report.place,
        waiting=silence.report.waiting,
        acts_at=None if limit_s is None else utc(silence.since + limit_s),
        text=silence.text(now),
    )


def _hold(job: Parts) -> HoldView | None:
    core, incidents = job.core, job.incidents
    if core.is_over or not (incidents.held or incidents.approval_wanted):
        return None
    ends_at = None if core.paused else core.timers.get("hold")
    return HoldView(
        at=utc(incidents.waits_for_operator_since),
        ends_at=None if ends_at is None else utc(ends_at),
        why=incidents.held,
        approves=incidents.approves,
    )


def slow_text(event: StragglersSeen, rank_nodes: Mapping[int, str] | None = None) -> str:
    """`rank 3 (n1) holds the others up: 22 % of every step since 14:02 UTC`."""
    since = utc(event.since).strftime("%H:%M")
    holds = "holds" if len(event.ranks) == 1 else "hold"
    nodes = sorted({(rank_nodes or {}).get(rank, "") for rank in event.ranks})
    on = f" ({nodes[0]})" if len(nodes) == 1 and nodes[0] else ""
    return (
        f"{rank_names(event.ranks)}{on} {holds} the others up: {100 * event.cost:.0f} % of every step since {since} UTC"
    )


def slow_price(event: StragglersSeen, gpus: int, *, on_gpus: bool) -> str:
    """`. Without it a step would take 0.81 s instead of 0.97 s: 16 %, 31 GPU-hours a day`, where steps are counted."""
    one = len(event.ranks) == 1
    because = f". {'It waits' if one else 'They wait'} for data {100 * event.starved:.0f} % of the time"
    told = because if event.starved else ""
    if not event.step_s or not gpus:
        return told
    cost = price(event.step_s, event.cost, gpus)
    lost, hours = cost.gpu_hours_a_day, "GPU-hours" if on_gpus else "rank-hours"
    return (
        f"{told}. Without {'it' if one else 'them'} a step would take {_step(cost.without_s)} instead of "
        f"{_step(event.step_s)}: {100 * event.cost:.0f} %, {lost:.{0 if lost >= 10 else 1}f} {hours} a day"
    )


def _step(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def slow_why(job: Parts, event: StragglersSeen) -> str:
    """`: its GPU 0000:c1:00 is slowed down by heat or power (...)`, where a check told something of a rank's GPU."""
    log = job.incidents.log
    near = (one for at in (job.core.now, event.since) for one in log.findings_near(at, event.attempt))
    for one in near:
        if one.rank in event.ranks and one.scope == "gpu" and one.failure_class in SLOWS:
            whose = "its" if len(event.ranks) == 1 else f"rank {one.rank}'s"
            text = clean_line(one.evidence.text, TEXT_LIMIT)
            return f": {whose} GPU{f' {one.gpu}' if one.gpu else ''} {SLOWS[one.failure_class]} ({text})"
    return ""


def slow_is_confirmed(job: Parts, event: StragglersSeen) -> bool:
    """One rank is slow, a check tells why of its GPU and of no other node's, and the rank does not wait for data."""
    log, attempt = job.incidents.log, job.attempts.live(event.attempt)
    if attempt is None or len(event.ranks) != 1 or slow_input(job, event):
        return False
    near = (one for at in (job.core.now, event.since) for one in log.findings_near(at, event.attempt))
    slowed = [one for one in near if one.scope == "gpu" and one.failure_class in SLOWS]
    nodes = {one.node or attempt.rank_nodes.get(one.rank, "") for one in slowed if one.rank is not None}
    (rank,) = event.ranks
    return nodes == {attempt.rank_nodes.get(rank)} and any(one.rank == rank for one in slowed)


def slow_input(job: Parts, event: StragglersSeen) -> str:
    """`: it waits for data 38 % of the time`, where not all ranks do. (No fault of its device: nothing to swap for.)"""
    waits = job.input_wait
    if waits is None or waits.attempt != event.attempt or not set(event.ranks) & set(waits.ranks) or waits.count > 16:
        return ""
    if set(waits.ranks) - set(event.ranks):
        return ""
    it = "it waits" if len(event.ranks) == 1 else "they wait"
    return f": {it} for data {100 * waits.share:.0f} % of the time"


def _stragglers(job: Parts) -> StragglersView | None:
    event = job.stragglers
    attempt = job.attempts.live(event.attempt) if event is not None else None
    if event is None or not event.ranks or attempt is None:
        return None
    text = (
        slow_text(event, attempt.rank_nodes)
        + slow_why(job, event)
        + slow_input(job, event)
        + slow_price(event, attempt.world_size, on_gpus=job.core.spec.on_gpus)
    )
    return StragglersView(ranks=event.ranks, cost_percent=round(100 * event.cost, 1), since=utc(event.since), text=text)


def _step_from(attempt: Attempt | None) -> Literal["", "output", "clock"]:
    if attempt is None or attempt.step is None:
        return ""
    return "clock" if attempt.counted_step is not None and attempt.counted_step >= attempt.step else "output"


def input_text(event: InputWaitSeen) -> str:
    """`ranks 0, 1 wait for data 38 % of the time since 14:02 UTC`."""
    waits = "waits" if event.count == 1 else "wait"
    more = f" and {event.count - len(event.ranks)} more" if event.count > len(event.ranks) else ""
    since = utc(event.since).strftime("%H:%M")
    return f"{rank_names(event.ranks)}{more} {waits} for data {100 * event.share:.0f} % of the time since {since} UTC"


def _input_wait(job: Parts) -> InputWaitView | None:
    event = job.input_wait
    if event is None or not event.ranks or job.attempts.live(event.attempt) is None:
        return None
    return InputWaitView(
        ranks=event.ranks, share_percent=round(100 * event.share, 1), since=utc(event.since), text=input_text(event)
    )


def _node(job: Parts, node: Node, blamed: str) -> NodeView:
    attempt = job.attempts.current
    cordon = job.nodes.cordons.of(node.name, job.core.now)
    state: NodeStateName = "ACTIVE" if attempt is not None and node.name in attempt.member_set else "SPARE"
    why = ""
    if not node.present:
        state, why = "LOST", node.why
    elif attempt is not None and not attempt.over and (bad := attempt.without.get(node.name)) is not None:
        n = len(bad.others)
        why = f"{n} of {n + 1} processes, without {bad.uuid}: {bad.reason}"
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


def _cordon(job: Parts, cordon: Cordon) -> CordonView:
    return CordonView(
        node=cordon.node,
        gpu=cordon.gpu,
        reason=cordon.reason,
        by=cordon.by,
        failure_class=cordon.failure_class.value if cordon.failure_class is not None else "",
        incident=cordon.incident,
        at=utc(cordon.at),
        until=None if cordon.until is None else utc(cordon.until),
        scheduler=job.scheduler.drains.get(cordon.node, ""),
        scope="cluster" if job.nodes.cordons.is_of_cluster(cordon) else msgspec.UNSET,
    )


def _tiers(tiers: Tiers) -> tuple[TierView, ...]:
    return tuple(
        TierView(tier=tier, path=f"{tiers.folder}/{save.name}", step=save.step, modified_at=utc(save.modified_at))
        for tier, save in tiers.newest().items()
    )


def _mirrored(attempts: Attempts) -> SnapshotMirrorView | msgspec.UnsetType:
    newest = attempts.mirrors.newest
    if newest is None:
        return msgspec.UNSET
    return SnapshotMirrorView(attempt=newest.attempt, step=newest.step, at=utc(newest.at), ranks=newest.world)


def _left(tiers: Tiers) -> tuple[LeftView, ...]:
    return tuple(
        LeftView(node=node, path=f"{tiers.folder}/{MIRRORS}", jobs=report.others, size_bytes=report.others_bytes)
        for node, report in sorted(tiers.reports().items())
        if report.others
    )


def _checkpoint(checkpoint: Checkpoint, tiers: Tiers) -> CheckpointView:
    return CheckpointView(
        path=checkpoint.path,
        step=checkpoint.step,
        format=checkpoint.format,
        complete=checkpoint.complete,
        why=checkpoint.why,
        modified_at=utc(checkpoint.modified_at),
        size_bytes=checkpoint.size_bytes,
        suspect=checkpoint.suspect,
        verdict=judgement(checkpoint),
        where=_where(checkpoint, tiers),
        copy_of=checkpoint.copy_of,
        layout=checkpoint.layout,
    )


def _where(checkpoint: Checkpoint, tiers: Tiers) -> tuple[str, ...]:
    if found := tiers.tiers_of(checkpoint.path):
        return found
    return ("copy",) if checkpoint.copy_of else ("in place",)


def _restart(job: Parts, now: float, held: NodeSnapshot | None) -> RestartView | None:
    """What a restart would resume from now. A choice that fails must not keep anybody from seeing the rest."""
    attempts, attempt = job.attempts, job.attempts.current
    if job.core.is_over or attempt is None:
        return None
    known = attempts.checkpoints
    try:
        chosen = known.would_choose(attempt.members)
    except Exception as error:
        return RestartView(path="", step=None, loses_steps=None, loses_s=None, why=clean_line(str(error)))
    path, at = (chosen.path, chosen.step) if chosen is not None else ("", None)
    found = _resume(job, attempt, chosen, now)
    if held is not None and attempts.would_start_from(held, path, at):
        found = _from_memory(attempt, held, now)
    left = _left_without_a_node(job.tiers, known.candidates(attempt.members)) if job.tiers.are_on else chosen
    after = _after_node_loss(job, attempt, left, now)
    same = (after.path, after.step, after.why) == (found.path, found.step, found.why) and (
        after.from_memory == found.from_memory
    )
    return found if same else msgspec.structs.replace(found, after_node_loss=after)


def _after_node_loss(job: Parts, attempt: Attempt, left: Checkpoint | None, now: float) -> RestartView:
    mirrored = job.attempts.mirrors.newest
    path, step = (left.path, left.step) if left is not None else ("", None)
    held = of_all(mirrored) if mirrored is not None and mirrored.attempt == attempt.number else None
    if held is None or not job.attempts.would_start_from(held, path, step):
        return _resume(job, attempt, left, now)
    return _from_memory(attempt, held, now)


def _from_memory(attempt: Attempt, held: NodeSnapshot, now: float) -> RestartView:
    loses = None if attempt.newest_step is None else max(0, attempt.newest_step - held.step)
    age_s = round(max(0.0, now - held.at), 3)
    return RestartView(path="", step=held.step, loses_steps=loses, loses_s=age_s, from_memory=True)


def _left_without_a_node(tiers: Tiers, seen: Sequence[Checkpoint]) -> Checkpoint | None:
    """The newest good checkpoint of which all is on other nodes too, or published."""
    good = (one for one in seen if one.complete and not one.suspect)
    return newest(one for one in good if {"mirrored", "published"} & {*_where(one, tiers)})


def _resume(job: Parts, attempt: Attempt, chosen: Checkpoint | None, now: float) -> RestartView:
    """From storage."""
    known = job.attempts.checkpoints
    seen = known.candidates(attempt.members)
    if chosen is None:
        doubt = any(one.in_doubt for one in seen)
        why = "the newest one is in doubt: the script decides" if doubt else ""
        since = attempt.first_at if attempt.first_at is not None else attempt.formed_at
        loses = None if doubt else (attempt.newest_step if not attempt.resume.path else None)
        return RestartView(
            path="", step=None, loses_steps=loses, loses_s=None if doubt else round(max(0.0, now - since), 3), why=why
        )
    step = chosen.step if chosen.step is not None else known.step_of(chosen.path)
    lost = attempt.newest_step - step if attempt.newest_step is not None and step is not None else None
    return RestartView(
        path=chosen.path,
        step=step,
        loses_steps=None if lost is None else max(0, lost),
        loses_s=round(max(0.0, now - chosen.modified_at), 3),
    )


def ettr(job: Parts, now: float | None = None) -> float | None:
    """Share of the wall time since the first attempt that went into steps which counted."""
    core, started_at = job.core, job.attempts.started_at
    if started_at is None:
        return None
    end = core.ended_at if core.ended_at is not None else max(core.now, now or 0.0)
    wall_s = end - started_at
    if wall_s <= 0:
        return None
    return round(max(0.0, 1.0 - (startup_s(job, end) + job.incidents.log.lost_s(end)) / wall_s), 4)


def startup_s(job: Parts, now: float) -> float:
    """From the first attempt to its first step, or to what stopped it before that."""
    attempts = job.attempts
    if attempts.started_at is None:
        return 0.0
    ends = [attempts.trains_since, job.incidents.log.down_since, job.core.ended_at, now]
    return max(0.0, min(end for end in ends if end is not None) - attempts.started_at)
