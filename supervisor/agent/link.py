"""The agent's end of the wire: one WebSocket to whichever controller is there now.

Whatever listens at the address must prove that it knows the job's token before anything is sent to it or done at its
word. A controller of the same node is found by its unix socket. The link connects again for ever, quickly at first; the
address and the token are read anew for each try, because a controller that was started again has another port. Posting
never waits: only the newest heartbeat is kept, and it is sent again on a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from diagnosis.signals import clean_text
from supervisor.agent.clock import ClockOffset
from supervisor.agent.proving import challenge
from supervisor.agent.websocket import WebSocket, connect
from supervisor.deadline import timeout
from supervisor.files import read_token
from supervisor.messages import (
    PROTOCOL,
    Assignment,
    ClockTold,
    ControllerMessage,
    Heartbeat,
    Hello,
    Refused,
    decode_controller_message,
    encode,
)
from supervisor.paths import NodePlan
from supervisor.wire.authentication import Exchange, Session, SharedSecret, Unproven
from supervisor.wire.peers import not_private, own_users
from supervisor.wire.tls import explain

log = logging.getLogger("unbroken.link")

CONNECT_TIMEOUT_S = 5.0
PING_S = 4.0
"""Half of this without an answer to a ping, and the connection is given up: 6 s after a link was cut at most."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
STEADY_S = 2.0
"""Only a connection that lasted this long makes the next tries quick ones again."""
REFUSED_PAUSE_S = 10.0
MAX_MESSAGE_BYTES = 8 << 20
DISTRUSTED_S = 3.0
"""What listens at the address has proven nothing for so long: the user is told. A new controller takes less to come."""


class NoController(Exception):
    """There is none to connect to (yet): `controller.json` or the token is not there."""


class Place(NamedTuple):
    """Where the controller is."""

    url: str
    socket: str = ""
    """Its unix socket, for agents of its own node; empty where that is not to be used."""


def source_of(job_dir: Path, url: str = "") -> Callable[[], Place]:
    """Tells where the controller is: at `url` when it is set, else where `controller.json` says now."""

    def place() -> Place:
        if url:
            return Place(url if "://" in url else f"http://{url}")
        try:
            found = msgspec.json.decode((job_dir / "controller.json").read_bytes())
            path = str(found.get("socket", ""))
            usable = path and os.path.exists(path) and not not_private(Path(path).parent, own_users())
            return Place(str(found["address"]), path if usable else "")
        except (OSError, msgspec.DecodeError, AttributeError, KeyError, TypeError) as error:
            raise NoController(f"no address in {job_dir / 'controller.json'}: {error}") from None

    return place


def token_of(job_dir: Path, token_file: str = "") -> Callable[[], str]:
    """Gives the job's token as it is on disk now."""
    path = Path(token_file) if token_file else job_dir / "token"

    def token() -> str:
        try:
            return read_token(path, shared=bool(token_file))
        except OSError as error:
            raise NoController(f"the token cannot be read: {error}") from None

    return token


class Link:
    """Keeps a connection. `connections` counts them; `connected` and `address` tell of the current one."""

    def __init__(
        self,
        place: Callable[[], Place],
        token: Callable[[], str],
        hello: Hello,
        tls_ca: str = "",
        ping_s: float = PING_S,
    ) -> None:
        self.connected = False
        self.connections = 0
        self.address = hello.address
        """Local address of the newest connection: under it others reach this node."""
        self.refusal = ""
        self.problem = ""
        """Why there is no connection, in words."""
        self.distrust = ""
        """What listens at the controller's address has not proven itself for a while: a sentence for the user."""
        self.through = ""
        """Of the newest connection: `unix`, `tcp` or `tls`."""
        self.ended = False
        """A heartbeat that said `done` was received: nothing more is expected of this node."""
        self.clock = ClockOffset()
        self.url = ""
        """The controller's, as it was read last."""
        self._place = place
        self._token = token
        self._hello = hello
        self._tls_ca = tls_ca
        self._ping_s = ping_s
        self._newest: Heartbeat | None = None
        self._posted = asyncio.Event()
        self._open: WebSocket | None = None
        """The connection, once its sender has said what is newest."""
        self._done_sent = False
        self._reading: asyncio.Future[tuple[Place, str]] | None = None
        self._session: Session | None = None
        """Of the connection that is open."""
        self._epoch = 0
        """The controller's, as it has proven."""
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
            order=plan.order,
            spare=plan.spare,
            scheduler_node=plan.scheduler_node,
            version=version,
            run=plan.run,
        )
        job_dir = Path(plan.job_dir)
        return cls(
            source_of(job_dir, plan.controller),
            token_of(job_dir, plan.token_file),
            hello,
            tls_ca=os.environ.get("UNBROKEN_TLS_CA", ""),
        )

    def post(self, heartbeat: Heartbeat) -> None:
        """Send `heartbeat` as soon as possible, in place of any that has not left yet."""
        waiting = self._newest if self._posted.is_set() else None
        if waiting is not None:
            # What is said once for each connection must not be lost with the heartbeat it was in.
            for part in ("checkpoints", "checkpoint_folders", "inventory"):
                if getattr(heartbeat, part) is None and getattr(waiting, part) is not None:
                    heartbeat = msgspec.structs.replace(heartbeat, **{part: getattr(waiting, part)})
        self._newest = heartbeat
        if self._open is not None and self._open.idle and not self._posted.is_set():
            self._send_newest(self._open)  # at once: to wake the sender takes as long again
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
                self._distrusts(f"what listens at {self.url} is not this job's controller: {error}", time.monotonic())
            except ssl.SSLError as error:
                self._distrusts(explain(error, self.url, self._tls_ca), time.monotonic())
            except asyncio.TimeoutError:
                where = self.url or "the job folder"
                silent_s = f"{CONNECT_TIMEOUT_S:.0f} s"
                self._explain(f"no connection to the controller: {where} has not answered for {silent_s}")
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

    def _distrusts(self, why: str, now: float) -> None:
        """Nothing was sent to it."""
        self._explain(why)
        if self._distrusted_since is None:
            self._distrusted_since = now
        elif now - self._distrusted_since > DISTRUSTED_S:
            self.distrust = why

    def _explain(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.info("%s", problem)
        self.problem = problem

    async def _once(self, on_message: Callable[[ControllerMessage], None]) -> None:
        place, token = await self._whereto()
        self.url = place.url.rstrip("/")
        ws, exchange = await self._open_at(place, SharedSecret(token))
        self._session = SharedSecret(token).session(exchange, controller=False)
        self._epoch = exchange.epoch
        self._distrusted_since, self.distrust = None, ""
        sender: asyncio.Task[None] | None = None
        try:
            self.address = self._hello.address or ws.local_address or urlsplit(self.url).hostname or ""
            ws.write(self._session.out.seal(encode(msgspec.structs.replace(self._hello, address=self.address))))
            await ws.drain()
            self.connected = True
            self.connections += 1
            self.clock.connected()
            sender = asyncio.create_task(self._send(ws))
            await self._receive(ws, self._session, on_message)
        finally:
            self.connected, self._open = False, None
            if sender is not None:
                sender.cancel()
            ws.close()

    async def _open_at(self, place: Place, secret: SharedSecret) -> tuple[WebSocket, Exchange]:
        """By its unix socket, if it has one here, else by its address. Raises OSError, ValueError and Unproven."""
        if place.socket:
            try:
                return await self._connect(secret, place.socket)
            except (asyncio.TimeoutError, OSError, Unproven) as error:
                log.debug("not by %s: %s", place.socket, clean_text(str(error) or repr(error), 200))
        return await self._connect(secret, "")

    async def _connect(self, secret: SharedSecret, unix_socket: str) -> tuple[WebSocket, Exchange]:
        exchanges: list[Exchange] = []

        async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> dict[str, str]:
            exchanges.append(await challenge(reader, writer, host, secret))
            return {"Authorization": secret.authorization(exchanges[0], "GET", "/v1/agent")}

        async with timeout(CONNECT_TIMEOUT_S):
            ws = await connect(
                f"{self.url}/v1/agent",
                introduce,
                ping_s=self._ping_s,
                max_bytes=MAX_MESSAGE_BYTES,
                tls_ca=self._tls_ca,
                unix_socket=unix_socket,
            )
        self.through = "unix" if unix_socket else "tls" if self.url.startswith("https") else "tcp"
        return ws, exchanges[0]

    async def _whereto(self) -> tuple[Place, str]:
        """Address and token, read in a thread and never twice at once: the job folder's file system may hang."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(lambda: (self._place(), self._token())))
        try:
            async with timeout(CONNECT_TIMEOUT_S):
                return await asyncio.shield(self._reading)
        finally:
            if self._reading.done():
                self._reading = None

    async def _send(self, ws: WebSocket) -> None:
        """What is newest at first, and what could not leave at once."""
        if self._newest is not None:
            self._posted.set()
        while True:
            await self._posted.wait()
            self._posted.clear()
            if not self._send_newest(ws):
                return
            self._open = ws
            try:
                await ws.drain()
            except OSError:
                self._give_up(ws)
                return

    def _send_newest(self, ws: WebSocket) -> bool:
        """False where that fails: the connection is ended then."""
        newest = self._newest
        assert newest is not None
        try:
            asked_at = time.time() if self.clock.due(time.monotonic()) else None
            best = self.clock.best(time.monotonic())
            offset_s = None if best is None else round(best[0], 6)
            assert self._session is not None
            told = encode(msgspec.structs.replace(newest, asked_at=asked_at, clock_offset_s=offset_s))
            ws.write(self._session.out.seal(told))
            self._done_sent = newest.done
            return True
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("a heartbeat could not be sent")
            self._give_up(ws)
            return False

    def _give_up(self, ws: WebSocket) -> None:
        """Never a live connection without a sender: the node would count as silent. The reader ends, and another is
        made."""
        self._open = None
        ws.close()

    async def _receive(self, ws: WebSocket, session: Session, on_message: Callable[[ControllerMessage], None]) -> None:
        """Raises Forged, a ValueError."""
        async for frame in ws.messages():
            told = session.into.open(frame)
            try:
                message = decode_controller_message(told)
            except msgspec.DecodeError as error:
                self._explain(f"a message of the controller could not be read: {clean_text(str(error), 200)}")
                continue
            if isinstance(message, ClockTold):
                now, mono = time.time(), time.monotonic()
                self.clock.answered(message.asked_at, message.heard_at, message.told_at, now, mono)
                continue
            if isinstance(message, Assignment) and message.epoch != self._epoch:
                self._explain(f"an assignment of epoch {message.epoch} came from a controller of epoch {self._epoch}")
                continue
            self.refusal = message.why if isinstance(message, Refused) else ""
            self._explain(self.refusal)
            if self._done_sent and not self.refusal:
                self.ended = True
            on_message(message)
