"""`unbroken trace FILE`: what is there is read, and no job is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from supervisor.cli.main import main
from supervisor.cli.trace import _readable
from supervisor.errors import ExitCode

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "dur": 400}
STEP = {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#SGD.step", "tid": 1, "dur": 100}


def trace_of(folder: Path, rank: int, wait_us: int) -> Path:
    """Ten steps of 1 ms; the rank waits for the others for so long in each."""
    events = []
    for step in range(10):
        begin = 1000 * step
        events += [{**EVENT, "ts": begin, "dur": 900 - wait_us}, {**STEP, "ts": begin + 900}]
        wait = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "tid": 2}
        events.append({**wait, "ts": begin + 900 - wait_us, "dur": wait_us})
    file = folder / f"kt_rank{rank}.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return file


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_folder_of_traces(tmp_path: Path) -> None:
    for rank, wait_us in enumerate((400, 0, 300)):
        trace_of(tmp_path, rank, wait_us)
    answer = json.loads(CliRunner().invoke(main, ["trace", str(tmp_path), "--json"]).output)
    assert [one["rank"] for one in answer["ranks"]] == [0, 1, 2]
    assert answer["slowest"]["rank"] == 1
    assert answer["slowest"]["share"] == pytest.approx(0.3, abs=0.01)
    shown = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert shown.exit_code == 0
    assert "rank 1" in shown.output


def test_a_timeline(tmp_path: Path) -> None:
    rows = ["dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,gmc"]
    for dp, factor in ((0, 1), (1, 3)):
        end = 3 * factor
        rows += [
            f"{dp},0,{dp},0,forward-compute,0,{factor},0,0,0",
            f"{dp},0,{dp},0,backward-compute,{factor},{2 * factor},0,0,0",
        ]
        rows += [
            f"{dp},0,{dp},0,optimizer-clip-main-grad,{end},{9 - end},0,-1,-1",
            f"{dp},0,{dp},0,optimizer,9,1,0,-1,-1",
        ]
    file = tmp_path / "operations.csv"
    file.write_text("\n".join(rows) + "\n")
    answer = json.loads(CliRunner().invoke(main, ["trace", str(file), "--json"]).output)
    assert answer["what_if"]["slowdown"] == pytest.approx(10 / 7)
    assert answer["what_if"]["worst_ranks"] == [1]
    assert CliRunner().invoke(main, ["trace", str(file)]).exit_code == 0


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["trace", str(tmp_path)]).exit_code == ExitCode.NOT_FOUND
    assert CliRunner().invoke(main, ["trace", str(tmp_path / "missing")]).exit_code == ExitCode.NOT_FOUND
    file = trace_of(tmp_path, 0, 0)
    twice = CliRunner().invoke(main, ["trace", str(file), str(file)])
    assert twice.exit_code == ExitCode.NOT_FOUND
    assert CliRunner().invoke(main, ["trace", "--input", str(file)]).exit_code == ExitCode.WRONG_USAGE


def test_an_empty_trace_of_a_rank_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    """A rank that waited all the time has no event."""
    empty = tmp_path / "kt_rank1.json"
    empty.write_text('{"traceEvents": [\n], "traceName": "kt.json"}')
    problems: list[str] = []
    times = _readable([trace_of(tmp_path, 0, 300), empty], problems)
    assert [one.rank for one in times] == [0]
    assert len(problems) == 1
