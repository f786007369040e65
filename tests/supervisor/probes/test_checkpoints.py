"""The probe that looks for checkpoints on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from supervisor.probes import checkpoints
from supervisor.probes.checkpoints import CheckpointProbe

torch = pytest.importorskip("torch")


def save(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.ones(9), "step": step}, path)


def test_without_a_thread_it_says_so_and_tries_again(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    probe = CheckpointProbe([str(tmp_path)], str(tmp_path), [])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        probe.scan({})
    assert probe.problem == "checkpoints are not looked for: can't start new thread"
    probe.scan({})
    assert probe.problem == ""
    (tmp_path / "model.pt").write_bytes(b"")
    until = time.monotonic() + 60
    while probe._looks == 0:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_long_pause_ends_when_a_rank_has_written_much(tmp_path, monkeypatch):
    for name, seconds in {"START_S": 0.0, "LIVELY_S": -1.0, "REST_EVERY_S": 600.0, "IDLE_EVERY_S": 0.0}.items():
        monkeypatch.setattr(checkpoints, name, seconds)
    probe = CheckpointProbe([str(tmp_path)], str(tmp_path), [])
    until = time.monotonic() + 60
    while probe._looks == 0 or probe._may_look_at > time.monotonic():
        probe.scan({1: 0})
        assert time.monotonic() < until
        time.sleep(0.01)
    probe.scan({1: checkpoints.WROTE_BYTES})
    assert not probe._at_once.is_set()
    save(tmp_path / "step_20.pt", 20)
    while [os.path.basename(one.path) for one in probe.checkpoints] != ["step_20.pt"]:
        probe.scan({1: 10**6})
        assert time.monotonic() < until
        time.sleep(0.01)


def looked(probe: CheckpointProbe) -> list[str]:
    """The names of the checkpoints that a whole look finds."""
    asyncio.run(probe.scan_now())
    until = time.monotonic() + 60
    while probe._waiters:  # it waits for two seconds at most: a busy machine needs longer
        assert time.monotonic() < until
        time.sleep(0.01)
    probe._take_up()
    return [os.path.basename(found.path) for found in probe.checkpoints if not found.copy_of]


def test_a_node_that_never_wrote_a_checkpoint_finds_those_it_is_told_of(tmp_path: Path) -> None:
    shared, here = tmp_path / "shared", tmp_path / "here"
    here.mkdir()
    save(shared / "save40" / "state.pt", 40)
    save(shared / "other" / "ckpt.pt", 9000)
    probe = CheckpointProbe([], str(here), ["train.py"])
    assert looked(probe) == []
    probe.follow([str(shared)])
    assert looked(probe) == ["save40"]
    assert probe.learned == (), "it did not see it written"


def test_what_is_new_below_the_working_folder_is_learned(tmp_path: Path) -> None:
    save(tmp_path / "out" / "run1" / "old" / "save9000" / "state.pt", 9000)
    os.utime(tmp_path / "out" / "run1" / "old" / "save9000" / "state.pt", (1, 1))
    probe = CheckpointProbe([], str(tmp_path), ["train.py"])
    save(tmp_path / "out" / "run1" / "ckpts" / "save40" / "state.pt", 40)
    assert looked(probe) == ["save40"]
    assert probe.learned == (tmp_path / "out" / "run1" / "ckpts",)


def test_other_runs_below_a_folder_that_the_command_names_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "one" / "ckpt.pt", 9000)
    probe = CheckpointProbe([], str(tmp_path / "elsewhere"), ["train.py", "--output_dir", str(tmp_path / "runs")])
    assert looked(probe) == ["ckpt.pt"], "it may be what the run goes on from"
    probe.follow([str(tmp_path / "runs" / "two")])
    save(tmp_path / "runs" / "two" / "step_20.pt", 20)
    assert looked(probe) == ["step_20.pt"]


def test_a_file_that_a_rank_has_open_tells_where(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(out / "ckpt_20.pt", 20)
    os.utime(out / "ckpt_20.pt", (1, 1))
    writing = "import sys; f = open(sys.argv[1], 'wb'); f.write(b'x' * 10**6); f.flush(); print(flush=True); input()"
    path = out / "ckpt_40.pt.tmp.77"
    with subprocess.Popen(
        [sys.executable, "-c", writing, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        probe = CheckpointProbe([], str(tmp_path / "elsewhere"), ["train.py"])
        until = time.monotonic() + 20
        while not probe.learned:
            probe.scan({rank.pid: 10**6})
            assert time.monotonic() < until
            time.sleep(0.01)
        rank.communicate(b"\n")
    assert probe.learned == (out,)
    assert [os.path.basename(found.path) for found in probe.checkpoints] == ["ckpt_20.pt"]
