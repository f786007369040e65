"""What readers are shown of a running job beyond what was decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from supervisor import messages as m
from supervisor.controller.heartbeats import Newest
from supervisor.controller.report import live_view


@pytest.fixture
def shown(make_driver: Any) -> Any:
    """The status of a job that runs and was told of step 9, as its controller answers."""
    driver = make_driver()
    driver.join("a")
    driver.up(step=8)
    driver.tell(m.Progressed, attempt=1, step=9)

    def status(newest: Newest, stall: str = "") -> Any:
        loop = SimpleNamespace(
            epoch=1,
            connections={},
            stall=stall,
            job=driver.job,
            watch=SimpleNamespace(newest=newest),
            clock=SimpleNamespace(now=lambda: driver.now),
        )
        return live_view("status", loop)()  # type: ignore[arg-type]

    return status


def test_the_step_is_that_of_the_newest_heartbeat(shown: Any) -> None:
    assert shown(Newest(1, 51, 0.0, 60))["step"] == 51
    assert shown(Newest(1, 51, 0.0, 60))["last_step"] == 60
    assert shown(Newest(1, None, 0.0, None))["step"] == 9
    assert shown(Newest(0, 51, 0.0, None))["step"] == 9


def test_a_job_whose_ranks_are_dead_is_not_running_while_its_journal_is_full(shown: Any) -> None:
    broken = Newest(1, 51, 0.0, None, broken=True)
    assert shown(broken)["state"] == "RUNNING", "decided in a moment"
    full = shown(broken, "No space left on device")
    assert full["state"] == "DIAGNOSING"
    assert "No space left" in full["waiting"]
    assert shown(Newest(1, 51, 0.0, None), "No space left on device")["state"] == "RUNNING"
