from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import recovery.worker


@pytest.fixture
def worker() -> ModuleType:
    """A fresh copy of the module, as a new process would have."""
    spec = importlib.util.spec_from_file_location("fresh_worker", recovery.worker.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outside_unbroken_everything_is_a_no_op(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNBROKEN_HEARTBEAT_FD", "UNBROKEN_RESUME_FROM", "UNBROKEN_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    worker.heartbeat(3)
    worker.phase("checkpoint")
    assert worker.resume_from() is None
    assert worker.attempt() == 0


def test_lines_arrive(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("UNBROKEN_HEARTBEAT_FD", str(writer))
    worker.heartbeat(3)
    worker.phase("check\npoint")
    worker.heartbeat("no number")
    os.close(writer)
    assert os.read(reader, 100) == b"step 3\nphase checkpoint\n"
    worker.heartbeat(4)
    os.close(reader)


def test_a_loss_goes_with_its_step(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("UNBROKEN_HEARTBEAT_FD", str(writer))
    worker.heartbeat(3, loss=2.5)
    worker.heartbeat(4, 1e-12)
    worker.heartbeat(5, loss=float("nan"))
    worker.heartbeat(6, loss="no number")
    assert os.read(reader, 200) == b"step 3 loss 2.5\nstep 4 loss 1e-12\nstep 5 loss nan\n"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(("value", "skip"), [(None, 0), ("", 0), ("120", 120), ("-1", 0), ("x", 0), ("\u0663", 0)])
def test_how_much_data_is_to_be_left_out(
    worker: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str | None, skip: int
) -> None:
    monkeypatch.delenv("UNBROKEN_SKIP_BATCHES", raising=False)
    if value is not None:
        monkeypatch.setenv("UNBROKEN_SKIP_BATCHES", value)
    assert worker.skip() == skip


def test_a_full_pipe_and_a_dead_reader_do_not_block_or_raise(
    worker: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv("UNBROKEN_HEARTBEAT_FD", str(writer))
    for step in range(20_000):
        worker.heartbeat(step)
    os.close(reader)
    worker.heartbeat(1)
    os.close(writer)


@pytest.mark.parametrize("value", ["", "x", "-1", "2", "9999", "99999999999999999999"])
def test_a_wrong_descriptor_is_ignored(worker: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("UNBROKEN_HEARTBEAT_FD", value)
    worker.heartbeat(1)


def test_what_the_agent_tells(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_RESUME_FROM", "/c/checkpoint-10")
    monkeypatch.setenv("UNBROKEN_ATTEMPT", "2")
    assert worker.resume_from() == "/c/checkpoint-10"
    assert worker.attempt() == 2


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = "import sys; sys.path[:0] = [sys.argv[1]]; import worker; print(worker.attempt())"
    folder = str(Path(recovery.worker.__file__).parent)
    out = subprocess.run([sys.executable, "-S", "-E", "-c", code, folder], capture_output=True, text=True, check=True)
    assert out.stdout == "0\n"
