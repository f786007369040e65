"""Numbers that a training prints again and again: loss, gradient norm, loss scale, seconds a step, ...

One `CurveReader` for a log, in bounded memory. Known: Megatron-LM, DeepSpeed, torchtitan, HF Trainer, Lightning and
other bars, nanoGPT, fairseq, NeMo, JSON lines, and any `name: number` whose name says what it is. Parts of a loss
(`aux_loss`, `moe loss`) are left alone.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from diagnosis.log_evidence import Curve, Point
from diagnosis.logs.steps import plain
from diagnosis.text import shape

Name = Literal[
    "loss", "eval_loss", "grad_norm", "loss_scale", "overflow_scale", "step_s", "data_s", "tokens_per_s", "mfu"
]
"""`overflow_scale`: the loss scale after an overflow, from the line that reports the overflow."""

MAX_LINE: Final = 4096
"""Bytes of a line that are read."""
MAX_CURVES: Final = 512
MAX_POINTS: Final = 4000
NEWEST: Final = 500
"""A curve that grows longer loses every second point, but not the newest."""
SHAPE_BYTES: Final = 600
SHAPES_KEPT: Final = 512
"""The positions of numbers are remembered for this many shapes of lines, up to this length."""

_NUMBER: Final = (
    rb"(?P<number>[-+]?(?:(?:nan|inf(?:inity)?)(?=(?:\.0{1,4})?(?![\w.]))"
    rb"|(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?(?![\w.]*\d)))(?P<ms>\s?ms\b)?"
)
_IS: Final = (
    rb"['\"]?\)?\s{0,3}(?:\((?:ms|s|sec|seconds)\))?\s{0,3}(?:[:=|]\s{0,12}|\s{1,8}|\bis\s)"
    rb"['\"]?(?:tensor\(|np\.float\d\d\()?"
)
_STEP_TIMES: Final = (
    rb"elapsed time per iteration",
    rb"(?:step|iter(?:ation)?|train_step|batch)[ _]?time(?:[ _/](?:s|sec|ms))?",
    rb"time[ _]per[ _](?:step|iter(?:ation)?)",
    rb"sec(?:onds)?[ _]?(?:/|per)[ _]?(?:step|iter(?:ation)?)",
    rb"(?:step|iteration)(?: \d{1,9})? took",
    rb"time(?=[ :=]{1,3}[\d.]{1,12} ?ms\b)",
)
_NAMES: Final[tuple[tuple[Name, bytes], ...]] = (
    ("loss_scale", rb"loss[ _]?scale"),
    ("grad_norm", rb"(?:global[ _])?grad(?:ient)?s?[ _]?norm|gnorm"),
    ("loss", rb"(?:reduced_train_|(?:train(?:ing)?|lm|mean|avg|average|total|global)[ _/])*loss(?:_step|_epoch)?"),
    ("step_s", b"|".join(_STEP_TIMES)),
    ("data_s", rb"data(?:[ _]?load(?:ing|er)?)?[ _]?time(?:\(%\))?|batch-generator|data[ _]wait(?:[ _](?:s|time))?"),
    ("tokens_per_s", rb"tok(?:en)?s?[ _]?(?:/|per)[ _]?(?:s\b|sec(?:ond)?)(?:[/_](?:gpu|device))?|\btps|\bwps"),
    ("mfu", rb"mfu(?:\s?\(%\))?"),
)
_VALUE: Final = re.compile(
    rb"(?<![a-z0-9])(?:"
    + b"|".join(b"(?P<" + name.encode() + b">" + words + b")" for name, words in _NAMES)
    + rb")"
    + _IS
    + _NUMBER
)
_BAR: Final = re.compile(rb"(\d{1,8}(?:\.\d{1,4})?)(it/s|s/it)\b")
_OF_TIME: Final = rb"(?:_time|[ _]load(?:ing)?)?(?:\s?\((?:t|s)\))?\s?[:=]?\s{0,3}(\d{1,6}\.\d{1,9})s?\b"
_TOOK: Final = re.compile(rb"\b(?:time|batch|step|iter)" + _OF_TIME)
_WAITED: Final = re.compile(rb"\bdata" + _OF_TIME)
"""`Time 0.1 (0.1) Data 0.0 (0.0)`, `time: 0.44, data_time: 0.05`, `Data (t): 0.1 Batch (t): 0.3`: in one line only."""
_OVERFLOW: Final = re.compile(
    rb"(?:reducing (?:loss scale )?to|setting loss scale to:?|new scale:?|minimum loss scale (?:reached )?\(?)\s{0,3}"
    + _NUMBER
)
_STEP: Final = re.compile(
    rb"(?<![a-z])(?:global[ _])?(?:step|iter(?:ation)?|it|num_updates|update)s?['\"]?\s{0,3}[:=#]?\s{0,12}"
    rb"[\[(]?['\"]?\s{0,8}(\d{1,12})(?![\d.])"
    rb"|\|\s{0,3}(\d{1,12})/\d{1,12}\s\["
)
_BEFORE: Final = re.compile(rb"([a-z0-9]+)[ _\-/]$")
_OF_EVALUATION: Final = re.compile(rb"(?:val|valid|validation|eval|evaluation|test|dev)[ _/.\-]{1,2}$")
_KEYS: Final = (
    b"loss",
    b"norm",
    b"time",
    b"it/s",
    b"s/it",
    b"mfu",
    b"tok",
    b"wps",
    b"tps",
    b"sec",
    b"batch-gen",
    b"took",
    b"data",
)


class _Place(NamedTuple):
    """Where the value of a name stands in a line."""

    name: Name
    start: int
    end: int
    unit: Literal["", "ms", "per_s"] = ""


class _Places(NamedTuple):
    """The positions of the numbers in every line of one shape."""

    values: tuple[_Place, ...]
    step: tuple[int, int] | None


class CurveReader:
    """Reads one log. Lines may be left out: a curve is a sample of what was printed."""

    def __init__(self) -> None:
        self._points: dict[tuple[int | None, Name], list[Point]] = {}

    def feed(self, line: bytes, number: int, rank: int | None = None, at: float | None = None) -> None:
        """One line, its number from 1, and what is known of it. Never raises."""
        text = plain(line[:MAX_LINE])
        like = shape(text)
        places = _remembered(like) if len(like) <= SHAPE_BYTES else _search(like)
        if not places.values:
            return
        step = int(text[slice(*places.step)]) if places.step is not None else None
        for place in places.values:
            value = _value(text, place)
            if value is None:
                continue
            points = self._points.get((rank, place.name))
            if points is None:
                if len(self._points) >= MAX_CURVES:
                    continue
                points = self._points[rank, place.name] = []
            points.append(Point(step=step, value=value, line=number, at=at))
            if len(points) > MAX_POINTS:
                points[:-NEWEST] = _thinned(points[:-NEWEST])

    def curves(self) -> tuple[Curve, ...]:
        """The curves read so far, in the order in which their names appeared."""
        return tuple(Curve(name=name, points=tuple(points), rank=rank) for (rank, name), points in self._points.items())


def _value(text: bytes, place: _Place) -> float | None:
    value = float(text[place.start : place.end].replace(b",", b""))
    if place.unit == "per_s":
        return 1 / value if value > 0 else None
    return value / 1000 if place.unit == "ms" else value


def _search(like: bytes) -> _Places:
    """The first value of each name, and the step, in lines with this shape (`diagnosis.text`, in lower case)."""
    if not any(key in like for key in _KEYS):
        return _NOWHERE
    values = tuple(_overflow(like) if b"overflow" in like else _values(like))
    match = _STEP.search(like) if values else None
    return _Places(values, match.span(match.lastindex or 0) if match is not None else None)


_NOWHERE: Final = _Places((), None)
_remembered: Final = functools.lru_cache(SHAPES_KEPT)(_search)


def _overflow(like: bytes) -> Iterator[_Place]:
    match = _OVERFLOW.search(like)
    if match is not None:
        yield _Place("overflow_scale", *match.span("number"))


def _values(like: bytes) -> Iterator[_Place]:
    found: set[Name] = set()
    for match in _VALUE.finditer(like):
        name = next(name for name, _ in _NAMES if match[name] is not None)
        before = like[max(0, match.start() - 40) : match.start()]
        if _OF_EVALUATION.search(before):
            if name != "loss":
                continue
            name = "eval_loss"
        if name in found or (name == "loss" and _is_part(before)):
            continue
        found.add(name)
        in_ms = name in ("step_s", "data_s") and (match["ms"] is not None or b"(ms)" in match[0])
        yield _Place(name, *match.span("number"), "ms" if in_ms else "")
    if "step_s" in found:
        return
    took = _TOOK.search(like) if b"data" in like else None
    waited = _WAITED.search(like) if took is not None else None
    bar = _BAR.search(like)
    if took is not None and waited is not None:
        yield _Place("step_s", *took.span(1))
        if "data_s" not in found:
            yield _Place("data_s", *waited.span(1))
    elif bar is not None:
        yield _Place("step_s", *bar.span(1), "" if bar[2] == b"s/it" else "per_s")


def _is_part(before: bytes) -> bool:
    """`moe loss`, `kl_loss` are parts; a step's number before it is none of its name."""
    word = _BEFORE.search(before)
    return word is not None and len(word[1]) > 1 and not word[1].isdigit()


def _thinned(points: list[Point]) -> list[Point]:
    """Every second point; the first that is no number stays."""
    first_bad = next((point for point in points if not math.isfinite(point.value)), None)
    return [point for index, point in enumerate(points) if index % 2 == 0 or point is first_bad]
