"""Faults of ranks: the run ends at its last step, its weights are an undisturbed run's, the right rank is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def the_incident(job: Any) -> tuple[str, list[int]]:
    """Class and culprit ranks of the only incident."""
    incidents = job.incidents()
    assert len(incidents) == 1, incidents
    return class_and_ranks(incidents[0])


def class_and_ranks(incident: dict[str, Any]) -> tuple[str, list[int]]:
    verdict = incident["verdict"]
    return verdict["failure_class"], sorted(c["rank"] for c in verdict["culprits"] if c.get("rank") is not None)


def test_a_killed_rank(supervise: Supervise) -> None:
    job = supervise("ddp")
    job.wait_step(12)
    before = job.ranks()
    job.kill(1)
    job.wait_ranks(2, not_in=list(before.values()))
    job.succeeds()
    assert the_incident(job) == ("worker_crash", [1])
    assert "resumed step-" in job.shown()


def test_an_exception_that_comes_back_stops_the_run(supervise: Supervise) -> None:
    job = supervise("plain", rig="exception!@12:1")
    assert job.code() == 90
    assert "KeyError" in job.last_line()
    classes = [class_and_ranks(incident) for incident in job.incidents()]
    assert classes == [("script_error", [1])] * 2
    assert not job.kin(), "nothing runs on"


@pytest.mark.parametrize(
    "fault",
    [
        "sleep@50:1",
        pytest.param("busy@50:1", marks=pytest.mark.slow),
        pytest.param("gil@50:0", marks=pytest.mark.slow),
        pytest.param("deaf@50:1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("trainer", ["silent", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_hang(supervise: Supervise, trainer: str, fault: str) -> None:
    # Stacks are compared once a pace is known: five signs of progress, one a second where nothing is printed.
    job = supervise(trainer, rig=fault, pace=0.12)
    job.succeeds()
    assert the_incident(job) == ("silent_hang", [int(fault[-1])])
    if not fault.startswith("busy"):  # honest work may stay in one line for a while as well
        assert job.incidents()[0]["seconds"]["detect"] < 12, "suspected within 3 s, confirmed within 3 s more"


@pytest.mark.parametrize(
    ("fault", "classes"),
    [
        ("segfault@14:1", {"worker_crash", "framework_bug"}),
        ("exit3@14:0", {"worker_crash", "script_error", "unknown"}),
        ("exit0@14:1", {"worker_crash", "script_error", "unknown", "silent_hang"}),
        ("leave@14:1", {"worker_crash", "script_error", "unknown", "silent_hang"}),
    ],
)
@pytest.mark.slow
def test_a_rank_that_ends_by_itself(supervise: Supervise, fault: str, classes: set[str]) -> None:
    job = supervise("plain", rig=fault)
    job.succeeds()
    failure_class, ranks = the_incident(job)
    assert failure_class in classes
    assert ranks == [int(fault[-1])]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", "silent"])
def test_a_skipped_collective(supervise: Supervise, trainer: str) -> None:
    """Either it is survived, or the run stops and says that the ranks disagreed: never a wrong result, never a wait."""
    job = supervise(trainer, rig="skip@14:1")
    code = job.code()
    if code == 0:
        job.succeeds()
    else:
        assert code == 90
        assert class_and_ranks(job.incidents()[-1])[0] == "collective_mismatch"


def test_a_rank_stopped_for_good(supervise: Supervise) -> None:
    """Stopped again whenever it is continued: SIGCONT does not help, a restart does."""
    job = supervise("plain")
    job.wait_step(12)
    before = job.ranks()
    victim = before[1]
    os.kill(victim, signal.SIGSTOP)

    def gone() -> bool:
        try:
            os.kill(victim, signal.SIGSTOP)
        except ProcessLookupError:
            return True
        return victim not in job.ranks().values()

    job.until(gone, 30, "the end of the stopped rank")
    job.succeeds()
    continued, restarted = job.incidents()
    assert class_and_ranks(continued) == class_and_ranks(restarted) == ("silent_hang", [1])


@pytest.mark.slow
def test_a_rank_stopped_once_is_continued(supervise: Supervise) -> None:
    """Nobody comes to continue it: SIGCONT is tried before anything else, and is enough."""
    job = supervise("plain")
    job.wait_step(12)
    before = job.ranks()
    os.kill(before[1], signal.SIGSTOP)
    job.wait_step(20)
    assert job.ranks() == before
    job.succeeds()
    assert the_incident(job) == ("silent_hang", [1])


def test_a_stop_of_five_seconds_is_no_fault(supervise: Supervise, after: Callable[[float], None]) -> None:
    job = supervise("plain")
    job.wait_step(12)
    before = job.ranks()
    os.kill(before[0], signal.SIGSTOP)
    after(5)
    os.kill(before[0], signal.SIGCONT)
    job.wait_step(20)
    assert job.ranks() == before
    job.succeeds()
    assert job.incidents() == []


@pytest.mark.slow
def test_two_faults_on_different_ranks(supervise: Supervise) -> None:
    job = supervise("ddp", rig="segfault@14:1,sleep@33:0")
    job.succeeds()
    assert [class_and_ranks(incident)[1] for incident in job.incidents()] == [[1], [0]]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_starts(supervise: Supervise, rank: int) -> None:
    job = supervise("plain")
    job.wait_ranks(2)
    job.kill(rank)
    job.succeeds()
    assert the_incident(job)[1] == [rank]


@pytest.mark.parametrize(
    "fault",
    [
        "teardown@-1:1",
        pytest.param("teardown@-1:0", marks=pytest.mark.slow),
        pytest.param("end_gil@-1:0", marks=pytest.mark.slow),
    ],
)
def test_an_end_that_hangs_is_a_success(supervise: Supervise, fault: str) -> None:
    """The work is complete, the last step is done, one rank does not get out of its end."""
    job = supervise("ddp", rig=fault)
    job.wait_shown("training complete")
    job.succeeds()
    assert the_incident(job) == ("exit_hang", [int(fault[-1])])


@pytest.mark.slow
def test_four_ranks(supervise: Supervise) -> None:
    job = supervise("plain", nproc=4)
    job.wait_step(12)
    job.kill(2)
    job.succeeds()
    assert the_incident(job) == ("worker_crash", [2])
