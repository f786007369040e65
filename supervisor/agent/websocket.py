"""The agent's end of its one WebSocket: h11 speaks HTTP until it is open, `supervisor.wire.websocket` has its frames.

A general HTTP client would be a third of the agent's memory on every node.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import h11

from diagnosis.signals import clean_text
from supervisor.blocking import timeout
from supervisor.errors import InternalError
from supervisor.wire import websocket as ws
from supervisor.wire.peers import own_users, peer_uid
from supervisor.wire.tls import client_context

HAPPY_EYEBALLS_S: Final = 0.25
PONG_WITHIN: Final = 5.0
"""A ping is to be answered within so many times the silence before it. A host that is gone is found sooner
(`_confirm_within`); a program that is slow is as slow on another connection, and has more to do then."""
TLS_PATIENCE: Final = 3.0
"""The handshake of TLS needs the other program, which may be slow."""
_CHUNK: Final = 1 << 16
_QUIET_ENDS: Final = frozenset({ws.NORMAL, ws.GOING_AWAY, 1005, 1006})
"""Codes of a normal end; others report a breach of the protocol."""


class WebSocketError(InternalError, ConnectionError):
    """The other end does not speak WebSocket, or not as it must."""


class WebSocket:
    """One open connection. `send` may wait for room; `messages` is to be read by one task, to its end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ping_s: float, max_bytes: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._ping_s = ping_s
        self._frames = ws.FrameReader(max_bytes, masked=False)
        self._first = b""
        """What came with the end of the handshake."""
        self._is_open = False
        self._received = 0
        """Reads that brought something: signs of life."""
        local = writer.get_extra_info("sockname")
        self.local_address = str(local[0]) if isinstance(local, tuple) else ""
        """Empty for a unix socket."""

    async def send(self, message: bytes) -> None:
        """Raises OSError when the connection is lost."""
        self.write(message)
        await self.drain()

    @property
    def idle(self) -> bool:
        """Whether all that was written has left."""
        transport = self._writer.transport
        # One that is lost has no buffer to ask about (TLS, Python 3.10).
        return not transport.is_closing() and transport.get_write_buffer_size() == 0

    async def drain(self) -> None:
        """Wait for room. Raises OSError when the connection is lost."""
        await self._writer.drain()

    def write(self, message: bytes) -> None:
        """Send it without waiting. Raises OSError when the connection is lost."""
        if not self._is_open:
            raise WebSocketError("the connection is not open")
        self._say(ws.BINARY, message)

    def _say(self, opcode: int, payload: bytes) -> None:
        self._writer.write(ws.frame(opcode, payload, os.urandom(4)))

    async def open(self, host: str, target: str, headers: Mapping[str, str]) -> None:
        """Shake hands. Raises OSError, and ValueError for a header of several lines."""
        key = base64.b64encode(os.urandom(16))
        http = h11.Connection(h11.CLIENT)
        given = [("Host", host), ("Upgrade", "websocket"), ("Connection", "Upgrade"), *headers.items()]
        given += [("Sec-WebSocket-Key", key.decode()), ("Sec-WebSocket-Version", "13")]
        try:
            request = http.send(h11.Request(method="GET", target=target, headers=given))
        except h11.LocalProtocolError as error:
            raise ValueError(f"a header cannot be sent: {error}") from None
        self._writer.write((request or b"") + (http.send(h11.EndOfMessage()) or b""))
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await self._reader.read(_CHUNK))
        except h11.ProtocolError as error:
            raise WebSocketError(clean_text(f"the port does not speak HTTP as it must: {error}", 200)) from error
        if isinstance(event, h11.Response):
            raise WebSocketError(f"the port answers with HTTP status {event.status_code}")
        if not isinstance(event, h11.InformationalResponse) or event.status_code != 101:
            raise WebSocketError("the port closed the connection instead of an answer")
        if dict(event.headers).get(b"sec-websocket-accept") != ws.accept_token(key):
            raise WebSocketError("the port does not speak WebSocket as it must: it has not read the request's key")
        self._first, self._is_open = http.trailing_data[0], True

    async def messages(self) -> AsyncIterator[bytes]:
        """The messages of the other end, until the connection ends in whatever way. Raises WebSocketError."""
        watch = asyncio.create_task(self._watch())
        data = self._first
        try:
            while True:
                for opcode, payload in self._frames.feed(data):
                    if opcode == ws.CLOSE:
                        _raise_for(payload)
                        return
                    if opcode == ws.PING:
                        self._say(ws.PONG, payload)
                    elif opcode != ws.PONG:
                        yield payload
                data = await self._reader.read(_CHUNK)
                if not data:
                    return
                self._received += 1
        except ws.FrameError as error:
            raise WebSocketError(f"the port does not speak WebSocket as it must: {error}") from error
        except OSError as error:
            if isinstance(error, WebSocketError):
                raise
        finally:
            watch.cancel()
            self.close()

    def close(self) -> None:
        """Say goodbye and end; what was sent still leaves. Whoever reads `messages` comes to their end."""
        if self._is_open:
            self._is_open = False
            self._say(ws.CLOSE, ws.NORMAL.to_bytes(2, "big"))
        self._writer.close()

    async def _watch(self) -> None:
        """Ask for a sign of life after a silence, and give the connection up when none comes."""
        while True:
            before = self._received
            await asyncio.sleep(self._ping_s)
            if self._received > before:
                continue
            self._say(ws.PING, b"")
            await asyncio.sleep(PONG_WITHIN * self._ping_s)
            if self._received == before:
                self._writer.transport.abort()
                return


def _raise_for(goodbye: bytes) -> None:
    """`goodbye`: of the other end. Raises WebSocketError where it is not a normal one."""
    code = int.from_bytes(goodbye[:2], "big")
    if goodbye and code not in _QUIET_ENDS:
        why = clean_text(goodbye[2:].decode(errors="replace"), 100)
        raise WebSocketError(f"the connection broke off: {why} (code {code})")


Introduction = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[Mapping[str, str]]]
"""What is said before the WebSocket is asked for, on the same connection: its reader, its writer and the host. Gives
the headers of the request."""


async def connect(
    url: str,
    introduce: Introduction,
    *,
    connect_s: float,
    ping_s: float,
    max_bytes: int,
    tls_ca: str = "",
    unix_socket: str = "",
) -> WebSocket:
    """Open a connection to `http(s)://host:port/path`, or to the same path of a `unix_socket` of our own user.

    `connect_s`: for the other host to take the connection (with TLS: to shake hands), and to confirm what it was sent.
    Its program may take longer to answer. Raises asyncio.TimeoutError, OSError, ValueError for a URL that is none, and
    what `introduce` raises.
    """
    parts = urlsplit(url)
    host, secure = parts.hostname, parts.scheme in ("https", "wss")
    if not host:
        raise ValueError(f"no host in {url!r}")
    if unix_socket:
        reader, writer = await _open_unix(unix_socket)
    else:
        tls = client_context(tls_ca) if secure else None
        port = parts.port or (443 if secure else 80)
        async with timeout(connect_s if tls is None else TLS_PATIENCE * connect_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls, happy_eyeballs_delay=HAPPY_EYEBALLS_S)
    opened = WebSocket(reader, writer, ping_s, max_bytes)
    try:
        _confirm_within(writer, connect_s)
        await opened.open(parts.netloc, parts.path or "/", await introduce(reader, writer, parts.netloc))
    except BaseException:
        writer.transport.abort()
        raise
    return opened


def _confirm_within(writer: asyncio.StreamWriter, seconds: float) -> None:
    """So long the other host may take to confirm what it was sent: then the link is cut."""
    connection = writer.get_extra_info("socket")
    if connection.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


async def _open_unix(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError, also where somebody else listens there."""
    reader, writer = await asyncio.open_unix_connection(path)
    uid = peer_uid(writer.get_extra_info("socket"))
    if uid not in own_users():
        writer.transport.abort()
        raise PermissionError(1, f"a process of user {uid} listens on {path}")
    return reader, writer
