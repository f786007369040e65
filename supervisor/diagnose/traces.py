"""Reads traces that are files: Kineto's of ranks, and timelines of operations as ByteDance published them.

A file is hostile input: it is read in pieces, an event at a time, and never as a whole. What is no event is left out.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from diagnosis.step_time import NoSteps, RankTime, TraceEvents
from diagnosis.whatif import Operation
from supervisor.errors import ExitCode, UnbrokenError

PIECE: Final = 1 << 20
MOST_BYTES: Final = 4 << 30
"""Of one trace, unpacked: what is behind is not read."""
LONGEST_EVENT: Final = 1 << 20
MOST_OPERATIONS: Final = 5_000_000
MOST_STAGES: Final = 4096
COLUMNS: Final = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
"""Of a timeline of operations, in the order of `Operation`; times in seconds."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_RANK = re.compile(r'"rank"\s*:\s*(\d{1,7})')
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,7})")


class TraceUnreadable(UnbrokenError):
    """A trace cannot be read, or is none."""

    exit_code = ExitCode.NOT_FOUND


def is_timeline(path: Path) -> bool:
    """Whether it is a timeline of operations, and no Kineto trace. Raises TraceUnreadable."""
    with _opened(path) as file:
        begin = file.read(4096)
    return begin.startswith(b"PAR1") or b"optype" in begin.partition(b"\n")[0]


def read_timeline(path: Path) -> Iterator[Operation]:
    """The operations of a Parquet or CSV file. Raises TraceUnreadable."""
    with _opened(path) as file:
        is_parquet = file.read(4) == b"PAR1"
    rows = _parquet_rows(path) if is_parquet else _csv_rows(path)
    for count, row in enumerate(rows):
        if count >= MOST_OPERATIONS:
            raise TraceUnreadable(f"{path} has over {MOST_OPERATIONS:,} operations: cut it to fewer steps")
        try:
            dp_rank, stage, rank, step, kind, start, duration, *numbers = (row[one] for one in COLUMNS)
            begin_s, duration_s = float(start), float(duration)
            if not (math.isfinite(begin_s) and math.isfinite(duration_s) and 0 <= int(stage) < MOST_STAGES):
                raise ValueError("a number is out of range")
            yield Operation(
                int(dp_rank),
                int(stage),
                int(rank),
                int(step),
                str(kind)[:80],
                begin_s,
                duration_s,
                *map(int, numbers),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            needed = ", ".join(COLUMNS)
            raise TraceUnreadable(f"{path}: row {count + 1} is no operation ({error}); needed: {needed}") from None


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise TraceUnreadable(f"{path} is a Parquet file: `pip install 'unbroken[traces]'` to read it") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1 << 16, columns=list(COLUMNS)):
                columns = batch.to_pydict()
                for values in zip(*(columns[name] for name in COLUMNS), strict=True):
                    yield dict(zip(COLUMNS, values, strict=True))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's errors are of these classes
        raise TraceUnreadable(f"{path} cannot be read: {str(error)[:200]}") from None


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with _opened(path) as file:
            yield from csv.DictReader(io.TextIOWrapper(file, "utf-8", "replace", newline=""))
    except csv.Error as error:
        raise TraceUnreadable(f"{path} cannot be read: {error}") from None


def read_rank(path: Path, otherwise: int = 0) -> RankTime:
    """Where the steps of the rank went whose trace this is. `otherwise`: its number where the trace has none.

    Raises TraceUnreadable.
    """
    events = TraceEvents()
    rank = _RANK_IN_NAME.search(path.name)
    number = int(rank[1]) if rank else None
    for event in trace_events(path):
        if isinstance(event, int):
            number = event if number is None else number
        else:
            events.add(event)
    try:
        return events.time(otherwise if number is None else number)
    except NoSteps as error:
        raise TraceUnreadable(f"{path}: {error}") from None


def trace_events(path: Path) -> Iterator[Mapping[str, Any] | int]:
    """The events of a Chrome trace, and before them the rank that it says it is of. Raises TraceUnreadable."""
    with _opened(path) as file:
        pieces = _pieces(file, path)
        text = ""
        for piece in pieces:
            text += piece
            if begin := _EVENTS.search(text):
                break
            if len(text) > 64 * PIECE:
                raise TraceUnreadable(f"{path} is no trace: its first {len(text) >> 20} MiB have no traceEvents")
        else:
            raise TraceUnreadable(f"{path} is no trace: it has no traceEvents")
        if rank := _RANK.search(text, 0, begin.start()):
            yield int(rank[1])
        yield from _objects(text[begin.end() :], pieces, path)


def _objects(text: str, pieces: Iterator[str], path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON array, whose rest comes in pieces."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if len(text) - at > LONGEST_EVENT:
                raise TraceUnreadable(f"{path} is damaged: an event is over {LONGEST_EVENT >> 20} MiB") from None
            piece = next(pieces, None)
            if piece is None:  # the writer was killed, or the limit is reached
                return
            text, at = text[at:] + piece, 0
            continue
        if isinstance(value, dict):
            yield value
        if at > PIECE:
            text, at = text[at:], 0


def _pieces(file: IO[bytes], path: Path) -> Iterator[str]:
    decoder, count = codecs.getincrementaldecoder("utf-8")("replace"), 0
    while count < MOST_BYTES:
        try:
            data = file.read(PIECE)
        except (OSError, EOFError, zlib.error) as error:  # a packed file that was cut off, or is damaged
            raise TraceUnreadable(f"{path} cannot be read to its end: {error}") from None
        if not data:
            return
        count += len(data)
        yield decoder.decode(data)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, unpacked if it is packed. Raises TraceUnreadable."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked  # type: ignore[misc]
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TraceUnreadable(f"{path} cannot be read: {why}") from None


def trace_files(folder: Path) -> Sequence[Path]:
    return sorted(one for one in folder.glob("kt_*.json*") if not one.name.endswith((".part", ".tmp")))
