"""Which nodes make an attempt, and how a job ends."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor import messages as m
from supervisor.view import utc


def test_ranks_keep_their_order_and_nodes_may_say_theirs(make_driver: Any) -> None:
    driver = make_driver(nodes_min=3, nodes_max=3)
    for name, order in (("c", 2), ("a", 0), ("b", 1)):
        driver.join(name, index=order)
    driver.up()
    assert driver.told["a"].round is not None
    assert driver.told["a"].round.nodes == ("a", "b", "c")
    assert driver.told["a"].round.store_host == "a"


def test_fewer_nodes_are_enough_after_a_while(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=3, gather_s=30.0)
    driver.join("a", "b")
    assert driver.state == "IDLE"
    driver.fire("gather")
    assert driver.state == "STARTING"
    assert driver.job.attempt.members == ("a", "b")


def test_a_spare_that_comes_first_is_not_taken_for_an_ordinary_node(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, gather_s=30.0)
    driver.join("s", spare=True)
    driver.join("a")
    assert driver.state == "IDLE"
    driver.join("b")
    assert driver.job.attempt.members == ("a", "b")
    late = make_driver(nodes_min=2, nodes_max=2, gather_s=30.0)
    late.join("s", spare=True)
    late.join("a")
    late.fire("gather")
    assert late.job.attempt.members == ("a", "s")


def test_a_member_that_is_cordoned_while_the_attempt_is_formed_is_replaced(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b")
    driver.join("s", spare=True)
    driver.tell(m.OperatorCommand, command="cordon", argument="b", by="ann")
    assert driver.job.attempt.members == ("a", "s")
    assert driver.told["b"].role == "excluded"


def test_how_long_a_job_is_held_is_set_and_shown(running: Any) -> None:
    driver = running("a", mode="recommend", hold_limit_s=600.0)
    driver.rank_ends()
    hold = driver.job.view().hold
    assert (hold.ends_at - hold.at).total_seconds() == 600.0
    assert "approve" in driver.job.waiting
    driver.fire("hold")
    assert (driver.state, driver.job.view().hold) == ("FAILED", None)


def test_a_limit_of_nothing_holds_for_ever(running: Any) -> None:
    driver = running("a", mode="recommend", hold_limit_s=0.0)
    driver.rank_ends()
    assert "hold" not in driver.job.timers
    assert driver.job.view().hold.ends_at is None


@pytest.mark.parametrize(
    ("ends_in", "said"),
    [
        (20.0, "stopped by SIGTERM on a, 20 s before the time limit of slurm"),
        (-0.5, "stopped by SIGTERM on a, at the time limit of slurm"),
        (7200.0, "stopped by SIGTERM on a"),
        (None, "stopped by SIGTERM on a"),
    ],
)
def test_a_stop_near_the_time_limit_names_it(slurm: Any, ends_in: float | None, said: str) -> None:
    begins = slurm().now
    driver = slurm(ends_at=None if ends_in is None else begins + ends_in)
    driver.now = begins
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    assert driver.job.outcome.line == said
    assert driver.job.view().ends_at == (None if ends_in is None else utc(begins + ends_in))
