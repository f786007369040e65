"""The tables of the job: everything has a handler, and no part forgets what it wants."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import supervisor.job
from supervisor import messages as m
from supervisor.job.core import TimerName, Want
from supervisor.job.job import Job
from supervisor.notes import KINDS

SOURCES = sorted(Path(supervisor.job.__file__).parent.glob("*.py"))


def test_every_event_has_a_handler() -> None:
    assert set(Job().event_handlers) == set(get_args(m.AnyEvent))


def test_every_timer_has_a_handler() -> None:
    assert set(Job().timer_handlers) == set(get_args(TimerName))


def test_every_want_has_a_handler() -> None:
    assert set(Job().want_handlers) == {m.Note, m.SchedulerRequest, m.SchedulerComment, *Want.__subclasses__()}


def test_every_command_has_a_handler() -> None:
    assert set(Job().operator.commands) == set(get_args(get_type_hints(m.OperatorCommand)["command"]))


def test_every_note_has_a_sentence() -> None:
    told = set()
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text())):
            func = getattr(call, "func", None)
            name = getattr(func, "id", getattr(func, "attr", ""))  # `note(...)` or `record.note(...)`
            if isinstance(call, ast.Call) and name in ("note", "_refuse"):
                told |= {one.value for one in ast.walk(call.args[0]) if isinstance(one, ast.Constant)}
    assert told - {"paused_"} <= set(KINDS)
    assert {f"paused_{state}" for state in ("idle", "starting", "running", "diagnosing", "recovering")} <= set(KINDS)


CLASSES = {
    node.name: node for path in SOURCES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
}


def _yielding(part: str) -> set[str]:
    """The methods of this class that yield wants."""
    methods = [node for node in CLASSES[part].body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in methods if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(node))}


@pytest.mark.parametrize("name", CLASSES)
def test_no_want_is_forgotten(name: str) -> None:
    """A method that yields wants does nothing where it is only called: its caller must yield from it."""
    parts = {attribute: type(part).__name__ for attribute, part in vars(Job()).items()}
    for node in ast.walk(CLASSES[name]):
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if call is None or not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value
        whose = name if getattr(owner, "id", "") == "self" else parts.get(getattr(owner, "attr", "").lstrip("_"), "")
        lost = whose in CLASSES and call.func.attr in _yielding(whose)
        assert not lost, f"{name}:{node.lineno}: {call.func.attr} is called, and its wants are lost"
