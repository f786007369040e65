"""Has the kernel read a checkpoint into the page cache: `python prefetch_child.py PATH RANKS`, a child of the agent.

A process of its own, because a file system that hangs would take the agent along; only what Python has loaded anyway is
imported. RANKS are those of this node (`0,1`), or empty: of a distributed checkpoint only their files are read.
It keeps `MARGIN_BYTES` of memory free, copies nothing (WILLNEED), and waits for each window before the next.
"""

import os
import stat
import sys

MARGIN_BYTES = 4 << 30
"""Of memory that stays available, of the machine and within the limits of the cgroup."""
WINDOW_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20
"""The kernel takes about so much at once."""
MOST_FILES = 100_000
NICENESS = 10


def main() -> None:
    path = os.fsencode(sys.argv[1])
    ranks = {number.encode() for number in sys.argv[2].split(",") if number}
    parent = os.getppid()
    os.nice(NICENESS)
    for number, file in enumerate(_files(path, ranks)):
        if number >= MOST_FILES or not _read(file, parent):
            return


def _files(path: bytes, ranks: "set[bytes]") -> "list[bytes]":
    """The largest first: optimizer state and weights are what loading waits for."""
    if not os.path.isdir(path):
        return [path]
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            if not name.endswith(b".distcp") or not ranks or name.lstrip(b"_").partition(b"_")[0] in ranks:
                file = os.path.join(folder, name)
                found.append((os.lstat(file).st_size, file))
        if len(found) > MOST_FILES:
            break
    return [file for _, file in sorted(found, reverse=True)]


def _read(path: bytes, parent: int) -> bool:
    """Whether to go on with the next file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    about = os.fstat(descriptor)
    size = about.st_size if stat.S_ISREG(about.st_mode) else 0
    for start in range(0, size, WINDOW_BYTES):
        end = min(size, start + WINDOW_BYTES)
        if os.getppid() != parent or bytes_to_spare() < end - start:
            return False
        for at in range(start, end, CHUNK_BYTES):
            os.posix_fadvise(descriptor, at, min(CHUNK_BYTES, end - at), os.POSIX_FADV_WILLNEED)
        os.pread(descriptor, 1, end - 1)  # wait for it
    os.close(descriptor)
    return True


def bytes_to_spare() -> int:
    """What may still be read without anything being short of memory."""
    available = _field(b"/proc/meminfo", b"MemAvailable:") << 10
    return min(available, _left_in_cgroup(available)) - MARGIN_BYTES


def _left_in_cgroup(most: int) -> int:
    """Version 2 only. Page cache counts there; what was not used lately is given back first."""
    path = next((line[3:].strip() for line in _lines(b"/proc/self/cgroup") if line.startswith(b"0::")), b"/")
    folder = os.path.normpath(b"/sys/fs/cgroup/" + path)
    left = most
    while folder.startswith(b"/sys/fs/cgroup"):
        limit = b"".join(_lines(folder + b"/memory.max")).strip()
        if limit.isdigit():
            used = int(b"".join(_lines(folder + b"/memory.current")) or 0)
            left = min(left, int(limit) - used + _field(folder + b"/memory.stat", b"inactive_file"))
        folder = os.path.dirname(folder)
    return left


def _field(path: bytes, name: bytes) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), 0)


def _lines(path: bytes) -> "list[bytes]":
    try:
        with open(path, "rb") as file:
            return file.readlines()
    except OSError:
        return []


if __name__ == "__main__":
    main()
