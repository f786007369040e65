"""The training step, read from whatever a script prints.

One `StepReader` for each stream of a rank. It works on bytes, in bounded memory, and looks only at the end of what
it is fed: the newest step is what counts. A counter is believed once it grew; among several the one that goes with a
loss and grows most wins. Formats known: Megatron-LM, torchtitan, HF Trainer and other tqdm bars, accelerate,
DeepSpeed, Lightning, nanoGPT, JSON lines, and anything with a growing number next to step, iter or iteration.
"""

from __future__ import annotations

import math
import re
from typing import Final, Literal

TAIL: Final = 4096
"""Bytes of one `feed` that are read in full; of what comes before only the last line with a counter is."""
NEWEST: Final = 16
"""Of the counters in a piece of text only the last few are looked at: what is newest counts."""
PARTIAL: Final = 4096
MAX_COUNTERS: Final = 64

Phase = Literal["", "checkpoint", "evaluation", "end"]

_ANSI: Final = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_COUNTER: Final = re.compile(
    rb"(?:step|iter(?:ation)?|\bit)s?(?:['\"]?\s{0,3}[:=#]\s{0,12}|\s{1,12})[\[(]?\s{0,12}(\d{1,12})"
    rb"(?!\d|\.\d|%|\s?(?:ms|secs?|seconds?|min|it/s|per)\b)(?:\s{0,3}(?:/|of)\s{0,12}(\d{1,12}))?"
)
_BAR: Final = re.compile(rb"\|\s{0,3}(\d{1,12})/(\d{1,12}|\?)\s\[([^\]\r\n]{0,300})\]")
_PAIR: Final = re.compile(rb"\[\s{0,8}(\d{1,12})/(\d{1,12})(?:\s\([^)]{0,8}\))?\]")
_EPOCH: Final = re.compile(rb"epoch['\"]?\s{0,2}[:=]?\s{0,2}[\[(]?\s{0,3}(\d{1,6})(?![\d.])(?:\s?/\s?(\d{1,6}))?")
_WORD_BEFORE: Final = re.compile(rb"([a-z]{2,20})[_ \-]$")
_LOSS: Final = re.compile(
    rb"loss['\"]?\s{0,2}[:=]?\s{0,4}(?:tensor\(|np\.float\d\d\()?"
    rb"([-+]?(?:nan|inf(?:inity)?|\d{1,12}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?))(?![\w.])"
)
_NOT_TRAINING: Final = frozenset(
    b"skipped nan max total num eval evaluation save saving saved logging log warmup accumulation accum per every val "
    b"validation test sampling sample decode denoising inference micro checkpointing remaining generation solver inner "
    b"from resume resuming after load loading until interval each".split()
)
_OTHER_BARS: Final = re.compile(
    rb"\b(?:map|filter|load|download|upload|generat|tokeniz|eval|valid|val\b|test|predict|fetch|sanity|resolv|sav|group|"
    rb"creat|process|preprocess|sampl|comput|pack|casting|flatten|extract|unpack|read|writ|push|convert|build|index|"
    rb"calculat|quantiz|calibrat|compil|capturing|warm|import|merg|shard|files|setting)"
)
_EVALUATION_BARS: Final = re.compile(rb"\b(?:eval|valid|val\b|test|predict)")
_HINTS: Final[tuple[tuple[Phase, re.Pattern[bytes]], ...]] = (
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
)
_OVER: Final = re.compile(
    rb"\bsaved\b|\bcheckpoint (?:written|done|complete)|"
    rb"\b(?:evaluation|validation) (?:done|finished|completed?)\b|eval_loss"
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
                self._read_loss(text[max(0, at - 40) : at + 40])

    def _read(self, text: bytes) -> None:
        grew_at = self._read_bars(text) if b"/s" in text or b"s/" in text else -1
        if b"step" in text or b"it" in text:
            grew_at = max(grew_at, self._read_counters(text))
        if b"epoch" in text:
            grew_at = max(grew_at, self._read_pairs(text))
        if b"loss" in text:
            self._read_loss(text)
        self._read_hints(text, grew_at)

    # ----- counters -----

    def _read_counters(self, text: bytes) -> int:
        grew_at, skipped = -1, 0
        matches = _last(_COUNTER, text)
        values = [int(match[1]) for match in matches]
        for at, match in enumerate(matches):
            if 0 < at < len(matches) - 1 and _runs_on(text, matches[at - 1 : at + 2], values[at - 1 : at + 2]):
                skipped += 1
                continue
            times, skipped = 1 + skipped, 0
            start = match.start()
            joined = text[start - 1 : start] in (b" ", b"_", b"-") and text[start - 2 : start - 1].isalpha()
            before = _WORD_BEFORE.search(text[max(0, start - 24) : start]) if joined else None
            word = before[1] if before else b""
            if word in _NOT_TRAINING or (not before and text[start - 1 : start].isalnum()):
                continue
            name = text[start : match.start(1)].rstrip(b"0123456789 :='\"#[(\t").rstrip(b"s")
            line_end = text.find(b"\n", match.end(), match.end() + 400)
            rest = text[match.end() : line_end if line_end >= 0 else match.end() + 400]
            line_start = text.rfind(b"\n", max(0, start - 200), start) + 1
            head = text[line_start:start]
            weight = 3.0 if b"loss" in rest or b"loss" in head else 1.5
            epoch = _EPOCH.search(head) if b"epoch" in head else None
            key = b"n:" + word + b" " + name
            epochal = epoch is not None and match[2] is not None
            if self._note(key, values[at], _number(match[2]), weight, epochal=epochal, times=times):
                grew_at = start
        return grew_at

    def _read_pairs(self, text: bytes) -> int:
        """`Epoch: [0]  [ 10/100]`, `Train Epoch: 1 [640/60000 (1%)]`."""
        grew_at = -1
        for match in _last(_PAIR, text):
            line_start = text.rfind(b"\n", max(0, match.start() - 200), match.start()) + 1
            head = text[line_start : match.start()]
            epoch = _EPOCH.search(head)
            if epoch is None or _EVALUATION_BARS.search(head) or b"step" in head or b"iter" in head:
                continue
            if self._note(b"p:epoch", int(match[1]), int(match[2]), 1.2, epochal=True):
                grew_at = match.start()
        return grew_at

    def _read_bars(self, text: bytes) -> int:
        grew_at = -1
        for match in _last(_BAR, text):
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
            if _EVALUATION_BARS.search(label):
                self.phase = "evaluation"
            if _OTHER_BARS.search(label):
                continue
            if self._note_bar(label, int(match[1]), _number(match[2]), b"loss" in timing):
                grew_at = match.start()
        return grew_at

    def _note_bar(self, label: bytes, value: int, total: int | None, with_loss: bool) -> bool:
        weight = 2.0 if with_loss else 1.0
        epoch = _EPOCH.search(label)
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

    def _read_loss(self, text: bytes) -> None:
        newest = None
        if b"nan" not in text and b"inf" not in text:  # only the newest is asked for then
            newest = _LOSS.search(text, text.rfind(b"loss"))
        for match in [newest] if newest else _last(_LOSS, text):
            value = float(match[1])
            if math.isfinite(value):
                self.loss = value
                self.bad_loss = False
                continue
            before = text[max(0, match.start() - 24) : match.start()]
            if b"val" in before or b"eval" in before or b"test" in before:
                continue
            self.loss = value
            self.bad_loss = True
            if self.bad_loss_step is None:
                self.bad_loss_step = self.step

    def _read_hints(self, text: bytes, grew_at: int) -> None:
        """The last hint counts, and only when no step came after it."""
        if grew_at >= 0:
            self.phase = ""
        after = text[grew_at + 1 :] if grew_at >= 0 else text
        if not any(literal in after for literal in _HINT_LITERALS) and b"saved" not in after:
            return
        newest = -1
        for phase, pattern in _HINTS:
            for match in pattern.finditer(after):
                if match.start() > newest:
                    newest, self.phase = match.start(), phase
        if self.phase in ("checkpoint", "evaluation"):
            for match in _OVER.finditer(after):
                if match.start() > newest:
                    self.phase = ""


def _plain(text: bytes) -> bytes:
    """In lower case and without terminal escapes."""
    if b"\x1b" in text:
        text = _ANSI.sub(b"", text)
    return text.lower()


def _last(pattern: re.Pattern[bytes], text: bytes) -> list[re.Match[bytes]]:
    return list(pattern.finditer(text))[-NEWEST:]


def _runs_on(text: bytes, three: list[re.Match[bytes]], values: list[int]) -> bool:
    """Whether the second of three counters lies evenly between the others, in lines alike: the third says it all."""
    step = values[1] - values[0]
    if step <= 0 or values[2] - values[1] != step:
        return False
    (a, value_a), (b, value_b), (c, value_c) = [(match.start(), match.start(1)) for match in three]
    alike = text[b - 16 : value_b]
    return (
        text[c - 16 : value_c] == alike == text[a - 16 : value_a]
        and three[0][2] == three[1][2] == three[2][2]
        and a > 16
    )


def _whole_line(text: bytes, start: int) -> int:
    """`start`, moved to the beginning of a line, unless the line is longer than what is read."""
    line = text.find(b"\n", start, start + TAIL // 2)
    return line + 1 if line >= 0 else start


def _number(digits: bytes | None) -> int | None:
    return int(digits) if digits and digits != b"?" else None
