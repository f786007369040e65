"""Tells nodes that cannot hear the controller which attempt is the newest, through the job folder.

What they do about it: `supervisor.agent.fence`.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from supervisor.blocking import BlockingCalls
from supervisor.paths import Fence

WRITE_S = 5.0

log = logging.getLogger("unbroken.controller")


class FenceWriter:
    """`raise_to` is called with each assignment that goes out; nothing waits for the folder."""

    def __init__(self, job_dir: Path, epoch: int) -> None:
        self._job_dir = job_dir
        self._epoch = epoch
        self._attempt = 0
        self._folder = BlockingCalls("fence")
        self._task: asyncio.Task[None] | None = None

    def raise_to(self, attempt: int) -> None:
        if attempt > self._attempt:
            self._attempt = attempt
            self._task = asyncio.get_running_loop().create_task(self._write(Fence(epoch=self._epoch, attempt=attempt)))

    async def _write(self, fence: Fence) -> None:
        try:
            await self._folder.run(lambda: fence.write(self._job_dir), WRITE_S)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the job folder's fence.json cannot be written: %r", error)
