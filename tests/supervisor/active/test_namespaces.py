"""The whole command on four nodes in network namespaces, with torch and gloo, and a link that loses packets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow]


def test_the_node_behind_a_lossy_link_is_named(bridge: Any, check_all: Any, tmp_path: Path) -> None:
    bridge.lose_packets("n3")
    processes = check_all("--active", "full", "--only", "pairs")
    answers = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    words = (tmp_path / "n1.err").read_text()
    failed = {(one["node"], one["test"]) for one in answers[0]["results"] if one["verdict"] == "fail"}
    assert failed == {("n3", "pairs")}, words
    assert set(answers[0]["pairs"]["good"]) == {"n1", "n2", "n4"}, words
    assert processes[2].returncode == 2
    assert processes[3].returncode == 0
