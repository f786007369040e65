"""`import unbroken`: what is promised in docs/python-api.md."""

import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import unbroken
from recovery import worker
from supervisor import api
from supervisor.errors import UnbrokenError
from tests.supervisor.cli.test_page import job_folder
from tests.supervisor.test_docs import example

DOCS = Path(unbroken.__file__).parent / "docs"


def test_the_names_and_signatures_stay() -> None:
    assert unbroken.__all__ == sorted([*api.__all__, *unbroken.FOR_SCRIPTS])
    assert set(unbroken.__all__) == {
        *("Check", "FailureClass", "JobJournal", "Probe", "diagnose", "judged", "read_journal", "snapshot", "unknown"),
        "worker",
    }
    assert str(inspect.signature(unbroken.diagnose)) == (
        "(*paths: 'str | os.PathLike[str]', good: 'Sequence[str | os.PathLike[str]]' = ()) -> 'dict[str, Any]'"
    )
    assert str(inspect.signature(unbroken.read_journal)) == "(job: 'str | os.PathLike[str]') -> 'JobJournal'"
    assert str(inspect.signature(unbroken.JobJournal.table)) == "(self, name: 'str') -> 'Any'"
    assert str(inspect.signature(unbroken.judged)) == (
        "(check: 'str', level: 'Level | None', text: 'str' = '', device: 'str' = '', **more: 'object') -> 'CheckResult'"
    )
    assert str(inspect.signature(unbroken.unknown)) == (
        "(check: 'str', why: 'str', device: 'str' = '', **more: 'object') -> 'CheckResult'"
    )
    with pytest.raises(AttributeError):
        unbroken.nothing  # noqa: B018


def test_the_hooks_for_scripts_stay() -> None:
    hooks = {name: str(inspect.signature(getattr(unbroken.worker, name))) for name in ("heartbeat", "phase", "skip")}
    assert hooks == {
        "heartbeat": "(step: 'int', loss: 'Optional[float]' = None) -> 'None'",
        "phase": "(name: 'str') -> 'None'",
        "skip": "() -> 'int'",
    }
    assert str(inspect.signature(unbroken.worker.resume_from)) == "() -> 'Optional[str]'"
    assert unbroken.worker is worker, "one module, however it is imported"


def test_hooks_are_ours_beside_a_package_of_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "recovery").mkdir()
    (tmp_path / "recovery" / "__init__.py").write_text("raise SystemExit('imported unasked')")
    code = "from unbroken import worker; worker.heartbeat(1); print(worker.__name__, worker.last_step())"
    done = run(code, tmp_path)
    assert done.stdout == "_unbroken_recovery.worker 1\n", done.stderr


def test_a_sitecustomize_that_imports_theirs_does_no_harm(tmp_path: Path) -> None:
    for name in ("recovery", "supervisor", "diagnosis"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import recovery, supervisor, diagnosis")
    command = [sys.executable, str(Path(unbroken.__file__)), "config", "--json"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("{"), done.stderr


def test_tables_are_of_pandas_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}
    frame = type("Frame", (dict,), {"columns": property(lambda self: list(self))})

    def data_frame(rows: list[dict[str, object]]) -> object:
        return frame({name: [row[name] for row in rows] for name in rows[0]})

    def to_datetime(column: object, unit: str, utc: bool) -> object:
        made["at"] = (column, unit, utc)
        return "times"

    pandas = types.SimpleNamespace(DataFrame=data_frame, to_datetime=to_datetime)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    table = unbroken.read_journal(job_folder(tmp_path)).table("steps")
    assert dict(table) == {"at": "times", "attempt": [1], "step": [10]}
    assert made == {"at": ([1_767_225_603.0], "s", True)}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError):
        unbroken.read_journal(job_folder(tmp_path / "again")).table("steps")


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


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    done = run(example("python-api.md", "python"), tmp_path)
    assert done.stdout.startswith("gpu_oom "), done.stderr
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python-api.md").read_text(encoding="utf-8"), re.M | re.S)
    done = run(blocks[1], tmp_path)
    assert (len(blocks), done.stdout) == (2, "None 2 0\n"), done.stderr


def test_a_package_of_the_users_with_our_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "supervisor").mkdir()
    (tmp_path / "supervisor" / "__init__.py").write_text("")
    done = run("import unbroken; unbroken.diagnose('x')", tmp_path)
    assert "ImportError" in done.stderr
    assert str(tmp_path / "supervisor") in done.stderr
