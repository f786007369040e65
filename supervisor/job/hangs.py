"""Hangs: what the hang watch tells, ranks that a signal has stopped, silence that nothing proves to be a hang."""

from __future__ import annotations

import dataclasses

import msgspec

from diagnosis.hang.proof import describe
from diagnosis.incident import HangReport
from diagnosis.signals import rank_names
from recovery import policy
from supervisor import messages as m
from supervisor.job.attempts import Attempt, Attempts
from supervisor.job.core import EARLY_S, Core, OpenIncident, Timer, Wants, cancel
from supervisor.job.incidents import Incidents
from supervisor.job.nodes import Nodes
from supervisor.notes import note

RESTACK_S = 3.0
RESTACK_SLOW_S = 30.0
RESTACK_FAST = 10
"""While a hang is suspected stacks are taken every 3 s, ten times; then every 30 s."""


TELL_S = 30.0
"""A silence is told on the terminal at once, unless its place has needed as long before or the run just begins; then
after this, and whenever it has lasted twice as long."""


@dataclasses.dataclass
class Silence:
    """Mutable; `Hangs` owns it. Times are Unix seconds."""

    attempt: int
    since: float
    report: HangReport
    tell_after_s: float = TELL_S
    loud: bool = False
    """It was reported on the user's terminal."""
    left: bool = False
    """A person was told that nothing more will be done about it."""

    def text(self, now: float) -> str:
        return describe(self.report, max(now - self.since, 0.0))


class Hangs:
    def __init__(self, core: Core, nodes: Nodes, attempts: Attempts, incidents: Incidents) -> None:
        self._core, self._nodes, self._attempts, self._incidents = core, nodes, attempts, incidents
        self._lessons = incidents.lessons
        self._stacks_taken = 0
        """How often, during the current suspicion."""
        self.silence: Silence | None = None
        """The silence that lasts now, if nothing proves it to be a hang."""

    # ----- queries -----

    def _starts_or_runs(self, attempt: Attempt | None) -> bool:
        return attempt is not None and not attempt.over and self._core.state in ("STARTING", "RUNNING")

    @property
    def shown_silence(self) -> Silence | None:
        """The silence of the attempt that runs now."""
        silence = self.silence
        return silence if silence is not None and self._attempts.live(silence.attempt) is not None else None

    @property
    def silence_limit(self) -> policy.SilenceLimit:
        """When the job acts on the present silence."""
        spec, silence = self._core.spec, self.silence
        figures = policy.SilenceFigures() if silence is None else self._figures(silence)
        return policy.silence_limit(
            figures, patience_s=spec.patience_s, factor=spec.patience_factor, off=spec.patience_off
        )

    @property
    def _outlook(self) -> str:
        """What the job will do about the present silence, in words."""
        core, limit = self._core, self.silence_limit
        if limit.seconds is None or (core.mode == "enforce" and not core.paused):
            return limit.why
        return f"Nothing is done about it: {'paused' if core.paused else f'mode {core.mode}'}"

    def _figures(self, silence: Silence) -> policy.SilenceFigures:
        """What a restart would cost now, and what is known about this place in the code."""
        attempts, report = self._attempts, silence.report
        attempt = attempts.current
        assert attempt is not None
        took = [one.recovery_s for one in self._incidents.log.records if one.recovery_s is not None]
        first = attempts.trains_since - attempts.started_at if attempts.trains_since and attempts.started_at else 0.0
        began = attempt.progress_seen_at if attempt.progress_seen_at is not None else attempt.workers_started_at
        saved = [one.modified_at for one in attempts.checkpoints.candidates() if one.complete and not one.suspect]
        since = max([began if began is not None else silence.since, *saved])
        return policy.SilenceFigures(
            recovery_s=max(took, default=max(first, 0.0)),
            redo_s=max(0.0, silence.since - since),
            needed_s=self._lessons.needed_s(report),
            did_not_help=self._lessons.did_not_help(report),
            timeout_s=report.timeout_s,
            over=report.kind == "exit_hang",
        )

    # ----- suspected, cleared, confirmed -----

    def suspected(self, event: m.HangSuspected) -> Wants:
        attempt = self._attempts.live(event.attempt)
        if attempt is None or attempt.round is None or not self._starts_or_runs(attempt):
            return
        yield note("hang_suspected", why=event.report.why)
        self._stacks_taken = 0
        yield from self._take_stacks(event.report.ranks)

    def _take_stacks(self, ranks: tuple[int, ...] = ()) -> Wants:
        self._incidents.take_stacks(ranks)
        self._stacks_taken += 1
        pause_s = RESTACK_S if self._stacks_taken < RESTACK_FAST else RESTACK_SLOW_S
        yield Timer("stacks", self._core.now + pause_s)

    def stacks_due(self) -> Wants:
        if self._starts_or_runs(self._attempts.current):
            yield from self._take_stacks()

    def cleared(self, event: m.HangCleared) -> Wants:
        attempt, incidents = self._attempts.live(event.attempt), self._incidents
        if attempt is None:
            return
        yield cancel("stacks", "again", "silence")
        by_us = self._nodes.progress_resumed(attempt.number)
        silence, self.silence = self.silence, None
        if silence is not None and silence.attempt == attempt.number:
            self._lessons.was_honest(silence.report, event.quiet_s)
        loud = silence is not None and silence.loud
        yield note("hang_cleared", loud=loud, quiet_s=event.quiet_s, no_hang=not by_us)
        if incidents.hung is not None:
            yield from incidents.close(incidents.hung, "progress came back by itself")
        record = incidents.active
        may_go_on = not self._attempts.cannot_go_on(attempt) and not incidents.held
        if record is not None and record.trigger == "hang" and may_go_on:
            yield from incidents.go_on("false alarm: progress came back by itself")

    def confirmed(self, event: m.HangConfirmed) -> Wants:
        attempt, now = self._attempts.live(event.attempt), self._core.now
        if attempt is None or attempt.round is None:
            return
        report, hung = event.report, self._incidents.hung
        if report.step is None:
            report = msgspec.structs.replace(report, step=attempt.step)
        if hung is not None and hung.hang is not None and (hung.hang.proven or not report.proven):
            return  # it is known, and not to be acted on
        yield cancel("stacks", "silence")
        if report.proven:
            self.silence = None
        if report.kind == "stopped" and self._nodes.left_stopped(attempt.number):
            why = f"{rank_names(report.ranks)} stopped (state T) for {report.quiet_s:.1f} s, and not continued so far"
            report = msgspec.structs.replace(report, why=why)
        yield OpenIncident("hang", f"hang: {report.why}", now - report.quiet_s, hang=report)

    def progressed(self, event: m.Progressed) -> Wants:
        """The hang watch of a new controller does not know about a hang that was left waiting."""
        hung = self._incidents.hung
        if hung is not None and event.step is not None and (hung.step is None or event.step > hung.step):
            yield from self._incidents.close(hung, "progress came back by itself")

    # ----- silence that nothing proves to be a hang -----

    def silence_seen(self, event: m.SilenceSeen) -> Wants:
        attempt = self._attempts.live(event.attempt)
        if attempt is None or attempt.round is None or not self._starts_or_runs(attempt):
            return
        report, silence, now = event.report, self.silence, self._core.now
        if silence is None or silence.attempt != attempt.number:
            silence = self.silence = Silence(attempt.number, now - report.quiet_s, report)
            silence.loud = report.phase != "start" and self._lessons.needed_s(report) < report.quiet_s
            yield note("silence", loud=silence.loud, what=silence.text(now), how=self._outlook)
        else:
            silence.report = report
            yield note("silence_lasts", still=True, what=silence.text(now), how=self._outlook)
        yield from self._watch_silence(silence)

    def _watch_silence(self, silence: Silence) -> Wants:
        limit_s = self.silence_limit.seconds
        wakes = [silence.tell_after_s]
        if limit_s is not None and self._incidents.hung is None:
            wakes.append(max(limit_s, self._core.now - silence.since + EARLY_S))
        yield Timer("silence", silence.since + min(wakes))

    def silence_due(self) -> Wants:
        silence, core = self.silence, self._core
        if silence is None or not self._starts_or_runs(self._attempts.live(silence.attempt)):
            return
        lasted_s, limit, hung = core.now - silence.since, self.silence_limit, self._incidents.hung
        if limit.seconds is not None and hung is None and lasted_s >= limit.seconds - EARLY_S:
            yield from self._act_on(silence, limit)
        elif limit.seconds is None and self._restarts_do_not_help(silence) and not silence.left:
            yield from self._leave_to_people(silence)
        if lasted_s >= silence.tell_after_s - EARLY_S:
            silence.tell_after_s, silence.loud = 2 * silence.tell_after_s, True
            if self._incidents.active is None:
                yield note("silence_lasts", loud=True, what=silence.text(core.now), how=self._outlook)
        if self.silence is not None and core.state in ("STARTING", "RUNNING"):
            yield from self._watch_silence(silence)

    def _act_on(self, silence: Silence, limit: policy.SilenceLimit) -> Wants:
        """It has lasted so long that a restart may be cheaper, although nothing proves a hang."""
        report = self._report_of(silence, "not proven, it may be an honest wait")
        report = msgspec.structs.replace(report, limit_s=limit.seconds or 0.0)
        yield from self.confirmed(m.HangConfirmed(at=self._core.now, attempt=silence.attempt, report=report))

    def _report_of(self, silence: Silence, comment: str) -> HangReport:
        now = self._core.now
        why = f"{silence.text(now)}: {comment}"
        return msgspec.structs.replace(silence.report, quiet_s=round(now - silence.since, 2), why=why)

    def _restarts_do_not_help(self, silence: Silence) -> bool:
        return self._lessons.did_not_help(silence.report) >= policy.TRIES and not self._core.spec.patience_off

    def _leave_to_people(self, silence: Silence) -> Wants:
        """The job does not restart any more. The incident stays open until progress resumes."""
        silence.left = True
        report = self._report_of(silence, f"restarted {policy.TRIES} times here already, and it stands here again")
        want = OpenIncident("hang", f"hang? {report.why}", silence.since, hang=report)
        why = f"{self._lessons.did_not_help(silence.report)} restarts at this place did not help"
        yield from self._incidents.open_with_plan(want, why, "left_to_people")

    # ----- ranks that are stopped -----

    def wake_wanted(self, event: m.RankWakeWanted) -> Wants:
        attempt, core = self._attempts.live(event.attempt), self._core
        if attempt is None or not self._starts_or_runs(attempt):
            return
        if core.paused or core.mode != "enforce":
            self._nodes.leave_stopped(attempt.number, event.ranks)
            because = "paused" if core.paused else core.mode
            yield note("ranks_stopped", who=rank_names(event.ranks), one=len(event.ranks) == 1, why=because)
            return
        why = f"{rank_names(event.ranks)} stood still for {event.stopped_s:.1f} s, stopped by a signal (state T)"
        report = HangReport(
            kind="stopped", ranks=event.ranks, quiet_s=event.stopped_s, limit_s=event.stopped_s, phase="", why=why
        )
        # It is on record even if SIGCONT is all that it needs; if it is not, a confirmed hang follows.
        want = OpenIncident("hang", why, core.now - event.stopped_s, hang=report)
        yield from self._incidents.open_with_plan(want, "continued with SIGCONT, no restart", "cured")
        self._nodes.wake(event.ranks, attempt.number, attempt.ranks)

    # ----- what happens to the job -----

    def controller_started(self) -> None:
        """A new hang watch starts: it finds out by itself whether there is a hang."""
        self.silence = None
