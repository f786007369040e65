"""What operators and modes allow policy to do."""

from __future__ import annotations

from typing import Any

import msgspec

from diagnosis.incident import Culprit
from supervisor import messages as m


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
