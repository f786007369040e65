"""`unbroken checkpoints` and `unbroken checkpoints verify`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from supervisor.cli.main import main
from supervisor.cli.render import restart_line
from tests.recovery.checkpoints.samples import unpack


def verified(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["checkpoints", "verify", "--json", *arguments])


def answer(result: Result) -> dict[str, list[dict[str, object]]]:
    decoded: dict[str, list[dict[str, object]]] = json.loads(result.stdout)
    return decoded


def test_whole_and_torn(tmp_path: Path) -> None:
    root = unpack("hf", tmp_path)
    result = verified(str(root))
    assert result.exit_code == 0
    assert [(one["verdict"], one["step"]) for one in answer(result)["checkpoints"]] == [("whole", 10), ("whole", 20)]
    os.truncate(root / "checkpoint-20" / "optimizer.pt", 100)
    result = verified(str(root))
    assert result.exit_code == 1
    assert [one["verdict"] for one in answer(result)["checkpoints"]] == ["whole", "incomplete"]


@pytest.mark.parametrize("kind", ["missing", "pipe", "text"])
def test_one_path_with_nothing_does_not_keep_the_others_from_being_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.pt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("hello")
    root = unpack("torch_save", tmp_path)
    result = verified(str(path), str(root / "ckpt_000010.pt"))
    assert result.exit_code == 66
    assert len(answer(result)["checkpoints"]) == len(answer(result)["problems"]) == 1


def test_a_remote_one_has_the_name_that_was_given(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"file://{unpack('dcp', tmp_path)}/step-20"
    result = verified(url)
    assert result.exit_code == 0
    assert [one["path"] for one in answer(result)["checkpoints"]] == [url]


def test_a_name_that_would_forge_a_line(tmp_path: Path) -> None:
    source = unpack("safetensors", tmp_path) / "model_20.safetensors"
    source.rename(tmp_path / "a\nwhole\x1b[31m_1.safetensors")
    result = CliRunner().invoke(main, ["checkpoints", "verify", str(tmp_path / "a\nwhole\x1b[31m_1.safetensors")])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 3, "the head, the checkpoint, and the remark about its mask"
    assert "\x1b" not in result.stdout


def test_what_a_restart_would_lose() -> None:
    known = {"path": "/c/step-40", "step": 40, "loses_steps": 12, "loses_s": 200.0, "why": ""}
    assert "12 steps (3 min 20 s)" in restart_line(known)
    assert "beginning" in restart_line(known | {"path": "", "step": None})
    assert "12 steps" in restart_line(known | {"path": "", "from_memory": True})
    assert "beginning" not in restart_line(known | {"path": "", "from_memory": True})
    assert "in doubt" in restart_line(known | {"path": "", "why": "the newest one is in doubt"})
