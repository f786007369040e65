"""What the viewer is shown, in a terminal and in a pipe."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Evidence
from diagnosis.taxonomy import FailureClass
from recovery.policy import Plan
from supervisor.demo.demo import Show
from supervisor.view import IncidentView, utc

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
