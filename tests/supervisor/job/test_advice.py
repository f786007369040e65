"""What a job measures of its saves, restarts and failures, and what it tells of that."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from diagnosis.taxonomy import FailureClass
from recovery.cadence import best_interval_s
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.controller.metrics import controller_samples
from supervisor.job.advice import JobAdvice, Measured, OnlineAdvice, advice_of, measured
from tests.recovery import cadence_jobs

STEP_S = 2.0
EVERY = 150
"""Steps between two saves."""
STALL_S, WRITE_S, RESTART_S = 20.0, 45.0, 90.0


class Training:
    """A job in virtual time, with what its agents would tell: steps, saves in the background, failures."""

    def __init__(self, run: Any, every: int = EVERY, stall_s: float = STALL_S) -> None:
        self.run, self.every, self.stall_s = run, every, stall_s
        self.step = self.saved = 1
        self.told_at = 0.0
        self.to_come: list[Checkpoint] = []
        self.seen: list[Checkpoint] = []

    def until(self, at: float) -> None:
        """Train until then."""
        while self.run.now + STEP_S <= at:
            self.run.now += STEP_S
            self.step += 1
            if self.run.now - self.told_at >= 10.0:
                self._tell()
            if self.step % self.every == 0:
                self._save()
            self._show_saves()

    def _tell(self) -> None:
        self.told_at = self.run.now
        self.run.tell(m.Progressed, attempt=self.run.number, step=self.step, step_at=self.run.now)

    def _save(self) -> None:
        began = self.run.now
        self.run.now += self.stall_s
        path = f"/ckpt/step-{self.step}.pt"
        self.to_come.append(
            Checkpoint(
                path=path,
                step=self.step,
                format="torch_save",
                complete=True,
                modified_at=began + WRITE_S,
                began_at=began,
            )
        )

    def _show_saves(self) -> None:
        while self.to_come and self.to_come[0].modified_at + 1.0 <= self.run.now:
            self.seen.insert(0, self.to_come.pop(0))
            self.saved = self.seen[0].step or 0
            self.run.tell(m.CheckpointsSeen, node="a", checkpoints=tuple(self.seen[:8]))

    def fail(self, failure_class: FailureClass | None = None, restart_s: float = RESTART_S) -> None:
        if failure_class is not None:
            self.run.verdict = msgspec.structs.replace(self.run.verdict, failure_class=failure_class)
        failed_at = self.run.now
        self.run.crash(step=self.step)
        while self.run.state != "STARTING":
            self.run.fire("evidence" if "evidence" in self.run.job.timers else "backoff")
        self.to_come.clear()
        self.run.now = max(self.run.now, failed_at + restart_s)
        self.step = self.saved + 1
        self.run.up(self.step)
        self.told_at = self.run.now

    @property
    def advice(self) -> JobAdvice:
        return advice_of(self.measured)

    @property
    def measured(self) -> Measured:
        return measured(self.run.job, self.run.now)


@pytest.fixture
def training(running: Any) -> Any:
    def start(*nodes: str, **more: Any) -> Training:
        return Training(running(*(nodes or ("a",))), **more)

    return start


def test_a_planted_job_is_measured_as_it_was_planted(training: Any) -> None:
    job, chance = training("a", "b"), random.Random(11)
    began = job.run.now
    for _ in range(12):
        job.until(job.run.now + chance.expovariate(1 / 3000.0))
        job.fail(FailureClass.NODE_FAILURE)
    job.until(job.run.now + 1000.0)

    seen = job.measured

    assert (seen.nodes, seen.gpus) == (2, 4)
    assert seen.failures == {"node_failure": 12}
    assert seen.node_failures == 12
    assert seen.not_counted == {}
    assert seen.saves > 30
    assert seen.stalls_seen > 20
    assert seen.stall_s == pytest.approx(STALL_S, abs=0.5)
    assert seen.write_s == pytest.approx(WRITE_S)
    assert seen.restart_s == pytest.approx(RESTART_S, abs=2.0)
    assert seen.step_s == pytest.approx(STEP_S)
    assert seen.interval_s == pytest.approx(EVERY * STEP_S, rel=0.02)
    assert seen.interval_steps == EVERY
    assert seen.redone_s == pytest.approx(seen.redone_steps * STEP_S, rel=0.2)
    assert 12 * 0.2 * EVERY < seen.redone_steps < 12 * 1.2 * EVERY
    assert seen.trained_s == pytest.approx(job.run.now - began - 12 * RESTART_S, rel=0.01)
    assert job.run.replayed().saves.total == seen.saves


def test_the_advice_to_a_planted_job_is_as_good_as_the_best_of_a_grid(training: Any) -> None:
    """The job's own figures, from 40 failures; then many such jobs, which know nothing of the formula."""
    job, chance, mtbf_s = training("a", every=600), random.Random(5), 2500.0
    for _ in range(40):
        job.until(job.run.now + chance.expovariate(1 / mtbf_s))
        job.fail(FailureClass.GPU_ECC_UNCORRECTABLE)
    told = job.advice
    assert told.figures is not None
    assert told.advice is not None
    assert told.advice.mtbf_low_s < mtbf_s < told.advice.mtbf_high_s
    true = msgspec.structs.replace(told.figures.costs, stall_s=STALL_S, durable_s=WRITE_S, restart_s=RESTART_S)
    factor = told.advice.interval_s / best_interval_s(true, mtbf_s)

    found = cadence_jobs.compare(true, mtbf_s, cadence_jobs.exponential, factor=factor)

    assert found.loss <= 3 * found.error + 5e-3, "a rate from 40 failures is 16 % off, which costs no more than that"
    assert told.matters
    assert told.advice.gain == pytest.approx(0.13, abs=0.05)


def test_users_code_operators_and_failing_starts_are_not_counted(training: Any) -> None:
    job = training()
    job.until(job.run.now + 1000.0)
    job.fail(FailureClass.SCRIPT_ERROR)
    job.until(job.run.now + 1000.0)
    job.fail(FailureClass.LOSS_SPIKE_OR_NAN)
    job.until(job.run.now + 1000.0)
    job.run.order("restart")
    job.run.up(job.step)
    job.until(job.run.now + 1000.0)
    job.fail(FailureClass.WORKER_CRASH)
    seen = job.measured
    assert seen.failures == {"worker_crash": 1}
    assert seen.node_failures == 0
    assert seen.not_counted == {"script_error": 1, "loss_spike_or_nan": 1}


def test_too_little_data_is_said_and_status_is_silent(training: Any) -> None:
    job = training()
    job.until(job.run.now + 3000.0)
    told = job.advice
    assert told.advice is not None
    assert (told.enough, told.matters) == (False, False)
    assert any(one.startswith("too little data") for one in told.lacks)
    assert any("no restart" in one for one in told.lacks)
    assert told.advice.mtbf_high_s > 20 * told.advice.mtbf_low_s


def test_no_checkpoint_no_advice(training: Any) -> None:
    job = training(every=10**9)
    job.until(job.run.now + 500.0)
    job.fail()
    told = job.advice
    assert (told.advice, told.figures) == (None, None)
    assert told.measured.saves == 0
    assert told.lacks


def test_a_job_that_has_not_begun_has_no_advice(make_driver: Any) -> None:
    run = make_driver()
    told = advice_of(measured(run.job, run.now))
    assert told.advice is None
    assert told.measured.trained_s == 0.0


def checkpoint(path: str, at: float, **more: Any) -> Checkpoint:
    return Checkpoint(
        **{"path": path, "step": None, "format": "torch_save", "complete": True, "modified_at": at, **more}
    )


def test_what_is_one_save_and_what_is_none(running: Any) -> None:
    run = running("a", "b")
    now = run.now

    def seen(node: str, *checkpoints: Checkpoint) -> None:
        run.tell(m.CheckpointsSeen, after=1.0, node=node, checkpoints=checkpoints)

    seen("a", checkpoint("/c/model_10.pt", now + 1.0, step=10), checkpoint("/c/opt_10.pt", now + 1.5, step=10))
    seen("b", checkpoint("/c/model_10.pt", now + 1.0, step=10), checkpoint("/c/rank1_10.pt", now + 2.0, step=10))
    assert run.job.saves.total == 1
    assert run.job.saves.newest[0].completed_at == now + 2.0
    seen("a", checkpoint("/c/best.pt", now + 3.0), checkpoint("/c/copy", now + 3.0, copy_of="/c/last.pt"))
    seen("a", checkpoint("/base/model.pt", now - 86_400.0, step=70_000), checkpoint("/c/x_9.pt", now - 5.0, step=9))
    assert run.job.saves.total == 1
    seen("a", checkpoint("/c/model_20.pt", now + 5.0, step=20, complete=False))
    assert run.job.saves.total == 1
    seen("a", checkpoint("/c/model_20.pt", now + 6.0, step=20))
    assert run.job.saves.total == 2
    assert run.job.saves.newest[-1].write_s == pytest.approx(1.0)


def test_a_step_that_is_saved_again_after_a_failure_is_another_save(training: Any) -> None:
    job = training()
    job.until(job.run.now + 400.0)
    assert [save.step for save in job.run.job.saves.newest] == [EVERY]
    job.saved = 100  # the newest was lost
    job.fail()
    job.seen.clear()
    job.until(job.run.now + 400.0)
    assert [(save.attempt, save.step) for save in job.run.job.saves.newest] == [(1, EVERY), (2, EVERY)]
    assert list(job.run.job.saves.intervals()) == [], "a failure lies between them"


def test_files_of_an_older_save_and_renames_tell_no_beginning(running: Any) -> None:
    run = running("a")
    now = run.now
    found = [
        checkpoint("/c/one", now + 1.0, step=1, began_at=now - 50.0),  # before the attempt
        checkpoint("/c/two", now + 2.0, step=2, began_at=now + 2.5),  # renamed when it was whole
        checkpoint("/c/three", now + 3.0, step=3, began_at=now + 0.5),  # has a file of the first
    ]
    for one in found:
        run.tell(m.CheckpointsSeen, after=3.0, node="a", checkpoints=(one,))
    assert [save.write_s for save in run.job.saves.newest] == [None, None, None]


def test_everything_is_bounded(running: Any) -> None:
    run = running("a")
    for number in range(1, 700):
        one = checkpoint(f"/c/{number}", run.now, step=number, complete=number % 2 == 0)
        run.tell(m.CheckpointsSeen, after=1.0, node="a", checkpoints=(one,))
        run.tell(m.Progressed, attempt=1, step=number + 1, step_at=run.now)
    saves = run.job.saves
    assert all(len(kept) <= 512 for kept in (saves.newest, saves._known, saves._begun, saves._samples))


def test_a_job_that_runs_computes_at_most_once_a_minute(training: Any) -> None:
    job, online = training(), OnlineAdvice()
    job.until(job.run.now + 700.0)
    first = online.of(job.run.job, job.run.now)
    job.until(job.run.now + 30.0)
    assert online.of(job.run.job, job.run.now) is first
    job.until(job.run.now + 600.0)
    assert online.of(job.run.job, job.run.now).measured.saves > first.measured.saves


def test_failures_within_seconds_tell_no_rate(training: Any) -> None:
    job = training()
    for _ in range(3):
        job.until(job.run.now + 3000.0)
        job.fail()
    seen = job.measured
    assert advice_of(seen).enough
    told = advice_of(msgspec.structs.replace(seen, trained_s=12.0))
    assert (told.enough, told.matters) == (False, False)
    assert len(told.lacks) > len(advice_of(seen).lacks)


def test_the_gauge_is_there_once_there_is_enough_data(training: Any) -> None:
    job = training()

    def gauge() -> list[float]:
        watch, clock = SimpleNamespace(newest=None, snapshot=None), SimpleNamespace(now=lambda: job.run.now)
        loop: Any = SimpleNamespace(
            epoch=1, connections={}, waiting=0, stall="", watch=watch, clock=clock, advice=OnlineAdvice(), ledger=None
        )
        samples = controller_samples(loop, job.run.job)
        return [one.value for one in samples if one.name == "unbroken_job_advised_interval_seconds"]

    assert gauge() == []
    for _ in range(3):
        job.until(job.run.now + 3000.0)
        job.fail()
    told = job.advice.advice
    assert told is not None
    assert gauge() == [told.interval_s]
