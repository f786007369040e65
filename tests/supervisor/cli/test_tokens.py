"""`unbroken token`, and what its tokens let the other commands do, with the real controller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.controller.main import read_controller_file

REPOSITORY = Path(__file__).parents[3]


def unbroken(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UNBROKEN")}
    return subprocess.run(
        [sys.executable, "-m", "supervisor.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=kept | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
        timeout=60,
    )


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A job whose controller runs."""
    folder = tmp_path / "job"
    folder.mkdir()
    place = tempfile.mkdtemp(prefix="ub", dir="/tmp")
    argv = [sys.executable, "-m", "supervisor.controller.main", "--job-dir", str(folder), "--socket", f"{place}/s"]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL, cwd=REPOSITORY)
    deadline = time.monotonic() + 60
    while read_controller_file(folder) is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield folder
    process.kill()
    process.wait(30)
    Path(place, "s").unlink(missing_ok=True)
    Path(place).rmdir()


@pytest.mark.slow
def test_a_token_is_made_used_listed_and_withdrawn(job: Path, tmp_path: Path) -> None:
    made = unbroken("token", "--role", "read", "--name", "team\x1b[31m A", "--job-dir", str(job), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (tmp_path / "mine").write_text(made.stdout)
    (tmp_path / "mine").chmod(0o600)
    found = read_controller_file(job)
    assert found is not None
    here = ("--controller", found.address, "--token-file", str(tmp_path / "mine"), "--job-dir", str(job))
    assert json.loads(unbroken("status", "--json", *here, cwd=tmp_path).stdout)["controller"]["epoch"] == 1
    denied = unbroken("pause", *here, cwd=tmp_path)
    assert (denied.returncode != 0, "`operate`" in denied.stderr) == (True, True)
    assert unbroken("pause", "--dry-run", *here, cwd=tmp_path).returncode == 0
    assert unbroken("token", "--role", "admin", *here, cwd=tmp_path).returncode != 0, "it makes no other tokens"
    (grant,) = json.loads(unbroken("token", "--json", "--job-dir", str(job), cwd=tmp_path).stdout)["grants"]
    assert (grant["role"], grant["uid"], grant["name"].isprintable()) == ("read", None, True)
    assert unbroken("token", "--withdraw", grant["id"], "--job-dir", str(job), cwd=tmp_path).returncode == 0
    assert unbroken("token", "--withdraw", grant["id"], "--job-dir", str(job), cwd=tmp_path).returncode != 0
    deadline = time.monotonic() + 60
    while unbroken("status", *here, cwd=tmp_path).returncode == 0:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "words",
    [
        ("--name", "x"),
        ("--role", "root"),
        ("--role", "read", "--withdraw", "00000001"),
        ("--role", "operate", "--user", "*"),
        ("--role", "alerts", "--user", "0"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    from click.testing import CliRunner

    from supervisor.cli.main import main

    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "journal.000001.jsonl").write_text("")
    assert CliRunner().invoke(main, ["token", "--job-dir", str(folder), *words]).exit_code == 2
    assert not (folder / "access").exists()
