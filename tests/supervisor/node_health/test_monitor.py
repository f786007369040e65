"""The health monitor with real probe workers: probes are plug-ins, processes are stopped, killed and stuck for real."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from diagnosis.signals import Finding
from supervisor.node_health.contract import JobInfo, Site
from supervisor.node_health.health_file import HealthFile
from supervisor.node_health.monitor import HealthMonitor
from supervisor.node_health.protocol import Setup
from supervisor.node_health.runner import (
    UNKILLABLE_KEPT,
    UnkillableProcesses,
    WorkerRunner,
    WorkerTimes,
    began_at,
    may_start,
)
from supervisor.paths import start_time

PlugIn = Callable[[str], dict[str, str]]

QUICK = WorkerTimes(tick=0.5, silent_ticks=60, dying=5.0, look_at_unkillable=0.1, first_pause=0.05, write_every=0.05)
IMPATIENT = QUICK._replace(silent_ticks=10)
"""With time enough for a probe worker to start on a loaded machine."""
LIMIT_S = 90.0

FLAW = """
class FlawProbe:
    name, every_s, deadline_s = "flaw", 0.05, 5.0
    checks = (check("flaw"), check("fine"))
    def look(self, place, now):
        there = os.path.exists(place.state_dir / "flaw")
        flaw = unhealthy("flaw", "it is there", "d0", pids=list(place.job.ranks)) if there else healthy("flaw", "d0")
        return [flaw, healthy("fine", text=f"by {os.getpid()}")]
"""


class Watch:
    """A health under test, and everything it told."""

    def __init__(self, health: HealthMonitor, path: Path, state_dir: Path) -> None:
        self.health = health
        self.path = path
        self.state_dir = state_dir
        self.job = JobInfo()
        self.findings: list[Finding] = []
        self.kernel: list[Finding] = []

    async def until(self, fits: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not fits():
            assert time.monotonic() < deadline, (self.findings, self.texts())
            self.health.update(self.job)
            self.findings += self.health.take()
            self.kernel += self.health.kernel_log.findings(())
            await asyncio.sleep(0.01)

    def texts(self) -> dict[tuple[str, str], str]:
        check_states = self.health.check_states.all()
        return {(s.result.check, s.result.device): f"{s.status}: {s.result.text}" for s in check_states}

    def told(self, rule: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.rule == rule]

    def file(self) -> HealthFile:
        return msgspec.json.decode(self.path.read_bytes(), type=HealthFile)


@asynccontextmanager
async def watching(
    tmp_path: Path, env: dict[str, str], *only: str, pace: WorkerTimes = QUICK, kernel_log: str = ""
) -> AsyncIterator[Watch]:
    path, state_dir = tmp_path / "health.json", tmp_path / "probes"
    shared = tmp_path / "shared"
    health = HealthMonitor(
        "n1",
        path,
        state_dir,
        env=env,
        only=only,
        steps=lambda: {3: 17},
        pace=pace,
        shared_dir=shared,
        kernel_log=kernel_log,
    )
    task = asyncio.create_task(health.run())
    try:
        yield Watch(health, path, state_dir)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait({task})
        for worker in health.workers.values():
            assert worker.pid == 0


RAISING = """
class RaisingProbe:
    name, every_s, deadline_s = "raising", 0.05, 5.0
    checks = (check("raising"),)
    def look(self, place, now):
        raise ValueError("of ours")
class NotMadeProbe:
    def __init__(self):
        raise ValueError("of ours")
"""


def test_a_probe_that_raises_is_told_at_once_and_once(tmp_path: Path, plug_in: PlugIn) -> None:
    async def story() -> None:
        told: list[str] = []

        def both() -> bool:
            told.extend(filter(None, [watch.health.notice()]))
            return sum("ValueError" in text for text in told) >= 2

        async with watching(tmp_path, plug_in(RAISING), "raising") as watch:
            await watch.until(both)
            await watch.until(lambda: watch.path.exists() and len(watch.file().problems) == 2)
            assert len([text for text in told if "ValueError" in text]) == 2

    asyncio.run(story())


def test_a_flaw_becomes_a_finding_and_a_file(tmp_path: Path, plug_in: PlugIn) -> None:
    async def story() -> None:
        async with watching(tmp_path, plug_in(FLAW), "flaw") as watch:
            watch.job = JobInfo(ranks={4711: 3})
            await watch.until(lambda: ("flaw", "d0") in watch.texts())
            assert watch.findings == []
            (watch.state_dir / "flaw").touch()
            await watch.until(lambda: watch.findings)
            (found,) = watch.findings
            assert (found.rule, found.node, found.rank, found.step) == ("flaw", "n1", 3, 17)
            assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            assert 0 <= time.monotonic() - found.mono < LIMIT_S
            assert [one.rule for one in watch.health.current_findings()] == ["flaw"]
            await watch.until(lambda: watch.path.exists() and watch.file().check_states[0].status == "unhealthy")
            file = watch.file()
            assert (file.schema, file.node, file.pid, file.waiting) == (1, "n1", os.getpid(), ())
            assert file.check_states[0].result.check == "flaw"
            assert watch.health.notice() == ""

    asyncio.run(story())


def test_a_killed_worker_comes_back_and_nothing_is_told(tmp_path: Path, plug_in: PlugIn) -> None:
    async def story() -> None:
        async with watching(tmp_path, plug_in(FLAW), "flaw") as watch:
            worker = watch.health.workers["node"]
            for _ in range(2):
                await watch.until(lambda: watch.texts().get(("fine", "")) == f"healthy: by {worker.pid}")
                os.kill(worker.pid, signal.SIGKILL)
                await watch.until(lambda: worker.pid == 0)
                await watch.until(lambda: worker.pid)
            assert watch.findings == []
            assert "ended" in watch.health.workers["node"].problem

    asyncio.run(story())


def test_a_worker_without_a_word_is_given_up_once(tmp_path: Path, plug_in: PlugIn) -> None:
    async def story() -> None:
        async with watching(tmp_path, plug_in(FLAW), "flaw", pace=IMPATIENT) as watch:
            await watch.until(lambda: ("fine", "") in watch.texts())
            pid = watch.health.workers["node"].pid
            os.kill(pid, signal.SIGSTOP)
            await watch.until(lambda: watch.health.workers["node"].pid not in (pid, 0))
            assert start_time(pid) is None
            assert "no message" in watch.health.workers["node"].problem
            assert watch.findings == []

    asyncio.run(story())


def test_a_look_that_never_returns_is_a_finding_and_hides_nothing(tmp_path: Path, plug_in: PlugIn) -> None:
    source = """
class StuckProbe:
    name, every_s, deadline_s = "stuck", 0.05, 0.3
    doing = ""
    checks = (check("stuck"),)
    looks = 0
    def look(self, place, now):
        self.looks += 1
        self.doing = "statvfs /mnt"
        while self.looks > 1 and not os.path.exists(place.state_dir / "free"):
            time.sleep(0.02)
        return [healthy("stuck")]
"""

    async def story() -> None:
        async with watching(tmp_path, plug_in(FLAW + source), "flaw", "stuck") as watch:
            await watch.until(lambda: watch.findings)
            (found,) = watch.findings
            assert (found.rule, found.severity) == ("station_node_responds", "warning")
            assert "statvfs /mnt has not returned" in found.evidence.text
            assert watch.texts()["stuck", ""].startswith("unknown: no look has returned")
            (watch.state_dir / "flaw").touch()
            await watch.until(lambda: watch.told("flaw"))
            (watch.state_dir / "free").touch()
            await watch.until(lambda: watch.texts()["station_node_responds", "stuck"].startswith("healthy"))
            assert watch.texts()["stuck", ""].startswith("healthy")

    asyncio.run(story())


def test_what_a_probe_hears_is_passed_on(tmp_path: Path, plug_in: PlugIn) -> None:
    source = """
class EventProbe:
    name, every_s, deadline_s = "event", 60.0, 5.0
    checks = (check("event"),)
    def look(self, place, now):
        return [unknown("event", "only root can read it")]
    def listen(self, place, tell):
        tell(Signal(source="gpu", text="NVRM: Xid (PCI:0000:c1:00): 79", at=time.time(), gpu="0000:c1:00"))
        time.sleep(60)
"""

    async def story() -> None:
        async with watching(tmp_path, plug_in(source), "event") as watch:
            await watch.until(lambda: watch.kernel)
            (found,) = watch.kernel
            assert (found.rule, found.node, found.gpu, found.step) == ("xid_79", "n1", "0000:c1:00", 17)
            assert found.mono
            assert found.boot_id
            await watch.until(lambda: watch.path.exists() and watch.file().unseen)
            assert watch.file().unseen == ("only root can read it",)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("left", "since_s", "allowed"), [(0, 0.0, True), (1, 30.0, False), (1, 600.0, True), (UNKILLABLE_KEPT, 1e9, False)]
)
def test_processes_that_do_not_die_are_not_piled_up(left: int, since_s: float, allowed: bool) -> None:
    assert may_start(left, since_s, WorkerTimes().replace_every) is allowed


ZOMBIE_LEADER = """
import ctypes, os, sys, threading
def wait():
    sys.stdin.buffer.read(1)
    os._exit(0)
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall({exit}, 0)
"""
"""As the kernel leaves a process that was killed while one of its threads hangs in a driver."""


@pytest.mark.parametrize("number", [UNKILLABLE_KEPT, 1])
def test_the_next_agent_knows_of_processes_that_live_on(tmp_path: Path, plug_in: PlugIn, number: int) -> None:
    """Enough of them, or a young one: it starts none beside them, says so, and goes on when they are gone."""
    source = ZOMBIE_LEADER.format(exit={"x86_64": 60}.get(platform.machine(), 93))
    sleepers = [subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE) for _ in range(number)]
    while any(start_time(sleeper.pid) is not None for sleeper in sleepers):
        time.sleep(0.01)  # until the first thread is a zombie
    (tmp_path / "probes").mkdir()
    notes = [(sleeper.pid, began_at(sleeper.pid)) for sleeper in sleepers]
    (tmp_path / "probes/station-node.json").write_bytes(msgspec.json.encode(notes))

    async def story() -> None:
        async with watching(tmp_path, plug_in(FLAW), "flaw") as watch:
            await watch.until(lambda: watch.told("station_node_responds"))
            (found,) = watch.told("station_node_responds")
            assert found.severity == "error"
            assert watch.health.workers["node"].pid == 0
            for sleeper in sleepers:
                sleeper.communicate(b"\n")
            await watch.until(lambda: watch.texts().get(("station_node_responds", ""), "").startswith("healthy"))

    try:
        asyncio.run(story())
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_what_an_agent_of_another_job_left_behind_is_enough(tmp_path: Path, plug_in: PlugIn) -> None:
    """Nothing is started beside it, however old it is."""
    source = ZOMBIE_LEADER.format(exit={"x86_64": 60}.get(platform.machine(), 93))
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE) as sleeper:
        while start_time(sleeper.pid) is not None:
            time.sleep(0.01)  # until the first thread is a zombie
        told = tmp_path / "shared/left-gpu.json"
        UnkillableProcesses(None, told).add(sleeper.pid)
        (known,) = UnkillableProcesses(None, told).of_others()
        assert (known.pid, known.start_time) == (sleeper.pid, began_at(sleeper.pid))
        (tmp_path / "shared/left-node.json").write_bytes(told.read_bytes())  # of that group one more may be tried
        quick = QUICK._replace(replace_every=0.0)

        async def story() -> None:
            async with watching(tmp_path, plug_in(FLAW), "flaw", pace=quick) as watch:
                worker = watch.health.workers["gpu"]
                await watch.until(lambda: watch.told("gpu_driver_responds"))
                await watch.until(lambda: watch.health.workers["node"].pid)
                assert worker.pid == 0
                assert f"of an earlier job {sleeper.pid} does not die" in worker.problem
                sleeper.communicate(b"\n")
                await watch.until(lambda: worker.pid)

        try:
            asyncio.run(story())
        finally:
            sleeper.kill()


def test_a_bug_of_who_listens_ends_nothing(plug_in: PlugIn) -> None:
    heard: list[object] = []

    def hear(_: str, word: object) -> None:
        heard.append(word)
        raise KeyError("a bug")

    async def story() -> None:
        setup = Setup(state_dir="/nonexistent", only=("fine",))
        worker = WorkerRunner("node", lambda: setup, hear, lambda *_: None, plug_in(FLAW), pace=QUICK)
        task = asyncio.create_task(worker.run())
        deadline = time.monotonic() + LIMIT_S
        while len(heard) < 4 and not task.done():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert "a bug" in worker.problem
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(story())


def test_what_the_kernel_says_is_a_finding_at_once_and_a_check_state_for_a_while(tmp_path: Path) -> None:
    kernel_log = tmp_path / "kern.log"
    kernel_log.touch()
    site = Site(limits={"kernel_log_gpu_fallen_off_bus": {"minutes": 0.01}})
    health = HealthMonitor("n1", tmp_path / "health.json", tmp_path / "probes", site=site, kernel_log=str(kernel_log))
    kernel_log.write_text("NVRM: Xid (PCI:0000:c1:00): 79, pid=77, name=python, GPU has fallen off the bus.\n")
    found: list[Finding] = []
    deadline = time.monotonic() + LIMIT_S
    while not found:
        assert time.monotonic() < deadline
        found = health.kernel_log.findings(())
    assert [one.rule for one in found] == ["xid_79"]

    def states() -> list[tuple[str, str, str]]:
        of_check = [one for one in health.states() if one.result.check == "kernel_log_gpu_fallen_off_bus"]
        return [(one.status, one.level, one.result.device) for one in of_check]

    assert states() == [("unhealthy", "critical", "0000:c1:00")]
    assert health.take() == [], "it is reported once"
    assert health.current_findings() == []
    while states()[0][0] != "healthy":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    blind = HealthMonitor("n1", tmp_path / "health.json", tmp_path / "probes", kernel_log=str(tmp_path / "absent"))
    assert {one.status for one in blind.states()} == {"unknown"}


@pytest.mark.root
def test_an_ordinary_user_is_told_once_what_is_not_seen(tmp_path: Path, plug_in: PlugIn) -> None:
    source = """
class ClosedProbe:
    name, every_s, deadline_s = "closed", 0.05, 5.0
    checks = (check("closed"), check("doubtful", looks=100), check("fresh"))
    def look(self, place, now):
        fresh = unknown("fresh", "so far it was looked at once: its rate is known from the second look on")
        return [fresh, unknown("closed", "only root can read the registers"), unhealthy("doubtful", "perhaps")]
"""

    async def story() -> None:
        async with watching(tmp_path, plug_in(source), "closed", kernel_log=str(tmp_path / "absent")) as watch:
            assert watch.health.notice() == ""
            closed = "unknown: only root can read the registers"
            await watch.until(lambda: watch.path.exists() and watch.texts().get(("closed", "")) == closed)
            os.seteuid(65534)
            try:
                told = watch.health.notice()
            finally:
                os.seteuid(0)
            assert told.startswith("as an ordinary user the agent does not see everything: ")
            assert re.search(r"the kernel log \S+ cannot be read .*; only root can read the registers$", told)
            assert watch.health.notice() == ""

    asyncio.run(story())
