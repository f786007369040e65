"""What commands that misbehave lead to. (What real ones do: tests/slurm.)"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.schedulers.slurm import Slurm
from recovery.scheduling import Answer

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def make(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path)}, command_s=0.5)


def drain(slurm: Slurm, reason: str = "unbroken: why") -> Answer:
    return asyncio.run(slurm.drain("n1", reason))


def test_no_slurm_here(tmp_path: Path) -> None:
    answer = drain(Slurm({"PATH": str(tmp_path)}))
    assert (answer.outcome, answer.text) == ("unsupported", "sinfo cannot be started (No such file or directory)")


def test_a_command_that_hangs_is_killed_with_its_children(program: Program, slurm: Slurm, tmp_path: Path) -> None:
    program("sinfo", 'sleep 1000 & echo $! > "$HERE/child"; wait')
    began = time.monotonic()
    answer = drain(slurm)
    assert (answer.outcome, answer.text) == ("unavailable", "sinfo gave no answer within 0.5 s")
    assert time.monotonic() - began < 5
    child = (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_endless_output_is_cut(program: Program, slurm: Slurm) -> None:
    program("sinfo", "head -c 100000000 /dev/zero | tr '\\0' x; exit 1")
    answer = asyncio.run(Slurm({**slurm._environment}, command_s=30.0).drain("n1", "unbroken: x"))
    assert answer.outcome == "failed"
    assert len(answer.text) <= 300


@pytest.mark.parametrize(
    ("says", "outcome"),
    [
        ("slurm_update error: Invalid user id", "denied"),
        ("slurm_update error: Access/permission denied", "denied"),
        ("slurm_update error: Unable to contact slurm controller (connect failure)", "unavailable"),
        ("slurm_update error: Socket timed out on send/recv operation", "unavailable"),
        ("scontrol: error: If munged is up, restart with --num-threads=10", "unavailable"),
        ("Requested operation is presently disabled for job 12", "unsupported"),
        ("Job is pending execution for job 12", "already"),
        ("slurm_update error: Invalid node name specified", "failed"),
        ("", "failed"),
    ],
)
def test_words_of_slurm(program: Program, slurm: Slurm, says: str, outcome: str) -> None:
    program("sinfo", "echo 'idle|none'")
    program("scontrol", f"echo '{says}' >&2; exit 1")
    answer = drain(slurm)
    assert answer.outcome == outcome
    assert answer.text == (says or "it ended with code 1")


@pytest.mark.parametrize(
    ("stands", "outcome"),
    [
        ("mixed|none", "done"),
        ("down*|Not responding", "foreign"),
        ("drained|none", "foreign"),
        ("draining|unbroken: other", "already"),
        ("idle|unbroken: of long ago", "done"),
        ("idle|kept for maintenance", "foreign"),
        ("idle|none\nidle|none", "done"),
        ("", "failed"),
    ],
)
def test_what_stands_decides(program: Program, slurm: Slurm, stands: str, outcome: str) -> None:
    program("sinfo", f"printf '%s\\n' '{stands}'")
    program("scontrol", "exit 0")
    assert drain(slurm).outcome == outcome


def test_a_users_own_formats_do_not_reach_the_commands(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SINFO_FORMAT", "SQUEUE_FORMAT2", "SINFO_PARTITION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program("sinfo", 'if env | grep -q "^S[A-Z]*_FORMAT\\|^SINFO"; then exit 1; fi; echo "idle|none"')
    program("scontrol", "exit 0")
    assert drain(Slurm()).outcome == "done"


def test_requeued_but_not_changed_is_said(program: Program, tmp_path: Path) -> None:
    slurm = Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    program("squeue", "echo node7")
    program("scontrol", 'case "$1" in requeue) exit 0;; *) echo "$@" >&2; sleep 0.01; exit 1;; esac')
    answer = asyncio.run(slurm.requeue("12", ("n1", "n2")))
    assert answer.outcome == "done"
    change = "update JobId=12 StartTime=now+15 ExcNodeList=node7,n1,n2"
    assert answer.text.startswith(f"job 12 is requeued, but not changed: {change} {change}")


def test_what_follows_a_requeue_is_done_though_we_are_stopped(program: Program, tmp_path: Path) -> None:
    program("squeue", "true")
    program("scontrol", 'if [ "$1" = requeue ]; then : > "$HERE/requeued"; sleep 0.5; else echo "$@" > "$HERE/$1"; fi')
    slurm = Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path)})

    async def give_up() -> None:
        asking = asyncio.ensure_future(slurm.requeue("12", ("n1",)))
        while not (tmp_path / "requeued").exists():
            await asyncio.sleep(0.01)
        asking.cancel()

    asyncio.run(give_up())
    deadline = time.monotonic() + 5
    while not (tmp_path / "update").exists() or not (tmp_path / "update").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "ExcNodeList=n1" in (tmp_path / "update").read_text()


def test_a_job_is_named_by_its_number(slurm: Slurm) -> None:
    for name in ("", "1,2", "-a", "ALL", "1;2"):
        assert asyncio.run(slurm.requeue(name, ())).outcome == "failed"
    assert asyncio.run(slurm.requeue("1", ("node[1-3]",))).outcome == "failed"
