"""What people read: the parts that no transcript shows."""

import time

import pytest

from supervisor import messages as m
from supervisor.cli import render
from supervisor.controller.report import status_of
from supervisor.job.job import Job
from supervisor.node_diff import compare


def test_status_tells_what_differs_and_whose_clock_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    spec = m.JobSpec(name="llama", nodes_min=3, nodes_max=3)
    job.handle(m.JobDefined(at=1.0, spec=spec))
    for node in ("a", "b", "c"):
        job.handle(m.NodeJoined(at=1.0, node=node, host=f"host-{node}", address="10.0.0.1"))
    found = compare({"a": {"driver": "550"}, "b": {"driver": "535"}, "c": {"driver": "550"}})
    job.handle(m.VersionsCompared(at=2.0, differences=found))
    answer = status_of(job.view(), None)
    assert [node["clock_offset_s"] for node in answer["nodes"]] == [None] * 3
    assert answer["skew"][0]["values"][1] == {"value": "535", "count": 1, "nodes": ["b"]}
    answer["nodes"][2]["clock_offset_s"] = -2.5
    answer["nodes"][1]["clock_offset_s"] = 0.004
    render.status(answer)
    lines = capsys.readouterr().out.splitlines()
    assert "the nodes differ: driver is 535 on b and 550 on the other 2" in lines
    assert [line.rpartition("\t")[2] for line in lines if "\thost-" in line] == [
        "",
        "",
        "its clock is 2.5 s behind",
    ]


def test_status_tells_when_the_scheduler_ends_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    for ends_in, said in ((7290.0, "(in 2 h 01 min)"), (-5.0, "(over)"), (None, "")):
        job = Job()
        ends_at = None if ends_in is None else time.time() + ends_in
        job.handle(m.JobDefined(at=1.0, spec=m.JobSpec(name="llama", ends_at=ends_at)))
        render.status(status_of(job.view(), None))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time limit: ")]
        assert [line.partition(" (")[2] for line in lines] == [said[1:]] * bool(said)
