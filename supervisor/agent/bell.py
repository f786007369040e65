"""A wake-up call with a time limit, for one task that waits again and again."""

from __future__ import annotations

import asyncio


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

    async def wait(self, seconds: float) -> None:
        """Until it is rung, `seconds` at most."""
        if self.rung:
            return
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(seconds, _fulfil, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None


def _fulfil(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
