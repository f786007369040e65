"""Whether the loss of a running training has gone wrong: a spike that does not pass, or a divergence. Pure.

One `LossWatch` follows one printed loss, in bounded memory. It compares each value with the ones before it, in log
space, so that a factor means the same at every level. A value is bad where it is far above the usual level, measured by
the usual noise. Single bad values are common and harmless. An alarm needs several in a row that do not come back by
themselves, and ends as well when they have settled at a new level.

A loss also rises for honest reasons. After a change of the data it stays at a new level as calmly as before, or falls
from there: that becomes the usual level. A learning rate that rises (a restart of its schedule) explains a higher loss,
where it is printed. A loss that may be negative tells nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

from diagnosis.signals import LossAlarm

WINDOW: Final = 64
"""Values that the usual level and noise are made of."""
RECENT: Final = 32
"""Of these the level."""
WARM_UP: Final = 40
"""Fewer values than this show nothing."""
NOISE: Final = 6.0
"""A bad value is this many times the noise above the usual level,"""
LEAP: Final = 0.35
"""and at least this much above it, in log space: 1.4 times."""
VERY_HIGH: Final = 1.7
"""5.5 times: no change of the data does that."""
FEW: Final = 8
"""So many bad values in a row are an alarm where they are very high,"""
MORE: Final = 12
"""so many where they are restless or rise,"""
MOST: Final = 24
"""so many where next to all that was learnt is lost. Otherwise this is the usual level from now on."""
BACK: Final = 3
"""So many good values in a row end a rise,"""
CALM: Final = 5
"""so many an alarm."""
RESTLESS: Final = 2.5
"""Bad values that scatter so many times as much as usual are restless."""
COMING_BACK: Final = 0.25
"""Of the rise: a loss that has lost so much of it again is left alone."""
LITTLE: Final = 0.2
"""A rise that gives back less than this share of what was learnt is no spike."""
MUCH: Final = 0.5
"""One that gives back more is a divergence,"""
NEXT_TO_ALL: Final = 0.8
"""even a steady one where it is so much,"""
BEGINNING: Final = 1.25
"""and no more than this,"""
DEAD_CALM: Final = 0.4
"""and it scatters less than so many times as much as usual: whatever the batch, the model knows nothing any more."""
RATE_ROSE: Final = 1.3
"""A learning rate that is so many times what it was explains a higher loss."""
BLOCK: Final = 16
"""Values of which the slow course of the loss is made."""
BLOCKS: Final = 32
CLIMB: Final = 1.0
"""So much above its best a loss that climbs slowly has diverged, in log space: 2.7 times."""
USUAL_RANGE: Final = 0.75
"""and above so many of its blocks: not of those at the beginning of the run."""
CLIMBS: Final = 4
"""Blocks in a row that rise."""
FIRST: Final = 8
"""Values at the beginning of a run that tell the level it started from."""
SAME_STEP: Final = 16
"""Values of one step that are taken together (micro-batches, ranks)."""


class LossWatch:
    """Feed it every value; `alarm` is what it says of the newest."""

    def __init__(self) -> None:
        self.alarm: LossAlarm | None = None
        self.count = 0
        """Values so far."""
        self.newest: tuple[int | None, float] | None = None
        """Step and value of the newest one of this attempt, good or not."""
        self._values: deque[tuple[int | None, float]] = deque(maxlen=WINDOW)
        """Step and logarithm of good values."""
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._blocks: deque[tuple[int | None, float]] = deque(maxlen=BLOCKS)
        """First step and median of the newest blocks of good values."""
        self._best: float | None = None
        """The lowest median of a block."""
        self._block: list[tuple[int | None, float]] = []
        self._first: list[float] = []
        self._knows_start = True
        self._run: deque[tuple[int | None, float]] = deque(maxlen=2 * MOST)
        """Since the first bad value."""
        self._bad = self._good = 0
        """Bad values of the run; good ones in a row."""
        self._pending: list[float] = []
        self._pending_step: int | None = None
        self._pending_rate: float | None = None
        self._calm_below = -math.inf
        """A value up to it is not bad, whatever the noise. It holds to the end of the block: more than half of the
        values that make the level stay meanwhile."""
        self._odd = 0
        """Values of which there is no logarithm."""
        self._began_again = False
        self._unplaced = 0
        """Values of a new attempt whose step is not known yet."""

    def feed(self, step: int | None, value: float, rate: float | None = None) -> None:
        """One more value, finite or not; several of one step count once. `rate`: the learning rate beside it."""
        if not math.isfinite(value):
            return  # that is for the count of bad reports (`StepReader.bad_reports`)
        self.newest = step, value
        if self._began_again and step is None and self._unplaced < FIRST:
            self._unplaced += 1  # a counter is believed once it has grown: the first lines of an attempt have no step
            return
        if step is not None and step == self._pending_step and len(self._pending) < SAME_STEP:
            self._pending.append(value)
            return
        if step is None:
            self._take(None, value, rate)
            return
        if self._pending:
            pending = self._pending
            one = pending[0] if len(pending) == 1 else statistics.median(pending)
            self._take(self._pending_step, one, self._pending_rate)
        self._pending, self._pending_step, self._pending_rate = [value], step, rate

    def begin_again(self) -> None:
        """The next value is of a new attempt: it goes on from an earlier step, with the level that it had there."""
        self.alarm = self.newest = None
        self._pending, self._pending_step = [], None
        self._end_run()
        self._began_again, self._unplaced = True, 0

    def _take(self, step: int | None, value: float, rate: float | None) -> None:
        self.count += 1
        if value <= 0.0:
            self._odd += 1
            return
        if self._began_again:
            self._go_back(step)
        x = math.log(value)
        if len(self._first) < FIRST and self._knows_start:
            self._first.append(value)
        if self._is_calm(x):  # next to all values: to find level and noise costs ten times as much
            self._accept(step, x, rate)
            if not self._block:
                self._calm_below = self._lowest() + LEAP
            return
        usual = self._usual()
        if usual is None or self._odd * 20 > self.count:
            self._accept(step, x, rate)
            return
        level, noise = usual
        bad = x - level > max(NOISE * noise, LEAP)
        if self.alarm is not None:
            self._look_for_its_end(step, x, rate, level, noise)
        elif self._run or bad:
            self._rise(step, x, rate, bad)
        else:
            self._accept(step, x, rate)
            self._look_for_a_climb(noise)
            self._calm_below = self._lowest() + LEAP

    def _is_calm(self, x: float) -> bool:
        """At a glance: a value of which nothing can come."""
        if x > self._calm_below or self._run or self.alarm is not None or self._odd * 20 > self.count:
            return False
        ends_a_block = len(self._block) == BLOCK - 1
        return not ends_a_block or self._best is None or max(x, *(one for _, one in self._block)) < self._best + CLIMB

    def _lowest(self) -> float:
        return min(one for _, one in list(self._values)[-RECENT:])

    def _go_back(self, step: int | None) -> None:
        """Forget what came after `step`: it is made again."""
        self._began_again = False
        kept = [(at, x) for at, x in self._values if step is not None and at is not None and at < step]
        if step is None or not kept:
            self._values.clear()
            self._knows_start = step is not None and step <= 1
            self._first = []
        else:
            self._values = deque(kept, maxlen=WINDOW)
        self._rates.clear()
        self._blocks.clear()
        self._block, self._best = [], None

    # ----- what is usual -----

    def _usual(self) -> tuple[float, float] | None:
        """Level and noise, both in log space; None while too little is known."""
        if len(self._values) < WARM_UP:
            return None
        values = [x for _, x in self._values]
        steps = [abs(after - before) for before, after in itertools.pairwise(values)]
        recent = values[-RECENT:]
        level = statistics.median(recent)
        spread = statistics.median(abs(x - level) for x in recent)
        return level, max(statistics.median(steps), 1.4826 * spread)

    def _accept(self, step: int | None, x: float, rate: float | None) -> None:
        self._values.append((step, x))
        if rate is not None:
            self._rates.append(rate)
        self._block.append((step, x))
        if len(self._block) < BLOCK:
            return
        median = statistics.median(one for _, one in self._block)
        self._blocks.append((self._block[0][0], median))
        self._best = median if self._best is None else min(self._best, median)
        self._block = []

    def _lost_share(self, level: float, before: float) -> float | None:
        """How much of what was learnt a rise from `before` to `level` gives back; None: the start was not seen."""
        if not self._knows_start or len(self._first) < FIRST:
            return None
        first = statistics.median(self._first)
        learnt = first - math.exp(before)
        return (math.exp(level) - math.exp(before)) / learnt if learnt > 0 else math.inf

    # ----- a rise -----

    def _rise(self, step: int | None, x: float, rate: float | None, bad: bool) -> None:
        """A bad value, or one after it."""
        self._run.append((step, x))
        self._bad += bad
        self._good = 0 if bad else self._good + 1
        if self._good >= BACK:
            good = list(self._run)[-BACK:]
            self._end_run()
            for at, one in good:
                self._accept(at, one, rate)
            return
        usual = self._usual()
        assert usual is not None
        if rate is not None and self._rates and rate > RATE_ROSE * min(self._rates):
            self._adopt(rate)
            return
        kind = self._judge(*usual)
        if kind is not None:
            self._raise(kind, usual[0])
        elif self._bad >= MOST:
            self._adopt(rate)

    def _judge(self, level: float, noise: float) -> Literal["spike", "divergence"] | None:
        """What the values of the run are by now; None: nothing yet."""
        values = [x for _, x in self._run]
        if self._bad < FEW or _comes_back(values, level):
            return None
        height = statistics.median(values) - level
        share = self._lost_share(level + height, level)
        if share is not None and share < LITTLE:
            return None
        if height > VERY_HIGH:
            return "spike"
        if self._bad < MORE:
            return None
        if _rises(values, noise):
            return "divergence" if share is not None and share > MUCH else "spike"
        if _scatter(values) > RESTLESS * max(noise, 0.01):
            return "spike"
        back = share is not None and NEXT_TO_ALL < share < BEGINNING
        collapsed = back and _scatter(values) < DEAD_CALM * noise
        return "divergence" if self._bad >= MOST and collapsed else None

    def _adopt(self, rate: float | None) -> None:
        """What looked bad is the usual level from now on."""
        run = list(self._run)
        self._end_run()
        self._values.clear()
        self._rates.clear()
        self._blocks.clear()
        self._block, self._best = [], None
        for step, x in run:
            self._accept(step, x, rate)

    def _end_run(self) -> None:
        self._calm_below = -math.inf
        self._run.clear()
        self._bad = self._good = 0

    def _look_for_a_climb(self, noise: float) -> None:
        """Divergence without a leap: the level rises and rises."""
        if self._block or len(self._blocks) <= CLIMBS or self._best is None:
            return
        medians = [median for _, median in self._blocks]
        newest = medians[-CLIMBS - 1 :]
        calm = medians[: max(CLIMBS, medians.index(min(medians)) + 1)]
        least = max(NOISE * noise, NOISE * _scatter(calm), CLIMB)
        rises = all(after > before + noise / 2 for before, after in itertools.pairwise(newest))
        earlier = sorted(medians[: -CLIMBS - 1])
        rises = rises and (not earlier or newest[-1] > earlier[int(USUAL_RANGE * (len(earlier) - 1))] + noise)
        share = self._lost_share(newest[-1], self._best)
        if not rises or newest[-1] - self._best < least or (share is not None and share < MUCH / 2):
            return
        if self._rates and self._rates[-1] > RATE_ROSE * self._rates[0]:
            return
        level, start = self._best, self._blocks[0][0]
        for (_, before), (step, _) in itertools.pairwise(self._blocks):
            start = step if before <= level + noise else start
        self._run.extend(self._values)
        self._raise("divergence", level, start)

    # ----- an alarm -----

    def _raise(self, kind: Literal["spike", "divergence"], level: float, start: int | None = None) -> None:
        steps = [step for step, _ in (*self._values, *self._run) if step is not None]
        gaps = [after - before for before, after in itertools.pairwise(steps) if after > before]
        first = self._run[0][0] if start is None else start
        interval = int(statistics.median(gaps)) if gaps else 1
        good = self._values[-1][0] if self._values else None
        if first is not None and good is not None:
            interval = max(interval, first - good)  # of much output some values are not read
        self.alarm = LossAlarm(
            kind=kind,
            step=first,
            interval=interval,
            usual=round(math.exp(level), 4),
            level=round(math.exp(statistics.median(x for _, x in list(self._run)[-RECENT:])), 4),
        )
        self._good = 0
        self._run.clear()

    def _look_for_its_end(self, step: int | None, x: float, rate: float | None, level: float, noise: float) -> None:
        """The usual level is the one from before the alarm."""
        assert self.alarm is not None
        level = min(level, math.log(self.alarm.usual)) if self.alarm.usual > 0 else level
        self._good = self._good + 1 if x - level < 0.5 * max(NOISE * noise, LEAP) else 0
        if self._good >= CALM:
            self.alarm = None
            self._end_run()
            self._accept(step, x, rate)
            return
        self._run.append((step, x))
        values = [one for _, one in self._run]
        calm = len(values) == self._run.maxlen and _scatter(values) < RESTLESS * max(noise, 0.01)
        if calm and not _rises(values, noise):
            self.alarm = None
            self._adopt(rate)


def _comes_back(values: Sequence[float], level: float) -> bool:
    """Whether a good part of the rise is gone again."""
    third = max(2, len(values) // 3)
    top, now = statistics.median(values[:third]), statistics.median(values[-third:])
    return top - now > COMING_BACK * (top - level)


def _scatter(values: Sequence[float]) -> float:
    return statistics.median(abs(after - before) for before, after in itertools.pairwise(values))


def _rises(values: Sequence[float], noise: float) -> bool:
    third = len(values) // 3
    parts = [statistics.median(part) for part in (values[:third], values[third : 2 * third], values[2 * third :])]
    return parts[0] < parts[1] < parts[2] and parts[2] - parts[0] > max(3 * noise, LEAP / 2)
