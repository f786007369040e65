"""Flight recorders through their pipes: real pipes, and a process that treats its own as torch's monitor does."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from diagnosis import rules
from supervisor.agent.evidence import PIPE, EvidenceCollector, by_pipe, dump_files, flight_of
from supervisor.agent.ranks import RankMonitor
from supervisor.keeper_client import WorkerProcess
from supervisor.messages import EvidenceRequest
from supervisor.paths import LocalPaths

TRACE = {
    "pg_config": {"0": {"ranks": "[0, 1]"}},
    "entries": [{"process_group": ("0", "default_pg"), "collective_seq_id": 7, "profiling_name": "nccl:all_reduce"}],
}
MONITOR = """
import os, sys, time
rank, dumps = sys.argv[1], [bytes.fromhex(one) for one in sys.argv[2:]]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
if os.path.lexists(pipe):
    os.unlink(pipe)
os.mkfifo(pipe, 0o666)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    time.sleep(0.02)
    if os.read(fd, 128) and dumps:
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
            for part in dumps:
                file.write(part)
                file.flush()
                time.sleep(0.2)
"""


@contextmanager
def rank_process(tmp_path, rank=3, dumps=(), script=MONITOR, **env):
    given = {PIPE: f"{tmp_path}/pipe_", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_", **env}
    command = [sys.executable, "-S", "-c", script, str(rank), *(one.hex() for one in dumps)]
    with subprocess.Popen(command, env={**os.environ, **given}, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def soon(seconds=60.0):
    return time.monotonic() + seconds


def test_a_dump_is_written_and_read(tmp_path):
    data = pickle.dumps(TRACE, 2)
    (tmp_path / "dump_3").write_bytes(pickle.dumps({"entries": []}))  # of an earlier hang
    with rank_process(tmp_path, dumps=(data[:40], data[40:])) as process:
        found = by_pipe(process.pid, 3, soon())
    assert found.error == ""
    assert [(one.group, one.seq, one.op) for one in found.entries] == [("[0, 1]", 7, "nccl:all_reduce")]


def test_a_relative_prefix_is_below_the_ranks_folder(tmp_path):
    names = {PIPE: "pipe_", "TORCH_FR_DUMP_TEMP_FILE": "dump_"}
    with rank_process(tmp_path, dumps=(pickle.dumps(TRACE, 2),), **names) as process:
        assert by_pipe(process.pid, 3, soon()).entries


@pytest.mark.parametrize(
    ("dumps", "why", "within_s"),
    [((), "no dump came", 0.3), ((pickle.dumps(print),), "plain data", 2.0), ((b"\x80\x02",), "damaged", 2.0)],
)
def test_a_dump_that_never_comes_or_is_none(tmp_path, dumps, why, within_s):
    with rank_process(tmp_path, dumps=dumps) as process:
        began = time.monotonic()
        found = by_pipe(process.pid, 3, soon(within_s))
        assert time.monotonic() - began < 20
    assert found.entries == ()
    assert why in found.error


IDLE = "import time; print('ready', flush=True); time.sleep(60)"


def test_a_pipe_without_a_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe_3.pipe")
    with rank_process(tmp_path, script=IDLE) as process:
        assert "nobody reads" in by_pipe(process.pid, 3, soon()).error


def test_what_is_no_pipe_is_not_touched_and_none_is_made(tmp_path):
    (tmp_path / "pipe_3").mkdir()
    (tmp_path / "pipe_3.pipe").write_bytes(b"mine")
    with rank_process(tmp_path, script=IDLE) as process:
        assert "not a pipe of the rank's user" in by_pipe(process.pid, 3, soon()).error
        assert "No such file" in by_pipe(process.pid, 4, soon()).error
    assert (tmp_path / "pipe_3.pipe").read_bytes() == b"mine"
    assert not (tmp_path / "pipe_4.pipe").exists()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe_5.pipe").symlink_to(tmp_path / "pipe")
    with rank_process(tmp_path, script=IDLE) as process:
        assert "not a pipe of the rank's user" in by_pipe(process.pid, 5, soon()).error


def test_a_rank_without_a_pipe_gets_no_request(tmp_path):
    with rank_process(tmp_path, script=IDLE, **{PIPE: ""}) as process:
        assert by_pipe(process.pid, 3, soon()) is None
    assert by_pipe(process.pid, 3, soon()) is None


def test_without_a_worker_server_the_pipe_is_asked(tmp_path):
    with rank_process(tmp_path, dumps=(pickle.dumps(TRACE, 2),)) as process:
        worker = WorkerProcess(attempt=1, rank=3, local_rank=0, pid=process.pid)
        found = asyncio.run(flight_of(worker, LocalPaths(tmp_path), soon()))
    assert found.entries[0].seq == 7


def test_without_either_both_reasons_are_in_the_error(tmp_path):
    with rank_process(tmp_path) as process:
        worker = WorkerProcess(attempt=1, rank=3, local_rank=0, pid=process.pid)
        found = asyncio.run(flight_of(worker, LocalPaths(tmp_path), soon(0.3)))
    assert "worker server: " in found.error
    assert "no dump came" in found.error


def test_where_torch_writes():
    assert list(dump_files({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/d"}, 5, 1)) == ["/a/d5"]
    both = {"TORCH_FR_DUMP_TEMP_FILE": "/b/d", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/d"}
    assert list(dump_files(both, 5, 1)) == ["/b/d5"]
    assert list(dump_files({"HOME": "/h"}, 5, 1)) == [
        "/h/.cache/torch/comm_lib_trace_rank_5",
        "/h/.cache/torch/nccl_trace_rank_5",
        "/tmp/nccl_trace_rank_5",
    ]


def test_the_evidence_of_a_hang_has_it_within_the_budget(tmp_path, make_state):
    with rank_process(tmp_path, dumps=(pickle.dumps(TRACE, 2),)) as process:
        worker = WorkerProcess(attempt=1, rank=3, local_rank=0, pid=process.pid)
        state = make_state()
        ranks = RankMonitor(state.paths, rules.default(), {})
        request = EvidenceRequest(number=1, budget_s=5.0, stacks=True, flight=True)
        asking = EvidenceCollector(state, ranks, list)._hang_evidence(1, request, [worker])
        evidence = asyncio.run(asking)
    assert evidence.flights[0].entries[0].seq == 7
    assert {one.sample for one in evidence.stacks} == {0, 1}
    assert evidence.took_s < 5.0
