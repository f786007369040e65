"""The end of a job under a scheduler: what it may still wait for is ended, and its own record tells what happened."""

from __future__ import annotations

from typing import Any

from supervisor import messages as m


def comments(driver: Any) -> list[str]:
    """Since the newest event."""
    return [action.text for action in driver.actions if isinstance(action, m.SchedulerComment)]


def test_a_node_that_was_lost_keeps_nobody_waiting_at_the_end(slurm: Any) -> None:
    driver = slurm()
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.order("stop")
    for name in "ac":
        driver.tell(m.NodeDone, node=name)
    assert not driver.ended
    assert driver.orders == [], "the last lines of the others come first"
    driver.fire("step_end")
    [order] = driver.orders
    assert (order.kind, order.avoid) == ("end_step", ("nodeb",))
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done", text="step 4711.0 is ended")
    assert driver.ended


def test_no_answer_keeps_the_job_no_longer(slurm: Any) -> None:
    driver = slurm()
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.order("pause")
    driver.order("stop")
    for name in "ac":
        driver.tell(m.NodeDone, node=name)
    driver.fire("step_end")
    assert [order.kind for order in driver.orders] == ["end_step"], "a pause keeps no nodes"
    driver.fire("last_orders")
    assert driver.ended
    assert any("has not ended the step of the job" in text for text in driver.loud)


def test_a_verdict_is_told_to_the_scheduler(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [text] = comments(driver)
    assert text.startswith("unbroken: i-1: gpu_fallen_off_bus (")
    assert len(text) <= 250
    quiet = slurm(mode="observe")
    quiet.crash("b", 2)
    assert comments(quiet) == []
