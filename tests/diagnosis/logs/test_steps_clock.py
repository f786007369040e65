"""The run's step from what the output tells and what the step clock counts."""

from __future__ import annotations

import random

import pytest

from diagnosis.logs.steps import StepMatch, match_steps


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        ([(1, 1), (2, 2), (3, 3)], StepMatch(1, 1, 0)),
        ([(1, 0), (2, 1), (3, 2)], StepMatch(1, 1, -1)),  # it counts from 0
        ([(10, 110), (20, 120), (30, 130)], StepMatch(1, 1, 100)),  # it has resumed
        ([(10, 10), (23, 20), (30, 30), (41, 40)], StepMatch(1, 1, 0)),  # read a little late
        ([(13, 10), (22, 20), (31, 30)], StepMatch(1, 1, -1)),
        ([(10, 10), (19, 20), (29, 30), (39, 40)], StepMatch(1, 1, 1)),  # the scaler has skipped one
        ([(1, 4), (2, 8), (3, 12)], StepMatch(1, 4, 0)),  # batches are counted, and four make a step
        ([(5, 1), (10, 2), (15, 3)], StepMatch(5, 1, 0)),  # five steps of the critic for one of the generator
        ([(1, 1), (2, 2)], None),
        ([], None),
        ([(5, 1), (5, 2), (5, 3)], None),  # an optimizer of which the clock does not know
        ([(1, 7), (2, 7), (3, 7)], None),
        ([(10, 10), (20, 5), (30, 1)], None),
        ([(10, 1000), (20, 3500), (30, 9000)], None),  # tokens, of sequences that are packed
        ([(10, 1), (24, 11), (38, 21)], None),  # 1.4 for one: nothing that is known
        ([(1, 1000), (2, 2000), (3, 3000)], None),  # samples
    ],
)
def test_counts_and_told_steps(pairs: list[tuple[int, int]], found: StepMatch | None) -> None:
    assert match_steps(pairs) == found


@pytest.mark.parametrize(
    ("one", "count", "step"),
    [
        (StepMatch(1, 1, 100), 37, 137),
        (StepMatch(5, 1, 0), 14, 2),
        (StepMatch(5, 1, 0), 15, 3),
        (StepMatch(1, 4, 2), 3, 14),
    ],
)
def test_a_step_from_a_count(one: StepMatch, count: int, step: int) -> None:
    assert one.step(count) == step


@pytest.mark.parametrize("seed", range(20))
def test_lines_that_are_read_late_are_right_once_one_was_read_in_time(seed: int) -> None:
    random_ = random.Random(seed)
    base = random_.randrange(10_000)
    made = sorted(random_.sample(range(1, 2000), 20))
    pairs = [(count + random_.randrange(30), base + count) for count in made]
    pairs.insert(10, (made[9], base + made[9]))
    found = match_steps(sorted(pairs, key=lambda pair: pair[1]))
    assert found == StepMatch(1, 1, base)
