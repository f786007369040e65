"""Nodes as the job sees them: agents, keepers, launchers and ranks, which behave as docs/architecture.md says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diagnosis.signals import ExitRecord, Frame, NodeEvidence, RankSample, RankStack
from recovery.checkpoint import PutBack, SetAside
from recovery.group_tests import GroupPart
from supervisor import messages as m

if TYPE_CHECKING:
    from .control import Control
    from .ground import Ground

STEPS_PER_S = 4.0


class Group:
    """The ranks of one attempt: they step only while all of them live."""

    def __init__(self, round_: m.Round, base: int, world: Ground) -> None:
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

    def __init__(self, world: Control, name: str, order: int, spare: bool) -> None:
        self.world, self.name, self.order, self.spare = world, name, order, spare
        self.domain = ""
        self.up = True
        self.agent_up = True
        self.cut = False
        self.connected = False
        self.incarnation, self.seq = 1, 0
        self.assignment: m.Assignment | None = None
        self.full_until: dict[int, float] = {}
        """Which wait for room -> until when this node has none."""
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
        self.bad_link, self.knows_no_tests = name == "n1", name == "n2"
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
                elif isinstance(one, PutBack):
                    self.world.put_back(one)
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

    def room(self) -> m.SpaceReported | None:
        """Answers whether there is room on its disks: at the first look there may be none."""
        wanted = self.assignment.space if self.assignment is not None else None
        if wanted is None:
            return None
        if wanted.number not in self.full_until:
            self.full_until[wanted.number] = self.world.now + self.world.random.choice((0.0, 0.0, 40.0))
        full = self.world.now < self.full_until[wanted.number]
        return m.SpaceReported(number=wanted.number, full=("/scratch: 0 bytes left",) if full else ())

    def tests(self) -> m.NodeTestReport | None:
        """Does what is asked, unless its agent knows no tests; now and then something is in the way."""
        order = self.assignment.tests if self.assignment is not None else None
        if order is None or self.knows_no_tests or self.alive:
            return None
        if order.suite is not None:
            return m.NodeTestReport(number=order.number, problem="no torch here")
        part = GroupPart(failed="timeout" if self.bad_link else "", seconds={"all_reduce": 0.1})
        return m.NodeTestReport(
            number=order.number,
            round=order.round,
            address=self.name,
            port=3000 + order.round,
            devices=self.world.local,
            kind="sim",
            part=part if order.world else None,
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
                index=self.order,
                spare=self.spare,
                scheduler_node=f"slurm-{self.name}",
                domain=self.domain,
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
            space=self.room(),
            tests=self.tests(),
        )
        world.send(world.heard, beat)
