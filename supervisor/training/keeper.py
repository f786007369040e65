"""The keeper of a node: imports torch once, forks launcher and ranks, keeps their true ends.

    python -u keeper.py --socket PATH --local-dir DIR [--log PATH] [--parent PID]

No policy, no network, one thread, no CUDA call. docs/node-files.md lists the operations of its socket.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035 (Python 3.9)

if TYPE_CHECKING:
    from supervisor.training import bootstrap, changes, clients, imports, members, surroundings, warm
else:  # under names that no script's import can meet
    _spec = importlib.util.spec_from_file_location(
        "_unbroken_bootstrap", os.path.join(os.path.dirname(os.path.realpath(__file__)), "bootstrap.py")
    )
    bootstrap = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = bootstrap
    _spec.loader.exec_module(bootstrap)
    clients, members, surroundings = (bootstrap.sibling(name) for name in ("clients", "members", "surroundings"))
    imports, changes, warm = (bootstrap.sibling(name) for name in ("imports", "changes", "warm"))

PRELOAD = ("torch", "torch.distributed", "torch.distributed.run")
PRELOAD_IF_THERE = (
    "torch.utils.data",
    "torch.nn.parallel",
    "torch.distributed.elastic.rendezvous.registry",
    "torch._dynamo",
    "torch.utils.serialization",
    "torch.profiler._cupti_monitor",
)
"""What torch imports when it is first used. The first optimizer of every script imports torch._dynamo: over a second.
The last two (of `torch.load` and of the first step of DDP) are small, but before each import a rank looks for changes:
70 ms of a core for both."""
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
MAX_QUEUED = 4 << 20
LOG_LIMIT = 1 << 20
SAME_STOP_S = 10.0
"""An order to stop that comes within this time after the same signal to every process is its consequence."""
NOT_OURS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends them to every process of a job. They are meant for the ranks, which the keeper's death would kill."""
HELD_BACK = (*NOT_OURS, signal.SIGINT)
"""What a fork is told before it has handlers of its own waits until then: the keeper's would swallow it."""
CHANGING = ("worker", "cold", "launch", "kill", "stop", "status")
"""Requests after which watchers are told."""


def die_with(parent: int) -> None:
    """Be killed when `parent` (the present parent) ends, or now if it has."""
    LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Become:
    """What a fork is to be: returned up to the top of the program, so that nothing of ours is below the script."""

    def __init__(self, argv: list[str], request: dict[str, Any], descriptors: list[int], worker: bool) -> None:
        self.argv = argv
        self.environ: dict[str, str] = {str(name): str(value) for name, value in (request.get("env") or {}).items()}
        self.cwd: str | None = request.get("cwd")
        self.umask: int | None = request.get("umask")
        self.descriptors = descriptors
        self.worker = worker
        self.interrupt: Any = signal.default_int_handler
        """What SIGINT does to a launcher: nothing where the keeper was started so."""
        self.blocked: set[Any] = set()
        """Signals to block again once its own handlers are set: those that the keeper was started with."""
        self.changed: dict[str, str | None] = {}
        """Variables that imports of a fork server have set, or removed (None)."""
        self.warned = ""
        """The warnings of these imports."""
        self.channel: socket.socket | None = None
        """To the keeper, of a fork server."""
        self.record: dict[str, Any] | None = None
        """What a fork server is to import."""


class Keeper:
    """The server. Every method returns at once; `serve` returns in a forked child only."""

    def __init__(self, socket_path: str, local_dir: str, log_path: str) -> None:
        self.log_path = log_path
        self.selector = selectors.DefaultSelector()
        self.listener = clients.listen(socket_path)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.wake_reader, self.wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self.wake_reader, selectors.EVENT_READ)
        self.clients: set[clients.Client] = set()
        self.members = members.Members(local_dir)
        self.error = ""
        self.attempt = 0
        self.extra_args: list[str] = []
        self.extra_env: dict[str, str] = {}
        self.kill_at: float | None = None
        self.noted: dict[int, float] = {}
        """Signal -> when we got it."""
        self.keeper_variables = surroundings.read_at_load(os.environ, bootstrap.SHIM)
        self.limits: dict[str, Any] = surroundings.limits()
        self.interrupt: Any = signal.default_int_handler
        self.become: Become | None = None
        self.warm = warm.Warm(self, Become)

    def note(self, number: int, _frame: object) -> None:
        """A signal that was sent to every process of the job, or to us by mistake."""
        self.noted[number] = time.monotonic()

    def log(self, text: str) -> None:
        """A line of our own log, which never grows over twice LOG_LIMIT."""
        if not self.log_path:
            return
        try:
            if os.path.exists(self.log_path) and os.path.getsize(self.log_path) > LOG_LIMIT:
                os.replace(self.log_path, self.log_path + ".1")
            with open(self.log_path, "a") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text[:2000]}\n")
        except OSError:
            pass

    def prepare(self) -> None:
        """Import torch and be ready to fork. What goes wrong is told in the state; then everything runs cold."""
        started = time.monotonic()
        try:
            for name in PRELOAD:
                __import__(name)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"[:500]
        for name in PRELOAD_IF_THERE if not self.error and os.environ.get("UNBROKEN_WARM") != "torch" else ():
            try:
                __import__(name)
            except Exception as error:
                self.log(f"not preloaded: {name}: {error}")
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        imports.keeper_has = frozenset(sys.modules)
        with warnings.catch_warnings():  # names that are old warn when they are looked at
            warnings.simplefilter("ignore")
            changes.remember_keeper()
        gc.collect()
        gc.freeze()
        self.members.ready = True
        threads = len(os.listdir("/proc/self/task"))
        self.log(f"ready after {time.monotonic() - started:.2f} s, {threads} thread(s) {self.error}")

    def serve(self) -> Become:
        while True:
            waits = [self.warm.wait_s(), None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())]
            for key, events in self.selector.select(min((one for one in waits if one is not None), default=None)):
                self._handle(key.fileobj, events)
                if self.become is not None:
                    return self.become
            self.warm.safely(self.warm.tick)
            if self.become is not None:
                return self.become
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_at = None
                self.members.kill_all("the grace of a stop is over")

    def _handle(self, source: Any, events: int) -> None:
        if source is self.listener:
            self._accept()
        elif source == self.wake_reader:
            self._reap()
        elif isinstance(source, clients.Client):
            self._serve_client(source, events)
        elif isinstance(source, warm.ServerProcess):
            self.warm.safely(self.warm.heard, source)
        elif isinstance(source, warm.ForkOrder):
            self.warm.safely(self.warm.forked, source)
        else:  # the pidfd of a cold worker
            self.selector.unregister(source)
            self.members.cold_gone(source)
            self._tell_watchers()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _gid = struct.unpack("3i", credentials)
        if uid != os.getuid():
            self.log(f"refused a connection of user {uid}")
            connection.close()
            return
        connection.setblocking(False)
        client = clients.Client(connection, pid)
        self.clients.add(client)
        self.selector.register(client, selectors.EVENT_READ)

    def _reap(self) -> None:
        try:
            os.read(self.wake_reader, 4096)
        except BlockingIOError:
            pass
        changed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            changed = True
            worker = self.members.ended(pid, status)
            if worker is not None and worker.owner is not None:
                self.send(worker.owner, {"status": status})
        if changed:
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        state = {**self.members.state(), "error": self.error}
        for client in [client for client in self.clients if client.watching]:
            self.send(client, state)

    def send(self, client: clients.Client, message: dict[str, Any]) -> None:
        """Queue and try to write at once. A client that does not read is dropped, never waited for."""
        client.outgoing += json.dumps(message).encode() + b"\n"
        if len(client.outgoing) > MAX_QUEUED:
            self._drop(client)
            return
        self._flush(client)

    def _flush(self, client: clients.Client) -> None:
        if client not in self.clients:
            return
        try:
            while client.outgoing:
                client.outgoing = client.outgoing[client.connection.send(client.outgoing) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        self.selector.modify(client, wanted)

    def _drop(self, client: clients.Client) -> None:
        if client not in self.clients:
            return
        self.clients.discard(client)
        self.selector.unregister(client)
        self.warm.client_gone(client)
        client.close()
        worker, client.worker = client.worker, None
        if worker is not None:
            worker.owner = None
            if worker.status is None:
                self.members.kill(worker, "its stub is gone", by_us=False)

    def _serve_client(self, client: clients.Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if client not in self.clients or not events & selectors.EVENT_READ:
            return
        alive = client.receive()
        while alive and b"\n" in client.incoming and client in self.clients:
            line, client.incoming = client.incoming.split(b"\n", 1)
            message: Any = None
            try:
                message = json.loads(line)
                answer = self._answer(client, message)
            except Exception as error:  # bad input must never end the keeper: it would take the run along
                self.log(f"bad request: {type(error).__name__}: {error}")
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            if self.become is not None:
                return
            if answer is not None:
                self.send(client, answer)
            if isinstance(message, dict) and message.get("op", "status") in CHANGING:
                self._tell_watchers()
        if not alive:
            self._drop(client)

    def _answer(self, client: clients.Client, message: Any) -> dict[str, Any] | None:
        if not isinstance(message, dict):
            raise ValueError("not an object")
        if "op" not in message and "status" in message and client.worker is not None and client.worker.cold:
            self.members.finish(client.worker, int(message["status"]))
            return None
        operation = OPERATIONS.get(str(message.get("op")))
        if operation is None:
            raise ValueError(f"unknown operation {str(message.get('op'))[:40]!r}")
        return operation(self, client, message)

    def _watch(self, client: clients.Client, _message: dict[str, Any]) -> dict[str, Any]:
        client.watching = True
        return {**self.members.state(), "error": self.error}

    def _attempt(self, _client: clients.Client, message: dict[str, Any]) -> dict[str, Any]:
        self.attempt = int(message["number"])
        self.members.kill_attempts(self.attempt - 1)  # what dead ranks left behind holds memory and ports
        self.extra_args = [str(argument) for argument in message.get("args") or []]
        self.extra_env = {str(name): str(value) for name, value in (message.get("env") or {}).items()}
        self.warm.new_attempt()
        return {"ok": True}

    def _kill(self, _client: clients.Client, message: dict[str, Any]) -> dict[str, Any]:
        return {"killed": self.members.kill_attempts(int(message["attempt"]))}

    def _signal(self, _client: clients.Client, message: dict[str, Any]) -> dict[str, Any]:
        self.members.signal(int(message["signal"]), message.get("ranks"), bool(message.get("handled")))
        return {"ok": True}

    def _stop(self, _client: clients.Client, message: dict[str, Any]) -> dict[str, Any]:
        grace_s, number, now = max(0.0, float(message.get("grace_s", 30.0))), int(message["signal"]), time.monotonic()
        # What Slurm sent to all of us, torchrun has: at a second one it ends at once, and its ranks while they save.
        told = number in self.noted and now - self.noted[number] < SAME_STOP_S
        self.members.stop(None if told else number)
        self.kill_at = now + grace_s
        return {"ok": True}

    def _launch(self, client: clients.Client, message: dict[str, Any]) -> dict[str, Any]:
        if self.members.launcher_alive():
            return {"error": "a launcher is alive"}
        argv = [str(argument) for argument in message["argv"]]
        become = Become(argv, message, client.descriptors[:3], worker=False)
        self.kill_at = None
        pid = self.fork(become)
        if pid == 0:
            return {}
        client.drop_descriptors()
        self.members.launched(pid)
        self.log(f"launcher {pid}")  # its words stand in node.json: there may be a secret among them
        return {"pid": pid}

    def _worker(self, client: clients.Client, message: dict[str, Any]) -> dict[str, Any] | None:
        environ = {**message["env"], **self.extra_env}
        refusal = str(message.get("cold") or "") or self.error
        refusal = refusal or surroundings.difference(
            self.keeper_variables,
            surroundings.read_at_load(environ, bootstrap.SHIM),
            self.limits,
            message.get("limits") or self.limits,
        )
        environ.setdefault("UNBROKEN_ATTEMPT", str(self.attempt))
        if refusal or len(client.descriptors) != 3:
            self.log(f"refused rank {environ.get('RANK')}: {refusal or 'no descriptors'}")
            client.drop_descriptors()
            given = {**self.extra_env, "UNBROKEN_ATTEMPT": environ["UNBROKEN_ATTEMPT"]}
            return {"refused": refusal or "no descriptors", "args": self.extra_args, "env": given}
        if client.is_gone():
            raise ValueError("the stub has given up")
        message["env"] = environ
        argv = [str(argument) for argument in message["argv"]] + self.extra_args
        if not self.warm.ask(client, message, argv):
            self.fork_worker(client, message, argv)
        return None

    def fork_worker(self, client: clients.Client, message: dict[str, Any], argv: list[str]) -> None:
        """Fork a rank from this process. In the child `become` is set."""
        pid = self.fork(Become(argv, message, client.descriptors, worker=True))
        if pid != 0:
            self.has_forked(client, message, argv, pid)

    def has_forked(self, client: clients.Client, message: dict[str, Any], argv: list[str], pid: int) -> None:
        client.drop_descriptors()
        worker = members.Worker.of(message["env"], pid, self.attempt, int(message.get("stub") or 0))
        self._own(client, worker)
        self.warm.started(message, argv, worker.local_rank)
        self.send(client, {"pid": pid})
        self._tell_watchers()

    @staticmethod
    def is_parent_of(pid: int) -> bool:
        return bool(members.parent(pid) == os.getpid())

    @staticmethod
    def prctl(option: int, argument: int) -> None:
        LIBC.prctl(option, ctypes.c_ulong(argument), 0, 0, 0)

    def _cold(self, client: clients.Client, message: dict[str, Any]) -> dict[str, Any]:
        pid = int(message["pid"])
        if pid <= 1 or members.parent(pid) != client.peer:
            raise ValueError(f"process {pid} is not a child of the one that says so")
        worker = members.Worker.of(message["env"], pid, self.attempt, 0)
        worker.cold = True
        self._own(client, worker)
        try:
            worker.pidfd = os.pidfd_open(pid)
            self.selector.register(worker.pidfd, selectors.EVENT_READ)
        except (OSError, AttributeError):  # an old kernel: the stub tells the end, or its connection does
            pass
        return {"ok": True}

    def _own(self, client: clients.Client, worker: members.Worker) -> None:
        client.worker = worker
        worker.owner = client
        self.members.add(worker)

    def fork(self, become: Become) -> int:
        """0 in the child, whose `serve` then returns."""
        become.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        pid = -1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                parent = os.getpid()
                pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, become.blocked)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            die_with(parent)
            os.setsid()
            become.interrupt = self.interrupt
            self.become = become
        return pid

    def close_in_fork(self) -> None:
        """Close everything that a fork must not keep open.

        Objects are closed, not their numbers: at the end of the process Python frees them, and each would close
        its number once more, which belongs to the script or to a library by then.
        """
        self.selector.close()
        self.listener.close()
        self.warm.close_in_fork()
        raw = [self.wake_reader, self.wake_writer, *self.members.take_descriptors()]
        for client in self.clients:
            raw += client.descriptors
            client.descriptors = []
            client.connection.close()
        for descriptor in raw:
            with contextlib.suppress(OSError):
                os.close(descriptor)


OPERATIONS: dict[str, Callable[[Keeper, clients.Client, dict[str, Any]], dict[str, Any] | None]] = {
    "worker": Keeper._worker,
    "cold": Keeper._cold,
    "launch": Keeper._launch,
    "attempt": Keeper._attempt,
    "watch": Keeper._watch,
    "kill": Keeper._kill,
    "signal": Keeper._signal,
    "stop": Keeper._stop,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="keeper.py")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--local-dir", required=True)
    parser.add_argument("--log", default="")
    parser.add_argument("--parent", type=int, default=os.getppid())
    options = parser.parse_args()
    die_with(options.parent)
    keeper = Keeper(options.socket, options.local_dir, options.log)
    for number in NOT_OURS:
        signal.signal(number, keeper.note)
    keeper.prepare()
    become = keeper.serve()
    settle = bootstrap.sibling("settle")
    close_in_fork: Callable[[], None] | None = keeper.close_in_fork
    if become.channel is not None:  # a fork server; what goes on from here is a rank that it has forked
        become = bootstrap.sibling("fork_server").serve(become, keeper.close_in_fork)
        close_in_fork = None
    settle.settle(become, close_in_fork)
    if become.worker:
        bootstrap.run_worker(become.argv)
    else:
        settle.run_launcher(become.argv, cold=keeper.error)


if __name__ == "__main__":
    main()
