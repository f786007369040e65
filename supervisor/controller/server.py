"""The controller's one port: a WebSocket for each agent, a few JSON answers for people and programs.

Nothing here decides anything. Sending never waits: each connection keeps the newest message only, and one slow or
silent agent cannot delay another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from diagnosis.signals import clean_line, clean_text
from supervisor import munge
from supervisor.blocking import timeout
from supervisor.controller.listener import BACKLOG, Listener
from supervisor.errors import CommandNotJournalled
from supervisor.messages import (
    PROTOCOL,
    ClockReply,
    Heartbeat,
    Hello,
    OperatorCommand,
    Refused,
    decode_agent_message,
    encode,
)
from supervisor.wire.authentication import (
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    PROOF_HEADER,
    Authenticator,
    Exchange,
    Forged,
    Session,
    is_nonce,
)
from supervisor.wire.peers import listen_privately, user_name

BY_LIMIT = 100


def given_by(uid: int | None, address: str, said: str) -> str:
    """`uid`: as the kernel (unix socket) or munge proves it; None: only that somebody holds the job's token."""
    if uid is None:
        return clean_line(f"holder of the token at {address}, says {said or 'nothing'}", BY_LIMIT)
    return clean_line(user_name(uid), BY_LIMIT)


log = logging.getLogger("unbroken.server")
requests_log = logging.getLogger("unbroken.server.requests")
"""aiohttp's own words about requests: `supervisor.logs` takes from them what strangers have sent."""

MAX_MESSAGE_BYTES = 8 << 20
"""Several nodes' worth of evidence (64 KiB each) with all findings; more than this is not a heartbeat."""
HELLO_TIMEOUT_S = 10.0
PING_S = 10.0
"""A connection whose other end does not answer a ping within half of this is closed."""
GOODBYE_S = 0.5
BODY_BYTES = 64 << 10
AGENT_PATH = "/v1/agent"
NOT_SIGNED = (
    f"this controller speaks protocol {PROTOCOL}: requests are signed with the job's token, which is never sent. "
    "Use the same version of unbroken everywhere"
)
MUNGE_S = 1.0
"""For munge to say who gives a command; then it is not known."""


SIGNED = ("command", "argument", "reason")
"""What munge signs of a command."""


def operator_command(body: dict[str, Any], uid: int | None) -> OperatorCommand:
    """The command in the body of POST /v1/override. Raises ValueError, where there is no such command, or field."""
    if unknown := sorted(body.keys() - {*SIGNED, "by"}):
        raise ValueError(f"a command has no field {clean_line(', '.join(unknown), 200)}")
    try:
        command = msgspec.convert({**body, "at": 0.0, "uid": uid}, type=OperatorCommand)
    except msgspec.ValidationError as error:
        raise ValueError(f"there is no such command: {error}") from None
    argument, reason = clean_line(command.argument, 200), clean_line(command.reason, 500)
    return msgspec.structs.replace(command, argument=argument, reason=reason)


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/ask."""

    incident: str


class Service(Protocol):
    """What the server asks of the controller."""

    @property
    def epoch(self) -> int: ...

    def hello(self, hello: Hello, connection: Connection) -> str:
        """Take an agent; a sentence why not, or the empty string."""

    def heartbeat(self, heartbeat: Heartbeat, connection: Connection) -> None: ...

    def gone(self, connection: Connection) -> None: ...

    async def command(self, command: OperatorCommand) -> dict[str, object]:
        """Carry it out. Raises ValueError with a sentence for the operator, and CommandNotJournalled."""

    async def dry_run(self, command: OperatorCommand) -> dict[str, object]:
        """Only tell what it would do. Raises ValueError with a sentence for the operator."""

    def ask(self, incident: str) -> dict[str, object]:
        """Have the language model asked about an incident. Raises ValueError with a sentence for the operator."""

    def view(self, name: str) -> Callable[[], dict[str, object]]:
        """Reads it now; what it gives makes the answer, in a thread."""

    async def timeline(self, since: int) -> dict[str, object]: ...


class Connection:
    """One agent's socket. `send` replaces what has not left yet: only the newest assignment matters."""

    def __init__(
        self, socket: web.WebSocketResponse, transport: asyncio.Transport | None, peer: str, session: Session
    ) -> None:
        self.socket = socket
        self.peer = peer
        self._transport = transport
        self._session = session
        self.node = ""
        self.host = ""
        self.run = ""
        self.clock_offset_s: float | None = None
        """As the node told it last."""
        self._asked: tuple[float, float] | None = None
        self._outbox: bytes | None = None
        self._filled = asyncio.Event()

    def send(self, message: bytes) -> None:
        """Send it at once where all before it has left; else it waits, in place of what waited before."""
        transport = self._transport
        waits = self._filled.is_set() or self.socket.closed or transport is None or transport.is_closing()
        if waits or transport is None or transport.get_write_buffer_size():
            self._outbox = message
            self._filled.set()
        else:
            transport.write(_frame(self._session.out.seal(message)))

    async def say(self, message: bytes) -> None:
        """Send it now."""
        await self.socket.send_bytes(self._session.out.seal(message))

    def read(self, frame: bytes | str) -> bytes:
        """Raises Forged."""
        return self._session.into.open(frame.encode() if isinstance(frame, str) else frame)

    def tell_clock(self, asked_at: float, heard_at: float) -> None:
        """Answer a heartbeat that asked for our clock."""
        self._asked = (asked_at, heard_at)
        self._filled.set()

    def close_soon(self) -> None:
        """End this connection, without waiting for its other end."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def drained(self) -> bool:
        return self._outbox is None

    async def pump(self) -> None:
        """Send what comes in, one message at a time, until cancelled or the connection fails."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            message, self._outbox = self._outbox, None
            asked, self._asked = self._asked, None
            if asked is not None:
                told = ClockReply(asked_at=asked[0], heard_at=asked[1], told_at=time.time())
                await self.say(encode(told))
            if message is not None:
                await self.say(message)


def _frame(message: bytes) -> bytes:
    """One whole binary message as a server sends it (RFC 6455, 5.2). An order to 4,096 agents is as many frames at
    once: to wake a task for each, and aiohttp's own way to send, took three times as long."""
    size = len(message)
    if size < 126:
        return struct.pack("!BB", _BINARY, size) + message
    if size < 1 << 16:
        return struct.pack("!BBH", _BINARY, 126, size) + message
    return struct.pack("!BBQ", _BINARY, 127, size) + message


_BINARY: Final = 0x82

Scrape = Callable[[], Callable[[str, str], tuple[bytes, dict[str, str]]]]
"""Reads the numbers, on the loop; what it gives makes the answer to `Accept` and `Accept-Encoding`, in a thread."""
SCRAPES_AT_ONCE = 4


class Server:
    """aiohttp on one port, and on a unix socket for this node."""

    def __init__(
        self, service: Service, token: str, tls: ssl.SSLContext | None = None, scrape: Scrape | None = None
    ) -> None:
        """`scrape`: what `/metrics` answers, to everybody; None: there is none."""
        self._service = service
        self._authenticator = Authenticator(token, service.epoch)
        self._tls = tls
        self._open = {"/healthz", CHALLENGE_PATH, *(["/metrics"] if scrape is not None else [])}
        """What is answered to everybody: health, numbers and names, as exporters do."""
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get(CHALLENGE_PATH, self._challenge)
        self._scrape = scrape
        self._scrapes = 0
        self._scraped = asyncio.Event()
        self._scraped_at = float("-inf")
        if scrape is not None:
            app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/timeline", self._timeline)
        app.router.add_get("/v1/{view:status|incidents}", self._view)
        app.router.add_post("/v1/override", self._command)
        app.router.add_post("/v1/ask", self._ask)
        self._sockets: set[web.WebSocketResponse] = set()
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=requests_log
        )
        self._listener: Listener | None = None
        self._socket: tuple[Path, int] | None = None
        """Path and inode of the unix socket: a newer controller may have put its own there by the end."""

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was taken (0 asks for a free one). Raises OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        await self._listen(listening)
        return int(listening.getsockname()[1])

    async def start_socket(self, path: Path) -> None:
        """Listen for processes of this user on this node as well. Raises OSError."""
        await self._listen(listen_privately(path))
        self._socket = (path, os.stat(path).st_ino)

    async def _listen(self, listening: socket.socket) -> None:
        if self._listener is None:
            await self._runner.setup()
            assert self._runner.server is not None
            self._listener = Listener(self._runner.server, self._tls)
        self._listener.listen(listening)

    async def stop(self) -> None:
        """Say goodbye to every agent (they look for the next controller then) and close the port."""
        if self._listener is not None:
            self._listener.close()
        with contextlib.suppress(OSError):
            if self._socket is not None and os.stat(self._socket[0]).st_ino == self._socket[1]:
                self._socket[0].unlink()
        await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._sockets))
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        assert self._listener is not None
        given = request.headers.get("Authorization", "")
        if request.path in self._open and not given.startswith("Unbroken "):
            try:
                return await handler(request)
            finally:
                self._listener.answered(request.transport)
        body = await request.read() if request.can_read_body else b""  # its time is limited as that of its headers
        exchange = self._authenticator.admit(given, request.method, request.raw_path, body, time.monotonic())
        if exchange is None:
            return await self._turn_away(request)
        with self._listener.proven(request.transport):
            try:
                answer = await (self._agent(request, exchange) if request.path == AGENT_PATH else handler(request))
            except web.HTTPException as error:
                answer = _problem(error.status, error.reason)
        if isinstance(answer, web.Response):
            told = answer.body if isinstance(answer.body, bytes) else b""
            answer.headers[PROOF_HEADER] = self._authenticator.secret.answer_proof(exchange, answer.status, told)
        return answer

    async def _turn_away(self, request: web.Request) -> web.StreamResponse:
        """An agent of protocol 1 hears why in the only way that it shows to its user."""
        socket = web.WebSocketResponse(timeout=GOODBYE_S, compress=False, max_msg_size=1024)
        if request.path != AGENT_PATH or not socket.can_prepare(request):
            return _problem(401, NOT_SIGNED)
        await socket.prepare(request)
        await socket.send_bytes(encode(Refused(why=NOT_SIGNED)))
        await socket.close()
        return socket

    async def _challenge(self, request: web.Request) -> web.Response:
        nonce = request.headers.get(CHALLENGE_HEADER, "")
        if not is_nonce(nonce):
            return _problem(400, f"header {CHALLENGE_HEADER}: 32 hexadecimal digits, never used before")
        return _answer(self._authenticator.answer(nonce, time.monotonic()))

    async def _healthz(self, _: web.Request) -> web.Response:
        view = self._service.view("health")()
        return _answer(view, 200 if view["ok"] else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        assert self._scrape is not None
        if self._scrapes >= SCRAPES_AT_ONCE:
            return _problem(503, "too many scrapes at once")
        self._scrapes += 1
        try:
            given = request.headers.get("Accept", ""), request.headers.get("Accept-Encoding", "")
            body, headers = await asyncio.to_thread(self._scrape(), *given)
        finally:
            self._scrapes -= 1
        self._scraped_at = time.monotonic()
        self._scraped.set()
        return web.Response(body=body, headers=headers)

    async def scraped_once_more(self, limit_s: float) -> None:
        """Wait for the next scrape where there were any within this time, and for no longer."""
        if time.monotonic() - self._scraped_at > limit_s:
            return
        self._scraped.clear()
        try:
            async with timeout(limit_s):
                await self._scraped.wait()
        except asyncio.TimeoutError:
            log.info("nobody scraped the end of the job")

    async def _view(self, request: web.Request) -> web.Response:
        return _answer(await asyncio.to_thread(self._service.view(request.match_info["view"])))

    async def _timeline(self, request: web.Request) -> web.Response:
        try:
            since = int(request.query.get("since", "0"))
        except ValueError:
            return _problem(400, "`since` must be a number: the seq of the last record you have")
        return _answer(await self._service.timeline(since))

    async def _command(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=dict[str, Any])
            credential, dry_run = body.pop("munge", ""), body.pop("dry_run", False) is not False
            assert self._listener is not None
            address, uid = self._listener.peer(request.transport)
            if uid is None and credential:
                signed = self._authenticator.secret.command_digest(*(str(body.get(name, "")) for name in SIGNED))
                uid = await asyncio.to_thread(munge.signed_by, str(credential), signed, MUNGE_S)
            command = operator_command({**body, "by": given_by(uid, address, str(body.get("by", "")))}, uid)
            return _answer(await (self._service.dry_run if dry_run else self._service.command)(command))
        except CommandNotJournalled as error:
            return _problem(504, clean_text(str(error)))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            return _answer(self._service.ask(msgspec.json.decode(await request.read(), type=Ask).incident))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))

    async def _agent(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        """One agent, to the end of its connection. That one leaves at whatever moment is nothing to report."""
        socket = web.WebSocketResponse(
            heartbeat=PING_S, timeout=GOODBYE_S, compress=False, max_msg_size=MAX_MESSAGE_BYTES
        )
        try:
            await socket.prepare(request)
            self._sockets.add(socket)
            await self._serve_agent(request, exchange, socket)
        except ConnectionError as error:
            log.debug("an agent left: %r", error)
            if not socket.prepared:
                return web.Response(status=400)
        finally:
            self._sockets.discard(socket)
        return socket

    async def _serve_agent(self, request: web.Request, exchange: Exchange, socket: web.WebSocketResponse) -> None:
        assert self._listener is not None
        session = self._authenticator.secret.session(exchange, controller=True)
        connection = Connection(socket, request.transport, self._listener.peer(request.transport)[0], session)
        refusal = await self._first_message(connection)
        if refusal:
            log.warning("agent %s refused: %s", connection.peer, refusal)
            await connection.say(encode(Refused(why=refusal)))
            await socket.close()
            return
        pump = asyncio.create_task(connection.pump())
        pump.add_done_callback(_failed_quietly)
        try:
            await self._converse(connection)
        finally:
            pump.cancel()
            self._service.gone(connection)
            await connection.socket.close()

    async def _first_message(self, connection: Connection) -> str:
        try:
            first = await connection.socket.receive(HELLO_TIMEOUT_S)
        except asyncio.TimeoutError:
            return f"no hello within {HELLO_TIMEOUT_S:.0f} s"
        if first.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            raise ConnectionResetError("it left before its hello")
        if first.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
            return "the first message must be a hello"
        try:
            return take_hello(self._service, connection.read(first.data), connection)
        except Forged as error:
            return str(error)

    async def _converse(self, connection: Connection) -> None:
        async for message in connection.socket:
            if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                continue
            heard_at = time.time()
            try:
                heartbeat = decode_agent_message(connection.read(message.data))
            except Forged as error:
                log.error("the connection of %s ends: %s", connection.node, error)
                return
            except msgspec.DecodeError as error:
                why = f"a message of {connection.node} could not be read: {clean_text(str(error), 200)}"
                log.error("%s", why)
                await connection.say(encode(Refused(why=why)))
                return
            if isinstance(heartbeat, Heartbeat) and heartbeat.node == connection.node:
                connection.clock_offset_s = heartbeat.clock_offset_s
                if heartbeat.asked_at is not None:
                    connection.tell_clock(heartbeat.asked_at, heard_at)
                self._service.heartbeat(heartbeat, connection)


class _AnyHello(msgspec.Struct, tag_field="type", tag="hello"):
    """The part of a hello that every protocol version has."""

    protocol: int


def take_hello(service: Service, data: bytes, connection: Connection) -> str:
    """Why this first message is refused, in words for a person; empty when the agent is taken."""
    try:
        protocol = msgspec.json.decode(data, type=_AnyHello).protocol
    except msgspec.DecodeError:
        return "the first message must be a hello with a protocol version"
    if protocol != PROTOCOL:
        return (
            f"the agent speaks protocol {protocol} and this controller speaks {PROTOCOL}: "
            "install the same version of unbroken on every node of the job"
        )
    try:
        hello = decode_agent_message(data)
    except msgspec.DecodeError as error:
        return f"the hello could not be read: {clean_text(str(error), 200)}"
    assert isinstance(hello, Hello)
    return service.hello(hello, connection)


def _failed_quietly(task: asyncio.Task[None]) -> None:
    """A connection that fails while sending is found by its reader too: nothing to do but look at the error."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("sending failed: %r", error)


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=encode(body) + b"\n", status=status, content_type="application/json")


def _problem(status: int, why: str) -> web.Response:
    return _answer({"schema": 1, "error": why}, status)
