"""The journal as the controller's loop uses it: written in a thread, tried again until it works, never blocking."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from supervisor.blocking import BlockingCalls, timeout
from supervisor.controller.journal import Entry, FileMark, Journal, newest_epoch

log = logging.getLogger("unbroken.journal")

STALL_S = 2.0
"""A write that takes longer than this is reported; nothing new is decided until it is done."""

SHRINK_S = 600.0
"""So long at most a journal is thinned out, beside everything else."""

T = TypeVar("T")


class JournalWriter:
    """`stall` says why nothing can be written now; empty while all is well."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.stall = ""
        self.stalled_for_s = 0.0
        """How long the newest stall that is over lasted."""
        self._stalled_at = 0.0
        self._late: list[Entry] = []
        self._ahead: list[Callable[[int], list[Entry]]] = []
        self._hurry = asyncio.Event()
        self._aside = BlockingCalls("shrink")
        self._shrinking: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[int] | None = None
        self.given_up = False
        """`give_up` was called."""
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="journal", daemon=True).start()

    @property
    def has_late(self) -> bool:
        """Something is to be written that came by `later` or `ahead`; not what just failed and is given up."""
        return bool(self._ahead) or (bool(self._late) and not (self.given_up and self.stall))

    def later(self, entry: Entry) -> None:
        """Write `entry` before whatever is written next."""
        self._late.append(entry)

    def ahead(self, decide: Callable[[int], list[Entry]]) -> None:
        """Call `decide` before the next try, and write what it gives before everything that waits.

        It is called with the number that its first entry will have (0: that is not known) while nothing is being
        written, so that the journal has things in the order in which they were decided.
        """
        self._ahead.append(decide)
        self._hurry.set()

    def give_up(self) -> None:
        """The job is to end: nobody waits for a journal that cannot be written any more. It is tried all the same."""
        self.given_up = True
        self._hurry.set()

    async def write(self, entries: Sequence[Entry], *, sync: bool = True) -> int:
        """Journal `entries` behind what came by `ahead` and `later`; the seq of the first. Tries until it works.

        After `give_up` it tries once, and gives 0 where that failed; what was to be written is tried with the next.
        Raises Superseded.
        """
        pause_s = 0.1
        while True:
            sync = sync or bool(self._ahead)
            self._go_ahead()
            whole = [*self._late, *entries]
            if self._hangs:
                self._late = whole
                return 0
            try:
                first = await self._patiently(self._submit(functools.partial(self.journal.write, whole, sync)))
                break
            except OSError as error:
                self._stalled(f"{self.journal.path}: {error.strerror or error}")
            if self.given_up:
                self._late = [] if self._hangs else whole  # what hangs may be written yet
                return 0
            await self._pause(pause_s)
            pause_s = min(2.0, pause_s * 2)
        before = len(whole) - len(entries)
        first, self._late = first + before, self._late[before:]
        if self.stall:
            self.stalled_for_s = time.monotonic() - self._stalled_at
            log.warning("the journal works again after %.1f s", self.stalled_for_s)
            self.stall = ""
        return first

    def shrink_beside(self) -> None:
        """Thin out a journal that has become large, while others go on writing. Not while a write is under way."""
        if self._shrinking is None or self._shrinking.done():
            self._shrinking = asyncio.create_task(self._shrink(self.journal.mark()))

    async def _shrink(self, mark: FileMark) -> None:
        try:
            thinned = await self._aside.run(lambda: self.journal.thin_out(mark), SHRINK_S)
            if thinned is not None:
                await self._submit(lambda: self.journal.take_over(thinned))
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the journal could not be made smaller: %r", error)

    async def newest_epoch(self) -> int:
        """Raises OSError."""
        return await self._submit(lambda: newest_epoch(self.journal.job_dir, self.journal.epoch))

    def _go_ahead(self) -> None:
        ahead, self._ahead = self._ahead, []
        for decide in ahead:
            self._late += decide(0 if self._hangs else self.journal.next_seq + len(self._late))

    @property
    def _hangs(self) -> bool:
        """A write that was given up has not returned."""
        return self._hung is not None and not self._hung.done()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(seconds):
                await self._hurry.wait()
        self._hurry.clear()

    async def _patiently(self, write: asyncio.Future[int]) -> int:
        done, _ = await asyncio.wait({write}, timeout=STALL_S)
        if not done:
            self._stalled(f"{self.journal.path}: a write takes more than {STALL_S:.0f} s")
        while not write.done() and not self.given_up:
            hurry = asyncio.ensure_future(self._hurry.wait())
            either: set[asyncio.Future[Any]] = {write, hurry}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            self._hurry.clear()
        if not write.done():
            self._hung = write
            write.add_done_callback(lambda one: one.cancelled() or one.exception())
            raise OSError(f"a write takes more than {STALL_S:.0f} s")
        return write.result()

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
