"""Slow-downs by what logs print: who makes steps long (a rank, a node, the input, everything), since when, its cost.

`diagnosis.trends.arrivals` asks the same of collectives. Warm-up, evaluation, checkpoints and compiling again are
single values or a fast end, never a level that stays: they give nothing. `confidence`: that somebody should act on it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.signals import Evidence
from diagnosis.story import Curve, Point, Slowness
from diagnosis.stuck import names
from diagnosis.trends import arrivals, series

LEAST: Final = 16
"""Values that anything is told from at least."""
FEW: Final = 4
"""On either side of the plainest change."""
WARM_UP: Final = 3
FLOOR: Final = 0.03
"""Relative noise that any step time may have."""
SLOWER: Final = math.log(1.25)
"""A level so much above the fastest before is a slow-down: a day's swing and other users make less."""
STAIRS: Final = 3
"""So many rises are a schedule (batch size, sequence length), or a slow drift."""
RANK_SLOWER: Final = 1.12
"""Times the median of its peers."""
INPUT_SHARE: Final = 0.2
STALL_S: Final = 0.02
"""Seconds of waiting for data a step that matter at least."""
MINUTE_S: Final = 60.0
STALLS: Final = 5
"""Values that must show it."""


class _Value(NamedTuple):
    step: int | None
    seconds: float
    point: Point


def judge(
    curves: Iterable[Curve], late: Iterable[Slowness] = (), rank_nodes: Mapping[int, str] | None = None
) -> tuple[Slowness, ...]:
    """What makes steps longer than they need to be, the surest first. `late`: found by `diagnosis.trends.arrivals`."""
    known = tuple(curves)
    nodes = rank_nodes or {}
    starved = _input(known)
    of_ranks = [*_ranks(known, nodes), *late]
    hungry = {rank for one in starved for rank in one.ranks}
    of_ranks = [one for one in of_ranks if not (hungry and hungry.issuperset(one.ranks))]  # late because of their input
    found = [*starved, *of_ranks] or _together(known)
    return tuple(sorted(found, key=lambda one: (-one.confidence, -one.cost_percent)))


# ----- all ranks at once -----


def _together(curves: Sequence[Curve]) -> list[Slowness]:
    """The slow-down of the whole job, by the number that says most: of work done, of time, of the lines' own times."""
    for name in ("tokens_per_s", "mfu", "step_s"):
        of_name = [curve for curve in curves if curve.name == name]
        if of_name:
            longest = max(of_name, key=lambda curve: len(curve.points))
            return _slow_down(_values(longest.points, inverse=name != "step_s"), name)
    dated = [curve for curve in curves if sum(point.at is not None for point in curve.points) >= LEAST]
    if not dated:
        return []
    return _slow_down(_between_lines(max(dated, key=lambda curve: len(curve.points)).points), "step_s")


def _slow_down(values: list[_Value], name: str) -> list[Slowness]:
    if len(values) < 2 * LEAST:
        return _leap(values, name)
    found = series.levels([math.log(value.seconds) for value in values], FLOOR)
    last = found[-1]
    before = [level for level in found[:-1] if level.end - level.start >= series.LEAST]
    if not before:
        return []
    fast = min(before, key=lambda level: level.value)
    rise = last.value - fast.value
    first = next(index for index, level in enumerate(found) if level is fast) + 1
    rises = sum(b.value - a.value > math.log(1.05) for a, b in itertools.pairwise(found[first - 1 :]))
    if rise < SLOWER or rise < 4.0 * max(fast.spread, last.spread) or rises >= STAIRS:
        return []
    start = next(level for level in found[first:] if level.value - fast.value > 0.5 * rise).start
    confidence = 0.5 if math.exp(rise) < 1.5 else 0.65 if math.exp(rise) < 2 else 0.8
    return [_slower(values, start, math.exp(rise), name, confidence)]


def _leap(values: list[_Value], name: str) -> list[Slowness]:
    """Of few values only the plainest is told: all that follow a moment are over twice all that came before it."""
    for start in range(FEW, len(values) - FEW + 1):
        before, after = values[:start], values[start:]
        if min(one.seconds for one in after) > 2 * max(one.seconds for one in before):
            ratio = statistics.median(one.seconds for one in after) / statistics.median(one.seconds for one in before)
            return [_slower(values, start, ratio, name, 0.6)]
    return []


def _slower(values: list[_Value], start: int, ratio: float, name: str, confidence: float) -> Slowness:
    since = values[start]
    unit, what = {
        "tokens_per_s": ("tokens a second", "tokens a second fell"),
        "mfu": ("MFU", "MFU fell"),
        "step_s": ("s a step", "steps became longer"),
    }[name]
    why = (
        f"{what} by a factor of {ratio:.2f} {_since(since)} and did not recover: "
        f"before it, steps took {100 * (1 - 1 / ratio):.0f} % less time"
    )
    return Slowness(
        kind="all",
        ranks=(),
        cost_percent=round(100 * (1 - 1 / ratio), 1),
        why=why,
        confidence=confidence,
        since_step=since.step,
        evidence=tuple(_evidence(values[at], None, unit) for at in (start - 1, min(start + 1, len(values) - 1))),
    )


def _values(points: Sequence[Point], *, inverse: bool = False) -> list[_Value]:
    """The newest run in the curve, without its warm-up."""
    usable = [point for point in _last_run(points) if math.isfinite(point.value) and point.value > 0]
    seconds = ((1 / point.value if inverse else point.value) for point in usable)
    found = [_Value(point.step, value, point) for point, value in zip(usable, seconds, strict=True)]
    return found[WARM_UP:] if len(found) > LEAST else found


def _between_lines(points: Sequence[Point]) -> list[_Value]:
    """Seconds a step by the times of two lines."""
    found = []
    for a, b in itertools.pairwise(_last_run(points)):
        if a.at is not None and b.at is not None and a.step is not None and b.step is not None and b.step > a.step:
            took = b.at - a.at
            if took > 0:
                found.append(_Value(b.step, took / (b.step - a.step), b))
    return found[WARM_UP:] if len(found) > LEAST else found


def _last_run(points: Sequence[Point]) -> Sequence[Point]:
    """From where steps began anew for the last time: a log may hold several runs."""
    start = 0
    for index, (a, b) in enumerate(itertools.pairwise(points), 1):
        if a.step is not None and b.step is not None and b.step < a.step:
            start = index
    return points[start:]


# ----- one rank or a few -----


def _ranks(curves: Sequence[Curve], nodes: Mapping[int, str]) -> list[Slowness]:
    """Ranks whose own steps are longer than those of their peers."""
    for name in ("step_s", "tokens_per_s"):
        table = _table(curves, name)
        if len(table) >= 2:
            return _slow_ranks(table, _table(curves, "data_s"), nodes)
    return []


def _table(curves: Sequence[Curve], name: str) -> dict[int, dict[int, float]]:
    """Rank -> step -> seconds, where ranks are known."""
    table: dict[int, dict[int, float]] = {}
    for curve in curves:
        if curve.name == name and curve.rank is not None:
            values = _values(curve.points, inverse=name == "tokens_per_s")[-series.MAX_VALUES :]
            table[curve.rank] = {
                index if value.step is None else value.step: value.seconds for index, value in enumerate(values)
            }
    return table


def _slow_ranks(
    table: dict[int, dict[int, float]], data: dict[int, dict[int, float]], nodes: Mapping[int, str]
) -> list[Slowness]:
    steps = sorted(set.intersection(*(set(values) for values in table.values())))
    if len(steps) < LEAST:
        return []
    middle = {step: statistics.median(values[step] for values in table.values()) for step in steps}
    if len(table) == 2:
        middle = {step: min(values[step] for values in table.values()) for step in steps}
    recent = steps[-max(LEAST, len(steps) // 4) :]
    ratios = {rank: statistics.median(of[step] / middle[step] for step in recent) for rank, of in table.items()}
    bar = max(RANK_SLOWER, statistics.median(ratios.values()) + 6 * series.spread(list(ratios.values())))
    slow = tuple(
        sorted(rank for rank, ratio in ratios.items() if ratio >= bar and _steady(table[rank], middle, recent))
    )
    if not slow or 3 * len(slow) > max(3, len(table)):
        return []
    worst = max(slow, key=lambda rank: ratios[rank])
    onset = _onset([math.log(table[worst][step] / middle[step]) for step in steps])
    rest = [of for rank, of in table.items() if rank not in slow]
    with_all = sum(max(of[step] for of in table.values()) for step in recent)
    cost = 1 - sum(max(of[step] for of in rest) for step in recent) / with_all
    kind, node = arrivals.place_of(slow, nodes, table)
    late = statistics.fmean(table[worst][step] - middle[step] for step in recent)
    if worst in data and all(step in data[worst] for step in recent) and len(data) > 1:
        waits = statistics.fmean(data[worst][step] for step in recent)
        others = [statistics.fmean(of.values()) for rank, of in data.items() if rank not in slow and of]
        if others and waits - statistics.median(others) > 0.6 * late:
            kind = "input"
    since = steps[onset] if onset else None
    why = (
        f"{names(slow)} took {ratios[worst]:.2f} times as long for a step as the median of {len(table)} ranks"
        f"{f' since step {since}' if since is not None else ''}{', waiting for data' if kind == 'input' else ''}"
        f": without {'it' if len(slow) == 1 else 'them'} steps would take {max(0.0, 100 * cost):.0f} % less time"
    )
    text = f"rank {worst}: {statistics.fmean(table[worst][step] for step in recent):.3g} s a step, median of all "
    text += f"{statistics.fmean(middle[step] for step in recent):.3g} s"
    return [
        Slowness(
            kind=kind,
            ranks=slow,
            cost_percent=round(100 * max(0.0, cost), 1),
            why=why,
            confidence=0.85 if len(table) > 2 else 0.6,
            node=node,
            since_step=since,
            evidence=(Evidence(text=text, source="step times", rank=worst, node=nodes.get(worst, "")),),
        )
    ]


def _steady(of: dict[int, float], middle: dict[int, float], steps: Sequence[int]) -> bool:
    """Slow in nearly all steps, not in a few."""
    return sum(of[step] > 1.05 * middle[step] for step in steps) >= 0.8 * len(steps)


def _onset(values: Sequence[float]) -> int:
    """Where the last level begins that is as high as the end; 0: it was so from the start."""
    found = series.levels(values, FLOOR)
    last = found[-1]
    low = [level for level in found[:-1] if level.value < 0.5 * last.value]
    return low[-1].end if low else 0


# ----- the input -----


def _input(curves: Sequence[Curve]) -> list[Slowness]:
    """Steps that wait for data: how much of their time, and on which ranks."""
    steps = {curve.rank: curve for curve in curves if curve.name == "step_s"}
    shares: dict[int | None, tuple[float, list[_Value]]] = {}
    for curve in curves:
        if curve.name == "data_s":
            values = _values(curve.points)
            took = _values(steps[curve.rank].points) if curve.rank in steps else _between_lines(curve.points)
            total = _whole(values, took)
            if len(values) >= LEAST and total > 0:
                shares[curve.rank] = (_trimmed(values) / total, values)
            elif (share := _plain_share(values, took)) is not None:
                shares[curve.rank] = (share, values)
    if not shares:
        return []
    worst, (share, values) = max(shares.items(), key=lambda item: item[1][0])
    mean = statistics.fmean(value.seconds for value in values)
    stalls = [value for value in values if value.seconds > STALL_S]
    if share < INPUT_SHARE or (len(values) >= LEAST and len(stalls) < STALLS) or mean < STALL_S:
        return []
    usual = statistics.median(one for one, _ in shares.values())
    ranks = tuple(
        sorted(rank for rank, (one, _) in shares.items() if rank is not None and one >= INPUT_SHARE and one > 3 * usual)
    )
    onset = _onset([value.seconds / mean for value in values])
    longest = max(stalls, key=lambda value: value.seconds)
    who = f" on {names(ranks)}" if ranks else ""
    return [
        Slowness(
            kind="input",
            ranks=ranks,
            cost_percent=round(100 * min(share, 0.99), 1),
            why=f"{100 * min(share, 0.99):.0f} % of the steps' time is spent waiting for data{who}",
            confidence=0.45 if share < 0.35 else 0.65 if share < 0.5 else 0.85,
            since_step=values[onset].step if onset else None,
            evidence=(_evidence(longest, worst, "s waiting for data"),),
        )
    ]


def _whole(values: Sequence[_Value], took: Sequence[_Value]) -> float:
    """Seconds of these steps in all, waiting included. Some print the time without it, some with it."""
    if len(took) < LEAST:
        return 0.0
    apart = any(wait.seconds > 1.02 * step.seconds for wait, step in zip(values, took, strict=False))
    waits = sum(value.seconds for value in values)
    return statistics.fmean(step.seconds for step in took) * len(values) + (waits if apart else 0.0)


def _plain_share(values: Sequence[_Value], took: Sequence[_Value]) -> float | None:
    """Of few steps only the plainest is told: most of each is waiting, or one waited for minutes.

    The first of more than a few may have had to start workers.
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


def _evidence(value: _Value, rank: int | None, what: str = "s a step") -> Evidence:
    where = f"step {value.step}: " if value.step is not None else ""
    number = value.seconds if what.startswith("s ") else value.point.value
    return Evidence(text=f"{where}{number:.4g} {what}", line=value.point.line, rank=rank, at=value.point.at)


def _since(value: _Value) -> str:
    return f"at step {value.step}" if value.step is not None else f"at line {value.point.line}"
