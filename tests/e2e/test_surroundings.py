"""Machines as they are: a full disk, a user without privileges."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow]

Supervise = Callable[..., Any]
NOBODY = 65534


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is full after some ten checkpoints."""
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(where)], check=True, timeout=10)
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=10)


def test_a_full_disk(small_disk: Path, supervise: Supervise) -> None:
    """The run waits, says why, and goes on once there is space: it neither fails nor spends its budget."""
    job = supervise("plain", out=small_disk)
    job.wait_shown("(?i)no space|disk.*full", 60)
    job.wait_shown("disk_full|(?i)(free|make).*space", 30)
    assert job.front.poll() is None, "it gave up"
    steps = sorted(small_disk.glob("step-*.pt"), key=lambda path: path.stat().st_mtime)
    for path in steps[:-1]:
        path.unlink()
    job.succeeds(90)
    assert {i["verdict"]["failure_class"] for i in job.incidents()} == {"disk_full"}


@pytest.fixture
def nobodys() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ub-nobody-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("rig", ["segfault@12:0", "sleep@14:1"])
def test_an_ordinary_user(nobodys: Path, supervise: Supervise, rig: str) -> None:
    """Everything works but what needs root, which is said once."""
    job = supervise(
        "plain",
        rig=rig,
        folder=nobodys,
        owner=NOBODY,
        prefix=["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"],
        env={"HOME": str(nobodys), "TMPDIR": "/tmp"},
    )
    job.succeeds()
    (incident,) = job.incidents()
    assert [c["rank"] for c in incident["verdict"]["culprits"]] == [int(rig[-1])]
