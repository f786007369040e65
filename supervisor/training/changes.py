"""What a script changes before it imports an installed package, which a package imported earlier would not have met.

In a rank, `ScriptChanges` hears of each import that the script begins (an audit hook), and looks whether functions,
classes or settings are still as they were. Only what was imported before the first change may be imported
before the script the next time. In doubt an import counts as changed.
Nothing of the script's is touched, and no code of it is called.
"""

from __future__ import annotations

import atexit
import locale
import logging
import os
import sys
import time
import warnings
import weakref
from operator import is_
from typing import TYPE_CHECKING, Any, Dict, Iterable  # noqa: UP035 (Python 3.9)

if TYPE_CHECKING:
    from supervisor.training import imports
else:
    imports = sys.modules["_unbroken_bootstrap"].sibling("imports")

MOST_S = 0.4
"""CPU time for all looks of a rank together. What is imported later is left to the script."""
KNOWN = {("torch", "compile"), ("warnings", "formatwarning")}
"""Lightning replaces them when it is imported, to note arguments and to shorten lines of warnings."""
SCRIPT = ("__main__", "__mp_main__")
OURS = "_unbroken"
COUNTERS = (int, float)
PLAIN = (bool, str, bytes, tuple, frozenset, type(None), *COUNTERS)
Names = Dict[str, Any]  # noqa: UP006 (Python 3.9)

keeper_modules: dict[str, tuple[Any, Any, Names]] = {}
"""Of the keeper, before any script: name -> module, its names, and what they meant."""
keeper_classes: list[tuple[str, Any, Names]] = []


def remember_keeper() -> None:
    """Called once in the keeper; forks find it there."""
    keeper_modules.update({name: noted for name, noted in noted_modules(sys.modules) if not name.startswith(OURS)})
    seen = set()
    for _module, _space, names in list(keeper_modules.values()):
        for value in names.values():
            if isinstance(value, type) and id(value) not in seen:
                seen.add(id(value))
                space = type.__dict__["__dict__"].__get__(value)
                keeper_classes.append((f"{value.__module__}.{value.__qualname__}", space, dict(space)))


def forget_keeper() -> None:
    """At the end: what is held longer than its module is destroyed when torch is gone already. It takes a fork 50 ms of
    a core, which copies each page on which something is let go."""
    keeper_modules.clear()
    keeper_classes.clear()


def noted_modules(names: Iterable[str]) -> Iterable[tuple[str, tuple[Any, Any, Names]]]:
    for name in list(names):
        module = sys.modules.get(name)
        try:
            space = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        yield name, (module, space, dict(space))


def same(space: Any, before: Names) -> bool:
    return len(space) == len(before) and all(map(is_, before.values(), space.values()))


def replaced(name: str, space: Any, before: Names, folders: tuple[str, ...]) -> str:
    """The first name in `space` that means something else, or is new; empty for none that matters."""
    now = dict(space)
    for key in {**before, **now}:
        old, new = before.get(key, before), now.get(key, before)
        if old is new or not matters(key, old, new, before):
            continue
        if name in ("sys", "warnings") and (key.endswith("hook") or not callable(new)):
            continue  # filters and streams are settings; an import that replaces a hook is refused by itself
        if (name, key) in KNOWN and code_file(new).startswith(folders):
            continue
        if new is sys.modules.get(f"{name}.{key}") or wraps_for_compiler(new, old) or is_ours(new):
            continue
        if is_profiled(new, old) or (key not in before and is_of_package(name, key, new)):
            continue
        return f"{name}.{key}"
    return ""


def matters(key: str, old: Any, new: Any, missing: Any) -> bool:
    """Not what modules and classes keep for themselves: caches, counters, and what Python adds."""
    if not isinstance(key, str) or key.startswith(("__", "_abc_")):
        return any(callable(one) for one in (old, new)) and old is not missing and new is not None
    if any(callable(one) or hasattr(type(one), "__get__") or hasattr(type(one), "__path__") for one in (old, new)):
        return True
    if isinstance(old, type(sys)) or isinstance(new, type(sys)):
        return True
    if old is missing or new is missing:
        return not key.startswith("_")
    if type(old) in COUNTERS and type(new) in COUNTERS:
        return False
    if isinstance(old, PLAIN) and isinstance(new, PLAIN):
        return not key.startswith("_") and bool(type(old) is not type(new) or old != new)
    return not key.startswith("_")


def code_file(function: Any) -> str:
    return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


def is_ours(value: Any) -> bool:
    names = getattr(type(value), "__module__", ""), getattr(value, "__module__", "")
    return any(isinstance(name, str) and name.startswith(OURS) for name in names)


def is_profiled(now: Any, before: Any) -> bool:
    """The first instance of an optimizer wraps `step` of its class."""
    return bool(
        getattr(now, "hooked", False) is True
        and getattr(now, "__wrapped__", None) is before
        and code_file(now).endswith("/torch/optim/optimizer.py")
    )


def is_of_package(name: str, key: str, value: Any) -> bool:
    """A package that loads its parts when they are asked for keeps them under the names that they have."""
    module = getattr(value, "__module__", None)
    return (
        isinstance(module, str)
        and module.partition(".")[0] == name.partition(".")[0]
        and getattr(sys.modules.get(module), key, None) is value
    )


def add_new(space: Any, before: Names) -> list[tuple[Names, str]]:
    """What an import has added: where it is noted, and its name."""
    new = [one for one in list(space) if one not in before]
    before.update({key: space[key] for key in new})
    return [(before, key) for key in new]


def wraps_for_compiler(now: Any, before: Any) -> bool:
    """The same function in a wrapper of torch's, into which torch.compile does not look. `torch.compile` at the top of
    a module, as torchtitan has it, puts some of torch's own functions into one."""
    try:
        return object.__getattribute__(now, "__dict__").get("_torchdynamo_orig_callable") is before
    except AttributeError:
        return False


def torch_settings(torch: Any) -> list[Any]:
    backends = torch.backends
    return [
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_cublas_allow_tf32(),
        torch._C._get_cudnn_allow_tf32(),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        torch.get_flush_denormal() if hasattr(torch, "get_flush_denormal") else None,
        torch.multiprocessing.get_sharing_strategy() if hasattr(torch, "multiprocessing") else None,
    ]


def settings() -> dict[str, Any]:
    """What a package may read while it is imported, besides names and variables."""
    torch: Any = sys.modules.get("torch")
    core: Any = getattr(torch, "_C", None)
    depth = getattr(core, "_len_torch_function_stack", None)
    root = logging.getLogger()
    return {
        "settings of torch": torch_settings(torch) if torch is not None else None,
        "torch's default device": depth() if depth is not None else None,
        "logging": (root.level, len(root.handlers), root.manager.disable),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the working folder": os.getcwd(),
        "sys.argv": sys.argv[1:],
        "sys.meta_path": [id(one) for one in sys.meta_path],
        "sys.path_hooks": [id(one) for one in sys.path_hooks],
        "the streams": [id(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
        "the interpreter": (sys.getrecursionlimit(), sys.flags, sys.gettrace(), sys.getprofile()),
    }


class ScriptChanges:
    """`safe`: what was imported while nothing was changed. `why`: what was changed then, or why we cannot tell."""

    def __init__(self, folders: list[str], standard: list[str], arguments: list[str]) -> None:
        """`arguments`: of the script."""
        self.folders, self.libraries = tuple(folders), (*folders, *standard)
        self.pid = os.getpid()
        self.why = ""
        self.safe: set[str] = {*sys.modules}
        self.variables: set[str] = set()
        """Changed by the script before an import."""
        self.filtered = False
        """The script changed filters of warnings before an import."""
        self.path: dict[str, None] = {}
        self.packages: dict[str, tuple[Any, Any, Names]] = {}
        self.known: dict[str, Any] = {}
        self.added: list[tuple[Names, str]] = []
        """To what the keeper remembers, since the fork."""
        self.spent_s = 0.0
        self.looks = 0
        self.current: Any = None
        """While the script imports: the reference that tells the end, and the modules that were there before."""
        self.last: tuple[str, int, int] = ("", 0, 0)
        self._note()
        self.settings["sys.argv"] = arguments

    def start(self) -> None:
        folders, begun, give_up = self.folders, self._begun, self._give_up
        atexit.register(self._end)

        def heard(event: str, args: tuple[Any, ...]) -> None:
            if (event != "exec" and event != "import") or self.why or not self.pid:
                return
            try:
                if event == "exec":
                    code = args[0]
                    if getattr(code, "co_name", "") != "<module>" or not code.co_filename.startswith(folders):
                        return
                    frame = sys._getframe(1)
                    if frame.f_code.co_name != "_call_with_frames_removed":
                        return
                    begun(str(frame.f_locals["args"][1]["__name__"]), frame)
                elif args[1] is not None and str(args[1]).startswith(folders):
                    begun(str(args[0]), sys._getframe(1))
            except Exception as error:
                give_up(f"{type(error).__name__}: {error}")

        sys.addaudithook(heard)

    def _give_up(self, why: str) -> None:
        self.why = self.why or why[:300] or "unknown"
        if os.getpid() == self.pid:  # what ends, ends in the rank
            self._let_go()

    def _end(self) -> None:
        """The script has ended: nothing that it imports from now on counts."""
        self.pid = 0
        self._let_go()
        forget_keeper()

    def _let_go(self) -> None:
        """Of what is the script's: what a package drops later has an end then, as without us. What the keeper had
        before the fork stays: to let go of that costs more (`forget_keeper`)."""
        self.current = None
        self.packages.clear()
        self.known.clear()
        for names, key in self.added:
            names.pop(key, None)
        self.added.clear()

    def _begun(self, name: str, frame: Any) -> None:
        """An installed module is about to be loaded. Who asks for it: another one, or the script?"""
        if os.getpid() != self.pid:
            self._give_up("another process")
            return
        asks = None
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(("<frozen", *self.libraries)):
                asks = asks or frame
            elif file.startswith(self.folders) and is_loading(frame):
                return
            frame = frame.f_back
        if self.current is not None:
            self._give_up(f"{name} is imported while something else is")
            return
        began = time.thread_time()
        here = (id(asks), asks.f_lasti) if asks is not None else (0, 0)
        same_statement = here == self.last[1:] and here[0] != 0 and name.startswith(self.last[0] + ".")
        why = "" if same_statement else self._look()
        if why:
            self._give_up(f"{why} before {name} is imported")
        else:
            self.last = (name, *here)
            lock = sys.modules["_frozen_importlib"]._module_locks[name]()
            self.current = weakref.ref(lock, self._ended), frozenset(sys.modules) - {name}
        self.spent_s += time.thread_time() - began

    def _ended(self, _: object) -> None:
        if self.current is None or self.why:
            return
        try:
            began = time.thread_time()
            self.safe.update(sys.modules.keys() - self.current[1])
            self._note()
            self.current = None
            self.spent_s += time.thread_time() - began
            if self.spent_s > MOST_S:
                self._give_up(f"{MOST_S} s were spent with looking for changes")
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _note(self) -> None:
        """How everything is now, as it may stay until the script imports again."""
        for _module, space, before in keeper_modules.values():
            if len(space) != len(before):
                self.added += add_new(space, before)
        for _name, space, before in keeper_classes:
            if len(space) != len(before):
                self.added += add_new(space, before)
        for name, module in list(sys.modules.items()):
            noted = self.packages.get(name)
            if noted is not None and noted[0] is module:
                if not same(noted[1], noted[2]):
                    self.packages[name] = module, noted[1], dict(noted[1])
            elif name not in keeper_modules and self._is_library(name, module):
                self.packages.update(noted_modules([name]))
        self.known = dict(sys.modules)
        self.environ = dict(os.environ)
        self.filters = list(warnings.filters)
        self.path.update(dict.fromkeys(entry for entry in sys.path if isinstance(entry, str)))
        self.settings = settings()

    def _is_library(self, name: str, module: Any) -> bool:
        return imports.origin(name, module).startswith(self.libraries)

    def _look(self) -> str:
        """What has changed since the last import, or for the keeper's modules since the fork."""
        self.looks += 1
        self.path.update(dict.fromkeys(entry for entry in sys.path if isinstance(entry, str)))
        for what, value in settings().items():
            if value != self.settings[what]:
                return f"the script changes {what}"
        for name, module in list(self.known.items()):
            if sys.modules.get(name, self) is not module and name not in SCRIPT:
                return f"the script replaces sys.modules[{name!r}]"
        for name in [one for one in list(sys.modules) if one not in self.known]:
            if not imports.origin(name, sys.modules[name]) and not is_namespace(sys.modules[name]):
                return f"the script sets sys.modules[{name!r}]"
        for noted in (keeper_modules, self.packages):
            for name, (_module, space, before) in list(noted.items()):
                if name not in SCRIPT and not same(space, before):
                    found = replaced(name, space, before, self.folders)
                    if found:
                        return f"the script replaces {found}"
        for name, space, before in keeper_classes:
            if not same(space, before):
                found = replaced(name, space, before, self.folders)
                if found:
                    return f"the script replaces {found}"
        now = dict(os.environ)
        self.variables |= {one for one in {*now, *self.environ} if now.get(one) != self.environ.get(one)}
        self.filtered = self.filtered or self.filters != list(warnings.filters)
        return ""


def is_loading(frame: Any) -> bool:
    return bool(frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__")


def is_namespace(module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and (spec.origin in (None, "built-in", "frozen")) and spec.loader is not None
