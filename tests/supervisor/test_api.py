"""`import unbroken`: what is promised in docs/python-api.md."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unbroken
from supervisor.errors import UnbrokenError
from tests.supervisor.cli.test_page import job_folder
from tests.supervisor.test_docs import example


def test_the_names_and_signatures_stay() -> None:
    assert sorted(unbroken.__all__) == ["JobJournal", "diagnose", "read_journal"]
    assert str(inspect.signature(unbroken.diagnose)) == (
        "(*paths: 'str | os.PathLike[str]', good: 'Sequence[str | os.PathLike[str]]' = ()) -> 'dict[str, Any]'"
    )
    assert str(inspect.signature(unbroken.read_journal)) == "(job: 'str | os.PathLike[str]') -> 'JobJournal'"
    with pytest.raises(AttributeError):
        unbroken.nothing  # noqa: B018


def test_a_journal_becomes_tables(tmp_path: Path) -> None:
    journal = unbroken.read_journal(job_folder(tmp_path))
    assert journal.status["attempt"] == 1
    assert [one["id"] for one in journal.incidents] == ["i-1"]
    assert journal.steps == [{"at": 1_767_225_603.0, "attempt": 1, "step": 10}]
    assert {"at", "text", "incident"} <= journal.timeline[0].keys()
    assert journal.problems == []


def test_what_cannot_be_read_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unbroken.read_journal(tmp_path / "none")
    with pytest.raises(UnbrokenError):
        unbroken.diagnose(tmp_path / "none.log")


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(Path(unbroken.__file__).parent)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    done = run(example("python-api.md", "python"), tmp_path)
    assert done.stdout.startswith("gpu_oom "), done.stderr


def test_a_package_of_the_users_with_our_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "supervisor").mkdir()
    (tmp_path / "supervisor" / "__init__.py").write_text("")
    done = run("import unbroken; unbroken.diagnose('x')", tmp_path)
    assert "ImportError" in done.stderr
    assert str(tmp_path / "supervisor") in done.stderr
