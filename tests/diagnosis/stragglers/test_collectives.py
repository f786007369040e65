"""Who is late to collectives: simulated jobs with a known truth, as many healthy as slow."""

from __future__ import annotations

import math
import random

import pytest

from diagnosis.flight import read_dump, timings
from diagnosis.flight.timings import RankTiming
from diagnosis.incident import Curve, Point
from diagnosis.logs import curves as logs_curves
from tests.bench import flight
from tests.bench.flight_jobs import dumps

SEEDS = range(4)


class Job:
    """Ranks that compute and meet in collectives: `dp` copies of `tp` ranks; rank = dp_index * tp + tp_index."""

    def __init__(self, seed, dp, tp=1, *, queued=False, jitter=0.03):
        self.rng = random.Random(seed)
        self.ranks = range(dp * tp)
        self.now = dict.fromkeys(self.ranks, 1_700_000_000.0)
        self.cpu = dict(self.now)
        self.queued = queued
        """The CPU runs ahead of its GPU, and waits for it at the end of each step."""
        self.jitter = jitter
        self.seen = {}
        self.clock = dict.fromkeys(self.ranks, 0.0)
        self.slowdown = dict.fromkeys(self.ranks, 1.0)
        self.transfer = {}
        rows = [tuple(range(at, at + tp)) for at in range(0, dp * tp, tp)]
        columns = [tuple(range(at, dp * tp, tp)) for at in range(tp)]
        self.tensor = [row for row in rows if tp > 1]
        self.data = [column for column in columns if dp > 1]

    def compute(self, rank, seconds):
        self.now[rank] += seconds * self.slowdown[rank] * math.exp(self.rng.gauss(0, self.jitter))

    def meet(self, group):
        came = {rank: self.now[rank] for rank in group}
        took = self.transfer.get(group, 0.002) * math.exp(self.rng.gauss(0, 0.1))
        end = max(came.values()) + took
        for rank in group:
            self.cpu[rank] += 0.0002
            created = self.cpu[rank] if self.queued else came[rank]
            noticed = end + self.rng.uniform(0, 0.1)
            self.seen.setdefault((rank, group), []).append((created, noticed, end - came[rank]))
            self.now[rank] = end

    def step(self, seconds=0.2, layers=3):
        for _ in range(layers):
            for rank in self.ranks:
                self.compute(rank, seconds / layers)
            for group in self.tensor:
                self.meet(group)
        for group in self.data:
            self.meet(group)
        if self.queued:
            self.cpu = dict(self.now)

    def timings(self, *, timed=False, completed=False):
        found = []
        for (rank, group), entries in self.seen.items():
            ns = [
                tuple(round((one[index] + self.clock[rank]) * 1e9) for one in entries)
                if index == 0 or completed
                else ()
                for index in (0, 1)
            ]
            found.append(
                RankTiming(
                    rank=rank,
                    group=str(list(group)),
                    seqs=tuple(range(1, len(entries) + 1)),
                    created_ns=ns[0],
                    completed_ns=ns[1],
                    duration_us=tuple(round(one[2] * 1e6) for one in entries) if timed else (),
                    kind="data" if group in self.data else "tensor",
                )
            )
        return found


SHAPES = [(4, 1), (8, 1), (4, 2), (4, 4), (8, 4)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(2, 1), *SHAPES])
@pytest.mark.parametrize("timed", [False, True])
def test_a_healthy_job_gives_nothing(seed, shape, timed):
    job = Job(seed, *shape, queued=timed, jitter=[0.01, 0.05, 0.15][seed % 3])
    for step in range(60):
        if step % 20 == 0:
            job.now[0] += 5.0  # rank 0 saves a checkpoint
        if job.rng.random() < 0.2:
            job.now[job.rng.choice(job.ranks)] += 0.3  # the interpreter collects its garbage
        job.step()
    assert timings.slowdowns(job.timings(timed=timed)) == ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [1.2, 1.6, 3.0])
@pytest.mark.parametrize("timed", [False, True])
def test_the_slow_rank_and_not_those_that_it_makes_late(seed, shape, ratio, timed):
    job = Job(seed, *shape, queued=timed)
    who = job.rng.choice(job.ranks)
    job.slowdown[who] = ratio
    for step in range(60):
        if step % 20 == 0:
            job.now[0] += 5.0
        job.step()
    (found,) = timings.slowdowns(job.timings(timed=timed))
    assert (found.kind, found.ranks) == ("rank", (who,))
    assert f"rank {who} came" in found.why
    quiet = 60 * 0.2 + 15
    assert found.cost_percent == pytest.approx(100 * 12 * (ratio - 1) / (quiet + 12 * (ratio - 1)), rel=0.45, abs=3)


def test_a_rank_that_waits_for_its_data_is_no_slow_gpu():
    job = Job(1, 4, 2)
    steps = []
    for _ in range(60):
        job.now[5] += 0.15
        began = job.now[0]
        job.step()
        steps.append(job.now[0] - began)
    curves = []
    for rank in job.ranks:
        for name, values in (("step_s", steps), ("data_s", [0.15 if rank == 5 else 0.001] * 60)):
            points = tuple(Point(step=step, value=value, line=step) for step, value in enumerate(values, 1))
            curves.append(Curve(name=name, points=points, rank=rank))
    (found,) = logs_curves.input_stalls(curves, timings.slowdowns(job.timings()))
    assert (found.kind, found.ranks) == ("input", (5,))
    assert logs_curves.input_stalls([], timings.slowdowns(job.timings()))[0].kind == "rank"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_node(seed):
    job = Job(seed, 8, 2)
    job.slowdown[6] = job.slowdown[7] = 1.5
    for _ in range(40):
        job.step()
    (found,) = timings.slowdowns(job.timings(), {rank: f"n{rank // 2}" for rank in job.ranks})
    assert (found.kind, found.ranks, found.node) == ("node", (6, 7), "n3")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cpu_that_is_late_while_its_gpu_is_not_costs_nothing(seed):
    job = Job(seed, 4, 2, queued=True)
    for _ in range(60):
        job.cpu[3] += 0.05  # behind the others, and still ahead of its GPU
        job.step()
    assert timings.slowdowns(job.timings(completed=True)) == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_clocks_that_differ_are_told_from_lateness(seed):
    job = Job(seed, 8, 2)
    job.clock[4] = job.clock[5] = 0.5
    for _ in range(60):
        job.step()
    assert timings.slowdowns(job.timings(completed=True)) == ()
    job.slowdown[1] = 2.0
    for _ in range(60):
        job.step()
    (found,) = timings.slowdowns(job.timings(completed=True))
    assert found.ranks == (1,)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipelines_first_stage_ends_last_by_its_nature(seed):
    rng = random.Random(seed)
    job = Job(seed, 4, 4)
    for _ in range(60):
        job.step()
        for first in range(4):
            pipe = tuple(range(first, 16, 4))  # the groups of `data` are pipelines here
            job.now[pipe[0]] += 0.1 * rng.uniform(0.9, 1.1)
            job.meet(pipe)
    sends = [
        RankTiming(rank=rank, group=f"p2p {a}->{a + 4}", seqs=(1,), created_ns=(1,))
        for a in range(12)
        for rank in (a, a + 4)
    ]
    assert timings.slowdowns([*job.timings(), *sends]) == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link_and_the_card_that_slow_groups_share(seed):
    job = Job(seed, 2, 8, queued=True)
    job.transfer[job.data[2]] = 0.1
    for _ in range(60):
        job.step()
    (found,) = timings.slowdowns(job.timings(timed=True))
    assert (found.kind, found.ranks) == ("link", job.data[2])
    assert found.cost_percent == pytest.approx(100 * 0.1 / 0.3, rel=0.3)
    pairs = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    job = Job(seed, 6, 1, queued=True)
    for pair in pairs:
        job.transfer[pair] = 0.05 if 4 in pair else 0.01
    for _ in range(30):
        job.step()
        for pair in pairs:
            job.meet(pair)
    assert [(one.kind, one.ranks) for one in timings.slowdowns(job.timings(timed=True))] == [("link", (4,))]


def test_odd_input_is_survived():
    whole = RankTiming(rank=0, group="g", seqs=tuple(range(40)), created_ns=(1,) * 40)
    broken = RankTiming(rank=1, group="g", seqs=(1, 2), created_ns=(5,))
    zeros = RankTiming(rank=2, group="g", seqs=tuple(range(40)), created_ns=(0,) * 40, duration_us=(0,) * 40)
    for several in ([], [whole], [whole, broken], [whole, zeros], [whole, whole], [broken, zeros]):
        assert timings.slowdowns(several) == ()


@pytest.mark.parametrize("seed", [271829, 577225, 577244])
def test_of_a_pipeline_the_one_that_makes_the_others_late(seed):
    job = flight.case("late", seed)
    assert job.shape.pipeline > 1
    (found,) = timings.slowdowns(timings.of_dumps([read_dump(data, rank) for rank, data in dumps(job).items()]))
    assert found.ranks == job.culprits
    assert found.confidence < 0.7
