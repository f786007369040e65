"""A real keeper, shared by the whole test session, and a small agent that speaks the two sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor import training
from tests.conftest import need

need("torch")
TORCHRUN = Path(sys.executable).with_name("torchrun")
OURS = ("UNBROKEN_", "TORCHELASTIC_", "OMP_", "PYTHON", "RANK", "LOCAL_RANK")


def user_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


class Connection:
    """One JSON-lines client."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        return self.receive()

    def receive(self) -> dict[str, Any]:
        line = self.file.readline()
        if not line:
            raise EOFError("the keeper hung up")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class Keeper:
    """A keeper process, what it says, and its stub."""

    def __init__(
        self, local_dir: Path, environment: dict[str, str] | None = None, python: str = sys.executable
    ) -> None:
        self.local_dir = local_dir
        self.environment = environment if environment is not None else {**user_environment(), "OMP_NUM_THREADS": "1"}
        self.stub = training.write_stub(local_dir, python)
        with open(local_dir / "launcher.out", "wb") as out, open(local_dir / "launcher.err", "wb") as err:
            self.process = subprocess.Popen(
                training.keeper_command(python, local_dir),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.socket_path = local_dir / "keeper.sock"
        until(self._listens, 60)
        self.control = Connection(self.socket_path)
        self.lock = threading.Lock()
        self.wait_for(lambda state: state["ready"], 60)

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self.local_dir / "launcher.err").read_text()
        try:
            Connection(self.socket_path).close()
        except OSError:
            return False
        return True

    def ask(self, **request: Any) -> dict[str, Any]:
        with self.lock:
            return self.control.ask(**request)

    @property
    def state(self) -> dict[str, Any]:
        """What it says at this moment."""
        with Connection(self.socket_path) as connection:
            return connection.ask(op="watch")

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 60) -> dict[str, Any]:
        """The first state from now on that fulfils the condition: nothing that was true before is taken for it."""
        deadline = time.monotonic() + timeout_s
        with Connection(self.socket_path) as connection:
            state = connection.ask(op="watch")
            while not condition(state):
                left = deadline - time.monotonic()
                assert left > 0, f"not within {timeout_s:g} s: {state}"
                connection.socket.settimeout(left + 1)
                state = connection.receive()
            return state

    def workers(self, attempt: int) -> list[dict[str, Any]]:
        return [worker for worker in self.state["workers"] if worker["attempt"] == attempt]

    def attempt_dir(self, attempt: int) -> Path:
        return self.local_dir / "attempts" / str(attempt)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


class Agent:
    """Forms a round for every join; restarts the group while `restarts` lasts, else lets torchrun look."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.restarts = 0
        self.attempt = 0
        self.leave = False
        self.extra: dict[str, Any] = {}
        self.connections: list[socket.socket] = []
        self.life = 0
        self.listen()

    def listen(self) -> None:
        path = self.keeper.local_dir / "agent.sock"
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def vanish(self) -> None:
        """As an agent that was killed."""
        self.life += 1
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        try:
            while True:
                connection, _ = listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:
            pass

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as file:
                for line in file:
                    request = json.loads(line)
                    answer = self._join(request) if request["op"] == "join" else self._wait(request["attempt"])
                    connection.sendall(json.dumps(answer).encode() + b"\n")
        except (OSError, EOFError, AssertionError):
            pass

    def _join(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.leave:
            return {"leave": True}
        self.attempt += 1
        self.keeper.ask(op="attempt", number=self.attempt, **self.extra)
        round_ = {"attempt": self.attempt, "rank": 0, "nodes": 1, "store_host": "127.0.0.1"}
        return {**round_, "store_port": request["store_port"]}

    def _wait(self, attempt: int) -> dict[str, Any]:
        life = self.life

        def ended(state: dict[str, Any]) -> bool:
            mine = [worker for worker in state["workers"] if worker["attempt"] == attempt]
            return any(worker["status"] is not None for worker in mine)

        self.keeper.wait_for(ended, 600)
        if life != self.life:
            raise EOFError
        if self.restarts and any(worker["status"] for worker in self.keeper.workers(attempt)):
            self.restarts -= 1
            self.keeper.ask(op="kill", attempt=attempt)
            return {"order": "restart"}
        return {"order": "look"}

    def launch(self, *arguments: str, cwd: Path | None = None, **variables: str) -> tuple[int, int]:
        """Start torchrun from the keeper; its pid, and the attempt that its first round will be."""
        attempt = self.attempt + 1
        environment = {**user_environment(), **variables}
        ours = training.launcher_variables(self.keeper.local_dir, "n0", self.keeper.stub, environment)
        options = ["--rdzv-backend", "unbroken", "--logs-specs", "unbroken", "--monitor-interval", "0.02"]
        options += ["--rdzv-endpoint", "localhost", "--rdzv-id", "job"]
        argv = [*options, *map(str, arguments)]
        for name in ("launcher.out", "launcher.err"):
            os.truncate(self.keeper.local_dir / name, 0)
        answer = self.keeper.ask(op="launch", argv=argv, env={**environment, **ours}, cwd=str(cwd or Path.cwd()))
        assert "pid" in answer, answer
        return int(answer["pid"]), attempt

    def run(self, *arguments: str, timeout_s: float = 60, **variables: Any) -> int:
        """Launch and wait for the end; torchrun's exit code."""
        pid, _attempt = self.launch(*arguments, **variables)
        state = self.keeper.wait_for(
            lambda state: (state["launcher"] or {}).get("pid") == pid and state["launcher"]["status"] is not None,
            timeout_s,
        )
        return os.waitstatus_to_exitcode(state["launcher"]["status"])

    def output(self, rank: int, stream: str = "out", attempt: int | None = None) -> str:
        path = self.keeper.attempt_dir(attempt or self.attempt) / f"rank{rank}.{stream}"
        return path.read_text()


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")  # one that was told to stop says of all that ends afterwards that we stopped it
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path_factory.mktemp("k"))
    yield keeper
    keeper.close()


@pytest.fixture
def own_keeper(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Makes a keeper that the test may destroy."""
    made: list[Keeper] = []

    def make(environment: dict[str, str] | None = None) -> Keeper:
        folder = tmp_path / f"k{len(made)}"
        folder.mkdir()
        made.append(Keeper(folder, environment))
        return made[-1]

    yield make
    for keeper in made:
        keeper.close()


@pytest.fixture(scope="module")
def shared_agent(keeper: Keeper) -> Agent:
    return Agent(keeper)


@pytest.fixture
def agent(shared_agent: Agent) -> Iterator[Agent]:
    shared_agent.restarts = 0
    shared_agent.extra = {}
    shared_agent.leave = False
    yield shared_agent
    keeper = shared_agent.keeper
    keeper.ask(op="stop", signal=9, grace_s=0)
    keeper.wait_for(lambda state: not state["launcher"] or state["launcher"]["status"] is not None)


@pytest.fixture
def make_agent() -> Callable[[Keeper], Agent]:
    return Agent


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return until


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process runs (a zombie does not)."""

    def check(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    return check


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


Result = tuple[str, str, int]


@pytest.fixture
def both(keeper: Keeper, tmp_path: Path) -> Callable[..., tuple[Result, Result]]:
    """Runs arguments with the real Python and with the stub; (stdout, stderr, return code) of each."""

    def run(*arguments: str, pythons: Sequence[str] = (sys.executable, ""), **variables: str) -> tuple[Result, Result]:
        results = []
        for python in (one or str(keeper.stub) for one in pythons):
            environment = {**keeper.environment, "RANK": "0", "LOCAL_RANK": "0", **variables}
            if python != sys.executable:
                environment = {
                    **environment,
                    **training.launcher_variables(keeper.local_dir, "n0", keeper.stub, environment),
                }
            done = subprocess.run(
                [python, "-u", *arguments],
                env=environment,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=180,
            )
            results.append((done.stdout, done.stderr, done.returncode))
        return results[0], results[1]

    return run
