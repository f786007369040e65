"""An attempt that is prepared, formed and finished by launchers."""

from __future__ import annotations

from typing import Any

from diagnosis.incident import HangReport
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


def test_a_preparation_that_succeeds_in_the_end_is_forgiven(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.up(1)
    driver.rank_ends()
    driver.tell(m.PreparationFailed, node="a", attempt=driver.number, error="no space left")
    offer = m.StoreOffer(host="a", port=1, local_world_size=2)
    driver.tell(m.LauncherReady, node="a", attempt=driver.number, offer=offer)
    driver.fire("backoff")
    assert (driver.state, len(driver.seen)) == ("STARTING", 2)


def test_launchers_that_do_not_come_are_an_incident(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    driver.fire("form")
    assert driver.seen[0].trigger == "setup"
    assert driver.number == 2


def test_a_launcher_that_cannot_start_is_an_incident_at_once(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    driver.tell(m.LauncherEnded, node="a", attempt=0, how="exit code 2")
    assert driver.seen[0].launcher_exits == {"a": "exit code 2"}


def test_torchruns_own_error_at_the_start_ends_the_run_with_its_code(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    driver.tell(m.LauncherEnded, node="a", attempt=0, how="torchrun ended with code 2", code=2)
    assert (driver.state, driver.number) == ("FAILED", 1)
    assert driver.job.outcome.exit_code == 2
    assert driver.loud == [], "torchrun has said on the terminal what is wrong"
    assert not driver.seen[0].ranks_started


def test_torchruns_own_error_after_the_round_was_formed_ends_the_run_too(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    offer = m.StoreOffer(host="a", port=1, local_world_size=2)
    driver.tell(m.LauncherReady, node="a", attempt=1, offer=offer)
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="torchrun ended with code 1", code=1)
    if driver.state == "DIAGNOSING":
        driver.fire("evidence")
    assert (driver.state, driver.job.outcome.exit_code) == ("FAILED", 1)


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


def test_mode_observe_ends_with_torchruns_own_code(make_driver: Any) -> None:
    driver = make_driver(mode="observe")
    driver.join("a")
    driver.tell(m.LauncherEnded, node="a", attempt=0, how="torchrun ended with code 2", code=2)
    assert (driver.state, driver.job.outcome.exit_code) == ("FAILED", 2)


def test_the_end_of_the_old_launcher_is_none_of_the_new_attempt(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert (driver.state, len(driver.seen)) == ("STARTING", 1)
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert len(driver.seen) == 2, "the second one was started for this attempt"


def test_launchers_that_do_not_end_after_a_success_are_not_waited_for(running: Any) -> None:
    driver = running("a")
    driver.finish()
    assert driver.told["a"].stage == "finish"
    driver.fire("finish")
    assert driver.state == "SUCCEEDED"


def test_a_node_that_is_lost_after_every_rank_ended_well_changes_nothing(running: Any) -> None:
    driver = running("a", "b")
    driver.finish()
    driver.tell(m.NodeLost, after=15.0, node="b", silent_s=15.0)
    assert driver.state == "RUNNING", "the launcher on a has not ended"
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 0")
    assert (driver.state, driver.seen) == ("SUCCEEDED", [])


def test_a_hang_that_is_told_after_every_rank_ended_well_changes_nothing(running: Any) -> None:
    driver = running("a")
    driver.finish()
    report = HangReport(kind="silent", ranks=(), quiet_s=60.0, limit_s=60.0, phase="end", why="quiet")
    driver.tell(m.HangConfirmed, attempt=1, report=report)
    driver.fire("finish")
    assert (driver.state, driver.seen) == ("SUCCEEDED", [])
