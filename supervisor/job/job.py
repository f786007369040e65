"""The job: one state machine that sees every event and says what is to be done.

Pure and deterministic: time comes from the events, nothing is read, and the same events give the same state, which is
how a controller that was killed comes back. After a replay (whose actions are dropped) `ControllerStarted` makes the
job give out every assignment and timer again under the new epoch.

It is built in layers: `assignments` (what nodes are told), `lifecycle` (attempts), `dealings` (the scheduler),
`casework` (incidents), `review` (evidence that comes late), `oversight` (operators), `course` (how an attempt goes),
`hangs` (what the hang watch tells), `degraded` (what is wrong while it goes on), and here what nodes and evidence tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diagnosis.signals import NodeEvidence
from diagnosis.stuck import names
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.triage import conclude as conclude_by_triage
from recovery.budgets import RestartBudget
from recovery.checkpoint import choose as choose_checkpoint
from recovery.checkpoint import newest
from supervisor import messages as m
from supervisor.job import opinions
from supervisor.job.attempt import Attempt
from supervisor.job.casework import Conclude
from supervisor.job.degraded import Degraded
from supervisor.job.lifecycle import Choose
from supervisor.job.roster import Node
from supervisor.job.shown import job_view, slow_text, slow_why
from supervisor.job.transitions import InvalidTransition
from supervisor.node_diff import Difference
from supervisor.view import JobView

__all__ = ["InvalidTransition", "Job"]

CHECKPOINTS_EACH = 8
FOLDERS_KEPT = 16
REPORTS_KEPT = 64
"""Nodes whose reports of checkpoints are remembered: on a shared file system they all say the same."""
STEPS_KEPT = 64
SKEW_SAID = 4
"""Differences between nodes that are told in one line."""


class Job(Degraded):
    """`handle` takes every event in every state: late, repeated and reordered ones are harmless."""

    def __init__(self, conclude: Conclude = conclude_by_triage, choose: Choose = choose_checkpoint) -> None:
        super().__init__(choose, conclude)
        self.skew: tuple[Difference, ...] = ()
        """What is not the same on all nodes, as compared last."""
        self.stragglers: m.StragglersSeen | None = None
        """Of the attempt that it names, as seen last."""
        self._skew_told: set[tuple[str, ...]] = set()
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.ControllerStarted: self._controller_started,
            m.JobDefined: self._job_defined,
            m.JobRequeued: self._job_requeued,
            m.NodeJoined: self._node_joined,
            m.NodeLost: self._node_lost,
            m.NodeQuiet: self._node_quiet,
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
            m.SilenceSeen: self._silence_seen,
            m.PaceLearned: self._pace_learned,
            m.CheckpointsSeen: self._checkpoints_seen,
            m.VersionsCompared: self._versions_compared,
            m.StragglersSeen: self._stragglers_seen,
            m.NumbersSeen: self._numbers_seen,
            m.SpaceSeen: self._space_seen,
            m.StopRequested: self._stop_or_lose,
            m.NodeDone: self._node_done,
            m.TimerFired: self._timer_fired,
            m.OverrideGiven: self._override_given,
            m.JournalStalled: self._journal_stalled,
            m.JournalDamaged: self._journal_damaged,
            m.SchedulerAnswered: self._scheduler_answered,
            m.OpinionAsked: self._opinion_asked,
            m.OpinionArrived: self._opinion_arrived,
        }

    def handle(self, event: m.AnyEvent) -> list[m.Action]:
        """What is to be done about `event`. Raises InvalidTransition (a defect of ours) and nothing else."""
        self.heard_before, self.now = self.now, max(self.now, event.at)
        self._event = event
        self._actions = []
        self._handlers[type(event)](event)
        self._settle()
        self._actions += opinions.newly_wanted(self.casebook, self.spec.opinion_below, self.outcome is not None)
        if self._ended:
            opinions.lost(self.casebook)
        return self._actions

    def view(self, now: float | None = None) -> JobView:
        """Everything that is shown of the job, as of its newest event or a later time."""
        return job_view(self, now)

    def _opinion_arrived(self, event: m.OpinionArrived) -> None:
        case = self.casebook.get(event.incident)
        if case is not None:
            opinions.arrived(case, event.opinion)

    def _opinion_asked(self, event: m.OpinionAsked) -> None:
        case = self.casebook.get(event.incident)
        if case is not None:
            case.opinion_wanted = True

    def _controller_started(self, event: m.ControllerStarted) -> None:
        if event.epoch > self.epoch:
            if self.epoch:
                self._note(f"the controller was started again (epoch {event.epoch})")
            self.epoch = event.epoch
            self._cancel("again", "stacks", "silence")  # the new hang watch finds out by itself whether there is a hang
            self.silence = None
        self._wait_for_word()
        for timer, at in self.timers.items():
            self._actions.append(m.SetTimer(timer=timer, at=at))
        for node in self.roster:
            node.sent = None
            node.quiet_since = self.now if node.quiet_since is None else node.quiet_since  # until it comes
        self._give_again()
        self._actions += opinions.wanted_again(self.casebook)
        self._touch_all()
        if self.outcome is not None:
            self._ended = False
            self._leave()

    def _journal_stalled(self, event: m.JournalStalled) -> None:
        self._note(
            f"the journal could not be written for {event.seconds:.0f} s: nothing was done by itself meanwhile",
            loud=True,
        )

    def _job_defined(self, event: m.JobDefined) -> None:
        if self._spec_open:
            self.spec, self._spec_open = event.spec, False
            self._proceed()
            return
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
            if not event.host:
                self._heard_again(node)
        self._refresh_and_proceed()

    def _heard_again(self, node: Node) -> None:
        """It was only silent, and nothing has been decided yet: no restart is needed."""
        case, attempt = self._case, self.attempt
        if case is None or attempt is None or self.state != "DIAGNOSING" or node.name not in case.lost_nodes:
            return
        case.lost_nodes.remove(node.name)
        only_silent = case.trigger == "node_lost" and case.hang is None and attempt.all_stand
        if only_silent and not case.lost_nodes and not self._is_broken(attempt):
            self._go_on(case, f"false alarm: {node.name} is back")

    def _node_lost(self, event: m.NodeLost) -> None:
        node = self.roster.get(event.node)
        if node is None or not node.standing:
            return
        self._lose(node, f"no word from it for {event.silent_s:.0f} s", event.silent_s)

    def _node_quiet(self, event: m.NodeQuiet) -> None:
        node = self.roster.get(event.node)
        if node is not None:
            node.quiet_since = event.at - event.silent_s if event.silent_s else None

    def _stop_or_lose(self, event: m.StopRequested) -> None:
        """A front that was killed takes its node's ranks along: with other nodes there, that node is lost."""
        node = self.roster.get(event.node)
        others = any(other.standing and other.name != event.node for other in self.roster)
        if event.signal == "FRONT_GONE" and others:
            if node is not None and node.standing:
                node.ours_ended = True
                self._lose(node, "its `unbroken run` was killed", 0.0)
            return
        self._stop_requested(event)

    def _lose(self, node: Node, why: str, silent_s: float) -> None:
        node.standing, node.why = False, why
        self._note(f"{node.name} is lost: {node.why}", loud=True)
        self._leave()
        attempt = self.attempt
        if attempt is None or attempt.over or node.name not in attempt.members:
            return
        if attempt.finishing:
            self._finished(attempt)  # its ranks ended well: nothing of the work is lost with it
            return
        if self.state == "RECOVERING" and not self._wants_approval:
            self._refresh_and_proceed()
            return
        case = self._fault("node_lost", f"node {node.name} was lost ({node.why})", self.now - silent_s)
        if case is not None:
            case.lost_nodes.append(node.name)
            self._look_into(case)

    def _evidence_arrived(self, event: m.EvidenceArrived) -> None:
        piece = event.evidence
        node = self.roster.get(piece.node)
        attempt = self.attempt
        if node is None or attempt is None:
            return
        if piece.attempt != attempt.number:
            self._late_evidence(piece)
            return
        if piece.request > node.evidence_seen:
            node.evidence_seen = piece.request
            self._touched.add(node.name)
        if attempt.keep_evidence(piece):
            self._note_evident_steps(attempt, piece)
            if self._case is not None and self._case.verdict is None:
                self._case.take(attempt.evidence.values())
            for finding in piece.findings:
                self.casebook.note_finding(finding)
            self._late_evidence(piece)
            self._conclude_when_ready()

    def _note_evident_steps(self, attempt: Attempt, piece: NodeEvidence) -> None:
        """The ranks' last words may tell a later step than the newest heartbeat."""
        for sample in piece.samples:
            if sample.step is not None and not attempt.over:
                attempt.note_step(sample.step, sample.last_step, self.now - sample.moved_age_s)
                self._reached(sample.step)

    def _finding_arrived(self, event: m.FindingArrived) -> None:
        node = self.roster.get(event.node)
        if node is None or event.number < node.findings_seen:
            return
        node.findings_seen = event.number + 1
        self._touched.add(node.name)
        self.casebook.note_finding(event.finding)
        self._late_finding(event.finding)
        if event.finding.failure_class is FailureClass.LOSS_SPIKE_OR_NAN:
            self._numerics(event.finding)
        self._device_finding(event.finding, event.node)

    def _pace_learned(self, _: m.PaceLearned) -> None:
        """Of an older journal: places in the code are remembered now."""

    def _checkpoints_seen(self, event: m.CheckpointsSeen) -> None:
        before = self.checkpoints.pop(event.node, ())
        known = {(c.path, c.modified_at) for c in before}
        step = self.attempt.step if self.attempt is not None else None
        if self.suspect_open and self._suspect_after is not None:
            new = [one for one in event.checkpoints if (one.path, one.modified_at) not in known]
            later = [one for one in new if one.step is not None and one.step > self._suspect_after]
            self.suspects.extend((one.path, one.modified_at) for one in later)
        for checkpoint in event.checkpoints:
            if checkpoint.step is None and step is not None and (checkpoint.path, checkpoint.modified_at) not in known:
                self._step_when_saved[checkpoint.path] = step
        while len(self._step_when_saved) > STEPS_KEPT:
            del self._step_when_saved[next(iter(self._step_when_saved))]
        self.checkpoints[event.node] = event.checkpoints[:CHECKPOINTS_EACH]
        while len(self.checkpoints) > REPORTS_KEPT:
            del self.checkpoints[next(iter(self.checkpoints))]
        self._saved(event.checkpoints)
        good = newest(event.checkpoints)
        self.last_good = good.path if good is not None else self.last_good
        others = [folder for folder in self.checkpoint_folders if folder not in event.folders]
        folders = (*others, *event.folders)[-FOLDERS_KEPT:]
        if set(folders) != set(self.checkpoint_folders):
            self._touch_all()
        self.checkpoint_folders = folders
        if self.state == "STARTING" or (self.state == "RECOVERING" and not self._wants_approval):
            self._refresh()

    def _versions_compared(self, event: m.VersionsCompared) -> None:
        """Told once for each set of values: that one more node has one of them is no news."""
        self.skew = event.differences
        new = []
        for difference in event.differences:
            told = (difference.key, *sorted(value.value for value in difference.values))
            if told not in self._skew_told:
                self._skew_told.add(told)
                new.append(difference)
        if new:
            more = f"; and {len(new) - SKEW_SAID} more differences (unbroken status)" if len(new) > SKEW_SAID else ""
            text = "; ".join(difference.text for difference in new[:SKEW_SAID])
            self._note(f"the nodes are not the same: {text}{more}", loud=any(one.important for one in new))

    def _stragglers_seen(self, event: m.StragglersSeen) -> None:
        """Told and shown, and nothing is done about it: whether to go on without a slow rank is for people to say."""
        attempt = self._current(event.attempt)
        if attempt is None:
            return
        before, self.stragglers = self.stragglers, event
        if event.ranks:
            self._note(slow_text(event, attempt.rank_nodes) + slow_why(self, event), loud=True)
        elif before is not None and before.ranks:
            self._note(f"{names(before.ranks)} {'holds' if len(before.ranks) == 1 else 'hold'} nobody up any more")

    def _node_done(self, event: m.NodeDone) -> None:
        node = self.roster.get(event.node)
        if node is not None:
            node.done = self.is_over
            self._leave()

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
