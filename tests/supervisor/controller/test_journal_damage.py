"""Damage to a small journal, at every byte and of every record: nothing healthy is touched, and it is never silent."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import ExitRecord, NodeEvidence
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.agent.reconcile import out_of_bounds, reconcile
from supervisor.agent.state import SavedState
from supervisor.controller.journal import (
    Decided,
    Entry,
    journal_path,
    open_journal,
    parse_record,
    read_history,
    steps,
)
from supervisor.controller.main import _behind_its_fence
from supervisor.job.job import Job
from supervisor.keeper_client import KeeperState, LauncherProcess, WorkerProcess
from supervisor.messages import encode
from supervisor.notes import text_of
from supervisor.paths import Fence

CRASH = Verdict(
    failure_class=FailureClass.WORKER_CRASH,
    culprits=(Culprit(node="a", rank=1),),
    confidence=0.8,
    why="rank 1 was killed",
    action="restart",
)


def a_job() -> Job:
    return Job(conclude=lambda _: CRASH)


class Writer:
    """Events through a job and into a journal, as the controller's loop has them."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir, self.job, self.now = job_dir, a_job(), 1000.0
        self.begin(1)

    def begin(self, epoch: int) -> None:
        self.journal, _ = open_journal(self.job_dir)
        self.tell(m.ControllerStarted, epoch=epoch)

    def tell(self, kind: Any, **fields: Any) -> None:
        self.now += 1.0
        event = kind(at=self.now, **fields)
        seq = self.journal.write([Entry("event", event.at, encode(event))], sync=False)
        actions = self.job.handle(event)
        for action in actions:
            if isinstance(action, m.Assign):
                Fence(epoch=self.journal.epoch, attempt=action.assignment.attempt).write(self.job_dir)
        if actions:
            self.journal.write(
                [Entry("decided", event.at, encode(Decided(of=seq, actions=tuple(actions))))], sync=False
            )

    def up(self) -> None:
        assert self.job.attempt is not None
        number = self.job.attempt.number
        offer = m.StoreOffer(host="a", port=1, local_world_size=2)
        self.tell(m.LauncherReady, node="a", attempt=number, offer=offer)
        self.tell(m.WorkersStarted, node="a", attempt=number, ranks=(0, 1))
        self.tell(m.Progressed, attempt=number, step=number, first=True)
        self.tell(m.Progressed, attempt=number, step=number + 5)


def crash(number: int, now: float) -> Iterator[m.AnyEvent]:
    end = ExitRecord(rank=1, local_rank=1, pid=1, code=None, signal=9, ended_at=now)
    yield m.EvidenceArrived(at=now, evidence=NodeEvidence(node="a", attempt=number, exits=(end,)))
    yield m.RankEnded(at=now, node="a", attempt=number, exit=end)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of two controllers: the second attempt runs, and an operator has spoken."""
    job_dir = tmp_path_factory.mktemp("whole")
    writer = Writer(job_dir)
    writer.tell(m.JobDefined, spec=m.JobSpec(name="j"))
    writer.tell(m.NodeJoined, node="a", host="h", address="10.0.0.1")
    writer.up()
    for event in crash(1, writer.now):
        writer.tell(type(event), **{name: getattr(event, name) for name in event.__struct_fields__ if name != "at"})
    assert writer.job.attempt is not None
    assert writer.job.attempt.number == 2
    writer.begin(2)
    writer.tell(m.NodeJoined, node="a", host="h", address="10.0.0.1")
    writer.tell(m.OperatorCommand, command="cordon", argument="z", by="ann")
    writer.up()
    assert writer.job.state == "RUNNING"
    return job_dir


class Nodes:
    """The node as it is: both ranks of attempt 2 run. Nothing that it is told may end them."""

    keeper = KeeperState(
        ready=True,
        launcher=LauncherProcess(pid=1),
        workers=tuple(WorkerProcess(attempt=2, rank=rank, local_rank=rank, pid=10 + rank) for rank in (0, 1)),
    )
    situation = SimpleNamespace(keeper=keeper, offer=None, watching=2, saved=SavedState(prepared=2, joined=2))

    def __init__(self, job: Job, now: float) -> None:
        self.job, self.now, self.told, self.newest = job, now, [], 0

    def tell(self, kind: Any, healthy: bool = True, **fields: Any) -> None:
        self.now = max(self.now, fields.pop("at", self.now))
        for action in self.job.handle(kind(at=self.now, **fields)):
            if isinstance(action, m.Note) and action.loud:
                self.told.append(text_of(action))
            if isinstance(action, m.Assign):
                self.newest = max(self.newest, action.assignment.attempt)
                assert out_of_bounds(action.assignment, "a") == ""
                assert not healthy or reconcile(action.assignment, self.situation) == [], action.assignment

    def timers(self, seconds: float) -> None:
        until = self.now + seconds
        for timer, at in sorted(self.job.timers.items(), key=lambda one: one[1]):
            if at <= until and timer in self.job.timers:
                self.tell(m.TimerFired, timer=timer, at=at)


def story_goes_on(job_dir: Path, *, must_tell: bool) -> None:
    """A controller starts on this journal while the ranks of attempt 2 run on; then one of them is killed."""
    journal, history = open_journal(job_dir, living=True)
    journal.close()
    job = a_job()
    nodes = Nodes(job, history.last_at or 2000.0)
    for step in steps(history.records):
        for action in job.handle(step.event):
            if isinstance(action, m.Note) and action.loud and isinstance(step.event, m.JournalDamaged):
                nodes.told.append(text_of(action))
    behind = _behind_its_fence(job_dir, history, job)
    if behind is not None:
        fields = {name: getattr(behind, name) for name in behind.__struct_fields__ if name != "at"}
        nodes.tell(m.JournalDamaged, **{**fields, "living": True})
    nodes.tell(m.ControllerStarted, epoch=journal.epoch)
    nodes.timers(2.0)
    nodes.tell(m.JobDefined, spec=m.JobSpec(name="j"))
    nodes.tell(m.NodeJoined, node="a", host="h", address="10.0.0.1")
    nodes.tell(m.WorkersStarted, node="a", attempt=2, ranks=(0, 1))
    nodes.tell(m.Progressed, attempt=2, step=8)
    nodes.timers(60.0)
    assert not job.is_over
    assert bool(nodes.told) or not must_tell, "nothing was said"
    for event in crash(2, nodes.now):
        nodes.tell(type(event), healthy=False, **{n: getattr(event, n) for n in event.__struct_fields__ if n != "at"})
    nodes.timers(10.0)
    recovered = nodes.newest > 2 and not job.is_over
    assert recovered or (job.paused and nodes.told), (job.state, job.attempt)
    assert not recovered or job.attempt is None or job.attempt.number > 2
    if job.paused:
        nodes.tell(m.OperatorCommand, healthy=False, command="restart", by="ann")
        nodes.tell(m.OperatorCommand, healthy=False, command="resume", by="ann")
        assert job.attempt is not None
        assert (job.attempt.number > 2, job.state) == (True, "STARTING")


def damaged(whole: Path, job_dir: Path, epoch: int, change: Callable[[bytes], bytes | None]) -> Path:
    shutil.rmtree(job_dir, ignore_errors=True)
    shutil.copytree(whole, job_dir)
    path = journal_path(job_dir, epoch)
    data = change(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    return job_dir


def lines(whole: Path, epoch: int) -> list[bytes]:
    return journal_path(whole, epoch).read_bytes().splitlines(keepends=True)


@pytest.mark.lasts(40)
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_bit_flipped_anywhere(whole: Path, tmp_path: Path, epoch: int) -> None:
    """No line is believed whatever byte of it is another; the story is gone through at some bytes in each record."""
    before, data = read_history(whole), journal_path(whole, epoch).read_bytes()
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        start, end = data.rfind(b"\n", 0, at) + 1, data.index(b"\n", at) + 1
        if data[at] != ord("\n"):  # of the end of a line nothing is lost
            assert [parse_record(line) for line in flipped[start:end].splitlines(keepends=True) if line.strip()] == [
                None
            ] * len(flipped[start:end].splitlines()), at
        if at % 61 == 0 or data[at] == ord("\n"):
            job_dir = damaged(whole, tmp_path / "job", epoch, lambda _, flipped=flipped: flipped)  # type: ignore[misc]
            found = read_history(job_dir)
            assert found.problems or len(found.records) == len(before.records), at
            assert {record.seq for record in found.records} <= {record.seq for record in before.records}
            assert len(before.records) - len(found.records) <= 1
            story_goes_on(job_dir, must_tell=bool(found.problems))


@pytest.mark.lasts(40)
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_journal_cut_anywhere(whole: Path, tmp_path: Path, epoch: int) -> None:
    """A cut of the last file between two records is seen only where nodes were told of more."""
    ends = {sum(map(len, lines(whole, epoch)[:n])) for n in range(len(lines(whole, epoch)) + 1)}
    for at in sorted(ends | set(range(0, sum(map(len, lines(whole, epoch))), 31))):
        job_dir = damaged(whole, tmp_path / "job", epoch, lambda data, at=at: data[:at])  # type: ignore[misc]
        story_goes_on(job_dir, must_tell=epoch == 1 and at < sum(map(len, lines(whole, 1))))
    job_dir = damaged(whole, tmp_path / "job", epoch, lambda _: None)
    story_goes_on(job_dir, must_tell=epoch == 1)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_record_that_is_gone_or_twice(whole: Path, tmp_path: Path, epoch: int) -> None:
    every = lines(whole, epoch)
    for at in range(len(every)):
        for instead in ([], [every[at]] * 2, [*every[at : at + 2][::-1]]):
            cut = at + max(1, len(set(instead)))
            job_dir = damaged(
                whole,
                tmp_path / "job",
                epoch,
                lambda _, at=at, cut=cut, instead=instead: b"".join([*every[:at], *instead, *every[cut:]]),  # type: ignore[misc]
            )
            lost = not instead and not (epoch == 2 and at == len(every) - 1)
            story_goes_on(job_dir, must_tell=lost or len(instead) != len(set(instead)))


def test_what_is_damaged_is_kept_and_told_once(whole: Path, tmp_path: Path) -> None:
    """An operator's word that may be lost pauses the job."""
    job_dir = damaged(whole, tmp_path / "job", 2, lambda data: data.replace(b'"argument":"z"', b'"argument":"y"', 1))
    found = journal_path(job_dir, 2).read_bytes()
    _, history = open_journal(job_dir, living=True)
    assert history.problems
    job = a_job()
    for step in steps(history.records):
        job.handle(step.event)
    assert job.core.pause is not None
    assert (job.core.pause.by, job.state) == ("unbroken", "RUNNING")
    assert (job_dir / "damaged" / "journal.2.jsonl").read_bytes() == found
    assert open_journal(job_dir, living=True)[1].damaged == ()
    told = [s.event for s in steps(read_history(job_dir).records) if isinstance(s.event, m.JournalDamaged)]
    assert [(one.lost, one.orders, one.attempt) for one in told] == [(1, True, 2)]


def test_an_attempt_that_was_adopted_is_recovered_or_ends_as_complete(make_driver: Any) -> None:
    """Of two nodes, each of which tells of its own ranks; no operator's word can be lost."""
    for ends_well in (True, False):
        driver = make_driver(nodes_min=2, nodes_max=2)
        damaged = {"what": "w", "lost": 1, "events": True, "living": True, "attempt": 3, "formed": True}
        driver.tell(m.JournalDamaged, **damaged)
        assert driver.job.paused
        driver.join("a", "b")
        for place, node in enumerate("ab"):
            driver.tell(m.WorkersStarted, node=node, attempt=3, ranks=(2 * place, 2 * place + 1))
            others = [told.stage for name, told in driver.told.items() if name > node]
            assert set(others) <= {"hold"}, "its ranks would be ended"
        assert (driver.state, driver.job.paused, driver.number) == ("RUNNING", False, 3)
        if ends_well:
            driver.finish()
            assert {told.stage for told in driver.told.values()} == {"finish"}
            for node in "ab":
                driver.tell(m.LauncherEnded, node=node, attempt=3, how="it ended with code 0")
            assert driver.state == "SUCCEEDED"
        else:
            driver.crash()
            assert (driver.number, driver.told["a"].stage) == (4, "form")
