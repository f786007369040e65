"""The training side: files that run inside the training environment (standard library and torch only).

The daemon side uses what is in this module; the other modules are started by path with the training Python.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Dict, List, Mapping  # noqa: UP035 (this package is read by Python 3.9 as well)

HERE = Path(__file__).resolve().parent
KEEPER = HERE / "keeper.py"
STUB = HERE / "stub.py"
SHIM = HERE / "shim"


def keeper_command(python: str, local_dir: Path) -> List[str]:  # noqa: UP006
    """The command line of a node's keeper. Start it from a main thread: it dies with the thread that started it."""
    return [
        *(python, "-u", str(KEEPER), "--socket", str(local_dir / "keeper.sock"), "--local-dir", str(local_dir)),
        *("--log", str(local_dir / "keeper.log"), "--parent", str(os.getpid())),
    ]


def write_stub(local_dir: Path, python: str) -> Path:
    """Write the executable that PYTHON_EXEC names and return its path.

    It goes to `local_dir`, or to the user's cache folder where programs in `local_dir` may not be executed (noexec).
    Raises OSError when there is no such place.
    """
    text = f'#!/bin/sh\nexec {shlex.quote(python)} -IS {shlex.quote(str(STUB))} "$@"\n'
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unbroken"
    for folder in (local_dir, cache / f"{local_dir.name}-{os.getpid()}"):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "python"
        temporary = folder / f".python.{os.getpid()}"
        temporary.write_text(text)
        temporary.chmod(0o755)
        temporary.replace(path)
        if os.access(path, os.X_OK):
            return path
    raise OSError(f"programs can be executed neither in {local_dir} nor in {cache}")


def launcher_variables(local_dir: Path, node: str, stub: Path, environ: Mapping[str, str]) -> Dict[str, str]:  # noqa: UP006
    """What the launcher's environment needs on top of the user's own. A user's own PYTHON_EXEC wins."""
    inherited = environ.get("PYTHONPATH")
    return {
        "UNBROKEN_AGENT_SOCKET": str(local_dir / "agent.sock"),
        "UNBROKEN_KEEPER_SOCKET": str(local_dir / "keeper.sock"),
        "UNBROKEN_NODE": node,
        "PYTHON_EXEC": environ.get("PYTHON_EXEC") or str(stub),
        "PYTHONPATH": os.pathsep.join([str(SHIM), inherited] if inherited else [str(SHIM)]),
    }
