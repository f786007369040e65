"""Reading /proc of a rank: state letter, CPU time, main-thread switches, bytes moved. A few microseconds each."""

from __future__ import annotations

import os

from diagnosis.signals import ProcessState, Word

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATES = frozenset("RSDTtZX")


class ProcessReading(Word, frozen=True, kw_only=True):
    state: ProcessState
    start_time: int
    cpu_s: float
    switches: int
    read_bytes: int
    """Bytes it asked to read (page cache included; what it sends over sockets is not in either count)."""
    written_bytes: int


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 8192).decode(errors="replace")
    finally:
        os.close(descriptor)


def _number(text: str, key: str) -> int:
    start = text.find(key)
    return int(text[start + len(key) :].split(None, 1)[0]) if start >= 0 else 0


def read_process(pid: int) -> ProcessReading | None:
    """None when the process is gone."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = stat[stat.rfind(")") + 2 :].split()
    state = fields[0]
    try:
        switches = _number(_read(f"/proc/{pid}/task/{pid}/status"), "\nvoluntary_ctxt_switches:")
        io = _read(f"/proc/{pid}/io")
    except OSError:  # another user's process, or it is going away
        switches, io = 0, ""
    return ProcessReading(
        state=state if state in _STATES else "?",  # type: ignore[arg-type]
        start_time=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        switches=switches,
        read_bytes=_number(io, "rchar:"),
        written_bytes=_number(io, "wchar:"),
    )


def files_open_for_writing(pid: int, limit: int = 256) -> list[str]:
    """Paths of regular files that the process has open for writing; at most `limit` descriptors are looked at."""
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
            info = _read(f"/proc/{pid}/fdinfo/{descriptor}")
            flags = int(info.split("flags:", 1)[1].split(None, 1)[0], 8)
        except (OSError, IndexError, ValueError):
            continue
        if flags & os.O_ACCMODE:
            paths.append(path.removesuffix(" (deleted)"))
    return paths
