"""Steps and lost time that incidents tell, beside the truth: what the script itself wrote down of each step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]
Steps = dict[int, float]
"""Step -> when it was made."""


def attempts(rig: Path) -> list[Steps]:
    """What rank 0 of each attempt made, in order; attempts without a step left out."""
    found = []
    for path in rig.glob("steps-0-*"):
        pairs = (line.split() for line in path.read_text().splitlines())
        found.append({int(step): float(at) for step, at in pairs})
    return sorted(found, key=lambda steps: min(steps.values()))


def behind_s(job: Any) -> float:
    """How old the step is that `status` shows: since when a later one has been made. (0: none has.)"""
    shown = job.told("status")["step"]
    later = [at for step, at in attempts(job.rig)[-1].items() if step > shown]
    return max(0.0, time.time() - min(later)) if later else 0.0


def expect_exact(job: Any, of_attempts: int) -> None:
    """Each incident's step is the last that was made, its cost the time between the same step made twice."""
    truth, incidents = attempts(job.rig), job.incidents()
    assert len(truth) == of_attempts
    assert len(incidents) == of_attempts - 1
    for incident, before, after in zip(incidents, truth, truth[1:], strict=False):
        last = max(before)
        assert last - 1 <= incident["step"] <= last, incident  # killed between the line and the note
        again = min(step for step in after if step >= incident["step"])
        pace = (before[last] - min(before.values())) / max(1, last - min(before))
        lost_s = after[again] - before[incident["step"]] - (again - incident["step"]) * pace
        assert incident["lost_s"] == pytest.approx(lost_s, abs=1.5 + 0.2 * lost_s), (incident["id"], lost_s)


@pytest.mark.slow
@pytest.mark.lasts(45)
def test_steps_that_no_line_has_told_are_lost_too(supervise: Supervise) -> None:
    """A line for every seventh step; the step clock tells the others, and where the run was when it was killed."""
    job = supervise("ddp", "--save-every", "20", "--show-every", "7", steps=400, pace=0.2)
    killed_at = random.randrange(45, 60)
    job.until(lambda: attempts(job.rig) and max(attempts(job.rig)[0]) >= killed_at, 180, "some step")
    assert job.told("status")["step_from"] == "clock"
    job.kill(1)
    lost = int(job.wait_shown(r"recovered .* (\d+) steps? lost", 180)[1])
    before, after = attempts(job.rig)[:2]
    truth = max(before) - min(after) + 1
    assert truth <= lost <= truth + 1, "rank 0 may have stepped when its last collective failed"


@pytest.mark.slow
@pytest.mark.lasts(45)
def test_a_killed_keeper_and_a_killed_rank_cost_what_was_trained_again(supervise: Supervise) -> None:
    job = supervise("plain", "--save-every", "20", steps=70, pace=0.2)
    job.wait_step(20, 120)
    assert sorted(behind_s(job) for _ in range(5))[2] < 6.0, "a second, where the machine has time"
    job.wait_step(36, 120)
    before = set(job.ranks().values())
    job.process("keeper").kill()
    job.until(lambda: not set(job.ranks().values()) & before, 5, "the orphans' end")
    job.until(lambda: len(attempts(job.rig)) == 2, 60, "a second attempt")
    job.until(lambda: max(attempts(job.rig)[1]) >= 58, 120, "step 58 of it")
    job.kill(1)
    job.succeeds(200)
    expect_exact(job, 3)
    assert job.told("status")["lost_s"] == pytest.approx(sum(one["lost_s"] for one in job.incidents()), abs=0.1)


@pytest.mark.lasts(60)
@pytest.mark.slow
def test_a_torn_save_costs_the_training_since_the_one_before(supervise: Supervise) -> None:
    """nanoGPT saves the step that it resumed from once more: that is no progress."""
    job = supervise("nanogpt", "--eval_interval=60", rig="tear@120:0", steps=150, pace=0.2)
    job.succeeds(240)
    expect_exact(job, 2)
