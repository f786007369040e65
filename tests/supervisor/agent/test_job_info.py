"""What the probes need to know of the job."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from recovery.checkpoint import Checkpoint
from supervisor.agent.agent import JobMonitor
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.link import Link
from supervisor.config import NodePlan
from supervisor.keeper_client import WorkerProcess
from supervisor.messages import JobSpec


def checkpoint_monitor(tmp_path: Path, given: tuple[str, ...]) -> CheckpointMonitor:
    folder = str(tmp_path)
    return CheckpointMonitor(given, folder, local_dir=folder, job_dir=folder, node="n1")


def plan(tmp_path: Path, **more: object) -> NodePlan:
    return NodePlan(
        node="n1",
        job_dir=str(tmp_path),
        local_dir=str(tmp_path / "local"),
        spec=JobSpec(name="j"),
        launcher_argv=("train.py",),
        python="/opt/venv/bin/python",
        cwd=str(tmp_path),
        front_pid=1,
        front_start_time=1,
        **more,  # type: ignore[arg-type]
    )


def worker(rank: int, pid: int, status: int | None = None) -> WorkerProcess:
    return WorkerProcess(attempt=1, rank=rank, local_rank=rank - 8, pid=pid, status=status)


def test_only_living_ranks_are_in_the_job_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    node = plan(tmp_path, launcher_env={"CUDA_VISIBLE_DEVICES": "2,3"})
    checkpoints = checkpoint_monitor(tmp_path, ("ckpt",))
    link = Link.for_plan(node)
    link.url = "http://n0:7461"
    monitor = JobMonitor(node, checkpoints, link)
    info = monitor.info([worker(8, 80), worker(9, 90), worker(10, 70, status=9)])
    assert info.ranks == {80: 8, 90: 9}
    assert info.gpus_of_ranks == {8: "2,3:0", 9: "2,3:1"}
    assert info.checkpoint_dirs == (str(tmp_path / "ckpt"),)
    assert info.folders == (str(tmp_path), str(tmp_path / "local"), str(tmp_path))
    assert info.python == "/opt/venv/bin/python"
    assert (info.checkpoint_bytes, info.clock_offset_s) == (0, None)


def test_room_is_counted_in_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints = checkpoint_monitor(tmp_path, ("ckpt",))
    sizes = [(100, True, 1.0), (300, True, 2.0), (7, False, 3.0)]
    checkpoints.checkpoints = tuple(
        Checkpoint(path=f"{at}", step=1, format="f", complete=complete, modified_at=at, size_bytes=size)
        for size, complete, at in sizes
    )
    node = plan(tmp_path)
    assert JobMonitor(node, checkpoints, Link.for_plan(node)).info([]).checkpoint_bytes == 300


def test_the_clock_is_reported_when_it_is_known_and_does_not_change_all_the_time(tmp_path: Path) -> None:
    node = plan(tmp_path)
    link = Link.for_plan(node)
    monitor = JobMonitor(node, checkpoint_monitor(tmp_path, ()), link)
    link.clock.answered(asked_at=100.5, received_at=100.0, sent_at=100.0, now=100.5, mono=0.0)
    first = monitor.info([])
    assert first.clock_offset_s == 0.5
    link.clock.answered(asked_at=101.5, received_at=101.0, sent_at=101.0, now=101.5002, mono=1.0)
    assert monitor.info([]) == first


def test_a_folder_whose_name_is_not_utf8_is_left_out(tmp_path: Path) -> None:
    node = plan(tmp_path)
    checkpoints = checkpoint_monitor(tmp_path, ("ckpt", os.fsdecode(b"run\xff")))
    info = JobMonitor(node, checkpoints, Link.for_plan(node)).info([])
    assert info.checkpoint_dirs == (str(tmp_path / "ckpt"),)
    assert msgspec.json.encode(info)
