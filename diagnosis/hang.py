"""When is silence a hang? Two stages: suspected (evidence is collected, nothing else) and confirmed.

Suspected: no progress of any rank for longer than five times the slowest recent gap, with a floor of 2 s, or a rank
in state T. Confirmed: a rank stays stopped although it was continued; or peers wait in a collective that a rank has
not entered while its stack stays the same; or all wait; or the limit of the phase ran out. `HangWatch` sees time only
in its arguments. A sample costs O(1); a tick is O(1) while anything moves and O(ranks) when all is quiet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Literal

from diagnosis import stacks as stack_reading
from diagnosis.blame import mismatch
from diagnosis.incident import HangReport
from diagnosis.signals import Frame, RankFlight, RankSample, RankStack, Word
from diagnosis.stacks import Activity

SUSPECT_FLOOR_S: Final = 2.0
"""Beacons move twice a second and heartbeats come every second: 2 s here is under 3 s after the fault."""
SUSPECT_FACTOR: Final = 5.0
GRANULARITY_S: Final = 0.5
"""By how much the age of a sample overstates a gap (period of the beacon)."""
HOLD_S: Final = 2.2
"""From suspected to confirmed at least: two stacks a second apart, and a slow step may still end."""
BUSY_HOLD_S: Final = 7.0
"""The same when the rank burns CPU: honest work looks like a busy loop, but not for that long in one line."""
LOCK_HOLD_S: Final = 30.0
STOPPED_SUSPECT_S: Final = 2.0
STOPPED_WAKE_S: Final = 6.0
AFTER_WAKE_S: Final = 1.5
REWAKE_S: Final = 3.0
PHASE_FLOOR_S: Final = 600.0
PHASE_FACTOR: Final = 10.0
HINT_ONLY_S: Final = 180.0
"""How long a line of output ('saving checkpoint ...') excuses a rank whose stack says otherwise."""
END_FLOOR_S: Final = 120.0
FRESH_S: Final = 2.5
"""A rank without a sample for longer is unknown, not silent: its agent may be gone."""
LEAP_S: Final = 1.2
"""How far ahead of its newest sample the quiet of a rank may be assumed."""
STEADY_MOVES: Final = 30
"""Signs of progress after which a script that prints no step counts as past its first step."""

Phase = Literal["start", "first", "steady", "checkpoint", "evaluation", "data", "end"]
_EXCUSED: Final[dict[Activity, Phase]] = {
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "data": "data",
    "compile": "first",
}


class Suspected(Word, frozen=True, kw_only=True, tag="suspected"):
    """Silence that is longer than usual: collect stacks, twice a second apart; nothing else."""

    report: HangReport


class Confirmed(Word, frozen=True, kw_only=True, tag="confirmed"):
    report: HangReport


class Cleared(Word, frozen=True, kw_only=True, tag="cleared"):
    """Progress came back after `quiet_s` seconds: it was no hang."""

    quiet_s: float


class Wake(Word, frozen=True, kw_only=True, tag="wake"):
    """Continue these stopped ranks (SIGCONT) before anything else."""

    ranks: tuple[int, ...]


class Learned(Word, frozen=True, kw_only=True, tag="learned"):
    """The longest honest pause of a phase grew: phase -> seconds."""

    longest_s: dict[str, float]


HangNotice = Suspected | Confirmed | Cleared | Wake | Learned


class _Rank:
    """What is known of one rank in this attempt."""

    __slots__ = (
        "awake_since",
        "frames",
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
        self.awake_since = -1e18
        """When it was last seen to leave state T or t."""
        self.wake_at: float | None = None
        self.woken = 0
        self.stack: RankStack | None = None
        self.forget_stack()

    def forget_stack(self) -> None:
        self.frames: tuple[Frame, ...] = ()
        self.same_from: tuple[float, RankSample] | None = None
        """Since when the stack is the same, with the sample of that moment."""
        self.same_count = 0
        self.stack_changed = False

    def stopped_s(self, now: float) -> float:
        stopped = self.sample.stopped_s
        return 0.0 if stopped is None else stopped + min(max(now - self.seen_at, 0.0), LEAP_S)


class HangWatch:
    """Watches one attempt at a time. `longest_s`: what `Learned` said before, by phase."""

    def __init__(self, longest_s: dict[str, float] | None = None) -> None:
        self.longest_s: dict[str, float] = dict(longest_s or {})
        self.start(0.0, 0)

    def start(self, now: float, attempt: int) -> None:
        """A new attempt: all ranks are new, what was learned stays."""
        self.attempt = attempt
        self._started_at = now
        self._ranks: dict[int, _Rank] = {}
        self._stopped: set[int] = set()
        self._ended: dict[int, int] = {}
        self._broken = False
        self._newest = now
        """When anything last made progress."""
        self._moves = 0
        self._peak = 0.0
        """Longest quiet seen since then."""
        self._gaps: dict[str, deque[float]] = {}
        self._slowest: dict[str, float] = {}
        self._step: int | None = None
        self._last_step: int | None = None
        self._suspicion: HangReport | None = None
        self._suspected_at = 0.0
        self._pause_phase: Phase | None = None
        self._confirmed = False
        self._flights: dict[int, RankFlight] = {}

    @property
    def suspected(self) -> bool:
        """A suspicion is open: stacks are wanted every few seconds."""
        return self._suspicion is not None and not self._confirmed

    # ----- what is seen -----

    def observe(self, now: float, samples: Iterable[RankSample]) -> None:
        """A heartbeat's samples."""
        for sample in samples:
            if sample.exit is not None:
                self._note_exit(now, sample)
                continue
            rank = self._ranks.get(sample.rank)
            if rank is None or rank.sample.pid != sample.pid:
                rank = self._ranks[sample.rank] = _Rank(sample, now)
                self._stopped.discard(sample.rank)
                if sample.moved_age_s < now - self._started_at - 1.0:
                    self._moved(rank.moved_at)
            else:
                self._update(now, rank, sample)
            if sample.state in "Tt":
                self._stopped.add(sample.rank)
            self._note_step(sample)
        self._peak = max(self._peak, now - self._newest)

    def _update(self, now: float, rank: _Rank, sample: RankSample) -> None:
        old = rank.sample
        if old.state in "Tt" and sample.state not in "Tt":
            self._stopped.discard(sample.rank)
            rank.awake_since = now
            rank.wake_at = None
            rank.forget_stack()
        elapsed = now - rank.seen_at
        # A late heartbeat makes an old age look younger: only content, or an age that hardly grew, is progress.
        if (
            sample.step != old.step
            or sample.moved_age_s < old.moved_age_s + 0.35 * elapsed
            or (sample.groups != old.groups and sample.moved_age_s < elapsed + GRANULARITY_S)
        ):
            moved_at = now - sample.moved_age_s
            if moved_at > rank.moved_at:
                rank.moved_at = moved_at
                rank.forget_stack()
                self._moved(moved_at)
        rank.sample = sample
        rank.seen_at = now

    def _moved(self, at: float) -> None:
        if at < self._newest + 0.4:
            self._newest = max(at, self._newest)  # several ranks, one moment
            return
        self._moves += 1
        gap = max(0.0, self._peak - GRANULARITY_S)
        self._newest = at
        self._peak = 0.0
        phase = self._pause_phase or self.phase
        gaps = self._gaps.setdefault(phase, deque(maxlen=50))
        gaps.append(gap)
        # One outlier in fifty says nothing about the next step; with few gaps the slowest is all there is.
        if gap > self._slowest.get(phase, 0.0) or len(gaps) % 10 == 0:
            ordered = sorted(gaps)  # at most 50
            self._slowest[phase] = ordered[-1 - len(ordered) // 25]

    def _note_step(self, sample: RankSample) -> None:
        if sample.step is not None and (self._step is None or sample.step > self._step):
            self._step = sample.step
        if sample.last_step is not None:
            self._last_step = sample.last_step

    def _note_exit(self, now: float, sample: RankSample) -> None:
        assert sample.exit is not None
        self._note_step(sample)
        self._stopped.discard(sample.rank)
        if self._ranks.pop(sample.rank, None) is not None or sample.rank not in self._ended:
            self._moved(now)  # an end is progress: the others get time to end as well
        self._ended[sample.rank] = -1 if sample.exit.code is None else sample.exit.code
        self._broken = self._broken or self._ended[sample.rank] != 0

    def note_stacks(self, now: float, stacks: Iterable[RankStack]) -> None:
        """Stacks of a suspicion, in the order in which they were taken."""
        for stack in sorted(stacks, key=lambda one: one.sample):
            rank = self._ranks.get(stack.rank)
            if rank is None or not stack.frames or rank.sample.state in "Tt":
                continue
            if stack.frames == rank.frames:
                rank.same_count += 1
            else:
                rank.stack_changed = rank.same_from is not None
                # Both samples of one collection arrive together: the first of them is a second old.
                rank.same_from = (now - (1.0 if stack.sample == 0 else 0.0), rank.sample)
                rank.same_count = 1
            rank.frames = stack.frames
            rank.stack = stack

    def note_flights(self, now: float, flights: Iterable[RankFlight]) -> None:
        """Flight recorder entries, where processes could give them."""
        del now
        self._flights.update((flight.rank, flight) for flight in flights)

    # ----- what is concluded -----

    @property
    def phase(self) -> Phase:
        """The job's phase as far as steps and progress tell; stacks refine it during a suspicion."""
        if self._complete() or self._ended:
            return "end"
        if self._step is not None or self._moves >= STEADY_MOVES:
            return "steady"
        return "first" if self._moves else "start"

    def suspect_limit_s(self) -> float:
        """Quiet seconds after which the present phase is suspected to hang."""
        return max(SUSPECT_FLOOR_S, SUSPECT_FACTOR * self._slowest.get(self.phase, 0.0))

    def phase_limit_s(self, phase: str) -> float:
        """Quiet seconds after which a phase counts as hung when nothing else is known."""
        floor = END_FLOOR_S if phase == "end" else PHASE_FLOOR_S
        return max(floor, PHASE_FACTOR * self.longest_s.get(phase, 0.0))

    def tick(self, now: float) -> list[HangNotice]:
        """What has become known by `now`. Call it a few times a second."""
        notices: list[HangNotice] = []
        if not self._ranks or self._broken:
            return notices
        if self._stopped:
            self._watch_stopped(now, notices)
        elif self._suspicion is not None and self._suspicion.kind in ("stopped", "traced"):
            self._after_stop(now)
        quiet = now - self._newest
        if self._suspicion is not None and quiet < min(self._suspicion.quiet_s, SUSPECT_FLOOR_S) and not self._stopped:
            self._clear(notices)
        limit = self.suspect_limit_s()
        if quiet < limit and self._suspicion is None:
            return notices
        if not any(now - rank.seen_at <= FRESH_S for rank in self._ranks.values()):
            return notices  # no agent speaks: that is no news of the ranks
        if self._suspicion is None:
            quiet = self._known_quiet(now)
            if quiet < limit:
                return notices
            self._suspect(
                now,
                HangReport(
                    kind="silent",
                    ranks=(),
                    quiet_s=round(quiet, 2),
                    limit_s=round(limit, 2),
                    phase=self.phase,
                    why=f"no rank made progress for {quiet:.1f} s, longer than {limit:.1f} s",
                ),
                notices,
            )
        elif not self._confirmed:
            report = self._judge(now)
            if report is not None:
                self._confirmed = True
                notices.append(Confirmed(report=report))
        return notices

    def _known_quiet(self, now: float) -> float:
        """Quiet seconds of the freshest rank, assumed no further than its samples allow."""
        return min(
            min(now, rank.seen_at + LEAP_S) - self._newest
            for rank in self._ranks.values()
            if now - rank.seen_at <= FRESH_S
        )

    def _suspect(self, now: float, report: HangReport, notices: list[HangNotice]) -> None:
        self._suspicion = report
        self._suspected_at = now
        self._confirmed = False
        for rank in self._ranks.values():
            rank.forget_stack()
        notices.append(Suspected(report=report))

    def _clear(self, notices: list[HangNotice]) -> None:
        assert self._suspicion is not None
        quiet = max(self._newest - self._suspected_at, 0.0) + self._suspicion.quiet_s
        notices.append(Cleared(quiet_s=round(quiet, 2)))
        phase = self._pause_phase or self._suspicion.phase
        if self._suspicion.kind not in ("stopped", "traced") and quiet > 1.2 * self.longest_s.get(phase, 2.5):
            self.longest_s[phase] = round(quiet, 2)
            notices.append(Learned(longest_s=dict(self.longest_s)))
        self._suspicion = None
        self._pause_phase = None
        self._confirmed = False
        self._flights.clear()

    # ----- stopped ranks -----

    def _watch_stopped(self, now: float, notices: list[HangNotice]) -> None:
        held = {
            number: rank
            for number in sorted(self._stopped)
            if (rank := self._ranks.get(number)) is not None and now - rank.seen_at <= FRESH_S
        }
        stopped = {number: rank for number, rank in held.items() if rank.sample.state == "T"}
        traced = [number for number, rank in held.items() if rank.sample.state == "t" and rank.stopped_s(now) >= 5.0]
        if self._suspicion is None or self._suspicion.kind == "silent":
            long = [number for number, rank in stopped.items() if rank.stopped_s(now) >= STOPPED_SUSPECT_S]
            if long:
                self._suspect(now, self._stop_report(now, "stopped", long, STOPPED_WAKE_S), notices)
            elif traced:
                self._suspect(now, self._stop_report(now, "traced", traced, 5.0), notices)
        wake = [
            number
            for number, rank in stopped.items()
            if rank.wake_at is None and rank.stopped_s(now) >= (REWAKE_S if rank.woken else STOPPED_WAKE_S)
        ]
        for number in wake:
            stopped[number].wake_at = now
            stopped[number].woken += 1
        if wake:
            notices.append(Wake(ranks=tuple(wake)))
        still = [
            number
            for number, rank in stopped.items()
            if rank.wake_at is not None and rank.seen_at >= rank.wake_at + AFTER_WAKE_S
        ]
        if still and not self._confirmed:
            self._confirmed = True
            notices.append(Confirmed(report=self._stop_report(now, "stopped", still, STOPPED_WAKE_S)))

    def _stop_report(
        self, now: float, kind: Literal["stopped", "traced"], ranks: list[int], limit_s: float
    ) -> HangReport:
        seconds = max(self._ranks[number].stopped_s(now) for number in ranks)
        how = "is stopped (state T)" if kind == "stopped" else "is held by a debugger (state t)"
        again = " and stays so after SIGCONT" if any(self._ranks[number].woken for number in ranks) else ""
        return HangReport(
            kind=kind,
            ranks=tuple(ranks),
            quiet_s=round(max(seconds, now - self._newest), 2),
            limit_s=limit_s,
            phase=self.phase,
            why=f"{_names(ranks)} {how} for {seconds:.1f} s{again}",
        )

    def _after_stop(self, now: float) -> None:
        """Stopped ranks run again: from here on it is ordinary quiet, and gets its whole time again."""
        assert self._suspicion is not None
        self._suspicion = HangReport(
            kind="silent",
            ranks=(),
            quiet_s=max(now - self._newest, SUSPECT_FLOOR_S),
            limit_s=self.suspect_limit_s(),
            phase=self.phase,
            why=f"{_names(self._suspicion.ranks)} runs again, progress has not come back yet",
        )
        self._suspected_at = now
        self._confirmed = False

    # ----- judging a suspicion -----

    def _judge(self, now: float) -> HangReport | None:
        """The report that confirms the open suspicion, or None while it may be an honest pause."""
        if any(rank.sample.state == "t" for rank in self._ranks.values()) or self._stopped:
            return None  # a debugger is somebody's wish; stopped ranks are judged by _watch_stopped
        quiet = self._known_or_zero(now)
        waiting: list[int] = []
        others: list[int] = []
        for number, rank in self._ranks.items():
            (waiting if self._waits(rank) else others).append(number)
        fresh = all(now - rank.seen_at <= FRESH_S for rank in self._ranks.values())
        held = now - self._suspected_at >= HOLD_S
        self._pause_phase = self._phase_of(others)
        if self._ended:
            return self._judge_end(now, quiet, held and fresh, waiting, others)
        if held and self.phase in ("steady", "end"):
            if waiting and others and all(self._is_stuck(now, number) for number in others):
                return self._missing(now, quiet, waiting, others)
            if not others and fresh and self._all_sure(now):
                if self._complete() and self._teardown(waiting):
                    return self._report(
                        now, "exit_hang", waiting, quiet, "the work is complete and all ranks wait at the end"
                    )
                return self._all_waiting(now, quiet, waiting)
            if fresh and self._complete() and self._teardown(list(self._ranks)):
                return self._report(
                    now, "exit_hang", sorted(self._ranks), quiet, "the work is complete and the end hangs"
                )
        return self._by_limit(now, quiet, others or waiting)

    def _known_or_zero(self, now: float) -> float:
        return max(now - self._newest, 0.0)

    def _waits(self, rank: _Rank) -> bool:
        """In a collective that does not complete, by its counters or by its stack."""
        if rank.sample.waiting_s is not None:
            return rank.sample.waiting_s >= 0.8
        if rank.sample.groups:
            return False  # its counters are known and say that it has nothing outstanding
        return rank.stack is not None and stack_reading.activity(rank.stack) == "collective"

    def _activity(self, rank: _Rank) -> Activity:
        return "unknown" if rank.stack is None else stack_reading.activity(rank.stack)

    def _phase_of(self, others: list[int]) -> Phase | None:
        """The phase of a pause: what those do that are not waiting."""
        for number in others:
            rank = self._ranks[number]
            if rank.sample.phase in ("checkpoint", "evaluation"):
                return rank.sample.phase
            if (excuse := _EXCUSED.get(self._activity(rank))) is not None:
                return excuse
        return None

    def _is_stuck(self, now: float, number: int) -> bool:
        """This rank, for which others wait, does nothing that may honestly last."""
        rank = self._ranks[number]
        if now - rank.seen_at > FRESH_S or rank.stack is None or rank.same_from is None or rank.same_count < 2:
            return False
        doing = self._activity(rank)
        since, then = rank.same_from
        same_s = now - since
        if doing in _EXCUSED or rank.sample.state == "D" or now - rank.awake_since < HOLD_S:
            return False
        if rank.sample.phase in ("checkpoint", "evaluation") and now - rank.moved_at < HINT_ONLY_S:
            return False
        if rank.sample.io_bytes - then.io_bytes > 65536:
            return False
        busy = rank.sample.cpu_s - then.cpu_s > 0.25 * max(same_s, 1.0) or (
            doing == "compute" and rank.sample.state == "R"
        )
        needed = BUSY_HOLD_S if busy else LOCK_HOLD_S if doing == "lock" else 0.9
        return same_s >= needed and (not busy or rank.same_count >= 3)

    def _all_sure(self, now: float) -> bool:
        """Nobody changed its place since the suspicion, where stacks are known at all."""
        del now
        return all(
            not rank.stack_changed and (rank.stack is None or rank.same_count >= 2) for rank in self._ranks.values()
        )

    def _complete(self) -> bool:
        """The last step that the output names was reached (scripts count from 0 or from 1)."""
        return self._step is not None and self._last_step is not None and self._step >= self._last_step - 1

    def _teardown(self, ranks: list[int]) -> bool:
        known = [rank.stack for number in ranks if (rank := self._ranks[number]).stack is not None]
        return bool(known) and all(
            stack is not None and (stack_reading.activity(stack) == "teardown" or stack_reading.in_barrier(stack))
            for stack in known
        )

    def _missing(self, now: float, quiet: float, waiting: list[int], others: list[int]) -> HangReport:
        first = self._ranks[others[0]]
        assert first.stack is not None
        where = stack_reading.place(first.stack)
        why = (
            f"{_names(waiting)} waited {quiet:.1f} s in a collective that {_names(others)} did not enter: "
            f"rank {others[0]} stays in {where}"
        )
        return self._report(now, "missing", sorted(others), quiet, why)

    def _all_waiting(self, now: float, quiet: float, waiting: list[int]) -> HangReport:
        odd, why = mismatch(self._flights.values())
        if why:
            return self._report(now, "mismatch", list(odd), quiet, why)
        behind = self._behind()
        if behind:
            return self._report(
                now,
                "mismatch",
                behind,
                quiet,
                f"all ranks wait in collectives and {_names(behind)} entered fewer of them than the others",
            )
        return self._report(
            now, "all_waiting", [], quiet, f"all {len(waiting)} ranks wait in collectives that do not complete"
        )

    def _behind(self) -> list[int]:
        """Ranks that entered fewer collectives of a group all ranks have than most did."""
        shared = set.intersection(*(set(rank.sample.groups) for rank in self._ranks.values()))
        for group in sorted(shared):
            counts = {number: rank.sample.groups[group][0] for number, rank in self._ranks.items()}
            most = max(counts.values())
            behind = sorted(number for number, count in counts.items() if count < most)
            if behind and 2 * len(behind) <= len(counts):
                return behind
        return []

    def _judge_end(
        self, now: float, quiet: float, held: bool, waiting: list[int], others: list[int]
    ) -> HangReport | None:
        """Some ranks ended with code 0 and the rest is quiet."""
        live = sorted(self._ranks)
        gone = sorted(self._ended)
        if held and not any(self._activity(self._ranks[number]) in _EXCUSED for number in others):
            tearing = [number for number in others if self._in_destroy(self._ranks[number])]
            if len(tearing) == len(others):
                if self._complete() or (self._last_step is None and self._teardown(live) and not waiting):
                    why = f"{_names(gone)} ended well, the work is complete and {_names(live)} does not end"
                    return self._report(now, "exit_hang", live, quiet, why)
                if waiting:
                    why = f"{_names(gone)} ended with code 0 while {_names(waiting)} still waits for it in a collective"
                    return self._report(now, "early_exit", gone, quiet, why)
        return self._by_limit(now, quiet, others or waiting)

    def _in_destroy(self, rank: _Rank) -> bool:
        return rank.stack is not None and any(
            frame.function.rsplit(".", 1)[-1] in ("destroy_process_group", "_shutdown_backend")
            for frame in rank.stack.frames
        )

    def _by_limit(self, now: float, quiet: float, doing: list[int]) -> HangReport | None:
        phase = self._pause_phase or self.phase
        limit = self.phase_limit_s(phase)
        changing = any(self._ranks[number].stack_changed for number in doing)
        if quiet < limit * (3 if changing else 1) or not all(
            now - self._ranks[number].seen_at <= FRESH_S for number in doing
        ):
            return None
        if phase == "end" and self._ended and self._complete():
            return self._report(now, "exit_hang", sorted(self._ranks), quiet, "the work is complete and the end hangs")
        ranks = sorted(doing) if len(doing) < len(self._ranks) else []
        return self._report(now, "silent", ranks, quiet, f"no progress for {quiet:.0f} s in phase {phase}", limit)

    def _report(
        self,
        now: float,
        kind: Literal["missing", "mismatch", "all_waiting", "silent", "exit_hang", "early_exit"],
        ranks: list[int],
        quiet: float,
        why: str,
        limit: float | None = None,
    ) -> HangReport:
        del now
        return HangReport(
            kind=kind,
            ranks=tuple(ranks),
            quiet_s=round(quiet, 2),
            phase=self._pause_phase or self.phase,
            why=why,
            limit_s=round(self.suspect_limit_s() if limit is None else limit, 2),
        )


def _names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2 and 5 others`."""
    known = sorted(ranks)
    shown = ", ".join(str(rank) for rank in known[:6])
    more = f" and {len(known) - 6} others" if len(known) > 6 else ""
    return f"rank{'s' if len(known) != 1 else ''} {shown}{more}"
