"""Steps that wait for data: synthetic curves with a known truth, as many healthy as slow."""

from __future__ import annotations

import math
import random

import pytest

from diagnosis.incident import Curve, Point, Slowdown
from diagnosis.logs import curves
from diagnosis.signals import Frame, RankStack

SEEDS = range(8)
LATE = Slowdown(kind="rank", ranks=(6,), cost_percent=22.0, why="rank 6 comes late", confidence=0.85, node="n1")


def curve(values, name="step_s", rank=None):
    points = tuple(Point(step=index + 1, value=value, line=10 * index + 1) for index, value in enumerate(values))
    return Curve(name=name, points=points, rank=rank)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [12, 40, 300])
def test_a_healthy_run_gives_nothing(seed, count):
    rng = random.Random(seed * 7919 + count)
    steps = [rng.uniform(2, 8) if rng.random() < 0.05 else math.exp(rng.gauss(0, 0.06)) for _ in range(count)]
    data = [0.03 * one * rng.uniform(0, 1) for one in steps]
    ranks = [curve([one * math.exp(rng.gauss(0, 0.02)) for one in steps], rank=rank) for rank in range(6)]
    assert curves.input_stalls([*ranks, curve(data, "data_s", rank=0)]) == ()


def test_of_few_steps_each_must_wait_for_data():
    steps, waits = [2.4, 2.5, 2.3, 2.6, 2.4, 2.5], [2.1, 2.2, 2.0, 2.3, 2.0, 2.2]
    (found,) = curves.input_stalls([curve(steps), curve(waits, "data_s")])

    assert (found.kind, found.ranks) == ("input", ())
    assert found.confidence >= 0.8
    assert curves.input_stalls([curve(steps), curve([2.1, 0.01, 0.01, 0.02, 0.01, 0.01], "data_s")]) == ()
    assert curves.input_stalls([curve([0.03] * 6), curve([0.025] * 6, "data_s")]) == ()


def test_a_step_that_waits_for_minutes_is_told_where_it_is_most_of_the_time():
    steps, waits = [0.6, 0.6, 0.6, 279.1, 69.1], [0.01, 0.01, 0.01, 278.5, 68.5]

    (found,) = curves.input_stalls([curve(steps), curve(waits, "data_s")])

    assert found.kind == "input"
    assert "279" not in found.why
    assert curves.input_stalls([curve([0.6] * 10 + [5.0]), curve([0.01] * 10 + [4.4], "data_s")]) == ()
    assert curves.input_stalls([curve([200.0] + [0.6] * 8), curve([199.0] + [0.01] * 8, "data_s")]) == ()


def test_the_rank_that_waits_for_data_is_named_and_not_late_besides():
    data = [curve([0.5 if rank == 4 else 0.01] * 60, "data_s", rank) for rank in range(12)]
    steps = [curve([1.0] * 60, rank=rank) for rank in range(12)]
    late = Slowdown(kind="rank", ranks=(4,), cost_percent=20.0, why="rank 4 comes late", confidence=0.9)

    assert {(one.kind, one.ranks) for one in curves.input_stalls([*steps, *data], [late, LATE])} == {
        ("input", (4,)),
        ("rank", (6,)),
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("apart", [False, True])
def test_an_input_stall_even_or_in_bursts(seed, apart):
    rng = random.Random(seed)
    burst = rng.choice([1, 4])
    compute = [math.exp(rng.gauss(0, 0.03)) for _ in range(100)]
    waits = [1.2 * burst * rng.uniform(0.7, 1.3) if index % burst == 0 else 0.001 for index in range(100)]
    steps = compute if apart else [a + b for a, b in zip(compute, waits, strict=True)]
    (found,) = curves.input_stalls([curve(steps), curve(waits, "data_s")])
    assert (found.kind, found.ranks) == ("input", ())
    assert found.cost_percent == pytest.approx(100 * 1.2 / 2.2, abs=9)


@pytest.mark.parametrize("values", [[], [1.0], [0.0] * 40, [float("nan")] * 40, [float("inf"), 1.0] * 30, [-1.0] * 50])
def test_any_numbers_are_survived(values):
    for name in ("step_s", "data_s", "tokens_per_s"):
        assert curves.input_stalls([curve(values, name, rank) for rank in (0, 1)]) == ()


def stack(rank: int, function: str, file: str) -> RankStack:
    return RankStack(rank=rank, frames=(Frame(function=function, file=file, line=1),))


def test_a_late_rank_in_its_data_loader_is_an_input_stall() -> None:
    data = stack(6, "_next_data", "torch/utils/data/dataloader.py")
    waiting = [stack(rank, "all_reduce", "torch/distributed/distributed_c10d.py") for rank in (1, 2, 3)]

    (found,) = curves.input_stalls([], [LATE], [data, *waiting])

    assert (found.kind, found.ranks) == ("input", (6,))
    computing = stack(6, "forward", "model.py")
    also = stack(1, "_next_data", "torch/utils/data/dataloader.py")
    for stacks in ([data], [computing, *waiting], [data, computing, *waiting], [data, also, *waiting]):
        assert curves.input_stalls([], [LATE], stacks) == (LATE,)
