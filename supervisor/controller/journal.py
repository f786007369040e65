"""The journal: everything the job ever saw, one checksummed line a record, in files that need no locks.

Each controller claims an epoch by creating `epochs/<n>` (a hard link: exactly one can win, on shared file systems
too) and writes `journal.<n>.jsonl`, which no other controller ever writes. Its first record, `opened`, says up to
which record its writer has read the older files (`after_seq`): what an older controller adds behind that point is
dropped by every reader, so a controller that was only asleep cannot change history (docs/adr/0001).

A file is read up to its first line that is not whole; the rest of it is reported and ignored.
"""

from __future__ import annotations

import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec

from supervisor.controller.epochs import Superseded, claim_epoch, newest_epoch, sync_folder
from supervisor.messages import Action, AnyEvent, Assign, decode_event

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


class History(NamedTuple):
    """What a job folder's journals say, in order."""

    records: list[Record]
    problems: list[str]
    """What could not be read, in words."""
    size_bytes: int

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
        """Whether `shrink` should be called when there is time."""
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

    def shrink(self) -> None:
        """Thin out everything so far. Raises OSError: nothing is lost then."""
        self._limit *= 2
        self.compact(list(thin(read_history(self.job_dir).records)))
        self._limit = max(self._limit // 2, 2 * self._size)

    def compact(self, records: Sequence[Record]) -> None:
        """Put `records` (see `thin`) at the start of this epoch's file and remove the older files.

        Readers see either all the old files or the new one: the file is replaced in one step, and its `opened`
        record takes over from everything older.
        """
        opened = msgspec.json.encode(Opened(after_seq=0, host=socket.gethostname(), pid=os.getpid()))
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        size = 0
        with open(temporary, "wb") as file:
            size += file.write(format_record(0, records[0].at if records else 0.0, self.epoch, "opened", opened))
            for record in records:
                if record.kind != "opened":
                    size += file.write(
                        format_record(record.seq, record.at, self.epoch, record.kind, bytes(record.body))
                    )
            file.flush()
            os.fsync(file.fileno())
        # Opened before it gets its name: whatever fails from here on, nothing is written to a file that is gone.
        fresh = self._open_file(temporary)
        try:
            os.replace(temporary, self.path)
        except OSError:
            fresh.close()
            raise
        old, self._file, self._size = self._file, fresh, size
        old.close()
        sync_folder(self.job_dir)
        for epoch, path in journal_files(self.job_dir):
            if epoch < self.epoch:
                path.unlink(missing_ok=True)


def open_journal(
    job_dir: Path,
    *,
    forget: bool = False,
    open_file: Callable[[Path], JournalFile] = _OsFile,
    max_bytes: int = MAX_BYTES,
) -> tuple[Journal, History]:
    """Claim the next epoch of `job_dir`, read all that is before it, and open its file. Raises OSError.

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
    if history.size_bytes > max_bytes:
        journal.compact(list(thin(history.records)))
    return journal, history


def journal_path(job_dir: Path, epoch: int) -> Path:
    return job_dir / f"journal.{epoch}.jsonl"


def journal_files(job_dir: Path) -> list[tuple[int, Path]]:
    """(epoch, path) of every journal file in `job_dir`, oldest first. Raises OSError."""
    found = ((_FILE.fullmatch(path.name), path) for path in job_dir.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def read_history(where: Path) -> History:
    """Everything the journals of a job folder (or one journal file) say, in order. Raises OSError."""
    files = [(0, where)] if where.is_file() else journal_files(where)
    records: list[Record] = []
    problems: list[str] = []
    size = 0
    for _, path in files:
        own, problem = _read_file(path)
        size += path.stat().st_size
        if problem:
            problems.append(problem)
        if not own:
            continue
        opened = own[0]
        if opened.kind != "opened":
            problems.append(f"{path.name}: does not begin with an `opened` record: ignored")
            continue
        after = msgspec.json.decode(opened.body, type=Opened).after_seq
        dropped = len(records)
        while records and records[-1].seq > after:
            records.pop()
        if after > 0 and len(records) < dropped:
            problems.append(
                f"{path.name}: {dropped - len(records)} records that an older controller wrote after epoch "
                f"{opened.epoch} had begun are dropped"
            )
        records.extend(own)
    return History(records, problems, size)


def _read_file(path: Path) -> tuple[list[Record], str]:
    records: list[Record] = []
    last = -1
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            record = parse_record(line)
            if record is None or record.seq <= last:
                return records, f"{path.name}:{number}: not a whole record; reading stops here"
            last = record.seq
            records.append(record)
    return records, ""


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
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if record.crc32 == zlib.crc32(head) else None


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a `decided` record: what the job wanted done about event number `of`."""

    of: int
    actions: tuple[Action, ...] = ()
    error: str = ""
    """Set when the job failed on the event: it went on without it, and every replay does the same."""


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
    decisions: dict[int, Decided] = {}
    for record in records:
        if record.kind == "decided":
            try:
                decided = _decode_decided(record.body)
            except msgspec.ValidationError:
                continue
            decisions[decided.of] = decided
    for record in records:
        if record.kind == "event":
            try:
                event = decode_event(record.body)
            except msgspec.ValidationError as error:
                if problems is not None:
                    problems.append(f"record {record.seq} is skipped: {error}")
                continue
            yield Step(record.seq, record.epoch, event, decisions.get(record.seq))


def slim(actions: Iterable[Action]) -> tuple[Action, ...]:
    """`actions` with each round's nodes named once (4,000 nodes would otherwise repeat 4,000 names each)."""
    seen: set[tuple[int, str, int]] = set()
    kept: list[Action] = []
    for action in actions:
        round_ = action.assignment.round if isinstance(action, Assign) else None
        if isinstance(action, Assign) and round_ is not None:
            key = (round_.attempt, round_.store_host, round_.store_port)
            if key in seen:
                bare = msgspec.structs.replace(round_, nodes=())
                action = Assign(assignment=msgspec.structs.replace(action.assignment, round=bare))
            seen.add(key)
        kept.append(action)
    return tuple(kept)


class _Of(msgspec.Struct, frozen=True):
    of: int


def thin(records: Sequence[Record]) -> Iterator[Record]:
    """`records` without the progress reports on which nothing was decided and which another one follows.

    They are nearly all of a long journal, and a job that sees only the last of a row of them ends in the same state.
    """
    decided = {msgspec.json.decode(record.body, type=_Of).of for record in records if record.kind == "decided"}
    for index, record in enumerate(records):
        following = records[index + 1] if index + 1 < len(records) else None
        if following is None or record.seq in decided or not (_is_progress(record) and _is_progress(following)):
            yield record


_PROGRESS = b'"event":"progressed"'


def _is_progress(record: Record) -> bool:
    body = bytes(record.body)
    return record.kind == "event" and _PROGRESS in body and b'"first":true' not in body
