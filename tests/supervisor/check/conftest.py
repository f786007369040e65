"""`unbroken check` as a process, apart from this machine's own state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[3]


class Done(NamedTuple):
    code: int
    out: str
    err: str
    took_s: float

    @property
    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        assert answer["schema"] == 1
        return answer

    def entry(self, check: str, device: str = "") -> dict[str, Any]:
        found: list[dict[str, Any]] = [
            one for one in self.answer["checks"] if (one["check"], one["device"]) == (check, device)
        ]
        assert len(found) == 1, (check, found)
        return found[0]


Check = Callable[..., Done]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Runs it apart from this machine's own state, agents and site file."""
    (tmp_path / "site.toml").write_text("")

    def run(*arguments: str, env: dict[str, str] | None = None, site: str | None = "") -> Done:
        chosen = ["--site", str(tmp_path / "site.toml")] if site is not None else []
        (tmp_path / "site.toml").write_text(site or "")
        argv = [sys.executable, "-m", "supervisor.cli.main", "check", "--state-dir", str(tmp_path / "kept"), *chosen]
        variables = {key: value for key, value in (env or os.environ).items() if not key.startswith("UNBROKEN")}
        variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), variables.get("PYTHONPATH", "")])
        variables["TMPDIR"] = str(tmp_path)
        began = time.monotonic()
        done = subprocess.run([*argv, *arguments], capture_output=True, text=True, env=variables, check=False)
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    return run


BROKEN = """
class BrokenProbe:
    name, every_s, deadline_s = "broken", 60.0, 5.0
    checks = (
        check("broken_disk", limits={"percent": 5.0}),
        check("broken_fan", scope="storage"),
        check("broken_before", when="preflight"),
        check("broken_none"),
    )
    def look(self, place, now):
        return [
            unhealthy("broken_disk", "2 % \\x1b[31mleft", "sda", values={"left_percent": 2.0}),
            healthy("broken_disk", "sdb"),
            unhealthy("broken_fan", "slow", level=os.environ.get("FAN", "warning")),
            unhealthy("broken_before", "old"),
            unknown("broken_none", "only root can read it"),
        ]
"""


@pytest.fixture
def broken() -> str:
    """Source of a probe that finds something of every kind."""
    return BROKEN
