"""What probes see, in a supervised run: a flaw becomes a finding, and the finding the cause of a crash."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]

PROBE = """
import os
from diagnosis.health import Check, healthy, unhealthy

class FlawProbe:
    name, every_s, deadline_s = "flaw", 0.2, 5.0
    checks = (
        Check(id="flaw", what="w", source="s", threshold="t", failure_class="gpu_ecc_uncorrectable", scope="gpu"),
    )
    def look(self, place, now):
        if not os.path.exists(os.environ["FLAW"]):
            return [healthy("flaw", "0000:c1:00")]
        pids = [pid for pid, rank in place.job.ranks.items() if rank == 1]
        return [unhealthy("flaw", "two uncorrected errors", "0000:c1:00", gpu="0000:c1:00", pids=pids)]
"""


def plug_in(folder: Path) -> dict[str, str]:
    """The probe as an installed plug-in; the environment in which it is found."""
    info = folder / "flaw-0.dist-info"
    info.mkdir(parents=True)
    (folder / "flaw_probe.py").write_text(PROBE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flaw\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[unbroken.probes]\nflaw = flaw_probe:FlawProbe\n")
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])]), "FLAW": str(folder / "flaw")}


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def health(job: Any) -> dict[str, Any]:
    """`health.json` of the only node; empty while there is none."""
    found = list(job.local.glob("*/*/health.json"))
    answer: dict[str, Any] = json.loads(found[0].read_bytes()) if found else {}
    return answer


def status(job: Any, check: str) -> str:
    check_states = health(job).get("standings", [])
    return next((one["status"] for one in check_states if one["reading"]["check"] == check), "")


def test_a_flaw_of_a_gpu_explains_a_crash(tmp_path: Path, supervise: Supervise) -> None:
    env = plug_in(tmp_path / "plug-in")
    job = supervise("plain", env=env, steps=2000)
    until(lambda: status(job, "flaw") == "healthy", "the plug-in's first look")
    Path(env["FLAW"]).touch()
    until(lambda: status(job, "flaw") == "unhealthy", "the flaw in health.json")
    job.kill(1)
    job.wait_shown("gpu_ecc_uncorrectable")
    *_, incident = sorted(
        job.incidents(), key=lambda one: one["opened_at"]
    )  # the flaw may be one before, of a living rank
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
    until(lambda: len(workers(agent)) == 2, "both stations")
    before = workers(agent)
    agent.send_signal(signal.SIGKILL)
    until(lambda: not any(one.is_running() for one in before), "the end of the stations")
    until(lambda: job.process("agent").pid != agent.pid, "another agent")
    until(lambda: len(workers(job.process("agent"))) == 2, "its stations")
    job.expect_alive()
