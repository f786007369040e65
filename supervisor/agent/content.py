"""Watches whether checkpoints keep the bytes with which they were first seen complete, and whether their weights are
finite (`recovery.formats.content`).

A thread of its own reads, at the lowest priority and at a bounded rate. What it has found out is kept in the job folder
(`verified/<node>.json`), so that the next agent, and the next life of the job, know it.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from recovery.checkpoint import Checkpoint
from recovery.formats.content import ContentLedger, ContentReader, ContentRecord, Stopped
from supervisor.files import write_atomically

FOLDER: Final = "verified"
BYTES_PER_S: Final = 64 << 20
AGAIN_S: Final = 600.0
"""The newest one is read again so often, although nobody has touched it: disks lose bits."""
LOOK_S: Final = 60.0
"""Whether somebody has touched one is looked at so often: times only."""
LATER_S: Final = 5.0
"""When a file could not be read."""
RECORD_BYTES: Final = 64 << 20
NODES_READ: Final = 256
HURRY_S: Final = 0.5
"""For what was touched since, when the ranks have ended and a restart waits."""

log = logging.getLogger("unbroken.agent")


class ContentMonitor:
    """`offer` the checkpoints of a scan; `judged` says what is known of one."""

    def __init__(self, job_dir: Path, node: str) -> None:
        self._folder = job_dir / FOLDER
        self._own = self._folder / f"{node.replace('/', '_')}.json"
        self._ledger = ContentLedger()
        self._kept = 0
        self._lock = threading.Lock()
        """Held while the ledger changes."""
        self._wanted: tuple[Checkpoint, ...] = ()
        self._news = threading.Event()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._read_again_at = 0.0

    def offer(self, found: Sequence[Checkpoint]) -> None:
        """What a scan has found and this node is to verify, the newest first. Never blocks."""
        wanted = tuple(one for one in found if one.complete and not one.in_doubt)
        if wanted != self._wanted:
            self._wanted = wanted
            self._news.set()
        if self._thread is None and wanted:
            thread = threading.Thread(target=self._run, name="content", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread left: at the next scan
                return
            self._thread = thread

    def judged(self, found: Checkpoint) -> Checkpoint:
        return self._ledger.judged(found)

    def check_now(self, found: Sequence[Checkpoint]) -> None:
        """The ranks have ended: look at those that somebody has touched since they were verified. Half a second."""
        self._hurry.set()
        try:
            if self._lock.acquire(timeout=HURRY_S):
                try:
                    until = time.monotonic() + HURRY_S
                    reader = ContentReader(lambda _: time.monotonic() < until)
                    for one in found:
                        if one.complete and time.monotonic() < until and self._ledger.is_known(one.path):
                            self._look(one.path, reader)
                finally:
                    self._lock.release()
        finally:
            self._hurry.clear()
            self._news.set()  # to keep what was found out

    def _look(self, path: str, reader: ContentReader, *, again: bool = False) -> bool:
        """Whether it was looked at to the end."""
        try:
            if again or not self._ledger.is_known(path) or self._ledger.touched(path):
                self._ledger.look(path, reader, time.time(), again=again)
        except (OSError, Stopped):
            return False
        return True

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        except OSError:
            pass  # then it has only its rate
        self._recall()
        self._read_again_at = time.monotonic() + AGAIN_S
        while True:
            self._news.clear()
            done = True
            try:
                done = self._look_at_all()
                self._keep()
            except Exception:
                log.exception("the content of checkpoints cannot be verified")
            self._news.wait(LOOK_S if done else LATER_S)

    def _look_at_all(self) -> bool:
        reader = ContentReader(self._wait)
        done = True
        due = time.monotonic() >= self._read_again_at
        for number, one in enumerate(self._wanted):
            with self._lock:
                done = self._look(one.path, reader, again=due and number == 0) and done
        if due:
            self._read_again_at = time.monotonic() + AGAIN_S
        return done

    def _wait(self, size: int) -> bool:
        return not self._hurry.wait(size / BYTES_PER_S)

    # ----- what outlives this agent -----

    def _keep(self) -> None:
        if self._ledger.changes == self._kept:
            return
        changes = self._ledger.changes
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._own, msgspec.json.encode(self._ledger.records), 0o600)
        except OSError as error:
            log.warning("what is known of checkpoints cannot be kept in %s: %s", self._own, error.strerror)
        self._kept = changes

    def _recall(self) -> None:
        """What this node knew, and of shared storage what the others knew: there the newest record counts.

        On the nodes' own disks one path is another checkpoint on each.
        """
        self._ledger.records.update(_read(self._own))
        try:
            names = sorted(os.listdir(self._folder))[:NODES_READ]
        except OSError:
            return
        for name in names:
            for path, record in _read(self._folder / name).items():
                held = self._ledger.records.get(path)
                if (held is None or held.at < record.at) and not is_on_a_disk(path) and _is_of(path, record):
                    self._ledger.records[path] = record


def is_on_a_disk(path: str) -> bool:
    """Whether it is on this node's own disk: file systems of other machines, and in memory, have no device."""
    try:
        return os.major(os.stat(path).st_dev) != 0
    except OSError:
        return False


def _is_of(path: str, record: ContentRecord) -> bool:
    """Whether a file is the one of the record. In memory, and where containers have no disk, others may be there."""
    for name, was in record.files.items():
        try:
            if was.was_not_written(os.stat(os.path.join(path, name) if name else path)):
                return True
        except OSError:
            continue
    return False


def _read(path: Path) -> dict[str, ContentRecord]:
    """Nothing where the file is not ours."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
                return {}
            if about.st_size > RECORD_BYTES:
                return {}
            return msgspec.json.decode(file.read(), type=dict[str, ContentRecord])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
