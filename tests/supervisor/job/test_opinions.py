"""When the job asks for a language model's opinion, and what it keeps of the answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.incident import Opinion, Verdict
from diagnosis.signals import ExitRecord
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.view import IncidentView

UNSURE = Verdict(
    failure_class=FailureClass.WORKER_CRASH, culprits=(), confidence=0.4, why="a rank ended", action="restart"
)
GOOD = Opinion(failure_class=FailureClass.SCRIPT_ERROR, lines=("rank 1: x",), why="it says so", model="m")
NONE = Opinion(failure_class=FailureClass.UNKNOWN, problem="no answer within 120 s")


@pytest.fixture
def running(running: Callable[..., Any]) -> Callable[..., Any]:
    """Every verdict is unsure, and a model is asked below 0.6."""
    return functools.partial(running, verdict=UNSURE, opinion_below=0.6)


def wanted(driver: Any) -> list[str]:
    return [one.incident for one in driver.actions if isinstance(one, m.OpinionWanted)]


def break_off(driver: Any) -> None:
    """A rank ends, and its evidence has not come yet."""
    end = ExitRecord(rank=1, local_rank=0, pid=7, code=1, signal=None, ended_at=driver.now)
    driver.tell(m.RankEnded, node="a", attempt=driver.number, exit=end)
    assert driver.state == "DIAGNOSING"
    assert wanted(driver) == []


def first(driver: Any) -> IncidentView:
    found: IncidentView = driver.job.view().incidents[0]
    return found


@pytest.mark.parametrize("below", [0.6, 0.3, 0.0])
def test_a_model_is_asked_about_verdicts_that_are_unsure(running: Any, below: float) -> None:
    driver = running("a", "b", opinion_below=below)
    driver.crash("a", 1)
    assert first(driver).opinion_wanted is (below == 0.6)


@pytest.mark.parametrize("order", ["stop", "restart"])
def test_one_that_an_operator_ends_before_its_verdict_is_asked_about(running: Any, order: str) -> None:
    driver = running("a", "b")
    break_off(driver)
    driver.order(order)
    assert wanted(driver) == ["i-1"]
    assert first(driver).verdict is None


def test_a_try_that_fails_does_not_replace_an_opinion(running: Any) -> None:
    driver = running("a", "b")
    driver.crash("a", 1)
    driver.tell(m.OpinionArrived, incident="i-1", opinion=NONE)
    assert (first(driver).opinion, first(driver).opinion_failed) == (NONE, None)
    driver.tell(m.OpinionArrived, incident="i-1", opinion=GOOD)
    driver.tell(m.OpinionAsked, incident="i-1")
    driver.tell(m.OpinionArrived, incident="i-1", opinion=NONE)
    one = first(driver)
    assert (one.opinion, one.opinion_failed, one.opinions, one.opinion_wanted) == (GOOD, NONE, 3, False)
    driver.tell(m.OpinionArrived, incident="i-1", opinion=GOOD)
    assert (first(driver).opinion, first(driver).opinion_failed) == (GOOD, None)


def test_a_new_controller_asks_what_was_asked_and_not_answered(running: Any) -> None:
    driver = running("a", "b")
    driver.crash("a", 1)
    driver.tell(m.ControllerStarted, epoch=2)
    assert wanted(driver) == ["i-1"]
    driver.tell(m.OpinionArrived, incident="i-1", opinion=GOOD)
    driver.tell(m.ControllerStarted, epoch=3)
    assert wanted(driver) == []
    driver.tell(m.OpinionAsked, incident="i-1")
    driver.tell(m.ControllerStarted, epoch=4)
    assert wanted(driver) == ["i-1"], "an operator's question, too"
    assert driver.replayed().view() == driver.job.view()


def test_what_the_jobs_end_leaves_unanswered_is_told_as_lost(running: Any) -> None:
    driver = running("a", "b")
    driver.crash("a", 1)
    driver.order("stop")
    for name in "ab":
        assert first(driver).opinion_wanted
        driver.tell(m.NodeDone, node=name)
    one = first(driver)
    assert one.opinion is not None
    assert one.opinion.problem == "the job ended before it came: `unbroken why i-1 --ask` asks now"
    assert not one.opinion_wanted
