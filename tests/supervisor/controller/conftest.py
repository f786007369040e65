"""A controller in this process with agents around it, and the real one as a process."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.link import ControllerAddress, Link
from supervisor.controller.alerts import AlertReceiver
from supervisor.controller.client import ControllerClient
from supervisor.controller.heartbeats import Newest
from supervisor.controller.journal import Entry, History, JournalFile, open_journal, read_history, steps
from supervisor.controller.loop import ControlLoop
from supervisor.controller.main import read_controller_file
from supervisor.controller.server import Server
from supervisor.messages import (
    PROTOCOL,
    Action,
    AnyEvent,
    Assign,
    Assignment,
    CommandRequest,
    ControllerMessage,
    ControllerStarted,
    End,
    Heartbeat,
    Hello,
    JobSpec,
    NodeJoined,
    Note,
    OperatorCommand,
    Outcome,
    Progressed,
    SetTimer,
    TimerFired,
    encode,
)
from supervisor.wire import authentication

TOKEN = "secret"


class SmallJob:
    """Deterministic and small: every node that joins is assigned; operators end it or make it fail."""

    state = "RUNNING"

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        self.epoch = 0
        self.version = 0
        self.seen: list[AnyEvent] = []
        self.lasts = False
        """Once stopped it waits for its nodes."""

    def handle(self, event: AnyEvent) -> list[Action]:
        self.seen.append(event)
        match event:
            case ControllerStarted():
                self.epoch = event.epoch
                return [self.assign(node) for node in self.nodes]
            case NodeJoined():
                self.nodes[event.node] = 1
                return [self.assign(event.node), SetTimer(timer="soon", at=event.at + 0.3)]
            case TimerFired():
                return [Note(text=f"{event.timer} fired", loud=True)]
            case OperatorCommand(command="restart"):
                return [Note(text="restarted"), *map(self.assign, self.nodes)]
            case OperatorCommand(command="reject"):
                raise RuntimeError("this job does not take that")
            case OperatorCommand(command="stop") if not self.lasts:
                return [End(outcome=Outcome(state="stopped", exit_code=143, line="stopped"))]
        return []

    def assign(self, node: str) -> Assign:
        self.version += 1
        return Assign(
            assignment=Assignment(
                epoch=self.epoch, version=self.version, node=node, role="member", attempt=1, stage="form"
            )
        )


class StepWatch:
    """Reports the number of each heartbeat as a step."""

    def __init__(self) -> None:
        self.ticks = 0
        self.newest = Newest(0, None, 0.0, None)

    def observe(self, heartbeat: Heartbeat, now: float) -> list[AnyEvent]:
        if heartbeat.stop_request == "trouble":
            raise ValueError("a heartbeat that cannot be digested")
        return [Progressed(at=now, attempt=heartbeat.attempt, step=heartbeat.seq)] if heartbeat.attempt else []

    def before_command(self, now: float) -> list[AnyEvent]:
        del now
        return []

    def tick(self, now: float) -> list[AnyEvent]:
        del now
        self.ticks += 1
        return []


def no_view(name: str, loop: ControlLoop) -> Callable[[], dict[str, object]]:
    return lambda: {"schema": 1, "ok": not loop.stall, "view": name}


class Running:
    def __init__(self, loop: ControlLoop, job: SmallJob, address: str, task: asyncio.Task[Outcome | None]) -> None:
        self.loop, self.job, self.address, self.task = loop, job, address, task
        assert isinstance(loop.watch, StepWatch)
        self.watch = loop.watch


class Agent:
    """A link and everything it was told."""

    def __init__(self, place: Callable[[], ControllerAddress], node: str = "n0", **hello: Any) -> None:
        values: dict[str, Any] = {"protocol": PROTOCOL, "host": "h", "address": "", "spec": JobSpec(name="j")}
        self.told: list[ControllerMessage] = []
        self.link = Link(place, lambda: TOKEN, Hello(**{**values, "node": node, **hello}))
        self.task = asyncio.create_task(self.link.run(self.told.append))
        self.seq = 0
        self.node = node

    def beat(self, **values: Any) -> None:
        self.seq += 1
        self.link.post(Heartbeat(node=self.node, incarnation=1, seq=self.seq, **values))

    @property
    def newest(self) -> Assignment | None:
        found = [message for message in self.told if isinstance(message, Assignment)]
        return found[-1] if found else None


class Process:
    """The real controller."""

    def __init__(self, job_dir: Path, *options: str, descriptors: int = 0, **env: str) -> None:
        """`descriptors`: no more for it than so many."""
        self.job_dir = job_dir
        argv = [sys.executable, "-m", "supervisor.controller.main", "--job-dir", str(job_dir), *options]
        self.folder = tempfile.mkdtemp(prefix="ub", dir="/tmp")
        """Short enough for a socket, and gone with this."""
        if "--socket" not in options:
            argv += ["--socket", f"{self.folder}/s"]
        if descriptors:
            argv = ["prlimit", f"--nofile={descriptors}:{descriptors}", *argv]
        with open(job_dir / "controller.log", "ab") as log:
            self.popen = subprocess.Popen(argv, stderr=log, env={**os.environ, **env})

    @property
    def address(self) -> str:
        """As soon as it answers there."""
        deadline = time.monotonic() + 60
        while (found := read_controller_file(self.job_dir)) is None or found.pid != self.popen.pid:
            assert self.popen.poll() is None, (self.job_dir / "controller.log").read_text()
            assert time.monotonic() < deadline, "the controller did not start"
            time.sleep(0.01)
        return found.address

    def client(self, ca: str = "") -> ControllerClient:
        return ControllerClient(self.address, (self.job_dir / "token").read_text().strip(), ca)

    def status(self) -> dict[str, Any]:
        return self.client().get("/v1/status")

    def exit_code(self) -> int:
        """When it has ended."""
        return self.popen.wait(60)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


def given(command: str) -> CommandRequest:
    return CommandRequest(command=command, reason="because", by="me")  # type: ignore[arg-type]


class Rig:
    """Controllers of one job folder, one after the other or at once, and agents."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir
        self.processes: list[Process] = []

    @asynccontextmanager
    async def controller(
        self,
        open_file: Callable[[Path], JournalFile] | None = None,
        unheard_s: float = 120.0,
        alerts: AlertReceiver | None = None,
    ) -> AsyncIterator[Running]:
        more: dict[str, Any] = {} if open_file is None else {"open_file": open_file}
        journal, history = open_journal(self.job_dir, **more)
        job = SmallJob()
        loop = ControlLoop(job, StepWatch, journal, history, no_view, unheard_s)
        server = Server(loop, TOKEN, alerts=alerts)
        port = await server.start("127.0.0.1", 0)
        task = asyncio.create_task(loop.run())
        try:
            yield Running(loop, job, f"http://127.0.0.1:{port}", task)
        finally:
            loop.stop()
            await asyncio.wait([task], timeout=30.0)
            await server.stop()

    new_agent = Agent

    @asynccontextmanager
    async def agent(self, where: str | ControllerAddress, node: str = "n0", **hello: Any) -> AsyncIterator[Agent]:
        place = ControllerAddress(where) if isinstance(where, str) else where
        found = Agent(lambda: place, node, **hello)
        try:
            yield found
        finally:
            found.task.cancel()
            await asyncio.gather(found.task, return_exceptions=True)

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come"
            await asyncio.sleep(0.002)

    async def ask(
        self, address: str, call: Callable[[ControllerClient], dict[str, Any]], token: str = TOKEN
    ) -> dict[str, Any]:
        return await asyncio.to_thread(call, ControllerClient(address, token))

    async def override(self, running: Running, command: str) -> dict[str, Any]:
        return await self.ask(running.address, lambda client: client.command(given(command)))

    async def ask_by(self, client: ControllerClient, command: str) -> dict[str, Any]:
        return await asyncio.to_thread(client.command, given(command))

    def history(self) -> History:
        return read_history(self.job_dir)

    def journal(self, events: Sequence[AnyEvent]) -> None:
        """What an earlier controller has written."""
        journal, _ = open_journal(self.job_dir)
        journal.write([Entry("event", event.at, encode(event)) for event in events])
        journal.close()

    def journalled(self, kind: type) -> list[Any]:
        return [step.event for step in steps(self.history().records) if isinstance(step.event, kind)]

    def go(self, scenario: Any) -> None:
        asyncio.run(asyncio.wait_for(scenario, 100.0))

    def start(self, *options: str, descriptors: int = 0, **env: str) -> Process:
        """The real controller, which answers."""
        self.processes.append(Process(self.job_dir, *options, descriptors=descriptors, **env))
        return self.processes[-1]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for process in rig.processes:
        process.kill()


@pytest.fixture
def munged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real one, and programs that ask it; users of every id can."""
    for program in ("munged", "munge", "unmunge"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip("munge is not installed")
    folder = Path(tempfile.mkdtemp(prefix="ub", dir="/tmp"))
    folder.chmod(0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {name: folder / name for name in ("socket", "pid-file", "log-file", "seed-file")}
    options = [f"--{name}={path}" for name, path in files.items()]
    daemon = subprocess.Popen(
        [
            shutil.which("munged", path="/usr/sbin:/sbin") or "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *options,
        ],
        stderr=subprocess.DEVNULL,
    )
    programs = folder / "bin"
    programs.mkdir()
    for name in ("munge", "unmunge"):
        (programs / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={files["socket"]} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    deadline = time.monotonic() + 60
    while not authentication.munge_credential("ready", 30.0):
        assert time.monotonic() < deadline
        assert daemon.poll() is None
        time.sleep(0.05)
    yield programs
    daemon.terminate()
    daemon.wait(30)
    shutil.rmtree(folder, ignore_errors=True)
