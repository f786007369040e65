"""A cordon drains the node, its end gives it back; an order is given until it is done with, and never while paused."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor import messages as m
from supervisor.notes import text_of


def test_a_cordon_drains_the_node_with_a_reason_that_tells_everything(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    assert (order.kind, order.node) == ("drain", "nodeb")
    assert order.reason.startswith("unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=4711/i-1 Xid 79")
    assert driver.job.attempt.members == ("a", "c")
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    assert driver.job.view().cordons[0].scheduler == "drained"
    assert driver.loud == []


def test_a_local_job_and_a_lost_node_order_nothing(slurm: Any, make_driver: Any) -> None:
    driver = slurm()
    local = make_driver(driver.verdict, nodes_min=2, nodes_max=2)
    local.join("a", "b", "c")
    local.up()
    local.crash("b", 2)
    assert local.orders == []
    assert local.job.nodes.cordons.of("b", local.now) is not None
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    assert driver.orders == []
    assert driver.job.attempt.members == ("a", "c")


@pytest.mark.parametrize("outcome", ["foreign", "denied", "failed", "unsupported"])
def test_a_refusal_is_told_once_and_the_cordon_stands(slurm: Any, outcome: str) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.tell(m.SchedulerAnswered, number=order.number, outcome=outcome, text="Invalid user id")
    [text] = driver.loud
    assert "nodeb" in text
    assert "Invalid user id" in text
    assert driver.job.nodes.cordons.of("b", driver.now) is not None
    assert driver.job.view().cordons[0].scheduler.startswith("not drained")
    driver.tell(m.SchedulerAnswered, number=order.number, outcome=outcome)
    assert driver.loud == []
    driver.order("uncordon", "b")
    assert driver.orders == [], "what was not drained is not given back"


def test_operators_drain_and_give_back(slurm: Any) -> None:
    driver = slurm()
    driver.tell(m.OperatorCommand, command="cordon", argument="c", reason="its fan\nis loud", by="ann@login")
    [order] = driver.orders
    assert order.reason == "unbroken: operator job=4711 by=ann@login its fan is loud"
    driver.tell(m.OperatorCommand, command="uncordon", argument="c", by="ann@login")
    assert driver.orders == [], "the drain is under way"
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    [back] = driver.orders
    assert (back.kind, back.node) == ("undrain", "nodec")


def test_a_drain_that_is_asked_for_twice_and_refused_once_is_still_taken_back(slurm: Any) -> None:
    driver = slurm()
    driver.order("cordon", "c")
    [first] = driver.orders
    driver.order("cordon", "c")
    assert driver.orders == []
    driver.tell(m.SchedulerAnswered, number=first.number, outcome="failed")
    [second] = driver.orders
    driver.tell(m.SchedulerAnswered, number=second.number, outcome="unavailable")
    driver.order("uncordon", "c")
    [back] = driver.orders
    assert back.kind == "undrain"


def test_nothing_goes_out_while_paused(slurm: Any) -> None:
    driver = slurm(spares=("c", "d"))
    driver.order("pause")
    driver.crash("b", 2)
    driver.order("cordon", "c")
    assert driver.orders == []
    driver.order("resume")
    assert {(order.kind, order.node) for order in driver.orders} == {("drain", "nodeb"), ("drain", "nodec")}


def test_a_drain_that_found_no_scheduler_is_tried_until_the_end_and_then_told_of(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="unavailable", text="slurmctld is down")
    driver.order("stop")
    assert driver.orders == [order], "at once, whenever it was due"
    assert driver.job.outcome.line == "stopped by an operator (so far slurm has not drained nodeb)"
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="unavailable")
    for name in "abc":
        driver.tell(m.NodeDone, node=name)
    assert not driver.ended
    assert driver.job.timers["orders"] - driver.now <= 5.0
    driver.fire("orders")
    assert driver.orders == [order]
    late = driver.replayed()
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    assert driver.ended
    assert driver.job.view().cordons[0].scheduler == "drained"
    actions = late.handle(m.TimerFired(at=late.timers["last_orders"], timer="last_orders"))
    assert [text_of(action) for action in actions if isinstance(action, m.Note)] == [
        f"slurm has not drained nodeb, and the job has ended: a person has to do that now ({order.reason})"
    ]
    assert any(isinstance(action, m.End) for action in actions)
    assert late.view().cordons[0].scheduler == "not drained: the job ended before slurm did it"


def requests(driver: Any) -> dict[str, str]:
    """Node -> what its newest assignment asks root's programs for."""
    return {name: sent.drain_request for name, sent in driver.told.items() if sent.drain_request}


def test_without_the_rights_the_node_is_asked_to_leave_a_request(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="denied", text="Invalid user id")
    assert requests(driver) == {"b": order.reason}
    assert driver.replayed().scheduler.drain_requests == {"b": order.reason}
    driver.order("uncordon", "b")
    assert requests(driver) == {}
