"""Blocks of whole lines: some lines of one, its last ones, those around a place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from diagnosis.logs.progress import WORDS as PROGRESS_WORDS
from diagnosis.logs.progress import ProgressReader

SAMPLE: Final = 3
SAMPLE_BYTES: Final = 16 * 1024
"""Of a block before the last lines: so many lines that may tell of progress, of its first bytes."""
BEFORE_REPORT: Final = 3
AFTER_REPORT: Final = 120
"""Lines around the beginning of a traceback or a launcher's report that are read with it."""


class Block(NamedTuple):
    """Whole lines of a log."""

    text: bytes
    lines: int
    has_frames: bool
    """Of tracebacks; maybe."""


def some(block: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The first few lines of a block that may tell of progress, with their numbers (that of its first is `first`)."""
    text = block[: block.rfind(b"\n", 0, SAMPLE_BYTES) + 1]
    low = text.lower()
    told = at = 0
    number = first
    while told < SAMPLE:
        found = _first_of(PROGRESS_WORDS, low, at)
        if found < 0:
            return
        start, end = low.rfind(b"\n", 0, found) + 1, low.find(b"\n", found)
        number += low.count(b"\n", at, start)
        if ProgressReader.may_tell(line := text[start:end]):
            told += 1
            yield number, line
        at, number = end + 1, number + 1


def _first_of(words: Iterable[bytes], text: bytes, at: int) -> int:
    """Where the first of any of these words is; -1: nowhere."""
    found, end = -1, len(text)
    for word in words:
        place = text.find(word, at, end)
        if place >= 0:
            found, end = place, place + len(word) - 1
    return found


def last_lines(block: bytes, count: int) -> list[bytes]:
    """So many lines of a block, fewer where it has no more."""
    return block.rsplit(b"\n", count)[-count:] if count > 0 else []


def after(block: bytes, at: int, lines: int) -> tuple[int, int]:
    """Where so many lines from `at` on end, and how many of them are beyond the block."""
    end = at - 1
    for taken in range(lines):
        end = block.find(b"\n", at)
        if end < 0:
            return len(block), lines - taken - 1
        at = end + 1
    return end, 0


def before(block: bytes, start: int) -> int:
    """Where the lines before the one at `start` begin."""
    for _ in range(BEFORE_REPORT):
        if start <= 0:
            return 0
        start = block.rfind(b"\n", 0, start - 1) + 1
    return start
