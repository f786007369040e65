"""What the hang watch tells, and what is done about ranks that are stopped: the layer of `Job` above `course`."""

from __future__ import annotations

import msgspec

from diagnosis.incident import HangReport
from diagnosis.stuck import names
from recovery.actions import Plan
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Case
from supervisor.job.casework import HANG_BUDGET_S, Conclude
from supervisor.job.course import Course
from supervisor.job.lifecycle import Choose

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
        """An attempt, and its stopped ranks that were left alone."""

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
        self._cancel("stacks", "again")
        self._unwoken = (0, ())
        self._note(f"progress again after {event.quiet_s:.1f} s: it was no hang")
        case = self._case
        if case is not None and case.trigger == "hang" and not self._is_broken(attempt) and not self.held:
            self._go_on(case, "false alarm: progress came back by itself")

    def _hang_confirmed(self, event: m.HangConfirmed) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None:
            return
        self._cancel("stacks")
        report = event.report
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
        attempt, report = self.attempt, self._left_alone
        if attempt is None or attempt.over or report is None or self.state != "RUNNING":
            return
        case = self._fault(
            "hang", f"the hang that was left alone lasts: {report.why}", self.now - report.quiet_s, report
        )
        if case is not None:
            case.lasts = True
            self._look_into(case)

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
        self._unwoken = (0, ())
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
        self._close(case, case.plan.why)
