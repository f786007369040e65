"""Tells the keeper what a rank has imported from installed packages, so that the next ranks find it there.

The beacon's thread calls `look`. Nothing is imported for it, and nothing of the script's is touched. What it writes is
no order: the keeper tries the imports in a process of its own (`fork_server.py`), and what it finds there decides.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
import warnings
from typing import Any, Mapping  # noqa: UP035 (Python 3.9)

STILL = 4
"""After so many looks (two seconds) without a new module, the imports count as done."""
MOST_WRITES = 8
MOST_MODULES = 20_000
LIMIT = 8 << 20
"""Of the file."""
OURS = ("UNBROKEN_", "PYTHON_EXEC", "PYTHONPATH")
keeper_has: frozenset[str] = frozenset()
"""What the keeper has imported itself."""


def installed_folders() -> list[str]:
    """Where packages are installed (site-packages). Editable installs and PYTHONPATH are elsewhere: a user's own."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    try:
        found += site.getsitepackages()
        if site.ENABLE_USER_SITE:
            found.append(site.getusersitepackages())
    except Exception:  # an interpreter without site
        pass
    return sorted({os.path.join(os.path.realpath(folder), "") for folder in found if folder})


def standard_folders() -> list[str]:
    found = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return sorted({os.path.join(os.path.realpath(folder), "") for folder in found if folder})


def origin(name: str, module: Any) -> str:
    """The file of a module; empty where it has none, or is an alias of another one. Runs no code of the module's."""
    try:
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
        if spec is None or spec.name != name or not spec.has_location:
            return ""
        return str(spec.origin or "")
    except Exception:
        return ""


class ImportRecord:
    """Writes `path` when the script has stopped importing, and again after it has imported more."""

    def __init__(self, path: str, given: Mapping[str, str], folders: list[str], changes: Any) -> None:
        """`given`: the environment that the script was started with. `changes`: a `ScriptChanges` that has started."""
        self.path = path
        self.given = given
        self.folders = tuple(folders)
        self.changes = changes
        self.count = self.told = self.still = self.writes = 0

    def look(self) -> None:
        count = len(sys.modules)
        self.still = self.still + 1 if count == self.count else 0
        self.count = count
        if self.still == STILL and count > self.told and self.writes < MOST_WRITES:
            self.told, self.writes = count, self.writes + 1
            data = json.dumps(self.content()).encode()
            with open(self.path, "wb") as file:  # cut short, it is no JSON
                file.write(data)

    def content(self) -> dict[str, Any]:
        """`modules`: in the order in which they were begun, up to where the script changed something before an import
        (`left`: what). The rest is what the script may have changed before."""
        modules = [
            name
            for name, module in list(sys.modules.items())
            if name in self.changes.safe
            and name not in keeper_has
            and os.path.realpath(origin(name, module)).startswith(self.folders)
        ]
        now = dict(os.environ)
        changed = {name for name in {*now, *self.given} if now.get(name) != self.given.get(name)}
        return {
            "modules": modules[:MOST_MODULES],
            "left": self.changes.why,
            "changed_variables": sorted(name for name in changed if not name.startswith(OURS)),
            "early_variables": sorted(name for name in self.changes.variables if not name.startswith(OURS)),
            "warning_filters": [str(one) for one in warnings.filters],
            "filtered": self.changes.filtered,
            "path": list(dict.fromkeys(one for one in [*self.changes.path, *sys.path] if isinstance(one, str))),
        }
