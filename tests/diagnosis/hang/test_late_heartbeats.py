"""A heartbeat that was long on its way is no sign of progress: ages in it are those of when it was sent."""

from __future__ import annotations

import pytest

from diagnosis.hang.watch import Cleared, HangWatch, Silent, Suspected
from diagnosis.signals import Frame, RankSample, RankStack

STOOD_AT = 60.0


def samples(at: float) -> list[RankSample]:
    """Of both ranks at this time: a step each half second, then rank 1 stands and rank 0 waits for it."""
    moved_at = min(at - at % 0.5, STOOD_AT)
    count, age = int(moved_at * 2), round(at - moved_at, 3)
    ages = {"local_rank": 0, "pid": 7, "state": "S", "moved_age_s": age, "beat_age_s": 0.1}
    ahead = at > STOOD_AT
    return [
        RankSample(rank=0, step=count, groups={"0": (count + ahead, count)}, waiting_s=age if ahead else None, **ages),
        RankSample(rank=1, groups={"0": (count, count)}, **ages),
    ]


STACKS = [
    RankStack(rank=rank, sample=sample, frames=(Frame(function=function, file="train.py", line=7),))
    for sample in (0, 1)
    for rank, function in ((0, "all_reduce"), (1, "step"))
]


@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.3, 0.9])
def test_the_one_with_the_evidence_is_late_and_the_silence_is_told_with_it(late_s: float) -> None:
    """It goes out right behind another, and what is in it takes its time: 9.2 s instead of 4.6, now and then."""
    watch = HangWatch()
    watch.start(0.0, 1)
    told: list[tuple[float, object]] = []
    asked_at = sent_at = 0.0
    for tick in range(1, 1500):
        now = tick / 20
        if now >= sent_at + 1.0:
            sent_at = now
            watch.observe(now, samples(now))
        if asked_at and sent_at >= asked_at + 1.2 and now >= sent_at + 0.05 + late_s - 0.001:
            watch.note_stacks(now, STACKS)
            watch.observe(now, samples(sent_at + 0.05))
            asked_at = now + 1.8
        notices = watch.tick(now)
        told += [(now, notice) for notice in notices]
        if any(isinstance(notice, Suspected) for notice in notices):
            asked_at = now
        if any(isinstance(notice, Silent) for notice in notices):
            break
    assert not any(isinstance(notice, Cleared) for _, notice in told)
    at, last = told[-1]
    assert isinstance(last, Silent)
    assert (last.report.kind, last.report.ranks, last.report.place) == ("missing", (1,), "step (train.py:7)")
    assert at - STOOD_AT < 6.0
