"""Frames of a WebSocket (RFC 6455, section 5), for both ends. Does no I/O.

A controller reads thousands of frames a second: a general library takes several times as long for each.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator
from typing import Final

from supervisor.errors import InternalError

CONTINUED: Final = 0
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_BROKEN: Final = 1002
TOO_LONG: Final = 1009


_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept_token(key: bytes) -> bytes:
    """What a server answers to the key of a client: it has read the request, and speaks the protocol."""
    return base64.b64encode(hashlib.sha1(key + _GUID).digest())


class FrameError(InternalError, ValueError):
    """The other end does not keep to the protocol. `code` says how, as a close frame has it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(opcode: int, payload: bytes, mask: bytes = b"") -> bytes:
    """One whole message, or a control frame. `mask`: four random bytes at a client's end."""
    size, masked = len(payload), 0x80 if mask else 0
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, masked | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, masked | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, masked | 127, size)
    return head + mask + _mask(payload, mask) if mask else head + payload


def _mask(payload: bytes, mask: bytes) -> bytes:
    """Twice gives `payload` again."""
    if mask == b"\0\0\0\0":
        return payload
    size = len(payload)
    key = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
    return (int.from_bytes(payload, "little") ^ key).to_bytes(size, "little")


class FrameReader:
    """`feed` it what arrives; it gives whole messages and control frames, each with its opcode."""

    def __init__(self, max_bytes: int, *, masked: bool) -> None:
        """`masked`: the other end is a client."""
        self._max_bytes = max_bytes
        self._masked = masked
        self._buffer = b""
        self._opcode = CONTINUED
        """Of the message whose first part has come; `CONTINUED`: there is none."""
        self._parts = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Raises FrameError."""
        self._buffer = self._buffer + data if self._buffer else data
        while (found := self._next()) is not None:
            is_last, opcode, payload = found
            if opcode >= CLOSE:
                yield opcode, payload
                continue
            if (opcode == CONTINUED) != (self._opcode != CONTINUED):
                raise FrameError(PROTOCOL_BROKEN, "a part of a message comes where none should")
            opcode, payload = opcode or self._opcode, self._parts + payload
            if len(payload) > self._max_bytes:
                raise FrameError(TOO_LONG, f"a message of over {self._max_bytes} bytes")
            self._opcode, self._parts = (CONTINUED, b"") if is_last else (opcode, payload)
            if is_last:
                yield opcode, payload

    def _next(self) -> tuple[bool, int, bytes] | None:
        """The next whole frame: whether it ends its message, its opcode, what is in it."""
        data = self._buffer
        if len(data) < 2:
            return None
        first, size, start = data[0], data[1] & 0x7F, 2
        if first & 0x70 or (first & 0x0F) not in (CONTINUED, TEXT, BINARY, CLOSE, PING, PONG):
            raise FrameError(PROTOCOL_BROKEN, "a frame has an unknown opcode or a reserved bit")
        if bool(data[1] & 0x80) is not self._masked:
            raise FrameError(PROTOCOL_BROKEN, f"a frame is {'not masked' if self._masked else 'masked'}")
        if first & 0x08 and (size > 125 or first <= 0x7F):
            raise FrameError(PROTOCOL_BROKEN, "a control frame is too long or in parts")
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(data) < start:
                return None
            size = int.from_bytes(data[2:start], "big")
        if size > self._max_bytes:
            raise FrameError(TOO_LONG, f"a message of over {self._max_bytes} bytes")
        if self._masked:
            start += 4
        end = start + size
        if len(data) < end:
            return None
        self._buffer = data[end:]
        payload = data[start:end]
        return first > 0x7F, first & 0x0F, _mask(payload, data[start - 4 : start]) if self._masked else payload
