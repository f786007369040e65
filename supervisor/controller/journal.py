"""The journal: everything the job ever saw, one checksummed line a record, in files that need no locks.

Each controller claims an epoch by creating `epochs/<n>` (a hard link: exactly one can win, on shared file systems
too) and writes `journal.<n>.jsonl`, which no other controller ever writes. Its first record, `opened`, says up to
which record its writer has read the older files (`after_seq`): what an older controller adds behind that point is
dropped by every reader, so a controller that was only asleep cannot change history (docs/adr/0001).

What is whole counts, whatever stands between: sequence numbers tell what is missing. The next controller moves damaged
files aside, writes what is whole anew, and tells the job (`JournalDamaged`), which then does not act on what it cannot
know (docs/adr/0017).

`Journal` is the file, `JournalWriter` the thread that writes it beside the controller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import queue
import re
import socket
import threading
import time
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from supervisor.blocking import BlockingCalls, timeout
from supervisor.errors import InternalError
from supervisor.files import create_exclusively
from supervisor.messages import EVENT_TAGS, Action, AnyEvent, Assign, Assignment, JournalDamaged, decode_event, encode


class Superseded(InternalError):
    """Another controller has claimed a newer epoch: whatever this one wanted to do, it must not."""

    def __init__(self, epoch: int, newer: int) -> None:
        super().__init__(f"a controller with epoch {newer} has taken over from this one (epoch {epoch})")
        self.newer = newer


def claim_epoch(job_dir: Path) -> int:
    """Take the next free epoch number; no two callers ever get the same one. Raises OSError."""
    folder = job_dir / "epochs"
    folder.mkdir(parents=True, exist_ok=True)
    claim = msgspec.json.encode({"host": socket.gethostname(), "pid": os.getpid(), "at": time.time_ns() / 1e9})
    epoch = newest_epoch(job_dir) + 1
    while not create_exclusively(folder / str(epoch), claim):
        epoch += 1
    sync_folder(folder)
    return epoch


def newest_epoch(job_dir: Path, known: int = 0) -> int:
    """The highest epoch claimed so far; `known` when there is none higher. Raises OSError."""
    with os.scandir(job_dir / "epochs") as entries:
        claimed = (int(entry.name) for entry in entries if entry.name.isdigit())
        return max(claimed, default=known)


def sync_folder(folder: Path) -> None:
    """Make new names in `folder` durable, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system can; the file itself is synced
    finally:
        os.close(fd)


Kind = Literal["opened", "event", "decided"]

MAX_BYTES = 64 << 20
"""A journal larger than this is compacted when the next controller starts, or when it has doubled."""

_FILE = re.compile(r"journal\.(\d+)\.jsonl")
_CRC = b',"crc32":'


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a journal file."""

    seq: int
    at: float
    epoch: int
    kind: Kind
    body: msgspec.Raw
    crc32: int


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the first record of every file."""

    after_seq: int
    """Records of older epochs count up to this number and no further."""
    host: str = ""
    pid: int = 0
    thinned_to: int = 0
    """Up to this number records were left out on purpose; `kept` of them follow."""
    kept: int = 0


class Loss(NamedTuple):
    """What damage has cost, of the story that counts."""

    records: int = 0
    """So many at least are not whole any more, or gone."""
    events: bool = False
    """One of them may be an event."""
    orders: bool = False
    """One of them may be an operator's."""


class History(NamedTuple):
    """What a job folder's journals say, in order."""

    records: list[Record]
    problems: list[str]
    """What could not be read, in words."""
    size_bytes: int
    damaged: tuple[Path, ...] = ()
    """Files in which something is not as it was written; not those that only end in part of a record."""
    loss: Loss = Loss()

    @property
    def last_seq(self) -> int:
        return self.records[-1].seq if self.records else 0

    @property
    def last_at(self) -> float:
        return max((record.at for record in self.records[-64:]), default=0.0)


class JournalFile(Protocol):
    """Where lines go. A seam: tests put a file here that hangs, or that is full."""

    def write(self, data: bytes) -> None:
        """Append all of `data`. Raises OSError."""

    def sync(self) -> None:
        """Return once everything written is on stable storage. Raises OSError."""

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class _OsFile:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)


class Entry(NamedTuple):
    """A record to be written; `body` is JSON."""

    kind: Kind
    at: float
    body: bytes


class FileMark(NamedTuple):
    seq: int
    size: int


class Thinned(NamedTuple):
    """A smaller file with all that is up to `mark`."""

    path: Path
    size: int
    mark: FileMark


class Journal:
    """The file of one epoch, open for appending. Blocking: the controller calls it in a thread of its own.

    A failed write leaves nothing behind: the next one starts where the last good one ended.
    """

    def __init__(
        self,
        job_dir: Path,
        epoch: int,
        history: History,
        open_file: Callable[[Path], JournalFile] = _OsFile,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.job_dir = job_dir
        self.epoch = epoch
        self.path = journal_path(job_dir, epoch)
        self._seq = history.last_seq
        self._open_file = open_file
        self._file = open_file(self.path)
        self._size = 0
        self._torn = False
        self._limit = max_bytes

    @property
    def is_large(self) -> bool:
        """It should be thinned out when there is time."""
        return self._size > self._limit

    @property
    def next_seq(self) -> int:
        """The number of the next record."""
        return self._seq + 1

    def write(self, entries: Sequence[Entry], sync: bool = True) -> int:
        """Append `entries`, with `sync` return when they are on stable storage; the number of the first one.

        Raises OSError (nothing was recorded; try again) and Superseded (recorded perhaps, but not ours to act on).
        """
        lines = [
            format_record(seq, entry.at, self.epoch, entry.kind, entry.body)
            for seq, entry in enumerate(entries, self._seq + 1)
        ]
        data = b"".join(lines)
        if self._torn:
            self._file.truncate(self._size)
        self._torn = True
        self._file.write(data)
        if sync:
            self._file.sync()
        newer = newest_epoch(self.job_dir, self.epoch)
        self._torn = False
        self._size += len(data)
        first = self._seq + 1
        self._seq += len(entries)
        if newer > self.epoch:
            raise Superseded(self.epoch, newer)
        return first

    def close(self) -> None:
        self._file.close()

    def mark(self) -> FileMark:
        """How far the file is; until `take_over` it does not count as large.

        Whatever was decided on events up to here is to be in the file: a progress report without a decision goes."""
        self._limit *= 2
        return FileMark(self._seq, self._size)

    def thin_out(self, mark: FileMark) -> Thinned | None:
        """Write a smaller file of all that is up to `mark`; None where something is damaged: the next controller keeps
        that, and tells of it. It may take long, and others may write meanwhile. Raises OSError."""
        dropped, decided, count, last = array("q"), array("q"), 0, None
        try:
            for record in _whole_records(self.job_dir, self.path, mark):
                if last is not None and _is_progress(last) and _is_progress(record):
                    dropped.append(last.seq)
                if record.kind == "decided":
                    decided.append(_of(record))
                count, last = count + (record.kind != "opened"), record
            kept = {of for of in decided if (at := bisect_left(dropped, of)) < len(dropped) and dropped[at] == of}
            records = thin(_whole_records(self.job_dir, self.path, mark), kept)
            return Thinned(*self._write_anew(records, count - len(dropped) + len(kept), mark.seq), mark)
        except _NotWhole as why:
            log.warning("the journal is not made smaller: %s", why)
            return None

    def take_over(self, thinned: Thinned) -> None:
        """Go on in the smaller file, with what was written since. Raises OSError: nothing is lost then."""
        if newest_epoch(self.job_dir, self.epoch) > self.epoch:
            return  # that controller has read the files as they are
        size = thinned.size
        with open(self.path, "rb") as file, open(thinned.path, "ab") as smaller:
            file.seek(thinned.mark.size)
            tail = self._size - thinned.mark.size
            while tail > 0 and (piece := file.read(min(tail, 1 << 20))):
                size += smaller.write(piece)
                tail -= len(piece)
            smaller.flush()
            os.fsync(smaller.fileno())
        self._go_on_in(thinned.path, size, ())
        self._limit = max(self._limit // 2, 2 * self._size)

    def compact(self, records: Sequence[Record], more: Sequence[Entry] = (), damaged: Sequence[Path] = ()) -> None:
        """Put `records` (see `thin`) and `more` at the start of this epoch's file and remove the older files.

        Files that are `damaged` are kept, in the folder of that name.
        """
        told = [record for record in records if record.kind != "opened"]
        temporary, size = self._write_anew(told, len(told), self._seq, more)
        self._go_on_in(temporary, size, damaged)
        self._seq += len(more)

    def _write_anew(
        self, records: Iterable[Record], kept: int, thinned_to: int, more: Sequence[Entry] = ()
    ) -> tuple[Path, int]:
        """A file that stands for all older ones, under another name so far; and its size. `kept`: so many records."""
        told = (record for record in records if record.kind != "opened")
        first = next(told, None)
        opened = msgspec.json.encode(
            Opened(after_seq=0, host=socket.gethostname(), pid=os.getpid(), thinned_to=thinned_to, kept=kept)
        )
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        size = 0
        with open(temporary, "wb") as file:
            size += file.write(format_record(0, first.at if first is not None else 0.0, self.epoch, "opened", opened))
            for record in chain(() if first is None else (first,), told):
                size += file.write(format_record(record.seq, record.at, self.epoch, record.kind, bytes(record.body)))
            for seq, entry in enumerate(more, thinned_to + 1):
                size += file.write(format_record(seq, entry.at, self.epoch, entry.kind, entry.body))
            file.flush()
            os.fsync(file.fileno())
        return temporary, size

    def _go_on_in(self, temporary: Path, size: int, damaged: Sequence[Path]) -> None:
        """Readers see either all the old files or the new one: the file is replaced in one step, and its `opened`
        record takes over from everything older."""
        # Opened before it gets its name: whatever fails from here on, nothing is written to a file that is gone.
        fresh = self._open_file(temporary)
        try:
            os.replace(temporary, self.path)
        except OSError:
            fresh.close()
            raise
        old, self._file, self._size, self._torn = self._file, fresh, size, False
        old.close()
        sync_folder(self.job_dir)
        for epoch, path in journal_files(self.job_dir):
            if epoch < self.epoch and path in damaged:
                _move_aside(path)
            elif epoch < self.epoch:
                path.unlink(missing_ok=True)


def _move_aside(path: Path) -> None:
    """As it is: a person may find out what stood there."""
    folder = path.parent / "damaged"
    folder.mkdir(exist_ok=True, mode=0o700)
    target = folder / path.name
    for number in range(1, 1000):
        if not target.exists():
            break
        target = folder / f"{path.name}.{number}"
    path.rename(target)


def open_journal(
    job_dir: Path,
    *,
    forget: bool = False,
    open_file: Callable[[Path], JournalFile] = _OsFile,
    max_bytes: int = MAX_BYTES,
    living: bool = False,
) -> tuple[Journal, History]:
    """Claim the next epoch of `job_dir`, read all that is before it, and open its file. Raises OSError.

    `living`: ranks may run; where the journal is damaged that decides what the job may do.

    With `forget` a new story begins: the older files stay where they are and no longer count.

    The claim comes before the reading: a controller of an older epoch that writes from now on finds the claim before
    it acts on what it wrote, and everything it wrote before the claim is read here.
    """
    job_dir.mkdir(parents=True, exist_ok=True)
    epoch = claim_epoch(job_dir)
    history = read_history(job_dir)
    journal = Journal(job_dir, epoch, history, open_file, max_bytes)
    at = max(time.time(), history.last_at)
    if forget:
        history = History([], history.problems, 0)
    opened = Opened(after_seq=history.last_seq, host=socket.gethostname(), pid=os.getpid())
    journal.write([Entry("opened", at, msgspec.json.encode(opened))])
    sync_folder(job_dir)
    if history.damaged and not forget:
        entry = Entry("event", at, encode(report_damage(history, at, living)))
        journal.compact(history.records, [entry], history.damaged)
        return journal, read_history(journal.path)._replace(problems=history.problems)
    if history.size_bytes > max_bytes:
        decided = {_of(record) for record in history.records if record.kind == "decided"}
        journal.compact(list(thin(history.records, decided)))
    return journal, history


def report_damage(history: History, at: float, living: bool) -> JournalDamaged:
    """What the job is told, with the newest attempt that its controllers told anybody of."""
    attempt, formed, ended = 0, False, False
    for record in history.records:
        if record.kind != "decided":
            continue
        with contextlib.suppress(msgspec.ValidationError):
            for action in _decode_decided(record.body).actions:
                if isinstance(action, Assign):
                    given = action.assignment
                    formed = given.round is not None or (formed and given.attempt == attempt)
                    attempt, ended = max(attempt, given.attempt), given.outcome is not None
    return JournalDamaged(
        at=at,
        lost=history.loss.records,
        what="; ".join(history.problems)[:1000],
        events=history.loss.events,
        orders=history.loss.orders,
        living=living,
        attempt=attempt,
        formed=formed,
        ended=ended,
    )


def journal_path(job_dir: Path, epoch: int) -> Path:
    return job_dir / f"journal.{epoch}.jsonl"


def journal_files(job_dir: Path) -> list[tuple[int, Path]]:
    """(epoch, path) of every journal file in `job_dir`, oldest first. Raises OSError."""
    found = ((_FILE.fullmatch(path.name), path) for path in job_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def read_history(where: Path) -> History:
    """Everything the journals of a job folder (or one journal file) say, in order. Raises OSError."""
    files = [(0, where)] if where.is_file() else journal_files(where)
    story = _Story()
    size = 0
    for _, path in files:
        size += path.stat().st_size
        story.take(path, _read_file(path))
    return History(story.records, story.problems, size, tuple(story.damaged), story.loss)


TAIL_BYTES = 256 << 10


def read_after(where: Path, seq: int) -> History:
    """As `read_history`, but records up to `seq` may be left out: of a long journal only the end is read then."""
    files = [] if where.is_file() else journal_files(where)
    records = _records_after(files[-1][1], seq) if files and seq > 0 else None
    return read_history(where) if records is None else History(records, [], 0)


def _records_after(path: Path, seq: int) -> list[Record] | None:
    """Those of the newest file; None where it does not have all of them, or something in it is damaged."""
    with open(path, "rb") as file:
        opened = parse_record(file.readline())
        if opened is None or opened.kind != "opened":
            return None
        if msgspec.json.decode(opened.body, type=Opened).after_seq > seq:
            return None
        begin = file.tell()
        at = file.seek(0, os.SEEK_END)
        data, start = b"", 0
        while at > begin:
            size = min(TAIL_BYTES, at - begin)
            at -= size
            file.seek(at)
            data = file.read(size) + data
            start = 0 if at == begin else data.find(b"\n") + 1
            first = parse_record(data[start : data.find(b"\n", start) + 1])
            if first is not None and first.seq <= seq:
                break
    lines = data[start:].splitlines(keepends=True) if data else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # it is being written
    found = [record for record in map(parse_record, lines) if record is not None]
    return [record for record in found if record.seq > seq] if len(found) == len(lines) else None


class _NotWhole(InternalError):
    """Something in the journals is not as it was written."""


def _whole_records(job_dir: Path, own: Path, mark: FileMark) -> Iterator[Record]:
    """What `read_history` gives up to `mark`, one record at a time: a long journal does not fit into memory.

    `own`: the newest file. Raises OSError, and _NotWhole where `read_history` would tell of damage.
    """
    counting, limit = list[tuple[Path, int]](), mark.seq
    for _, path in reversed(journal_files(job_dir)):
        with open(path, "rb") as file:
            line = file.readline()
        opened = parse_record(line)
        if opened is None and not counting:
            raise _NotWhole(f"{path.name} does not begin as it should")
        if opened is None and _is_torn(line):
            continue  # its controller ended before it had written anything
        if opened is None or opened.kind != "opened" or (path != own and not counting):
            raise _NotWhole(f"{path.name} does not begin as it should")
        counting.append((path, limit))
        after = msgspec.json.decode(opened.body, type=Opened).after_seq
        limit = min(limit, after)
        if after == 0:
            break
    last = 0
    for path, limit in reversed(counting):
        for record in _lines_in_order(path, mark.size if path == own else -1, last):
            if record.seq <= limit:
                last = record.seq
                yield record
    if last != mark.seq:
        raise _NotWhole(f"{own.name} lacks records after {last}")


def _lines_in_order(path: Path, size: int, last: int) -> Iterator[Record]:
    """The records of a file whose numbers go on from `last`, or that took over from all before. `size`: of what is read
    of it; negative: all. Raises OSError, _NotWhole."""
    thinned_to, missing, seen = 0, 0, False
    with open(path, "rb") as file:
        for line in file:
            if not size:
                break
            size -= len(line)
            record = parse_record(line)
            if record is None:
                if seen and _is_torn(line) and not file.read(1):
                    break
                raise _NotWhole(f"{path.name} has a line that is not a whole record")
            if not seen:
                about = msgspec.json.decode(record.body, type=Opened)
                if about.after_seq == 0:
                    last, thinned_to, missing = record.seq - 1, about.thinned_to, about.kept
                if record.seq > last + 1:
                    raise _NotWhole(f"{path.name} lacks records before {record.seq}")
                gaps_tell = record.seq > 0 or thinned_to > 0
            elif thinned_to and record.seq <= thinned_to:
                missing -= 1
                if record.seq <= last:
                    raise _NotWhole(f"{path.name} has records twice")
            elif record.seq <= last or (gaps_tell and record.seq > max(last, thinned_to) + 1):
                raise _NotWhole(f"{path.name} lacks records before {record.seq}")
            seen, last = True, record.seq
            yield record
    if thinned_to and missing > 0:
        raise _NotWhole(f"{path.name} lacks {missing} records")


class _Story:
    """The files in order: which of their records count, and what is missing."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.damaged: list[Path] = []
        self._missing = 0
        self._bad: list[_Bad] = []
        self._last = Path()

    @property
    def loss(self) -> Loss:
        """Lines that are no records cost nothing where no number is missing: at the end of all no number tells."""
        at_end = [one for one in self._bad if one.path == self._last and one.is_behind_all]
        unseen = self._missing > len(self._bad) - len(at_end)
        lost = self._bad if self._missing else at_end
        return Loss(
            records=self._missing + len(at_end),
            events=unseen or any(one.may_be_event for one in lost),
            orders=unseen or any(one.may_be_order for one in lost),
        )

    def take(self, path: Path, file: _FileRead) -> None:
        """The next file. One whose first record is damaged goes on where it may be, or begins anew (`_begins_anew`)."""
        own = file.records
        self._last = path
        opened = own[0] if own and own[0].kind == "opened" else None
        about = msgspec.json.decode(opened.body, type=Opened) if opened is not None else None
        if about is not None and about.after_seq == 0:
            self._begin()
        elif about is not None:
            self._drop_behind(path, opened, about.after_seq)
        elif own and _begins_anew(self.records, own):
            self._begin()
        if file.torn:
            self.problems.append(f"{path.name}: ends in what is not a whole record")
        wrong = []
        if file.bad:
            wrong.append(f"{len(file.bad)} lines are not a whole record, the first is line {file.bad[0].line}")
        if file.repeated:
            wrong.append(f"{file.repeated} records stand there twice")
        if missing := self._count_missing(file, about):
            wrong.append(
                f"{missing} record{'s' * (missing > 1)} before or in it {'are' if missing > 1 else 'is'} missing"
            )
        self._missing += missing
        self._bad += file.bad
        if wrong:
            self.problems.append(f"{path.name}: {'; '.join(wrong)}")
            self.damaged.append(path)
        self.records.extend(own)

    def _begin(self) -> None:
        """The files before this one do not count any more."""
        self.records, self.problems, self.damaged, self._missing, self._bad = [], [], [], 0, []

    def _drop_behind(self, path: Path, opened: Record | None, after: int) -> None:
        dropped = len(self.records)
        while self.records and self.records[-1].seq > after:
            self.records.pop()
        if len(self.records) < dropped and opened is not None:
            self.problems.append(
                f"{path.name}: {dropped - len(self.records)} records that an older controller wrote after epoch "
                f"{opened.epoch} had begun are dropped"
            )

    def _count_missing(self, file: _FileRead, about: Opened | None) -> int:
        own = file.records
        if not own:
            return 0
        last = self.records[-1].seq if self.records else 0
        if about is not None and own[0].seq == 0:  # thinned: gaps are as they should be up to a number
            thinned = sum(1 for record in own[1:] if record.seq <= about.thinned_to)
            rest = [record.seq for record in own if record.seq > about.thinned_to]
            if not about.thinned_to:
                return sum(not one.is_behind_all for one in file.bad)  # by a version that did not say up to which
            return max(0, about.kept - thinned) + _gaps(about.thinned_to, rest)
        if about is not None and about.after_seq == 0:
            last = own[0].seq - 1
        return _gaps(last, [record.seq for record in own])


def _gaps(last: int, numbers: Sequence[int]) -> int:
    missing = 0
    for number in numbers:
        missing += max(0, number - last - 1)
        last = number
    return missing


def _begins_anew(before: Sequence[Record], own: Sequence[Record]) -> bool:
    """Whether a file whose `opened` is damaged took over from all before it: thinned anew, or another story."""
    if not before or own[0].seq <= before[-1].seq:
        return True
    over = any(record.kind == "decided" and _ENDS.search(record.body) for record in before)
    return over and _REQUEUED not in bytes(own[0].body)


_ENDS = re.compile(rb'"type":"end"|"outcome":\{')
_REQUEUED = b'"event":"job_requeued"'


class _Bad(NamedTuple):
    """A line, or part of one, that is no whole record."""

    path: Path
    line: int
    text: bytes
    """Its beginning."""
    is_behind_all: bool = False
    """No whole record of the file comes after it."""

    @property
    def may_be_event(self) -> bool:
        return _HARMLESS.search(self.text) is None

    @property
    def may_be_order(self) -> bool:
        known = _EVENT.search(self.text)
        return self.may_be_event and (known is None or known[1].decode() not in EVENT_TAGS - {"override_given"})


_HARMLESS = re.compile(rb'"kind":"(?:decided|opened)"|"event":"progressed"')
_EVENT = re.compile(rb'"event":"([a-z_]+)"')
_BAD_HEAD = 400


class _FileRead(NamedTuple):
    """One file: its whole records in order, each once."""

    records: list[Record]
    torn: bool
    """It ends in part of a record: the process or the node was lost while it was written."""
    bad: list[_Bad]
    repeated: int


_HEAD = b'{"seq":'
_STARTS = re.compile(rb'(?=\{"seq":\d{1,18},"at":)')


def _read_file(path: Path) -> _FileRead:
    found: dict[int, Record] = {}
    bad: list[_Bad] = []
    repeated, ascending, last, was_bad, line, number, newest = 0, True, -1, False, b"", 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = parse_record(line)
            records, rest = ([record], b"") if record is not None else _salvaged(line)
            for one in records:
                repeated += one.seq in found
                ascending = ascending and one.seq > last
                last = one.seq
                found.setdefault(one.seq, one)
            if rest and not (was_bad and not rest.startswith(_HEAD)):  # the second half of a record that was split
                bad.append(_Bad(path, number, rest[:_BAD_HEAD]))
            newest = number if records else newest
            was_bad = bool(rest)
    torn = was_bad and _is_torn(line)
    if torn and bad and bad[-1].line == number:
        bad.pop()
    records = list(found.values())
    bad = [one._replace(is_behind_all=one.line > newest) for one in bad]
    return _FileRead(records if ascending else sorted(records, key=lambda one: one.seq), torn, bad, repeated)


def _is_torn(line: bytes) -> bool:
    """The last line: begun and not ended, or zeros, as file systems leave them after a power cut."""
    return not line.endswith(b"\n") or not line.strip(b"\0\n")


def _salvaged(line: bytes) -> tuple[list[Record], bytes]:
    """Whole records within a line that is none (its end was damaged), and the first part that is not."""
    if not line.strip():
        return [], line
    records, rest = [], b""
    for piece in _STARTS.split(line):
        end = piece.rfind(b"}") + 1
        ends = piece[end:] or line.endswith(piece) is False
        record = parse_record(piece[:end] + b"\n") if ends else None
        if record is not None:
            records.append(record)
        elif piece:
            rest = rest or piece
    return records, rest


_decode_record = msgspec.json.Decoder(Record).decode


def format_record(seq: int, at: float, epoch: int, kind: Kind, body: bytes) -> bytes:
    """One line, its checksum taken over everything before it."""
    head = b'{"seq":%d,"at":%s,"epoch":%d,"kind":"%s","body":' % (seq, repr(at).encode(), epoch, kind.encode())
    head += body
    return head + _CRC + b"%d}\n" % zlib.crc32(head)


def parse_record(line: bytes) -> Record | None:
    """The record of a whole line, or None when the line is torn, damaged or something else."""
    head, found, _ = line.rpartition(_CRC)
    if not found or not line.endswith(b"}\n"):
        return None
    try:
        record = _decode_record(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.crc32 == zlib.crc32(head) else None


class Decided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a `decided` record: what the job wanted done about event number `of`."""

    of: int
    actions: tuple[Action, ...] = ()
    error: str = ""
    """Set when the job failed on the event: it went on without it, and every replay does the same."""
    names: dict[str, tuple[str, ...]] = {}
    """Digest (`Round.names`) -> names of nodes, in the first record that needs them."""


class _DecidedLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`Decided` as it is written: assignments are JSON already."""

    of: int
    actions: Sequence[Action | msgspec.Raw] = ()
    error: str = ""
    names: dict[str, tuple[str, ...]] = {}


def decided_entry(
    of: int, at: float, actions: Sequence[Action | msgspec.Raw], error: str, names: dict[str, tuple[str, ...]]
) -> Entry:
    """The record of what was decided about event number `of`."""
    return Entry("decided", at, encode(_DecidedLine(of=of, actions=actions, error=error, names=names)))


class Step(NamedTuple):
    """One event of the past, with what was decided on it then."""

    seq: int
    epoch: int
    event: AnyEvent
    decided: Decided | None
    """None when nothing was recorded: nothing was decided, or the controller died before it said so."""


_decode_decided = msgspec.json.Decoder(Decided).decode


def steps(records: Sequence[Record], problems: list[str] | None = None) -> Iterator[Step]:
    """The events of `records` in order. One that this version does not know is skipped, and told in `problems`."""
    decisions = {_of(record): record for record in records if record.kind == "decided"}
    for record in records:
        if record.kind == "event":
            try:
                event = decode_event(record.body)
            except msgspec.ValidationError as error:
                if problems is not None:
                    problems.append(f"record {record.seq} is skipped: {error}")
                continue
            yield Step(record.seq, record.epoch, event, _decided(decisions.get(record.seq)))


def _decided(record: Record | None) -> Decided | None:
    """None also for what this version cannot read. Made when it is asked for: all decisions of a large job fill the
    memory."""
    if record is None:
        return None
    try:
        return _decode_decided(record.body)
    except msgspec.ValidationError:
        return None


def _of(record: Record) -> int:
    """The event that a decision is about; 0: it does not say."""
    try:
        return msgspec.json.decode(record.body, type=_Of).of
    except msgspec.ValidationError:
        return 0


class _Of(msgspec.Struct, frozen=True):
    of: int


class RoundNames:
    """The names of a round's nodes, said once: N nodes are told their own place each, and the journal N names once."""

    def __init__(self) -> None:
        self._nodes: tuple[str, ...] = ()
        self._digest = ""
        self._ranks: dict[str, int] = {}
        self._kept = ""

    def shorten(self, assignment: Assignment) -> Assignment:
        """The same with the node's place instead of all names."""
        given = assignment.round
        if given is None or not given.nodes:
            return assignment
        if given.nodes is not self._nodes:  # one object for all nodes of a round
            self._nodes, self._digest = given.nodes, digest_of(given.nodes)
            self._ranks = {name: rank for rank, name in enumerate(given.nodes)}
        short = msgspec.structs.replace(
            given,
            nodes=(),
            names=self._digest,
            rank=self._ranks.get(assignment.node),
            count=len(given.nodes),
            first=given.nodes[0],
        )
        return msgspec.structs.replace(assignment, round=short)

    def fresh(self) -> dict[str, tuple[str, ...]]:
        """Digest and names of the round that was shortened last, where the journal does not have them yet."""
        if self._kept == self._digest:
            return {}
        self._kept = self._digest
        return {self._digest: self._nodes}


def digest_of(nodes: Sequence[str]) -> str:
    """Short for these names in this order."""
    return hashlib.blake2s("\n".join(nodes).encode(errors="replace"), digest_size=8).hexdigest()


def thin(records: Iterable[Record], decided: Container[int]) -> Iterator[Record]:
    """`records` without the progress reports on which nothing was decided and which another one follows.

    They are nearly all of a long journal, and a job that sees only the last of a row of them ends in the same state.
    """
    last: Record | None = None
    for record in records:
        if last is not None and (last.seq in decided or not (_is_progress(last) and _is_progress(record))):
            yield last
        last = record
    if last is not None:
        yield last


_PROGRESS = b'"event":"progressed"'


def _is_progress(record: Record) -> bool:
    body = bytes(record.body)
    return record.kind == "event" and _PROGRESS in body and b'"first":true' not in body


log = logging.getLogger("unbroken.journal")

# ----- how the controller's loop writes: in a thread, tried again until it works, never blocking -----

STALL_S = 2.0
"""A write that takes longer than this is reported; nothing new is decided until it is done."""

SHRINK_S = 600.0
"""So long at most a journal is thinned out, beside everything else."""

T = TypeVar("T")


class JournalWriter:
    """`stall` says why nothing can be written now; empty while all is well."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.stall = ""
        self.stalled_for_s = 0.0
        """How long the newest stall that is over lasted."""
        self._stalled_at = 0.0
        self._late: list[Entry] = []
        self._ahead: list[Callable[[int], list[Entry]]] = []
        self._hurry = asyncio.Event()
        self._aside = BlockingCalls("shrink")
        self._shrinking: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[int] | None = None
        self.given_up = False
        """`give_up` was called."""
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="journal", daemon=True).start()

    @property
    def has_late(self) -> bool:
        """Something is to be written that came by `later` or `ahead`; not what just failed and is given up."""
        return bool(self._ahead) or (bool(self._late) and not (self.given_up and self.stall))

    def later(self, entry: Entry) -> None:
        """Write `entry` before whatever is written next."""
        self._late.append(entry)

    def ahead(self, decide: Callable[[int], list[Entry]]) -> None:
        """Call `decide` before the next try, and write what it gives before everything that waits.

        It is called with the number that its first entry will have (0: that is not known) while nothing is being
        written, so that the journal has things in the order in which they were decided.
        """
        self._ahead.append(decide)
        self._hurry.set()

    def give_up(self) -> None:
        """The job is to end: nobody waits for a journal that cannot be written any more. It is tried all the same."""
        self.given_up = True
        self._hurry.set()

    async def write(self, entries: Sequence[Entry], *, sync: bool = True) -> int:
        """Journal `entries` behind what came by `ahead` and `later`; the seq of the first. Tries until it works.

        After `give_up` it tries once, and gives 0 where that failed; what was to be written is tried with the next.
        Raises Superseded.
        """
        pause_s = 0.1
        while True:
            sync = sync or bool(self._ahead)
            self._go_ahead()
            whole = [*self._late, *entries]
            if self._hangs:
                self._late = whole
                return 0
            try:
                first = await self._patiently(self._submit(functools.partial(self.journal.write, whole, sync)))
                break
            except OSError as error:
                self._stalled(f"{self.journal.path}: {error.strerror or error}")
            if self.given_up:
                self._late = [] if self._hangs else whole  # what hangs may be written yet
                return 0
            await self._pause(pause_s)
            pause_s = min(2.0, pause_s * 2)
        before = len(whole) - len(entries)
        first, self._late = first + before, self._late[before:]
        if self.stall:
            self.stalled_for_s = time.monotonic() - self._stalled_at
            log.warning("the journal works again after %.1f s", self.stalled_for_s)
            self.stall = ""
        return first

    def shrink_beside(self) -> None:
        """Thin out a journal that has become large, while others go on writing. Not while a write is under way."""
        if self._shrinking is None or self._shrinking.done():
            self._shrinking = asyncio.create_task(self._shrink(self.journal.mark()))

    async def _shrink(self, mark: FileMark) -> None:
        try:
            thinned = await self._aside.run(lambda: self.journal.thin_out(mark), SHRINK_S)
            if thinned is not None:
                await self._submit(lambda: self.journal.take_over(thinned))
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the journal could not be made smaller: %r", error)

    async def newest_epoch(self) -> int:
        """Raises OSError."""
        return await self._submit(lambda: newest_epoch(self.journal.job_dir, self.journal.epoch))

    def _go_ahead(self) -> None:
        ahead, self._ahead = self._ahead, []
        for decide in ahead:
            self._late += decide(0 if self._hangs else self.journal.next_seq + len(self._late))

    @property
    def _hangs(self) -> bool:
        """A write that was given up has not returned."""
        return self._hung is not None and not self._hung.done()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(seconds):
                await self._hurry.wait()
        self._hurry.clear()

    async def _patiently(self, write: asyncio.Future[int]) -> int:
        done, _ = await asyncio.wait({write}, timeout=STALL_S)
        if not done:
            self._stalled(f"{self.journal.path}: a write takes more than {STALL_S:.0f} s")
        while not write.done() and not self.given_up:
            hurry = asyncio.ensure_future(self._hurry.wait())
            either: set[asyncio.Future[Any]] = {write, hurry}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            self._hurry.clear()
        if not write.done():
            self._hung = write
            write.add_done_callback(lambda one: one.cancelled() or one.exception())
            raise OSError(f"a write takes more than {STALL_S:.0f} s")
        return write.result()

    def _stalled(self, why: str) -> None:
        if not self.stall:
            self._stalled_at = time.monotonic()
            log.error("the journal cannot be written (%s): no new actions until it can; the run goes on", why)
            self.stall = why

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((call, future))
        return future

    def _work(self) -> None:
        """The thread. A daemon: a process that wants to end need not wait for a file system that hangs."""
        while True:
            call, future = self._calls.get()
            result, error = None, None
            try:
                result = call()
            except Exception as failure:
                error = failure
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
