"""Schedulers: who gave the job its nodes, and can take one out of service or start the job again.

A `Scheduler` acts on orders of the job and decides nothing. Every call ends within its deadline, also when the
scheduler's daemons hang. Plug-ins: entry-point group `unbroken.schedulers`.
"""

from __future__ import annotations

from typing import Protocol

from diagnosis.signals import Word
from recovery.actions import OrderOutcome

PREFIX = "unbroken:"
"""Every reason that we write begins with it; one that does not is somebody else's, and is left alone."""


class Answer(Word, frozen=True, kw_only=True):
    outcome: OrderOutcome
    text: str = ""
    """In words, for the operator."""


class Scheduler(Protocol):
    name: str

    async def drain(self, node: str, reason: str) -> Answer:
        """No new work for `node`; running jobs go on. Never over a foreign reason, which is read again just before."""

    async def undrain(self, node: str) -> Answer:
        """Back into service, if the reason that stands is ours."""

    async def requeue(self, job: str, exclude: tuple[str, ...]) -> Answer:
        """Start the job again at once, on other nodes than `exclude`."""

    async def headless(self, job: str) -> bool:
        """Whether the scheduler has lost the node of the job's first process, with our controller, and lets the others
        run on. False when it cannot tell."""
