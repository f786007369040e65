"""What goes wrong, and operators who order anything."""

from __future__ import annotations

from diagnosis.incident import HangReport
from diagnosis.signals import Evidence, Finding, LossAlarm
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m

from .control import Control
from .nodes import FakeNode

FAULTS = ["rank", "rank", "hang", "launcher", "node", "cut", "agent", "agent", "controller", "controller", "storm"]


class Faults(Control):
    """The world with all that disturbs it."""

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
            if self.late.random() < 0.5:
                self.later(self.late.uniform(0.0, 6.0), self.late_finding, node, self.now)
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

    def late_finding(self, node: FakeNode, at: float) -> None:
        """What the kernel had to say of it: before the verdict, or after it, when the next attempt is on its way."""
        known = self.job.nodes.get(node.name)
        if known is None or not self.controller_up or not node.connected:
            return
        finding = Finding(
            rule="xid_79",
            failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
            confidence=0.95,
            scope="gpu",
            severity="fatal",
            evidence=Evidence(text="Xid 79", source="kernel", node=node.name),
            node=node.name,
            at=at,
        )
        self.tell(m.FindingArrived(at=self.now, node=node.name, finding=finding, number=known.findings_seen))

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

    def operate(self) -> None:
        if self.controller_up and self.ended is None:
            if self.job.incidents.held or self.job.paused:
                self.order("resume")
            if "approve" in self.job.waiting:
                self.order("approve")
            if self.now >= self.faults_until:
                if self.job.core.mode == "observe":
                    self.order("mode", "enforce")
                for cordon in self.job.nodes.cordons.all(self.now):
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
            incidents = ("", "i-1", f"i-{self.job.incidents.log.total}", "7")
            arguments = {"mode": modes, "approve": incidents, "reject": incidents}
            self.order(command, self.random.choice(arguments.get(command, tuple(self.nodes))))
        self.later(self.random.expovariate(self.rates["meddle"]), self.meddle)

    def go_back(self) -> None:
        """A loss that goes wrong, or an operator who goes back, or forward again."""
        if self.now >= self.faults_until:
            return
        job, dice = self.job, self.late
        attempt = job.attempt
        if self.controller_up and self.ended is None and attempt is not None and attempt.step is not None:
            before = attempt.number
            steps = [found.step or 0 for found in self.storage.values() if found.complete]
            what = dice.choice(("spike", "nan", "well", "", "step", "--undo"))
            if what in ("spike", "nan"):
                first = max(1, attempt.step - dice.randrange(60))
                alarm = LossAlarm(kind=what, step=first)  # type: ignore[arg-type]
                self.tell(m.LossSeen(at=self.now, attempt=before, alarm=alarm, ranks=(0,), step=attempt.step))
                limit = first - 1
            elif what == "well":
                self.tell(m.LossSeen(at=self.now, attempt=before, step=attempt.step))
                limit = None
            else:
                limit = dice.choice(steps) if what == "step" and steps else None
                self.order("rollback", what if limit is None or what != "step" else str(limit))
            now = job.attempt
            if limit is not None and job.checkpoints.rolls_back and now is not None and now.number > before:
                self.rolled_back += 1
                self.limits = {now.number: limit}
        self.later(dice.expovariate(self.rates["go_back"]), self.go_back)

    def wear(self) -> None:
        """A device that a rank uses fails or degrades, or an operator has a word about a node that should leave."""
        if self.now >= self.faults_until:
            return
        dice = self.late
        node = dice.choice(list(self.nodes.values()))
        known = self.job.nodes.get(node.name)
        if self.controller_up and self.ended is None and known is not None and node.connected:
            what = dice.choice(("fails", "fails", "degrades", "slows", "repair", "swap", "now", "reject", "approve"))
            if what in ("swap", "now"):
                self.order("swap", f"{node.name} --now" if what == "now" else node.name)
            elif what in ("reject", "approve"):
                self.order(what, node.name)
            elif node.ranks:
                self.tell(
                    m.FindingArrived(
                        at=self.now, node=node.name, finding=self.worn(node, what), number=known.findings_seen
                    )
                )
                if what == "fails" and dice.random() < 0.5 and node.group is not None:
                    node.group.stick()
                    self.later(1.5, self.struck, node, self.job.attempt.number if self.job.attempt is not None else 0)
        self.later(dice.expovariate(self.rates["wear"]), self.wear)

    def worn(self, node: FakeNode, outlook: str) -> Finding:
        return Finding(
            rule="xid_79",
            failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
            confidence=0.95,
            scope="gpu",
            severity="fatal",
            evidence=Evidence(text="Xid 79", source="kernel", node=node.name),
            node=node.name,
            rank=node.ranks[0],
            at=self.now,
            outlook=outlook,  # type: ignore[arg-type]
        )

    def rack_fails(self, rack: list[str], within_s: float) -> None:
        """What these nodes share fails: within so many seconds all that have ranks lose a device."""
        for name in rack:
            self.later(self.late.uniform(0.0, within_s), self.rack_strikes, self.nodes[name])

    def rack_strikes(self, node: FakeNode) -> None:
        known = self.job.nodes.get(node.name)
        if not node.ranks or node.group is None or known is None:
            return
        found = self.worn(node, "fails")
        self.tell(m.FindingArrived(at=self.now, node=node.name, finding=found, number=known.findings_seen))
        node.group.stick()
        self.later(1.5, self.struck, node, self.job.attempt.number if self.job.attempt is not None else 0)

    def struck(self, node: FakeNode, attempt: int) -> None:
        """One slow step later the watch says that its rank makes none any more."""
        if self.controller_up and self.ended is None and node.joined == attempt and node.ranks:
            report = HangReport(
                kind="device", ranks=node.ranks[:1], quiet_s=1.5, limit_s=1.2, phase="steady", why="stuck", early=True
            )
            self.tell(m.HangConfirmed(at=self.now, attempt=attempt, report=report))

    def order(self, command: str, argument: str = "") -> None:
        if command in ("cordon", "uncordon") and not self.job.is_over:
            self.operators[argument] = command == "cordon"
            self.vouched[argument] = self.now if command == "uncordon" else 0.0
        if command == "resume" and self.job.incidents.breaker_tripped:
            self.breaker_since = self.now  # an operator lets it count anew
        self.tell(m.OperatorCommand(at=self.now, command=command, argument=argument, by="sim"))  # type: ignore[arg-type]
