"""What the job asks of the scheduler that gave it its nodes: the layer of `Job` above `lifecycle`.

A cordon has the node drained, its end gives it back; a job that is short of nodes for good asks to be started again
on others, once. The job's own cordons stand whatever the scheduler answers. While the job is paused nothing goes out.
"""

from __future__ import annotations

import msgspec

from diagnosis.signals import clean_line
from recovery.actions import Cordon, OrderOutcome
from recovery.cordon import drain_reason
from recovery.drain_requests import may_be_asked
from recovery.scheduling import PREFIX
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.lifecycle import FAILURE_GRACE_S, Choose, Lifecycle
from supervisor.job.orders import LONGEST_PAUSE_S, OrderBook, Pending

LOCAL = "local"
"""The scheduler of jobs that have none."""
REQUEUE_WAIT_S = 30.0
"""A node that is lost may come back: the job is not started again before so long."""
REQUEUED_EXIT = 75
NOT_DRAINED = "not drained"
END_ORDERS_S = 25.0
"""After the nodes have ended it waits so long for the scheduler's answers; Slurm's `KillWait` is 30 s as a rule."""
LAST_OUTPUT_S = 5.0
"""After the nodes have ended, before the scheduler is asked to end the step: until then their last lines are shown."""
COMMENT_LIMIT = 250
END_PAUSE_S = 5.0
"""Between tries then."""
REQUEUE_PAUSE_S = 60.0
"""Before a scheduler that cannot start the job again yet is asked anew, at most: no node trains meanwhile."""
LIMIT_NEAR_S = 900.0
"""A stop so long before the end of the job's time is told with it: batch scripts have Slurm warn that early."""


class Dealings(Lifecycle):
    """Orders to the scheduler and their answers."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.drains: dict[str, str] = {}
        """Node -> what became of the order to drain it, in a word or a sentence."""
        self.requeue_refused = ""
        """Why the scheduler does not start the job again."""
        self._orders = OrderBook()
        self._scheduler_names: dict[str, str] = {}
        """Node -> what the scheduler calls it, over all lives of the job."""
        self._requeue_approved = False
        """By an operator, with the plan that said so."""
        self._step_left: tuple[str, ...] | None = None
        """At the end: nodes for whose processes the scheduler may wait. None: not known yet, empty: it was told."""
        self._even_so = False
        """The end waits for no node any more."""
        self._moved_since_requeue = True

    # ----- giving out -----

    def _settle(self) -> None:
        for order in self._orders.take(self.now, self._allowed):
            self._actions.append(order)
        due = self._orders.next_due(self._allowed)
        if due is None:
            self._cancel("orders")
        else:
            self._set_timer("orders", due)
        super()._settle()

    def _allowed(self, held: Pending) -> bool:
        """While the job is paused only looks, and the end of what has ended; nothing of policy's own unless it is to
        act; no new start at the end."""
        if held.order.kind in ("look", "end_step"):
            return True
        if self.paused or (held.by_policy and self.mode != "enforce"):
            return False
        return not self.is_over or held.order.kind != "requeue"

    def _orders_due(self) -> None:
        """`_settle` gives out what is due."""

    def _give_again(self) -> None:
        """After `ControllerStarted`: the controller before this one may have died with them."""
        self._orders.again(self.now)

    # ----- at the end -----

    def _end(self, outcome: m.Outcome, why: str, *, grace_s: float = FAILURE_GRACE_S) -> None:
        """The front ends with the outcome's line: it tells what Slurm has not done until now."""
        late = [held for held in self._orders.of_nodes if held.tries > 1 or not held.under_way]
        if late and outcome.state != "requeued":
            told = "; ".join(map(self._undone, late[:4])) + "; ..." * (len(late) > 4)
            outcome = msgspec.structs.replace(outcome, line=f"{outcome.line} (so far {told})"[:500])
        self._orders.hasten(self.now)
        if outcome.state == "failed":
            self._comment(outcome.line)
        super()._end(outcome, why, grace_s=grace_s)

    def _leave(self, even_so: bool = False) -> None:
        """What the scheduler may still do is waited for, for a while."""
        if self.outcome is None or self._ended:
            return
        open_ = self._orders.under_way if self._starts_again else self._orders.open(self._allowed)
        if not even_so and open_:
            if all(node.done or not node.standing for node in self.roster) and "last_orders" not in self.timers:
                self._set_timer("last_orders", self.now + END_ORDERS_S)
            return
        if not self._starts_again:
            self._give_up_orders()
        self._even_so |= even_so
        if self._step_left is None and (self._even_so or all(node.done or not node.standing for node in self.roster)):
            self._step_left = self._silent_nodes()
            if self._step_left:
                self._set_timer("step_end", self.now + LAST_OUTPUT_S)
        if self._step_left:
            return
        super()._leave(self._even_so)
        if self._ended:
            self._cancel("last_orders", "orders")

    def _silent_nodes(self) -> tuple[str, ...]:
        """Those whose `unbroken run` has not ended as far as anybody knows, where every one that is heard has."""
        if not self._has_scheduler or self._starts_again:
            return ()
        return self._scheduler_names_of({node.name for node in self.roster if not (node.done or node.ours_ended)})

    def _step_end_due(self) -> None:
        """The scheduler may wait for their processes for ever: a node that was booted again tells nobody of them."""
        silent, self._step_left = self._step_left or (), ()
        self._orders.add("end_step", avoid=silent, by_policy=False)
        self._leave()

    def _step_answered(self, event: m.SchedulerAnswered, done: bool) -> None:
        scheduler = self.spec.scheduler
        if event.outcome == "done":
            self._note(f"{scheduler}: {event.text}", loud=True)
        elif done and event.outcome != "already":
            self._note(f"{scheduler} may keep the nodes: {event.text or _why(event.outcome)}", loud=True)

    @property
    def _starts_again(self) -> bool:
        """The next life of the job gives out what is left."""
        return self.outcome is not None and self.outcome.state == "requeued"

    def _last_orders_due(self) -> None:
        self._give_up_orders()
        self._leave()

    def _give_up_orders(self) -> None:
        for held in self._orders.give_up():
            if held.order.kind in ("requeue", "look"):
                continue
            when = "was paused when it ended" if self.paused else "has ended"
            told = f"{self._undone(held)}, and the job {when}: that is for a person to do now"
            told += f" ({held.order.reason})" if held.order.reason else ""
            self._note(told, incident=held.incident, loud=True)
            if held.order.kind == "drain" and held.name in self.drains:
                self.drains[held.name] = f"{NOT_DRAINED}: the job ended before {self.spec.scheduler} did it"

    def _undone(self, held: Pending) -> str:
        told = {"drain": "drained", "undrain": "given back", "cancel": "cancelled", "end_step": "ended the step of"}
        what = told[held.order.kind]
        return f"{self.spec.scheduler} has not {what} {held.order.node or 'the job'}"

    def _comment(self, text: str) -> None:
        """Have the scheduler's record of the job tell it, too."""
        if self._has_scheduler and not self.paused and self.mode != "observe":
            line = clean_line(f"{PREFIX} {text}", COMMENT_LIMIT).replace('"', "'")
            self._actions.append(m.SchedulerComment(text=line))

    # ----- cordons -----

    @property
    def _has_scheduler(self) -> bool:
        return self.spec.scheduler != LOCAL

    def _scheduler_name(self, name: str) -> str:
        """Empty for a node that was never one of the job's."""
        node = self.roster.get(name)
        if node is not None:
            self._scheduler_names[name] = node.scheduler_name or name
        return self._scheduler_names.get(name, "")

    def _cordon(self, cordon: Cordon, approved: bool = False) -> None:
        """Leave a node out from now on, and tell the scheduler. `approved`: policy's, by an operator's own word."""
        self.cordons.add(cordon)
        self._touched.add(cordon.node)
        if not self._has_scheduler:
            return
        node = self._scheduler_name(cordon.node)
        if not node:
            self._note(f"{cordon.node} was never one of the job's nodes: {self.spec.scheduler} is not told")
            return
        reason = drain_reason(cordon, self.spec.scheduler_job or self.spec.name)
        by_policy = cordon.by == "policy" and not approved
        self._orders.add(
            "drain", node=node, name=cordon.node, reason=reason, by_policy=by_policy, incident=cordon.incident
        )
        self.drains[cordon.node] = "asked for"
        when = " after `unbroken resume`" if self.paused else ""
        self._note(f"{self.spec.scheduler} is asked to drain {node}{when} ({reason})", incident=cordon.incident)

    def _uncordon(self, name: str, gpu: str = "") -> bool:
        """An operator's word about a node, or one GPU's cordon of it. False: it was not cordoned."""
        lifted = self.cordons.lift(name, gpu)
        if lifted and self.cordons.of(name, self.now) is not None:
            return True  # for another GPU, so it stays left out and drained
        self.cordons.vouch(name, self.now)
        if self.drain_requests.pop(name, ""):
            self._touched.add(name)
        if not lifted:
            return False
        node = self._scheduler_name(name)
        drain = self.drains.pop(name, NOT_DRAINED)
        if self._has_scheduler and node and not drain.startswith(NOT_DRAINED):
            self._orders.add("undrain", node=node, name=name, by_policy=False)
            self._note(f"{self.spec.scheduler} is asked to give {node} back")
        return True

    # ----- answers -----

    def _scheduler_answered(self, event: m.SchedulerAnswered) -> None:
        requeue = self._orders.requeue
        longest_s = REQUEUE_PAUSE_S if requeue is not None and requeue.order.number == event.number else LONGEST_PAUSE_S
        longest_s = END_PAUSE_S if self.is_over else longest_s
        found = self._orders.answered(event.number, event.outcome, self.now, longest_s)
        if found is None:
            return
        held, done = found
        if held.order.kind == "requeue":
            self._requeue_answered(event, done)
        elif held.order.kind == "cancel":
            self._cancel_answered(event, done)
        elif held.order.kind == "look":
            self._looked(event.outcome == "done")
        elif held.order.kind == "end_step":
            self._step_answered(event, done)
        else:
            self._node_answered(held, event, done)
        self._leave()

    def _node_answered(self, held: Pending, event: m.SchedulerAnswered, done: bool) -> None:
        order, scheduler = held.order, self.spec.scheduler
        what = f"drain {order.node}" if order.kind == "drain" else f"give {order.node} back"
        text = event.text or event.outcome
        state = ""
        if not done:
            if held.tries == 1:
                self._note(f"{scheduler} does not answer: it is asked again to {what} ({text})", incident=held.incident)
            return
        if event.outcome in ("done", "already"):
            state = "drained"
            self._note(f"{scheduler}: {what}: {event.outcome}", incident=held.incident)
        else:
            state = f"{NOT_DRAINED}: {_why(event.outcome)}"
            only_here = "; it is left out by this job alone" if order.kind == "drain" else ""
            if order.kind == "drain" and event.outcome == "denied":
                only_here += self._ask_root(held.name, order.reason)
            told = f"{scheduler} does not {what}: {_why(event.outcome)} ({text}){only_here}"
            self._note(told, incident=held.incident, loud=True)
        if order.kind == "drain" and held.name in self.drains and not self._orders.about(order.node):
            self.drains[held.name] = state

    def _ask_root(self, name: str, reason: str) -> str:
        """Have the node's agent leave the request for root's programs there; what is said of it."""
        node = self.roster.get(name)
        if self.cordons.of(name, self.now) is None or not may_be_asked(reason, self.spec.scheduler_job):
            return ""
        if node is None or not node.standing:
            return ", and nobody is there to leave a request for root's programs"
        self.drain_requests[name] = reason
        self._touched.add(name)
        return ", and root's programs there are asked to drain it"

    # ----- starting the job again -----

    def _begin_life(self) -> None:
        for node in self.roster:
            self._scheduler_name(node.name)
        super()._begin_life()
        self._orders.forget_requeue()
        self.drain_requests.clear()
        self.requeue_refused = ""
        self._requeue_approved = self._moved_since_requeue = self._even_so = False
        self._step_left = None

    @property
    def may_requeue(self) -> bool:
        """Whether the scheduler can be asked to start the job again: never twice without progress in between."""
        return (
            self._has_scheduler
            and self.spec.requeues < self.spec.max_requeues
            and self._moved_since_requeue
            and not self.requeue_refused
        )

    @property
    def _may_requeue_by_itself(self) -> bool:
        return self.may_requeue and not self.paused and self.mode == "enforce" and not self.is_over

    @property
    def requeuing(self) -> bool:
        """The order is under way, and cannot be taken back."""
        held = self._orders.requeue
        return held is not None and held.under_way

    @property
    def _will_ask_again(self) -> bool:
        return self._orders.requeue is not None and self._may_ask

    @property
    def _may_have_been_asked(self) -> bool:
        """As `requeuing`, or the answer was lost."""
        held = self._orders.requeue
        return held is not None and held.tries > 0

    @property
    def _may_ask(self) -> bool:
        return self.may_requeue and (self.mode == "enforce" or self._requeue_approved)

    def _must_wait(self) -> bool:
        return self.requeuing or super()._must_wait()

    def _short(self, found: int) -> None:
        """Fewer nodes can be used than are needed, with the spares: others are asked for, if that may be."""
        asked = self._orders.requeue is not None or "requeue" in self.timers
        if self.attempt is None or self.state != "RECOVERING" or found >= max(1, self.spec.nodes_min) or asked:
            return
        if not self._may_ask:
            return
        cordoned = self._cordoned
        if any(not node.standing and not node.ours_ended and node.name not in cordoned for node in self.roster):
            wait_s = min(REQUEUE_WAIT_S, self.spec.wait_for_nodes_s / 2)
            self._note(f"{self.spec.scheduler} is asked to start the job again if no node comes within {wait_s:.0f} s")
            self._set_timer("requeue", self.now + wait_s)
        else:
            self._ask_requeue(found)

    def _near_its_limit(self) -> str:
        """`, 20 s before the time limit of slurm` where that is near: what most likely made the scheduler stop it."""
        ends_at = self.spec.ends_at
        if not self._has_scheduler or ends_at is None or self.now < ends_at - LIMIT_NEAR_S:
            return ""
        left_s = ends_at - self.now
        when = f"{left_s:.0f} s before the" if left_s >= 1.0 else "at the"
        return f", {when} time limit of {self.spec.scheduler}"

    def _requeue_due(self) -> None:
        if self.state == "RECOVERING" and not (self.paused or self.held or self._must_wait()):
            found = len(self._members())
            if found < max(1, self.spec.nodes_min) and self._may_ask:
                self._ask_requeue(found)

    def _ask_requeue(self, found: int) -> None:
        cordoned = self._cordoned
        gone = {node.name for node in self.roster if not self._usable(node) and not node.ours_ended}
        exclude, avoid = self._scheduler_names_of(cordoned), self._scheduler_names_of(gone - cordoned)
        self._orders.add("requeue", exclude=exclude, avoid=avoid, by_policy=not self._requeue_approved)
        without = [f"without {_names(exclude)}"] if exclude else []
        without += [f"without {_names(avoid)} where there are enough others"] if avoid else []
        self._note(
            f"{found} of {max(1, self.spec.nodes_min)} nodes can be used and no spare is left: "
            f"{self.spec.scheduler} is asked to start the job again {', '.join(without)}".rstrip(),
            loud=True,
        )

    @property
    def _cordoned(self) -> set[str]:
        return {cordon.node for cordon in self.cordons.all(self.now)}

    def _scheduler_names_of(self, nodes: set[str]) -> tuple[str, ...]:
        return tuple(sorted(filter(None, map(self._scheduler_name, nodes))))

    def _requeue_answered(self, event: m.SchedulerAnswered, done: bool) -> None:
        scheduler = self.spec.scheduler
        if self.is_over:
            self._requeue_answered_late(event)
        elif event.outcome in ("done", "already"):
            self._requeued(event.text)
        elif not done:
            self._note(f"{scheduler} cannot start the job again yet, and is asked again: {event.text}")
            self._proceed()
        else:
            self.requeue_refused = f"{_why(event.outcome)} ({event.text or event.outcome})"
            self._note(f"{scheduler} does not start the job again: {self.requeue_refused}", loud=True)
            self._cancel("nodes")  # they are waited for anew
            self._proceed()

    def _requeue_answered_late(self, event: m.SchedulerAnswered) -> None:
        """The signal with which the scheduler begins it was faster, or somebody has stopped the job."""
        outcome = self.outcome
        if outcome is not None and outcome.state == "requeued" and event.text:
            self._note(f"{self.spec.scheduler}: {event.text}", loud=True)
            self.outcome = msgspec.structs.replace(outcome, line=f"{outcome.line} ({event.text})"[:500])
            self._touch_all()
        elif event.outcome not in ("done", "already", "unavailable"):
            self._orders.drop_cancel()

    def _requeued(self, how: str = "") -> None:
        line = f"requeued: {self.spec.scheduler} starts the job again, and it goes on from here"
        line = f"{line} ({how})"[:500] if how else line
        self._end(m.Outcome(state="requeued", exit_code=REQUEUED_EXIT, line=line), line)

    def _look_whether_again(self) -> None:
        """Slurm begins a new start, of a job that was preempted, say, with the same signal as its end."""
        if self._has_scheduler:
            self._orders.add("look", by_policy=False)

    def _looked(self, again: bool) -> None:
        outcome = self.outcome
        if again and outcome is not None and outcome.state == "stopped":
            line = (
                f"requeued: {self.spec.scheduler} starts the job again, by itself or for somebody else ({outcome.line})"
            )
            self.outcome = m.Outcome(state="requeued", exit_code=REQUEUED_EXIT, line=line[:500])
            self._note(line, loud=True)
            self._touch_all()

    def _take_back(self) -> None:
        """An operator stops a job that is being started again: it must not come back."""
        self._orders.add("cancel", by_policy=False)
        scheduler = self.spec.scheduler
        self._note(f"{scheduler} was asked already to start the job again: it is asked to cancel it", loud=True)

    def _cancel_answered(self, event: m.SchedulerAnswered, done: bool) -> None:
        scheduler = self.spec.scheduler
        if event.outcome in ("done", "already"):
            self._note(f"{scheduler}: {event.text or event.outcome}: it does not come back")
        elif done:
            why = f"{_why(event.outcome)} ({event.text or event.outcome})"
            self._note(f"{scheduler} does not cancel the job: {why}; cancel it there, or it starts again", loud=True)

    def _begin_attempt(self, attempt: Attempt) -> None:
        self._orders.drop_requeue()
        self._cancel("requeue")
        super()._begin_attempt(attempt)


def _names(nodes: tuple[str, ...]) -> str:
    return ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")


def _why(outcome: OrderOutcome) -> str:
    return {
        "foreign": "somebody else's reason stands",
        "denied": "we lack the rights",
        "unavailable": "it did not answer, however often it was asked",
        "unsupported": "it cannot do that",
    }.get(outcome, "it failed")
