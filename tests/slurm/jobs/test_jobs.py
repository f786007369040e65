"""Jobs of deploy/slurm on a real cluster: whatever happens to them, they end with an undisturbed run's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e]

Submit = Callable[..., Any]


def test_a_job_runs_to_its_end_and_survives_a_killed_rank(submit: Submit) -> None:
    job = submit(nodes=2)
    job.wait_step(12)
    assert job.places() == {0: "node1", 1: "node2"}
    job.kill(1)
    job.wait_shown(r"resumed step-\d+\.pt")
    job.succeeds()
    (incident,) = job.incidents()
    assert [(c["node"], c["rank"]) for c in incident["verdict"]["culprits"]] == [("node2", 1)]
