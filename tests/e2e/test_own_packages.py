"""A user's repository with names like ours, in the working folder and in PYTHONPATH: each side imports its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

UNBROKEN = str(Path(sys.executable).with_name("unbroken"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
THEIRS = """
import os, sys
with open(os.path.join(os.environ["SEEN"], f"{__name__}-{os.getpid()}"), "w") as file:
    file.write(" ".join(sys.orig_argv))
MINE = "theirs"
"""
OTHER_PYTHONS = 'raise ImportError("made for another Python")\n'
TRAIN = """
import os, signal, sys, time
import diagnosis, recovery, supervisor
from unbroken import snapshot, worker
assert "recovery.worker" not in sys.modules and snapshot.worker is worker
worker.heartbeat(7)
print("rank", os.environ["RANK"], diagnosis.MINE, recovery.MINE, supervisor.MINE, flush=True)
if os.environ["UNBROKEN_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1.5)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repo = tmp_path / "repo"
    for package in ("recovery", "diagnosis"):
        (repo / package).mkdir(parents=True)
        (repo / package / "__init__.py").write_text(THEIRS)
    (repo / "supervisor.py").write_text(THEIRS)
    (repo / "train.py").write_text(TRAIN)
    (repo / "dmesg.txt").write_text("NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n" * 3)
    site = repo / "site"
    site.mkdir()
    for name in ("msgspec", "click", "aiohttp", "rich", "psutil", "h11"):
        (site / f"{name}.py").write_text(OTHER_PYTHONS)
    (tmp_path / "seen").mkdir()
    return repo


@pytest.mark.slow
def test_each_side_imports_its_own(repository: Path) -> None:
    seen = repository.parent / "seen"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(["", str(repository), "site"]),
        "SEEN": str(seen),
        "UNBROKEN_LOCAL_DIR": str(repository.parent / "local"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [UNBROKEN, *arguments], cwd=repository, env=env, capture_output=True, text=True, timeout=90, stdin=None
        )

    done = ask("run", "--name", "own", "--", TORCHRUN, "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("theirs theirs theirs") == 4, done.stdout + done.stderr
    strangers = [p.read_text() for p in seen.iterdir() if "train.py" not in p.read_text()]
    assert not strangers, "processes of ours imported the user's modules"
    for entry in seen.iterdir():
        entry.unlink()

    status = ask("status", "--json", "--job-dir", "unbroken-jobs/own")
    assert json.loads(status.stdout)["restarts"] == 1, status.stderr
    assert json.loads(status.stdout)["step"] == 7, "told by our worker, beside their package `recovery`"
    checked = ask("check", "--only", "memory_available", "--json", "--fresh")
    assert json.loads(checked.stdout)["schema"] == 1, checked.stderr
    assert not json.loads(checked.stdout)["problems"]
    diagnosed = ask("diagnose", "--json", "dmesg.txt")
    assert json.loads(diagnosed.stdout)["verdict"]["failure_class"] == "gpu_fallen_off_bus", diagnosed.stderr
    module = [sys.executable, "-m", "unbroken", "config", "--json"]
    config = subprocess.run(module, cwd=repository, env=env, capture_output=True, text=True, timeout=60)
    assert json.loads(config.stdout)["schema"] == 1, config.stderr
    assert not list(seen.iterdir())
