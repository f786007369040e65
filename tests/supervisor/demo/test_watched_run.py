"""Watched runs of real processes."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Evidence
from diagnosis.taxonomy import FailureClass
from recovery.policy import Plan
from supervisor.demo.demo import Show
from supervisor.demo.watched_run import WatchedRun
from supervisor.errors import RunFailed
from supervisor.view import IncidentView, utc

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


# ----- what the viewer is shown, in a terminal and in a pipe -----


INCIDENT = IncidentView(
    id="i-1",
    trigger="exit",
    attempt=1,
    opened_at=utc(1_769_860_800.0),
    closed_at=utc(1_769_860_801.0),
    what="rank 1 on n1 ended by signal 9",
    verdict=Verdict(
        failure_class=FailureClass.WORKER_CRASH,
        culprits=(Culprit(rank=1),),
        confidence=0.7,
        why="rank 1 was killed",
        action="restart",
        evidence=(Evidence(text="rank 1 was killed by SIGKILL\x1b[2J"),),
    ),
    plan=Plan(kind="restart", why="a restart may cure it"),
    next_attempt=2,
    seconds={"detect": 0.01, "diagnose": 0.1, "first_step": 0.25},
)


def shown(terminal: bool, draw: Any) -> str:
    out = io.StringIO()
    draw(Show(Console(file=out, force_terminal=terminal, width=120, color_system=None, legacy_windows=False)))
    return out.getvalue()


def test_a_terminal_sees_verdict_evidence_deed_and_seconds() -> None:
    text = shown(True, lambda show: show.incident(INCIDENT, "step-20.pt", ["step-30.pt: incomplete"]))
    for part in (
        "incident i-1",
        "worker_crash (70%): rank 1 was killed",
        "· rank 1 was killed by SIGKILL",
        "moved aside step-30.pt: incomplete; restart: a restart may cure it, from step-20.pt",
        "detect 0.01 + diagnose 0.10 + first step 0.25 = 0.36 s",
    ):
        assert part in text
    assert "\x1b[2J" not in text, "what a log says never steers the terminal"


def test_a_pipe_gets_one_line() -> None:
    text = shown(False, lambda show: show.incident(INCIDENT, "step-20.pt", []))
    assert text.count("\n") == 1
    assert "i-1: worker_crash (70%): rank 1 was killed; restart: a restart may cure it, from step-20.pt;" in text


def test_unequal_weights_are_said_aloud() -> None:
    assert "NOT EQUAL" in shown(False, lambda show: show.proof("a" * 64, "b" * 64))
    assert "equal, bit for bit" in shown(False, lambda show: show.proof("a" * 64, "a" * 64))
