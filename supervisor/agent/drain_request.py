"""Leaves the job's request to drain this node where root's programs read it (`recovery.drain_requests`).

For jobs of users who may not drain nodes themselves. It is taken back when the node is uncordoned before it was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from recovery.drain_requests import DrainRequest, clean_reason, file_name, may_be_asked
from supervisor.agent.state import Notebook
from supervisor.blocking import Aside
from supervisor.files import write_atomically
from supervisor.node_health.contract import Place
from supervisor.paths import NodePlan

WRITE_S = 5.0
AGAIN_S = 60.0
"""A request that could not be left is tried again after so long."""


class DrainRequests:
    def __init__(self, plan: NodePlan, folder: str, book: Notebook, mention: Callable[[str], None]) -> None:
        """`folder`: the site's. `mention` tells the user and the controller, once."""
        self._node = plan.scheduler_node or plan.node
        self._job = plan.spec.scheduler_job
        self._path = Path(folder) / file_name(self._job, os.getuid())
        self._mention = mention
        self._aside = Aside("drain request")
        self._book = book
        self._task: asyncio.Task[None] | None = None
        self._again_at = 0.0

    def tend(self, reason: str) -> None:
        """See that the file asks for this; empty, or nothing that root's programs would take: there is to be none."""
        reason = reason if may_be_asked(reason, self._job) else ""
        busy = self._task is not None and not self._task.done()
        if reason == self._book.drain_request or busy or not self._job or time.monotonic() < self._again_at:
            return
        self._task = asyncio.get_running_loop().create_task(self._bring_about(reason))

    async def _bring_about(self, reason: str) -> None:
        try:
            await self._aside.run(lambda: self._write(reason), WRITE_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._again_at = time.monotonic() + AGAIN_S
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it takes too long"
            self._mention(
                f"{self._node}: the request to drain it cannot be left in {self._path.parent} ({why}): "
                "nobody but this job leaves it out"
            )
            return
        self._book.drain_request = reason
        if reason:
            self._mention(f"{self._node}: root's programs are asked to drain it ({self._path})")

    def _write(self, reason: str) -> None:
        if not reason:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            return
        boot_id = Place().boot_id
        request = DrainRequest(
            job=self._job, node=self._node, reason=clean_reason(reason), boot_id=boot_id, at=round(time.time(), 3)
        )
        write_atomically(self._path, msgspec.json.encode(request), 0o600)
