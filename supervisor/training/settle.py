"""The first moments of a process forked from the keeper: descriptors, session, environment, signals, streams."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035 (Python 3.9)

if TYPE_CHECKING:
    from supervisor.training import bootstrap
else:
    bootstrap = sys.modules["_unbroken_bootstrap"]

TORCH_SEED = 67280421310721
"""Of every process in most releases of torch; where it is random at start, forks must not share the keeper's."""
TORCHRUN = "import sys\nfrom torch.distributed.run import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def settle(become: Any, close_in_fork: Callable[[], None] | None) -> None:
    """Turn the fork into what it is to be.

    `close_in_fork`: closes the keeper's descriptors; None in a fork of a fork server, which has closed them.
    """
    for number, descriptor in enumerate(become.descriptors):
        os.dup2(descriptor, number)
    if close_in_fork is not None:
        close_in_fork()
    else:
        for descriptor in become.descriptors:
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(become.environ)
    bootstrap.given = dict(become.environ)
    for name, value in become.changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if become.umask is not None:
        os.umask(become.umask)
    if become.cwd is not None:
        os.chdir(become.cwd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler if become.worker else become.interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for passed_by in (signal.SIGUSR1, signal.SIGUSR2):  # from Slurm to every process of a job: to be the ranks' alone
        signal.signal(passed_by, signal.SIG_DFL if become.worker else signal.SIG_IGN)
    if become.worker:  # torchrun handles these, so that a program it executes has the defaults, whatever nohup did
        for handled in (signal.SIGHUP, signal.SIGQUIT):
            signal.signal(handled, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, become.blocked)
    name_process([sys.executable, *(["-u"] if become.worker else [console_script() or "torchrun"]), *become.argv])
    bootstrap.rebuild_streams(in_place=close_in_fork is None)
    if become.warned and sys.stderr is not None:
        sys.stderr.write(become.warned)
        sys.stderr.flush()
    # The keeper froze what it had imported. At the end all of it is to be collected, or libraries tell of leaks.
    atexit.register(gc.unfreeze)
    refresh_modules()


def name_process(argv: list[str]) -> None:
    """Let `ps` and `pkill -f` see the command that this process is, as far as the keeper's own command line is long."""
    try:
        with open("/proc/self/stat", "rb") as file:
            start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
        text = b"\0".join(os.fsencode(argument) for argument in argv)[: end - start - 1]
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            if start and os.pread(memory, 16, start) == os.fsencode(sys.executable)[:16]:
                os.pwrite(memory, text.ljust(end - start, b"\0"), start)
        finally:
            os.close(memory)
    except (OSError, ValueError):
        pass


def refresh_modules() -> None:
    """What modules noted when the keeper imported them and a fresh process would have otherwise."""
    time.tzset()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()


def console_script() -> str:
    """The `torchrun` of this environment, or an empty string."""
    path = os.path.join(os.path.dirname(sys.executable), "torchrun")
    try:
        with open(path, "rb") as file:
            text = file.read(4096)
    except OSError:
        return ""
    return path if text.startswith(b"#!") and b"torch.distributed.run" in text else ""


def run_launcher(argv: list[str], cold: str) -> None:
    """Be `torchrun argv`. `cold`: why torch is not imported; then Python itself is executed, and tells the user."""
    script = console_script()
    if cold:
        command = [script] if script else ["-m", "torch.distributed.run"]
        os.execve(sys.executable, [sys.executable, *command, *argv], dict(os.environ))
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [entry for entry in inherited if entry and entry not in sys.path]
    register_rendezvous()
    if script:
        bootstrap.run_main([script, *argv])
    else:
        bootstrap.run_main(["torchrun", *argv], TORCHRUN)


def register_rendezvous() -> None:
    """torch looks for rendezvous plug-ins when it is imported; that was before our folder was in the path."""
    import importlib

    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    try:
        shim = importlib.import_module("unbroken_shim")
    except ImportError:  # a torchrun of the user's own making, without our folder
        return
    rendezvous_handler_registry.register("unbroken", shim.rendezvous())
