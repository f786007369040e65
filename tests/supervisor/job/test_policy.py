"""What operators and modes allow policy to do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport
from supervisor import messages as m
from supervisor.notes import text_of


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
    driver = slurm(spares=("c", "d", "e"))
    driver.verdict = msgspec.structs.replace(driver.verdict, culprits=tuple(Culprit(node=name) for name in "abc"))
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
    [refusal] = [text_of(action) for action in driver.actions if isinstance(action, m.Note) and action.refused]
    assert "i-7 does not wait for approval; i-1 does" in refusal
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


def test_an_approval_ends_with_the_attempt_that_the_journal_has_lost(slurm: Any) -> None:
    """It would keep the next attempt back, and no command could answer it."""
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    assert driver.job.view().hold is not None
    driver.tell(m.JournalDamaged, what="", lost=1, events=True, attempt=2)
    assert driver.job.view().hold is None
    driver.order("approve")
    assert [action.kind for action in driver.actions if isinstance(action, m.Note) and action.refused]
    driver.order("restart")
    assert driver.state == "STARTING"


def test_a_restart_of_what_never_ran_is_refused(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a")
    driver.order("restart")
    assert [text_of(action) for action in driver.actions if isinstance(action, m.Note) and action.refused]


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
