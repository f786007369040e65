"""Where every program of ours begins: with our own packages, whatever PYTHONPATH and the working folder hold.

    unbroken ARGUMENTS, python -m unbroken ARGUMENTS      the command
    python .../unbroken.py -m MODULE ARGUMENTS            a module of ours (`supervisor.paths.daemon_argv`)

    import unbroken; unbroken.diagnose("run.log")         the functions of `supervisor.api`, for scripts and notebooks

A user's repository may have a folder or file `recovery`, `supervisor` or `diagnosis`, and PYTHONPATH may lead to the
packages of another Python. Neither may come before ours; what they add stays importable behind (plug-ins).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supervisor.api import JobJournal as JobJournal
    from supervisor.api import diagnose as diagnose
    from supervisor.api import read_journal as read_journal

__all__ = ["JobJournal", "diagnose", "read_journal"]


def __getattr__(name: str) -> Any:
    """The names of the API, imported when the first one is used. Raises AttributeError for any other."""
    if name not in __all__:
        raise AttributeError(f"module 'unbroken' has no attribute {name!r}")
    import supervisor

    ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervisor")
    if os.path.dirname(os.path.abspath(supervisor.__file__ or "")) != ours:
        why = f"{supervisor.__file__} is found before unbroken's own package `supervisor`"
        raise ImportError(f"{why}: import unbroken from another folder")
    from supervisor import api

    return getattr(api, name)


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


def main() -> None:
    """The command, or a module of ours."""
    find_ourselves()
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
