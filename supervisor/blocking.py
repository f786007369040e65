"""Work that may hang for ever (a dead file system), on a thread of its own: waited for as long as there is time.

Threads of asyncio's own pool are few, and one that hangs is lost to everybody else; these are not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from supervisor.deadline import timeout

T = TypeVar("T")


class Aside:
    """One kind of work. While `most` threads of it hang, no more is begun."""

    def __init__(self, name: str, most: int = 1) -> None:
        self._name = name
        self._most = most
        self._running = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T], deadline_s: float) -> T:
        """What `work` returns or raises. Raises asyncio.TimeoutError when it takes longer, and at once when it cannot
        be begun; what it then still does is nobody's.
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
                raise asyncio.TimeoutError(f"{self._name}: what was begun earlier has not returned")
            self._running += 1
        try:
            threading.Thread(target=body, name=self._name, daemon=True).start()
        except RuntimeError as error:  # no thread left
            with self._lock:
                self._running -= 1
            raise asyncio.TimeoutError(f"{self._name}: {error}") from None
        async with timeout(deadline_s):
            return await done
