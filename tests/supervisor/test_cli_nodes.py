"""`unbroken nodes`, and cordons for all jobs, where no job runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from recovery.ledger import DAY_S, CordonLifted, NodeCordoned, NodeFailed, NodesSeen, TestResult
from recovery.ledger_folder import LedgerFolder
from supervisor.cli.main import main
from supervisor.cli.nodes import keep_results

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ledger"
    made.mkdir()
    return made


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Run:
    environment = {"UNBROKEN_LEDGER": str(folder), "UNBROKEN_CONFIG": "", "PATH": str(tmp_path)}

    def run(*arguments: str, **more: str) -> Result:
        return CliRunner(env={**environment, **more}).invoke(main, arguments)

    return run


def seen(folder: Path, *names: str) -> LedgerFolder:
    ledger = LedgerFolder(folder, "job")
    now = time.time()
    ledger.append([ledger.entry(NodesSeen(nodes=names), now - 3 * DAY_S, by="policy")], now)
    return ledger


def of(result: Result) -> dict[str, dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return {one["node"]: one for one in json.loads(result.stdout)["nodes"]}


def test_a_cordon_for_all_jobs_needs_no_job_and_is_lifted_by_a_repair(run: Run, folder: Path) -> None:
    seen(folder, "n1", "n7")
    assert run("cordon", "n7", "--cluster", "--until", "3d", "-m", "fan fails").exit_code == 0
    [held] = of(run("nodes", "--json"))["n7"]["cordons"]
    assert (held["reason"], held["until"] is not None) == ("fan fails", True)
    assert of(run("nodes", "--json"))["n1"]["state"] == "IN USE"
    assert run("uncordon", "n7", "--cluster", "-m", "fan replaced").exit_code == 0
    found = of(run("nodes", "n7", "--json"))["n7"]
    assert (found["state"], found["cordons"]) == ("PROBATION", [])
    assert [event["kind"] for event in found["history"]] == ["cordoned", "repaired"]


def test_a_node_that_nobody_knows_is_cordoned_and_said(run: Run) -> None:
    assert run("cordon", "n9", "--cluster").exit_code == 3
    assert of(run("nodes", "--json"))["n9"]["state"] == "CORDONED"
    assert run("nodes", "n10").exit_code == 3


def test_a_dry_run_writes_nothing(run: Run, folder: Path) -> None:
    seen(folder, "n7")
    assert run("cordon", "n7", "--cluster", "--dry-run").exit_code == 0
    assert of(run("nodes", "--json"))["n7"]["state"] == "IN USE"
    assert len(list(folder.iterdir())) == 1


def test_what_is_not_cordoned_is_not_lifted(run: Run, folder: Path) -> None:
    seen(folder, "n7")
    result = run("uncordon", "n7", "--cluster", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (1, False)


@pytest.mark.parametrize("until", ["soon", "2020-01-01T00:00", "-3h", "99999999999999d"])
def test_an_end_that_is_none_is_refused(run: Run, folder: Path, until: str) -> None:
    assert run("cordon", "n7", "--cluster", "--until", until).exit_code == 2
    assert list(folder.iterdir()) == []


def test_an_end_without_the_cluster_is_refused(run: Run) -> None:
    assert run("cordon", "n7", "--until", "3d").exit_code == 2


def test_without_a_folder_it_says_what_to_do(run: Run, tmp_path: Path) -> None:
    for command in (("nodes",), ("cordon", "n7", "--cluster")):
        result = run(*command, UNBROKEN_LEDGER="")
        assert result.exit_code == 78
        assert "ledger.folder" in result.stderr
    gone = run("nodes", UNBROKEN_LEDGER=str(tmp_path / "gone"))
    assert (gone.exit_code, str(tmp_path / "gone") in gone.stderr) == (1, True)


def test_lemons_come_with_their_reasons(run: Run, folder: Path) -> None:
    ledger, now = seen(folder, "n1", "n7"), time.time()
    ledger.append(
        [
            ledger.entry(NodeFailed(node="n7", failure_class="gpu_lost"), now - 3 * DAY_S, by="policy", job="j1"),
            ledger.entry(NodeCordoned(node="n7", scope="job"), now - 3 * DAY_S, by="policy", job="j1", name="c"),
            ledger.entry(CordonLifted(node="n7", lifts=("c",), repair="reseated"), now - 2 * DAY_S, by="ann"),
            ledger.entry(NodeFailed(node="n7", failure_class="gpu_lost"), now - DAY_S, by="policy", job="j2"),
        ],
        now,
    )
    found = of(run("nodes", "--json"))
    assert list(found) == ["n7", "n1"], "who needs a look comes first"
    assert (found["n7"]["lemon"], found["n7"]["outages"], found["n7"]["state"]) == (True, 2, "PROBATION")
    assert len(found["n7"]["why"]) == 2
    shown = run("nodes")
    assert "LEMON" in shown.stdout
    assert run("nodes", "n7").stdout.count("\n") > 5


def test_damage_is_said_and_hostile_text_is_harmless(run: Run, folder: Path) -> None:
    seen(folder, "n7")
    (path,) = folder.iterdir()
    with path.open("ab") as file:
        file.write(b"garbage\n")
    run("cordon", "n7", "--cluster", "-m", "\x1b[2Jevil\nnode n1 is fine")
    result = run("nodes")
    assert "damaged" in result.stderr
    assert "\x1b[2J" not in result.stdout
    assert not any(line.startswith("node n1") for line in result.stdout.splitlines())


def test_results_of_tests_are_kept_and_a_failure_counts(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    results = [
        TestResult(node="n7", gpu="GPU-1", test="matmul", value=1.5, unit="TFLOP/s", verdict="pass", at=now),
        TestResult(node="n7", test="pairs", verdict="fail", reason="slow with n1 and n2", at=now),
    ]
    keep_results(results)
    assert list(folder.iterdir()) == [], "without a ledger nothing is kept"
    monkeypatch.setenv("UNBROKEN_LEDGER", str(folder))
    keep_results(results)
    found = of(run("nodes", "n7", "--json"))["n7"]
    assert [event["kind"] for event in found["history"]] == ["test", "test"]
    assert (found["outages"], found["score"]) == (1, 2.0)
    monkeypatch.setenv("UNBROKEN_LEDGER", str(tmp_path / "gone"))
    keep_results(results)


@pytest.mark.parametrize("place", ["", "/GPU-1", " ", "n7\x1b[31m", "n" * 300])
def test_what_is_no_name_of_a_node_is_refused(run: Run, folder: Path, place: str) -> None:
    assert run("cordon", place, "--cluster").exit_code == 2
    assert not list(folder.iterdir()), "all readers would report it as damaged"
