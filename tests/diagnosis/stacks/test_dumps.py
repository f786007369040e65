"""Stacks as the tools write them: real ones where they are at hand, else their wording."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis import stacks

PYSPY, FAULTHANDLER, GDB, EU_STACK, LLDB, PYSTACK = (
    (Path(__file__).parent / f"dumps/{tool}.txt").read_text()
    for tool in ("pyspy", "faulthandler", "gdb", "eu_stack", "lldb", "pystack")
)


def functions(stack):
    return [frame.function for frame in stack.frames]


def only(data, name="stack_rank3.txt"):
    (found,) = stacks.read_dump(data.encode(), name)
    return found


def test_py_spy_text_with_the_hooks_that_autograd_runs_for_the_main_thread():
    found = only(PYSPY)
    assert found.rank == 3
    assert functions(found)[:3] == ["all_gather_into_tensor", "fetch_sub_module", "_engine_run_backward"]
    assert found.frames[-2:][0].line == 41
    assert stacks.activity(found) == "collective"
    assert stacks.place(found) == "train_step (train.py:41)"


def test_faulthandler_text_repeated_is_several_samples():
    found = stacks.read_dump((FAULTHANDLER.format(line=7) + FAULTHANDLER.format(line=9)).encode(), "rank12/fh.txt")
    assert [(one.rank, one.sample, one.frames[0].line) for one in found] == [(12, 0, 7), (12, 1, 9)]
    assert stacks.activity(found[0]) == "data"


@pytest.mark.parametrize(
    ("call", "activity"),
    [
        ("cudaStreamSynchronize", "gpu_sync"),
        ("ncclAllReduce", "collective"),
        ("pncclGroupEnd", "collective"),
        ("ncclCommAbort", "teardown"),
    ],
)
def test_gdb_of_all_threads(call, activity):
    found = only(GDB.format(call=call))
    assert functions(found) == ["??", call, "c10::cuda::f", "step"]
    assert found.frames[2].file == "/env/lib/libtorch_cuda.so"
    assert (found.frames[3].file, found.frames[3].line) == ("/job/train.py", 12)
    assert stacks.activity(found) == activity


def test_eu_stack_and_lldb():
    found = only(EU_STACK)
    assert (functions(found), stacks.activity(found)) == (["read", "reader_fill"], "data")
    found = only(LLDB)
    assert (functions(found)[1], stacks.activity(found)) == ("c10d::ProcessGroupNCCL::abort", "teardown")


def test_pystack_writes_the_innermost_frame_last():
    found = only(PYSTACK)
    assert (functions(found), stacks.activity(found)) == (["pread64", "load_batch", "<module>"], "data")


def test_a_node_in_one_file():
    text = "".join(f"=========== rank {rank} =======\n{PYSPY}" for rank in (4, 5))
    assert [one.rank for one in stacks.read_dump(text.encode(), "node0.txt")] == [4, 5]
    labelled = "".join(f"[rank{rank}]:{line}\n" for line in PYSPY.splitlines() for rank in (0, 1))
    assert [one.rank for one in stacks.read_dump(labelled.encode(), "all.txt")] == [0, 1]
    slurm = "".join(f" {rank}: {line}\n" for rank in (8, 9) for line in FAULTHANDLER.splitlines())
    assert [one.rank for one in stacks.read_dump(slurm.encode(), "all.txt")] == [8, 9]


def test_a_rank_that_nobody_tells_is_told_apart_and_never_guessed():
    text = PYSPY + PYSPY.replace("4312", "4313")
    assert [one.rank for one in stacks.read_dump(text.encode(), "node0.txt")] == [-4312, -4313]
    assert only(EU_STACK, "stacks.txt").rank == -500
    assert only(PYSPY, "pyspy_77.txt").rank == 77
    assert only(PYSPY, "pyspy_70123.txt").rank == -4312


def test_loader_workers_and_the_launcher_are_no_ranks():
    worker = PYSPY.replace("4312", "9").replace(
        "train_step (train.py", "_worker_loop (torch/utils/data/_utils/worker.py"
    )
    assert [one.rank for one in stacks.read_dump((PYSPY + worker).encode(), "rank_2.txt")] == [2]


REAL = """
import faulthandler, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def wait_here():
    faulthandler.dump_traceback()
    print("there", flush=True)
    sys.stdin.read()
wait_here()
"""


def test_real_tools():
    child = subprocess.Popen(
        [sys.executable, "-c", REAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"there\n"
        spy = [f"{sysconfig.get_path('scripts')}/py-spy", "dump", "--pid", str(child.pid)]
        outputs = [subprocess.run([*spy, *more], capture_output=True, timeout=30).stdout for more in ([], ["--json"])]
    finally:
        child.kill()
        outputs.append(child.communicate(timeout=30)[1])
    if not outputs[0]:
        pytest.skip("py-spy may not look at processes here")
    for output in outputs:
        assert stacks.is_dump(output[:4096])
        (found,) = stacks.read_dump(output, "rank_6")
        assert (found.rank, functions(found)[-2:]) == (6, ["wait_here", "<module>"])


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200), st.sampled_from([PYSPY, FAULTHANDLER, GDB, EU_STACK, LLDB, PYSTACK]), st.integers(0, 300)
)
def test_any_bytes_are_survived(noise, text, at):
    data = text.encode()
    for one in stacks.read_dump(data[:at] + noise + data[at:], "x"):
        assert len(one.frames) <= stacks.MAX_FRAMES
        stacks.activity(one)
        json.dumps([frame.function for frame in one.frames])


def test_a_log_is_no_dump():
    assert not stacks.is_dump(b"step 1 loss 2.0\nTraceback (most recent call last):\n  File 'x'\n#1 best\n")
    assert stacks.read_dump(b"step 1 loss 2.0\nrank 3 starts\n", "rank_0.log") == []
    assert stacks.read_dump(b'{"step": 1}\n', "rank_0.json") == []
    assert stacks.read_dump(b'[{"frames":' * 5000, "rank_0.json") == []
