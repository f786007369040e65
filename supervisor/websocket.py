"""The client's end of a WebSocket (RFC 6455), as much of it as an agent needs: whole messages, pings, a clean end.

A general HTTP client would be a third of the agent's memory on every node, for this one connection.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import urlsplit

from diagnosis.signals import clean_text

HAPPY_EYEBALLS_S: Final = 0.25
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA


class WebSocketError(ConnectionError):
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
        self._frames = 0
        self._said_goodbye = False
        local = writer.get_extra_info("sockname")
        self.local_address = str(local[0]) if local else ""

    async def send(self, message: bytes) -> None:
        """Raises OSError when the connection is lost."""
        self._writer.write(frame(_BINARY, message))
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[bytes]:
        """What the other end says, until the connection ends in whatever way. Raises WebSocketError."""
        watch = asyncio.create_task(self._watch())
        try:
            while (message := await self._message()) is not None:
                yield message
        except (asyncio.IncompleteReadError, OSError) as error:
            if isinstance(error, WebSocketError):
                raise
        finally:
            watch.cancel()
            self.close()

    def close(self) -> None:
        """Say goodbye and end; what was sent still leaves. Whoever reads `messages` comes to their end."""
        if not self._said_goodbye:
            self._said_goodbye = True
            self._writer.write(frame(_CLOSE, (1000).to_bytes(2, "big")))
        self._writer.close()

    async def _watch(self) -> None:
        """Ask for a sign of life after a silence, and give the connection up when none comes."""
        while True:
            before = self._frames
            await asyncio.sleep(self._ping_s)
            if self._frames > before:
                continue
            self._writer.write(frame(_PING, b""))
            await asyncio.sleep(self._ping_s / 2)
            if self._frames == before:
                self._writer.transport.abort()
                return

    async def _message(self) -> bytes | None:
        """The next whole message; None at the end."""
        parts: list[bytes] = []
        while True:
            final, kind, payload = await self._frame(self._max_bytes - sum(map(len, parts)))
            if kind == _CLOSE:
                return None
            if kind == _PING:
                self._writer.write(frame(_PONG, payload))
            elif kind in (_TEXT, _BINARY, _CONTINUATION):
                if (kind == _CONTINUATION) != bool(parts):
                    raise WebSocketError("the parts of a message came out of order")
                parts.append(payload)
                if final:
                    return b"".join(parts)

    async def _frame(self, room: int) -> tuple[bool, int, bytes]:
        read = self._reader.readexactly
        first, second = await read(2)
        if first & 0x70 or second & 0x80:
            raise WebSocketError("a frame with bits that no server sets")
        size = second
        if size >= 126:
            size = int.from_bytes(await read(2 if size == 126 else 8), "big")
        if size > room:
            raise WebSocketError(f"a message of over {self._max_bytes} bytes")
        payload = await read(size)
        self._frames += 1
        return bool(first & 0x80), first & 0x0F, payload


def frame(kind: int, payload: bytes) -> bytes:
    """A whole message as a client sends it: masked."""
    size, mask = len(payload), os.urandom(4)
    if size < 126:
        head = bytes((0x80 | kind, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | kind, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | kind, 0xFF)) + size.to_bytes(8, "big")
    key = (mask * (size // 4 + 1))[:size]
    masked = int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")
    return head + mask + masked.to_bytes(size, "little")


async def connect(
    url: str,
    headers: Mapping[str, str],
    *,
    ping_s: float,
    max_bytes: int,
    tls_ca: str = "",
) -> WebSocket:
    """Open a connection to `http(s)://host:port/path`. Raises OSError, ValueError for a URL that is none."""
    parts = urlsplit(url)
    host, secure = parts.hostname, parts.scheme in ("https", "wss")
    if not host:
        raise ValueError(f"no host in {url!r}")
    tls = ssl.create_default_context(cafile=tls_ca or None) if secure else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, happy_eyeballs_delay=HAPPY_EYEBALLS_S)
    try:
        await _shake_hands(reader, writer, parts.netloc, parts.path or "/", headers)
    except BaseException:
        writer.transport.abort()
        raise
    return WebSocket(reader, writer, ping_s, max_bytes)


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str, headers: Mapping[str, str]
) -> None:
    key = base64.b64encode(os.urandom(16))
    fields = {
        "Host": host,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key.decode(),
        "Sec-WebSocket-Version": "13",
        **headers,
    }
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header may be one line only")
    writer.write("\r\n".join([*lines, "", ""]).encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise WebSocketError("no HTTP answer") from None
    except asyncio.IncompleteReadError:
        raise WebSocketError("the connection was closed before an answer") from None
    status, *rows = head.decode("latin-1").split("\r\n")
    if status.split(" ")[1:2] != ["101"]:
        raise WebSocketError(f"it was answered {clean_text(status, 100)!r}")
    answer = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
    accept = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
    if answer.get("sec-websocket-accept") != accept or answer.get("upgrade", "").lower() != "websocket":
        raise WebSocketError("the answer is not that of a WebSocket")
