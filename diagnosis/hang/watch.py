"""When is silence a hang? It is looked for a reason at once, and acted on only when there is a proof.

Suspected: no rank made progress for five times the slowest recent gap, 1.8 s at least, or a rank is in state T:
evidence is collected, nothing else. Confirmed: a rank stays stopped although it was continued, or `proof.prove` has a
proof. Silent: there is none (yet); what is done about that is for `recovery.policy` to say.
`HangWatch` sees time only in its arguments. A sample costs O(1); a tick O(1) while anything moves, else O(ranks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from diagnosis.flight.waits import WaitRing
from diagnosis.hang import proof
from diagnosis.hang.proof import unproven
from diagnosis.hang.ranks import GAPS_KEPT, LEAP_S, SETTLED_GAPS, SETTLED_STEPS, WatchedRank, slowest
from diagnosis.incident import HangReport
from diagnosis.signals import Finding, Frozen, RankClock, RankFlight, RankSample, RankStack, rank_names

FLOOR_S: Final = 1.8
"""Beacon, agent and heartbeat add up to a second each way: this is under 3 s after the fault."""
UNSETTLED_S: Final = 3.0
"""The same while the pace is not known yet."""
FACTOR: Final = 5.0
GRANULARITY_S: Final = 1.0
"""By how much the age of a sample overstates a gap (the beacon's period and the agent's)."""
EARLY_FLOOR_S: Final = 0.5
"""A step is seen so much late: the beacon's period. The step clock has no such delay."""
EARLY_FLOOR_CLOCK_S: Final = 0.2
TRAINS_ON_S: Final = 2.0
"""Progress by so much more than two slow steps after a device's failure was not under way: its rank trains on."""


class Pace:
    """Recent gaps between signs of progress of one attempt."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)
        self._slowest = 0.0

    def note_gap(self, seconds: float) -> None:
        """An honest gap, as the oldest age seen within it."""
        self._gaps.append(max(0.0, seconds - GRANULARITY_S))
        self._slowest = slowest(self._gaps, GRANULARITY_S)

    @property
    def settled(self) -> bool:
        """Enough gaps were seen to know the pace."""
        return len(self._gaps) >= SETTLED_GAPS

    @property
    def suspect_limit_s(self) -> float:
        """Silent seconds after which it is looked for the reason."""
        return max(FLOOR_S, FACTOR * self._slowest) if self.settled else UNSETTLED_S


Phase = Literal["start", "steady", "end"]
"""How far the job is: words of the report, nothing else."""
HOLD_S: Final = 2.6
"""From suspected to proven by stacks at least: two stacks a second apart, and a slow step may still end."""
CLOCK_STEPS: Final = 50
EVEN_FACTOR: Final = 4.0
"""After so many steps the step clock gives the pace, if the slowest was at most so much slower than usual."""
STOPPED_SUSPECT_S: Final = 1.5
STOPPED_WAKE_S: Final = 5.6
"""As it is counted; with half a second until it is noticed, about 6 s. A stop of 5 s is nobody's fault."""
REWAKE_S: Final = 3.0
"""The same for a rank that was stopped again after we continued it."""
AFTER_WAKE_S: Final = 1.5
TRACED_S: Final = 5.0
"""py-spy itself holds a process for moments: that is not a debugger."""
SAME_MOMENT_S: Final = 0.4
"""Signs of progress of several ranks within this are one."""
COMPARE_S: Final = 2.0
"""The flight recorders of all ranks are compared at most so often."""
REPORT_AFTER_S: Final = 1.6
"""A rank that moved on while the recorders were read shows it within this: its beacon's period and a heartbeat."""
LOOK_S: Final = 2.5
"""Silence after which a rank is looked at that shows by itself that it cannot go on."""
TELL_AFTER_S: Final = 5.0
"""A silence without stacks is reported after this; with stacks as soon as they are there, ..."""
TELL_AGAIN_S: Final = 5.0
"""... and again when somebody else is waited for, or somewhere else."""


class Suspected(Frozen, frozen=True, kw_only=True, tag="suspected"):
    """Silence that is longer than usual: collect stacks, twice a second apart; nothing else."""

    report: HangReport


class Confirmed(Frozen, frozen=True, kw_only=True, tag="confirmed"):
    """It is proven to be a hang. Said once for each suspicion."""

    report: HangReport


class Cleared(Frozen, frozen=True, kw_only=True, tag="cleared"):
    """Progress came back after `quiet_s` seconds: it was no hang."""

    quiet_s: float


class Wake(Frozen, frozen=True, kw_only=True, tag="wake"):
    """Continue these stopped ranks (SIGCONT) before anything else."""

    ranks: tuple[int, ...]
    stopped_s: float = 0.0


class Silent(Frozen, frozen=True, kw_only=True, tag="silent"):
    """Nothing proves this silence to be a hang. Said when it is known who is where, and when that changes."""

    report: HangReport


def _is_even(clock: RankClock | None) -> bool:
    """Whether steps come so evenly that a longer gap means something: no evaluation or save among the newest."""
    if clock is None or clock.step_s is None:
        return False
    return clock.steps >= CLOCK_STEPS and clock.slowest_s <= EVEN_FACTOR * clock.step_s


HangNotice = Suspected | Confirmed | Silent | Cleared | Wake


class HangWatch:
    """Watches one attempt at a time."""

    def __init__(self) -> None:
        self.start(0.0, 0)

    def start(self, now: float, attempt: int) -> None:
        """A new attempt: all ranks are new."""
        self.attempt = attempt
        self.pace = Pace()
        self._ranks: dict[int, WatchedRank] = {}
        self._stopped: set[int] = set()
        self._ended: set[int] = set()
        self._broken = False
        """A rank ended badly: that is for others to judge."""
        self._newest = now
        """When anything last made progress."""
        self._paced = now
        """The same without what does not tell the pace."""
        self._collectives = False
        """Some were seen: they tell the pace better than whole steps do."""
        self._counted = now
        """When that last counted as a sign of its own: what many ranks show within one moment is one sign."""
        self._longest_quiet_s = 0.0
        """Longest quiet seen since then."""
        self._step: int | None = None
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._suspicion: HangReport | None = None
        self._suspected_at = 0.0
        self._quiet_from = now
        self._was_stopped = False
        self._confirmed = False
        self._reported: tuple[float, HangReport] | None = None
        """When the silence was reported last, and as what."""
        self._devices: dict[int, str] = {}
        self._failing: dict[int, tuple[str, float]] = {}
        """Rank -> a finding after which no step is expected of it, and the rank's newest sample at that time."""
        self._flights: dict[int, RankFlight] = {}
        self._disagreement: proof.Disagreement = ((), "")
        self._compared_at: float | None = None
        self._flights_are_new = False
        self._flights_at = now
        """When the newest of them came."""
        self._ring: WaitRing | None = None
        self._ring_at: float | None = None
        self._ring_is_reported = False
        """No rank has moved since its recorder was read."""

    @property
    def suspected(self) -> bool:
        """A suspicion is open: stacks are wanted, and again every few seconds."""
        return self._suspicion is not None and not self._confirmed

    @property
    def phase(self) -> Phase:
        """How far the job is."""
        if self._ended or self._complete:
            return "end"
        return "steady" if self._is_settled else "start"

    @property
    def suspect_limit_s(self) -> float:
        """Silent seconds after which it is looked for the reason."""
        limit = self.pace.suspect_limit_s
        if self.pace.settled or self._collectives:
            return limit
        slowest = max((rank.sample.clock.slowest_s for rank in self._ranks.values() if rank.sample.clock), default=0.0)
        return max(limit, FACTOR * slowest)

    @property
    def _complete(self) -> bool:
        # Scripts count from 0 or from 1.
        return self._step is not None and self._last_step is not None and self._step >= self._last_step - 1

    @property
    def _is_settled(self) -> bool:
        steps = 0 if self._step is None or self._first_step is None else self._step - self._first_step
        return steps >= SETTLED_STEPS or self.pace.settled

    # ----- what is seen -----

    def observe(self, now: float, samples: Iterable[RankSample]) -> None:
        """The ranks of one heartbeat."""
        for sample in samples:
            if sample.exit is not None:
                self._note_exit(now, sample)
                continue
            rank = self._ranks.get(sample.rank)
            if rank is None or rank.sample.pid != sample.pid:
                rank = self._ranks[sample.rank] = WatchedRank(sample, now)
                if sample.step is not None or sample.groups:
                    self._moved(rank.moved_at)  # it was under way before we looked
            elif rank.update(now, sample):
                self._moved(rank.moved_at, tells_pace=not rank.moved_by_clock or _is_even(sample.clock))
            self._collectives = self._collectives or bool(sample.groups)
            if sample.state in "Tt" and self._ranks[sample.rank].stopped:
                self._stopped.add(sample.rank)
            elif self._stopped:
                self._stopped.discard(sample.rank)
            self._note_step(sample)
        self._longest_quiet_s = max(self._longest_quiet_s, now - self._paced)

    def _moved(self, at: float, *, tells_pace: bool = True) -> None:
        """`tells_pace`: the limit may become shorter by it. Any sign of progress ends a silence."""
        self._newest = max(at, self._newest)
        if not tells_pace:
            return
        self._paced = max(at, self._paced)
        if at < self._counted + SAME_MOMENT_S:
            return
        if not self._was_stopped:
            self.pace.note_gap(self._longest_quiet_s)
        self._counted = at
        self._longest_quiet_s = 0.0

    def _note_step(self, sample: RankSample) -> None:
        if sample.step is not None and self._last_step is not None and sample.step > self._last_step:
            self._last_step = None  # that was the end of an epoch
        if sample.last_step is not None and sample.last_step != self._last_step:
            self._last_step, self._step = sample.last_step, sample.step  # another counter is believed now
            self._first_step = sample.step
        elif sample.step is not None and (self._step is None or sample.step > self._step):
            self._step = sample.step
            self._first_step = sample.step if self._first_step is None else self._first_step

    def _note_exit(self, now: float, sample: RankSample) -> None:
        assert sample.exit is not None
        self._note_step(sample)
        if sample.rank not in self._ended:
            self._moved(now)  # an end is progress: the others get time to end as well
        self._ranks.pop(sample.rank, None)
        self._stopped.discard(sample.rank)
        self._ended.add(sample.rank)
        self._broken = self._broken or sample.exit.code != 0

    def note_stacks(self, now: float, stacks: Iterable[RankStack]) -> None:
        """Stacks taken during a suspicion."""
        for stack in sorted(stacks, key=lambda one: one.sample):
            rank = self._ranks.get(stack.rank)
            # The stack of a stopped process says nothing about what it does when it runs.
            if rank is not None and stack.frames and stack.rank not in self._stopped:
                rank.note_stack(now, stack)

    def note_flights(self, now: float, flights: Iterable[RankFlight]) -> None:
        """Flight recorder entries, where processes could give them."""
        self._flights.update((flight.rank, flight) for flight in flights)
        self._flights_are_new = True
        self._flights_at = now

    def note_findings(self, findings: Iterable[Finding], ranks: Iterable[int] = ()) -> None:
        """What devices and kernels said. What ranks write themselves is no proof. `ranks`: all of that node."""
        for finding in findings:
            if finding.evidence.source == "output" or finding.attempt not in (0, self.attempt):
                continue
            if finding.severity == "fatal" and finding.rank is not None:
                self._devices.setdefault(finding.rank, finding.evidence.text)
            if finding.outlook == "fails":
                for rank in struck_ranks(finding, ranks):
                    since = self._ranks[rank].seen_at if rank in self._ranks else self._newest
                    self._failing.setdefault(rank, (finding.evidence.text, since))

    # ----- what is concluded -----

    def tick(self, now: float) -> list[HangNotice]:
        """What has become known by `now`. Call it a few times a second."""
        notices: list[HangNotice] = []
        if not self._ranks or self._broken:
            return notices
        if self._failing and not self._confirmed:
            self._look_at_failing(now, notices)
        if self._stopped:
            self._watch_stopped(now, notices)
        elif self._suspicion is not None and self._suspicion.kind in ("stopped", "traced"):
            self._after_stop(now)
        if self._suspicion is not None and self._newest > self._quiet_from + SAME_MOMENT_S and not self._stopped:
            self._clear(notices)
        if self._suspicion is None:
            self._look_for_quiet(now, notices)
        elif not self._confirmed:
            self._judge(now, notices)
        return notices

    def _look_for_quiet(self, now: float, notices: list[HangNotice]) -> None:
        limit = min(self.suspect_limit_s, LOOK_S) if self._is_plain else self.suspect_limit_s
        if now - self._newest < limit:
            return
        # Without samples nothing is known: quiet is what fresh samples show, and hardly more.
        known = [min(now, rank.seen_at + LEAP_S) for rank in self._ranks.values() if rank.fresh(now)]
        quiet = min(known, default=self._newest) - self._newest
        if quiet >= limit:
            why = f"no rank made progress for {quiet:.1f} s, longer than {limit:.1f} s"
            self._suspect(now, self._report("silent", (), quiet, limit, why), notices)

    def _look_at_failing(self, now: float, notices: list[HangNotice]) -> None:
        """A rank whose device has failed, and that has made no progress for as long as the slowest step of late, makes
        none any more: that needs no longer silence, and no stacks."""
        if self._complete:
            return
        still: dict[int, float] = {}
        limit = 0.0
        for number in sorted(self._failing.keys() & self._ranks.keys()):
            rank = self._ranks[number]
            quiet_s, slow_s = rank.seen_at - rank.moved_at, rank.slow_step_s
            busy = rank.stopped or rank.sample.phase or not rank.fresh(now)
            floor_s = EARLY_FLOOR_CLOCK_S if rank.is_clocked else EARLY_FLOOR_S
            if slow_s is not None and rank.moved_at > self._failing[number][1] + 2 * slow_s + TRAINS_ON_S:
                del self._failing[number]  # it trains on: a longer pause is an evaluation or a save, as in any run
                continue
            if slow_s is not None and not busy and quiet_s >= slow_s + floor_s:
                still[number], limit = quiet_s, slow_s + floor_s
        if not still:
            return
        first, seconds = next(iter(still)), max(still.values())
        why = f"no step for {seconds:.1f} s, longer than any of late, after a fatal finding on {rank_names(still)}"
        why = f"{why}: {self._failing[first][0]}"
        if self._suspicion is None:
            self._quiet_from, self._was_stopped = self._newest, False
        self._suspicion = HangReport(
            kind="device",
            ranks=tuple(still),
            quiet_s=round(seconds, 2),
            limit_s=round(limit, 2),
            phase=self.phase,
            why=why,
            step=self._step,
            early=True,
        )
        self._suspected_at = now
        self._confirm(self._suspicion, notices)

    @property
    def _is_plain(self) -> bool:
        """A rank shows by itself that something is wrong with it: that needs no long silence."""
        return any(
            rank.dead_since is not None or (rank.sample.locked_s or 0.0) >= proof.LOCKED_S
            for rank in self._ranks.values()
        )

    def _judge(self, now: float, notices: list[HangNotice]) -> None:
        if self._stopped:
            return  # that a rank is stopped explains it; a debugger is somebody's wish
        self._compare(now)
        held = now - self._suspected_at >= HOLD_S
        if held and self._flights:
            self._look_for_ring(now)
        quiet_s = max(now - self._newest, 0.0)
        scene = proof.Scene(
            now=now,
            quiet_s=quiet_s,
            held=held,
            ranks=self._ranks,
            ended=tuple(sorted(self._ended)),
            complete=self._complete,
            ends_known=self._last_step is not None,
            disagreement=self._disagreement,
            wait_ring=self._ring,
            ring_is_sure=self._ring_is_reported,
            devices=self._devices,
        )
        report = proof.prove(scene)
        if report is not None:
            self._confirm(msgspec.structs.replace(report, phase=self.phase, step=self._step), notices)
        elif scene.held:
            self._tell(now, quiet_s, notices)

    def _tell(self, now: float, quiet_s: float, notices: list[HangNotice]) -> None:
        """Who is where: once that is known, and when it changes."""
        if self._reported is not None and now - self._reported[0] < TELL_AGAIN_S:
            return
        if (
            self._reported is None
            and quiet_s < TELL_AFTER_S
            and all(rank.stack is None for rank in self._ranks.values())
        ):
            return
        # Where no output names a last step, others that ended well tell of it.
        over = self._complete or (self._last_step is None and not any(rank.waits for rank in self._ranks.values()))
        done = bool(self._ended) and over
        report = unproven(self._ranks, quiet_s, self.phase, self._step, done=done)
        before = self._reported[1] if self._reported is not None else None
        if before is None or (report.ranks, report.place, report.kind) != (before.ranks, before.place, before.kind):
            self._reported = now, report
            notices.append(Silent(report=report))

    def _compare(self, now: float) -> None:
        """Each node's entries come by themselves, and to compare those of thousands of ranks takes half a second."""
        if self._flights_are_new and (self._compared_at is None or now - self._compared_at >= COMPARE_S):
            self._disagreement = proof.disagreement(self._flights.values())
            self._compared_at, self._flights_are_new = now, False

    def _look_for_ring(self, now: float) -> None:
        settled = now - self._flights_at >= REPORT_AFTER_S
        looked = self._ring_at is not None and now - self._ring_at < COMPARE_S
        if not looked or (settled and not self._ring_is_reported):
            self._ring = proof.wait_ring_of(now, self._ranks, self._flights.values())
            self._ring_at, self._ring_is_reported = now, settled

    def _suspect(self, now: float, report: HangReport, notices: list[HangNotice]) -> None:
        if self._suspicion is None:
            self._quiet_from = self._newest
            self._was_stopped = False
        self._suspicion = report
        self._suspected_at = now
        self._confirmed = False
        self._was_stopped = self._was_stopped or report.kind in ("stopped", "traced")
        for rank in self._ranks.values():
            rank.forget_stack()
        notices.append(Suspected(report=report))

    def _confirm(self, report: HangReport, notices: list[HangNotice]) -> None:
        if not report.limit_s:
            report = msgspec.structs.replace(report, limit_s=round(self.suspect_limit_s, 2))
        self._confirmed = True
        notices.append(Confirmed(report=report))

    def _clear(self, notices: list[HangNotice]) -> None:
        assert self._suspicion is not None
        quiet = self._newest - self._quiet_from
        notices.append(Cleared(quiet_s=round(quiet, 2)))
        self._suspicion = None
        self._reported = None
        self._was_stopped = False
        self._confirmed = False
        self._flights.clear()
        self._disagreement = ((), "")
        self._compared_at, self._flights_are_new = None, False
        self._ring = self._ring_at = None
        self._ring_is_reported = False

    # ----- stopped ranks -----

    def _watch_stopped(self, now: float, notices: list[HangNotice]) -> None:
        held = {number: self._ranks[number] for number in sorted(self._stopped) if self._ranks[number].fresh(now)}
        stopped = {number: rank for number, rank in held.items() if rank.sample.state == "T"}
        if self._suspicion is None or self._suspicion.kind == "silent":
            long = tuple(number for number, rank in stopped.items() if rank.stopped_s(now) >= STOPPED_SUSPECT_S)
            traced = tuple(number for number, rank in held.items() if rank.stopped_s(now) >= TRACED_S)
            if long:
                self._suspect(now, self._stop_report(now, "stopped", long), notices)
            elif traced:
                self._suspect(now, self._stop_report(now, "traced", traced), notices)
        wake = [
            number
            for number, rank in stopped.items()
            if rank.wake_at is None and rank.stopped_s(now) >= (REWAKE_S if rank.woken else STOPPED_WAKE_S)
        ]
        if wake:
            for number in wake:
                stopped[number].wake_at = now
                stopped[number].woken += 1
            longest = max(stopped[number].stopped_s(now) for number in wake)
            notices.append(Wake(ranks=tuple(wake), stopped_s=round(longest, 2)))
        still = tuple(
            number
            for number, rank in stopped.items()
            if rank.wake_at is not None and rank.seen_at >= rank.wake_at + AFTER_WAKE_S
        )
        if still and not self._confirmed:
            self._confirm(self._stop_report(now, "stopped", still), notices)

    def _stop_report(self, now: float, kind: Literal["stopped", "traced"], ranks: tuple[int, ...]) -> HangReport:
        seconds = max(self._ranks[number].stopped_s(now) for number in ranks)
        how = "is stopped (state T)" if kind == "stopped" else "is held by a debugger (state t)"
        again = (
            " and stays so after SIGCONT" if any(self._ranks[number].wake_at is not None for number in ranks) else ""
        )
        limit = STOPPED_WAKE_S if kind == "stopped" else TRACED_S
        why = f"{rank_names(ranks)} {how} for {seconds:.1f} s{again}"
        return self._report(kind, ranks, max(seconds, now - self._newest), limit, why)

    def _after_stop(self, now: float) -> None:
        """Stopped ranks run again: from here on it is ordinary quiet, and gets its whole time again."""
        assert self._suspicion is not None
        why = f"{rank_names(self._suspicion.ranks)} runs again, progress has not come back yet"
        limit = self.suspect_limit_s
        self._suspicion = self._report("silent", (), max(now - self._newest, 0.0), limit, why)
        self._suspected_at = now
        self._confirmed = False

    def _report(
        self,
        kind: Literal["silent", "stopped", "traced"],
        ranks: tuple[int, ...],
        quiet_s: float,
        limit_s: float,
        why: str,
    ) -> HangReport:
        return HangReport(
            kind=kind, ranks=ranks, quiet_s=round(quiet_s, 2), limit_s=round(limit_s, 2), phase=self.phase, why=why
        )


def struck_ranks(finding: Finding, of_node: Iterable[int]) -> tuple[int, ...]:
    """The ranks that use what a finding is about: the one of its GPU, or all of the node."""
    if finding.rank is not None:
        return (finding.rank,)
    return tuple(of_node) if finding.scope == "node" else ()
