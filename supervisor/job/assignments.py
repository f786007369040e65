"""What a job knows and says: the lowest layer of `Job` (then `lifecycle`, `dealings`, `casework`, ...).

Nodes are told their whole desired state; it is worked out again after every event for the nodes that the event touched,
and given out only where it changed.
"""

from __future__ import annotations

from collections import deque

import msgspec

from recovery.actions import Mode
from recovery.cordon import CordonLedger
from supervisor.job.attempt import Attempt
from supervisor.job.roster import Node, Roster
from supervisor.job.transitions import TRANSITIONS, InvalidTransition
from supervisor.messages import (
    Action,
    AnyEvent,
    Assign,
    Assignment,
    ControllerStarted,
    JobSpec,
    Note,
    Outcome,
    OverrideGiven,
    SetTimer,
    SpaceWanted,
    Stage,
)
from supervisor.view import JobStateName, StoryLine, utc

STOP_GRACE_S = 30.0
"""For the workers of a job that is stopped on request."""
STORY_KEPT = 500
NOTICES_KEPT = 20


class Assignments:
    """State, notes, timers and assignments. Subclasses handle an event, then call `_settle`."""

    def __init__(self) -> None:
        self.state: JobStateName = "IDLE"
        self.spec = JobSpec(name="")
        self.now = 0.0
        self.heard_before = 0.0
        """The time of the event before this one."""
        self.epoch = 0
        self.mode: Mode = "enforce"
        self.pause: OverrideGiven | None = None
        """The operator's order that holds now; None: not paused."""
        self.attempt: Attempt | None = None
        self.outcome: Outcome | None = None
        self.roster = Roster()
        self.checkpoint_folders: tuple[str, ...] = ()
        """Where ranks were seen to write checkpoints: a node that never wrote one must know where to look."""
        self.cordons = CordonLedger()
        self.timers: dict[str, float] = {}
        self.story: deque[StoryLine] = deque(maxlen=STORY_KEPT)
        self._space: SpaceWanted | None = None
        """The next attempt waits until there is room on disks."""
        self._version = 0
        self._notices: deque[tuple[int, str]] = deque(maxlen=NOTICES_KEPT)
        self.drain_requests: dict[str, str] = {}
        """Node -> the reason why root's programs there are to drain it, for the job may not."""
        self._notice_number = 0
        self._stop_signal = "SIGTERM"
        self._grace_s = STOP_GRACE_S
        self._event: AnyEvent = ControllerStarted(at=0.0, epoch=0)
        self._actions: list[Action] = []
        self._touched: set[str] = set()
        self._touched_all = False

    # ----- saying things -----

    def _note(
        self, text: str, incident: str = "", loud: bool = False, refused: bool = False, unknown_node: bool = False
    ) -> None:
        self.story.append(StoryLine(at=utc(self.now), text=text, incident=incident, loud=loud))
        self._actions.append(Note(text=text, incident=incident, loud=loud, refused=refused, unknown_node=unknown_node))
        if loud:
            self._notice_number += 1
            self._notices.append((self._notice_number, text))
            self._touched.add(self._speaker())

    def _set_timer(self, timer: str, at: float) -> None:
        if self.timers.get(timer) != at:
            self.timers[timer] = at
            self._actions.append(SetTimer(timer=timer, at=at))

    def _cancel(self, *timers: str) -> None:
        for timer in timers:
            if self.timers.pop(timer, None) is not None:
                self._actions.append(SetTimer(timer=timer, at=None))

    def _enter(self, state: JobStateName) -> None:
        if state == self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(self.state, state, self._event, self.story)
        self.state = state

    @property
    def paused(self) -> bool:
        return self.pause is not None

    @property
    def is_over(self) -> bool:
        return self.outcome is not None

    # ----- what nodes are told -----

    def _touch_all(self) -> None:
        self._touched_all = True

    def _speaker(self) -> str:
        """The node whose terminal shows our lines: the first of the attempt."""
        if self.attempt is not None and self.attempt.members:
            return self.attempt.members[0]
        return next((node.name for node in self.roster if node.standing), "")

    def _settle(self) -> None:
        """Give out what changed."""
        touched = (node.name for node in self.roster) if self._touched_all else sorted(self._touched)
        for name in list(touched):
            node = self.roster.get(name)
            if node is not None:
                self._give_out(node)
        self._touched.clear()
        self._touched_all = False

    def _give_out(self, node: Node) -> None:
        wanted = self._desired(node)
        if node.sent is not None and msgspec.structs.replace(wanted, version=node.sent.version) == node.sent:
            return
        self._version += 1
        node.sent = msgspec.structs.replace(wanted, version=self._version)
        self._actions.append(Assign(assignment=node.sent))

    def _desired(self, node: Node) -> Assignment:
        attempt = self.attempt
        member = attempt is not None and node.name in attempt.members
        cordoned = self.cordons.of(node.name, self.now) is not None
        common = Assignment(
            epoch=self.epoch,
            version=0,
            node=node.name,
            role="member" if member else "excluded" if cordoned else "spare",
            attempt=attempt.number if attempt is not None else 0,
            stage=self.stage,
            evidence=node.request,
            space=self._space if member else None,
            wake=node.wake,
            wake_number=node.wake_number,
            evidence_seen=node.evidence_seen,
            findings_seen=node.findings_seen,
            checkpoint_folders=self.checkpoint_folders,
            grace_s=self._grace_s,
            stop_signal=self._stop_signal,
            outcome=self.outcome,
            drain_request=self.drain_requests.get(node.name, ""),
            may_requeue=self._may_requeue_by_itself,
            notices=tuple(self._notices) if node.name == self._speaker() else (),
        )
        if attempt is None or not member:
            # No worker of an older attempt may live on a node that is not a member: it may be one that came back.
            stage: Stage = "form" if attempt is not None and not self.is_over else self.stage
            if attempt is not None and attempt.adopted and not self.is_over:
                stage = "hold"  # it may have ranks of this very attempt, and has not told yet
            return msgspec.structs.replace(common, stage=stage)
        return msgspec.structs.replace(
            common,
            round=None if attempt.adopted else attempt.round,  # where its ranks met is not known, nor needed
            resume=attempt.resume,
            prepare=attempt.prepare if node.name == attempt.preparer else (),
            paused=(self.paused or self._space is not None) and self.state == "RECOVERING",
        )

    @property
    def _may_requeue_by_itself(self) -> bool:
        return False

    @property
    def stage(self) -> Stage:
        if self.outcome is not None:
            return "stop"
        attempt = self.attempt
        if attempt is None:
            return "hold"
        if attempt.round is None:
            return "form"
        return "finish" if attempt.finishing else "run"
