"""How an attempt goes whose script shows no step, and what incidents cost."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import ExitRecord
from diagnosis.taxonomy import FailureClass
from recovery.actions import Checkpoint
from supervisor import messages as m
from supervisor.job.shown import ettr, startup_s

CRASH = Verdict(
    failure_class=FailureClass.WORKER_CRASH,
    culprits=(Culprit(node="a", rank=1),),
    confidence=0.8,
    why="",
    action="restart",
)


def saves(driver: Any, *steps: int, complete: bool = True) -> None:
    seen = tuple(
        Checkpoint(path=f"/c/checkpoint-{step}", step=step, complete=complete, format="torch", modified_at=driver.now)
        for step in steps
    )
    driver.tell(m.CheckpointsSeen, after=10, node="a", checkpoints=seen)


def started(make_driver: Any) -> Any:
    driver = make_driver(CRASH, nodes_min=1, nodes_max=1)
    driver.join("a")
    driver.up(step=None)
    return driver


def test_a_checkpoint_further_than_ever_is_progress_and_the_end_of_the_incident(make_driver: Any) -> None:
    driver = started(make_driver)
    driver.now += 100
    saves(driver, 20)
    driver.crash("a", 1)
    assert driver.job.budget.used == 1
    driver.up(step=None)
    moved_at = driver.now
    saves(driver, 20)
    assert driver.job.budget.used == 1, "written before, or no further"
    saves(driver, 30, complete=False)
    assert driver.job.budget.used == 1
    saves(driver, 30)
    assert driver.job.budget.used == 0
    (case,) = driver.job.casebook.cases
    assert case.closed_why == "attempt 2 saved a checkpoint of step 30"
    assert case.lost_s(driver.now) == moved_at - case.failed_at, "training went on long before it saved"


def test_time_before_the_first_sign_of_life_alone_is_startup(make_driver: Any) -> None:
    driver = started(make_driver)
    saves(driver, 20)
    driver.now += 990
    saves(driver, 30)
    ratio = ettr(driver.job)
    assert ratio is not None
    assert ratio > 0.99
    assert driver.replayed().trains_since == driver.job.trains_since


def test_a_run_that_ends_well_has_lost_what_passed_before_it_went_on(make_driver: Any) -> None:
    driver = started(make_driver)
    driver.crash("a", 1)
    driver.up(step=None)
    (case,) = driver.job.casebook.cases
    moved_at = driver.now
    driver.now += 500
    for rank in (0, 1):
        record = ExitRecord(rank=rank, local_rank=rank, pid=1, code=0, signal=None, ended_at=driver.now)
        driver.tell(m.RankEnded, node="a", attempt=2, exit=record)
    assert case.closed_why == "every rank ended well"
    assert case.lost_s(driver.now) == moved_at - case.failed_at


def test_the_time_that_two_incidents_lasted_at_once_counts_once(make_driver: Any) -> None:
    driver = make_driver(CRASH, nodes_min=2, nodes_max=2)
    driver.join("a", "b")
    driver.up(step=1)
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
    cases = driver.job.casebook.cases
    assert len(cases) > 1
    assert all(case.closed_at is not None for case in cases)
    redo_s = sum(case.redo_s for case in cases)
    assert driver.job.casebook.lost_s(driver.now) == back_at - failed_at + redo_s
    assert sum(case.lost_s(driver.now) for case in cases) > back_at - failed_at + redo_s
    assert sum(driver.job.casebook.sums().badput_s.values()) == pytest.approx(back_at - failed_at + redo_s)


def test_a_failure_before_the_first_step_counts_once(make_driver: Any) -> None:
    driver = make_driver(CRASH, nodes_min=1, nodes_max=1)
    driver.join("a")
    started_at = driver.now
    driver.tell(m.LauncherEnded, after=50, node="a", attempt=1, how="code 1")
    for _ in range(3):
        for timer in ("evidence", "again"):
            if timer in driver.job.timers:
                driver.fire(timer)
    driver.up(step=1)
    (case,) = driver.job.casebook.cases
    assert startup_s(driver.job, driver.now) == case.failed_at - started_at
    assert startup_s(driver.job, driver.now) + driver.job.casebook.lost_s(driver.now) == driver.now - started_at
