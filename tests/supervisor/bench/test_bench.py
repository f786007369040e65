"""The benchmarks, shortened; and their clocks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from supervisor.bench.recovery import process_created, unix_time
from supervisor.errors import RunFailed


def bench(*arguments: str, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "supervisor.cli.main", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_creation_of_a_process_is_known_to_10_ms() -> None:
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        after = time.monotonic()
        created = process_created(child.pid)
        child.communicate(b"\n", timeout=30)
    assert before - 0.02 < created < after + 0.02
    with pytest.raises(RunFailed, match="is gone"):
        process_created(child.pid)


def test_times_of_the_timeline_are_read() -> None:
    assert unix_time({"at": "2026-01-31T12:00:00.250Z"}) == pytest.approx(1769860800.25)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.lasts(45)
def test_thirty_kills_of_our_own_processes_change_nothing() -> None:
    found = bench("chaos", "--kills", "30", timeout_s=480)
    assert found["equal_weights"], found
    # One that was chosen may have died a moment ago, with the other, and is not there to be killed.
    assert found["kills"]["controller"] + found["kills"]["agent"] >= 25


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.lasts(50)
def test_recovery_is_measured_side_by_side() -> None:
    found = bench("recovery", "--repetitions", "1", timeout_s=280)
    ratios = {row["what"]: row["ratio"] for row in found["recovery"]}
    assert ratios["new_step"] < 0.5, found
    assert found["hang"].keys() == {"stop", "deadlock"}
