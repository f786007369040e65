"""Words for what `unbroken incidents` and `why` show of one incident, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

RECURRENCES_SHOWN: Final = 10


def class_text(incident: dict[str, Any]) -> str:
    """An operator's word comes before the verdict's."""
    if corrections := incident.get("corrections"):
        return f"{corrections[-1]['failure_class']} (corrected)"
    return incident["verdict"]["failure_class"] if incident["verdict"] else "?"


def done_text(incident: dict[str, Any]) -> str:
    """What was done. A plan counts as done only if another attempt followed."""
    plan = f"{incident['plan']['kind']}: {incident['plan']['why']}" if incident["plan"] else ""
    if incident["next_attempt"] is not None:
        return plan
    return str(incident["closed_why"]) if incident["closed_at"] else f"planned: {plan}" if plan else ""


def recurrence_lines(incidents: Iterable[dict[str, Any]]) -> list[str]:
    """Of the newest incidents that have happened before."""
    again = [f"{one['id']}: {each['text']}" for one in incidents for each in one.get("recurrences", ())]
    return again[-RECURRENCES_SHOWN:]


def fields(incident: dict[str, Any], clock: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """For `why`: whether it has happened before, and what operators say that it was, the newest first."""
    for number, one in enumerate(incident.get("recurrences", ())):
        yield "" if number else "before", one["text"]
    for number, one in enumerate(reversed(incident.get("corrections", ()))):
        text = f"{one['failure_class']}, says {one['by'] or 'an operator'} ({clock(one['at'])})"
        text += f": {one['note']}" if one["note"] else ""
        yield "" if number else "corrected", text + (" (earlier)" if number else "")
