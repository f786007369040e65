"""A trace of a job that really runs: the unchanged Trainer of transformers, asked while it trains."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


@pytest.fixture
def _daemon_name() -> None:
    """There is one name for all programs of a network namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        try:
            one.bind(b"\0dynolog\0")
        except OSError:
            pytest.skip("another program has the name of the dynolog daemon")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_daemon_name")
def test_a_trainer_is_traced_while_it_trains(supervise: Supervise) -> None:
    job = supervise("hf", steps=3000, pace=0.05, options=["--traceable"])
    job.wait_step(3, within_s=120)
    answer = json.loads(job.ask("trace", "--json", "--steps", "4"))
    assert [one["rank"] for one in answer["ranks"]] == [0, 1]
    for one in answer["ranks"]:
        assert one["steps"] == 4
        assert one["parts"]["compute"] > 0
        assert sum(one["parts"].values()) == pytest.approx(one["step_s"])
        assert one["parts"]["optimizer"] > 0
    assert answer["problems"] == []
    for file in map(Path, answer["files"]):
        trace = json.loads(gzip.decompress(file.read_bytes()))  # as Perfetto opens it
        names = {one.get("name", "") for one in trace["traceEvents"]}
        assert {"Optimizer.step#AdamW.step"} <= names
        assert any(name.startswith("gloo:all_reduce") for name in names)
    step = job.step()
    job.wait_step(step + 5)  # it trains on
    assert job.told("status")["state"] == "RUNNING"
    assert "no rank 9" in job.ask("trace", "--ranks", "9", check=False)
    job.ask("stop", "--yes")
    assert job.code() == 143


@pytest.mark.slow
def test_a_job_that_is_not_traceable_says_so(supervise: Supervise) -> None:
    job = supervise("plain", steps=3000)
    job.wait_step(2)
    assert "--traceable" in job.ask("trace", check=False)
    job.ask("stop", "--yes")
    job.code()
