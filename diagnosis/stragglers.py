"""Which rank holds the others up while the job goes on, by how often each rank is seen waiting in a collective.

All ranks wait for the slowest rank at each step, and the slowest waits for none. So it is seen waiting less often than
the others, and the difference is the time that they lose. Each rank is counted by itself: clocks do not matter. Ranks
are compared with each other: a job that is slow as a whole shows no straggler. Only ranks that call the collectives of
one group are compared, because the stages of a pipeline wait for each other by nature. A GPU that runs behind its CPU
always seems to wait: a rank with a late host is found, a rank with a slow GPU is not.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.signals import RankClock, RankSample
from diagnosis.taxonomy import FailureClass

WORLD: Final = "0"
"""The group that all ranks belong to, as torch numbers it."""
WINDOW_S: Final = 60.0
WINDOWS: Final = 4
"""At most this many of the newest windows are judged together, if fewer are not enough to be sure."""
LEAST_LOOKS: Final = 20
LEAST_COLLECTIVES: Final = 8
"""Fewer collectives of a rank in a window: the ranks do not work in step."""
COST: Final = 0.08
"""Share of the time that the others lose."""
HALF: Final = 0.5
"""A rank that waits more than this share of what the others wait is no straggler."""
SURE: Final = 4.5
"""Standard errors between a straggler and the others: among thousands of ranks one is 3 away by chance."""
STARVED: Final = 0.1
"""A slow rank that waits for data by this much more of its time than the others do is slow because of that."""
AGREE: Final = 3
"""This many windows in a row must agree before a straggler is reported, and before it is over."""
TOO_MANY: Final = 3
"""More than one of this many ranks are no stragglers."""
FRESH_S: Final = 2.0
"""A beacon that is older is no longer written."""
SLOWS: Final = {
    FailureClass.GPU_THERMAL_POWER: "is slowed down by heat or power",
    FailureClass.GPU_ECC_UNCORRECTABLE: "has memory errors",
    FailureClass.PCIE_ERROR: "has a bad PCIe link",
    FailureClass.NVLINK_ERROR: "has NVLink errors",
    FailureClass.STRAGGLER_OR_SLOW: "runs below its clocks",
    FailureClass.GPU_DRIVER: "is not the job's alone, or not as it should be",
}
"""What makes a GPU slow while the job goes on."""


class Straggler(NamedTuple):
    """Ranks that the others wait for; none: it is over."""

    ranks: tuple[int, ...]
    cost: float = 0.0
    """Share of each step."""
    since: float = 0.0
    """Unix seconds: the beginning of the first window that showed it."""
    step_s: float = 0.0
    """How long a step takes; 0: no rank has a step clock."""
    starved: float = 0.0
    """Share of its time that the slow rank waits for data, where that is what makes it slow."""


class Price(NamedTuple):
    """What the slow ranks cost: the step without them, and what all others lose."""

    without_s: float
    gpu_hours_a_day: float


def price(step_s: float, cost: float, gpus: int) -> Price:
    """`cost`: the share of each step for which the others wait. Each rank has one GPU."""
    return Price(step_s * (1 - cost), cost * gpus * 24)


class Looks(NamedTuple):
    """Of one rank in one window: how often it was looked at, and how often it was waiting."""

    looks: int = 0
    waiting: int = 0

    @property
    def share(self) -> float:
        return self.waiting / self.looks if self.looks else 0.0


class _Rank:
    __slots__ = ("first", "last", "looks", "waiting")

    def __init__(self, completed: int) -> None:
        self.first = self.last = completed
        self.looks = self.waiting = 0


class StragglerWatch:
    """Counts the samples of one attempt; each costs O(1), and a window O(ranks) at its end."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self.start(0.0)

    def start(self, now: float) -> None:
        """A new attempt."""
        self._ranks: dict[int, _Rank] = {}
        self._clocks: dict[int, RankClock] = {}
        self._began_at: float | None = None
        self._windows: deque[dict[int, Looks]] = deque(maxlen=WINDOWS)
        self._suspects: tuple[int, ...] = ()
        self._agreed = 0
        self._since = now
        self._told: tuple[int, ...] = ()

    def observe(self, now: float, samples: Iterable[RankSample]) -> None:
        """The ranks of one heartbeat."""
        if self._began_at is None:
            self._began_at = now
        for sample in samples:
            counts = sample.groups.get(WORLD)
            if counts is None or sample.exit is not None or sample.phase or sample.state in "TtZX":
                continue
            if sample.beat_age_s is not None and sample.beat_age_s > FRESH_S:
                continue
            enqueued, completed = counts
            rank = self._ranks.get(sample.rank)
            if rank is None:
                rank = self._ranks[sample.rank] = _Rank(completed)
            rank.last = completed
            rank.looks += 1
            rank.waiting += enqueued > completed
            if sample.clock is not None:
                self._clocks[sample.rank] = sample.clock

    def tick(self, now: float) -> Straggler | None:
        """A change: a rank holds the others up, or no longer does."""
        if self._began_at is None or now - self._began_at < self._window_s:
            return None
        began_at, self._began_at = self._began_at, now
        window = {
            number: Looks(rank.looks, rank.waiting)
            for number, rank in self._ranks.items()
            if rank.looks >= LEAST_LOOKS * self._window_s / WINDOW_S and rank.last - rank.first >= LEAST_COLLECTIVES
        }
        whole = len(window) == len(self._ranks) >= 2
        self._ranks = {}
        if not whole:  # ranks come and go, save, or stand still: nothing is known of this time
            self._windows.clear()
            return None
        self._windows.append(window)
        return self._settle(judge(self._windows), began_at)

    def _settle(self, found: tuple[tuple[int, ...], float], began_at: float) -> Straggler | None:
        ranks, cost = found
        if ranks == self._suspects:
            self._agreed += 1
        else:
            self._suspects, self._agreed, self._since = ranks, 1, began_at
        if self._agreed < AGREE or ranks == self._told:
            return None
        self._told = ranks
        step_s, starved = self._by_clocks(ranks)
        return Straggler(ranks, cost, self._since, step_s, starved)

    def _by_clocks(self, slow: Collection[int]) -> tuple[float, float]:
        """The time of a step, and how much of theirs the slow ranks wait for data if the others do not."""
        steps = [clock.step_s for clock in self._clocks.values() if clock.step_s]
        waits = {rank: clock.input_share for rank, clock in self._clocks.items() if clock.input_share is not None}
        theirs = [share for rank, share in waits.items() if rank in slow]
        others = [share for rank, share in waits.items() if rank not in slow]
        step_s = statistics.median(steps) if steps else 0.0
        if not theirs or not others or min(theirs) - statistics.median(others) < STARVED:
            return step_s, 0.0
        return step_s, min(theirs)


def judge(windows: Sequence[Mapping[int, Looks]]) -> tuple[tuple[int, ...], float]:
    """The ranks that the others wait for, and the share of the time that they lose; the newest windows are the last.

    As few windows as make it sure: a straggler of now is not hidden by what was before.
    """
    for count in (1, 2, WINDOWS):
        newest = list(windows)[-count:]
        ranks, cost = _judge(_together(newest))
        if ranks and all(_cost(window, ranks) >= COST / 2 for window in newest):  # at each time, and not in a burst
            return ranks, cost
    return (), 0.0


def _together(windows: Sequence[Mapping[int, Looks]]) -> dict[int, Looks]:
    ranks = set.intersection(*(set(window) for window in windows))
    return {
        rank: Looks(sum(one[rank].looks for one in windows), sum(one[rank].waiting for one in windows))
        for rank in ranks
    }


def _judge(looks: Mapping[int, Looks]) -> tuple[tuple[int, ...], float]:
    ordered = sorted(looks, key=lambda rank: (looks[rank].share, rank))
    upper = [looks[rank] for rank in ordered[len(ordered) // 2 :]]
    usual = sum(one.waiting for one in upper) / max(1, sum(one.looks for one in upper))
    few = [rank for rank in ordered if looks[rank].share < HALF * usual]
    if not few or len(few) > max(1, len(looks) // TOO_MANY):
        return (), 0.0
    rest = _others(looks, few)
    cost = _cost(looks, few)
    if cost < COST or any(_apart(looks[rank], rest) < SURE for rank in few):
        return (), 0.0
    return tuple(sorted(few)), cost


def _cost(looks: Mapping[int, Looks], slow: Collection[int]) -> float:
    """By how much less the slow ranks wait than the others."""
    return _others(looks, slow).share - max(looks[rank].share for rank in slow)


def _others(looks: Mapping[int, Looks], slow: Collection[int]) -> Looks:
    rest = [one for rank, one in looks.items() if rank not in slow]
    return Looks(sum(one.looks for one in rest), sum(one.waiting for one in rest))


def _apart(one: Looks, others: Looks) -> float:
    """Standard errors between its share and that of the others."""
    own = (one.waiting + 1) / (one.looks + 2)  # nobody is sure of a share of nothing
    share = others.share
    error = math.sqrt(own * (1 - own) / one.looks + share * (1 - share) / others.looks)
    return (share - one.share) / error
