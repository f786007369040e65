"""What every way to ask a model has in common."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from diagnosis.llm import Question


class NoAnswer(Exception):
    """There is none; the text says why, for a person."""


class Answer(NamedTuple):
    """What a model said: anything at all, until it is grounded (`diagnosis.llm.ground`)."""

    text: str
    lines: int
    """So many lines of the question it was shown."""
    model: str


class Backend(Protocol):
    async def ask(self, question: Question) -> Answer:
        """Raises NoAnswer, soon after its time is up at the latest."""
