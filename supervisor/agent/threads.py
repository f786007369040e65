"""Whether the threads of a rank can ever go on by themselves: read from /proc, without stopping anything.

A thread that waits for a futex of its own process, with no time-out, is woken by another thread of that process or
never. When all threads of a rank wait like that and none of them has run in between, no thread is left that could wake
them: a deadlock. A thread that sleeps, polls, reads, waits for a program, a socket, a file or a lock that another
process may hold is in another call, or in one with a time-out, and proves nothing.
"""

from __future__ import annotations

import os
import platform
from typing import Final, NamedTuple

MOST_THREADS: Final = 1024
MAPS_CHARS: Final = 1 << 20
_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""The number of the system call; None: not known for this machine, and nothing is ever proven."""
_WAITS: Final = frozenset({0, 6, 9, 13})
"""FUTEX_WAIT, LOCK_PI, WAIT_BITSET, LOCK_PI2."""
_PRIVATE: Final = 128
_COMMAND: Final = 127
RUNTIME: Final = frozenset(
    {
        "gloo_tcp_loop",
        "pt_tcpstore",
        "pt_tcpstore_uv",
        "pt_workerserver",
        "pt_nccl_watchdg",
        "pt_nccl_heartbt",
        "pt_nccl_monitor",
    }
)
"""Names of torch's own threads that move the bytes of collectives and watch them. They wake no other thread."""
_NEVER_AWAITED: Final = (2, 4, 5, 6, 7, 8, 11, 31, 32, 33)
"""INT, which Python itself always handles; ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS: faults of the process, which
`faulthandler` handles; the C library's own. A handler of any other signal is the script's, and may release a lock:
of SIGTERM, too, for ranks have no handler of it by torchrun, torch or accelerate."""


class FutexWait(NamedTuple):
    """A thread waits for another one of its process."""

    address: int
    """Of what it waits for."""
    timed: bool


def waiting(call: str, futex: int | None = _FUTEX) -> FutexWait | None:
    """What this text of /proc/PID/task/TID/syscall says; None where the thread does something else."""
    words = call.split()
    if futex is None or len(words) < 7 or words[0] != str(futex):
        return None
    operation = int(words[2], 16)
    if not operation & _PRIVATE or operation & _COMMAND not in _WAITS:
        return None
    return FutexWait(int(words[1], 16), int(words[4], 16) != 0)


def interpreter_data(maps: str) -> list[tuple[int, int]]:
    """Where Python keeps the data that all threads share, its lock (the GIL) among them (text of /proc/PID/maps)."""
    found: list[tuple[int, int]] = []
    for line in maps.splitlines():
        fields = line.split(None, 5)
        begin, _, end = fields[0].partition("-")
        span = int(begin, 16), int(end, 16)
        name = fields[5].rsplit("/", 1)[-1] if len(fields) > 5 else ""
        of_python = name.startswith(("python", "libpython"))
        if fields[1].startswith("rw") and (of_python or (not name and found and found[-1][1] == span[0])):
            found.append(span)  # what has no name and follows is what begins as zeros
    return found


def can_be_woken(status: str) -> bool:
    """Whether the process catches a signal that somebody may send to end a wait (text of /proc/PID/status)."""
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return bool(caught & ~sum(1 << (one - 1) for one in _NEVER_AWAITED))


def blocked(pid: int, spared: int | None = None) -> tuple[tuple[int, int], ...] | None:
    """(thread, how often it has run) of all that wait for ever; None as soon as one does not.

    The runtime's threads and `spared` (our beacon's) do not count. Nor do those that wait for Python's lock: they go on
    when its holder does. Reads three small files of each thread, and stops at the first that may go on: of a rank that
    works that is the first one.
    """
    found: list[tuple[int, int]] = []
    shared: list[tuple[int, int]] | None = None
    try:
        tasks = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
        if len(tasks) > MOST_THREADS:
            return None
        for task in tasks:
            folder = f"/proc/{pid}/task/{task}"
            if task == spared or (task != pid and _read(f"{folder}/comm").strip() in RUNTIME):
                continue
            wait = waiting(_read(f"{folder}/syscall"))
            if wait is None:
                return None
            if wait.timed:
                shared = interpreter_data(_whole(f"/proc/{pid}/maps")) if shared is None else shared
                if not any(begin <= wait.address < end for begin, end in shared):
                    return None
                continue
            found.append((task, int(_read(f"{folder}/schedstat").split()[2])))
        return tuple(found) if found and not can_be_woken(_read(f"/proc/{pid}/status")) else None
    except (OSError, ValueError, IndexError):  # it is going away, or we may not look
        return None


def thread_waits_for_ever(pid: int, thread: int) -> bool:
    """The same of one thread."""
    try:
        wait = waiting(_read(f"/proc/{pid}/task/{thread}/syscall"))
    except (OSError, ValueError):
        return False
    return wait is not None and not wait.timed


def _whole(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read(MAPS_CHARS)


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)
