"""What a node does that has lost its controller while the job goes on without it: it ends its ranks.

The controller writes into the job folder which attempt is the newest. A node without a connection looks there, and
kills what it has of older attempts: ranks that wait for others which are gone, and may yet write a checkpoint. Where
the folder cannot be reached either they live until the node has its connection again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from supervisor.blocking import Aside
from supervisor.paths import Fence

ALONE_S = 2.0
"""A controller that is started again is back before that."""
LOOK_S = 1.0
READ_S = 5.0

log = logging.getLogger("unbroken.agent")


class Fencing:
    """`look` is called with each look of the agent; it never waits."""

    def __init__(
        self,
        job_dir: Path,
        epoch: Callable[[], int],
        attempt: Callable[[], int],
        kill: Callable[[int], Awaitable[None]],
    ) -> None:
        """`epoch`: of the assignment that is held. `attempt`: the newest that has ranks here; 0: none has. `kill`: the
        ranks of attempts up to a number."""
        self._job_dir = job_dir
        self._epoch = epoch
        self._attempt = attempt
        self._kill = kill
        self._folder = Aside("fence")
        self._alone_since: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._next = 0.0

    def look(self, connected: bool, now: float) -> None:
        """`now`: monotonic."""
        if connected or not self._attempt():
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        busy = self._task is not None and not self._task.done()
        if now - self._alone_since >= ALONE_S and now >= self._next and not busy:
            self._next = now + LOOK_S
            self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            newest = await self._folder.run(lambda: Fence.read(self._job_dir), READ_S)
            attempt = self._attempt()
            if newest is None or not attempt or newest.epoch < self._epoch() or newest.attempt <= attempt:
                return
            log.warning(
                "attempt %d runs without this node, which has no controller: its ranks are ended", newest.attempt
            )
            await self._kill(newest.attempt - 1)
        except (OSError, asyncio.TimeoutError) as error:
            log.info("whether the job has gone on without this node cannot be seen: %r", error)
