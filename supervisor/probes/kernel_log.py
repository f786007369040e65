"""The kernel log as signals: `/dev/kmsg`, or a file that grows like one. Only what comes after the start is read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable

import msgspec

from diagnosis.rules import Rules
from diagnosis.signals import Finding, Signal, clean_text
from supervisor.keeping import WorkerProcess

_PREFIX = re.compile(r"^\d+,\d+,\d+,[^;]*;")
RECORDS_PER_POLL = 2000


class KernelLog:
    """`poll()` gives new lines. `problem` says why nothing can be seen (no right to read), in words."""

    def __init__(self, path: str, node: str) -> None:
        self._path = path
        self._node = node
        self._descriptor: int | None = None
        self._is_device = False
        self._rest = b""
        self.problem = ""
        self._open(from_end=True)

    def _open(self, *, from_end: bool) -> None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if from_end:
                os.lseek(descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.problem = (
                f"the kernel log {self._path} cannot be read ({error.strerror}): Xid and OOM lines are not seen"
            )
            return
        self._descriptor, self.problem = descriptor, ""

    def poll(self, at: float) -> list[Signal]:
        """New lines since the last poll, at most 2,000. Never blocks."""
        if self._descriptor is None:
            if not os.path.exists(self._path) or self._path == "/dev/kmsg":
                return []
            self._open(from_end=False)
            if self._descriptor is None:
                return []
        lines = self._read_device() if self._is_device else self._read_file()
        return [Signal(source="kernel", text=clean_text(line), at=at, node=self._node) for line in lines if line]

    def _read_device(self) -> list[str]:
        """One record a read; continuation lines (after the first newline) are dictionary fields, not text."""
        assert self._descriptor is not None
        lines: list[str] = []
        for _ in range(RECORDS_PER_POLL):
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except OSError:  # EPIPE: the ring ran over us, the next read continues at the oldest record
                continue
            if not record:
                break
            lines.append(_PREFIX.sub("", record.decode(errors="replace").split("\n", 1)[0]))
        return lines

    def _read_file(self) -> list[str]:
        assert self._descriptor is not None
        try:
            data = self._rest + os.read(self._descriptor, 256 * 1024)
        except OSError:
            return []
        *whole, self._rest = data.split(b"\n")
        self._rest = self._rest[-8192:]
        return [_PREFIX.sub("", line.decode(errors="replace")) for line in whole]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def kernel_findings(lines: Iterable[Signal], line_rules: Rules, workers: Iterable[WorkerProcess]) -> list[Finding]:
    """Kernel lines that mean something, those about a process joined to its rank; crashes of other programs dropped."""
    ranks = {worker.pid: worker.rank for worker in workers}
    found: list[Finding] = []
    for line in lines:
        finding = line_rules.match(line)
        if finding is None:
            continue
        pid = finding.fields.get("pid") or finding.fields.get("pid2") or ""
        rank = ranks.get(int(pid)) if pid.isdigit() else None
        if rank is not None:
            finding = msgspec.structs.replace(finding, rank=rank)
        elif finding.rule == "segfault":
            continue
        found.append(finding)
    return found
