"""What is wrong while an attempt goes on: a loss that is no number, a device that fails under a living rank."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.incident import Verdict
from diagnosis.signals import Evidence, Finding
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.controller.metrics import job_samples
from supervisor.job.incidents import DEVICE_LASTS_S, NUMBERS_REPORTED

NAN = Verdict(
    failure_class=FailureClass.LOSS_SPIKE_OR_NAN, culprits=(), confidence=0.9, why="the loss is NaN", action="none"
)


def xid(node: str = "a", rank: int | None = 1, gpu: str = "0000:c1:00", **more: Any) -> Finding:
    usual: dict[str, Any] = {
        "rule": "xid",
        "failure_class": FailureClass.GPU_FALLEN_OFF_BUS,
        "confidence": 0.95,
        "scope": "gpu",
        "severity": "fatal",
        "evidence": Evidence(text=f"NVRM: Xid (PCI:{gpu}): 79, GPU has fallen off the bus.", source="kernel"),
        "node": node,
        "rank": rank,
        "gpu": gpu,
    }
    return Finding(**{**usual, **more})


def open_ones(driver: Any) -> list[str]:
    return [case.trigger for case in driver.job.incidents.log.open_degradations()]


def series(driver: Any, name: str) -> dict[tuple[str, ...], float]:
    return {one.labels: one.value for one in job_samples(driver.job, driver.now) if one.name == name}


# ----- numbers -----


def test_numbers_that_come_back_close_the_incident_and_what_is_saved_then_is_good(running: Any) -> None:
    driver = running("a")
    driver.verdict = NAN
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0,))
    assert open_ones(driver) == ["signal"]
    assert driver.state == "RUNNING"
    assert driver.job.checkpoints.suspect_open
    assert series(driver, "unbroken_job_open_incidents") == {("loss_spike_or_nan",): 1.0}
    driver.tell(m.NumbersSeen, after=20, attempt=1, bad=False, step=55)
    assert open_ones(driver) == []
    assert not driver.job.checkpoints.suspect_open
    assert driver.job.attempts.restarts == 0
    assert driver.job.incidents.log.lost_s(driver.now) == 0.0


def test_a_run_that_ends_with_every_loss_nan_says_so_though_it_exits_with_0(running: Any) -> None:
    driver = running("a")
    driver.verdict = NAN
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0, 1))
    driver.finish()
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="with code 0")
    outcome = driver.job.outcome
    assert outcome.state == "succeeded"
    assert outcome.exit_code == 0
    assert "from step 40 on" in outcome.line
    last = driver.job.view().incidents[-1]
    assert last.closed_at is not None
    assert "to the end" in last.closed_why


def test_a_warning_of_a_skipped_step_is_no_incident(running: Any) -> None:
    driver = running("a")
    skipped = xid(failure_class=FailureClass.LOSS_SPIKE_OR_NAN, scope="job", severity="warning", attempt=1)
    driver.tell(m.FindingArrived, node="a", finding=skipped, number=0)
    assert not driver.job.incidents.log.records


def test_a_loss_that_comes_and_goes_is_told_so_often_and_no_more(running: Any) -> None:
    driver = running("a")
    for _ in range(3 * NUMBERS_REPORTED):
        driver.tell(m.NumbersSeen, after=20, attempt=1, bad=True, step=40, ranks=(0,))
        driver.tell(m.NumbersSeen, after=20, attempt=1, bad=False, step=41)
    assert driver.job.incidents.log.total == NUMBERS_REPORTED


# ----- devices -----


def test_a_device_that_fails_under_a_living_rank_is_an_incident_and_restarts_nothing(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.FindingArrived, node="a", finding=xid(at=driver.now), number=0)
    assert not driver.job.incidents.log.records
    driver.fire("device")
    assert open_ones(driver) == ["device"]
    assert driver.state == "RUNNING"
    assert driver.number == 1
    case = driver.job.incidents.log.records[-1]
    assert case.plan.kind == "ignore"
    assert driver.loud
    assert not driver.job.nodes.cordons.all(driver.now)
    assert series(driver, "unbroken_job_open_incidents")
    assert [node.state for node in driver.job.view().nodes if node.node == "a"] == ["SUSPECT"]
    assert driver.job.incidents.log.lost_s(driver.now) == 0.0


def test_one_that_dies_of_it_later_closes_it(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.FindingArrived, node="a", finding=xid(at=driver.now), number=0)
    driver.fire("device")
    driver.now += 30
    driver.crash("a", 1)
    first, second = driver.job.incidents.log.records
    assert second.id in first.closed_why
    assert [one.rule for one in driver.seen[-1].findings] == ["xid"]


def test_a_storm_is_one_incident_and_cordons_nobody(running: Any) -> None:
    driver = running(*"abcdefgh")
    for number, node in enumerate("abcdefgh"):
        for gpu in range(4):
            finding = xid(node, 2 * number, f"0000:c{gpu}:00")
            driver.tell(m.FindingArrived, after=0.01, node=node, finding=finding, number=gpu)
    driver.fire("device")
    assert driver.job.incidents.log.total == 1
    assert driver.job.incidents.log.records[0].further_failures == 31
    assert not driver.job.nodes.cordons.all(driver.now)
    assert driver.state == "RUNNING"
    driver.tell(m.FindingArrived, after=5, node="a", finding=xid("a", 0, "0000:d9:00"), number=9)
    driver.fire("device")
    assert driver.job.incidents.log.total == 1
    assert driver.job.incidents.log.records[0].further_failures == 32


@pytest.mark.parametrize(
    "finding",
    [
        xid(rank=None),
        xid(severity="warning"),
        xid(failure_class=FailureClass.GPU_THERMAL_POWER),
        xid(node="elsewhere"),
        xid(evidence=Evidence(text="NVRM: Xid 79", source="output")),
    ],
)
def test_what_is_no_failed_device_of_a_rank_stays_a_line_of_the_timeline(running: Any, finding: Finding) -> None:
    driver = running("a")
    driver.tell(m.FindingArrived, node="a", finding=finding, number=0)
    assert "device" not in driver.job.timers


def test_an_attempt_that_trains_on_for_long_is_not_degraded_any_more(running: Any) -> None:
    driver = running("a")
    driver.tell(m.FindingArrived, node="a", finding=xid(at=driver.now), number=0)
    driver.fire("device")
    began = driver.now
    driver.fire("degraded")
    assert driver.now == began + DEVICE_LASTS_S
    assert open_ones(driver) == []
    assert driver.state == "RUNNING"
