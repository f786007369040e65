"""Our own processes and torchrun die, at the worst moments: who may die when is in docs/architecture.md."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def kill(job: Any, role: str) -> int:
    process = job.process(role)
    pid: int = process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_torchrun_is_killed(supervise: Supervise) -> None:
    """No orphan trains on beside the new workers, and the run goes on from its checkpoint."""
    job = supervise("plain")
    job.wait_step(12)
    before = job.ranks()
    kill(job, "launcher")
    assert set(job.wait_ranks(2, not_in=list(before.values()))) == {0, 1}
    assert not set(job.ranks().values()) & set(before.values())
    job.succeeds()
    assert len(job.incidents()) == 1


def test_agent_and_controller_are_killed(supervise: Supervise) -> None:
    """Training does not notice; a fault afterwards is handled as ever."""
    roles = ("agent", "controller")
    job = supervise("plain", pace=0.15)
    job.wait_step(12)
    before = job.ranks()
    dead = {kill(job, role) for role in roles}
    job.wait_step(job.step() + 12)
    assert job.ranks() == before
    for role in roles:
        assert job.process(role).pid not in dead
    job.kill(1)
    job.succeeds()
    assert [i["verdict"]["culprits"][0]["rank"] for i in job.incidents()] == [1]


def test_the_front_is_killed(supervise: Supervise) -> None:
    """The user's process is gone: nothing of the job may live on."""
    job = supervise("plain", steps=1000)
    job.wait_step(12)
    job.front.kill()
    job.until(lambda: not job.ranks(), 2, "the ranks' end")
    job.until(lambda: not job.kin(), 15, "the end of all processes")


def test_the_users_signals(supervise: Supervise) -> None:
    """Two are the ranks', and a third one stops the run."""
    job = supervise("plain", steps=1000, env={"RIG_SIGNALS": "1"})
    job.wait_step(12)
    before = job.ranks()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        job.front.send_signal(number)
        seen = f"signal-{int(number)}-*"
        job.until(lambda seen=seen: len(list(job.rig.glob(seen))) == 2, 10, f"{seen} of both ranks")
    job.wait_step(job.step() + 5)
    assert job.ranks() == before
    job.front.send_signal(signal.SIGINT)
    assert job.code(20) == 130
    job.until(lambda: not job.kin(), 5, "the end of all processes")
    assert job.incidents() == []


@pytest.mark.slow
def test_the_second_interrupt_kills(supervise: Supervise, after: Callable[[float], None]) -> None:
    job = supervise("plain", steps=1000, rig="deaf@12:1")
    job.wait_step(11)
    job.front.send_signal(signal.SIGINT)
    job.wait_shown("press Ctrl-C again")
    after(0.3)  # nearer together they are one: Slurm sends the first twice
    job.front.send_signal(signal.SIGINT)
    assert job.code(10) == 130
    job.until(lambda: not job.kin(), 5, "the end of all processes")


@pytest.mark.slow
def test_a_stop_before_the_first_step(supervise: Supervise) -> None:
    job = supervise("plain", steps=1000)
    job.process("agent")
    job.front.send_signal(signal.SIGINT)
    assert job.code(40) == 130
    job.until(lambda: not job.kin(), 5, "the end of all processes")
