"""Reports of launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.logs import launchers
from tests.tables import table

CASES = table(__file__)

REPORT = Path(__file__).with_name("torchrun_report.txt").read_text().rstrip("\n")


def test_the_report_of_torchrun():
    other, root = launchers.read(REPORT.splitlines(), 100)
    assert (root.rank, root.local_rank, root.host, root.pid, root.signal, root.code) == (3, 3, "n1", 4242, 9, None)
    assert root.is_root
    assert root.at == 1772366405.0
    assert (other.rank, other.code, other.is_root, other.line) == (9, 1, False, 106)
    assert other.message.endswith("ValueError: rank: too many")
    assert other.error_file.endswith("error.json")


def test_prefixes_and_the_agents_own_line_are_the_same_worker():
    agent = "E0301 12:00:05.1 77 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) "
    agent += "local_rank: 3 (pid: 4242) of binary: /usr/bin/python"
    lines = [agent, *(f"[n1:0]: {line}" for line in REPORT.splitlines())]
    found = launchers.read(lines)
    assert [(one.rank, one.pid) for one in found] == [(3, 4242), (9, 4711)]
    assert found[0].is_root


@pytest.mark.parametrize(("line", "expected"), CASES["lines"])
def test_lines(line, expected):
    (one,) = launchers.read([line])
    assert (one.rank, one.host, one.code, one.signal) == expected


def test_ranges_of_tasks_and_blocks():
    assert [one.rank for one in launchers.read(["srun: error: n[1-2]: tasks 0-2,5: Exited with exit code 1"])] == [
        0,
        1,
        2,
        5,
    ]
    hydra = ["=   RANK 3 PID 123 RUNNING AT n1", "=   KILLED BY SIGNAL: 9 (Killed)"]
    assert [(one.rank, one.signal, one.pid) for one in launchers.read(hydra)] == [(3, 9, 123)]
    orte = ["  Process name: [[12345,1],3]", "  Exit code:    1"]
    assert [(one.rank, one.code) for one in launchers.read(orte)] == [(3, 1)]


@pytest.mark.parametrize(
    "line",
    CASES["what_is_no_report"],
)
def test_what_is_no_report(line):
    assert launchers.read([line, "x" * 100_000]) == ()


def test_the_same_rank_of_two_attempts_is_told_twice():
    second = REPORT.replace("4242", "5242").replace("4711", "5711")
    assert len(launchers.read([*REPORT.splitlines(), *second.splitlines()])) == 4
