"""The training environment's Python, found behind `torchrun` or `python`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from supervisor.errors import LaunchRefused

ASK_TIMEOUT_S = 60.0
"""A first import from a cold network file system takes its time."""


def training_python(program: str, is_python: bool, environment: Mapping[str, str]) -> str:
    """Path of the Python that `program` (torchrun, or a Python itself) runs with. Raises LaunchRefused.

    The path is not resolved: a virtual environment's Python is a link, and means something only by its place.
    """
    path = _find(program, environment)
    python = _behind_scripts(path) if is_python else python_of_script(path, environment) or _sibling(path)
    if not python:
        raise LaunchRefused(f"cannot find the Python that {path} runs: use `python -m torch.distributed.run` instead")
    if not _has_torch(python):
        raise LaunchRefused(f"{python} has no torch: activate the training environment, or give its torchrun's path")
    return python


def _find(program: str, environment: Mapping[str, str]) -> Path:
    found = shutil.which(program, path=environment.get("PATH"))
    beside = Path(sys.executable).parent / program
    if found is None and os.sep not in program and os.access(beside, os.X_OK):
        found = str(beside)  # .venv/bin/unbroken, with the environment not activated
    if found is None:
        raise LaunchRefused(f"{program} is not found: activate the training environment, or give its path")
    return Path(found).absolute()


def _head(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""


def python_word(head: str) -> str:
    """The interpreter that a script's first lines name: a path, or a bare word for PATH. Empty: not a Python."""
    lines = head.split("\n", 2)
    if not lines[0].startswith("#!"):
        return ""
    words = lines[0][2:].split()
    if words and words[0].endswith("/sh") and len(lines) > 1:
        # pip's and uv's way around long paths and spaces: '''exec' "/long path/python" "$0" "$@"
        quoted = re.match(r"""'''exec'\s+(?:"([^"]+)"|'([^']+)'|(\S+))""", lines[1])
        return next((part for part in quoted.groups() if part), "") if quoted else ""
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    word = words[0] if words else ""
    return word if re.match(r"(python|pypy)", Path(word).name) else ""


def python_of_script(path: Path, environment: Mapping[str, str]) -> str:
    """The Python of a script like torchrun by its first lines; empty when they name none that exists."""
    word = python_word(_head(path))
    if not word:
        return ""
    found = shutil.which(word, path=environment.get("PATH"))
    return _behind_scripts(Path(found)) if found else ""


def _sibling(path: Path) -> str:
    for name in ("python", "python3"):
        beside = path.parent / name
        if os.access(beside, os.X_OK):
            return _behind_scripts(beside)
    return ""


def _behind_scripts(python: Path) -> str:
    """`python`, or what it runs when it is a script (pyenv's shims, wrappers)."""
    if not _head(python).startswith("#!"):
        return str(python)
    try:
        asked = subprocess.run(
            [str(python), "-c", "import sys; print(sys.executable)"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip().rpartition("\n")[2]


def _has_torch(python: str) -> bool:
    """Looked for where it usually is, which costs nothing; else the Python is asked."""
    prefix = Path(python).parent.parent
    for pattern in ("lib*/python3*/site-packages/torch/version.py", "lib*/python3*/dist-packages/torch/version.py"):
        if next(iter(prefix.glob(pattern)), None) is not None:
            return True
    question = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 3)"
    try:
        return (
            subprocess.run(
                [python, "-c", question],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_TIMEOUT_S,
                check=False,
            ).returncode
            != 3
        )
    except (OSError, subprocess.SubprocessError):
        return False
