"""The controller's port and the agents' links, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from supervisor.agent.link import ControllerAddress
from supervisor.controller.client import ControllerClient
from supervisor.controller.main import read_controller_file
from supervisor.controller.server import given_by
from supervisor.errors import CommandDenied
from supervisor.messages import (
    PROTOCOL,
    CommandName,
    CommandRequest,
    NodeJoined,
    OperatorCommand,
    Progressed,
    Refused,
    decode_controller_message,
)
from supervisor.wire import authentication


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


# ----- who an order is said to come from -----


def test_what_is_proven_is_named_and_what_is_said_is_said() -> None:
    assert given_by(0, "unix", "mallory@login") == "root (uid 0)"
    assert given_by(4_000_000, "unix", "") == "uid 4000000"
    said = given_by(None, "10.0.0.7", "ann@login\x1b[31m" + "x" * 1000)
    assert said.startswith("holder of the token at 10.0.0.7, says ann@login")
    assert len(said) <= 100
    assert said.isprintable()


def order(rig: Any, client: Callable[[str], ControllerClient]) -> OperatorCommand:
    """As the journal has it."""

    async def scenario() -> None:
        async with rig.controller() as running:
            assert (await rig.ask_by(client(running.address), "restart"))["ok"]

    rig.go(scenario())
    (event,) = rig.journalled(OperatorCommand)
    assert isinstance(event, OperatorCommand)
    return event


def test_by_the_network_only_the_token_is_proven(rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no munge
    event = order(rig, lambda address: ControllerClient(address, "secret"))
    assert (event.uid, event.by) == (None, "holder of the token at 127.0.0.1, says me")


@pytest.mark.parametrize("body", [b'{"command":"pause","uid":0}', b'{"command":"reboot"}', b'{"reason":"why"}', b"[]"])
def test_a_command_that_is_none_or_claims_a_user_is_refused(rig: Any, body: bytes) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            with pytest.raises(CommandDenied) as denied:
                await rig.ask(running.address, lambda client: client._ask("POST", "/v1/override", body))
            assert denied.value.status == 400

    rig.go(scenario())
    assert rig.journalled(OperatorCommand) == []


def test_by_the_unix_socket_the_kernel_tells(rig: Any) -> None:
    process = rig.start()
    assert process.address
    told = ControllerClient.of_job(rig.job_dir).command(
        CommandRequest(command="pause", reason="because", by="mallory@login")
    )
    assert told["ok"]
    pause = process.status()["pause"]
    (event,) = rig.journalled(OperatorCommand)
    assert (event.uid, event.by) == (os.getuid(), pause["by"])
    assert pause["by"].endswith(f"(uid {os.getuid()})")


@pytest.mark.usefixtures("munged")
def test_a_credential_is_good_once_and_for_its_order_alone() -> None:
    credential = authentication.munge_credential("order 1", 30.0)
    assert authentication.munge_user(credential, "order 2", 30.0) is None
    fresh = authentication.munge_credential("order 1", 30.0)
    assert authentication.munge_user(fresh, "order 1", 30.0) == os.getuid()
    assert authentication.munge_user(fresh, "order 1", 30.0) is None, "replayed"
    for odd in ("", "MUNGE:nonsense:", "x" * 10_000):
        assert authentication.munge_user(odd, "order 1", 30.0) is None


@pytest.mark.usefixtures("munged")
def test_by_munge_a_user_of_the_cluster_is_proven(rig: Any) -> None:
    event = order(rig, lambda address: ControllerClient(address, "secret"))
    assert event.uid == os.getuid()
    assert event.by.endswith(f"(uid {os.getuid()})")


# ----- strangers at the controller's port -----


class Relay:
    """Stands between an agent and its controller; what it lets through it may change, repeat or keep."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.to_agent: list[asyncio.StreamWriter] = []
        self.to_controller: list[asyncio.StreamWriter] = []
        self.from_agent = b""
        self.from_controller = b""

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.port)
        self.to_agent.append(writer)
        self.to_controller.append(ours)

        async def back() -> None:
            while said := await theirs.read(65536):
                self.from_controller += said
                writer.write(said)
            writer.close()

        task = asyncio.create_task(back())
        while said := await reader.read(65536):
            self.from_agent += said
            ours.write(said)
        ours.close()
        await asyncio.gather(task, return_exceptions=True)


def test_a_relay_can_neither_repeat_nor_inject(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running:
            relay = Relay(int(running.address.rpartition(":")[2]))
            server = await asyncio.start_server(relay.meet, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with server, rig.agent(url) as one:
                await rig.until(lambda: one.newest)
                assert b"secret" not in relay.from_agent
                heard = relay.from_controller.rpartition(b"\r\n\r\n")[2]
                for frame in (heard, b"\x82\x7e\x01\x00" + b"x" * 256):  # the controller's own once more; another
                    told, connections = len(one.told), one.link.connections
                    relay.to_agent[-1].write(frame)
                    await rig.until(lambda connections=connections: one.link.connections > connections)
                    assert len(one.told) <= told + 1, "the assignment that comes with the new connection"
                    assert "not the next one" in one.link.problem or one.link.connected
                beats = len(running.job.seen)
                connections = one.link.connections
                relay.to_controller[-1].write(b"\x82\x80\x00\x00\x00\x00")  # an empty frame, masked with zeros
                await rig.until(lambda: one.link.connections > connections)
                assert len(running.job.seen) >= beats

    rig.go(scenario())


SMALL = 1024
"""Descriptors of the controller: what most machines give a process."""


class Crowd:
    """Connections of strangers: some say nothing, some drip, some flood."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[socket.socket] = []
        self.over = threading.Event()
        self.sent = 0
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self.drip, self.flood)]

    def __enter__(self) -> Crowd:
        return self

    def gather(self) -> None:
        for _ in range(1100):
            self.idle.append(self.connection())
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()
        for one in self.idle:
            one.close()

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def drip(self) -> None:
        """A request that never ends, a hundred times."""
        slow = [self.connection() for _ in range(100)]
        for one in slow:
            one.sendall(b"GET /v1/status HTTP/1.1\r\n")
        while not self.over.wait(0.1):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(b"x: y\r\n")
        for one in slow:
            one.close()

    def flood(self) -> None:
        """What cannot be read, with a token in it, as fast as it goes."""
        pieces = [
            b"\x16\x03\x01" + b"\xff" * 2000,
            b"GET / HTTP/1.1\r\nAuthorization: Bearer LEAK" + b"x" * 60_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: h\r\nBad\x00Header: LEAK\r\n\r\n" * 20,
            b"POST /v1/override HTTP/1.1\r\nHost: h\r\nContent-Length: nonsense LEAK\r\n\r\n",
            b"LEAK " * 5000 + b"\r\n\r\n",
        ]
        while not self.over.is_set():
            with contextlib.suppress(OSError), self.connection() as one:
                one.sendall(pieces[self.sent % len(pieces)])
                self.sent += 1
                one.settimeout(0.2)
                one.recv(4096)


def test_a_crowd_does_not_stop_recovery(rig: Any) -> None:
    """1,100 idle connections, requests that drip, a flood: agents of this node and by TCP, and orders, go on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * SMALL:
        pytest.skip("this process may not open enough connections itself")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * SMALL), hard))

    async def scenario() -> None:
        (rig.job_dir / "token").write_text("secret\n")
        (rig.job_dir / "token").chmod(0o600)
        process = rig.start(descriptors=SMALL)
        port = int(process.address.rpartition(":")[2])
        socket_path = read_controller_file(rig.job_dir).socket
        near, far = ControllerAddress(process.address, socket_path), ControllerAddress(process.address)
        async with rig.agent(near) as one, rig.agent(far, "n1") as two:
            await rig.until(lambda: one.newest and two.newest)
            assert (one.link.through, two.link.through) == ("unix", "tcp")
            with Crowd(port) as crowd:
                await asyncio.to_thread(crowd.gather)
                for round_ in range(5):
                    name: CommandName = "pause" if round_ % 2 == 0 else "resume"
                    await asyncio.to_thread(process.client().command, CommandRequest(command=name, by="me"))
                    versions = [agent.newest.version for agent in (one, two)]
                    one.beat()
                    two.beat()
                    async with rig.agent(near, f"a{round_}") as third, rig.agent(far, f"b{round_}") as fourth:
                        await rig.until(lambda third=third, fourth=fourth: third.newest and fourth.newest)
                    assert [agent.link.connections for agent in (one, two)] == [1, 1], versions
                    sent = crowd.sent
                    await rig.until(lambda sent=sent: crowd.sent >= sent + 300)
                crowd.over.set()
        log = (rig.job_dir / "controller.log").read_text()
        assert len(log) < 200_000
        assert "LEAK" not in log
        assert "secret" not in log
        assert "Traceback" not in log
        assert len(os.listdir(f"/proc/{process.popen.pid}/fd")) < SMALL

    rig.go(scenario())


def test_connections_that_prove_nothing_end(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.controller.listener.REQUEST_S", 0.2)
    monkeypatch.setattr("supervisor.controller.listener.SWEEP_S", 0.1)

    async def scenario() -> None:
        async with rig.controller() as running:
            port = int(running.address.rpartition(":")[2])
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for number, (_, writer) in enumerate(opened):
                writer.write(b"" if number % 2 else b"GET /v1/status HTTP/1.1\r\nx:")
            for reader, _ in opened:
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
            async with rig.agent(running.address) as one:
                await rig.until(lambda: one.newest)

    rig.go(scenario())


def test_who_asks_on_and_does_not_read_the_answers_is_put_out(rig: Any) -> None:
    request = (
        f"GET {authentication.CHALLENGE_PATH} HTTP/1.1\r\nHost: x\r\n"
        f"{authentication.CHALLENGE_HEADER}: {authentication.new_nonce()}\r\n\r\n"
    ).encode()

    async def ask_on(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        for _ in range(2000):  # 30 MB of answers
            writer.write(request * 100)
            await writer.drain()

    async def scenario() -> None:
        async with rig.controller() as running:
            with pytest.raises(ConnectionError):
                await ask_on(int(running.address.rpartition(":")[2]))
            async with rig.agent(running.address) as one:
                await rig.until(lambda: one.newest)

    rig.go(scenario())


def test_an_agent_of_an_older_version_is_refused_in_words(rig: Any) -> None:
    async def scenario() -> None:
        async with rig.controller() as running, aiohttp.ClientSession() as client:
            headers = {"Authorization": "Bearer secret"}
            async with client.ws_connect(f"{running.address}/v1/agent", headers=headers) as socket:
                refused = decode_controller_message(await socket.receive_bytes())
                assert isinstance(refused, Refused)
                assert f"protocol {PROTOCOL}" in refused.why

    rig.go(scenario())


@pytest.mark.root
def test_another_user_does_not_come_in_by_the_unix_socket(rig: Any) -> None:
    """Neither where the folder keeps him out, nor where it does not."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for a socket
    path = str(folder / "s")
    assert rig.start("--socket", path).address
    assert read_controller_file(rig.job_dir).socket == path
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(30)\n"
        "s.connect(sys.argv[1]); s.sendall(b'GET /healthz HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n'); print(s.recv(100))"
    )

    def as_nobody() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60)

    assert "PermissionError" in as_nobody().stderr
    folder.chmod(0o755)
    Path(path).chmod(0o666)
    done = as_nobody()
    assert "200" not in done.stdout
    assert done.stdout.strip() in ("b''", "")
    assert "PermissionError" not in done.stderr
    shutil.rmtree(folder)
