"""From the first sign of a failure to what is done about it."""

from __future__ import annotations

from typing import Any

from diagnosis.incident import Incident, Verdict
from diagnosis.signals import Evidence, Finding
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m


def test_a_node_that_was_only_silent_needs_no_restart(running: Any) -> None:
    driver = running("a", "b", "c")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.tell(m.NodeLost, node="c", silent_s=5.0)
    driver.tell(m.NodeJoined, node="b", host="", address="")
    assert driver.state == "DIAGNOSING"
    driver.tell(m.NodeJoined, node="c", host="", address="")
    assert (driver.state, driver.seen, driver.number) == ("RUNNING", [], 1)


def test_a_node_that_came_back_with_a_dead_rank_is_diagnosed(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.rank_ends(node="a", rank=1)
    driver.tell(m.NodeJoined, node="b", host="", address="")
    assert driver.state == "DIAGNOSING"
    driver.fire("evidence")
    assert driver.number == 2


def test_a_diagnosis_that_fails_does_not_stop_the_run(make_driver: Any) -> None:
    def broken(_: Incident) -> Verdict:
        raise KeyError("a defect")

    driver = make_driver()
    driver.conclude = broken
    driver.join("a")
    driver.up()
    driver.rank_ends()
    assert driver.state == "STARTING"
    verdict = driver.job.view().incidents[0].verdict
    assert verdict is not None
    assert verdict.failure_class is FailureClass.UNKNOWN


def test_a_choice_of_checkpoint_that_fails_does_not_stop_the_run(running: Any) -> None:
    def broken(_: Any) -> Any:
        raise OSError("a defect")

    driver = running("a")
    driver.choose = broken
    driver.rank_ends()
    assert driver.state == "STARTING"


def test_findings_are_acknowledged_and_reach_the_diagnosis_once(running: Any) -> None:
    driver = running("a")
    finding = Finding(
        rule="xid",
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        confidence=0.9,
        scope="gpu",
        severity="fatal",
        evidence=Evidence(text="Xid 79"),
        at=driver.now,
    )
    for number in (0, 0, 1):
        driver.tell(m.FindingArrived, node="a", finding=finding, number=number)
    assert driver.told["a"].findings_seen == 2
    driver.rank_ends(ended_at=driver.now)
    assert len(driver.seen[0].findings) == 2
