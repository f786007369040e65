"""Watched runs of real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from supervisor.demo.watched_run import WatchedRun
from supervisor.errors import RunFailed

COUNT = "import time\nfor i in range(1, 4): print(f'step {i}/3', flush=True)\ntime.sleep(60)"


def test_lines_are_waited_for(tmp_path: Path) -> None:
    run = WatchedRun([sys.executable, "-c", COUNT], folder=tmp_path)
    try:
        third = run.wait_for_step(3, timeout_s=60)
        first, match = run.wait_for(r"step (\d)", timeout_s=1)
        assert (match[1], third.text) == ("1", "step 3/3")
        assert run.started < first.at <= third.at < time.monotonic()
        with pytest.raises(RunFailed, match=r"(?s)no line 'step 4' within .* step 3/3"):
            run.wait_for("step 4", timeout_s=0.05)
    finally:
        run.close()
    assert run.wait_for_end(60.0) == -signal.SIGTERM


def test_a_run_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    run = WatchedRun([sys.executable, "-c", "import sys; print('bad news'); sys.exit(3)"], folder=tmp_path)
    with pytest.raises(RunFailed, match=r"(?s)before its end.*bad news"):
        run.wait_for("good news", timeout_s=60)
    assert run.wait_for_end(60.0) == 3


def test_a_run_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    run = WatchedRun([sys.executable, "-c", deaf], folder=tmp_path)
    run.wait_for("deaf", timeout_s=60)
    run.close(grace_s=0.1)
    assert run.wait_for_end(60.0) == -signal.SIGKILL


def test_a_run_ends_with_the_process_that_watches_it() -> None:
    code = (
        "import pathlib, sys; from supervisor.demo.watched_run import WatchedRun\n"
        "child = 'import time; print(1, flush=True); time.sleep(60)'\n"
        "run = WatchedRun([sys.executable, '-c', child], folder=pathlib.Path())\n"
        "run.wait_for('1'); print(run.process.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        child = psutil.Process(int(demo.stdout.readline()))
        demo.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
