"""Reads the checkpoint that the next ranks will load into the page cache, while a failure is looked at and ranks end.

`wanted` says which one; `Prefetch` has a child process read it. Nothing depends on it: what was not read, or not in
time, the ranks read themselves.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from recovery.checkpoint import Checkpoint, newest
from supervisor.keeper_client import KeeperState
from supervisor.messages import Assignment

CHILD: Final = Path(__file__).with_name("prefetch_child.py")
LEAST_BYTES = 64 << 20
"""A smaller checkpoint is read in less time than a process takes to start."""

log = logging.getLogger("unbroken.agent")


def wanted(
    assignment: Assignment | None, keeper: KeeperState | None, checkpoints: Sequence[Checkpoint], progressed: int
) -> str:
    """The checkpoint to be read now; empty for none. `progressed`: the newest attempt that has shown progress.

    When a rank of this node has failed: the newest good one, as a guess. While the next attempt is formed and starts:
    what it resumes from.
    """
    if assignment is None or keeper is None or assignment.outcome is not None or assignment.role == "excluded":
        return ""
    attempt = keeper.newest_attempt
    if assignment.attempt < attempt:
        return ""
    if assignment.stage in ("form", "run") and assignment.attempt > max(progressed, attempt - 1):
        path = (assignment.resume.path if assignment.resume is not None else None) or ""
    elif assignment.stage in ("run", "hold") and _has_failed(keeper, attempt):
        path = getattr(newest(checkpoints), "path", "")
    else:
        return ""
    size = next((one.size_bytes for one in checkpoints if one.path == path), LEAST_BYTES)  # not known: tried
    return path if path and size >= LEAST_BYTES else ""


def _has_failed(keeper: KeeperState, attempt: int) -> bool:
    return any(worker.status and not worker.stopped_by_us for worker in keeper.workers_of(attempt))


class Prefetch:
    """At most one child. One that a file system holds is not waited for, and no other is started meanwhile."""

    def __init__(self, child: Sequence[str] = (sys.executable, "-IS", str(CHILD))) -> None:
        self._command = list(child)
        self._process: subprocess.Popen[bytes] | None = None
        self._path = ""

    def follow(self, path: str, ranks: Sequence[int], nodes: int) -> None:
        """`path`: empty to stop. `nodes`: how many the job has; 0: not known. Called often, with the same values most
        times; never blocks."""
        running = self._process is not None and self._process.poll() is None
        if not running:
            self._process = None
        if path == self._path:
            return
        if running and self._process is not None:
            self._process.kill()
            if path:
                return  # started when that one is gone
        self._path = path
        if path:
            self._start(path, ranks, nodes)

    def _start(self, path: str, ranks: Sequence[int], nodes: int) -> None:
        arguments = [path, ",".join(map(str, ranks)), str(nodes)]
        try:
            self._process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.info("no prefetch: %s", error)
        else:
            log.info("prefetch of %s", path)
