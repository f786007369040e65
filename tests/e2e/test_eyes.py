"""What probes see, in a supervised run: a flaw becomes a finding, and the finding the cause of a crash."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def health(job: Any) -> dict[str, Any]:
    """`health.json` of the only node; empty while there is none."""
    found = list(job.local.glob("*/*/health.json"))
    answer: dict[str, Any] = json.loads(found[0].read_bytes()) if found else {}
    return answer


def status(job: Any, check: str) -> str:
    check_states = health(job).get("standings", [])
    return next((one["status"] for one in check_states if one["reading"]["check"] == check), "")


def test_a_flaw_of_a_gpu_explains_a_crash(flaw: dict[str, str], supervise: Supervise) -> None:
    job = supervise("plain", env=flaw, steps=2000)
    job.until(lambda: status(job, "flaw") == "healthy", 60, "the plug-in's first look")
    Path(flaw["FLAW"]).touch()
    job.until(lambda: status(job, "flaw") == "unhealthy", 60, "the flaw in health.json")
    job.kill(1)
    job.wait_shown("gpu_ecc_uncorrectable")
    # The flaw may be one before, of a living rank.
    *_, incident = sorted(job.incidents(), key=lambda one: one["opened_at"])
    (culprit,) = incident["verdict"]["culprits"]
    assert (incident["verdict"]["failure_class"], culprit["gpu"]) == ("gpu_ecc_uncorrectable", "0000:c1:00")
    assert culprit["rank"] == 1
    assert any("two uncorrected errors" in one["text"] for one in incident["verdict"]["evidence"])


def test_probe_workers_end_with_their_agent_and_come_back_with_the_next(supervise: Supervise) -> None:
    job = supervise("plain", steps=2000)

    def workers(agent: psutil.Process) -> list[psutil.Process]:
        try:
            return [child for child in agent.children() if "supervisor.node_health.worker" in child.cmdline()]
        except psutil.NoSuchProcess:  # one of them has just ended
            return []

    agent = job.process("agent")
    job.until(lambda: len(workers(agent)) == 2, 60, "both probe workers")
    before = workers(agent)
    agent.send_signal(signal.SIGKILL)
    job.until(lambda: not any(one.is_running() for one in before), 60, "the end of the probe workers")
    job.until(lambda: job.process("agent").pid != agent.pid, 60, "another agent")
    job.until(lambda: len(workers(job.process("agent"))) == 2, 60, "its probe workers")
    job.expect_alive()
