"""What our own processes use, for the metrics `unbroken_process_*`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from supervisor.metrics.table import Sample


def process_samples(kind: str, pid: int) -> Iterator[Sample]:
    """CPU time and resident memory of a process; nothing when it has just ended."""
    try:
        cpu_s = time.clock_gettime_ns((~pid << 3) | 2) / 1e9  # the clock of another process: CPUCLOCK_SCHED of its pid
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return
    yield Sample("unbroken_process_cpu_seconds_total", cpu_s, (kind,))
    yield Sample("unbroken_process_resident_memory_bytes", pages * os.sysconf("SC_PAGE_SIZE"), (kind,))
