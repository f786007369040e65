"""What the probes are told of the job on this node: its ranks and their GPUs, where it writes, the clock's offset."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from supervisor.agent.checkpoints import CheckpointMonitor, is_utf8
from supervisor.agent.link import Link
from supervisor.keeper_client import WorkerProcess
from supervisor.node_health.contract import JobInfo
from supervisor.paths import NodePlan

SLOW_EVERY_S = 60.0
"""What changes all the time is looked up once a minute: every change is sent to the probe workers."""


class JobWatch:
    """`view` gives the newest state; it costs some microseconds."""

    def __init__(self, plan: NodePlan, checkpoints: CheckpointMonitor, link: Link) -> None:
        self._plan = plan
        self._checkpoints = checkpoints
        self._link = link
        self._slow = JobInfo()
        self._next_slow_at = 0.0
        self._view = JobInfo()
        self._made_of: tuple[object, ...] = ()
        """What `_view` was made of."""
        variables = {**os.environ, **plan.launcher_env}
        self._visible = variables.get("CUDA_VISIBLE_DEVICES", "")
        """Ranks get the launcher's (what a script sets for itself shows only where its processes use the GPUs)."""

    def view(self, workers: Sequence[WorkerProcess]) -> JobInfo:
        now = time.monotonic()
        if now >= self._next_slow_at:
            self._slow = self._look_slowly(now)
            self._next_slow_at = now + (SLOW_EVERY_S if self._slow.clock_offset_s is not None else 5.0)
        made_of = (workers, self._slow, self._checkpoints.changes, self._checkpoints.folders)
        if made_of != self._made_of:
            self._made_of, self._view = made_of, self._look(workers)
        return self._view

    def _look(self, workers: Sequence[WorkerProcess]) -> JobInfo:
        slow = self._slow
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
            clock_offset_s=slow.clock_offset_s,
            clock_error_s=slow.clock_error_s,
        )

    def _look_slowly(self, now: float) -> JobInfo:
        best = self._link.clock.best(now)
        if best is None:
            return JobInfo()
        offset_s, error_s = best
        return JobInfo(clock_offset_s=round(offset_s, 4), clock_error_s=round(error_s, 4))
