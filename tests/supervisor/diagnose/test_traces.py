"""Reading traces: Kineto's as torch writes them, damaged and hostile ones, and timelines of operations."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import pytest

from diagnosis.step_time import COMPUTE
from supervisor.diagnose.traces import TraceUnreadable, is_timeline, read_rank, read_timeline

HEAD = '{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "gloo", "rank": 5},\n  "traceEvents": [\n'
EVENT = '  {\n "ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1,\n "ts": %d, "dur": 5\n ,\n "args": {}\n }'
CSV = "dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,gmc\n0,0,0,1,forward-compute,0.5,1.5,0,0,0\n"


def trace(count: int, tail: str = '\n], "traceName": "kt.json"}') -> str:
    return HEAD + ",\n".join(EVENT % (10 * at) for at in range(count)) + tail


@pytest.mark.parametrize("packed", [False, True])
def test_kineto(tmp_path: Path, packed: bool) -> None:
    file = tmp_path / "kt_1.json.gz"
    file.write_bytes(gzip.compress(trace(100).encode()) if packed else trace(100).encode())
    found = read_rank(file)
    assert (found.rank, found.steps) == (5, 0)
    assert found.parts[COMPUTE] == pytest.approx(500e-6)
    assert not is_timeline(file)


def test_the_name_tells_the_rank(tmp_path: Path) -> None:
    file = tmp_path / "kt_rank7.json"
    file.write_text(trace(2))
    assert read_rank(file).rank == 7


@pytest.mark.parametrize("tail", ["", ', {"ph": "X", "name": "cut', '], "x": "]"}', ", 1, [], null]}"])
def test_cut_off_or_odd_at_the_end(tmp_path: Path, tail: str) -> None:
    file = tmp_path / "kt_1.json"
    file.write_text(trace(50, tail))
    assert read_rank(file).parts[COMPUTE] == pytest.approx(250e-6)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no trace",
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X", "a": "' + b"x" * (3 << 20),
        b'{"traceEvents": [' + b"[" * 200_000,
        b"\x1f\x8b\x08\x00broken",
        gzip.compress(trace(50).encode() * 9)[:-30],
        gzip.compress(trace(500).encode())[:60] + b"\xff" * 4000,
    ],
    ids=["empty", "text", "no events", "one long event", "deep", "not packed", "packed and cut off", "packed, damaged"],
)
def test_hostile(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "kt_1.json"
    file.write_bytes(content)
    with pytest.raises(TraceUnreadable):
        is_timeline(file) or read_rank(file)


def test_a_large_trace_is_never_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "kt_1.json.gz"
    filler = json.dumps({"ph": "i", "name": "x" * 2000})
    with gzip.open(file, "wt", compresslevel=1) as out:
        out.write(HEAD)
        for _ in range(300):
            out.write((filler + ",") * 100)  # 60 MiB
        out.write(EVENT % 0 + "]}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_rank(file).parts[COMPUTE] == pytest.approx(5e-6)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10


def test_timeline_as_csv(tmp_path: Path) -> None:
    file = tmp_path / "ops.csv"
    file.write_text(CSV)
    assert is_timeline(file)
    (one,) = read_timeline(file)
    assert (one.kind, one.end_s, one.rank) == ("forward-compute", 2.0, 0)


@pytest.mark.parametrize(
    "row", ["0,0,0,1,forward-compute,nan,1,0,0,0", "0,99999999,0,1,a,0,1,0,0,0", "0", "a,,,,,,,,,"]
)
def test_timeline_that_is_none(tmp_path: Path, row: str) -> None:
    file = tmp_path / "ops.csv"
    file.write_text(CSV.partition("\n")[0] + "\n" + row + "\n")
    with pytest.raises(TraceUnreadable):
        list(read_timeline(file))
