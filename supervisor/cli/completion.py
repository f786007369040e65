"""What a shell offers after `unbroken` and Tab; standard library only, because a shell waits for it.

`unbroken completion bash` prints click's script for the shell. At each Tab that script starts `unbroken`, which comes
here (`unbroken.py`) without importing any command: commands and options are read from `commands.json`, which
docs/make_commands.py makes; incidents, nodes and jobs from the job folders of the working folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

VARIABLE: Final = "_COMPLETE_UNBROKEN"
TABLE: Final = Path(__file__).with_name("commands.json")
JOURNAL_BYTES: Final = 512 << 10
"""So much of the end of a journal is read."""
MOST: Final = 50
_WORD: Final = re.compile(rb'"(i-\d{1,6})"|"node":"([A-Za-z0-9][A-Za-z0-9._-]{0,62})"')


class Offer(NamedTuple):
    value: str
    text: str = ""
    kind: str = "plain"
    """`file` or `dir`: the shell completes paths itself."""


def answer(shell: str) -> str:
    """What click's script for `bash`, `zsh` or `fish` wants to read. Never raises."""
    try:
        words = shlex.split(os.environ.get("COMP_WORDS", ""))
    except ValueError:  # an open quote
        words = os.environ.get("COMP_WORDS", "").split()
    place = os.environ.get("COMP_CWORD", "")
    if shell == "fish":
        begun = place
        words = words[:-1] if begun and words[-1:] == [begun] else words
    else:
        number = int(place) if place.isdigit() else len(words)
        begun = words[number] if number < len(words) else ""
        words = words[:number]
    try:
        offers = offered(json.loads(TABLE.read_bytes()), words[1:], begun, Path.cwd())
    except (OSError, ValueError):
        return ""
    if shell == "zsh":
        return "".join(f"{one.kind}\n{one.value.replace(':', chr(92) + ':')}\n{one.text or '_'}\n" for one in offers)
    with_text = shell == "fish"
    lines = (f"{one.kind},{one.value}" + (f"\t{one.text}" if with_text and one.text else "") for one in offers)
    return "".join(f"{line}\n" for line in lines)


def offered(table: dict[str, Any], words: list[str], begun: str, cwd: Path) -> list[Offer]:
    """What may stand in place of `begun`, after the `words` behind `unbroken`."""
    name, command, rest = "", table[""], list(words)
    while rest and f"{name} {rest[0]}".strip() in table:
        name = f"{name} {rest.pop(0)}".strip()
        command = table[name]
    if "--" in rest:
        return [Offer("", kind="file")]
    job_dir, before, arguments = "", "", 0
    for word in rest:
        takes_value = before in command["options"] and command["options"][before][1] is not None
        job_dir = word if takes_value and before == "--job-dir" else job_dir
        if not takes_value:
            arguments += not word.startswith("-")
            before = word
        else:
            before = ""
    expected = command["options"].get(before, ("", None))[1]
    if expected is not None:
        return _of_kind(expected, begun, cwd, job_dir)
    if begun.startswith("-"):
        found = [Offer(option, text) for option, (text, _) in command["options"].items()]
    elif command["commands"] and not arguments:
        found = [Offer(one, table[f"{name} {one}".strip()]["help"]) for one in command["commands"]]
    elif command["arguments"]:
        return _of_kind(command["arguments"][min(arguments, len(command["arguments"]) - 1)], begun, cwd, job_dir)
    else:
        found = []
    return [one for one in found if one.value.startswith(begun)]


def _of_kind(kind: str | list[str], begun: str, cwd: Path, job_dir: str) -> list[Offer]:
    """`kind`: values, or the words for what is looked up now."""
    values: list[str] = []
    if isinstance(kind, list):
        values = kind
    elif kind == "file":
        return [Offer(begun, kind="file")]
    elif kind == "page":
        pages = TABLE.parents[1] / "pages" if (TABLE.parents[1] / "pages").is_dir() else TABLE.parents[2]
        values = sorted(path.stem for path in (*pages.glob("docs/*.md"), *pages.glob("docs/runbook/Unbroken*.md")))
    elif kind == "job":
        values = [job.name for job in _jobs(cwd)]
    elif kind:
        named = (cwd / job_dir, cwd / "unbroken-jobs" / job_dir) if job_dir else _jobs(cwd)[:1]
        folder = next((one for one in named if one.is_dir()), None)
        incidents, nodes = _reported(folder) if folder is not None else ([], [])
        values = ["last", *incidents] if incidents and "incident" in kind else []
        values += nodes if "node" in kind else []
    found = [Offer(value) for value in values if value.startswith(begun)][:MOST]
    return [*found, Offer(begun, kind="dir")] if kind == "job" and not found else found


def _jobs(cwd: Path) -> list[Path]:
    """The job folders under `unbroken-jobs`, the newest first."""
    try:
        jobs = [one for one in (cwd / "unbroken-jobs").iterdir() if (one / "epochs").is_dir()]
        return sorted(jobs, key=lambda one: (one / "epochs").stat().st_mtime, reverse=True)
    except OSError:
        return []


def _reported(folder: Path) -> tuple[list[str], list[str]]:
    """Incidents, the newest first, and nodes that the newest journals of a job name."""
    incidents: set[int] = set()
    nodes: set[str] = set()
    for path in _newest(folder.glob("journal.*.jsonl")):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                for start in {0, max(0, size - JOURNAL_BYTES)}:  # nodes join at the beginning
                    file.seek(start)
                    for incident, node in _WORD.findall(file.read(JOURNAL_BYTES)):
                        incidents |= {int(incident[2:])} if incident else set()
                        nodes |= {node.decode()} if node else set()
        except OSError:
            continue
    newest = max(incidents, default=0)
    return [f"i-{number}" for number in range(newest, max(0, newest - MOST), -1)], sorted(nodes)


def _newest(paths: Iterable[Path]) -> list[Path]:
    numbered = [(int(path.name.split(".")[1]), path) for path in paths if path.name.split(".")[1].isdigit()]
    return [path for _, path in sorted(numbered, reverse=True)[:3]]
