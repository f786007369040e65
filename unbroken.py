"""Where every program of ours begins: with our own packages, whatever PYTHONPATH and the working folder hold.

    unbroken ARGUMENTS, python -m unbroken ARGUMENTS      the command
    python .../unbroken.py -m MODULE ARGUMENTS            a module of ours (`supervisor.paths.daemon_argv`)

    import unbroken; unbroken.diagnose("run.log")         the functions of `supervisor.api`, for scripts and notebooks
    from unbroken import worker                           `recovery.worker`, for training scripts

A user's repository may have a folder or file `recovery`, `supervisor` or `diagnosis`, and PYTHONPATH may lead to the
packages of another Python. Neither may come before ours; what they add stays importable behind (plug-ins).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recovery import snapshot as snapshot
    from recovery import worker as worker
    from supervisor.api import Check as Check
    from supervisor.api import FailureClass as FailureClass
    from supervisor.api import JobJournal as JobJournal
    from supervisor.api import Probe as Probe
    from supervisor.api import diagnose as diagnose
    from supervisor.api import judged as judged
    from supervisor.api import read_journal as read_journal
    from supervisor.api import unknown as unknown

OURS = ("diagnosis", "recovery", "supervisor")
HERE = os.path.dirname(os.path.realpath(__file__))
FOR_SCRIPTS = ("snapshot", "worker")
"""Modules of `recovery` that training scripts use."""

__all__ = [
    "Check", "FailureClass", "JobJournal", "Probe", "diagnose", "judged", "read_journal", "snapshot", "unknown",
    "worker",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The names of the API, imported when the first one is used. Raises AttributeError for any other."""
    if name not in __all__:
        raise AttributeError(f"module 'unbroken' has no attribute {name!r}")
    import importlib

    if name in FOR_SCRIPTS:
        return importlib.import_module(f"{recovery_package()}.{name}")
    import supervisor

    if not is_below_here(supervisor.__file__):
        why = f"{getattr(supervisor, '__file__', None)} is found before unbroken's own package `supervisor`"
        raise ImportError(f"{why}: import unbroken from another folder")
    return getattr(importlib.import_module("supervisor.api"), name)


def is_below_here(file: str | None) -> bool:
    """Whether the `__init__.py` of a package is that of ours."""
    return os.path.dirname(os.path.dirname(os.path.realpath(file or ""))) == HERE


def recovery_package() -> str:
    """Under which name our `recovery` can be imported: a script may have a package of that name itself."""
    import importlib.util

    if "recovery" in sys.modules:
        file = getattr(sys.modules["recovery"], "__file__", None)
    else:
        found = importlib.util.find_spec("recovery")
        file = found.origin if found is not None else None
    if is_below_here(file):
        return "recovery"
    name, file = "_unbroken_recovery", os.path.join(HERE, "recovery", "__init__.py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[os.path.dirname(file)])
        assert spec is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return name


def our_packages_first(path: list[str], here: str, foreign: list[str], standard: str) -> list[str]:
    """`path` in the order: standard library, `here`, what is installed, the entries that are `foreign`.

    `foreign`: entries of PYTHONPATH, the working folder, the script's. `standard`: the standard library's folder; what
    lies below is installed for this Python, whoever names it.
    """
    library = (standard, os.path.join(standard, "lib-dynload"))
    kept = [entry for entry in path if entry and entry != here]
    last = [entry for entry in kept if entry in foreign and not entry.startswith(standard + os.sep)]
    installed = [entry for entry in kept if entry not in last]
    first = max((place + 1 for place, entry in enumerate(installed) if entry in library), default=0)
    return [*installed[:first], here, *installed[first:], *last]


def find_ourselves() -> None:
    """Set `sys.path`."""
    python_path = os.environ.get("PYTHONPATH", "")
    foreign = [os.path.abspath(entry) for entry in python_path.split(os.pathsep)] if python_path else []
    foreign += [os.path.dirname(os.path.realpath(word)) for word in sys.argv[:1] if word]
    try:
        foreign.append(os.getcwd())
    except OSError:  # it was deleted
        pass
    here, standard = (os.path.dirname(os.path.abspath(file)) for file in (__file__, os.__file__))
    sys.path[:] = our_packages_first(sys.path, here, foreign, standard)
    for name in list(sys.modules):  # a sitecustomize in PYTHONPATH may have imported theirs
        top = name.partition(".")[0]
        if top in OURS and not is_below_here(getattr(sys.modules.get(top), "__file__", None)):
            del sys.modules[name]


def main() -> None:
    """The command, or a module of ours."""
    find_ourselves()
    if os.environ.get("_COMPLETE_UNBROKEN", "").endswith("_complete"):
        from supervisor.cli.completion import answer

        sys.stdout.write(answer(os.environ["_COMPLETE_UNBROKEN"].partition("_")[0]))
        return
    if sys.argv[1:2] == ["-m"]:
        import runpy

        module = sys.argv[2]
        del sys.argv[1:3]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    from supervisor.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
