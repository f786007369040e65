"""`unbroken drain-requests`, as root's Epilog or HealthCheckProgram runs it, among files that users have made."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from supervisor.node_health.contract import ProbeContext

pytestmark = pytest.mark.root

USER = 65534
REASON = "unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=77/i-1 Xid 79"
SINFO = """case "$*" in
*--list-reasons*) cat "$HERE/drained" ;;
*) [ -s "$HERE/node" ] && cat "$HERE/node" || echo 'idle|none' ;;
esac"""
SCONTROL = """echo "$*" >> "$HERE/done"
case "$*" in
*State=DRAIN*) cat "$HERE/others" >> "$HERE/drained"
  date "+node2|drained|%Y-%m-%dT%H:%M:%S|unbroken:" >> "$HERE/drained"
  echo "drained|${*#*Reason=}" > "$HERE/node" ;;
esac"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """With a spool folder, and a Slurm that has job 77 of USER on this node."""
    programs = {"sinfo": SINFO, "scontrol": SCONTROL, "squeue": f"echo '77|{USER}'; echo '78|4242'; echo odd"}
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("drained", "others", "node", "done"):
        (tmp_path / name).touch()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o1733)
    return tmp_path


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(here: Path) -> Run:
    """What it says, and what was done to Slurm."""

    def run(*arguments: str, **environment: str) -> tuple[str, str]:
        env = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "HERE": str(here), **environment}
        command = (sys.executable, "-m", "supervisor.cli.main", "drain-requests")
        options = ("--spool", str(here / "spool"), "--node-name", "node2", *arguments)
        done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, ""), done
        return done.stderr, (here / "done").read_text()

    return run


def leave(here: Path, name: str = f"77.{USER}.json", owner: int = USER, **changes: Any) -> Path:
    boot_id = ProbeContext().boot_id
    good = {"schema": 1, "job": "77", "node": "node2", "reason": REASON, "boot_id": boot_id, "at": time.time()}
    path = here / "spool" / name
    path.write_bytes(msgspec.json.encode(good | changes))
    os.chown(path, owner, owner)
    return path


def stamp(ago_s: float, node: str) -> str:
    return time.strftime(f"{node}|drained|%Y-%m-%dT%H:%M:%S|unbroken:\n", time.localtime(time.time() - ago_s))


def test_the_request_of_a_job_on_this_node_is_carried_out_once(here: Path, run: Run) -> None:
    path = leave(here)
    said, done = run("--dry-run")
    assert ("it would be drained" in said, done, path.exists()) == (True, "", True)
    said, done = run()
    assert done == f"update NodeName=node2 State=DRAIN Reason={REASON}\n"
    assert not path.exists()
    assert run() == ("", done), "an administrator may have given it back since"


def test_an_epilog_knows_its_job_by_slurmd(here: Path, run: Run) -> None:
    (here / "squeue").write_text("#!/bin/sh\nexit 1\n")
    leave(here)
    assert run()[1] == ""
    assert run(SLURM_JOB_ID="77", SLURM_JOB_UID=str(USER))[1] != ""


def test_what_is_no_request_of_the_jobs_user_does_nothing_and_goes(here: Path, run: Run) -> None:
    secret = here / "secret"
    secret.write_text(leave(here).read_text())
    name = f"77.{USER}.json"
    path = here / "spool" / name

    def link() -> None:
        path.symlink_to(secret)

    def hard_link() -> None:
        leave(here, "own")
        os.link(here / "spool" / "own", path)

    for make in (
        lambda: leave(here, owner=4242),
        lambda: leave(here, owner=0),
        lambda: leave(here, node="node3"),
        lambda: leave(here, boot_id="before"),
        lambda: leave(here, reason="unbroken: operator job=77 by=ann why"),
        lambda: leave(here, reason=REASON + "x" * 100_000),
        lambda: os.mkfifo(path),
        link,
        hard_link,
    ):
        path.unlink(missing_ok=True)
        make()
        said, done = run()
        assert (done, f"the request {name} is ignored" in said) == ("", True)
        assert not os.path.lexists(path)
    assert secret.exists()
    leave(here, "79.65534.json", job="79")
    leave(here, "78.4242.json", owner=USER)
    assert run()[1] == "", "no job of this node, and not the job's user"
    assert (here / "spool" / "79.65534.json").exists()


@pytest.mark.parametrize("mode", [0o777, 0o730])
def test_a_folder_in_which_users_could_replace_files_is_not_used(here: Path, run: Run, mode: int) -> None:
    leave(here)
    (here / "spool").chmod(mode)
    said, done = run()
    assert ("sticky" in said, done) == (True, "")


def test_what_somebody_else_wrote_about_the_node_stands(here: Path, run: Run) -> None:
    path = leave(here)
    (here / "node").write_text("drained|disk swap\n")
    said, done = run()
    assert ("disk swap" in said, done, path.exists()) == (True, "", False)


def test_not_more_nodes_than_so_many_within_an_hour(here: Path, run: Run) -> None:
    path = leave(here)
    (here / "drained").write_text(stamp(60, "node7") + stamp(30, "node8"))
    said, done = run()
    assert ("2 nodes were drained within the hour" in said, done, path.exists()) == (True, "", True)
    assert run("--per-hour", "3")[1] != ""


def test_who_comes_last_steps_back(here: Path, run: Run) -> None:
    """Two others were drained at the same moment, between the look and the deed."""
    leave(here)
    (here / "others").write_text(stamp(2, "node0") + stamp(2, "node1"))
    said, done = run()
    assert "node2 is given back" in said
    assert [line.split()[2] for line in done.splitlines()] == ["State=DRAIN", "State=UNDRAIN"]


def test_a_site_without_the_folder_and_a_user_without_the_rights(here: Path, run: Run) -> None:
    assert run("--spool", str(here / "none")) == ("", "")
    command = ["setpriv", f"--reuid={USER}", sys.executable, "-m", "supervisor.cli.main", "drain-requests"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/").returncode != 0
