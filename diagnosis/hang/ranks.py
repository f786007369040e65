"""One rank as the hang watch sees it: its newest sample, its stack over time, and what both mean."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from diagnosis import stacks
from diagnosis.signals import Frame, RankSample, RankStack
from diagnosis.stacks import Activity

WORLD: Final = "0"
"""The process group of all ranks has this id on every rank; the ids of others are each rank's own."""
FRESH_S: Final = 2.5
"""A rank without a sample for longer is unknown, not silent: its agent may be gone."""
LEAP_S: Final = 1.2
"""How far ahead of its newest sample the quiet of a rank may be assumed."""
SAME_S: Final = 0.9
STOPPED_S: Final = 1.0
"""In state T or t for less: py-spy holds a process for moments."""
STALE_BEAT_S: Final = 1.5
"""A beacon older than this is not written any more (the GIL is held): its counters say nothing."""
IDLE_SHARE: Final = 0.05
"""Of one core: who uses less is idle. (Threads that move a collective's bytes wake 99 times a second for nothing.)"""
LOOKED_AT_S: Final = 0.35
"""CPU seconds that our own looks may cost a rank: a full flight recorder takes a quarter of a second to tell."""
IDLE_BYTES: Final = 65536
CLOCK_S: Final = 0.01
"""What is closer to the newest step of the step clock is that step."""
CLOCK_BEHIND_S: Final = 0.5
"""Besides two steps: a clock that is further behind all other signs of progress has stopped."""
GAPS_KEPT: Final = 50
SETTLED_GAPS: Final = 5
"""Fewer gaps between signs of progress do not tell a pace."""
SETTLED_STEPS: Final = 10
"""So many steps tell the pace, however few heartbeats they took."""
OUTLIER_FACTOR: Final = 12.0
"""A gap that much longer than usual was a pause, not a step ..."""
RECURS: Final = 3
"""... unless there are so many of them: a step may be many quick collectives and one long computation."""


class WatchedRank:
    """What is known of one live rank in this attempt."""

    __slots__ = (
        "awake_since",
        "dead_since",
        "gaps",
        "moved_at",
        "moved_by_clock",
        "own",
        "same_count",
        "same_from",
        "sample",
        "seen_at",
        "sent",
        "stack",
        "stack_changed",
        "wake_at",
        "woken",
    )

    def __init__(self, sample: RankSample, now: float) -> None:
        self.sample = sample
        self.seen_at = now
        self.moved_at = now - sample.moved_age_s
        self.moved_by_clock = False
        """The newest sign of progress is a step that the step clock alone shows."""
        self.gaps = array("d")
        """Seconds between its own signs of progress, the newest last. A deque of floats takes five times the memory."""
        self.awake_since = float("-inf")
        """When it was last seen to leave state T or t."""
        self.dead_since: float | None = now if sample.state == "Z" else None
        """Since when its first thread is gone, and its end not reported."""
        self.wake_at: float | None = None
        self.woken = 0
        """How often it was continued."""
        self.forget_stack()

    def update(self, now: float, sample: RankSample) -> bool:
        """Take the next sample; True when it shows progress (then `moved_at` says when)."""
        old, elapsed = self.sample, now - self.seen_at
        if self.stopped and sample.state not in "Tt":
            self.awake_since = now
            self.wake_at = None
            self.forget_stack()
        if sample.state != "Z":
            self.dead_since = None
        elif self.dead_since is None:
            self.dead_since = now
        self.sample = sample
        self.seen_at = now
        moved_at = now - sample.moved_age_s
        # A late heartbeat makes an old age look younger, above all one that was sent right after another: only content,
        # or an age that hardly grew, is progress, and that has come since the sample before.
        since = sample.moved_age_s < elapsed + 0.5
        grew_little = sample.moved_age_s < old.moved_age_s + 0.35 * elapsed
        progress = sample.step != old.step or (since and (grew_little or sample.groups != old.groups))
        if not progress or moved_at <= self.moved_at:
            return False
        if self.moved_at >= self.awake_since:
            self.gaps.append(moved_at - self.moved_at)
            del self.gaps[:-GAPS_KEPT]
        self.moved_at = moved_at
        stepped = sample.clock is not None and abs(sample.moved_age_s - sample.clock.age_s) < CLOCK_S
        self.moved_by_clock = stepped and sample.step == old.step and sample.groups == old.groups
        self.forget_stack()
        return True

    def forget_stack(self) -> None:
        self.stack: RankStack | None = None
        self.same_from: tuple[float, RankSample] | None = None
        """Since when the stack is the same, with the sample of that moment."""
        self.same_count = 0
        self.stack_changed = False
        self.sent = False
        """Bytes of it were on their way when one of these stacks was taken."""
        self.own: tuple[Frame, ...] = ()
        """The script's own frames that all stacks of this silence have in common, the outermost first."""

    def note_stack(self, now: float, stack: RankStack) -> None:
        """One stack of it, in the order in which they were taken."""
        before = self.stack
        self.sent = stack.sends or (self.sent and stack.sample > 0)
        if before is not None and stack.frames == before.frames:
            self.same_count += 1
        else:
            self.stack_changed = before is not None
            # Both samples of one collection arrive together: the first of them is a second old.
            self.same_from = (now - (1.0 if stack.sample == 0 else 0.0), self.sample)
            self.same_count = 1
        own = stacks.own_frames(stack)
        self.own = own if before is None else _common(self.own, own)
        self.stack = stack

    @property
    def slow_step_s(self) -> float | None:
        """None of its honest gaps of late was longer; None: too few of them were seen.

        Gaps are seen as often as it is looked at, and leave pauses out; the step clock is exact, and does not. It has
        seen enough after some steps, though all of them came between a few heartbeats.
        """
        clock, known = self.sample.clock, []
        if len(self.gaps) >= SETTLED_GAPS:
            known.append(slowest(self.gaps))
        if clock is not None and clock.slowest_s and self.is_clocked and (known or clock.steps > SETTLED_STEPS):
            known.append(clock.slowest_s)
        return min(known, default=None)

    @property
    def is_clocked(self) -> bool:
        """The step clock counts what it does now. (Steps of a compiled optimizer, or in a CUDA graph, it does not.)"""
        clock = self.sample.clock
        if clock is None or not clock.steps:
            return False
        return clock.age_s - self.sample.moved_age_s <= 2 * clock.slowest_s + CLOCK_BEHIND_S

    def fresh(self, now: float) -> bool:
        return now - self.seen_at <= FRESH_S

    @property
    def stopped(self) -> bool:
        """Stopped or traced, and not only for a moment."""
        return self.sample.state in "Tt" and (self.sample.stopped_s or 0.0) >= STOPPED_S

    def stopped_s(self, now: float) -> float:
        stopped = self.sample.stopped_s
        return 0.0 if stopped is None else stopped + min(max(now - self.seen_at, 0.0), LEAP_S)

    @property
    def activity(self) -> Activity:
        return "unknown" if self.stack is None else stacks.activity(self.stack)

    @property
    def in_collective(self) -> bool:
        """Its stack stands in the call that waits for other ranks."""
        return self.stack is not None and stacks.waits_in_collective(self.stack)

    @property
    def sends_or_receives(self) -> bool:
        """Of the group of all ranks or another; that group has been used, so that no connection is made for it."""
        used = self.sample.groups.get(WORLD, (0, 0))[1] > 0
        return used and self.stack is not None and stacks.in_send_or_receive(self.stack)

    @property
    def waits(self) -> bool:
        """In a collective that does not complete: by its stack, or by its counters (gloo counts no sends)."""
        if self.in_collective:
            return True
        if self.stack is not None and self.activity in ("sleep", "lock"):
            return False
        waiting, beat = self.sample.waiting_s, self.sample.beat_age_s
        return waiting is not None and waiting >= 0.8 and (beat is None or beat < STALE_BEAT_S)

    @property
    def tears_down(self) -> bool:
        return self.stack is not None and stacks.in_teardown(self.stack)

    def settled(self, now: float) -> bool:
        """It has stood in one place for a while, and used no CPU time and moved and sent no bytes there."""
        if self.same_from is None or self.same_count < 2 or self.stack_changed:
            return False
        since, then = self.same_from
        used, seconds = self.sample.cpu_s - then.cpu_s, now - since
        idle = (
            not self.sent
            and used <= LOOKED_AT_S + IDLE_SHARE * seconds
            and self.sample.io_bytes - then.io_bytes <= IDLE_BYTES
        )
        return idle and seconds >= SAME_S


def _common(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """What two stacks have in common from the outside in: a loop over several lines is one place, its caller's."""
    alike = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        alike += 1
    return one[:alike]


def slowest(gaps: Iterable[float], overstated_s: float = 0.0) -> float:
    """The longest of these gaps that was no pause. `overstated_s`: what was subtracted from each."""
    ordered = sorted(gaps)
    usual = ordered[len(ordered) // 2] + overstated_s
    if sum(one > OUTLIER_FACTOR * usual for one in ordered) >= RECURS:
        return ordered[-1]
    return next(one for one in reversed(ordered) if one <= OUTLIER_FACTOR * usual)
