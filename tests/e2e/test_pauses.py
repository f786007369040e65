"""Long waits that are no faults: each is told, nothing is restarted, and no incident is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def undisturbed(job: Any, within_s: float, last: int = 39) -> None:
    job.wait_step(1)
    before = job.ranks()
    job.wait_step(last, within_s)
    assert job.ranks() == before, "it was restarted"
    job.succeeds()
    assert job.incidents() == []


@pytest.mark.slow
def test_a_wait_that_nothing_explains_is_told(supervise: Supervise) -> None:
    """A proven hang would have been acted on after 6 s."""
    job = supervise("waits", "20", steps=40, nproc=2, healthy=("0",))
    job.wait_step(20)

    def told() -> Any:
        return job.told("status")["silence"]

    silence = job.until(told, 30, "the silence in status")
    assert (silence["ranks"], silence["waiting"]) == ([0], 1)
    assert silence["place"].startswith("polls (waits.py:")
    undisturbed(job, 90)
    assert "rank 0 has been in polls (waits.py:" in job.shown()
    assert "it was not a hang" in job.shown()


@pytest.mark.slow
@pytest.mark.lasts(90)
@pytest.mark.timeout(400)
def test_twelve_ways_to_wait_honestly(supervise: Supervise) -> None:
    """Each of twelve ranks waits in a way of its own, with two cores for all of them, and the last waits for them."""
    job = supervise("waits", "55", steps=40, nproc=13, healthy=("0",))
    job.wait_step(20, 120)

    def told() -> Any:
        silence = job.told("status")["silence"]
        return silence if silence and len(silence["ranks"]) >= 12 else None

    assert job.until(told, 60, "the silence of all twelve in status")["ranks"] == list(range(12))
    undisturbed(job, 250)


@pytest.mark.slow
@pytest.mark.lasts(75)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "pauses",
    [
        ("start:10@0", "save:35@9", "judge:12@20", "evaluate_all:10@25", "measure:12@30"),
        ("hand_over:9@9", "hand_over:9@18", "hand_over:9@27", "hand_over:9@36"),  # at every checkpoint of a run
    ],
)
def test_longer_pauses(supervise: Supervise, pauses: tuple[str, ...]) -> None:
    extra = [word for pause in pauses for word in ("--pause", pause)]
    job = supervise("pauses", *extra, steps=40, healthy=())
    undisturbed(job, 200)
