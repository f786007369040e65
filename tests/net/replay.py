"""Recorded journals and the decisions on them.

A recording is a file of JSON lines, packed by xz. The first line is the head. Each later one has an event as the
journal has it, and what the job decided on it: `actions` (sentences left out), `texts` (those sentences, in order),
and `now` (state and timers, only where they changed). `verdicts` are those that the job was given; where the head says
`by the diagnosis`, the real diagnosis gives them. The last line is the job's `view` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import adapter
from .golden import SENTENCE, split

Line = dict[str, Any]


def record(head: Line, events: Iterable[Line], conclude: Callable[[int, Any], Any] | None = None) -> list[Line]:
    """A new recording. `conclude` gives the verdict, as JSON, on an incident during the event of a number."""
    number, given = 0, []

    def concluded(incident: Any) -> Any:
        assert conclude is not None
        try:
            given.append(conclude(number, incident))
        except ValueError as error:
            given.append({"error": str(error)})
            raise
        return given[-1]

    job = adapter.new_job(concluded if conclude is not None else None)
    lines = [head]
    before: Any = None
    for event in events:
        given.clear()
        line, before = _decide(job, event, before)
        number += 1
        lines.append({"event": event, **({"verdicts": list(given)} if given else {}), **line})
    return [*lines, _end(job)]


def replay(lines: list[Line]) -> list[Line]:
    """The recording that its events give now, with the recorded verdicts."""
    waiting: list[Any] = []
    asked_more: list[Any] = []

    def concluded(incident: Any) -> Any:
        if not waiting:
            asked_more.append(incident)
            raise ValueError("the job asks for a verdict that it did not ask for when this was recorded")
        verdict = waiting.pop(0)
        if "error" in verdict:
            raise ValueError(verdict["error"])
        return verdict

    head = lines[0]
    job = adapter.new_job(concluded if head["verdicts"] == "recorded" else None)
    found = [head]
    before: Any = None
    for line in lines[1:-1]:
        waiting[:] = line.get("verdicts", ())
        decided, before = _decide(job, line["event"], before)
        kept = {key: line[key] for key in ("event", "verdicts") if key in line}
        if waiting or asked_more:
            decided["verdicts_asked_for"] = {"less": len(waiting), "more": len(asked_more)}
            asked_more.clear()
        found.append({**kept, **decided})
    return [*found, _end(job)]


def _decide(job: Any, event: Line, before: Any) -> tuple[Line, Any]:
    texts: list[str] = []
    try:
        actions = [_action(action, texts) for action in adapter.handle(job, event)]
    except Exception:  # the controller goes on without the event, and so do we
        actions = [{"type": "error"}]
    now = adapter.state_of(job)
    line: Line = {}
    if actions:
        line["actions"] = actions
    if texts:
        line["texts"] = texts
    if now != before:
        line["now"] = now
    return line, now


def _action(action: Line, texts: list[str]) -> Any:
    if action["type"] == "note":
        texts.append(adapter.note_text(action))
        return {key: action[key] for key in adapter.NOTE_FIELDS if key in action} | {"text": SENTENCE}
    return split(action, texts)


def _end(job: Any) -> Line:
    texts: list[str] = []
    return {"view": split(adapter.view_of(job), texts), "texts": texts}
