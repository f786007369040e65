"""The monitor that looks for checkpoints on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from supervisor.agent import checkpoints
from supervisor.agent.checkpoints import CheckpointMonitor
from tests.conftest import Later, until

torch = Later("torch")


def a_probe(tmp_path: Path, given: Sequence[str] = (), node: str = "n1", job: str = "job") -> CheckpointMonitor:
    job_dir = tmp_path / job
    job_dir.mkdir(exist_ok=True)
    local = tmp_path / f"local-{node}" if job == "job" else tmp_path / "nowhere"
    return CheckpointMonitor(given, str(tmp_path), local_dir=str(local), job_dir=str(job_dir), node=node)


def save(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.ones(9), "step": step}, path)


def test_without_a_thread_there_is_a_problem_and_another_try(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monitor = a_probe(tmp_path, given=[str(tmp_path)])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        monitor.update({})
    assert monitor.problem == "checkpoints are not looked for: can't start new thread"
    monitor.update({})
    assert monitor.problem == ""
    (tmp_path / "model.pt").write_bytes(b"")
    until(lambda: monitor._scans, 60, "a scan")


def test_a_rank_that_writes_much_ends_a_long_pause(tmp_path, monkeypatch):
    for name, seconds in {"START_S": 0.0, "LIVELY_S": -1.0, "REST_EVERY_S": 600.0, "IDLE_EVERY_S": 0.0}.items():
        monkeypatch.setattr(checkpoints, name, seconds)
    monitor = a_probe(tmp_path, given=[str(tmp_path)])

    def rests() -> bool:
        monitor.update({1: 0})
        return monitor._scans > 0 and monitor._early_scan_at <= time.monotonic()

    until(rests, 60, "a rest")
    monitor.update({1: checkpoints.WROTE_BYTES})
    assert not monitor._scan_requested.is_set()
    save(tmp_path / "step_20.pt", 20)

    def names() -> list[str]:
        monitor.update({1: 10**6})
        return [os.path.basename(one.path) for one in monitor.checkpoints]

    until(lambda: names() == ["step_20.pt"], 60, "the checkpoint")


def looked(monitor: CheckpointMonitor) -> list[str]:
    """The names of the checkpoints that a whole look finds."""
    asyncio.run(monitor.scan_now())
    until(lambda: not monitor._waiters, 60, "the scan: a busy machine needs longer than two seconds")
    monitor._take_over()
    return [os.path.basename(found.path) for found in monitor.checkpoints if not found.copy_of]


class Recorded:
    """What a rank of a node does, as its record tells."""

    def __init__(self, tmp_path: Path, node: str = "n1", attempt: int = 1) -> None:
        folder = tmp_path / f"local-{node}" / "attempts" / str(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rank0.writes"

    def note(self, kind: str, path: Path, more: object = None) -> None:
        with open(self.path, "a") as file:
            print(json.dumps([time.time_ns(), 2**22 + 1, kind, str(path), more]), file=file)

    def save(self, path: Path, step: int) -> None:
        if not path.parent.exists():
            self.note("d", path.parent)
        self.note("w", path)
        save(path, step)
        self.note("i", path, [path.stat().st_ino])  # who imports torch only now has made the file late


def test_only_checkpoints_that_ranks_wrote_are_found(tmp_path: Path) -> None:
    save(tmp_path / "out" / "ckpt_9000.pt", 9000)
    monitor = a_probe(tmp_path)
    assert looked(monitor) == []
    rank = Recorded(tmp_path)
    rank.save(tmp_path / "out" / "ckpt_20.pt", 20)
    save(tmp_path / "out" / "ckpt_30.pt", 30)
    assert looked(monitor) == ["ckpt_20.pt"]
    assert monitor.learned == (tmp_path / "out",)
    assert monitor.bounds().why_not(tmp_path / "out" / "ckpt_20.pt") == ""
    assert monitor.bounds().why_not(tmp_path / "out" / "ckpt_30.pt")


def test_the_record_serves_another_agent_another_node_and_the_next_life(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    Recorded(tmp_path).save(tmp_path / "shared" / "step_40" / "state.pt", 40)
    save(tmp_path / "shared" / "step_90" / "state.pt", 90)
    assert looked(a_probe(tmp_path)) == ["step_40"]
    shutil.rmtree(tmp_path / "local-n1")
    assert looked(a_probe(tmp_path)) == ["step_40"], "its own record in the job folder"
    other = a_probe(tmp_path, node="n2")
    assert looked(other) == ["step_40"]
    assert other.why_no_resume(str(tmp_path / "shared" / "step_40"), 2, "n1") == ""
    assert other.why_no_resume(str(tmp_path / "shared" / "step_90"), 2, "n1")
    assert looked(a_probe(tmp_path, job="another")) == []


def test_a_file_that_another_program_overwrote_is_not_the_jobs_any_more(tmp_path: Path) -> None:
    rank = Recorded(tmp_path)
    rank.save(tmp_path / "out" / "ckpt.pt", 20)
    monitor = a_probe(tmp_path)
    assert looked(monitor) == ["ckpt.pt"]
    save(tmp_path / "out" / "ckpt.pt", 9000)
    assert looked(monitor) == []
    assert monitor.why_no_resume(str(tmp_path / "out" / "ckpt.pt"), 1, "n1")


def test_parts_of_one_checkpoint_are_known_from_the_nodes_that_wrote_them(tmp_path: Path) -> None:
    first, second = Recorded(tmp_path), Recorded(tmp_path, node="n2")
    first.save(tmp_path / "out" / "step_20" / "rank_0.pt", 20)
    second.save(tmp_path / "out" / "step_20" / "rank_1.pt", 20)
    os.chmod(tmp_path / "out" / "step_20" / "rank_1.pt", 0o600)  # the last thing that is done there
    monitor = a_probe(tmp_path)
    looked(monitor)
    assert all(one.in_doubt for one in monitor.checkpoints)
    assert monitor.left, "it is said"
    assert looked(a_probe(tmp_path, node="n2")) == ["step_20"], "it reads what the first has kept"
    assert looked(monitor) == ["step_20"]


@pytest.mark.parametrize("trouble", ["0666", "link", "damaged"])
def test_a_record_that_other_users_can_write_is_ignored(tmp_path: Path, trouble: str) -> None:
    Recorded(tmp_path).save(tmp_path / "out" / "ckpt.pt", 20)
    assert looked(a_probe(tmp_path)) == ["ckpt.pt"]
    record = tmp_path / "job" / "written" / "n1.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    if trouble == "0666":
        record.chmod(0o666)
    elif trouble == "link":
        record.rename(tmp_path / "elsewhere.json")
        record.symlink_to(tmp_path / "elsewhere.json")
    else:
        record.write_bytes(record.read_bytes()[:-20])
    assert looked(a_probe(tmp_path, node="n2")) == []


def test_a_file_that_a_rank_has_open_is_its_own(tmp_path: Path) -> None:
    """Nothing but open descriptors tells of what is not written by Python."""
    out = tmp_path / "out"
    save(out / "ckpt_20.pt", 20)
    writing = (
        "import os, sys; f = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY); "
        "os.write(f, open(sys.argv[1], 'rb').read()); print(flush=True); input()"
    )
    path = out / "ckpt_40.pt"
    with subprocess.Popen(
        [sys.executable, "-c", writing, str(out / "ckpt_20.pt"), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as rank:
        rank.stdout.readline()
        monitor = a_probe(tmp_path)
        until(lambda: monitor.update({rank.pid: 10**6}) or monitor.learned, 60, "a folder")
        rank.communicate(b"\n")
    assert monitor.learned == (out,)
    assert looked(monitor) == ["ckpt_40.pt"]


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"nonsense", b'[1,2,"w"]', b'[1,2,"w","relative",null]', b'[1,2,"w","/a\\udcff",null]', b"[" * 9000,
     b'[1,2,"q","/a",null]', b'["1",2,"w","/a",null]', b'[1,2,"r","/a",[]]', b'[1,2,"w",null,null]', b"\xff\xfe"],
)  # fmt: skip
def test_damaged_lines_of_a_record_are_skipped(tmp_path: Path, line: bytes) -> None:
    rank = Recorded(tmp_path)
    rank.save(tmp_path / "out" / "a.pt", 1)
    with open(rank.path, "ab") as file:
        file.write(line + b"\n")
    rank.save(tmp_path / "out" / "b.pt", 2)
    assert sorted(looked(a_probe(tmp_path))) == ["a.pt", "b.pt"]


def test_a_record_is_read_on_from_where_it_was_cut(tmp_path: Path) -> None:
    rank = Recorded(tmp_path)
    rank.save(tmp_path / "out" / "a.pt", 1)
    monitor = a_probe(tmp_path)
    assert looked(monitor) == ["a.pt"]
    rank.save(tmp_path / "out" / "b.pt", 2)
    os.replace(rank.path, f"{rank.path}.1")
    rank.save(tmp_path / "out" / "c.pt", 3)
    assert sorted(looked(monitor)) == ["a.pt", "b.pt", "c.pt"]


def test_links_in_a_path_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    rank = Recorded(tmp_path)
    rank.note("w", tmp_path / "out" / "ckpt.pt")
    save(tmp_path / "out" / "ckpt.pt", 1)
    monitor = a_probe(tmp_path)
    assert looked(monitor) == ["ckpt.pt"]
    assert monitor.checkpoints[0].path == str(tmp_path / "real" / "ckpt.pt")
