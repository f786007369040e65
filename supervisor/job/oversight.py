"""What operators order, and what happens when nobody does: the layer of `Job` above `review`.

Operators win: what they order is done even while the job is paused, and policy never undoes it. A run that is stopped
on request ends with 130 (SIGINT) or 143 (SIGTERM and `unbroken stop`): it is not complete, so it is never 0.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from diagnosis.incident import RULE_PREFIX, Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.actions import Cordon, Mode, Plan
from recovery.policy import BUDGET_SPENT, NOT_WORTH_RETRYING
from supervisor import messages as m
from supervisor.job.assignments import STOP_GRACE_S
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Case
from supervisor.job.review import Review
from supervisor.view import JobStateName, utc

STOPPED_EXIT = {"SIGINT": 130, "SIGTERM": 143}
_PAUSED_WHILE: dict[JobStateName, str] = {
    "IDLE": "no attempt starts until `unbroken resume`",
    "STARTING": "the start that has begun is completed; what breaks then stays as it is until `unbroken resume`",
    "RUNNING": "the ranks go on; what breaks stays as it is until `unbroken resume`",
    "DIAGNOSING": "what is broken is looked into, and stays as it is until `unbroken resume`",
    "RECOVERING": "no attempt starts until `unbroken resume`",
}


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.0f} s"


class Oversight(Review):
    """Overrides, stops, and the ends of waiting."""

    def _current(self, number: int) -> Attempt | None:
        """The current attempt if `number` means it and it is not over."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.number == number and not attempt.over else None

    @property
    def waiting(self) -> str:
        """What the job waits for, and until when, in words."""
        if self.is_over:
            return ""
        if self.held:
            return f"an operator: {self.held}{self._held_until('resume`, `restart` or `stop')}"
        if self._space is not None and not self.paused:
            return f"room on disks{self._held_until('resume`, `restart` or `stop')}: {self.waits_for_space}"
        if self._wants_approval:
            return (
                "`unbroken resume`" if self.paused else f"`unbroken approve` or `reject`{self._held_until('approve')}"
            )
        if self.state in ("IDLE", "RECOVERING"):
            return self._waiting_to_start()
        return "evidence" if self.state == "DIAGNOSING" else ""

    def _waiting_to_start(self) -> str:
        if self.paused and not self._ordered:
            return "`unbroken resume`"
        if self._orders.requeue is not None:
            return f"{self.spec.scheduler}, to start the job again"
        if "backoff" in self.timers:
            return "the back-off"
        refused = f"; {self.spec.scheduler} does not start the job again: {self.requeue_refused}"
        nodes = f"nodes: {len(self._members())} of {self.spec.nodes_max} can be used{self._until('nodes')}"
        return nodes + (refused if self.requeue_refused else "")

    def _held_until(self, what: str) -> str:
        """Since when it waits for an operator, and when that ends it."""
        since, at = f" (held since {utc(self.asked_at):%Y-%m-%d %H:%M} UTC", self.timers.get("hold")
        if self.paused:
            return f"{since})"
        if at is None:
            return f"{since}, without a limit)"
        return f"{since}; the job ends at {utc(at):%Y-%m-%d %H:%M} UTC unless `unbroken {what}`)"

    def _until(self, timer: str) -> str:
        """Then the job ends."""
        at = self.timers.get(timer)
        return "" if at is None or self.paused else f" (until {utc(at):%Y-%m-%d %H:%M} UTC)"

    def _refresh_and_proceed(self) -> None:
        self._go_on_with_room()
        if self.state == "RECOVERING" and not self._wants_approval:
            self._refresh()
        self._proceed()

    @property
    def goes_on_when_requeued(self) -> bool:
        """Whether a job that its scheduler has started again is to go on: not one that was done with."""
        return self.defined_at is not None and (self.outcome is None or self.outcome.state in ("requeued", "stopped"))

    def _job_requeued(self, event: m.JobRequeued) -> None:
        """The nodes are others. Budgets, incidents, cordons and what operators said stay; attempts count on."""
        if not self.goes_on_when_requeued or event.requeues <= self.spec.requeues:
            return
        ended, attempt = self.outcome is not None, self.attempt
        known = {node.scheduler_name: node.name for node in self.roster}
        lost = known.get(event.lost, event.lost)
        asked = f": {event.by} asked for it, for the first node, {lost}, was lost" if event.by else ""
        self._note(f"{self.spec.scheduler} has started the job again (restart {event.requeues}){asked}", loud=True)
        if not ended and attempt is not None and not self.casebook.unclosed():
            self._case_of_requeue(attempt, event, lost)
        for case in self.casebook.unclosed():
            if case.plan is None:
                case.plan = Plan(kind="requeue", why="the scheduler started the job again", counts=False)
        self._begin_life()
        self.spec = msgspec.structs.replace(self.spec, requeues=event.requeues)
        self._spec_open = True

    def _case_of_requeue(self, attempt: Attempt, event: m.JobRequeued, lost: str) -> None:
        """No controller lived to tell why it ended; one of the nodes may have."""
        what = f"attempt {attempt.number} ended with all its nodes, and nothing was told before"
        why = "the scheduler started the job again while it ran: most likely the node of its controller was lost"
        if lost:
            what = f"node {lost}, the first one, was lost with the controller"
            why = f"the scheduler has lost {lost}, where the controller was, says {event.by}"
        failed_at = self.heard_before if event.lost_at is None else event.lost_at
        case = self._open("node_lost", what, self.heard_before, attempt, None)
        case.failed_at = attempt.broke_at = min(self.now, max(attempt.formed_at, failed_at))
        case.verdict = Verdict(
            failure_class=FailureClass.NODE_FAILURE,
            culprits=(Culprit(node=lost),) if lost else (),
            confidence=0.9 if lost else 0.5,
            why=why,
            action="requeue",
        )
        case.mark("diagnose", self.now)

    def _stop_requested(self, event: m.StopRequested) -> None:
        if self.is_over or (self.attempt is not None and self.attempt.finishing):
            return
        if self.requeuing and event.signal != "SIGINT":
            self._requeued()  # the scheduler's way to begin it
            return
        self._stop(event.signal, f"stopped by {event.signal} on {event.node}{self._near_its_limit()}")
        if event.signal == "SIGTERM":
            self._look_whether_again()

    def _stop(self, signal: str, why: str) -> None:
        """Exit code 130 for SIGINT, else 143: a stopped run is not complete, so it is never 0."""
        self._stop_signal = signal if signal in STOPPED_EXIT else "SIGTERM"
        code = STOPPED_EXIT[self._stop_signal]
        self._end(m.Outcome(state="stopped", exit_code=code, line=why), why, grace_s=STOP_GRACE_S)

    def _hold_due(self) -> None:
        why = (
            f"nobody decided within {_hours(self.spec.hold_limit_s)} (run.hold_limit_s): "
            f"{self.held or 'a plan waited for approval'}"
        )
        if self._space is not None:
            limit = _hours(self.spec.hold_limit_s)
            why = f"no room on disks within {limit} (run.hold_limit_s): {self.waits_for_space}"[:400]
        self._end(m.Outcome(state="failed", exit_code=NOT_WORTH_RETRYING, line=why), why)

    def _nodes_due(self) -> None:
        if self.paused or self.held or self._wants_approval:
            return
        if self.requeuing or self._will_ask_again:
            self._set_timer("nodes", self.now + self.spec.wait_for_nodes_s)
            return
        found = len(self._members())
        why = f"no {self.spec.nodes_min} nodes within {self.spec.wait_for_nodes_s:.0f} s ({found} can be used)"
        why += f"; {self.spec.scheduler} does not start the job again: {self.requeue_refused}" * bool(
            self.requeue_refused
        )
        self._end(m.Outcome(state="failed", exit_code=BUDGET_SPENT, line=why), why)

    def _backoff_due(self) -> None:
        self._go_on_with_room()
        self._proceed()

    def _gather_due(self) -> None:
        self._proceed()

    def _end_due(self) -> None:
        self._leave(even_so=True)

    def _override_given(self, event: m.OverrideGiven) -> None:
        if self.is_over and not event.argument.startswith(RULE_PREFIX):
            self._refuse(f"{event.command}: the job has ended already")
            return
        by = f" by {event.by}" if event.by else ""
        reason = f" ({event.reason})" if event.reason else ""
        self._note(f"operator: {event.command} {event.argument}".rstrip() + by + reason)
        if event.unrecorded:
            told = f"{event.command}: done although the journal cannot be written now ({event.unrecorded})"
            self._note(f"{told}: it is recorded when that is possible again", loud=True)
        before = self.attempt if self.state == "STARTING" else None
        getattr(self, f"_operator_{event.command}")(event)
        if self.state == "STARTING" and self.attempt is not None and self.attempt is not before:
            nodes = ", ".join(self.attempt.members[:8]) + (", ..." if len(self.attempt.members) > 8 else "")
            self._note(f"attempt {self.attempt.number} is being formed on {nodes}")

    def _refuse(self, why: str) -> None:
        self._note(why, refused=True)

    def _operator_pause(self, event: m.OverrideGiven) -> None:
        if self.pause is not None:
            who = f" by {self.pause.by}" if self.pause.by else ""
            self._note(f"it was paused already, since {utc(self.pause.at):%Y-%m-%d %H:%M:%S} UTC{who}")
            return
        self.pause, self._ordered = event, False
        for node in self.roster:
            node.wake = ()
        self._cancel("hold")
        self._touch_all()
        self._note(_PAUSED_WHILE[self.state])

    def _operator_resume(self, _: m.OverrideGiven) -> None:
        if not (self.paused or self.held or self._wants_approval or self._space is not None):
            self._note("nothing was paused or held")
            return
        if self._space is not None and not self.paused:
            self._note("the next attempt starts although there may be no room")
            self._space = None
            self._cancel("backoff")
        if self.tripped:
            self.cordons.start_anew()
            self._note("the circuit breaker starts anew: policy may cordon again")
        self.pause, self.held = None, ""
        self._cancel("hold", "nodes", "gather")
        self._touch_all()
        if self.mode == "enforce" and not self._wants_approval:
            self._review_now()
        case = self._case
        if self._wants_approval and case is not None and case.plan is not None:
            if self.mode != "enforce":
                self._note(f"{case.id} waits for `unbroken approve` or `reject` ({case.plan.kind}: {case.plan.why})")
                self._wait_for_operator()
            else:
                self._carry_out(case, case.plan)
            return
        self._go_on_from_hold()

    def _go_on_from_hold(self) -> None:
        """A hold leaves the broken attempt as it is, or (`_began_again`) has ended it already."""
        if self.state == "RECOVERING" and self._case is not None:
            self._next_attempt()
        else:
            self._refresh_and_proceed()

    def _ends_by_itself(self) -> bool:
        """Its work is done: a restart would do it again, and a stop would call it incomplete."""
        finishing = self.attempt is not None and self.attempt.finishing and not self.attempt.over
        if finishing:
            self._refuse("every rank has ended well: the job ends by itself within a minute, as complete")
        return finishing

    def _operator_restart(self, _: m.OverrideGiven) -> None:
        if self._ends_by_itself():
            return
        if self.attempt is None or self.state == "IDLE":
            self._proceed(by_operator=True)
            if self.state == "IDLE" and self.paused:
                self._note(f"the first attempt starts as soon as it can; it waits for {self.waiting}")
            elif self.state == "IDLE":
                self._refuse(f"nothing runs yet, and it waits for {self.waiting}")
            return
        self.held = ""
        self.restarts += 1
        if self._case is not None and self._case.plan is None:
            self._case.plan = Plan(kind="restart", why="an operator restarted the run", counts=False)
        self._next_attempt(by_operator=True)

    def _operator_stop(self, event: m.OverrideGiven) -> None:
        if self._ends_by_itself():
            return
        if self._may_have_been_asked:
            self._take_back()
        self._stop("SIGTERM", f"stopped by an operator{f': {event.reason}' if event.reason else ''}")

    def _operator_cordon(self, event: m.OverrideGiven) -> None:
        name, _, gpu = event.argument.partition("/")
        if not name:
            self._refuse("cordon needs the name of a node")
            return
        reason = event.reason or "an operator's order"
        if self.roster.get(name) is None and not self._scheduler_name(name):
            self._note(f"the job knows no node {name}: it is left out if it comes", loud=True, unknown_node=True)
        self._cordon(Cordon(node=name, gpu=gpu, reason=reason, by=event.by or "operator", at=self.now))
        attempt = self.attempt
        if attempt is None or attempt.over or name not in attempt.members:
            return
        if self.state == "STARTING" and attempt.round is None:
            self._next_attempt()
        elif attempt.round is None:
            self._refresh_and_proceed()
        else:
            self._note(
                f"{name} is in use: it is left out from the next attempt on (`unbroken restart`: now)", loud=True
            )

    def _operator_uncordon(self, event: m.OverrideGiven) -> None:
        name, _, gpu = event.argument.partition("/")
        if not name:
            self._refuse("uncordon needs the name of a node")
            return
        if gpu and self.cordons.on(name, gpu) is None:
            held = self.cordons.of(name, self.now)
            what = f"{_place(held)} is ({held.reason})" if held is not None else "nor is the node"
            self._refuse(f"{event.argument} is not cordoned; {what}")
            return
        if not self._uncordon(name, gpu):
            self._note(f"{event.argument} was not cordoned; policy will not cordon it for what is known so far")
        held = self.cordons.of(name, self.now)
        if held is not None:
            self._note(f"{name} is still left out: {_place(held)} is cordoned ({held.reason})")
        self._touch_all()
        self._refresh_and_proceed()

    def _operator_mode(self, event: m.OverrideGiven) -> None:
        if event.argument not in get_args(Mode):
            self._refuse(f"unknown mode {event.argument!r}: observe, recommend or enforce")
            return
        self.mode = event.argument  # type: ignore[assignment]
        self._touch_all()
        case = self._case
        if self.mode == "enforce" and (self.hung is not None or "again" in self.timers):
            self._set_timer("again", self.now)  # a hang that was only watched
        if self.mode == "enforce" and not self._wants_approval:
            self._review_now()
        if self.mode != "enforce" and self.state == "RECOVERING":
            if self._wants_approval:
                self._note("the plan that waits is not carried out without `unbroken approve`")
            elif not self.held:
                self._note("the restart that has begun is completed; after that nothing is done by itself")
        if self.mode == "enforce" and self._wants_approval and not self.paused and case is not None and case.plan:
            self._carry_out(case, case.plan)

    def _waiting_plan(self, event: m.OverrideGiven) -> tuple[Case, Plan] | None:
        """The plan that the order is about; an order that names another incident is refused."""
        case = self._case
        if not self._wants_approval or case is None or case.plan is None:
            waiting = f"; the job waits for {self.waiting}" if self.waiting else ""
            self._refuse(f"nothing waits for approval{waiting}")
            return None
        named = event.argument if event.argument.startswith("i-") else f"i-{event.argument}"
        if event.argument and named != case.id:
            self._refuse(f"{event.argument} is not what waits for approval: that is {case.id} ({case.plan.why})")
            return None
        return case, case.plan

    def _operator_approve(self, event: m.OverrideGiven) -> None:
        if event.argument.startswith(RULE_PREFIX):
            return  # that it was decided is on record; the rule is in a file of the job folder
        waiting = self._waiting_plan(event)
        if waiting is not None:
            self._carry_out(*waiting, by_operator=True)

    def _operator_reject(self, event: m.OverrideGiven) -> None:
        if event.argument.startswith(RULE_PREFIX):
            return
        if self._waiting_plan(event) is None:
            return
        self._wants_approval = False
        self._hold(f"the plan was rejected{f': {event.reason}' if event.reason else ''}")


def _place(cordon: Cordon) -> str:
    return f"{cordon.node}/{cordon.gpu}" if cordon.gpu else cordon.node
