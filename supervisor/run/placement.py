"""Where this node runs: the scheduler that gave it, its job there, and its place among the job's nodes.

By itself a process knows of Slurm, by the environment of its step. `[scheduler] name` chooses: none (`local`), Slurm,
or one that is plugged in.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from recovery.scheduling import JobThere, slurm_job
from supervisor.errors import LaunchRefused


class Step(NamedTuple):
    """The Slurm step that this node belongs to."""

    nodes: int
    """0: there is none."""
    order: int | None
    """This node's place among them."""


def slurm_step(environment: Mapping[str, str]) -> Step:
    """Raises LaunchRefused where the step has more than one task a node."""
    if not environment.get("SLURM_JOB_ID") or not environment.get("SLURM_STEP_NUM_NODES", "").isdigit():
        return Step(0, None)
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or nodes)
    if tasks > nodes:
        raise LaunchRefused(
            f"srun starts {tasks} tasks on {nodes} node{'s' * (nodes > 1)}, unbroken wants one a node: "
            "srun --ntasks-per-node=1 unbroken run --nproc-per-node N -- ..."
        )
    order = environment.get("SLURM_NODEID", "")
    return Step(nodes, int(order) if order.isdigit() and nodes > 1 else None)


def scheduler_job(name: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """What the job's spec says of its scheduler, and what that calls this node. Raises LaunchRefused.

    `name`: as configured; empty: Slurm within one of its jobs, else none. All nodes of a job say the same.
    """
    if name == "local":
        return {}, ""
    job = slurm_job(environment, time.time()) if name in ("", "slurm") else _of_plug_in(name, environment)
    if job is None:
        if name:
            raise LaunchRefused(f"the scheduler is to be {name}, but this is none of its jobs")
        return {}, ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}", job.id):
        raise LaunchRefused(f"the scheduler's name for its job, {job.id[:80]!r}, cannot be that of a folder")
    told = {"scheduler": name or "slurm", "scheduler_job": job.id, "requeues": job.requeues, "ends_at": job.ends_at}
    return told, job.node


def _of_plug_in(name: str, environment: Mapping[str, str]) -> JobThere | None:
    from recovery.schedulers import load_schedulers  # seldom needed

    found, problems = load_schedulers()
    scheduler = found.get(name)
    if scheduler is None:
        skipped = f" ({'; '.join(problems)})" if problems else ""
        raise LaunchRefused(f"there is no scheduler {name!r}: installed are {', '.join(sorted(found))}{skipped}")
    try:
        return scheduler.job_of(environment)
    except Exception as error:  # a plug-in's bug
        raise LaunchRefused(f"the scheduler {name} failed: {type(error).__name__}: {str(error)[:200]}") from error
