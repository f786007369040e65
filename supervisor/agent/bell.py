"""A wake-up call with a time limit, for one task that waits again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bell:
    """Like an `asyncio.Event` under a timeout, without the exception at the end of a wait: it costs some loops."""

    def __init__(self) -> None:
        self.rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake who waits, or the next who does."""
        self.rung = True
        if self._waiter is not None:
            _fulfil(self._waiter)

    def hush(self) -> None:
        self.rung = False

    async def wait(self, seconds: float, glance: Callable[[], None] | None = None, glance_s: float = 0.0) -> None:
        """Until it is rung, `seconds` at most. `glance` is called after `glance_s`, once, if that is not over by then:
        who waits is woken by what it raises, else only when it rings. That takes half of what waking up does.
        """
        if self.rung:
            return
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timers = [loop.call_later(seconds, _fulfil, waiter)]
        if glance is not None:
            timers.append(loop.call_later(glance_s, _meanwhile, glance, waiter))
        try:
            await waiter
        finally:
            for timer in timers:
                timer.cancel()
            self._waiter = None


def _meanwhile(glance: Callable[[], None], waiter: asyncio.Future[None]) -> None:
    if waiter.done():
        return
    try:
        glance()
    except Exception as error:
        waiter.set_exception(error)


def _fulfil(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
