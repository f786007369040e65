"""Ranks in step, looked at now and then: simulated with a known truth, as many healthy as slow."""

from __future__ import annotations

import random

import pytest

from diagnosis.signals import RankSample
from diagnosis.stragglers import Straggler, StragglerWatch

SEEDS = range(6)


class Job:
    """Ranks that compute, then meet in a collective; steps take 1 s and are looked at once a second or so."""

    def __init__(self, seed: int, ranks: int = 4, transfer: float = 0.05) -> None:
        self.rng = random.Random(seed)
        self.ranks = range(ranks)
        self.transfer = transfer
        self.watch = StragglerWatch()
        self.now = 1000.0
        self.step = 0.0

    def run(
        self, seconds: float, work: dict[int, float] | None = None, usual: float = 1.0, phase: str = ""
    ) -> list[Straggler]:
        """`work`: seconds of computing of some ranks; `usual`: of all others."""
        told = []
        end = self.now + seconds
        while self.now < end:
            self.now += self.rng.uniform(0.9, 1.3)
            took = {rank: (work or {}).get(rank, usual) for rank in self.ranks}
            length = max(took.values()) + self.transfer
            self.step += 1.1 / length
            samples = []
            for rank in self.ranks:
                at = self.rng.uniform(0, length)  # where in its step the beacon was written
                done = int(self.step)
                groups = {"0": (done + (at > took[rank]), done)}
                samples.append(RankSample(rank=rank, local_rank=rank, pid=rank + 1, groups=groups, phase=phase))  # type: ignore[arg-type]
            self.watch.observe(self.now, samples)
            found = self.watch.tick(self.now)
            told += [found] if found is not None else []
        return told


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transfer", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_an_even_job_gives_nothing(seed: int, transfer: float, ranks: int) -> None:
    job = Job(seed, ranks, transfer)

    assert job.run(1200) + job.run(1200, usual=1.3) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_a_slow_rank_is_told_once_with_its_cost_and_since_when_and_that_it_is_over(seed: int, ranks: int) -> None:
    job = Job(seed, ranks)
    assert job.run(300) == []
    began = job.now

    (told,) = job.run(900, {1: 1.3})

    assert told.ranks == (1,)
    assert told.cost == pytest.approx(0.3 / 1.35, abs=0.12)
    assert told.since == pytest.approx(began, abs=130)
    (over,) = job.run(900)
    assert over.ranks == ()


def test_a_slow_node() -> None:
    job = Job(1, 12)

    (told,) = job.run(400, {4: 1.4, 5: 1.4})

    assert told.ranks == (4, 5)


def test_half_of_the_ranks_are_no_stragglers() -> None:
    assert Job(1, 8).run(600, dict.fromkeys(range(4), 1.5)) == []


def test_gpus_that_run_behind_their_cpus_tell_nothing() -> None:
    job = Job(1)
    job.transfer = 50.0  # all seem to wait all the time

    assert job.run(600, {1: 1.3}) == []


def test_a_slow_minute_and_a_checkpoint_of_one_rank_are_nothing() -> None:
    job = Job(2)

    assert job.run(200) + job.run(50, {0: 3.0}) + job.run(300) == []
    assert job.run(300, {0: 1.5}, phase="checkpoint") == []


def test_ranks_without_collectives_of_the_world_tell_nothing() -> None:
    watch = StragglerWatch()
    for second in range(300):
        samples = [RankSample(rank=r, local_rank=r, pid=r + 1, groups={"1": (second + r, second)}) for r in (0, 1)]
        watch.observe(float(second), samples)
        assert watch.tick(float(second)) is None
