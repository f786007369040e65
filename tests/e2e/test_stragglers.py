"""A rank that is slow, told while the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.lasts(190)
def test_a_rank_that_the_others_wait_for(supervise: Supervise) -> None:
    job = supervise("uneven", nproc=4, steps=5000, pace=0.2)
    shown = job.wait_shown(r"rank 3 \(\S+\) holds the others up: (\d+) % of every step since", within_s=540)
    assert 16 <= int(shown[1]) <= 42  # 26 by what the script does
    status = job.told("status")
    assert status["stragglers"]["ranks"] == [3]
    assert (status["state"], status["restarts"], job.incidents()) == ("RUNNING", 0, [])
    job.ask("stop", "--yes")
    assert job.code() == 143
