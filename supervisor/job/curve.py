"""Steps and loss over the whole job, in bounded memory, as people are shown them. No decision uses them.

A curve has at most `POINTS` points. When it is full, the whole job so far is cut into equal parts, and of each those
with the lowest and the highest loss stay, so that a spike is still seen after weeks. (Parts of what was told, not of
the clock, which may jump.) What happened on the way (a new attempt that went back, a loss that went wrong) is kept
beside it as marks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from supervisor.messages import LossSeen, NumbersSeen, Progressed
from supervisor.view import CurveMark, CurvePoint, CurveView, utc

POINTS = 720
PARTS = POINTS // 4
MARKS = 200


class Numbered(NamedTuple):
    """A point, and how many were told before it."""

    number: int
    point: CurvePoint


class TrainingCurve:
    def __init__(self) -> None:
        self._points: list[Numbered] = []
        self._count = 0
        self._marks: deque[CurveMark] = deque(maxlen=MARKS)
        self._loss_step: int | None = None
        self._wrong = ""
        """What is wrong with the loss now."""

    def progressed(self, event: Progressed) -> None:
        last = self._points[-1].point if self._points else None
        step = event.step if event.counted_step is None else max(event.counted_step, event.step or 0)
        if step is None and event.loss is None:
            return
        if last is None or last.attempt != event.attempt:
            self._loss_step, self._wrong = None, ""
            if last is not None:
                self._begin(last, event, step)
        loss = event.loss if event.loss_step is None or event.loss_step != self._loss_step else None
        self._loss_step = event.loss_step
        at = event.at if event.step_at is None else min(event.step_at, event.at)
        point = CurvePoint(at=utc(at), attempt=event.attempt, step=step, loss=loss)
        self._points.append(Numbered(self._count, point))
        self._count += 1
        if len(self._points) > POINTS:
            self._points = thinned(self._points, self._count)

    def _begin(self, last: CurvePoint, event: Progressed, step: int | None) -> None:
        text = f"attempt {event.attempt}" + ("" if step is None else f" is at step {step}")
        text += "" if last.step is None else f", attempt {last.attempt} was at step {last.step}"
        is_back = step is not None and last.step is not None and step <= last.step
        self._mark(event.at, "back" if is_back else "attempt", step, text)

    def numbers_seen(self, event: NumbersSeen) -> None:
        self._note_alarm(event.at, "nan" if event.bad else "", event.step)

    def loss_seen(self, event: LossSeen) -> None:
        alarm = event.alarm
        self._note_alarm(event.at, "" if alarm is None else alarm.kind, event.step if alarm is None else alarm.step)

    def _note_alarm(self, at: float, kind: str, step: int | None) -> None:
        """An alarm is told again and again while it lasts."""
        if kind == self._wrong:
            return
        words = {"nan": "the loss is NaN or infinite", "spike": "loss spike", "divergence": "the loss diverges"}
        since = "" if step is None else f" since step {step}" if kind else f" at step {step}"
        self._mark(at, kind or "well", step, words.get(kind, "the loss is well again") + since)
        self._wrong = kind

    def _mark(self, at: float, kind: str, step: int | None, text: str) -> None:
        self._marks.append(CurveMark(at=utc(at), kind=kind, step=step, text=text))

    def loss_of(self, attempt: int) -> float | msgspec.UnsetType:
        """The newest one, if this attempt has told any."""
        newest = next((point for _, point in reversed(self._points) if point.loss is not None), None)
        return msgspec.UNSET if newest is None or newest.loss is None or newest.attempt != attempt else newest.loss

    def view(self) -> CurveView:
        return CurveView(points=tuple(point for _, point in self._points), marks=tuple(self._marks))


def thinned(points: Sequence[Numbered], count: int) -> list[Numbered]:
    """The first, the last, and at most two of each part of the `count` that were told."""
    kept = {points[0], points[-1]}
    for _, part in groupby(points, lambda one: one.number * PARTS // count):
        here = list(part)
        told = [one for one in here if one.point.loss is not None] or here[:1]
        kept |= {min(told, key=_loss), max(told, key=_loss)}
    return sorted(kept, key=lambda one: one.number)


def _loss(one: Numbered) -> float:
    return one.point.loss or 0.0
