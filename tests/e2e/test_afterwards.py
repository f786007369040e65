"""After the end, a job can be asked what happened and why; wrong commands are refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]
UNBROKEN = str(Path(sys.executable).with_name("unbroken"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


def test_an_exception_and_what_is_told_of_it(supervise: Supervise) -> None:
    job = supervise("plain", rig="exception@12:0")
    job.succeeds()
    assert "KeyError: 'momentum'" in job.shown(), "the traceback belongs on the terminal, as under torchrun"

    (incident,) = job.incidents()
    assert incident["id"] == "i-1"
    assert incident["verdict"]["failure_class"] == "script_error"
    assert [c["rank"] for c in incident["verdict"]["culprits"]] == [0]
    assert incident["closed_at"] is not None
    assert incident["plan"]["kind"] == "restart"

    status = job.told("status")
    assert status["state"] == "SUCCEEDED"
    assert status["attempt"] == 2
    assert status["restarts"] == 1
    assert 0 < status["ettr"] < 1

    why = job.ask("why", "i-1")
    assert "momentum" in why
    assert "rigging.py" in why, "the line of code is what a user wants to see"
    assert job.told("why", "i-1")["schema"] == 1
    timeline = job.ask("timeline")
    assert "rank 0" in timeline
    assert "attempt 2" in timeline
    assert job.told("timeline")["schema"] == 1
    for command in ("status", "incidents"):
        assert "script_error" in job.ask(command)

    for journal in job.job_dir.glob("journal.*.jsonl"):
        done = subprocess.run([UNBROKEN, "replay", str(journal)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not job.kin(), "something of the job is left"


@pytest.mark.parametrize(
    ("code", "command", "says"),
    [
        (78, ["--", TORCHRUN, "absent.py"], "absent.py"),
        (78, ["--", "accelerate", "launch", "train.py"], "accelerate"),
        (78, ["--", TORCHRUN, "--nnodes", "two", "train.py"], "--nnodes"),
        (78, ["--", "train.py"], "train.py"),
        (2, ["--job-dir", "x"], "COMMAND"),
        (2, ["--max-restarts", "many", "--", TORCHRUN, "train.py"], "max-restarts"),
    ],
)
def test_wrong_commands(tmp_path: Path, code: int, command: Sequence[str], says: str) -> None:
    """Code 78 (2 for options of ours that cannot be read) and one sentence that names what is wrong."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = subprocess.run(
        [UNBROKEN, "run", *command], cwd=tmp_path, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "options", "says"),
    [
        (2, ["--no-such-option"], "unrecognized arguments: --no-such-option"),
        pytest.param(1, ["--log-dir", "train.py/logs", "--tee", "3"], "NotADirectoryError", marks=pytest.mark.slow),
    ],
)
def test_torchruns_own_error_ends_the_run_as_torchrun_would(
    tmp_path: Path, code: int, options: Sequence[str], says: str
) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    command = [UNBROKEN, "run", "--name", "own", "--", TORCHRUN, "--nproc-per-node", "2", *options, "train.py"]
    env = {**os.environ, "UNBROKEN_LOCAL_DIR": str(tmp_path / "local")}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count(says) == 1, done.stderr
    ask = [UNBROKEN, "incidents", "--json", "--job-dir", str(tmp_path / "unbroken-jobs/own")]
    (incident,) = json.loads(subprocess.run(ask, capture_output=True, text=True, timeout=60).stdout)["incidents"]
    assert incident["plan"]["kind"] == "stop"
    assert incident["attempt"] == 1


def test_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "unbroken.toml").write_text("max_restart = 3\n")
    done = subprocess.run(
        [UNBROKEN, "run", "--", TORCHRUN, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 78, done.stderr
    assert "max_restart" in done.stderr


KEPT = """
import os
class Kept:
    def __del__(self, write=os.write):
        write(2, b"freed\\n")
kept = Kept()
kept.me = kept
def load():
    pass
"""


@pytest.mark.slow
def test_what_libraries_hold_is_freed_at_the_end_as_under_torchrun(tmp_path: Path) -> None:
    """Else some print what they call leaks (nanobind). torch loads this one when it is imported itself."""
    site = tmp_path / "site"
    (site / "kept-1.dist-info").mkdir(parents=True)
    (site / "kept-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: kept\nVersion: 1\n")
    (site / "kept-1.dist-info/entry_points.txt").write_text("[torch.backends]\nkept = kept:load\n")
    (site / "kept.py").write_text(KEPT)
    (tmp_path / "train.py").write_text("import torch\n")
    local = str(tmp_path / "local")
    env = {**os.environ, "PYTHONPATH": str(site), "UNBROKEN_LOCAL_DIR": local}
    printed = []
    for prefix in ([], [UNBROKEN, "run", "--quiet", "--"]):
        command = [*prefix, TORCHRUN, "--nproc-per-node", "1", "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        printed.append(done.stderr.count("freed"))
        assert done.returncode == 0, done.stderr
    assert printed == [2, 2], "the rank's and the launcher's"


HELD_TO_THE_END = """
import gc, select, socket, torch, torch.distributed as dist
gc.unfreeze()
owners = [one for one in gc.get_objects() if isinstance(one, (socket.socket, select.epoll))]
assert not [one for one in owners if one.fileno() >= 0], owners
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(20):
    model(torch.ones(4, 64)).mean().backward()
"""


@pytest.mark.slow
def test_a_process_group_that_nobody_destroys_ends_well(tmp_path: Path) -> None:
    """Objects of the keeper owned numbers of descriptors that gloo had by then, and closed them at the end: SIGABRT."""
    (tmp_path / "train.py").write_text(HELD_TO_THE_END)
    env = {**os.environ, "UNBROKEN_LOCAL_DIR": str(tmp_path / "local")}
    command = [UNBROKEN, "run", "--max-restarts", "0", "--", TORCHRUN, "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_disabled_it_runs_the_command_untouched(tmp_path: Path) -> None:
    command = [
        UNBROKEN,
        "run",
        "--",
        sys.executable,
        "-c",
        "import os; print(sorted(k for k in os.environ if 'UNBROKEN_' in k))",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=20, env={**os.environ, "UNBROKEN_DISABLE": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.replace("'", '"')) == ["UNBROKEN_DISABLE"]
    assert not (tmp_path / "unbroken-jobs").exists()
