"""The controller's way to the ledger of all jobs: reads its folder when it changes, and writes what the job adds.

The folder may hang with its file system: every look has a deadline, on a thread of its own, and nothing waits for one
but the start of the controller, which wants to know of cordons before it uses nodes. A record that cannot be written is
tried again; what the ledger said last holds meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from recovery.ledger import NODES_IN_RECORD, NodeCordoned, NodeRecord, NodesSeen, merge
from recovery.ledger_folder import LedgerFolder, LedgerRead
from supervisor import messages as m
from supervisor.blocking import BlockingCalls, timeout

log = logging.getLogger("unbroken.controller")

LOOK_S: Final = 5.0
"""Between two looks whether a file has changed."""
AFRESH_S: Final = 600.0
"""Scores and ends of probation change without a file that does."""
FIRST_S: Final = 3.0
"""So long the controller's start waits for the ledger."""
DEADLINE_S: Final = 20.0
LAST_S: Final = 3.0
"""So long the controller's end waits for what is still to be written."""
LAST_LOOK_S: Final = 0.05
COMPACT_S: Final = 12 * 3600.0
COMPACT_FIRST_S: Final = (60.0, 600.0)
"""After the controller's start, somewhere between: short jobs leave files, too, and many may start at once."""
ENTRIES_KEPT: Final = 200_000
"""In the controller's memory, which takes about 1 KB for each."""
NODES_REPORTED: Final = 1000
REASON_CHARS: Final = 200
WAITING_LIMIT: Final = 1000


def ledger_nodes(records: Iterable[NodeRecord]) -> tuple[m.LedgerNode, ...]:
    """What the job is told: of nodes that are like any other, nothing."""
    worth = [one for one in records if one.cordons or one.probation_until is not None or one.score.points]
    worth.sort(key=lambda one: (not one.cordons, one.probation_until is None, -one.score.points, one.node))
    return tuple(sorted(map(_reported, worth[:NODES_REPORTED]), key=lambda one: one.node))


def _reported(record: NodeRecord) -> m.LedgerNode:
    found = m.LedgerNode(
        node=record.node,
        probation_until=record.probation_until,
        retest_due=record.retest_due,
        points=record.score.points,
        lemon=record.score.lemon,
        why=tuple(text[:REASON_CHARS] for text in record.score.why),
    )
    if not record.cordons:
        return found
    # One that a person set comes before policy's, and one without an end before the others.
    held = min(record.cordons, key=lambda one: (one.by == "policy", _until(one.what), one.at, one.id))
    assert isinstance(held.what, NodeCordoned)
    last = max(_until(one.what) for one in record.cordons)
    return msgspec.structs.replace(
        found,
        cordon=(held.what.reason or "no reason was given")[:REASON_CHARS],
        gpu=held.what.gpu,
        by=held.by or "somebody",
        failure_class=held.what.failure_class,
        cordoned_at=held.at,
        until=None if last == float("inf") else last,
    )


def _until(what: object) -> float:
    return what.until if isinstance(what, NodeCordoned) and what.until is not None else float("inf")


class LedgerWatch:
    """`names`: of the job's nodes, as the ledger calls them."""

    def __init__(
        self,
        folder: LedgerFolder,
        post: Callable[[m.AnyEvent], None],
        now: Callable[[], float],
        names: Callable[[], Iterable[str]],
    ) -> None:
        self._folder, self._post, self._now, self._names = folder, post, now, names
        self._calls = BlockingCalls("ledger")
        self._signature: object = None
        self._read_at = float("-inf")
        self._compact_at = time.monotonic() + random.uniform(*COMPACT_FIRST_S)
        self._reported: tuple[object, ...] | None = None
        self._noted: frozenset[str] = frozenset()
        """Nodes of the job that were written down."""
        self._waiting: list[m.LedgerWrite] = []
        self._wake = asyncio.Event()
        self.records: dict[str, NodeRecord] = {}
        """As read last."""
        self.readable = True
        self._unwritten = ""
        """Why the newest write failed."""
        self._known: tuple[tuple[m.LedgerNode, ...], int, str] | None = None
        """What was told last, without that."""

    def write(self, action: m.LedgerWrite) -> None:
        if all(one.number != action.number for one in self._waiting):
            self._waiting = [*self._waiting, action][-WAITING_LIMIT:]
        self._wake.set()

    async def first_look(self) -> None:
        """Before anybody can join: cordoned nodes are known from the start, if the folder answers soon."""
        try:
            await self._look(FIRST_S)
        except Exception as error:  # a defect here must not cost the job its controller
            log.exception("the ledger")
            self._tell((), 0, f"{self._folder.folder}: {error!r}"[:REASON_CHARS])

    async def run(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._write_waiting(DEADLINE_S)
                await self._look(DEADLINE_S)
            except Exception:  # a defect here must not cost the job its controller
                log.exception("the ledger")
                await asyncio.sleep(AFRESH_S)

    async def stop(self) -> None:
        """What is still to be written is tried once more, as soon as a look that is under way has ended."""
        end = time.monotonic() + LAST_S
        while self._waiting and self._calls.busy and time.monotonic() < end:
            await asyncio.sleep(LAST_LOOK_S)
        await self._write_waiting(max(LAST_LOOK_S, end - time.monotonic()))

    # ----- reading -----

    async def _look(self, deadline_s: float) -> None:
        now = self._now()
        try:
            found = await self._calls.run(lambda: self._read(now), deadline_s)
        except asyncio.TimeoutError:
            self._tell((), 0, f"{self._folder.folder} does not answer")
            return
        except OSError as error:
            self._tell((), 0, f"{self._folder.folder}: {error.strerror or error}")
            return
        if found is None:
            return
        self._signature, self._read_at, read, self.records = found
        for problem in read.problems:
            log.warning("the ledger: %s", problem)
        self._tell(ledger_nodes(self.records.values()), len(self.records), "")

    def _read(self, now: float) -> tuple[object, float, LedgerRead, dict[str, NodeRecord]] | None:
        """In a thread, which changes nothing of ours but the folder. None: no file has changed."""
        signature, at = self._folder.signature(), time.monotonic()
        if signature == self._signature and at < self._read_at + AFRESH_S:
            return None
        if at > self._compact_at:
            self._compact_at = at + COMPACT_S
            self._folder.compact(now)
            signature = self._folder.signature()
        read = self._folder.read(now)
        return signature, at, read, merge(read.entries, now)

    def _tell(self, nodes: tuple[m.LedgerNode, ...], fleet: int, problem: str) -> None:
        self.readable = not problem
        if problem:
            self._read_at = float("-inf")  # once it answers, what was said of it is taken back
        self._known = nodes, fleet, problem
        report = (nodes, problem, self._unwritten) if not problem else (problem,)
        if report == self._reported:
            return
        self._reported = report
        seen = m.LedgerSeen(at=self._now(), nodes=nodes, fleet=fleet, problem=problem, unwritten=self._unwritten)
        self._post(seen)

    # ----- writing -----

    def _tell_unwritten(self, why: str) -> None:
        if why != self._unwritten:
            self._unwritten = why
            log.warning("the ledger: %s", f"cannot be written: {why}" if why else "can be written again")
            if self._known is not None:
                self._tell(*self._known)

    async def _write_waiting(self, deadline_s: float) -> None:
        waiting, names = self._waiting, frozenset(self._names())
        if not waiting and names <= self._noted:
            return
        now = self._now()
        fresh = sorted(names - self._noted)

        def append() -> None:
            entries = [self._folder.entry(one.what, one.at, by=one.by, job=one.job, name=one.id) for one in waiting]
            for first in range(0, len(fresh), NODES_IN_RECORD):
                seen = NodesSeen(nodes=tuple(fresh[first : first + NODES_IN_RECORD]))
                entries.append(self._folder.entry(seen, now, by="policy"))
            self._folder.append(entries, now)

        try:
            await self._calls.run(append, deadline_s)
        except asyncio.TimeoutError:
            return  # the next look says so
        except OSError as error:
            self._tell_unwritten(f"{self._folder.folder}: {error.strerror or error}")
            return
        self._tell_unwritten("")
        self._noted |= names
        self._waiting = [one for one in self._waiting if one not in waiting]
        for one in waiting:
            self._post(m.LedgerWritten(at=self._now(), number=one.number))
