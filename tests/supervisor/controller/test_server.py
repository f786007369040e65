"""The controller's port and the agents' links, over real sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from supervisor.errors import CommandDenied
from supervisor.messages import (
    Refused,
)


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
