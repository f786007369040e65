"""Reading /proc of a rank, without stopping it: state letter, CPU time, main-thread switches, bytes moved, open files,
connections, and whether its threads can ever go on by themselves.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Final, NamedTuple

from diagnosis.signals import ProcessState

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATES: Final[dict[bytes, ProcessState]] = {
    b"R": "R",
    b"S": "S",
    b"D": "D",
    b"T": "T",
    b"t": "t",
    b"Z": "Z",
    b"X": "X",
}


class ProcessReading(NamedTuple):
    state: ProcessState
    cpu_s: float
    switches: int | None
    """Voluntary switches of the main thread; None: they were not asked for."""
    read_bytes: int
    """Bytes that it read, also from the page cache. Sockets count in neither."""
    written_bytes: int


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 8192).decode(errors="replace")
    finally:
        os.close(descriptor)


def _number(text: bytes, key: bytes) -> int:
    start = text.find(key)
    return int(text[start + len(key) :].split(None, 1)[0]) if start >= 0 else 0


class RankProcessReader:
    """Reads one process again and again. Its files stay open: opening them costs more than reading them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._open: dict[str, int] = {}

    def read(self, *, switches: bool = True) -> ProcessReading | None:
        """None when the process is gone (another one that gets its pid later is never taken for it).

        `switches`: they are in a file that costs the kernel as much as the others together.
        """
        stat = self._bytes("stat")
        if not stat:
            return None
        fields = stat[stat.rfind(b")") + 2 :].split(None, 13)
        # Empty: another user's process, or it is going away.
        status = self._bytes(f"task/{self.pid}/status") if switches else b""
        read, written = self._asked()
        return ProcessReading(
            _STATES.get(fields[0], "?"),
            (int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            _number(status, b"\nvoluntary_ctxt_switches:") if switches else None,
            read,
            written,
        )

    def _asked(self) -> tuple[int, int]:
        io = self._bytes("io").split(None, 4)
        return (int(io[1]), int(io[3])) if len(io) > 3 else (0, 0)

    def _bytes(self, name: str) -> bytes:
        descriptor = self._open.get(name)
        try:
            if descriptor is None:
                descriptor = self._open[name] = os.open(f"/proc/{self.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(descriptor, 4096, 0)
        except OSError:
            return b""

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class ProcessIdentity:
    """One process, whoever gets its pid later. `is_there()` may be asked again and again."""

    def __init__(self, pid: int, start_time: int) -> None:
        """`start_time`: in clock ticks after boot, as its /proc/PID/stat has it."""
        self._pid = pid
        self._start_time = start_time
        self._descriptor: int | None = None

    def is_there(self) -> bool:
        """False when it is gone or a zombie. Raises OSError when that cannot be read (no descriptor or memory left)."""
        first = self._descriptor is None
        try:
            if self._descriptor is None:
                self._descriptor = os.open(f"/proc/{self._pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            stat = os.pread(self._descriptor, 2048, 0)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        fields = stat[stat.rfind(b")") + 2 :].split(None, 20)
        if first and int(fields[19]) != self._start_time:
            self.close()  # another process has its pid
            return False
        return fields[0] not in (b"Z", b"X")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def files_open_for_writing(pid: int, limit: int = 256, *, wanted: Callable[[str], bool] = bool) -> list[str]:
    """Paths of the regular files (among those that are `wanted`) that the process has open for writing.

    At most `limit` descriptors are looked at.
    """
    paths: list[str] = []
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")[:limit]
    except OSError:
        return paths
    for descriptor in descriptors:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if not path.startswith("/") or path.startswith(("/dev/", "/proc/", "/sys/")):
                continue
            path = path.removesuffix(" (deleted)")
            if not wanted(path):
                continue
            info = _read(f"/proc/{pid}/fdinfo/{descriptor}")
            flags = int(info.split("flags:", 1)[1].split(None, 1)[0], 8)
        except (OSError, IndexError, ValueError):
            continue
        if flags & os.O_ACCMODE:
            paths.append(path)
    return paths


def descendants(pid: int, limit: int = 64) -> list[int]:
    """Processes that `pid` and its children started, and that live; at most `limit`."""
    found: list[int] = []
    pending = [pid]
    while pending and len(found) < limit:
        one = pending.pop()
        try:
            threads = os.listdir(f"/proc/{one}/task")[:limit]
        except OSError:
            continue
        for thread in threads:
            try:
                children = [int(child) for child in _read(f"/proc/{one}/task/{thread}/children").split()]
            except (OSError, ValueError):  # a kernel without it
                continue
            found += children
            pending += children
    return found[:limit]


# ----- bytes on their way -----


TABLE_BYTES: Final = 4 << 20
MOST_DESCRIPTORS: Final = 4096
GIVEN_UP: Final = 4
"""So often sent again without an answer, nothing is on its way any more: the other end, or the way there, is gone."""


def sends(pid: int) -> bool:
    """Whether bytes of a process are on their way: a slow network is not a collective that hangs.

    Some connection of it has bytes that the other end has not acknowledged yet, and is not given up.
    """
    try:
        unsent = {
            inode
            for table in ("tcp", "tcp6")
            for inode in unacknowledged(_read_table(f"/proc/{pid}/net/{table}").decode(errors="replace"))
        }
        if not unsent:
            return False
        descriptors = os.listdir(f"/proc/{pid}/fd")[:MOST_DESCRIPTORS]
    except OSError:
        return False
    return any(_target(f"/proc/{pid}/fd/{one}") in unsent for one in descriptors)


def unacknowledged(table: str) -> set[str]:
    """The sockets of this text of /proc/PID/net/tcp with bytes on their way, as links of descriptors name them."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and int(fields[4].partition(":")[0], 16) and int(fields[6], 16) < GIVEN_UP:
            found.add(f"socket:[{fields[9]}]")
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read_table(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(TABLE_BYTES)
    except FileNotFoundError:
        return b""


# ----- threads that wait for ever -----
#
# A thread that waits for a futex of its own process, with no time-out, is woken by another thread of that process or
# never. When all threads of a rank wait like that and none of them has run in between, no thread is left that could
# wake them: a deadlock. A thread that sleeps, polls, reads, waits for a program, a socket, a file or a lock that
# another process may hold is in another call, or in one with a time-out, and proves nothing.


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
    return bool(_caught(status) & ~sum(1 << (one - 1) for one in _NEVER_AWAITED))


def handles(pid: int, signal: int) -> bool:
    """Whether the process has a handler of its own for this signal; False where that is not known."""
    try:
        return bool(_caught(_read(f"/proc/{pid}/status")) & 1 << (signal - 1))
    except OSError:
        return False


def _caught(status: str) -> int:
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)


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
