"""Planted slow stages in real workers of a real DataLoader, each named from outside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from diagnosis.signals import RankClock, RankSample
from supervisor.agent.input_sampling import look_at
from supervisor.agent.loader_watch import LONG_S, WAITS_EVERY_S, LoaderWatch, RankInput
from supervisor.keeper_client import WorkerProcess

SCRIPT = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

KIND, FOLDER, WORKERS = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path.insert(0, FOLDER)

def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(200))

def decode(index):
    from site_packages_of_test import decode_image
    decode_image(0.02)

def tokenize(index):
    from tokenizers import Tokenizer, models, pre_tokenizers
    global tokenizer
    if "tokenizer" not in globals():
        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.encode("some words " * 5000)

def disk(index):
    file = os.open(os.path.join(FOLDER, "data.bin"), os.O_RDONLY | os.O_DIRECT)
    import mmap
    with mmap.mmap(-1, 8 << 20) as buffer:
        os.preadv(file, [buffer], 0)
    os.close(file)

def own(index):
    busy(0.02)

class Planted(Dataset):
    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        globals()[KIND](index)
        return torch.zeros(4)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for _ in DataLoader(Planted(), batch_size=4, num_workers=WORKERS):
        print("batch", flush=True)
"""
PIL = """
import time
def decode_image(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
"""


@pytest.fixture
def looked_at(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RankInput]:
    """What is told of a loader with this slow stage."""
    kind, workers = request.param
    (tmp_path / "train.py").write_text(SCRIPT)
    library = tmp_path / "lib/site-packages/PIL"
    library.mkdir(parents=True)
    (library / "decoding.py").write_text(PIL)
    (tmp_path / "site_packages_of_test.py").write_text(
        f"import sys; sys.path.insert(0, {str(library)!r}); from decoding import decode_image"
    )
    (tmp_path / "data.bin").write_bytes(os.urandom(1 << 20) * 8)
    command = [sys.executable, str(tmp_path / "train.py"), kind, str(tmp_path), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"batch\n"
            worker = WorkerProcess(pid=process.pid, rank=3, local_rank=0, attempt=1)
            yield asyncio.run(asyncio.wait_for(look_at(worker, 0.38, 1), 60))
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("looked_at", "stage", "words"),
    [
        (("decode", 2), "decode images", "PIL"),
        (("tokenize", 2), "tokenize", "tokeniz"),
        (("disk", 2), "read", "disk (train.py)"),
        (("own", 2), "own code", "busy (train.py)"),
        (("decode", 0), "decode images", "PIL"),
    ],
    indirect=["looked_at"],
    ids=["decode", "tokenizer", "disk", "own function", "without workers"],
)
def test_a_planted_stage_is_named(looked_at: RankInput, stage: str, words: str, request: pytest.FixtureRequest) -> None:
    assert looked_at.problem == ""
    assert looked_at.stages[0].stage == stage
    assert words in looked_at.stages[0].what
    assert looked_at.stages[0].share > 0.5
    assert looked_at.workers == (0 if "without" in request.node.name else 2)
    assert "38%" in looked_at.text
    assert looked_at.advice


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    worker = WorkerProcess(pid=process.pid, rank=0, local_rank=0, attempt=1)
    began = time.monotonic()
    assert asyncio.run(look_at(worker, None, 1)).problem
    assert time.monotonic() - began < 30


def samples(shares: dict[int, float]) -> list[RankSample]:
    return [
        RankSample(rank=rank, local_rank=0, pid=1, clock=RankClock(steps=9, input_share=share))
        for rank, share in shares.items()
    ]


def looks(watch: LoaderWatch, shares: dict[int, float], begin: float, end: float, attempt: int = 1) -> list[int]:
    found = []
    now = begin
    while now <= end:
        rank = watch.look(now, samples(shares)) if watch.is_due(now, attempt) else None
        found += [] if rank is None else [rank]
        now += WAITS_EVERY_S
    return found


def test_who_waits_long_is_looked_at_once_in_an_attempt() -> None:
    watch = LoaderWatch()
    assert looks(watch, {0: 0.1, 1: 0.3, 2: 0.5}, 0.0, LONG_S - WAITS_EVERY_S) == []
    assert looks(watch, {0: 0.1, 1: 0.3, 2: 0.5}, LONG_S, 3 * LONG_S) == [2]
    assert looks(watch, {0: 0.4}, 3 * LONG_S, 5 * LONG_S, attempt=2) == [0]


def test_who_waited_only_for_a_while_is_not() -> None:
    watch = LoaderWatch()
    assert looks(watch, {0: 0.5}, 0.0, LONG_S / 2) == []
    assert looks(watch, {0: 0.1}, LONG_S / 2, LONG_S) == []
    assert looks(watch, {0: 0.5}, LONG_S, 1.5 * LONG_S) == []
