"""The thread that verifies the content of checkpoints, with real files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.checkpoint import Checkpoint
from recovery.formats.scan import CheckpointScanner
from supervisor.agent.content import ContentMonitor, is_on_a_disk
from tests.conftest import until
from tests.recovery.checkpoints.samples import unpack


def found(root: Path) -> list[Checkpoint]:
    return CheckpointScanner().scan([root], 4e9, at_rest=True)


def changed(root: Path, monitor: ContentMonitor) -> list[str]:
    monitor.offer(found(root))
    return [os.path.basename(one.path) for one in map(monitor.judged, found(root)) if one.changed]


def records(job: Path, node: str) -> bytes:
    path = job / "verified" / f"{node}.json"
    return path.read_bytes() if path.exists() else b""


def damage(path: Path) -> None:
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(stat.st_size - 9)
        file.write(b"\x01\x02")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder on a file system without a device, as those of other machines are."""
    if not is_shared(Path("/dev/shm")):
        pytest.skip("/dev/shm is not in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def is_shared(path: Path) -> bool:
    return path.is_dir() and not is_on_a_disk(str(path))


def test_what_is_changed_after_its_first_sight(tmp_path: Path, shared: Path) -> None:
    root, job = unpack("safetensors", shared), tmp_path / "job"
    job.mkdir()
    monitor = ContentMonitor(job, "n/0")
    monitor.offer(found(root))
    until(lambda: b"model_20" in records(job, "n_0") and b"model_10" in records(job, "n_0"), 30, "both are recorded")
    damage(root / "model_20.safetensors")
    monitor.check_now(found(root))
    assert changed(root, monitor) == ["model_20.safetensors"]
    until(lambda: b"although its size" in records(job, "n_0"), 30, "it is kept")

    later = ContentMonitor(job, "n1")
    until(lambda: changed(root, later) == ["model_20.safetensors"], 30, "another node knows it")

    shutil.copytree(root, shared / "copy")
    shutil.rmtree(root)
    (shared / "copy").rename(root)
    another = ContentMonitor(job, "n2")  # in its memory are other files by these names
    another.offer(found(root))
    until(lambda: b"model_20" in records(job, "n2"), 30, "it has looked")
    assert not changed(root, another)


def test_a_record_of_another_node_does_not_judge_a_disk_of_this_one(tmp_path: Path) -> None:
    if is_shared(tmp_path):
        pytest.skip("no disk here")
    root, job = unpack("safetensors", tmp_path), tmp_path / "job"
    job.mkdir()
    first = ContentMonitor(job, "n0")
    first.offer(found(root))
    until(lambda: b"model_20" in records(job, "n0"), 30, "it is recorded")
    damage(root / "model_20.safetensors")
    first.check_now(found(root))
    until(lambda: b"although its size" in records(job, "n0"), 30, "it is kept")
    other, itself = ContentMonitor(job, "n1"), ContentMonitor(job, "n0")
    other.offer(found(root))
    until(lambda: b"model_20" in records(job, "n1"), 30, "the other node has looked")
    assert not changed(root, other)
    until(lambda: changed(root, itself) == ["model_20.safetensors"], 30, "the node itself remembers")


def test_at_the_end_of_the_ranks_it_does_not_wait_for_what_is_read(tmp_path: Path) -> None:
    """A file system that hangs holds the thread, and nothing else."""
    monitor = ContentMonitor(tmp_path, "n0")
    with monitor._lock:
        monitor.check_now(found(unpack("dcp", tmp_path / "run")))
