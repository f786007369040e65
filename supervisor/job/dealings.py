"""What the job asks of the scheduler that gave it its nodes: the layer of `Job` above `lifecycle`.

A cordon has the node drained, its end gives it back; a job that is short of nodes for good asks to be started again
on others, once. The job's own cordons stand whatever the scheduler answers. While the job is paused nothing goes out.
"""

from __future__ import annotations

from recovery.actions import Cordon, OrderOutcome
from recovery.cordon import drain_reason
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.lifecycle import Choose, Lifecycle
from supervisor.job.orders import OrderBook, Pending

LOCAL = "local"
"""The scheduler of jobs that have none."""
REQUEUE_WAIT_S = 30.0
"""A node that is lost may come back: the job is not started again before so long."""
REQUEUED_EXIT = 75
NOT_DRAINED = "not drained"


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
        """Nothing while the job is paused, nothing of policy's own unless it is to act, nothing new at the end."""
        if self.paused or (held.by_policy and self.mode != "enforce"):
            return False
        return not self.is_over or (held.tries > 0 and held.order.kind != "requeue")

    def _orders_due(self) -> None:
        """`_settle` gives out what is due."""

    def _give_again(self) -> None:
        """After `ControllerStarted`: the controller before this one may have died with them."""
        self._orders.again(self.now)

    def _leave(self, even_so: bool = False) -> None:
        """What is under way is waited for, within the time that nodes get to end."""
        if even_so or not self._orders.under_way:
            super()._leave(even_so)

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
        found = self._orders.answered(event.number, event.outcome, self.now)
        if found is None:
            return
        held, done = found
        if held.order.kind == "requeue":
            self._requeue_answered(event, done)
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
            told = f"{scheduler} does not {what}: {_why(event.outcome)} ({text}){only_here}"
            self._note(told, incident=held.incident, loud=True)
        if order.kind == "drain" and held.name in self.drains and not self._orders.about(order.node):
            self.drains[held.name] = state

    # ----- starting the job again -----

    def _begin_life(self) -> None:
        for node in self.roster:
            self._scheduler_name(node.name)
        super()._begin_life()
        self._orders.forget_requeue()
        self.requeue_refused = ""
        self._requeue_approved = self._moved_since_requeue = False

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
        lost = any(not node.standing and self.cordons.of(node.name, self.now) is None for node in self.roster)
        if lost:
            wait_s = min(REQUEUE_WAIT_S, self.spec.wait_for_nodes_s / 2)
            self._note(f"{self.spec.scheduler} is asked to start the job again if no node comes within {wait_s:.0f} s")
            self._set_timer("requeue", self.now + wait_s)
        else:
            self._ask_requeue(found)

    def _requeue_due(self) -> None:
        if self.state == "RECOVERING" and not (self.paused or self.held or self._must_wait()):
            found = len(self._members())
            if found < max(1, self.spec.nodes_min) and self._may_ask:
                self._ask_requeue(found)

    def _ask_requeue(self, found: int) -> None:
        gone = [node for node in self.roster if not self._usable(node)]
        known = {cordon.node for cordon in self.cordons.all(self.now)} | {node.name for node in gone}
        exclude = tuple(sorted(filter(None, (self._scheduler_name(name) for name in known))))
        without = ", ".join(exclude[:8]) + (", ..." if len(exclude) > 8 else "")
        self._orders.add("requeue", exclude=exclude, by_policy=not self._requeue_approved)
        self._note(
            f"{found} of {max(1, self.spec.nodes_min)} nodes can be used and no spare is left: "
            f"{self.spec.scheduler} is asked to start the job again without {without}",
            loud=True,
        )

    def _requeue_answered(self, event: m.SchedulerAnswered, done: bool) -> None:
        scheduler = self.spec.scheduler
        if self.is_over:
            return
        if event.outcome in ("done", "already"):
            self._requeued()
        elif not done:
            self._note(f"{scheduler} does not answer: it is asked again to start the job again ({event.text})")
            self._proceed()
        else:
            self.requeue_refused = f"{_why(event.outcome)} ({event.text or event.outcome})"
            self._note(f"{scheduler} does not start the job again: {self.requeue_refused}", loud=True)
            self._cancel("nodes")  # they are waited for anew
            self._proceed()

    def _requeued(self) -> None:
        line = f"requeued: {self.spec.scheduler} starts the job again on other nodes, and it goes on from here"
        self._end(m.Outcome(state="requeued", exit_code=REQUEUED_EXIT, line=line), line)

    def _begin_attempt(self, attempt: Attempt) -> None:
        self._orders.drop_requeue()
        self._cancel("requeue")
        super()._begin_attempt(attempt)


def _why(outcome: OrderOutcome) -> str:
    return {
        "foreign": "somebody else's reason stands",
        "denied": "we lack the rights",
        "unavailable": "it did not answer, however often it was asked",
        "unsupported": "it cannot do that",
    }.get(outcome, "it failed")
