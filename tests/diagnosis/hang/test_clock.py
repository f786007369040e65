"""A step that only the step clock shows is progress at once, and shortens a limit only where steps come evenly."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.hang.watch import Cleared, Confirmed, HangWatch, Suspected
from diagnosis.signals import Evidence, Finding, RankClock, RankSample
from diagnosis.taxonomy import FailureClass


class Job:
    """One rank whose output tells every hundredth step, and whose beacon the rest."""

    def __init__(self, *, logs: bool = True) -> None:
        self.watch = HangWatch()
        self.watch.start(0.0, 1)
        self.now = 0.0
        self.logs = logs
        self.ends: list[float] = []
        self.logged: int | None = None
        self.logged_at = 0.0
        self.notices: list[Any] = []

    def steps(self, *lengths: float) -> None:
        for length in lengths:
            self.run(length)
            self.ends.append(self.now)
            if self.logs and not len(self.ends) % 100:
                self.logged, self.logged_at = len(self.ends), self.now
            self.watch.observe(self.now, [self.sample()])

    def run(self, seconds: float) -> None:
        """Heartbeats come twice a second."""
        end = self.now + seconds
        while self.now + 1e-9 < end:
            self.now = min(end, self.now + 0.5)
            self.watch.observe(self.now, [self.sample()])
            self.notices += self.watch.tick(self.now)

    def sample(self) -> RankSample:
        clock, moved_at = None, self.logged_at
        if self.ends:
            gaps = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)][-100:]
            usual = gaps[-30:]
            clock = RankClock(
                steps=len(self.ends),
                age_s=self.now - self.ends[-1],
                step_s=sum(usual) / len(usual) if usual else None,
                slowest_s=max(gaps, default=0.0),
            )
            moved_at = self.ends[-1]
        return RankSample(
            rank=0, local_rank=0, pid=1, state="R", step=self.logged, moved_age_s=self.now - moved_at, clock=clock
        )

    def count(self, kind: type) -> int:
        return sum(isinstance(one, kind) for one in self.notices)


def test_a_step_between_two_lines_ends_a_silence() -> None:
    job = Job()
    job.steps(*[1.0] * 30)
    job.run(20)
    assert job.count(Suspected) == 1
    job.steps(1.0, 1.0)
    assert job.count(Cleared) == 1


def test_even_steps_tell_the_pace() -> None:
    """Lines come once in 100 s: without the clock the limit would be 500 s."""
    job = Job()
    job.steps(*[1.0] * 700)
    assert job.watch.pace.settled
    assert job.watch.suspect_limit_s < 10
    job.notices.clear()
    job.run(15)
    assert job.count(Suspected) == 1
    assert not job.count(Confirmed)


@pytest.mark.parametrize("every", [20, 45])
def test_steps_with_an_evaluation_between_them_shorten_nothing(every: int) -> None:
    """Its lines alone tell the pace, as if there were no clock."""
    job = Job()
    for _ in range(700 // every):
        job.steps(*[1.0] * every, 12.0)
    assert job.watch.suspect_limit_s > 400
    assert job.count(Suspected) <= 1, "only before anything was known"


@pytest.mark.parametrize("length", [6.0, 120.0, 600.0])
def test_rare_steps_of_a_script_that_prints_nothing_are_waited_for(length: float) -> None:
    """Gradient accumulation for minutes: after its first two steps nothing is suspected."""
    job = Job(logs=False)
    job.steps(length, length)
    job.notices.clear()
    job.steps(*[length, length * 1.5] * 4)
    assert not job.count(Suspected)


def test_where_collectives_are_seen_they_tell_the_pace() -> None:
    job = Job(logs=False)
    job.steps(100.0, 100.0)
    assert job.watch.suspect_limit_s == 500.0
    sample = job.sample()
    watch = HangWatch()
    watch.start(0.0, 1)
    watch.observe(
        1.0,
        [RankSample(rank=0, local_rank=0, pid=1, moved_age_s=0.0, groups={"0": (4, 4)}, clock=sample.clock)],
    )
    assert watch.suspect_limit_s == 3.0


def test_a_clock_that_has_stopped_shortens_nothing() -> None:
    """A few quick steps, then the optimizer is in a CUDA graph, and the output tells a step every 4 s."""
    watch, told, now = HangWatch(), 0, 0.0
    watch.start(0.0, 1)
    while now < 200:
        now += 0.5
        told = int(now / 4)
        moved_s, clock = now - 4 * told, RankClock(steps=30, age_s=now, slowest_s=0.01)
        watch.observe(now, [RankSample(rank=0, local_rank=0, pid=1, step=told, moved_age_s=moved_s, clock=clock)])
        if now > 100:
            watch.note_findings([device_failed()])
        assert not [one for one in watch.tick(now) if isinstance(one, Confirmed)]


@pytest.mark.parametrize(
    ("steps", "slowest_s", "within_s"),
    [(45, 0.04, (0.24, 0.5)), (45, 0.6, (0.8, 1.1)), (9, 0.04, None)],
    ids=["quick steps", "one of them was slow", "too few"],
)
def test_steps_tell_the_pace_however_few_heartbeats_they_took(
    steps: int, slowest_s: float, within_s: tuple[float, float] | None
) -> None:
    """The device fails in the second second of training: after two heartbeats with progress."""
    watch, notices = HangWatch(), []
    watch.start(0.0, 1)
    for now in (0.5, 1.0, 1.5):
        clock = RankClock(steps=int(steps * now / 1.5), age_s=0.01, slowest_s=slowest_s)
        watch.observe(now, [RankSample(rank=0, local_rank=0, pid=1, moved_age_s=0.01, clock=clock)])
        assert not watch.tick(now)
    watch.note_findings([device_failed()])
    for tenths in range(16, 40):
        now = tenths / 10
        stands = RankClock(steps=steps, age_s=now - 1.49, slowest_s=slowest_s)
        watch.observe(now, [RankSample(rank=0, local_rank=0, pid=1, moved_age_s=now - 1.49, clock=stands)])
        notices += [(now - 1.49, one.report) for one in watch.tick(now) if isinstance(one, Confirmed)]
    if within_s is None:
        assert not notices
        return
    ((after_s, report),) = notices
    assert (report.kind, report.early, report.ranks) == ("device", True, (0,))
    assert within_s[0] <= after_s <= within_s[1]


def device_failed() -> Finding:
    return Finding(
        rule="xid",
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        confidence=0.9,
        scope="gpu",
        severity="fatal",
        evidence=Evidence(text="NVRM: Xid 79", source="kernel"),
        rank=0,
        outlook="fails",
    )
