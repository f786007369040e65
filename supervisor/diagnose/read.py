"""Reads files one by one into log summaries, flight recorder dumps and stacks; large inputs in processes of their own.

Nothing here decides: `unbroken diagnose` makes one incident of all readings. A process that reads has a limit on its
memory, so that a hostile file ends only its own reading.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from diagnosis import rules, tracebacks
from diagnosis import stacks as stack_dumps
from diagnosis.flight.dumps import RankDump, read_dump
from diagnosis.incident import LauncherFailure, LoggedTraceback, LogSummary
from diagnosis.kernel import log as kernel_rules
from diagnosis.kernel.xid import default_tables
from diagnosis.logs import scan
from diagnosis.logs.reader import IN_FULL, LogReader, Place
from diagnosis.logs.templates import MAX_SHAPES, TemplateBook
from diagnosis.rules import RuleMatch
from diagnosis.signals import Finding, NodeEvidence, RankStack, clean_text, from_wait_status
from supervisor.diagnose import log_files

LARGEST: Final = 64 << 20
"""At most this many bytes are read of a file that is not read line by line."""
AT_ONCE_BYTES: Final = 4 << 20
"""From this size on all rules are compiled into one scan (0.5 s)."""
POOL_BYTES: Final = 64 << 20
"""From this size on processes are started."""
WORKER_BYTES: Final = 6 << 30
"""Address space of a process that reads."""
MAX_KILLED: Final = 8
"""After this many files that killed the process that read them, the rest is left out."""
MAX_RANK: Final = 1 << 24
MAX_STATUS: Final = 0xFFFF
"""The largest wait status."""
HEAP_BYTES: Final = 8 << 20
"""glibc keeps at least this much freed memory for the next block, instead of giving it back for each."""
FULL_LINES: Final = 60_000
"""This many lines are read in full at the ends of all files together."""
ALL_SHAPES: Final = 400_000
LEAST_SHAPES: Final = 500
"""Shapes of lines that are kept of all files together, and at least of each."""


class ReadOptions(NamedTuple):
    """How to read; sent to each process once."""

    site: dict[str, Any] = {}
    """Rows over the tables of Xids and kernel messages."""
    compiled: bytes = b""
    """The compiled scan; empty: shapes are looked up."""
    in_full: int = IN_FULL
    """All numbers are read in this many lines at the end of each file."""
    shapes: int = 0
    """So many shapes of the lines of each file are counted."""


class Reading(NamedTuple):
    """What one file contains."""

    logs: tuple[LogSummary, ...] = ()
    dumps: tuple[RankDump, ...] = ()
    stacks: tuple[RankStack, ...] = ()
    book: TemplateBook | None = None
    """Its lines, counted."""
    problem: str = ""
    unreadable: bool = False
    """The file cannot be opened or read at all; `problem` says why."""


def joined_book(readings: Iterable[Reading]) -> TemplateBook:
    """The lines of all these files."""
    book = TemplateBook()
    for one in readings:
        if one.book is not None:
            book.join(one.book)
    return book


class Reader:
    """Reads files, one after another."""

    def __init__(self, settings: ReadOptions) -> None:
        _ = bytes(HEAP_BYTES)  # never touched; once it is gone, glibc keeps twice as much before it gives any back
        rules.use(settings.site.get("rule") or ())
        self._tables = default_tables().with_site(settings.site)
        self._messages = kernel_rules.default().with_site(settings.site.get("kernel") or {})
        self._scan = None
        if settings.compiled:
            self._scan = scan.at_once(scan.patterns(kernel=self._messages), settings.compiled)
        self._in_full = settings.in_full
        self._shapes = settings.shapes

    def read(self, source: log_files.Source, place: Place, note: Callable[[int], None] | None = None) -> Reading:
        """Everything that a file contains; `note` is called with the bytes that were read. Never raises."""
        try:
            return self._read(source, place, note)
        except OSError as error:
            return Reading(problem=f"{source.name}: {error.strerror or error}", unreadable=True)
        except MemoryError:
            return Reading(problem=f"{source.name}: takes more memory than there is")

    def _read(self, source: log_files.Source, place: Place, note: Callable[[int], None] | None) -> Reading:
        with contextlib.closing(log_files.open_source(source)) as stream:
            head = log_files.read_up_to(stream, log_files.HEAD)
            kind = log_files.content(head, source.path)
            if kind == "text":
                reading = self._text(log_files.blocks(stream, head), source, place, note)
                damage = log_files.damage(stream)
                return reading._replace(problem=f"{source.name}: {damage}") if damage else reading
            if kind == "binary":
                return Reading(problem=f"{source.name}: no text, and no dump that is known: left out")
            data = head + log_files.read_up_to(stream, LARGEST - len(head))
        try:
            return self._structured(kind, data, source, place)
        except (ValueError, msgspec.DecodeError, MemoryError, RecursionError) as error:
            return Reading(problem=f"{source.name}: {clean_text(str(error), 200) or 'too large'}")

    def log(self, source: log_files.Source, place: Place) -> LogReader:
        return LogReader(
            source.name,
            self._tables,
            self._messages,
            engine=scan.AtOnce(self._scan) if self._scan is not None else None,
            place=place,
            year=time.gmtime(source.modified).tm_year if source.modified else None,
            in_full=self._in_full,
        )

    def _text(
        self, blocks: Iterator[bytes], source: log_files.Source, place: Place, note: Callable[[int], None] | None
    ) -> Reading:
        log, book = self.log(source, place), self._new_book()
        for block in blocks:
            if book is not None:
                book.feed(source.name, block, log.lines + 1, place.rank)
            log.feed(block)
            if note is not None:
                note(len(block) + 1)
        log.end()
        return Reading(logs=(log.summary(),), book=book)

    def _new_book(self) -> TemplateBook | None:
        return TemplateBook(self._shapes) if self._shapes else None

    def _structured(self, kind: log_files.Content, data: bytes, source: log_files.Source, place: Place) -> Reading:
        if kind == "flight":
            return Reading(dumps=(read_dump(data, place.rank),))
        if kind == "stacks":
            return Reading(stacks=tuple(stack_dumps.read_dump(data, source.path)))
        if kind == "evidence":
            return self._evidence(msgspec.json.decode(data, type=NodeEvidence), source)
        if kind == "journal":
            return self._journal(data, source)
        return Reading(logs=_record(kind, data, source, place))

    def _evidence(self, evidence: NodeEvidence, source: log_files.Source) -> Reading:
        """The evidence that an agent collected."""
        logs, book = [], self._new_book()
        for output in evidence.outputs:
            shown = source._replace(path=f"{source.path}#rank{output.rank}")
            log = self.log(shown, Place(output.rank, evidence.node))
            own = [line for line in output.traceback if line not in output.tail]
            text = "\n".join([*own, *output.tail]).encode(errors="replace")
            if book is not None:
                book.feed(shown.name, text, 1, output.rank)
            log.feed(text)
            log.end()
            logs.append(log.summary())
            error = tracebacks.from_error_file(output.error_file) if output.error_file else None
            if error is not None:
                logged = LoggedTraceback(traceback=error, line=1, rank=output.rank, node=evidence.node)
                logs.append(LogSummary(source=shown.name, node=evidence.node, rank=output.rank, tracebacks=(logged,)))
        last_bad = max((one.order for one in evidence.exits if one.signal or one.code), default=0)
        failures = tuple(
            LauncherFailure(
                rank=one.rank,
                line=1,
                text=f"rank {one.rank} ended with " + (f"signal {one.signal}" if one.signal else f"code {one.code}"),
                local_rank=one.local_rank,
                host=evidence.node,
                pid=one.pid,
                code=one.code,
                signal=one.signal,
                at=one.ended_at,
            )
            for one in evidence.exits
            # A rank that left while the others went on may be the reason why they failed.
            if not one.stopped_by_us and (one.signal or one.code or one.order < last_bad)
        )
        if failures:
            logs.append(LogSummary(source=source.name, node=evidence.node, launcher=failures))
        # Findings in a rank's output are read again with that output.
        matches = tuple(_match(one) for one in evidence.findings if one.rank is None or one.evidence.source != "output")
        if matches:
            logs.append(LogSummary(source=source.name, node=evidence.node, kind="kernel", matches=matches))
        return Reading(logs=tuple(logs), stacks=evidence.stacks, book=book)

    def _journal(self, data: bytes, source: log_files.Source) -> Reading:
        """A job's journal alone: the evidence that agents sent of the last attempt that failed."""
        found: list[NodeEvidence] = []
        for line in data.split(b"\n"):
            if b"evidence_arrived" not in line:
                continue
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=_JournalLine).evidence)
        last = max((one.attempt for one in found), default=0)
        readings = [self._evidence(one, source) for one in found if one.attempt == last]
        return Reading(
            logs=tuple(log for one in readings for log in one.logs),
            stacks=tuple(stack for one in readings for stack in one.stacks),
            book=joined_book(readings),
        )


class _Body(msgspec.Struct):
    evidence: NodeEvidence


class _JournalLine(msgspec.Struct):
    body: _Body

    @property
    def evidence(self) -> NodeEvidence:
        return self.body.evidence


class _Exit(msgspec.Struct):
    """`rank<r>.exit` (docs/node-files.md)."""

    rank: int
    status: int
    local_rank: int | None = None
    pid: int | None = None
    ended_at: float | None = None
    stopped_by_us: bool = False


def _record(kind: log_files.Content, data: bytes, source: log_files.Source, place: Place) -> tuple[LogSummary, ...]:
    """An exit record of ours, or torch elastic's error file."""
    if kind == "exit":
        record = msgspec.json.decode(data, type=_Exit)
        if not 0 <= record.rank <= MAX_RANK or not 0 <= record.status <= MAX_STATUS:
            raise ValueError("an exit record with a rank or a status that cannot be")
        code, signal, _ = from_wait_status(record.status)
        if record.stopped_by_us or not (code or signal):
            return ()
        failure = LauncherFailure(
            rank=record.rank,
            line=1,
            text=f"rank {record.rank} ended with " + (f"signal {signal}" if signal else f"code {code}"),
            local_rank=record.local_rank,
            host=place.node,
            pid=record.pid,
            code=code,
            signal=signal,
            at=record.ended_at,
        )
        return (LogSummary(source=source.name, rank=record.rank, node=place.node, launcher=(failure,)),)
    error = tracebacks.from_error_file(data.decode(errors="replace"))
    if error is None:
        return ()
    logged = LoggedTraceback(traceback=error, line=1, rank=place.rank, node=place.node, at=_error_at(data))
    return (LogSummary(source=source.name, rank=place.rank, node=place.node, tracebacks=(logged,)),)


def _error_at(data: bytes) -> float | None:
    """The time of the error, by the error file."""
    try:
        return float(msgspec.json.decode(data)["message"]["extraInfo"]["timestamp"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None


def _match(finding: Finding) -> RuleMatch:
    gpu = finding.gpu or finding.gpu_uuid
    device = {"device": gpu} if gpu else {}
    return RuleMatch(
        rule=finding.rule,
        role="cause",
        failure_class=finding.failure_class,
        confidence=finding.confidence,
        severity=finding.severity,
        scope=finding.scope,
        text=finding.evidence.text,
        line=finding.evidence.line or 0,
        rank=finding.rank,
        node=finding.node,
        at=finding.at or None,
        fields={**device, **finding.fields},
        count=finding.count,
    )


# ----- several files -----


def settings(
    sources: Sequence[log_files.Source], site: dict[str, Any], *, templates: bool = False, more_bytes: int = 0
) -> ReadOptions:
    """The fastest way to read these files; with `templates` their lines are counted as well.

    `more_bytes`: of other files that are read in the same way, before or after.
    """
    at_once = sum(source.size for source in sources) + more_bytes >= AT_ONCE_BYTES
    compiled = _compiled(rules.default().file, msgspec.json.encode(site.get("kernel"))) if at_once else b""
    in_full = min(IN_FULL, max(60, FULL_LINES // max(len(sources), 1)))
    shapes = min(MAX_SHAPES, max(LEAST_SHAPES, ALL_SHAPES // max(len(sources), 1))) if templates else 0
    return ReadOptions(site, compiled, in_full, shapes)


@functools.lru_cache(1)
def _compiled(_: rules.RuleFile, kernel: bytes) -> bytes:
    """One scan for all rules in use: a comparison reads several runs with it. Empty: hyperscan does not work here."""
    messages = kernel_rules.default().with_site(msgspec.json.decode(kernel) or {})
    found = scan.at_once(scan.patterns(kernel=messages))
    return found.dump() if found is not None else b""


_reader: Reader | None = None


def _start(how: ReadOptions) -> None:
    """In each process of the pool."""
    import resource

    global _reader
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES if most < 0 else min(WORKER_BYTES, most), most))
    _reader = Reader(how)


def _read(source: log_files.Source, place: Place) -> Reading:
    assert _reader is not None
    return _reader.read(source, place)


def read_all(
    sources: Sequence[log_files.Source],
    places: Sequence[Place],
    how: ReadOptions,
    note: Callable[[int], None],
) -> Iterator[Reading]:
    """All files, in order. `note` is called with bytes that were read."""
    total = sum(source.size for source in sources)
    workers = min(len(os.sched_getaffinity(0)), len(sources))
    if workers > 1 and total >= POOL_BYTES:
        yield from _in_processes(sources, places, how, note, workers)
        return
    reader = Reader(how)
    for source, place in zip(sources, places, strict=True):
        yield reader.read(source, place, note)


def _in_processes(
    sources: Sequence[log_files.Source],
    places: Sequence[Place],
    how: ReadOptions,
    note: Callable[[int], None],
    workers: int,
) -> Iterator[Reading]:
    """A process that is killed (for its memory) takes the pool along: what is left is then read by one at a time."""
    readings: dict[int, Reading] = {}
    left = sorted(range(len(sources)), key=lambda n: -sources[n].size)
    for _ in range(MAX_KILLED):
        for number, reading in _in_pool({n: (sources[n], places[n]) for n in left}, how, workers):
            readings[number] = reading
            note(sources[number].size)
        left = [n for n in left if n not in readings]
        if left and workers == 1:
            readings[left[0]] = _killed(sources[left.pop(0)])
        workers = 1
        if not left:
            break
    yield from (readings[n] if n in readings else _killed(sources[n]) for n in range(len(sources)))


def _killed(source: log_files.Source) -> Reading:
    return Reading(problem=f"{source.name}: the process that read it was killed")


def _in_pool(
    given: dict[int, tuple[log_files.Source, Place]], how: ReadOptions, workers: int
) -> Iterator[tuple[int, Reading]]:
    """The readings as they come; not all of them if a process was killed."""
    import multiprocessing
    import signal
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (how,))
    try:
        # Ctrl-C is for this process: the others inherit that it is blocked, also while they start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = {}
        try:
            with contextlib.suppress(BrokenProcessPool):
                for number, one in given.items():
                    futures[pool.submit(_read, *one)] = number
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            with contextlib.suppress(BrokenProcessPool):
                yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
