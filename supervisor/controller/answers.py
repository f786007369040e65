"""What a controller answers to people and programs: to orders, what they would do, questions, the job's story.

Each answer comes within seconds, and what it says was done, was done.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.blocking import timeout
from supervisor.controller.journal import read_history
from supervisor.errors import CommandNotJournalled
from supervisor.messages import Action, Note, OperatorCommand, OverrideGiven
from supervisor.notes import text_of

if TYPE_CHECKING:
    from supervisor.controller.loop import ControlLoop

log = logging.getLogger("unbroken.controller")

ANSWER_S = 4.0
"""An operator's order is answered within this, done or not (the command line waits 5 s)."""

FIRST_S = 2.5
"""`stop` and `pause` wait so long for a journal of which nobody knows yet that it cannot be written (`STALL_S`)."""
EVEN_SO = ("stop", "pause")
"""Orders that are done while the journal cannot be written: they only ever keep things from being done."""


async def override(loop: ControlLoop, given: OperatorCommand) -> dict[str, object]:
    """Carry out an operator's command.

    Raises ValueError when it is refused, CommandNotJournalled when that is not known yet.
    """
    event = given.event(loop.clock.now())
    if given.dry_run:
        return await _would(loop.job_dir, event)
    if loop.outcome is not None:
        raise ValueError(f"{given.command}: the job has ended already")
    if loop.stall and given.command not in EVEN_SO:
        raise ValueError(
            f"the journal cannot be written ({loop.stall}): until it can be, nothing is done but `stop` and `pause`"
        )
    try:
        async with timeout(ANSWER_S):
            actions = await _decided(loop, event)
    except asyncio.TimeoutError:
        raise CommandNotJournalled(f"the journal has not taken the order within {ANSWER_S:.0f} s") from None
    log.info("override %s %s by %s: %s", given.command, given.argument, given.by, given.reason)
    refused = [text_of(action) for action in actions if isinstance(action, Note) and action.refused]
    if refused:
        raise ValueError("; ".join(refused))
    notes = [action for action in actions if isinstance(action, Note)]
    unknown = any(note.unknown_node for note in notes)
    return {"schema": 1, "ok": True, "notes": [text_of(note) for note in notes], "unknown_node": unknown}


async def _decided(loop: ControlLoop, event: OverrideGiven) -> list[Action]:
    """What was decided, once the journal has the order; where it cannot be written, of some orders before that."""
    if not loop.stall:
        asked = loop.submit(event)
        done, _ = await asyncio.wait({asked}, timeout=FIRST_S)
        if done or event.command not in EVEN_SO or not loop.stall:
            return await asyncio.shield(asked)
    return await asyncio.shield(loop.submit_even_so(event))


async def _would(job_dir: Path, event: OverrideGiven) -> dict[str, object]:
    """From the journal, off the loop: a long one takes its time, and agents do not wait."""
    from supervisor.controller.would import would

    try:
        return await asyncio.get_running_loop().run_in_executor(None, would, job_dir, event)
    except OSError as error:
        raise ValueError(f"the journal cannot be read: {error.strerror or error}") from None


def ask(loop: ControlLoop, incident: str) -> dict[str, object]:
    """Have a model asked about an incident. Raises ValueError when there is no such incident, or no model."""
    incidents = loop.view("incidents")()["incidents"]
    assert isinstance(incidents, list)
    if not any(one["id"] == incident for one in incidents):
        raise ValueError(f"there is no incident {incident}")
    problem = loop.ask_model(incident)
    if problem:
        raise ValueError(problem)
    return {"schema": 1, "ok": True, "incident": incident}


async def timeline(job_dir: Path, since: int) -> dict[str, object]:
    """The job's story after record `since`."""
    from supervisor.controller.report import timeline_rows  # only the few who ask pay for it

    def rows() -> list[dict[str, object]]:
        return [row for row in timeline_rows(read_history(job_dir)) if row["seq"] > since]

    return {"schema": 1, "rows": await asyncio.to_thread(rows)}
