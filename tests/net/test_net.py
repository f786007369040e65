"""The net under a change that may not change what users see.

Journals replay to the recorded decisions, `diagnose` and `check` answer as recorded, what travels and is kept has the
recorded fields. `pytest tests/net --rewrite` writes the golden files anew.
"""

from __future__ import annotations

import base64
import functools
import json
import lzma
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import adapter
from .golden import FOLDER, read_json, read_lines, shown, split, write_json, write_lines
from .replay import replay
from .schemas import plain_schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = FOLDER.parent / "diagnosis" / "cases"
RECORDINGS = {
    str(path.relative_to(FOLDER / "journals")).removesuffix(".jsonl.xz").removesuffix("/decisions"): path
    for path in (FOLDER / "journals").rglob("*.jsonl.xz")
    if not path.name.startswith("journal.")
}
RUNS = sorted({path.parent for path in (FOLDER / "journals" / "runs").glob("*/journal.*")})
INPUTS = FOLDER / "inputs"

Compare = Callable[[Path, Any], None]


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture
def compare(rewrite: bool) -> Compare:
    """With a golden JSON file."""

    def compare(path: Path, got: Any) -> None:
        if rewrite:
            write_json(path, got)
            return
        assert path.exists(), f"{path} is missing: pytest tests/net --rewrite"
        if told := shown(f"{path.relative_to(FOLDER)}:", read_json(path), got):
            pytest.fail(told, pytrace=False)

    return compare


# ----- journals -----


@functools.lru_cache(maxsize=2)
def _replayed(name: str) -> tuple[list[Any], list[Any]]:
    recorded = read_lines(RECORDINGS[name])
    return recorded, replay(recorded)


def _differing(name: str, without: tuple[str, ...], limit: int = 3) -> str:
    """The first events on which something else is decided now; `without`: keys that are not compared."""
    recorded, now = _replayed(name)
    found = []
    for number, (old, new) in enumerate(zip(recorded, now, strict=True)):
        pair = [{key: one for key, one in line.items() if key not in without} for line in (old, new)]
        if pair[0] != pair[1]:
            what = old.get("event", {}).get("event", "the end")
            found.append(shown(f"{name}, line {number + 1} ({what}):", *pair))
    more = [f"... and {len(found) - limit} more events"] if len(found) > limit else []
    return "\n".join([*found[:limit], *more])


NOT_COMPARED = {"decisions": ("texts",), "sentences": ("actions", "now", "view", "verdicts_asked_for")}
"""Decisions: the same actions, states and timers. Sentences: the same notes, reasons and last line; other words alone
are no other decision."""


@pytest.mark.parametrize("what", NOT_COMPARED)
@pytest.mark.parametrize("name", sorted(RECORDINGS))
def test_journal(name: str, what: str, rewrite: bool) -> None:
    if rewrite and what == "decisions":
        write_lines(RECORDINGS[name], _replayed(name)[1])
        _replayed.cache_clear()
    elif told := _differing(name, NOT_COMPARED[what]):
        pytest.fail(f"other {what}:\n{told}", pytrace=False)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_journal_is_read_as_it_was(folder: Path, tmp_path: Path) -> None:
    """Journal files of yesterday give the events that were in them."""
    for packed in folder.glob("journal.*.xz"):
        (tmp_path / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    recorded = read_lines(folder / "decisions.jsonl.xz")[1:-1]
    steps = list(adapter.journal_steps(tmp_path))
    assert len(steps) == len(recorded)
    for line, (event, _, _) in zip(recorded, steps, strict=True):
        if told := shown(f"{folder.name}, {event['event']}:", line["event"], event):
            pytest.fail(told, pytrace=False)


# ----- diagnose -----


def _write(root: Path, files: dict[str, Any]) -> None:
    """`files`: path -> {"text"}, {"base64"}, {"link"} or {"folder"}."""
    for name, one in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "link" in one:
            path.symlink_to(one["link"])
        elif "folder" in one:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(one["text"].encode() if "text" in one else base64.b64decode(one["base64"]))


@functools.cache
def _inputs(name: str) -> dict[str, Any]:
    path = INPUTS / f"{name}.jsonl.xz"
    return {one["name"]: one for one in read_lines(path)} if path.exists() else {}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, where nothing of this machine is seen."""
    for name in [name for name in os.environ if name.startswith(("UNBROKEN", "SLURM"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    (tmp_path / "given").mkdir()
    (tmp_path / "no-site.toml").touch()
    monkeypatch.setenv("UNBROKEN_SITE", str(tmp_path / "no-site.toml"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "given"
    monkeypatch.undo()
    time.tzset()


def _diagnosed() -> Any:
    code, said = adapter.unbroken("diagnose", "--json", "given")
    if code or not said.strip():
        return {"exit_code": code}
    return _in_two(json.loads(said))


def _in_two(answer: Any) -> Any:
    texts: list[str] = []
    return {"answer": split(answer, texts), "texts": texts}


@pytest.mark.parametrize("path", sorted(CASES.glob("*.toml")), ids=lambda path: path.stem)
def test_diagnose_of_a_case(path: Path, here: Path, compare: Compare) -> None:
    """Each file of the case lies in a folder with the name of its node, where it has one."""
    case = tomllib.loads(path.read_text(encoding="utf-8"))
    for file in case["file"]:
        text = file["text"].strip("\n") + "\n"
        ranks = [rank for first, last in file.get("ranks", ()) for rank in range(first, last + 1)]
        for rank in ranks or [""]:
            node = file.get("node", "").replace("{node}", str(rank // 8) if rank != "" else "")
            name = file["name"].replace("{rank}", str(rank)).lstrip("/")
            target = here / node / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{rank}", str(rank)), encoding="utf-8")
    compare(FOLDER / "diagnose" / "cases" / f"{path.stem}.json", _diagnosed())


@pytest.mark.parametrize("name", sorted(_inputs("diagnose")))
def test_diagnose_of_files(name: str, here: Path, compare: Compare) -> None:
    """Of logs, dumps, stacks and folders of all kinds."""
    _write(here, _inputs("diagnose")[name]["files"])
    compare(FOLDER / "diagnose" / "files" / f"{name}.json", _diagnosed())


# ----- check -----

VARY = ("at", "since", "boot_id", "node")


def _checked(said: str, brief: bool = False) -> Any:
    """What was seen, without times and what does not apply. `brief`: of what is healthy only how often."""
    answer = json.loads(said)
    for key in VARY:
        answer.pop(key, None)
    answer["checks"] = [
        {key: value for key, value in one.items() if key not in VARY}
        for one in answer["checks"]
        if one["status"] != "not_applicable"
    ]
    if brief:
        answer["healthy"] = Counter(one["check"] for one in answer["checks"] if one["status"] == "healthy")
        answer["checks"] = [one for one in answer["checks"] if one["status"] != "healthy"]
    return _in_two(answer)


@pytest.mark.parametrize("name", sorted(_inputs("trees")))
def test_check_of_a_tree(name: str, here: Path, compare: Compare) -> None:
    given = _inputs("trees")[name]
    _write(here, given["files"])
    (here.parent / "site.toml").write_text(given["site"])
    code, said = adapter.unbroken(
        *("check", "--json", "--preflight", "--root", "given", "--site", "site.toml", "--timeout", "60"),
        *("--state-dir", "kept", *(f"--only={one}" for one in given["only"])),
    )
    answer = _checked(said)
    assert answer["answer"]["exit_code"] == code
    compare(FOLDER / "check" / "trees" / f"{name}.json", answer)


@pytest.fixture(scope="session")
def scripted_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an NVML library that says what a file says (tests/fake_nvml)."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("C compiler: install gcc and libc6-dev")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O2", "-Wl,-soname,libnvidia-ml.so.1"]
    source = FOLDER.parent / "fake_nvml" / "fake_nvml.c"
    subprocess.run([compiler, *flags, "-o", library, source, "-lpthread"], check=True)
    return library.parent


GPU_SITE = "[expect]\ngpus = 8\n[limits.gpu_driver_responds]\nseconds = 2\n"


@pytest.mark.parametrize("name", sorted(_inputs("nvml")))
def test_check_of_gpus(
    name: str, here: Path, compare: Compare, scripted_nvml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight GPUs, as a scripted NVML has them. Of what is healthy only the number of devices is compared."""
    for variable, file, content in (
        ("FAKE_NVML_STATE", "state", _inputs("nvml")[name]["state"]),
        ("FAKE_NVML_EVENTS", "events", ""),
        ("FAKE_NVML_COUNTS", "counts", ""),
    ):
        (here / file).write_text(content)
        monkeypatch.setenv(variable, str(here / file))
    (here.parent / "site.toml").write_text(GPU_SITE)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(scripted_nvml))
    code, said = adapter.unbroken(
        *("check", "--json", "--fresh", "--site", "site.toml", "--state-dir", "kept", "--timeout", "30"),
        *("--only", "nvml", "--only", "gpu_driver_responds"),
    )
    answer = _checked(said, brief=True)
    assert answer["answer"]["exit_code"] == code
    compare(FOLDER / "check" / "gpus" / f"{name}.json", answer)


def test_the_list_of_checks(here: Path, compare: Compare) -> None:
    """Every check: id, threshold, class, source."""
    (here / "proc").mkdir()
    code, said = adapter.unbroken("check", "--list", "--json", "--root", "given", "--site", "no-site.toml")
    answer = json.loads(said)
    for one in answer["checks"]:
        one.pop("here", None)
        one.pop("applies", None)
    assert code == 0
    compare(FOLDER / "check" / "list.json", _in_two(answer))


# ----- what travels and what is kept -----


@pytest.mark.parametrize("name", sorted(adapter.SCHEMAS))
def test_schema(name: str, compare: Compare) -> None:
    compare(FOLDER / "schemas" / f"{name}.json", plain_schema(adapter.SCHEMAS[name]))


def test_the_net_holds_something() -> None:
    """An empty net would hold everything."""
    assert len(RECORDINGS) >= 200
    assert len(RUNS) >= 15
    assert len(_inputs("diagnose")) >= 40
    assert len(_inputs("trees")) >= 70
