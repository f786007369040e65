"""A seeded world around the real `Job` and `Observer`: fake nodes, a bad network, faults. Time is simulated.

Nodes behave as agents, keepers and launchers do (docs/architecture.md); after every event the invariants are checked.
A failure names its seed: `World(seed).run()` repeats it exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport, Incident, Verdict
from diagnosis.signals import ExitRecord, Frame, NodeEvidence, RankSample, RankStack
from diagnosis.taxonomy import FailureClass
from recovery.actions import Checkpoint, SetAside
from recovery.checkpoint import INCOMPLETE
from recovery.cordon import breaker_limit
from supervisor import messages as m
from supervisor.controller.observer import Observer
from supervisor.job.job import Job

BEGAN = 1_700_000_000.0
STEPS_PER_S = 4.0
SAVE_EVERY = 20
RECOVERED_S = 900.0
"""After the last fault it runs again within this (back-offs, time limits and the operator's rounds included)."""
STALE_S = 10.0
"""A node that can be reached does not run an old attempt for longer than this."""


FAULTS = ["rank", "rank", "hang", "launcher", "node", "cut", "agent", "agent", "controller", "controller", "storm"]


class Group:
    """The ranks of one attempt: they step only while all of them live."""

    def __init__(self, round_: m.Round, base: int, world: World) -> None:
        self.round, self.base, self.world = round_, base, world
        self.started: set[str] = set()
        self.live_since: float | None = None
        self.stuck_at: float | None = None
        self.saved = base

    def join(self, node: str) -> None:
        self.started.add(node)
        if self.started == set(self.round.nodes):
            self.live_since = self.world.now + 0.2

    def stick(self) -> None:
        """A rank died or hangs: nobody steps any more."""
        if self.stuck_at is None:
            self.stuck_at = self.world.now

    @property
    def step(self) -> int | None:
        if self.live_since is None or self.world.now < self.live_since:
            return None
        end = self.world.now if self.stuck_at is None else max(self.stuck_at, self.live_since)
        return min(self.world.target, self.base + 1 + int((end - self.live_since) * STEPS_PER_S))

    @property
    def steps(self) -> bool:
        return self.live_since is not None and self.stuck_at is None


class FakeNode:
    """Agent, keeper, launcher and ranks of one node."""

    def __init__(self, world: World, name: str, order: int, spare: bool) -> None:
        self.world, self.name, self.order, self.spare = world, name, order, spare
        self.up = True
        self.agent_up = True
        self.cut = False
        self.connected = False
        self.incarnation, self.seq = 1, 0
        self.assignment: m.Assignment | None = None
        self.launcher: m.LauncherState = "absent"
        self.launcher_exit = ""
        self.joined = self.prepared = self.collected = 0
        self.preparing = 0
        self.prepare_error = ""
        self.exits: dict[int, ExitRecord] = {}
        self.ranks: tuple[int, ...] = ()
        self.hung: set[int] = set()
        self.evidence: dict[int, NodeEvidence] = {}
        self.done = False
        self.told_checkpoints = -1
        self.stale_since = world.now
        self.retired = False
        """The scheduler has taken it from the job."""

    @property
    def alive(self) -> bool:
        return any(rank not in self.exits for rank in self.ranks)

    @property
    def group(self) -> Group | None:
        return self.world.groups.get(self.joined)

    # ----- what happens to it -----

    def end_rank(self, rank: int, code: int | None, signal: int | None, by_us: bool = False) -> None:
        if rank in self.exits or rank not in self.ranks:
            return
        self.exits[rank] = ExitRecord(
            rank=rank,
            local_rank=rank - self.ranks[0],
            pid=rank,
            code=code,
            signal=signal,
            ended_at=self.world.now,
            stopped_by_us=by_us,
            order=len(self.exits),
        )
        if code != 0 and self.group is not None:
            self.group.stick()
            if not by_us:
                self.evidence.setdefault(0, self.collect(0))

    def kill_workers(self) -> None:
        for rank in self.ranks:
            self.end_rank(rank, None, 9, by_us=True)
        if self.group is not None:
            self.group.stick()

    def die(self) -> None:
        """Power cut; `boot` brings it back empty."""
        self.kill_workers()
        self.up = self.connected = False

    def boot(self) -> None:
        if not self.up and not self.retired:
            fresh = FakeNode(self.world, self.name, self.order, self.spare)
            fresh.incarnation = self.incarnation + 1
            self.__dict__.update(fresh.__dict__)

    def collect(self, number: int) -> NodeEvidence:
        frames = (Frame(function="all_reduce", file="torch/distributed.py", line=1),)
        stacks = tuple(RankStack(rank=rank, frames=frames) for rank in self.ranks if rank not in self.exits)
        return NodeEvidence(
            node=self.name, attempt=self.joined, request=number, exits=tuple(self.exits.values()), stacks=stacks
        )

    # ----- what it does -----

    def accept(self, assignment: m.Assignment) -> None:
        if not (self.up and self.agent_up):
            return
        held = self.assignment
        if held is not None and (assignment.epoch, assignment.version) < (held.epoch, held.version):
            return
        self.assignment = assignment
        for number in [n for n in self.evidence if n <= assignment.evidence_seen and assignment.attempt == self.joined]:
            del self.evidence[number]
        self.reconcile()

    def reconcile(self) -> None:
        a = self.assignment
        if a is None or not (self.up and self.agent_up):
            return
        before = (self.launcher, self.joined, self.alive, self.done)
        if a.evidence is not None and a.evidence.number > self.collected and self.joined == a.attempt:
            self.collected = a.evidence.number
            self.world.later(self.world.random.uniform(0.02, 0.3), self.answer, a.evidence.number)
        if a.stage == "stop" or a.outcome is not None:
            self.kill_workers()
            self.launcher = "absent" if self.launcher == "absent" else "ended"
            self.done = a.outcome is not None
        elif a.role != "member":
            if a.stage != "hold":
                self.kill_workers()
                self.launcher = "joining" if self.launcher == "running" else self.launcher
        elif a.stage == "finish":
            if self.joined == a.attempt and self.launcher == "running":
                self.launcher, self.launcher_exit = "ended", "exit code 0"
        elif a.stage in ("form", "run") and not (self.joined >= a.attempt and self.launcher != "joining"):
            self.form(a)
        if before != (self.launcher, self.joined, self.alive, self.done):
            self.world.later(0.01, self.beat)

    def form(self, a: m.Assignment) -> None:
        self.kill_workers()
        if a.paused:
            return
        if self.prepared < a.attempt and self.preparing < a.attempt:
            self.preparing = a.attempt
            self.world.later(self.world.random.uniform(0.01, 0.2), self.prepare, a)
        if self.launcher == "running":
            self.launcher = "joining"
        elif self.launcher in ("absent", "ended"):
            self.launcher = "starting"
            self.world.later(self.world.random.uniform(0.1, 1.5), self.come)
        elif self.launcher == "joining" and a.stage == "run" and a.round is not None and self.prepared >= a.attempt:
            self.start(a, a.round)

    def prepare(self, a: m.Assignment) -> None:
        if not self.up or self.preparing != a.attempt:
            return
        if self.world.chance("prepare"):
            self.prepare_error, self.preparing = "no space left on device", 0
        else:
            self.prepare_error, self.prepared = "", a.attempt
            for one in a.prepare:
                if isinstance(one, SetAside):
                    self.world.set_aside(one)
        self.reconcile()
        self.beat()

    def come(self) -> None:
        if self.up and self.launcher == "starting":
            self.launcher = "joining"
            self.reconcile()
            self.beat()

    def start(self, a: m.Assignment, round_: m.Round) -> None:
        self.joined, self.launcher = a.attempt, "running"
        place = round_.nodes.index(self.name) * self.world.local
        self.ranks = tuple(range(place, place + self.world.local))
        self.exits, self.hung, self.evidence = {}, set(), {}
        self.world.join(round_, a, self.name)
        self.world.later(0.02, self.beat)

    def answer(self, number: int) -> None:
        if self.up and self.agent_up:
            self.evidence[number] = self.collect(number)
            self.beat()

    def samples(self) -> tuple[RankSample, ...]:
        group = self.group
        if group is None:
            return ()
        world, step = self.world, group.step
        quiet = 0.0 if group.steps or group.stuck_at is None else world.now - group.stuck_at
        count = step or 0
        return tuple(
            RankSample(
                rank=rank,
                local_rank=rank - self.ranks[0],
                pid=rank + 1000 * self.joined,
                state="S",
                step=step if rank == 0 else None,
                last_step=world.target if rank == 0 and step is not None else None,
                groups={"0": (count if rank in self.hung else count + 1, count)} if step is not None else {},
                moved_age_s=quiet,
                waiting_s=quiet if quiet and rank not in self.hung else None,
                exit=self.exits.get(rank),
            )
            for rank in self.ranks
        )

    def beat(self) -> None:
        """Send a heartbeat, if there is anyone to send it."""
        world = self.world
        if not (self.up and self.agent_up) or self.cut or not world.controller_up:
            self.connected = False
            return
        if not self.connected:
            self.connected, self.told_checkpoints = True, -1
            hello = m.NodeJoined(
                at=world.now,
                node=self.name,
                host=self.name,
                address=self.name,
                order=self.order,
                spare=self.spare,
                scheduler_node=f"slurm-{self.name}",
            )
            world.tell(hello)
        self.seq += 1
        changed = self.told_checkpoints != world.storage_changes and self.order < 2
        self.told_checkpoints = world.storage_changes
        offer = m.StoreOffer(host=self.name, port=20000 + self.prepared, local_world_size=world.local)
        beat = m.Heartbeat(
            node=self.name,
            incarnation=self.incarnation,
            seq=self.seq,
            attempt=self.joined,
            launcher=self.launcher,
            launcher_exit=self.launcher_exit if self.launcher == "ended" else "",
            offer=offer if self.launcher == "joining" else None,
            prepared=self.prepared,
            prepare_error=self.prepare_error,
            ranks=self.samples(),
            evidence=tuple(self.evidence.values()),
            checkpoints=tuple(world.storage.values())[-8:][::-1] if changed else None,
            done=self.done,
        )
        world.send(world.heard, beat)


class World:
    """Everything: nodes, storage, network, one controller at a time, and what must always hold."""

    def __init__(self, seed: int, nodes: int = 3, spares: int = 1, faults_s: float = 150.0, **spec: Any) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = BEGAN
        self.local = 2
        self.target = 10_000
        self.faults_until = BEGAN + faults_s
        self.rates: dict[str, float] = {}
        self.groups: dict[int, Group] = {}
        self.storage: dict[str, Checkpoint] = {}
        self.storage_changes = 0
        self.controller_up = True
        self.epoch = 1
        self.job = self.new_job()
        self.observer = Observer()
        self.journal: list[m.AnyEvent] = []
        self.sent: dict[str, m.Assignment] = {}
        self.versions: dict[str, tuple[int, int, int]] = {}
        self.rounds: set[int] = set()
        self.restarts_in_a_row = 0
        self.policy_cordons: dict[str, float] = {}
        self.breaker_since = 0.0
        self.ended: m.Outcome | None = None
        self.storm = False
        self.lives = 0
        self.queued = False
        """It waits in the scheduler's queue."""
        self.orders: dict[int, m.SchedulerOrder] = {}
        self.orders_told: list[m.SchedulerOrder] = []
        self.vouched: dict[str, float] = {}
        self.operators: dict[str, bool] = {}
        """Node -> whether the operator's last word on it was `cordon`."""
        self.furthest_before: int | None = None
        """The highest step when the scheduler started the job again."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.names = [f"n{i}" for i in range(nodes)] + [f"s{i}" for i in range(spares)]
        self.nodes = {name: FakeNode(self, name, i, name[0] == "s") for i, name in enumerate(self.names)}
        self.spec = m.JobSpec(
            **{"name": "sim", "nodes_min": nodes, "nodes_max": nodes, "spares": spares, "max_restarts": 1000, **spec}
        )

    def new_job(self) -> Job:
        return Job(conclude=self.conclude)

    def conclude(self, incident: Incident) -> Verdict:
        """Any verdict at all, always the same for the same incident: the job must cope with it, even with none."""
        dice = random.Random(f"{self.seed} {incident.id}")
        if dice.random() < 0.05:
            raise ValueError("the diagnosis has a defect")
        bad = [c for c in FailureClass if c.value in self.verdicts] if self.verdicts else list(FailureClass)
        actions = ["none", "restart", "cordon_node_and_restart", "cordon_gpu_and_restart", "wait_and_retry", "hold"]
        names = [*self.names, "a stranger"]
        return Verdict(
            failure_class=dice.choice(bad),
            culprits=tuple(Culprit(node=dice.choice(names)) for _ in range(dice.choice((0, 1, 1, 2)))),
            confidence=dice.random(),
            why="the dice say so",
            action=dice.choice(actions),  # type: ignore[arg-type]
            fingerprint=dice.choice(self.fingerprints),
        )

    verdicts: frozenset[str] = frozenset()
    """Classes that the dice choose from; all if empty."""
    curable = False
    """Whether every fault can be recovered from."""
    fingerprints: tuple[str, ...] = ("", "", "train.py:1", "train.py:2")

    # ----- time, network -----

    def later(self, delay_s: float, call: Callable[..., None], *values: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, call, values))

    def chance(self, fault: str) -> bool:
        return self.now < self.faults_until and self.random.random() < self.rates.get(fault, 0.0)

    def send(self, receive: Callable[..., None], message: Any) -> None:
        copies = 0 if self.chance("loss") else 2 if self.chance("duplicate") else 1
        for _ in range(copies):
            self.later(self.random.uniform(0.3, 3.0) if self.chance("reorder") else 0.002, receive, message)

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

    # ----- the controller -----

    def tell(self, event: m.AnyEvent) -> None:
        assert not (self.ended and self.controller_up is False)
        self.journal.append(event)
        actions = self.job.handle(event)
        for action in actions:
            if isinstance(action, m.Assign):
                self.check_assignment(action.assignment)
                self.sent[action.assignment.node] = action.assignment
                self.deliver(action.assignment)
            elif isinstance(action, m.SchedulerOrder):
                self.take_order(action)
            elif isinstance(action, m.End):
                if action.outcome.state == "requeued":
                    self.controller_up = False
                else:
                    self.ended = action.outcome
        self.check()

    # ----- the scheduler -----

    def take_order(self, order: m.SchedulerOrder) -> None:
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
                assert (job.furthest or 0) > self.furthest_before, "asked to start again twice without progress"
            if outcome == "done":
                self.later(self.random.uniform(0.2, 5.0), self.begin_again, order.exclude, self.lives)
        elif order.kind == "drain":
            assert job.cordons.of(order.node.removeprefix("slurm-"), self.now) is not None, "drained and not cordoned"
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
        self.furthest_before = self.job.furthest or 0
        taken = {name.removeprefix("slurm-") for name in exclude}
        names = [name if name not in taken else f"{name}.{self.lives}" for name in self.names]
        fresh = {name: FakeNode(self, name, i, name[0] == "s") for i, name in enumerate(names)}
        self.nodes |= fresh
        self.epoch, self.sent, self.observer = self.epoch + 1, {}, Observer(self.job.pace)
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
        self.observer = Observer(self.job.pace)
        for node in self.nodes.values():
            node.connected = False
        self.tell(m.ControllerStarted(at=self.now, epoch=self.epoch))
        for node in self.job.roster:
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

    # ----- training -----

    def join(self, round_: m.Round, a: m.Assignment, node: str) -> None:
        group = self.groups.get(round_.attempt)
        if group is None:
            base = 0
            if a.resume is not None and a.resume.path:
                found = self.storage.get(a.resume.path)
                assert found is not None, f"resumes from {a.resume.path}, which is not there"
                assert found.complete, f"resumes from {a.resume.path}, which is torn"
                base = found.step or 0
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
            del self.storage[order.path]
            self.storage_changes += 1

    def saved(self, group: Group, path: str) -> None:
        if group.steps and path in self.storage:
            self.put(msgspec.structs.replace(self.storage[path], complete=True, modified_at=self.now))

    # ----- faults -----

    def fault(self) -> None:
        if self.now >= self.faults_until:
            return
        node = self.random.choice(list(self.nodes.values()))
        what = self.random.choice(
            [*FAULTS, "requeued"] if self.spec.scheduler != "local" and self.random.random() < 0.3 else FAULTS
        )
        if what == "rank" and node.ranks:
            node.end_rank(self.random.choice(node.ranks), None, 9)
            self.later(self.random.uniform(0.0, 2.0), self.cascade, node.joined)
            self.later(0.05, node.beat)
        elif what == "hang" and node.ranks and node.group is not None:
            node.hung.add(node.ranks[0])
            node.group.stick()
        elif what == "launcher" and node.launcher in ("running", "joining"):
            node.kill_workers()
            node.launcher, node.launcher_exit = "ended", "signal 9"
        elif what == "node" and node.up:
            node.die()
            self.later(self.random.uniform(3.0, 90.0), node.boot)
        elif what == "cut" and not node.cut:
            node.cut, node.connected = True, False
            self.later(self.random.uniform(1.0, 40.0), self.mend, node)
        elif what == "agent" and node.agent_up:
            node.agent_up, node.connected = False, False
            self.later(self.random.uniform(0.5, 4.0), self.restart_agent, node)
        elif what == "controller":
            self.kill_controller()
        elif what == "requeued" and self.lives < 3:
            self.begin_again((), self.lives)
        elif what == "storm" and self.controller_up:
            self.false_alarms()
        self.later(self.random.expovariate(1 / 6.0), self.fault)

    def cascade(self, attempt: int) -> None:
        """Peers of a dead rank fail too, or wait for ever."""
        group = self.groups.get(attempt)
        for name in group.round.nodes if group is not None else ():
            peer = self.nodes[name]
            if peer.joined == attempt and self.random.random() < 0.5:
                for rank in peer.ranks:
                    peer.end_rank(rank, 1, None)

    def mend(self, node: FakeNode) -> None:
        node.cut = False

    def restart_agent(self, node: FakeNode) -> None:
        node.agent_up = True
        node.incarnation, node.seq = node.incarnation + 1, 0

    def false_alarms(self) -> None:
        attempt = self.job.attempt.number if self.job.attempt is not None else 0
        for _ in range(self.random.randrange(1, 10)):
            report = HangReport(
                kind="missing", ranks=(self.random.randrange(4),), quiet_s=4.0, limit_s=3.0, phase="steady", why="storm"
            )
            number = attempt - self.random.choice((0, 0, 1))
            kind = self.random.choice((m.HangSuspected, m.HangConfirmed, m.HangCleared, m.RankWakeWanted))
            if kind is m.HangCleared:
                group = self.groups.get(number)
                if group is not None and not group.steps:
                    continue  # it is only ever told of progress
                self.tell(m.HangCleared(at=self.now, attempt=number, quiet_s=4.0))
            elif kind is m.RankWakeWanted:
                self.tell(m.RankWakeWanted(at=self.now, attempt=number, ranks=report.ranks))
            else:
                self.tell(kind(at=self.now, attempt=number, report=report))

    # ----- the operator, who looks every half minute -----

    def operate(self) -> None:
        if self.controller_up and self.ended is None:
            for command in ("approve", "resume") if "operator" in self.spec.mode else ("resume", "approve"):
                waits = self.job.waiting
                if command == "resume" and (self.job.held or self.job.paused):
                    self.order("resume")
                elif command == "approve" and "approve" in waits:
                    self.order("approve")
            if self.now >= self.faults_until:
                if self.job.mode == "observe":
                    self.order("mode", "enforce")
                for cordon in self.job.cordons.all(self.now):
                    self.order("uncordon", cordon.node)
            elif self.random.random() < 0.1:
                name = self.random.choice(list(self.nodes))
                self.order(self.random.choice(("pause", "restart", "cordon", "uncordon")), name)
        self.later(30.0, self.operate)

    def meddle(self) -> None:
        """Operators who order anything at any time."""
        if self.now >= self.faults_until:
            return
        if self.controller_up and self.ended is None:
            command = self.random.choice(
                ("pause", "resume", "resume", "restart", "cordon", "uncordon", "mode", "approve", "reject")
            )
            modes = ("observe", "recommend", "enforce", "enforce", "enforce")
            incidents = ("", "i-1", f"i-{self.job.casebook.total}", "7")
            arguments = {"mode": modes, "approve": incidents, "reject": incidents}
            self.order(command, self.random.choice(arguments.get(command, tuple(self.nodes))))
        self.later(self.random.expovariate(self.rates["meddle"]), self.meddle)

    def order(self, command: str, argument: str = "") -> None:
        if command in ("cordon", "uncordon") and not self.job.is_over:
            self.operators[argument] = command == "cordon"
            self.vouched[argument] = self.now if command == "uncordon" else 0.0
        if command == "resume" and self.job.tripped:
            self.breaker_since = self.now  # an operator lets it count anew
        self.tell(m.OverrideGiven(at=self.now, command=command, argument=argument, by="sim"))  # type: ignore[arg-type]

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
                known = self.job.roster.get(name)
                assert self.job.cordons.of(name, self.now) is None, f"{name} is cordoned and used"
                assert known is not None
                assert known.standing, f"{name} is lost and used"

    def check(self) -> None:
        job = self.job
        live = [g for g in self.groups.values() if g.steps and len(g.round.nodes) > 1 and self.all_live(g)]
        assert len(live) <= 1, f"attempts {[g.round.attempt for g in live]} are alive together"
        assert job.budget.used <= job.budget.max_restarts, "the restart budget was exceeded"
        by_policy = {c.node: c.at for c in job.cordons.all(self.now) if c.by == "policy"}
        self.policy_cordons.update(by_policy)
        recent = [name for name, at in self.policy_cordons.items() if at > max(self.now - 3600.0, self.breaker_since)]
        assert len(recent) <= breaker_limit(self.spec.nodes_max), "the circuit breaker was exceeded"
        assert len(job.casebook.unclosed()) <= 1, "incidents stay open"
        assert len(job.timers) < 12
        for name, cordoned in self.operators.items():
            cordon = job.cordons.of(name, self.now)
            if cordoned:
                assert cordon is not None, f"policy lifted the operator's cordon of {name}"
                assert cordon.by == "sim", f"policy replaced the operator's cordon of {name}"
            elif cordon is not None:
                opened = next(case.opened_at for case in job.casebook.cases if case.id == cordon.incident)
                assert opened > self.vouched.get(name, 0.0), f"{name} was cordoned again for the same incident"
        if job.is_over and job.outcome is not None and job.outcome.state != "requeued":
            assert not job.casebook.unclosed(), "the job ended with an open incident"

    def all_live(self, group: Group) -> bool:
        return all(
            self.nodes[name].joined == group.round.attempt and self.nodes[name].alive for name in group.round.nodes
        )

    def check_replay(self) -> None:
        again = self.new_job()
        orders: list[m.SchedulerOrder] = []
        for event in self.journal:
            orders += [action for action in again.handle(event) if isinstance(action, m.SchedulerOrder)]
        assert orders == self.orders_told, "the replay gave other orders"
        assert again.view() == self.job.view(), "the replay came to another state"
        assert again.timers == self.job.timers
        assert {n.name: n.sent for n in again.roster} == {n.name: n.sent for n in self.job.roster}
        self.job = again

    # ----- running -----

    def run(self, until_s: float = 4000.0) -> World:
        """Until the job has ended, or `until_s`. Whatever goes wrong names the seed."""
        try:
            self.tell(m.ControllerStarted(at=self.now, epoch=1))
            self.tell(m.JobDefined(at=self.now, spec=self.spec))
            for node in self.nodes.values():
                self.later(self.random.random(), self.live, node)
            self.later(0.25, self.tick)
            self.later(5.0, self.fault)
            self.later(30.0, self.operate)
            if "meddle" in self.rates:
                self.later(1.0, self.meddle)
            self.later(self.faults_until - self.now + RECOVERED_S, self.must_run)
            while self._queue and self.ended is None and self.now < BEGAN + until_s:
                self.now, _, call, values = heapq.heappop(self._queue)
                call(*values)
        except Exception as error:
            raise AssertionError(
                f"seed {self.seed} at {self.now - BEGAN:.2f} s: {type(error).__name__}: {error}"
            ) from error
        return self

    def must_run(self) -> None:
        job = self.job
        assert job.is_over or job.state == "RUNNING", f"{job.state}, waits for {job.waiting!r} long after the faults"
        if self.curable and not job.is_over and job.attempt is not None and job.attempt.step is not None:
            group = self.groups[job.attempt.number]
            assert group.steps, "it hangs long after the faults and nobody minds"

    def live(self, node: FakeNode) -> None:
        number = self.job.attempt.number if self.job.attempt is not None else 0
        if not (node.alive and node.connected and self.controller_up and node.joined < number):
            node.stale_since = self.now
        assert self.now - node.stale_since < STALE_S, f"{node.name} runs attempt {node.joined}, {number} is current"
        node.reconcile()
        node.beat()
        self.later(1.0, self.live, node)


@pytest.fixture
def world() -> type[World]:
    return World
