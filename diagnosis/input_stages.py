"""Which stage of the input is slow, from samples of what the workers of a data loader do.

A sample is the stack of a worker's main thread, and what it waits for in the kernel. It belongs to the innermost frame
that `input_stages.toml` knows; else to reading files, if the kernel says so; else to the user's own function, by name.
Stacks and source lines are hostile input: bounded and cleaned, matched and shown, never run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import clean_line
from diagnosis.tables import load

WaitsFor = Literal["", "file", "network"]
MOST_FRAMES: Final = 200
TEXT_LENGTH: Final = 300
STAGES_SHOWN: Final = 6

_WORKER = re.compile(r"torch/utils/data/_utils/worker\.py$")
_FETCHER = re.compile(r"torch/utils/data/(?:_utils/fetch|dataloader)\.py$")
_QUEUE = re.compile(r"multiprocessing/(?:queues|connection)\.py$|/selectors\.py$|/threading\.py$|/queue\.py$")
_OF_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3[.\d]*/|^<|/torch/utils/data/")


class LoaderFrame(NamedTuple):
    function: str
    file: str
    line: int
    source: str = ""
    """That line, where it could be read."""

    @property
    def text(self) -> str:
        told = f"{self.file}: {self.function}"
        return (f"{told} | {self.source}" if self.source else told)[:TEXT_LENGTH]


class LoaderSample(NamedTuple):
    frames: tuple[LoaderFrame, ...]
    """Innermost first."""
    waits_for: WaitsFor = ""


class InputStage(NamedTuple):
    stage: str
    what: str
    pattern: re.Pattern[str]
    advice: str


class StageShare(NamedTuple):
    stage: str
    what: str
    """In words, with the place."""
    share: float
    """Of the workers' busy time."""
    advice: str


class InputProfile(NamedTuple):
    samples: int
    """Of workers, or of the rank itself while it is in its loader."""
    idle: float
    """Share of the samples in which a worker had nothing to do: its batches are ready."""
    stages: tuple[StageShare, ...]
    """The largest first."""


ROWS: Final = tuple(
    InputStage(row["stage"], row["what"], re.compile(row["pattern"]), row["advice"])
    for row in load("diagnosis", "input_stages.toml")["stage"]
)
_READING = next(row for row in ROWS if row.stage == "read")
_FETCHING = next(row for row in ROWS if row.stage == "network")
_OWN = InputStage(
    "own code", "", re.compile(r"(?!)"), "look at that function, do the work once before training, or use more workers"
)


def read_stack(dump: bytes) -> tuple[LoaderFrame, ...]:
    """The thread of `py-spy dump --json` that loads data; empty: none does."""
    try:
        threads = msgspec.json.decode(dump)
        for thread in threads[:64]:
            frames = tuple(map(_frame, thread["frames"][:MOST_FRAMES]))
            if any(_WORKER.search(one.file) or _FETCHER.search(one.file) for one in frames):
                return frames
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError):
        pass  # it was not read in time, or is no such dump
    return ()


def _frame(raw: dict[str, Any]) -> LoaderFrame:
    file = raw.get("filename") or raw.get("short_filename") or ""
    return LoaderFrame(clean_line(str(raw.get("name", "")), 120), clean_line(str(file), 200), int(raw.get("line") or 0))


def stage_of(sample: LoaderSample) -> tuple[InputStage, str] | None:
    """The row, and the stage in words; None: the worker waits for something to do."""
    inner: list[LoaderFrame] = []
    for frame in sample.frames:
        if _WORKER.search(frame.file) or _FETCHER.search(frame.file):
            break
        inner.append(frame)
    else:
        return None
    boundary = sample.frames[len(inner)]
    if all(_QUEUE.search(frame.file) for frame in inner) and (inner or _WORKER.search(boundary.file)):
        return None  # a worker without work, or the rank that waits for one
    own = next((frame for frame in inner if not _OF_LIBRARIES.search(frame.file)), None)
    if sample.waits_for:
        row = _READING if sample.waits_for == "file" else _FETCHING
        return row, f"{row.what}{_in(own)}"
    for frame in inner:
        for row in ROWS:
            if row.pattern.search(frame.text):
                return row, row.what + (_in(own) if row is _READING else _library(frame))
    if own is not None:
        return _OWN, f"your function {own.function} ({_base(own.file)})"
    place = inner[0] if inner else boundary
    return _OWN, f"{place.function} ({_base(place.file)})"


def _in(own: LoaderFrame | None) -> str:
    return f", in {own.function} ({_base(own.file)})" if own is not None else ""


def _library(frame: LoaderFrame) -> str:
    """` (PIL)`: whose code it is."""
    found = re.search(r"/(?:site|dist)-packages/([A-Za-z0-9_]+)", frame.file)
    if found:
        return f" ({found[1]})"
    called = re.search(r"\b(cv2|zlib|json|pickle|np|tokenizer)\b", frame.source)
    return f" ({called[1]}, in {frame.function})" if called else f" ({_base(frame.file)})"


def _base(file: str) -> str:
    return file.rpartition("/")[2]


def profile(samples: Iterable[LoaderSample]) -> InputProfile:
    """What the workers do, the largest part first."""
    count, counted, rows = 0, Counter[str](), dict[str, InputStage]()
    for sample in samples:
        if not sample.frames:
            continue
        count += 1
        found = stage_of(sample)
        if found is None:
            continue
        rows.setdefault(found[1], found[0])
        counted[found[1]] += 1
    busy = sum(counted.values())
    stages = tuple(
        StageShare(rows[told].stage, told, number / busy, rows[told].advice)
        for told, number in counted.most_common(STAGES_SHOWN)
    )
    return InputProfile(count, (count - busy) / count if count else 0.0, stages)


def advice(found: InputProfile, workers: int, cpus: float, free_bytes: int) -> tuple[str, ...]:
    """What would help, in words. `cpus`: those that each rank of the node has for itself."""
    if not found.stages:
        return ()
    told = []
    largest = found.stages[0]
    if workers == 0:
        told.append("the script loads data in its own process: give the DataLoader num_workers, so that it overlaps")
    elif found.idle > 0.5:
        told.append(
            "the workers are idle half of the time: the rank waits for something else, or for the first batches"
        )
    elif workers + 1 < cpus:
        told.append(f"{workers} workers for each rank, and {cpus:.0f} CPUs: give the DataLoader more num_workers")
    told.append(largest.advice)
    if largest.stage in ("decode images", "decompress", "read", "network", "tokenize") and free_bytes > 8 << 30:
        told.append(
            f"{free_bytes >> 30} GiB of memory are free on the node: a cache of what is needed again fits there"
        )
    return tuple(told)
