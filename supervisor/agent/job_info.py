"""What the probes need to know of the job on this node: its ranks, their GPUs, its folders, the clock's offset."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from supervisor.agent.checkpoints import CheckpointMonitor, is_utf8
from supervisor.agent.link import Link
from supervisor.keeper_client import WorkerProcess
from supervisor.node_health.contract import JobInfo
from supervisor.paths import NodePlan

CLOCK_EVERY_S = 60.0
"""The clock's offset changes all the time. It is read once a minute: every change is sent to the probe workers."""


class JobMonitor:
    """`info` gives the newest state; it costs some microseconds."""

    def __init__(self, plan: NodePlan, checkpoints: CheckpointMonitor, link: Link) -> None:
        self._plan = plan
        self._checkpoints = checkpoints
        self._link = link
        self._clock = JobInfo()
        self._next_clock_at = 0.0
        self._info = JobInfo()
        self._made_of: tuple[object, ...] = ()
        """What `_info` was made of."""
        variables = {**os.environ, **plan.launcher_env}
        self._visible = variables.get("CUDA_VISIBLE_DEVICES", "")
        """The launcher's, which the ranks inherit. What a script sets for itself shows only in the GPUs' processes."""

    def info(self, workers: Sequence[WorkerProcess]) -> JobInfo:
        now = time.monotonic()
        if now >= self._next_clock_at:
            self._clock = self._read_clock(now)
            self._next_clock_at = now + (CLOCK_EVERY_S if self._clock.clock_offset_s is not None else 5.0)
        made_of = (workers, self._clock, self._checkpoints.changes, self._checkpoints.folders)
        if made_of != self._made_of:
            self._made_of, self._info = made_of, self._look(workers)
        return self._info

    def _look(self, workers: Sequence[WorkerProcess]) -> JobInfo:
        clock = self._clock
        alive = [worker for worker in workers if worker.alive]
        complete = [one for one in self._checkpoints.checkpoints if one.complete]
        newest = max(complete, key=lambda one: one.modified_at, default=None)
        return JobInfo(
            ranks={worker.pid: worker.rank for worker in alive},
            gpus_of_ranks={worker.rank: f"{self._visible}:{worker.local_rank}" for worker in alive},
            checkpoint_dirs=tuple(filter(is_utf8, map(str, self._checkpoints.folders))),
            checkpoint_bytes=newest.size_bytes if newest is not None else 0,
            folders=(self._plan.job_dir, self._plan.local_dir, self._plan.cwd),
            python=self._plan.python,
            clock_offset_s=clock.clock_offset_s,
            clock_error_s=clock.clock_error_s,
        )

    def _read_clock(self, now: float) -> JobInfo:
        best = self._link.clock.best(now)
        if best is None:
            return JobInfo()
        offset_s, error_s = best
        return JobInfo(clock_offset_s=round(offset_s, 4), clock_error_s=round(error_s, 4))
