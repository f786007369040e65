from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from diagnosis.incident import Anomaly, Curve, Point
from diagnosis.logs.curves import LASTING, anomalies

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
