"""One controller at a time around the real job and observer, and the scheduler that it orders from."""

from __future__ import annotations

from typing import Any

import msgspec

from supervisor import messages as m
from supervisor.controller.heartbeats import HeartbeatEvents

from .ground import Ground
from .nodes import FakeNode

STALE_S = 10.0
"""A node that can be reached does not run an old attempt for longer than this."""


class Control(Ground):
    """The world with a controller."""

    def __init__(self, *how: Any, **more: Any) -> None:
        super().__init__(*how, **more)
        self.nodes = self.new_nodes(self.names)

    def new_nodes(self, names: list[str]) -> dict[str, FakeNode]:
        return {name: FakeNode(self, name, order, name[0] == "s") for order, name in enumerate(names)}

    def tell(self, event: m.AnyEvent) -> None:
        assert not (self.ended and self.controller_up is False)
        self.journal.append(event)
        actions = self.job.handle(event)
        for action in actions:
            if isinstance(action, m.Assign):
                self.check_assignment(action.assignment)
                self.sent[action.assignment.node] = action.assignment
                self.deliver(action.assignment)
            elif isinstance(action, m.SchedulerRequest):
                self.take_order(action)
            elif isinstance(action, m.Note) and action.kind in ("rollback_given_up", "rollback_undone"):
                self.limits.clear()
            elif isinstance(action, m.End):
                if action.outcome.state == "requeued":
                    self.controller_up = False
                else:
                    self.ended = action.outcome
        self.check()

    def heard(self, beat: m.Heartbeat) -> None:
        if self.controller_up:
            for event in self.observer.observe(beat, self.now):
                self.tell(event)
            held = self.sent.get(beat.node)
            if held is not None:
                self.deliver(held)

    def deliver(self, assignment: m.Assignment) -> None:
        node = self.nodes[assignment.node]
        if not node.cut:
            self.send(node.accept, assignment)

    def take_order(self, order: m.SchedulerRequest) -> None:
        job = self.job
        self.orders_told.append(order)
        assert self.spec.scheduler != "local"
        assert not job.paused, f"{order.kind} while paused"
        first = order.number not in self.orders
        self.orders[order.number] = order
        outcome = self.random.choice(("done", "done", "already", "unavailable", "denied", "foreign", "failed"))
        if order.kind == "requeue":
            outcome = self.random.choice(("done", "done", "unavailable", "denied"))
            assert job.spec.requeues < job.spec.max_requeues
            if first and self.furthest_before is not None:
                assert (job.attempts.furthest or 0) > self.furthest_before, (
                    "asked to start again twice without progress"
                )
            if outcome == "done":
                self.later(self.random.uniform(0.2, 5.0), self.begin_again, order.exclude, self.lives)
        elif order.kind == "look":
            outcome = "failed"  # nobody but the job itself has it started again here
        elif order.kind == "drain":
            assert job.nodes.cordons.of(order.node.removeprefix("slurm-"), self.now) is not None, (
                "drained and not cordoned"
            )
        self.later(self.random.uniform(0.05, 3.0), self.answer_order, order.number, outcome)

    def answer_order(self, number: int, outcome: Any) -> None:
        if self.controller_up and self.ended is None and not self.chance("loss"):
            self.tell(m.SchedulerAnswered(at=self.now, number=number, outcome=outcome, text="sim"))

    def begin_again(self, exclude: tuple[str, ...], life: int) -> None:
        """The job's processes are gone; some time later it runs on other nodes."""
        if self.ended is not None or life != self.lives or self.queued:
            return
        self.lives, self.queued = self.lives + 1, True
        self.controller_up = False
        for node in self.nodes.values():
            node.die()
            node.retired = True
        self.later(self.random.uniform(5.0, 100.0), self.new_life, exclude)

    def new_life(self, exclude: tuple[str, ...]) -> None:
        self.check_replay()
        self.queued = False
        self.furthest_before = self.job.attempts.furthest or 0
        taken = {name.removeprefix("slurm-") for name in exclude}
        names = [name if name not in taken else f"{name}.{self.lives}" for name in self.names]
        fresh = self.new_nodes(names)
        self.nodes |= fresh
        self.epoch, self.sent, self.observer = self.epoch + 1, {}, HeartbeatEvents()
        self.controller_up = True
        self.tell(m.JobRequeued(at=self.now, requeues=self.lives))
        self.tell(m.ControllerStarted(at=self.now, epoch=self.epoch))
        self.tell(m.JobDefined(at=self.now, spec=msgspec.structs.replace(self.spec, requeues=self.lives)))
        for node in fresh.values():
            self.later(self.random.random(), self.live, node)

    def kill_controller(self) -> None:
        """SIGKILL; another one starts soon, with the journal and nothing else."""
        if self.controller_up and self.ended is None:
            self.controller_up = False
            self.later(self.random.uniform(0.5, 4.0), self.start_controller, self.lives)

    def start_controller(self, life: int) -> None:
        if life != self.lives:
            return
        self.check_replay()
        self.controller_up = True
        self.epoch += 1
        self.sent = {}
        self.observer = HeartbeatEvents()
        for node in self.nodes.values():
            node.connected = False
        self.tell(m.ControllerStarted(at=self.now, epoch=self.epoch))
        for node in self.job.nodes:
            self.later(60.0, self.miss, node.name, self.epoch)

    def miss(self, name: str, epoch: int) -> None:
        """The control loop gives up nodes that the new controller never heard of."""
        if epoch == self.epoch and self.controller_up and self.ended is None and not self.nodes[name].connected:
            self.tell(m.NodeLost(at=self.now, node=name, silent_s=60.0))

    def tick(self) -> None:
        if self.controller_up and self.ended is None:
            for event in self.observer.tick(self.now):
                self.tell(event)
            for timer, at in list(self.job.timers.items()):
                if at <= self.now and self.job.timers.get(timer) == at:
                    self.tell(m.TimerFired(at=self.now, timer=timer))
        self.save()
        self.later(0.25, self.tick)

    def live(self, node: FakeNode) -> None:
        number = self.job.attempt.number if self.job.attempt is not None else 0
        if not (node.alive and node.connected and self.controller_up and node.joined < number):
            node.stale_since = self.now
        assert self.now - node.stale_since < STALE_S, f"{node.name} runs attempt {node.joined}, {number} is current"
        node.reconcile()
        node.beat()
        self.later(1.0, self.live, node)
