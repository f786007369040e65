"""An operator takes the GPUs: a real health with real probe workers behind a real socket, asked by the real command."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from supervisor.agent.actions import LauncherSocket
from supervisor.cli import check
from supervisor.cli.check import ask_agent, seconds_of, sockets
from supervisor.node_health.contract import JobInfo
from supervisor.node_health.health_file import GpuRelease
from supervisor.node_health.monitor import HealthMonitor
from supervisor.node_health.runner import WorkerTimes

QUICK = WorkerTimes(
    tick=0.5, silent_ticks=60, dying=5.0, look_at_unkillable=0.1, look_at_hold=0.05, first_pause=0.05, write_every=0.05
)
RESPONDS = "gpu_driver_responds"


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.health = HealthMonitor("n1", folder / "health.json", folder / "probes", pace=QUICK)
        self.said: list[str] = []

    async def until(self, fits) -> None:
        deadline = time.monotonic() + 90
        while not fits():
            assert time.monotonic() < deadline, (self.said, self.check_state(), self.worker.problem)
            self.health.update(JobInfo())
            self.said += filter(None, [self.health.notice()])
            await asyncio.sleep(0.01)

    @property
    def worker(self):
        return self.health.workers["gpu"]

    def check_state(self) -> str:
        told = [one for one in self.health.check_states.all() if one.result.check == RESPONDS]
        return f"{told[0].status}: {told[0].result.text}" if told else ""

    async def command(self, time_: str):
        command = [sys.executable, "-m", "supervisor.cli.main", "check", "--release-gpus", time_]
        process = await asyncio.create_subprocess_exec(
            *command, "--local-dir", str(self.folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def a_node(folder: Path, make_state):
    node = Node(folder)
    server = await LauncherSocket(make_state(), node.health.release_gpus).serve(folder / "agent.sock")
    task = asyncio.create_task(node.health.run())
    try:
        yield node
        assert not task.done(), task
    finally:
        server.close()
        task.cancel()
        await asyncio.wait({task})


def test_the_gpus_are_released_and_taken_back(make_state, tmp_path: Path) -> None:
    async def story() -> None:
        async with a_node(tmp_path, make_state) as node:
            await node.until(lambda: node.worker.pid and node.check_state())
            held = node.worker.pid
            code, out, _ = await node.command("10m")
            assert code == 0
            clock = time.strftime("%H:%M", time.localtime(node.health._release.until))
            assert out == f"{tmp_path}: the GPUs are released until {clock}\n"
            assert not os.path.exists(f"/proc/{held}")
            assert node.worker.alive() == []
            await node.until(lambda: node.said)
            assert f"until {clock}" in node.said[0]
            assert node.check_state().startswith(("unknown: released by the operator", "not_applicable"))
            assert (await node.command("0"))[0] == 0
            await node.until(lambda: node.worker.pid)
            await node.until(lambda: len(node.said) == 2)

    asyncio.run(story())


def test_the_time_passes_and_the_next_agent_keeps_the_word(make_state, tmp_path: Path) -> None:
    GpuRelease(until=time.time() + 6, by="somebody").keep(tmp_path / "probes")

    async def story() -> None:
        async with a_node(tmp_path, make_state) as node:
            await node.until(lambda: any("somebody" in said for said in node.said))
            await node.until(lambda: node.health.workers["node"].pid)
            assert node.worker.pid == 0
            await node.until(lambda: node.worker.pid)
            # The worker waits by the monotonic clock, the release ends by the wall clock: either may be first.
            await node.until(lambda: GpuRelease.read(tmp_path / "probes").until == 0)

    asyncio.run(story())


def test_where_no_agent_runs_there_is_nothing_to_release(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "supervisor.cli.main", "check", "--release-gpus"]
    done = subprocess.run([*command, "10m", "--local-dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no agent" in done.stdout
    done = subprocess.run([*command, "soon"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_an_agent_that_has_ended_leaves_its_socket(make_state, tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "job/n1").mkdir(parents=True)
        server = await LauncherSocket(make_state(), None).serve(tmp_path / "job/n1/agent.sock")
        server.close()
        await server.wait_closed()

    asyncio.run(story())
    (path,) = sockets(str(tmp_path)) or ("",)
    assert path == "" or ask_agent(path, 1.0) == {}


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("99h", 86400)])
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_an_agent_that_does_not_answer_is_told_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stuck:
        stuck.bind(str(tmp_path / "agent.sock"))
        stuck.listen()
        assert check.release_gpus_here("10m", str(tmp_path)) == 1
    assert "the agent gave no answer in 0.1 s; it may still do it" in capsys.readouterr().err
