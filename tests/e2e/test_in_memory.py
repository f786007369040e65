"""Snapshots in memory: what a killed rank loses, a rank whose weights go wrong, and that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Supervise = Callable[..., Any]


def test_a_killed_rank_goes_on_from_memory(supervise: Supervise) -> None:
    """The script writes no checkpoint. The agent is killed as well: the memory is not its."""
    job = supervise("in_memory", steps=80)
    job.wait_step(20)
    job.until(lambda: (job.told("status").get("snapshot") or {}).get("step", 0) >= 10, 20, "a snapshot in the status")
    job.process("agent").kill()
    job.kill(1)
    job.succeeds()
    starts = [int(job.wait_shown(rf"rank {rank} goes on from memory at step (\d+)")[1]) for rank in (0, 1)]
    assert starts[0] == starts[1] >= 20
    assert len(job.incidents()) == 1


@pytest.mark.parametrize("fault", ["flip", "nan"])
def test_the_run_goes_back_to_before_a_replica_differed(supervise: Supervise, fault: str) -> None:
    """At step 12 a weight of rank 2 changes; of step 9 all ranks had the same. What it spoils spreads at once."""
    job = supervise(
        "in_memory", "3", steps=30, nproc=3, pace=0.3, rig=f"{fault}@12:2", env={"UNBROKEN_LOSS_GUARD": "enforce"}
    )
    start = job.wait_shown(r"rank 0 goes on from \S+ at step (\d+)")
    assert int(start[1]) <= 9
    job.succeeds()
    [incident] = job.incidents()
    assert (incident["trigger"], incident["verdict"]["failure_class"]) == ("replicas", "silent_data_corruption")
    assert [one["rank"] for one in incident["verdict"]["culprits"]] == [2]
    assert incident["plan"]["rollback"]["step"] == 10


def test_nothing_is_left_when_everything_is_killed(supervise: Supervise) -> None:
    job = supervise("in_memory", steps=400)
    job.wait_step(10)
    holders = [process.pid for process in job.kin()]
    assert any(map(memory_held, holders))
    job.front.kill()
    for process in job.kin():
        process.kill()
    job.until(lambda: not any(map(memory_held, holders)), 20, "no process that holds snapshots")


def memory_held(pid: int) -> bool:
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any("memfd:unbroken-snapshot" in link for link in links)
