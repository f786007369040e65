"""A job whose ranks print secrets: nothing that we write or print has them, but for what the ranks wrote themselves."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

TRAINER = Path(__file__).parent / "trainers" / "leaky.py"
BIN = Path(sys.executable).parent
RANKS_OWN = ("rank*.out", "rank*.err", "rank*.error.json")
NEEDED = ("node.json",)
"""With the command as it has to run; the folder is its owner's only."""


@pytest.fixture
def secrets() -> dict[str, str]:
    found: dict[str, str] = runpy.run_path(str(TRAINER))["SECRETS"]
    return found


@pytest.fixture
def local() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ub-") as folder:
        yield Path(folder)


def told(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([str(BIN / "unbroken"), *arguments], capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def found_in(text: str, secrets: dict[str, str]) -> list[str]:
    return [name for name, value in secrets.items() if value in text]


@pytest.mark.slow
def test_secrets_that_ranks_print_stay_where_they_printed_them(
    tmp_path: Path, local: Path, secrets: dict[str, str]
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("UNBROKEN_", "TORCHELASTIC"))}
    env |= {"UNBROKEN_LOCAL_DIR": str(local), "LEAK_WANDB_API_KEY": secrets["wandb"]}
    job_dir = tmp_path / "job"
    command = [str(BIN / "unbroken"), "run", "--job-dir", str(job_dir), "--max-restarts", "0", "--"]
    command += [str(BIN / "torchrun"), "--nproc-per-node", "2", str(TRAINER), "--hub-token", secrets["option"]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path, env=env)
    assert ran.returncode != 0
    assert set(found_in(ran.stdout + ran.stderr, secrets)) == set(secrets), "the terminal shows what ranks print"

    ours = [line for line in ran.stderr.splitlines() if line.startswith("unbroken:")]
    assert any("Input/output error" in line for line in ours)
    assert found_in("\n".join(ours), secrets) == []
    at = ("--job-dir", str(job_dir))
    asked = [
        told(*words, *at, cwd=tmp_path) for words in (("why", "1"), ("why", "1", "--json"), ("status",), ("incidents",))
    ]
    asked += [told("timeline", "--all", *at, cwd=tmp_path), told("incidents", "--json", *at, cwd=tmp_path)]
    asked += [
        told("diagnose", str(path), how, cwd=tmp_path) for path, how in ((local, "--digest"), (job_dir, "--json"))
    ]
    assert "storage_error" in asked[0]
    for text in asked:
        assert found_in(text, secrets) == [], text
    files = [path for folder in (job_dir, local) for path in folder.rglob("*") if path.is_file()]
    assert any(path.match("evidence-*.json") for path in files)
    assert any(path.match("journal.*.jsonl") for path in files)
    for path in files:
        if not any(path.match(pattern) for pattern in (*RANKS_OWN, *NEEDED)):
            assert found_in(path.read_text(errors="replace"), secrets) == [], path
