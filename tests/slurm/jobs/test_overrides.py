"""An operator at work on a job of Slurm, found by its id, while a GPU falls off the bus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.slow]

XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_nothing_reaches_slurm_while_paused(cluster: Any, submit: Callable[..., Any], tmp_path: Path) -> None:
    job = submit(nodes=3, spares=1, pace=0.2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def order(*arguments: str) -> dict[str, Any]:
        """From a folder that knows nothing of the job: Slurm says where it works."""
        said = cluster.run("ctl", "unbroken", *arguments, "--job", job.id, "--json", cwd=elsewhere)
        return dict(json.loads(said))

    job.wait_step(12)
    order("pause", "--reason", "I look first")
    cluster.kernel_says("node2", XID_79)
    job.kill(1)
    cluster.until(lambda: "resume" in order("status")["waiting"], 60, "the plan to wait")
    assert cluster.reason("node2") == ""
    would = order("resume", "--dry-run")
    assert (would["leave"], would["join"]) == (["node2"], ["node3"])
    assert [one["node"] for one in would["scheduler"]] == ["node2"]
    assert cluster.reason("node2") == ""
    order("resume")
    job.wait_places({0: "node1", 1: "node3"})
    job.succeeds()
    assert f"incident={job.id}/i-1" in cluster.reason("node2")
    assert "pause (I look first)" in job.ask("timeline")
