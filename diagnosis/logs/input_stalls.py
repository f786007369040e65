"""Steps that wait for data, by what logs print: the share of their time, the ranks, the cost.

`stragglers.collectives` finds ranks that come late to collectives. A late rank whose stack is in its data loader
belongs here too. `confidence`: that somebody should act on it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis.log_evidence import Curve, Point, Slowdown
from diagnosis.signals import Evidence, RankStack
from diagnosis.stacks import Activity, activity
from diagnosis.stuck import names

LEAST: Final = 16
"""Fewer values than this show only the plainest stall."""
FEW: Final = 4
WARM_UP: Final = 3
"""The first values of a run are left out."""
INPUT_SHARE: Final = 0.2
"""The least share of the steps' time that is an input stall."""
STALL_S: Final = 0.02
"""Waiting for data that matters takes at least this many seconds a step."""
MINUTE_S: Final = 60.0
STALLS: Final = 5
"""This many values must show the wait."""


class _Value(NamedTuple):
    step: int | None
    seconds: float
    point: Point


def judge(
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
    return msgspec.structs.replace(slow, kind="input", why=f"{names(slow.ranks)} {is_in} by the stack: {slow.why}")


# ----- what logs print of the wait -----


def _input(curves: Sequence[Curve]) -> list[Slowdown]:
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
    longest = max(stalls, key=lambda value: value.seconds)
    who = f" on {names(ranks)}" if ranks else ""
    return [
        Slowdown(
            kind="input",
            ranks=ranks,
            cost_percent=round(100 * min(share, 0.99), 1),
            why=f"{100 * min(share, 0.99):.0f} % of the steps' time is spent waiting for data{who}",
            confidence=0.45 if share < 0.35 else 0.65 if share < 0.5 else 0.85,
            evidence=(_evidence(longest, worst),),
        )
    ]


def _whole(values: Sequence[_Value], took: Sequence[_Value]) -> float:
    """Seconds of these steps in all, with the wait. Some scripts print the step's time without it, some with it."""
    if len(took) < LEAST:
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


def _values(points: Sequence[Point]) -> list[_Value]:
    """The newest run in the curve, without its warm-up."""
    usable = [point for point in _last_run(points) if math.isfinite(point.value) and point.value > 0]
    found = [_Value(point.step, point.value, point) for point in usable]
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


def _evidence(value: _Value, rank: int | None) -> Evidence:
    where = f"step {value.step}: " if value.step is not None else ""
    text = f"{where}{value.seconds:.4g} s waiting for data"
    return Evidence(text=text, line=value.point.line, rank=rank, at=value.point.at)
