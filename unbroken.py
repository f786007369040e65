"""Where every program of ours begins: with our own packages, whatever PYTHONPATH and the working folder hold.

    unbroken ARGUMENTS, python -m unbroken ARGUMENTS      the command
    python .../unbroken.py -m MODULE ARGUMENTS            a module of ours (`supervisor.paths.daemon_argv`)

A user's repository may have a folder or file `recovery`, `supervisor` or `diagnosis`, and PYTHONPATH may lead to the
packages of another Python. Neither may come before ours; what they add stays importable behind (plug-ins).
"""

from __future__ import annotations

import os
import sys


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
