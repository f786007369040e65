"""Who may drain nodes, as Slurm 22.05.8 with slurmdbd let them."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.cli.drain_requests import judge, request_folder

CONFIG = "SlurmUser               = slurm(64030)\nSlurmdUser              = root(0)\n"


@pytest.mark.parametrize(
    ("uid", "config", "level", "may"),
    [
        (0, "", "", True),
        (64030, CONFIG, "", True),
        (1000, CONFIG, "Administrator", True),
        (1000, CONFIG, "Operator", False),
        (1000, CONFIG, "None", False),
        (1000, "", "", False),
    ],
)
def test_who_may_drain(uid: int, config: str, level: str, may: bool) -> None:
    assert judge(uid, config, level).may_drain is may


def test_whether_requests_can_be_left(tmp_path: Path) -> None:
    told = [request_folder(str(path)) for path in (tmp_path / "none", tmp_path)]
    assert "there is no folder" in told[0]
    assert str(tmp_path) in told[1]
