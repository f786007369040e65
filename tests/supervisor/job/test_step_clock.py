"""What the step clock counts: told, and used for what is lost. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recovery.checkpoint import Checkpoint
from supervisor import messages as m


@pytest.fixture
def run(make_driver: Any) -> Callable[..., Any]:
    def start(step: int | None) -> Any:
        driver = make_driver()
        driver.join("a")
        driver.up(step)
        return driver

    return start


def goes_on(driver: Any, after: float = 50.0, **fields: Any) -> None:
    driver.tell(m.Progressed, after=after, attempt=driver.number, **fields)


def fails(driver: Any) -> None:
    driver.crash()
    while driver.state != "STARTING":
        driver.fire(min(driver.job.timers, key=driver.job.timers.__getitem__))


def saved(driver: Any, step: int) -> None:
    one = Checkpoint(
        path=f"/c/step-{step}", step=step, complete=True, format="dcp", modified_at=driver.now, size_bytes=1
    )
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(one,))


def recovered(driver: Any) -> dict[str, Any]:
    (found,) = (note for kind, note in driver.loud.items() if kind == "recovered")
    return dict(found)


def test_steps_that_the_output_did_not_tell_are_lost_too(run: Any) -> None:
    """Every hundredth is printed. It is killed after 457."""
    job = run(100)
    goes_on(job, step=400, counted=400, counted_step=400)
    saved(job, 400)
    goes_on(job, after=5.0, step=400, counted=457, counted_step=457)
    view = job.job.view()
    assert (view.step, view.step_from, view.counted) == (457, "clock", 457)
    assert view.restart.loses_steps == 57
    fails(job)
    job.up(500)
    assert recovered(job)["lost_steps"] == 57
    assert job.job.attempt.newest_step == 500
    assert job.job.view().counted == 0


def test_without_the_clock_the_output_tells(run: Any) -> None:
    job = run(100)
    goes_on(job, step=400)
    view = job.job.view()
    assert (view.step, view.step_from, view.counted) == (400, "output", 0)


def test_a_script_that_shows_no_steps_makes_its_first_one(run: Any) -> None:
    """Its incident is closed by that, and not after ten minutes; what it has lost is what was counted."""
    job = run(None)
    goes_on(job, step=None, counted=33, counted_at=job.now + 49.0)
    view = job.job.view()
    assert (view.step, view.step_from, view.counted) == (None, "", 33)
    fails(job)
    job.up(None)
    assert job.job.view().incidents[-1].closed_at is None
    goes_on(job, after=2.0, step=None, counted=1)
    assert recovered(job)["lost_steps"] == 33
    assert job.job.view().incidents[-1].closed_at is not None
    goes_on(job, step=None, counted=20)
    assert "recovered" not in job.loud


def test_counted_steps_alone_are_no_progress_that_renews_the_budget(run: Any) -> None:
    """A script that begins again each time counts up each time."""
    job = run(None)
    for _ in range(3):
        goes_on(job, step=None, counted=500)
        fails(job)
        job.up(None)
        goes_on(job, after=1.0, step=None, counted=1)
    assert job.job.view().budget.used == 3


def test_ranks_that_wait_for_data_are_told_and_nothing_is_done(run: Any) -> None:
    job = run(1)
    before = (job.state, job.number)
    job.tell(m.InputWaitSeen, attempt=1, ranks=(0, 1), count=2, share=0.38, since=50_520.0)
    assert job.loud.keys() == {"input_wait"}
    view = job.job.view().input_wait
    assert (view.ranks, view.share_percent) == ((0, 1), 38.0)
    job.tell(m.InputWaitSeen, attempt=7, ranks=(0,), count=1, share=0.9)
    assert job.job.view().input_wait.share_percent == 38.0, "of no attempt that there is"
    job.tell(m.InputWaitSeen, attempt=1, ranks=())
    assert [one.kind for one in job.actions if isinstance(one, m.Note)] == ["input_wait_gone"]
    assert job.job.view().input_wait is None
    assert (job.state, job.number) == before


@pytest.mark.parametrize(("ranks", "named"), [((1,), True), ((0, 1), False), ((), False)])
def test_a_straggler_that_waits_for_data_is_no_slow_device(run: Any, ranks: tuple[int, ...], named: bool) -> None:
    job = run(1)
    job.tell(m.InputWaitSeen, attempt=1, ranks=ranks, count=len(ranks), share=0.38)
    job.tell(m.StragglersSeen, attempt=1, ranks=(1,), cost=0.2, since=50_520.0)
    assert ("for data 38 %" in job.loud["stragglers"]["what"]) == named
    assert ("for data 38 %" in job.job.view().stragglers.text) == named
