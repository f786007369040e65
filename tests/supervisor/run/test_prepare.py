from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from supervisor.config import RunSettings, Settings, read_plan
from supervisor.errors import LaunchRefused
from supervisor.files import Here
from supervisor.paths import start_time
from supervisor.run.prepare import Prepared, RunOptions, has_service, is_held, prepare, remove_old_jobs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch beside this Python")

TORCHRUN = ("torchrun", "--nproc-per-node", "2", "train.py")


@pytest.fixture
def local_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="ub"))
    monkeypatch.setenv("UNBROKEN_LOCAL_DIR", str(root))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


def given(*, spare: bool = False, **run: Any) -> RunOptions:
    """The options of a start with these settings of `[run]`."""
    return RunOptions(settings=Settings(run=RunSettings(**run)), spare=spare)


def prepared(
    cwd: Path, options: RunOptions | None = None, command: tuple[str, ...] = TORCHRUN, **environment: str
) -> Prepared:
    return prepare(options or given(node_name="n1"), command, {"PATH": os.environ["PATH"], **environment}, cwd)


@pytest.mark.usefixtures("local_root")
def test_the_plan_says_all_that_agent_and_keeper_need(cwd: Path) -> None:
    made = prepared(cwd, given(node_name="n1", checkpoint_dirs=("ckpt",), restart_args="--resume"), FOO="1")
    plan = read_plan(made.paths.plan)
    assert plan == made.plan
    assert made.job_dir.parent == cwd / "unbroken-jobs"
    assert made.job_dir.name.startswith("train-")
    assert plan.spec.name == made.job_dir.name
    assert (plan.spec.checkpoint_dirs, plan.spec.has_restart_args) == ((str(cwd / "ckpt"),), True)
    assert plan.launcher_argv[-2:] == ("--nproc-per-node=2", "train.py")
    assert plan.launcher_env["UNBROKEN_NODE"] == "n1"
    assert os.access(plan.launcher_env["PYTHON_EXEC"], os.X_OK)
    assert (plan.front_pid, plan.front_start_time) == (os.getpid(), start_time(os.getpid()))
    assert (made.keeper_env["FOO"], made.keeper_env["OMP_NUM_THREADS"]) == ("1", "1")
    assert made.runs_controller
    assert made.paths.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("local_root")
def test_a_plan_of_an_older_version_is_read(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front still runs when the agent is started again from a newer version."""
    made = prepared(cwd)
    old = {"kernel_log": "/log", "token_file": "/token", "controller": "http://n0:1", "restart_args": ["a b", "c"]}
    content = msgspec.json.decode(made.paths.plan.read_bytes())
    del content["settings"]
    made.paths.plan.write_bytes(msgspec.json.encode({**content, **old}))
    monkeypatch.setenv("UNBROKEN_METRICS", "false")
    read = read_plan(made.paths.plan)
    assert (read.settings.run.kernel_log, read.settings.run.token_file) == ("/log", "/token")
    assert (read.settings.run.controller, read.settings.run.restart_args) == ("http://n0:1", "'a b' c")
    assert not read.settings.metrics.enabled
    assert msgspec.structs.replace(read, settings=made.plan.settings) == made.plan


@pytest.mark.usefixtures("local_root")
def test_a_users_own_choices_win(cwd: Path) -> None:
    made = prepared(cwd, PYTHON_EXEC="/opt/wrapper", PYTHONPATH="/mine", OMP_NUM_THREADS="4")
    wrapper = Path(made.plan.launcher_env["PYTHON_EXEC"])
    assert "--program /opt/wrapper" in wrapper.read_text()
    assert made.plan.launcher_env["PYTHONPATH"].endswith(os.pathsep + "/mine")
    assert made.keeper_env["OMP_NUM_THREADS"] == "4"
    restarts = prepared(cwd, given(max_restarts=0), ("torchrun", "--max-restarts", "3", "train.py"))
    assert restarts.plan.spec.max_restarts == 0
    assert prepared(cwd, None, ("torchrun", "--max-restarts", "3", "train.py")).plan.spec.max_restarts == 3


@pytest.mark.usefixtures("local_root")
def test_a_program_that_is_no_python_is_run_by_the_stub(cwd: Path) -> None:
    made = prepared(cwd, None, ("torchrun", "--no-python", "sh", "-c", "true"))
    stub, *rest = made.plan.launcher_argv[-5:]
    assert stub == made.plan.launcher_env["PYTHON_EXEC"]
    assert rest == ["--program", "sh", "-c", "true"]


SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURMD_NODENAME": "node-b"}


@pytest.mark.usefixtures("local_root")
def test_under_slurm_folder_nodes_order_and_name_are_slurms(cwd: Path) -> None:
    slurm = {**SLURM, "SLURM_SUBMIT_DIR": str(cwd)}
    first = prepared(cwd, given(spares=1), TORCHRUN, **slurm, SLURM_NODEID="0")
    assert not first.others_join, "srun starts them"
    assert first.job_dir == cwd / "unbroken-jobs" / "77"
    assert (first.plan.spec.nodes_min, first.plan.spec.nodes_max, first.plan.spec.spares) == (2, 2, 1)
    assert (first.plan.node, first.plan.index, first.runs_controller) == ("node-b", 0, True)
    other = prepared(cwd, given(spares=1, node_name="c"), TORCHRUN, **slurm, SLURM_NODEID="1")
    assert (other.job_dir, other.plan.index, other.runs_controller) == (first.job_dir, 1, False)
    assert (first.plan.spare, other.plan.spare) == (False, False)
    last = prepared(cwd, given(spares=1, node_name="e"), TORCHRUN, **slurm, SLURM_NODEID="2")
    assert (last.plan.spare, last.runs_controller, last.plan.scheduler_node) == (True, False, "node-b")
    assert last.plan.spec == first.plan.spec
    told = prepared(cwd, given(node_name="d"), ("torchrun", "--nnodes", "1:3", "train.py"), **slurm)
    assert (told.plan.spec.nodes_min, told.plan.spec.nodes_max, told.plan.spec.spares) == (1, 3, 0)
    two = ("torchrun", "--nnodes", "2", "train.py")
    more = prepared(cwd, given(node_name="f"), two, **slurm, SLURM_NODEID="2")
    assert (more.plan.spec.nodes_max, more.plan.spec.spares, more.plan.spare) == (2, 1, True)


@pytest.mark.usefixtures("local_root")
def test_more_nodes_than_the_step_has_are_refused(cwd: Path) -> None:
    for options, command in (
        (given(spares=3), TORCHRUN),
        (given(spares=1), ("torchrun", "--nnodes", "3", "train.py")),
        (given(), ("torchrun", "--nnodes", "4", "train.py")),
    ):
        with pytest.raises(LaunchRefused, match="the Slurm step has 3 nodes, torchrun wants"):
            prepared(cwd, options, command, **SLURM)


@pytest.mark.usefixtures("local_root")
def test_who_runs_the_controller(cwd: Path) -> None:
    two = ("torchrun", "--nnodes", "2", "--node-rank", "1", "train.py")
    with pytest.raises(LaunchRefused, match="give --controller HOST:PORT"):
        prepared(cwd, None, two)
    joined = prepared(cwd, given(controller="head:7461", token_file="t"), two)
    assert not joined.runs_controller
    run = joined.plan.settings.run
    assert (run.controller, run.token_file) == ("http://head:7461", str(cwd / "t"))
    assert not prepared(cwd, given(job_dir="shared"), two).runs_controller
    assert not prepared(cwd, given(job_dir="shared", spare=True, node_name="s")).runs_controller
    assert prepared(cwd, given(job_dir="shared", node_name="a"), ("torchrun", "train.py")).runs_controller


def test_long_paths_fall_back_to_a_short_one(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_LOCAL_DIR", str(cwd / ("x" * 80)))
    made = prepared(cwd)
    try:
        assert len(str(made.paths.rank_file(99999, 999999, "sock"))) <= 107
    finally:
        shutil.rmtree(made.paths.folder.parent)


def test_what_an_earlier_run_left_is_kept_once(cwd: Path, local_root: Path) -> None:
    options = given(name="again", node_name="n1")
    first = prepared(cwd, options)
    first.paths.outcome.write_text("old")
    assert is_held(first.paths.folder)
    first.release()
    assert not is_held(first.paths.folder)
    second = prepared(cwd, options)
    assert second.paths.folder == first.paths.folder
    assert not second.paths.outcome.exists()
    assert (second.paths.folder.with_name("n1.previous") / "outcome.json").read_text() == "old"
    with pytest.raises(LaunchRefused, match="already runs"):
        prepared(cwd, options)
    assert local_root in second.paths.folder.parents


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's folder")
@pytest.mark.root
def test_a_local_folder_of_somebody_else_is_refused(cwd: Path, local_root: Path) -> None:
    os.chown(local_root, 12345, 12345)
    with pytest.raises(LaunchRefused, match="belongs to somebody else"):
        prepared(cwd)


def test_only_the_newest_jobs_that_are_over_stay(cwd: Path, local_root: Path) -> None:
    """Whether one is over tells its lock: a process id means nothing in another container or on another host."""
    runs = [prepared(cwd, given(name=f"job{number}", node_name="n1")) for number in range(7)]
    for number, run in enumerate(runs):
        plan = json.loads(run.paths.plan.read_bytes())
        run.paths.plan.write_text(json.dumps({**plan, "front_pid": 1 << 22, "front_start_time": 1}))
        os.utime(run.paths.folder, (number, number))
        if number not in (1, 6):
            run.release()
    (local_root / "of-the-user").mkdir()
    foreign = local_root / "without-a-lock" / "n1"
    foreign.mkdir(parents=True)
    (foreign / "node.json").write_text("{}")
    remove_old_jobs(runs[0].paths.folder, keep=2)
    left = sorted(path.name.partition("-")[0] for path in local_root.iterdir())
    assert left == ["job0", "job1", "job4", "job5", "job6", "of", "without"]
    for run in (runs[1], runs[6]):
        assert run.paths.plan.exists()
        run.release()


@pytest.mark.parametrize("where", ["root", "job"])
@pytest.mark.parametrize("how", [0o777, 0o770, "link"])
def test_a_local_folder_that_others_can_enter_is_refused(
    cwd: Path, local_root: Path, where: str, how: int | str
) -> None:
    options = given(name="again", node_name="n1")
    first = prepared(cwd, options)
    first.release()
    folder = local_root if where == "root" else first.paths.folder.parent
    if how == "link":
        moved = folder.with_name(f"{folder.name}-moved")
        folder.rename(moved)
        folder.symlink_to(moved)
    else:
        folder.chmod(int(how))
    with pytest.raises(LaunchRefused, match=r"is a link|open to other users.*chmod"):
        prepared(cwd, options)
    if how == "link":
        folder.unlink()
        moved.rename(folder)
    folder.chmod(0o700)
    prepared(cwd, options).release()


@pytest.mark.parametrize("plant", ["readable", "link", "pipe"])
@pytest.mark.usefixtures("local_root")
def test_a_planted_token_is_refused_before_anything_starts(cwd: Path, plant: str) -> None:
    job = cwd / "job"
    job.mkdir()
    if plant == "link":
        (cwd / "token").write_text("abc")
        (job / "token").symlink_to(cwd / "token")
    elif plant == "pipe":
        os.mkfifo(job / "token")
    else:
        (job / "token").write_text("abc")
        (job / "token").chmod(0o644)
    with pytest.raises(LaunchRefused, match=r"token .*job/token is not used: .*(chmod 600|link|pipe)"):
        prepared(cwd, given(job_dir="job", node_name="n1"))


@pytest.mark.usefixtures("local_root")
def test_one_life_of_a_job_at_a_time(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = given(job_dir="job", node_name="n1")
    first = prepared(cwd, options)
    assert first.lease is not None
    assert first.runs_controller
    with tempfile.TemporaryDirectory(prefix="ub") as elsewhere:  # as in a container with a /tmp of its own
        monkeypatch.setenv("UNBROKEN_LOCAL_DIR", elsewhere)
        for node, command in (("n1", TORCHRUN), ("n2", TORCHRUN), ("n1", ("torchrun", "--nnodes", "2", "train.py"))):
            with pytest.raises(LaunchRefused, match=r"runs already.*unbroken stop"):
                prepared(cwd, given(job_dir="job", node_name=node), command)
        joined = prepared(cwd, given(job_dir="job", node_name="n2"), ("torchrun", "--nnodes", "2", "train.py"))
        assert (joined.lease, joined.runs_controller) == (None, False)
        joined.release()
        first.release()
        second = prepared(cwd, options)
        assert second.lease is not None
        assert second.lease.number == first.lease.number + 1
        second.release()


@pytest.mark.usefixtures("local_root")
def test_a_controller_file_is_believed_where_its_process_lives(cwd: Path) -> None:
    """Else a run would wait for ever for whoever has the port now."""
    (cwd / "job").mkdir()
    here = Here.find()
    with socket.create_server(("127.0.0.1", 0)) as whoever:
        told = {
            "address": f"http://127.0.0.1:{whoever.getsockname()[1]}",
            "epoch": 1,
            "host": "n1",
            "pid": os.getpid(),
            "start_time": start_time(os.getpid()),
            "boot_id": here.boot_id,
            "pid_namespace": here.pid_namespace,
            "service": True,
        }
        stale = {"start_time": 1}, {"service": False}, {"boot_id": "of another host"}
        for changed, alive in (({}, True), *((one, False) for one in stale)):
            (cwd / "job" / "controller.json").write_text(json.dumps({**told, **changed}))
            assert has_service(cwd / "job", Settings()) == alive
            made = prepared(cwd, given(job_dir="job", node_name="n1"))
            assert made.runs_controller == (not alive)
            made.release()
