"""What the front starts: its logs stay small while it runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from supervisor.run import front
from supervisor.run.front import ServiceProcess

FLOOD = """
import sys, time
for _ in range(100):
    sys.stderr.write("x" * 10_000 + "\\n")
    time.sleep(0.001)
sys.stderr.write("the last\\n")
sys.stderr.flush()
time.sleep(600)
"""


def test_a_log_that_grows_begins_anew_and_keeps_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "LOG_LIMIT", 50_000)
    log = tmp_path / "agent.log"
    service = ServiceProcess("agent", [sys.executable, "-c", FLOOD], env=dict(os.environ), cwd=tmp_path, log=log)
    largest, deadline = 0, time.monotonic() + 60
    try:
        logs = (log, tmp_path / "agent.log.1")
        while not any(one.exists() and one.read_bytes().endswith(b"the last\n") for one in logs):
            assert time.monotonic() < deadline
            service.tend(time.monotonic())
            largest = max(largest, log.stat().st_size if log.exists() else 0)
            time.sleep(0.001)
        service.tend(time.monotonic())
        assert largest < 1_000_000, "all that was ever written"
        assert log.stat().st_size <= 50_000
        assert 0 < logs[1].stat().st_size <= 50_000
        assert log.read_bytes().count(b"\0") == 0, "it is open for appending: no hole"
    finally:
        service.end(0.0)
