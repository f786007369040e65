"""A full disk, or a quota used up: the job waits for room, and goes on by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.incident import Verdict
from diagnosis.signals import Evidence
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.controller.metrics import job_samples

FULL = Verdict(
    failure_class=FailureClass.DISK_FULL,
    culprits=(),
    confidence=0.93,
    why="no space",
    action="hold",
    evidence=(Evidence(text="OSError: [Errno 28] No space left on device: '/ckpt/step-10.pt'"),),
)
QUOTA = msgspec.structs.replace(
    FULL,
    failure_class=FailureClass.STORAGE_ERROR,
    action="wait_and_retry",
    evidence=(Evidence(text="OSError: [Errno 122] Disk quota exceeded: '/ckpt/step-10.pt'"),),
)


def waiting(running: Any, *names: str, verdict: Verdict = FULL) -> Any:
    """A job that waits for room, its back-off over."""
    driver = running(*(names or ("a",)))
    saved = Checkpoint(path="/ckpt/step-5.pt", step=5, format="torch", complete=True, size_bytes=1_000_000)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved,), folders=("/ckpt",))
    driver.verdict = verdict
    driver.crash("a", 1)
    assert driver.state == "RECOVERING"
    driver.fire("backoff")
    assert driver.state == "RECOVERING"
    return driver


def tell(driver: Any, node: str = "a", *full: str, after: float = 1.0) -> None:
    number = driver.told[node].space.number
    driver.tell(m.SpaceSeen, after=after, node=node, number=number, full=full)


@pytest.mark.parametrize("verdict", [FULL, QUOTA])
def test_the_job_holds_until_there_is_room_and_goes_on_by_itself(running: Any, verdict: Verdict) -> None:
    driver = waiting(running, verdict=verdict)
    told = driver.told["a"]
    assert told.stage == "form"
    assert told.paused, "old workers end; nothing is prepared, moved or started"
    assert told.space.folders == ("/ckpt",)
    assert told.space.need_bytes > 1_000_000
    tell(driver, "a", "/ckpt: no space left")
    assert driver.state == "RECOVERING"
    assert "/ckpt" in driver.job.view().waiting
    waits = {s.labels: s.value for s in job_samples(driver.job, driver.now) if s.name == "unbroken_job_waiting"}
    assert [labels for labels, value in waits.items() if value] == [("space",)]
    tell(driver, after=3000.0)
    assert driver.state == "STARTING"
    assert driver.told["a"].space is None
    assert not driver.told["a"].paused
    assert driver.job.incidents.budget.used == 0
    driver.up(step=11)
    assert driver.job.incidents.log.records[-1].closed_at is not None
    assert driver.job.view().waiting == ""


def test_a_disk_that_is_full_again_each_time_is_tried_more_and_more_seldom(running: Any) -> None:
    driver = running("a")
    driver.verdict = FULL
    waits = []
    for _ in range(8):
        driver.crash("a", 1)
        began = driver.now
        tell(driver)
        driver.fire("backoff")
        waits.append(round(driver.now - began))
        driver.up(step=None)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    assert driver.job.incidents.budget.used == 0


def test_an_operator_may_go_on_without_room_and_a_pause_holds(running: Any) -> None:
    driver = waiting(running)
    driver.order("pause")
    tell(driver)
    assert driver.state == "RECOVERING"
    driver.order("resume")
    assert driver.state == "STARTING"
    again = waiting(running)
    again.order("resume")
    assert again.state == "STARTING"
    third = waiting(running)
    third.order("restart")
    assert third.state == "STARTING"


def test_it_ends_when_nobody_makes_room_for_as_long_as_a_job_may_be_held(running: Any) -> None:
    driver = waiting(running)
    tell(driver, "a", "/ckpt: no space left")
    driver.fire("hold")
    assert driver.state == "FAILED"
    assert "/ckpt" in driver.job.outcome.line
