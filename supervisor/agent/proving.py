"""An agent has its controller prove itself, before it says or does anything else (docs/protocol.md, "Proof")."""

from __future__ import annotations

import asyncio
from typing import Final

import h11
import msgspec

from supervisor.wire.authentication import (
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    Exchange,
    SharedSecret,
    Unproven,
    exchange_of,
    new_nonce,
)

ANSWER_BYTES: Final = 8 << 10


async def challenge(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, secret: SharedSecret
) -> Exchange:
    """Ask on a connection that was just opened, and leave it ready for the next request.

    Raises Unproven when what answers is not this job's controller, and OSError.
    """
    nonce = new_nonce()
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=ANSWER_BYTES)
    request = h11.Request(method="GET", target=CHALLENGE_PATH, headers=[("Host", host), (CHALLENGE_HEADER, nonce)])
    try:
        writer.write(connection.send(request) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        status, body = await _answer(connection, reader)
        if status != 200:
            raise Unproven(f"it answers with HTTP status {status}: another version of unbroken, or another program")
        return exchange_of(msgspec.json.decode(body), nonce, secret)
    except (h11.ProtocolError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise Unproven("it does not answer as a controller does: another program has this port") from None


async def _answer(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, body, first = 0, b"", True
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(4096)
            if not data:
                raise Unproven("it closes the connection instead of an answer")
            if first and data[:5] != b"HTTP/"[: len(data)]:
                raise Unproven("it does not speak HTTP: another program has this port")
            first = False
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
            if len(body) > ANSWER_BYTES:
                raise Unproven("its answer is longer than a controller's")
        elif isinstance(event, h11.EndOfMessage):
            return status, body
        elif isinstance(event, h11.ConnectionClosed):
            raise Unproven("it closes the connection instead of an answer")
