"""Steps and loss over the whole job: bounded, and what stands out stays."""

import math

import msgspec

from diagnosis.signals import LossAlarm
from supervisor.job.curve import MARKS, POINTS, TrainingCurve
from supervisor.messages import LossSeen, NumbersSeen, Progressed

AT = 1_767_225_600.0


def told(
    curve: TrainingCurve, number: int, *, attempt: int = 1, step: int | None = None, loss: float | None = None
) -> None:
    step = number if step is None else step
    curve.progressed(
        Progressed(at=AT + 10 * number, attempt=attempt, step=step, loss=loss, loss_step=None if loss is None else step)
    )


def test_a_long_job_keeps_its_ends_and_its_spike_in_bounded_memory() -> None:
    curve = TrainingCurve()
    for number in range(50_000):
        told(curve, number, loss=900.0 if number == 31_337 else 2.0 + math.sin(number) / 10)
    view = curve.view()
    assert POINTS // 4 < len(view.points) <= POINTS
    assert (view.points[0].step, view.points[-1].step) == (0, 49_999)
    assert [one.step for one in view.points if one.loss == 900.0] == [31_337]
    steps = [one.step for one in view.points]
    assert steps == sorted(steps)


def test_of_each_day_of_a_long_job_the_course_stays() -> None:
    curve, day = TrainingCurve(), 3000
    for number in range(14 * day):
        told(curve, number, loss=900.0 if number in (2 * day, 3 * day, 11 * day) else 2.0 + math.sin(number) / 10)
    points = curve.view().points
    assert [one.step for one in points if one.loss == 900.0] == [2 * day, 3 * day, 11 * day]
    days = [(one.step or 0) // day for one in points]
    assert min(days.count(number) for number in range(14)) > POINTS // 4 // 14


def test_an_attempt_that_goes_back_is_marked() -> None:
    curve = TrainingCurve()
    told(curve, 1, step=30)
    told(curve, 2, attempt=2, step=21)
    told(curve, 3, attempt=3, step=40)
    assert [(one.kind, one.step) for one in curve.view().marks] == [("back", 21), ("attempt", 40)]


def test_a_loss_that_is_not_told_anew_is_no_point_of_the_curve() -> None:
    curve = TrainingCurve()
    for number in (1, 2):
        curve.progressed(Progressed(at=AT + number, attempt=1, step=number, loss=2.5, loss_step=1))
    assert [one.loss for one in curve.view().points] == [2.5, None]
    assert curve.loss_of(1) == 2.5
    assert curve.loss_of(2) is msgspec.UNSET


def test_what_is_wrong_with_the_loss_is_marked_once() -> None:
    curve = TrainingCurve()
    spike = LossSeen(at=AT, attempt=1, alarm=LossAlarm(kind="spike", step=7))
    for _ in range(3):
        curve.loss_seen(spike)
    curve.loss_seen(LossSeen(at=AT, attempt=1, step=9))
    curve.numbers_seen(NumbersSeen(at=AT, attempt=1, bad=True, step=12))
    assert [one.kind for one in curve.view().marks] == ["spike", "well", "nan"]
    for number in range(1000):
        told(curve, number, attempt=number, step=1)
    assert len(curve.view().marks) == MARKS
