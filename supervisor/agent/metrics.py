"""The agent's metrics for Prometheus: probes, checks, GPUs, ranks, the connection, and what the agent costs."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, get_args

from diagnosis.health import Level, Status
from supervisor.agent.link import Link
from supervisor.agent.mover import MoverRunner
from supervisor.agent.ranks import RankMonitor
from supervisor.config import NodePlan
from supervisor.errors import ConfigError
from supervisor.metrics.port import Exposed, MetricsPort, process_samples
from supervisor.metrics.table import AGENT, UNHEALTHY_NAMED, Sample, job_name, states
from supervisor.metrics.targets import TargetFile
from supervisor.mover.protocol import MoverStatus
from supervisor.node_health.monitor import HealthMonitor

log = logging.getLogger("unbroken.metrics")

GPUS_NAMED: Final = 64
RANKS_NAMED: Final = 128
PROBES_NAMED: Final = 64

GPU_STATES: Final = ("healthy", "warning", "critical", "unknown")


def metrics_port(
    plan: NodePlan, health: HealthMonitor, link: Link, ranks: RankMonitor, mover: MoverRunner
) -> MetricsPort:
    """The port of the agent of `plan`; one that is never opened where the settings say so."""
    options = plan.settings.metrics
    exposed = Exposed(
        AGENT,
        lambda: agent_samples(health, link, ranks, mover.status),
        [("job", job_name(plan.spec.name)), ("node", plan.node)],
    )
    target = TargetFile(plan.job_dir, options.targets_dir, "agent", plan.node)
    where = None
    try:
        alone = plan.spec.nodes_max + plan.spec.spares == 1 and not plan.spec.scheduler_job
        where = options.where(alone=alone) if options.enabled else None
    except ConfigError as error:  # `unbroken run` refuses it; an agent that was started otherwise does without
        log.warning("no metrics: %s", error)
    return MetricsPort(exposed, target, plan.spec.name, where)


def agent_samples(
    health: HealthMonitor, link: Link, ranks: RankMonitor, mover: MoverStatus | None = None
) -> list[Sample]:
    """The samples of all families now; some hundred rows."""
    tally = _tally(health)
    return [
        *_ranks_and_connection(link, ranks),
        *_probes(health, tally),
        *_checks(tally),
        *_gpus(health, tally),
        *_processes(health),
        *_mover(mover),
    ]


class _Tally(NamedTuple):
    """What stands, counted."""

    looked_at: dict[str, float]
    """Probe -> Unix time of its newest look."""
    statuses: Counter[Status]
    bad: Counter[tuple[str, Level, str]]
    """Check, level and failure class -> devices."""
    flaws: Counter[tuple[str, Level, str]]
    """The same of each GPU -> checks."""
    well: set[str]
    """GPUs of which a check says so."""


def _tally(health: HealthMonitor) -> _Tally:
    """In one pass: a node with eight GPUs has about a thousand check states."""
    tally = _Tally({}, Counter(), Counter(), Counter(), set())
    check_states = health.check_states
    looked_at, statuses, well, probe_of = tally.looked_at, tally.statuses, tally.well, check_states.probe_of
    for check_state in health.states():
        result, status = check_state.result, check_state.status
        statuses[status] += 1
        probe = probe_of(result.check)
        if check_state.looked_at > looked_at.get(probe, 0.0):
            looked_at[probe] = check_state.looked_at
        if status == "healthy":
            well.add(result.gpu)
        elif status == "unhealthy":
            failure_class = check_states.check(result.check).failure_class.value
            tally.bad[result.check, check_state.level, failure_class] += 1
            tally.flaws[result.gpu, check_state.level, failure_class] += 1
    return tally


def _mover(status: MoverStatus | None) -> Iterator[Sample]:
    if status is None:
        return
    moved = {
        "mirrored": status.mirrored_bytes,
        "published": status.published_bytes,
        "brought": status.brought_bytes,
    }
    for kind, count in moved.items():
        yield Sample("unbroken_agent_checkpoint_bytes_total", count, (kind,))
    yield Sample("unbroken_agent_checkpoint_behind_seconds", status.behind_s)


def _ranks_and_connection(link: Link, ranks: RankMonitor) -> Iterator[Sample]:
    yield Sample("unbroken_agent_connected", link.connected)
    yield Sample("unbroken_agent_connections_total", link.connections)
    yield Sample("unbroken_agent_attempt", ranks.attempt)
    stopped = set(ranks.stopped)
    for sample in ranks.samples()[:RANKS_NAMED]:
        rank = str(sample.rank)
        if sample.step is not None:
            yield Sample("unbroken_rank_step", sample.step, (rank,))
        clock = sample.clock
        if clock is not None:
            figures = {"counted_steps": clock.steps or None, "step_seconds": clock.step_s}
            figures["input_wait_ratio"] = clock.input_share
            for name, figure in figures.items():
                if figure is not None:
                    yield Sample(f"unbroken_rank_{name}", figure, (rank,))
        if sample.exit is None:
            yield Sample("unbroken_rank_quiet_seconds", sample.moved_age_s, (rank,))
            yield Sample("unbroken_rank_stopped", sample.rank in stopped, (rank,))


def _probes(health: HealthMonitor, tally: _Tally) -> Iterator[Sample]:
    for group, worker in health.workers.items():
        yield Sample("unbroken_agent_station_up", bool(worker.pid), (group,))
    yield Sample("unbroken_agent_findings_left_out_total", health.check_states.left_out)
    for probe, cost in list(health.costs.items())[:PROBES_NAMED]:
        yield Sample("unbroken_probe_looks_total", cost.looks, (probe,))
        yield Sample("unbroken_probe_cpu_seconds_total", cost.cpu_s, (probe,))
        yield Sample("unbroken_probe_seconds_total", cost.took_s, (probe,))
    for probe, at in list(tally.looked_at.items())[:PROBES_NAMED]:
        if probe:
            yield Sample("unbroken_probe_look_timestamp_seconds", at, (probe,))


def _checks(tally: _Tally) -> Iterator[Sample]:
    for state in get_args(Status):
        yield Sample("unbroken_checks", tally.statuses[state], (state,))
    worst_first = sorted(tally.bad.items(), key=lambda row: row[0][1])  # critical comes first
    for labels, count in worst_first[:UNHEALTHY_NAMED]:
        yield Sample("unbroken_check_unhealthy", count, labels)


def _gpus(health: HealthMonitor, tally: _Tally) -> Iterator[Sample]:
    levels: dict[str, set[Level]] = {}
    for gpu, level, _ in tally.flaws:
        levels.setdefault(gpu, set()).add(level)
    named = sorted(health.check_states.gpus.items())[:GPUS_NAMED]
    for gpu, uuid in named:
        found: Sequence[str] = [*levels.get(gpu, ()), *(("healthy",) if gpu in tally.well else ())]
        yield Sample("unbroken_gpu_info", 1, (gpu, uuid))
        yield from states("unbroken_gpu_health", GPU_STATES, max(found, key=_RANKS.index, default="unknown"), (gpu,))
    known = dict(named)
    for labels, count in tally.flaws.items():
        if labels[0] in known:
            yield Sample("unbroken_gpu_unhealthy", count, labels)


_RANKS: Final = ("healthy", "warning", "critical")


def _processes(health: HealthMonitor) -> Iterator[Sample]:
    yield from process_samples("agent", os.getpid())
    for group, worker in health.workers.items():
        if worker.pid:
            yield from process_samples(f"station_{group}", worker.pid)
