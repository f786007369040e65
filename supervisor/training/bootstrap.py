"""Makes a process behave exactly like `python -u script args` or `python -u -m module args`.

Two ways in: the keeper forks and calls `run_worker` (or `run_main` for the launcher); the stub executes this file with
the real Python when there can be no warm start (`python -u bootstrap.py [-m] script args`).
Exceptions and SystemExit travel up to the interpreter itself, which prints, maps exit codes and finalizes as ever.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import types
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.realpath(__file__))
SHIM = os.path.join(HERE, "shim")
OURS = (
    "UNBROKEN_AGENT_SOCKET",
    "UNBROKEN_KEEPER_SOCKET",
    "UNBROKEN_NODE",
    "UNBROKEN_LOCAL_RANK",
    "UNBROKEN_TRACEABLE",
    "PYTHON_EXEC",
)
EARLIER_GLOBALS: dict[str, Any] = {"__builtins__": builtins, "__annotations__": {}}
PR_SET_PTRACER = 0x59616D61
given: dict[str, str] | None = None
"""The environment that a forked rank was asked to have."""
prepared_main: types.ModuleType | None = None
"""The `__main__` that the imports of a fork server have met: the script becomes this very module."""


def sibling(name: str) -> Any:
    """A module of this folder, under a name that no script's import can meet."""
    full_name = f"_unbroken_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, os.path.join(HERE, name + ".py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


def without_shim(path: str) -> str:
    """A PYTHONPATH without our folder."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry != SHIM)


def clean_environment() -> None:
    """Take out of os.environ what is ours and not meant for scripts."""
    for name in OURS:
        os.environ.pop(name, None)
    path = os.environ.get("PYTHONPATH")
    if path is not None and SHIM in path.split(os.pathsep):
        rest = without_shim(path)
        if rest:
            os.environ["PYTHONPATH"] = rest
        else:
            del os.environ["PYTHONPATH"]
        sys.path[:] = [entry for entry in sys.path if entry != SHIM]


def run_worker(argv: list[str]) -> None:
    """Be a rank: clean the environment, start the beacon, run the script. `argv` as after `python -u`."""
    local_dir = os.path.dirname(os.environ.get("UNBROKEN_KEEPER_SOCKET", ""))
    attempt, rank = os.environ.get("UNBROKEN_ATTEMPT", ""), os.environ.get("RANK", "")
    traceable = bool(os.environ.get("UNBROKEN_TRACEABLE"))
    clean_environment()
    if os.environ.get("UNBROKEN_SNAPSHOT_FILES"):
        os.environ["UNBROKEN_SNAPSHOT_PID"] = str(os.getpid())
    allow_tracing()
    allow_profiling(traceable)
    if local_dir and attempt and rank:
        prefix = os.path.join(local_dir, "attempts", attempt, f"rank{rank}")
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        record = import_record(prefix + ".imports", argv) if is_first else None
        if record is None and "_unbroken_changes" in sys.modules:
            atexit.register(sibling("changes").forget_keeper)
        clock = start_beacon(prefix, record)
        record_writes(prefix + ".writes", record.path if record is not None else "", clock)
    run_main(argv)


def import_record(path: str, argv: list[str]) -> Any:
    """What tells the keeper of the script's imports; None in a rank that was not forked."""
    imports = sys.modules.get("_unbroken_imports")
    if imports is None or given is None:
        return None
    try:
        folders = imports.installed_folders()
        arguments = argv[2:] if argv[0] == "-m" else argv[1:]
        changes = sibling("changes").ScriptChanges(folders, imports.standard_folders(), arguments)
        changes.start()
        return imports.ImportRecord(path, given, folders, changes)
    except Exception as error:
        print(f"unbroken: no record of imports: {error}", file=sys.stderr)
        return None


def start_beacon(prefix: str, record: Any = None) -> Any:
    """Start the beacon; without a writable local folder the script simply runs without one. Its step clock, or None."""
    try:
        os.makedirs(os.path.dirname(prefix), exist_ok=True)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.environ["UNBROKEN_HEARTBEAT_FD"] = str(writer)
        beacon = sibling("beacon").Beacon(prefix + ".beacon", prefix + ".sock", reader, record)
        beacon.start()
    except Exception as error:
        print(f"unbroken: no progress beacon: {error}", file=sys.stderr)
        return None
    try:
        beacon.clock = sibling("clock").StepClock(beacon.figures)
    except Exception as error:
        print(f"unbroken: no step clock: {error}", file=sys.stderr)
    return beacon.clock


def record_writes(path: str, other: str = "", clock: Any = None) -> None:
    """Record which files the script writes; where that cannot be, open descriptors alone tell.

    `clock`: begins to listen to torch when the script has imported it.
    """
    try:
        sibling("writes").WriteRecorder(path, other, clock).start()
    except Exception as error:
        print(f"unbroken: no record of written files: {error}", file=sys.stderr)


def prctl(option: int, argument: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument & (2**64 - 1)), 0, 0, 0)


def allow_tracing() -> None:
    """Let py-spy of the agent (not an ancestor) look where yama restricts ptrace to ancestors."""
    if not os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):
        return
    try:
        prctl(PR_SET_PTRACER, -1)
        os.register_at_fork(after_in_child=_allow_quietly)  # workers of its data loaders
    except Exception:
        pass


def _allow_quietly() -> None:
    try:
        prctl(PR_SET_PTRACER, -1)
    except Exception:
        pass


def allow_profiling(traceable: bool) -> None:
    """Let the agent ask for traces, where the job was started so (`traceable`), or a daemon that the user has."""
    if not os.environ.get("KINETO_USE_DAEMON"):
        return
    try:
        sibling("tracing").start(traceable)
    except Exception as error:
        print(f"unbroken: no traces of this rank: {error}", file=sys.stderr)


def rebuild_streams(in_place: bool = False) -> None:
    """Std streams on the present descriptors 0, 1, 2, made as `python -u` makes them.

    `in_place`: the objects stay, because modules that were imported hold them.
    """
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        encoding, errors = (old.encoding, old.errors) if old is not None else ("utf-8", "strict")
        mode, buffering = ("rb", -1) if descriptor == 0 else ("wb", 0)
        try:
            raw: Any = open(descriptor, mode, buffering, closefd=False)  # noqa: SIM115
        except OSError:  # the descriptor is closed: Python has None there as well
            stream = None
        else:
            stream = old if in_place and old is not None else io.TextIOWrapper(io.BytesIO())
            io.TextIOWrapper.__init__(stream, raw, encoding, errors, "\n", write_through=True)
            stream.mode = "r" if descriptor == 0 else "w"  # type: ignore[misc]
            getattr(raw, "raw", raw).name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def prepare_main(argv: list[str]) -> None:
    """Let imports before the script find `sys.argv` and a `__main__` as they would in the script."""
    global prepared_main
    prepared_main = types.ModuleType("__main__")
    sys.modules["__main__"] = prepared_main
    sys.orig_argv = [sys.executable, "-u", *argv]  # novermin: Python 3.9 has none, and takes it
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
    else:
        sys.argv = list(argv)
        prepared_main.__file__ = os.path.join(os.getcwd(), argv[0])


def run_main(argv: list[str], source: str | None = None) -> None:
    """Run `argv` (`-m module args` or `script args`) as `__main__`. Returns, or raises what the script raises.

    `source`: the program itself, where it is in no file.
    """
    main = prepared_main or types.ModuleType("__main__")
    main.__dict__.clear()
    main.__dict__.update(types.ModuleType("__main__").__dict__)
    main.__dict__.update({"__builtins__": builtins} if sys.version_info >= (3, 14) else EARLIER_GLOBALS)
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, "-u", *argv]  # novermin: Python 3.9 has none, and takes it
    if source is not None:
        sys.argv = list(argv)
        target: tuple[Any, ...] = (exec, compile(source, argv[0], "exec"), main.__dict__)
    elif argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        set_first_path(os.getcwd())
        target = (runpy._run_module_as_main, argv[1])  # type: ignore[attr-defined]
    else:
        sys.argv = list(argv)
        if pkgutil.get_importer(argv[0]) is not None:  # a folder or an archive with a __main__.py
            set_first_path(os.path.join(os.getcwd(), argv[0]))
            target = (runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]
        else:
            set_first_path(os.path.dirname(os.path.realpath(argv[0])))
            target = (run_script, argv[0], main)
    try:
        target[0](*target[1:])
    except SystemExit:
        raise
    except BaseException:
        hide_our_frames()
        raise


def set_first_path(path: str) -> None:
    """Give sys.path its first entry, in place of the folder of the file that this process was started with."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path and sys.path[0] == HERE:
        sys.path[0] = path
    else:
        sys.path.insert(0, path)


def run_script(path: str, main: types.ModuleType) -> None:
    from importlib.machinery import SourceFileLoader

    full_path = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(full_path) as file:
            code = pkgutil.read_code(file)
            if code is None:
                file.seek(0)
                code = compile(file.read(), full_path, "exec", dont_inherit=True)
    except OSError as error:
        cannot_open(full_path, error)
    main.__dict__.update(
        __file__=full_path, __cached__=None, __loader__=SourceFileLoader("__main__", full_path), __package__=None
    )
    exec(code, main.__dict__)


def cannot_open(path: str, error: OSError) -> NoReturn:
    print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
    raise SystemExit(2)


def hide_our_frames() -> None:
    """Have the interpreter's last words about an exception begin at the script, as if we were not there."""
    script_hook = sys.excepthook
    ours = {__file__, os.path.join(HERE, "keeper.py"), os.path.join(HERE, "bootstrap.py")}

    def hook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        value.__traceback__ = trace
        sys.last_traceback = trace
        script_hook(kind, value, trace)

    sys.excepthook = hook


if __name__ == "__main__":
    # The stub has found the folders' variables in place: this is the cold way.
    sys.modules["_unbroken_bootstrap"] = sys.modules["__main__"]
    run_worker(sys.argv[1:])
