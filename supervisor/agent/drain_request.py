"""Writes the job's request to drain this node to where root's programs read it (`recovery.cordon`).

For jobs of users who may not drain nodes themselves. The request is removed when the node is uncordoned before it was
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import msgspec

from recovery.cordon import DrainRequest, clean_reason, may_be_asked, request_file
from supervisor.agent.state import AgentState
from supervisor.blocking import BlockingCalls
from supervisor.files import write_atomically
from supervisor.node_health.contract import ProbeContext

WRITE_S = 5.0
AGAIN_S = 60.0
"""A request that could not be written is tried again after so long."""


class DrainRequests:
    """Keeps the file with the request as the newest assignment wants it."""

    def __init__(self, state: AgentState, folder: str) -> None:
        """`folder`: the site's, for requests."""
        self._state = state
        self._node = state.plan.scheduler_node or state.plan.node
        self._job = state.plan.spec.scheduler_job
        self._path = Path(folder) / request_file(self._job, os.getuid())
        self._file = BlockingCalls("drain request")
        self._task: asyncio.Task[None] | None = None
        self._again_at = 0.0

    def follow(self, reason: str) -> None:
        """`reason`: empty, or one that root's programs would not take, stands for no request."""
        reason = reason if may_be_asked(reason, self._job) else ""
        busy = self._task is not None and not self._task.done()
        if reason == self._state.saved.drain_request or busy or not self._job or time.monotonic() < self._again_at:
            return
        self._task = asyncio.get_running_loop().create_task(self._update(reason))

    async def _update(self, reason: str) -> None:
        try:
            await self._file.run(lambda: self._write(reason), WRITE_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._again_at = time.monotonic() + AGAIN_S
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it takes too long"
            self._state.notices.report(
                f"{self._node}: the request to drain it cannot be written to {self._path.parent} ({why}): "
                "other jobs may still get this node"
            )
            return
        self._state.saved.drain_request = reason
        if reason:
            self._state.notices.report(f"{self._node}: root's programs are asked to drain it ({self._path})")

    def _write(self, reason: str) -> None:
        if not reason:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            return
        boot_id = ProbeContext().boot_id
        request = DrainRequest(
            job=self._job, node=self._node, reason=clean_reason(reason), boot_id=boot_id, at=round(time.time(), 3)
        )
        write_atomically(self._path, msgspec.json.encode(request), 0o600)
