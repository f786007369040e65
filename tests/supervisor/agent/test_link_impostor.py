"""What listens at the controller's address may be a stranger: it learns nothing and is not obeyed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from supervisor.agent.link import ControllerAddress, Link, LinkTimeouts
from supervisor.messages import PROTOCOL, Assignment, Hello, JobSpec, encode
from supervisor.wire.authentication import CHALLENGE_PATH, Authenticator

TOKEN = "token-of-the-job"
HELLO = Hello(protocol=PROTOCOL, node="n0", host="h", address="", spec=JobSpec(name="j", command=("python", "x.py")))
ORDER = encode(Assignment(epoch=9, version=9, node="n0", role="member", attempt=1, stage="stop"))
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

Answer = Callable[[bytes], bytes | None]


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )


def upgraded(asked: bytes) -> bytes:
    """A WebSocket that gives an order at once, whoever asks."""
    key = re.search(rb"(?i)sec-websocket-key: (\S+)", asked)
    if key is None:
        return http(b"{}")
    proof = base64.b64encode(hashlib.sha1(key[1] + GUID).digest()).decode()
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: upgrade"]
    frame = b"\x82\x7e" + len(ORDER).to_bytes(2, "big") + ORDER
    return "\r\n".join([*lines, f"Sec-WebSocket-Accept: {proof}", "", ""]).encode() + frame


def guessed(asked: bytes) -> bytes:
    """Speaks our protocol, with another token."""
    nonce = re.search(rb"(?i)unbroken-challenge: (\S+)", asked)
    if nonce is None:
        return upgraded(asked)
    return http(msgspec.json.encode(Authenticator("a guess", epoch=9).answer(nonce[1].decode(), 0.0)))


def echoed(asked: bytes) -> bytes:
    """Gives back what it has heard."""
    nonce = re.search(rb"(?i)unbroken-challenge: (\S+)", asked)
    told = nonce[1].decode() if nonce else ""
    return http(msgspec.json.encode({"protocol": PROTOCOL, "epoch": 9, "nonce": told * 2, "proof": told * 2}))


IMPOSTORS: dict[str, Answer] = {
    "of protocol 1": upgraded,
    "with another token": guessed,
    "with an echo": echoed,
    "that refuses": lambda _: http(b'{"schema":1,"error":"no"}', "401 Unauthorized"),
    "of a later protocol": lambda _: http(b'{"protocol":3,"epoch":1,"nonce":"%s","proof":""}' % (b"0" * 64)),
    "of another kind": lambda _: b"SSH-2.0-OpenSSH_9.2\r\n",
    "with a long answer": lambda _: http(b" " * 100_000),
    "that closes": lambda _: None,
}


@asynccontextmanager
async def impostor(answer: Answer):  # type: ignore[no-untyped-def]
    heard: list[bytes] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while said := await reader.read(65536):
                heard.append(said)
                told = answer(said)
                if told is None:
                    break
                writer.write(told)
                await writer.drain()
        except OSError:
            pass  # the agent has had enough
        finally:
            writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


def go(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 100.0)

    asyncio.run(bounded())


@pytest.mark.parametrize("answer", IMPOSTORS.values(), ids=IMPOSTORS.keys())
def test_an_impostor_gets_no_secret_and_is_not_obeyed(answer: Answer) -> None:
    told: list[Any] = []

    async def scenario() -> None:
        async with impostor(answer) as (url, heard):
            link = Link(lambda: ControllerAddress(url), lambda: TOKEN, HELLO, timeouts=LinkTimeouts(distrusted_s=0.0))
            task = asyncio.create_task(link.run(told.append))
            while len(heard) < 3 or not link.distrust:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert told == []
            assert not link.connected
            assert link.connections == 0
            said = b"".join(heard)
            assert CHALLENGE_PATH.encode() in said
            for secret in (TOKEN.encode(), b"Authorization", b"x.py", b"hello"):
                assert secret not in said

    go(scenario())
