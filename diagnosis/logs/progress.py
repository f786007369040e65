"""How far training came, from the lines of a log: the newest step, the line that shows it, the end of the work."""

from __future__ import annotations

import re
from typing import Final

from diagnosis.logs.steps import StepReader

WORDS: Final = tuple(b"step iter it/s s/it epoch loss train exiting finish complet done wandb exits".split())
"""One of them (in lower case) is in every line that is worth to be fed."""
_FINISHED: Final = re.compile(
    rb"train_runtime|\btraining (?:is |has |was )?(?:now )?(?:successfully )?(?:completed?|finished|done|ended)\b"
    rb"(?! (?:epoch|step|iter|batch|for)\b)"
    rb"|`?trainer\.fit`? stopped: `?max_|\bexiting program (?:after|at)\b|\bfinished training\b|\bdone training\b"
    rb"|\btraining successfully\b|wandb: (?:run summary|synced)|\bprocess \d+ exits successfully",
    re.IGNORECASE,
)
MAX_RANKS: Final = 64


class ProgressReader:
    """Reads the lines of one log; lines may be left out."""

    def __init__(self) -> None:
        self._readers: dict[int | None, StepReader] = {}
        self.line: int | None = None
        """The last line that shows that training goes on."""
        self.finished_line: int | None = None
        """A line that says that the work is complete, and nothing after it shows that it goes on."""

    @staticmethod
    def may_tell(line: bytes) -> bool:
        """Whether it is worth to be fed."""
        low = line[:2000].lower()
        for word in WORDS:  # noqa: SIM110  # any() over a generator costs twice as much
            if word in low:
                return True
        return False

    def feed(self, line: bytes, number: int, rank: int | None = None) -> None:
        """One line, its number and the rank that wrote it, where known."""
        reader = self._readers.get(rank)
        if reader is None:
            if len(self._readers) >= MAX_RANKS:
                return
            reader = self._readers[rank] = StepReader()
        before = reader.step, reader.loss
        reader.feed(line + b"\n")
        if reader.step != before[0] or (reader.loss != before[1] and reader.loss is not None and before[1] is not None):
            self.line, self.finished_line = number, None
        elif self.finished_line is None and _FINISHED.search(line) is not None:
            self.finished_line = number

    @property
    def step(self) -> int | None:
        """The newest step of all ranks."""
        return max((one.step for one in self._readers.values() if one.step is not None), default=None)

    @property
    def last_step(self) -> int | None:
        """The step at which the run would be complete, where the output tells."""
        return max((one.last_step for one in self._readers.values() if one.last_step is not None), default=None)
