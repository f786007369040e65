"""A job that is short of nodes asks its scheduler to be started again, once, and goes on there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.notes import text_of


def short(slurm: Any, **spec: Any) -> Any:
    """No spare, and a GPU of b is gone: the scheduler was asked to drain b and to start the job again."""
    driver = slurm(spares=(), **spec)
    driver.crash("b", 2)
    return driver


def again(driver: Any, requeues: int, *names: str) -> None:
    """The scheduler has started the job again, on these nodes."""
    spec = driver.job.spec
    driver.tell(m.JobRequeued, requeues=requeues)
    driver.tell(m.ControllerStarted, epoch=driver.job.core.epoch + 1)
    driver.tell(m.JobDefined, spec=msgspec.structs.replace(spec, requeues=requeues, ends_at=9e9))
    for name in names:
        driver.join(name, scheduler_node=f"node{name}")


def test_without_a_node_left_the_job_is_started_again_elsewhere_and_goes_on(slurm: Any) -> None:
    driver = short(slurm)
    drain, requeue = sorted(driver.orders, key=lambda order: order.kind)
    assert (drain.kind, drain.node) == ("drain", "nodeb")
    assert (requeue.kind, requeue.exclude) == ("requeue", ("nodeb",))
    assert "slurm" in driver.job.waiting
    number, used = driver.number, driver.job.incidents.budget.used
    assert used == 1
    driver.tell(m.SchedulerAnswered, number=requeue.number, outcome="done")
    outcome = driver.job.outcome
    assert (outcome.state, outcome.exit_code) == ("requeued", 75)
    assert driver.told["a"].outcome == outcome
    driver.tell(m.SchedulerAnswered, number=drain.number, outcome="done")
    driver.now += 3600.0
    again(driver, 1, "a", "c")
    assert driver.state == "STARTING"
    assert driver.number > number
    assert driver.job.attempt.members == ("a", "c")
    assert driver.job.incidents.budget.used == used
    assert driver.job.spec.ends_at == 9e9
    assert [cordon.node for cordon in driver.job.view().cordons] == ["b"]
    driver.up(5)
    [incident] = driver.job.view().incidents
    assert incident.closed_at is not None
    assert incident.lost_s > 3600.0, "what the wait in the queue cost is the incident's"
    assert driver.replayed().view() == driver.job.view()


def test_a_node_that_comes_back_in_time_makes_a_new_start_needless(slurm: Any) -> None:
    driver = slurm(spares=())
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    assert driver.orders == []
    assert "requeue" in driver.job.timers
    driver.join("b", scheduler_node="nodeb")
    assert driver.state == "STARTING"
    assert "requeue" not in driver.job.timers


def test_a_node_whose_front_was_killed_is_not_waited_for_and_may_be_given_again(slurm: Any) -> None:
    """Its task is over, so it does not come back; the node is as good as any, and Slurm would never give it up."""
    driver = slurm(spares=())
    driver.tell(m.StopRequested, node="b", signal="FRONT_GONE")
    driver.fire("evidence")
    [order] = driver.orders
    assert (order.kind, order.exclude, order.avoid) == ("requeue", (), ())
    assert driver.replayed().view() == driver.job.view()


def test_it_is_never_started_again_twice_without_progress(slurm: Any) -> None:
    driver = short(slurm, max_requeues=5)
    driver.tell(m.SchedulerAnswered, number=driver.orders[-1].number, outcome="done")
    again(driver, 1, "a", "b2")
    driver.up(1)
    driver.tell(m.NodeLost, node="b2", silent_s=5.0)
    driver.fire("evidence")
    driver.fire("backoff")
    assert "requeue" not in driver.job.timers
    assert "nodes" in driver.job.timers, "it waits for nodes, and fails in the end"
    driver.join("b2")
    driver.up(50)
    driver.tell(m.NodeLost, node="b2", silent_s=5.0)
    driver.fire("evidence")
    assert "requeue" in driver.job.timers, "it came further than ever in between"


def test_no_new_start_while_paused_and_none_in_mode_recommend_without_approval(slurm: Any) -> None:
    driver = slurm(spares=())
    driver.order("pause")
    driver.crash("b", 2)
    driver.tell(m.NodeLost, node="a", silent_s=5.0)
    assert driver.orders == []
    asking = short(slurm, mode="recommend")
    assert asking.orders == []
    assert asking.job.view().incidents[0].plan.kind == "requeue"
    asking.order("approve")
    assert {order.kind for order in asking.orders} == {"drain", "requeue"}


def test_a_job_whose_first_node_died_goes_on_when_the_scheduler_starts_it_again(slurm: Any) -> None:
    driver = slurm(spares=())
    driver.tell(m.Progressed, after=50.0, attempt=1, step=40)
    driver.now += 600.0
    again(driver, 1, "c", "d")
    assert (driver.state, driver.number) == ("STARTING", 2)
    driver.up(30)
    [incident] = driver.job.view().incidents
    assert incident.verdict.failure_class is FailureClass.NODE_FAILURE
    assert incident.lost_s > 600.0
    assert driver.replayed().view() == driver.job.view()


def test_the_timeline_says_which_first_node_was_lost_and_who_asked_for_the_new_start(slurm: Any) -> None:
    driver = slurm(spares=())
    driver.tell(m.Progressed, after=50.0, attempt=1, step=40)
    lost_at = driver.now + 5.0
    driver.now += 600.0
    driver.tell(m.JobRequeued, requeues=1, by="b", lost="nodea", lost_at=lost_at)
    assert driver.loud[0] == (
        "slurm has started the job again (restart 1): b asked for it, because the first node, a, was lost"
    )
    [case] = driver.job.incidents.log.open_failures()
    assert case.what == "node a, the first one, was lost with the controller"
    assert [culprit.node for culprit in case.verdict.culprits] == ["a"]
    assert (case.verdict.failure_class, case.failed_at) == (FailureClass.NODE_FAILURE, lost_at)


def test_nodes_know_whether_the_job_may_be_started_again_without_a_controller(slurm: Any) -> None:
    driver = slurm()
    assert driver.told["a"].may_requeue
    for command, argument, may in (("pause", "", False), ("resume", "", True), ("mode", "observe", False)):
        driver.order(command, argument)
        assert driver.told["a"].may_requeue is may, command
    again = slurm(requeues=1)
    assert not again.told["a"].may_requeue


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("done", "job 4711 is cancelled: the job does not start again"),
        ("denied", "cancel it there, or it starts again"),
    ],
)
def test_a_stop_takes_back_a_new_start_that_is_under_way(slurm: Any, outcome: str, said: str) -> None:
    driver = short(slurm)
    requeue = driver.orders[-1]
    driver.order("stop")
    for name in "ab":
        driver.tell(m.NodeDone, node=name)
    assert driver.orders == [], "the new start is answered first"
    driver.tell(m.SchedulerAnswered, number=requeue.number, outcome="done", text="job 4711 is requeued")
    [cancel] = [order for order in driver.orders if order.kind == "cancel"]
    driver.tell(m.SchedulerAnswered, number=1, outcome="done")
    assert not driver.ended
    driver.tell(m.SchedulerAnswered, number=cancel.number, outcome=outcome, text="job 4711 is cancelled")
    assert any(said in text_of(action) for action in driver.actions if isinstance(action, m.Note))
    assert driver.ended
    assert driver.job.outcome.state == "stopped"


def test_a_new_start_that_was_refused_need_not_be_taken_back(slurm: Any) -> None:
    driver = short(slurm)
    drain, requeue = driver.orders
    driver.order("stop")
    for name in "ab":
        driver.tell(m.NodeDone, node=name)
    driver.tell(m.SchedulerAnswered, number=drain.number, outcome="done")
    driver.tell(m.SchedulerAnswered, number=requeue.number, outcome="denied")
    assert driver.orders == []
    assert driver.ended


def test_what_the_new_start_leaves_out_is_told_even_if_its_signal_is_faster(slurm: Any) -> None:
    driver = short(slurm)
    _, requeue = driver.orders
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    driver.tell(m.SchedulerAnswered, number=requeue.number, outcome="done", text="job 4711 is requeued without nodeb")
    assert driver.job.outcome.line.endswith("(job 4711 is requeued without nodeb)")
    assert driver.told["a"].outcome == driver.job.outcome
    assert driver.replayed().view() == driver.job.view()


def test_why_no_new_start_is_possible_is_what_the_job_waits_with(slurm: Any) -> None:
    driver = short(slurm)
    why = "job 4711 cannot start again: it needs 2 nodes, and partition main has 1 besides nodeb"
    driver.tell(m.SchedulerAnswered, number=driver.orders[-1].number, outcome="unsupported", text=why)
    assert why in driver.job.waiting
    assert why in driver.loud[0]


@pytest.mark.parametrize("again_by_itself", [True, False])
def test_what_looks_like_a_stop_may_be_a_new_start_by_somebody_else(slurm: Any, again_by_itself: bool) -> None:
    """Preempted, or `scontrol requeue`: the signal is the same."""
    driver = slurm()
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    assert driver.job.outcome.exit_code == 143
    [look] = driver.orders
    assert look.kind == "look"
    driver.tell(m.SchedulerAnswered, number=look.number, outcome="done" if again_by_itself else "failed")
    outcome = driver.job.outcome
    if again_by_itself:
        assert (outcome.state, outcome.exit_code, driver.job.view().state) == ("requeued", 75, "REQUEUED")
        assert outcome.line.endswith("(stopped by SIGTERM on a)")
        assert driver.told["a"].outcome == outcome
        again(driver, 1, "a", "b", "c")
        assert driver.state == "STARTING"
    else:
        assert (outcome.state, driver.job.view().state) == ("stopped", "STOPPED")
    assert driver.replayed().view() == driver.job.view()
