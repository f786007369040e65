"""Numbers that a training prints again and again: loss, gradient norm, loss scale, seconds a step, ...

One `CurveReader` for a log, in bounded memory. Known: Megatron-LM, DeepSpeed, torchtitan, HF Trainer, Lightning and
other bars, nanoGPT, fairseq, NeMo, JSON lines, and any `name: number` whose name says what it is. Parts of a loss
(`aux_loss`, `moe loss`) are left alone.

`anomalies`: NaN, infinity, spikes, divergence, a loss scale at its floor. Their thresholds are multiples of the noise:
the median distance of neighbouring values, which no trend and no spike changes. `input_stalls`: steps that wait for
data.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.incident import Anomaly, Curve, Point, Slowdown
from diagnosis.logs.steps import plain
from diagnosis.signals import Evidence, RankStack, rank_names
from diagnosis.stacks import Activity, activity
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


LEAST_POINTS: Final = 12
"""A curve with fewer values shows nothing."""
WINDOW: Final = 40
SPIKE: Final = 12.0
"""A spike is this many times the noise above the values before it,"""
LEAP: Final = 0.4
"""and this share of their level."""
TO_STAY: Final = 5
"""This many values in a row do not pass."""
SETTLED: Final = 3
"""So many reports with numbers come after the search for a scale."""
OFTEN: Final = 5
"""A loss of which one report in so many is no number is a failure, though numbers came back."""
FLOOR_SCALE: Final = 1.0
"""A scale at or below this is at its floor: a dynamic scale above it can still fall."""
SUNK_SCALE: Final = 1e-3
"""A scale without a floor that fell this far: no scale is small enough."""
ABSURD: Final = 1e8
"""A loss this large is none, whatever it measures."""
PASSING: Final = 0.2
LASTING: Final = 0.6
CERTAIN: Final = 0.9


def anomalies(curves: Iterable[Curve]) -> tuple[Anomaly, ...]:
    """The anomalies, the surest failure first."""
    found: list[Anomaly] = []
    known = tuple(curves)
    unscaled = {
        one.rank for one in known if one.name == "loss_scale" and all(point.value == 1.0 for point in one.points)
    }
    zero = {
        (curve.rank, point.line) for curve in known if curve.name == "loss" for point in curve.points if not point.value
    }
    for curve in known:
        points = _last_run(curve.points)
        if curve.name == "loss":
            found += _of_loss(curve, points)
        elif curve.name == "eval_loss":
            found += _not_finite(curve, points)
        elif curve.name == "grad_norm":
            found += _zeroed(curve, points, zero) or _not_finite(curve, points, unscaled=curve.rank in unscaled)
        elif curve.name == "loss_scale":
            found += _of_scale(curve, points)
        elif curve.name == "overflow_scale":
            found += _of_overflows(curve, points)
    return tuple(sorted(found, key=lambda one: -one.confidence))


def _last_run(points: Sequence[Point]) -> Sequence[Point]:
    """The points of the last run: a log may hold several runs."""
    start = 0
    for index in range(1, len(points)):
        before, step = points[index - 1].step, points[index].step
        if before is not None and step is not None and step < before and step <= before // 2:
            start = index
    return points[start:]


# ----- no numbers -----


def _of_loss(curve: Curve, points: Sequence[Point]) -> list[Anomaly]:
    broken = _not_finite(curve, points)
    finite = [point for point in points if math.isfinite(point.value)]
    if any(one.confidence >= LASTING for one in broken) or _crosses_zero(finite):
        return broken
    if len(finite) > 1 and min(point.value for point in finite[-2:]) > ABSURD:
        return [_anomaly("divergence", curve, finite[-2], f"{_name(curve)} is {finite[-1].value:g}", LASTING)]
    return broken + _leaps(curve, finite)


def _not_finite(curve: Curve, points: Sequence[Point], *, unscaled: bool = False) -> list[Anomaly]:
    """The first value that is no number, and whether numbers came back. `unscaled`: no loss scaler skips such steps."""
    bad = [index for index, point in enumerate(points) if not math.isfinite(point.value)]
    if not bad:
        return []
    first = points[bad[0]]
    kind = "nan" if math.isnan(first.value) else "inf"
    run = len(points) - 1 - max((index for index, point in enumerate(points) if math.isfinite(point.value)), default=-1)
    stays = run >= (TO_STAY if curve.name == "grad_norm" else 2)
    word = "NaN" if kind == "nan" else "infinite"
    name = _name(curve)
    if stays:
        start = points[len(points) - run]
        why = f"{name} is {word} from {_place(start)} on ({run} values in a row, to the end)"
        return [_anomaly(kind, curve, start, why, CERTAIN if curve.name == "loss" else LASTING)]
    # A loss scaler that looks for its scale skips the first steps, and later one at a time.
    apart = run > 1 and len(points) - run >= SETTLED and _are_apart(*points[-2:])
    if run:
        lasts = curve.name == "loss" or unscaled or apart
        return [
            _anomaly(
                kind, curve, first, f"{name} is {word} at the end ({_place(first)})", LASTING if lasts else PASSING
            )
        ]
    why = f"{name} was {word} at {_place(first)}, and {len(bad)} times in all; numbers came back"
    often = curve.name == "loss" and bad[-1] > 0 and OFTEN * len(bad) >= len(points)
    return [_anomaly(kind, curve, first, why, LASTING if often else PASSING)]


def _are_apart(one: Point, other: Point) -> bool:
    """Steps lie between two reports, as far as is known."""
    return one.step is None or other.step is None or other.step - one.step >= TO_STAY


def _of_scale(curve: Curve, points: Sequence[Point]) -> list[Anomaly]:
    """A dynamic loss scale that fell to 1 and stays: every step overflows. One that is 1 from the start is static."""
    values = [point.value for point in points]
    if not values or max(values) < 16:
        return []
    low = len(values)
    while low > 0 and values[low - 1] <= 1.0:
        low -= 1
    if len(values) - low < TO_STAY:
        return []
    why = (
        f"the loss scale fell from {max(values):g} to {values[-1]:g} and stays there: gradients overflow at every step"
    )
    return [_anomaly("loss_scale_floor", curve, points[low], why, 0.8)]


def _of_overflows(curve: Curve, points: Sequence[Point]) -> list[Anomaly]:
    """One overflow after another, and the scale falls no further."""
    same = list(itertools.takewhile(lambda point: point.value == points[-1].value, reversed(points)))
    if len(points) > TO_STAY and points[-1].value <= SUNK_SCALE:
        why = f"gradients overflowed {len(points)} times, and the loss scale sank to {points[-1].value:g}"
        return [_anomaly("loss_scale_floor", curve, points[-1], why, 0.8)]
    if len(same) < TO_STAY - 1 or same[0].value > FLOOR_SCALE:
        return []
    why = f"gradients overflowed {len(same)} times with the loss scale at its floor of {same[0].value:g}"
    return [_anomaly("loss_scale_floor", curve, same[-1], why, 0.8)]


def _zeroed(curve: Curve, points: Sequence[Point], zero: Set[tuple[int | None, int]]) -> list[Anomaly]:
    """NaN gradients beside a loss of exactly 0: a trainer that prints NaN losses as 0."""
    bad = [point for point in points if math.isnan(point.value) and (curve.rank, point.line) in zero]
    if len(bad) < 2 or bad[-1] is not points[-1]:
        return []
    why = f"the gradient norm is NaN and the loss exactly 0 from {_place(bad[0])} on"
    return [_anomaly("nan", curve, bad[0], why, 0.8)]


# ----- shapes -----


class _Level(NamedTuple):
    """The usual level and noise before a place."""

    median: float
    noise: float


def _leaps(curve: Curve, points: Sequence[Point]) -> list[Anomaly]:
    values = [point.value for point in points]
    if len(values) < LEAST_POINTS:
        return []
    found = []
    index = LEAST_POINTS // 2
    while index < len(values):
        usual = _usual(values[max(0, index - WINDOW) : index])
        if not _is_leap(values[index], usual):
            index += 1
            continue
        end = _back_at(values, index, usual)
        found.append(_leap(curve, points, index, end, usual))
        if end is None:
            break
        index = end + 1
    grown = _grown(curve, points) if not any(one.confidence >= LASTING for one in found) else []
    passing = [one for one in found if one.confidence < LASTING]
    # Many spikes that pass are usual for this run: reported once.
    return [*(one for one in found if one.confidence >= LASTING), *passing[-1:], *grown]


def _usual(before: Sequence[float]) -> _Level:
    steps = [abs(after - value) for value, after in itertools.pairwise(before)]
    return _Level(statistics.median(before), statistics.median(steps) if steps else 0.0)


def _is_leap(value: float, usual: _Level) -> bool:
    return value - usual.median > max(SPIKE * usual.noise, LEAP * abs(usual.median), 0.05)


def _back_at(values: Sequence[float], start: int, usual: _Level) -> int | None:
    """Where the values are back near what was usual for three in a row; None where they never are."""
    near = usual.median + max(6 * usual.noise, 0.5 * LEAP * abs(usual.median), 0.05)
    for index in range(start + 1, len(values)):
        if all(value <= near for value in values[index : index + 3]):
            return index
    return None


def _leap(curve: Curve, points: Sequence[Point], start: int, end: int | None, usual: _Level) -> Anomaly:
    top = max(point.value for point in points[start:end])
    told = f"{_name(curve)} leapt from {usual.median:.4g} to {top:.4g} at {_place(points[start])}"
    if end is not None:
        return _anomaly("spike", curve, points[start], f"{told} and came back at {_place(points[end])}", PASSING)
    after = [point.value for point in points[start:]]
    if len(after) < TO_STAY:
        return _anomaly("spike", curve, points[start], f"{told}, at the end of what is there", 0.4)
    first = statistics.median([point.value for point in points[: LEAST_POINTS // 2]])
    level = statistics.median(after[-WINDOW:])
    lost = (level - usual.median) / (first - usual.median) if first > usual.median else 1.0
    certain = CERTAIN if lost > 0.5 else LASTING
    if points[start].step is None:
        certain -= 0.2  # without steps it may be another run in the same file
    return _anomaly(
        "divergence" if lost > 0.5 else "spike", curve, points[start], f"{told} and never came back", certain
    )


def _grown(curve: Curve, points: Sequence[Point]) -> list[Anomaly]:
    """A loss that rises for long without a spike."""
    values = [point.value for point in points]
    width = max(LEAST_POINTS, len(values) // 20)
    if len(values) < 4 * width:
        return []
    levels = [statistics.median(values[at : at + width]) for at in range(0, len(values) - width + 1, width)]
    low = min(range(len(levels)), key=levels.__getitem__)
    rise = levels[-1] - levels[low]
    noise = _usual(values[low * width : (low + 1) * width]).noise
    learnt = levels[0] - levels[low]
    falls = sum(after < before for before, after in itertools.pairwise(levels[low:]))
    if len(levels) - 1 - low < 2 or falls > (len(levels) - low) // 4:
        return []
    if rise <= max(0.5 * learnt, SPIKE * noise, LEAP * abs(levels[low]), 0.1):
        return []
    start = points[(low + 1) * width]
    why = f"{_name(curve)} climbs from {levels[low]:.4g} to {levels[-1]:.4g} since {_place(start)}"
    return [_anomaly("divergence", curve, start, why, 0.7 if start.step is not None else 0.45)]


def _crosses_zero(points: Sequence[Point]) -> bool:
    """The level of a loss that may be negative (of a policy, a critic) says nothing."""
    return sum(point.value < 0 for point in points) > len(points) // 100


# ----- words -----


def _anomaly(kind: str, curve: Curve, point: Point, why: str, confidence: float) -> Anomaly:
    evidence = Evidence(
        text=f"{_name(curve)} {point.value:g} at {_place(point)}", line=point.line, rank=curve.rank, at=point.at
    )
    return Anomaly(
        kind=kind,  # type: ignore[arg-type]  # one of the literals, by its callers
        curve=curve.name,
        why=why,
        confidence=round(confidence, 2),
        rank=curve.rank,
        step=point.step,
        evidence=(evidence,),
    )


_IN_WORDS: Final = {
    "grad_norm": "the gradient norm",
    "eval_loss": "the loss of the evaluation",
    "loss_scale": "the loss scale",
    "overflow_scale": "the loss scale",
}


def _name(curve: Curve) -> str:
    return _IN_WORDS.get(curve.name, f"the {curve.name}")


def _place(point: Point) -> str:
    return f"step {point.step}" if point.step is not None else f"line {point.line}"


LEAST_STEPS: Final = 16
"""Fewer values than this show only the plainest stall."""
FEW: Final = 4
WARM_UP: Final = 3
"""The first values of a run are left out."""
INPUT_SHARE: Final = 0.2
"""The least share of the steps' time that is an input stall."""
STALL_S: Final = 0.02
"""Waiting for data that matters takes at least this many seconds a step."""
MINUTE_S: Final = 60.0
STEADY_SHARE: Final = 0.7
"""A share that was less than this and the same from the first third of the run to the last is how this job is."""
STALLS: Final = 5
"""This many values must show the wait."""


class _Value(NamedTuple):
    step: int | None
    seconds: float
    point: Point


def input_stalls(
    curves: Iterable[Curve], late: Iterable[Slowdown] = (), stacks: Iterable[RankStack] = ()
) -> tuple[Slowdown, ...]:
    """Input stalls, and the `late` ranks and links that no input stall explains, the surest first."""
    starved = _input(tuple(curves))
    hungry = {rank for one in starved for rank in one.ranks}
    doing: dict[int, set[Activity]] = {}
    for stack in stacks:
        doing.setdefault(stack.rank, set()).add(activity(stack))
    # A rank that waits for its data is late for that reason.
    others = [_of_input(one, doing) for one in late if not (hungry and hungry.issuperset(one.ranks))]
    return tuple(sorted([*starved, *others], key=lambda one: (-one.confidence, -one.cost_percent)))


def _of_input(slow: Slowdown, doing: dict[int, set[Activity]]) -> Slowdown:
    """Late ranks whose stacks all show their data loaders, while no other rank's does, have an input stall."""
    others = [rank for rank in doing if rank not in slow.ranks]
    if slow.kind != "rank" or len(others) <= len(slow.ranks) or any("data" in doing[rank] for rank in others):
        return slow
    if any(doing.get(rank) != {"data"} for rank in slow.ranks):
        return slow
    is_in = "is in its data loader" if len(slow.ranks) == 1 else "are in their data loaders"
    return msgspec.structs.replace(slow, kind="input", why=f"{rank_names(slow.ranks)} {is_in} by the stack: {slow.why}")


# ----- what logs print of the wait -----


def _input(curves: Sequence[Curve]) -> list[Slowdown]:
    """Steps that wait for data: how much of their time, and on which ranks."""
    steps = {curve.rank: curve for curve in curves if curve.name == "step_s"}
    shares: dict[int | None, tuple[float, list[_Value]]] = {}
    for curve in curves:
        if curve.name == "data_s":
            values = _seconds(curve.points)
            took = _seconds(steps[curve.rank].points) if curve.rank in steps else _between_lines(curve.points)
            total = _whole(values, took)
            if len(values) >= LEAST_STEPS and total > 0:
                shares[curve.rank] = (_trimmed(values) / total, values)
            elif (share := _plain_share(values, took)) is not None:
                shares[curve.rank] = (share, values)
    if not shares:
        return []
    worst, (share, values) = max(shares.items(), key=lambda item: item[1][0])
    mean = statistics.fmean(value.seconds for value in values)
    stalls = [value for value in values if value.seconds > STALL_S]
    if share < INPUT_SHARE or (len(values) >= LEAST_STEPS and len(stalls) < STALLS) or mean < STALL_S:
        return []
    usual = statistics.median(one for one, _ in shares.values())
    ranks = tuple(
        sorted(rank for rank, (one, _) in shares.items() if rank is not None and one >= INPUT_SHARE and one > 3 * usual)
    )
    steady = not ranks and share < STEADY_SHARE and _is_steady(values)
    longest = max(stalls, key=lambda value: value.seconds)
    who = f" on {rank_names(ranks)}" if ranks else ""
    return [
        Slowdown(
            kind="input",
            ranks=ranks,
            cost_percent=round(100 * min(share, 0.99), 1),
            why=f"{100 * min(share, 0.99):.0f} % of the steps' time is spent waiting for data{who}",
            confidence=0.45 if share < 0.35 or steady else 0.65 if share < 0.5 else 0.85,
            evidence=(_evidence(longest, worst),),
        )
    ]


def _is_steady(values: Sequence[_Value]) -> bool:
    """It waited as long in the first third of the run as in the last."""
    third = len(values) // 3
    if third < LEAST_STEPS:
        return False
    before, after = (statistics.median(one.seconds for one in part) for part in (values[:third], values[-third:]))
    return after <= 1.5 * before


def _whole(values: Sequence[_Value], took: Sequence[_Value]) -> float:
    """Seconds of these steps in all, with the wait. Some scripts print the step's time without it, some with it."""
    if len(took) < LEAST_STEPS:
        return 0.0
    apart = any(wait.seconds > 1.02 * step.seconds for wait, step in zip(values, took, strict=False))
    waits = sum(value.seconds for value in values)
    return statistics.fmean(step.seconds for step in took) * len(values) + (waits if apart else 0.0)


def _plain_share(values: Sequence[_Value], took: Sequence[_Value]) -> float | None:
    """A few steps show only the plainest stall: each of them mostly waits, or one waited for minutes.

    The first of more than a few steps may have had to start workers: it is left out.
    """
    both = list(zip(values, took, strict=False))
    both = both[1:] if len(both) > FEW else both
    whole = sum(max(wait.seconds, step.seconds) for wait, step in both)
    if len(both) < FEW - 1 or whole <= 0:
        return None
    each = all(wait.seconds > max(0.5 * step.seconds, 5 * STALL_S) for wait, step in both)
    minutes = any(wait.seconds > max(0.9 * step.seconds, MINUTE_S) for wait, step in both)
    share = sum(wait.seconds for wait, _ in both) / whole
    return share if share > 0.5 and (each or minutes) else None


def _trimmed(values: Sequence[_Value]) -> float:
    """Seconds of waiting, without the few longest: an epoch begins, a shard is opened."""
    ordered = sorted(value.seconds for value in values)
    return sum(ordered[: len(ordered) - max(1, len(ordered) // 50)])


def _seconds(points: Sequence[Point]) -> list[_Value]:
    """The newest run in the curve, without its warm-up."""
    usable = [point for point in _newest_run(points) if math.isfinite(point.value) and point.value > 0]
    found = [_Value(point.step, point.value, point) for point in usable]
    return found[WARM_UP:] if len(found) > LEAST_STEPS else found


def _between_lines(points: Sequence[Point]) -> list[_Value]:
    """Seconds a step by the times of two lines."""
    found = []
    for a, b in itertools.pairwise(_newest_run(points)):
        if a.at is not None and b.at is not None and a.step is not None and b.step is not None and b.step > a.step:
            took = b.at - a.at
            if took > 0:
                found.append(_Value(b.step, took / (b.step - a.step), b))
    return found[WARM_UP:] if len(found) > LEAST_STEPS else found


def _newest_run(points: Sequence[Point]) -> Sequence[Point]:
    """From where steps began anew for the last time: a log may hold several runs."""
    start = 0
    for index, (a, b) in enumerate(itertools.pairwise(points), 1):
        if a.step is not None and b.step is not None and b.step < a.step:
            start = index
    return points[start:]


def _evidence(value: _Value, rank: int | None) -> Evidence:
    where = f"step {value.step}: " if value.step is not None else ""
    text = f"{where}{value.seconds:.4g} s waiting for data"
    return Evidence(text=text, line=value.point.line, rank=rank, at=value.point.at)
