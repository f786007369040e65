"""Anomalies in curves: NaN, infinity, spikes, divergence, a loss scale at its floor.

All thresholds are multiples of the noise: the median distance of neighbouring values. No trend and no spike changes it.
`confidence`: that the run has failed. A spike that passes is an anomaly and no failure.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence, Set
from typing import Final, NamedTuple

from diagnosis.log_evidence import Anomaly, Curve, Point
from diagnosis.signals import Evidence

LEAST: Final = 12
"""A curve with fewer values shows nothing."""
WINDOW: Final = 40
SPIKE: Final = 12.0
"""A spike is this many times the noise above the values before it,"""
LEAP: Final = 0.4
"""and this share of their level."""
TO_STAY: Final = 5
"""This many values in a row do not pass."""
FLOOR_SCALE: Final = 1.0
"""A scale at or below this is at its floor: a dynamic scale above it can still fall."""
SUNK_SCALE: Final = 1e-3
"""A scale without a floor that fell this far: no scale is small enough."""
ABSURD: Final = 1e8
"""A loss this large is none, whatever it measures."""
PASSING: Final = 0.2
LASTING: Final = 0.6
CERTAIN: Final = 0.9


def judge(curves: Iterable[Curve]) -> tuple[Anomaly, ...]:
    """The anomalies, the surest failure first."""
    found: list[Anomaly] = []
    known = tuple(curves)
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
            found += _zeroed(curve, points, zero) or _not_finite(curve, points)
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


def _not_finite(curve: Curve, points: Sequence[Point]) -> list[Anomaly]:
    """The first value that is no number, and whether numbers came back."""
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
    if run and curve.name == "loss":
        return [_anomaly(kind, curve, first, f"the last {name} is {word} ({_place(first)})", LASTING)]
    why = f"{name} was {word} at {_place(first)}, and {len(bad)} times in all; numbers came back"
    return [_anomaly(kind, curve, first, why, PASSING)]


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
    if len(values) < LEAST:
        return []
    found = []
    index = LEAST // 2
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
    first = statistics.median([point.value for point in points[: LEAST // 2]])
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
    width = max(LEAST, len(values) // 20)
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


_NAMES: Final = {
    "grad_norm": "the gradient norm",
    "eval_loss": "the loss of the evaluation",
    "loss_scale": "the loss scale",
    "overflow_scale": "the loss scale",
}


def _name(curve: Curve) -> str:
    return _NAMES.get(curve.name, f"the {curve.name}")


def _place(point: Point) -> str:
    return f"step {point.step}" if point.step is not None else f"line {point.line}"
