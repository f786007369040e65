"""Which scheduler a node belongs to. The plug-in is a real distribution with an entry point."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.scheduling import JobThere, slurm_job
from supervisor.errors import LaunchRefused
from supervisor.run.prepare import scheduler_job

PLUG_IN = """
from recovery.scheduling import Answer, JobThere

class Queue:
    name = "queue"

    def job_of(self, environment):
        job = environment.get("QUEUE_JOB")
        if job == "bug":
            raise ValueError("no such queue")
        return JobThere(id=job, node="rack7", requeues=2, ends_at=9e9) if job else None

    async def drain(self, node, reason):
        return Answer(outcome="done", text=f"{node} {reason}")

    async def undrain(self, node, job):
        return Answer(outcome="done")

    async def requeue(self, job, exclude, avoid=()):
        return Answer(outcome="done")

    async def cancel(self, job):
        return Answer(outcome="done")

    async def end_step(self, job, nodes):
        return Answer(outcome="done")

    async def comment(self, job, text):
        return Answer(outcome="done")

    async def starts_again(self, job, requeues):
        return False

    async def headless(self, job):
        return ""
"""

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURMD_NODENAME": "node2",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_JOB_END_TIME": "1800000000",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install distributions with an entry point each: name, and what it points to."""
    (tmp_path / "a_queue_of_ours.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(**points: str) -> None:
        for name, target in points.items():
            about = tmp_path / f"a_queue_{name}-1.0.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: a-queue-{name}\nVersion: 1.0\n")
            (about / "entry_points.txt").write_text(f"[unbroken.schedulers]\n{name} = {target}\n")

    return install


def test_a_job_without_a_time_limit_has_none() -> None:
    """Slurm gives it an end that is a year after its start."""
    start, year = 1_800_000_000, 365 * 86400
    unlimited = {**SLURM, "SLURM_JOB_END_TIME": str(start + year), "SLURM_JOB_START_TIME": str(start)}
    assert [slurm_job(unlimited, now) for now in (start + 1.0, start + 30 * 86400.0)] == [
        JobThere(id="77", node="node2", requeues=1)
    ] * 2
    month = {**unlimited, "SLURM_JOB_END_TIME": str(start + 30 * 86400)}
    untold = {key: value for key, value in unlimited.items() if key != "SLURM_JOB_START_TIME"}
    limits = [slurm_job(one, start + 5.0) for one in (month, untold)]
    assert [one and one.ends_at for one in limits] == [start + 30 * 86400.0, None]


def test_one_that_is_plugged_in(install: Callable[..., None]) -> None:
    install(queue="a_queue_of_ours:Queue")
    told, node = scheduler_job("queue", {**SLURM, "QUEUE_JOB": "train-3"})
    assert told == {"scheduler": "queue", "scheduler_job": "train-3", "requeues": 2, "ends_at": 9e9}
    assert node == "rack7"


@pytest.mark.parametrize(
    ("name", "environment", "why"),
    [
        ("slurm", {}, "scheduler.name is slurm"),
        ("queue", {}, "scheduler.name is queue"),
        ("queue", {"QUEUE_JOB": "bug"}, "the scheduler queue failed: ValueError: no such queue"),
        ("queue", {"QUEUE_JOB": "../../x"}, "cannot be the name of a folder"),
        ("pbs", {}, "there is no scheduler 'pbs': installed are local, queue, slurm (scheduler broken was skipped: "),
    ],
)
def test_what_is_refused_and_in_which_words(
    install: Callable[..., None], name: str, environment: dict[str, str], why: str
) -> None:
    install(queue="a_queue_of_ours:Queue", broken="no_such_module:X")
    with pytest.raises(LaunchRefused) as refused:
        scheduler_job(name, {**environment, "PATH": os.environ["PATH"]})
    assert why in str(refused.value)
