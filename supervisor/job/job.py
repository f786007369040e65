"""The job: one state machine that sees every event and says what is to be done.

Pure and deterministic: time comes from the events, nothing is read, and the same events give the same state, which is
how a controller that was killed comes back. After a replay (whose actions are dropped) `ControllerStarted` makes the
job give out every assignment and timer again under the new epoch.

The states (`TRANSITIONS` has the table):

    IDLE         no attempt runs: nodes are waited for
    STARTING     an attempt is given out: launchers come to rendezvous, workers start
    RUNNING      the ranks work
    DIAGNOSING   something broke: evidence is gathered, then there are a verdict and a plan
    RECOVERING   the plan is carried out, or waits: for nodes, a back-off, room on disks, an operator
    SUCCEEDED, FAILED, STOPPED

The tables of events, timers and wants (`_events` and what follows it) say who handles what. Each part owns its
fields, and changes nothing else; it calls those above it in this list:

    core          state, clock, spec, mode, pause, timers
    nodes         which nodes there are, which may be used, whose assignment is to be worked out again
    ledger        what all jobs of the cluster know of the nodes, and what this one adds
    tiers         checkpoints on the nodes' own disks: who has what of them
    checkpoints   what was saved, what is suspect
    attempts      forming, starting, running, finishing
    space         waiting for room on disks
    scheduler     requests to drain nodes and to start the job again
    tests         active tests of suspects before the next attempt, and of idle nodes
    alerts        alerts of others' monitoring that fire for nodes of the job
    incidents     from the first sign of a failure to the plan that is carried out
    hangs         hangs, stopped ranks, silence
    degraded      what is wrong while the attempt goes on
    swaps         nodes that leave at a checkpoint
    replicas      a rank whose replica differs: tells, or takes the run back
    guard         the same for a loss that went wrong
    operator      commands
    assignments   what each node is told

What a part wants of the job, or of a part below it, it yields as a want (`core.Want`). `handle` carries out one at a
time, with all that it leads to, before the part goes on.

A damaged journal: the intact part was replayed, but the nodes may be further than that. The job does not act on a past
that it does not know. If ranks may live, and an event or an operator's command may be lost, it pauses and says so. It
believes what nodes report about their ranks more than the journal: an attempt that is newer than any in the journal is
taken over as it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from diagnosis.signals import Finding, rank_names
from diagnosis.verdict.triage import conclude as conclude_by_triage
from recovery.checkpoint import choose as choose_checkpoint
from recovery.policy import BUDGET_SPENT, NOT_WORTH_RETRYING
from recovery.snapshot_choice import NodeSnapshot
from supervisor import messages as m
from supervisor.errors import InternalError
from supervisor.job import view
from supervisor.job.advice import Saves
from supervisor.job.alerts import Alerts
from supervisor.job.assignments import Assignments
from supervisor.job.attempts import Attempt, Attempts, Space
from supervisor.job.checkpoint_choice import Checkpoints, Choose
from supervisor.job.core import (
    EARLY_S,
    STOP_GRACE_S,
    AnyWant,
    Cancel,
    CloseFailures,
    Core,
    EndJob,
    Enter,
    Form,
    GoOn,
    Hold,
    LetControllerGo,
    Mark,
    NextAttempt,
    OpenIncident,
    Proceed,
    ProgressMade,
    ProposeSwap,
    RanksSaved,
    Recovered,
    RefreshAndProceed,
    ReplaceOutcome,
    SuspectsTested,
    Timer,
    TimerName,
    Wants,
    cancel,
)
from supervisor.job.curve import TrainingCurve
from supervisor.job.degraded import Degraded
from supervisor.job.hangs import Hangs
from supervisor.job.incidents import Conclude, Incidents
from supervisor.job.ledger import ClusterLedger
from supervisor.job.loss import LossGuard, ReplicaGuard
from supervisor.job.memory import Memory
from supervisor.job.node_tests import NodeTests
from supervisor.job.nodes import Node, Nodes
from supervisor.job.operator import Operator
from supervisor.job.scheduler import SchedulerRequests
from supervisor.job.swaps import Swaps
from supervisor.job.tiers import Tiers
from supervisor.job.traces import Traces
from supervisor.messages import AnyEvent
from supervisor.node_diff import Difference
from supervisor.notes import note, text_of
from supervisor.view import JobStateName, JobView, StoryLine, utc

__all__ = ["InvalidTransition", "Job"]

TRANSITIONS: dict[JobStateName, frozenset[JobStateName]] = {
    "IDLE": frozenset({"STARTING", "FAILED", "STOPPED"}),
    "STARTING": frozenset({"RUNNING", "DIAGNOSING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "RUNNING": frozenset({"DIAGNOSING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "DIAGNOSING": frozenset({"RUNNING", "RECOVERING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "RECOVERING": frozenset({"STARTING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"}),
    "SUCCEEDED": frozenset(),
    "FAILED": frozenset(),
    "STOPPED": frozenset(),
}
"""Which state may follow which. `Job` sets the state past this table in three places, where no step of the job happens
but its past changes: a scheduler has started it again (`_job_requeued`), an attempt is forgotten (`_forget_attempt`) or
adopted (`_adopt`)."""


class InvalidTransition(InternalError):
    """The job was about to do what its table does not allow: a defect of ours. Its text tells the story so far."""

    def __init__(self, before: JobStateName, after: JobStateName, event: AnyEvent, story: Iterable[StoryLine]) -> None:
        self.before, self.after = before, after
        lines = "".join(f"\n  {line.at:%H:%M:%S} {line.text}" for line in list(story)[-10:])
        super().__init__(f"{before} -> {after} on {event!r}; before that:{lines}")


OURS = "unbroken"
"""Who paused the job, if no person did."""
STORY_KEPT = 500
DIFFERENCES_SHOWN = 4
"""Differences between nodes that are told in one line."""
NODES_SHOWN = 8
"""Names of lost nodes that are told in one line."""
HEARD_S = 15.0
"""Agents find a controller that has started again within a second or two."""
DRAIN_LIMIT_S = 1800.0
"""So much more where checkpoints are still to be published."""
END_SLACK_S = 60.0
"""How much longer than the grace a node may take to say that it is done."""
_ENDS: dict[str, JobStateName] = {
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "stopped": "STOPPED",
    "requeued": "FAILED",  # `view` says REQUEUED
}

Handler = Callable[[Any], Wants | None]


def _first_difference(given: m.JobSpec, first: m.JobSpec, node: str) -> str:
    for name in first.__struct_fields__:
        if (wanted := getattr(given, name)) != (holds := getattr(first, name)):
            return f"{name}: {wanted} on {node or 'that node'}, {holds} on the first node"
    return ""


class Job:
    """`handle` takes every event in every state: late, repeated and reordered ones are harmless."""

    def __init__(self, conclude: Conclude = conclude_by_triage, choose: Choose = choose_checkpoint) -> None:
        self.core = core = Core()
        self.nodes = nodes = Nodes(core)
        self.ledger = ledger = ClusterLedger(core, nodes)
        self.tiers = Tiers(core, nodes)
        self.checkpoints = Checkpoints(core, choose, self.tiers)
        self.attempts = attempts = Attempts(core, nodes, self.checkpoints)
        self.space = Space(core, nodes, attempts)
        self.scheduler = SchedulerRequests(core, nodes, attempts, ledger)
        self.tests = NodeTests(core, nodes, attempts, ledger)
        self.alerts = Alerts(core)
        self.incidents = Incidents(
            core, nodes, attempts, self.space, self.scheduler, self.tests, self.alerts, ledger, conclude
        )
        self.memory = Memory(core, nodes, self.incidents.log)
        self.hangs = Hangs(core, nodes, attempts, self.incidents)
        self.saves = Saves()
        """Only told (`unbroken advise`, and when a planned swap is due)."""
        self.swaps = Swaps(core, nodes, attempts, self.scheduler, self.incidents, self.alerts, self._saved_at)
        self.degraded = Degraded(core, attempts, self.incidents)
        self.replicas = ReplicaGuard(core, attempts, self.incidents)
        self.guard = LossGuard(core, attempts, self.incidents, self.replicas)
        self.curve = TrainingCurve()
        """Only told."""
        self.traces = Traces(core, nodes, attempts)
        self.operator = Operator(
            core,
            nodes,
            attempts,
            self.incidents,
            self.scheduler,
            self.space,
            self.guard,
            self.swaps,
            self.traces,
            self.tests,
            ledger,
            self.memory,
        )
        self.assignments = Assignments(
            core, nodes, attempts, self.scheduler, self.space, self.traces, self.tests, ledger
        )
        self.story: deque[StoryLine] = deque(maxlen=STORY_KEPT)
        self.skew: tuple[Difference, ...] = ()
        """What is not the same on all nodes, as compared last."""
        self.stragglers: m.StragglersSeen | None = None
        self.input_wait: m.InputWaitSeen | None = None
        """Of the attempt that it names, as seen last."""
        self._skew_reported: set[tuple[str, ...]] = set()
        self._spec_open = False
        """Started again by the scheduler: the next spec is the job's."""
        self._commands_kept = False
        """The newest damage of the journal cannot have hit an operator's command."""
        self._event: m.AnyEvent = m.ControllerStarted(at=0.0, epoch=0)
        self._actions: list[m.Action] = []
        self.event_handlers, self.timer_handlers = self._events(), self._timers()
        self.want_handlers = self._wants()

    # ----- who handles what -----

    def _events(self) -> dict[type[m.Event], Handler]:
        return {
            # the controller
            m.ControllerStarted: self._controller_started,
            m.JournalStalled: self._journal_stalled,
            m.JournalDamaged: self._journal_damaged,
            m.TimerFired: self._timer_fired,
            # the job, its nodes and their agents
            m.JobDefined: self._job_defined,
            m.JobRequeued: self._job_requeued,
            m.NodeJoined: self._node_joined,
            m.NodeQuiet: self._node_quiet,
            m.NodeLost: self._nodes_lost,
            m.NodesLost: self._nodes_lost,
            m.StopRequested: self._stop_requested,
            m.NodeDone: self._node_done,
            m.VersionsCompared: self._versions_compared,
            # an attempt
            m.LauncherReady: self.attempts.launcher_ready,
            m.PreparationFailed: self.attempts.preparation_failed,
            m.WorkersStarted: self._workers_started,
            m.Progressed: self._progressed,
            m.RankEnded: self.attempts.rank_ended,
            m.RanksStopped: self.attempts.ranks_stopped,
            m.LauncherEnded: self.attempts.launcher_ended,
            m.CheckpointsSeen: self._checkpoints_seen,
            m.TiersSeen: self.tiers.add,
            m.SnapshotCopiesSeen: self.tiers.add_snapshots,
            m.SpaceSeen: self.space.seen,
            m.NodeTested: self.tests.reported,
            m.GpusSeen: self._gpus_seen,
            m.StragglersSeen: self._stragglers_seen,
            m.AlertsSeen: self._alerts_seen,
            m.NodesLeaving: self.swaps.leaving,
            m.InputWaitSeen: self._input_wait_seen,
            # what may be wrong
            m.EvidenceArrived: self.incidents.evidence_arrived,
            m.FindingArrived: self._findings_arrived,
            m.FindingsArrived: self._findings_arrived,
            m.HangSuspected: self.hangs.suspected,
            m.HangCleared: self.hangs.cleared,
            m.HangConfirmed: self.hangs.confirmed,
            m.RankWakeWanted: self.hangs.wake_wanted,
            m.SilenceSeen: self.hangs.silence_seen,
            m.NumbersSeen: self._numbers_seen,
            m.LossSeen: self._loss_seen,
            m.ReplicasDiffer: self.replicas.differ,
            m.SnapshotSeen: self.attempts.mirrors.seen,
            m.PaceLearned: self._pace_learned,
            # people, the scheduler, the ledger, a language model
            m.OperatorCommand: self.operator.given,
            m.SchedulerAnswered: self.scheduler.answered,
            m.LedgerSeen: self._ledger_seen,
            m.LedgerWritten: self.ledger.written,
            m.OpinionAsked: self._opinion_asked,
            m.OpinionArrived: self._opinion_arrived,
            m.IncidentRecurred: self.memory.recurred,
            m.IncidentMemorySeen: self.memory.seen,
        }

    def _timers(self) -> dict[str, Callable[[], Wants | None]]:
        return {
            "form": self.attempts.form_due,  # not all launchers came to rendezvous
            "start": self.attempts.start_due,  # not all workers were started
            "stood": self.attempts.stood_due,  # workers have stood for so long that the attempt counts as running
            "settle": self.attempts.settle_due,  # the attempt has run for so long that incidents close without a step
            "finish": self.attempts.finish_due,  # launchers did not end although every rank did
            "backoff": self._backoff_due,  # the pause before the next attempt is over
            "gather": self._proceed,  # the job starts with fewer nodes than it may have
            "nodes": self._nodes_due,  # too few nodes came
            "hold": self._hold_due,  # no operator decided
            "evidence": self.incidents.evidence_due,  # an incident is diagnosed without the evidence that is missing
            "again": self.incidents.again_due,  # a hang that was left alone is examined again
            "stacks": self.hangs.stacks_due,  # stacks are collected again during a suspected hang
            "silence": self.hangs.silence_due,  # no progress for so long that it is told again, or acted on
            "device": self.degraded.device_due,  # device failures of one moment become one incident
            "degraded": self.degraded.degraded_due,  # no device has failed for so long that the attempt is healthy
            "orders": self.scheduler.requests_due,  # a scheduler request is due
            "requeue": self._requeue_due,  # no lost node came back: the scheduler is asked to start the job again
            "last_orders": self.scheduler.last_requests_due,  # the end of the job waits for no scheduler any more
            "step_end": self.scheduler.step_end_due,  # the scheduler is asked to end the step
            "tests": self.tests.due,  # nodes whose active tests take too long are not waited for
            "tiers": self._tiers_due,  # nodes have told where their checkpoints are
            "end": self._end_due,  # the end of the job waits for no node any more
        }

    def _wants(self) -> dict[type[AnyWant], Handler]:
        incidents = self.incidents
        return {
            m.Note: self._add_note,
            Enter: self._enter,
            Timer: self._set_timer,
            Cancel: self._cancel,
            m.SchedulerRequest: self._give_out,
            m.SchedulerComment: self._give_out,
            m.LedgerWrite: self._give_out,
            # attempts
            Form: lambda want: self._form(want.members),
            Proceed: lambda want: self._proceed(by_operator=want.by_operator),
            RefreshAndProceed: lambda _: self._refresh_and_proceed(),
            NextAttempt: lambda want: self._next_attempt(want.delay_s, want.by_operator),
            # incidents
            OpenIncident: incidents.open_incident,
            GoOn: lambda want: incidents.go_on(want.text),
            Hold: lambda want: incidents.hold(want.why),
            ProposeSwap: lambda want: self.swaps.device(want.finding, want.node),
            RanksSaved: lambda _: self.swaps.ranks_saved(),
            SuspectsTested: incidents.tested,
            Mark: lambda want: incidents.mark_phase(want.phase),
            ProgressMade: lambda _: incidents.progress_made(),
            Recovered: lambda want: incidents.recovered(want.text),
            CloseFailures: lambda want: incidents.close_failures(want.text),
            # the end
            EndJob: self._end,
            ReplaceOutcome: self._replace_outcome,
            LetControllerGo: self._let_controller_go,
        }

    # ----- the loop -----

    def handle(self, event: m.AnyEvent) -> list[m.Action]:
        """What is to be done about `event`. Raises InvalidTransition (a defect of ours) and nothing else."""
        core = self.core
        core.previous_event_at, core.now = core.now, max(core.now, event.at)
        self._event = event
        self._actions = []
        self._carry_out(self.event_handlers[type(event)](event))
        self._carry_out(self.scheduler.settle())
        self._actions += self.assignments.settle()
        wanted = self.incidents.log.opinions_wanted(core.spec.opinion_below, core.is_over)
        self._actions += [m.OpinionWanted(incident=name) for name in wanted]
        if core.controller_may_go:
            self.incidents.log.give_up_opinions()
        return self._actions

    def _carry_out(self, wants: Wants | None) -> None:
        """Until none is left; what a want leads to comes before what was wanted after it."""
        makers = [] if wants is None else [wants]
        while makers:
            want = next(makers[-1], None)
            if want is None:
                makers.pop()
                continue
            more = self.want_handlers[type(want)](want)
            if more is not None:
                makers.append(more)

    # ----- notes, state and timers -----

    def _add_note(self, note: m.Note) -> None:
        text = text_of(note)
        self.story.append(StoryLine(at=utc(self.core.now), text=text, incident=note.incident, loud=note.loud))
        self._actions.append(note)
        if note.loud:
            self.assignments.add_notice(text)

    def _give_out(self, action: m.SchedulerRequest | m.SchedulerComment | m.LedgerWrite) -> None:
        self._actions.append(action)

    def _enter(self, want: Enter) -> None:
        before = self.core.state
        if want.state == before:
            return
        if want.state not in TRANSITIONS[before]:
            raise InvalidTransition(before, want.state, self._event, self.story)
        self.core.state = want.state

    def _set_timer(self, want: Timer) -> None:
        if self.core.timers.get(want.name) != want.at:
            self.core.timers[want.name] = want.at
            self._actions.append(m.SetTimer(timer=want.name, at=want.at))

    def _cancel(self, want: Cancel) -> None:
        for timer in want.names:
            if self.core.timers.pop(timer, None) is not None:
                self._actions.append(m.SetTimer(timer=timer, at=None))

    def _cancel_all(self) -> None:
        self._cancel(Cancel(tuple(self.core.timers)))  # type: ignore[arg-type]  # names of `TimerName` all

    def _timer_fired(self, event: m.TimerFired) -> Wants | None:
        due = self.core.timers.get(event.timer)
        if due is None:
            return None
        if event.at < due - EARLY_S:
            self._actions.append(m.SetTimer(timer=event.timer, at=due))
            return None
        del self.core.timers[event.timer]
        return self.timer_handlers[event.timer]()

    # ----- events: the controller and its journal -----

    def _controller_started(self, event: m.ControllerStarted) -> Wants:
        core = self.core
        if event.epoch > core.epoch:
            if core.epoch:
                yield note("controller_restarted", epoch=event.epoch)
            core.epoch = event.epoch
            yield cancel("again", "stacks", "silence")
            self.hangs.controller_started()
        yield from self._give_agents_time()
        self._actions += [m.SetTimer(timer=timer, at=at) for timer, at in core.timers.items()]
        self.nodes.expect_all()
        self.assignments.forget_sent(node.name for node in self.nodes)
        self.scheduler.give_again()
        yield from self.ledger.give_again()
        self._actions += [m.OpinionWanted(incident=name) for name in self.incidents.log.opinions_unanswered()]
        self.nodes.touch_all()
        if core.is_over:
            core.controller_may_go = False
            yield from self.scheduler.leave()

    def _give_agents_time(self) -> Wants:
        """No limit on an attempt's start runs out before the agents could tell this controller how far it is."""
        limits: tuple[TimerName, ...] = ("form", "start", "evidence", "tests")
        for timer in limits:
            if timer in self.core.timers:
                yield Timer(timer, max(self.core.timers[timer], self.core.now + HEARD_S))

    def _journal_stalled(self, event: m.JournalStalled) -> Wants:
        yield note("journal_stalled", loud=True, seconds=event.seconds)

    def _journal_damaged(self, event: m.JournalDamaged) -> Wants:
        self._commands_kept = not event.orders
        self.attempts.set_numbers_from(event.attempt)
        yield note("journal_damaged", loud=True, lost=event.lost or None, what=event.what)
        fits = self._fits(event)
        if event.events and not fits:
            self._forget_attempt("the journal has lost how it went on")
        if event.living and not self.is_over and (event.orders or not fits):
            what = "an operator's command may be lost" if fits else "it is not known what was decided since"
            yield from self._pause_for_damage(f"the journal was damaged, and {what}")
        yield from self._give_agents_time()

    def _fits(self, event: m.JournalDamaged) -> bool:
        """Whether the replay ends in the state that the nodes were assigned."""
        attempt = self.attempt
        number, formed = (attempt.number, attempt.round is not None) if attempt is not None else (0, False)
        if not event.events:  # decisions may be lost: then it has come further than they tell
            return (number, formed) >= (event.attempt, event.formed)
        return (number, formed, self.is_over) == (event.attempt, event.formed, event.ended)

    def _pause_for_damage(self, reason: str) -> Wants:
        if not self.paused:
            command = m.OperatorCommand(at=self.now, command="pause", reason=reason, by=OURS)
            yield from self.operator.pause_job(command)
        yield note("paused_for", loud=True, reason=reason)

    def _forget_attempt(self, why: str) -> None:
        """Nodes are left as they are until they have told what they have."""
        core = self.core
        self.attempts.forget_current()
        self.tests.forget()
        self.incidents.forget_attempt(why)
        core.state, core.outcome, core.ended_at, core.controller_may_go = "IDLE", None, None, False
        self._cancel_all()
        self.nodes.touch_all()

    def _is_unknown(self, event: m.WorkersStarted) -> bool:
        """Whether the journal does not know the attempt of these ranks, or has lost its start."""
        attempt = self.attempt
        known = max(attempt.number if attempt is not None else 0, self.attempts.numbers_from)
        if self.is_over or not event.ranks or event.attempt < known:
            return False
        return self._is_other(event) or (attempt is not None and attempt.adopted and not attempt.over)

    def _is_other(self, event: m.WorkersStarted) -> bool:
        """The attempt of these ranks is newer than the current one, which may not even have started."""
        attempt = self.attempt
        if attempt is None or event.attempt > attempt.number:
            return True
        return attempt.round is None and not attempt.over

    def _adopt(self, event: m.WorkersStarted) -> Wants:
        """Take the running attempt over as it is."""
        if self._is_other(event):
            number, pause = event.attempt, self.core.pause
            self._forget_attempt(f"ranks of attempt {number} run, of which the journal does not tell")
            yield note("attempt_adopted", attempt=number)
            self.attempts.begin_adopted(number)
            self.core.state = "RUNNING"
            if not self._commands_kept:
                why = "the journal does not tell of the attempt that runs: an operator's command may be lost as well"
                yield from self._pause_for_damage(why)
            elif pause is not None and pause.by == OURS:
                self.core.pause = None  # nothing can have been lost
                yield note("acts_again", loud=True)
        # Nothing changes for the other nodes: telling all of them for each that reports would cost the square.
        speaker = self.assignments.speaker
        self.attempts.adopt(event)
        self.nodes.touch(event.node, speaker, self.assignments.speaker)

    def _pace_learned(self, _: m.PaceLearned) -> None:
        """Of an older journal: places in the code are remembered now."""

    # ----- events: the job and its nodes -----

    def _job_defined(self, event: m.JobDefined) -> Wants:
        core = self.core
        if self._spec_open:
            core.spec, self._spec_open = event.spec, False
        elif core.defined_at is None:
            core.defined_at = core.now
            core.spec, core.mode = event.spec, event.spec.mode
            self.incidents.define()
        else:
            spec = msgspec.structs.replace(event.spec, on_gpus=core.spec.on_gpus)  # no option
            if spec != core.spec:
                yield note("spec_differs", what=_first_difference(spec, core.spec, event.node))
            return
        yield from self._proceed()

    def _saved_at(self, attempt: int) -> list[float]:
        return [one.completed_at for one in self.saves.newest if one.attempt == attempt]

    @property
    def goes_on_when_requeued(self) -> bool:
        """Whether a job that its scheduler has started again is to go on: not one that was done with."""
        outcome = self.core.outcome
        return self.core.defined_at is not None and (outcome is None or outcome.state in ("requeued", "stopped"))

    def _job_requeued(self, event: m.JobRequeued) -> Wants:
        """The nodes are others. Budgets, incidents, cordons and what operators said stay; attempts count on."""
        core = self.core
        if not self.goes_on_when_requeued or event.requeues <= core.spec.requeues:
            return
        known = {node.scheduler_name: node.name for node in self.nodes}
        lost = known.get(event.lost, event.lost)
        yield note(
            "requeued",
            loud=True,
            scheduler=core.spec.scheduler,
            requeues=event.requeues,
            by=event.by,
            lost=lost,
        )
        yield from self.incidents.started_again(event, lost)
        self.scheduler.end_life()
        self.swaps.begin_life()
        core.state, core.outcome, core.ended_at, core.controller_may_go = "IDLE", None, None, False
        core.stop_signal, core.grace_s = "SIGTERM", STOP_GRACE_S
        self.space.stop_waiting()
        self.tests.forget()
        self.nodes.begin_life()
        self.ledger.begin_life()
        self.attempts.begin_life()
        self.checkpoints.begin_life()
        self.assignments.begin_life()
        self._cancel_all()
        core.spec, self._spec_open = msgspec.structs.replace(core.spec, requeues=event.requeues), True

    def _node_joined(self, event: m.NodeJoined) -> Wants:
        known = self.nodes.get(event.node)
        back = known is not None and not known.present
        node = self.nodes.join(event)
        self.assignments.forget_sent([node.name])  # whatever it was told before, tell it again
        self.nodes.touch(node.name)
        if known is None or back:
            yield note("node_back" if back else "node_joined", node=node.name, host=node.host)
        if known is None:
            yield from self.ledger.joined(node.name)
            yield from self.tests.retest()
        if back and not event.host:
            yield from self.incidents.node_back(node.name)
        yield from self._refresh_and_proceed()

    def _gpus_seen(self, event: m.GpusSeen) -> Wants:
        self.nodes.set_gpus(event.node, event.gpus)
        if event.node in self.nodes.cordoned():
            yield from self._refresh_and_proceed()

    def _node_quiet(self, event: m.NodeQuiet) -> None:
        self.nodes.set_quiet(event.node, event.at - event.silent_s if event.silent_s else None)

    def _nodes_lost(self, event: m.NodeLost | m.NodesLost) -> Wants:
        known = map(self.nodes.get, event.nodes if isinstance(event, m.NodesLost) else (event.node,))
        present = [node for node in known if node is not None and node.present]
        if present:
            yield from self._lose(present, f"no heartbeat for {event.silent_s:.0f} s", event.silent_s)

    def _stop_requested(self, event: m.StopRequested) -> Wants:
        """A front that was killed takes its node's ranks along: with other nodes there, that node is lost."""
        node = self.nodes.get(event.node)
        others = any(other.present and other.name != event.node for other in self.nodes)
        if event.signal != "FRONT_GONE" or not others:
            yield from self.operator.stop_requested(event)
        elif node is not None and node.present:
            yield from self._lose([node], "its `unbroken run` was killed", 0.0, front_ended=True)

    def _lose(self, lost: Sequence[Node], why: str, silent_s: float, *, front_ended: bool = False) -> Wants:
        for node in lost:
            self.nodes.lose(node, why, front_ended=front_ended)
        lost_names = tuple(node.name for node in lost)
        if len(lost) == 1:
            yield note("node_lost", loud=True, node=lost_names[0], why=why)
        else:
            yield note("nodes_lost", loud=True, count=len(lost), nodes=lost_names[:NODES_SHOWN], why=why)
        yield from self.scheduler.leave()
        for name in lost_names:
            yield from self.tests.lost(name)
        attempt = self.attempt
        members = tuple(name for name in lost_names if attempt is not None and name in attempt.member_set)
        if attempt is None or attempt.over or not members:
            return
        if attempt.finishing:
            yield from self.attempts.finish()  # its ranks ended well: nothing of the work is lost with it
        elif self.state == "RECOVERING" and not self.incidents.approval_wanted:
            yield from self._refresh_and_proceed()
        else:
            at, more = self.core.now - silent_s, ", ..." if len(members) > NODES_SHOWN else ""
            text = f"node {members[0]} was lost ({why})"
            if len(members) > 1:
                text = f"{len(members)} nodes were lost ({', '.join(members[:NODES_SHOWN])}{more}: {why})"
            yield OpenIncident("node_lost", text, at, node=members[0], nodes=members)

    def _node_done(self, event: m.NodeDone) -> Wants:
        if self.nodes.get(event.node) is not None:
            self.nodes.set_done(event.node)
            if self.tiers.are_on:
                self.nodes.touch_all()  # what it was to publish, another one may
            yield from self.scheduler.leave()

    def _versions_compared(self, event: m.VersionsCompared) -> Wants:
        """Told once for each set of values: that one more node has one of them is no news."""
        self.skew = event.differences
        new = []
        for difference in event.differences:
            told = (difference.key, *sorted(value.value for value in difference.values))
            if told not in self._skew_reported:
                self._skew_reported.add(told)
                new.append(difference)
        if new:
            yield note(
                "nodes_differ",
                loud=any(one.important for one in new),
                what="; ".join(difference.text for difference in new[:DIFFERENCES_SHOWN]),
                more=len(new) - DIFFERENCES_SHOWN if len(new) > DIFFERENCES_SHOWN else None,
            )

    # ----- events: an attempt -----

    def _workers_started(self, event: m.WorkersStarted) -> Wants:
        if self._is_unknown(event):
            yield from self._adopt(event)
        else:
            yield from self.attempts.workers_started(event)

    def _progressed(self, event: m.Progressed) -> Wants:
        yield from self.attempts.progressed(event)
        self.saves.progressed(self.attempts.live(event.attempt))
        self.curve.progressed(event)
        yield from self.hangs.progressed(event)
        yield from self.degraded.progressed(event)

    def _numbers_seen(self, event: m.NumbersSeen) -> Wants:
        self.curve.numbers_seen(event)
        yield from self.degraded.numbers_seen(event)

    def _loss_seen(self, event: m.LossSeen) -> Wants:
        self.curve.loss_seen(event)
        yield from self.guard.seen(event)

    def _checkpoints_seen(self, event: m.CheckpointsSeen) -> Wants:
        self.saves.checkpoints_seen(event, self.attempt)
        new_folders = self.checkpoints.add(event, self.attempt.step if self.attempt is not None else None)
        yield from self.attempts.saved(event.checkpoints)
        if new_folders:
            self.nodes.touch_all()
        yield from self.degraded.saved(event)
        yield from self.swaps.checkpoints_seen()
        if self.state == "STARTING" or (self.state == "RECOVERING" and not self.incidents.approval_wanted):
            yield from self.attempts.refresh()

    def _tiers_due(self) -> Wants:
        yield from self.tiers.work_out()
        self.attempts.work_out_mirrors()
        yield from self.swaps.checkpoints_seen()
        if self.state == "STARTING" or (self.state == "RECOVERING" and not self.incidents.approval_wanted):
            yield from self.attempts.refresh()

    def _stragglers_seen(self, event: m.StragglersSeen) -> Wants:
        """Told and shown. Whether to go on without a slow rank is for people to say, unless a check confirms it."""
        attempt = self.attempts.live(event.attempt)
        if attempt is None:
            return
        before, self.stragglers = self.stragglers, event
        if event.ranks:
            text = view.slow_text(event, attempt.rank_nodes) + view.slow_why(self, event) + view.slow_input(self, event)
            text += view.slow_price(event, attempt.world_size, on_gpus=self.core.spec.on_gpus)
            yield note("stragglers", loud=True, what=text)
        elif before is not None and before.ranks:
            yield note("stragglers_gone", who=rank_names(before.ranks), one=len(before.ranks) == 1)
        confirmed = view.slow_is_confirmed(self, event)
        yield from self.swaps.stragglers_seen(event, view.slow_why(self, event), confirmed=confirmed)

    def _input_wait_seen(self, event: m.InputWaitSeen) -> Wants:
        if self.attempts.live(event.attempt) is None:
            return
        before, self.input_wait = self.input_wait, event
        if event.ranks:
            yield note("input_wait", loud=before is None or not before.ranks, what=view.input_text(event))
        elif before is not None and before.ranks:
            yield note("input_wait_gone")

    # ----- events: what may be wrong -----

    def _findings_arrived(self, event: m.FindingArrived | m.FindingsArrived) -> Wants:
        findings: Sequence[Finding]
        if isinstance(event, m.FindingArrived):
            findings, end = (event.finding,), event.number + 1
        else:
            findings, end = event.findings, event.end
        if not self.nodes.acknowledge_findings(event.node, end):
            return
        for finding in findings:
            yield from self.incidents.finding_arrived(finding)
            yield from self.degraded.finding_arrived(finding, event.node)
            yield from self.swaps.finding_arrived(finding, event.node)

    def _alerts_seen(self, event: m.AlertsSeen) -> Wants:
        yield from self.alerts.seen(event)
        self.incidents.note_alerts()
        yield from self.swaps.alerts_seen()

    def _ledger_seen(self, event: m.LedgerSeen) -> Wants:
        """Nodes in use stay until the next checkpoint, or the end of the attempt."""
        out = yield from self.ledger.seen(event)
        yield from self.tests.retest()
        attempt = self.attempt
        if self.is_over:
            return
        used = [name for name in out if attempt is not None and not attempt.over and name in attempt.member_set]
        if used and attempt is not None and attempt.round is None and self.state == "STARTING":
            yield NextAttempt()
            return
        told = yield from self.swaps.ledger_seen()
        for name in used:
            if name not in told:
                yield note("node_in_use", loud=True, node=name)
        yield from self._refresh_and_proceed()

    def _opinion_asked(self, event: m.OpinionAsked) -> None:
        record = self.incidents.log.get(event.incident)
        if record is not None:
            record.opinion_wanted = True

    def _opinion_arrived(self, event: m.OpinionArrived) -> None:
        record = self.incidents.log.get(event.incident)
        if record is not None:
            record.add_opinion(event.opinion)
            self.incidents.log.opinion_use.add(event.opinion)

    # ----- timers: ends of waiting -----

    def _backoff_due(self) -> Wants:
        yield from self.space.go_on_with_room()
        yield from self._proceed()

    def _requeue_due(self) -> Wants:
        if self.state == "RECOVERING" and not (self.paused or self.incidents.held or self._must_wait()):
            yield from self.scheduler.requeue_due()

    def _nodes_due(self) -> Wants:
        core, spec, scheduler = self.core, self.core.spec, self.scheduler
        if core.paused or self.incidents.held or self.incidents.approval_wanted:
            return
        if scheduler.is_requeuing or scheduler.will_ask_again:
            yield Timer("nodes", core.now + spec.wait_for_nodes_s)
            return
        found, refused = len(self.attempts.next_members()), scheduler.requeue_refused
        why = f"only {found} of {spec.nodes_min} nodes could be used after {spec.wait_for_nodes_s:.0f} s"
        held = sorted(node.name for node in self.nodes if node.present and node.name in self.nodes.cordoned())
        why += f"; {len(held)} cordoned: {', '.join(held[:4])} (`unbroken status` says why)" if held else ""
        why += f"; {spec.scheduler} does not start the job again: {refused}" if refused else ""
        yield EndJob(m.Outcome(state="failed", exit_code=BUDGET_SPENT, line=why))

    def _hold_due(self) -> Wants:
        limit_s, held = self.core.spec.hold_limit_s, self.incidents.held
        limit = f"{limit_s / 3600:.3g} h" if limit_s >= 3600 else f"{limit_s:.0f} s"
        why = f"nobody decided within {limit} (run.hold_limit_s): {held or 'a plan waited for approval'}"
        if self.space.wanted is not None:
            why = f"no room on disks within {limit} (run.hold_limit_s): {self.space.text}"[:400]
        if self.incidents.may_go_on:
            yield from self.guard.let_go_on(why)
            return
        yield EndJob(m.Outcome(state="failed", exit_code=NOT_WORTH_RETRYING, line=why))

    def _end_due(self) -> Wants:
        yield from self.scheduler.leave(even_so=True)

    # ----- wants: the next attempt, from the end of the current one to the order to start -----

    def _next_attempt(self, delay_s: float, by_operator: bool) -> Wants:
        """End what is left of the current attempt and start the next."""
        yield Enter("RECOVERING")
        self.incidents.hand_over(by_operator)
        if by_operator:
            yield from self.tests.stop("an operator has the job start at once")
        self.space.stop_waiting()
        yield cancel("backoff", "gather", "nodes", "hold", "evidence")
        yield from self.swaps.next_attempt_forms()
        yield from self._form(self.attempts.next_members())
        if delay_s > 0:
            yield Timer("backoff", self.core.now + delay_s)
            yield note("attempt_delayed", delay_s=delay_s)
        yield from self._proceed(by_operator=by_operator)

    def _form(self, members: tuple[str, ...]) -> Wants:
        """A new attempt. What was wrong with the one before ends with it."""
        yield from self.degraded.attempt_ends()
        self.guard.attempt_ends()
        self.replicas.attempt_ends()
        yield from self.attempts.form(members)

    def _proceed(self, *, by_operator: bool = False) -> Wants:
        """Start the next attempt if nothing stands in its way."""
        core, attempts = self.core, self.attempts
        if core.state not in ("IDLE", "RECOVERING") or core.defined_at is None or core.is_over:
            return
        if by_operator:
            attempts.start_by_operator()
        kept_back = core.paused and not attempts.by_operator
        if kept_back or self.incidents.held or "backoff" in core.timers or self._must_wait():
            return
        there_are = yield from attempts.gather()
        if there_are == "too few" and (yield from self.swaps.give_back()):
            there_are = yield from attempts.gather()
        if there_are == "too few":
            yield from self.scheduler.short_of_nodes()
        if there_are != "enough":
            return
        if attempts.current is None or attempts.current.over:
            yield from self._form(attempts.next_members())
        else:
            yield from attempts.refresh()
        assert attempts.current is not None
        self.scheduler.attempt_begins()
        yield from self.tests.make_way(attempts.current.members)
        yield cancel("requeue")
        self.incidents.attempt_begins(attempts.current.number)
        yield from attempts.begin(attempts.current)

    def _must_wait(self) -> bool:
        """Whether somebody else has to answer first."""
        no_room = self.space.wanted is not None and not self.attempts.by_operator
        tests = self.tests.is_awaited and not self.attempts.by_operator
        return self.scheduler.is_requeuing or self.incidents.approval_wanted or no_room or tests

    def _refresh_and_proceed(self) -> Wants:
        yield from self.space.go_on_with_room()
        if self.state == "RECOVERING" and not self.incidents.approval_wanted:
            yield from self.attempts.refresh()
        yield from self._proceed()

    # ----- wants: the end -----

    def _end(self, want: EndJob) -> Wants:
        """The job has ended: tell every node, and go when all of them are done."""
        core = self.core
        outcome = yield from self.degraded.end(want.outcome)
        outcome = self.scheduler.end(outcome)
        if outcome.state == "failed":
            yield from self.scheduler.comment(outcome.line)
        yield Enter(_ENDS[outcome.state])
        core.outcome, core.ended_at, core.grace_s = outcome, core.now, want.grace_s
        self.space.stop_waiting()
        self.tests.forget()
        self.attempts.end()
        for record in self.incidents.log.open_failures():
            yield from self.ledger.failed(record.id, record.verdict)
        self.incidents.end(outcome)
        self._cancel_all()
        yield Timer("end", core.now + want.grace_s + END_SLACK_S + (DRAIN_LIMIT_S if self.tiers.are_on else 0.0))
        line = want.outcome.line
        requeued = outcome.state == "requeued"
        yield note("requeue_happens", what=line) if requeued else note("job_ended", why=want.why or line)
        self.nodes.touch_all()
        yield from self.scheduler.leave()

    def _replace_outcome(self, want: ReplaceOutcome) -> None:
        self.core.outcome = want.outcome
        self.nodes.touch_all()

    def _let_controller_go(self, _: LetControllerGo) -> Wants:
        outcome = self.core.outcome
        assert outcome is not None
        self.core.controller_may_go = True
        yield cancel("end")
        self._actions.append(m.End(outcome=outcome))

    # ----- what others ask -----

    def view(self, now: float | None = None, held: NodeSnapshot | None = None) -> JobView:
        """Everything that is shown of the job, as of its newest event or a later time.

        `held`: the newest snapshot in memory of all ranks, which only a running controller knows.
        """
        return view.job_view(self, now, held)

    @property
    def state(self) -> JobStateName:
        return self.core.state

    @property
    def now(self) -> float:
        return self.core.now

    @property
    def spec(self) -> m.JobSpec:
        return self.core.spec

    @property
    def timers(self) -> dict[str, float]:
        return self.core.timers

    @property
    def outcome(self) -> m.Outcome | None:
        return self.core.outcome

    @property
    def is_over(self) -> bool:
        return self.core.is_over

    @property
    def paused(self) -> bool:
        return self.core.paused

    @property
    def attempt(self) -> Attempt | None:
        return self.attempts.current

    @property
    def waiting(self) -> str:
        """What the job waits for, and until when, in words."""
        return self.operator.waiting
