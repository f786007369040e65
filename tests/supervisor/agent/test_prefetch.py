"""Which checkpoint is read into the page cache, when, and that it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from recovery.checkpoint import Checkpoint
from supervisor.agent import prefetch_child
from supervisor.agent.prefetch import CHILD, LEAST_BYTES, Prefetch, wanted
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.messages import Assignment, Outcome, Resume
from supervisor.training import warm
from tests.conftest import until

OLD = Checkpoint(path="/c/step-1", step=1, format="dcp", complete=True, size_bytes=LEAST_BYTES, modified_at=1)
NEW = Checkpoint(path="/c/step-2", step=2, format="dcp", complete=True, size_bytes=LEAST_BYTES, modified_at=2)
TORN = Checkpoint(path="/c/step-3", step=3, format="dcp", complete=False, size_bytes=LEAST_BYTES, modified_at=3)
SMALL = Checkpoint(path="/c/step-4", step=4, format="dcp", complete=True, size_bytes=1000, modified_at=4)
FORM = {"attempt": 2, "stage": "form"}
OUTCOME = Outcome(state="succeeded", exit_code=0, line="")


def assigned(**fields: Any) -> Assignment:
    values = {"epoch": 1, "version": 1, "node": "a", "role": "member", "attempt": 1, "stage": "run", **fields}
    return Assignment(**values)


def keeper(*statuses: int | None, attempt: int = 1, by_us: bool = False) -> KeeperState:
    workers = [
        WorkerProcess(attempt=attempt, rank=rank, local_rank=rank, pid=9, status=status, stopped_by_us=by_us)
        for rank, status in enumerate(statuses)
    ]
    return KeeperState(ready=True, workers=tuple(workers))


@pytest.mark.parametrize(
    ("assignment", "state", "found", "path"),
    [
        (assigned(), keeper(None, None), [OLD, NEW], ""),
        (assigned(), keeper(9, None), [OLD, NEW, TORN], "/c/step-2"),
        (assigned(), keeper(9, 9, by_us=True), [NEW], ""),
        (assigned(), keeper(0, 0), [NEW], ""),
        (assigned(), keeper(9, None), [NEW, SMALL], ""),
        (assigned(), keeper(9, None), [], ""),
        (assigned(**FORM, resume=Resume(path="/c/step-1")), keeper(9, 9), [OLD, NEW], "/c/step-1"),
        (assigned(**FORM, resume=Resume(path="/seen/by/others")), keeper(9, 9), [], "/seen/by/others"),
        (assigned(**FORM), keeper(9, 9), [OLD], ""),
        (assigned(attempt=2, resume=Resume(path="/c/step-1")), keeper(None, None, attempt=2), [OLD], "/c/step-1"),
        (assigned(attempt=3, resume=Resume(path="/c/step-1")), keeper(None, None, attempt=3), [OLD], ""),
        (assigned(attempt=2, resume=Resume(path="/c/step-1")), keeper(None, None, attempt=3), [OLD], ""),
        (assigned(role="excluded"), keeper(9, None), [NEW], ""),
        (assigned(outcome=OUTCOME), keeper(9, None), [NEW], ""),
        (None, keeper(9, None), [NEW], ""),
        (assigned(), None, [NEW], ""),
    ],
)
def test_what_is_wanted(
    assignment: Assignment | None, state: KeeperState | None, found: list[Checkpoint], path: str
) -> None:
    progressed = 1 if assignment is None or assignment.attempt < 3 else 3
    assert wanted(assignment, state, found, progressed) == path


ZERO = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(8)]
ZERO_2 = [f"zero_pp_rank_{place}_mp_rank_{part:02}_optim_states.pt" for place in range(4) for part in range(2)]
MEGATRON = [
    f"mp_rank_{tensor:02}_{stage:03}/{name}"
    for tensor in range(2)
    for stage in range(2)
    for name in ("distrib_optim.pt", "model_optim_rng.pt")
]


@pytest.mark.parametrize(
    ("names", "ranks", "mine"),
    [
        (["__0_0.distcp", "__2_0.distcp", "__3_1.distcp", ".metadata"], {2, 3}, ["__2_0.distcp", "__3_1.distcp"]),
        (["__0_0.distcp", "__2_0.distcp", ".metadata"], {0, 1}, ["__0_0.distcp", ".metadata"]),
        ([*ZERO, "mp_rank_00_model_states.pt"], {2, 3}, ZERO[2:4]),
        (ZERO[:6], {2, 3}, []),
        (ZERO_2, {2, 3}, []),
        (MEGATRON, {2, 3}, ["mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_000/model_optim_rng.pt"]),
        (MEGATRON, {4, 5}, MEGATRON[2:4] + MEGATRON[6:8]),
        (MEGATRON[:6], {2, 3}, []),
        (["mp_rank_00_000_000/model.pt", "mp_rank_00_000_001/model.pt"], {0, 1}, []),
        (["ep0-ba9-rank3.pt", "ep0-ba9-rank13.pt"], {2, 3}, ["ep0-ba9-rank3.pt"]),
        (["model.safetensors", "optimizer.pt"], {2, 3}, []),
        (["model.safetensors", "optimizer.pt"], {0, 1}, ["model.safetensors", "optimizer.pt"]),
    ],
)
def test_what_a_node_of_four_reads_from_shared_storage(names: list[str], ranks: set[int], mine: list[str]) -> None:
    """Two ranks on each: together the nodes read what the ranks will read, and nothing else more than once."""
    found = prefetch_child.own_files([os.fsencode(name) for name in names], ranks, 8, False)
    assert sorted(map(os.fsdecode, found)) == sorted(mine)


def test_on_a_disk_of_its_own_and_alone_a_node_reads_all(tmp_path: Path) -> None:
    file = tmp_path / "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    file.write_bytes(b"x")
    assert prefetch_child._files(os.fsencode(tmp_path), {0}, 1) == [os.fsencode(file)]
    if os.major(tmp_path.stat().st_dev):
        assert prefetch_child._files(os.fsencode(file), {2}, 4) == [os.fsencode(file)]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        if not os.major(os.fstat(shared.fileno()).st_dev):
            assert [len(prefetch_child._files(os.fsencode(shared.name), {rank}, 4)) for rank in (0, 2)] == [1, 0]


def cgroups(root: Path) -> tuple[bytes, bytes]:
    """A system where memory is limited by version 1, and the file with this process' groups."""
    outer = root / "memory" / "outer"
    (outer / "inner").mkdir(parents=True)
    for folder, limit in ((outer, 10 << 30), (outer / "inner", (1 << 63) - 4096)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{8 << 30}\n")
        (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {1 << 30}\n")
    (root / "own").write_text("5:cpu,cpuacct:/x\n4:memory:/outer/inner\n0::/outer\n")
    return os.fsencode(root), os.fsencode(root / "own")


def test_the_limit_of_a_cgroup_of_version_1(tmp_path: Path) -> None:
    assert prefetch_child._left_in_cgroup(100 << 30, *cgroups(tmp_path)) == 3 << 30
    root, own = map(os.fsdecode, cgroups(tmp_path / "again"))
    assert warm.cgroup_left(root, own) == 3 << 30


def cached(path: Path) -> bool:
    """Whether the end of a file can be read without the disk. To try it would begin to read ahead."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        byte = ctypes.c_char.from_buffer(mapped)
        code = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(byte)), ctypes.c_size_t(len(mapped)), seen)
        del byte  # else the mapping cannot be closed
    assert code == 0
    return bool(seen[-1] & 1)


def uncached(path: Path) -> None:
    """A file that is on disk alone."""
    path.write_bytes(b"x" * (1 << 20))
    with open(path, "rb") as file:
        for _ in range(200):  # a busy kernel keeps pages that it is still working on
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not cached(path):
                return


def test_the_child_reads_the_files_of_its_ranks(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    uncached(probe)
    if cached(probe):
        pytest.skip("the page cache cannot be emptied here")
    names = ("__0_0.distcp", "__1_0.distcp", "__10_0.distcp", "trainer.pt")
    for name in names:
        uncached(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    subprocess.run([sys.executable, "-IS", CHILD, tmp_path, "1", "2"], check=True, timeout=60)
    assert {name for name in names if cached(tmp_path / name)} == {"__1_0.distcp", "trainer.pt"}


def test_another_choice_ends_the_child_and_one_that_does_not_end_is_not_joined(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(1000)\n")
    first, second = tmp_path / "first", tmp_path / "second"
    prefetch = Prefetch((sys.executable, str(script)))
    prefetch.follow(str(first), [0], 1)
    until(lambda: first.exists() and first.read_text(), 30, "the first child")

    def second_runs() -> bool:
        prefetch.follow(str(second), [0], 1)
        return second.exists() and bool(second.read_text())

    until(second_runs, 30, "the second child")
    assert not Path(f"/proc/{first.read_text()}").exists()
    until(lambda: prefetch.follow("", (), 1) or not Path(f"/proc/{second.read_text()}").exists(), 30, "none is left")
