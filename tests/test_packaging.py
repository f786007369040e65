"""The wheel: what is in it, and that it works beside supervisord, whose import package is also called `supervisor`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from unbroken import our_packages_first

ROOT = Path(__file__).parent.parent
OURS = ("diagnosis", "recovery", "supervisor")
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")

SUPERVISORD_MODULES = set(
    "childutils compat confecho datatypes dispatchers events http http_client loggers medusa options pidproxy poller "
    "process rpcinterface scripts skel socket_manager states supervisorctl supervisord templating tests ui version web "
    "xmlrpc".split()
)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, the wheel made from the sdist as an index would get them."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def modules(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


def tracked_files(*where: str) -> set[str]:
    """What a clone would have, and what is new in this working tree, as paths below ROOT."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *where, cwd=ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith("unbroken-")}
        shared = [name for name in wheel.namelist() if name.startswith(f"unbroken-{VERSION}.data/")]
        metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
        licences = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    pages = {name for name in names if name.startswith("supervisor/pages/")}
    assert names - pages == tracked_files(*OURS, "unbroken.py")
    assert "share/man/man1/unbroken.1" in "".join(shared)
    assert {name.removeprefix("supervisor/pages/") for name in pages} == tracked_files("docs", "deploy", *TOP_PAGES)
    assert {f"{package}/py.typed" for package in OURS} <= names
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names), "the shim's entry points"
    assert any(name.endswith("output_rules/framework.toml") for name in names)
    assert "Name: unbroken" in metadata
    assert licences


def test_the_sdist_holds_what_a_builder_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert tracked_files(*OURS, "unbroken.py") <= names


def test_no_module_is_named_like_one_of_supervisords() -> None:
    folder = ROOT / "supervisor"
    assert not {path.stem for path in folder.iterdir()} & SUPERVISORD_MODULES


@pytest.mark.parametrize(
    ("path", "foreign", "ordered"),
    [
        (["/bin", "/repo", "/std", "/std/site-packages"], ["/bin", "/repo"], "/std /own /std/site-packages /bin /repo"),
        (["/own", "/zip", "/std", "/std/lib-dynload", "/own"], [], "/zip /std /std/lib-dynload /own"),
        (["/std/site-packages", "/std"], ["/std/site-packages"], "/std/site-packages /std /own"),
        (["", "/repo"], ["/repo"], "/own /repo"),
    ],
)
def test_our_packages_come_before_what_is_foreign(path: list[str], foreign: list[str], ordered: str) -> None:
    assert our_packages_first(path, "/own", foreign, "/std") == ordered.split()


@pytest.mark.parametrize("package", OURS)
def test_importing_a_package_does_nothing(package: str) -> None:
    (docstring,) = ast.parse((ROOT / package / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)


def imported_names(path: Path) -> set[str]:
    """Top-level names of everything a file imports when it runs, at any depth; a relative import counts as `.`."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module).partition(".")[0])
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return names


def test_the_training_side_needs_the_standard_library_and_torch_only() -> None:
    folder = ROOT / "supervisor" / "training"
    siblings = {path.stem for path in modules(folder)}
    for path in modules(folder):
        foreign = imported_names(path) - sys.stdlib_module_names - siblings - {"torch"}
        assert not foreign, f"{path} imports {foreign}"


@pytest.mark.parametrize(
    "module", ["supervisor.cli.main", "supervisor.agent.agent", "supervisor.controller.main", "supervisor.run.front"]
)
def test_the_daemon_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(len(sys.modules), *{{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    count, *heavy = run(sys.executable, "-c", code, cwd=ROOT).split()
    assert not heavy
    assert int(count) < 1200, "modules are what start-up time is made of"


VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]  # type: ignore[index]


def test_the_version_is_the_distributions() -> None:
    assert run(sys.executable, "-m", "supervisor.cli.main", "--version", cwd=ROOT).split() == ["unbroken", VERSION]


def test_the_changelog_begins_with_what_is_unreleased_and_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)[:2]
    assert first == ("Unreleased", "")
    assert (second[0], bool(second[1])) == (VERSION, True)


def environment(folder: Path) -> Path:
    """A fresh venv that sees our dependencies (not our editable install): its own packages come first."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip_install(python: Path, *what: str | Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *what)


@pytest.fixture(scope="module")
def supervisord_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervisord")
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "supervisor==4.3.0")
    return next(folder.iterdir())


@pytest.mark.parametrize("ours_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_works_beside_the_real_supervisord(
    built: tuple[Path, Path], supervisord_wheel: Path, tmp_path: Path, ours_first: bool
) -> None:
    python = environment(tmp_path / "venv")
    order = (built[0], supervisord_wheel) if ours_first else (supervisord_wheel, built[0])
    for wheel in order:
        pip_install(python, wheel)
    with zipfile.ZipFile(built[0]) as ours, zipfile.ZipFile(supervisord_wheel) as theirs:
        shared = {name for name in set(ours.namelist()) & set(theirs.namelist()) if not name.endswith("/")}
    assert shared == {"supervisor/__init__.py"}
    scripts = python.parent
    assert run(scripts / "supervisord", "--version", cwd=tmp_path).strip() == "4.3.0"
    assert "run" in run(scripts / "unbroken", "--help", cwd=tmp_path)
    assert run(scripts / "unbroken", "docs", "loss", cwd=tmp_path) == (ROOT / "docs/loss.md").read_text("utf-8")
    assert run(scripts / "unbroken", "slurm-template", cwd=tmp_path).startswith("#!/bin/bash")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in (*OURS, "msgspec", "click"):
        (theirs / f"{name}.py").write_text("raise ImportError\n")
    assert "run" in run("env", f"PYTHONPATH={theirs}", scripts / "unbroken", "--help", cwd=theirs)
    run(
        python,
        "-c",
        "import supervisor.options, supervisor.events, supervisor.messages, supervisor.job.job",
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_it_installs_from_the_index_and_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", built[0])
    assert "run" in run(python.parent / "unbroken", "--help", cwd=tmp_path)
