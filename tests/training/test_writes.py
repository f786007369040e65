"""The record of what a process writes: everything that ranks save with, and nothing that a script could notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.training import writes
from tests.conftest import need

need("torch")

PRELUDE = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("_unbroken_writes", {writes.__file__!r})
writes = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = writes
spec.loader.exec_module(writes)
recorder = writes.WriteRecorder(os.path.abspath("../rank0.writes"))
recorder.start()
"""


class Result:
    def __init__(self, done: subprocess.CompletedProcess[str], record: Path) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        files = [record.with_name(record.name + ".1"), record]
        self.lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]

    def of(self, kind: str) -> list[str]:
        return [os.path.basename(path) for _, _, one, path, _ in self.lines if one == kind]


@pytest.fixture
def run(tmp_path: Path):
    """Run a script that records, in a folder of its own."""
    here = tmp_path / "here"
    here.mkdir()

    def start(script: str) -> Result:
        command = [sys.executable, "-c", PRELUDE + script]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)
        return Result(done, tmp_path / "rank0.writes")

    return start


def test_everything_that_ranks_save_with(run) -> None:
    """One process, for torch takes seconds to be imported."""
    pytest.importorskip("safetensors")
    result = run(
        """
import pathlib, multiprocessing, warnings
import numpy, torch, torch.distributed.checkpoint as dcp, safetensors.torch
warnings.simplefilter("ignore")
state = {"w": torch.ones(9)}
torch.save(state, "str.pt")
torch.save({"no": "tensor"}, pathlib.Path("path.pt"))
torch.save(state, "ümlaut.pt")
torch.save(state, "legacy.pt", _use_new_zipfile_serialization=False)
with open("object.pt", "wb") as file:
    torch.save(state, file)
numpy.save("array.npy", numpy.ones(3))
torch.save(state, "ckpt.pt.tmp"); os.replace("ckpt.pt.tmp", "ckpt.pt")
dcp.save(state, checkpoint_id="step-10")
os.makedirs("checkpoint-10"); os.makedirs("checkpoint-10", exist_ok=True)
safetensors.torch.save_file(state, "checkpoint-10/model.safetensors")
pathlib.Path("checkpoint-10/state.json").write_text("{}")
os.symlink("checkpoint-10", "latest"); os.link("str.pt", "hard.pt")
child = multiprocessing.get_context("fork").Process(target=torch.save, args=(state, "child.pt"))
child.start(); child.join()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, at):
        pathlib.Path(f"worker{at}.txt").write_text("x")
        return at
list(torch.utils.data.DataLoader(Data(), num_workers=1))
os.remove("array.npy")
try:
    torch.save(state, "/nowhere/at/all.pt")
except RuntimeError as error:
    import traceback
    traceback.print_exc(file=sys.stdout)
with open("str.pt", "rb") as file:
    torch.load(file)
"""
    )
    assert result.code == 0, result.err
    written = result.of("w")
    for name in ("str.pt", "path.pt", "ümlaut.pt", "legacy.pt", "object.pt", "array.npy", "ckpt.pt.tmp", "state.json"):
        assert name in written, name
    assert "child.pt" in written, "a forked child"
    assert {"worker0.txt", "worker1.txt"} <= set(written), "a DataLoader's workers"
    assert "__0_0.distcp" in written
    assert any(name.startswith(".metadata") for name in written)
    assert {"step-10", "checkpoint-10"} <= set(result.of("d"))
    assert result.of("d").count("checkpoint-10") == 1, "made once"
    renamed = [(path, more[0]) for _, _, kind, path, more in result.lines if kind == "r"]
    assert any(path.endswith("/ckpt.pt.tmp") and to.endswith("/ckpt.pt") for path, to in renamed)
    assert "latest" in result.of("l")
    assert "str.pt" in result.of("h")
    assert "array.npy" in result.of("x")
    assert "writes.py" not in result.out, "nothing of ours in a traceback"
    assert len({pid for _, pid, *_ in result.lines}) >= 3


def test_what_stood_there_before_is_told(run, tmp_path: Path) -> None:
    old = tmp_path / "here" / "old.pt"
    old.write_bytes(b"12345")
    result = run("open('old.pt', 'r+b').close(); open('new.pt', 'wb').close()")
    about = old.stat()
    assert [(kind, more) for _, _, kind, _, more in result.lines] == [
        ("w", [about.st_ino, 5, about.st_mtime_ns]),
        ("w", None),
    ]


def test_torch_imported_later_is_heard_of(run) -> None:
    assert "a.pt" in run("import torch; torch.save({'no': 'tensor'}, 'a.pt')").of("w")


def test_older_torch_is_heard_of(run) -> None:
    """Before 2.1 the name is known to the constructor alone."""
    result = run(
        """
import types
class _opener:
    def __init__(self, file_like):
        self.file_like = file_like
class _open_zipfile_writer_file(_opener):
    def __init__(self, name):
        super().__init__(os.mkdir(str(name) + ".d"))
torch = types.ModuleType("torch.serialization")
torch._open_zipfile_writer_file = _open_zipfile_writer_file
sys.modules["torch.serialization"] = torch
recorder._listen_to_torch()
_open_zipfile_writer_file("old.pt")
"""
    )
    assert [(os.path.basename(path), more) for _, _, kind, path, more in result.lines if kind == "w"] == [
        ("old.pt", True)
    ]


def test_hostile_names_and_objects(run) -> None:
    result = run(
        r"""
import pathlib
for name in ("new\nline", "quote\"", "x" * 250, b"bytes\xff", pathlib.Path("path")):
    open(name, "wb").close()
for bad in ("nul\0", "", "d" * 5000, 10**6, -1, None, 1.5, [], "/nowhere/x"):
    try:
        open(bad, "wb")
    except (ValueError, OSError, TypeError):
        pass
class Odd(str):
    def startswith(self, *_): raise RuntimeError("the script's own")
    def encode(self, *_): raise RuntimeError("the script's own")
open(Odd("odd"), "wb").close()
class Path:
    calls = 0
    def __fspath__(self):
        Path.calls += 1
        return "like"
open(Path(), "wb").close()
calls = Path.calls
os.open("like", os.O_WRONLY | os.O_TRUNC)
folder = os.open(".", os.O_RDONLY)
os.mkdir("inside", dir_fd=folder)
os.close(os.open("inside.pt", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
sys.audit("open", 1); sys.audit("open", "x", None, None); sys.audit("os.rename"); sys.audit("open", object(), 1, 1)
print(calls)
"""
    )
    assert result.code == 0, result.err
    assert result.out.strip() == "1", "the script's own code runs as often as ever"
    assert {"new\nline", 'quote"', "x" * 250, "bytes\udcff", "path"} <= set(result.of("w"))
    assert "inside.pt" not in result.of("w"), "relative to another folder than it seems"


def test_it_is_bounded_and_goes_on(run, tmp_path: Path) -> None:
    result = run("writes.LIMIT = 2000\nfor at in range(200): open(f'{at}.pt', 'wb').close()")
    sizes = [path.stat().st_size for path in tmp_path.glob("rank0.writes*")]
    assert len(sizes) == 2
    assert max(sizes) < 2500
    assert result.of("w")[-1] == "199.pt"


@pytest.mark.parametrize(
    "trouble", ["os.rmdir(folder)", "os.chmod(folder, 0)", "os.symlink('/dev/full', folder + '/r')"]
)
def test_where_it_cannot_be_written_the_script_goes_on(run, trouble: str) -> None:
    result = run(
        f"""
folder = os.path.abspath("../local")
os.mkdir(folder)
{trouble}
writes.WriteRecorder(folder + "/r").start()
open("a.pt", "wb").close()
print("goes on")
"""
    )
    assert (result.code, result.out) == (0, "goes on\n"), result.err


def test_a_script_that_closes_all_descriptors_and_one_with_signals(run) -> None:
    """What its handler raises while we note something is its own."""
    result = run(
        """
import signal
os.closerange(3, 200)
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
heard = made = 0
while heard < 30:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while True:
            open("a.pt", "wb").close()
            made += 1
    except Late:
        heard += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(heard)
"""
    )
    assert (result.code, result.out) == (0, "30\n"), result.err


def test_it_costs_next_to_nothing(run) -> None:
    """An event that is of no interest, and one that is; generous, for the machine may be busy."""
    result = run(
        """
import timeit
glance = min(timeit.repeat(sys._getframe, number=2000, repeat=20)) / 2000
write = min(timeit.repeat(lambda: open("a.pt", "wb").close(), number=50, repeat=20)) / 50
print(glance * 1e9, write * 1e6)
"""
    )
    glance_ns, write_us = map(float, result.out.split())
    assert glance_ns < 20_000
    assert write_us < 2_000
