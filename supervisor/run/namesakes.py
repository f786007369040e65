"""Packages of the user's that have the name of one of ours, in the environment that both are installed in.

Scripts find theirs first in their own folder and in PYTHONPATH, and our processes find ours first (`unbroken.py`). One
case is left: a package that is installed as editable comes after all that is installed as copies, also after ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

OURS = ("diagnosis", "recovery", "supervisor")


def namesakes(python: str, script_folder: Path, environment_path: str) -> tuple[str, ...]:
    """A sentence for each package that scripts of `python` do not find, because ours has its name.

    `environment_path`: PYTHONPATH.
    """
    if os.path.normpath(Path(python).parent.parent) != os.path.normpath(sys.prefix):
        return ()  # ours is not installed there
    first = [str(script_folder), *(os.path.abspath(entry) for entry in environment_path.split(os.pathsep) if entry)]
    here = Path(__file__).resolve().parents[2]
    return tuple(
        f"scripts of this environment find unbroken's package `{name}` before {found} (installed as editable): start "
        f"with PYTHONPATH={found.parent}, or install unbroken in an environment of its own"
        for name, found in hidden(first, sys.path, editable(), here).items()
    )


def hidden(first: Sequence[str], path: Sequence[str], mapped: dict[str, str], here: Path) -> dict[str, Path]:
    """Where the packages are that have a name of ours and are found after ours in `here`.

    `first`: where scripts look before that. `path`: all of `sys.path`. `mapped`: what setuptools' editable installs
    say of names and folders.
    """
    found: dict[str, Path] = {}
    folders = [Path(entry) for entry in path if not entry.endswith(("/site-packages", "/dist-packages"))]
    for name in OURS:
        if any(_in(Path(entry), name) for entry in first):
            continue
        places = [place for folder in folders if (place := _in(folder, name))]
        places += [Path(mapped[name])] if name in mapped else []
        if place := next((one for one in places if one.resolve().parent != here.resolve()), None):
            found[name] = place
    return found


def _in(folder: Path, name: str) -> Path | None:
    for path, is_there in ((folder / name, os.path.isdir), (folder / f"{name}.py", os.path.isfile)):
        if is_there(path):
            return path
    return None


def editable(finders: Iterable[object] | None = None) -> dict[str, str]:
    """The names that setuptools' editable installs map to folders, in this Python."""
    found: dict[str, str] = {}
    for finder in sys.meta_path if finders is None else finders:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(module, "MAPPING", None)
        if getattr(module, "__name__", "").startswith("__editable__") and isinstance(mapping, dict):
            found |= {str(name): str(folder) for name, folder in mapping.items()}
    return found
