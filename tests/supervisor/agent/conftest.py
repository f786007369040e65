from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.state import AgentState
from supervisor.config import NodePlan
from supervisor.messages import JobSpec

MakeState = Callable[..., AgentState]


@pytest.fixture
def make_state(tmp_path: Path) -> MakeState:
    """The state of an agent whose folders are below `tmp_path`; arguments are fields of its plan."""

    def make(**plan: Any) -> AgentState:
        local = tmp_path / "local"
        local.mkdir(exist_ok=True)
        fields: dict[str, Any] = {
            "node": "n1",
            "job_dir": str(tmp_path / "job"),
            "local_dir": str(local),
            "spec": JobSpec(name="j"),
            "launcher_argv": (),
            "python": "",
            "cwd": str(tmp_path),
            "front_pid": 1,
            "front_start_time": 1,
        }
        return AgentState(NodePlan(**{**fields, **plan}))

    return make


@pytest.fixture
def shown() -> Callable[[AgentState], list[str]]:
    """The lines that the user has seen."""

    def read(state: AgentState) -> list[str]:
        file = state.paths.notices
        return file.read_text().splitlines() if file.exists() else []

    return read
