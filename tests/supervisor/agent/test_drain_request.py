"""The request to drain a node, as its agent leaves it and takes it back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.drain_requests import DrainRequest, file_name, read_request
from supervisor.agent.drain_request import DrainRequests
from supervisor.agent.state import Notebook
from supervisor.messages import JobSpec
from supervisor.node_health.contract import Place
from supervisor.paths import NodePlan

REASON = "unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=77/i-1 Xid 79"


@pytest.fixture
def desk(tmp_path: Path) -> Callable[[str, list[str]], DrainRequests]:
    def make(folder: str, told: list[str]) -> DrainRequests:
        plan = NodePlan(
            node="n2",
            job_dir=str(tmp_path),
            local_dir=str(tmp_path),
            spec=JobSpec(name="j", scheduler="slurm", scheduler_job="77"),
            launcher_argv=(),
            python="",
            cwd="",
            front_pid=1,
            front_start_time=1,
            scheduler_node="node2",
        )
        return DrainRequests(plan, folder, Notebook(), told.append)

    return make


def until(desk: DrainRequests, reason: str, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            desk.tend(reason)
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(wait(), 60))


def test_it_is_left_as_root_takes_it_and_taken_back(tmp_path: Path, desk: Callable[..., DrainRequests]) -> None:
    told: list[str] = []
    ours = desk(str(tmp_path), told)
    path = tmp_path / file_name("77", os.getuid())
    until(ours, REASON, lambda: bool(told))
    assert path.stat().st_mode & 0o777 == 0o600
    boot_id = Place().boot_id
    read = read_request(path.read_bytes(), job="77", node="node2", boot_id=boot_id, now=time.time())
    assert isinstance(read, DrainRequest)
    assert read.reason == REASON
    path.unlink()  # root's programs have read it
    until(ours, REASON, lambda: True)
    assert not path.exists()
    until(ours, "", lambda: ours._book.drain_request == "")
    assert len(told) == 1


def test_where_there_is_no_folder_it_is_said(tmp_path: Path, desk: Callable[..., DrainRequests]) -> None:
    told: list[str] = []
    until(desk(str(tmp_path / "none"), told), REASON, lambda: bool(told))
    assert "No such file" in told[0]
