"""Ranks that wait for data are told after a minute and a half, and again when it is over."""

from __future__ import annotations

import pytest

from diagnosis.input_waits import InputWait, InputWatch
from diagnosis.signals import RankClock, RankSample


def samples(*shares: float | None) -> list[RankSample]:
    return [
        RankSample(rank=rank, local_rank=rank, pid=rank + 1, clock=RankClock(steps=9, input_share=share))
        for rank, share in enumerate(shares)
    ]


def watch(*minutes: tuple[float | None, ...]) -> list[InputWait]:
    """Each row of shares lasts for two minutes."""
    one, told, now = InputWatch(), [], 0.0
    for shares in minutes:
        for _ in range(24):
            now += 5.0
            one.observe(samples(*shares))
            found = one.tick(now)
            told += [found] if found is not None else []
    return told


@pytest.mark.parametrize(
    ("minutes", "told"),
    [
        ([(0.38, 0.35, 0.1)], [InputWait(0.38, (0, 1), 2, 0.0)]),
        ([(0.1, 0.05), (0.0, 0.45)], [InputWait(0.45, (1,), 1, 120.0)]),
        ([(0.15, 0.19)], []),
        ([(None, None)], []),
        ([()], []),
        ([(0.4, 0.4), (0.15, 0.1), (0.02, 0.01)], [InputWait(0.4, (0, 1), 2, 0.0), InputWait()]),
        ([(0.3,), (0.8,)], [InputWait(0.3, (0,), 1, 0.0), InputWait(0.8, (0,), 1, 0.0)]),
    ],
)
def test_waits(minutes: list[tuple[float | None, ...]], told: list[InputWait]) -> None:
    assert watch(*minutes) == told


def test_of_many_ranks_few_are_named() -> None:
    (told,) = watch((0.5,) * 40)
    assert (told.ranks, told.many) == (tuple(range(16)), 40)


def test_a_moment_is_no_state_and_an_attempt_begins_anew() -> None:
    one = InputWatch()
    for now, share in [(30.0, 0.5), (60.0, 0.5), (90.0, 0.0), (120.0, 0.5), (150.0, 0.5)]:
        one.observe(samples(share))
        assert one.tick(now) is None
    one.start(150.0)
    assert one.tick(180.0) is None
