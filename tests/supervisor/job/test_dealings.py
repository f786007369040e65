"""What a job asks of its scheduler: drains with a cordon, a new start when nodes are short; nothing while paused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport, Verdict
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.view import utc

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


def ended(driver: Any) -> bool:
    """Whether the controller may go, since the last event."""
    return any(isinstance(action, m.End) for action in driver.actions)


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


# ----- no node left -----


def short(slurm: Any, **spec: Any) -> Any:
    """No spare, and a GPU of b is gone: the scheduler was asked to drain b and to start the job again."""
    driver = slurm(spares=(), **spec)
    driver.crash("b", 2)
    return driver


def again(driver: Any, requeues: int, *names: str) -> None:
    """The scheduler has started the job again, on these nodes."""
    spec = driver.job.spec
    driver.tell(m.JobRequeued, requeues=requeues)
    driver.tell(m.ControllerStarted, epoch=driver.job.epoch + 1)
    driver.tell(m.JobDefined, spec=msgspec.structs.replace(spec, requeues=requeues, ends_at=9e9))
    for name in names:
        driver.join(name, scheduler_node=f"node{name}")


def test_without_a_node_left_the_job_is_started_again_elsewhere_and_goes_on(slurm: Any) -> None:
    driver = short(slurm)
    drain, requeue = sorted(driver.orders, key=lambda order: order.kind)
    assert (drain.kind, drain.node) == ("drain", "nodeb")
    assert (requeue.kind, requeue.exclude) == ("requeue", ("nodeb",))
    assert "slurm" in driver.job.waiting
    number, used = driver.number, driver.job.budget.used
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
    assert driver.job.budget.used == used
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


def test_a_lost_node_that_stays_away_is_excluded(slurm: Any) -> None:
    driver = slurm(spares=())
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    driver.fire("requeue")
    [order] = driver.orders
    assert (order.kind, order.exclude, order.avoid) == ("requeue", (), ("nodeb",))


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


def test_the_number_of_new_starts_is_bounded(slurm: Any) -> None:
    driver = short(slurm, requeues=1)
    assert [order.kind for order in driver.orders] == []
    assert driver.state == "STARTING", "restarted in place, as without a scheduler"


def test_a_new_start_that_is_refused_leaves_the_job_waiting_for_nodes(slurm: Any) -> None:
    driver = short(slurm)
    requeue = driver.orders[-1]
    driver.tell(m.SchedulerAnswered, number=requeue.number, outcome="denied", text="Access denied")
    assert "Access denied" in driver.loud[0]
    assert driver.state == "RECOVERING"
    driver.fire("nodes")
    assert driver.job.outcome.exit_code == 91
    assert "Access denied" in driver.job.outcome.line


def test_the_signal_that_comes_with_a_new_start_is_no_stop(slurm: Any) -> None:
    driver = short(slurm)
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    assert driver.job.outcome.state == "requeued"
    other = short(slurm)
    other.tell(m.StopRequested, node="a", signal="SIGINT")
    assert other.job.outcome.state == "stopped"


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
        "slurm has started the job again (restart 1): b asked for it, for the first node, a, was lost"
    )
    [case] = driver.job.casebook.unclosed()
    assert case.what == "node a, the first one, was lost with the controller"
    assert [culprit.node for culprit in case.verdict.culprits] == ["a"]
    assert (case.verdict.failure_class, case.failed_at) == (FailureClass.NODE_FAILURE, lost_at)


def test_a_job_that_was_done_with_does_not_go_on(slurm: Any) -> None:
    driver = slurm()
    driver.order("stop")
    assert driver.job.goes_on_when_requeued, "the scheduler stops what it starts again"
    driver = slurm(max_restarts=0)
    driver.crash("a", 0)
    assert driver.job.outcome.state == "failed"
    driver.tell(m.JobRequeued, requeues=1)
    assert driver.state == "FAILED"


# ----- operators and policy -----


def test_what_an_operator_uncordons_is_not_cordoned_again_for_the_same_incident(slurm: Any) -> None:
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    assert driver.job.view().incidents[0].plan.cordons
    driver.order("uncordon", "b")
    driver.order("approve", "i-1")
    assert driver.job.view().cordons == ()
    assert driver.orders == []
    assert driver.job.attempt.members == ("a", "b")
    driver.up()
    driver.now += 1.0
    driver.crash("b", 2)
    driver.order("approve", "i-2")
    assert [cordon.node for cordon in driver.job.view().cordons] == ["b"], "the next incident is another matter"


def test_an_operators_cordon_is_never_lifted_by_policy(slurm: Any) -> None:
    driver = slurm()
    driver.order("cordon", "b", by="ann")
    driver.crash("b", 2)
    driver.up()
    [cordon] = driver.job.view().cordons
    assert (cordon.node, cordon.by) == ("b", "ann")


def test_the_breaker_bounds_drains_and_starts_anew_with_resume(slurm: Any) -> None:
    wide = msgspec.structs.replace(GPU, culprits=tuple(Culprit(node=name) for name in "abc"))
    driver = slurm(verdict=wide, spares=("c", "d", "e"))
    driver.crash("b", 2)
    assert driver.orders == []
    breaker = driver.job.view().breaker
    assert (breaker.used, breaker.limit, breaker.tripped) == (0, 2, True)
    driver.order("resume")
    assert driver.state == "STARTING"
    assert not driver.job.view().breaker.tripped


@pytest.mark.parametrize("command", ["approve", "reject"])
def test_an_order_about_another_incident_is_refused_with_a_sentence(slurm: Any, command: str) -> None:
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    driver.order(command, "i-7")
    [refusal] = [action.text for action in driver.actions if isinstance(action, m.Note) and action.refused]
    assert "i-7 is not what waits for approval: that is i-1" in refusal
    assert "approve" in driver.job.waiting
    driver.order(command, "1")
    assert "approve" not in driver.job.waiting


def test_observe_that_is_given_while_a_plan_waits_keeps_it_waiting(slurm: Any) -> None:
    driver = slurm()
    driver.order("pause")
    driver.crash("b", 2)
    driver.order("mode", "observe")
    driver.order("resume")
    assert driver.orders == []
    assert (driver.state, driver.number) == ("RECOVERING", 1)
    driver.order("approve")
    assert driver.state == "STARTING"
    assert [order.node for order in driver.orders] == ["nodeb"], "that was an operator's own word"


def test_observe_that_is_given_during_a_restart_is_the_last_one(slurm: Any) -> None:
    driver = slurm()
    driver.crash("a", 0)
    driver.order("mode", "observe")
    driver.up()
    assert driver.state == "RUNNING"
    driver.crash("a", 0)
    assert driver.job.outcome.state == "failed"


def test_nothing_is_prepared_while_paused(slurm: Any) -> None:
    driver = slurm()
    driver.crash("a", 0)
    driver.up(1)
    driver.crash("a", 0)
    assert "backoff" in driver.job.timers
    driver.order("pause")
    assert driver.told["a"].paused
    driver.fire("backoff")
    assert driver.state == "RECOVERING"
    driver.order("resume")
    assert driver.state == "STARTING"
    assert not driver.told["a"].paused


def test_an_approval_while_paused_is_an_operators_own_order(slurm: Any) -> None:
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    driver.order("pause")
    driver.order("approve")
    assert driver.state == "STARTING"
    assert driver.orders == [], "the scheduler is told afterwards"
    driver.order("resume")
    assert [order.node for order in driver.orders] == ["nodeb"]


def test_nodes_know_whether_the_job_may_be_started_again_without_a_controller(slurm: Any) -> None:
    driver = slurm()
    assert driver.told["a"].may_requeue
    for command, argument, may in (("pause", "", False), ("resume", "", True), ("mode", "observe", False)):
        driver.order(command, argument)
        assert driver.told["a"].may_requeue is may, command
    again = slurm(requeues=1)
    assert not again.told["a"].may_requeue


def test_a_stop_ends_the_asking_for_a_new_start(slurm: Any) -> None:
    driver = short(slurm)
    driver.tell(m.SchedulerAnswered, number=driver.orders[-1].number, outcome="unavailable")
    driver.order("stop")
    driver.now += 60.0
    driver.tell(m.TimerFired, timer="orders")
    driver.tell(m.ControllerStarted, epoch=2)
    assert "requeue" not in {order.kind for order in driver.orders}


@pytest.mark.parametrize(
    ("outcome", "said"),
    [("done", "job 4711 is cancelled: it does not come back"), ("denied", "cancel it there, or it starts again")],
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
    assert not ended(driver)
    driver.tell(m.SchedulerAnswered, number=cancel.number, outcome=outcome, text="job 4711 is cancelled")
    assert any(said in action.text for action in driver.actions if isinstance(action, m.Note))
    assert ended(driver)
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
    assert ended(driver)


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
    assert not ended(driver)
    assert driver.job.timers["orders"] - driver.now <= 5.0
    driver.fire("orders")
    assert driver.orders == [order]
    late = driver.replayed()
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    assert ended(driver)
    assert driver.job.view().cordons[0].scheduler == "drained"
    actions = late.handle(m.TimerFired(at=late.timers["last_orders"], timer="last_orders"))
    assert [action.text for action in actions if isinstance(action, m.Note)] == [
        f"slurm has not drained nodeb, and the job has ended: that is for a person to do now ({order.reason})"
    ]
    assert any(isinstance(action, m.End) for action in actions)
    assert late.view().cordons[0].scheduler == "not drained: the job ended before slurm did it"


def test_a_drain_that_a_pause_held_back_is_told_of_at_the_end(slurm: Any) -> None:
    driver = slurm()
    driver.order("pause")
    driver.order("cordon", "c")
    driver.order("stop")
    assert any("slurm has not drained nodec, and the job was paused when it ended" in text for text in driver.loud)
    for name in "abc":
        driver.tell(m.NodeDone, node=name)
    assert driver.orders == []
    assert ended(driver)


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


def test_a_restart_of_what_never_ran_is_refused(make_driver: Any) -> None:
    driver = make_driver(GPU, nodes_min=2, nodes_max=2)
    driver.join("a")
    driver.order("restart")
    assert [action.text for action in driver.actions if isinstance(action, m.Note) and action.refused]


def test_an_attempt_that_cannot_start_is_the_end_in_mode_observe(slurm: Any) -> None:
    driver = slurm()
    driver.crash("a", 0)
    driver.order("mode", "observe")
    driver.tell(m.PreparationFailed, node="a", attempt=driver.number, error="no space left on device")
    assert driver.job.outcome.state == "failed", "nothing runs, and nothing would ever run"


def test_a_hang_that_was_only_watched_is_acted_on_once_that_may_be(slurm: Any) -> None:
    driver = slurm(mode="observe")
    report = HangReport(kind="silent", ranks=(), quiet_s=600.0, limit_s=600.0, phase="steady", why="quiet")
    driver.tell(m.HangConfirmed, attempt=1, report=report)
    driver.fire("evidence")
    assert (driver.state, driver.number) == ("RUNNING", 1)
    driver.order("mode", "enforce")
    driver.fire("again")
    driver.fire("evidence")
    assert (driver.state, driver.number) == ("STARTING", 2)


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


def test_what_policy_wanted_in_mode_enforce_is_not_ordered_in_mode_recommend(slurm: Any) -> None:
    driver = slurm(spares=())
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    driver.order("mode", "recommend")
    driver.fire("requeue")
    assert driver.orders == []
    assert driver.state == "RECOVERING", "it waits for nodes"
