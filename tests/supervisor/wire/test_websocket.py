"""Frames of a WebSocket, as both ends make and read them."""

from __future__ import annotations

import pytest

from supervisor.wire.websocket import (
    BINARY,
    CLOSE,
    CONTINUED,
    PING,
    PROTOCOL_BROKEN,
    TEXT,
    TOO_LONG,
    FrameError,
    FrameReader,
    frame,
)

MASK = b"\x01\xf0\x80\x7f"


def read(reader: FrameReader, *pieces: bytes) -> list[tuple[int, bytes]]:
    return [found for piece in pieces for found in reader.feed(piece)]


@pytest.mark.parametrize("mask", [b"", MASK, b"\0\0\0\0"])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 300_001])
def test_a_message_of_any_size_is_read_as_it_was_sent(size: int, mask: bytes) -> None:
    message = bytes(number * 7 % 251 for number in range(size))
    sent = frame(BINARY, message, mask) + frame(PING, b"there?", mask)
    assert read(FrameReader(1 << 20, masked=bool(mask)), sent) == [(BINARY, message), (PING, b"there?")]


def test_what_comes_byte_by_byte_is_read_when_it_is_whole() -> None:
    message = bytes(200)
    sent = frame(BINARY, message, MASK) * 2
    pieces = [sent[place : place + 1] for place in range(len(sent))]
    assert read(FrameReader(1000, masked=True), *pieces) == [(BINARY, message)] * 2


def test_parts_make_one_message_with_a_ping_between_them() -> None:
    raw = b"\x01\x03one" + frame(PING, b"") + b"\x00\x02 a" + b"\x80\x03nd." + frame(CLOSE, b"\x03\xe8")
    assert read(FrameReader(100, masked=False), raw) == [(PING, b""), (TEXT, b"one and."), (CLOSE, b"\x03\xe8")]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\xc2\x81\0\0\0\0x", PROTOCOL_BROKEN),  # a reserved bit
        (b"\x83\x81\0\0\0\0x", PROTOCOL_BROKEN),  # an unknown opcode
        (frame(BINARY, b"x"), PROTOCOL_BROKEN),  # not masked
        (frame(CONTINUED, b"x", MASK), PROTOCOL_BROKEN),  # a part of nothing
        (b"\x01\x81\0\0\0\0x" + frame(TEXT, b"y", MASK), PROTOCOL_BROKEN),  # a message within another
        (frame(PING, b"x" * 126, MASK), PROTOCOL_BROKEN),
        (b"\x09\x80\0\0\0\0", PROTOCOL_BROKEN),  # a ping in parts
        (frame(BINARY, b"x" * 101, MASK), TOO_LONG),
        (b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff", TOO_LONG),  # found before it comes
        (b"\x02\xe0" + MASK + bytes(96) + b"\x80\xe0" + MASK + bytes(96), TOO_LONG),  # its parts together
    ],
)
def test_what_breaks_the_protocol_is_told_apart(raw: bytes, code: int) -> None:
    with pytest.raises(FrameError) as found:
        read(FrameReader(100, masked=True), raw)
    assert found.value.code == code
