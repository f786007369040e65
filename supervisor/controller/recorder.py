"""The journal as the controller's loop uses it: written in a thread, tried again until it works, never blocking."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from supervisor.controller.epochs import newest_epoch
from supervisor.controller.journal import Entry, Journal
from supervisor.deadline import timeout

log = logging.getLogger("unbroken.journal")

STALL_S = 2.0
"""A write that takes longer than this is reported; nothing new is decided until it is done."""

T = TypeVar("T")


class Recorder:
    """`stall` says why nothing can be written now; empty while all is well."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.stall = ""
        self.stalled_for_s = 0.0
        """How long the newest stall that is over lasted."""
        self._stalled_at = 0.0
        self._late: list[Entry] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="journal", daemon=True).start()

    @property
    def has_late(self) -> bool:
        return bool(self._late)

    def later(self, entry: Entry) -> None:
        """Write `entry` before whatever is written next."""
        self._late.append(entry)

    async def write(self, entries: Sequence[Entry], *, sync: bool = True) -> int:
        """Journal `entries` behind what came by `later`; the seq of the first. Tries until it works.

        Raises Superseded.
        """
        late, self._late = self._late, []
        pause_s = 0.1
        while True:
            try:
                first = await self._patiently(self._submit(lambda: self.journal.write([*late, *entries], sync)))
                break
            except OSError as error:
                self._stalled(f"{self.journal.path}: {error.strerror or error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, pause_s * 2)
        if self.stall:
            self.stalled_for_s = time.monotonic() - self._stalled_at
            log.warning("the journal works again after %.1f s", self.stalled_for_s)
            self.stall = ""
        return first + len(late)

    async def shrink(self) -> None:
        """Thin out a journal that has become large."""
        try:
            await self._submit(self.journal.shrink)
        except OSError as error:
            log.warning("the journal could not be made smaller: %s", error)

    async def newest_epoch(self) -> int:
        """Raises OSError."""
        return await self._submit(lambda: newest_epoch(self.journal.job_dir, self.journal.epoch))

    async def _patiently(self, write: asyncio.Future[int]) -> int:
        try:
            async with timeout(STALL_S):
                return await asyncio.shield(write)
        except asyncio.TimeoutError:
            self._stalled(f"{self.journal.path}: a write takes over {STALL_S:.0f} s")
        return await write

    def _stalled(self, why: str) -> None:
        if not self.stall:
            self._stalled_at = time.monotonic()
            log.error("the journal cannot be written (%s): no new actions until it can; the run goes on", why)
            self.stall = why

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((call, future))
        return future

    def _work(self) -> None:
        """The thread. A daemon: a process that wants to end need not wait for a file system that hangs."""
        while True:
            call, future = self._calls.get()
            result, error = None, None
            try:
                result = call()
            except Exception as failure:
                error = failure
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
