"""The connections of the controller's port and unix socket.

asyncio's own servers accept whatever comes: a thousand idle connections would take all descriptors. Here each
connection counts from the moment it is accepted, before TLS and before its first byte, until it has proven itself.

Agents are answered here, to the last frame; other requests are aiohttp's. Sending never waits: each connection keeps
the newest message only, and one slow or silent agent cannot delay another. 4,096 agents that come back at once cost
half of what they cost through aiohttp (docs/adr/0031).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec

from diagnosis.signals import clean_text
from supervisor.messages import (
    PROTOCOL,
    ClockReply,
    Heartbeat,
    Hello,
    Refused,
    WatchedNow,
    decode_agent_message,
    encode,
)
from supervisor.wire import websocket as ws
from supervisor.wire.access import MUNGE_HEADER, TOKEN_HEADER
from supervisor.wire.authentication import (
    AGENT_PATH,
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    Authenticator,
    Forged,
    Session,
    is_nonce,
)
from supervisor.wire.limits import IDLE_S, REQUEST_S, RESERVED, UnprovenConnections, descriptor_limit
from supervisor.wire.peers import own_users, peer_uid

log = logging.getLogger("unbroken.server")

ACCEPTS_AT_ONCE = 256
"""Then others have their turn."""
ACCEPT_AGAIN_S = 0.2
"""After descriptors have run out all the same."""
TLS_HANDSHAKE_S = 5.0
SWEEP_S = 1.0
BACKLOG = 4096
"""Connections that the kernel keeps for us (as far as it may): so many agents find a controller that starts again."""
MAX_MESSAGE_BYTES = 8 << 20
"""Several nodes' worth of evidence (64 KiB each) with all findings; more than this is not a heartbeat."""
HEAD_BYTES = 8 << 10
"""Of a request."""
HELLO_TIMEOUT_S = 10.0
PING_S = 10.0
"""A connection whose other end does not answer a ping within half of this is closed."""
GOODBYE_S = 0.5
NOT_SIGNED = (
    f"this controller speaks protocol {PROTOCOL}: requests are signed with the job's token, which is never sent. "
    "Use the same version of unbroken everywhere"
)
_REQUEST_LINES: Final = tuple(b"GET %s HTTP/1.1\r\n" % path.encode() for path in (CHALLENGE_PATH, AGENT_PATH))


class AgentService(Protocol):
    """What the connections of agents ask of the controller."""

    def hello(self, hello: Hello, connection: Connection) -> str:
        """Take an agent; a sentence why not, or the empty string."""

    def heartbeat(self, heartbeat: Heartbeat, connection: Connection) -> None: ...

    def gone(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """One connection: at first a stranger's, then an agent's or aiohttp's.

    `send` replaces what has not left yet: only the newest assignment matters.
    """

    def __init__(self, listener: Listener, accepted: socket.socket, peer: str, uid: int | None) -> None:
        self.peer = peer
        self.uid = uid
        """Of a process at the other end of the unix socket."""
        self.node = ""
        self.host = ""
        self.run = ""
        self.clock_offset_s: float | None = None
        """As the node told it last."""
        self.opening: asyncio.Task[object] | None = None
        self._listener = listener
        self._socket = accepted
        self._transport: asyncio.Transport | None = None
        self._put_out = False
        self._request = b""
        """The part of a request that has come."""
        self._http: asyncio.Protocol | None = None
        self._frames: ws.FrameReader | None = None
        """It is a WebSocket."""
        self._session: Session | None = None
        """An agent that has proven itself is at the other end."""
        self._greeted = False
        """Its hello was taken."""
        self._ends = False
        self._is_full = False
        """Something waits for the kernel to take it."""
        self._outbox: bytes | None = None
        self._asked: tuple[float, float] | None = None
        self._heard_at = 0.0
        self._pinged_at: float | None = None

    # ----- what others ask of it -----

    def send(self, message: bytes) -> None:
        """Send it at once where all before it has left; else it waits, in place of what waited before."""
        if self._is_full:
            self._outbox = message
        else:
            self._say(message)

    def close_soon(self) -> None:
        """End this connection, without waiting for its other end."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def drained(self) -> bool:
        return self._outbox is None

    def put_out(self) -> None:
        """End it at once, whatever state it is in."""
        self._put_out = True
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def opened(self, task: asyncio.Task[object]) -> None:
        """It is open, or (TLS failed, it was put out) never will be."""
        failed = task.cancelled() or task.exception() is not None
        self.opening = None
        if (failed or self._put_out) and self._transport is None:
            self._socket.close()
            self._listener.forget(self, None)

    def look(self, now: float) -> None:
        """Ask an agent that is silent for a sign of life, and end its connection when none comes."""
        if not self._greeted and now - self._heard_at > HELLO_TIMEOUT_S:
            self._refuse(f"no hello within {HELLO_TIMEOUT_S:.0f} s")
        elif self._pinged_at is not None and now - self._pinged_at > PING_S / 2:
            self.close_soon()
        elif self._pinged_at is None and now - self._heard_at > PING_S:
            self._pinged_at = now
            self._write(ws.PING, b"")

    def say_goodbye(self, code: int = ws.NORMAL) -> None:
        """Close it, and let what was sent leave."""
        if not self._ends:
            self._ends = True
            self._write(ws.CLOSE, code.to_bytes(2, "big"))
            asyncio.get_running_loop().call_later(GOODBYE_S, self.close_soon)

    # ----- what asyncio calls -----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._put_out:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.forget(self, self._transport)
        if self._http is not None:
            self._http.connection_lost(exc)
        elif self._greeted:
            self._listener.service.gone(self)

    def data_received(self, data: bytes) -> None:
        if self._frames is not None:
            self._take(self._frames, data)
        elif self._http is not None:
            self._http.data_received(data)
        else:
            self._read_request(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received() if self._http is not None else None

    def pause_writing(self) -> None:
        self._is_full = True
        if self._http is not None:
            self._http.pause_writing()
        elif self._frames is None:  # it asks on and on, and does not read the answers: they would pile up
            self.close_soon()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._http is not None:
            self._http.resume_writing()
            return
        if self._asked is not None:
            self._tell_clock(*self._asked)
        if self._outbox is not None and not self._is_full:
            message, self._outbox = self._outbox, None
            self._say(message)

    # ----- requests -----

    def _read_request(self, data: bytes) -> None:
        self._request += data
        while self._request and self._frames is None:
            expected = any(self._request[: len(line)] == line[: len(self._request)] for line in _REQUEST_LINES)
            head, found, rest = self._request.partition(b"\r\n\r\n")
            if expected and not found and len(head) < HEAD_BYTES:
                return
            if not (expected and found and self._answer(head)):
                self._hand_over()
                return
            self._request = rest
        if self._request and self._frames is not None:
            rest, self._request = self._request, b""
            self._take(self._frames, rest)

    def _answer(self, head: bytes) -> bool:
        """Answer a challenge, or an agent that wants its WebSocket; False for what is to be refused by aiohttp."""
        headers = _headers(head)
        if {"content-length", "transfer-encoding"} & headers.keys() or headers.get("connection", "").lower() == "close":
            return False
        assert self._transport is not None
        now = time.monotonic()
        if head.startswith(_REQUEST_LINES[0][:-2]):
            nonce = headers.get(CHALLENGE_HEADER.lower(), "")
            if is_nonce(nonce) and not _OTHER_PROOFS & headers.keys():
                body = encode(self._listener.authenticator.answer(nonce, now)) + b"\n"
                self._transport.write(_CHALLENGE_ANSWER % len(body) + body)
                self._listener.answered(self)
                return True
            return False
        key = headers.get("sec-websocket-key", "")
        if headers.get("upgrade", "").lower() != "websocket" or headers.get("sec-websocket-version") != "13" or not key:
            return False
        given = headers.get("authorization", "")
        exchange = self._listener.authenticator.admit(given, "GET", AGENT_PATH, b"", now)
        self._frames, self._heard_at = ws.FrameReader(MAX_MESSAGE_BYTES, masked=True), now
        self._transport.set_write_buffer_limits(high=0)  # from here on TLS calls it full with each write
        self._transport.write(_UPGRADE_ANSWER % ws.accept_token(key.encode()))
        if exchange is not None:
            self._session = self._listener.authenticator.secret.session(exchange, controller=True)
            self._listener.prove(self)
        else:  # an agent of protocol 1 hears why in the only way that it shows to its user
            self._write(ws.BINARY, encode(Refused(why=NOT_SIGNED)))
            self.say_goodbye()
        return True

    def _hand_over(self) -> None:
        """This request and those that follow it are aiohttp's."""
        assert self._transport is not None
        request, self._request = self._request, b""
        self._http = self._listener.handler_of(self, self._transport)
        self._http.connection_made(self._transport)
        self._http.data_received(request)

    # ----- frames -----

    def _take(self, frames: ws.FrameReader, data: bytes) -> None:
        assert self._transport is not None
        self._heard_at, self._pinged_at = time.monotonic(), None
        try:
            for opcode, payload in frames.feed(data):
                if opcode == ws.CLOSE:
                    self._write(ws.CLOSE, payload[:2])
                    self._transport.close()
                elif opcode == ws.PING:
                    self._write(ws.PONG, payload)
                elif opcode != ws.PONG and not self._ends:
                    self._take_message(payload)
        except ws.FrameError as error:
            log.info("the connection of %s ends: %s", self.node or self.peer, error)
            self.say_goodbye(error.code)

    def _take_message(self, frame: bytes) -> None:
        heard_at = time.time()
        assert self._session is not None
        try:
            data = self._session.into.open(frame)
            if not self._greeted:
                self._take_hello(data)
                return
            heartbeat = decode_agent_message(data)
        except Forged as error:
            if self._greeted:
                log.error("the connection of %s ends: %s", self.node, error)
                self.say_goodbye()
            else:
                self._refuse(str(error))
            return
        except msgspec.DecodeError as error:
            self._refuse(f"a message of {self.node} could not be read: {clean_text(str(error), 200)}")
            return
        if isinstance(heartbeat, Heartbeat) and heartbeat.node == self.node:
            self.clock_offset_s = heartbeat.clock_offset_s
            if heartbeat.asked_at is not None:
                self._tell_clock(heartbeat.asked_at, heard_at)
            self._listener.service.heartbeat(heartbeat, self)

    def _take_hello(self, data: bytes) -> None:
        hello = read_hello(data)
        refusal = hello if isinstance(hello, str) else self._listener.service.hello(hello, self)
        if refusal:
            self._refuse(refusal)
        else:
            self._greeted = True

    def _refuse(self, why: str) -> None:
        log.warning("agent %s refused: %s", self.node or self.peer, why)
        self._say(encode(Refused(why=why)))
        self.say_goodbye()

    def _tell_clock(self, asked_at: float, heard_at: float) -> None:
        """Answer a heartbeat that asked for our clock, as soon as the answer can leave."""
        self._asked = (asked_at, heard_at) if self._is_full else None
        if not self._is_full:
            self._say(encode(ClockReply(asked_at=asked_at, heard_at=heard_at, told_at=time.time())))

    def tell_watched(self, for_s: float) -> None:
        """It does not matter if this is lost: the next heartbeat is answered, too."""
        if not self._is_full:
            self._say(encode(WatchedNow(for_s=for_s)))

    def _say(self, message: bytes) -> None:
        if self._session is not None and not self._ends:
            self._write(ws.BINARY, self._session.out.seal(message))

    def _write(self, opcode: int, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(ws.frame(opcode, payload))


def _headers(head: bytes) -> dict[str, str]:
    """Of a request; names in lower case."""
    pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.lower(): value.strip() for name, _, value in pairs}


_OTHER_PROOFS: Final = frozenset(name.lower() for name in ("Authorization", TOKEN_HEADER, MUNGE_HEADER))
"""Of a challenge: aiohttp answers one with another token than the job's own."""
_CHALLENGE_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n"
)
_UPGRADE_ANSWER: Final = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n"
)


class _AnyHello(msgspec.Struct, tag_field="type", tag="hello"):
    """The part of a hello that every protocol version has."""

    protocol: int


def read_hello(data: bytes) -> Hello | str:
    """The first message of an agent; or why it is refused, in words for a person."""
    try:
        protocol = msgspec.json.decode(data, type=_AnyHello).protocol
        if protocol != PROTOCOL:
            return (
                f"the agent speaks protocol {protocol} and this controller speaks {PROTOCOL}: "
                "install the same version of unbroken on every node of the job"
            )
    except msgspec.DecodeError:
        return "the first message must be a hello with a protocol version"
    try:
        hello = decode_agent_message(data)
    except msgspec.DecodeError as error:
        return f"the hello could not be read: {clean_text(str(error), 200)}"
    assert isinstance(hello, Hello)
    return hello


class Listener:
    """`listen` on sockets, `close` at the end; `say_goodbye` to agents."""

    def __init__(
        self,
        service: AgentService,
        authenticator: Authenticator,
        handlers: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`handlers` makes what answers other requests than those of agents. `tls`: of TCP connections."""
        limit = descriptor_limit()
        self.service = service
        self.authenticator = authenticator
        self._handlers = handlers
        self._tls = tls
        self._unproven: UnprovenConnections[Connection] = UnprovenConnections.for_descriptors(limit)
        self._most = max(16, limit - RESERVED)
        self._all: set[Connection] = set()
        self._agents: set[Connection] = set()
        self._by_transport: dict[asyncio.BaseTransport, Connection] = {}
        self._sockets: list[socket.socket] = []
        self._sweeper: asyncio.Task[None] | None = None

    def listen(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._sockets.append(listening)
        asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())

    def close(self) -> None:
        """No new connections; those that are open stay."""
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
            listening.close()
        self._sockets.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def say_goodbye(self) -> None:
        """To every agent: they look for the next controller then."""
        for agent in self._agents:
            agent.say_goodbye(ws.GOING_AWAY)
        deadline = time.monotonic() + GOODBYE_S
        while self._agents and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # ----- of requests that aiohttp answers -----

    @contextlib.contextmanager
    def proven(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Meanwhile its other end counts as one that has proven itself: it may take its time."""
        found = self.of(transport)
        if found is not None:
            self._unproven.gone(found)
        try:
            yield
        finally:
            if found is not None:
                self.answered(found)

    def of(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        return self._by_transport.get(transport) if transport is not None else None

    def handler_of(self, connection: Connection, transport: asyncio.Transport) -> asyncio.Protocol:
        self._by_transport[transport] = connection
        return self._handlers()

    # ----- of connections -----

    def prove(self, connection: Connection) -> None:
        """An agent is at its other end."""
        self._unproven.gone(connection)
        self._agents.add(connection)

    def answered(self, connection: Connection) -> None:
        """A request was answered: its connection may wait for the next."""
        if connection in self._all:
            self._unproven.gone(connection)
            self._limit(self._unproven.came(connection, connection.peer, time.monotonic(), IDLE_S))

    def forget(self, connection: Connection, transport: asyncio.BaseTransport | None) -> None:
        self._all.discard(connection)
        self._agents.discard(connection)
        self._unproven.gone(connection)
        if transport is not None:
            self._by_transport.pop(transport, None)

    # ----- accepting -----

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._accept_later(listening, error)
                return
            accepted.setblocking(False)
            try:
                uid = peer_uid(accepted)
            except OSError:
                uid = -1
            if uid is not None and uid not in own_users():
                log.warning("a process of user %d was turned away from the unix socket", uid)
                accepted.close()
                continue
            self._take(accepted, str(address[0]) if uid is None else "unix", uid)

    def _accept_later(self, listening: socket.socket, error: OSError) -> None:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            log.warning("a connection could not be accepted: %s", error.strerror)
            return
        log.warning(
            "no connection can be accepted: %s; the oldest without proof of the token is closed", error.strerror
        )
        self._make_room()
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.fileno())

        def again() -> None:
            if listening in self._sockets:
                loop.add_reader(listening.fileno(), self._accept, listening)

        loop.call_later(ACCEPT_AGAIN_S, again)

    def _take(self, accepted: socket.socket, address: str, uid: int | None) -> None:
        connection = Connection(self, accepted, address, uid)
        self._all.add(connection)
        self._limit(self._unproven.came(connection, address, time.monotonic(), REQUEST_S))
        if len(self._all) > self._most:
            self._make_room()
        loop = asyncio.get_running_loop()
        opening = loop.connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=self._tls if uid is None else None,
            ssl_handshake_timeout=TLS_HANDSHAKE_S if self._tls is not None and uid is None else None,
        )
        connection.opening = asyncio.create_task(opening)
        connection.opening.add_done_callback(connection.opened)

    def _make_room(self) -> None:
        oldest = self._unproven.oldest()
        self._limit([] if oldest is None else [oldest])

    def _limit(self, over: Iterable[Connection]) -> None:
        for connection in over:
            self._unproven.gone(connection)
            connection.put_out()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for agent in list(self._agents):
                agent.look(now)
            timed_out = self._unproven.timed_out(now)
            if timed_out:
                log.info("%d connections were closed: they did not prove the job's token in time", len(timed_out))
            self._limit(timed_out)
