"""The job: one state machine that sees every event and says what is to be done.

Pure and deterministic: time comes from the events, nothing is read, and the same events give the same state, which is
how a controller that was killed comes back. After a replay (whose actions are dropped) `ControllerStarted` makes the
job give out every assignment and timer again under the new epoch.

This module has what each event means; `casework` has incidents, `lifecycle` attempts and assignments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from diagnosis.incident import HangReport
from diagnosis.signals import Finding
from diagnosis.taxonomy import FailureClass
from recovery.actions import Cordon, Mode, Plan
from recovery.budgets import RestartBudget
from recovery.checkpoint import choose as choose_checkpoint
from recovery.policy import NOT_WORTH_RETRYING
from supervisor import messages as m
from supervisor.attempt import Attempt
from supervisor.casework import CRASH_BUDGET_S, HANG_BUDGET_S, Casework, Conclude
from supervisor.lifecycle import BUDGET_SPENT, HOLD_LIMIT_S, STOP_GRACE_S, Choose, InvalidTransition
from supervisor.show_job import job_view
from supervisor.view import JobView

__all__ = ["InvalidTransition", "Job"]

STAND_S = 1.0
"""Workers that all stood this long are running, whether or not progress can be seen."""
SETTLE_S = 600.0
"""An incident closes after this even if no progress can be seen in the new attempt."""
FINISH_LIMIT_S = 60.0
"""Launchers get this long to end after every rank ended well."""
RESTACK_S = 3.0
RESTACK_SLOW_S = 30.0
RESTACK_FAST = 10
"""While a hang is suspected stacks are taken every 3 s, ten times; then every 30 s."""
STOPPED_EXIT = {"SIGINT": 130, "SIGTERM": 143}
BEGAN_AGAIN = 0.5
"""A first step below this part of the step resumed from means that the script began again from nothing."""


class Job(Casework):
    """`handle` takes every event in every state: late, repeated and reordered ones are harmless."""

    def __init__(self, conclude: Conclude | None = None, choose: Choose = choose_checkpoint) -> None:
        if conclude is None:
            from diagnosis.triage import conclude
        super().__init__(choose, conclude)
        self.pace: dict[str, float] = {}
        """What the hang watch learned, for the observer of the next controller: phase -> seconds."""
        self._suspected = 0
        """How often stacks were asked for in the current suspicion; 0: none is open."""
        self._began_at: int | None = None
        """The first step of the first attempt."""
        self._step_when_saved: dict[str, int] = {}
        """Checkpoints that do not tell their step: the run's step when they appeared."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.ControllerStarted: self._controller_started,
            m.JobDefined: self._job_defined,
            m.NodeJoined: self._node_joined,
            m.NodeLost: self._node_lost,
            m.LauncherReady: self._launcher_ready,
            m.PreparationFailed: self._preparation_failed,
            m.WorkersStarted: self._workers_started,
            m.Progressed: self._progress,
            m.RankEnded: self._rank_ended,
            m.LauncherEnded: self._launcher_ended,
            m.EvidenceArrived: self._evidence_arrived,
            m.FindingArrived: self._finding_arrived,
            m.HangSuspected: self._hang_suspected,
            m.HangCleared: self._hang_cleared,
            m.RankWakeWanted: self._wake_wanted,
            m.HangConfirmed: self._hang_confirmed,
            m.PaceLearned: self._pace_learned,
            m.CheckpointsSeen: self._checkpoints_seen,
            m.StopRequested: self._stop_requested,
            m.NodeDone: self._node_done,
            m.TimerFired: self._timer_fired,
            m.OverrideGiven: self._override_given,
        }

    def handle(self, event: m.AnyEvent) -> list[m.Action]:
        """What is to be done about `event`. Raises InvalidTransition (a defect of ours) and nothing else."""
        self.now = max(self.now, event.at)
        self._event = event
        self._actions = []
        self._handlers[type(event)](event)
        self._settle()
        return self._actions

    def view(self) -> JobView:
        """Everything that is shown of the job."""
        return job_view(self)

    def _current(self, number: int) -> Attempt | None:
        """The current attempt if `number` means it and it is not over."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.number == number and not attempt.over else None

    # ----- controller and nodes -----

    def _controller_started(self, event: m.ControllerStarted) -> None:
        if event.epoch > self.epoch:
            if self.epoch:
                self._note(f"the controller was started again (epoch {event.epoch})")
            self.epoch = event.epoch
        for timer, at in self.timers.items():
            self._actions.append(m.SetTimer(timer=timer, at=at))
        for node in self.roster:
            node.sent = None
        self._touch_all()
        if self.outcome is not None:
            self._ended = False
            self._leave()

    def _job_defined(self, event: m.JobDefined) -> None:
        if self.defined_at is not None:
            if event.spec != self.spec:
                self._note("a node asks for something else than the first one did: the first one's word holds")
            return
        self.defined_at = self.now
        self.spec, self.mode = event.spec, event.spec.mode
        self.budget = RestartBudget(event.spec.max_restarts)
        self._proceed()

    def _node_joined(self, event: m.NodeJoined) -> None:
        known = self.roster.get(event.node)
        back = known is not None and not known.standing
        node = self.roster.join(event)
        node.sent = None  # whatever it was told before, tell it again
        self._touched.add(node.name)
        if known is None or back:
            self._note(f"{node.name} ({node.host}) {'is back' if back else 'joined'}")
        if back:
            node.findings_seen = 0
        self._refresh_and_proceed()

    def _refresh_and_proceed(self) -> None:
        if self.state == "RECOVERING" and not self._wants_approval:
            self._refresh()
        self._proceed()

    def _node_lost(self, event: m.NodeLost) -> None:
        node = self.roster.get(event.node)
        if node is None or not node.standing:
            return
        node.standing, node.why = False, f"no word from it for {event.silent_s:.0f} s"
        self._note(f"{node.name} is lost: {node.why}", loud=True)
        self._leave()
        attempt = self.attempt
        if attempt is None or attempt.over or node.name not in attempt.members:
            return
        if self.state == "RECOVERING" and not self._wants_approval:
            self._refresh_and_proceed()
            return
        case = self._fault("node_lost", f"node {node.name} was lost ({node.why})", self.now - event.silent_s)
        if case is not None:
            case.lost_nodes.append(node.name)
            self._look_into(case)

    def _look_into(self, case: Any) -> None:
        """Ask everybody, unless they have been asked."""
        if self.state != "DIAGNOSING":
            return
        if "evidence" in self.timers:
            self._conclude_when_ready()
        else:
            self._gather(case, self._witnesses(), CRASH_BUDGET_S)

    # ----- an attempt begins -----

    def _launcher_ready(self, event: m.LauncherReady) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is not None or event.node not in attempt.members:
            return
        attempt.offers[event.node] = event.offer
        for case in self.casebook.unclosed():
            if case.next_attempt is not None:
                case.mark("stop", self.now)
        self._form_round()

    def _preparation_failed(self, event: m.PreparationFailed) -> None:
        attempt = self.attempt
        if attempt is None or attempt.over or attempt.round is not None or event.attempt > attempt.number:
            return
        attempt.prepare_error = f"{event.node} could not prepare attempt {event.attempt}: {event.error}"
        if self.state == "STARTING":
            self._setup_fault(attempt.prepare_error)

    def _begin_attempt(self, attempt: Attempt) -> None:
        super()._begin_attempt(attempt)
        if attempt.prepare_error:
            self._setup_fault(attempt.prepare_error)

    def _workers_started(self, event: m.WorkersStarted) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or event.node not in attempt.members:
            return
        attempt.ranks[event.node] = event.ranks
        if attempt.stood_at is None and attempt.all_stand:
            attempt.stood_at = self.now
            self._mark_restarted("start")
            self._cancel("start")
            if self.state == "STARTING":
                self._set_timer("stood", self.now + STAND_S)

    def _mark_restarted(self, phase: str) -> None:
        for case in self.casebook.unclosed():
            if case.next_attempt is not None:
                case.mark(phase, self.now)

    def _run(self) -> None:
        if self.state != "STARTING":
            return
        self._enter("RUNNING")
        self._cancel("stood", "start")
        assert self.attempt is not None
        self._note(f"attempt {self.attempt.number} runs")
        self._set_timer("settle", self.now + SETTLE_S)

    def _progress(self, event: m.Progressed) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None:
            return
        attempt.moved = True
        self._run()
        attempt.note_step(event.step, event.last_step, self.now)
        if event.step is not None:
            self.first_step_at = self.now if self.first_step_at is None else self.first_step_at
            if not attempt.compared:
                attempt.compared = True
                self._first_step(attempt, event.step)
            if not attempt.over:
                self._reached(event.step)

    def _reached(self, step: int | None) -> None:
        """Further than ever is progress."""
        if step is not None and (self.furthest is None or step > self.furthest):
            self.furthest = step
            self._progressed()

    def _first_step(self, attempt: Attempt, step: int) -> None:
        if attempt.number == 1:
            self._began_at = step
        expected = self._expected_step(attempt)
        if attempt.number > 1 and expected is not None and step + 2 < expected:
            if step < expected * BEGAN_AGAIN:
                self._began_again(attempt, step, expected)
                return
            self._note(f"the run goes on at step {step}, before the checkpoint of step {expected}", loud=True)
        self._recovered(attempt, f"attempt {attempt.number} reached step {step}")

    def _expected_step(self, attempt: Attempt) -> int | None:
        """The step of the checkpoint that the attempt should have started from; None: unknown, or not of this job."""
        path = attempt.resume.path
        found = next((c for c in self.candidates() if c.path == path), None)
        if not path or found is None or self.started_at is None:
            return None
        step = attempt.resume.step if attempt.resume.step is not None else self._step_when_saved.get(path)
        ours = found.modified_at >= self.started_at
        # An older one counts only if the first attempt started from it: else the user means to begin anew.
        if step is None or not (ours or (self._began_at is not None and self._began_at + 2 >= step)):
            return None
        return step

    def _began_again(self, attempt: Attempt, step: int, expected: int) -> None:
        """Stop it before it overwrites a good checkpoint."""
        self._note(
            f"attempt {attempt.number} began again at step {step}, although {attempt.resume.path} holds "
            f"step {expected}: stopped before that is overwritten. Tell the script how to resume (`--restart-args`)",
            loud=True,
        )
        self._enter("RECOVERING")
        self._form(self._members())
        self._hold(f"the script does not resume from its checkpoint (it began at step {step} instead of {expected})")

    def _recovered(self, attempt: Attempt, how: str) -> None:
        for case in self.casebook.unclosed():
            if case.next_attempt is None:
                continue
            case.mark("first_step", self.now)
            pace = self._pace_before
            if pace is not None and case.step is not None and attempt.first_step is not None:
                case.redo_s = max(0, case.step - attempt.first_step) * pace
            self._close(case, how)

    # ----- ends -----

    def _rank_ended(self, event: m.RankEnded) -> None:
        attempt = self._current(event.attempt)
        record = event.exit
        if attempt is None or attempt.round is None or record.rank in attempt.exits or record.stopped_by_us:
            return
        attempt.exits[record.rank] = record
        attempt.note_step(event.step, event.last_step, self.now)
        self._reached(event.step)
        if record.code == 0:
            self._ended_well(attempt)
            return
        how = f"signal {record.signal}" if record.signal is not None else f"exit code {record.code}"
        first = self.state in ("STARTING", "RUNNING")
        case = self._fault("exit", f"rank {record.rank} on {event.node} ended by {how}", record.ended_at)
        if case is None or self.state != "DIAGNOSING":
            return
        if (event.node, 0) not in attempt.evidence:
            case.awaiting.add((event.node, 0))
        if first:
            self._gather(case, [n for n in self._witnesses() if n != event.node], CRASH_BUDGET_S)
        elif "evidence" not in self.timers:
            self._conclude_when_ready()

    def _ended_well(self, attempt: Attempt) -> None:
        if not attempt.ended_well or self.state not in ("STARTING", "RUNNING", "DIAGNOSING", "RECOVERING"):
            return
        if self.state == "STARTING":
            self._run()
        if self._case is not None:
            self._go_on(self._case, "false alarm: every rank ended well")
        attempt.finishing = True
        for case in self.casebook.unclosed():
            self._close(case, "every rank ended well")
        self._note("every rank ended with code 0")
        self._set_timer("finish", self.now + FINISH_LIMIT_S)
        self._touch_all()
        self._finished(attempt)

    def _finished(self, attempt: Attempt, late: bool = False) -> None:
        waiting = [
            name
            for name in attempt.members
            if name not in attempt.launchers_ended and (node := self.roster.get(name)) and node.standing
        ]
        if late or not waiting:
            self._end(m.Outcome(state="succeeded", exit_code=0, line="the run is complete"), "the run is complete")

    def _launcher_ended(self, event: m.LauncherEnded) -> None:
        attempt = self.attempt
        if attempt is None or attempt.over or event.node not in attempt.members:
            return
        if attempt.round is None or event.attempt < attempt.number:
            # It may be the one of the attempt before; only one that is known to have ended just now counts.
            if event.fresh and self.state == "STARTING" and event.attempt <= attempt.number:
                self._launcher_ended_early(attempt, event)
            return
        if event.attempt > attempt.number or event.node in attempt.launchers_ended:
            return
        if attempt.finishing:
            attempt.launchers_ended[event.node] = event.how
            self._finished(attempt)
            return
        self._launcher_fault(attempt, event)

    def _launcher_ended_early(self, attempt: Attempt, event: m.LauncherEnded) -> None:
        """While the attempt is being formed. The first end may be that of the attempt before: agents start another."""
        if attempt.number == 1 or event.node in attempt.early_ends:
            self._launcher_fault(attempt, event)
        attempt.early_ends.add(event.node)

    def _launcher_fault(self, attempt: Attempt, event: m.LauncherEnded) -> None:
        attempt.launchers_ended[event.node] = event.how
        case = self._fault("launcher", f"the launcher on {event.node} ended ({event.how})", self.now)
        if case is not None:
            case.launcher_exits[event.node] = event.how
            self._look_into(case)

    # ----- evidence, findings, hangs -----

    def _evidence_arrived(self, event: m.EvidenceArrived) -> None:
        piece = event.evidence
        node = self.roster.get(piece.node)
        attempt = self.attempt
        if node is None or attempt is None or piece.attempt != attempt.number:
            return
        if piece.request > node.evidence_seen:
            node.evidence_seen = piece.request
            self._touched.add(node.name)
        if attempt.keep_evidence(piece):
            for finding in piece.findings:
                self.casebook.note_finding(finding)
            self._conclude_when_ready()

    def _finding_arrived(self, event: m.FindingArrived) -> None:
        node = self.roster.get(event.node)
        if node is None or event.number < node.findings_seen:
            return
        node.findings_seen = event.number + 1
        self._touched.add(node.name)
        self.casebook.note_finding(event.finding)
        if event.finding.failure_class is FailureClass.LOSS_SPIKE_OR_NAN:
            self._numerics(event.finding)

    def _numerics(self, finding: Finding) -> None:
        """The numbers went wrong: an incident, and what is saved from now on is suspect. No restart."""
        attempt = self.attempt
        if attempt is None or attempt.over or self.state != "RUNNING" or self.suspect_open:
            return
        since = min(self.now, max(finding.at, attempt.formed_at))
        self.suspect_spans.append((since, None))
        case = self._open(
            "signal", f"{finding.evidence.text or finding.rule} (step {attempt.step})", since, attempt, None
        )
        case.evidence = list(attempt.evidence.values())
        case.verdict = self._verdict(case, attempt)
        case.mark("diagnose", self.now)
        case.plan = Plan(
            kind="ignore", why="no restart: checkpoints written from now on are suspect and used last", counts=False
        )
        self._note(f"{case.id}: {case.verdict.why}. {case.plan.why}", incident=case.id, loud=True)
        self._close(case, case.plan.why)

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

    def _hang_cleared(self, event: m.HangCleared) -> None:
        attempt = self._current(event.attempt)
        if attempt is None:
            return
        self._cancel("stacks")
        self._note(f"progress again after {event.quiet_s:.1f} s: it was no hang")
        case = self._case
        if case is not None and case.trigger == "hang" and not self._is_broken(attempt) and not self.held:
            self._go_on(case, "false alarm: progress came back by itself")

    def _wake_wanted(self, event: m.RankWakeWanted) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or self.state not in ("STARTING", "RUNNING"):
            return
        if self.paused or self.mode != "enforce":
            self._note(
                f"ranks {_ranks(event.ranks)} are stopped; left alone ({'paused' if self.paused else self.mode})"
            )
            return
        self._note(f"ranks {_ranks(event.ranks)} are stopped: continued with SIGCONT")
        for name, ranks in attempt.ranks.items():
            node = self.roster.get(name)
            wake = tuple(rank for rank in event.ranks if rank in ranks)
            if node is not None and wake:
                node.wake, node.wake_number = wake, node.wake_number + 1
                self._touched.add(name)

    def _hang_confirmed(self, event: m.HangConfirmed) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None:
            return
        self._cancel("stacks")
        report = event.report
        case = self._fault("hang", f"hang: {report.why}", self.now - report.quiet_s, report)
        if case is None or self.state != "DIAGNOSING" or "evidence" in self.timers:
            return
        have = {name for name, number in attempt.evidence if number}
        nodes = attempt.rank_nodes
        names = self._witnesses([nodes[rank] for rank in report.ranks if rank in nodes])
        missing = [name for name in names if name not in have]
        if not missing or not attempt.suspect_request:
            self._gather(case, missing, HANG_BUDGET_S, flight=True)
            return
        case.awaiting.update((name, attempt.suspect_request) for name in missing)
        self._gather(case, (), HANG_BUDGET_S)

    def _pace_learned(self, event: m.PaceLearned) -> None:
        self.pace = dict(event.longest_s)

    def _checkpoints_seen(self, event: m.CheckpointsSeen) -> None:
        known = {(c.path, c.modified_at) for c in self.checkpoints.get(event.node, ())}
        step = self.attempt.step if self.attempt is not None else None
        for checkpoint in event.checkpoints:
            if checkpoint.step is None and step is not None and (checkpoint.path, checkpoint.modified_at) not in known:
                self._step_when_saved[checkpoint.path] = step
        while len(self._step_when_saved) > 64:
            del self._step_when_saved[next(iter(self._step_when_saved))]
        self.checkpoints[event.node] = event.checkpoints[:8]
        if self.state == "STARTING" or (self.state == "RECOVERING" and not self._wants_approval):
            self._refresh()

    # ----- stopping -----

    def _stop_requested(self, event: m.StopRequested) -> None:
        if self.is_over or (self.attempt is not None and self.attempt.finishing):
            return
        self._stop(event.signal, f"stopped by {event.signal} on {event.node}")

    def _stop(self, signal: str, why: str) -> None:
        """Exit code 130 for SIGINT, else 143: a stopped run is not complete, so it is never 0."""
        self._stop_signal = signal if signal in STOPPED_EXIT else "SIGTERM"
        code = STOPPED_EXIT[self._stop_signal]
        self._end(m.Outcome(state="stopped", exit_code=code, line=why), why, grace_s=STOP_GRACE_S)

    def _node_done(self, event: m.NodeDone) -> None:
        node = self.roster.get(event.node)
        if node is not None:
            node.done = self.is_over
            self._leave()

    # ----- timers -----

    def _timer_fired(self, event: m.TimerFired) -> None:
        due = self.timers.get(event.timer)
        if due is None:
            return
        if event.at < due - 0.001:
            self._actions.append(m.SetTimer(timer=event.timer, at=due))
            return
        del self.timers[event.timer]
        getattr(self, f"_{event.timer}_due")()

    def _evidence_due(self) -> None:
        self._conclude_when_ready(late=True)

    def _backoff_due(self) -> None:
        self._proceed()

    def _gather_due(self) -> None:
        self._proceed()

    def _stood_due(self) -> None:
        self._run()

    def _end_due(self) -> None:
        self._leave(even_so=True)

    def _stacks_due(self) -> None:
        if self.attempt is not None and not self.attempt.over and self.state in ("STARTING", "RUNNING"):
            self._take_stacks(self.attempt)

    def _settle_due(self) -> None:
        if self.attempt is not None and not self.attempt.over:
            self._recovered(self.attempt, f"attempt {self.attempt.number} has run for {SETTLE_S:.0f} s")

    def _finish_due(self) -> None:
        if self.attempt is not None and self.attempt.finishing:
            self._note("launchers do not end although every rank did: they are ended")
            self._finished(self.attempt, late=True)

    def _form_due(self) -> None:
        assert self.attempt is not None
        absent = [name for name in self.attempt.members if name not in self.attempt.offers]
        self._setup_fault(f"no launcher came to rendezvous on {', '.join(absent[:8])}")

    def _start_due(self) -> None:
        assert self.attempt is not None
        absent = [n for n in self.attempt.members if len(self.attempt.ranks.get(n, ())) == 0]
        self._setup_fault(f"workers did not start on {', '.join(absent[:8]) or 'some nodes'}")

    def _setup_fault(self, what: str) -> None:
        case = self._fault("setup", what, self.now)
        if case is not None:
            self._look_into(case)

    def _nodes_due(self) -> None:
        if self.paused or self.held or self._wants_approval:
            return
        found = len(self._members())
        why = f"no {self.spec.nodes_min} nodes within {self.spec.wait_for_nodes_s:.0f} s ({found} can be used)"
        self._end(m.Outcome(state="failed", exit_code=BUDGET_SPENT, line=why), why)

    def _hold_due(self) -> None:
        why = f"nobody decided within a day: {self.held or 'a plan waited for approval'}"
        self._end(m.Outcome(state="failed", exit_code=NOT_WORTH_RETRYING, line=why), why)

    # ----- operators -----

    def _override_given(self, event: m.OverrideGiven) -> None:
        if self.is_over:
            self._note(f"{event.command}: the job has ended already")
            return
        by = f" by {event.by}" if event.by else ""
        reason = f" ({event.reason})" if event.reason else ""
        self._note(f"operator: {event.command} {event.argument}".rstrip() + by + reason)
        getattr(self, f"_operator_{event.command}")(event)

    def _operator_pause(self, _: m.OverrideGiven) -> None:
        self.paused = True
        if self.state in ("IDLE", "RECOVERING"):
            self._set_timer("hold", self.now + HOLD_LIMIT_S)

    def _operator_resume(self, _: m.OverrideGiven) -> None:
        self.paused, self.held = False, ""
        self._cancel("hold", "nodes", "gather")
        case = self._case
        if self._wants_approval and case is not None and case.plan is not None:
            if not case.plan.needs_approval:
                self._carry_out(case, case.plan)
            return
        self._go_on_from_hold()

    def _go_on_from_hold(self) -> None:
        if (
            self.state == "RECOVERING"
            and self.attempt is not None
            and self.attempt.over is False
            and self._case is not None
        ):
            self._next_attempt(by_operator=True)
        else:
            self._refresh_and_proceed()

    def _operator_restart(self, _: m.OverrideGiven) -> None:
        if self.attempt is None or self.state == "IDLE":
            self._proceed(by_operator=True)
            return
        self.held = ""
        self.restarts += 1
        if self._case is not None and self._case.plan is None:
            self._case.plan = Plan(kind="restart", why="an operator restarted the run", counts=False)
        self._next_attempt(by_operator=True)

    def _operator_stop(self, event: m.OverrideGiven) -> None:
        self._stop("SIGTERM", f"stopped by an operator{f': {event.reason}' if event.reason else ''}")

    def _operator_cordon(self, event: m.OverrideGiven) -> None:
        name, _, gpu = event.argument.partition("/")
        if not name:
            self._note("cordon: which node?")
            return
        reason = event.reason or "an operator's order"
        self.cordons.add(Cordon(node=name, gpu=gpu, reason=reason, by=event.by or "operator", at=self.now))
        self._touched.add(name)
        attempt = self.attempt
        if attempt is None or attempt.over or name not in attempt.members:
            return
        if attempt.round is None:
            self._next_attempt()
        else:
            self._note(
                f"{name} is in use: it is left out from the next attempt on (`unbroken restart`: now)", loud=True
            )

    def _operator_uncordon(self, event: m.OverrideGiven) -> None:
        if not self.cordons.lift(event.argument.partition("/")[0]):
            self._note(f"{event.argument} was not cordoned")
        self._touch_all()
        self._refresh_and_proceed()

    def _operator_mode(self, event: m.OverrideGiven) -> None:
        if event.argument not in get_args(Mode):
            self._note(f"unknown mode {event.argument!r}: observe, recommend or enforce")
            return
        self.mode = event.argument  # type: ignore[assignment]
        case = self._case
        if self.mode == "enforce" and self._wants_approval and not self.paused and case is not None and case.plan:
            self._carry_out(case, case.plan)

    def _operator_approve(self, _: m.OverrideGiven) -> None:
        case = self._case
        if not self._wants_approval or case is None or case.plan is None:
            self._note("nothing waits for approval")
            return
        self._carry_out(case, case.plan)

    def _operator_reject(self, event: m.OverrideGiven) -> None:
        if not self._wants_approval:
            self._note("nothing waits for approval")
            return
        self._wants_approval = False
        self._hold(f"the plan was rejected{f': {event.reason}' if event.reason else ''}")


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
