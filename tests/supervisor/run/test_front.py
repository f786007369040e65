from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch beside this Python")

DRIVER = """
import os, sys
from pathlib import Path
from supervisor.config import RunSettings, Settings
from supervisor.run.front import Front, open_standard_streams
from supervisor.run.prepare import RunOptions, prepare
from supervisor.run.front import ServiceProcess

cwd = Path.cwd()
run = RunSettings(job_dir="job", node_name="n1")
options = RunOptions(settings=Settings(run=run), json="--json" in sys.argv)
prepared = prepare(options, ["torchrun", "--nproc-per-node", "2", "t.py"], os.environ, cwd)
local = prepared.paths.folder
Path("local").symlink_to(local)
services = {
    name: ServiceProcess(
        name, [sys.executable, "part.py", name, str(local)], env=os.environ, cwd=cwd, log=cwd / f"{name}.log"
    )
    for name in ("keeper", "agent")
}
open_standard_streams()
sys.exit(Front(prepared, options, services).run())
"""

GIVEN = (
    "import sys; from supervisor.config import RunSettings, Settings; "
    "from supervisor.run.front import RunOptions, main; "
    "given = lambda **run: RunOptions(settings=Settings(run=RunSettings(**run)))"
)
"""The options of a start with these settings of `[run]`."""

PART = """
import json, os, socket, sys, time
name, local = sys.argv[1:]
with open(f"{name}.pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
def behaviour(name):
    return open(f"{name}.behaviour").read() if os.path.exists(f"{name}.behaviour") else ""
def keeper():
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{local}/keeper.sock")
    server.listen()
    while True:
        connection, _ = server.accept()
        line = connection.makefile("rb").readline()
        with open("keeper.requests", "ab") as file:
            file.write(line)
        status = "0" if os.path.exists(f"{local}/launcher.ended") else "null"
        connection.sendall(b'{"ok": true, "launcher": {"pid": 1, "status": %s}}\\n' % status.encode())
def end(code, line):
    with open(f"{local}/new", "w") as file:
        json.dump({"state": "stopped", "exit_code": code, "line": line}, file)
    os.replace(f"{local}/new", f"{local}/outcome.json")
def agent():
    while True:
        if os.path.exists("go"):
            return end(int(open("go").read()), "the end")
        stop = json.load(open(f"{local}/front.json"))["stop"]
        if stop:
            return end({"SIGINT": 130, "SIGTERM": 143}[stop], f"stopped by {stop}")
        time.sleep(0.01)
if behaviour(name) == "crash":
    sys.exit("no such luck")
if behaviour(name) == "deaf":
    time.sleep(1000)
keeper() if name == "keeper" else agent()
"""


class Run:
    """A front in a process of its own, with stand-ins for keeper and agent."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        (folder / "driver.py").write_text(DRIVER)
        (folder / "part.py").write_text(PART)
        (folder / "t.py").touch()
        self.env = {**os.environ, "UNBROKEN_LOCAL_DIR": str(root), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, **behaviours: str) -> Run:
        for name, what in behaviours.items():
            (self.folder / f"{name}.behaviour").write_text(what)
        self.process = subprocess.Popen(
            [sys.executable, "driver.py", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: all(self.pids(name) for name in ("keeper", "agent")))
        return self

    def pids(self, name: str) -> list[int]:
        try:
            return [int(line) for line in (self.folder / f"{name}.pids").read_text().split()]
        except (OSError, ValueError):
            return []

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; nothing that it started may be left."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=60)
        for pid in self.pids("keeper") + self.pids("agent"):
            assert not alive(pid)
        return self.process.returncode, out, err

    def requests(self) -> list[dict[str, object]]:
        path = self.folder / "keeper.requests"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def local_root() -> Iterator[Path]:
    """A short path: unix sockets live below it."""
    root = Path(tempfile.mkdtemp(prefix="ub"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path, local_root: Path) -> Iterator[Run]:
    run = Run(tmp_path, local_root)
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.kill()
        run.process.wait()
    for pid in run.pids("keeper") + run.pids("agent"):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_it_shows_everything_and_ends_with_the_outcome(run: Run) -> None:
    run.start("--json")
    attempt = run.folder / "local" / "attempts" / "1"
    attempt.mkdir()
    stream = {"rank": 0, "local_rank": 0, "stream": "out", "path": str(attempt / "rank0.out"), "terminal": True}
    (attempt / "rank0.out").write_text("step 1\nunfinished")
    (attempt / "streams.json").write_text(json.dumps([stream]))
    (run.folder / "local" / "notices.log").write_text("a notice\n")
    (run.folder / "go").write_text("3")
    code, out, err = run.end()
    assert (code, out) == (3, "step 1\nunfinished")
    lines = err.splitlines()
    assert lines[-3:-1] == ["unbroken: a notice", "unbroken: the end"]
    assert str(run.folder / "job") in "".join(lines[:-3]), "which job this is, and where"
    assert json.loads(lines[-1]) == {"schema": 1, "state": "stopped", "exit_code": 3, "line": "the end"}
    plan = json.loads((run.folder / "local" / "node.json").read_text())
    assert plan["node"] == "n1"
    assert plan["job_dir"] == str(run.folder / "job")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_the_first_signal_asks_for_a_graceful_stop(run: Run, number: signal.Signals, code: int) -> None:
    run.start()
    run.signal(number)
    ended, _, err = run.end()
    assert ended == code
    assert "stopping; press Ctrl-C again" in err


def test_the_second_signal_kills(run: Run) -> None:
    run.start(agent="deaf")
    run.signal(signal.SIGINT)
    until(lambda: json.loads((run.folder / "local" / "front.json").read_text())["stop"] == "SIGINT")
    deadline = time.monotonic() + 60
    assert run.process is not None
    while run.process.poll() is None and time.monotonic() < deadline:
        run.signal(signal.SIGINT)
        time.sleep(0.05)
    code, _, err = run.end()
    assert code == 130
    assert "killed by a second SIGINT" in err
    assert {"op": "kill", "attempt": 1 << 30} in run.requests()


def test_user_signals_reach_the_ranks_through_the_keeper(run: Run) -> None:
    run.start()
    until(lambda: (run.folder / "local" / "keeper.sock").exists())
    run.signal(signal.SIGUSR1)
    wanted = {"op": "signal", "signal": int(signal.SIGUSR1), "ranks": None}
    until(lambda: wanted in run.requests())
    (run.folder / "go").write_text("0")
    assert run.end()[0] == 0


def test_a_killed_agent_and_keeper_are_started_again(run: Run) -> None:
    run.start()
    for name in ("agent", "keeper"):
        (run.folder / "local" / "keeper.sock").unlink(missing_ok=True)
        os.kill(run.pids(name)[0], signal.SIGKILL)
        until(lambda name=name: len(run.pids(name)) == 2)  # type: ignore[misc]
    (run.folder / "go").write_text("0")
    assert run.end()[0] == 0


def test_when_the_agent_cannot_run_the_training_decides(run: Run) -> None:
    run.start(agent="crash")
    (run.folder / "local" / "attempts" / "2").mkdir()
    (run.folder / "local" / "launcher.exit").write_text(json.dumps({"pid": 1, "status": 3 << 8}))  # of an earlier one
    until(lambda: len(run.pids("agent")) >= 6)
    assert run.process is not None
    assert run.process.poll() is None  # the newer launcher still runs
    (run.folder / "local" / "launcher.ended").touch()
    code, _, err = run.end()
    assert code == 3
    assert "without supervision" in err


def test_a_keeper_that_cannot_start_ends_the_run_with_its_reason(run: Run) -> None:
    run.start(keeper="crash")
    code, _, err = run.end()
    assert code == 78
    assert err.splitlines()[-1].startswith("unbroken: the keeper does not start: no such luck")


def test_a_second_run_of_the_same_job_on_the_same_node_is_refused(run: Run) -> None:
    run.start()
    second = front(run, "main(given(job_dir='job', node_name='n1'), ['torchrun', 't.py'])")
    assert second.returncode == 78
    assert "already runs on this node" in second.stderr
    (run.folder / "go").write_text("0")
    assert run.end()[0] == 0


def test_a_run_that_another_life_of_the_job_replaced_ends(run: Run) -> None:
    run.start(agent="deaf")
    first = run.folder / "job" / "leases" / "1.json"
    (run.folder / "job" / "leases" / "2.json").write_bytes(first.read_bytes().replace(b'"host":"', b'"host":"x'))
    code, _, err = run.end()
    assert code == 75
    assert "another run of this job has taken it over" in err


def front(run: Run, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`supervisor.run.front.main` in a process of its own."""
    code = f"{GIVEN}; sys.exit({call})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=run.folder,
        env={**run.env, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("main(given(), [])", "no command"),
        ("main(given(), ['torchrun', 'missing.py'])", "no script missing.py"),
        ("main(given(), ['torchrun', '--no-python', './missing'])", "no program ./missing"),
        ("main(given(), ['torchrun', '--nnodes', 'many', 't.py'])", "--nnodes many"),
        ("main(given(), ['accelerate', 'launch', 't.py'])", "accelerate"),
        ("main(given(), ['/nowhere/torchrun', 't.py'])", "/nowhere/torchrun is not found"),
        ("main(given(job_dir='part.py/job'), ['torchrun', 't.py'])", "cannot be written"),
        ("main(given(node_name='a b'), ['torchrun', 't.py'])", "node name"),
    ],
)
def test_wrong_input_is_one_sentence_and_starts_nothing(run: Run, call: str, says: str) -> None:
    ended = front(run, call)
    assert ended.returncode == 78
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(Path(run.env["UNBROKEN_LOCAL_DIR"]).iterdir())


def test_disabled_or_already_supervised_the_command_runs_as_it_is(run: Run) -> None:
    call = "main(given(), [sys.executable, '-c', 'print(42); sys.exit(5)'.replace('sys.exit', 'raise SystemExit')])"
    disabled = front(run, call, UNBROKEN_DISABLE="1")
    assert (disabled.returncode, disabled.stdout, disabled.stderr) == (5, "42\n", "")
    nested = front(run, call, UNBROKEN_ATTEMPT="2")
    assert (nested.returncode, nested.stdout) == (5, "42\n")
    assert "already supervised" in nested.stderr


def test_help_is_torchruns_own(run: Run) -> None:
    (run.folder / "torchrun").write_text("#!/bin/sh\necho usage of $*\n")
    (run.folder / "torchrun").chmod(0o755)
    shown = front(run, "main(given(), ['./torchrun', '--nnodes', '2', '--help'])")
    assert (shown.returncode, shown.stdout) == (0, "usage of --nnodes 2 --help\n")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "2>&1 | true"])
def test_who_hears_nothing_changes_nothing(run: Run, closed: str) -> None:
    """The exit code is the run's, and comes."""
    attempt = "mkdir local/attempts/1; cp streams.json local/attempts/1; echo a line > out; echo 3 > go"
    stream = {"rank": 0, "local_rank": 0, "stream": "out", "path": str(run.folder / "out"), "terminal": True}
    errors = {**stream, "stream": "err"}
    (run.folder / "streams.json").write_text(json.dumps([stream, errors]))
    script = f"(while [ ! -S local/keeper.sock ]; do sleep 0.05; done; {attempt}) & "
    command = f"{sys.executable} driver.py {closed}"
    code = "${PIPESTATUS[0]}" if "|" in closed else "$?"
    done = subprocess.run(
        ["bash", "-c", f"{script} {command}; exit {code}"],
        cwd=run.folder,
        env=run.env,
        timeout=90,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == 3


def test_an_untouched_command_without_stdout_is_run(run: Run) -> None:
    call = "main(given(), ['true'])"
    code = f"{GIVEN}; sys.exit({call})"
    environment = {**run.env, "UNBROKEN_DISABLE": "1"}
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" >&- 2>&-', code], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.root
def test_an_outcome_that_another_user_planted_ends_nothing(run: Run) -> None:
    run.start(agent="deaf")
    planted = run.folder / "local" / "planted"
    planted.write_text(json.dumps({"state": "succeeded", "exit_code": 0, "line": "all is well"}))
    os.chown(planted, 12345, 12345)
    planted.rename(run.folder / "local" / "outcome.json")
    until(lambda: (run.folder / "local" / "keeper.sock").exists())
    run.signal(signal.SIGTERM)
    until(lambda: json.loads((run.folder / "local" / "front.json").read_text())["stop"] == "SIGTERM")
    (run.folder / "local" / "outcome.json").unlink()
    run.signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 143
    assert "all is well" not in err
