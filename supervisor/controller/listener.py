"""Takes the connections of the controller's port and unix socket, and limits those that have proven nothing.

asyncio's own servers accept whatever comes: a thousand idle connections would take all descriptors. Here each
connection counts from the moment it is accepted, before TLS and before its first byte.
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

from supervisor.wire.limits import IDLE_S, REQUEST_S, RESERVED, UnprovenConnections, descriptor_limit
from supervisor.wire.peers import own_users, peer_uid

log = logging.getLogger("unbroken.server")

ACCEPTS_AT_ONCE = 64
"""Then others have their turn."""
ACCEPT_AGAIN_S = 0.2
"""After descriptors have run out all the same."""
TLS_HANDSHAKE_S = 5.0
SWEEP_S = 1.0
BACKLOG = 1024


class _Connection(asyncio.Protocol):
    """One connection; its bytes go to `handler`."""

    def __init__(self, listener: Listener, accepted: socket.socket, address: str, uid: int | None) -> None:
        self.address = address
        self.uid = uid
        self.opening: asyncio.Task[object] | None = None
        self._listener = listener
        self._socket = accepted
        self._transport: asyncio.Transport | None = None
        self._handler: asyncio.Protocol | None = None
        self._put_out = False

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
        if (failed or self._put_out) and self._transport is None:
            self._socket.close()
            self._listener.forget(self, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._put_out:
            transport.abort()
            return
        self._handler = self._listener.handler_of(self, transport)
        self._handler.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.forget(self, self._transport)
        if self._handler is not None:
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._handler is not None else None

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()


class Listener:
    """`listen` on sockets, `close` at the end."""

    def __init__(self, handlers: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None) -> None:
        """`handlers` makes the protocol of each connection. `tls`: of TCP connections."""
        limit = descriptor_limit()
        self._handlers = handlers
        self._tls = tls
        self._unproven: UnprovenConnections[_Connection] = UnprovenConnections.for_descriptors(limit)
        self._most = max(16, limit - RESERVED)
        self._all: set[_Connection] = set()
        self._by_transport: dict[asyncio.BaseTransport, _Connection] = {}
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

    @contextlib.contextmanager
    def proven(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Meanwhile its other end counts as one that has proven itself: it may take its time."""
        found = self._by_transport.get(transport) if transport is not None else None
        if found is not None:
            self._unproven.gone(found)
        try:
            yield
        finally:
            self.answered(transport)

    def answered(self, transport: asyncio.BaseTransport | None) -> None:
        """A request was answered: its connection may wait for the next."""
        found = self._by_transport.get(transport) if transport is not None else None
        if found is not None:
            self._unproven.gone(found)
            self._limit(self._unproven.came(found, found.address, time.monotonic(), IDLE_S))

    def peer(self, transport: asyncio.BaseTransport | None) -> tuple[str, int | None]:
        """The other end: its address, and (of the unix socket) its user id."""
        found = self._by_transport.get(transport) if transport is not None else None
        return (found.address, found.uid) if found is not None else ("?", None)

    # ----- of connections -----

    def handler_of(self, connection: _Connection, transport: asyncio.Transport) -> asyncio.Protocol:
        self._by_transport[transport] = connection
        return self._handlers()

    def forget(self, connection: _Connection, transport: asyncio.BaseTransport | None) -> None:
        self._all.discard(connection)
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
            log.warning("a connection could not be taken: %s", error.strerror)
            return
        log.warning("no connection can be taken: %s; the oldest that has proven nothing ends", error.strerror)
        self._make_room()
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening.fileno())

        def again() -> None:
            if listening in self._sockets:
                loop.add_reader(listening.fileno(), self._accept, listening)

        loop.call_later(ACCEPT_AGAIN_S, again)

    def _take(self, accepted: socket.socket, address: str, uid: int | None) -> None:
        connection = _Connection(self, accepted, address, uid)
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

    def _limit(self, over: Iterable[_Connection]) -> None:
        for connection in over:
            self._unproven.gone(connection)
            connection.put_out()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            timed_out = self._unproven.timed_out(time.monotonic())
            if timed_out:
                log.info("%d connections ended that had proven nothing in time", len(timed_out))
            self._limit(timed_out)
