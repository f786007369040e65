"""What the documentation gives as an example works."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor import config, site
from supervisor.node_health.selection import site_problems, table

REPOSITORY = Path(__file__).parents[2]


def example(page: str, language: str) -> str:
    found = re.search(
        rf"^```{language}\n(.*?)^```", (REPOSITORY / "docs" / page).read_text(encoding="utf-8"), re.M | re.S
    )
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("value", "status", "code"),
    [("25", "healthy", 0), ("40", "unhealthy", 1), (None, "unknown", 3), ("warm", "unknown", 3)],
)
def test_the_probe_of_the_page(
    tmp_path: Path, plug_in: Callable[[str], dict[str, str]], value: str | None, status: str, code: int
) -> None:
    file = tmp_path / "tree/var/lib/facility/inlet_c"
    file.parent.mkdir(parents=True)
    if value is not None:
        file.write_text(value)
    command = [
        sys.executable,
        "-m",
        "supervisor.cli.main",
        "check",
        "--only",
        "inlet",
        "--json",
        "--root",
        str(tmp_path / "tree"),
    ]
    env = plug_in(example("probes.md", "python"))
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert [(one["check"], one["status"]) for one in answer["checks"]] == [("inlet_hot", status)], done.stderr
    assert (done.returncode, answer["problems"]) == (code, [])


def test_the_site_file_of_the_runbook(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(example("runbook.md", "toml"))
    read = site.load(str(path))
    assert site_problems(table(), read.site) == []
    assert set(read.tables) == {"xid", "kernel", "rule"}
    assert {name for name in read.site.expect.__struct_fields__ if not getattr(read.site.expect, name)} == set(), (
        "all keys are shown"
    )


def test_the_page_of_settings_is_up_to_date() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs/make_configuration.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run: python docs/make_configuration.py"
    assert {knob.key.partition(".")[0] for knob in config.knobs().values()} == set(made["TABLES"])


def test_every_variable_of_ours_is_in_a_table() -> None:
    code = [
        path for package in ("supervisor", "recovery", "diagnosis") for path in (REPOSITORY / package).rglob("*.py")
    ]
    named = {name for path in code for name in re.findall(r"UNBROKEN_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8"))}
    assert named == {*config.ENVIRONMENT.values(), *config.OTHER_VARIABLES}


def test_the_pages_of_some_settings_name_no_other() -> None:
    known = set(config.knobs())
    for page in ("hangs", "metrics", "opinion"):
        text = (REPOSITORY / f"docs/{page}.md").read_text(encoding="utf-8")
        tables = "|".join(sorted({key.partition(".")[0] for key in known}))
        named = set(re.findall(rf"`((?:{tables})\.[a-z_]+)`", text))
        assert named <= known, page
