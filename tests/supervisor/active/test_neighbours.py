"""Who else computes on a node: ranks are found, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor.active.neighbours import SHOWN, ranks_here, why_occupied

RANK = {"RANK": "3", "WORLD_SIZE": "8"}


@pytest.fixture
def process(tmp_path: Path) -> Any:
    """Adds a process to a folder in place of /proc."""

    def made(pid: int, environment: dict[str, str], maps: str = "7f00 r-xp /env/lib/libtorch_cpu.so\n") -> Path:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "environ").write_text("".join(f"{key}={value}\0" for key, value in environment.items()))
        (folder / "maps").write_text(maps)
        (folder / "comm").write_text("python\n")
        (folder / "stat").write_text(f"{pid} (python) S 1 1 1")
        return tmp_path

    return made


def test_a_rank_is_seen(process: Any) -> None:
    process(4711, RANK)
    process(4712, RANK, "7f00 r-xp /usr/bin/bash\n")
    process(4713, {"HOME": "/root"})
    proc = process(os.getpid(), RANK)
    (proc / "4714").mkdir()
    (words,) = ranks_here(proc)
    assert "4711" in words
    assert "rank 3 of 8" in words


def test_a_forked_rank_of_ours_is_seen(process: Any) -> None:
    """It has the environment of the keeper."""
    for pid, output in {4711: "/tmp/unbroken-0/job/n1/attempts/2/rank5.out", 4712: "/home/ann/rank5.out"}.items():
        proc = process(pid, {"HOME": "/root"})
        (proc / str(pid) / "fd").mkdir()
        (proc / str(pid) / "fd" / "1").symlink_to(output)
    (words,) = ranks_here(proc)
    assert "4711" in words
    assert "rank 5" in words


def test_only_some_are_named(process: Any) -> None:
    for pid in range(5000, 5000 + 3 * SHOWN):
        proc = process(pid, {**RANK, "RANK": "9" * 500})
    words = why_occupied({"GPU-1": "python, process 99"}, proc)
    assert "GPU-1" in words
    assert words.count("rank") == SHOWN - 1
    assert len(words) < 1000
    assert why_occupied({}, Path("/nowhere")) == ""


def test_a_real_process_with_a_rank_and_no_torch() -> None:
    words = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", words], env={**os.environ, **RANK}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as here:
        assert here.stdout is not None
        assert here.stdout.readline()
        assert not [one for one in ranks_here() if f"process {here.pid}," in one]
        here.communicate(b"\n")
