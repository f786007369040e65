"""What the hang watch tells the job."""

from __future__ import annotations

from typing import Any

from diagnosis.incident import HangReport, Verdict
from diagnosis.signals import NodeEvidence
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m


def test_a_hang_that_was_left_alone_and_lasts_is_acted_on(running: Any) -> None:
    driver = running("a")
    driver.verdict = Verdict(
        failure_class=FailureClass.NONE, culprits=(), confidence=0.9, why="all is well", action="none"
    )
    report = HangReport(kind="silent", ranks=(), quiet_s=600.0, limit_s=600.0, phase="steady", why="quiet")
    driver.tell(m.HangConfirmed, attempt=1, report=report)
    driver.tell(m.EvidenceArrived, evidence=NodeEvidence(node="a", attempt=1, request=1))
    assert driver.state == "RUNNING"
    driver.fire("again")
    driver.fire("evidence")
    assert (driver.state, driver.number) == ("STARTING", 2)


def test_a_new_controller_suspects_nothing_until_its_own_watch_does(running: Any) -> None:
    driver = running("a")
    report = HangReport(kind="silent", ranks=(), quiet_s=3.0, limit_s=2.0, phase="steady", why="quiet")
    driver.tell(m.HangSuspected, attempt=1, report=report)
    assert "stacks" in driver.job.timers
    driver.tell(m.ControllerStarted, epoch=2)
    assert "stacks" not in driver.job.timers
