"""The store of past incidents: one SQLite file in a folder that many jobs and clusters may share.

The folder may be on NFS: there is no write-ahead log (it needs memory that all hosts share), every call opens the file
anew and holds a lock only for one short transaction, and one that is locked, damaged, full or of a newer version is an
OSError in words, for the caller to tell once. No job needs anything of it. Several processes may write; what two say of
one incident is put together. Calls may block for as long as the file system does: callers have deadlines
(`supervisor.blocking`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from recovery.incident_memory import (
    DAY_S,
    RECURRENCES_SHOWN,
    WINDOW_S,
    ClosedIncident,
    Correction,
    Recurrence,
    SimilarIncident,
    bounded,
    corrected,
    places,
    read_record,
    recurrence,
)

FILE: Final = "incidents.sqlite"
VERSION: Final = 1
APPLICATION: Final = 0x756E626B
KEEP_S: Final = 3 * 365 * DAY_S
"""What is older goes, unless an operator has corrected it."""
MOST_INCIDENTS: Final = 50_000
MOST_BYTES: Final = 256 << 20
RECORD_BYTES: Final = 64 << 10
BUSY_S: Final = 2.0
"""So long for a lock that another process holds."""
DEADLINE_S: Final = 5.0
"""So long for one call, in which SQLite computes."""
TERMS: Final = 64
"""Of a text that is searched for, the first of them that differ."""
ROWS_READ: Final = 1000
"""That share a place with an incident, the newest."""
MOST_REMOVED: Final = 10_000
"""In one transaction."""
MEMORY_BYTES: Final = 64 << 20
"""Of all that SQLite holds in this process: what is in the file, or computes, is another user's word."""
_ONE_CALL: Final = threading.Lock()
"""A process that closes a file loses its locks on it, whoever has them: one call at a time reads its first bytes."""
_SUPER_JOURNAL: Final = bytes.fromhex("d9d505f920a163d7")
"""At the end of a journal of a transaction over several files. SQLite deletes the file that it names."""
_SCHEMA: Final = (
    "CREATE TABLE incident (id INTEGER PRIMARY KEY, job_id TEXT, name TEXT, opened_at REAL, corrected INT, record)",
    "CREATE UNIQUE INDEX incident_name ON incident (job_id, name)",
    "CREATE INDEX incident_age ON incident (corrected, opened_at)",
    "CREATE TABLE place (incident INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL)",
    "CREATE INDEX place_name ON place (kind, name)",
    "CREATE INDEX place_incident ON place (incident)",
    "CREATE VIRTUAL TABLE words USING fts5 (text)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)
_TERM: Final = re.compile(r"[a-z][a-z0-9]*|(?<![\w.])\d{1,3}(?![\w.])")


def terms(text: str) -> list[str]:
    """The words of a text that are searched: no long numbers, which no two incidents have in common but by chance."""
    return _TERM.findall(text.lower())


class IncidentStore:
    """One process's way to the folder. `most_bytes`: the file's size, to which the oldest incidents go."""

    def __init__(self, folder: str | Path, *, busy_s: float = BUSY_S, most_bytes: int = MOST_BYTES) -> None:
        self.folder = Path(folder)
        self.path = self.folder / FILE
        self._busy_s, self._most_bytes = busy_s, most_bytes

    # ----- reading: raises OSError; where there is no file yet there are no incidents -----

    def similar(
        self, text: str, limit: int = 5, *, before: float = float("inf"), corrected_only: bool = False
    ) -> list[SimilarIncident]:
        """Past incidents whose words are most like those of `text` (BM25), the best first. `before`: opened by then.

        `corrected_only`: those of which an operator has said what they were.
        """
        wanted = list(dict.fromkeys(terms(text)))[:TERMS]
        if not wanted:
            return []
        query = " OR ".join(f'"{term}"' for term in wanted)
        with self._reading() as found:
            rows = found.execute(
                "SELECT record, -bm25(words) FROM words JOIN incident ON incident.id = words.rowid "
                "WHERE words MATCH ? AND opened_at < ? AND corrected >= ? AND length(record) <= ? "
                "ORDER BY bm25(words), incident.id LIMIT ?",
                (query, min(before, 1e12), int(corrected_only), RECORD_BYTES, limit),
            ).fetchall()
        return [SimilarIncident(one, float(score)) for raw, score in rows if (one := read_record(raw)) is not None]

    def recurrences(self, one: ClosedIncident) -> tuple[Recurrence, ...]:
        """What `one`, which need not be in the store, has in common with earlier incidents, the most telling first."""
        told: list[Recurrence] = []
        seen: set[frozenset[int]] = set()
        with self._reading() as found:
            for kind, name in places(one):
                rows = found.execute(
                    "SELECT DISTINCT incident.id, opened_at FROM place JOIN incident ON incident.id = place.incident "
                    "WHERE kind = ? AND place.name = ? AND opened_at BETWEEN ? AND ? "
                    "AND NOT (job_id = ? AND incident.name = ?) ORDER BY opened_at DESC LIMIT ?",
                    (kind, name, one.opened_at - WINDOW_S, one.opened_at, one.job_id, one.incident, ROWS_READ),
                ).fetchall()
                same = frozenset(int(row[0]) for row in rows)
                if not rows or same in seen or len(told) == RECURRENCES_SHOWN:
                    continue
                last = self._record(found, int(rows[0][0]))
                if last is not None:
                    seen.add(same)
                    told.append(recurrence((kind, name), one, len(rows) + 1, float(rows[-1][1]), last))
        return tuple(told)

    def all(self, *, corrected_only: bool = False) -> list[ClosedIncident]:
        """The oldest first."""
        with self._reading() as found:
            rows = found.execute(
                "SELECT record FROM incident WHERE corrected >= ? AND length(record) <= ? LIMIT ?",
                (int(corrected_only), RECORD_BYTES, MOST_INCIDENTS),
            )
            every = [one for (raw,) in rows if (one := read_record(raw)) is not None]
        return sorted(every, key=lambda one: one.opened_at)

    # ----- writing: on stable storage when it returns. Raises OSError -----

    def write(self, incidents: Iterable[ClosedIncident], now: float) -> None:
        """What is known of an incident already stays: corrections of both are kept."""
        with self._writing() as found:
            for one in incidents:
                self._put(found, one)
            self._prune(found, now)

    def correct(self, job_id: str, incident: str, corrections: Sequence[Correction]) -> bool:
        with self._writing() as found:
            row = found.execute("SELECT id FROM incident WHERE job_id = ? AND name = ?", (job_id, incident)).fetchone()
            known = self._record(found, int(row[0])) if row is not None else None
            if known is None:
                return False
            self._put(found, corrected(known, corrections))
        return True

    def _put(self, found: sqlite3.Connection, one: ClosedIncident) -> None:
        one = bounded(one)
        row = found.execute("SELECT id FROM incident WHERE job_id = ? AND name = ?", (one.job_id, one.incident))
        held = row.fetchone()
        known = self._record(found, int(held[0])) if held is not None else None
        if known is not None:
            one = corrected(one, known.corrections)
            if one == known:
                return
        if held is not None:
            self._remove(found, [int(held[0])])
        fields = (one.job_id, one.incident, one.opened_at, int(bool(one.corrections)))
        record = msgspec.json.encode(one).decode()
        if len(record) > RECORD_BYTES:  # it is bounded by now; what is left is escapes of odd characters
            record = msgspec.json.encode(msgspec.structs.replace(one, evidence=one.evidence[:1])).decode()
        added = found.execute(
            "INSERT INTO incident (job_id, name, opened_at, corrected, record) VALUES (?, ?, ?, ?, ?)",
            (*fields, record),
        ).lastrowid
        found.executemany("INSERT INTO place VALUES (?, ?, ?)", [(added, *place) for place in places(one)])
        found.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (added, " ".join(terms(one.text))))

    @staticmethod
    def _record(found: sqlite3.Connection, number: int) -> ClosedIncident | None:
        row = found.execute(
            "SELECT record FROM incident WHERE id = ? AND length(record) <= ?", (number, RECORD_BYTES)
        ).fetchone()
        return read_record(row[0]) if row is not None else None

    @staticmethod
    def _remove(found: sqlite3.Connection, numbers: Iterable[int]) -> None:
        rows = [(number,) for number in numbers]
        found.executemany("DELETE FROM incident WHERE id = ?", rows)
        found.executemany("DELETE FROM place WHERE incident = ?", rows)
        found.executemany("DELETE FROM words WHERE rowid = ?", rows)

    def _prune(self, found: sqlite3.Connection, now: float) -> None:
        """Those that nobody has corrected go first."""
        old = found.execute(
            "SELECT id FROM incident WHERE corrected = 0 AND opened_at < ? LIMIT ?", (now - KEEP_S, MOST_REMOVED)
        ).fetchall()
        self._remove(found, (int(row[0]) for row in old))
        (many,) = found.execute("SELECT count(*) FROM incident").fetchone()
        too_many = max(0, many - MOST_INCIDENTS)
        if self._size(found) > self._most_bytes:
            too_many = max(too_many, many // 10 + 1)
        if too_many := min(too_many, MOST_REMOVED):
            rows = found.execute("SELECT id FROM incident ORDER BY corrected, opened_at LIMIT ?", (too_many,))
            self._remove(found, [int(row[0]) for row in rows.fetchall()])

    @staticmethod
    def _size(found: sqlite3.Connection) -> int:
        size, pages, free = (
            int(found.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_size", "page_count", "freelist_count")
        )
        return size * (pages - free)

    # ----- the file -----

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._in_words(), contextlib.ExitStack() as stack:
            self.folder.stat()  # a folder that is not there is a problem; a store that is not there yet is none
            found = stack.enter_context(self._opened()) if self.path.exists() else None
            if found is not None:
                found.execute("PRAGMA query_only = ON")
            if found is None or self._version(found) == 0:
                found = stack.enter_context(contextlib.closing(sqlite3.connect(":memory:")))
                _make_schema(found)
            yield found

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._make_file()
        with self._in_words(), self._opened() as found:
            found.execute("PRAGMA journal_mode = DELETE")
            found.execute("PRAGMA synchronous = FULL")
            found.execute("BEGIN IMMEDIATE")  # closed without COMMIT it is rolled back
            if self._version(found) == 0:
                _make_schema(found)
            yield found
            found.execute("COMMIT")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if not _ONE_CALL.acquire(timeout=self._busy_s):
            raise OSError(errno.EAGAIN, "another call of this process holds its lock", str(self.path))
        try:
            self._check()
            with self._connected() as found:
                yield found
        finally:
            _ONE_CALL.release()

    def _check(self) -> None:
        """That SQLite will touch no file but these two, whoever wrote them."""
        if any(version != 1 for version in _bytes_at(self.path, 18, 2)):
            problem = "has a write-ahead log, or is damaged: move it away, and a new one is made"
            raise OSError(errno.EINVAL, problem, str(self.path))
        journal = Path(f"{self.path}-journal")
        with contextlib.suppress(FileNotFoundError):
            if _bytes_at(journal, -len(_SUPER_JOURNAL), len(_SUPER_JOURNAL)) == _SUPER_JOURNAL:
                raise OSError(errno.EINVAL, "it names another file: move it away", str(journal))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        # To read what a writer left in the middle when it died needs the right to write.
        mode = "rw" if os.access(self.path, os.W_OK) else "ro"
        where = f"{self.path.absolute().as_uri()}?mode={mode}"
        until = time.monotonic() + DEADLINE_S
        with contextlib.closing(sqlite3.connect(where, self._busy_s, uri=True, isolation_level=None)) as found:
            found.text_factory = bytes
            found.set_progress_handler(lambda: time.monotonic() > until, 10_000)
            for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "temp_store = MEMORY"):
                found.execute(f"PRAGMA {pragma}")
            found.execute(f"PRAGMA hard_heap_limit = {MEMORY_BYTES}")
            yield found

    def _version(self, found: sqlite3.Connection) -> int:
        """0: nothing is in it yet."""
        program, version, tables = (
            int(found.execute(query).fetchone()[0])
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if program != APPLICATION and (program or version or tables):
            raise OSError(errno.EINVAL, "is a database of another program", str(self.path))
        if version > VERSION:
            text = f"a newer unbroken wrote it (format {version}; this one knows {VERSION})"
            raise OSError(errno.EINVAL, text, str(self.path))
        return version

    def _make_file(self) -> None:
        """Whoever may write to the folder may write to the file."""
        if self.path.exists():
            return
        mode = 0o600 | (self.folder.stat().st_mode & 0o066)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(self.path, flags, mode)
            try:
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """What SQLite says, as an OSError."""
        try:
            yield
        except MemoryError:
            problem = f"needs more than {MEMORY_BYTES >> 20} MiB of memory: move it away, and a new one is made"
            raise OSError(errno.ENOMEM, problem, str(self.path)) from None
        except sqlite3.Error as error:
            said = str(error)
            for mark, number, text in _PROBLEMS:
                if mark in said:
                    raise OSError(number, text, str(self.path)) from None
            raise OSError(errno.EIO, f"SQLite says: {said[:200]}", str(self.path)) from None


_PROBLEMS: Final = (
    ("locked", errno.EAGAIN, "another process holds its lock"),
    ("interrupted", errno.ETIMEDOUT, f"took longer than {DEADLINE_S:.0f} s"),
    ("malformed", errno.EIO, "is damaged: move it away, and a new one is made"),
    ("not a database", errno.EIO, "is damaged, or no database: move it away, and a new one is made"),
    ("fts5", errno.ENOSYS, "this Python's SQLite has no FTS5"),
    ("disk is full", errno.ENOSPC, "no space left for it"),
    ("readonly", errno.EACCES, "may not be written"),
    ("unable to open", errno.EACCES, "cannot be opened"),
)


def _bytes_at(path: Path, place: int, size: int) -> bytes:
    """Of a file; from its end where `place` is negative."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, place if place >= 0 else max(0, os.fstat(descriptor).st_size + place))
    finally:
        os.close(descriptor)


def _make_schema(found: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        found.execute(statement)
