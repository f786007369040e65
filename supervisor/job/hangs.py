"""What the hang watch tells, and what is done about ranks that are stopped: the layer of `Job` above `course`."""

from __future__ import annotations

import msgspec

from diagnosis.incident import HangReport, Verdict
from diagnosis.stuck import names
from recovery import patience
from recovery.actions import Plan
from recovery.policy import Situation
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Case
from supervisor.job.casework import HANG_BUDGET_S, Conclude
from supervisor.job.course import Course
from supervisor.job.lifecycle import Choose
from supervisor.job.silence import Lessons, Silence

RESTACK_S = 3.0
RESTACK_SLOW_S = 30.0
RESTACK_FAST = 10
"""While a hang is suspected stacks are taken every 3 s, ten times; then every 30 s."""
AWAKE_S = 30.0
"""Ranks that were continued late get this long, and three steps, to show progress."""


class Hangs(Course):
    """Suspicions, stacks, stopped ranks, confirmed hangs."""

    def __init__(self, choose: Choose, conclude: Conclude) -> None:
        super().__init__(choose, conclude)
        self._suspected = 0
        """How often stacks were asked for in the current suspicion; 0: none is open."""
        self._unwoken: tuple[int, tuple[int, ...]] = (0, ())
        self._woken = 0
        """The attempt of which ranks were continued with SIGCONT, until progress is back."""
        """An attempt, and its stopped ranks that were left alone."""
        self.silence: Silence | None = None
        """What lasts now, and nothing proves to be a hang."""
        self._lessons = Lessons()

    def _hang_suspected(self, event: m.HangSuspected) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None or self.state not in ("STARTING", "RUNNING"):
            return
        self._note(f"a hang is suspected: {event.report.why}")
        self._suspected = 0
        self._take_stacks(attempt, event.report)

    def _take_stacks(self, attempt: Attempt, report: HangReport | None = None) -> None:
        """Again and again while the suspicion lasts: only a stack that stays the same tells."""
        nodes = attempt.rank_nodes
        first = [nodes[rank] for rank in report.ranks if rank in nodes] if report is not None else []
        attempt.drop_evidence_between(1, attempt.suspect_request)
        attempt.suspect_request = self._ask(self._witnesses(first), HANG_BUDGET_S, flight=True)
        self._suspected += 1
        pause_s = RESTACK_S if self._suspected < RESTACK_FAST else RESTACK_SLOW_S
        self._set_timer("stacks", self.now + pause_s)

    def _stacks_due(self) -> None:
        if self.attempt is not None and not self.attempt.over and self.state in ("STARTING", "RUNNING"):
            self._take_stacks(self.attempt)

    def _hang_cleared(self, event: m.HangCleared) -> None:
        attempt = self._current(event.attempt)
        if attempt is None:
            return
        self._cancel("stacks", "again", "silence")
        self._unwoken = (0, ())
        silence, self.silence = self.silence, None
        if silence is not None and silence.attempt == attempt.number:
            self._lessons.was_honest(silence.report, event.quiet_s)
        loud = silence is not None and silence.loud
        ended_by_us, self._woken = self._woken == attempt.number, 0
        self._note(f"progress again after {event.quiet_s:.1f} s{'' if ended_by_us else ': it was no hang'}", loud=loud)
        if self.hung is not None:
            self._close(self.hung, "progress came back by itself")
        case = self._case
        if case is not None and case.trigger == "hang" and not self._is_broken(attempt) and not self.held:
            self._go_on(case, "false alarm: progress came back by itself")

    def _hang_confirmed(self, event: m.HangConfirmed) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None:
            return
        report, hung = event.report, self.hung
        if report.step is None:
            report = msgspec.structs.replace(report, step=attempt.step)
        if hung is not None and hung.hang is not None and (hung.hang.proven or not report.proven):
            return  # it is known, and not to be acted on
        self._cancel("stacks", "silence")
        if report.proven:
            self.silence = None
        if report.kind == "stopped" and self._left_stopped(attempt):
            why = f"{names(report.ranks)} stopped (state T) for {report.quiet_s:.1f} s, and not continued so far"
            report = msgspec.structs.replace(report, why=why)
        case = self._fault("hang", f"hang: {report.why}", self.now - report.quiet_s, report)
        if case is None or self.state != "DIAGNOSING" or "evidence" in self.timers:
            return
        have = {name for name, number in attempt.evidence if number}
        nodes = attempt.rank_nodes
        asked = self._witnesses([nodes[rank] for rank in report.ranks if rank in nodes])
        missing = [name for name in asked if name not in have]
        if not missing or not attempt.suspect_request:
            self._gather(case, missing, HANG_BUDGET_S, flight=True)
            return
        case.awaiting.update((name, attempt.suspect_request) for name in missing)
        self._gather(case, (), HANG_BUDGET_S)

    def _again_due(self) -> None:
        """Progress would have cancelled this (`HangCleared`)."""
        attempt, report, hung = self.attempt, self._left_alone, self.hung
        if attempt is None or attempt.over or self.state != "RUNNING":
            return
        if hung is not None:
            self._hung, self._case, hung.lasts, hung.stood_still = None, hung, True, False
            self._enter("DIAGNOSING")
            self._look_into(hung)
            return
        if report is None:
            return
        case = self._fault(
            "hang", f"the hang that was left alone lasts: {report.why}", self.now - report.quiet_s, report
        )
        if case is not None:
            case.lasts = True
            self._look_into(case)

    # ----- silence that nothing proves to be a hang -----

    def _silence_seen(self, event: m.SilenceSeen) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None or self.state not in ("STARTING", "RUNNING"):
            return
        report, silence = event.report, self.silence
        if silence is None or silence.attempt != attempt.number:
            silence = self.silence = Silence(attempt.number, self.now - report.quiet_s, report)
            silence.loud = report.phase != "start" and self._lessons.needed_s(report) < report.quiet_s
            text = f"no progress, and no proof of a hang: {silence.text(self.now)}; {self._outlook}"
            self._note(text, loud=silence.loud)
        else:
            silence.report = report
            self._note(f"still no progress: {silence.text(self.now)}; {self._outlook}")
        self._watch_silence(silence)

    @property
    def silence_limit(self) -> patience.Limit:
        """When the present silence is acted on."""
        spec, silence = self.spec, self.silence
        figures = patience.Figures() if silence is None else self._figures(silence)
        return patience.limit(figures, patience_s=spec.patience_s, factor=spec.patience_factor, off=spec.patience_off)

    @property
    def _outlook(self) -> str:
        """What will be done about the present silence, in words."""
        limit = self.silence_limit
        if limit.seconds is None or (self.mode == "enforce" and not self.paused):
            return limit.why
        return f"nothing is done about it: {'paused' if self.paused else f'mode {self.mode}'}"

    def _figures(self, silence: Silence) -> patience.Figures:
        """What a restart would cost now, and what is known of this place."""
        attempt, report = self.attempt, silence.report
        assert attempt is not None
        took = [case.recovery_s for case in self.casebook.cases if case.recovery_s is not None]
        first = self.trains_since - self.started_at if self.trains_since and self.started_at else 0.0
        began = attempt.moved_at if attempt.moved_at is not None else attempt.stood_at
        good = [one.modified_at for one in self.candidates() if one.complete and not one.suspect]
        since = max([began if began is not None else silence.since, *good])
        return patience.Figures(
            recovery_s=max(took, default=max(first, 0.0)),
            redo_s=max(0.0, silence.since - since),
            needed_s=self._lessons.needed_s(report),
            did_not_help=self._lessons.did_not_help(report),
            timeout_s=report.timeout_s,
            over=report.kind == "exit_hang",
        )

    def _watch_silence(self, silence: Silence) -> None:
        limit_s = self.silence_limit.seconds
        wakes = [silence.tell_after_s]
        if limit_s is not None and self.hung is None:
            wakes.append(max(limit_s, self.now - silence.since + 0.001))
        self._set_timer("silence", silence.since + min(wakes))

    def _silence_due(self) -> None:
        silence, attempt = self.silence, self.attempt
        if silence is None or attempt is None or attempt.over or silence.attempt != attempt.number:
            return
        if self.state not in ("STARTING", "RUNNING"):
            return
        lasted_s, limit = self.now - silence.since, self.silence_limit
        if limit.seconds is not None and self.hung is None and lasted_s >= limit.seconds - 0.001:
            self._act_on(silence, limit)
        elif limit.seconds is None and self._helps_not(silence) and not silence.left:
            self._leave_to_people(silence, limit, attempt)
        if lasted_s >= silence.tell_after_s - 0.001:
            silence.tell_after_s, silence.loud = 2 * silence.tell_after_s, True
            if self._case is None:
                self._note(f"{silence.text(self.now)}; {self._outlook}", loud=True)
        if self.silence is not None and self.state in ("STARTING", "RUNNING"):
            self._watch_silence(silence)

    def _act_on(self, silence: Silence, limit: patience.Limit) -> None:
        """It has lasted so long that a restart may be cheaper; that it is a hang is not proven."""
        report = self._so_far(silence, "not proven, it may be an honest wait")
        report = msgspec.structs.replace(report, limit_s=limit.seconds or 0.0)
        self._hang_confirmed(m.HangConfirmed(at=self.now, attempt=silence.attempt, report=report))

    def _so_far(self, silence: Silence, more: str) -> HangReport:
        return msgspec.structs.replace(
            silence.report, quiet_s=round(self.now - silence.since, 2), why=f"{silence.text(self.now)}: {more}"
        )

    def _helps_not(self, silence: Silence) -> bool:
        return self._lessons.did_not_help(silence.report) >= patience.TRIES and not self.spec.patience_off

    def _leave_to_people(self, silence: Silence, limit: patience.Limit, attempt: Attempt) -> None:
        """Nothing is restarted any more; the incident is open until progress comes back."""
        silence.left = True
        report = self._so_far(silence, f"restarted {patience.TRIES} times here already, and it stands here again")
        case = self._open("hang", f"hang? {report.why}", silence.since, attempt, report)
        case.take(attempt.evidence.values())
        case.verdict = self._verdict(case, attempt)
        case.mark("diagnose", self.now)
        case.plan = Plan(kind="ignore", why=f"{limit.why}, a person has to look", counts=False)
        self._note(
            f"{case.id}: left waiting: {case.plan.why} (`unbroken restart`, `stop`)", incident=case.id, loud=True
        )
        self._hung = case

    def _restart(self, case: Case, plan: Plan, by_operator: bool = False) -> None:
        if case.hang is not None and case.trigger == "hang":
            self._lessons.restarted(case.hang)
        super()._restart(case, plan, by_operator)

    def _situation(self, case: Case, verdict: Verdict, attempt: Attempt) -> Situation:
        situation = super()._situation(case, verdict, attempt)
        if case.hang is None or case.trigger != "hang" or self._is_broken(attempt):
            return situation
        return msgspec.structs.replace(situation, did_not_help=self._lessons.did_not_help(case.hang))

    def _progress(self, event: m.Progressed) -> None:
        super()._progress(event)
        hung = self.hung
        if hung is not None and event.step is not None and (hung.step is None or event.step > hung.step):
            self._close(hung, "progress came back by itself")  # a new controller's watch does not know of it

    # ----- ranks that are stopped -----

    def _wake_wanted(self, event: m.RankWakeWanted) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or self.state not in ("STARTING", "RUNNING"):
            return
        if self.paused or self.mode != "enforce":
            self._unwoken = (attempt.number, event.ranks)
            who = f"{names(event.ranks)} {'is' if len(event.ranks) == 1 else 'are'}"
            self._note(f"{who} stopped; left alone ({'paused' if self.paused else self.mode})")
            return
        self._continue_stopped(event, attempt)
        self._wake(event.ranks, attempt)

    def _wake(self, ranks: tuple[int, ...], attempt: Attempt) -> None:
        self._unwoken, self._woken = (0, ()), attempt.number
        for name, its_ranks in attempt.ranks.items():
            node = self.roster.get(name)
            wake = tuple(rank for rank in ranks if rank in its_ranks)
            if node is not None and wake:
                node.wake, node.wake_number = wake, node.wake_number + 1
                self._touched.add(name)

    def _left_stopped(self, attempt: Attempt) -> tuple[int, ...]:
        """Its ranks that were to be continued, and were not."""
        number, ranks = self._unwoken
        return ranks if number == attempt.number else ()

    def _carry_out(self, case: Case, plan: Plan, by_operator: bool = False) -> None:
        """What was not to be continued by then is continued first: that may be all that it needs."""
        attempt = self.attempt
        stopped = self._left_stopped(attempt) if attempt is not None and not attempt.over else ()
        if attempt is None or not stopped or plan.kind != "restart" or by_operator or self._is_broken(attempt):
            super()._carry_out(case, plan, by_operator)
            return
        self._wake(stopped, attempt)
        case.plan = Plan(kind="ignore", why=f"{names(stopped)} continued with SIGCONT, no restart", counts=False)
        self._left_alone = case.hang
        self._go_on(case, case.plan.why)
        self._set_timer("again", self.now + AWAKE_S + 3 * (attempt.seconds_per_step or 0.0))

    def _continue_stopped(self, event: m.RankWakeWanted, attempt: Attempt) -> None:
        """It is on record even if SIGCONT is all that it needs; if it is not, a confirmed hang follows."""
        report = HangReport(
            kind="stopped",
            ranks=event.ranks,
            quiet_s=event.stopped_s,
            limit_s=event.stopped_s,
            phase="",
            why=f"{names(event.ranks)} stood still for {event.stopped_s:.1f} s, stopped by a signal (state T)",
        )
        case = self._open("hang", report.why, self.now - event.stopped_s, attempt, report)
        case.verdict = self._verdict(case, attempt)
        case.mark("diagnose", self.now)
        case.plan = Plan(kind="ignore", why="continued with SIGCONT, no restart", counts=False)
        self._close(case, case.plan.why, loud=True)
