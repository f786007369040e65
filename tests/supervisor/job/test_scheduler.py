"""A job that is short of nodes asks its scheduler to be started again, once, and goes on there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.job.scheduler import FIRST_PAUSE_S, TRIES, UNANSWERED_S, PendingRequest, RequestQueue
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
    assert driver.loud["requeued"] == {"scheduler": "slurm", "requeues": 1, "by": "b", "lost": "a"}
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
    assert why in driver.loud["requeue_refused"]["why"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("again_by_itself", [True, False])
def test_what_looks_like_a_stop_may_be_a_new_start_by_somebody_else(
    slurm: Any, again_by_itself: bool, late: bool
) -> None:
    """Preempted, or `scontrol requeue`: the signal is the same."""
    driver = slurm()
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    assert driver.job.outcome.exit_code == 143
    [look] = driver.orders
    assert look.kind == "look"
    if late:
        driver.tell(m.SchedulerAnswered, number=look.number, outcome="unavailable")
        driver.fire("orders")
        assert driver.orders == [look]
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


# ----- a cordon drains the node, its end gives it back; an order is given until it is done with, and never  -----


def test_a_cordon_drains_the_node_with_a_reason_that_tells_everything(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [order] = driver.orders
    assert (order.kind, order.node) == ("drain", "nodeb")
    assert order.reason.startswith("unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=4711/i-1 Xid 79")
    assert driver.job.attempt.members == ("a", "c")
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    assert driver.job.view().cordons[0].scheduler == "drained"
    assert not driver.loud


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
    refused = driver.loud["request_refused"]
    assert (refused["node"], refused["text"]) == ("nodeb", "Invalid user id")
    assert driver.job.nodes.cordons.of("b", driver.now) is not None
    assert driver.job.view().cordons[0].scheduler.startswith("not drained")
    driver.tell(m.SchedulerAnswered, number=order.number, outcome=outcome)
    assert not driver.loud
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


def test_a_drain_that_a_pause_held_back_is_told_of_at_the_end(slurm: Any) -> None:
    driver = slurm()
    driver.order("pause")
    driver.order("cordon", "c")
    driver.order("stop")
    assert driver.loud["request_given_up"]["paused"]
    for name in "abc":
        driver.tell(m.NodeDone, node=name)
    assert driver.orders == []
    assert driver.ended


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


# ----- the end of a job under a scheduler -----


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
    assert "request_given_up" in driver.loud


def test_a_verdict_is_told_to_the_scheduler(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    [text] = comments(driver)
    assert text.startswith("unbroken: i-1: gpu_fallen_off_bus (")
    assert len(text) <= 250
    quiet = slurm(mode="observe")
    quiet.crash("b", 2)
    assert comments(quiet) == []


# ----- requests to the scheduler -----


def anything(_: PendingRequest) -> bool:
    return True


def test_an_order_goes_out_once_and_again_when_nobody_answers() -> None:
    queue = RequestQueue()
    request = queue.add("drain", node="n1", reason="unbroken: x", by_policy=True).request
    assert queue.take(0.0, anything) == [request]
    assert queue.take(1.0, anything) == []
    assert queue.next_due(anything) == UNANSWERED_S
    assert queue.take(UNANSWERED_S, anything) == [request]
    queue.give_again(200.0)
    assert queue.take(200.0, anything) == [request], "a new controller has not given it out"
    found = queue.answered(request.number, "done", 201.0)
    assert found is not None
    assert found[1]
    assert queue.answered(request.number, "done", 202.0) is None
    assert queue.next_due(anything) is None


def test_a_scheduler_that_is_away_is_asked_again_later_and_later_and_then_no_more() -> None:
    queue = RequestQueue()
    request = queue.add("drain", node="n1", by_policy=True).request
    now, pauses = 0.0, []
    while True:
        assert queue.take(now, anything) == [request]
        found = queue.answered(request.number, "unavailable", now)
        assert found is not None
        if found[1]:
            break
        due = queue.next_due(anything)
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert len(pauses) == TRIES - 1
    assert max(pauses) <= 300.0


def test_orders_about_one_node_keep_their_order_and_a_newer_one_replaces_one_that_waits() -> None:
    queue = RequestQueue()
    drain = queue.add("drain", node="n1", by_policy=True).request
    assert queue.take(0.0, anything) == [drain]
    undrain = queue.add("undrain", node="n1", by_policy=False).request
    other = queue.add("drain", node="n2", by_policy=True).request
    assert queue.take(0.0, anything) == [other], "the first one is under way"
    assert queue.next_due(anything) == UNANSWERED_S, "what waits behind another sets no timer"
    queue.answered(drain.number, "unavailable", 1.0)
    assert queue.take(1.0, anything) == [undrain], "a drain that nobody wants any more is not tried again"
    queue.answered(undrain.number, "unavailable", 2.0)
    again = queue.add("drain", node="n1", by_policy=False).request
    assert queue.take(2.0, anything) == [again]


def test_what_may_not_go_out_waits_without_a_timer() -> None:
    queue = RequestQueue()
    queue.add("drain", node="n1", by_policy=True)
    assert queue.take(0.0, lambda _: False) == []
    assert queue.next_due(lambda _: False) is None
    assert queue.next_due(anything) == 0.0
