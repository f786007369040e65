"""Settings of the model: checked before the job starts, and handed to the controller."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from supervisor.config import OpinionSettings, Settings, absolute, check_opinion, load, missing_for_opinion
from supervisor.errors import ConfigError


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").touch()
    (tmp_path / "key").write_text("k-1")
    return tmp_path


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"backend": "transformers", "model": "model", "below": 0.3},
        {"backend": "endpoint", "model": "m", "url": "https://host/v1", "key_file": "key", "timeout_s": 5.0},
        {"backend": "endpoint", "model": "m", "url": "http://127.0.0.1:8000/v1", "key_file": "key"},
        {"backend": "endpoint", "model": "m", "url": "http://[::1]:8000/v1", "key_file": "key"},
        {"backend": "endpoint", "model": "m", "url": "http://far:8000/v1"},
    ],
)
def test_they_reach_the_controller(cwd: Path, values: dict[str, Any]) -> None:
    given = OpinionSettings(**values)
    check_opinion(given)
    arrived = absolute(Settings(opinion=given), cwd).opinion
    assert (arrived.backend, arrived.below, arrived.timeout_s) == (given.backend, given.below, given.timeout_s)
    if values.get("backend") == "transformers":
        assert arrived.model == str(cwd / "model")
    if values.get("key_file"):
        assert arrived.key_file == str(cwd / "key")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"backend": "transformers"}, "must be the folder"),
        ({"backend": "endpoint", "model": "m"}, "expected something like"),
        ({"backend": "endpoint", "model": "m", "url": "ftp://x/v1"}, "expected something like"),
        ({"backend": "endpoint", "model": "m", "url": "https://x:port/v1"}, "cannot be used"),
        ({"backend": "endpoint", "url": "https://x/v1"}, "name one of"),
        ({"backend": "endpoint", "model": "m", "url": "https://me:pa55word@x/v1"}, "name or password"),
        ({"backend": "endpoint", "model": "m", "url": "http://far/v1", "key_file": "key"}, "https only"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check_opinion(OpinionSettings(**values))
    assert "pa55word" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, ""),
        ({"backend": "transformers", "model": "model"}, ""),
        ({"backend": "transformers", "model": "org/some-name"}, "no folder"),
        ({"backend": "transformers", "model": "bin"}, "safetensors"),
        ({"backend": "endpoint", "model": "m", "url": "https://x/v1", "key_file": "no"}, "no such file"),
    ],
)
def test_what_is_not_there_is_told_and_ends_no_run(cwd: Path, values: dict[str, Any], problem: str) -> None:
    given = OpinionSettings(**values)
    check_opinion(given)
    told = missing_for_opinion(given, cwd)
    assert problem in told
    assert bool(told) is bool(problem)


PAGE = (Path(__file__).parents[3] / "docs" / "opinion.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S))
def test_the_examples_of_the_page(tmp_path: Path, example: str) -> None:
    (tmp_path / "unbroken.toml").write_text(example)
    given = load({}, {}, tmp_path).settings.opinion
    if given.backend == "endpoint":
        check_opinion(given)
    assert given.model
