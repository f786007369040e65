"""How every command gives its answer, as JSON on one line or as `supervisor.cli.render` shows it; and who asks.

And words for what is shown of an incident, from its JSON.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click

from supervisor.errors import UnbrokenError

RECURRENCES_SHOWN: Final = 10


def print_answer(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Write the answer on stdout. Raises UnbrokenError when it cannot be written (a full disk)."""
    with writing():
        write_answer(value, as_json, show)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raises UnbrokenError if stdout cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise  # `| head`: the end of the output, and no fault
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries to write the rest at exit
        raise UnbrokenError(f"the answer cannot be written: {error.strerror}") from None


def write_answer(value: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """As `print_answer`. Raises OSError."""
    if sys.stdout is None:  # `>&-`: nobody wants it
        return
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(value).decode())
    else:
        show(value)
    sys.stdout.flush()


def warn(text: str) -> None:
    """A line on stderr, beside the answer."""
    click.echo(f"unbroken: {text}", err=True)


def operator_name() -> str:
    """Who gives this command, as he says."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


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


def past_fields(incident: dict[str, Any], clock: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """For `why`: whether it has happened before, and what operators say that it was, the newest first."""
    for number, one in enumerate(incident.get("recurrences", ())):
        yield "" if number else "before", one["text"]
    for number, one in enumerate(incident.get("alerts", ())):
        text = f"{one['node']}: {one['name']} ({one['failure_class']})"
        yield "" if number else "alerts", text + (f": {one['text']}" if one["text"] else "")
    for number, one in enumerate(reversed(incident.get("corrections", ()))):
        text = f"{one['failure_class']}, says {one['by'] or 'an operator'} ({clock(one['at'])})"
        text += f": {one['note']}" if one["note"] else ""
        yield "" if number else "corrected", text + (" (earlier)" if number else "")
