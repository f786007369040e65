"""Curves out of a log's lines, and what in them is no number, or stands out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.incident import Anomaly, Curve, Point
from diagnosis.logs.curves import LASTING, MAX_POINTS, NEWEST, CurveReader, anomalies
from tests.tables import table

CASES = table(__file__)


def read(*lines: bytes) -> dict[str, list[tuple[int | None, float]]]:
    reader = CurveReader()
    for number, line in enumerate(lines, start=1):
        reader.feed(line, number)
    return {curve.name: [(point.step, round(point.value, 6)) for point in curve.points] for curve in reader.curves()}


@pytest.mark.parametrize(("line", "values"), CASES["lines_of_known_trainers"])
def test_lines_of_known_trainers(line: str, values: dict[str, float]) -> None:
    assert read(line.encode()) == {name: [(100, value)] for name, value in values.items()}


def test_a_line_without_a_step_has_its_place_only() -> None:
    assert read(b"{'loss': 2.31, 'grad_norm': 0.53, 'epoch': 0.5}") == {
        "loss": [(None, 2.31)],
        "grad_norm": [(None, 0.53)],
    }


@pytest.mark.parametrize(
    "line",
    [
        b"eval_grad_norm: 3.2",
        b"aux_loss: 0.2",
        b"without loss of generality 4",
        b"loss_fn: cross_entropy 3",
        b"time (ms) | forward: 1",
    ],
)
def test_what_is_no_number_of_the_training(line: bytes) -> None:
    assert read(line) == {}


@pytest.mark.parametrize("line", [b"step: 5 val_loss: 3.2", b"step 5 validation loss 3.2", b"step 5 eval/loss: 3.2"])
def test_the_loss_of_an_evaluation_is_a_curve_of_its_own(line: bytes) -> None:
    assert read(line) == {"eval_loss": [(5, 3.2)]}


@pytest.mark.parametrize(
    ("line", "scale"),
    [
        (b"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1", 1.0),
        (b"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0", 16384.0),
        (b"NOTE: overflow detected, setting loss scale to: 0.0001", 0.0001),
    ],
)
def test_an_overflow_tells_the_scale_after_it(line: bytes, scale: float | None) -> None:
    assert read(line) == ({} if scale is None else {"overflow_scale": [(None, scale)]})


def test_no_number_is_a_value() -> None:
    reader = CurveReader()
    reader.feed(b"step 10 | train loss nan", 1)
    reader.feed(b"Loss is inf", 2)

    (curve,) = reader.curves()

    assert math.isnan(curve.points[0].value)
    assert math.isinf(curve.points[1].value)


def test_ranks_have_curves_of_their_own() -> None:
    reader = CurveReader()
    reader.feed(b"step 1 loss 2.0", 1, rank=0)
    reader.feed(b"step 1 loss 3.0", 2, rank=1, at=5.0)

    assert [(curve.rank, curve.points[0].value, curve.points[0].at) for curve in reader.curves()] == [
        (0, 2.0, None),
        (1, 3.0, 5.0),
    ]


def test_a_long_curve_is_thinned_out_but_for_its_end_and_its_first_nan() -> None:
    reader = CurveReader()
    for step in range(4 * MAX_POINTS):
        reader.feed(b"step %d loss %s" % (step, b"nan" if step == 5 else b"2.0"), step + 1)

    (curve,) = reader.curves()

    assert len(curve.points) <= MAX_POINTS
    assert [point.step for point in curve.points[-NEWEST:]] == list(range(4 * MAX_POINTS - NEWEST, 4 * MAX_POINTS))
    assert any(point.step == 5 for point in curve.points)


@given(st.binary(max_size=300))
def test_any_bytes_are_taken(line: bytes) -> None:
    reader = CurveReader()
    reader.feed(b"loss: " + line + b" grad_norm: " + line, 1)
    reader.feed(line, 2)
    reader.curves()


Shape = Callable[[int, random.Random], float]


def curve(values: Sequence[float], name: str = "loss", first_step: int | None = 1) -> Curve:
    points = [
        Point(step=None if first_step is None else first_step + index, value=value, line=index + 1)
        for index, value in enumerate(values)
    ]
    return Curve(name=name, points=tuple(points))  # type: ignore[arg-type]


def trained(step: int, chance: random.Random, noise: float = 0.05) -> float:
    """A loss as language models have it: from ln(50,000) down by a power law, with noise."""
    return 1.8 + 9.0 * math.pow(step + 1, -0.35) + chance.gauss(0, noise)


def failures(found: Sequence[Anomaly]) -> list[str]:
    return [one.kind for one in found if one.confidence >= 0.5]


HEALTHY: dict[str, Shape] = {
    "language model": trained,
    "very noisy": lambda step, chance: trained(step, chance, 0.4),
    "small batches": lambda _, chance: abs(chance.lognormvariate(-2.0, 1.2)),
    "flat": lambda _, chance: 0.31 + chance.gauss(0, 0.01),
    "constant": lambda *_: 0.69,
    "warm-up bump": lambda step, chance: trained(step, chance) + (1.5 * math.exp(-((step - 60) ** 2) / 400)),
    "learning rate restarts": lambda step, chance: trained(step % 400 + 100, chance) + 0.1 * (step % 400 < 20),
    "data change": lambda step, chance: trained(step, chance) + (0.5 if step > 500 else 0.0),
    "policy that crosses zero": lambda _, chance: chance.gauss(0, 3.0),
    "one spike": lambda step, chance: trained(step, chance) + (4.0 if step == 600 else 0.0),
    "spike that takes time": lambda step, chance: trained(step, chance) + max(0.0, 4.0 - abs(step - 600) / 8),
    "passing NaN": lambda step, chance: math.nan if step in (3, 400) else trained(step, chance),
    "contrastive": lambda step, chance: 5.5 * math.exp(-step / 900) + chance.gauss(0, 0.3) + 1,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_has_no_failure(name: str, seed: int) -> None:
    chance = random.Random(seed)
    values = [HEALTHY[name](step, chance) for step in range(1000)]

    assert failures(anomalies([curve(values)])) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("nan", lambda step, chance: math.nan if step >= 700 else trained(step, chance)),
        ("inf", lambda step, chance: math.inf if step >= 998 else trained(step, chance)),
        ("divergence", lambda step, chance: trained(step, chance) if step < 700 else 9.5 + chance.gauss(0, 0.3)),
        ("divergence", lambda step, chance: trained(step, chance) + max(0, step - 500) * 0.012),
        ("spike", lambda step, chance: trained(step, chance) if step < 700 else 4.2 + chance.gauss(0, 0.1)),
    ],
)
def test_a_failed_run_is_told_with_its_step(kind: str, shape: Shape, seed: int) -> None:
    chance = random.Random(seed)
    found = anomalies([curve([shape(step, chance) for step in range(1000)])])

    assert failures(found) == [kind]
    assert found[0].confidence >= LASTING
    assert (found[0].step or 0) >= 500
    assert f"step {found[0].step}" in found[0].why


def test_a_spike_that_passes_is_told_and_no_failure() -> None:
    values = [trained(step, random.Random(step)) + (4.0 if step == 600 else 0.0) for step in range(1000)]

    (one,) = anomalies([curve(values)])

    assert (one.kind, one.step) == ("spike", 601)
    assert one.confidence < 0.5
    assert one.evidence[0].line == 601


def test_the_last_value_may_tell_alone() -> None:
    assert failures(anomalies([curve([2.0, 1.9, math.nan])])) == ["nan"]


def test_infinite_gradients_of_a_dynamic_loss_scale_are_usual_at_the_start() -> None:
    assert failures(anomalies([curve([math.inf, math.inf, math.nan, 1.0, 0.9, 0.8, 0.9], "grad_norm")])) == []
    assert failures(anomalies([curve([1.0, 0.9, *[math.inf] * 8], "grad_norm")])) == ["inf"]


def test_a_loss_scale_that_fell_to_its_floor_is_told_and_a_static_one_is_not() -> None:
    falling = [65536.0 / 2**step if step < 16 else 1.0 for step in range(30)]

    assert failures(anomalies([curve(falling, "loss_scale")])) == ["loss_scale_floor"]
    assert anomalies([curve([1.0] * 100, "loss_scale")]) == ()
    assert anomalies([curve([65536.0, 32768.0, 16384.0] + [16384.0] * 50, "loss_scale")]) == ()


def test_a_second_run_in_the_same_log_starts_high_again() -> None:
    chance = random.Random(1)
    first = curve([trained(step, chance) for step in range(300)])
    second = curve([trained(step, chance) for step in range(300)])

    assert anomalies([Curve(name="loss", points=first.points + second.points)]) == ()


def test_the_surest_failure_comes_first() -> None:
    passing = curve([trained(step, random.Random(step)) + (5.0 if step == 500 else 0.0) for step in range(1000)])
    broken = curve([2.0] * 20 + [math.nan] * 5)

    assert [one.kind for one in anomalies([passing, broken])] == ["nan", "spike"]


def test_overflows_at_the_floor_are_a_failure_and_those_on_the_way_down_are_not() -> None:
    falling = [2.0**power for power in range(16, 0, -1)]

    assert failures(anomalies([curve([*falling, 1.0, 1.0, 1.0, 1.0], "overflow_scale", None)])) == ["loss_scale_floor"]
    assert anomalies([curve(falling, "overflow_scale", None)]) == ()
    assert anomalies([curve([65536.0] * 6, "overflow_scale", None)]) == ()
    sunk = [2.0**-power for power in range(16)]
    assert failures(anomalies([curve(sunk, "overflow_scale", None)])) == ["loss_scale_floor"]


def test_nan_gradients_beside_a_loss_of_zero_are_a_nan_loss() -> None:
    loss, norm = curve([2.0, 1.9, 0.0, 0.0]), curve([0.5, 0.4, math.nan, math.nan], "grad_norm")

    (one,) = anomalies([loss, norm])

    assert (one.kind, one.step, one.confidence) == ("nan", 3, 0.8)
    assert anomalies([curve([2.0, 0.0, 0.0]), curve([0.5, 0.1, 0.0], "grad_norm")]) == ()


def test_a_loss_beyond_all_measure_and_an_evaluation_without_a_number() -> None:
    assert failures(anomalies([curve([2.0, 3e9, 5e12])])) == ["divergence"]
    assert failures(anomalies([curve([2.0, math.nan, math.nan], "eval_loss")])) == ["nan"]
    assert failures(anomalies([curve([2.0, math.nan, 1.9], "eval_loss")])) == []
