"""What a job asks of its scheduler: drains with a cordon, a new start when nodes are short; nothing while paused."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m

GPU = Verdict(
    failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
    culprits=(Culprit(node="b", rank=2, gpu="0000:c1:00"),),
    confidence=0.95,
    why="Xid 79: the GPU has fallen off the bus",
    action="cordon_node_and_restart",
)


@pytest.fixture
def slurm(make_driver: Any) -> Any:
    """Nodes a and b run, c is the spare; the scheduler has names of its own for them."""

    def start(verdict: Verdict = GPU, spares: tuple[str, ...] = ("c",), **spec: Any) -> Any:
        driver = make_driver(
            verdict, nodes_min=2, nodes_max=2, scheduler="slurm", scheduler_job="4711", spares=len(spares), **spec
        )
        for name in ("a", "b"):
            driver.join(name, scheduler_node=f"node{name}")
        for name in spares:
            driver.join(name, spare=True, scheduler_node=f"node{name}")
        driver.up()
        return driver

    return start


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
    local = make_driver(GPU, nodes_min=2, nodes_max=2)
    local.join("a", "b", "c")
    local.up()
    local.crash("b", 2)
    assert local.orders == []
    assert local.job.cordons.of("b", local.now) is not None
    driver = slurm()
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    assert driver.orders == []
    assert driver.job.attempt.members == ("a", "c")


def test_an_order_is_given_again_to_a_new_controller_until_it_is_answered(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.tell(m.ControllerStarted, epoch=2)
    assert driver.orders == [order]
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    driver.tell(m.ControllerStarted, epoch=3)
    assert driver.orders == []


def test_a_scheduler_that_does_not_answer_is_asked_again(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="unavailable", text="slurmctld is down")
    assert driver.job.timers["orders"] == driver.now + 5.0
    driver.fire("orders")
    assert driver.orders == [order]


@pytest.mark.parametrize("outcome", ["foreign", "denied", "failed", "unsupported"])
def test_a_refusal_is_told_once_and_the_cordon_stands(slurm: Any, outcome: str) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.tell(m.SchedulerAnswered, number=order.number, outcome=outcome, text="Invalid user id")
    [text] = driver.loud
    assert "nodeb" in text
    assert "Invalid user id" in text
    assert driver.job.cordons.of("b", driver.now) is not None
    assert driver.job.view().cordons[0].scheduler.startswith("not drained")
    driver.tell(m.SchedulerAnswered, number=order.number, outcome=outcome)
    assert driver.loud == []
    driver.order("uncordon", "b")
    assert driver.orders == [], "what was not drained is not given back"


def test_operators_drain_and_give_back(slurm: Any) -> None:
    driver = slurm()
    driver.tell(m.OverrideGiven, command="cordon", argument="c", reason="its fan\nis loud", by="ann@login")
    [order] = driver.orders
    assert order.reason == "unbroken: operator job=4711 by=ann@login its fan is loud"
    driver.tell(m.OverrideGiven, command="uncordon", argument="c", by="ann@login")
    assert driver.orders == [], "the drain is under way"
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    [back] = driver.orders
    assert (back.kind, back.node) == ("undrain", "nodec")


def test_a_node_that_was_never_the_jobs_is_not_drained(slurm: Any) -> None:
    driver = slurm()
    driver.order("cordon", "login1")
    assert driver.orders == []
    assert driver.job.cordons.of("login1", driver.now) is not None


def test_nothing_goes_out_while_paused(slurm: Any) -> None:
    driver = slurm(spares=("c", "d"))
    driver.order("pause")
    driver.crash("b", 2)
    driver.order("cordon", "c")
    assert driver.orders == []
    driver.order("resume")
    assert {(order.kind, order.node) for order in driver.orders} == {("drain", "nodeb"), ("drain", "nodec")}


def test_nothing_is_ordered_without_approval(slurm: Any) -> None:
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    assert driver.orders == []
    driver.tell(m.OverrideGiven, command="approve", argument="i-1")
    assert [order.node for order in driver.orders] == ["nodeb"]
    observed = slurm(mode="observe")
    observed.crash("b", 2)
    assert observed.orders == []


def test_the_end_waits_for_an_order_that_is_under_way(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    driver.order("stop")
    for name in "abc":
        driver.tell(m.NodeDone, node=name)
    assert not any(isinstance(action, m.End) for action in driver.actions)
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    assert any(isinstance(action, m.End) for action in driver.actions)
