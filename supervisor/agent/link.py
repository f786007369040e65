"""The agent's end of the wire: one WebSocket to whichever controller is there now.

Whatever listens at the address must prove that it knows the job's token before the agent sends it anything, or obeys
it. A controller on the same node is reached through its unix socket. The link reconnects for ever, quickly at first. It
reads address and token again for each try, because a controller that was started again has another port. Posting never
waits: only the newest heartbeat is kept, and it is sent again on a new connection.

h11 speaks HTTP here until the WebSocket is open; `supervisor.wire.websocket` has its frames. A general HTTP client
would be a third of the agent's memory on every node.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import random
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11
import msgspec

from diagnosis.signals import clean_text
from supervisor.blocking import timeout
from supervisor.config import NodePlan
from supervisor.errors import InternalError
from supervisor.files import read_token
from supervisor.messages import (
    PROTOCOL,
    Assignment,
    ClockReply,
    ControllerMessage,
    Heartbeat,
    Hello,
    Refused,
    WatchedNow,
    decode_controller_message,
    encode,
)
from supervisor.wire import websocket as ws
from supervisor.wire.authentication import (
    AGENT_PATH,
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    Exchange,
    Session,
    SharedSecret,
    Unproven,
    exchange_of,
    new_nonce,
)
from supervisor.wire.peers import explain_tls, not_private, own_users, peer_uid, tls_context

log = logging.getLogger("unbroken.link")


class LinkTimeouts(NamedTuple):
    connect_s: float = 5.0
    """For the job folder, for the unix socket, and for a host to take a connection."""
    patience_s: float = 60.0
    """For a controller that has taken the connection: one that has just started serves thousands of agents. To give up
    and come again would only be more work for it."""
    ping_s: float = 4.0
    """After such a silence the controller is asked for a sign of life. A cut link is found within `connect_s`."""
    distrusted_s: float = 3.0
    """After so long with an unproven listener at the address the user is told. A new controller is there sooner."""


TIMEOUTS = LinkTimeouts()
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
STEADY_S = 2.0
"""After a connection that lasted this long, the next tries are quick again."""
REFUSED_PAUSE_S = 10.0
MAX_MESSAGE_BYTES = 8 << 20
WATCHED_AT_MOST_S = 10.0


class NoController(InternalError):
    """There is none to connect to (yet): `controller.json` or the token is missing."""


class ControllerAddress(NamedTuple):
    url: str
    socket: str = ""
    """Its unix socket, for agents of its own node; empty where that is not to be used."""


def address_reader(job_dir: Path, url: str = "") -> Callable[[], ControllerAddress]:
    """Gives the controller's address: `url` when it is set, else what `controller.json` has now."""

    def read() -> ControllerAddress:
        if url:
            return ControllerAddress(url if "://" in url else f"http://{url}")
        try:
            found = msgspec.json.decode((job_dir / "controller.json").read_bytes())
            path = str(found.get("socket", ""))
            usable = path and os.path.exists(path) and not not_private(Path(path).parent, own_users())
            return ControllerAddress(str(found["address"]), path if usable else "")
        except (OSError, msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
            raise NoController(f"no address in {job_dir / 'controller.json'}: {error}") from None

    return read


def token_reader(job_dir: Path, token_file: str = "") -> Callable[[], str]:
    """Reads the job's token as it is on disk now."""
    path = Path(token_file) if token_file else job_dir / "token"

    def read() -> str:
        try:
            return read_token(path, shared=bool(token_file))
        except OSError as error:
            raise NoController(f"the token cannot be read: {error}") from None

    return read


class Link:
    """Keeps a connection. `connections` counts them; `connected` and `address` are of the current one."""

    def __init__(
        self,
        read_address: Callable[[], ControllerAddress],
        read_token: Callable[[], str],
        hello: Hello,
        tls_ca: str = "",
        timeouts: LinkTimeouts = TIMEOUTS,
    ) -> None:
        self.connected = False
        self.connections = 0
        self.address = hello.address
        """Local address of the newest connection: under it others reach this node."""
        self.refusal = ""
        self.problem = ""
        """Why there is no connection, in words."""
        self.distrust = ""
        """A sentence for the user while something that is not the controller listens at its address."""
        self.through = ""
        """How the newest connection was made: `unix`, `tcp` or `tls`."""
        self.ended = False
        """A heartbeat that said `done` was received: nothing more is expected of this node."""
        self.clock = ClockOffset()
        self.watched_until = 0.0
        """Somebody looks at the job until then (monotonic)."""
        self.url = ""
        """The controller's, as it was read last."""
        self._read_address = read_address
        self._read_token = read_token
        self._hello = hello
        self._tls_ca = tls_ca
        self._timeouts = timeouts
        self._newest: Heartbeat | None = None
        self._posted = asyncio.Event()
        self._opened: WebSocket | None = None
        """The newest connection."""
        self._open: WebSocket | None = None
        """The same, once the newest heartbeat was sent on it."""
        self._done_sent = False
        self._reading: asyncio.Future[tuple[ControllerAddress, str]] | None = None
        self._session: Session | None = None
        """Of the connection that is open."""
        self._epoch = 0
        """The controller's, as it has proven it."""
        self._distrusted_since: float | None = None

    @classmethod
    def for_plan(cls, plan: NodePlan, version: str = "") -> Link:
        """The link of the agent of `plan`."""
        hello = Hello(
            protocol=PROTOCOL,
            node=plan.node,
            host=socket.gethostname(),
            address="",
            spec=plan.spec,
            index=plan.index,
            spare=plan.spare,
            scheduler_node=plan.scheduler_node,
            domain=plan.domain,
            can_test=True,
            version=version,
            run=plan.run,
        )
        job_dir, settings = Path(plan.job_dir), plan.settings
        return cls(
            address_reader(job_dir, settings.run.controller),
            token_reader(job_dir, settings.run.token_file),
            hello,
            tls_ca=settings.controller.tls_ca,
        )

    @property
    def heard_at(self) -> float:
        """When the controller last sent anything on the newest connection (monotonic). It is asked to after a silence
        of `LinkTimeouts.ping_s`."""
        return self._opened.heard_at if self._opened is not None else 0.0

    def post(self, heartbeat: Heartbeat) -> None:
        """Send `heartbeat` as soon as possible, in place of any that has not left yet."""
        waiting = self._newest if self._posted.is_set() else None
        if waiting is not None:
            # What goes out once for each connection must not be lost with the heartbeat that it was in.
            for part in ("checkpoints", "checkpoint_folders", "inventory", "tiers", "snapshots"):
                if getattr(heartbeat, part) is None and getattr(waiting, part) is not None:
                    heartbeat = msgspec.structs.replace(heartbeat, **{part: getattr(waiting, part)})
        self._newest = heartbeat
        if self._open is not None and self._open.idle and not self._posted.is_set():
            self._send_newest(self._open)  # at once: waking the sender would take as long again
        else:
            self._posted.set()

    async def run(self, on_message: Callable[[ControllerMessage], None]) -> None:
        """Stay connected until cancelled; every message of the controller goes to `on_message`."""
        pause_s = FIRST_PAUSE_S
        while True:
            before, began = self.connections, time.monotonic()
            try:
                await self._once(on_message)
                self._explain(self.refusal or "the controller closed the connection")
            except NoController as error:
                self._explain(str(error))
            except Unproven as error:
                self._distrust(f"what listens at {self.url} is not this job's controller: {error}", time.monotonic())
            except ssl.SSLError as error:
                self._distrust(explain_tls(error, self.url, self._tls_ca), time.monotonic())
            except asyncio.TimeoutError:
                self._explain(self._no_answer())
            except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no thread left
                self._explain(f"no connection to the controller: {clean_text(str(error) or repr(error), 200)}")
            finally:
                self.connected = False
            if self._done_sent:
                self.ended = True
            steady = self.connections > before and time.monotonic() - began > STEADY_S
            pause_s = FIRST_PAUSE_S if steady else min(LONGEST_PAUSE_S, pause_s * 1.5)
            if self.refusal:
                pause_s = REFUSED_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _distrust(self, why: str, now: float) -> None:
        """What listens there is not the controller. Nothing was sent to it."""
        self._explain(why)
        if self._distrusted_since is None:
            self._distrusted_since = now
        elif now - self._distrusted_since > self._timeouts.distrusted_s:
            self.distrust = why

    def _explain(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.info("%s", problem)
        self.problem = problem

    async def _once(self, on_message: Callable[[ControllerMessage], None]) -> None:
        controller, token = await self._find_controller()
        self.url = controller.url.rstrip("/")
        opened, exchange = await self._patiently(self._open_at(controller, SharedSecret(token)), (controller, token))
        self._session = SharedSecret(token).session(exchange, controller=False)
        self._epoch = exchange.epoch
        self._distrusted_since, self.distrust = None, ""
        self._opened = opened
        sender: asyncio.Task[None] | None = None
        try:
            self.address = self._hello.address or opened.local_address or urlsplit(self.url).hostname or ""
            opened.write(self._session.out.seal(encode(msgspec.structs.replace(self._hello, address=self.address))))
            await opened.drain()
            self.connected = True
            self.connections += 1
            self.clock.connected()
            sender = asyncio.create_task(self._send(opened))
            await self._receive(opened, self._session, on_message, lambda: self._has_successor((controller, token)))
        finally:
            self.connected, self._open = False, None
            if sender is not None:
                sender.cancel()
            opened.close()

    async def _patiently(
        self, opening: Coroutine[None, None, tuple[WebSocket, Exchange]], found: tuple[ControllerAddress, str]
    ) -> tuple[WebSocket, Exchange]:
        """Wait for `opening` as long as the controller that was `found` is the job's. Raises as `_open_at`."""
        task = asyncio.ensure_future(opening)
        try:
            while not (await asyncio.wait({task}, timeout=self._timeouts.connect_s))[0]:
                self._explain(self._no_answer())
                if await self._is_replaced(found):
                    raise NoController("another controller has taken over")
            return task.result()
        finally:
            task.cancel()

    async def _is_replaced(self, found: tuple[ControllerAddress, str]) -> bool:
        """Whether the job has another controller than the one that was `found`. Raises NoController."""
        try:
            return await self._find_controller() != found
        except asyncio.TimeoutError:  # the job folder hangs: nothing else is known
            return False

    async def _has_successor(self, found: tuple[ControllerAddress, str]) -> bool:
        """The same of a controller that is connected, and silent."""
        try:
            return await self._is_replaced(found)
        except (NoController, RuntimeError):  # RuntimeError: no thread left
            return False

    def _no_answer(self) -> str:
        where = self.url or "the job folder"
        return f"no connection to the controller: {where} has not answered for {self._timeouts.connect_s:.0f} s"

    async def _open_at(self, controller: ControllerAddress, secret: SharedSecret) -> tuple[WebSocket, Exchange]:
        """Through its unix socket, if it has one here, else to its address. Raises OSError, ValueError and Unproven."""
        if controller.socket:
            try:
                return await self._connect(secret, controller.socket)
            except (asyncio.TimeoutError, OSError, Unproven) as error:
                log.debug("not by %s: %s", controller.socket, clean_text(str(error) or repr(error), 200))
        return await self._connect(secret, "")

    async def _connect(self, secret: SharedSecret, unix_socket: str) -> tuple[WebSocket, Exchange]:
        exchanges: list[Exchange] = []

        async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> dict[str, str]:
            exchanges.append(await challenge(reader, writer, host, secret))
            return {"Authorization": secret.authorization(exchanges[0], "GET", AGENT_PATH)}

        async with timeout(self._timeouts.connect_s if unix_socket else self._timeouts.patience_s):
            opened = await connect(
                f"{self.url}{AGENT_PATH}",
                introduce,
                connect_s=self._timeouts.connect_s,
                ping_s=self._timeouts.ping_s,
                max_bytes=MAX_MESSAGE_BYTES,
                tls_ca=self._tls_ca,
                unix_socket=unix_socket,
            )
        self.through = "unix" if unix_socket else "tls" if self.url.startswith("https") else "tcp"
        return opened, exchanges[0]

    async def _find_controller(self) -> tuple[ControllerAddress, str]:
        """Address and token, read in a thread, one read at a time: the job folder's file system may hang."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(lambda: (self._read_address(), self._read_token())))
        try:
            async with timeout(self._timeouts.connect_s):
                return await asyncio.shield(self._reading)
        finally:
            if self._reading.done():
                self._reading = None

    async def _send(self, opened: WebSocket) -> None:
        """Send the newest heartbeat, and each later one that could not be sent at once."""
        if self._newest is not None:
            self._posted.set()
        while True:
            await self._posted.wait()
            self._posted.clear()
            if not self._send_newest(opened):
                return
            self._open = opened
            try:
                await opened.drain()
            except OSError:
                self._give_up(opened)
                return

    def _send_newest(self, opened: WebSocket) -> bool:
        """False where that fails: the connection is closed then."""
        newest = self._newest
        assert newest is not None
        try:
            asked_at = time.time() if self.clock.due(time.monotonic()) else None
            best = self.clock.best(time.monotonic())
            offset_s = None if best is None else round(best[0], 6)
            assert self._session is not None
            message = encode(msgspec.structs.replace(newest, asked_at=asked_at, clock_offset_s=offset_s))
            opened.write(self._session.out.seal(message))
            self._done_sent = newest.done
            return True
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("a heartbeat could not be sent")
            self._give_up(opened)
            return False

    def _give_up(self, opened: WebSocket) -> None:
        """Close the connection: without a sender the node would count as silent. The reader ends, and the link
        reconnects."""
        self._open = None
        opened.close()

    async def _receive(
        self,
        opened: WebSocket,
        session: Session,
        on_message: Callable[[ControllerMessage], None],
        is_replaced: Callable[[], Awaitable[bool]],
    ) -> None:
        """Raises Forged, a ValueError."""
        async for frame in opened.messages(is_replaced):
            data = session.into.open(frame)
            try:
                message = decode_controller_message(data)
            except msgspec.DecodeError as error:
                self._explain(f"a message of the controller could not be read: {clean_text(str(error), 200)}")
                continue
            if isinstance(message, ClockReply):
                now, mono = time.time(), time.monotonic()
                self.clock.answered(message.asked_at, message.heard_at, message.told_at, now, mono)
                continue
            if isinstance(message, WatchedNow):
                self.watched_until = time.monotonic() + min(message.for_s, WATCHED_AT_MOST_S)
                continue
            if isinstance(message, Assignment) and message.epoch != self._epoch:
                self._explain(f"an assignment of epoch {message.epoch} came from a controller of epoch {self._epoch}")
                continue
            self.refusal = message.why if isinstance(message, Refused) else ""
            self._explain(self.refusal)
            if self._done_sent and not self.refusal:
                self.ended = True
            on_message(message)


# ----- the controller proves itself -----


ANSWER_BYTES: Final = 8 << 10


async def challenge(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, secret: SharedSecret
) -> Exchange:
    """Have the controller prove itself (docs/protocol.md, "Proof"), on a connection that was just opened.

    The connection is ready for the next request then.
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


# ----- the clocks -----


ASK_CLOCK_EVERY_S: Final = 60.0
"""Between two questions on one connection."""
ASK_CLOCK_AT_FIRST_S: Final = 2.0
FIRST_CLOCK_QUESTIONS: Final = 3
"""So many questions on a new connection come quickly: the first is slow, for everybody connects at once."""
CLOCK_SAMPLES: Final = 8
CLOCK_DRIFT: Final = 100e-6
"""Seconds per second that two clocks may part; a clock chip is good for about 50e-6."""

ROUNDING_S: Final = 1e-6
"""Seconds since 1970 are kept to some 2e-7 of a second: an answer at once may seem to come before its question."""


class ClockSample(NamedTuple):
    offset_s: float
    error_s: float
    """The true offset is at most this far from `offset_s`."""
    mono: float


class ClockOffset:
    """This node's clock minus the controller's, from four times as in NTP (RFC 5905, section 8). Does no I/O.

    Each answer bounds the offset for certain: it lies within half a round trip of the estimate, however different the
    two ways were. The best of the last eight answers counts. An answer that contradicts an earlier one says that a
    clock was set: all others are forgotten.
    """

    def __init__(self) -> None:
        self._samples: deque[ClockSample] = deque(maxlen=CLOCK_SAMPLES)
        self._asked = 0
        self._next_at = 0.0

    def connected(self) -> None:
        """A new connection: perhaps another controller, on another host."""
        self._samples.clear()
        self._asked, self._next_at = 0, 0.0

    def due(self, mono: float) -> bool:
        """Whether the next heartbeat should ask. Counts the question as asked."""
        if mono < self._next_at:
            return False
        self._asked += 1
        self._next_at = mono + (ASK_CLOCK_AT_FIRST_S if self._asked < FIRST_CLOCK_QUESTIONS else ASK_CLOCK_EVERY_S)
        return True

    def answered(self, asked_at: float, received_at: float, sent_at: float, now: float, mono: float) -> None:
        """Take an answer. `asked_at`, `now`: by this node's clock; `received_at`, `sent_at`: by the controller's."""
        round_trip_s = (now - asked_at) - (sent_at - received_at)
        if round_trip_s < -ROUNDING_S or sent_at < received_at:
            return  # a clock was set while the question was on its way
        round_trip_s = max(round_trip_s, 0.0)
        offset_s = ((asked_at - received_at) + (now - sent_at)) / 2
        sample = ClockSample(offset_s, round_trip_s / 2, mono)
        if any(abs(s.offset_s - offset_s) > sample.error_s + _error_s(s, mono) for s in self._samples):
            self._samples.clear()
        self._samples.append(sample)

    def best(self, mono: float) -> tuple[float, float] | None:
        """Offset and how far off it may be, in seconds."""
        if not self._samples:
            return None
        best = min(self._samples, key=lambda sample: _error_s(sample, mono))
        return best.offset_s, _error_s(best, mono)


def _error_s(sample: ClockSample, mono: float) -> float:
    return sample.error_s + CLOCK_DRIFT * (mono - sample.mono)


# ----- the WebSocket -----


HAPPY_EYEBALLS_S: Final = 0.25
PONG_WITHIN: Final = 5.0
"""A ping is to be answered within so many times the silence before it. A host that is gone is found sooner
(`_confirm_within`), and so is a program that was replaced; one that is slow is as slow on another connection, and has
more to do then."""
TLS_PATIENCE: Final = 3.0
"""The handshake of TLS needs the other program, which may be slow."""
_CHUNK: Final = 1 << 16
_QUIET_ENDS: Final = frozenset({ws.NORMAL, ws.GOING_AWAY, 1005, 1006})
"""Codes of a normal end; others report a breach of the protocol."""


class WebSocketError(InternalError, ConnectionError):
    """The other end does not speak WebSocket, or not as it must."""


class WebSocket:
    """One open connection. `messages` is to be read by one task, to its end."""

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
        self.heard_at = time.monotonic()
        """When the other end last sent anything."""
        local = writer.get_extra_info("sockname")
        self.local_address = str(local[0]) if isinstance(local, tuple) else ""
        """Empty for a unix socket."""

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

    async def messages(self, is_replaced: Callable[[], Awaitable[bool]] | None = None) -> AsyncIterator[bytes]:
        """The messages of the other end, until the connection ends in whatever way. Raises WebSocketError.

        `is_replaced`: asked while the other end is silent; an end that was replaced is left.
        """
        watch = asyncio.create_task(self._watch(is_replaced))
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
                self.heard_at = time.monotonic()
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

    async def _watch(self, is_replaced: Callable[[], Awaitable[bool]] | None) -> None:
        """Ask for a sign of life after a silence, and give the connection up when none comes."""
        while True:
            heard_at = self.heard_at
            quiet_s = heard_at + self._ping_s - time.monotonic()
            if quiet_s > 0:
                await asyncio.sleep(quiet_s)
                continue
            self._say(ws.PING, b"")
            give_up_at = time.monotonic() + PONG_WITHIN * self._ping_s
            while await self._is_silent(heard_at):
                if time.monotonic() >= give_up_at or (is_replaced is not None and await is_replaced()):
                    self._writer.transport.abort()
                    return

    async def _is_silent(self, since: float) -> bool:
        """Whether nothing comes for a while more."""
        await asyncio.sleep(self._ping_s)
        return self.heard_at == since


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
        tls = tls_context(tls_ca) if secure else None
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
