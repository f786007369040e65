"""An attempt that is prepared, formed and finished by launchers."""

from __future__ import annotations

from typing import Any

from supervisor import messages as m


def test_a_preparation_that_fails_is_an_incident(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    driver.tell(m.PreparationFailed, node="a", attempt=1, error="no space left")
    assert driver.seen[0].trigger == "setup"
    assert driver.number == 2


def test_a_preparation_that_fails_during_the_back_off_is_not_forgotten(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.up(1)
    driver.rank_ends()
    assert "backoff" in driver.job.timers
    driver.tell(m.PreparationFailed, node="a", attempt=driver.number, error="no space left")
    assert len(driver.seen) == 2
    driver.fire("backoff")
    assert driver.seen[2].trigger == "setup"


def test_a_launcher_that_is_killed_before_it_starts_a_rank_is_tried_again_within_the_budget(make_driver: Any) -> None:
    driver = make_driver(max_restarts=3)
    driver.join("a")
    for _ in range(3):
        for _ in range(2):  # the first end may be that of the attempt before
            driver.tell(m.LauncherEnded, node="a", attempt=0, how="torchrun was killed by SIGKILL")
        if "backoff" in driver.job.timers:
            driver.fire("backoff")
    assert driver.state == "STARTING"
    for _ in range(2):
        driver.tell(m.LauncherEnded, node="a", attempt=0, how="torchrun was killed by SIGKILL")
    assert (driver.state, driver.job.outcome.exit_code) == ("FAILED", 91)


def test_a_run_that_has_trained_gets_a_second_try_when_torchrun_fails(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    for number in (1, 1):
        driver.tell(m.LauncherEnded, node="a", attempt=number, how="torchrun ended with code 1", code=1)
    assert (driver.state, driver.number) == ("RECOVERING", 3)
    driver.fire("backoff")
    for number in (1, 1):
        driver.tell(m.LauncherEnded, node="a", attempt=number, how="torchrun ended with code 1", code=1)
    assert (driver.state, driver.job.outcome.exit_code) == ("FAILED", 1)


def test_the_end_of_the_old_launcher_is_none_of_the_new_attempt(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert (driver.state, len(driver.seen)) == ("STARTING", 1)
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert len(driver.seen) == 2, "the second one was started for this attempt"
