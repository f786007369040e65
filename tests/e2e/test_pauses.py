"""Long pauses that are no faults: nothing is restarted, and no incident is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def undisturbed(job: Any, within_s: float) -> None:
    job.wait_step(1)
    before = job.ranks()
    job.wait_step(39, within_s)
    assert job.ranks() == before, "it was restarted"
    job.succeeds()
    assert job.incidents() == []


def test_evaluations(supervise: Supervise) -> None:
    job = supervise("pauses", "--pause", "evaluate:9@20", steps=40, healthy=())  # a hang is confirmed after 6 s
    undisturbed(job, 60)


@pytest.mark.slow
@pytest.mark.lasts(75)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "pauses",
    [
        ("start:10@0", "judge:12@20", "evaluate_all:10@25", "measure:12@30"),
        ("save:35@9", "hand_over:35@20"),  # longer than every limit below the ten minutes of a phase: 30 s
        ("evaluate:35@12",),
    ],
)
def test_longer_pauses(supervise: Supervise, pauses: tuple[str, ...]) -> None:
    extra = [word for pause in pauses for word in ("--pause", pause)]
    job = supervise("pauses", *extra, steps=40, healthy=())
    undisturbed(job, 200)


@pytest.mark.slow
def test_irregular_steps(supervise: Supervise) -> None:
    job = supervise("pauses", "--irregular", "4", steps=40, healthy=())
    undisturbed(job, 90)
