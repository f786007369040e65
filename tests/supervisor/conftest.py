"""Probes that exist only for a test, as a plug-in of the entry-point group `unbroken.probes`; a job with its clock."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diagnosis.incident import Culprit, Incident, Verdict
from diagnosis.signals import ExitRecord, NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import choose as choose_checkpoint
from supervisor import messages as m
from supervisor.job.checkpoint_choice import Choose
from supervisor.job.job import Job

PREAMBLE = """
import os, time
from diagnosis.health import Check, healthy, unhealthy, unknown
from diagnosis.signals import Signal

def check(id, **more):
    more = {"failure_class": "storage_error", "scope": "node", **more}
    return Check(id=id, what="w", source="s", threshold="t", **more)
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Source of probe classes (names ending in `Probe`) -> the environment of a process that finds them."""

    def install(source: str) -> dict[str, str]:
        folder = tmp_path / "plug-in"
        info = folder / "test_probes-0.dist-info"
        info.mkdir(parents=True)
        (folder / "plugged_in.py").write_text(PREAMBLE + source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-probes\nVersion: 0\n")
        names = [line.split()[1].rstrip(":") for line in source.splitlines() if line.startswith("class ")]
        points = "".join(f"{name} = plugged_in:{name}\n" for name in names)
        (info / "entry_points.txt").write_text(f"[unbroken.probes]\n{points}")
        path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
        return {**os.environ, "PYTHONPATH": path}

    return install


CRASH = Verdict(
    failure_class=FailureClass.WORKER_CRASH,
    culprits=(Culprit(node="a", rank=1),),
    confidence=0.8,
    why="rank 1 was killed",
    action="restart",
)


class JobDriver:
    """A job with its clock, and a diagnosis that always says the same."""

    def __init__(self, verdict: Verdict = CRASH, **spec: Any) -> None:
        self.verdict = verdict
        self.seen: list[Incident] = []
        """What was diagnosed."""
        self.conclude: Callable[[Incident], Verdict] = lambda _: self.verdict
        """A test may put another diagnosis here."""
        self.choose: Choose = choose_checkpoint
        self.job = Job(self._conclude, lambda found, situation: self.choose(found, situation))
        self.now = 1000.0
        self.told: dict[str, m.Assignment] = {}
        self.actions: list[m.Action] = []
        self.journal: list[m.AnyEvent] = []
        self.tell(m.ControllerStarted, epoch=1)
        self.tell(m.JobDefined, spec=m.JobSpec(**{"name": "test", **spec}))

    def _conclude(self, incident: Incident) -> Verdict:
        self.seen.append(incident)
        return self.conclude(incident)

    def tell(self, kind: Any, after: float = 0.0, **fields: Any) -> list[m.Action]:
        self.now += after
        self.journal.append(kind(at=self.now, **fields))
        self.actions = self.job.handle(self.journal[-1])
        self.told |= {a.assignment.node: a.assignment for a in self.actions if isinstance(a, m.Assign)}
        return self.actions

    def order(self, command: str, argument: str = "", by: str = "ann") -> list[m.Action]:
        return self.tell(m.OperatorCommand, command=command, argument=argument, by=by)

    def join(self, *names: str, **fields: Any) -> None:
        for name in names:
            self.tell(m.NodeJoined, node=name, host=f"host-{name}", address="10.0.0.1", **fields)

    @property
    def number(self) -> int:
        return self.job.attempt.number if self.job.attempt is not None else 0

    def up(self, step: int | None = 1) -> None:
        """All launchers come, all workers start, and the first step is made."""
        assert self.job.attempt is not None
        members = self.job.attempt.members
        for name in members:
            offer = m.StoreOffer(host=name, port=1, local_world_size=2)
            self.tell(m.LauncherReady, node=name, attempt=self.number, offer=offer)
        for place, name in enumerate(members):
            self.tell(m.WorkersStarted, node=name, attempt=self.number, ranks=(2 * place, 2 * place + 1))
        self.tell(m.Progressed, attempt=self.number, step=step, first=True)

    def finish(self) -> None:
        """Every rank ends well; the launchers are still there."""
        assert self.job.attempt is not None
        ends = {"pid": 1, "code": 0, "signal": None, "ended_at": self.now}
        for place, name in enumerate(self.job.attempt.members):
            for local in (0, 1):
                end = ExitRecord(rank=2 * place + local, local_rank=local, **ends)
                self.tell(m.RankEnded, node=name, attempt=self.number, exit=end)

    def rank_ends(self, node: str = "a", rank: int = 1, step: int | None = None, **record: Any) -> None:
        """A rank is killed, or what the record says; the other nodes' evidence is still to come."""
        usual = {"local_rank": rank % 2, "pid": 1, "code": None, "signal": 9, "ended_at": self.now}
        end = ExitRecord(rank=rank, **{**usual, **record})
        self.tell(m.EvidenceArrived, evidence=NodeEvidence(node=node, attempt=self.number, exits=(end,)))
        self.tell(m.RankEnded, node=node, attempt=self.number, exit=end, step=step)

    def crash(self, node: str = "a", rank: int = 1, **more: Any) -> None:
        """A rank is killed; the time of the other nodes' evidence runs out."""
        self.rank_ends(node, rank, **more)
        if self.state == "DIAGNOSING":
            self.fire("evidence")

    def fire(self, timer: str) -> None:
        self.now = max(self.now, self.job.timers[timer])
        self.tell(m.TimerFired, timer=timer)

    @property
    def state(self) -> str:
        return self.job.state

    @property
    def ended(self) -> bool:
        """Whether the controller may go, since the newest event."""
        return any(isinstance(action, m.End) for action in self.actions)

    @property
    def orders(self) -> list[m.SchedulerRequest]:
        """What the scheduler was asked by the newest event."""
        return [action for action in self.actions if isinstance(action, m.SchedulerRequest)]

    @property
    def loud(self) -> dict[str, dict[str, Any]]:
        """What the newest event has for the terminal: kind -> arguments."""
        return {note.kind: note.arguments for note in self.actions if isinstance(note, m.Note) and note.loud}

    def replayed(self) -> Job:
        """The same events through another job."""
        again = Job(conclude=lambda _: self.verdict)
        for event in self.journal:
            again.handle(event)
        return again


@pytest.fixture
def make_driver() -> type[JobDriver]:
    return JobDriver
