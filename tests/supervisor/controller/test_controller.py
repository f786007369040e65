"""The controller's loop, its port and the agents' link, over real sockets and a real journal."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from supervisor.agent.link import Link
from supervisor.commands.client import Client, Denied, Unanswered, Unreachable
from supervisor.controller.controller import ensure_token, own_address, parse_listen, read_controller_file
from supervisor.controller.journal import Entry, JournalFile, open_journal, read_history, steps
from supervisor.controller.loop import ControlLoop
from supervisor.controller.report import differences, timeline_rows
from supervisor.controller.server import Server
from supervisor.controller.timers import Clock
from supervisor.messages import (
    Action,
    AnyEvent,
    Assign,
    Assignment,
    ControllerMessage,
    ControllerStarted,
    End,
    Heartbeat,
    Hello,
    JobDefined,
    JobSpec,
    JournalStalled,
    LauncherEnded,
    NodeJoined,
    NodeLost,
    Note,
    Outcome,
    OverrideGiven,
    Progressed,
    Refused,
    SchedulerAnswered,
    SetTimer,
    TimerFired,
    WorkersStarted,
    encode,
)

TOKEN = "secret"


class SmallJob:
    """Deterministic and small: every node that joins is assigned; operators end it or make it fail."""

    state = "RUNNING"

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        self.epoch = 0
        self.version = 0
        self.seen: list[AnyEvent] = []

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
            case OverrideGiven(command="restart"):
                return [Note(text="restarted"), *map(self.assign, self.nodes)]
            case OverrideGiven(command="reject"):
                raise RuntimeError("this job does not take that")
            case OverrideGiven(command="stop"):
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

    def observe(self, heartbeat: Heartbeat, now: float) -> list[AnyEvent]:
        if heartbeat.stop_request == "trouble":
            raise ValueError("a heartbeat that cannot be digested")
        return [Progressed(at=now, attempt=heartbeat.attempt, step=heartbeat.seq)] if heartbeat.attempt else []

    def tick(self, now: float) -> list[AnyEvent]:
        del now
        self.ticks += 1
        return []


def no_view(name: str, loop: ControlLoop) -> dict[str, object]:
    return {"schema": 1, "ok": not loop.stall, "view": name}


class Running:
    def __init__(self, loop: ControlLoop, job: SmallJob, address: str, task: "asyncio.Task[Outcome | None]") -> None:
        self.loop, self.job, self.address, self.task = loop, job, address, task
        assert isinstance(loop.watch, StepWatch)
        self.watch = loop.watch


@asynccontextmanager
async def controller(
    job_dir: Path, open_file: Callable[[Path], JournalFile] | None = None, unheard_s: float = 120.0
) -> AsyncIterator[Running]:
    more: dict[str, Any] = {} if open_file is None else {"open_file": open_file}
    journal, history = open_journal(job_dir, **more)
    job = SmallJob()
    loop = ControlLoop(job, StepWatch, journal, history, no_view, unheard_s)
    server = Server(loop, TOKEN)
    port = await server.start("127.0.0.1", 0)
    task = asyncio.create_task(loop.run())
    try:
        yield Running(loop, job, f"http://127.0.0.1:{port}", task)
    finally:
        loop.stop()
        await asyncio.wait([task], timeout=30.0)
        await server.stop()


class Agent:
    """A link and everything it was told."""

    def __init__(self, address: Callable[[], str], node: str = "n0", **hello: Any) -> None:
        values: dict[str, Any] = {"protocol": 1, "host": "h", "address": "", "spec": JobSpec(name="j")}
        self.told: list[ControllerMessage] = []
        self.link = Link(address, lambda: TOKEN, Hello(**{**values, "node": node, **hello}))
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


@asynccontextmanager
async def agent(address: str | Callable[[], str], node: str = "n0", **hello: Any) -> AsyncIterator[Agent]:
    found = Agent(address if callable(address) else lambda: address, node, **hello)
    try:
        yield found
    finally:
        found.task.cancel()
        await asyncio.gather(found.task, return_exceptions=True)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.002)


async def ask(address: str, call: Callable[[Client], dict[str, Any]], token: str = TOKEN) -> dict[str, Any]:
    return await asyncio.to_thread(call, Client(address, token))


async def override(running: Running, command: str) -> dict[str, Any]:
    return await ask(running.address, lambda client: client.override(command, "", "because", "me"))


def journalled(job_dir: Path, kind: type) -> list[Any]:
    return [step.event for step in steps(read_history(job_dir).records) if isinstance(step.event, kind)]


def go(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


def test_an_agent_is_assigned_and_each_heartbeat_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            assert one.newest is not None
            assert (one.newest.epoch, one.newest.node) == (1, "n0")
            assert one.link.address == "127.0.0.1"
            told = len(one.told)
            one.beat(attempt=1)
            await until(lambda: len(one.told) > told and journalled(tmp_path, Progressed))
            assert journalled(tmp_path, NodeJoined)[0].address == "127.0.0.1"

    go(scenario())


def test_what_is_decided_reaches_the_agent_in_milliseconds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            took = []
            for _ in range(20):
                told = len(one.told)
                began = time.monotonic()
                running.loop.post(OverrideGiven(at=running.loop.clock.now(), command="restart"))
                while len(one.told) == told:
                    await asyncio.sleep(0)
                took.append(time.monotonic() - began)
            assert sorted(took)[10] < 0.05, took

    go(scenario())


def test_the_clocks_are_compared_with_the_first_heartbeats(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            one.beat()
            await until(lambda: one.link.clock.best(time.monotonic()))
            offset_s, error_s = one.link.clock.best(time.monotonic()) or (9.9, 0.0)
            assert abs(offset_s) <= error_s < 5.0  # it is the same clock
            one.beat()
            await until(lambda: running.loop.connections["n0"].clock_offset_s is not None)

    go(scenario())


def test_nobody_gets_in_without_the_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running:
            assert (await ask(running.address, lambda client: client.get("/healthz"), ""))["ok"]
            for path in ("/v1/status", "/v1/timeline", "/v1/agent"):
                with pytest.raises(Denied, match="does not take this token") as denied:
                    await ask(running.address, lambda client, path=path: client.get(path), "wrong")  # type: ignore[misc]
                assert denied.value.status == 401
            assert (await ask(running.address, lambda client: client.get("/v1/status")))["view"] == "status"

    go(scenario())


def test_another_protocol_is_refused_in_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address, protocol=99) as one:
            await until(lambda: one.told)
            assert isinstance(one.told[0], Refused)
            assert "protocol 99" in one.told[0].why
            assert "same version" in one.link.refusal

    go(scenario())


def test_a_message_that_cannot_be_read_is_answered_in_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            one.beat(launcher="a state of the future")
            await until(lambda: one.link.refusal)
            assert "launcher" in one.link.refusal

    go(scenario())


def test_two_hosts_cannot_share_a_node_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            async with agent(running.address, host="other") as two:
                await until(lambda: two.told)
                assert isinstance(two.told[0], Refused)
                assert "--node-name" in two.told[0].why
            assert one.link.connected

    go(scenario())


def test_a_new_agent_of_the_same_host_takes_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            before = one.link.connections
            one.task.cancel()
            async with agent(running.address) as two:
                await until(lambda: two.newest)
                assert before == 1

    go(scenario())


class HangingFile:
    """A journal on a file system that stops answering while `open` is not set."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.works = threading.Event()
        self.works.set()

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def sync(self) -> None:
        self.works.wait()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def test_while_the_journal_hangs_nothing_is_decided_and_nobody_is_disturbed(tmp_path: Path) -> None:
    files: list[HangingFile] = []

    def open_file(path: Path) -> HangingFile:
        files.append(HangingFile(path))
        return files[-1]

    async def scenario() -> None:
        async with controller(tmp_path, open_file) as running, agent(running.address) as one:
            await until(lambda: one.newest and running.job.seen)
            files[0].works.clear()
            version = one.newest.version if one.newest else 0
            with pytest.raises(Unanswered, match="the journal has not taken the order"):
                await override(running, "restart")
            assert running.loop.stall
            with pytest.raises(Denied, match="status 503"):
                await ask(running.address, lambda client: client.get("/healthz"))
            with pytest.raises(Denied, match="journal cannot be written"):
                await override(running, "restart")
            told = len(one.told)
            one.beat()
            await until(lambda: len(one.told) > told)
            assert one.newest is not None
            assert one.newest.version == version
            files[0].works.set()
            await until(lambda: one.newest and one.newest.version > version)
            assert not running.loop.stall
            await until(lambda: journalled(tmp_path, JournalStalled))
            assert journalled(tmp_path, JournalStalled)[0].seconds >= 2.0

    go(scenario())


def test_a_failing_write_is_tried_again(tmp_path: Path) -> None:
    class FullFile(HangingFile):
        full = 0

        def write(self, data: bytes) -> None:
            if FullFile.full > 0:
                FullFile.full -= 1
                super().write(data[:10])
                raise OSError(28, "No space left on device")
            super().write(data)

    async def scenario() -> None:
        async with controller(tmp_path, FullFile) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            FullFile.full = 3
            while True:
                try:
                    answer = await override(running, "restart")
                    break
                except Denied:  # another event met the full disk first: asked again, as a person would
                    await asyncio.sleep(0.02)
            assert answer["notes"] == ["restarted"]
        history = read_history(tmp_path)
        assert history.problems == []
        assert len(journalled(tmp_path, OverrideGiven)) == 1

    go(scenario())


def test_a_job_that_fails_on_an_event_goes_on_and_replays_alike(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running, agent(running.address) as one:
            await until(lambda: one.newest)
            assert (await override(running, "reject"))["notes"] == []
            assert (await override(running, "restart"))["notes"] == ["restarted"]
            one.beat(stop_request="trouble")
            one.beat(attempt=1)
            await until(lambda: any(isinstance(event, Progressed) for event in running.job.seen))
            seen = list(running.job.seen)
        failed = [step for step in steps(read_history(tmp_path).records) if step.decided and step.decided.error]
        assert "does not take that" in failed[0].decided.error  # type: ignore[union-attr]
        async with controller(tmp_path) as again:
            assert again.job.seen[: len(seen)] == seen

    go(scenario())


def test_a_controller_started_again_knows_everything_and_the_agent_hardly_notices(tmp_path: Path) -> None:
    async def scenario() -> None:
        address = ""
        async with controller(tmp_path) as first:
            address = first.address
            one = Agent(lambda: address)
            await until(lambda: one.newest)
        await until(lambda: not one.link.connected)
        assert "no connection" in one.link.problem or "closed" in one.link.problem
        async with controller(tmp_path) as second:
            address = second.address
            await until(lambda: one.newest and one.newest.epoch == 2)
            assert "n0" in second.job.nodes
            await until(lambda: len(journalled(tmp_path, NodeJoined)) == 2)
            one.task.cancel()
            await asyncio.gather(one.task, return_exceptions=True)
            events = [step.event for step in steps(read_history(tmp_path).records)]
            assert [event.at for event in events] == sorted(event.at for event in events)

    go(scenario())


def test_a_node_that_was_started_anew_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as first, agent(first.address) as one:
            first.loop.post(WorkersStarted(at=first.loop.clock.now(), node="n0", attempt=3, ranks=(0, 1)))
            await until(lambda: journalled(tmp_path, WorkersStarted))
            one.beat(attempt=3, keeper="ready")
            await until(lambda: journalled(tmp_path, Progressed))
        async with controller(tmp_path) as second, agent(second.address) as one:
            one.beat(keeper="absent")
            one.beat(keeper="starting")
            await until(lambda: journalled(tmp_path, LauncherEnded))
            one.beat(keeper="ready")
            one.beat(keeper="ready", attempt=4)
            await until(lambda: journalled(tmp_path, Progressed)[-1].attempt == 4)
        assert [(event.attempt, event.fresh) for event in journalled(tmp_path, LauncherEnded)] == [(3, False)]

    go(scenario())


def test_a_node_that_never_came_back_is_lost_and_a_new_one_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as first, agent(first.address) as one, agent(first.address, "n1") as two:
            await until(lambda: one.newest and two.newest)
        async with controller(tmp_path, unheard_s=0.5) as second, agent(second.address) as one:
            one.beat()
            await until(lambda: journalled(tmp_path, NodeLost))
            async with agent(second.address, "n2") as three:
                await until(lambda: three.newest)
                ticks = second.watch.ticks
                await until(lambda: second.watch.ticks > ticks + 1)
        assert [event.node for event in journalled(tmp_path, NodeLost)] == ["n1"]

    go(scenario())


def test_a_node_that_never_came_back_to_a_broken_run_is_soon_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.controller.loop.UNHEARD_AFRESH_S", 0.5)

    async def scenario() -> None:
        async with controller(tmp_path) as first, agent(first.address) as one, agent(first.address, "n1") as two:
            await until(lambda: one.newest and two.newest)
        async with controller(tmp_path) as second, agent(second.address) as one:
            one.beat()
            await until(lambda: second.watch.ticks > 4)
            assert journalled(tmp_path, NodeLost) == []
            second.job.state = "RECOVERING"
            await until(lambda: journalled(tmp_path, NodeLost))
        assert [event.node for event in journalled(tmp_path, NodeLost)] == ["n1"]

    go(scenario())


def test_a_differing_spec_reaches_the_job_once_and_a_differing_name_never(tmp_path: Path) -> None:
    async def scenario() -> None:
        specs = [JobSpec(name="j"), JobSpec(name="other"), JobSpec(name="j", spares=1), JobSpec(name="j", spares=1)]
        async with controller(tmp_path) as running:
            for number, spec in enumerate(specs):
                async with agent(running.address, f"n{number}", spec=spec) as one:
                    await until(lambda one=one: one.newest)  # type: ignore[misc]
        assert [event.spec for event in journalled(tmp_path, JobDefined)] == [specs[0], specs[2]]

    go(scenario())


def test_a_timer_survives_its_controller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as first, agent(first.address) as one:
            await until(lambda: one.newest)
        async with controller(tmp_path) as second:
            await until(lambda: any(isinstance(event, TimerFired) for event in second.job.seen))
        assert [event.timer for event in journalled(tmp_path, TimerFired)] == ["soon"]

    go(scenario())


def test_the_older_of_two_controllers_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as first, agent(first.address) as one:
            await until(lambda: one.newest)
            version = one.newest.version if one.newest else 0
            async with controller(tmp_path) as second:
                first.loop.post(OverrideGiven(at=first.loop.clock.now(), command="restart"))
                await until(first.task.done)
                assert first.loop.superseded
                assert one.newest is not None
                assert one.newest.version == version
                assert not any(isinstance(event, OverrideGiven) for event in second.job.seen)

    go(scenario())


def test_it_ends_with_the_outcome_and_stays_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running:
            await override(running, "stop")
            outcome = await asyncio.wait_for(running.task, 30.0)
            assert outcome is not None
            assert outcome.state == "stopped"
        async with controller(tmp_path) as again:
            assert await asyncio.wait_for(again.task, 30.0) == outcome

    go(scenario())


def test_an_unknown_order_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running:
            with pytest.raises(Denied, match="no such override"):
                await override(running, "explode")

    go(scenario())


def test_a_hundred_agents(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with controller(tmp_path) as running:
            agents = [Agent(lambda: running.address, f"n{i}") for i in range(100)]
            await until(lambda: all(one.newest for one in agents), 30.0)
            await override(running, "restart")
            newest = running.job.version
            await until(lambda: max(one.newest.version for one in agents if one.newest) == newest)
            assert {one.newest.node for one in agents if one.newest} == {f"n{i}" for i in range(100)}
            for one in agents:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in agents), return_exceptions=True)

    go(scenario())


def test_the_clock_never_runs_backwards() -> None:
    future = time.time() + 3600.0
    clock = Clock(not_before=future)
    assert clock.now() >= future
    assert Clock().now() - time.time() < 1.0


def test_the_token_is_the_owners_alone(tmp_path: Path) -> None:
    token = ensure_token(tmp_path)
    assert len(token) == 48
    assert ensure_token(tmp_path) == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_listen_addresses() -> None:
    assert parse_listen("0.0.0.0:7461") == ("0.0.0.0", 7461)
    assert parse_listen("node7") == ("node7", 0)
    assert parse_listen(":80") == ("0.0.0.0", 80)
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_listen("host:http")
    assert own_address()


# ----- the real thing, as a process -----


class Process:
    def __init__(self, job_dir: Path, *options: str) -> None:
        self.job_dir = job_dir
        argv = [sys.executable, "-m", "supervisor.controller.controller", "--job-dir", str(job_dir), *options]
        self.popen = subprocess.Popen(argv, stderr=open(job_dir / "controller.log", "ab"))  # noqa: SIM115

    def wait_ready(self) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = read_controller_file(self.job_dir)
            if found is not None and found.pid == self.popen.pid:
                return found.address
            assert self.popen.poll() is None, (self.job_dir / "controller.log").read_text()
            time.sleep(0.01)
        raise AssertionError("the controller did not start")

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        if process.popen.poll() is None:
            process.kill()


def test_sigkill_and_start_again(tmp_path: Path, processes: list[Process]) -> None:
    async def scenario() -> None:
        from supervisor.agent.link import source_of, token_of

        hello = Hello(protocol=1, node="n0", host="h", address="", spec=JobSpec(name="j"))
        told: list[ControllerMessage] = []
        link = Link(source_of(tmp_path), token_of(tmp_path), hello)
        task = asyncio.create_task(link.run(told.append))
        for epoch in (1, 2, 3):
            processes.append(Process(tmp_path, *(["--restarted"] if epoch > 1 else [])))
            await asyncio.to_thread(processes[-1].wait_ready)
            await until(lambda epoch=epoch: told and isinstance(told[-1], Assignment) and told[-1].epoch == epoch)  # type: ignore[misc]
            processes[-1].kill()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    go(scenario())
    assert len(os.listdir(tmp_path / "epochs")) == 3
    history = read_history(tmp_path)
    assert history.problems == []
    assert len(journalled(tmp_path, ControllerStarted)) == 3


def test_a_job_that_has_ended_begins_again_unless_it_was_only_its_controller(
    tmp_path: Path, processes: list[Process]
) -> None:
    processes.append(Process(tmp_path))
    address = processes[-1].wait_ready()
    token = (tmp_path / "token").read_text().strip()
    Client(address, token).override("stop", "", "enough", "me")
    assert processes[-1].popen.wait(10) == 0
    processes.append(Process(tmp_path, "--restarted"))
    assert processes[-1].popen.wait(10) == 0
    assert "enough" in json.dumps([row["text"] for row in timeline_rows(read_history(tmp_path))])
    processes.append(Process(tmp_path))
    assert Client(processes[-1].wait_ready(), token).get("/v1/status")["state"] == "IDLE"
    assert "enough" not in json.dumps([row["text"] for row in timeline_rows(read_history(tmp_path))])


def test_a_job_whose_nodes_were_killed_at_its_end_begins_again(
    tmp_path: Path, processes: list[Process], make_driver: Any
) -> None:
    verdict = Verdict(failure_class=FailureClass.UNKNOWN, culprits=(), confidence=0.5, why="-", action="restart")
    driver = make_driver(verdict)
    driver.now = time.time()
    driver.join("a")
    driver.order("stop")
    assert driver.job.is_over
    journal, _ = open_journal(tmp_path)
    journal.write([Entry("event", event.at, encode(event)) for event in driver.journal])
    journal.close()
    for options, state in ((["--restarted", "--of-front"], "STOPPED"), ([], "STOPPED"), (["--of-front"], "IDLE")):
        processes.append(Process(tmp_path, *options))
        client = Client(processes[-1].wait_ready(), (tmp_path / "token").read_text().strip())
        assert client.get("/v1/status")["state"] == state, options
        processes[-1].kill()


def test_a_job_that_its_scheduler_has_started_again_goes_on(
    tmp_path: Path, processes: list[Process], make_driver: Any
) -> None:
    verdict = Verdict(
        failure_class=FailureClass.NODE_FAILURE,
        culprits=(Culprit(node="b"),),
        confidence=0.9,
        why="it is gone",
        action="restart_excluding",
    )
    driver = make_driver(verdict, nodes_min=2, nodes_max=2, scheduler="slurm", scheduler_job="7")
    driver.join("a", "b")
    driver.up()
    driver.order("cordon", "n7")
    driver.tell(NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    driver.fire("requeue")
    driver.tell(SchedulerAnswered, number=driver.orders[-1].number, outcome="done")
    assert driver.job.outcome.state == "requeued"
    journal, _ = open_journal(tmp_path)
    journal.write([Entry("event", event.at, encode(event)) for event in driver.journal])
    journal.close()
    life = ["--scheduler-job", "7", "--requeues", "1"]
    for options in (life, [*life, "--restarted"]):
        processes.append(Process(tmp_path, *options))
        address = processes[-1].wait_ready()
        client = Client(address, (tmp_path / "token").read_text().strip())
        go(until(lambda client=client: client.get("/v1/status")["requeues"] == 1))  # type: ignore[misc]
        status = client.get("/v1/status")
        assert (status["state"], status["outcome"], status["budget"]["used"]) == ("IDLE", None, 1)
        assert [cordon["node"] for cordon in status["cordons"]] == ["n7"]
        processes[-1].kill()
    count, found = differences(read_history(tmp_path))
    assert count > len(driver.journal)
    assert found == []


def test_tls(tmp_path: Path, processes: list[Process]) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    processes.append(Process(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key)))
    address = processes[-1].wait_ready()
    assert address.startswith("https://")
    token = (tmp_path / "token").read_text().strip()
    assert Client(address, token, str(cert)).get("/v1/status")["state"] == "IDLE"
    with pytest.raises(Unreachable, match="certificate"):
        Client(address, token).get("/v1/status")

    async def scenario() -> None:
        hello = Hello(protocol=1, node="n0", host="h", address="", spec=JobSpec(name="j"))
        told: list[ControllerMessage] = []
        trusting = Link(lambda: address, lambda: token, hello, tls_ca=str(cert))
        wary = Link(lambda: address, lambda: token, hello)
        tasks = [asyncio.create_task(link.run(told.append)) for link in (trusting, wary)]
        await until(lambda: told and trusting.connected and "certificate" in wary.problem)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    go(scenario())


def test_sigterm_ends_it_politely_and_the_port_is_kept(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(Process(tmp_path))
    address = processes[-1].wait_ready()
    token = (tmp_path / "token").read_text().strip()
    assert Client(address, token).get("/v1/status")["state"] == "IDLE"
    processes[-1].popen.send_signal(signal.SIGTERM)
    assert processes[-1].popen.wait(10) == 0
    with pytest.raises(Unreachable):
        Client(address, token).get("/healthz")
    processes.append(Process(tmp_path))
    assert processes[-1].wait_ready() == address
    assert json.loads((tmp_path / "controller.json").read_text())["epoch"] == 2
