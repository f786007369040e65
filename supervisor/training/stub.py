"""What torchrun believes to be its worker (PYTHON_EXEC): asks the keeper to fork the rank and stands in for it.

Started as `python -IS stub.py -u [-m] script args` and on the way of every restart: only C modules are imported before
the request is out. It forwards signals to the rank's group and ends as the rank ends. Without a keeper, or when the
keeper refuses, it runs the real Python as its child through bootstrap.py. As `stub.py --program name args` it
stands for a program that is no Python of ours (torchrun's --no-python, a PYTHON_EXEC of the user's own) and runs that
as it is.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import os
import resource
import sys
import time
from _json import encode_basestring_ascii as quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, NoReturn  # noqa: UP035

CONNECT_S = 3.0
"""How long the keeper may take to answer. One that is gone is noticed at once; a busy one is waited for."""
PROGRAM = "--program"
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
ENVIRON = os.environ


class Rank:
    """The process that this stub stands for; signals that come before it is known are kept."""

    def __init__(self) -> None:
        self.pid = 0
        self.early: list[int] = []

    def forward(self, number: int, _frame: object = None) -> None:
        if not self.pid:
            self.early.append(number)
            return
        for send in (os.killpg, os.kill):  # its group, as torchrun does; itself while it has no group yet
            try:
                send(self.pid, number)
                return
            except OSError:
                pass

    def known(self, pid: int) -> None:
        self.pid = pid
        while self.early:
            self.forward(self.early.pop(0))


class Line:
    """The connection to the keeper."""

    def __init__(self, path: str) -> None:
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        self.socket.settimeout(CONNECT_S)
        self.socket.connect(path)
        self.buffer = b""

    def send(self, text: str, descriptors: tuple[int, ...] = ()) -> None:
        data = text.encode() + b"\n"
        if descriptors:
            packed = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
            sent = self.socket.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
            data = data[sent:]
        self.socket.sendall(data)

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """The next object. OSError when there is none in time or the keeper is gone."""
        import json

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            self.socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            data = self.socket.recv(65536)
            if not data:
                raise OSError("the keeper is gone")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        answer = json.loads(line)
        return answer if isinstance(answer, dict) else {}


def encode(value: object) -> str:
    """JSON, without importing json: that would cost a third of the stub's time."""
    if isinstance(value, str):
        return str(quote(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{quote(name)}:{encode(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(encode, value)) + "]"
    return str(int(value)) if isinstance(value, int) else "null"


def request(argv: list[str], cold: str) -> dict[str, object]:
    umask = os.umask(0)
    os.umask(umask)
    limits: dict[str, object] = {
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "rlimits": [list(resource.getrlimit(number)) for number in range(16)],
    }
    return {
        "op": "worker",
        "argv": argv,
        "cwd": os.getcwd(),
        "env": dict(ENVIRON),
        "umask": umask,
        "stub": os.getpid(),
        "cold": cold,
        "limits": limits,
    }


def main() -> NoReturn:
    argv = sys.argv[1:]
    if argv and argv[0] == "-u":
        argv = argv[1:]
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-m", PROGRAM)):  # nothing that torchrun asks for
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    rank = Rank()
    for name in FORWARDED:
        _signal.signal(getattr(_signal, name), rank.forward)
    cold = PROGRAM if argv[0] == PROGRAM else "UNBROKEN_WARM=0" if ENVIRON.get("UNBROKEN_WARM") == "0" else ""
    answer: dict[str, Any] = {}
    line: Line | None = None
    try:
        line = Line(ENVIRON.get("UNBROKEN_KEEPER_SOCKET", ""))
        line.send(encode(request(argv, cold)), (0, 1, 2))
        answer = line.receive(CONNECT_S)
    except (OSError, ValueError):
        line = None
    if line is None or not answer.get("pid"):
        run_cold(rank, line, argv, answer)
    rank.known(answer["pid"])
    try:
        status = line.receive(None)["status"]
    except (OSError, ValueError, KeyError):
        status = _signal.SIGKILL  # the kernel kills the keeper's children along with it
    end(status)


def run_cold(rank: Rank, line: Line | None, argv: list[str], answer: Mapping[str, Any]) -> NoReturn:
    """Run the real Python as a child and stand for it."""
    ENVIRON.update(answer.get("env") or {})
    argv = [*argv, *(answer.get("args") or [])]
    bootstrap = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")
    stub = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        if os.getppid() != stub:
            os._exit(1)
        for name in FORWARDED:
            _signal.signal(getattr(_signal, name), _signal.SIG_DFL)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python's own choice for itself; exec would keep it
            _signal.signal(number, _signal.SIG_DFL)
        if argv[0] == PROGRAM:
            run_program(argv[1:])
        os.execve(sys.executable, [sys.executable, "-u", bootstrap, *argv], dict(ENVIRON))
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)  # of the launcher: no keeper may be there to see it die
    rank.known(pid)
    tell(line, {"op": "cold", "pid": pid, "env": dict(ENVIRON)})
    while True:
        try:
            status = os.waitpid(pid, 0)[1]
            break
        except InterruptedError:
            continue
    tell(line, {"status": status})
    end(status)


def run_program(argv: list[str]) -> NoReturn:
    """Become the program, without what is ours in its environment."""
    shim = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")
    ours = ("UNBROKEN_AGENT_SOCKET", "UNBROKEN_KEEPER_SOCKET", "UNBROKEN_NODE", "UNBROKEN_LOCAL_RANK")
    for name in (*ours, "UNBROKEN_SNAPSHOT_PID"):  # the last: of a rank that has started this job
        ENVIRON.pop(name, None)
    if ENVIRON.get("PYTHON_EXEC") != argv[0]:
        ENVIRON.pop("PYTHON_EXEC", None)
    path = [entry for entry in ENVIRON.pop("PYTHONPATH", "").split(os.pathsep) if entry != shim]
    if any(path):
        ENVIRON["PYTHONPATH"] = os.pathsep.join(path)
    try:
        os.execvpe(argv[0], argv, dict(ENVIRON))
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        os._exit(127)


def tell(line: Line | None, message: dict[str, object]) -> None:
    if line is not None:
        try:
            line.socket.settimeout(CONNECT_S)
            line.send(encode(message))
        except OSError:
            pass


def prctl(option: int, argument: int) -> None:
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0)
    except Exception:
        pass


def end(status: int) -> NoReturn:
    """End with the same exit code or signal; the core dump is the rank's alone."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WCOREDUMP(status) or number in (3, 4, 5, 6, 7, 8, 11, 31):
            prctl(PR_SET_DUMPABLE, 0)  # where core files are piped to a program the limit does not count
        if number != _signal.SIGKILL:
            _signal.signal(number, _signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
