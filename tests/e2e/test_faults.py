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


def test_a_deadlock(supervise: Supervise) -> None:
    job = supervise("silent", rig="relock@50:1", pace=0.12)
    job.succeeds()
    assert the_incident(job) == ("silent_hang", [1])
    assert job.incidents()[0]["seconds"]["detect"] < 20, "4 s on a machine that is not busy"


@pytest.mark.slow
def test_a_silent_script_that_hangs_in_its_first_seconds(supervise: Supervise) -> None:
    job = supervise("silent", rig="pool@2:0", pace=0.12)
    job.succeeds()
    assert the_incident(job) == ("silent_hang", [0])
    assert job.incidents()[0]["seconds"]["detect"] < 20


@pytest.mark.slow
@pytest.mark.lasts(75)
@pytest.mark.timeout(300)
def test_proven_hangs_one_after_the_other(supervise: Supervise) -> None:
    faults = {"relock@12:1": "silent_hang", "crossed@35:0": "silent_hang", "joined@58:1": "silent_hang"}
    faults |= {"pool@81:0": "silent_hang", "gone@104:1": "worker_crash", "left@127:0": "silent_hang"}
    job = supervise("plain", rig=",".join(faults), steps=150)
    job.succeeds(250)
    incidents = job.incidents()
    told = [class_and_ranks(one) for one in incidents]
    assert told == [(kind, [int(fault[-1])]) for fault, kind in faults.items()]
    assert all(one["seconds"]["detect"] < 20 for one in incidents), "4 to 6 s on a machine that is not busy"
    assert all(one["verdict"]["confidence"] > 0.7 for one in incidents)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.lasts(90)
@pytest.mark.parametrize("fault", ["gil@20:0", "deaf@20:1"])
def test_a_hang_that_nothing_proves(supervise: Supervise, fault: str) -> None:
    """From outside it might be an honest wait: it is given the patience that was set, and said to be unproven."""
    job = supervise("silent", rig=fault, pace=0.12, options=("--patience", "60"))
    job.succeeds(250)
    assert the_incident(job) == ("silent_hang", [int(fault[-1])])
    (incident,) = job.incidents()
    assert incident["seconds"]["detect"] > 55
    assert incident["verdict"]["confidence"] < 0.5


def test_different_collectives(supervise: Supervise) -> None:
    job = supervise("plain", rig="other@14:1")
    job.succeeds()
    assert the_incident(job)[0] == "collective_mismatch"


@pytest.mark.slow
@pytest.mark.lasts(45)
def test_ranks_that_end_one_after_the_other(supervise: Supervise) -> None:
    unnamed = {"worker_crash", "script_error", "unknown"}
    faults = {"segfault@14:1": {"worker_crash", "framework_bug"}, "exit3@24:0": unnamed, "relock@34:0": {"silent_hang"}}
    faults |= {"exit0@44:1": {*unnamed, "silent_hang"}, "leave@54:1": {*unnamed, "silent_hang"}}
    job = supervise("ddp", rig=",".join(faults))
    job.succeeds(200)
    told = [class_and_ranks(one) for one in job.incidents()]
    assert [ranks for _, ranks in told] == [[int(fault[-1])] for fault in faults]
    assert all(kind in classes for (kind, _), classes in zip(told, faults.values(), strict=True)), told


@pytest.mark.slow
def test_a_skipped_collective(supervise: Supervise) -> None:
    """Either it is survived, or the run stops and says that the ranks disagreed: never a wrong result, never a wait."""
    job = supervise("silent", rig="skip@14:1")
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
def test_a_rank_killed_while_it_starts(supervise: Supervise) -> None:
    job = supervise("plain")
    job.wait_ranks(2)
    job.kill(0)
    job.succeeds()
    assert the_incident(job)[1] == [0]


def test_an_end_that_hangs_is_a_success(supervise: Supervise) -> None:
    """The work is complete, the last step is done, one rank does not get out of its end."""
    job = supervise("ddp", rig="teardown@-1:1")
    job.wait_shown("training complete")
    job.succeeds()
    assert the_incident(job) == ("exit_hang", [1])
