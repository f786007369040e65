"""The kernel's lines of the last minutes, read once: from `/dev/kmsg`, else from the journal; bounded."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from diagnosis.kernel.log import read_stamp
from diagnosis.signals import Finding, Signal, clean_text
from supervisor.node_health.contract import Moment
from supervisor.node_health.kernel_log import DEVICE, MAX_TEXT, OF_KERNEL, KernelSight, is_of_kernel, may_read_journal

RECORDS: Final = 20_000
"""The newest ones that are read: more than the ring of most kernels holds."""
READ_S: Final = 3.0
JOURNAL_S: Final = 6.0
JOURNAL_LINES: Final = 5000


def findings(told: Sequence[Signal], tables: Mapping[str, Any]) -> list[Finding]:
    """One for each root cause."""
    sight = KernelSight(tables)
    return [*sight.findings(told, ()), *sight.findings((), ())]  # no more comes: what waits for it is whole


def lines(seconds: float, now: Moment) -> list[Signal]:
    """Those of the last `seconds`, oldest first. Raises OSError, in words, where nothing can be read."""
    try:
        descriptor = open_device()
        try:
            return records(descriptor, seconds, now)
        finally:
            os.close(descriptor)
    except OSError as error:
        return _journal(seconds, now, error.strerror or "")


def open_device() -> int:
    """At the oldest record there is."""
    return os.open(DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def records(descriptor: int, seconds: float, now: Moment) -> list[Signal]:
    """Of the records of `/dev/kmsg`, one a read, those of the last `seconds`. Raises OSError."""
    until = time.monotonic() + READ_S
    kept: deque[Signal] = deque(maxlen=RECORDS)
    while time.monotonic() < until:
        try:
            record = os.read(descriptor, 8192)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno == errno.EPIPE:  # the ring ran over us: the next read has the oldest record there is
                continue
            raise
        if not record:
            break
        if not is_of_kernel(record):
            continue
        text = record.split(b"\n", 1)[0].decode(errors="replace")  # behind it come keys and values
        stamp = read_stamp(text)
        age_s = now.mono - stamp.uptime if stamp.uptime is not None else 0.0
        if age_s <= seconds:
            kept.append(Signal(source="kernel", text=clean_text(text, MAX_TEXT), at=now.wall - age_s))
    return list(kept)


def _journal(seconds: float, now: Moment, why: str) -> list[Signal]:
    program = shutil.which("journalctl")
    if program is None or not may_read_journal():
        raise OSError(f"the kernel log cannot be read ({DEVICE}: {why}), nor can the journal")
    since = f"--since=@{max(0, int(now.wall - seconds))}"
    command = [program, *OF_KERNEL, "-o", "short-unix", "--no-pager", "-q", f"-n{JOURNAL_LINES}", since]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=JOURNAL_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"journalctl gave no answer in {JOURNAL_S:g} s") from None
    if done.returncode:
        raise OSError(f"journalctl: {done.stderr[:200].decode(errors='replace')}")
    return [
        Signal(source="kernel", text=clean_text(line, MAX_TEXT), at=at)
        for line in done.stdout.decode(errors="replace").splitlines()
        if (at := read_stamp(line).at) is not None
    ]
