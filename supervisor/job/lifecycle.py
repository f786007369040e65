"""The life of a job: its attempts one after the other, and its end. The layer of `Job` above `assignments`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from recovery.actions import Checkpoint, Preparation, Resume
from recovery.budgets import RestartBudget
from supervisor.job.assignments import STOP_GRACE_S, Assignments
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Casebook
from supervisor.job.roster import Node, Roster
from supervisor.messages import End, Outcome, Round
from supervisor.view import JobStateName

FORM_LIMIT_S = 600.0
"""All launchers must have come to rendezvous, preparations done, within this."""
START_LIMIT_S = 120.0
"""All workers must stand within this after the round was formed."""
HEARD_S = 15.0
"""Agents find a controller that has started again within a second or two."""
FAILURE_GRACE_S = 5.0
"""After a failure nothing is left to be saved; a stop on request gets `STOP_GRACE_S`."""
SUSPECTS_KEPT = 64
END_SLACK_S = 60.0
"""How much longer than the grace a node may take to say that it is done."""

_ENDS: dict[str, JobStateName] = {
    "succeeded": "SUCCEEDED",
    "failed": "FAILED",
    "stopped": "STOPPED",
    "requeued": "FAILED",  # `view` says REQUEUED
}

Choose = Callable[[Sequence[Checkpoint]], tuple[Checkpoint | None, tuple[Preparation, ...]]]


class Lifecycle(Assignments):
    """Attempts, what they wait for, and the end."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.defined_at: float | None = None
        self.started_at: float | None = None
        self.first_moved_at: float | None = None
        self.first_step_at: float | None = None
        self.ended_at: float | None = None
        self.held = ""
        """Why an operator has to say how to go on; empty when none has to."""
        self.asked_at = 0.0
        """Since when the job has waited for an operator, if it does."""
        self.budget = RestartBudget(self.spec.max_restarts)
        self.casebook = Casebook()
        self.checkpoints: dict[str, tuple[Checkpoint, ...]] = {}
        """By the node that saw them, the newest report last."""
        self.suspect_spans: list[tuple[float, float | None]] = []
        """Checkpoints modified within are suspect."""
        self.last_good = ""
        """A complete checkpoint that was seen last."""
        self.suspects: deque[tuple[str, float]] = deque(maxlen=SUSPECTS_KEPT)
        """Path and time of those of a later step that came while numerics were wrong: storage has its own clock."""
        self.restarts = 0
        self.furthest: int | None = None
        """The highest step that any attempt reached."""
        self.furthest_saved: int | None = None
        """The highest step of a checkpoint that an attempt wrote which shows no steps."""
        self._choose = choose
        self._places: tuple[str, ...] = ()
        """The members of the last attempt whose workers ran, in the order of their ranks."""
        self._gather_until = 0.0
        """Before this it starts only with all nodes."""
        self._last_started = 0
        """The number of the newest attempt whose ranks were let go."""
        self._broke: Attempt | None = None
        """The newest attempt before this one that made steps."""
        self._ordered = False
        """An operator's order for the next attempt, which a pause does not keep back."""
        self._ended = False
        self._numbers_from = 0
        """Attempts up to here have been, as far as is known: the journal may have lost some."""
        self._spec_open = False
        """Started again by the scheduler: the next spec is the job's."""

    def _begin_life(self) -> None:
        """As a job without nodes again, on which everything that was learned is kept."""
        self.state, self.outcome, self.ended_at, self.held = "IDLE", None, None, ""
        self._space = None
        self.roster, self._places, self._ended = Roster(), (), False
        self.checkpoints.clear()
        self._notices.clear()
        self._stop_signal, self._grace_s, self._gather_until = "SIGTERM", STOP_GRACE_S, 0.0
        if self.attempt is not None:
            self.attempt.over = True
        self._cancel(*list(self.timers))

    def _wait_for_word(self) -> None:
        """No limit on an attempt's start runs out before the agents could tell this controller how far it is."""
        for timer in ("form", "start", "evidence"):
            if timer in self.timers:
                self._set_timer(timer, max(self.timers[timer], self.now + HEARD_S))

    # ----- attempts -----

    @property
    def trains_since(self) -> float | None:
        """When training began: the first step, or where steps are not shown the first sign of life."""
        return self.first_step_at if self.first_step_at is not None else self.first_moved_at

    @property
    def suspect_open(self) -> bool:
        """The numerics of the current attempt went wrong."""
        return bool(self.suspect_spans) and self.suspect_spans[-1][1] is None

    def _usable(self, node: Node) -> bool:
        return node.standing and not node.done and self.cordons.of(node.name, self.now) is None

    def _members(self) -> tuple[str, ...]:
        return self.roster.choose(self._places, self.spec.nodes_max, self._usable)

    def candidates(self, members: tuple[str, ...] = ()) -> list[Checkpoint]:
        """All checkpoints known, each once, with those marked that were written while the numerics were bad.

        What `members` see counts alone, if one of them has looked: they look again before each attempt, and another
        node's older look may still list what was set aside since.
        """
        found: dict[str, Checkpoint] = {}
        wanted = set(members)
        looks = [seen for node, seen in self.checkpoints.items() if node in wanted] or self.checkpoints.values()
        for seen in looks:
            for checkpoint in seen:
                known = found.get(checkpoint.path)
                if known is None or _told_better(checkpoint) > _told_better(known):
                    found[checkpoint.path] = checkpoint
        return [self._judged(checkpoint) for checkpoint in found.values()]

    def _judged(self, checkpoint: Checkpoint) -> Checkpoint:
        if (checkpoint.path, checkpoint.modified_at) in self.suspects:
            return msgspec.structs.replace(checkpoint, suspect=True)
        for since, until in self.suspect_spans:
            if since <= checkpoint.modified_at and (until is None or checkpoint.modified_at <= until):
                return msgspec.structs.replace(checkpoint, suspect=True)
        return checkpoint

    def _form(self, members: tuple[str, ...]) -> None:
        """A new attempt: from now on no worker of an older one may live."""
        number = 1 + max(self._numbers_from, self.attempt.number if self.attempt is not None else 0)
        if self.attempt is not None:
            self.attempt.over = True
            if self.attempt.step is not None:
                self._broke = self.attempt
        resume, prepare = self._resume(members)
        closed: list[tuple[float, float | None]] = [(since, until or self.now) for since, until in self.suspect_spans]
        self.suspect_spans = closed[-8:]
        self.attempt = Attempt(
            number=number,
            members=members,
            formed_at=self.now,
            resume=resume,
            prepare=prepare,
            preparer=members[0] if members and prepare else "",
        )
        for node in self.roster:
            node.request, node.wake, node.evidence_seen = None, (), -1
        self._cancel("form", "start", "stood", "settle", "evidence", "finish", "again", "stacks", "silence")
        self._touch_all()

    def _resume(self, members: tuple[str, ...]) -> tuple[Resume, tuple[Preparation, ...]]:
        try:
            checkpoint, prepare = self._choose(self.candidates(members))
        except Exception as error:  # which checkpoint to use must never decide whether the run comes back at all
            self._note(f"which checkpoint to resume from could not be worked out ({error}): the script decides")
            return Resume(), ()
        if checkpoint is None:
            return Resume(prepare=prepare), prepare
        return Resume(path=checkpoint.path, step=checkpoint.step, prepare=prepare), prepare

    def _refresh(self) -> None:
        """Checkpoints or members changed while an attempt is being formed: bring it up to date.

        Preparations are done once for each attempt number, so other preparations, or another node to do them, make
        a new attempt.
        """
        attempt = self.attempt
        if attempt is None or attempt.round is not None or self.is_over:
            return
        members = self._members() if self.state == "RECOVERING" else attempt.members
        resume, prepare = self._resume(members)
        if not attempt.preparer and members and prepare:
            attempt.preparer = members[0]
        if prepare != attempt.prepare or (attempt.preparer and attempt.preparer not in members):
            self._form(members)
            if self.state == "STARTING":
                self._set_timer("form", self.now + FORM_LIMIT_S)
        elif members != attempt.members or resume != attempt.resume:
            attempt.members, attempt.resume = members, resume
            attempt.offers = {name: offer for name, offer in attempt.offers.items() if name in members}
            self._touch_all()

    def _proceed(self, by_operator: bool = False) -> None:
        """Start the next attempt if nothing stands in its way; else see that something will happen in time."""
        if self.state not in ("IDLE", "RECOVERING") or self.defined_at is None or self.is_over:
            return
        self._ordered |= by_operator
        if (self.paused and not self._ordered) or self.held or "backoff" in self.timers or self._must_wait():
            return
        if "nodes" in self.timers and len(self.roster) < self.spec.nodes_max and self.now < self._gather_until:
            return
        members = self._members()
        # A spare that happens to come first is not taken in the stead of a node that is on its way.
        early = self.state == "IDLE" and any((node := self.roster.get(name)) and node.spare for name in members)
        if (early or len(members) < self.spec.nodes_max) and not self._gathered(len(members)):
            self._short(len(members))
            return
        self._cancel("gather", "nodes", "hold")
        if self.attempt is None or self.attempt.over:
            self._form(members)
        else:
            self._refresh()
        assert self.attempt is not None
        self._begin_attempt(self.attempt)

    def _must_wait(self) -> bool:
        """Whether somebody else has to answer first."""
        return self._approval_wanted() or (self._space is not None and not self._ordered)

    def _short(self, found: int) -> None:
        """It waits for nodes, and only `found` can be used."""

    def _approval_wanted(self) -> bool:
        return False

    @property
    def approval_wanted(self) -> bool:
        """A plan waits for an operator's `approve` (or, while paused, for `resume`)."""
        return self._approval_wanted()

    def _gathered(self, found: int) -> bool:
        """Whether to go on with what there is: fewer than `nodes_max` nodes, or spares among them."""
        deadline = self.timers.get("nodes")
        if deadline is None:
            self._set_timer("nodes", self.now + self.spec.wait_for_nodes_s)
            deadline = self.timers["nodes"]
            if found or self.attempt is not None:
                self._note(f"waits for nodes: {found} of {self.spec.nodes_max} can be used")
        may_be_fewer = self.state == "IDLE" or self.spec.nodes_min < self.spec.nodes_max
        self._gather_until = deadline - self.spec.wait_for_nodes_s + self.spec.gather_s if may_be_fewer else deadline
        if self.now < self._gather_until:
            if may_be_fewer:
                self._set_timer("gather", self._gather_until)
            return False
        return found >= max(1, self.spec.nodes_min)

    def _begin_attempt(self, attempt: Attempt) -> None:
        self._enter("STARTING")
        self._ordered = False
        if self.started_at is None:
            self.started_at = self.now
        for case in self.casebook.unclosed():
            if case.plan is not None:
                case.mark("decide", self.now)
                case.next_attempt = attempt.number
        self._set_timer("form", self.now + FORM_LIMIT_S)
        self._touch_all()
        self._form_round()

    def _form_round(self) -> None:
        """All launchers wait in rendezvous: let them go."""
        attempt = self.attempt
        if attempt is None or self.state != "STARTING" or attempt.round is not None:
            return
        if not attempt.all_offered:
            return
        attempt.world_size = sum(offer.local_world_size for offer in attempt.offers.values())
        offer = attempt.offers[attempt.members[0]]
        attempt.round = Round(
            attempt=attempt.number, nodes=attempt.members, store_host=offer.host, store_port=offer.port
        )
        self._places = attempt.members
        names = ", ".join(attempt.members[:8]) + (", ..." if len(attempt.members) > 8 else "")
        nodes = "1 node" if len(attempt.members) == 1 else f"{len(attempt.members)} nodes"
        ours = {step.path for step in attempt.prepare}
        gone = self.last_good if attempt.number > 1 and not attempt.resume.path and self.last_good not in ours else ""
        although = f", although {gone} was there: is its file system mounted?" if gone else ""
        told = f"attempt {attempt.number} starts on {nodes} ({names}){attempt.newest_known}{although}"
        self._note(told + _given_up(self._last_started + 1, attempt.number - 1), loud=bool(gone))
        self._last_started = attempt.number
        for case in self.casebook.unclosed():
            if case.next_attempt is not None:
                case.mark("rendezvous", self.now)
        self._cancel("form")
        self._set_timer("start", self.now + START_LIMIT_S)
        self._touch_all()

    # ----- the end -----

    def _end(self, outcome: Outcome, why: str, *, grace_s: float = FAILURE_GRACE_S) -> None:
        """The job has ended: tell every node, and go when all of them are done."""
        self._enter(_ENDS[outcome.state])
        self.outcome = outcome
        self.ended_at = self.now
        self._grace_s = grace_s
        self.held, self._space = "", None
        if self.attempt is not None:
            self.attempt.over = True
        broken = self.casebook.unclosed() if outcome.state != "requeued" else []  # what it costs goes on
        for case in [*broken, *self.casebook.standing()]:
            case.close(self.now, f"the job ended: {outcome.line}")
        self._cancel(*list(self.timers))
        self._set_timer("end", self.now + grace_s + END_SLACK_S)
        self._note(why)
        self._touch_all()
        self._leave()

    def _leave(self, even_so: bool = False) -> None:
        """End, once every node that can be reached has ended everything."""
        if self.outcome is None or self._ended:
            return
        if even_so or all(node.done or not node.standing for node in self.roster):
            self._ended = True
            self._cancel("end")
            self._actions.append(End(outcome=self.outcome))


def _given_up(first: int, last: int) -> str:
    """Numbers that were never in use: what an attempt prepares, or its nodes, changed while it was being formed."""
    if first > last:
        return ""
    what = f"attempt {last} was" if first == last else f"attempts {first} to {last} were"
    return f"; {what} given up while being formed"


def _told_better(checkpoint: Checkpoint) -> tuple[bool, float]:
    """Of what several nodes tell of one path: one that knows all its writers has no doubt."""
    return (not checkpoint.in_doubt, checkpoint.modified_at)
