"""Deadlines (`async with timeout(seconds)`), and calls that may block for ever (a dead file system) on own threads.

`timeout` raises asyncio.TimeoutError and never swallows a cancellation. `asyncio.wait_for` before Python 3.12 does: a
task that is cancelled in the moment its call returns goes on, and whoever waits for its end does so for ever.
The threads of asyncio's own pool are few, and each one that hangs is lost to everybody: blocking calls have others.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["BlockingCalls", "timeout"]

T = TypeVar("T")


class BlockingCalls:
    """Calls of one kind. While `most` of them hang, no more is begun."""

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._most = most
        self._running = 0
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """No more can be begun now."""
        return self._running >= self._most

    async def run(self, work: Callable[[], T], deadline_s: float) -> T:
        """What `work` returns or raises. Raises asyncio.TimeoutError when it takes longer, and at once when it cannot
        be begun. Its thread may go on after that; nobody waits for it.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)  # type: ignore[arg-type]

        def body() -> None:
            value, error = None, None
            try:
                value = work()
            except Exception as raised:
                error = raised
            with self._lock:
                self._running -= 1
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:  # the loop has ended
                pass

        with self._lock:
            if self._running >= self._most:
                raise asyncio.TimeoutError(f"{self._name}: an earlier call has not returned")
            self._running += 1
        try:
            threading.Thread(target=body, name=self._name, daemon=True).start()
        except RuntimeError as error:  # no thread left
            with self._lock:
                self._running -= 1
            raise asyncio.TimeoutError(f"{self._name}: {error}") from None
        async with timeout(deadline_s):
            return await done
