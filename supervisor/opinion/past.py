"""Earlier incidents that are like the one that a model is asked about, from the store of past incidents.

The store is shared: what is in it was written by others, and is as hostile as a log. It is cleaned and cut, and shown
as data. Where it is empty, hangs, or cannot be read, the model is asked without it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from diagnosis.llm import SHOWN_PAST, ShownEvidence, ShownPast
from diagnosis.signals import clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass
from recovery.incident_memory import ClosedIncident, age, done, normalised
from supervisor.blocking import BlockingCalls

log = logging.getLogger("unbroken.opinion")

DEADLINE_S: Final = 10.0
LOOKED_AT: Final = 20
LEAST_SHARE: Final = 0.5
"""Of the words of its most telling line, so many stand in the evidence, too."""
LEAST_WORDS: Final = 3
WORD_CHARS: Final = 3
LINE_CHARS: Final = 200
NOTE_CHARS: Final = 150
NAME_CHARS: Final = 60
_KNOWN: Final = {each.value: each for each in FailureClass}


class PastIncidents:
    """Those in `folder`; None: none are shown."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._calls = BlockingCalls("past incidents")

    async def like(self, seen: ShownEvidence, opened_at: float) -> tuple[ShownPast, ...]:
        """Those opened before `opened_at` whose words are like those of this evidence, an operator's word first."""
        if self._folder is None:
            return ()
        folder, text = self._folder, seen.said
        try:
            return await self._calls.run(lambda: _like(folder, text, opened_at), DEADLINE_S)
        except asyncio.TimeoutError:
            log.warning("past incidents are not shown: %s does not answer", folder)
        except (OSError, ImportError) as error:
            log.warning("past incidents are not shown: %s", error)
        return ()


def _like(folder: Path, text: str, opened_at: float) -> tuple[ShownPast, ...]:
    """In a thread. Raises OSError, and ImportError where Python has no SQLite."""
    from recovery.incident_store import IncidentStore, terms

    words = set(terms(text))
    found = [one.incident for one in IncidentStore(folder).similar(text, LOOKED_AT, before=opened_at)]
    alike = [one for one in found if _says_something(one) and _is_like(set(terms(one.evidence[0])), words)]
    alike.sort(key=lambda one: not one.corrections)
    told: dict[tuple[str, str], ClosedIncident] = {}
    for one in alike:
        told.setdefault((one.truth, normalised(one.evidence[0])), one)
    return tuple(shown(one, opened_at) for one in list(told.values())[:SHOWN_PAST])


def _says_something(one: ClosedIncident) -> bool:
    """Its class is a cause that was found, or an operator's word."""
    known = _KNOWN.get(one.truth)
    if known is None or not one.evidence:
        return False
    return bool(one.corrections) or TAXONOMY[known].kind in ("cause", "symptom")


def _is_like(told: set[str], words: set[str]) -> bool:
    telling = {word for word in told if len(word) >= WORD_CHARS}
    both = telling & words
    return len(both) >= LEAST_WORDS and len(both) >= LEAST_SHARE * len(telling)


def shown(one: ClosedIncident, now: float) -> ShownPast:
    """What is told of an earlier incident: to the model without the job's name."""
    when = f"{age(now - one.opened_at)} ago"
    last = one.corrections[-1] if one.corrections else None
    who = "an operator said so" if last is not None else "our rules said so; nobody has confirmed it"
    note = f"; note: {clean_line(last.note, NOTE_CHARS)}" if last is not None and last.note else ""
    then = f"; then: {clean_line(done(one), NOTE_CHARS)}" if done(one) else ""
    text = f"{when}: {one.truth} ({who}){note}{then}; it said: {clean_line(one.evidence[0], LINE_CHARS)}"
    by = f" (as {clean_line(last.by, NAME_CHARS) or 'an operator'} said)" if last is not None else ""
    job = clean_line(one.job, NAME_CHARS)
    return ShownPast(text=text, named=f"{job} {clean_line(one.incident, NAME_CHARS)}, {when}, {one.truth}{by}{note}")
