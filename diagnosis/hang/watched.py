"""One rank as the hang watch sees it: its newest sample, its stack over time, and what both mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diagnosis.hang.pace import Phase
from diagnosis.signals import Frame, RankSample, RankStack
from diagnosis.stacks import doing as stack_reading
from diagnosis.stacks.doing import Activity

FRESH_S: Final = 2.5
"""A rank without a sample for longer is unknown, not silent: its agent may be gone."""
LEAP_S: Final = 1.2
"""How far ahead of its newest sample the quiet of a rank may be assumed."""
HOLD_S: Final = 2.6
"""From suspected to confirmed at least: two stacks a second apart, and a slow step may still end."""
SAME_S: Final = 0.9
STOPPED_S: Final = 1.0
"""In state T or t for less: py-spy holds a process for moments."""
STALE_BEAT_S: Final = 1.5
"""A beacon older than this is not written any more (the GIL is held): its counters say nothing."""
BUSY_S: Final = 15.0
BUSY_SAMPLES: Final = 6
"""How long, and in how many samples, a rank that burns CPU must never leave one line: honest work looks like a busy
loop for a moment, but not for that long."""
LOCK_S: Final = 30.0
HINT_ONLY_S: Final = 180.0
"""How long a line of output ('saving checkpoint ...') excuses a rank whose stack says otherwise."""
MOVED_BYTES: Final = 65536

EXCUSED: Final[dict[Activity, Phase]] = {
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "data": "data",
    "compile": "first",
}
"""Activities that may honestly last, and the phase whose limit holds for them."""


class WatchedRank:
    """What is known of one live rank in this attempt."""

    __slots__ = (
        "awake_since",
        "moved_at",
        "same_count",
        "same_from",
        "sample",
        "seen_at",
        "stack",
        "stack_changed",
        "wake_at",
        "woken",
    )

    def __init__(self, sample: RankSample, now: float) -> None:
        self.sample = sample
        self.seen_at = now
        self.moved_at = now - sample.moved_age_s
        self.awake_since = float("-inf")
        """When it was last seen to leave state T or t."""
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
        self.moved_at = moved_at
        self.forget_stack()
        return True

    def forget_stack(self) -> None:
        self.stack: RankStack | None = None
        self.same_from: tuple[float, RankSample] | None = None
        """Since when the stack is the same, with the sample of that moment."""
        self.same_count = 0
        self.stack_changed = False

    def note_stack(self, now: float, stack: RankStack) -> None:
        """One stack of it, in the order in which they were taken."""
        frames: tuple[Frame, ...] = () if self.stack is None else self.stack.frames
        if stack.frames == frames:
            self.same_count += 1
        else:
            self.stack_changed = self.stack is not None
            # Both samples of one collection arrive together: the first of them is a second old.
            self.same_from = (now - (1.0 if stack.sample == 0 else 0.0), self.sample)
            self.same_count = 1
        self.stack = stack

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
        return "unknown" if self.stack is None else stack_reading.activity(self.stack)

    @property
    def waits(self) -> bool:
        """In a collective that does not complete: by its counters, or by its stack (gloo counts no sends)."""
        doing = self.activity
        if doing in ("collective", "sleep"):
            return doing == "collective"
        waiting, beat = self.sample.waiting_s, self.sample.beat_age_s
        return waiting is not None and waiting >= 0.8 and (beat is None or beat < STALE_BEAT_S)

    @property
    def tears_down(self) -> bool:
        """In the destruction of the process group, not merely in some handler at exit (which may upload a log)."""
        return self.stack is not None and any(
            frame.function.rsplit(".", 1)[-1] in ("destroy_process_group", "_shutdown_backend")
            for frame in self.stack.frames
        )

    @property
    def at_end(self) -> bool:
        """Where scripts are after their last step: teardown, or a barrier."""
        return self.stack is not None and (self.activity == "teardown" or stack_reading.in_barrier(self.stack))

    def pause_phase(self) -> Phase | None:
        """The phase that excuses its silence, if one does."""
        if self.sample.phase in ("checkpoint", "evaluation"):
            return self.sample.phase
        return EXCUSED.get(self.activity)

    def is_stuck(self, now: float) -> bool:
        """Others wait for it, and it does nothing that may honestly last."""
        if not self.fresh(now) or self.stack is None or self.same_from is None or self.same_count < 2:
            return False
        doing = self.activity
        since, then = self.same_from
        if doing in EXCUSED or self.sample.state == "D" or now - self.awake_since < HOLD_S:
            return False
        if self.sample.phase in ("checkpoint", "evaluation") and now - self.moved_at < HINT_ONLY_S:
            return False
        if self.sample.io_bytes - then.io_bytes > MOVED_BYTES:
            return False
        same_s = now - since
        if self._is_busy(doing, same_s, then):
            return same_s >= BUSY_S and self.same_count >= BUSY_SAMPLES and not self.stack_changed
        return same_s >= (LOCK_S if doing == "lock" else SAME_S)

    @property
    def moves_bytes(self) -> bool:
        """It reads or writes in earnest while its stack stays the same."""
        return self.same_from is not None and self.sample.io_bytes - self.same_from[1].io_bytes > 100 * MOVED_BYTES

    def _is_busy(self, doing: Activity, same_s: float, then: RankSample) -> bool:
        used = self.sample.cpu_s - then.cpu_s
        return used > 0.25 * max(same_s, 1.0) or (doing == "compute" and self.sample.state == "R")


def names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2, 4, 5, 6 and 2 others`."""
    known = sorted(ranks)
    shown = ", ".join(str(rank) for rank in known[:6])
    more = f" and {len(known) - 6} others" if len(known) > 6 else ""
    return f"rank{'s' if len(known) != 1 else ''} {shown}{more}"
