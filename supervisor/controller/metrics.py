"""The job's numbers at the moment of a scrape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final, get_args

from diagnosis.taxonomy import FailureClass
from recovery.active_verdicts import node_verdict
from recovery.cordon import breaker_limit
from recovery.group_tests import PAIR_TEST
from recovery.ledger import NodeRecord, TestVerdict
from recovery.policy import Mode
from recovery.snapshot_choice import RankSnapshot
from recovery.snapshot_mirrors import Mirrored
from recovery.swaps import Cause
from supervisor.job.advice import JobAdvice
from supervisor.job.incident_log import IncidentRecord
from supervisor.job.scheduler import NOT_DRAINED
from supervisor.job.view import ettr, shown_state, startup_s
from supervisor.metrics.table import CORDONS_NAMED, OUTCOMES, WAITING, Sample, states
from supervisor.view import PHASES, JobStateName, NodeStateName

if TYPE_CHECKING:
    from supervisor.controller.heartbeats import Newest
    from supervisor.controller.loop import ControlLoop
    from supervisor.job.job import Job

_SAFE: Final = re.compile(r"[\w.:/-]{1,64}")


def controller_samples(loop: ControlLoop, job: Job) -> list[Sample]:
    """Everything that a controller tells now; some hundred rows, whatever the number of nodes."""
    now = loop.clock.now()
    return [
        *job_samples(job, now, loop.watch.newest),
        *_snapshots(loop.watch.snapshot, job.attempts.mirrors.newest),
        *_advised(loop.advice.of(job, now)),
        *(ledger_samples(loop.ledger.records.values(), loop.ledger.readable) if loop.ledger is not None else ()),
        Sample("unbroken_controller_epoch", loop.epoch),
        Sample("unbroken_controller_agents", len(loop.connections)),
        Sample("unbroken_controller_events_waiting", loop.waiting),
        Sample("unbroken_controller_journal_ok", not loop.stall),
    ]


def job_samples(job: Job, now: float, newest: Newest | None = None) -> Iterator[Sample]:
    """`now`: Unix seconds. `newest`: how far the ranks are by their newest heartbeat."""
    yield from _state(job)
    yield from _standstill(job)
    yield from _progress(job, now, newest)
    yield from _incidents(job)
    yield from _checkpoints(job)
    yield from _tiers(job)
    yield from _nodes(job, now)
    yield from _cordons(job, now)
    yield from _swaps(job)
    yield from _tests(job)


def _state(job: Job) -> Iterator[Sample]:
    yield from states("unbroken_job_state", (*get_args(JobStateName), "HUNG"), shown_state(job))
    yield from states("unbroken_job_outcome", OUTCOMES, job.outcome.state if job.outcome is not None else "")
    yield from states("unbroken_job_mode", get_args(Mode), job.core.mode)
    yield Sample("unbroken_job_paused", job.paused)
    waits_for = _waits_for(job)
    for kind in WAITING:
        yield Sample("unbroken_job_waiting", kind == waits_for, (kind,))
    yield Sample("unbroken_job_attempts_total", job.attempt.number if job.attempt is not None else 0)
    yield Sample("unbroken_job_restarts_total", job.attempts.restarts)
    yield Sample("unbroken_job_restarts_without_progress", job.incidents.budget.used)
    yield Sample("unbroken_job_restarts_allowed", job.incidents.budget.max_restarts)


def _waits_for(job: Job) -> str:
    if job.is_over:
        return ""
    if job.incidents.held or (job.paused and job.state in ("IDLE", "RECOVERING")):
        return "operator"
    if job.incidents.approval_wanted:
        return "approval"
    if job.space.text:
        return "space"
    if job.state in ("IDLE", "RECOVERING"):
        return "backoff" if "backoff" in job.timers else "nodes"
    return "evidence" if job.state == "DIAGNOSING" else ""


def _standstill(job: Job) -> Iterator[Sample]:
    view, record = job.hangs.silence, job.incidents.hung_or_waiting
    attempt = job.attempt
    if view is not None and attempt is not None and not attempt.over and attempt.number == view.attempt:
        yield Sample("unbroken_job_silence_start_timestamp_seconds", view.since)
    if record is not None:
        yield Sample("unbroken_job_hung_start_timestamp_seconds", record.failed_at)


def _progress(job: Job, now: float, newest: Newest | None) -> Iterator[Sample]:
    attempt = job.attempt
    if attempt is not None and attempt.step is not None:
        step, at = attempt.step, attempt.step_at
        if newest is not None and newest.attempt == attempt.number and newest.step is not None and newest.step > step:
            step, at = newest.step, newest.at
        yield Sample("unbroken_job_step", max(step, attempt.counted_step or 0))
        yield Sample("unbroken_job_progress_timestamp_seconds", max(at, attempt.counted_at))
    elif attempt is not None and attempt.counted:
        yield Sample("unbroken_job_progress_timestamp_seconds", attempt.counted_at)
    if attempt is not None and attempt.workers_started_at is not None:
        yield Sample("unbroken_job_attempt_start_timestamp_seconds", attempt.workers_started_at)
    if attempt is not None and attempt.last_step is not None:
        yield Sample("unbroken_job_last_step", attempt.last_step)
    pace = attempt.seconds_per_step if attempt is not None else None
    if pace is not None:
        yield Sample("unbroken_job_step_seconds", pace)
    if attempt is not None and attempt.counted:
        yield Sample("unbroken_job_counted_steps", attempt.counted)
        waits = job.input_wait
        yield Sample("unbroken_job_input_wait_ratio", waits.share if waits and job.attempts.live(waits.attempt) else 0)
    ratio = ettr(job, now)
    if ratio is not None:
        yield Sample("unbroken_job_ettr_ratio", ratio)
    if job.attempts.started_at is None:
        return
    yield Sample("unbroken_job_start_timestamp_seconds", job.attempts.started_at)
    if job.core.ended_at is not None:
        yield Sample("unbroken_job_end_timestamp_seconds", job.core.ended_at)
    yield Sample("unbroken_job_badput_seconds_total", startup_s(job, now), ("startup",))


def _incidents(job: Job) -> Iterator[Sample]:
    sums = job.incidents.log.totals()
    for failure_class in FailureClass:
        yield Sample("unbroken_job_incidents_total", sums.incidents[failure_class], (failure_class.value,))
    for name, count in Counter(map(_class, _open(job))).items():
        yield Sample("unbroken_job_open_incidents", count, (name,))
    for phase in PHASES:
        yield Sample("unbroken_job_recovery_seconds", sums.recoveries[phase], (phase,), "_count")
        yield Sample("unbroken_job_recovery_seconds", sums.recovery_s.get(phase, 0.0), (phase,), "_sum")
    for kind in (*PHASES, "redo", "other"):
        yield Sample("unbroken_job_badput_seconds_total", sums.badput_s.get(kind, 0.0), (kind,))
    yield Sample("unbroken_job_lost_steps_total", sums.redone_steps)
    use = job.incidents.log.opinion_use
    for result, count in (("answered", use.answered), ("failed", use.failed)):
        yield Sample("unbroken_job_opinions_total", count, (result,))
    yield Sample("unbroken_job_opinion_seconds_total", use.took_s)
    for kind, tokens in (("read", use.tokens_read), ("written", use.tokens_written)):
        yield Sample("unbroken_job_opinion_tokens_total", tokens, (kind,))
    yield Sample("unbroken_job_opinion_cost_total", use.cost)
    plans = [record.plan for record in job.incidents.log.open_failures() if record.plan is not None]
    proposed = sum(len(plan.cordons) for plan in plans) if job.incidents.approval_wanted else 0
    yield Sample("unbroken_job_cordons_proposed", proposed)


def _open(job: Job) -> list[IncidentRecord]:
    return [*job.incidents.log.open_failures(), *job.incidents.log.open_degradations()]


def _class(record: IncidentRecord) -> str:
    return record.verdict.failure_class.value if record.verdict is not None else ""


def _checkpoints(job: Job) -> Iterator[Sample]:
    seen = job.checkpoints.candidates()
    kinds = Counter("suspect" if one.suspect else "complete" if one.complete else "incomplete" for one in seen)
    for kind in ("complete", "incomplete", "suspect"):
        yield Sample("unbroken_job_checkpoints", kinds[kind], (kind,))
    good = [one for one in seen if one.complete and not one.suspect]
    newest = max(good, key=lambda one: one.modified_at, default=None)
    if newest is not None:
        yield Sample("unbroken_job_checkpoint_timestamp_seconds", newest.modified_at)
        if newest.step is not None:
            yield Sample("unbroken_job_checkpoint_step", newest.step)


def _advised(told: JobAdvice) -> Iterator[Sample]:
    if told.enough and told.advice is not None:
        yield Sample("unbroken_job_advised_interval_seconds", told.advice.interval_s)


def ledger_samples(records: Collection[NodeRecord], readable: bool) -> Iterator[Sample]:
    yield Sample("unbroken_ledger_readable", readable)
    lemons = [one for one in records if one.score.lemon and not one.cordons]
    counts = {
        "known": len(records),
        "cordoned": sum(bool(one.cordons) for one in records),
        "proposed": sum(bool(one.proposals) for one in records),
        "probation": sum(one.probation_until is not None for one in records),
        "retest": sum(one.retest_due for one in records),
        "lemon": len(lemons),
    }
    for kind, count in counts.items():
        yield Sample("unbroken_ledger_nodes", count, (kind,))
    for one in sorted(lemons, key=lambda one: (-one.score.points, one.node))[:CORDONS_NAMED]:
        if _SAFE.fullmatch(one.node):
            yield Sample("unbroken_ledger_lemon_points", one.score.points, (one.node,))


def _tiers(job: Job) -> Iterator[Sample]:
    for tier, save in job.tiers.newest().items():
        yield Sample("unbroken_job_checkpoint_tier_timestamp_seconds", save.modified_at, (tier,))
        if save.step is not None:
            yield Sample("unbroken_job_checkpoint_tier_step", save.step, (tier,))


def _snapshots(local: RankSnapshot | None, mirrored: Mirrored | None) -> Iterator[Sample]:
    """In memory: what all ranks hold, and what the loss of any node leaves."""
    for tier, held in (("snapshot_local", local), ("snapshot_mirrored", mirrored)):
        if held is not None:
            yield Sample("unbroken_job_checkpoint_tier_timestamp_seconds", held.at, (tier,))
            yield Sample("unbroken_job_checkpoint_tier_step", held.step, (tier,))


def _nodes(job: Job, now: float) -> Iterator[Sample]:
    """One pass over the nodes: `Job.view()` makes ten objects of each."""
    members = set(job.attempt.members) if job.attempt is not None else set()
    cordons = job.nodes.cordons.all(now)
    cordoned = {cordon.node for cordon in cordons}
    verdicts = [record.verdict for record in _open(job) if record.verdict is not None]
    suspects = {culprit.node for verdict in verdicts for culprit in verdict.culprits}
    counts: Counter[NodeStateName] = Counter()
    for node in job.nodes:
        name = node.name
        if not node.present:
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


def _swaps(job: Job) -> Iterator[Sample]:
    states_of = Counter(job.swaps.decision(one).state for one in job.swaps.proposed.values())
    for state in ("planned", "recommended", "blocked"):
        yield Sample("unbroken_job_swaps", states_of[state], (state,))
    for cause in get_args(Cause):
        yield Sample("unbroken_job_swaps_made_total", job.swaps.made.get(cause, 0), (cause,))


def _tests(job: Job) -> Iterator[Sample]:
    """Of few nodes by name, those that failed first."""
    found: dict[tuple[str, str], TestVerdict] = {}
    for node, results in job.tests.results.items():
        if _SAFE.fullmatch(node):
            pairs = [one for one in results.values() if one.test == PAIR_TEST]
            alone = [one for one in results.values() if one.test != PAIR_TEST]
            found |= {(node, PAIR_TEST): node_verdict(pairs)} if pairs else {}
            found |= {(node, "node"): node_verdict(alone)} if alone else {}
    worst_first = sorted(found, key=lambda one: TEST_VERDICTS.index(found[one]))
    named = list(dict.fromkeys(node for node, _ in worst_first))[:CORDONS_NAMED]
    for node, test in worst_first:
        if node in named:
            yield from states("unbroken_job_active_test_verdict", TEST_VERDICTS, found[node, test], (node, test))


TEST_VERDICTS: Final = ("fail", "unknown", "pass")


def _cordons(job: Job, now: float) -> Iterator[Sample]:
    cordons = job.nodes.cordons.all(now)
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
    known = [cordon for cordon in cordons if job.nodes.get(cordon.node) is not None]
    named: dict[tuple[str, str, str], float] = {}
    for cordon in known[-CORDONS_NAMED:]:
        gpu = cordon.gpu if _SAFE.fullmatch(cordon.gpu) else ""  # an operator may have typed anything
        labels = (cordon.node, gpu, cordon.failure_class.value if cordon.failure_class is not None else "")
        named[labels] = cordon.at
    for labels, at in named.items():
        yield Sample("unbroken_job_cordon_start_timestamp_seconds", at, labels)
    drains = Counter("refused" if told.startswith(NOT_DRAINED) else "asked" for told in job.scheduler.drains.values())
    for kind in ("asked", "refused"):
        yield Sample("unbroken_job_drains", drains[kind], (kind,))
    members = len(job.attempt.members) if job.attempt is not None else job.spec.nodes_max
    yield Sample("unbroken_job_breaker_cordons", job.nodes.cordons.taken(now))
    yield Sample("unbroken_job_breaker_limit", breaker_limit(members))
    yield Sample("unbroken_job_breaker_tripped", job.incidents.breaker_tripped)
