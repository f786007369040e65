"""Schedulers: who gave the job its nodes, and can take one out of service or start the job again.

A `Scheduler` acts on requests of the job and decides nothing. Every call ends within its deadline, also when the
scheduler's daemons hang. Plug-ins: entry-point group `unbroken.schedulers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Protocol

from diagnosis.signals import Frozen, clean_line

PREFIX = "unbroken:"
DOMAIN_LIMIT: Final = 200
"""Every reason that we write begins with it; one that does not is somebody else's, and is left alone."""


RequestOutcome = Literal["done", "already", "foreign", "denied", "unavailable", "unsupported", "failed"]
"""What became of a request to the scheduler. `already`: it was so; `foreign`: somebody else's reason is there, and is
left alone; `denied`: we lack the rights; `unavailable`: no answer in time, worth another try; `unsupported`: this
scheduler cannot do it."""


class Answer(Frozen, frozen=True, kw_only=True):
    outcome: RequestOutcome
    text: str = ""
    """In words, for the operator."""


class LeavingNode(Frozen, frozen=True, kw_only=True):
    """A node that its scheduler takes out of service."""

    node: str
    """As the scheduler calls it."""
    kind: Literal["drained", "maintenance"]
    why: str
    """In words."""


class JobThere(Frozen, frozen=True, kw_only=True):
    """The job that a process belongs to, as its scheduler knows it."""

    id: str
    node: str = ""
    """What the scheduler calls the process's node; empty: as that calls itself."""
    requeues: int = 0
    """How often it has started the job again."""
    ends_at: float | None = None
    """When it ends the job, Unix time; None: no limit, or none that is known."""


UNLIMITED_S: Final = 364 * 86400.0
"""Slurm says of a job without a time limit that it ends a year after its start."""


def slurm_domain(environment: Mapping[str, str]) -> str:
    """The switch or rack of this node, where Slurm knows it (TopologyPlugin): `spine.leaf1` of `spine.leaf1.node3`."""
    return clean_line(environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0], DOMAIN_LIMIT)


def slurm_job(environment: Mapping[str, str], now: float) -> JobThere | None:
    """The job of Slurm that a process with this environment runs in. (Here: it is asked without loading the rest.)"""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return None
    names = ("RESTART_COUNT", "JOB_START_TIME", "JOB_END_TIME")
    restarts, start, end = (environment.get(f"SLURM_{name}", "") for name in names)
    limited = end.isdigit() and float(end) - (float(start) if start.isdigit() else now) < UNLIMITED_S
    return JobThere(
        id=job,
        node=environment.get("SLURMD_NODENAME", ""),
        requeues=int(restarts) if restarts.isdigit() else 0,
        ends_at=float(end) if limited else None,
    )


class Scheduler(Protocol):
    name: str

    def job_of(self, environment: Mapping[str, str]) -> JobThere | None:
        """The job that a process with this environment runs in. Asked where this scheduler is configured by name."""

    async def drain(self, node: str, reason: str) -> Answer:
        """No new work for `node`; running jobs go on. Never over a foreign reason, which is read again just before."""

    async def undrain(self, node: str, job: str) -> Answer:
        """Back into service, if the reason that is shown is one that `job` gave (`recovery.cordon.is_drain_of`)."""

    async def requeue(self, job: str, exclude: tuple[str, ...], avoid: tuple[str, ...] = ()) -> Answer:
        """Start the job again at once, on other nodes than `exclude`, and than `avoid` where there are enough others.

        A job that cannot start on what is left is not touched (`unsupported`).
        """

    async def cancel(self, job: str) -> Answer:
        """End the job, one that waits to be started again, too."""

    async def end_step(self, job: str, nodes: tuple[str, ...]) -> Answer:
        """The run has ended, and nobody hears of its processes on `nodes`: see that the job does not wait for them."""

    async def comment(self, job: str, text: str) -> Answer:
        """Have the scheduler's own record of the job say `text`, where nobody else's words stand there."""

    async def starts_again(self, job: str, requeues: int) -> bool | None:
        """Whether the job that is being ended now is to start again by itself (preempted, or requeued by somebody),
        after `requeues` new starts. None where the scheduler does not answer: it is asked again."""

    async def leaving(self, job: str, nodes: tuple[str, ...]) -> tuple[LeavingNode, ...] | None:
        """Which of these nodes it takes out of service, for another reason than one of `job`'s. None: it does not say.

        A plug-in may leave this out.
        """

    async def headless(self, job: str) -> str:
        """The node of the job's first process, with our controller, if the scheduler has lost it and lets the others
        run on. Empty when that is not so, or not known."""
