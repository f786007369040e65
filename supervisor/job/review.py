"""A second look at a verdict, when evidence of the failure comes late: the layer of `Job` above `casework`.

A GPU's last words may come some milliseconds after those of its rank, and the start that was ordered meanwhile would
use it again. Until the next attempt has made a step, and for a minute at most, what is heard of the time of the failure
leads to a new verdict; where that wants other nodes left out, the start that has begun goes on without them: once an
incident, charged once, and never against an operator's word.
"""

from __future__ import annotations

import msgspec

from diagnosis.incident import Verdict
from diagnosis.signals import Finding, NodeEvidence
from recovery import policy
from recovery.actions import Plan
from supervisor.job.casebook import Case
from supervisor.job.casework import Casework

REVIEW_S = 60.0
"""After its verdict; an incident whose next attempt has not been started yet may be looked at again later, too."""
SLACK_S = 5.0
"""Clocks of nodes differ, and a driver may tell seconds later what a rank has felt at once."""
LOOKS = 16
"""At an incident: a diagnosis takes milliseconds, and all nodes may tell of a broken fabric one after the other."""


class Review(Casework):
    """Late findings and late evidence."""

    def _late_finding(self, finding: Finding) -> None:
        """What the kernel, a GPU or the host told may be about what has been concluded already."""
        case = self._open_to_review()
        if case is None or finding.severity == "warning" or finding.evidence.source == "output":
            return
        if finding.attempt not in (0, case.attempt):
            return
        if finding.at <= case.opened_at + SLACK_S:
            self._review(case)

    def _late_evidence(self, piece: NodeEvidence) -> None:
        """Evidence of an attempt that is over, which its verdict could not wait for."""
        case = self._open_to_review()
        if case is None or case.of is None or case.of.number != piece.attempt:
            return
        if case.of is self.attempt or case.of.keep_evidence(piece):
            case.take(case.of.evidence.values())
            self._review(case)

    def _open_to_review(self) -> Case | None:
        """The incident whose plan is being carried out, or waits for an operator."""
        case = next(reversed(self.casebook.unclosed()), None)
        if self.is_over or self.attempt is None or case is None or case.of is None or case.plan is None:
            return None
        if case.replanned or case.looks >= LOOKS or case.plan.kind not in ("restart", "requeue"):
            return None
        if self._wants_approval:
            return case if case is self._case else None
        if self._case is not None or self.attempt is case.of or self.attempt.finishing:
            return None
        started = self.attempt.round is not None
        return None if started and self.now > case.marks["diagnose"] + REVIEW_S else case

    def _review(self, case: Case) -> None:
        attempt, before, held = case.of, case.verdict, case.plan
        if attempt is None or before is None or held is None:
            return
        case.looks += 1
        self._forget(before, attempt, case.marks["diagnose"])
        verdict = self._verdict(case, attempt)
        situation = self._situation(case, verdict, attempt)
        # Members that the first plan left out are not there for the start that has begun.
        blamed = {culprit.node for culprit in verdict.culprits}
        there = [n for n in attempt.members if n not in situation.lost]
        there = [n for n in there if n in blamed or self.cordons.of(n, self.now) is None]
        situation = msgspec.structs.replace(situation, nodes=len(there))
        if not self._wants_approval:
            situation = msgspec.structs.replace(situation, delay_s=0.0)  # this restart is charged already
        plan = policy.plan(verdict, situation)
        known = {cordon.node for cordon in held.cordons}
        fresh = [c for c in plan.cordons if c.node not in known and self.cordons.of(c.node, self.now) is None]
        surer = verdict.failure_class is not before.failure_class and verdict.confidence > before.confidence
        told = f"{verdict.failure_class.value} ({verdict.confidence:.0%} sure): {verdict.why}"
        refused = "" if self._wants_approval else self._may_not_act()
        if fresh and refused:
            self._tell_once(case, f"{told}; {plan.why}: not done, {refused} (`unbroken cordon` leaves a node out)")
        elif fresh:
            self._revise(case, verdict, f"{told}; {plan.why}")
            self._replan(case, plan)
        elif surer:
            self._revise(case, verdict, f"{told}; the plan stays" + (f": {plan.why}" if plan.breaker else ""))
        self._remember(case.verdict or before, attempt, case.marks["diagnose"])

    def _may_not_act(self) -> str:
        """Why what has begun is not changed now; empty: it may be."""
        if self.paused:
            return "the job is paused"
        if self.mode != "enforce":
            return f"mode {self.mode}"
        return f"{self.spec.scheduler} was asked already to start the job again" if self._may_have_been_asked else ""

    def _tell_once(self, case: Case, told: str) -> None:
        if not case.late_told:
            case.late_told = True
            self._note(f"{case.id}: looked at again: {told}", incident=case.id, loud=True)

    def _revise(self, case: Case, verdict: Verdict, told: str) -> None:
        if case.verdict is not None and case.plan is not None and not case.revised:
            case.revised = f"{case.verdict.failure_class.value} ({case.verdict.confidence:.0%} sure): {case.plan.why}"
        case.verdict = verdict
        self._note(f"{case.id}: looked at again: {told}", incident=case.id, loud=True)

    def _replan(self, case: Case, plan: Plan) -> None:
        """For the same incident: what was charged for the first plan stays charged."""
        charged = case.plan.counts if case.plan is not None and not self._wants_approval else plan.counts
        case.plan, case.replanned = msgspec.structs.replace(plan, counts=charged), True
        if not self._wants_approval:
            self._leave_out(case, plan)
            self._start_without(case, {cordon.node for cordon in plan.cordons})

    def _start_without(self, case: Case, left_out: set[str]) -> None:
        attempt = self.attempt
        assert attempt is not None
        if not left_out & set(attempt.members):
            return
        for phase in ("decide", "stop", "rendezvous", "start"):
            case.marks.pop(phase, None)  # of the start that is given up
        case.next_attempt = None
        if attempt.round is not None:
            self._next_attempt()
            return
        self._enter("RECOVERING")  # nothing of it has run: the same attempt on other nodes
        self._cancel("form")
        self._refresh()
        self._proceed()

    def _review_now(self) -> None:
        """An operator lets policy act again: what was heard meanwhile may want another plan."""
        case = self._open_to_review()
        if case is not None and case.late_told:
            self._review(case)

    def _next_attempt(self, delay_s: float = 0.0, by_operator: bool = False) -> None:
        if by_operator:
            for case in self.casebook.unclosed():
                case.of = None  # it starts as an operator ordered it
        super()._next_attempt(delay_s, by_operator)

    def _begin_life(self) -> None:
        super()._begin_life()
        for case in self.casebook.unclosed():
            case.of = None  # its nodes are others
