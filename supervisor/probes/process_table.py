"""The processes of a node: one pass over `/proc/PID/stat`, which never blocks (`cmdline`, `environ` and `maps` of a
stuck process do), and a closer look at those in state D.
"""

from __future__ import annotations

import os
import re
from typing import Final

from diagnosis.signals import Word, clean_text
from supervisor.probes.probe import Place

_PF_KTHREAD: Final = 0x00200000
KERNEL_THREADS_EVERY: Final = 5
"""A node with 256 CPUs has thousands of kernel threads: those that were not in state D are read at every fifth look."""
SUSPECTS: Final = 200
"""Processes in state D that are looked at closely; a node whose storage is gone has all of them there."""
THREADS: Final = 512


_NUMBERS: Final = (6, 11, 12, 17, 19)
"""Fields behind the name that are read as numbers: flags, user and system time, threads, start."""


class Task(Word, frozen=True, kw_only=True):
    """A process in state D, or a zombie some of whose threads do not end because they are in state D."""

    pid: int
    name: str
    start: int
    """When it started, clock ticks since boot: with the pid, who it is."""
    runs: int
    """How often it (its stuck thread) was given a CPU."""
    wchan: str = ""
    """The kernel function it waits in; empty where we may not know."""


class Snapshot(Word, frozen=True, kw_only=True):
    seen: int
    """Processes that were looked at."""
    stuck: tuple[Task, ...]
    """Those in state D, without those that wait there by right."""
    zombies: tuple[int, ...]
    hidden: bool = False
    """Other users' processes are not to be seen (hidepid)."""


class Reader:
    """Reads snapshots of one place; it remembers the kernel threads."""

    def __init__(self) -> None:
        self._looks = 0
        self._resting: set[int] = set()
        """Kernel threads that were not in state D when they were last read."""
        self._rested: set[int] = set()
        """Those that ever were not: the others sleep in D by design."""

    def read(self, place: Place) -> Snapshot:
        pids = {int(name) for name in _listed(place.path("proc")) if name.isdecimal()}
        if self._looks % KERNEL_THREADS_EVERY == 0:
            self._resting, self._rested = set(), self._rested & pids
        self._looks += 1
        base = f"{place.path('proc')}/"
        stuck: list[Task] = []
        zombies: list[int] = []
        for pid in pids - self._resting:
            data = _read(f"{base}{pid}/stat")
            end = data.rfind(b")")
            fields = data[end + 2 :].split(None, 20)
            if len(fields) < 21 or not all(fields[index].isdigit() for index in _NUMBERS):
                continue  # it has just ended
            state, is_kernels = fields[0], int(fields[6]) & _PF_KTHREAD
            if is_kernels and state != b"D":
                self._resting.add(pid)
                self._rested.add(pid)
            elif state == b"Z":
                zombies.append(pid)
            if (state == b"D" and (not is_kernels or pid in self._rested)) or (
                state == b"Z" and fields[17] not in (b"0", b"1")
            ):
                found = len(stuck) < SUSPECTS and _stuck(base, pid, state, data[data.find(b"(") + 1 : end], fields)
                if found:
                    stuck.append(found)
        return Snapshot(
            seen=len(pids),
            stuck=tuple(sorted(stuck, key=lambda task: task.pid)),
            zombies=tuple(sorted(zombies)),
            hidden=bool(pids) and place.live and 1 not in pids,
        )


def _listed(folder: str | os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> bytes:
    """Up to 1 KiB; empty when it is gone or not ours to read. Without the comfort of `Place.text`: it is read often."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1024)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


_BY_RIGHT: Final = re.compile(r"refrigerator|vfork_done|^(?:_?do_fork|kernel_clone)$")
"""Frozen (a paused container, a suspended job; since Linux 6.1 see `frozen`), or a parent that waits for its vfork."""


def _stuck(base: str, pid: int, state: bytes, name: bytes, fields: list[bytes]) -> Task | None:
    """None when it waits by right, or is a zombie without a thread in state D."""
    folder = f"{base}{pid}"
    if state == b"Z":
        threads = (f"{folder}/task/{thread}" for thread in _listed(f"{folder}/task")[:THREADS])
        folder = next((thread for thread in threads if _state(_read(f"{thread}/stat")) == b"D"), "")
        if not folder:
            return None
    wchan = clean_text(_read(f"{folder}/wchan").decode(errors="replace").strip(), 64)
    if _BY_RIGHT.search(wchan):
        return None
    schedule = _read(f"{folder}/schedstat").split()
    ran = schedule[2:3] if len(schedule) == 3 else []
    return Task(
        pid=pid,
        name=clean_text(name.decode(errors="replace"), 32),
        start=int(fields[19]),
        runs=int(ran[0]) if ran and ran[0].isdigit() else int(fields[11]) + int(fields[12]),
        wchan="" if wchan == "0" else wchan,
    )


def frozen(place: Place, pid: int) -> bool:
    """Whether its freezer cgroup (v1) is frozen: that is state D wherever it happens to be. In v2 it is state S."""
    for line in (place.text(f"proc/{pid}/cgroup") or "").splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if "freezer" in kinds.split(","):
            state = place.text(f"sys/fs/cgroup/freezer{path}/freezer.state", 64) or ""
            return state.startswith("FR")
    return False


def _state(stat: bytes) -> bytes:
    end = stat.rfind(b")")
    return stat[end + 2 : end + 3]


def read_threads(place: Place) -> tuple[int | None, int | None]:
    """Threads of the node, and how many there may be."""
    load = re.search(r" \d+/(\d{1,9}) ", place.text("proc/loadavg", 256) or "")
    limits = [place.number(f"proc/sys/kernel/{name}") for name in ("pid_max", "threads-max")]
    return int(load[1]) if load else None, min((limit for limit in limits if limit), default=None)


def read_files(place: Place) -> tuple[int | None, int | None]:
    """Open files of the node, and how many there may be."""
    found = re.match(r"(\d{1,19})\s+\d+\s+(\d{1,19})\s*$", place.text("proc/sys/fs/file-nr", 256) or "")
    return (int(found[1]), int(found[2])) if found else (None, None)
