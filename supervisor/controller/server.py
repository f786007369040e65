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
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from diagnosis.signals import clean_line, clean_text
from supervisor.blocking import timeout
from supervisor.controller.access import MUNGE_S, OWNER, Access, Admitted, HeldRights
from supervisor.controller.alerts import BODY_BYTES as ALERT_BYTES
from supervisor.controller.listener import BACKLOG, NOT_SIGNED, Listener
from supervisor.controller.routes import (
    ALERTS_PATH,
    COMMAND_PATH,
    METRICS_PATH,
    OPENAPI_PATH,
    ROUTES,
    Ask,
    is_open,
    needed,
)
from supervisor.errors import AccessRefused, CommandNotJournalled
from supervisor.messages import decode_command, encode
from supervisor.wire.access import Role, allows, needed_for
from supervisor.wire.authentication import (
    AGENT_PATH,
    CHALLENGE_HEADER,
    CHALLENGE_PATH,
    PROOF_HEADER,
    is_nonce,
    munge_user,
)
from supervisor.wire.peers import listen_privately, user_name

if TYPE_CHECKING:
    from supervisor.controller.alerts import AlertReceiver
    from supervisor.controller.loop import ControlLoop

BY_LIMIT = 100


def given_by(uid: int | None, address: str, said: str, shown: str = "") -> str:
    """`uid`: as the kernel (unix socket) or munge proves it; None: only that somebody holds the job's token.

    `shown`: what he has shown in place of the job's own token.
    """
    if uid is None:
        return clean_line(f"holder of the {shown or 'token'} at {address}, says {said or 'nothing'}", BY_LIMIT)
    return clean_line(f"{user_name(uid)}{f', {shown}' if shown else ''}", BY_LIMIT)


log = logging.getLogger("unbroken.server")
requests_log = logging.getLogger("unbroken.server.requests")
"""aiohttp's own words about requests: `supervisor.logs` takes from them what strangers have sent."""

BODY_BYTES = 64 << 10
ADMITTED: ContextVar[Admitted] = ContextVar("admitted")
"""Who has sent the signed request that is being answered, and with which key."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Scrape = Callable[[], Callable[[str, str], tuple[bytes, dict[str, str]]]]
"""Reads the numbers, on the loop; what it gives makes the answer to `Accept` and `Accept-Encoding`, in a thread."""
SCRAPES_AT_ONCE = 4


class Server:
    """aiohttp on one port, and on a unix socket for this node."""

    def __init__(
        self,
        loop: ControlLoop,
        token: str,
        tls: ssl.SSLContext | None = None,
        scrape: Scrape | None = None,
        alerts: AlertReceiver | None = None,
    ) -> None:
        """`scrape`: what `/metrics` answers, to everybody; None: there is none. `alerts`: takes those from outside."""
        self._loop = loop
        self._access = Access(token, loop.epoch, loop.job_dir)
        self._tls = tls
        app = web.Application(middlewares=[self._guard], client_max_size=BODY_BYTES)
        handlers = self._handlers()
        for route in ROUTES:
            if route.path != METRICS_PATH or scrape is not None:
                app.router.add_route(route.method, route.path, handlers[route.path])
        self._alerts = alerts
        self._scrape = scrape
        self._scrapes = 0
        self._described: asyncio.Task[dict[str, Any]] | None = None
        """Made once: it costs a tenth of a second, and strangers may ask."""
        self._scraped = asyncio.Event()
        self._scraped_at = float("-inf")
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=requests_log
        )
        self._listener: Listener | None = None
        self._socket: tuple[Path, int] | None = None
        """Path and inode of the unix socket: a newer controller may have put its own there by the end."""

    def _handlers(self) -> dict[str, Handler]:
        return {
            "/healthz": self._healthz,
            METRICS_PATH: self._metrics,
            CHALLENGE_PATH: self._challenge,
            OPENAPI_PATH: self._openapi,
            AGENT_PATH: self._agent,
            "/v1/status": self._view,
            "/v1/incidents": self._view,
            "/v1/curve": self._view,
            "/v1/advice": self._view,
            "/v1/timeline": self._timeline,
            COMMAND_PATH: self._command,
            "/v1/ask": self._ask,
            ALERTS_PATH: self._alerts_posted,
        }

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
            self._listener = Listener(self._loop, self._access.authenticator, self._runner.server, self._tls)
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
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self._listener is not None
        given = request.headers.get("Authorization", "")
        signed, method, path = given.startswith("Unbroken "), request.method, request.path
        try:
            if not signed and is_open(method, path):
                return await self._unsigned(request, handler)
            if not signed and given.startswith("Bearer ") and needed(method, path) == "alerts":
                return await self._with_bearer(request, handler, given)
            return await self._signed(request, handler)
        except AccessRefused as error:
            return _problem(error.status, clean_text(str(error)))
        except web.HTTPException as error:  # what was sent is too long
            return _problem(error.status, error.reason)

    async def _unsigned(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self._listener is not None
        try:
            return await handler(request)
        finally:
            if (connection := self._listener.of(request.transport)) is not None:
                self._listener.answered(connection)

    async def _with_bearer(self, request: web.Request, handler: Handler, given: str) -> web.StreamResponse:
        """A token sent as it is: the answer is not signed, and its sender counts as one who has proven nothing."""
        rights = await self._access.bearer(given.removeprefix("Bearer ").strip())
        if rights is None:
            return _problem(401, NOT_SIGNED)
        return await self._unsigned(request, handler)

    async def _signed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self._listener is not None
        body = await request.read() if request.can_read_body else b""  # its time is limited as that of its headers
        found = await self._access.admit(request.headers, request.method, request.raw_path, body, time.monotonic())
        if found is None:
            return _problem(401, NOT_SIGNED)
        before = ADMITTED.set(found)
        with self._listener.proven(request.transport):
            try:
                _check(found.rights, needed(request.method, request.path))
                answer = await handler(request)
            except AccessRefused as error:
                answer = _problem(error.status, clean_text(str(error)))
            except web.HTTPException as error:
                answer = _problem(error.status, error.reason)
            finally:
                ADMITTED.reset(before)
        if isinstance(answer, web.Response):
            told = answer.body if isinstance(answer.body, bytes) else b""
            answer.headers[PROOF_HEADER] = found.secret.answer_proof(found.exchange, answer.status, told)
        return answer

    async def _challenge(self, request: web.Request) -> web.Response:
        nonce = request.headers.get(CHALLENGE_HEADER, "")
        if not is_nonce(nonce):
            return _problem(400, f"header {CHALLENGE_HEADER}: 32 hexadecimal digits that were never used before")
        return _answer(await self._access.challenge(nonce, request.headers, time.monotonic()))

    async def _agent(self, _: web.Request) -> web.Response:
        """An agent's own request does not come here: its connection answers it."""
        return _problem(426, "agents open a WebSocket here, with the first request that they sign")

    async def _openapi(self, _: web.Request) -> web.Response:
        from supervisor.controller.openapi import description  # only the few who ask pay for it

        self._described = self._described or asyncio.create_task(asyncio.to_thread(description))
        return _answer(await asyncio.shield(self._described))

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
        view = self._loop.view(request.path.rpartition("/")[2])
        return await asyncio.to_thread(lambda: _answer(view()))

    async def _timeline(self, request: web.Request) -> web.Response:
        try:
            since = int(request.query.get("since", "0"))
        except ValueError:
            return _problem(400, "`since` must be a number: the seq of the last record you have")
        return await asyncio.to_thread(_answer, await self._loop.timeline(since))

    async def _command(self, request: web.Request) -> web.Response:
        try:
            asked, admitted = decode_command(await request.read()), ADMITTED.get()
            rights = admitted.rights
            _check(rights, needed_for(asked))
            assert self._listener is not None
            connection = self._listener.of(request.transport)
            address, uid = (connection.peer, connection.uid) if connection is not None else ("?", None)
            uid = rights.uid if rights.uid is not None else uid
            if uid is None and asked.munge:
                signed = admitted.secret.command_digest(*asked.words)
                uid = await asyncio.to_thread(munge_user, asked.munge, signed, MUNGE_S)
            by, role = given_by(uid, address, asked.by, rights.words), rights.role if rights is not OWNER else ""
            return _answer(await self._loop.command(asked, by, uid, role))
        except CommandNotJournalled as error:
            return _problem(504, clean_text(str(error)))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))

    async def _alerts_posted(self, request: web.Request) -> web.Response:
        if self._alerts is None:
            return _problem(404, "this controller takes no alerts")
        body = await _body(request, ALERT_BYTES)
        try:
            return _answer(msgspec.to_builtins(await self._alerts.take(body, self._loop.clock.now())))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return _problem(400, clean_text(f"{error} (expected: Alertmanager's webhook, version 4)"))

    async def _ask(self, request: web.Request) -> web.Response:
        try:
            return _answer(self._loop.ask(msgspec.json.decode(await request.read(), type=Ask).incident))
        except (msgspec.DecodeError, ValueError) as error:
            return _problem(400, clean_text(str(error)))


async def _body(request: web.Request, limit: int) -> bytes:
    """Of a request with a bearer token up to `limit`; a signed one was read already. Raises AccessRefused."""
    if ADMITTED.get(None) is not None:
        return await request.read()
    try:
        return await request.clone(client_max_size=limit).read()
    except web.HTTPRequestEntityTooLarge:
        raise AccessRefused(413, f"more than {limit >> 10} KiB") from None


def _check(rights: HeldRights, role: Role | None) -> None:
    """Raises AccessRefused."""
    if role is not None and not allows(rights.role, role):
        raise AccessRefused(403, f"this needs the role `{role}`, and what you have shown gives `{rights.role}`")


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=encode(body) + b"\n", status=status, content_type="application/json")


def _problem(status: int, why: str) -> web.Response:
    return _answer({"schema": 1, "error": why}, status)
