"""How an attempt goes, whether it goes on where it should, and what incidents cost."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.signals import NodeEvidence, RankSample
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.job.view import startup_s


def saves(driver: Any, *steps: int, complete: bool = True) -> None:
    seen = tuple(
        Checkpoint(path=f"/c/checkpoint-{step}", step=step, complete=complete, format="torch", modified_at=driver.now)
        for step in steps
    )
    driver.tell(m.CheckpointsSeen, after=10, node="a", checkpoints=seen)


def test_a_checkpoint_further_than_ever_is_progress_and_the_end_of_the_incident(running: Any) -> None:
    driver = running("a", step=None)
    driver.now += 100
    saves(driver, 20)
    driver.crash("a", 1)
    assert driver.job.incidents.budget.used == 1
    driver.up(step=None)
    moved_at = driver.now
    saves(driver, 20)
    assert driver.job.incidents.budget.used == 1, "written before, or no further"
    saves(driver, 30, complete=False)
    assert driver.job.incidents.budget.used == 1
    saves(driver, 30)
    assert driver.job.incidents.budget.used == 0
    (case,) = driver.job.incidents.log.records
    assert case.closed_why == "attempt 2 saved a checkpoint of step 30"
    assert case.lost_s(driver.now) == moved_at - case.failed_at, "training went on long before it saved"


def test_the_time_that_two_incidents_lasted_at_once_counts_once(running: Any) -> None:
    driver = running("a", "b")
    driver.now += 100
    failed_at = driver.now
    driver.crash("a", 1)
    driver.tell(m.NodeLost, after=50, node="b", silent_s=50.0)
    driver.join("b")
    for timer in ("evidence", "backoff"):
        if timer in driver.job.timers:
            driver.fire(timer)
    driver.up(step=1)
    back_at = driver.now
    driver.now += 10
    cases = driver.job.incidents.log.records
    assert len(cases) > 1
    assert all(case.closed_at is not None for case in cases)
    redo_s = sum(case.redone_s for case in cases)
    assert driver.job.incidents.log.lost_s(driver.now) == back_at - failed_at + redo_s
    assert sum(case.lost_s(driver.now) for case in cases) > back_at - failed_at + redo_s
    assert sum(driver.job.incidents.log.totals().badput_s.values()) == pytest.approx(back_at - failed_at + redo_s)


def test_a_failure_before_the_first_step_counts_once(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    started_at = driver.now
    driver.tell(m.LauncherEnded, after=50, node="a", attempt=1, how="code 1")
    for _ in range(3):
        for timer in ("evidence", "again"):
            if timer in driver.job.timers:
                driver.fire(timer)
    driver.up(step=1)
    (case,) = driver.job.incidents.log.records
    assert startup_s(driver.job, driver.now) == case.failed_at - started_at
    assert startup_s(driver.job, driver.now) + driver.job.incidents.log.lost_s(driver.now) == driver.now - started_at


# ----- the attempt after -----


def restarted(running: Any, first: int) -> Any:
    """The second attempt, which should go on at step 100, shows this step first."""
    driver = running("a")
    checkpoint = Checkpoint(path="/c/100", step=100, format="x", complete=True, modified_at=driver.now + 60)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.rank_ends(step=120)
    driver.up(first)
    return driver


def test_a_run_that_begins_again_is_held_once_its_second_step_shows_it(running: Any) -> None:
    driver = restarted(running, 0)
    assert driver.state == "RUNNING", "a progress bar that is being drawn says 0 too"
    driver.tell(m.Progressed, attempt=2, step=1)
    assert (driver.state, driver.told["a"].stage, driver.number) == ("RECOVERING", "form", 3)
    assert "operator" in driver.job.waiting


def test_a_bar_that_is_drawn_from_nothing_and_jumps_is_no_new_beginning(running: Any) -> None:
    driver = restarted(running, 0)
    driver.tell(m.Progressed, attempt=2, step=101)
    assert driver.state == "RUNNING"
    [incident] = driver.job.view().incidents
    assert incident.closed_at is not None


@pytest.mark.parametrize("step", [60, 99, 100, 101, 130])
def test_a_run_that_goes_on_somewhere_near_is_left_alone(running: Any, step: int) -> None:
    driver = restarted(running, step)
    driver.tell(m.Progressed, attempt=2, step=step + 1)
    assert driver.state == "RUNNING"


def test_a_checkpoint_that_counts_samples_is_no_measure_for_steps(running: Any) -> None:
    driver = running("a")
    checkpoint = Checkpoint(path="/c/64000", step=64000, format="x", complete=True, modified_at=driver.now + 60)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.rank_ends(step=510)
    driver.up(501)
    driver.tell(m.Progressed, attempt=2, step=502)
    assert driver.state == "RUNNING"


def test_what_an_earlier_job_left_behind_is_no_reason_to_hold(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    old = Checkpoint(path="/c/5000", step=5000, format="x", complete=True, modified_at=driver.now - 86400)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(old,))
    driver.up(0)
    driver.rank_ends(step=7)
    driver.up(0)
    driver.tell(m.Progressed, attempt=2, step=1)
    assert driver.state == "RUNNING"


def test_an_incident_closes_even_if_no_step_is_ever_seen(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.tell(m.LauncherReady, node="a", attempt=2, offer=m.StoreOffer(host="a", port=1, local_world_size=2))
    driver.tell(m.WorkersStarted, node="a", attempt=2, ranks=(0, 1))
    driver.fire("stood")
    assert driver.job.view().incidents[0].closed_at is None
    driver.fire("settle")
    assert driver.job.view().incidents[0].closed_at is not None


def steps_until(driver: Any, first: int, last: int, pace: float) -> dict[int, float]:
    """Makes steps; the job hears of the last one as the controller tells it. Step -> when it was made."""
    made = {first: driver.now}
    driver.tell(m.Progressed, attempt=driver.number, step=first, step_at=driver.now)
    for step in range(first + 1, last + 1):
        driver.now += pace
        made[step] = driver.now
    driver.tell(m.Progressed, after=0.7, attempt=driver.number, step=last, step_at=made[last])
    return made


@pytest.mark.parametrize(("saved", "shown"), [(10, 11), (10, 15), (50, 51), (0, 1), (51, 53)])
@pytest.mark.parametrize("partial_s", [0.0, 3.0])
def test_what_is_lost_is_what_lies_between_the_same_step_made_twice(
    running: Any, saved: int, shown: int, partial_s: float
) -> None:
    """The next attempt resumes after `saved`, and the first step of it that is seen is `shown`."""
    driver = running("a", step=None)
    made = steps_until(driver, 1, 51, pace=2.0)
    driver.now = made[51] + partial_s
    driver.crash("a", 1)
    driver.now += 4.0
    driver.up(step=None)
    again_at = driver.now + (shown - saved) * 2.0
    driver.tell(m.Progressed, after=again_at + 1.0 - driver.now, attempt=2, step=shown, step_at=again_at)
    driver.tell(m.Progressed, after=2.0, attempt=2, step=shown + 1, step_at=again_at + 2.0)
    (case,) = driver.job.incidents.log.records
    assert case.step == 51
    would_have = made.get(shown, made[51] + 2.0 * (shown - 51))
    assert case.lost_s(driver.now) == pytest.approx(again_at - would_have, abs=0.01)


def test_the_last_words_of_a_rank_tell_its_step(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.Progressed, after=10, attempt=1, step=9)
    driver.rank_ends("b", 3)
    words = RankSample(rank=0, local_rank=0, pid=1, step=51, moved_age_s=0.5)
    driver.tell(m.EvidenceArrived, after=0.1, evidence=NodeEvidence(node="a", attempt=1, request=1, samples=(words,)))
    (case,) = driver.job.incidents.log.records
    assert case.verdict is not None
    assert case.step == 51
    assert driver.job.view().incidents[0].step == 51
