"""What agents of ours collected, read as a case."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from click.testing import CliRunner

from diagnosis.signals import ExitRecord, NodeEvidence, RankOutput
from supervisor.cli import main

GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:676"


def ended(rank: int, code: int, order: int) -> ExitRecord:
    at = 1795292431.0 + order
    return ExitRecord(rank=rank, local_rank=rank, pid=70 + rank, code=code, signal=None, ended_at=at, order=order)


def test_the_rank_that_left_with_code_0_is_named(tmp_path: Path) -> None:
    said = ("Traceback (most recent call last):", '  File "/home/u/t.py", line 8, in <module>', GLOO)
    evidence = NodeEvidence(
        node="n1", attempt=1, exits=(ended(1, 0, 0), ended(0, 1, 1)), outputs=(RankOutput(rank=0, traceback=said),)
    )
    folder = tmp_path / "attempts" / "1" / "n1"
    folder.mkdir(parents=True)
    (folder / "evidence-0.json").write_bytes(msgspec.json.encode(evidence))

    told = CliRunner().invoke(main, ["diagnose", "--json", str(tmp_path)])

    verdict = json.loads(told.stdout)["verdict"]
    assert (verdict["failure_class"], verdict["culprits"]) == ("worker_crash", [{"node": "n1", "rank": 1}])
