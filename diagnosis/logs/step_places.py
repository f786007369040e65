"""Where the numbers that tell of progress stand in a line of output, and what they are: a step, a loss, a phase's name.

All of it follows from the line's shape (`diagnosis.shapes`): lines alike are searched once, for all ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

NEWEST: Final = 16
"""Of the counters in a line only the last few are looked at: what is newest counts."""
SHAPE_BYTES: Final = 600
SHAPES_KEPT: Final = 256
"""Shapes of lines whose places are remembered: so long, so many."""

Phase = Literal["", "checkpoint", "evaluation", "end"]

_ANSI: Final = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_COUNTER: Final = re.compile(
    rb"(?:step|iter(?:ation)?|\bit)s?(?:['\"]?\s{0,3}[:=#]\s{0,12}|\s{1,12})[\[(]?\s{0,12}(\d{1,12})"
    rb"(?!\d|\.\d|%|\s?(?:ms|secs?|seconds?|min|it/s|per)\b)(?:\s{0,3}(?:/|of)\s{0,12}(\d{1,12}))?"
)
BAR: Final = re.compile(rb"\|\s{0,3}(\d{1,12})/(\d{1,12}|\?)\s\[([^\]\r\n]{0,300})\]")
_PAIR: Final = re.compile(rb"\[\s{0,8}(\d{1,12})/(\d{1,12})(?:\s\([^)]{0,8}\))?\]")
EPOCH: Final = re.compile(rb"epoch['\"]?\s{0,2}[:=]?\s{0,2}[\[(]?\s{0,3}(\d{1,6})(?![\d.])(?:\s?/\s?(\d{1,6}))?")
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
_NORM: Final = re.compile(rb"(?<![a-z0-9])(?:global[ _]|total[ _])?grad(?:ient)?s?[ _]?norm" + _VALUE)
_NAN_ITERATIONS: Final = re.compile(rb"number of nan iterations:\s{1,4}(\d{1,9})\b")
_OF_NO_TRAINING: Final = (b"val", b"eval", b"test", b"best", b"min", b"prev")
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
    """Where its words begin."""
    value: tuple[int, int]
    total: tuple[int, int] | None
    """Where the number stands that it counts to."""
    key: bytes
    weight: float
    epochal: bool


class Places(NamedTuple):
    """What stands where in every line of one shape."""

    bars: bool
    counters: tuple[CounterPlace, ...]
    losses: tuple[tuple[int, int, bool], ...]
    norm: tuple[int, int] | None
    """Where the norm of the gradients stands."""
    nans: tuple[int, int] | None
    """Where Megatron counts the iterations whose loss was no number."""
    hints: tuple[tuple[int, Phase | Literal["over"]], ...]
    """Where a phase is named, in order; `over`: where its end is."""


def places(line: bytes) -> Places | None:
    """Of lines with this shape (without escapes, in lower case). None: nothing to be read in such a line."""
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
        nans=_span(_NAN_ITERATIONS, line) if b"nan iterations" in line else None,
        hints=_hints_in(line),
    )
    return found if any(found) else None


_remembered = functools.lru_cache(SHAPES_KEPT)(_search)


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
