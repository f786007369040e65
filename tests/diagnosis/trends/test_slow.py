"""Slow-downs by curves: synthetic ones with a known truth, as many healthy as slow."""

from __future__ import annotations

import math
import random

import pytest

from diagnosis.story import Curve, Point
from diagnosis.trends import series, slow

SEEDS = range(8)


def curve(values, name="step_s", rank=None, every=1, at=None):
    points = tuple(
        Point(step=every * (index + 1), value=value, line=10 * index + 1, at=None if at is None else at[index])
        for index, value in enumerate(values)
    )
    return Curve(name=name, points=points, rank=rank)


def honest(rng, count):
    """Seconds a step of a healthy run: noise, warm-up, pauses, evaluation, checkpoints, compiling, a day's swing."""
    base, noise = rng.uniform(0.2, 20.0), rng.choice([0.005, 0.02, 0.06])
    evaluate, save = rng.choice([0, 20, 50]), rng.choice([0, 33, 100])
    values = []
    for index in range(count):
        value = base * math.exp(rng.gauss(0, noise)) * (1 + 0.02 * math.sin(index / 100))
        if index < rng.choice([1, 3, 6]):
            value *= rng.uniform(2, 30)
        if (evaluate and index % evaluate == 0) or (save and index % save == 0) or rng.random() < 0.01:
            value *= rng.uniform(1.5, 8)
        values.append(value)
    return values


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [12, 40, 300, 1500])
def test_a_healthy_run_gives_nothing(seed, count):
    rng = random.Random(seed * 7919 + count)
    steps = honest(rng, count)
    assert slow.judge([curve(steps)]) == ()
    assert slow.judge([curve([1e4 / one for one in steps], "tokens_per_s")]) == ()
    data = [0.03 * one * rng.uniform(0, 1) for one in steps]
    ranks = [curve([one * math.exp(rng.gauss(0, 0.02)) for one in steps], rank=rank) for rank in range(6)]
    assert slow.judge([*ranks, curve(data, "data_s", rank=0)]) == ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ratio", [1.35, 2.0, 5.0])
@pytest.mark.parametrize("count", [60, 1200])
def test_a_slow_down_of_all_is_found_with_its_step_and_cost(seed, ratio, count):
    rng = random.Random(seed * 31 + count)
    steps = honest(rng, count)
    since = rng.randrange(count // 3, count - 16)
    steps = [one * ratio if index >= since else one for index, one in enumerate(steps)]
    (found,) = slow.judge([curve(steps)])
    assert (found.kind, found.ranks) == ("all", ())
    assert found.since_step == pytest.approx(since, abs=max(8, count // 60))
    assert found.cost_percent == pytest.approx(100 * (1 - 1 / ratio), abs=6)
    assert [one.kind for one in slow.judge([curve([1 / one for one in steps], "tokens_per_s")])] == ["all"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_times_of_lines_tell_where_nothing_else_does(seed):
    rng = random.Random(seed)
    steps = [max(one, 0.2) for one in honest(rng, 120)]
    for ratio, expected in ((1, []), (2, ["all"])):
        at, now = [], 1.7e9
        for index, one in enumerate(steps):
            now += 10 * one * (ratio if index > 70 else 1)
            at.append(float(round(now)))
        assert [one.kind for one in slow.judge([curve([2.0] * 120, "loss", every=10, at=at)])] == expected


def test_of_few_values_only_the_plainest_change_is_told():
    (found,) = slow.judge([curve([0.4, 0.41, 0.4, 0.42, 0.41, 1.3, 1.25, 1.4, 1.3])])

    assert (found.kind, found.since_step, found.confidence) == ("all", 6, 0.6)
    assert slow.judge([curve([1.3, 0.4, 0.41, 0.4, 0.42, 0.41])]) == ()
    assert slow.judge([curve([0.4, 0.41, 0.4, 0.42, 0.6, 0.7, 0.65, 0.7])]) == ()
    assert slow.judge([curve([0.4, 0.41, 0.4, 0.42, 1.3, 0.4, 1.3, 1.3])]) == ()


def test_of_few_steps_each_must_wait_for_data():
    steps, waits = [2.4, 2.5, 2.3, 2.6, 2.4, 2.5], [2.1, 2.2, 2.0, 2.3, 2.0, 2.2]
    (found,) = slow.judge([curve(steps), curve(waits, "data_s")])

    assert (found.kind, found.ranks) == ("input", ())
    assert found.confidence >= 0.8
    assert slow.judge([curve(steps), curve([2.1, 0.01, 0.01, 0.02, 0.01, 0.01], "data_s")]) == ()
    assert slow.judge([curve([0.03] * 6), curve([0.025] * 6, "data_s")]) == ()


def test_a_step_that_waits_for_minutes_is_told_where_it_is_most_of_the_time():
    steps, waits = [0.6, 0.6, 0.6, 279.1, 69.1], [0.01, 0.01, 0.01, 278.5, 68.5]

    (found,) = slow.judge([curve(steps), curve(waits, "data_s")])

    assert found.kind == "input"
    assert "279" not in found.why
    assert slow.judge([curve([0.6] * 10 + [5.0]), curve([0.01] * 10 + [4.4], "data_s")]) == ()
    assert slow.judge([curve([200.0] + [0.6] * 8), curve([199.0] + [0.01] * 8, "data_s")]) == ()


@pytest.mark.parametrize("stairs", [4, 8])
def test_a_schedule_is_no_slow_down(stairs):
    rng = random.Random(stairs)
    steps = [(1 + index * stairs // 400) * math.exp(rng.gauss(0, 0.02)) for index in range(400)]
    assert slow.judge([curve(steps)]) == ()
    tokens = [100 * math.exp(rng.gauss(0, 0.02)) for _ in steps]
    assert slow.judge([curve(steps[:220]), curve(tokens[:220], "tokens_per_s")]) == ()


def test_a_run_that_recovered_or_began_anew_is_healthy():
    rng = random.Random(1)
    noisy = [math.exp(rng.gauss(0, 0.02)) for _ in range(300)]
    assert slow.judge([curve([2 * one if 100 < index < 180 else one for index, one in enumerate(noisy)])]) == ()
    points = (*curve([0.4 * one for one in noisy]).points, *curve(noisy).points)
    assert slow.judge([Curve(name="step_s", points=points)]) == ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ranks", "ratio"), [(3, 1.25), (8, 1.25), (8, 2.0), (64, 1.5)])
def test_a_slow_rank(seed, ranks, ratio):
    rng = random.Random(seed + ranks)
    steps = honest(rng, 120)
    who, since = rng.randrange(ranks), rng.choice([0, 60])
    known = [
        curve(
            [
                one * math.exp(rng.gauss(0, 0.02)) * (ratio if rank == who and index >= since else 1)
                for index, one in enumerate(steps)
            ],
            rank=rank,
        )
        for rank in range(ranks)
    ]
    (found,) = slow.judge(known, rank_nodes={rank: f"n{rank // 2}" for rank in range(ranks)})
    assert (found.kind, found.ranks, found.node) == ("rank", (who,), f"n{who // 2}")
    assert found.cost_percent == pytest.approx(100 * (1 - 1 / ratio), abs=8)
    assert (found.since_step or 0) == pytest.approx(since, abs=8)
    assert f"rank {who} took" in found.why


def test_a_slow_node_and_a_rank_that_waits_for_data():
    rng = random.Random(3)
    steps = {rank: [math.exp(rng.gauss(0, 0.02)) for _ in range(60)] for rank in range(12)}
    nodes = {rank: f"n{rank // 2}" for rank in steps}
    for rank in (4, 5):
        steps[rank] = [1.5 * one for one in steps[rank]]
    (found,) = slow.judge([curve(values, rank=rank) for rank, values in steps.items()], rank_nodes=nodes)
    assert (found.kind, found.ranks, found.node) == ("node", (4, 5), "n2")
    steps[5] = steps[0]
    data = {rank: [0.5 if rank == 4 else 0.01] * 60 for rank in steps}
    known = [curve(values, rank=rank) for rank, values in steps.items()]
    found = slow.judge([*known, *(curve(values, "data_s", rank=rank) for rank, values in data.items())])
    assert {(one.kind, one.ranks) for one in found} == {("input", (4,))}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("apart", [False, True])
def test_an_input_stall_even_or_in_bursts(seed, apart):
    rng = random.Random(seed)
    burst = rng.choice([1, 4])
    compute = [math.exp(rng.gauss(0, 0.03)) for _ in range(100)]
    waits = [1.2 * burst * rng.uniform(0.7, 1.3) if index % burst == 0 else 0.001 for index in range(100)]
    steps = compute if apart else [a + b for a, b in zip(compute, waits, strict=True)]
    (found,) = slow.judge([curve(steps), curve(waits, "data_s")])
    assert (found.kind, found.ranks) == ("input", ())
    assert found.cost_percent == pytest.approx(100 * 1.2 / 2.2, abs=9)


@pytest.mark.parametrize("values", [[], [1.0], [0.0] * 40, [float("nan")] * 40, [float("inf"), 1.0] * 30, [-1.0] * 50])
def test_any_numbers_are_survived(values):
    for name in ("step_s", "data_s", "tokens_per_s"):
        assert slow.judge([curve(values, name, rank) for rank in (0, 1)]) == ()


def test_levels_are_those_that_were_put_in():
    rng = random.Random(5)
    values = [rng.gauss(level, 0.1) + (50 if rng.random() < 0.03 else 0) for level in (1, 2, 1.5) for _ in range(100)]
    found = series.levels(values, 0.01)
    assert [round(level.value, 1) for level in found] == [1.0, 2.0, 1.5]
    assert [level.start for level in found] == pytest.approx([0, 100, 200], abs=3)
    assert series.levels([], 0.1) == []
