"""A loss that goes wrong at one place in the data, with a real torchrun: taken back, data left out, trained past."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]
PACE = {"steps": 230, "pace": 0.02, "nproc": 1}
ENFORCE = {"UNBROKEN_LOSS_GUARD": "enforce"}


def ends_sound(job: Any) -> None:
    assert job.code() == 0
    assert (job.out / "final.bin").read_bytes() == b"sound"


def aside(job: Any) -> list[str]:
    return sorted(path.name for path in Path(job.out).glob(".unbroken-set-aside/*.safetensors"))


def test_a_spike_is_taken_back_and_its_data_left_out(supervise: Supervise) -> None:
    job = supervise("spiky", env=ENFORCE, **PACE)
    ends_sound(job)
    incidents = job.incidents()
    assert [one["trigger"] for one in incidents] == ["loss"], incidents
    incident = incidents[0]
    assert incident["verdict"]["failure_class"] == "loss_spike_or_nan"
    assert incident["plan"]["skip_batches"] > 0
    resumed = job.wait_shown(r"resumed step_(\d+).safetensors, (\d+) batches")
    assert int(resumed[1]) <= 80, "with a margin before step 100"
    assert int(resumed[2]) > 0
    assert "step_000100.safetensors" in aside(job), "moved, not deleted"


@pytest.mark.slow
def test_the_same_spike_again_and_again_is_left_to_a_person(supervise: Supervise) -> None:
    job = supervise("spiky", "--stubborn", env=ENFORCE, **PACE | {"steps": 1000})
    job.wait_shown(r"No restart \(loss.guard\)", 150)
    first, second, third = job.incidents()
    assert min(first["plan"]["skip_batches"], second["plan"]["skip_batches"]) > 0
    assert (third["trigger"], third["plan"]["kind"]) == ("signal", "ignore"), "it trains on"
    assert job.told("status")["restarts"] == 2
    job.ask("rollback", "--undo", "--yes", "-m", "I want them back")
    job.wait_shown("Both are kept|was put back from")  # the run has written some of them again
    job.ask("stop", "--yes")
    assert job.code() == 143


@pytest.mark.slow
def test_nan_that_the_script_tells_without_a_word(supervise: Supervise) -> None:
    job = supervise("spiky", "--told", "--nan", env=ENFORCE, **PACE)
    ends_sound(job)
    taken_back = [one for one in job.incidents() if one["trigger"] == "loss"]
    assert len(taken_back) == 1
    assert taken_back[0]["plan"]["rollback"]["kind"] == "bad_numbers"


def test_recommend_only_tells_and_an_operator_does_it(supervise: Supervise, tmp_path: Path) -> None:
    """The script waits at step 400: on a busy machine it would be at its end before all commands are."""
    job = supervise("spiky", **PACE | {"steps": 500}, env={"RIG_HOLD": f"400:{tmp_path / 'go-on'}"})
    told = job.wait_shown(r"`unbroken rollback (\d+) --skip (\d+)`")
    assert job.told("status")["attempt"] == 1, "it does nothing"
    assert "known steps" in job.ask("rollback", "7", "--dry-run", check=False)
    would = job.told("rollback", "--dry-run")
    assert re.search(r"back to step \d+ .* lost", would["would"])
    assert would["interrupts"]
    assert "give --yes" in job.ask("rollback", check=False)
    job.ask("rollback", told[1], "--skip", told[2], "--yes")
    job.wait_shown(f"resumed step_{int(told[1]):06d}.safetensors, {told[2]} batches")
    moved = aside(job)
    assert moved
    # Back to before the rollback, while the script has not come so far again.
    job.ask("rollback", "--undo", "--yes")
    job.wait_shown(f"resumed {moved[-1]}, 0 batches")
    assert moved[-1] not in aside(job)
    job.ask("rollback", told[1], "--skip", told[2], "--yes")
    (tmp_path / "go-on").touch()
    ends_sound(job)
    assert "rollback --undo" in job.ask("timeline")
