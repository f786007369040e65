"""Copying files so that nothing is ever seen half: below one folder, not through links, under a temporary name, then
fsync and rename. Names from peers are checked here once more, whoever checked them before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from recovery.tiers import why_bad_name
from supervisor.errors import InternalError

CHUNK: Final = 1 << 20
SYNC_EVERY: Final = 64 << 20
"""Written bytes are sent to the disk in pieces: one fsync of a whole checkpoint would stall everybody else's."""
PARTIAL: Final = ".unbroken-partial"
"""Ends the temporary name of a file that is being written."""
KEEP_FREE: Final = 0.05
"""So much of a file system stays free of our copies."""
BYTES_PER_S: Final = 512 << 20
IDLE_SHARE: Final = 0.25
"""Of the time that a piece takes: a slow disk or link belongs to the ranks first."""


class CopyError(InternalError):
    """A copy cannot be made. The text says why."""


class GaveWay(CopyError):
    """A copy ends: something more urgent is to be done, or it is of no use any more."""


class SourceChanged(CopyError):
    """The file was changed while it was read."""


class CopyPace:
    """How fast one stream goes: at most `BYTES_PER_S`, and never without pauses. `hurry`: ranks wait for it."""

    def __init__(self, sleep: Callable[[float], object] = time.sleep) -> None:
        self._sleep = sleep
        self.hurry = False

    def after(self, count: int, took_s: float) -> None:
        if not self.hurry:
            self._sleep(pause_s(count, took_s))


def pause_s(count: int, took_s: float) -> float:
    """After `count` bytes that took so long."""
    return min(max(count / BYTES_PER_S - took_s, took_s * IDLE_SHARE, 0.0), 5.0)


class Copied(NamedTuple):
    size: int
    crc: int


# ----- below one folder, without links -----


def open_folder(base: Path, parts: tuple[str, ...], *, make: bool = False) -> int:
    """A descriptor of the folder `parts` below `base`. Links are refused. Raises OSError."""
    held = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o777, dir_fd=held)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held)
            os.close(held)
            held = below
    except BaseException:
        os.close(held)
        raise
    return held


def checked(name: str) -> tuple[str, ...]:
    """The components of a relative name. Raises CopyError."""
    if why := why_bad_name(name):
        raise CopyError(f"{name[:80]!r}: {why}")
    return tuple(name.split("/"))


@contextlib.contextmanager
def reading(base: Path, name: str) -> Iterator[int]:
    """A descriptor of a regular file below `base`. Raises OSError, CopyError."""
    parts = checked(name)
    folder = open_folder(base, parts[:-1])
    try:
        descriptor = os.open(
            parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder
        )
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CopyError(f"{name[:80]!r} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def look(base: Path, name: str) -> os.stat_result | None:
    """What is there, if it is a regular file reached without links; else None."""
    try:
        with reading(base, name) as descriptor:
            return os.fstat(descriptor)
    except (OSError, CopyError):
        return None


class NewFile:
    """A file below `base` that appears under its name, whole, when `finish` is called; else it never was."""

    def __init__(self, base: Path, name: str, size: int) -> None:
        """Raises OSError, CopyError: also where there is no room."""
        self.name, self.size = name, size
        *above, self._base = checked(name)
        self._temporary = f".{self._base}"[: 250 - len(PARTIAL)] + PARTIAL
        self._folder = open_folder(base, tuple(above), make=True)
        self._file = -1
        try:
            need_room(self._folder, size)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._folder)  # of a copy that was cut off
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._temporary, flags, 0o666, dir_fd=self._folder)
        except BaseException:
            self.close()
            raise
        self.written = 0
        self.crc = 0
        self._synced = 0

    def write(self, data: bytes | memoryview) -> None:
        """Raises OSError; CopyError for more than was announced."""
        if self.written + len(data) > self.size:
            raise CopyError(f"{self.name[:80]!r} is longer than announced")
        self.crc = zlib.crc32(data, self.crc)
        view = memoryview(data)
        while view:
            count = os.write(self._file, view)
            view = view[count:]
            self.written += count
        if self.written - self._synced >= SYNC_EVERY:
            os.fdatasync(self._file)
            _forget_pages(self._file)
            self._synced = self.written

    def finish(self, crc: int | None = None, mtime_ns: int | None = None) -> Copied:
        """Make it appear. Raises OSError; CopyError where it is not what was announced."""
        if self.written != self.size or crc not in (None, self.crc):
            raise CopyError(f"{self.name[:80]!r} did not arrive whole")
        if mtime_ns is not None:
            os.utime(self._file, ns=(mtime_ns, mtime_ns))
        os.fsync(self._file)
        _forget_pages(self._file)
        os.rename(self._temporary, self._base, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)
        return Copied(self.written, self.crc)

    def close(self) -> None:
        """What was not finished is gone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._folder)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forget_pages(descriptor: int) -> None:
    """Our copies must not push what ranks read out of the page cache."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def need_room(folder: int | str | Path, size: int, *, reserve: int = 0, share: float = KEEP_FREE) -> None:
    """Raises OSError (ENOSPC) where a copy of `size` bytes would leave less free than `reserve` bytes, or than that
    share of the file system."""
    found = os.fstatvfs(folder) if isinstance(folder, int) else os.statvfs(folder)
    kept = max(reserve, int(share * found.f_blocks * found.f_frsize))
    if found.f_blocks and found.f_bavail * found.f_frsize < size + kept:
        raise OSError(errno.ENOSPC, f"no room for {size} bytes beside a reserve of {kept} bytes")


def pieces(descriptor: int, pace: CopyPace) -> Iterator[bytes]:
    """The file's content. What the caller does with a piece counts as time that it took. Raises SourceChanged."""
    before = os.fstat(descriptor)
    left = before.st_size
    while left:
        began = time.monotonic()
        data = os.read(descriptor, min(CHUNK, left))
        if not data:
            raise SourceChanged("it became shorter while it was read")
        left -= len(data)
        yield data
        pace.after(len(data), time.monotonic() - began)
    after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise SourceChanged("it was written while it was read")


def copy(source: Path, name: str, target: Path, new_name: str, pace: CopyPace, count: Callable[[int], None]) -> Copied:
    """Copy one file, with its time. `count` is told of each piece. Raises OSError, CopyError."""
    with reading(source, name) as descriptor:
        about = os.fstat(descriptor)
        with NewFile(target, new_name, about.st_size) as new:
            for piece in pieces(descriptor, pace):
                new.write(piece)
                count(len(piece))
            return new.finish(mtime_ns=about.st_mtime_ns)


def checksum(base: Path, name: str, word: Callable[[], object], every_s: float) -> Copied:
    """`word` is called every so often. Raises OSError, CopyError."""
    crc, size = 0, 0
    said = time.monotonic()
    with reading(base, name) as descriptor:
        while data := os.read(descriptor, CHUNK):
            crc, size = zlib.crc32(data, crc), size + len(data)
            if time.monotonic() - said >= every_s:
                word()
                said = time.monotonic()
    return Copied(size, crc)


def make_private(folder: Path) -> Path:
    """A folder for this user alone; made where nothing is. Raises OSError, CopyError."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CopyError(f"{folder} is no folder of this user alone: remove it, or `chmod 700` it")
    return folder


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_ours(folder: Path) -> None:
    """Remove a folder that this program has made. `rmtree` follows no links."""
    shutil.rmtree(folder, ignore_errors=True)
