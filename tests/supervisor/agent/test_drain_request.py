"""The request to drain a node, as its agent writes it and removes it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.cordon import DrainRequest, read_request, request_file
from supervisor.agent.actions import DrainRequests
from supervisor.agent.state import AgentState
from supervisor.messages import JobSpec
from supervisor.node_health.contract import ProbeContext

REASON = "unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=77/i-1 Xid 79"


@pytest.fixture
def state(make_state: Any) -> AgentState:
    spec = JobSpec(name="j", scheduler="slurm", scheduler_job="77")
    return make_state(node="n2", scheduler_node="node2", spec=spec)


def until(requests: DrainRequests, reason: str, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            requests.follow(reason)
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(wait(), 60))


def test_it_is_written_as_root_reads_it_and_removed(tmp_path: Path, state: AgentState) -> None:
    requests = DrainRequests(state, str(tmp_path))
    path = tmp_path / request_file("77", os.getuid())
    until(requests, REASON, lambda: bool(state.notices.reported))
    assert path.stat().st_mode & 0o777 == 0o600
    boot_id = ProbeContext().boot_id
    read = read_request(path.read_bytes(), job="77", node="node2", boot_id=boot_id, now=time.time())
    assert isinstance(read, DrainRequest)
    assert read.reason == REASON
    path.unlink()  # root's programs have read it
    until(requests, REASON, lambda: True)
    assert not path.exists()
    until(requests, "", lambda: state.saved.drain_request == "")
    assert len(state.notices.reported) == 1


def test_a_folder_that_is_not_there_is_reported(tmp_path: Path, state: AgentState) -> None:
    until(DrainRequests(state, str(tmp_path / "none")), REASON, lambda: bool(state.notices.reported))
    assert "No such file" in state.notices.reported[0]
