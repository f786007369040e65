"""Operators at work on a live job while faults arrive: what they say holds, and is on record with who and why."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]
# A command takes a third of a second, and several on a loaded machine: paces leave time for those of a test.


def waits_for(job: Any) -> str:
    return str(job.told("status")["waiting"])


@pytest.mark.slow
def test_a_rank_that_dies_during_a_pause_is_only_recorded_until_resume(supervise: Supervise) -> None:
    job = supervise(pace=0.15)
    job.wait_step(12)
    job.ask("pause", "--reason", "I want to look at it")
    job.kill(1)
    job.until(lambda: "resume" in waits_for(job), 30, "the plan to wait")
    status = job.told("status")
    assert (status["attempt"], status["paused"]) == (1, True)
    assert job.incidents()[0]["verdict"] is not None, "it is watched and judged all the same"
    would = job.told("resume", "--dry-run")
    assert would["attempt"] == 2
    assert "attempt 2 would start" in would["would"]
    assert job.told("status")["attempt"] == 1, "a dry run changes nothing"
    job.ask("resume", "--reason", "seen enough")
    job.succeeds()
    told = job.ask("timeline")
    assert "pause (I want to look at it)" in told
    assert "resume (seen enough)" in told
    assert f"(uid {os.getuid()})" in told, "who did it"


@pytest.mark.slow
def test_a_stopped_rank_is_not_woken_while_paused(supervise: Supervise, after: Callable[[float], None]) -> None:
    job = supervise(pace=0.15)
    job.wait_step(12)
    job.ask("pause")
    pid = job.kill(1, signal.SIGSTOP)
    job.until(lambda: "nothing is done about it (paused)" in job.ask("timeline"), 40, "the stopped rank to be told of")
    after(1)
    assert job.ranks()[1] == pid
    job.ask("resume")  # now it is: that is all that it needs
    job.succeeds()
    assert job.told("status")["restarts"] == 0


@pytest.mark.slow
def test_approvals_are_about_the_incident_that_they_name(supervise: Supervise) -> None:
    job = supervise(pace=0.2, options=("--mode", "recommend"))
    job.wait_step(12)
    job.kill(0)
    job.until(lambda: "approve" in waits_for(job), 30, "the plan to wait")
    refusal = job.ask("approve", "i-9", check=False)
    assert "i-9 does not wait for approval; i-1 does" in refusal
    assert "Nothing was done" in refusal
    assert job.told("status")["attempt"] == 1
    job.ask("approve", "i-1", "-m", "go on")
    job.wait_ranks(2)
    job.ask("mode", "enforce")
    job.wait_step(job.step() + 3)
    job.kill(1)
    job.succeeds()
    assert len(job.incidents()) == 2


@pytest.mark.slow
def test_observe_that_comes_during_a_recovery_is_the_last_restart(supervise: Supervise) -> None:
    job = supervise(pace=0.2)
    job.wait_step(12)
    before = job.ranks()
    job.kill(1)
    job.ask("mode", "observe")
    job.wait_ranks(2, not_in=list(before.values()))
    job.kill(0)
    assert job.code() == 1, "as torchrun would have ended"
    assert "mode observe: would restart" in job.last_line()


def test_a_restart_says_first_what_it_would_stop(supervise: Supervise) -> None:
    job = supervise(pace=0.25)
    job.wait_step(12)
    assert "give --yes" in job.ask("restart", check=False)
    before = job.ranks()
    would = job.told("restart", "--dry-run")
    assert would["interrupts"]
    assert "attempt 1 would be stopped (2 ranks" in would["would"]
    assert job.ranks() == before
    job.ask("restart", "--yes", "-m", "new driver")
    job.wait_ranks(2, not_in=list(before.values()))
    job.succeeds()
