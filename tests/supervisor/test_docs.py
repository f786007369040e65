"""What the documentation gives as an example works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor import config, site
from supervisor.cli.render import setting
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


def test_the_page_of_settings_has_every_key_with_its_flag_variable_and_default() -> None:
    page = (REPOSITORY / "docs/configuration.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    told = {cells[0].strip("`"): cells[1:] for cells in rows if "." in cells[0]}
    knobs = config.knobs()
    assert list(told) == list(knobs), "in the order of `unbroken config`"
    assert page.count("\n| `") == len(told) + 4, "and four variables that no file can set"
    for key, (flag, variable, default, scope, what) in told.items():
        assert re.findall(r"`(--[a-z-]+)", flag) == ([config.FLAGS[key]] if key in config.FLAGS else []), key
        assert variable.strip("`") == config.ENVIRONMENT.get(key, ""), key
        assert not (given := setting(knobs[key].default)) or default == f"`{given}`", key
        assert scope in ("job", "node", "controller"), key
        assert default, key
        assert what.endswith((".", ").")), key


def test_the_pages_of_some_settings_name_no_other() -> None:
    known = set(config.knobs())
    for page in ("hangs", "metrics", "opinion"):
        text = (REPOSITORY / f"docs/{page}.md").read_text(encoding="utf-8")
        tables = "|".join(sorted({key.partition(".")[0] for key in known}))
        named = set(re.findall(rf"`((?:{tables})\.[a-z_]+)`", text))
        assert named <= known, page
