"""Ranks that are forked from a process which has imported what the ranks before had imported.

The packages are made by the tests, in a site-packages that the Python of keeper and ranks has besides its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sysconfig
import types
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from supervisor.training import warm
from tests.conftest import until
from tests.tables import table
from tests.training.conftest import Keeper, user_environment

CASES = table(__file__)
TRAINING = Path(__file__).parents[2] / "supervisor" / "training"
SCRIPT = """
import os, sys, time
warm = "{name}" in sys.modules
{before}
import {name}
print("warm" if warm else "cold", {name}.LOADED_BY == os.getpid(), os.getppid(), {shown}, flush=True)
time.sleep(1000)
"""
TRIAL = """
import importlib.util, json, os, socket, sys, types, warnings
spec = importlib.util.spec_from_file_location("_unbroken_bootstrap", sys.argv[1] + "/bootstrap.py")
bootstrap = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = bootstrap
spec.loader.exec_module(bootstrap)
record = {"modules": ["pk_one"], "changed_variables": ["CHANGED_BY_SCRIPT", "PYTHONHASHSEED"], "path": []}
record["early_variables"], record["filtered"] = ["CHANGED_EARLY"], False
record["warning_filters"] = [str(one) for one in warnings.filters]
channel = socket.socket(fileno=int(sys.argv[2]))
become = types.SimpleNamespace(channel=channel, record=record, environ=dict(os.environ), argv=["/nowhere/train.py"])
become.cwd = become.umask = None
bootstrap.sibling("fork_server").serve(become, lambda: None)
"""


def package(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(f"import os\nLOADED_BY = os.getpid()\n{body}\n")


def environment_with_packages(folder: Path) -> tuple[str, Path]:
    """A Python that has our own packages as well, and the folder of its own."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "more.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(folder / "bin" / "python"), packages


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment_with_packages(tmp_path_factory.mktemp("trial") / "env")[0]


@pytest.mark.parametrize(("body", "answer"), CASES["left_to_the_script"])
def test_what_imports_may_leave_behind(body: str, answer: str, python: str) -> None:
    packages = next(Path(python).parents[1].glob("lib/python*/site-packages"))
    package(packages, "pk_one", body)
    package(packages, "pk_other", "")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [python, "-B", "-c", TRIAL, str(TRAINING), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=user_environment())
        theirs.close()
        ours.settimeout(60)
        data = ours.recv(1 << 20)
    code = process.wait(60)
    told = json.loads(data) if data else {"unfit": f"exit {code}"}
    assert answer in (told.get("unfit") or "ready")


class Site:
    """A keeper whose Python has packages of the test's own. Each test has a package and a script by its own name."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.python, self.packages = environment_with_packages(folder / "env")
        (folder / "local").mkdir()
        environment = {**user_environment(), "OMP_NUM_THREADS": "1", **variables}
        self.keeper = Keeper(folder / "local", environment, self.python)
        self.folder = folder
        self.script = folder / "train.py"
        self.attempt = 0
        self.stubs: list[subprocess.Popen[str]] = []

    def make(self, name: str, body: str = "", before: str = "", shown: str = "''") -> None:
        package(self.packages, name, body)
        self.script = self.folder / name / "train.py"
        self.script.parent.mkdir(exist_ok=True)
        self.script.write_text(SCRIPT.format(name=name, before=before, shown=shown))

    def start(self, ranks: int = 1, stderr: IO[str] | None = None, **variables: str) -> list[list[str]]:
        """The ranks of the next attempt; what each of them prints."""
        self.attempt += 1
        self.keeper.ask(op="kill", attempt=self.attempt - 1)
        self.keeper.ask(op="attempt", number=self.attempt)
        told = []
        for rank in range(ranks):
            ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(7000 + self.attempt)}
            ours["UNBROKEN_KEEPER_SOCKET"] = str(self.keeper.socket_path)
            process = subprocess.Popen(
                [self.keeper.stub, "-u", self.script],
                env={**self.keeper.environment, **ours, **variables},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
            self.stubs.append(process)
            assert process.stdout is not None
            told.append(process.stdout.readline().split())
        return told

    @property
    def log(self) -> str:
        return (self.folder / "local" / "keeper.log").read_text()

    def wait_ready(self, servers: int = 1) -> None:
        """Until so many more fork servers than at the start of this attempt are ready."""
        before = self.ready
        until(lambda: self.log.count(" of its own") >= before + servers, 120, "a fork server is ready")
        self.ready = before + servers

    ready = 0

    def close(self) -> None:
        self.keeper.close()
        for stub in self.stubs:
            stub.wait(60)


def is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


def test_the_next_ranks_find_the_imports_there_and_the_keeper_is_their_parent(site: Site) -> None:
    keeper = str(site.keeper.process.pid)
    site.make("pk_first")
    assert site.start(ranks=2) == [["cold", "True", keeper]] * 2
    site.wait_ready()
    assert site.start(ranks=2) == [["warm", "False", keeper]] * 2
    family = psutil.Process(site.keeper.process.pid)
    until(lambda: not [one for one in family.children(recursive=True) if is_zombie(one)], 10, "no zombie is left")
    worker = site.keeper.workers(site.attempt)[0]
    os.kill(worker["pid"], signal.SIGSEGV)
    path = site.keeper.attempt_dir(site.attempt) / f"rank{worker['rank']}.exit"
    until(path.exists, 60, "its end is recorded")
    assert os.WTERMSIG(json.loads(path.read_text())["status"]) == signal.SIGSEGV


def test_warnings_of_the_imports_are_shown_by_every_rank(site: Site) -> None:
    site.make("pk_warns", body="import warnings\nwarnings.warn('pk_warns is old', FutureWarning)")
    shown = []
    for how in ("cold", "warm"):
        with open(site.folder / how, "w+") as stderr:
            assert site.start(stderr=stderr)[0][0] == how
            if how == "cold":
                site.wait_ready()
            shown.append((site.folder / how).read_text())
    assert shown[0] == shown[1]
    assert "FutureWarning: pk_warns is old" in shown[0]


def test_a_script_with_filters_of_its_own_imports_what_warns_by_itself(site: Site) -> None:
    ignore = "import warnings; warnings.simplefilter('ignore', FutureWarning)"
    body = "import warnings\nwarnings.warn('pk_filters is old', FutureWarning)"
    site.make("pk_filters", body=body, before=ignore)
    assert site.start()[0][0] == "cold"
    until(lambda: "the imports warn, and the script filters warnings" in site.log, 120, "it is left to the script")


SURROUNDINGS = """
import atexit, ctypes, gc, json, signal, threading, __main__
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))
streams = (sys.stdin, sys.stdout, sys.stderr)
status = [line.split() for line in open("/proc/self/status") if line[:4] in ("SigP", "SigB", "SigI", "SigC", "Thre")]
seen = {
    "death": death.value, "status": status, "argv": sys.argv, "path": sys.path, "main": sorted(vars(__main__)),
    "meta": [str(x)[:60] for x in sys.meta_path], "threads": threading.active_count(),
    "name": __name__, "file": __file__, "package": __package__, "frames": sys._getframe().f_back.f_code.co_name,
    "streams": [(x.fileno(), x.name, x.mode, x.encoding, x.errors, x.line_buffering, x.write_through, x.seekable(),
                 str(x), x is y) for x, y in zip(streams, (sys.__stdin__, sys.__stdout__, sys.__stderr__))],
    "files": sorted(os.listdir("/proc/self/fd")), "leads": (os.getpid() == os.getsid(0) == os.getpgrp()),
    "cwd": os.getcwd(), "umask": os.umask(0o22), "orig": getattr(sys, "orig_argv", [])[1:],
    "environ": sorted(set(os.environ) - {"UNBROKEN_HEARTBEAT_FD"}), "class": str(type(os.environ)),
    "oom": open("/proc/self/oom_score_adj").read(),
    "cmdline": open("/proc/self/cmdline").read(), "signals": [str(signal.getsignal(x)) for x in signal.valid_signals()],
}
print(json.dumps(seen, sort_keys=True).replace(" ", ""), end=" ")
"""


def test_the_script_sees_what_it_would_see_without(site: Site) -> None:
    site.make("pk_seen")
    text = site.script.read_text().replace("import pk_seen\n", f"import pk_seen\n{SURROUNDINGS}\n", 1)
    site.script.write_text(text)
    [cold] = site.start()
    site.wait_ready()
    [warm] = site.start()
    assert (cold[1], warm[1]) == ("cold", "warm")
    assert json.loads(warm[0]) == json.loads(cold[0])


def test_what_depends_on_the_rank_is_imported_for_each_and_what_is_set_stays_set(site: Site) -> None:
    body = "RANK = os.environ.get('RANK'); os.environ['PK_SET'] = 'yes'"
    site.make("pk_rank", body, shown="pk_rank.RANK, os.environ['PK_SET']")
    site.start(ranks=2)
    site.wait_ready(2)
    assert [(told[0], told[3:]) for told in site.start(ranks=2)] == [("warm", ["0", "yes"]), ("warm", ["1", "yes"])]


def test_a_variable_that_the_imports_read_and_that_has_changed(site: Site) -> None:
    site.make("pk_mode", "MODE = os.environ.get('PK_MODE')", shown="pk_mode.MODE")
    site.start()
    site.wait_ready()
    assert site.start(PK_MODE="x")[0][0::3] == ["cold", "x"]
    assert site.start()[0][0::3] == ["warm", "None"]


def test_what_has_changed_on_disk_is_imported_again(site: Site) -> None:
    site.make("pk_edited", "X = 1", shown="pk_edited.X")
    site.start()
    site.wait_ready()
    package(site.packages, "pk_edited", "X = 2.0")
    assert site.start()[0][0::3] == ["cold", "2.0"]
    site.wait_ready()
    (site.packages / "pk_edited-2.dist-info").mkdir()  # installed anew
    assert site.start()[0][0] == "cold"
    site.wait_ready()
    package(site.script.parent, "pk_edited", "X = 3")  # the script's own, from now on
    assert site.start()[0][0::3] == ["cold", "3"]


CHANGES = CASES["changed_before_an_import"]


@pytest.mark.parametrize(
    ("before", "body", "left"),
    [*CHANGES[:2], CHANGES[-1], *(pytest.param(*one, marks=pytest.mark.slow) for one in CHANGES[2:-1])],
)
def test_what_the_script_changes_before_an_import(before: str, body: str, left: str, site: Site) -> None:
    """As plain torchrun has it: `SEEN` is what the package met, in the first attempt and in the next."""
    name = f"pk_changed{len(site.log)}"
    package(site.packages, f"{name}_first", "def f(): return 0\nFLAG = False")
    site.make(name, body, before.replace("FIRST", f"{name}_first"), shown=f"{name}.SEEN")
    package(site.packages, name, body.replace("FIRST", f"{name}_first"))
    logged = len(site.log)
    first = site.start()[0]
    if left:
        until(lambda: left in site.log[logged:], 120, "it is left to the script")
        record = json.loads((site.keeper.attempt_dir(site.attempt) / "rank0.imports").read_text())
        assert name not in record["modules"] or left not in record["left"]
    else:
        site.wait_ready()
    again = site.start()[0]
    assert (again[0], again[3:]) == ("cold" if left else "warm", first[3:])


def test_the_users_own_modules_are_never_imported_beforehand(site: Site) -> None:
    site.make("pk_theirs", before="import pk_own", shown="pk_own.LOADED_BY == os.getpid()")
    package(site.script.parent, "pk_own", "")
    site.start()
    site.wait_ready()
    assert site.start()[0][0::3] == ["warm", "True"]


def test_a_fork_server_that_hangs_is_not_waited_for(site: Site) -> None:
    site.make("pk_hangs")
    site.start()
    site.wait_ready()
    pid = int(site.log.rsplit(" modules in ", 1)[0].rsplit("fork server ", 1)[1].split(":")[0])
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    os.kill(pid, signal.SIGSTOP)
    assert site.start()[0][0] == "cold"
    until(lambda: not Path(f"/proc/{pid}").exists(), 60, "it is gone")


def test_fork_servers_end_when_memory_is_short() -> None:
    ours, theirs = socket.socketpair()
    lines: list[str] = []
    free = [warm.FREE_BYTES]
    keeper = types.SimpleNamespace(selector=selectors.DefaultSelector(), log=lines.append)
    servers = warm.Warm(keeper, lambda: None, lambda: free[0])
    with theirs, subprocess.Popen(["sleep", "1000"]) as process:
        become = types.SimpleNamespace(environ={}, argv=["train.py"], cwd=None)
        server = warm.ServerProcess(process.pid, ours, become, 0)
        servers.servers.append(server)
        keeper.selector.register(server, selectors.EVENT_READ)
        servers._look()
        assert servers.servers == [server]
        free[0] = warm.LEAST_FREE_BYTES - 1
        servers._look()
        assert process.wait(60) == -signal.SIGKILL
    assert not servers.servers


@pytest.mark.slow
def test_nothing_but_torch_is_imported_beforehand_when_the_user_says_so(tmp_path: Path, site: Site) -> None:
    without = Site(tmp_path, UNBROKEN_WARM="torch")
    try:
        without.make("pk_torch", shown="'torch' in sys.modules, 'torch._dynamo' in sys.modules")
        cold = [["cold", "True", str(without.keeper.process.pid), "True", "False"]]
        assert without.start() == cold
        until((without.keeper.attempt_dir(1) / "rank0.imports").exists, 60, "its imports are recorded")
        site.make("pk_meanwhile")
        site.start()
        site.wait_ready()
        assert without.start() == cold
        assert "fork server" not in without.log
    finally:
        without.close()
