"""The controller's loop with a real journal: what it survives, what it notices, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.controller.journal import steps
from supervisor.controller.loop import Clock, KnownNodes
from supervisor.errors import CommandDenied, ControllerSilent
from supervisor.messages import (
    CommandRequest,
    JobSpec,
    JournalStalled,
    LauncherEnded,
    NodeLost,
    OperatorCommand,
    Progressed,
    TimerFired,
    WorkersStarted,
)


def test_a_job_that_fails_on_an_event_goes_on_and_replays_alike(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            assert (await rig.override(running, "reject"))["notes"] == []
            assert (await rig.override(running, "restart"))["notes"] == ["restarted"]
            one.beat(stop_request="trouble")
            one.beat(attempt=1)
            await rig.until(lambda: any(isinstance(event, Progressed) for event in running.job.seen))
            seen = list(running.job.seen)
        failed = [step for step in steps(rig.history().records) if step.decided and step.decided.error]
        assert "does not take that" in failed[0].decided.error  # type: ignore[union-attr]
        async with rig.controller() as again:
            assert again.job.seen[: len(seen)] == seen

    rig.go(scenario())


def test_a_node_that_was_started_anew_is_noticed(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as first, rig.agent(first.address) as one:
            first.loop.post(WorkersStarted(at=first.loop.clock.now(), node="n0", attempt=3, ranks=(0, 1)))
            await rig.until(lambda: rig.journalled(WorkersStarted))
            one.beat(attempt=3, keeper="ready")
            await rig.until(lambda: rig.journalled(Progressed))
        async with rig.controller() as second, rig.agent(second.address) as one:
            one.beat(keeper="absent")
            one.beat(keeper="starting")
            await rig.until(lambda: rig.journalled(LauncherEnded))
            one.beat(keeper="ready")
            one.beat(keeper="ready", attempt=4)
            await rig.until(lambda: rig.journalled(Progressed)[-1].attempt == 4)
        assert [(event.attempt, event.fresh) for event in rig.journalled(LauncherEnded)] == [(3, False)]

    rig.go(scenario())


def test_a_node_that_never_came_back_is_lost_and_a_new_one_is_not(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as first, rig.agent(first.address) as one, rig.agent(first.address, "n1") as two:
            await rig.until(lambda: one.newest and two.newest)
        async with rig.controller(unheard_s=2.0) as second, rig.agent(second.address) as one:
            one.beat()
            await rig.until(lambda: rig.journalled(NodeLost))
            async with rig.agent(second.address, "n2") as three:
                await rig.until(lambda: three.newest)
                ticks = second.watch.ticks
                await rig.until(lambda: second.watch.ticks > ticks + 1)
        assert [event.node for event in rig.journalled(NodeLost)] == ["n1"]

    rig.go(scenario())


def test_a_timer_survives_its_controller(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as first, rig.agent(first.address) as one:
            await rig.until(lambda: one.newest)
        async with rig.controller() as second:
            await rig.until(lambda: any(isinstance(event, TimerFired) for event in second.job.seen))
        assert [event.timer for event in rig.journalled(TimerFired)] == ["soon"]

    rig.go(scenario())


def test_the_older_of_two_controllers_ends(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as first, rig.agent(first.address) as one:
            await rig.until(lambda: one.newest)
            version = one.newest.version if one.newest else 0
            async with rig.controller() as second:
                first.loop.post(OperatorCommand(at=first.loop.clock.now(), command="restart"))
                await rig.until(first.task.done)
                assert first.loop.superseded
                assert one.newest is not None
                assert one.newest.version == version
                assert not any(isinstance(event, OperatorCommand) for event in second.job.seen)

    rig.go(scenario())


def test_it_ends_with_the_outcome_and_stays_ended(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            await rig.override(running, "stop")
            outcome = await asyncio.wait_for(running.task, 30.0)
            assert outcome is not None
            assert outcome.state == "stopped"
        async with rig.controller() as again:
            assert await asyncio.wait_for(again.task, 30.0) == outcome

    rig.go(scenario())


def test_the_clock_never_runs_backwards() -> None:
    future = time.time() + 3600.0
    clock = Clock(not_before=future)
    assert clock.now() >= future
    assert Clock().now() - time.time() < 1.0


def test_a_spare_need_not_say_how_many_spares_there_are() -> None:
    known, first = KnownNodes(), JobSpec(name="llama", spares=1)
    assert known.is_new(first)
    assert not known.is_new(JobSpec(name="other"), spare=True)
    assert known.is_new(JobSpec(name="other", nodes_max=3), spare=True)
    assert known.is_new(JobSpec(name="other"))


# ----- `stop` and `pause` while the journal cannot be written -----


class BadFile:
    """A journal on a file system that is full while `full` is set, and does not answer while `works` is not."""

    full = threading.Event()
    works = threading.Event()

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        if self.full.is_set():
            self._file.write(data[:10])
            raise OSError(28, "No space left on device")
        self._file.write(data)

    def sync(self) -> None:
        self.works.wait(60)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


@pytest.fixture(autouse=True)
def good_disk() -> Any:
    BadFile.full.clear()
    BadFile.works.set()
    yield
    BadFile.full.clear()
    BadFile.works.set()


def told(rig: Any) -> list[tuple[str, bool]]:
    """The journal's orders and steps in order, and whether it says what was decided on them."""
    found = [one for one in steps(rig.history().records) if isinstance(one.event, OperatorCommand | Progressed)]
    return [
        (one.event.command if isinstance(one.event, OperatorCommand) else "step", one.decided is not None)
        for one in found
    ]


@contextlib.asynccontextmanager
async def stalled(rig: Any, spoil: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    """A controller whose journal has just stopped taking anything, a step of its agent waiting; and the agent."""
    async with rig.controller(BadFile) as running, rig.agent(running.address) as one:
        await rig.until(lambda: one.newest)
        spoil()
        one.beat(attempt=1)
        await rig.until(lambda: running.loop.stall)
        yield running, one


def test_on_a_full_disk_a_pause_acts_at_once_and_is_journalled_before_what_waited(rig: Any) -> None:
    async def scenario() -> None:
        async with stalled(rig, BadFile.full.set) as (running, _):
            with pytest.raises(CommandDenied, match="nothing is done but `stop` and `pause`"):
                await rig.override(running, "restart")
            with pytest.raises(CommandDenied, match="status 503"):
                await rig.ask(running.address, lambda client: client.get("/healthz"))
            await rig.override(running, "pause")
            [order] = [event for event in running.job.seen if isinstance(event, OperatorCommand)]
            assert (order.command, "No space left" in order.unrecorded) == ("pause", True)
            assert not any(isinstance(event, Progressed) for event in running.job.seen), "all else waits"
            BadFile.full.clear()
            await rig.until(lambda: any(isinstance(event, Progressed) for event in running.job.seen))
            assert not running.loop.stall
            assert (await rig.override(running, "restart"))["notes"] == ["restarted"]
            seen = list(running.job.seen)
        assert [what for what, _ in told(rig)] == ["pause", "step", "restart"]
        async with rig.controller() as again:
            assert again.job.seen[: len(seen)] == seen

    rig.go(scenario())


def test_on_a_full_disk_a_stop_ends_the_job_and_is_journalled_if_there_is_room_again(rig: Any) -> None:
    async def scenario() -> None:
        async with stalled(rig, BadFile.full.set) as (running, one):
            running.job.lasts = True
            await rig.override(running, "stop")
            one.beat(attempt=1)
            await rig.until(lambda: sum(isinstance(event, Progressed) for event in running.job.seen) == 2)
            BadFile.full.clear()
            one.beat(attempt=1)
            await rig.until(lambda: not running.loop.stall)
        assert [what for what, _ in told(rig)] == ["stop", "step", "step", "step"]
        assert told(rig)[0] == ("stop", True)

    rig.go(scenario())


def test_where_the_file_system_hangs_a_stop_acts_and_a_pause_comes_first_when_it_answers(rig: Any) -> None:
    async def scenario() -> None:
        async with stalled(rig, BadFile.works.clear) as (running, one):
            with pytest.raises(ControllerSilent, match="not recorded yet"):
                await rig.override(running, "pause")
            one.beat(attempt=1)
            BadFile.works.set()
            await rig.until(lambda: sum(isinstance(event, Progressed) for event in running.job.seen) == 2)
            assert [what for what, _ in told(rig)] == ["step", "pause", "step"]
            assert rig.journalled(JournalStalled)[0].seconds >= 2.0
            BadFile.works.clear()
            one.beat(attempt=1)
            await rig.until(lambda: running.loop.stall)
            await rig.override(running, "stop")
            outcome = await running.task
            assert outcome.state == "stopped"
            BadFile.works.set()

    rig.go(scenario())


def test_the_real_controller_ends_a_job_whose_disk_is_full(rig: Any) -> None:
    async def scenario() -> None:
        (rig.job_dir / "token").write_text("secret\n")
        (rig.job_dir / "token").chmod(0o600)
        process = rig.start()
        client = process.client()
        async with rig.agent(process.address) as one:
            await rig.until(lambda: one.newest)
            size = max(path.stat().st_size for path in rig.job_dir.glob("journal.*.jsonl"))
            resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            answer = await asyncio.to_thread(client.command, CommandRequest(command="pause", by="ann"))
            assert answer["ok"]
            status = await asyncio.to_thread(client.get, "/v1/status")
            assert (status["paused"], status["pause"]["by"]) == (
                True,
                "holder of the token at 127.0.0.1, says ann",
            )
            assert "File too large" in status["controller"]["journal"]
            await asyncio.to_thread(client.command, CommandRequest(command="stop", by="ann"))
            await rig.until(lambda: one.newest.outcome)
            assert one.newest.outcome.state == "stopped"
            assert any("done, but the journal cannot be written now" in text for _, text in one.newest.notices)
            one.beat(done=True)
            assert await asyncio.to_thread(process.exit_code) == 0

    rig.go(scenario())
