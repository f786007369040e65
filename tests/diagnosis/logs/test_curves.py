from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.logs.curves import MAX_POINTS, NEWEST, CurveReader
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
