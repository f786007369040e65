"""The two public extension points of torchrun that unbroken uses, found by entry points in this folder.

`torchrun --rdzv-backend unbroken --logs-specs unbroken ...`: membership and every restart come from the agent, and
every rank's output goes to a file. The only folder of ours in the launcher's path; the ranks do not have it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any, Callable, NoReturn  # noqa: UP035 (Python 3.9)

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, SignalException, Std, to_map
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

PATIENCE_S = 10.0
"""How long a running round waits for an agent to come back before torchrun is left to itself."""
RETRY_S = 0.2
STORE_TIMEOUT = timedelta(seconds=30)
"""For reaching the store of the node with rank 0; then the node joins again."""
attempt = 0
"""Of the round that was formed last; 0 before the first. Shared by the two classes below."""


class AgentGone(Exception):
    """The agent does not answer."""


class Agent:
    """Requests to the node's agent, one JSON line each; a lost connection is made again by the next request."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Blocks until the agent answers. Raises AgentGone when it cannot be reached or hangs up."""
        try:
            if self.file is None:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(self.path)
                    self.file = connection.makefile("rwb")
            self.file.write(json.dumps(request).encode() + b"\n")
            self.file.flush()
            line = self.file.readline()
            if not line:
                raise OSError("hung up")
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
            return answer
        except (OSError, ValueError) as error:
            self.close()
            raise AgentGone(str(error)) from error
        except BaseException:  # a signal came in the middle: the answer belongs to nobody
            self.close()
            raise

    def close(self) -> None:
        if self.file is not None:
            try:
                self.file.close()
            except OSError:
                pass
        self.file = None


def say(text: str) -> None:
    print(f"unbroken: {text}", file=sys.stderr, flush=True)


def local_world_size() -> int:
    """`--nproc-per-node` of this torchrun, as torchrun itself works it out; 0 when that fails."""
    try:
        from torch.distributed import run

        return int(run.determine_local_world_size(run.parse_args(sys.argv[1:]).nproc_per_node))
    except (Exception, SystemExit) as error:
        if isinstance(error, SignalException):
            raise
        return 0


class UnbrokenRendezvous(RendezvousHandler):  # type: ignore[misc]
    """Rounds are the controller's. Nothing here raises: an exception would end the launcher and healthy workers."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        self.local_addr: str | None = getattr(parameters, "local_addr", None)
        self.agent = Agent(os.environ.get("UNBROKEN_AGENT_SOCKET", ""))
        self.store: Any = None
        self.left_alone = False

    def get_backend(self) -> str:
        return "unbroken"

    def get_run_id(self) -> str:
        return str(self.run_id)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        self.agent.close()
        return True

    @property
    def use_agent_store(self) -> bool:
        """Workers use the launcher's store, fresh in each round: no race for a port, and no rank whose end takes it."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait, for ever if need be, until the controller has formed a round with this node in it."""
        global attempt
        host = self.local_addr or socket.gethostname()
        size = local_world_size()
        complained = False
        while True:
            self.store = None  # the old round's store goes before a new one is made
            try:
                store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                offer = {"store_host": host, "store_port": store.port, "local_world_size": size}
                answer = self._join(offer)
                attempt, rank = int(answer["attempt"]), int(answer["rank"])
                address, port = str(answer["store_host"]), int(answer["store_port"])
                if rank != 0:
                    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
                self.store, self.left_alone = store, False
                bootstrap = self._bootstrap(store, rank, address, port)
                return RendezvousInfo(PrefixStore(f"round{attempt}", store), rank, int(answer["nodes"]), bootstrap)
            except SignalException:
                raise
            except Exception as error:
                if not complained:
                    say(f"waiting to join the run: {type(error).__name__}: {error}")
                complained = True
                time.sleep(RETRY_S)

    def _bootstrap(self, store: TCPStore, rank: int, address: str, port: int) -> RendezvousStoreInfo:
        if self.use_agent_store:
            return RendezvousStoreInfo(address, port)
        return RendezvousStoreInfo.build(rank, PrefixStore("bootstrap", store), address)

    def _join(self, offer: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                answer = self.agent.ask({"op": "join", "pid": os.getpid(), **offer})
            except AgentGone:
                time.sleep(RETRY_S)
                continue
            if answer.get("leave"):
                leave()
            return answer

    def num_nodes_waiting(self) -> int:
        """Blocks until the agent wants torchrun to look at its workers (0) or to restart them (1)."""
        deadline = time.monotonic() + (0.0 if self.left_alone else PATIENCE_S)
        try:
            while True:
                try:
                    answer = self.agent.ask({"op": "wait", "attempt": attempt})
                    self.left_alone = False
                    return 1 if answer.get("order") == "restart" else 0
                except AgentGone:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(RETRY_S)
        except SignalException:
            raise
        except Exception as error:
            say(f"torchrun is left to itself: {type(error).__name__}: {error}")
        self.left_alone = True  # plain torchrun from here on, until the agent answers again
        return 0


def leave() -> NoReturn:
    """This node is not needed any more."""
    raise SystemExit(0)


def end_without_a_traceback() -> None:
    """A launcher that is told to end says so in a line of its own: a page of its frames is no news to anybody."""
    usual = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if not issubclass(kind, SignalException):
            usual(kind, error, trace)

    sys.excepthook = hook


def rendezvous() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of the group torchrun.handlers: returns the creator. Called in the launcher alone."""
    end_without_a_traceback()
    return UnbrokenRendezvous


class UnbrokenLogsSpecs(DefaultLogsSpecs):  # type: ignore[misc]
    """What torchrun would show on the terminal goes to files of the local folder; the user's own wishes hold.

    `--redirects` and `--tee` without `--log-dir` go to the same files. With `--log-dir` they keep torchrun's layout,
    numbered by our attempts and never deleted. `streams.json` says what is to be shown on the terminal.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Any = Std.NONE,
        tee: Any = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        **others: Any,
    ) -> None:
        self.local_dir = os.path.dirname(os.environ["UNBROKEN_AGENT_SOCKET"])
        self.user_dir = log_dir if log_dir and log_dir != os.devnull else None
        self.run_dir: str | None = None
        # Given no folder torch would make one in the temporary folder, which nobody would use.
        super().__init__(log_dir or os.devnull, redirects, tee, local_ranks_filter, **others)
        self.discarded = log_dir == os.devnull

    @property
    def root_log_dir(self) -> str:
        return self.user_dir or self.local_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where each local rank's output goes; also tells the ranks their attempt (the same on all nodes)."""
        number = max(attempt, 1)
        folder = os.path.join(self.local_dir, "attempts", str(number))
        os.makedirs(folder, exist_ok=True)
        user_folder = self._user_folder(envs, number)
        tee, redirects = to_map(self._tee, len(envs)), to_map(self._redirects, len(envs))
        paths: dict[str, dict[int, str]] = {"out": {}, "err": {}}
        tees: dict[str, dict[int, str]] = {"out": {}, "err": {}}
        errors: dict[int, str] = {}
        streams: list[dict[str, Any]] = []
        for local_rank, env in envs.items():
            rank = int(env.get("RANK", local_rank))
            hidden = bool(self._local_ranks_filter) and local_rank not in self._local_ranks_filter
            for stream, bit, name in (("out", Std.OUT, "stdout.log"), ("err", Std.ERR, "stderr.log")):
                teed = bool(tee[local_rank] & bit)
                kept = (teed or bool(redirects[local_rank] & bit)) and not self.discarded
                path = os.path.join(folder, f"rank{rank}.{stream}")
                if kept and user_folder:
                    path = os.path.join(user_folder, str(local_rank), name)
                paths[stream][local_rank] = path
                if teed and (self.discarded or not hidden):
                    tees[stream][local_rank] = os.devnull if self.discarded else path
                terminal = not kept and (self.discarded or not hidden)
                entry = {"rank": rank, "local_rank": local_rank, "stream": stream, "path": path}
                streams.append({**entry, "terminal": terminal, "tee": teed and kept and not hidden})
            errors[local_rank] = self._error_file(folder, user_folder, rank, local_rank)
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
            env["TORCHELASTIC_RESTART_COUNT"] = str(number - 1)
            env["UNBROKEN_ATTEMPT"] = str(number)
            env["UNBROKEN_LOCAL_RANK"] = str(local_rank)
        write_atomically(os.path.join(folder, "streams.json"), streams)
        values = [paths["out"], paths["err"], tees["out"], tees["err"], errors]
        filtered = [os.path.join(user_folder or folder, f"filtered_{name}.log") for name in ("stdout", "stderr")]
        return LogsDest(*[*values, *filtered][: len(dataclasses.fields(LogsDest))])

    def _user_folder(self, envs: dict[int, dict[str, str]], number: int) -> str:
        """`<log-dir>/<run id>_.../attempt_<n - 1>` with a folder for each local rank; empty without --log-dir."""
        if self.user_dir is None:
            return ""
        if self.run_dir is None:
            run_id = next(iter(envs.values()), {}).get("TORCHELASTIC_RUN_ID", "none")
            os.makedirs(self.user_dir, exist_ok=True)
            self.run_dir = tempfile.mkdtemp(prefix=f"{run_id}_", dir=self.user_dir)
        folder = os.path.join(self.run_dir, f"attempt_{number - 1}")
        for local_rank in envs:
            os.makedirs(os.path.join(folder, str(local_rank)), exist_ok=True)
        return folder

    def _error_file(self, folder: str, user_folder: str, rank: int, local_rank: int) -> str:
        """In the user's folder with a link to it from ours, or in ours."""
        ours = os.path.join(folder, f"rank{rank}.error.json")
        if not user_folder:
            return ours
        theirs = os.path.join(user_folder, str(local_rank), "error.json")
        if not os.path.lexists(ours):
            os.symlink(os.path.abspath(theirs), ours)
        return theirs


def write_atomically(path: str, value: Any) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)
