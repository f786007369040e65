"""What the documentation gives as an example works, and what it names exists."""

from __future__ import annotations

import glob
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from supervisor import config
from supervisor.bench.command import group as bench
from supervisor.cli.main import main
from supervisor.node_health.check import site_problems, table

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
    read = config.load_site(str(path))
    assert site_problems(table(), read.site) == []
    assert set(read.tables) == {"xid", "kernel", "rule"}
    assert {name for name in read.site.expect.__struct_fields__ if not getattr(read.site.expect, name)} == set(), (
        "all keys are shown"
    )


def test_the_file_of_the_page_of_settings(tmp_path: Path) -> None:
    (tmp_path / "unbroken.toml").write_text(example("configuration.md", "toml"))
    read = config.load({}, {}, tmp_path)
    assert {key.partition(".")[0] for key in read.origins} == {key.partition(".")[0] for key in config.knobs()}


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


# ----- what the pages name exists -----

PAGES = sorted(
    path
    for path in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("deploy/**/*.md"))
    if path.name != "CHANGELOG.md" and path.parent.name != "adr"
)
OURS = "supervisor|diagnosis|recovery"
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_PATH = re.compile(rf"(?<![\w/.-])((?:{OURS}|tests|docs|deploy|tools)/[\w./{{}},*-]*\w[\w./{{}},*]*)")
NAMED_MODULE = re.compile(rf"(?<![\w/.-])((?:{OURS})(?:\.[A-Za-z_]\w*)+)(?!\w*\()")
NAME_IN_MODULE = re.compile(rf"`(\w+)` in\s+`((?:{OURS})/[\w/]+\.py)`")
NAMED_VARIABLE = re.compile(r"UNBROKEN_[A-Z][A-Z_]*[A-Z]")
CODE = re.compile(r"^```.*?^```|^    .*?$|(?<!`)`[^`\n]+`", re.M | re.S)
COMMAND_LINE = re.compile(r"(?<![\w/.-])(?<!from )unbroken ((?!--|protocol \d)[^`\n#]*)")


def every(pattern: re.Pattern[str]) -> Iterator[tuple[str, Any]]:
    for page in PAGES:
        for found in pattern.findall(page.read_text(encoding="utf-8")):
            yield str(page.relative_to(REPOSITORY)), found


def in_braces(path: str) -> list[str]:
    """`a/{b,c}.py` is two paths."""
    match = re.search(r"\{([^{}]*)\}", path)
    if match is None:
        return [path]
    return [one for part in match[1].split(",") for one in in_braces(path.replace(match[0], part, 1))]


def is_there(path: str) -> bool:
    pattern = str(REPOSITORY / path.rstrip("/.,"))
    return bool(glob.glob(pattern) or (path.startswith("docs/adr/") and glob.glob(f"{pattern}-*")))


def defines(module: str) -> bool:
    """Whether it is a module of ours, or a name that a module of ours has."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        base = REPOSITORY.joinpath(*parts[:count])
        file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        if file.exists():
            source = file.read_text(encoding="utf-8")
            return all(re.search(rf"\b{name}\b", source) for name in parts[count:])
    return False


def test_paths_in_the_pages_exist() -> None:
    missing = {(page, one) for page, path in every(NAMED_PATH) for one in in_braces(path) if not is_there(one)}
    assert missing == set()


def test_modules_in_the_pages_exist() -> None:
    assert {(page, module) for page, module in every(NAMED_MODULE) if not defines(module)} == set()


def test_names_are_in_the_modules_that_the_pages_say() -> None:
    """Where a page says "`Name` in `module.py`"."""
    said = [(page, name, path) for page, (name, path) in every(NAME_IN_MODULE)]
    wrong = [
        one for one in said if not re.search(rf"^(class |def |){one[1]}\b", (REPOSITORY / one[2]).read_text(), re.M)
    ]
    assert (bool(said), wrong) == (True, [])


def test_variables_in_the_pages_exist() -> None:
    sources = "".join(path.read_text() for name in OURS.split("|") for path in (REPOSITORY / name).rglob("*.py"))
    assert {(page, name) for page, name in every(NAMED_VARIABLE) if name not in sources} == set()


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" in link:
                continue
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append((str(page.relative_to(REPOSITORY)), link))
    assert broken == []


def test_the_index_has_every_page() -> None:
    index = (REPOSITORY / "docs/README.md").read_text(encoding="utf-8")
    assert [page.name for page in REPOSITORY.glob("docs/*.md") if f"({page.name})" not in index] == ["README.md"]


def options_of(command: click.Command) -> set[str]:
    return {"--help", "-h", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}


def wrong_in(line: str) -> list[str]:
    """What of `unbroken LINE` there is not. `status | why last` is two commands, `a | tail` one and the shell's."""
    wrong = []
    for number, part in enumerate(re.split(r" [|;] |\)", line.partition(" -- ")[0])):
        words = part.removeprefix("unbroken ").split()
        name = words[0].rstrip(".,:") if words else ""
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            continue
        command = main.commands.get(name)
        if command is None:
            wrong += [name] if number == 0 else []
            continue
        if name == "bench" and len(words) > 1:
            command = bench.commands.get(words[1])
        if name == "export" and isinstance(command, click.Group) and len(words) > 1:
            command = command.commands.get(words[1])
        if command is None:
            wrong.append(f"{name} {words[1]}")
            continue
        if name in ("demo", "controller"):
            continue  # they read their options themselves
        given = {word.partition("=")[0].strip("[].,:;()'\"") for word in words if word.strip("[]('\"")[:2] == "--"}
        wrong += [f"{name} {option}" for option in given - options_of(command) if option != "--"]
    return wrong


def test_commands_and_their_options_in_the_pages_exist() -> None:
    found = [
        (str(page.relative_to(REPOSITORY)), wrong)
        for page in PAGES
        for code in CODE.findall(page.read_text(encoding="utf-8"))
        for line in COMMAND_LINE.findall(code)
        for wrong in wrong_in(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("status --json", []),
        ("run --spares 2 -- torchrun --nnodes 2 t.py", []),
        ("status | why last | tail -3", []),
        ("statsu", ["statsu"]),
        ("status --jsno", ["status --jsno"]),
        ("bench recovery --no-such", ["bench --no-such"]),
        ("bench recvery", ["bench recvery"]),
    ],
)
def test_a_wrong_command_is_noticed(line: str, wrong: list[str]) -> None:
    assert wrong_in(line) == wrong


def test_a_wrong_path_or_module_is_noticed() -> None:
    assert not is_there("supervisor/probes")
    assert not defines("supervisor.node")
    assert not defines("supervisor.paths.NoSuchName")
    assert in_braces("a/{b,c}.py") == ["a/b.py", "a/c.py"]
