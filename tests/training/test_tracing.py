"""The profiler of a rank that may be traced: begun only where it is wanted, and where torch's works."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "supervisor/training/tracing.py"


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("_tracing_under_test", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv(module.LEVEL, raising=False)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    return module


def loaded(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    torch = types.ModuleType("torch")
    torch.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_nothing_happens_where_it_is_not_wanted(tracing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, "2.13.0")
    tracing.start(True)
    assert tracing.LEVEL not in tracing.os.environ


@pytest.mark.parametrize(
    ("version", "stays"), [("2.6.1+cu124", False), ("2.7.0a0+git12", True), ("2.13.0+cpu", True), ("3.0", True)]
)
def test_old_torch(tracing: Any, monkeypatch: pytest.MonkeyPatch, version: str, stays: bool) -> None:
    loaded(monkeypatch, version)
    monkeypatch.setenv(tracing.VARIABLE, "1")
    begun: list[str] = []
    library = types.SimpleNamespace(**{tracing.BEGIN: lambda: begun.append("begun")})
    monkeypatch.setattr(tracing.ctypes, "CDLL", lambda _: library)
    monkeypatch.setitem(sys.modules, "torch.profiler", types.SimpleNamespace(_optimizer_post_hook=1))  # type: ignore[arg-type]
    hooks = types.SimpleNamespace(register_optimizer_step_post_hook=lambda _: begun.append("hook"))
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", hooks)  # type: ignore[arg-type]
    tracing.start(True)
    assert (begun == ["begun", "hook"]) is stays
    assert (tracing.VARIABLE in tracing.os.environ) is stays


def test_a_rank_that_loads_torch_itself(tracing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    monkeypatch.setattr(tracing, "version", lambda: (2, 13))
    tracing.start(True)
    assert tracing.os.environ[tracing.VARIABLE] == "1"
    assert tracing.os.environ[tracing.LEVEL] == tracing.SILENT


@pytest.mark.parametrize("version", ["2.6.1", "2.13.0"])
def test_a_daemon_of_the_users_own(tracing: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Without --traceable the environment stays as it is."""
    monkeypatch.setenv(tracing.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    monkeypatch.setattr(tracing, "version", lambda: tuple(map(int, version.split(".")[:2])))
    tracing.start(False)
    assert tracing.os.environ[tracing.VARIABLE] == "1"
    assert tracing.LEVEL not in tracing.os.environ
