"""Machines as they are: a full disk, a user without privileges."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
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
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(where)], check=True, timeout=10)
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=10)


def test_a_full_disk(small_disk: Path, supervise: Supervise) -> None:
    """The run waits, says why, and goes on by itself once there is space."""
    job = supervise("plain", out=small_disk)
    job.wait_shown("disk_full.*: .*No space left")
    assert job.front.poll() is None, "it gave up"
    steps = sorted(small_disk.glob("step-*.pt"), key=lambda path: path.stat().st_mtime)
    for path in steps[:-1]:
        path.unlink()
    job.succeeds()
    assert {i["verdict"]["failure_class"] for i in job.incidents()} == {"disk_full"}


def as_nobody() -> list[str]:
    """What runs a command as an ordinary user. Where only root may reach our Python, in a root folder of its own."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]
    base = Path(sys.base_prefix)
    closed = next((p for p in reversed(base.parents) if not p.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        return user
    script = (
        'set -e; keep=$(mktemp -d); mount --bind "$1" "$keep"; mount -t tmpfs -o mode=755 tmpfs "$2"; '
        'mkdir -p "$1"; mount --bind "$keep" "$1"; umount "$keep"; rmdir "$keep"; shift 2; exec "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(base), str(closed), *user]


@pytest.fixture
def nobodys() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ub-nobody-"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_an_ordinary_user(nobodys: Path, supervise: Supervise) -> None:
    """Everything works but what needs root, which is said once."""
    job = supervise(
        "plain",
        rig="segfault@12:0,relock@28:1",
        folder=nobodys,
        owner=NOBODY,
        prefix=as_nobody(),
        env={"HOME": str(nobodys), "TMPDIR": "/tmp", "UNBROKEN_KERNEL_LOG": "/dev/kmsg"},
    )
    job.succeeds()
    assert [[c["rank"] for c in one["verdict"]["culprits"]] for one in job.incidents()] == [[0], [1]]
