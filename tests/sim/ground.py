"""Time, the network, storage and training, and what must always hold. Nothing here decides anything."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import msgspec

from diagnosis.incident import Culprit, Incident, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import INCOMPLETE, Checkpoint, PutBack, SetAside
from recovery.cordon import breaker_limit
from supervisor import messages as m
from supervisor.controller.heartbeats import HeartbeatEvents
from supervisor.job.job import Job

from .nodes import FakeNode, Group

BEGAN = 1_700_000_000.0
SAVE_EVERY = 20


class Ground:
    """The world without anyone who acts in it."""

    def __init__(self, seed: int, nodes: int = 3, spares: int = 1, faults_s: float = 150.0, **spec: Any) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.late = random.Random(f"{seed} late")
        self.now: float = BEGAN
        self.local = 2
        self.target = 10_000
        self.faults_until = BEGAN + faults_s
        self.rates: dict[str, float] = {}
        self.groups: dict[int, Group] = {}
        self.storage: dict[str, Checkpoint] = {}
        self.storage_changes = 0
        self.rolled_back = 0
        self.aside: dict[str, Checkpoint] = {}
        """Whole checkpoints that a rollback moved away."""
        self.limits: dict[int, int] = {}
        """First attempt after a rollback -> the step that it resumes from at most."""
        self.controller_up = True
        self.epoch = 1
        self.job = self.new_job()
        self.observer = HeartbeatEvents()
        self.journal: list[m.AnyEvent] = []
        self.sent: dict[str, m.Assignment] = {}
        self.versions: dict[str, tuple[int, int, int]] = {}
        self.rounds: set[int] = set()
        self.policy_cordons: dict[str, float] = {}
        self.breaker_since = 0.0
        self.ended: m.Outcome | None = None
        self.lives = 0
        self.queued = False
        """It waits in the scheduler's queue."""
        self.orders: dict[int, m.SchedulerRequest] = {}
        self.orders_told: list[m.SchedulerRequest] = []
        self.vouched: dict[str, float] = {}
        self.operators: dict[str, bool] = {}
        """Node -> whether the operator's last word on it was `cordon`."""
        self.furthest_before: int | None = None
        """The highest step when the scheduler started the job again."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.names = [f"n{i}" for i in range(nodes)] + [f"s{i}" for i in range(spares)]
        self.nodes: dict[str, FakeNode] = {}
        self.spec = m.JobSpec(
            **{"name": "sim", "nodes_min": nodes, "nodes_max": nodes, "spares": spares, "max_restarts": 1000, **spec}
        )

    verdicts: frozenset[str] = frozenset()
    """Classes that the dice choose from; all if empty."""
    curable = False
    """Whether every fault can be recovered from."""
    fingerprints: tuple[str, ...] = ("", "", "train.py:1", "train.py:2")

    def new_job(self) -> Job:
        return Job(conclude=self.conclude)

    def conclude(self, incident: Incident) -> Verdict:
        """Any verdict, the same for the same incident and findings: the job must cope with it, even with none."""
        dice = random.Random(" ".join(map(str, (self.seed, incident.id, len(incident.findings) or ""))).rstrip())
        if dice.random() < 0.05:
            raise ValueError("the diagnosis has a defect")
        bad = [c for c in FailureClass if c.value in self.verdicts] if self.verdicts else list(FailureClass)
        actions = ["none", "restart", "cordon_node_and_restart", "cordon_gpu_and_restart", "wait_and_retry", "hold"]
        if incident.findings and dice.random() < 0.5:  # as a diagnosis does that believes the kernel
            return Verdict(
                failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
                culprits=(Culprit(node=incident.findings[-1].node),),
                confidence=0.95,
                why="the kernel says so",
                action="cordon_node_and_restart",
            )
        names = [*self.names, "a stranger"]
        return Verdict(
            failure_class=dice.choice(bad),
            culprits=tuple(Culprit(node=dice.choice(names)) for _ in range(dice.choice((0, 1, 1, 2)))),
            confidence=dice.random(),
            why="the dice say so",
            action=dice.choice(actions),  # type: ignore[arg-type]
            fingerprint=dice.choice(self.fingerprints),
        )

    def later(self, delay_s: float, call: Callable[..., None], *values: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, call, values))

    def chance(self, fault: str) -> bool:
        return self.now < self.faults_until and self.random.random() < self.rates.get(fault, 0.0)

    def send(self, receive: Callable[..., None], message: Any) -> None:
        copies = 0 if self.chance("loss") else 2 if self.chance("duplicate") else 1
        for _ in range(copies):
            self.later(self.random.uniform(0.3, 3.0) if self.chance("reorder") else 0.002, receive, message)

    def join(self, round_: m.Round, a: m.Assignment, node: str) -> None:
        group = self.groups.get(round_.attempt)
        if group is None:
            base = 0
            if a.resume is not None and a.resume.path:
                found = self.storage.get(a.resume.path)
                assert found is not None, f"resumes from {a.resume.path}, which is not there"
                assert found.complete, f"resumes from {a.resume.path}, which is torn"
                base = found.step or 0
                for first in [first for first in self.limits if first <= round_.attempt]:
                    limit = self.limits.pop(first)
                    assert base <= limit, f"resumes from step {base}, and goes back to {limit} at most"
            newest = max((c.step or 0 for c in self.storage.values() if c.complete), default=0)
            assert base <= newest, "the first step is beyond the newest complete checkpoint"
            group = self.groups[round_.attempt] = Group(round_, base, self)
        assert group.round == round_, "two rounds of one attempt"
        group.join(node)

    def save(self) -> None:
        for group in self.groups.values():
            step = group.step
            if not group.steps or step is None:
                continue
            if step >= self.target:
                for name in group.round.nodes:
                    for rank in self.nodes[name].ranks:
                        self.nodes[name].end_rank(rank, 0, None)
            elif step - group.saved >= SAVE_EVERY:
                group.saved = step
                path = f"/ckpt/{step}"
                self.put(Checkpoint(path=path, step=step, format="sim", complete=False, modified_at=self.now))
                self.later(self.random.uniform(0.1, 3.0), self.saved, group, path)

    def put(self, checkpoint: Checkpoint) -> None:
        self.storage.pop(checkpoint.path, None)
        self.storage[checkpoint.path] = checkpoint
        self.storage_changes += 1

    def set_aside(self, order: SetAside) -> None:
        """Looked at once more before it is moved: it may have been finished meanwhile."""
        found = self.storage.get(order.path)
        if found is not None and not (found.complete and order.why.startswith(INCOMPLETE)):
            if found.complete:
                self.aside[order.path] = found
            del self.storage[order.path]
            self.storage_changes += 1

    def put_back(self, order: PutBack) -> None:
        """Unless something is there again."""
        if order.path in self.aside and order.path not in self.storage:
            self.put(self.aside.pop(order.path))

    def saved(self, group: Group, path: str) -> None:
        if group.steps and path in self.storage:
            self.put(msgspec.structs.replace(self.storage[path], complete=True, modified_at=self.now))

    def all_live(self, group: Group) -> bool:
        return all(
            self.nodes[name].joined == group.round.attempt and self.nodes[name].alive for name in group.round.nodes
        )

    # ----- what must always hold -----

    def check_assignment(self, a: m.Assignment) -> None:
        before = self.versions.get(a.node, (0, 0, 0))
        assert (a.epoch, a.version) > before[:2], f"{a.node}: assignments went back"
        assert a.attempt >= before[2], f"{a.node}: attempts went back"
        self.versions[a.node] = (a.epoch, a.version, a.attempt)
        if a.round is not None and a.stage == "run" and a.attempt not in self.rounds:
            self.rounds.add(a.attempt)
            assert self.spec.nodes_min <= len(a.round.nodes) <= self.spec.nodes_max, "too few nodes, or too many"
            for name in a.round.nodes:
                known = self.job.nodes.get(name)
                assert self.job.nodes.cordons.of(name, self.now) is None, f"{name} is cordoned and used"
                assert known is not None
                assert known.present, f"{name} is lost and used"

    def check(self) -> None:
        job = self.job
        live = [g for g in self.groups.values() if g.steps and len(g.round.nodes) > 1 and self.all_live(g)]
        assert len(live) <= 1, f"attempts {[g.round.attempt for g in live]} are alive together"
        assert job.incidents.budget.used <= job.incidents.budget.max_restarts, "the restart budget was exceeded"
        by_policy = {c.node: c.at for c in job.nodes.cordons.all(self.now) if c.by == "policy"}
        self.policy_cordons.update(by_policy)
        recent = [name for name, at in self.policy_cordons.items() if at > max(self.now - 3600.0, self.breaker_since)]
        assert len(recent) <= breaker_limit(self.spec.nodes_max), "the circuit breaker was exceeded"
        assert len(job.incidents.log.open_failures()) <= 1, "incidents stay open"
        assert len(job.timers) < 12
        for name, cordoned in self.operators.items():
            cordon = job.nodes.cordons.of(name, self.now)
            if cordoned:
                assert cordon is not None, f"policy lifted the operator's cordon of {name}"
                assert cordon.by == "sim", f"policy replaced the operator's cordon of {name}"
            elif cordon is not None:
                opened = next(case.opened_at for case in job.incidents.log.records if case.id == cordon.incident)
                assert opened > self.vouched.get(name, 0.0), f"{name} was cordoned again for the same incident"
        if job.is_over and job.outcome is not None and job.outcome.state != "requeued":
            assert not job.incidents.log.open_failures(), "the job ended with an open incident"

    def check_replay(self) -> None:
        again = self.new_job()
        orders: list[m.SchedulerRequest] = []
        for event in self.journal:
            orders += [action for action in again.handle(event) if isinstance(action, m.SchedulerRequest)]
        assert orders == self.orders_told, "the replay gave other orders"
        assert again.view() == self.job.view(), "the replay came to another state"
        assert again.timers == self.job.timers
        assert again.assignments.sent == self.job.assignments.sent
        self.job = again
