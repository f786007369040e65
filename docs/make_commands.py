"""Makes supervisor/cli/commands.json (for completion) and docs/unbroken.1 (the man page) from the commands.

Run `python docs/make_commands.py` after a change of a command or an option; a test compares.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import click

from diagnosis.taxonomy import FailureClass
from supervisor.bench.command import group as bench
from supervisor.cli.docs import root
from supervisor.cli.main import HELP, main
from supervisor.demo.demo import command as demo

TABLE = Path(__file__).parent.parent / "supervisor" / "cli" / "commands.json"
MAN = Path(__file__).with_name("unbroken.1")
KINDS = {
    "incident": "incident", "node": "node", "what": "incident node", "job_dir": "job", "job_name": "job",
    "job_names": "job", "page": "page", "paths": "file", "files": "file", "journal": "file", "good": "file",
}  # fmt: skip
OWN_OPTIONS = {"bench": bench, "demo": demo}
"""Commands that read their options themselves."""


def commands(group: click.Group, before: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name in sorted(group.commands):
        command = OWN_OPTIONS.get(name, group.commands[name]) if not before else group.commands[name]
        if command.hidden:
            continue
        found[f"{before} {name}".strip()] = command
        if isinstance(command, click.Group):
            found |= commands(command, f"{before} {name}".strip())
    return found


def kind(param: click.Parameter) -> Any:
    """What may stand there: a list of values, what is looked up at the moment, or nothing that is known."""
    if isinstance(param.type, click.Choice):
        return [str(one) for one in param.type.choices]
    if param.name == "failure_class":
        return sorted(one.value for one in FailureClass)
    if param.name == "name" and isinstance(param, click.Argument):
        return sorted(path.name for path in (root() / "deploy" / "slurm").glob("*"))
    is_file = isinstance(param.type, click.Path) or re.search(r"_(file|dir|dirs|log)$", param.name or "")
    return KINDS.get(param.name or "", "file" if is_file else "")


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def options(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden]


def table() -> str:
    rows: dict[str, Any] = {}
    for name, command in {"": main, **commands(main)}.items():
        rows[name] = {
            "help": command.get_short_help_str(80),
            "commands": sorted(command.commands) if isinstance(command, click.Group) else [],
            "options": {
                spelling: [one_line(one.help)[:80], None if one.is_flag else kind(one)]
                for one in options(command)
                for spelling in (*one.opts, *one.secondary_opts)
                if spelling.startswith("--")
            },
            "arguments": [kind(one) for one in command.params if isinstance(one, click.Argument)],
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f"{{\n{lines}\n}}\n"


def troff(text: str) -> str:
    """Text as troff takes it: nothing in it is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line or ".PP" for line in text.splitlines())


def described(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=f"unbroken {name}", **command.context_settings)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        ".SS " + troff(f"unbroken {name} {usage}"),
        troff(inspect.cleandoc((command.help or "").replace("\b", ""))),
    ]
    for one in options(command):
        record = one.get_help_record(context)
        if record is not None:
            lines += [".TP", f".B {troff(record[0])}", troff(one_line(record[1]))]
    return lines


def man() -> str:
    known = commands(main)
    lines = ['.\\" Made by docs/make_commands.py', '.TH UNBROKEN 1 "" unbroken "User commands"', ".SH NAME"]
    lines += ["unbroken \\- keep a distributed pretraining run alive", ".SH SYNOPSIS", ".B unbroken run \\-\\-"]
    lines += [".I COMMAND", ".br", ".B unbroken", ".I COMMAND", "[\\fIOPTIONS\\fR]", ".SH DESCRIPTION"]
    lines += [troff("Put `unbroken run --` in front of the command that starts the run; the script does not change.")]
    for title, names in HELP.items():
        lines.append(f".SH {title.upper()}")
        for name in names:
            for each, command in known.items():
                if each.split(" ")[0] == name:
                    lines += described(each, command)
    lines += [".SH SEE ALSO", troff("`unbroken docs` has the pages that are named here, such as docs/checkpoints.md.")]
    return "\n".join(line for line in lines if line) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
    MAN.write_text(man(), encoding="utf-8")
