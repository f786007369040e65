"""The controller's loop with a real journal: what it survives, what it notices, and how it ends."""

from __future__ import annotations

import time
from typing import Any

from supervisor.controller.journal import steps
from supervisor.controller.loop import Clock, KnownNodes
from supervisor.messages import (
    JobSpec,
    LauncherEnded,
    NodeLost,
    OperatorCommand,
    Progressed,
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
