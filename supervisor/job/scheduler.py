"""What the job asks of the scheduler that gave it its nodes.

A cordon has the node drained, its end gives it back; a job that is short of nodes for good asks to be started again
on others, once. The job's own cordons stand whatever the scheduler answers. While the job is paused nothing goes out.
Requests are harmless when repeated, so one that may or may not have been carried out is simply given again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from diagnosis.signals import clean_line
from recovery.cordon import Cordon, drain_reason, may_be_asked
from recovery.scheduling import PREFIX, RequestOutcome
from supervisor import messages as m
from supervisor.job.attempts import Attempts
from supervisor.job.core import (
    Core,
    EndJob,
    LetControllerGo,
    Proceed,
    ReplaceOutcome,
    Timer,
    Wants,
    cancel,
)
from supervisor.job.ledger import ClusterLedger
from supervisor.job.nodes import Nodes
from supervisor.messages import SchedulerRequest
from supervisor.notes import note

REQUEUE_WAIT_S = 30.0
"""A lost node may come back: the job waits this long before it asks to be started again."""
REQUEUED_EXIT = 75
NOT_DRAINED = "not drained"
END_REQUESTS_S = 25.0
"""After the nodes have ended the job waits so long for the scheduler's answers; Slurm's `KillWait` is 30 s as a
rule."""
LAST_OUTPUT_S = 5.0
"""Pause between the end of the nodes and the request to end the step: their last lines are shown meanwhile."""
COMMENT_LIMIT = 250
END_PAUSE_S = 5.0
"""Longest pause between tries at the end of the job."""
REQUEUE_PAUSE_S = 60.0
"""Longest pause before a scheduler that cannot start the job again yet is asked again: no node trains meanwhile."""
LIMIT_NEAR_S = 900.0
"""If the job is stopped this close to its time limit, the message says so: batch scripts have Slurm warn early."""

FIRST_PAUSE_S = 5.0
"""Pause before a request that the scheduler did not answer is repeated; it doubles from there."""
LONGEST_PAUSE_S = 300.0
TRIES = 12
"""About half an hour; then the request is given up."""
UNANSWERED_S = 120.0
"""A request without any answer for this long is repeated: the process that carried it out has died."""


@dataclasses.dataclass
class PendingRequest:
    """One request that is not finished. Times are Unix seconds."""

    request: SchedulerRequest
    name: str
    """The job's own name for the node."""
    by_policy: bool
    incident: str
    tries: int = 0
    under_way: bool = False
    due: float = 0.0
    """When it may be sent; once sent: when it counts as unanswered."""


class RequestQueue:
    """Mutable; `SchedulerRequests` owns it. Requests about one node are sent one at a time."""

    def __init__(self) -> None:
        self._number = 0
        self._pending: list[PendingRequest] = []

    def add(
        self,
        kind: Literal["drain", "undrain", "requeue", "cancel", "look", "end_step"],
        *,
        node: str = "",
        name: str = "",
        reason: str = "",
        exclude: tuple[str, ...] = (),
        avoid: tuple[str, ...] = (),
        by_policy: bool,
        incident: str = "",
    ) -> PendingRequest:
        """A new request; it replaces requests about the same node that have not been sent."""
        self._pending = [one for one in self._pending if one.request.node != node or one.under_way]
        self._number += 1
        request = SchedulerRequest(
            number=self._number, kind=kind, node=node, reason=reason, exclude=exclude, avoid=avoid
        )
        pending = PendingRequest(request, name, by_policy, incident)
        self._pending.append(pending)
        return pending

    @property
    def under_way(self) -> bool:
        return any(one.under_way for one in self._pending)

    @property
    def requeue(self) -> PendingRequest | None:
        return next((one for one in self._pending if one.request.kind == "requeue"), None)

    @property
    def of_nodes(self) -> list[PendingRequest]:
        return [one for one in self._pending if one.request.node]

    def open(self, allowed: Callable[[PendingRequest], bool]) -> bool:
        """Whether an answer may still come."""
        return any(one.under_way or allowed(one) for one in self._pending)

    def hasten(self, now: float) -> None:
        """Try now what was to be tried later."""
        for pending in self._pending:
            if not pending.under_way:
                pending.due = min(pending.due, now)

    def give_up(self) -> list[PendingRequest]:
        """Drop all requests; returns those that were not answered."""
        given_up, self._pending = self._pending, []
        return given_up

    def about(self, node: str) -> bool:
        """Whether a request about this node is pending."""
        return any(one.request.node == node for one in self._pending)

    def drop_requeue(self) -> None:
        """It is not needed any more. (One that was sent cannot be taken back.)"""
        self._pending = [one for one in self._pending if one.request.kind != "requeue" or one.under_way]

    def drop_cancel(self) -> None:
        self._pending = [one for one in self._pending if one.request.kind != "cancel"]

    def forget_requeue(self) -> None:
        """The job was started again: the answer does not matter any more."""
        self._pending = [one for one in self._pending if one.request.kind not in ("requeue", "look")]

    def take(self, now: float, allowed: Callable[[PendingRequest], bool]) -> list[SchedulerRequest]:
        """The requests to be sent now."""
        self._pending = [one for one in self._pending if one.due > now or not self._is_overtaken(one)]
        taken: list[SchedulerRequest] = []
        busy: set[str] = set()
        for pending in self._pending:
            if pending.request.node not in busy and pending.due <= now and allowed(pending):
                pending.under_way, pending.tries, pending.due = True, pending.tries + 1, now + UNANSWERED_S
                taken.append(pending.request)
            busy.add(pending.request.node)
        return taken

    def next_due(self, allowed: Callable[[PendingRequest], bool]) -> float | None:
        """When `take` has the next request to send, after what is due now."""
        first: dict[str, PendingRequest] = {}
        for pending in self._pending:
            first.setdefault(pending.request.node, pending)
        return min((pending.due for pending in first.values() if allowed(pending)), default=None)

    def give_again(self, now: float) -> None:
        """After a controller was replaced: requests that were sent are sent again as soon as they may be."""
        for pending in self._pending:
            if pending.under_way:
                pending.under_way, pending.due = False, now

    def _is_overtaken(self, pending: PendingRequest) -> bool:
        """Whether a newer request about the same node replaces this one."""
        node, number = pending.request.node, pending.request.number
        return any(other.request.node == node and other.request.number > number for other in self._pending)

    def answered(
        self, number: int, outcome: RequestOutcome, now: float, longest_s: float = LONGEST_PAUSE_S
    ) -> tuple[PendingRequest, bool] | None:
        """The request that was answered, and whether it is finished; None: there is none. `longest_s`: of a pause."""
        pending = next((one for one in self._pending if one.request.number == number), None)
        if pending is None:
            return None
        if outcome == "unavailable" and pending.tries < TRIES and not self._is_overtaken(pending):
            pending.under_way = False
            pending.due = now + min(longest_s, FIRST_PAUSE_S * 2 ** max(0, pending.tries - 1))
            return pending, False
        self._pending.remove(pending)
        return pending, True


class SchedulerRequests:
    def __init__(self, core: Core, nodes: Nodes, attempts: Attempts, ledger: ClusterLedger) -> None:
        self._core, self._nodes, self._attempts, self._ledger = core, nodes, attempts, ledger
        self._queue = RequestQueue()
        self.drains: dict[str, str] = {}
        """Node -> what became of the request to drain it, in a word or a sentence."""
        self.drain_requests: dict[str, str] = {}
        """Node -> why root's programs there are asked to drain it, because the job may not do it itself."""
        self.requeue_refused = ""
        """Why the scheduler does not start the job again."""
        self._names: dict[str, str] = {}
        """Node -> what the scheduler calls it, over all lives of the job."""
        self._requeue_approved = False
        """An operator approved the plan that says so."""
        self._progress_since_requeue = True
        self._end_step_for: tuple[str, ...] | None = None
        """At the end: nodes whose processes may keep the scheduler waiting. None: not known; empty: there are none."""
        self._waits_for_nobody = False
        """The end of the job waits for no node any more."""

    # ----- queries -----

    @property
    def _scheduler(self) -> str:
        return self._core.spec.scheduler

    @property
    def may_requeue(self) -> bool:
        """Whether the scheduler can be asked to start the job again: never twice without progress in between."""
        spec = self._core.spec
        may = spec.requeues < spec.max_requeues and self._progress_since_requeue and not self.requeue_refused
        return self._core.has_scheduler and may

    @property
    def may_requeue_by_itself(self) -> bool:
        core = self._core
        return self.may_requeue and not core.paused and core.mode == "enforce" and not core.is_over

    @property
    def is_requeuing(self) -> bool:
        """The request was sent, and cannot be taken back."""
        pending = self._queue.requeue
        return pending is not None and pending.under_way

    @property
    def wants_requeue(self) -> bool:
        return self._queue.requeue is not None

    @property
    def will_ask_again(self) -> bool:
        return self.wants_requeue and self._may_ask

    @property
    def may_have_been_asked(self) -> bool:
        """The request to start the job again was sent at least once."""
        pending = self._queue.requeue
        return pending is not None and pending.tries > 0

    @property
    def _may_ask(self) -> bool:
        return self.may_requeue and (self._core.mode == "enforce" or self._requeue_approved)

    @property
    def _starts_again(self) -> bool:
        """The job is being started again: pending requests are sent by its next run."""
        return self._core.outcome is not None and self._core.outcome.state == "requeued"

    def was_ever_ours(self, name: str) -> bool:
        return self._nodes.get(name) is not None or bool(self._name(name))

    def near_limit(self) -> str:
        """`, 20 s before the time limit of slurm` where that is near: most likely why the scheduler stopped the job."""
        ends_at, now = self._core.spec.ends_at, self._core.now
        if not self._core.has_scheduler or ends_at is None or now < ends_at - LIMIT_NEAR_S:
            return ""
        left_s = ends_at - now
        when = f"{left_s:.0f} s before the" if left_s >= 1.0 else "at the"
        return f", {when} time limit of {self._scheduler}"

    def _name(self, name: str) -> str:
        """What the scheduler calls a node; empty for one that was never one of the job's."""
        node = self._nodes.get(name)
        if node is not None:
            self._names[name] = node.scheduler_name or name
        return self._names.get(name, "")

    def _names_of(self, nodes: set[str]) -> tuple[str, ...]:
        return tuple(sorted(filter(None, map(self._name, nodes))))

    # ----- giving out -----

    def settle(self) -> Wants:
        """After each event: send what is due."""
        yield from self._queue.take(self._core.now, self._allowed)
        due = self._queue.next_due(self._allowed)
        yield cancel("orders") if due is None else Timer("orders", due)

    def _allowed(self, pending: PendingRequest) -> bool:
        """While the job is paused only looks, and the end of what has ended; nothing of policy's own unless it is to
        act; no new start at the end."""
        core, kind = self._core, pending.request.kind
        if kind in ("look", "end_step"):
            return True
        if core.paused or (pending.by_policy and core.mode != "enforce"):
            return False
        return not core.is_over or kind != "requeue"

    def requests_due(self) -> None:
        """`settle` sends what is due."""

    def give_again(self) -> None:
        """The controller was replaced: requests that it sent may be lost."""
        self._queue.give_again(self._core.now)

    def comment(self, text: str) -> Wants:
        """Put it into the scheduler's record of the job, too."""
        core = self._core
        if core.has_scheduler and not core.paused and core.mode != "observe":
            line = clean_line(f"{PREFIX} {text}", COMMENT_LIMIT).replace('"', "'")
            yield m.SchedulerComment(text=line)

    # ----- at the end -----

    def end(self, outcome: m.Outcome) -> m.Outcome:
        """The outcome's line is the last line that the user sees: add what the scheduler has not done yet."""
        late = [pending for pending in self._queue.of_nodes if pending.tries > 1 or not pending.under_way]
        if late and outcome.state != "requeued":
            told = "; ".join(map(self._undone, late[:4])) + "; ..." * (len(late) > 4)
            outcome = msgspec.structs.replace(outcome, line=f"{outcome.line} (so far {told})"[:500])
        self._queue.hasten(self._core.now)
        return outcome

    def leave(self, *, even_so: bool = False) -> Wants:
        """Let the controller go as soon as nobody is waited for; `even_so`: whichever node has not answered."""
        core, all_done = self._core, self._nodes.all_done
        if core.outcome is None or core.controller_may_go:
            return
        open_ = self._queue.under_way if self._starts_again else self._queue.open(self._allowed)
        if not even_so and open_:
            if all_done and "last_orders" not in core.timers:
                yield Timer("last_orders", core.now + END_REQUESTS_S)
            return
        if not self._starts_again:
            yield from self._give_up()
        self._waits_for_nobody |= even_so
        if self._end_step_for is None and (self._waits_for_nobody or all_done):
            self._end_step_for = self._silent_nodes()
            if self._end_step_for:
                yield Timer("step_end", core.now + LAST_OUTPUT_S)
        if not self._end_step_for and (self._waits_for_nobody or all_done):
            yield LetControllerGo()
            yield cancel("last_orders", "orders")

    def _silent_nodes(self) -> tuple[str, ...]:
        """Nodes whose `unbroken run` may still live, when all other nodes have ended."""
        if not self._core.has_scheduler or self._starts_again:
            return ()
        return self._names_of({node.name for node in self._nodes if not (node.done or node.front_ended)})

    def step_end_due(self) -> Wants:
        """Without this the scheduler could wait for their processes for ever: a rebooted node reports nothing."""
        silent, self._end_step_for = self._end_step_for or (), ()
        self._queue.add("end_step", avoid=silent, by_policy=False)
        yield from self.leave()

    def last_requests_due(self) -> Wants:
        yield from self._give_up()
        yield from self.leave()

    def _give_up(self) -> Wants:
        for pending in self._queue.give_up():
            kind = pending.request.kind
            if kind in ("requeue", "look"):
                continue
            yield note(
                "request_given_up",
                incident=pending.incident,
                loud=True,
                what=self._undone(pending),
                paused=self._core.paused,
                reason=pending.request.reason,
            )
            if kind == "drain" and pending.name in self.drains:
                self.drains[pending.name] = f"{NOT_DRAINED}: the job ended before {self._scheduler} did it"

    def _undone(self, pending: PendingRequest) -> str:
        done = {"drain": "drained", "undrain": "given back", "cancel": "cancelled", "end_step": "ended the step of"}
        return f"{self._scheduler} has not {done[pending.request.kind]} {pending.request.node or 'the job'}"

    # ----- cordons -----

    def cordon(self, cordon: Cordon, *, approved: bool = False) -> Wants:
        """Leave a node out from now on, and have it drained. `approved`: by policy, and an operator approved it."""
        self._nodes.cordons.add(cordon)
        self._nodes.touch(cordon.node)
        yield from self._ledger.cordoned(cordon, approved=approved)
        if not self._core.has_scheduler or cordon.follows_scheduler:
            return
        node = self._name(cordon.node)
        if not node:
            yield note("request_unknown_node", node=cordon.node, scheduler=self._scheduler)
            return
        reason = drain_reason(cordon, self._core.spec.scheduler_job or self._core.spec.name)
        by_policy = cordon.by == "policy" and not approved
        self._queue.add(
            "drain", node=node, name=cordon.node, reason=reason, by_policy=by_policy, incident=cordon.incident
        )
        self.drains[cordon.node] = "asked for"
        yield note(
            "drain_asked",
            incident=cordon.incident,
            scheduler=self._scheduler,
            node=node,
            paused=self._core.paused,
            reason=reason,
        )

    def lift_cordon(self, name: str, gpu: str) -> Wants:
        """An operator's word about a node, or about one GPU's cordon of it."""
        cordons, now = self._nodes.cordons, self._core.now
        lifted = cordons.lift(name, gpu)
        if lifted and cordons.of_job(name, now) is not None:
            return  # for another GPU, so it stays left out and drained
        self._nodes.use_whole(name, False)
        cordons.vouch(name, now)
        yield from self._undrain(name, lifted)
        if not lifted:
            yield note("not_cordoned", argument=name)

    def _undrain(self, name: str, lifted: bool) -> Wants:
        """An operator says that a node may be used. `lifted`: it was cordoned, and is no longer."""
        if self.drain_requests.pop(name, ""):
            self._nodes.touch(name)
        if not lifted:
            return
        node, drain = self._name(name), self.drains.pop(name, NOT_DRAINED)
        if self._core.has_scheduler and node and not drain.startswith(NOT_DRAINED):
            self._queue.add("undrain", node=node, name=name, by_policy=False)
            yield note("undrain_asked", scheduler=self._scheduler, node=node)

    # ----- answers -----

    def answered(self, event: m.SchedulerAnswered) -> Wants:
        requeue = self._queue.requeue
        of_requeue = requeue is not None and requeue.request.number == event.number
        longest_s = END_PAUSE_S if self._core.is_over else REQUEUE_PAUSE_S if of_requeue else LONGEST_PAUSE_S
        found = self._queue.answered(event.number, event.outcome, self._core.now, longest_s)
        if found is None:
            return
        pending, done = found
        kind = pending.request.kind
        if kind == "requeue":
            yield from self._requeue_answered(event, done)
        elif kind == "cancel":
            yield from self._cancel_answered(event, done)
        elif kind == "look":
            yield from self._looked(event.outcome == "done")
        elif kind == "end_step":
            yield from self._step_answered(event, done)
        else:
            yield from self._node_answered(pending, event, done)
        yield from self.leave()

    def _node_answered(self, pending: PendingRequest, event: m.SchedulerAnswered, done: bool) -> Wants:
        request, drains = pending.request, pending.request.kind == "drain"
        incident = pending.incident
        about: dict[str, Any] = {"scheduler": self._scheduler, "node": request.node, "drain": drains}
        text = event.text or event.outcome
        if not done:
            if pending.tries == 1:
                yield note("request_unanswered", incident=incident, **about, text=text)
            return
        if event.outcome in ("done", "already"):
            state = "drained"
            yield note("request_done", incident=incident, **about, outcome=event.outcome)
        else:
            state = f"{NOT_DRAINED}: {_why(event.outcome)}"
            left = ""
            if drains and event.outcome == "denied":
                left = self._ask_root(pending.name, request.reason)
            why = _why(event.outcome)
            root, nobody = left == "root", left == "nobody"
            yield note(
                "request_refused", loud=True, incident=incident, **about, why=why, text=text, root=root, nobody=nobody
            )
        if drains and pending.name in self.drains and not self._queue.about(request.node):
            self.drains[pending.name] = state

    def _ask_root(self, name: str, reason: str) -> str:
        """Ask root's programs on the node to drain it. `root`: they are asked; `nobody`: the node is gone."""
        if self._nodes.cordons.of(name, self._core.now) is None:
            return ""
        if not may_be_asked(reason, self._core.spec.scheduler_job):
            return ""
        if not self._nodes.is_present(name):
            return "nobody"
        self.drain_requests[name] = reason
        self._nodes.touch(name)
        return "root"

    def _step_answered(self, event: m.SchedulerAnswered, done: bool) -> Wants:
        if event.outcome == "done":
            yield note("scheduler_says", loud=True, scheduler=self._scheduler, text=event.text)
        elif done and event.outcome != "already":
            text = event.text or _why(event.outcome)
            yield note("nodes_kept", loud=True, scheduler=self._scheduler, text=text)

    # ----- starting the job again -----

    def short_of_nodes(self) -> Wants:
        """Fewer nodes can be used than are needed: ask the scheduler to start the job on others, if that is allowed."""
        core, found = self._core, len(self._attempts.next_members())
        asked = self.wants_requeue or "requeue" in core.timers
        enough = found >= max(1, core.spec.nodes_min)
        if self._attempts.current is None or core.state != "RECOVERING" or enough or asked or not self._may_ask:
            return
        cordoned = self._nodes.cordoned()
        if any(not node.present and not node.front_ended and node.name not in cordoned for node in self._nodes):
            wait_s = min(REQUEUE_WAIT_S, core.spec.wait_for_nodes_s / 2)
            yield note("requeue_planned", scheduler=self._scheduler, wait_s=wait_s)
            yield Timer("requeue", core.now + wait_s)
        else:
            yield from self._ask_requeue(found)

    def requeue_due(self) -> Wants:
        found = len(self._attempts.next_members())
        if found < max(1, self._core.spec.nodes_min) and self._may_ask:
            yield from self._ask_requeue(found)

    def _ask_requeue(self, found: int) -> Wants:
        nodes, cordoned = self._nodes, self._nodes.cordoned()
        gone = {node.name for node in nodes if not node.front_ended} - {node.name for node in nodes.usable()}
        exclude, avoid = self._names_of(cordoned), self._names_of(gone - cordoned)
        self._queue.add("requeue", exclude=exclude, avoid=avoid, by_policy=not self._requeue_approved)
        yield note(
            "requeue_asked",
            loud=True,
            found=found,
            wanted=max(1, self._core.spec.nodes_min),
            scheduler=self._scheduler,
            exclude=exclude,
            avoid=avoid,
            both=bool(exclude and avoid),
        )

    def _requeue_answered(self, event: m.SchedulerAnswered, done: bool) -> Wants:
        if self._core.is_over:
            yield from self._requeue_answered_late(event)
        elif event.outcome in ("done", "already"):
            yield from self.end_requeued(event.text)
        elif not done:
            yield note("requeue_later", scheduler=self._scheduler, text=event.text)
            yield Proceed()
        else:
            self.requeue_refused = f"{_why(event.outcome)} ({event.text or event.outcome})"
            yield note("requeue_refused", loud=True, scheduler=self._scheduler, why=self.requeue_refused)
            yield cancel("nodes")  # they are waited for anew
            yield Proceed()

    def _requeue_answered_late(self, event: m.SchedulerAnswered) -> Wants:
        """The job has already ended: the scheduler's signal was faster than its answer, or somebody stopped the job."""
        outcome = self._core.outcome
        if outcome is not None and outcome.state == "requeued" and event.text:
            yield note("scheduler_says", loud=True, scheduler=self._scheduler, text=event.text)
            yield ReplaceOutcome(msgspec.structs.replace(outcome, line=f"{outcome.line} ({event.text})"[:500]))
        elif event.outcome not in ("done", "already", "unavailable"):
            self._queue.drop_cancel()

    def end_requeued(self, how: str = "") -> Wants:
        """The scheduler starts the job again: this run of it ends. `how`: as it says."""
        line = f"requeued: {self._scheduler} starts the job again, and it goes on from here"
        line = f"{line} ({how})"[:500] if how else line
        yield EndJob(m.Outcome(state="requeued", exit_code=REQUEUED_EXIT, line=line))

    def look_whether_again(self) -> None:
        """Slurm sends the same signal when it ends a job and when it starts it again (after a preemption, say)."""
        if self._core.has_scheduler:
            self._queue.add("look", by_policy=False)

    def _looked(self, again: bool) -> Wants:
        outcome = self._core.outcome
        if again and outcome is not None and outcome.state == "stopped":
            line = f"requeued: {self._scheduler} starts the job again, by itself or for somebody else ({outcome.line})"
            yield note("requeue_happens", loud=True, what=line)
            yield ReplaceOutcome(m.Outcome(state="requeued", exit_code=REQUEUED_EXIT, line=line[:500]))

    def take_back_requeue(self) -> Wants:
        """An operator stops a job that is being started again: cancel it, so that it does not come back."""
        if self.may_have_been_asked:
            self._queue.add("cancel", by_policy=False)
            yield note("requeue_taken_back", loud=True, scheduler=self._scheduler)

    def _cancel_answered(self, event: m.SchedulerAnswered, done: bool) -> Wants:
        text = event.text or event.outcome
        if event.outcome in ("done", "already"):
            yield note("requeue_cancelled", scheduler=self._scheduler, text=text)
        elif done:
            why = f"{_why(event.outcome)} ({text})"
            yield note("requeue_not_cancelled", loud=True, scheduler=self._scheduler, why=why)

    # ----- what happens to the job -----

    def approve_requeue(self, approved: bool) -> None:
        self._requeue_approved = approved

    def attempt_begins(self) -> None:
        self._queue.drop_requeue()

    def progress_made(self) -> bool:
        """True: the scheduler may be asked to start the job again, from now on."""
        news, self._progress_since_requeue = not self._progress_since_requeue, True
        return news

    def end_life(self) -> None:
        """The scheduler has started the job again: whatever became of the request is of no interest."""
        for node in self._nodes:
            self._name(node.name)
        self._queue.forget_requeue()
        self.drain_requests.clear()
        self.requeue_refused = ""
        self._requeue_approved = self._progress_since_requeue = self._waits_for_nobody = False
        self._end_step_for = None


def _why(outcome: RequestOutcome) -> str:
    return {
        "foreign": "somebody else's reason stands",
        "denied": "we lack the rights",
        "unavailable": "it did not answer, however often it was asked",
        "unsupported": "it cannot do that",
    }.get(outcome, "it failed")
