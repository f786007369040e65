"""The folder of a ledger: each writer appends to a file of its own, and a reader puts all of them together.

On a shared file system neither a lock nor an append by two hosts is safe, so nobody shares a file. A writer appends to
its file for a day, then begins another; files that nobody appends to any more are put together by a process of the
same user (`compact`): the new file is whole on the disk before the old ones go, and a record that two files have counts
once. So two who do this at once do no harm, and neither does one that dies in between.

Everything here may block for as long as the file system does: callers have deadlines (`supervisor.blocking`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from recovery.ledger import (
    DAY_S,
    LINE_BYTES,
    VERSION,
    LedgerEntry,
    LedgerLine,
    LedgerRecord,
    TestResult,
    compacted,
    encode_entry,
    read_line,
)

APPEND_S: Final = DAY_S
"""A writer appends to one file for so long."""
SEALED_S: Final = 2 * DAY_S
"""So long after a file was begun, by its name, nobody appends to it, whichever clock is right to a day."""
FILE_BYTES: Final = 16 << 20
FILES_READ: Final = 4096
BYTES_READ: Final = 256 << 20
FILE_READ: Final = 4 * FILE_BYTES
"""Of one file: a broken one must not hide all others."""
PIECE_BYTES: Final = 4 << 20
"""So much of a file is in memory at once, besides what its lines say."""
ENTRIES_READ: Final = 1_000_000
"""Of all files; one takes about 1 KB of memory."""
COMPACT_FILES, COMPACT_BYTES = 8, 4 << 20
"""From so many own files, or so many bytes in several, they are put together."""
PROBLEMS_KEPT: Final = 20
TRIES: Final = 10
_NAME: Final = re.compile(r"(\d{9,11})-([A-Za-z0-9._-]{1,120})\.jsonl")
_PART: Final = ".part-"


class LedgerRead(NamedTuple):
    """What all files say."""

    entries: tuple[LedgerEntry, ...]
    problems: tuple[str, ...]
    """What was left out, and why, in words."""


@dataclasses.dataclass
class _File:
    """What was read of one file so far."""

    inode: int
    own: bool
    end: int = 0
    """Behind the last whole line."""
    size: int = 0
    numbers: int = 0
    """Lines so far."""
    modified_at: float = 0.0
    cut: bool = False
    """It was read in part: there is more than is read."""
    lines: list[LedgerLine] = dataclasses.field(default_factory=list)
    tested: dict[str, LedgerLine] = dataclasses.field(default_factory=dict)
    """By node, its newest test that did not fail, where the others are not kept."""
    problems: list[str] = dataclasses.field(default_factory=list)


class LedgerFolder:
    """One process's way to the folder. Not for several threads at once.

    `all_tests`: else only the newest test of a node in each file is kept in memory, of those that did not fail. Most
    records are such tests, and a job has no use for them.
    """

    def __init__(
        self,
        folder: str | Path,
        host: str = "",
        *,
        all_tests: bool = True,
        most_bytes: int = BYTES_READ,
        most_entries: int = ENTRIES_READ,
    ) -> None:
        self.folder = Path(folder)
        self._host, self._all_tests, self._most_bytes, self._most_entries = host, all_tests, most_bytes, most_entries
        name = re.sub(r"[^A-Za-z0-9._-]", "_", host or socket.gethostname())[:60]
        self.writer = f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
        self._number = 0
        self._path: Path | None = None
        self._begun = 0.0
        self._written = 0
        self._files: dict[str, _File] = {}

    # ----- reading -----

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Changes when a file does. Raises OSError."""
        found = []
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):
                about = os.stat(self.folder / name, follow_symlinks=False)
                found.append((name, about.st_size, about.st_mtime_ns))
        return tuple(found)

    def read(self, now: float) -> LedgerRead:
        """Raises OSError where the folder cannot be read; a file that cannot is told."""
        for _ in range(TRIES):
            names = self._names()
            problems: list[str] = []
            self._files = {name: known for name, known in self._files.items() if name in names}
            try:
                self._read_all(names[-FILES_READ:], now, problems)
            except FileNotFoundError:
                continue  # somebody put files together meanwhile: what it said is in another one
            break
        else:
            raise OSError(errno.EAGAIN, "its files change faster than they can be read", str(self.folder))
        if len(names) > FILES_READ:
            problems.append(f"{len(names) - FILES_READ} older files are left out: there are more than {FILES_READ}")
        for name, known in self._files.items():
            problems += [f"{name}: {problem}" for problem in known.problems]
        more = len(problems) - PROBLEMS_KEPT
        told = (*problems[:PROBLEMS_KEPT], *([f"and {more} more"] if more > 0 else []))
        lines = (line for known in self._files.values() for line in (*known.lines, *known.tested.values()))
        return LedgerRead(tuple(line.entry for line in lines if line.entry is not None), told)

    def _names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))

    def _read_all(self, names: Sequence[str], now: float, problems: list[str]) -> None:
        left, entries = self._most_bytes, self._most_entries
        for name in reversed(names):
            try:
                known = self._read_file(name, now, left, entries)
                left -= min(known.size, FILE_READ)
                entries -= len(known.lines) + len(known.tested)
            except FileNotFoundError:
                raise
            except OSError as error:
                self._files.pop(name, None)
                problems.append(f"{name}: {error.strerror or error}")
        if any(known.cut for known in self._files.values()):
            problems.append(
                "some records, and cordons may be among them, are left out: the oldest of more than "
                f"{self._most_bytes >> 20} MiB or {self._most_entries} records, or the end of a file of more than "
                f"{FILE_READ >> 20} MiB"
            )

    def _read_file(self, name: str, now: float, most: int, entries: int) -> _File:
        """Read on behind what is known of it: so many bytes from its begin, and so many records."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(self.folder / name, flags)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "it is no file", name)
            known = self._files.get(name)
            if known is None or known.inode != about.st_ino or about.st_size < known.end:
                known = self._files[name] = _File(about.st_ino, own=about.st_uid == os.geteuid())
            known.size, known.modified_at = about.st_size, about.st_mtime
            limit, before = min(max(0, most), about.st_size, FILE_READ), -1
            while before < known.end < limit and len(known.lines) + len(known.tested) < entries:
                before = known.end
                file.seek(known.end)
                self._take_lines(known, file.read(min(PIECE_BYTES, limit - known.end)), now)
            known.cut = known.end < about.st_size and (limit < about.st_size or before != known.end)
        return known

    def _take_lines(self, known: _File, data: bytes, now: float) -> None:
        """A line without its end is being written just now, or was when its writer died."""
        whole, bar, rest = data.rpartition(b"\n")
        for raw in whole.split(b"\n") if bar else ():
            known.numbers += 1
            if not raw:
                continue
            line = read_line(raw, now)
            if line.entry is not None:
                self._keep(known, line._replace(raw=b""), line.entry)
            elif line.newer:
                known.lines.append(line)
            if line.problem and len(known.problems) < PROBLEMS_KEPT:
                known.problems.append(f"line {known.numbers} {line.problem}, and is left out")
        known.end += len(whole) + len(bar)
        if len(rest) > LINE_BYTES:
            known.problems.append(f"what follows line {known.numbers} is no line, and is left out")
            known.end += len(rest)

    def _keep(self, known: _File, line: LedgerLine, entry: LedgerEntry) -> None:
        what = entry.what
        if self._all_tests or not isinstance(what, TestResult) or what.verdict == "fail":
            known.lines.append(line)
            return
        other = known.tested.get(what.node)
        if other is None or other.entry is None or other.entry.at < entry.at:
            known.tested[what.node] = line

    # ----- writing -----

    def entry(self, what: LedgerRecord, at: float, *, by: str, job: str = "", name: str = "") -> LedgerEntry:
        """A record as it is to be written. `name`: what is said twice has the same one."""
        self._number += 1
        own = name or f"{self.writer}-{self._number}"
        return LedgerEntry(v=VERSION, id=own, at=at, by=by, job=job, writer=self.writer, what=what)

    def append(self, entries: Iterable[LedgerEntry], now: float) -> None:
        """They are on stable storage when this returns. Raises OSError; then some may be, and may be given again."""
        lines = [encode_entry(entry) for entry in entries]
        long = [line for line in lines if len(line) > LINE_BYTES]
        if long:
            raise OSError(errno.EMSGSIZE, f"a record is longer than {LINE_BYTES} bytes", str(self.folder))
        data = b"".join(line + b"\n" for line in lines)
        try:
            try:
                self._write(data, now)
            except FileNotFoundError:  # somebody has removed it
                self._path = None
                self._write(data, now)
        except OSError:
            self._path = None  # it may end within a line: nothing more is written to it
            raise
        self._written += len(data)

    def _write(self, data: bytes, now: float) -> None:
        if self._path is None or now >= self._begun + APPEND_S or self._written + len(data) > FILE_BYTES:
            self._begin(now)
        assert self._path is not None
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.closing(_Descriptor(os.open(self._path, flags))) as file:
            if os.write(file.number, data) != len(data):
                raise OSError(errno.ENOSPC, "a record was written in part", str(self._path))
            os.fsync(file.number)
            if os.fstat(file.number).st_ino != os.stat(self._path, follow_symlinks=False).st_ino:
                raise FileNotFoundError(errno.ENOENT, "it is another file now", str(self._path))

    def _begin(self, now: float) -> None:
        self._path = self._make(self.folder / f"{int(now)}-{self.writer}-{os.urandom(2).hex()}.jsonl")
        self._begun, self._written = now, 0

    @staticmethod
    def _make(path: Path) -> Path:
        """Every user of the folder may read it, whatever this one's umask is."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.closing(_Descriptor(os.open(path, flags, 0o644))) as file:
            os.fchmod(file.number, 0o644)
        _sync_folder(path.parent)
        return path

    # ----- keeping it small -----

    def compact(self, now: float) -> int:
        """Put own files that nobody appends to any more together, where that is worth it; how many went.

        Raises OSError.
        """
        sealed = self._sealed(now)
        size = sum(sealed.values())
        if len(sealed) < 2 or (len(sealed) < COMPACT_FILES and size < COMPACT_BYTES):
            return 0
        all_of_it = LedgerFolder(self.folder, self._host, most_bytes=self._most_bytes, most_entries=self._most_entries)
        return all_of_it._put_together(sealed, now)

    def _sealed(self, now: float) -> dict[str, int]:
        """Own files that nobody appends to any more, and their sizes."""
        found = {}
        for name in self._names()[-FILES_READ:]:
            if _begun_at(name) < now - SEALED_S:
                with contextlib.suppress(FileNotFoundError):
                    about = os.stat(self.folder / name, follow_symlinks=False)
                    if about.st_uid == os.geteuid() and about.st_mtime < now - APPEND_S:
                        found[name] = about.st_size
        return found

    def _put_together(self, names: Iterable[str], now: float) -> int:
        """Files that were read to their end: what was not read is not lost."""
        read = self.read(now)
        own = {name: self._files[name] for name in names if name in self._files}
        sealed = {name: known for name, known in own.items() if known.own and not known.cut}
        if len(sealed) < 2:
            return 0
        lines = compacted([line for known in sealed.values() for line in known.lines], read.entries, now)
        for data in _in_files(lines):
            self._write_whole(data, now)
        gone = 0
        for name, known in sealed.items():
            path = self.folder / name
            with contextlib.suppress(OSError):
                about = os.stat(path, follow_symlinks=False)
                if (about.st_ino, about.st_size) == (known.inode, known.size):
                    os.unlink(path)
                    gone += 1
        self._tidy(now)
        return gone

    def _write_whole(self, data: bytes, now: float) -> None:
        name = f"{int(now)}-whole-{self.writer}-{os.urandom(2).hex()}.jsonl"
        part = self._make(self.folder / f"{_PART}{name}")
        try:
            with open(part, "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        _sync_folder(self.folder)

    def _tidy(self, now: float) -> None:
        """What a process of this user left when it died while it put files together."""
        for name in os.listdir(self.folder):
            path = self.folder / name
            with contextlib.suppress(OSError):
                about = os.stat(path, follow_symlinks=False)
                if name.startswith(_PART) and about.st_uid == os.geteuid() and about.st_mtime < now - APPEND_S:
                    os.unlink(path)


class _Descriptor:
    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        os.close(self.number)


def _begun_at(name: str) -> float:
    found = _NAME.fullmatch(name)
    return float(found[1]) if found is not None else float("inf")


def _in_files(lines: Iterable[bytes]) -> Iterator[bytes]:
    """None of them larger than a file of a writer."""
    data = bytearray()
    for line in lines:
        if data and len(data) + len(line) >= FILE_BYTES:
            yield bytes(data)
            data.clear()
        data += line + b"\n"
    yield bytes(data)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
