"""The agent's end of its one WebSocket: wsproto speaks the protocol, this moves its bytes.

A general HTTP client would be a third of the agent's memory on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Message,
    Ping,
    RejectConnection,
    Request,
)
from wsproto.utilities import ProtocolError

from diagnosis.signals import clean_text
from supervisor.blocking import timeout
from supervisor.errors import InternalError
from supervisor.wire.peers import own_users, peer_uid
from supervisor.wire.tls import client_context

HAPPY_EYEBALLS_S: Final = 0.25
PONG_WITHIN: Final = 5.0
"""A ping is to be answered within so many times the silence before it. A host that is gone is found sooner
(`_confirm_within`); a program that is slow is as slow on another connection, and has more to do then."""
TLS_PATIENCE: Final = 3.0
"""The handshake of TLS needs the other program, which may be slow."""
_CHUNK: Final = 1 << 16
_BINARY: Final = 0x82
"""A frame that is a whole binary message."""
_MASKED: Final = 0x80
_QUIET_ENDS: Final = frozenset({1000, 1001, 1005, 1006})
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
        self._max_bytes = max_bytes
        self._protocol = WSConnection(ConnectionType.CLIENT)
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
        if self._protocol.state is not ConnectionState.OPEN:
            raise WebSocketError("the connection is not open")
        self._writer.write(_frame(message, os.urandom(4)))

    def _say(self, event: Event) -> None:
        try:
            self._writer.write(self._protocol.send(event))
        except ProtocolError as error:  # sent after the end
            raise WebSocketError(str(error)) from error

    async def open(self, host: str, target: str, headers: Mapping[str, str]) -> None:
        """Shake hands. Raises OSError, and ValueError for a header of several lines."""
        if any(mark in text for item in headers.items() for text in item for mark in "\r\n"):
            raise ValueError("a header may be one line only")
        given = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._say(Request(host=host, target=target, extra_headers=given))
        async for event in self._events():
            if isinstance(event, AcceptConnection):
                return
            if isinstance(event, RejectConnection):
                raise WebSocketError(f"the port answers with HTTP status {event.status_code}")
        raise WebSocketError("the port closed the connection instead of an answer")

    async def messages(self) -> AsyncIterator[bytes]:
        """The messages of the other end, until the connection ends in whatever way. Raises WebSocketError."""
        watch = asyncio.create_task(self._watch())
        parts: list[bytes] = []
        try:
            async for event in self._events():
                if not isinstance(event, Message):
                    continue
                parts.append(event.data.encode() if isinstance(event.data, str) else bytes(event.data))
                if sum(map(len, parts)) > self._max_bytes:
                    raise WebSocketError(f"a message of over {self._max_bytes} bytes")
                if event.message_finished:
                    yield b"".join(parts)
                    parts = []
        finally:
            watch.cancel()
            self.close()

    async def _events(self) -> AsyncIterator[Event]:
        """Everything that arrives, pings answered, until the end."""
        try:
            while True:
                for event in self._protocol.events():
                    if isinstance(event, CloseConnection):
                        if event.code not in _QUIET_ENDS:
                            why = clean_text(event.reason or "", 100)
                            raise WebSocketError(f"the connection broke off: {why} (code {int(event.code)})")
                        return
                    if isinstance(event, Ping):
                        self._say(event.response())
                    yield event
                data = await self._reader.read(_CHUNK)
                if not data:
                    return
                self._received += 1
                self._protocol.receive_data(data)
        except ProtocolError as error:
            raise WebSocketError(clean_text(f"the port does not speak WebSocket as it must: {error}", 200)) from error
        except OSError as error:
            if isinstance(error, WebSocketError):
                raise

    def close(self) -> None:
        """Say goodbye and end; what was sent still leaves. Whoever reads `messages` comes to their end."""
        try:
            self._say(CloseConnection(code=1000))
        except WebSocketError:
            pass  # closed before, or never opened
        self._writer.close()

    async def _watch(self) -> None:
        """Ask for a sign of life after a silence, and give the connection up when none comes."""
        while True:
            before = self._received
            await asyncio.sleep(self._ping_s)
            if self._received > before:
                continue
            self._say(Ping())
            await asyncio.sleep(PONG_WITHIN * self._ping_s)
            if self._received == before:
                self._writer.transport.abort()
                return


def _frame(message: bytes, mask: bytes) -> bytes:
    """One whole binary message as a client sends it (RFC 6455, 5.2). wsproto takes ten times as long to mask it, and
    heartbeats are most of what is ever sent.
    """
    size = len(message)
    if size < 126:
        head = struct.pack("!BB", _BINARY, _MASKED | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", _BINARY, _MASKED | 126, size)
    else:
        head = struct.pack("!BBQ", _BINARY, _MASKED | 127, size)
    key = (mask * (size // 4 + 1))[:size]
    masked = int.from_bytes(message, "little") ^ int.from_bytes(key, "little")
    return head + mask + masked.to_bytes(size, "little")


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
