"""Which rank's data loader is worth a look, and what such a look has found, in words. Pure.

The look itself is `input_sampling`, which is loaded when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diagnosis.input_waits import MUCH
from diagnosis.signals import Frozen, RankSample

LONG_S: Final = 300.0
"""A rank that waits much for its data, and for so long, is looked at by itself, once in an attempt."""
WAITS_EVERY_S: Final = 10.0


class SlowStage(Frozen, frozen=True, kw_only=True):
    stage: str
    what: str
    share: float


class RankInput(Frozen, frozen=True, kw_only=True):
    """What came of one rank."""

    rank: int
    input_share: float | None = None
    """Of its time that it waits for data; None: not known."""
    workers: int = 0
    """Of its data loader; 0: the script loads in its own process."""
    samples: int = 0
    idle: float = 0.0
    """Share of the samples in which a worker had nothing to do."""
    stages: tuple[SlowStage, ...] = ()
    advice: tuple[str, ...] = ()
    problem: str = ""

    @property
    def text(self) -> str:
        """`rank 3 waits for data 38 % of the time; 71 % of its 4 loader workers' time is decoding images (PIL)`."""
        waits = (
            f"rank {self.rank} waits for data {self.input_share:.0%} of the time; "
            if self.input_share is not None
            else ""
        )
        whose = f"its {self.workers} loader workers' time" if self.workers else "its loading time"
        if not self.stages:
            return f"{waits}{self.problem or 'its loader has nothing to do'}"
        first, *more = self.stages[:3]
        others = "".join(f", {one.share:.0%} {one.what}" for one in more)
        return f"{waits}{first.share:.0%} of {whose} is {first.what}{others}"


class LoaderWatch:
    """Which rank has waited much for its data, and long. Pure."""

    def __init__(self) -> None:
        self._attempt = 0
        self._since: dict[int, float] = {}
        self._told = False
        self._next = 0.0

    def is_due(self, now: float, attempt: int) -> bool:
        """Cheap: the agent asks with each look."""
        if attempt != self._attempt:
            self._attempt, self._since, self._told = attempt, {}, False
        return not self._told and now >= self._next

    def look(self, now: float, samples: Sequence[RankSample]) -> int | None:
        """A rank to look at, once in an attempt."""
        self._next = now + WAITS_EVERY_S
        waiting = {
            one.rank: one.clock.input_share
            for one in samples
            if one.exit is None and one.clock is not None and (one.clock.input_share or 0.0) >= MUCH
        }
        self._since = {rank: self._since.get(rank, now) for rank in waiting}
        long = [rank for rank, since in self._since.items() if now - since >= LONG_S]
        if not long:
            return None
        self._told = True
        return max(long, key=lambda rank: (waiting[rank] or 0.0, -rank))
