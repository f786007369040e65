from __future__ import annotations

import logging
from pathlib import Path

import pytest

from recovery.provenance import Provenance
from supervisor.agent.checkpoints import FOLDER, JobRecord


def test_a_record_that_cannot_be_read_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    damaged = folder / "n2.json"
    damaged.write_text("{")
    damaged.chmod(0o600)
    record, known = JobRecord(tmp_path, "n1"), Provenance("n1")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            record.read_all(known)
            assert record.of("n2") == {}
        assert len(caplog.records) == 1
        damaged.write_text("[]")  # another error
        record.read_all(known)
        assert len(caplog.records) == 2
        damaged.write_text("{}")
        record.read_all(known)
        damaged.write_text("{ ")
        record.read_all(known)
    assert len(caplog.records) == 3


def test_a_missing_record_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert JobRecord(tmp_path, "n1").of("n3") == {}
    assert caplog.records == []
