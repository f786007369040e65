"""Commands that ask first: what is asked, and what is done after it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from supervisor.cli.job_commands import OPERATOR_COMMANDS, give
from supervisor.errors import UnbrokenError

class Job:  # its controller says what the command would do: once for each node that is named, then for the last one
    is_guessed, folder, drains = False, None, sys.argv[2].split(",")

    def client(self):
        return self

    def command(self, request):
        if not request.confirm:
            print("given", request.command, request.argument)
            return {"schema": 1, "ok": True, "notes": ["done"]}
        node = self.drains.pop(0) if len(self.drains) > 1 else self.drains[0]
        if not node:
            return {"schema": 1, "ok": True, "notes": ["done at once"]}
        told = {"would": "would drain " + node, "refused": False, "interrupts": False, "drains": [node]}
        return {"schema": 1, "state": "RUNNING", "attempt": None, "leave": [], "join": [], "confirm": True, **told}

command = next(one for one in OPERATOR_COMMANDS if one.name == sys.argv[1])
options = {"dry_run": False, "yes": sys.argv[3] == "yes", "reason": "", "as_json": False}
more = {"approve": {"what": "n7", "site": False}, "cordon": {"node": "n7"}, "swap": {"node": "n7", "at_once": False}}
inner = command.callback
while hasattr(inner, "__wrapped__"):
    inner = inner.__wrapped__
try:
    inner(Job(), **more[command.name], **options)
except UnbrokenError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def run(command: str, drains: str, typed: str | None = None, yes: str = "") -> tuple[int, str]:
    """Exit code and output; `typed`: at a terminal, else nobody is there to be asked."""
    master, terminal = pty.openpty()
    if typed is not None:
        os.write(master, typed.encode())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, drains, yes],
        stdin=terminal if typed is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    os.close(master)
    os.close(terminal)
    return done.returncode, done.stdout


@pytest.mark.parametrize("command", ["approve", "cordon", "swap"])
def test_what_drains_a_node_is_asked_first(command: str) -> None:
    code, output = run(command, "n7")
    assert (code, "given" in output) == (2, False), output
    code, output = run(command, "n7", yes="yes")
    assert (code, f"given {command} n7" in output) == (0, True), output


def test_the_answer_counts() -> None:
    code, output = run("approve", "n7", "n\n")
    assert (code != 0, "given" in output) == (True, False), output
    code, output = run("approve", "n7", "y\n")
    assert (code, output.count("would drain n7"), "given approve n7" in output) == (0, 1, True), output


def test_what_has_changed_since_is_asked_again() -> None:
    """Somebody has said yes to n7, and it would be n8 now."""
    code, output = run("approve", "n7,n8", "y\nn\n")
    assert (code != 0, "would drain n8" in output, "given" in output) == (True, True, False), output
    code, output = run("approve", "n7,", "y\n")
    assert (code, "done at once" in output, "given" in output) == (0, True, False), output
