"""Which nodes make the next attempt when some are silent just now."""

from __future__ import annotations

from typing import Any

from supervisor import messages as m


def test_a_silent_spare_is_the_last_choice(running: Any) -> None:
    driver = running("a", "b")
    driver.join("c", "d", "e", spare=True)
    driver.tell(m.NodeQuiet, node="c", silent_s=9.0)
    driver.tell(m.NodeQuiet, after=1.0, node="d", silent_s=3.1)
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    assert driver.job.attempt.members == ("a", "e")
    driver.tell(m.NodeLost, node="e", silent_s=15.0)
    assert driver.job.attempt.members == ("a", "d"), "of the silent ones the one heard last"


def test_a_new_controller_prefers_the_nodes_that_have_come_to_it(running: Any) -> None:
    driver = running("a", "b")
    driver.join("c", "d", spare=True)
    driver.tell(m.ControllerStarted, epoch=2)
    driver.join("a", "b", "d")
    driver.tell(m.NodeLost, node="b", silent_s=20.0)
    driver.fire("evidence")
    assert driver.job.attempt.members == ("a", "d")
    assert driver.replayed().view() == driver.job.view()


def test_members_are_chosen_anew_only_when_a_node_has_changed(make_driver: Any) -> None:
    """With thousands of nodes most events change none of them."""
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b", "c")
    chosen = driver.job.attempts.next_members()
    driver.join("a")
    assert driver.job.attempts.next_members() is chosen
    driver.tell(m.NodeLost, node="a", silent_s=5.0)
    assert driver.job.attempts.next_members() == ("b", "c")
    driver.join("a")
    driver.order("cordon", "b")
    assert "b" not in driver.job.attempts.next_members()


def test_what_is_told_to_all_is_worked_out_only_for_those_that_it_can_concern(make_driver: Any) -> None:
    driver = make_driver(nodes_min=3, nodes_max=3, spares=1)
    driver.join("a", "b", "c")
    driver.join("d", spare=True)
    driver.up()
    driver.crash("a", 1)
    driver.up()
    driver.crash("a", 1)
    assert driver.state == "RECOVERING"
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    roles = {one.assignment.node: one.assignment.role for one in driver.actions if isinstance(one, m.Assign)}
    assert roles == {"b": "spare", "d": "member", "a": "member"}, "a shows that b is lost"


def test_who_spoke_for_the_job_before_is_told_that_it_does_not_any_more(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b")
    driver.up()
    driver.crash("a", 1)
    driver.up()
    driver.crash("a", 1)
    driver.order("cordon", "a")
    driver.order("cordon", "b")
    driver.tell(m.NodeLost, node="a", silent_s=5.0)
    assert driver.job.attempt.members == ()
    assert driver.told["b"].notices, "nobody else is there"
    driver.job.nodes.cordons.lift("a")
    driver.tell(m.NodeJoined, node="a", host="", address="")
    assert driver.job.attempt.members == ("a",)
    assert (bool(driver.told["a"].notices), driver.told["b"].notices) == (True, ())
