"""The training step, read from whatever a script prints.

One `StepReader` for each stream of a rank. It works on bytes, in bounded memory, and looks only at the end of what
it is fed: the newest step is what counts. A counter is believed once it grew; among several the one that goes with a
loss and grows most wins. Formats known: Megatron-LM, torchtitan, HF Trainer and other tqdm bars, accelerate,
DeepSpeed, Lightning, nanoGPT, JSON lines, and anything with a growing number next to step, iter or iteration.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from diagnosis.logs.loss import LossWatch
from diagnosis.signals import LossAlarm
from diagnosis.text import shape

NEWEST: Final = 16
"""Of the counters in a line only the last few are read: the newest counts."""
SHAPE_BYTES: Final = 600
SHAPES_KEPT: Final = 256
"""The positions of numbers are remembered for shapes up to this length, and for this many."""

Phase = Literal["", "checkpoint", "evaluation", "end"]

_ANSI: Final = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_COUNTER: Final = re.compile(
    rb"(?:step|iter(?:ation)?|\bit)s?(?:['\"]?\s{0,3}[:=#]\s{0,12}|\s{1,12})[\[(]?\s{0,12}(\d{1,12})"
    rb"(?!\d|\.\d|%|\s?(?:ms|secs?|seconds?|min|it/s|per)\b)(?:\s{0,3}(?:/|of)\s{0,12}(\d{1,12}))?"
)
BAR: Final = re.compile(rb"\|\s{0,3}(\d{1,12})/(\d{1,12}|\?)\s\[([^\]\r\n]{0,300})\]")
_PAIR: Final = re.compile(rb"\[\s{0,8}(\d{1,12})/(\d{1,12})(?:\s\([^)]{0,8}\))?\]")
EPOCH: Final = re.compile(
    rb"epoch(?:\(train\))?['\"]?\s{0,2}[:=]?\s{0,2}[\[(]?\s{0,3}(\d{1,6})(?![\d.])(?:\s?/\s?(\d{1,6}))?"
)
_WORD_BEFORE: Final = re.compile(rb"([a-z]{2,20})[_ \-]$")
_PATH_BEFORE: Final = re.compile(
    rb"(?:(?:^|[\s'\"`([{<,;:=])(?:~|\.{1,2})?/|(?:ckpt|checkpoint)[^\s/]{0,40}/)[^\s'\"]{0,150}$"
)
_PATH_AFTER: Final = re.compile(
    rb"/(?=[\s'\"]|$)|/[\w.\-]{1,100}/|[^\s'\",;|]{0,100}\.(?:ckpt|pth?|bin|safetensors|distcp|tar|zip|npz|pkl|h5|json)\b"
)
"""A number in a path counts nothing: `/ckpt/step=80/model.pt` names what is written, read or removed."""
_VALUE: Final = (
    rb"['\"]?\s{0,2}[:=]?\s{0,12}['\"]?(?:tensor\(|np\.float\d\d\()?"
    rb"([-+]?(?:(?:nan|inf(?:inity)?)(?=(?:\.0{1,4})?(?![\w.]))|\d{1,12}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?(?![\w.])))"
)
"""A number, also as text (`'nan'`, HF Trainer) and as Lightning's bars pad it (`nan.0`)."""
_LOSS: Final = re.compile(rb"loss(?:_step|_epoch)?" + _VALUE)
_RATE: Final = re.compile(rb"(?<![a-z0-9])(?:lr|learning[ _]rate)" + _VALUE)
_PART_OF_LOSS: Final = re.compile(rb"([a-z][a-z0-9]*)[ _\-/.]$")
_WHOLE_LOSS: Final = frozenset(
    b"train training lm total global mean avg average batch model running step iter iteration ce nll xent".split()
)
"""Words before `loss` that leave it the loss itself; all others name a part of it (`aux loss`, `kl_loss`)."""
_DIGITS: Final = re.compile(rb"[-+]?\d[\d.,:]*(?:e[-+]?\d+)?|nan|inf(?:inity)?")
_LETTERS: Final = re.compile(rb"[^a-z]+")
_NORM: Final = re.compile(rb"(?<![a-z0-9])(?:global[ _]|total[ _])?grad(?:ient)?s?[ _]?norm" + _VALUE)
_NAN_ITERATIONS: Final = re.compile(rb"number of nan iterations:\s{1,4}(\d{1,9})\b")
_OF_NO_TRAINING: Final = (b"val", b"eval", b"test", b"best", b"lowest", b"min", b"prev", b"last ")
_NOT_TRAINING: Final = frozenset(
    b"skipped nan max total num eval evaluation save saving saved logging log warmup accumulation accum per every val "
    b"validation test sampling sample decode denoising inference micro checkpointing remaining generation solver inner "
    b"from resume resuming after load loading until interval each".split()
)
EVALUATION_BARS: Final = re.compile(rb"\b(?:eval|valid|val\b|test|predict)")
_HINTS: Final[tuple[tuple[Phase | Literal["over"], re.Pattern[bytes]], ...]] = (
    (
        "checkpoint",
        re.compile(
            rb"\b(?:saving|writing|storing|dumping)\b[^\n]{0,40}\b(?:checkpoints?|ckpt|model|state|weights|snapshot)\b"
        ),
    ),
    (
        "evaluation",
        re.compile(rb"(?:running|start(?:ing)?) (?:evaluation|validation|prediction)|\b(?:evaluating|validating)\b"),
    ),
    (
        "end",
        re.compile(
            rb"train_runtime|\btraining (?:is )?(?:completed?|finished|done|ended)\b|`?trainer\.fit`? stopped|"
            rb"\bexiting program (?:after|at)\b|\bfinished training\b|\btraining successfully completed\b"
        ),
    ),
    (
        "over",
        re.compile(
            rb"\bsaved\b|\bcheckpoint (?:written|done|complete)|"
            rb"\b(?:evaluation|validation) (?:done|finished|completed?)\b|eval_loss"
        ),
    ),
)
_HINT_LITERALS: Final = (
    b"saving",
    b"writing",
    b"storing",
    b"dumping",
    b"evalua",
    b"valida",
    b"running predict",
    b"train",
    b"exiting",
    b"saved",
    b"checkpoint",
    b"eval_loss",
)


class CounterPlace(NamedTuple):
    """A number that may count steps."""

    start: int
    """The start of its name."""
    value: tuple[int, int]
    total: tuple[int, int] | None
    """The position of the number that it counts to."""
    key: bytes
    weight: float
    epochal: bool


class Places(NamedTuple):
    """The positions of the numbers in every line of one shape."""

    bars: bool
    counters: tuple[CounterPlace, ...]
    losses: tuple[tuple[int, int, bool], ...]
    norm: tuple[int, int] | None
    """The position of the gradient norm."""
    watched: tuple[int, int, bytes] | None
    """The position of the loss whose course is watched, and the words before it."""
    rate: tuple[int, int] | None
    """The position of the learning rate."""
    nans: tuple[int, int] | None
    """The position of Megatron's count of iterations whose loss was no number."""
    hints: tuple[tuple[int, Phase | Literal["over"]], ...]
    """Where a phase is named, in order; `over`: where its end is."""


def places(line: bytes) -> Places | None:
    """The positions in lines of this shape (without escapes, in lower case). None: the line has no such number."""
    return _remembered(line) if len(line) <= SHAPE_BYTES else _search(line)


def _search(line: bytes) -> Places | None:
    found = Places(
        bars=(b"/s" in line or b"s/" in line) and BAR.search(line) is not None,
        counters=(
            *(_counters_in(line) if b"step" in line or b"it" in line else ()),
            *(_pairs_in(line) if b"epoch" in line else ()),
        ),
        losses=tuple(losses(line)) if b"loss" in line else (),
        norm=_span(_NORM, line) if b"norm" in line else None,
        watched=_watched(line) if b"loss" in line else None,
        rate=_span(_RATE, line) if b"loss" in line and (b"lr" in line or b"learning" in line) else None,
        nans=_span(_NAN_ITERATIONS, line) if b"nan iterations" in line else None,
        hints=_hints_in(line),
    )
    return found if any(found) else None


_remembered = functools.lru_cache(SHAPES_KEPT)(_search)


def _watched(line: bytes) -> tuple[int, int, bytes] | None:
    """The first loss of the training that is no part of one. Lines of other words before it are another curve."""
    for start, end, training in losses(line):
        head = line[max(0, start - 400) : start]
        part = _PART_OF_LOSS.search(head[: head.rfind(b"loss")][-40:])
        if training and (part is None or part[1] in _WHOLE_LOSS):
            if EVALUATION_BARS.search(head):
                return None
            return start, end, _LETTERS.sub(b" ", _DIGITS.sub(b" ", head))[-80:]
    return None


def _span(pattern: re.Pattern[bytes], line: bytes) -> tuple[int, int] | None:
    match = pattern.search(line)
    return match.span(1) if match is not None else None


def _counters_in(line: bytes) -> Iterator[CounterPlace]:
    for match in last(_COUNTER, line):
        start = match.start()
        joined = line[start - 1 : start] in (b" ", b"_", b"-") and line[start - 2 : start - 1].isalpha()
        before = _WORD_BEFORE.search(line[max(0, start - 24) : start]) if joined else None
        word = before[1] if before else b""
        if word in _NOT_TRAINING or (not before and line[start - 1 : start].isalnum()):
            continue
        name = line[start : match.start(1)].rstrip(b"0123456789 :='\"#[(\t").rstrip(b"s")
        head, rest = line[max(0, start - 200) : start], line[match.end() : match.end() + 400]
        if _PATH_AFTER.match(rest) or _PATH_BEFORE.search(head):
            continue
        yield CounterPlace(
            start=start,
            value=match.span(1),
            total=match.span(2) if match[2] is not None else None,
            key=b"n:" + word + b" " + name,
            weight=3.0 if b"loss" in rest or b"loss" in head else 1.5,
            epochal=match[2] is not None and b"epoch" in head and EPOCH.search(head) is not None,
        )


def _pairs_in(line: bytes) -> Iterator[CounterPlace]:
    """`Epoch: [0]  [ 10/100]`, `Train Epoch: 1 [640/60000 (1%)]`."""
    for match in last(_PAIR, line):
        head = line[max(0, match.start() - 200) : match.start()]
        if EPOCH.search(head) is None or EVALUATION_BARS.search(head) or b"step" in head or b"iter" in head:
            continue
        yield CounterPlace(match.start(), match.span(1), match.span(2), b"p:epoch", 1.2, True)


def losses(line: bytes) -> Iterator[tuple[int, int, bool]]:
    """From, to, and whether it is a loss of the training; of any text in lower case."""
    for match in last(_LOSS, line):
        before = line[max(0, match.start() - 24) : match.start()]
        yield *match.span(1), not any(word in before for word in _OF_NO_TRAINING)


def _hints_in(line: bytes) -> tuple[tuple[int, Phase | Literal["over"]], ...]:
    if not any(literal in line for literal in _HINT_LITERALS):
        return ()
    found = ((match.start(), phase) for phase, pattern in _HINTS for match in pattern.finditer(line))
    return tuple(sorted(found))


def last(pattern: re.Pattern[bytes], text: bytes) -> list[re.Match[bytes]]:
    return list(pattern.finditer(text))[-NEWEST:]


def plain(text: bytes) -> bytes:
    """In lower case and without terminal escapes."""
    if b"\x1b" in text:
        text = _ANSI.sub(b"", text)
    return text.lower()


TAIL: Final = 4096
"""Bytes of one `feed` that are read in full; of what comes before only the last line with a counter is."""
PARTIAL: Final = 4096
MAX_COUNTERS: Final = 64

_OTHER_BARS: Final = re.compile(
    rb"\b(?:map|filter|load|download|upload|generat|tokeniz|eval|valid|val\b|test|predict|fetch|sanity|resolv|sav|group|"
    rb"creat|process|preprocess|sampl|comput|pack|casting|flatten|extract|unpack|read|writ|push|convert|build|index|"
    rb"calculat|quantiz|calibrat|compil|capturing|warm|import|merg|shard|files|setting)"
)
_NO_STEPS: Final = re.compile(rb"\d{5}(?:\.\d+)?it/s|\d\s?[kmg]?i?b/s")
"""The rate of a bar that counts bytes or rows: no training makes 10,000 steps a second."""
_BAD_LOSS: Final = (b": nan", b"=nan", b"= nan", b"  nan", b"loss nan", b": inf", b"=inf", b"= inf", b"loss inf")
BAD_NORMS: Final = 5
"""So many gradient norms in a row that are NaN are a failure; a single one may be what a loss scaler skips."""


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


CURVES: Final = 8
"""Losses of one stream that are told apart."""
WATCHED: Final = 5
"""A loss that was printed so often is watched."""
LASTING: Final = 3
"""So many bad reports in a row do not pass by themselves: a loss scaler skips one, or two."""


class LossCurves:
    """The losses of one stream, told apart by the words before them; the one that is printed most often counts."""

    def __init__(self) -> None:
        self._curves: dict[bytes, LossWatch] = {}

    def feed(self, words: bytes, step: int | None, value: float, rate: float | None = None) -> None:
        watch = self._curves.get(words)
        if watch is None:
            if len(self._curves) >= CURVES:
                del self._curves[min(self._curves, key=lambda key: self._curves[key].count)]
            watch = self._curves[words] = LossWatch()
        watch.feed(step, value, rate)

    def begin_again(self) -> None:
        """What follows is of the next attempt."""
        for watch in self._curves.values():
            watch.begin_again()

    @property
    def _best(self) -> LossWatch | None:
        return max(self._curves.values(), key=lambda watch: watch.count, default=None)

    @property
    def watched(self) -> bool:
        return self._best is not None and self._best.count >= WATCHED

    @property
    def alarm(self) -> LossAlarm | None:
        return None if self._best is None else self._best.alarm

    @property
    def newest(self) -> tuple[int | None, float] | None:
        """Step and value of the newest loss of this attempt."""
        return None if self._best is None else self._best.newest


class StepReader:
    """Reads one stream. All properties are the newest values."""

    def __init__(self) -> None:
        self._partial = b""
        self._counters: dict[bytes, _Counter] = {}
        self._best: _Counter | None = None
        self._best_key = b""
        self.phase: Phase = ""
        """The phase that the latest lines name, until a step follows."""
        self.loss: float | None = None
        self.curves = LossCurves()
        self.bad_reports = 0
        """So many of the newest lines in a row had a loss that is no number, as trainers print it: Megatron leaves it
        out and counts it, HF Trainer prints 0 beside a gradient norm of NaN (twice in a row). Or five such norms.
        """
        self.bad_since: int | None = None
        """The step of the first of them."""
        self._nan_reports = 0
        """So many of the newest values of the watched loss in a row were none: no parts of it, and no norms."""
        self._nan_since: int | None = None
        self._odd_reports = self._doubt = 0
        """Lines in a row with a number that is none, whatever is made of it, and how much they mean."""

    @property
    def bad_loss(self) -> bool:
        """The newest loss is no number."""
        return self.bad_reports > 0

    @property
    def step(self) -> int | None:
        return None if self._best is None else self._best.step

    @property
    def last_step(self) -> int | None:
        """The step at which the run will be complete, if the output says so."""
        return None if self._best is None else self._best.last_step

    @property
    def loss_alarm(self) -> LossAlarm | None:
        """The loss has gone wrong and does not come back by itself."""
        if self._nan_reports >= LASTING:
            return LossAlarm(kind="nan", step=self._nan_since, interval=self._interval)
        return self.curves.alarm

    @property
    def _interval(self) -> int:
        """Steps from one line to the next."""
        return max(1, self._best.increment) if self._best is not None else 1

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
            self._read(plain(text[start:end]))
        # A bar is written as "\r bar": its end only comes with the next one. Closed by a bracket it is whole.
        if b"|" in self._partial and self._partial.rstrip().endswith(b"]"):
            self._read_bars(plain(self._partial))

    def _read_skipped(self, text: bytes) -> None:
        """In a flood only the last line with a counter and a bad loss are read."""
        at = max(text.rfind(literal) for literal in (b"step", b"iter", b"it/s]", b"s/it]"))
        if at >= 0:
            start = max(text.rfind(b"\n", 0, at) + 1, text.rfind(b"\r", 0, at) + 1, at - 600)
            end = text.find(b"\n", at, at + 600)
            self._read(plain(text[start : end + 1 if end >= 0 else at + 600]))
        for literal in _BAD_LOSS:
            at = text.find(literal)
            if at >= 0:
                for start, end, training in losses(near := text[max(0, at - 40) : at + 40]):
                    if training:
                        self._note_numbers(float(near[start:end]), None, 0)

    def _read(self, text: bytes) -> None:
        """Whole lines and bars. Those of one shape that follow each other are read together."""
        text = text.replace(b"\r", b"\n")
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
        if found.losses or found.norm is not None or found.nans is not None:
            self._read_numbers(lines, found)
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
        if step > 0 and values == list(range(values[0], values[-1] + 1, step)):  # the last one is enough
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
            if _NO_STEPS.search(timing) is not None:
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

    def _read_numbers(self, lines: Sequence[bytes], found: Places) -> None:
        """Loss and gradient norm of lines alike; where one prints NaN, so do all."""
        newest = lines[-1]
        told = [float(newest[start:end]) for start, end, training in found.losses if training]
        norm = float(newest[slice(*found.norm)]) if found.norm is not None else None
        nans = int(newest[slice(*found.nans)]) if found.nans is not None else 0
        loss = next((value for value in told if not math.isfinite(value)), told[-1] if told else None)
        watched = float(newest[slice(*found.watched[:2])]) if found.watched is not None else None
        if watched is not None and math.isfinite(watched) and loss is not None and not math.isfinite(loss):
            loss = watched  # what is none is a part that it does not count, or the lowest so far
        self._note_numbers(loss, norm, nans, len(lines))
        if watched is not None or nans > 0:
            zero = watched == 0 and norm is not None and math.isnan(norm)  # HF Trainer prints a loss of NaN so
            self._note_watched(nans > 0 or zero or (watched is not None and not math.isfinite(watched)), len(lines))
        if found.watched is not None:
            first, end, words = found.watched
            increment = self._best.increment if self._best is not None else 0
            newest_step = self.step
            for index, line in enumerate(lines, 1 - len(lines)):
                step = None if newest_step is None else newest_step + index * increment
                rate = float(line[slice(*found.rate)]) if found.rate is not None else None
                self.curves.feed(words, step, float(line[first:end]), rate)

    def _note_watched(self, bad: bool, times: int) -> None:
        """What `times` lines say of the loss itself. Mixed precision skips steps with norms of NaN: that is honest."""
        if not bad:
            self._nan_reports, self._nan_since = 0, None
            return
        if not self._nan_reports:
            self._nan_since = self._step_before(times)
        self._nan_reports += times

    def _step_before(self, times: int) -> int | None:
        """The step of the first of the newest `times` lines."""
        before = (times - 1) * (self._best.increment if self._best is not None else 0)
        return None if self.step is None else max(0, self.step - before)

    def _note_numbers(self, loss: float | None, norm: float | None, nans: int, times: int = 1) -> None:
        """What `times` lines say of the training's numbers. `nans`: iterations whose loss was none."""
        self.loss = loss if loss is not None else self.loss
        bad_norm = norm is not None and math.isnan(norm)
        if nans > 0 or (loss is not None and not math.isfinite(loss)):
            weight = BAD_NORMS
        elif bad_norm:
            weight = BAD_NORMS // 2 + 1 if loss == 0 else 1  # HF Trainer prints a loss of NaN as 0
        else:
            if loss is not None or norm is not None:
                self.bad_reports = self._doubt = self._odd_reports = 0
                self.bad_since = None
            return
        if not self._doubt:
            self.bad_since = self._step_before(times)
        self._doubt += weight * times
        self._odd_reports += times
        self.bad_reports = self._odd_reports if self._doubt >= BAD_NORMS else 0


def _whole_line(text: bytes, start: int) -> int:
    """`start`, moved to the beginning of a line, unless the line is longer than what is read."""
    line = text.find(b"\n", start, start + TAIL // 2)
    return line + 1 if line >= 0 else start


def _number(digits: bytes | None) -> int | None:
    return int(digits) if digits and digits != b"?" else None


WORDS: Final = tuple(
    b"step iter it/s s/it epoch loss train exiting finish complet done wandb exits run_stop runandtime result, final"
    b" code early terminat exit_status".split()
)
"""Every line that may show progress contains one of these words (in lower case)."""
_FINISHED: Final = re.compile(
    rb"train_runtime|\btraining (?:is |has |was )?(?:now )?(?:successfully )?(?:completed?|finished|done|ended)\b"
    rb"(?! (?:epoch|step|iter|batch|for)\b)"
    rb"|`?trainer\.fit`? stopped: `?max_|\bexiting program (?:after|at)\b|\bfinished training\b|\bdone training\b"
    rb"|\bearly[ _-]?stop\w{0,4}\b.{0,60}\b(?:stopping training|triggered)"
    rb"|\bearly[ _-]?stop\w{0,4}\b,? (?:since|because"
    rb"|(?:at|after|in|on) (?:(?:epoch|step|iter|round|batch)\w{0,6} ?)?[#:]?\d)"
    rb"|(?:^|\d: |\] |- )early[ _-]?stop\w{0,4}[\s.!]*$"
    rb"|\b(?:stopp|halt|end)(?:ed|ing) (?:the )?(?:training |run )?early\b"
    rb"|\bpatience (?:is |was |has been )?(?:exhausted|exceeded|reached)\b"
    rb"(?!.{0,80}\b(?:lr|learning[ _]rate|reduc|decreas|lower|halv|decay))"
    rb"|\b(?:not|no) (?:\S{1,30} )?(?:improve|decrease|increase)\w{0,4}\b.{0,80}"
    rb"\b(?:early[ _-]?stop(?:ped|ping)?|stopp(?:ed|ing))\b"
    rb"(?! ?[:=(]?\s?(?:counter|patience|count|in \d|if|when|\d{1,6}\s?(?:/|of|out)))"
    rb"|\breached (?:the )?max(?:imum)?[ _](?:epochs?|steps?|iters?|iterations?)\b.{0,20}\bstopp(?:ed|ing)\b"
    rb"|^\[\d{1,4}\](?:\s{0,3}[+-]\s{1,4}|\s{2,6})(?:\d{1,9} )?done(?:\s*$|\s\s)"
    rb"|\btraining successfully\b|wandb: (?:run summary|synced)|\bprocess \d+ exits successfully"
    rb"|\bnormal termination \(return value 0\)|^\s{0,8}exit_status ?= ?0\s*$|^successfully completed\.\s*$"
    rb"|\"run_stop\"|^RUNANDTIME_STOP\b|^RESULT,\w"
    rb"|\b(?:saved|saving|wrote) (?:the )?final (?:model|checkpoint|weights)\b"
    rb"|\bfinal (?:model|checkpoint|weights) (?:was |is |has been )?(?:saved|written)\b"
    rb"|\b(?:exit(?:ed)?|finished|completed|terminated|ended)\b.{0,40}\b(?:exit ?code|code|rc|status)[ =:]{1,3}0\b",
    re.IGNORECASE,
)
MAX_RANKS: Final = 64


class ProgressReader:
    """Reads the lines of one log; lines may be left out."""

    def __init__(self) -> None:
        self._readers: dict[int | None, StepReader] = {}
        self.line: int | None = None
        """The last line that shows that training goes on."""
        self.finished_line: int | None = None
        """A line that says that the work is complete, and nothing after it shows that it goes on."""

    @staticmethod
    def may_tell(line: bytes) -> bool:
        """Whether the line may show progress."""
        low = line[:2000].lower()
        for word in WORDS:  # noqa: SIM110  # any() over a generator costs twice as much
            if word in low:
                return True
        return False

    def feed(self, line: bytes, number: int, rank: int | None = None) -> None:
        """One line, its number and the rank that wrote it, where known."""
        reader = self._readers.get(rank)
        if reader is None:
            if len(self._readers) >= MAX_RANKS:
                return
            reader = self._readers[rank] = StepReader()
        before = reader.step, reader.loss
        reader.feed(line + b"\n")
        if reader.step != before[0] or (reader.loss != before[1] and reader.loss is not None and before[1] is not None):
            self.line, self.finished_line = number, None
        elif self.finished_line is None and _FINISHED.search(line) is not None:
            self.finished_line = number

    @property
    def step(self) -> int | None:
        """The newest step of all ranks."""
        return max((one.step for one in self._readers.values() if one.step is not None), default=None)

    @property
    def last_step(self) -> int | None:
        """The step at which the run would be complete, if the output says so."""
        return max((one.last_step for one in self._readers.values() if one.last_step is not None), default=None)


# ----- the output and the step clock -----


MATCHED_LINES: Final = 3
"""So many lines must have told a step."""
MOST_STEPS_EACH: Final = 64
"""One step of the one is at most so many of the other."""
MATCH_UNSURE: Final = 0.2
"""Of the way that was seen: what differs more has nothing to do with each other."""


class StepMatch(NamedTuple):
    """`counted` steps of the clock are `shown` ones of the output; one of the two is 1."""

    counted: int
    shown: int
    offset: int

    def step(self, count: int) -> int:
        """The run's step when the clock has counted so far."""
        return (count * self.shown + self.offset) // self.counted


def match_steps(pairs: Sequence[tuple[int, int]]) -> StepMatch | None:
    """`pairs`: (count of the clock, step of the output), oldest first, each count read after its line. None: they do
    not go together, or too little was seen.

    The output may show every hundredth step, count batches where the optimizer steps once in four, or count what two
    optimizers do in turn as one. A loss that overflows skips the optimizer. A run that has resumed counts on where it
    was; the clock begins at 0. A count may be late, never early: of all offsets the greatest is the right one.
    """
    if len(pairs) < MATCHED_LINES:
        return None
    counts, steps = pairs[-1][0] - pairs[0][0], pairs[-1][1] - pairs[0][1]
    if min(counts, steps) <= 0:
        return None
    counted, shown = (round(counts / steps), 1) if counts >= steps else (1, round(steps / counts))
    offsets = [step * counted - count * shown for count, step in pairs]
    if max(counted, shown) > MOST_STEPS_EACH or max(offsets) - min(offsets) > MATCH_UNSURE * counts * shown:
        return None
    return StepMatch(counted, shown, max(offsets))


def went_on(lines: Sequence[str]) -> list[str]:
    """Those of a rank's last lines after which it still trained."""
    progress = ProgressReader()
    for number, line in enumerate(lines, 1):
        progress.feed(line.encode(), number)
    return list(lines[: progress.line or 0])
