"""The agent's side of the keeper socket: the node's processes as the keeper sees them, and orders to it.

The keeper sends its whole state after every change, so a reader that reconnects has missed nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from diagnosis.signals import ExitRecord, Frozen
from supervisor.deadline import timeout
from supervisor.errors import KeeperError

ORDER_DEADLINE_S = 5.0


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
    stopped_by_us: bool = False

    @property
    def alive(self) -> bool:
        return self.status is None

    def exit_record(self) -> ExitRecord | None:
        """How it ended; None while it runs."""
        if self.status is None:
            return None
        signalled = os.WIFSIGNALED(self.status)
        return ExitRecord(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.pid,
            code=None if signalled else os.waitstatus_to_exitcode(self.status),
            signal=os.WTERMSIG(self.status) if signalled else None,
            core_dumped=signalled and os.WCOREDUMP(self.status),
            ended_at=self.ended_at or 0.0,
            stopped_by_us=self.stopped_by_us,
            order=self.order or 0,
        )


class KeeperState(Frozen, frozen=True, kw_only=True):
    ready: bool = False
    error: str = ""
    """Why torch could not be imported; workers then start cold."""
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


class Keeper:
    """Connection to the node's keeper. `state` is None while there is none."""

    def __init__(self, socket: Path, on_change: Callable[[], None]) -> None:
        self._socket = str(socket)
        self._on_change = on_change
        self.state: KeeperState | None = None

    async def watch(self) -> None:
        """Follow the keeper's state for ever; a keeper that went away is waited for."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 22)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            try:
                writer.write(b'{"op":"watch"}\n')
                while line := await reader.readline():
                    self.state = _decode_state(line)
                    self._on_change()
            except (OSError, ValueError, msgspec.DecodeError):
                await asyncio.sleep(0.5)  # a keeper that talks nonsense: do not spin
            finally:
                writer.close()
                self.state = None
                self._on_change()

    async def order(self, **request: Any) -> dict[str, Any]:
        """Ask the keeper for something; its answer. Raises KeeperError."""
        name = request.get("op")
        try:
            async with timeout(ORDER_DEADLINE_S):
                line = await self._ask(json.dumps(request).encode() + b"\n")
        except (OSError, asyncio.TimeoutError) as error:
            raise KeeperError(f"keeper does not answer {name!r}: {error or 'no answer in 5 s'}") from error
        if not line:
            raise KeeperError(f"keeper closed the connection at {name!r}")
        answer: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            raise KeeperError(f"keeper refused {name!r}: {answer['error']}")
        return answer

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 22)
        try:
            writer.write(request)
            return await reader.readline()
        finally:
            writer.close()
