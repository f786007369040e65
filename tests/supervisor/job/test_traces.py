"""Traces that an operator asks for: who is asked, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from supervisor import messages as m
from supervisor.job.traces import read_request

Start = Callable[..., Any]


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("ab12 --ranks 0,5 --steps 3 --wait 60", ("ab12", "steps", (0, 5), 3, 60.0)),
        ("ab12 --ranks 5,0,5 --input --wait 9", ("ab12", "input", (0, 5), 3, 9.0)),
    ],
)
def test_what_is_asked_for(argument: str, wanted: tuple[Any, ...]) -> None:
    found = read_request(argument)
    assert found is not None
    assert (found.name, found.what, found.ranks, found.steps, found.budget_s) == wanted


@pytest.mark.parametrize(
    "argument",
    [
        "",
        "ab12",
        "ab12 --ranks",
        "ab12 --ranks x",
        "../../etc --ranks 0",
        "ab12 --ranks 0 --steps 0",
        "ab12 --ranks 0 --steps 101",
        "ab12 --ranks 0 --wait 601",
        "ab12 --ranks 0 --wait ٣",
        "ab12 --ranks 0 --more 1",
        "ab12 --ranks " + ",".join(map(str, range(65))),
    ],
)
def test_what_is_no_request(argument: str) -> None:
    assert read_request(argument) is None


def orders(driver: Any) -> dict[str, m.TraceRequest]:
    """What each node was told last."""
    sent = driver.job.assignments.sent
    return {name: one.trace for name, one in sent.items() if one.trace is not None}


def test_only_nodes_with_these_ranks_are_asked(running: Start) -> None:
    driver = running("a", "b", traceable=True)
    (rank,) = driver.job.attempts.current.ranks["b"][:1]
    driver.order("trace", f"ab12 --ranks {rank} --steps 2 --wait 60")
    assert {name: (one.number, one.ranks, one.steps) for name, one in orders(driver).items()} == {"b": (1, (rank,), 2)}
    driver.order("trace", f"cd34 --ranks {rank} --input --wait 60")
    assert {name: (one.number, one.what) for name, one in orders(driver).items()} == {"b": (2, "input")}


def test_another_attempt_is_not_asked(running: Start) -> None:
    driver = running("a", traceable=True)
    driver.order("trace", "ab12 --ranks 0 --wait 60")
    assert orders(driver)
    driver.order("restart")
    assert not orders(driver)


@pytest.mark.parametrize(
    ("spec", "argument", "kind"),
    [
        ({}, "ab12 --ranks 0 --wait 60", "trace_not_allowed"),
        ({"traceable": True}, "ab12 --ranks 4711 --wait 60", "trace_no_rank"),
        ({"traceable": True}, "what", "trace_unclear"),
    ],
)
def test_refused(running: Start, spec: dict[str, Any], argument: str, kind: str) -> None:
    driver = running("a", **spec)
    driver.order("trace", argument)
    (refusal,) = (one for one in driver.actions if isinstance(one, m.Note) and one.refused)
    assert refusal.kind == kind
    assert not orders(driver)


def test_the_input_can_be_looked_at_in_any_job(running: Start) -> None:
    driver = running("a")
    driver.order("trace", "ab12 --ranks 0 --input --wait 60")
    assert orders(driver)["a"].what == "input"
