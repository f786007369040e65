"""A process that has imported what the ranks of an attempt had imported, from which those of the next are forked.

It is the trial of these imports as well: when they leave anything behind that the script could notice, or that a fork
must not inherit, the process says why and ends, and ranks are forked from the keeper as before. Nothing of the user's
own code is imported: the path has only the standard library and installed packages.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import gc
import importlib
import json
import locale
import logging
import multiprocessing
import os
import posix
import random
import select
import signal
import socket
import sys
import threading
import time
import types
import warnings
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035 (Python 3.9)

if TYPE_CHECKING:
    from supervisor.training import bootstrap, changes, imports, members, surroundings
else:
    bootstrap = sys.modules["_unbroken_bootstrap"]
    changes, imports, members, surroundings = (
        bootstrap.sibling(name) for name in ("changes", "imports", "members", "surroundings")
    )

to_json = json.dumps
"""As it was before the imports."""
WORK_S = 0.02
"""After so much CPU time it sleeps as long: it takes half a core at most, beside a training that runs."""
MOST_WARNED = 64 << 10
MOST_NAMES = 20_000
"""Of a user's folder."""
ADOPTED_S = 2.0
GO_S = 5.0
REAP_S = 0.05
"""So soon a process in between, which ends at once, is looked for."""
PR_SET_PDEATHSIG = 1
HARMLESS_THREADS = ("jemalloc_bg_thd",)
"""pyarrow's allocator starts it when it is loaded. It has handlers for forks, and does without the thread in one."""
READS_NAMES = {"fsspec.config": "FSSPEC", "networkx.utils.backends": "NETWORKX_"}
"""Who looks through all variables, and for which prefix."""
READ_WHEN_USED = (
    "CUDA_",
    "NCCL_",
    "TORCH_NCCL_",
    "TOKENIZERS_PARALLELISM",
    "HF_",
    "TRANSFORMERS_",
    "WANDB_",
    "MASTER_",
)
"""Native libraries read these, if at all, when they are used; what reads them in Python is seen."""
NO_TRIAL = ("tempfile.mkdtemp", "tempfile.mkstemp")
"""A temporary file that a package makes when it is imported would be shared by all ranks."""
DRIVERS = ("libcuda.so", "libnvidia-ml.so", "libamdhip64.so", "libze_loader.so")
OOM_SCORE = "/proc/{}/oom_score_adj"
ENDED_FIRST = 1000
"""When memory is short, the kernel ends the process with the highest score: a fork server, not a rank."""
TOUCHES_DRIVER = 17
"""The exit code where an import asks for GPUs. It ends before anything of the driver is called."""


class Unfit(Exception):
    """Why no rank may be forked from here, for our log."""


class Watched(os._Environ):  # type: ignore[type-arg]
    """os.environ and os.environb while packages are imported: notes which variables they read."""

    names: set[str] = set()
    prefixes: set[str] = set()
    everything = ""

    def __getitem__(self, key: Any) -> Any:
        reader, asked = self._reader()
        name = os.fsdecode(key)  # bytes in os.environb
        if asked or reader not in READS_NAMES or name.startswith(READS_NAMES[reader]):
            Watched.names.add(name)
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        reader, _ = self._reader()
        if reader in READS_NAMES:
            Watched.prefixes.add(READS_NAMES[reader])
        else:
            Watched.everything = Watched.everything or reader
        return super().__iter__()

    @staticmethod
    def _reader() -> tuple[str, bool]:
        """Which module reads, and whether it asks for one name."""
        frame: Any = sys._getframe(2)
        asked = frame.f_code.co_name in ("get", "__contains__", "setdefault", "pop")
        while frame is not None and frame.f_globals.get("__name__") in ("collections.abc", "os", "copy", "typing"):
            frame = frame.f_back
        return (frame.f_globals.get("__name__", "?") if frame is not None else "?"), asked


class Environment(types.ModuleType):
    """The module posix while packages are imported: its dictionary cannot be watched, so to ask for it is noted."""

    @property
    def environ(self) -> Any:
        Watched.everything = Watched.everything or sys._getframe(1).f_globals.get("__name__", "?")
        return self.__dict__["environ"]


class SeedSeen(_random.Random):
    """Notes that somebody sets Python's random numbers; a fork seeds them anew."""

    seen: list[str] = []

    def seed(self, *arguments: Any) -> None:
        if arguments and arguments[0] is not None:
            SeedSeen.seen.append("random.seed")
        super().seed(*arguments)

    def setstate(self, state: Any) -> None:
        SeedSeen.seen.append("random.setstate")
        super().setstate(state)


class RandomWatched(random.Random, SeedSeen):
    """Python's own generator while packages are imported: what random.Random calls comes by SeedSeen."""


class Finder:
    """Finds nothing: is asked first, notes the name, and sleeps now and then."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.worked_s = time.thread_time()
        """When it last slept. What it waits for a file system or a busy core counts as rest."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        self.names.add(name.partition(".")[0])
        worked = time.thread_time() - self.worked_s
        if worked > WORK_S:
            time.sleep(min(worked, 1.0))
            self.worked_s = time.thread_time()


def serve(become: Any, close_in_fork: Callable[[], None]) -> Any:
    """Import, tell the keeper, and fork at its orders. Returns in a forked rank only: what it is to be."""
    forked = None
    try:
        server = ForkServer(become)
        close_in_fork()
        try:
            be_ended_first()
            server.prepare()
        except Unfit as unfit:
            server.tell({"unfit": str(unfit)[:1000]})
            os._exit(0)
        forked = server.run()
    except BaseException as error:
        try:
            become.channel.send(to_json({"unfit": f"{type(error).__name__}: {error}"[:500]}).encode())
        finally:
            os._exit(1)
    if forked is None:
        os._exit(0)
    return forked


class ForkServer:
    def __init__(self, become: Any) -> None:
        self.become = become
        self.channel: socket.socket = become.channel
        self.record: dict[str, Any] = become.record
        self.keeper = os.getppid()
        self.finder = Finder()
        self.own_path: list[str] = []
        """Where the user's own modules may be: never imported from here, and looked through before a fork."""
        self.failed: list[str] = []
        self.files: dict[str, tuple[int, int]] = {}
        self.changed: dict[str, str | None] = {}
        """Variables that the imports themselves set, or removed (None)."""
        self.warned = ""
        """Warnings of the imports, for the standard error of each rank."""
        self.stale = ""
        self.patience = 0.0

    def tell(self, message: dict[str, Any]) -> None:
        self.channel.send(to_json(message).encode())

    # ----- importing -----

    def prepare(self) -> None:
        began = time.time()
        had = frozenset(sys.modules)
        output = self.be_like_a_rank()
        path, finders = self.only_installed()
        environ, looks = dict(os.environ), state()
        bindings = bound(had)
        guard = Guard()
        sys.meta_path.insert(0, self.finder)
        try:
            for name in self.record["modules"]:
                self.import_one(name)
        finally:
            sys.meta_path[:] = [*finders, *(one for one in sys.meta_path if one not in (*finders, self.finder))]
            guard.end()
        if self.failed:  # half of it may have stayed
            raise Unfit(f"{', '.join(self.failed[:5])} cannot be imported before the script")
        self.changed = difference(environ, dict(os.environ))
        new = {name: module for name, module in list(sys.modules.items()) if name not in had}
        self.judge(guard, looks, bindings, path, output)
        self.judge_modules(new, began)
        self.judge_variables(next((name for name, module in new.items() if is_native(name, module)), ""))
        sys.path[:] = path
        os.close(output)
        gc.collect()
        gc.freeze()
        self.tell(
            {
                "ready": True,
                "modules": sorted(new),
                "reads": sorted(Watched.names),
                "prefixes": sorted(Watched.prefixes),
                "private_kib": private_kib(),
                "took_s": round(time.time() - began, 2),
            }
        )

    def import_one(self, name: str) -> None:
        if name in sys.modules or name.startswith("_unbroken"):
            return
        try:
            importlib.import_module(name)
        except BaseException:  # the script may have gone about it in another way; it will import it itself
            self.failed.append(name)

    def be_like_a_rank(self) -> int:
        """Environment, folder, streams and `__main__` as the rank had; the file that output goes to."""
        become = self.become
        null = os.open(os.devnull, os.O_RDWR)
        output = os.memfd_create("output")
        for number, descriptor in enumerate((null, output, output)):
            os.dup2(descriptor, number)
        os.close(null)
        os.environ.clear()
        os.environ.update(become.environ)
        bootstrap.clean_environment()
        if become.umask is not None:
            os.umask(become.umask)
        if become.cwd is not None:
            os.chdir(become.cwd)
        bootstrap.rebuild_streams()
        bootstrap.prepare_main(become.argv)
        return output

    def only_installed(self) -> tuple[list[str], list[Any]]:
        """Leave in the path what is installed, and of the finders those of Python. Both as they were, for later."""
        path, finders = list(sys.path), list(sys.meta_path)
        folders = tuple(imports.installed_folders() + imports.standard_folders())
        kept = [entry for entry in path if inside(entry, folders) or entry.endswith(".zip")]
        kept = [entry for entry in kept if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.own_path = [entry for entry in path if entry not in kept and entry != bootstrap.HERE]
        sys.path[:] = kept
        sys.meta_path[:] = [one for one in finders if not module_of(one).startswith("__editable__")]
        return path, finders

    # ----- what the imports have left behind -----

    def judge(self, guard: Guard, looks: dict[str, Any], bindings: Any, path: list[str], output: int) -> None:
        if guard.seen:
            raise Unfit(f"the imports call {guard.seen[0]}")
        printed = os.lseek(output, 0, os.SEEK_END)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if os.lseek(output, 0, os.SEEK_END):
            raise Unfit(f"the imports print: {os.pread(output, 200, 0)!r}" if printed else "the imports print")
        for what, value in state().items():
            if value != looks[what]:
                raise Unfit(f"the imports change {what}: {str(looks[what])[:200]} -> {str(value)[:200]}")
        patches = sorted(rebound(bindings) - changes.KNOWN)
        if patches:
            raise Unfit(f"the imports replace {', '.join(map('.'.join, patches[:5]))}")
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
        else:
            raise Unfit("the imports leave a child process")
        if any(entry not in path for entry in sys.path):
            raise Unfit("the imports change sys.path")
        filters, theirs = [str(one) for one in warnings.filters], self.record["warning_filters"]
        if theirs[-len(filters) :] != filters:
            raise Unfit("the script's filters of warnings came before those of the imports, or between them")
        self.warned = "".join(guard.warned)
        if self.warned and (theirs != filters or self.record["filtered"] or len(self.warned) > MOST_WARNED):
            raise Unfit(f"the imports warn, and the script filters warnings: {self.warned[:200]}")

    def judge_modules(self, new: dict[str, Any], began: float) -> None:
        installed, standard = tuple(imports.installed_folders()), tuple(imports.standard_folders())
        expected = {*self.record["modules"]}
        for folder in installed:
            self.note_file(folder)
        for name, module in new.items():
            file = os.path.realpath(imports.origin(name, module) or "/dev/null")
            if file == "/dev/null" or name.startswith("_unbroken"):
                continue
            if file.startswith(installed):
                if name not in expected:
                    raise Unfit(f"the imports bring {name}, which the script did not have")
                self.note_file(file)
            elif not file.startswith(standard):
                raise Unfit(f"{name} is not in an installed package: {file}")
        fresh = next((file for file, (mtime, _) in self.files.items() if mtime > began * 1e9), "")
        if fresh:
            raise Unfit(f"{fresh} was changed meanwhile")

    def judge_variables(self, native: str) -> None:
        """`native`: the first new library that is not written in Python. Nobody sees which variables it reads."""
        if Watched.everything:
            raise Unfit(f"{Watched.everything} reads all variables")
        theirs = {*self.record["changed_variables"]}
        if not theirs >= {*self.changed}:
            raise Unfit(
                f"the imports set {', '.join(sorted({*self.changed} - theirs))}, and the script does not have it"
            )
        early = {*self.record["early_variables"]}
        wrong = sorted(name for name in early | (theirs - {*self.changed}) if name in Watched.names or is_read(name))
        if wrong:
            raise Unfit(f"the script changes variables that the imports read: {', '.join(wrong)}")
        unseen = sorted(name for name in early if not name.startswith(READ_WHEN_USED))
        if unseen and native:
            raise Unfit(f"the script changes {', '.join(unseen)}, which {native} may read when it is loaded")

    def note_file(self, path: str) -> None:
        about = os.stat(path)
        self.files[path] = about.st_mtime_ns, about.st_size

    # ----- before a fork -----

    def check(self) -> None:
        """Whether what was imported is still what a fresh process would import. The keeper does not wait for it."""
        self.stale = ""
        for path, noted in self.files.items():
            try:
                about = os.stat(path)
            except OSError:
                self.stale = f"{path} is gone"
                return
            if (about.st_mtime_ns, about.st_size) != noted:
                self.stale = f"{path} has changed"
                return
        for folder in self.user_folders():
            self.stale = self.stale or self.shadowed(folder)

    def user_folders(self) -> list[str]:
        argv, known = self.become.argv, {*sys.path, bootstrap.HERE, bootstrap.SHIM}
        first = os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.realpath(argv[0]))
        added = [entry for entry in self.record["path"] if entry not in known]
        return list(dict.fromkeys([first, *self.own_path, *added]))

    def shadowed(self, folder: str) -> str:
        """A file in a user's folder by the name of something that was imported, or looked for in vain."""
        try:
            with os.scandir(folder or ".") as entries:
                for number, entry in enumerate(entries):
                    if number > MOST_NAMES:
                        return f"{folder} has too many files"
                    name = entry.name.partition(".")[0]
                    if name not in self.finder.names:
                        continue
                    if "." in entry.name or os.path.exists(os.path.join(entry.path, "__init__.py")):
                        if entry.name.endswith((".py", ".pyc", ".so")) or entry.is_dir():
                            return f"{entry.path} comes before the installed {name}"
                    elif name not in sys.modules and entry.is_dir():
                        return f"{entry.path} can be imported as {name}"
        except NotADirectoryError:
            return f"{folder} is an archive"
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"{folder}: {error.strerror}"
        return ""

    # ----- forking -----

    def run(self) -> Any:
        """Serve until the keeper hangs up (None), or in a fork: what it is to be."""
        while True:
            while has_children() and not select.select([self.channel], [], [], REAP_S)[0]:
                pass
            data, descriptors, _flags, _address = socket.recv_fds(self.channel, 1 << 20, 8)
            if not data:
                return None
            message = json.loads(data)
            if message["op"] == "check":
                self.check()
                self.tell({"stale": self.stale})
                continue
            if not self.stale and len(descriptors) == 4:
                become = self.fork(message, descriptors)
                if become is not None:
                    return become
            for descriptor in descriptors:
                os.close(descriptor)

    def fork(self, message: dict[str, Any], descriptors: list[int]) -> Any:
        """Fork twice: the rank is then an orphan, which the keeper adopts. Its parent is the keeper, as of any rank."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0 and os.fork() != 0:
                os._exit(0)
        if pid == 0:
            try:
                return self.be_adopted(message, descriptors)
            except BaseException:
                os._exit(1)
        return None

    def be_adopted(self, message: dict[str, Any], descriptors: list[int]) -> Any:
        """In the rank: wait until the keeper is the parent, and has taken us into its book."""
        set_oom_score(oom_score(self.keeper))
        until = time.monotonic() + ADOPTED_S
        while os.getppid() != self.keeper:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.0002)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self.keeper:
            os._exit(1)
        os.setsid()
        with socket.socket(fileno=descriptors[0]) as link:
            link.settimeout(GO_S)
            link.send(to_json({"pid": os.getpid()}).encode())
            if link.recv(16) != b"go":
                os._exit(1)
        self.channel.close()
        become = type(self.become)(message["argv"], message, descriptors[1:], worker=True)
        become.interrupt, become.blocked = self.become.interrupt, self.become.blocked
        become.changed, become.warned = self.changed, self.warned
        return become


def has_children() -> bool:
    """After those are reaped that have ended: the ones in between, of earlier orders."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def oom_score(pid: int) -> int:
    with open(OOM_SCORE.format(pid)) as file:
        return int(file.read())


def set_oom_score(score: int) -> None:
    """Raises OSError. Who may not lower it below what it was can still take it back to that."""
    if score != oom_score(os.getpid()):
        with open(OOM_SCORE.format(os.getpid()), "w") as file:
            file.write(str(score))


def be_ended_first() -> None:
    """Before any rank, when memory is short. Tried first: a rank must be able to take it back."""
    before = oom_score(os.getpid())
    try:
        set_oom_score(ENDED_FIRST)
        set_oom_score(before)
    except OSError as error:
        raise Unfit(f"its OOM score of {before} cannot be raised and lowered again: {error.strerror}") from None
    set_oom_score(ENDED_FIRST)


class Guard:
    """While packages are imported: nothing of a GPU's driver is called, and what they read and set is noted."""

    def __init__(self) -> None:
        self.seen = SeedSeen.seen
        self.on = True
        self.warned: list[str] = []
        """Warnings as they would be shown."""
        self.show = warnings.showwarning
        warnings.showwarning = self.showwarning
        self.replaced: list[tuple[Any, str, Any]] = []
        generator: Any = random._inst
        watched = ((os.environ, Watched), (os.environb, Watched), (posix, Environment), (generator, RandomWatched))
        for one, kind in watched:
            self.replaced.append((one, "__class__", type(one)))
            one.__class__ = kind
        sys.addaudithook(self.heard)
        core: Any = getattr(sys.modules.get("torch"), "_C", None)
        for name in ("_cuda_init", "_cuda_getDeviceCount", "_xpu_init", "_xpu_getDeviceCount"):
            if hasattr(core, name):
                self.replaced.append((core, name, getattr(core, name)))
                setattr(core, name, touches_driver)

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in NO_TRIAL:
            self.seen.append(event)
        elif event == "ctypes.dlopen" and os.path.basename(str(args[0])).startswith(DRIVERS):
            touches_driver()

    def showwarning(
        self,
        message: Any,
        category: Any,
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if self.on and file is None:
            self.warned.append(warnings.formatwarning(message, category, filename, lineno, line))
        else:
            self.show(message, category, filename, lineno, file, line)

    def end(self) -> None:
        self.on = False
        if warnings.showwarning == self.showwarning:
            warnings.showwarning = self.show
        for owner, name, value in self.replaced:
            setattr(owner, name, value)


def touches_driver(*_: object) -> None:
    os._exit(TOUCHES_DRIVER)


def state() -> dict[str, Any]:
    """All that a script, or a fork, could notice of an import besides its modules."""
    torch: Any = sys.modules.get("torch")
    numpy_random: Any = sys.modules.get("numpy.random")
    root = logging.getLogger()
    return {
        "threads": sorted(name for name in thread_names() if name not in HARMLESS_THREADS),
        "open files": open_files(),
        "signal handlers": signal_masks(),
        "Python's signal handlers": [str(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
        "the working folder": os.getcwd(),
        "limits": surroundings.limits(),
        "torch's random numbers": torch.get_rng_state().tolist() if torch is not None else None,
        "numpy's random numbers": numpy_random.get_state()[1].tolist() if numpy_random is not None else None,
        "settings of torch": changes.torch_settings(torch) if torch is not None else None,
        "streams": [
            (getattr(sys, name), getattr(sys, f"__{name}__"), *map(str, settings_of(getattr(sys, name))))
            for name in ("stdin", "stdout", "stderr")
        ],
        "hooks": [
            getattr(sys, name, None) for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
        ]
        + [threading.excepthook, sys.gettrace(), sys.getprofile(), warnings.showwarning],
        "logging": (root.level, list(root.handlers), root.manager.disable, logging.raiseExceptions, logging.lastResort),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()),
        "processes": (multiprocessing.get_start_method(allow_none=True), socket.getdefaulttimeout()),
        "a GPU's driver": driver_is_mapped(torch),
    }


def settings_of(stream: Any) -> list[Any]:
    return [getattr(stream, name, None) for name in ("line_buffering", "write_through", "encoding", "errors", "buffer")]


def driver_is_mapped(torch: Any) -> bool:
    if torch is not None and torch.cuda.is_initialized():
        return True
    with open("/proc/self/maps") as file:
        return "/dev/nvidia" in file.read()


def signal_masks() -> dict[str, int]:
    """Which signals are blocked, ignored, handled; without 32 and 33, which the C library uses for its threads."""
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    return {name: int(mask, 16) & ~(3 << 31) for name, mask in lines}


def private_kib() -> int:
    """What this process has beyond what it shares with the keeper."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
    except (OSError, ValueError):
        return 0


def thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue
    return names


def open_files() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one that listdir itself had open
            continue
    return found


def bound(names: frozenset[str]) -> list[tuple[str, Any, dict[str, Any]]]:
    """What functions and classes the modules have that were there before, and the classes whose methods matter most."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for name in names:
        module = sys.modules.get(name)
        try:
            space = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if not name.startswith("_unbroken"):
            found.append((name, space, {key: value for key, value in list(space.items()) if callable(value)}))
    torch: Any = sys.modules.get("torch")
    classes: list[Any] = [random.Random]
    if torch is not None:
        classes += [torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.nn.Linear, torch.autograd.Function]
    return found + [(one.__name__, one.__dict__, dict(one.__dict__)) for one in classes]


def rebound(before: list[tuple[str, Any, dict[str, Any]]]) -> set[tuple[str, str]]:
    return {
        (name, key)
        for name, space, values in before
        for key, value in values.items()
        if key in space and space[key] is not value and not changes.wraps_for_compiler(space[key], value)
    }


def difference(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def inside(entry: str, folders: tuple[str, ...]) -> bool:
    return os.path.join(os.path.realpath(entry), "").startswith(folders)


def is_read(name: str) -> bool:
    """Libraries in C read these when they are loaded. Python has read its own when it was started."""
    return not name.startswith("PYTHON") and bool(surroundings.read_at_load({name: ""}, bootstrap.SHIM))


def is_native(name: str, module: Any) -> bool:
    file = imports.origin(name, module)
    return file.endswith(".so") and inside(file, tuple(imports.installed_folders()))


def module_of(finder: Any) -> str:
    return str(getattr(finder, "__module__", "") or type(finder).__module__)
