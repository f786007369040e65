"""What people and programs ask at the controller's port: a few JSON answers, by aiohttp. Nothing here decides anything.

Agents come to the same port; `listener` answers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from diagnosis.signals import clean_line, clean_text
from supervisor.blocking import timeout
from supervisor.controller.listener import BACKLOG, NOT_SIGNED, Listener
from supervisor.errors import CommandNotJournalled
from supervisor.messages import decode_command, encode
from supervisor.wire.authentication import (
    AGENT_PATH,
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    PROOF_HEADER,
    Authenticator,
    is_nonce,
    munge_user,
)
from supervisor.wire.peers import listen_privately, user_name

if TYPE_CHECKING:
    from supervisor.controller.loop import ControlLoop

BY_LIMIT = 100


def given_by(uid: int | None, address: str, said: str) -> str:
    """`uid`: as the kernel (unix socket) or munge proves it; None: only that somebody holds the job's token."""
    if uid is None:
        return clean_line(f"holder of the token at {address}, says {said or 'nothing'}", BY_LIMIT)
    return clean_line(user_name(uid), BY_LIMIT)


log = logging.getLogger("unbroken.server")
requests_log = logging.getLogger("unbroken.server.requests")
"""aiohttp's own words about requests: `supervisor.logs` takes from them what strangers have sent."""

BODY_BYTES = 64 << 10
MUNGE_S = 1.0
"""Munge has this long to say who gives a command; after that, it counts as unknown."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/ask."""

    incident: str


Scrape = Callable[[], Callable[[str, str], tuple[bytes, dict[str, str]]]]
"""Reads the numbers, on the loop; what it gives makes the answer to `Accept` and `Accept-Encoding`, in a thread."""
SCRAPES_AT_ONCE = 4


class Server:
    """aiohttp on one port, and on a unix socket for this node."""

    def __init__(
        self, loop: ControlLoop, token: str, tls: ssl.SSLContext | None = None, scrape: Scrape | None = None
    ) -> None:
        """`scrape`: what `/metrics` answers, to everybody; None: there is none."""
        self._loop = loop
        self._authenticator = Authenticator(token, loop.epoch)
        self._tls = tls
        self._open = {"/healthz", CHALLENGE_PATH, *(["/metrics"] if scrape is not None else [])}
        """What is answered to everybody: health, numbers and names, as exporters do."""
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get(CHALLENGE_PATH, self._challenge)
        app.router.add_get(AGENT_PATH, self._agent)
        self._scrape = scrape
        self._scrapes = 0
        self._scraped = asyncio.Event()
        self._scraped_at = float("-inf")
        if scrape is not None:
            app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/timeline", self._timeline)
        app.router.add_get("/v1/{view:status|incidents|advice}", self._view)
        app.router.add_post("/v1/override", self._command)
        app.router.add_post("/v1/ask", self._ask)
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
            self._listener = Listener(self._loop, self._authenticator, self._runner.server, self._tls)
        self._listener.listen(listening)

    async def stop(self) -> None:
        """Say goodbye to every agent (they look for the next controller then) and close the port."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.say_goodbye()
        with contextlib.suppress(OSError):
            if self._socket is not None and os.stat(self._socket[0]).st_ino == self._socket[1]:
                self._socket[0].unlink()
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
                if (connection := self._listener.of(request.transport)) is not None:
                    self._listener.answered(connection)
        body = await request.read() if request.can_read_body else b""  # its time is limited as that of its headers
        exchange = self._authenticator.admit(given, request.method, request.raw_path, body, time.monotonic())
        if exchange is None:
            return _problem(401, NOT_SIGNED)
        with self._listener.proven(request.transport):
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = _problem(error.status, error.reason)
        if isinstance(answer, web.Response):
            told = answer.body if isinstance(answer.body, bytes) else b""
            answer.headers[PROOF_HEADER] = self._authenticator.secret.answer_proof(exchange, answer.status, told)
        return answer

    async def _challenge(self, request: web.Request) -> web.Response:
        nonce = request.headers.get(CHALLENGE_HEADER, "")
        if not is_nonce(nonce):
            return _problem(400, f"header {CHALLENGE_HEADER}: 32 hexadecimal digits that were never used before")
        return _answer(self._authenticator.answer(nonce, time.monotonic()))

    async def _agent(self, _: web.Request) -> web.Response:
        """An agent's own request does not come here: its connection answers it."""
        return _problem(426, "agents open a WebSocket here, with the first request that they sign")

    async def _healthz(self, _: web.Request) -> web.Response:
        view = self._loop.view("health")()
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
            log.info("nobody read the metrics of the job's end")

    async def _view(self, request: web.Request) -> web.Response:
        return _answer(await asyncio.to_thread(self._loop.view(request.match_info["view"])))

    async def _timeline(self, request: web.Request) -> web.Response:
        try:
            since = int(request.query.get("since", "0"))
        except ValueError:
            return _problem(400, "`since` must be a number: the seq of the last record you have")
        return _answer(await self._loop.timeline(since))

    async def _command(self, request: web.Request) -> web.Response:
        try:
            asked = decode_command(await request.read())
            assert self._listener is not None
            connection = self._listener.of(request.transport)
            address, uid = (connection.peer, connection.uid) if connection is not None else ("?", None)
            if uid is None and asked.munge:
                signed = self._authenticator.secret.command_digest(*asked.words)
                uid = await asyncio.to_thread(munge_user, asked.munge, signed, MUNGE_S)
            return _answer(await self._loop.command(asked, given_by(uid, address, asked.by), uid))
        except CommandNotJournalled as error:
            return _problem(504, clean_text(str(error)))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            return _answer(self._loop.ask(msgspec.json.decode(await request.read(), type=Ask).incident))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=encode(body) + b"\n", status=status, content_type="application/json")


def _problem(status: int, why: str) -> web.Response:
    return _answer({"schema": 1, "error": why}, status)
