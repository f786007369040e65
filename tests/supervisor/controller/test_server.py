"""The controller's port and the agents' links, over real sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from supervisor.agent.link import ControllerAddress
from supervisor.errors import CommandDenied
from supervisor.messages import (
    JobDefined,
    JobSpec,
    NodeJoined,
    OperatorCommand,
    Progressed,
    Refused,
)


def test_an_agent_is_assigned_and_each_heartbeat_answered(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            assert one.newest is not None
            assert (one.newest.epoch, one.newest.node) == (1, "n0")
            assert one.link.address == "127.0.0.1"
            told = len(one.told)
            one.beat(attempt=1)
            await rig.until(lambda: len(one.told) > told and rig.journalled(Progressed))
            assert rig.journalled(NodeJoined)[0].address == "127.0.0.1"

    rig.go(scenario())


def test_what_is_decided_reaches_the_agent_in_milliseconds(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            took = []
            for _ in range(20):
                told = len(one.told)
                began = time.monotonic()
                running.loop.post(OperatorCommand(at=running.loop.clock.now(), command="restart"))
                while len(one.told) == told:
                    await asyncio.sleep(0)
                took.append(time.monotonic() - began)
            assert min(took) < 0.05, took  # the others waited for a busy machine

    rig.go(scenario())


def test_the_clocks_are_compared_with_the_first_heartbeats(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            one.beat()
            await rig.until(lambda: one.link.clock.best(time.monotonic()))
            offset_s, error_s = one.link.clock.best(time.monotonic()) or (9.9, 0.0)
            assert abs(offset_s) <= error_s < 5.0  # it is the same clock
            one.beat()
            await rig.until(lambda: running.loop.connections["n0"].clock_offset_s is not None)

    rig.go(scenario())


def test_nobody_gets_in_without_the_token(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            async with aiohttp.ClientSession() as client:
                for path in ("/v1/status", "/v1/timeline", "/v1/agent"):
                    async with client.get(
                        f"{running.address}{path}", headers={"Authorization": "Bearer secret"}
                    ) as told:
                        assert told.status == 401, "the token itself is no proof: whoever saw it could send it"
                async with client.get(f"{running.address}/healthz") as told:
                    assert (await told.json())["ok"]
            with pytest.raises(CommandDenied, match="this job's token") as denied:
                await rig.ask(running.address, lambda client: client.get("/v1/status"), "wrong")
            assert denied.value.status == 401
            assert (await rig.ask(running.address, lambda client: client.get("/v1/status")))["view"] == "status"

    rig.go(scenario())


def test_a_token_that_is_no_text_is_a_wrong_one(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(running.address.rpartition(":")[2]))
            writer.write(b"GET /v1/status HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer \xff\r\n\r\n")
            assert b" 401 " in await reader.readline()
            writer.close()

    rig.go(scenario())


def test_another_protocol_is_refused_in_words(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address, protocol=99) as one:
            await rig.until(lambda: one.told)
            assert isinstance(one.told[0], Refused)
            assert "protocol 99" in one.told[0].why
            assert "same version" in one.link.refusal

    rig.go(scenario())


def test_a_message_that_cannot_be_read_is_answered_in_words(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            one.beat(launcher="a state of the future")
            await rig.until(lambda: one.link.refusal)
            assert "launcher" in one.link.refusal

    rig.go(scenario())


def test_two_hosts_cannot_share_a_node_name(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            async with rig.agent(running.address, host="other") as two:
                await rig.until(lambda: two.told)
                assert isinstance(two.told[0], Refused)
                assert "--node-name" in two.told[0].why
            assert one.link.connected

    rig.go(scenario())


def test_two_runs_of_one_host_cannot_share_a_node_name(rig: Any) -> None:
    """Two containers with one host name: each would train as this node. An agent that starts again is let in."""

    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address, "n0", run="a") as first:
            await rig.until(lambda: first.newest)
            async with rig.agent(running.address, "n0", run="b") as second:
                await rig.until(lambda: second.link.refusal)
                assert "another `unbroken run`" in second.link.refusal
                assert second.newest is None
            async with rig.agent(running.address, "n0", run="a") as again:
                await rig.until(lambda: again.newest)

    rig.go(scenario())


def test_a_new_agent_of_the_same_host_takes_over(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, rig.agent(running.address) as one:
            await rig.until(lambda: one.newest)
            before = one.link.connections
            one.task.cancel()
            async with rig.agent(running.address) as two:
                await rig.until(lambda: two.newest)
                assert before == 1

    rig.go(scenario())


def test_a_differing_spec_reaches_the_job_once_and_a_differing_name_never(rig: Any) -> None:
    async def scenario() -> None:
        specs = [JobSpec(name="j"), JobSpec(name="other"), JobSpec(name="j", spares=1), JobSpec(name="j", spares=1)]
        async with rig.controller() as running:
            for number, spec in enumerate(specs):
                async with rig.agent(running.address, f"n{number}", spec=spec) as one:
                    await rig.until(lambda one=one: one.newest)  # type: ignore[misc]
        assert [event.spec for event in rig.journalled(JobDefined)] == [specs[0], specs[2]]

    rig.go(scenario())


def test_an_unknown_order_is_refused(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            with pytest.raises(CommandDenied, match="no such command"):
                await rig.override(running, "explode")

    rig.go(scenario())


def test_a_hundred_agents(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            agents = [rig.new_agent(lambda: ControllerAddress(running.address), f"n{i}") for i in range(100)]
            await rig.until(lambda: all(one.newest for one in agents))
            await rig.override(running, "restart")
            newest = running.job.version
            await rig.until(lambda: max(one.newest.version for one in agents if one.newest) == newest)
            assert {one.newest.node for one in agents if one.newest} == {f"n{i}" for i in range(100)}
            for one in agents:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in agents), return_exceptions=True)

    rig.go(scenario())
