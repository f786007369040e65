"""All that the net knows of the code's insides. A move or a rename touches this file and no other one in tests/net."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from diagnosis.incident import Incident, Verdict
from supervisor import messages
from supervisor.cli.main import main
from supervisor.controller import journal
from supervisor.controller.report import plain
from supervisor.job.job import Job
from supervisor.node_health.health_file import HealthFile
from supervisor.notes import text_of
from supervisor.view import JobView

SCHEMAS: dict[str, Any] = {
    "agent_message": messages.AgentMessage,
    "controller_message": messages.ControllerMessage | messages.ClockReply | messages.WatchedNow,
    "event": messages.AnyEvent,
    "action": messages.Action,
    "journal_record": journal.Record,
    "journal_opened": journal.Opened,
    "journal_decided": journal.Decided,
    "health_file": HealthFile,
    "job_view": JobView,
}
"""Golden file -> the type whose JSON schema it holds."""

NOTE_FIELDS = ("type", "incident", "loud", "refused", "unknown_node")
"""What of a note is compared as a decision. Its sentence is compared apart; more fields may be added to notes."""


def new_job(conclude: Callable[[Any], Any] | None = None) -> Job:
    """A job. `conclude` gives the verdict on an incident as JSON; without it the real diagnosis does."""
    if conclude is None:
        return Job()

    def concluded(incident: Incident) -> Verdict:
        return msgspec.convert(conclude(incident), Verdict)

    return Job(conclude=concluded)


def handle(job: Job, event: Any) -> list[dict[str, Any]]:
    """The actions on an event, both as the journal has them."""
    actions = job.handle(messages.decode_event(msgspec.json.encode(event)))
    told: list[dict[str, Any]] = msgspec.json.decode(messages.encode(actions))
    return told


def note_text(action: dict[str, Any]) -> str:
    """The sentence of a note."""
    return text_of(msgspec.convert(action, messages.Note))


def state_of(job: Job) -> dict[str, Any]:
    """What an event may change beside its actions."""
    waits: bool = bool(job.waiting)
    return {"state": job.state, "waits": waits, "paused": job.paused, "timers": dict(sorted(job.timers.items()))}


def view_of(job: Job) -> Any:
    """The job as `unbroken status --json` has it."""
    return msgspec.json.decode(msgspec.json.encode(plain(job.view())))


def journal_steps(folder: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]] | None, str]]:
    """Of a job folder's journals: each event, and what the controller recorded then: the actions, or an error."""
    for step in journal.steps(journal.read_history(folder).records):
        decided = step.decided
        actions = msgspec.json.decode(messages.encode(decided.actions)) if decided is not None else None
        yield msgspec.json.decode(messages.encode(step.event)), actions, decided.error if decided is not None else ""


def unbroken(*arguments: str) -> tuple[int, str]:
    """Exit code and standard output of `unbroken ARGUMENTS`."""
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout
