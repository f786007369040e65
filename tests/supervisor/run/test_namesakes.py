"""Packages of the user's that our installation hides from their scripts are told at the start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from supervisor.run.namesakes import editable, hidden, namesakes

HERE = Path("/env/lib/site-packages")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo" / "recovery").mkdir(parents=True)
    (tmp_path / "repo" / "diagnosis.py").touch()
    return tmp_path / "repo"


def test_an_editable_folder_after_ours_is_hidden(repo: Path) -> None:
    found = hidden(["/elsewhere"], [str(HERE), str(repo)], {}, HERE)
    assert found == {"recovery": repo / "recovery", "diagnosis": repo / "diagnosis.py"}


def test_what_scripts_find_first_is_not(repo: Path) -> None:
    assert hidden([str(repo)], [str(HERE), str(repo)], {}, HERE) == {}


def test_ours_and_other_installed_copies_are_not(repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "site-packages"
    (other / "supervisor").mkdir(parents=True)  # supervisord
    assert hidden([], [str(HERE), str(other)], {}, HERE) == {}
    assert hidden([], [str(repo)], {}, repo) == {}, "a checkout of ours"


def test_names_that_setuptools_maps_are_hidden(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("__editable___theirs_finder")
    module.MAPPING = {"recovery": str(repo / "recovery"), "theirs": str(repo / "theirs")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    finder = type("_EditableFinder", (), {"__module__": module.__name__})
    assert editable([finder]) == module.MAPPING
    assert hidden([], [str(HERE)], editable([finder]), HERE) == {"recovery": repo / "recovery"}


def test_a_sentence_for_each_and_none_for_another_environment(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(repo)])
    said = namesakes(sys.executable, repo.parent, "")
    assert [("recovery" in one, "diagnosis" in one) for one in said] == [(False, True), (True, False)]
    assert all(f"PYTHONPATH={repo}" in one for one in said)
    assert namesakes("/other/bin/python", repo.parent, "") == ()
    assert namesakes(sys.executable, repo.parent, str(repo)) == ()
