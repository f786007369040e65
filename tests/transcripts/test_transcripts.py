"""Golden transcripts: stories of a job, told by what goes in (`>`) and what comes out.

Lines that begin with `#` are prose, with `>` a command (below, `Script`). Timers fire by themselves when time passes.
Everything else is written by the driver: `pytest tests/transcripts --rewrite`, then read what changed.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport, Incident, Verdict
from diagnosis.signals import Evidence, ExitRecord, Finding, LossAlarm, NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.job.attempts import Attempt
from supervisor.job.job import Job
from supervisor.notes import text_of

FOLDER = Path(__file__).parent
BEGAN = 1_700_000_000.0
SIGNALS = {"SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}


class Script:
    """Runs the commands of one transcript against a job; `text` is what it said."""

    def __init__(self) -> None:
        self.verdict = Verdict(
            failure_class=FailureClass.WORKER_CRASH, culprits=(), confidence=0.6, why="rank killed", action="restart"
        )
        self.job = Job(conclude=self._conclude)
        self.journal: list[m.AnyEvent] = []
        self.now = BEGAN
        self.text: list[str] = []
        self.local = 2
        self.port = 0

    def _conclude(self, _: Incident) -> Verdict:
        return self.verdict

    @property
    def attempt(self) -> Attempt:
        assert self.job.attempt is not None
        return self.job.attempt

    # ----- the driver -----

    def line(self, text: str) -> None:
        words = shlex.split(text)
        if words[0].startswith("+"):
            self.pass_time(float(words[0][1:]))
            words = words[1:]
        if words:
            plain = [word for word in words[1:] if "=" not in word]
            named = dict(word.split("=", 1) for word in words[1:] if "=" in word)
            getattr(self, "do_" + words[0])(*plain, **named)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [(at, name) for name, at in self.job.timers.items() if at <= until]:
            at, name = min(due)
            self.now = max(self.now, at)
            self.text.append(f"  {self.clock()} (timer {name})")
            self.tell(m.TimerFired(at=self.now, timer=name))
            assert self.job.timers.get(name) != at, f"timer {name} fired and is still due"
        self.now = until

    def clock(self) -> str:
        seconds = self.now - BEGAN
        return f"{int(seconds // 60):02}:{seconds % 60:04.1f}"

    def tell(self, event: m.AnyEvent) -> None:
        before = self.job.state
        self.journal.append(event)
        actions = self.job.handle(event)
        self.text += [
            f"  {self.clock()} {'! ' if note.loud else ''}{text_of(note)}"
            for note in actions
            if isinstance(note, m.Note)
        ]
        if self.job.state != before:
            self.text.append(f"  {self.clock()} {before} -> {self.job.state}")
        orders: dict[str, list[str]] = {}
        for action in actions:
            if isinstance(action, m.Assign):
                orders.setdefault(_in_words(action.assignment), []).append(action.assignment.node)
        self.text += [f"  {self.clock()} {', '.join(nodes)}: {order}" for order, nodes in orders.items()]
        for order in actions:
            if isinstance(order, m.SchedulerRequest):
                what = " ".join(filter(None, (order.kind, order.node, order.reason, " ".join(order.exclude))))
                what += f", rather not {' '.join(order.avoid)}" if order.avoid else ""
                self.text.append(f"  {self.clock()} to the scheduler, {order.number}: {what}")
        if any(isinstance(action, m.End) for action in actions):
            self.text.append(f"  {self.clock()} the controller may go")

    # ----- commands -----

    def do_job(self, local: str = "2", **fields: str) -> None:
        self.local = int(local)
        spec = msgspec.convert({"name": "story", **fields}, m.JobSpec, strict=False)
        self.tell(m.ControllerStarted(at=self.now, epoch=1))
        self.tell(m.JobDefined(at=self.now, spec=spec))

    def do_join(self, *nodes: str, spare: str = "") -> None:
        for node in nodes:
            self.tell(m.NodeJoined(at=self.now, node=node, host=f"host-{node}", address="10.0.0.1", spare=bool(spare)))

    def do_ready(self, *nodes: str) -> None:
        number = self.attempt.number
        for node in nodes or self.attempt.members:
            self.port += 1
            offer = m.StoreOffer(host=f"host-{node}", port=29400 + self.port, local_world_size=self.local)
            self.tell(m.LauncherReady(at=self.now, node=node, attempt=number, offer=offer))

    def do_workers(self, *nodes: str) -> None:
        for node in nodes or self.attempt.members:
            first = self.attempt.members.index(node) * self.local
            ranks = tuple(range(first, first + self.local))
            self.tell(m.WorkersStarted(at=self.now, node=node, attempt=self.attempt.number, ranks=ranks))

    def do_up(self, step: str) -> None:
        """All launchers come, all workers start, the first step is made."""
        self.do_ready()
        self.do_workers()
        self.pass_time(0.1)
        self.do_step(step, first="yes")

    def do_step(self, step: str, first: str = "", of: str = "") -> None:
        last = int(of) if of else None
        number = self.attempt.number
        self.tell(m.Progressed(at=self.now, attempt=number, step=int(step), last_step=last, first=bool(first)))

    def do_verdict(self, name: str, node: str = "", rank: str = "", **fields: str) -> None:
        """What the diagnosis will say from now on."""
        self.verdict = Verdict(
            failure_class=FailureClass(name),
            culprits=(Culprit(node=node, rank=int(rank) if rank else None),) if node else (),
            confidence=float(fields.get("sure", "0.9")),
            why=fields.get("why", "as the script says"),
            action=fields.get("action", "restart"),  # type: ignore[arg-type]
            fingerprint=fields.get("fingerprint", ""),
        )

    def do_ended(self, node: str, rank: str, how: str, step: str = "") -> None:
        """A rank ends, `how`: an exit code, or a signal as in SIGKILL; a failed one brings its evidence along."""
        number = self.attempt.number
        record = ExitRecord(
            rank=int(rank),
            local_rank=int(rank) % self.local,
            pid=1000 + int(rank),
            code=None if how in SIGNALS else int(how),
            signal=SIGNALS.get(how),
            ended_at=self.now - 0.05,
        )
        if record.code != 0:
            self.do_evidence(node)
        self.tell(m.RankEnded(at=self.now, node=node, attempt=number, exit=record, step=int(step) if step else None))

    def do_evidence(self, node: str, request: str = "0") -> None:
        piece = NodeEvidence(node=node, attempt=self.attempt.number, request=int(request))
        if (node, 0) not in self.attempt.evidence or piece.request:
            self.tell(m.EvidenceArrived(at=self.now, evidence=piece))

    def do_answer(self, *nodes: str) -> None:
        """The nodes answer the evidence request that they have."""
        for node in nodes:
            known = self.job.nodes.get(node)
            assert known is not None
            if known.request is not None:
                self.do_evidence(node, str(known.request.number))

    def do_launcher(self, node: str, how: str) -> None:
        self.tell(m.LauncherEnded(at=self.now, node=node, attempt=self.attempt.number, how=how))

    def do_lost(self, node: str, silent: str = "5") -> None:
        self.tell(m.NodeLost(at=self.now, node=node, silent_s=float(silent)))

    def do_suspected(self, kind: str, ranks: str, quiet: str, why: str) -> None:
        report = _report(kind, ranks, quiet, why)
        self.tell(m.HangSuspected(at=self.now, attempt=self.attempt.number, report=report))

    def do_confirmed(self, kind: str, ranks: str, quiet: str, why: str) -> None:
        report = _report(kind, ranks, quiet, why)
        self.tell(m.HangConfirmed(at=self.now, attempt=self.attempt.number, report=report))

    def do_silence(self, ranks: str, quiet: str, place: str, step: str = "") -> None:
        """No progress, and nothing proves a hang."""
        report = msgspec.structs.replace(
            _report("missing", ranks, quiet, ""),
            proven=False,
            place=place,
            places=(place,),
            waiting=2 * len(self.attempt.members) - len(ranks.split(",")),
            step=int(step) if step else None,
        )
        self.tell(m.SilenceSeen(at=self.now, attempt=self.attempt.number, report=report))

    def do_cleared(self, quiet: str) -> None:
        self.tell(m.HangCleared(at=self.now, attempt=self.attempt.number, quiet_s=float(quiet)))

    def do_wake(self, *ranks: str) -> None:
        wanted = tuple(int(rank) for rank in ranks)
        self.tell(m.RankWakeWanted(at=self.now, attempt=self.attempt.number, ranks=wanted))

    def do_nan(self, node: str) -> None:
        finding = Finding(
            rule="nan",
            failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
            confidence=0.9,
            scope="job",
            severity="error",
            evidence=Evidence(text="loss is nan", node=node),
            node=node,
            at=self.now,
        )
        self.tell(m.FindingArrived(at=self.now, node=node, finding=finding))

    def do_loss(self, kind: str, step: str = "", seen: str = "", ranks: str = "0", every: str = "1") -> None:
        """The loss has gone wrong at `step`, which shows at step `seen`; `well`: it is well again."""
        alarm = LossAlarm(kind=kind, step=int(step), interval=int(every), usual=2.3, level=7.1) if step else None  # type: ignore[arg-type]
        if seen:
            self.do_step(seen)
        told = tuple(int(rank) for rank in ranks.split(",")) if alarm else ()
        self.tell(m.LossSeen(at=self.now, attempt=self.attempt.number, alarm=alarm, ranks=told))

    def do_corrupt(self, node: str) -> None:
        """The digest of its replica differs from that of the others."""
        finding = Finding(
            rule="replica_digest",
            failure_class=FailureClass.SILENT_DATA_CORRUPTION,
            confidence=0.9,
            scope="node",
            severity="error",
            evidence=Evidence(text=f"the replica on {node} differs from the others", source="agent"),
            node=node,
            at=self.now,
        )
        self.tell(m.FindingArrived(at=self.now, node=node, finding=finding))

    def do_replicas(self, odd: str, step: str, since: str) -> None:
        """Rank `odd` differs from the others in the snapshot of `step`; in that of `since` they were the same."""
        told = m.ReplicasDiffer(
            at=self.now,
            attempt=self.attempt.number,
            step=int(step),
            compared=self.local * len(self.attempt.members),
            odd=(int(odd),),
            since=BEGAN + int(since),
            since_step=int(since),
        )
        self.tell(told)

    def do_checkpoints(self, node: str, *found: str) -> None:
        """Each is STEP, or STEP! for a torn one; saved as many seconds after the beginning."""
        seen = tuple(
            Checkpoint(
                path=f"/ckpt/step-{word.rstrip('!')}",
                step=int(word.rstrip("!")),
                format="torch_save",
                complete=not word.endswith("!"),
                why="truncated" if word.endswith("!") else "",
                modified_at=BEGAN + int(word.rstrip("!")),
            )
            for word in found
        )
        self.tell(m.CheckpointsSeen(at=self.now, node=node, checkpoints=seen))

    def do_fails(self, node: str, rank: str, text: str) -> None:
        """The kernel tells of a device after whose failure no step is expected."""
        finding = Finding(
            rule="xid_79",
            failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
            confidence=0.92,
            scope="gpu",
            severity="fatal",
            evidence=Evidence(text=text, source="kernel", node=node),
            node=node,
            rank=int(rank),
            at=self.now,
            outlook="fails",
        )
        self.tell(m.FindingArrived(at=self.now, node=node, finding=finding))

    def do_early(self, ranks: str, quiet: str, why: str) -> None:
        report = msgspec.structs.replace(_report("device", ranks, quiet, why), early=True)
        self.tell(m.HangConfirmed(at=self.now, attempt=self.attempt.number, report=report))

    def do_leaving(self, node: str, kind: str, why: str) -> None:
        found = m.LeavingNode(node=node, kind=kind, why=why)  # type: ignore[arg-type]
        self.tell(m.NodesLeaving(at=self.now, nodes=(found,)))

    def do_scheduler(self, number: str, outcome: str, text: str = "") -> None:
        self.tell(m.SchedulerAnswered(at=self.now, number=int(number), outcome=outcome, text=text))  # type: ignore[arg-type]

    def do_requeued(self, requeues: str) -> None:
        """The scheduler has started the job again; a controller is there, and the first agent's spec."""
        spec = msgspec.structs.replace(self.job.spec, requeues=int(requeues))
        self.tell(m.JobRequeued(at=self.now, requeues=int(requeues)))
        self.tell(m.ControllerStarted(at=self.now, epoch=self.job.core.epoch + 1))
        self.tell(m.JobDefined(at=self.now, spec=spec))

    def do_stop(self, node: str, signal: str) -> None:
        self.tell(m.StopRequested(at=self.now, node=node, signal=signal))

    def do_done(self, *nodes: str) -> None:
        for node in nodes:
            self.tell(m.NodeDone(at=self.now, node=node))

    def do_operator(self, command: str, argument: str = "", reason: str = "") -> None:
        self.tell(
            m.OperatorCommand(at=self.now, command=command, argument=argument, reason=reason, by="ann")  # type: ignore[arg-type]
        )

    def do_controller_killed(self) -> None:
        """A new controller: the journal is replayed, the replayed job must be the same."""
        before = self.job.view()
        self.job = Job(conclude=self._conclude)
        for event in self.journal:
            self.job.handle(event)
        assert self.job.view() == before, "the replay came to another state"
        self.tell(m.ControllerStarted(at=self.now, epoch=self.job.core.epoch + 1))

    def do_incidents(self) -> None:
        for case in self.job.view().incidents:
            phases = ", ".join(f"{name} {seconds:g} s" for name, seconds in case.seconds.items())
            self.text.append(f"  {case.id}: {case.what}; {phases}; lost {case.lost_s:g} s; {case.closed_why or 'open'}")


def _report(kind: str, ranks: str, quiet: str, why: str) -> HangReport:
    return HangReport(
        kind=kind,  # type: ignore[arg-type]
        ranks=tuple(int(rank) for rank in ranks.split(",") if rank),
        quiet_s=float(quiet),
        limit_s=3.0,
        phase="steady",
        why=why,
    )


def _in_words(assignment: m.Assignment) -> str:
    told = [f"{assignment.role}, attempt {assignment.attempt}, {assignment.stage}"]
    if assignment.epoch > 1:
        told.append(f"epoch {assignment.epoch}")
    if assignment.stage == "run" and assignment.round is not None:
        told.append(f"nodes {' '.join(assignment.round.nodes)}, store on {assignment.round.store_host}")
    if assignment.stage == "form" and assignment.resume is not None and assignment.resume.path:
        skip = assignment.resume.skip_batches
        told.append(f"resume {assignment.resume.path}" + (f", skip {skip} batches" if skip else ""))
    told += [f"prepare {msgspec.to_builtins(preparation)}" for preparation in assignment.prepare]
    if assignment.evidence is not None:
        told.append(f"evidence {assignment.evidence.number} within {assignment.evidence.budget_s:g} s")
    if assignment.wake:
        told.append(f"continue ranks {assignment.wake}")
    if assignment.stage == "stop":
        told.append(f"{assignment.stop_signal}, {assignment.grace_s:g} s of grace")
    outcome = assignment.outcome
    if outcome is not None:
        told.append(f"outcome {outcome.state}, exit code {outcome.exit_code}: {outcome.line}")
    return "; ".join(told)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_transcript(name: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    golden = path.read_text()
    script = Script()
    for line in golden.splitlines():
        if line.startswith(("#", "> ")) or not line.strip():
            script.text.append(line)
        if line.startswith("> "):
            script.line(line[2:])
    told = "\n".join(script.text) + "\n"
    if request.config.getoption("--rewrite", default=False):
        path.write_text(told)
        return
    assert told == golden
