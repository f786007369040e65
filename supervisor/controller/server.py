"""The controller's one port: a WebSocket for each agent, a few JSON answers for people and programs.

Nothing here decides anything. Sending never waits: each connection keeps the newest message only, and one slow or
silent agent cannot delay another.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from diagnosis.signals import clean_line, clean_text
from supervisor.deadline import timeout
from supervisor.messages import (
    PROTOCOL,
    ClockTold,
    Heartbeat,
    Hello,
    OverrideGiven,
    Refused,
    decode_agent_message,
    encode,
)

log = logging.getLogger("unbroken.server")

MAX_MESSAGE_BYTES = 8 << 20
"""Several nodes' worth of evidence (64 KiB each) with all findings; more than this is not a heartbeat."""
HELLO_TIMEOUT_S = 10.0
PING_S = 10.0
"""A connection whose other end does not answer a ping within half of this is closed."""
GOODBYE_S = 0.5


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/override."""

    command: str
    argument: str = ""
    reason: str = ""
    by: str = ""
    dry_run: bool = False
    """Only tell what it would do."""


class NotYet(Exception):
    """An order that the journal has not taken so far: it may be done yet. The text says so."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/ask."""

    incident: str


class Service(Protocol):
    """What the server asks of the controller."""

    def hello(self, hello: Hello, connection: Connection) -> str:
        """Take an agent; a sentence why not, or the empty string."""

    def heartbeat(self, heartbeat: Heartbeat, connection: Connection) -> None: ...

    def gone(self, connection: Connection) -> None: ...

    async def override(self, given: Override) -> dict[str, object]:
        """Raises ValueError with a sentence for the operator, and NotYet."""

    def ask(self, incident: str) -> dict[str, object]:
        """Have the language model asked about an incident. Raises ValueError with a sentence for the operator."""

    def view(self, name: str) -> dict[str, object]: ...

    async def timeline(self, since: int) -> dict[str, object]: ...


class Connection:
    """One agent's socket. `send` replaces what has not left yet: only the newest assignment matters."""

    def __init__(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        self.socket = socket
        self.peer = request.remote or "?"
        self._transport = request.transport
        self.node = ""
        self.host = ""
        self.clock_offset_s: float | None = None
        """As the node told it last."""
        self._asked: tuple[float, float] | None = None
        self._outbox: bytes | None = None
        self._filled = asyncio.Event()

    def send(self, message: bytes) -> None:
        self._outbox = message
        self._filled.set()

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
                told = ClockTold(asked_at=asked[0], heard_at=asked[1], told_at=time.time())
                await self.socket.send_bytes(encode(told))
            if message is not None:
                await self.socket.send_bytes(message)


Scrape = Callable[[], Callable[[str, str], tuple[bytes, dict[str, str]]]]
"""Reads the numbers, on the loop; what it gives makes the answer to `Accept` and `Accept-Encoding`, in a thread."""
SCRAPES_AT_ONCE = 4


class Server:
    """aiohttp on one port."""

    def __init__(
        self, service: Service, token: str, tls: ssl.SSLContext | None = None, scrape: Scrape | None = None
    ) -> None:
        """`scrape`: what `/metrics` answers, to everybody; None: there is none."""
        self._service = service
        self._token = token.encode()
        self._tls = tls
        app = web.Application(middlewares=[self._guard], client_max_size=64 << 10)
        app.router.add_get("/healthz", self._healthz)
        self._scrape = scrape
        self._scrapes = 0
        self._scraped = asyncio.Event()
        self._scraped_at = float("-inf")
        if scrape is not None:
            app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/agent", self._agent)
        app.router.add_get("/v1/timeline", self._timeline)
        app.router.add_get("/v1/{view:status|incidents}", self._view)
        app.router.add_post("/v1/override", self._override)
        app.router.add_post("/v1/ask", self._ask)
        self._sockets: set[web.WebSocketResponse] = set()
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was taken (0 asks for a free one). Raises OSError."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=self._tls, backlog=1024)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Say goodbye to every agent (they look for the next controller then) and close the port."""
        await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._sockets))
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/healthz" or (request.path == "/metrics" and self._scrape is not None):
            return await handler(request)  # open, as exporters are: numbers and names
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="replace"), b"Bearer " + self._token):
            return _problem(401, "this request needs the job's token: header `Authorization: Bearer TOKEN`")
        return await handler(request)

    async def _healthz(self, _: web.Request) -> web.Response:
        view = self._service.view("health")
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
        return _answer(self._service.view(request.match_info["view"]))

    async def _timeline(self, request: web.Request) -> web.Response:
        try:
            since = int(request.query.get("since", "0"))
        except ValueError:
            return _problem(400, "`since` must be a number: the seq of the last record you have")
        return _answer(await self._service.timeline(since))

    async def _override(self, request: web.Request) -> web.Response:
        try:
            return _answer(await self._service.override(msgspec.json.decode(await request.read(), type=Override)))
        except NotYet as error:
            return _problem(504, clean_text(str(error)))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            return _answer(self._service.ask(msgspec.json.decode(await request.read(), type=Ask).incident))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=PING_S, timeout=GOODBYE_S, compress=False, max_msg_size=MAX_MESSAGE_BYTES
        )
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            await self._serve_agent(request, socket)
        finally:
            self._sockets.discard(socket)
        return socket

    async def _serve_agent(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        connection = Connection(socket, request)
        refusal = await self._first_message(connection)
        if refusal:
            log.warning("agent %s refused: %s", connection.peer, refusal)
            await socket.send_bytes(encode(Refused(why=refusal)))
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
        if first.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
            return "the first message must be a hello"
        return take_hello(self._service, first.data, connection)

    async def _converse(self, connection: Connection) -> None:
        async for message in connection.socket:
            if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                continue
            heard_at = time.time()
            try:
                heartbeat = decode_agent_message(message.data)
            except msgspec.DecodeError as error:
                why = f"a message of {connection.node} could not be read: {clean_text(str(error), 200)}"
                log.error("%s", why)
                await connection.socket.send_bytes(encode(Refused(why=why)))
                return
            if isinstance(heartbeat, Heartbeat) and heartbeat.node == connection.node:
                connection.clock_offset_s = heartbeat.clock_offset_s
                if heartbeat.asked_at is not None:
                    connection.tell_clock(heartbeat.asked_at, heard_at)
                self._service.heartbeat(heartbeat, connection)


class _AnyHello(msgspec.Struct, tag_field="type", tag="hello"):
    """The part of a hello that every protocol version has."""

    protocol: int


def take_hello(service: Service, data: bytes | str, connection: Connection) -> str:
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


def make_override(given: Override, at: float) -> OverrideGiven:
    """The event of an operator's command. Raises ValueError when there is no such command."""
    try:
        return msgspec.convert(
            {
                "event": "override_given",
                "at": at,
                "command": given.command,
                "argument": clean_line(given.argument, 200),
                "reason": clean_line(given.reason, 500),
                "by": clean_line(given.by, 100),
            },
            type=OverrideGiven,
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"no such override: {error}") from None
