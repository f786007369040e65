"""The measuring of scans: all readers read the same, and logs of our own making are healthy."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from diagnosis.logs.scan import patterns
from supervisor.cli import diagnose
from tests.bench import scan
from tests.bench.__main__ import group


@pytest.fixture
def logs(tmp_path):
    return list(scan.make(tmp_path, 200_000))


def test_made_logs_are_healthy(logs):
    for path in logs:
        with path.open("rb") as stream:
            verdict = diagnose.answer([diagnose.read(stream, path.name)])["verdict"]
        # A log that shows no step shows no health, and no trouble.
        without_steps = path.name in ("nccl-info.log", "every-line-new.log")
        assert verdict["failure_class"] == ("unknown" if without_steps else "none"), path.name


def test_no_pattern_is_looked_for_by_words_of_healthy_lines(tmp_path):
    """Its chunks would all be read line by line: twice in one afternoon that made the scan four times slower."""
    for path in scan.make(tmp_path, 40_000):
        lines = path.read_bytes().splitlines()[:100]
        for one in patterns():
            scanned = re.compile(one.scanned.encode(), re.IGNORECASE)
            hit = sum(scanned.search(line) is not None for line in lines)
            assert hit <= len(lines) / 10, f"{one.id} is scanned for as {one.scanned!r}, which {path.name} is full of"


def test_a_report(logs, monkeypatch):
    monkeypatch.setattr(scan, "SLOWEST_BYTES", 20_000)
    done = CliRunner().invoke(group, ["scan", str(logs[0]), "--json"], standalone_mode=False)
    found = json.loads(done.stdout)
    (log,) = found["logs"]
    rates = {one["reader"].strip(): one["mb_s"] for one in log["readers"]}
    assert rates["unbroken, shapes"] > 0
    assert rates["Python re"] > 0
    assert log["readers"][0]["ratio"] == 1.0
    for one in log["readers"]:
        assert one["mb_s"] is None or not one["missing"]
