"""Alerts from outside: they stand beside incidents, at most a node is tested for one, and nothing else changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.job import alerts

UNKNOWN = Verdict(failure_class=FailureClass.UNKNOWN, culprits=(), confidence=0.3, why="nobody knows", action="restart")
OWN_FAULT = Verdict(
    failure_class=FailureClass.SCRIPT_ERROR, culprits=(Culprit(rank=1),), confidence=0.9, why="a bug", action="restart"
)
NETWORK = Verdict(
    failure_class=FailureClass.NCCL_NETWORK,
    culprits=(Culprit(node="n1"),),
    confidence=0.8,
    why="connections broke",
    action="wait_and_retry",
)


def alert(node: str, number: int = 0, at: float = 0.0, **more: Any) -> m.OutsideAlert:
    return m.OutsideAlert(key=f"{node}-{number}", node=node, name="Fabric", at=at, **more)


def tell(driver: Any, *firing: m.OutsideAlert, ended: tuple[str, ...] = ()) -> None:
    driver.tell(m.AlertsSeen, firing=firing, ended=ended)


def wanted(driver: Any) -> dict[str, m.Assignment]:
    """The nodes' desired states, without what is told there."""
    return {name: msgspec.structs.replace(one, notices=(), version=0) for name, one in driver.told.items()}


def shown(driver: Any) -> list[str]:
    found = driver.job.view().alerts
    return [] if not isinstance(found, tuple) else [one.key for one in found]


@pytest.mark.parametrize("suspect", [False, True])
def test_an_alert_decides_nothing(running: Any, suspect: bool) -> None:
    driver = running("a", "b")
    before = wanted(driver)
    tell(driver, alert("a", at=driver.now, suspect=suspect, failure_class=FailureClass.GPU_FALLEN_OFF_BUS))
    tell(driver, alert("b", at=driver.now, suspect=suspect, failure_class=FailureClass.GPU_FALLEN_OFF_BUS))
    assert wanted(driver) == before
    assert driver.state == "RUNNING"
    view = driver.job.view()
    assert (view.cordons, view.incidents, shown(driver)) == ((), (), ["a-0", "b-0"])
    assert driver.job.swaps.proposed == {}


def test_an_alert_ends_when_it_is_said_or_not_heard_of_any_more(running: Any) -> None:
    driver = running("a", "b")
    tell(driver, alert("a", at=driver.now), alert("b", at=driver.now))
    tell(driver, ended=("a-0", "c-0"))
    assert shown(driver) == ["b-0"]
    driver.now += alerts.EXPIRES_S + 1
    tell(driver, alert("a", 7, at=driver.now))
    assert shown(driver) == ["a-7"]


def test_what_is_kept_of_alerts_is_bounded(running: Any) -> None:
    driver = running("a", "b")
    tell(driver, *(alert("a", number, at=driver.now) for number in range(alerts.MOST + 50)))
    assert (len(shown(driver)), driver.job.alerts.left_out) == (alerts.MOST, 50)
    driver.crash("a", 1)
    assert len(driver.job.view().incidents[-1].alerts) == 16


def test_an_incident_has_what_fires_beside_it_also_what_comes_late(running: Any) -> None:
    driver = running("a", "b")
    tell(driver, alert("b", at=driver.now))
    driver.crash("a", 1)
    assert [one.key for one in driver.job.view().incidents[-1].alerts] == ["b-0"]
    tell(driver, alert("a", 1, at=driver.now))
    tell(driver, ended=("b-0",))
    assert [one.key for one in driver.job.view().incidents[-1].alerts] == ["b-0", "a-1"]


@pytest.mark.parametrize(
    ("verdict", "suspect", "tested"),
    [
        (UNKNOWN, True, {"n2"}),
        (UNKNOWN, False, set()),
        (NETWORK, True, {"n1", "n2"}),
        (NETWORK, False, {"n1"}),
        (OWN_FAULT, True, set()),
    ],
)
def test_a_suspect_is_tested_before_the_restart(
    make_driver: Any, verdict: Verdict, suspect: bool, tested: set[str]
) -> None:
    driver = make_driver(verdict, nodes_min=4, nodes_max=4, spares=4, test_suspects=True)
    driver.join(*(f"n{number}" for number in range(4)))
    driver.join(*(f"n{number}" for number in range(4, 8)), spare=True)
    driver.up()
    tell(driver, alert("n2", at=driver.now, suspect=suspect), alert("n9", at=driver.now, suspect=suspect))
    driver.crash("n0", rank=1, code=1, signal=None)
    if driver.state == "DIAGNOSING":
        driver.fire("evidence")
    assert set(driver.job.incidents.log.records[-1].suspects) == tested
    assert any(one.tests is not None for one in driver.told.values()) is bool(tested)
    assert driver.job.view().cordons == (), "a test may cordon it, an alert never"
