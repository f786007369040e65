"""The agent's side of the keeper socket: the node's processes as the keeper sees them, and requests to the keeper.

The keeper sends its whole state after every change, so a client that reconnects has missed nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from diagnosis.signals import ExitRecord, Frozen, from_wait_status
from supervisor.blocking import timeout
from supervisor.errors import KeeperError

REQUEST_DEADLINE_S = 5.0


class LauncherProcess(Frozen, frozen=True, kw_only=True):
    pid: int
    start_time: int = 0
    status: int | None = None
    """As from waitpid; None while it runs."""


class WorkerProcess(Frozen, frozen=True, kw_only=True):
    attempt: int
    rank: int
    local_rank: int
    pid: int
    start_time: int = 0
    started_at: float = 0.0
    status: int | None = None
    ended_at: float | None = None
    order: int | None = None
    """0 for the rank of its attempt that ended first, 1 for the next, and so on."""
    stopped_by_us: bool = False

    @property
    def alive(self) -> bool:
        return self.status is None

    def exit_record(self) -> ExitRecord | None:
        """How it ended; None while it runs."""
        if self.status is None:
            return None
        code, number, core_dumped = from_wait_status(self.status)
        return ExitRecord(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.pid,
            code=code,
            signal=number,
            core_dumped=core_dumped,
            ended_at=self.ended_at or 0.0,
            stopped_by_us=self.stopped_by_us,
            order=self.order or 0,
        )


class KeeperState(Frozen, frozen=True, kw_only=True):
    ready: bool = False
    error: str = ""
    """Why torch could not be imported; workers then start without it."""
    launcher: LauncherProcess | None = None
    workers: tuple[WorkerProcess, ...] = ()

    @property
    def launcher_alive(self) -> bool:
        return self.launcher is not None and self.launcher.status is None

    def workers_of(self, attempt: int) -> tuple[WorkerProcess, ...]:
        return tuple(worker for worker in self.workers if worker.attempt == attempt)

    @property
    def newest_attempt(self) -> int:
        return max((worker.attempt for worker in self.workers), default=0)


_decode_state = msgspec.json.Decoder(KeeperState).decode


class KeeperClient:
    """Follows the state of the node's keeper, and asks it to do things."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    async def watch(self, on_state: Callable[[KeeperState | None], None]) -> None:
        """Give each new state to `on_state`, for ever; None while there is no keeper."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 22)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            try:
                writer.write(b'{"op":"watch"}\n')
                while line := await reader.readline():
                    on_state(_decode_state(line))
            except (OSError, ValueError, msgspec.DecodeError):
                await asyncio.sleep(0.5)  # what the keeper sends cannot be read: do not spin
            finally:
                writer.close()
                on_state(None)

    async def request(self, **request: Any) -> dict[str, Any]:
        """Ask the keeper to do something; its reply. Raises KeeperError."""
        name = request.get("op")
        try:
            async with timeout(REQUEST_DEADLINE_S):
                line = await self._send(json.dumps(request).encode() + b"\n")
        except (OSError, asyncio.TimeoutError) as error:
            why = error or f"no reply in {REQUEST_DEADLINE_S:.0f} s"
            raise KeeperError(f"the keeper does not reply to {name!r}: {why}") from error
        if not line:
            raise KeeperError(f"the keeper closed the connection at {name!r}")
        reply: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in reply:
            raise KeeperError(f"the keeper refused {name!r}: {reply['error']}")
        return reply

    async def _send(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 22)
        try:
            writer.write(request)
            return await reader.readline()
        finally:
            writer.close()
