"""The training step, read from whatever a script prints.

One `StepReader` for each stream of a rank. It works on bytes, in bounded memory, and looks only at the end of what
it is fed: the newest step is what counts. A counter is believed once it grew; among several the one that goes with a
loss and grows most wins. Formats known: Megatron-LM, torchtitan, HF Trainer and other tqdm bars, accelerate,
DeepSpeed, Lightning, nanoGPT, JSON lines, and anything with a growing number next to step, iter or iteration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from diagnosis.logs.step_places import BAR, EPOCH, EVALUATION_BARS, CounterPlace, Phase, Places, last, losses, places
from diagnosis.shapes import shape

TAIL: Final = 4096
"""Bytes of one `feed` that are read in full; of what comes before only the last line with a counter is."""
PARTIAL: Final = 4096
MAX_COUNTERS: Final = 64

_ANSI: Final = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_OTHER_BARS: Final = re.compile(
    rb"\b(?:map|filter|load|download|upload|generat|tokeniz|eval|valid|val\b|test|predict|fetch|sanity|resolv|sav|group|"
    rb"creat|process|preprocess|sampl|comput|pack|casting|flatten|extract|unpack|read|writ|push|convert|build|index|"
    rb"calculat|quantiz|calibrat|compil|capturing|warm|import|merg|shard|files|setting)"
)
_BAD_LOSS: Final = (b": nan", b"=nan", b"= nan", b"loss nan", b": inf", b"=inf", b"= inf", b"loss inf")


class _Counter:
    """One candidate: a key in the output and the numbers next to it."""

    __slots__ = ("back_from", "base", "epochal", "first", "grown", "increment", "score", "total", "value")

    def __init__(self, value: int, total: int | None) -> None:
        self.value = self.first = value
        self.total = total
        self.base = 0
        self.back_from: tuple[int, int] | None = None
        """(value, base) before the last fall: to be undone when it turns out to be noise."""
        self.grown = 0
        self.increment = 0
        self.score = 0.0
        self.epochal = False

    def note(self, value: int, total: int | None, weight: float, times: int = 1) -> bool:
        """Take the next number; True when it grew."""
        old, self.total = self.value, total or self.total
        if value == old:
            return False
        if value < old:
            # A new epoch counts on from the old one; a fall without a known end may be another loop's counter.
            self.back_from = (old, self.base)
            self.base += old if total is None or old > total else max(total, old)
            self.value = value
            self.score *= 0.8
            return False
        if self.back_from is not None and old < self.back_from[0] < value <= self.back_from[0] + 4 * max(
            self.increment, 1
        ):
            old, self.base = self.back_from  # it continues where it was before the fall
            self.back_from = None
        increment = (value - old) // times
        self.grown += times
        self.score += times * weight * (1.5 if increment == self.increment else 1.0)
        self.increment = increment
        self.value = value
        return True

    @property
    def step(self) -> int:
        return self.base + self.value

    @property
    def last_step(self) -> int | None:
        return None if self.total is None or self.base or self.epochal or self.total < self.value else self.total


class StepReader:
    """Reads one stream. All properties tell what is newest."""

    def __init__(self) -> None:
        self._partial = b""
        self._counters: dict[bytes, _Counter] = {}
        self._best: _Counter | None = None
        self._best_key = b""
        self.phase: Phase = ""
        """What the latest lines say that the script is doing, until a step follows."""
        self.loss: float | None = None
        self.bad_loss = False
        """A loss of NaN or infinity was printed (and no finite one since)."""
        self.bad_loss_step: int | None = None
        """The step at which the first of them was noticed."""

    @property
    def step(self) -> int | None:
        return None if self._best is None else self._best.step

    @property
    def last_step(self) -> int | None:
        """The step at which the run will be complete, where the output tells."""
        return None if self._best is None else self._best.last_step

    def feed(self, data: bytes) -> None:
        """Read more output: any bytes, cut anywhere. Never raises."""
        if not data:
            return
        text = self._partial + data
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._partial = text[max(end, len(text) - PARTIAL) :]
        start = _whole_line(text, end - TAIL) if end > TAIL else 0
        if start:
            self._read_skipped(text[:start].lower())
        if end > start:
            self._read(_plain(text[start:end]))
        # A bar is written as "\r bar": its end only comes with the next one. Closed by a bracket it is whole.
        if b"|" in self._partial and self._partial.rstrip().endswith(b"]"):
            self._read_bars(_plain(self._partial))

    def _read_skipped(self, text: bytes) -> None:
        """Of a flood only the last line with a counter and a bad loss are looked for."""
        at = max(text.rfind(literal) for literal in (b"step", b"iter", b"it/s]", b"s/it]"))
        if at >= 0:
            start = max(text.rfind(b"\n", 0, at) + 1, text.rfind(b"\r", 0, at) + 1, at - 600)
            end = text.find(b"\n", at, at + 600)
            self._read(_plain(text[start : end + 1 if end >= 0 else at + 600]))
        for literal in _BAD_LOSS:
            at = text.find(literal)
            if at >= 0:
                for start, end, training in losses(near := text[max(0, at - 40) : at + 40]):
                    self._note_loss(float(near[start:end]), training)

    def _read(self, text: bytes) -> None:
        """Whole lines. Those of one shape that follow each other are read together."""
        lines, shapes = text.split(b"\n"), shape(text).split(b"\n")
        first = 0
        while first < len(lines):
            here = shapes[first]
            end = first + 1
            while end < len(lines) and shapes[end] == here:
                end += 1
            found = places(here)
            if found is not None:
                self._read_alike(lines[first:end], found)
            first = end

    def _read_alike(self, lines: Sequence[bytes], found: Places) -> None:
        grew_at = max(map(self._read_bars, lines)) if found.bars else -1
        for counter in found.counters:
            if self._count(lines, counter):
                grew_at = max(grew_at, counter.start)
        for start, end, training in found.losses:
            self._note_loss(float(lines[-1][start:end]), training)
        if grew_at >= 0:
            self.phase = ""
        for at, phase in found.hints:
            if at > grew_at and (phase != "over" or self.phase in ("checkpoint", "evaluation")):
                self.phase = "" if phase == "over" else phase

    # ----- counters -----

    def _count(self, lines: Sequence[bytes], place: CounterPlace) -> bool:
        """The numbers at one place of lines alike; True when the best counter grew."""
        first, end = place.value
        values = [int(line[first:end]) for line in lines]
        totals = [_number(line[slice(*place.total)]) for line in (lines[0], lines[-1])] if place.total else (None, None)
        times = len(values) - 1
        step = (values[-1] - values[0]) // times if times else 0
        if step > 0 and values == list(range(values[0], values[-1] + 1, step)):  # the last says it all
            grew = self._note(place.key, values[0], totals[0], place.weight, epochal=place.epochal)
            return (
                self._note(place.key, values[-1], totals[1], place.weight, epochal=place.epochal, times=times) or grew
            )
        grew = False
        for value in values:
            grew = self._note(place.key, value, totals[1], place.weight, epochal=place.epochal) or grew
        return grew

    def _read_bars(self, text: bytes) -> int:
        grew_at = -1
        for match in last(BAR, text):
            timing = match[3]
            if b"/s" not in timing and b"s/" not in timing and b"?" not in timing:
                continue
            start = max(text.rfind(b"\r", 0, match.start()), text.rfind(b"\n", 0, match.start())) + 1
            label = (
                text[max(start, match.start() - 600) : match.start()]
                .split(b"|", 1)[0]
                .rstrip(b"0123456789% ")
                .strip(b": ")
            )
            label = label[-80:]
            if EVALUATION_BARS.search(label):
                self.phase = "evaluation"
            if _OTHER_BARS.search(label):
                continue
            if self._note_bar(label, int(match[1]), _number(match[2]), b"loss" in timing):
                grew_at = match.start()
        return grew_at

    def _note_bar(self, label: bytes, value: int, total: int | None, with_loss: bool) -> bool:
        weight = 2.0 if with_loss else 1.0
        epoch = EPOCH.search(label)
        if epoch is not None and total:
            first = 1 if epoch[2] else 0
            epochs = _number(epoch[2])
            value += max(int(epoch[1]) - first, 0) * total
            return self._note(b"b:epoch", value, total * epochs if epochs else None, weight, epochal=not epochs)
        key = b"b:" + re.sub(rb"\d+", b"", label) + b":%d" % (total or 0)
        before = self._counters.get(key)
        moved = before is not None and value > before.value
        grew = self._note(key, value, total, weight, bar=True)
        if moved and not grew and self._best_key.startswith(b"b:"):
            # Another bar moves and the training's own does not: an evaluation, as in HF Trainer.
            self.phase = "evaluation"
        elif grew:
            self.phase = ""
        return grew

    def _note(
        self,
        key: bytes,
        value: int,
        total: int | None,
        weight: float,
        *,
        epochal: bool = False,
        bar: bool = False,
        times: int = 1,
    ) -> bool:
        """Take a number for a key; True when the best counter grew. `times`: it grew evenly in so many lines."""
        counter = self._counters.get(key)
        if counter is None:
            if len(self._counters) >= MAX_COUNTERS:
                weakest = min((k for k in self._counters if k != self._best_key), key=lambda k: self._counters[k].score)
                del self._counters[weakest]
            counter = self._counters[key] = _Counter(value, total)
        counter.epochal = counter.epochal or epochal
        if not counter.note(value, total, weight, times):
            return False
        best = self._best
        if best is None or best is counter:
            self._best, self._best_key = counter, key
            return True
        both_bars = bar and self._best_key.startswith(b"b:")
        if both_bars and weight <= 1.0 and (counter.total or 0) <= (best.total or 0):
            return False  # the shorter bar is an evaluation inside the longer one
        if both_bars and weight <= 1.0 and best.total is not None and best.value < best.total:
            return False
        if counter.score > 1.5 * best.score + 2.0:
            self._best, self._best_key = counter, key
            return True
        return False

    # ----- loss and phase -----

    def _note_loss(self, value: float, training: bool) -> None:
        """`training`: False for the loss of an evaluation, which may be bad without harm."""
        if math.isfinite(value):
            self.loss = value
            self.bad_loss = False
        elif training:
            self.loss = value
            self.bad_loss = True
            if self.bad_loss_step is None:
                self.bad_loss_step = self.step


def _plain(text: bytes) -> bytes:
    """In lower case and without terminal escapes."""
    if b"\x1b" in text:
        text = _ANSI.sub(b"", text)
    return text.lower()


def _whole_line(text: bytes, start: int) -> int:
    """`start`, moved to the beginning of a line, unless the line is longer than what is read."""
    line = text.find(b"\n", start, start + TAIL // 2)
    return line + 1 if line >= 0 else start


def _number(digits: bytes | None) -> int | None:
    return int(digits) if digits and digits != b"?" else None
