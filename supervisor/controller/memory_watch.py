"""The controller's way to the store of past incidents: writes those that are closed, and asks it about new ones.

It looks at the job's records beside the loop, and nothing waits for it: what the store says of an incident comes back
as an event. The folder may hang, and the file may be locked or damaged: that is told once, tried again later, and
changes nothing else. What an earlier controller did not write is written by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from recovery.incident_memory import ClosedIncident, Recurrence
from recovery.incident_store import IncidentStore
from supervisor import messages as m
from supervisor.blocking import BlockingCalls

if TYPE_CHECKING:
    from supervisor.job.incident_log import IncidentRecord
    from supervisor.job.job import Job

log = logging.getLogger("unbroken.controller")

LOOK_S: Final = 0.5
DEADLINE_S: Final = 15.0
LAST_S: Final = 3.0
"""So long the controller's end waits for what is still to be written."""
LAST_LOOK_S: Final = 0.05
AGAIN_S: Final = 60.0
"""After a failure."""
AT_ONCE: Final = 20
"""Incidents in one transaction: it is to be short."""
REASON_CHARS: Final = 300

_Known = tuple[float | None, int]
"""When an incident was closed, and how often it was corrected: then it is written again."""


class MemoryWatch:
    def __init__(
        self, store: IncidentStore, job: Job, post: Callable[[m.AnyEvent], None], now: Callable[[], float]
    ) -> None:
        self._store, self._job, self._post, self._now = store, job, post, now
        self._calls = BlockingCalls("incidents")
        self._written: dict[str, _Known] = {}
        self._asked = {one.id: _question(one) for one in job.incidents.log.records if one.closed_at is not None}
        """The verdicts that the store was asked about."""
        self._problem = ""
        self._again_at = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() < self._again_at:
                continue
            try:
                await self._look(DEADLINE_S)
            except Exception:  # a defect here must not cost the job its controller
                log.exception("the memory of incidents")
                self._again_at = time.monotonic() + AGAIN_S

    async def stop(self) -> None:
        """What is still to be written is tried once more, as soon as a call that is under way has ended."""
        end = time.monotonic() + LAST_S
        while self._calls.busy and time.monotonic() < end:
            await asyncio.sleep(LAST_LOOK_S)
        try:
            while self._unwritten() and time.monotonic() < end and not self._problem:
                await self._look(max(LAST_LOOK_S, end - time.monotonic()))
        except Exception:
            log.exception("the memory of incidents")

    def _unwritten(self) -> list[IncidentRecord]:
        records = self._job.incidents.log.records
        self._written = {one.id: self._written[one.id] for one in records if one.id in self._written}
        closed = (one for one in records if one.closed_at is not None)
        return [one for one in closed if self._written.get(one.id) != _known(one)][:AT_ONCE]

    async def _look(self, deadline_s: float) -> None:
        """What is new is asked about, then what is closed is written: at most one call of each."""
        memory, records = self._job.memory, self._job.incidents.log.records
        self._asked = {one.id: self._asked[one.id] for one in records if one.id in self._asked}
        new = [one for one in records if one.verdict is not None and self._asked.get(one.id) != _question(one)][
            :AT_ONCE
        ]
        closed = self._unwritten()
        if not new and not closed:
            return
        asked = [(one.id, _question(one), memory.closed(one)) for one in new]
        known = [(one.id, _known(one), memory.closed(one)) for one in closed]
        now = self._now()
        try:
            found = await self._calls.run(
                lambda: self._exchange([one for *_, one in asked], [one for *_, one in known], now), deadline_s
            )
        except asyncio.TimeoutError:
            self._tell(f"{self._store.path} does not answer")
            return
        except OSError as error:
            self._tell(f"{self._store.path}: {error.strerror or error}"[:REASON_CHARS])
            return
        self._tell("")
        self._asked.update((name, question) for name, question, _ in asked)
        self._written.update((name, state) for name, state, _ in known)
        for (name, *_), recurrences in zip(asked, found, strict=True):
            record = self._job.incidents.log.get(name)
            if record is not None and record.recurrences != recurrences:
                self._post(m.IncidentRecurred(at=self._now(), incident=name, recurrences=recurrences))

    def _exchange(
        self, asked: Sequence[ClosedIncident], closed: Sequence[ClosedIncident], now: float
    ) -> list[tuple[Recurrence, ...]]:
        """In a thread, which changes nothing of ours but the store."""
        found = [self._store.recurrences(one) for one in asked]
        if closed:
            self._store.write(closed, now)
        return found

    def _tell(self, problem: str) -> None:
        self._again_at = time.monotonic() + AGAIN_S if problem else 0.0
        if problem == self._problem:
            return
        log.warning("the memory of incidents: %s", problem or "it can be used again")
        if not problem or not self._problem:  # another word for it is no news
            self._post(m.IncidentMemorySeen(at=self._now(), problem=problem))
        self._problem = problem


def _known(record: IncidentRecord) -> _Known:
    return record.closed_at, len(record.corrections)


def _question(record: IncidentRecord) -> object:
    verdict = record.verdict
    return verdict and (verdict.failure_class, verdict.culprits, verdict.evidence[:1])
