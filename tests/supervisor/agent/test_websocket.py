"""The client's end of a WebSocket against aiohttp's server, and against ports that do not keep to the protocol."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSMsgType, web

from supervisor.agent.link import WebSocket, WebSocketError, connect

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def go(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 100.0)

    asyncio.run(bounded())


@asynccontextmanager
async def served(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]):  # type: ignore[no-untyped-def]
    app = web.Application()
    app.router.add_get("/v1/agent", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/agent"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(*raw: bytes, accept: str = ""):  # type: ignore[no-untyped-def]
    """A port that shakes hands and then sends these bytes, whatever they are; it hands over what it got."""
    heard: list[bytes] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = head.split(b"Sec-WebSocket-Key: ", 1)[1].split(b"\r\n", 1)[0]
        proof = accept or base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: upgrade"]
        writer.write("\r\n".join([*lines, f"Sec-WebSocket-Accept: {proof}", "", ""]).encode())
        for piece in raw:
            writer.write(piece)
            await writer.drain()
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", heard


async def opened(url: str, ping_s: float = 60.0, max_bytes: int = 1 << 20) -> WebSocket:
    async def introduce(*_: object) -> dict[str, str]:
        return {"Authorization": "Bearer secret"}

    return await connect(url, introduce, connect_s=5.0, ping_s=ping_s, max_bytes=max_bytes)


async def all_of(socket: WebSocket) -> list[bytes]:
    return [message async for message in socket.messages()]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 300_001])
def test_messages_of_any_size_come_back_as_they_were(size: int) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(await socket.receive_bytes())
        await socket.close()
        return socket

    async def scenario() -> None:
        message = bytes(number * 7 % 251 for number in range(size))
        async with served(echo) as url:
            socket = await opened(url)
            assert socket.local_address == "127.0.0.1"
            await socket.send(message)
            assert await all_of(socket) == [message]

    go(scenario())


def test_the_close_is_sent_to_the_server_and_pings_are_answered() -> None:
    ended: list[object] = []

    async def meet(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await socket.ping(b"there?")
        pong = await socket.receive()
        await socket.send_str("go on")
        ended.extend([(pong.type, pong.data), (await socket.receive()).type, socket.close_code])
        return socket

    async def scenario() -> None:
        async with served(meet) as url:
            socket = await opened(url)
            async for message in socket.messages():
                assert message == b"go on"
                socket.close()
            while len(ended) < 3:
                await asyncio.sleep(0.005)
        assert ended == [(WSMsgType.PONG, b"there?"), WSMsgType.CLOSE, 1000]

    go(scenario())


def test_parts_make_one_message_with_pings_between_them() -> None:
    async def scenario() -> None:
        raw = [b"\x01\x03one", b"\x89\x00", b"\x00\x02 a", b"\x80\x03nd.", b"\x82\x01x", b"\x88\x00"]
        async with answering(*raw) as (url, heard):
            assert await all_of(await opened(url)) == [b"one and.", b"x"]
            while not heard:
                await asyncio.sleep(0.005)
            assert heard[0][:2] == b"\x8a\x80"  # the pong, masked

    go(scenario())


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x82\x81\x00\x00\x00\x00x", "is masked"),
        (b"\xc2\x01x", "reserved bit"),
        (b"\x80\x01x", "a part of a message"),
        (b"\x01\x01x\x82\x01y", "a part of a message"),
        (b"\x82\x02" + b"xx" + b"\x02\x7f\x00\x00\x00\x00\x40\x00\x00\x00" + b"x" * 1100000, "over 1048576 bytes"),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(raw: bytes, why: str) -> None:
    async def scenario() -> None:
        async with answering(raw) as (url, _):
            with pytest.raises(WebSocketError, match=why):
                await all_of(await opened(url))

    go(scenario())


def test_a_frame_that_is_cut_off_is_the_end() -> None:
    async def scenario() -> None:
        async with served(_refuse) as url:
            with pytest.raises(WebSocketError, match="401"):
                await opened(url)
        async with answering(accept="nonsense") as (url, _):
            with pytest.raises(WebSocketError, match="has not read the request's key"):
                await opened(url)
        async with answering(b"\x82\x05ab") as (url, _):
            socket = await opened(url, ping_s=0.05)
            began = time.monotonic()
            assert await all_of(socket) == []  # given up: nothing whole came for so long
            assert time.monotonic() - began >= 0.07

    go(scenario())


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=401, text="no")
