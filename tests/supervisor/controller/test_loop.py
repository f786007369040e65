"""The controller's loop with a real journal: what it survives, what it notices, and how it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.link import ControllerAddress
from supervisor.controller.journal import steps
from supervisor.controller.loop import Clock, KnownNodes
from supervisor.errors import CommandDenied, ControllerSilent
from supervisor.messages import (
    JobSpec,
    JournalStalled,
    LauncherEnded,
    NodeJoined,
    NodeLost,
    OperatorCommand,
    Progressed,
    TimerFired,
    WorkersStarted,
)


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


def test_while_the_journal_hangs_nothing_is_decided_and_nobody_is_disturbed(rig: Any) -> None:
    files: list[HangingFile] = []

    def open_file(path: Path) -> HangingFile:
        files.append(HangingFile(path))
        return files[-1]

    async def scenario() -> None:
        async with rig.controller(open_file) as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest and running.job.seen)
            files[0].works.clear()
            version = one.newest.version if one.newest else 0
            with pytest.raises(ControllerSilent, match="not recorded yet"):
                await rig.override(running, "restart")
            assert running.loop.stall
            with pytest.raises(CommandDenied, match="status 503"):
                await rig.ask(running.address, lambda client: client.get("/healthz"))
            with pytest.raises(CommandDenied, match="journal cannot be written"):
                await rig.override(running, "restart")
            told = len(one.told)
            one.beat()
            await rig.until(lambda: len(one.told) > told)
            assert one.newest is not None
            assert one.newest.version == version
            files[0].works.set()
            await rig.until(lambda: one.newest and one.newest.version > version)
            assert not running.loop.stall
            await rig.until(lambda: rig.journalled(JournalStalled))
            assert rig.journalled(JournalStalled)[0].seconds >= 2.0

    rig.go(scenario())


def test_a_failing_write_is_tried_again(rig: Any) -> None:
    class FullFile(HangingFile):
        full = 0

        def write(self, data: bytes) -> None:
            if FullFile.full > 0:
                FullFile.full -= 1
                super().write(data[:10])
                raise OSError(28, "No space left on device")
            super().write(data)

    async def scenario() -> None:
        async with rig.controller(FullFile) as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            FullFile.full = 3
            while True:
                try:
                    answer = await rig.override(running, "restart")
                    break
                except CommandDenied:  # another event met the full disk first: asked again, as a person would
                    await asyncio.sleep(0.02)
            assert answer["notes"] == ["restarted"]
        history = rig.history()
        assert history.problems == []
        assert len(rig.journalled(OperatorCommand)) == 1

    rig.go(scenario())


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


def test_a_controller_started_again_knows_everything_and_the_agent_hardly_notices(rig: Any) -> None:
    async def scenario() -> None:
        address = ""
        async with rig.controller() as first:
            address = first.address
            one = rig.new_agent(lambda: ControllerAddress(address))
            await rig.until(lambda: one.newest)
        await rig.until(lambda: not one.link.connected)
        assert "no connection" in one.link.problem or "closed" in one.link.problem
        async with rig.controller() as second:
            address = second.address
            await rig.until(lambda: one.newest and one.newest.epoch == 2)
            assert "n0" in second.job.nodes
            await rig.until(lambda: len(rig.journalled(NodeJoined)) == 2)
            one.task.cancel()
            await asyncio.gather(one.task, return_exceptions=True)
            events = [step.event for step in steps(rig.history().records)]
            assert [event.at for event in events] == sorted(event.at for event in events)

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


def test_a_node_that_never_came_back_to_a_broken_run_is_soon_lost(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.controller.loop.UNHEARD_AFRESH_S", 0.5)

    async def scenario() -> None:
        async with rig.controller() as first, rig.agent(first.address) as one, rig.agent(first.address, "n1") as two:
            await rig.until(lambda: one.newest and two.newest)
        async with rig.controller() as second, rig.agent(second.address) as one:
            one.beat()
            await rig.until(lambda: one.newest and second.watch.ticks > 4)
            assert rig.journalled(NodeLost) == []
            second.job.state = "RECOVERING"
            await rig.until(lambda: rig.journalled(NodeLost))
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
