"""`check --active` and `qualify`: one node alone, exit codes, Slurm's line, and the ledger."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recovery.ledger import TestResult
from recovery.ledger_folder import LedgerFolder
from supervisor.active import neighbours
from supervisor.cli.main import main

SCRIPT = """#!{python}
import json, sys
if sys.argv[1:2] == ["-c"]: print(sys.executable); sys.exit(0)
order = json.loads(sys.stdin.readline())
def tell(**words): print(json.dumps(words), flush=True)
if order["do"] == "look": tell(devices=["cuda:0"], kind="H100, torch 2, CUDA 12")
else:
    tell(kind="H100, torch 2, CUDA 12", uuid="GPU-1")
    tell(test="matmul_a", unit="TFLOP/s", values=[{rate}], ok=True)
    tell(test="memory_patterns", ok={well}, why="8 words changed")
tell(end=True)
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_STEP_NUM_NODES", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(neighbours, "PROC", tmp_path / "proc")

    def made(*words: str, rate: float = 700.0, well: bool = True, node: str = "n1") -> Result:
        python = tmp_path / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.write_text(SCRIPT.format(python=sys.executable, rate=rate, well=well))
        python.chmod(0o755)
        version = tmp_path / "lib/python3.11/site-packages/torch/version.py"
        version.parent.mkdir(parents=True, exist_ok=True)
        version.touch()
        monkeypatch.setattr("supervisor.run.prepare._behind_scripts", str)
        more = ["--node-name", node] if words[0] == "check" else []
        return CliRunner().invoke(main, [*words, "--python", str(python), *more])

    return made


def test_alone_a_node_is_compared_with_nobody(call: object) -> None:
    result = call("check", "--active", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["status"]) == (0, "ok")
    assert {one["test"]: one["verdict"] for one in answer["results"]} == {
        "matmul_a": "unknown",
        "memory_patterns": "pass",
    }


def test_wrong_data_is_critical(call: object) -> None:
    assert call("check", "--active", well=False).exit_code == 2
    assert call("qualify", "--suite", "quick", well=False).exit_code == 2
    prolog = call("check", "--active", "--slurm", "prolog", well=False)
    assert prolog.exit_code == 1
    assert prolog.stdout.startswith("unbroken: silent_data_corruption GPU-1 ")
    well = call("check", "--active", "--slurm", "prolog")
    assert (well.exit_code, well.stdout) == (0, "")


def test_a_fault_of_ours_drains_no_node(tmp_path: Path) -> None:
    words = ["check", "--active", "--slurm", "prolog", "--python", str(tmp_path / "nothing")]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stdout) == (0, "")
    assert CliRunner().invoke(main, ["check", "--active", "--python", str(tmp_path / "nothing")]).exit_code == 3


def test_results_are_kept_in_the_ledger_and_compared_with(
    call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ledger").mkdir()
    monkeypatch.setenv("UNBROKEN_LEDGER", str(tmp_path / "ledger"))
    for number in range(1, 5):
        assert call("check", "--active", node=f"n{number}").exit_code == 0
    slow = call("check", "--active", "--json", rate=500.0, node="n5")
    assert slow.exit_code == 2
    prolog = call("check", "--active", "--slurm", "prolog", rate=500.0, node="n6")
    assert (prolog.exit_code, prolog.stdout) == (0, ""), "a fleet that became slower is not drained node by node"
    read = LedgerFolder(tmp_path / "ledger").read(4e9)
    kept = [one.what for one in read.entries if isinstance(one.what, TestResult)]
    assert {(one.node, one.verdict) for one in kept if one.test == "matmul_a"} == {
        ("n1", "unknown"),
        ("n2", "unknown"),
        ("n3", "unknown"),
        ("n4", "pass"),
        ("n5", "fail"),
        ("n6", "unknown"),
    }


def test_another_node_tests_itself(call: object) -> None:
    assert call("qualify", "elsewhere").exit_code == 3


def test_beside_a_running_job_nothing_is_tested(call: object, tmp_path: Path) -> None:
    rank = tmp_path / "proc" / "4711"
    rank.mkdir(parents=True)
    (rank / "environ").write_text("RANK=3\0WORLD_SIZE=8\0")
    (rank / "maps").write_text("libtorch_cuda.so")
    (rank / "comm").write_text("python\n")
    refused = call("check", "--active", well=False)
    assert refused.exit_code == 3
    assert "4711" in refused.stderr
    prolog = call("check", "--active", "--slurm", "prolog", well=False)
    assert (prolog.exit_code, prolog.stdout) == (0, "")
    assert call("check", "--active", "--beside-jobs", well=False).exit_code == 2
