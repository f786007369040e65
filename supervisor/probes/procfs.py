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
    switches: int | None
    """Voluntary switches of the main thread; None: they were not asked for."""
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


class ProcessReader:
    """Reads one process again and again. Its files are kept open: opening them anew costs more than reading them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._open: dict[str, int] = {}

    def read(self, *, switches: bool = True) -> ProcessReading | None:
        """None when the process is gone (another one that gets its pid later is never taken for it).

        `switches`: they stand in a file that costs the kernel as much to write as the others together.
        """
        stat = self._text("stat")
        if not stat:
            return None
        fields = stat[stat.rfind(")") + 2 :].split()
        # Empty: another user's process, or it is going away.
        status = self._text(f"task/{self.pid}/status") if switches else ""
        io = self._text("io")
        return ProcessReading(
            state=fields[0] if fields[0] in _STATES else "?",  # type: ignore[arg-type]
            start_time=int(fields[19]),
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            switches=_number(status, "\nvoluntary_ctxt_switches:") if switches else None,
            read_bytes=_number(io, "rchar:"),
            written_bytes=_number(io, "wchar:"),
        )

    def _text(self, name: str) -> str:
        try:
            descriptor = self._open.get(name)
            if descriptor is None:
                descriptor = self._open[name] = os.open(f"/proc/{self.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(descriptor, 8192, 0).decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def written_bytes(pid: int) -> int:
    """Bytes the process asked to write since it started; 0 when that cannot be seen."""
    try:
        return _number(_read(f"/proc/{pid}/io"), "wchar:")
    except OSError:
        return 0


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
