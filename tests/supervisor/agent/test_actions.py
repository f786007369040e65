"""The launcher's questions, over the real unix socket, and the request to drain a node as its agent writes it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.cordon import DrainRequest, read_request, request_file
from supervisor.agent.actions import DrainRequests, LauncherSocket
from supervisor.agent.state import AgentState
from supervisor.messages import JobSpec
from supervisor.node_health.contract import ProbeContext


class Launcher:
    """Speaks as the rendezvous handler does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, path: Path) -> Launcher:
        return cls(*await asyncio.open_unix_connection(str(path)))

    def ask(self, **question: Any) -> None:
        self.writer.write(json.dumps(question).encode() + b"\n")

    async def answer(self) -> Any:
        return json.loads(await asyncio.wait_for(self.reader.readline(), 90))


async def until(state: AgentState, condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition(state):
        assert time.monotonic() < deadline
        state.wakeup.clear()
        await state.wakeup.wait(90)


async def nothing_to_release(seconds: float, by: str) -> dict[str, Any]:
    raise AssertionError((seconds, by))


def test_join_wait_release_and_leave(make_state: Any, tmp_path: Path) -> None:
    async def story() -> None:
        state = make_state()
        launchers = LauncherSocket(state, nothing_to_release)
        server = await launchers.serve(tmp_path / "s")
        launcher = await Launcher.connect(tmp_path / "s")
        launcher.ask(op="join", pid=7, store_host="127.0.0.1", store_port=99, local_world_size=2)
        await until(state, lambda s: s.offer is not None)
        assert (state.offer.port, state.offer.local_world_size) == (99, 2)
        assert not launchers.answer("wait", order="look")  # it is joining, not watching
        assert launchers.answer("join", attempt=1, rank=0, nodes=1, store_host="127.0.0.1", store_port=99)
        assert (await launcher.answer())["attempt"] == 1
        assert state.offer is None
        launcher.ask(op="wait", attempt=1)
        await until(state, lambda s: s.watching == 1)
        assert launchers.answer("wait", order="restart")
        assert await launcher.answer() == {"order": "restart"}
        launcher.ask(op="join", store_host="", store_port=1, local_world_size=2)
        await until(state, lambda s: s.offer is not None)
        assert launchers.answer("join", leave=True)
        assert await launcher.answer() == {"leave": True}
        server.close()

    asyncio.run(story())


def test_a_launcher_that_hangs_up_leaves_no_question_behind(make_state: Any, tmp_path: Path) -> None:
    async def story() -> None:
        state = make_state()
        launchers = LauncherSocket(state, nothing_to_release)
        server = await launchers.serve(tmp_path / "s")
        first = await Launcher.connect(tmp_path / "s")
        first.ask(op="wait", attempt=3)
        await until(state, lambda s: s.watching == 3)
        first.writer.close()
        await until(state, lambda s: s.watching is None)
        for nonsense in (b"\x00\xff\n", b"[]\n", b'{"op":"join"}\n', b'{"op":"dance"}\n', b"x" * 100_000 + b"\n"):
            bad = await Launcher.connect(tmp_path / "s")
            bad.writer.write(nonsense)
            assert await asyncio.wait_for(bad.reader.read(), 90) == b""
        second = await Launcher.connect(tmp_path / "s")
        second.ask(op="wait", attempt=4)
        await until(state, lambda s: s.watching == 4)
        server.close()

    asyncio.run(story())


REASON = "unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=77/i-1 Xid 79"


@pytest.fixture
def state(make_state: Any) -> AgentState:
    spec = JobSpec(name="j", scheduler="slurm", scheduler_job="77")
    return make_state(node="n2", scheduler_node="node2", spec=spec)


def follow_until(requests: DrainRequests, reason: str, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            requests.follow(reason)
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(wait(), 60))


def test_it_is_written_as_root_reads_it_and_removed(tmp_path: Path, state: AgentState) -> None:
    requests = DrainRequests(state, str(tmp_path))
    path = tmp_path / request_file("77", os.getuid())
    follow_until(requests, REASON, lambda: bool(state.notices.reported))
    assert path.stat().st_mode & 0o777 == 0o600
    boot_id = ProbeContext().boot_id
    read = read_request(path.read_bytes(), job="77", node="node2", boot_id=boot_id, now=time.time())
    assert isinstance(read, DrainRequest)
    assert read.reason == REASON
    path.unlink()  # root's programs have read it
    follow_until(requests, REASON, lambda: True)
    assert not path.exists()
    follow_until(requests, "", lambda: state.saved.drain_request == "")
    assert len(state.notices.reported) == 1


def test_a_folder_that_is_not_there_is_reported(tmp_path: Path, state: AgentState) -> None:
    follow_until(DrainRequests(state, str(tmp_path / "none")), REASON, lambda: bool(state.notices.reported))
    assert "No such file" in state.notices.reported[0]
