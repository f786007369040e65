"""A training run, started as a user would start it, watched from outside, and given faults: for demo and bench.

Times are seconds of the monotonic clock. What a run printed is read by a thread, so that every line has its time.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from supervisor.errors import RunFailed
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.paths import daemon_argv

LINES_KEPT = 20_000
TAIL = 15
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
STEP = re.compile(r"\bstep (\d+)/\d+")


class OutputLine(NamedTuple):
    number: int
    at: float
    text: str


class WatchedRun:
    """One run. Each command is started in a session of its own, without standard input; all print into one story."""

    def __init__(self, command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.started = time.monotonic()
        self._lines: deque[OutputLine] = deque(maxlen=LINES_KEPT)
        self._next_number = 0
        self._news = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self.join(command, folder=folder, env=env)

    def join(self, command: Sequence[str], *, folder: Path, env: Mapping[str, str] | None = None) -> None:
        """Start another process that takes part in this run: one more node of it."""
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._processes.append(process)
        self._readers.append(reader)
        reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            with self._news:
                line = OutputLine(self._next_number, time.monotonic(), raw.decode(errors="replace").rstrip())
                self._next_number += 1
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The first one: its end is the run's."""
        return self._processes[0]

    @property
    def lines(self) -> list[OutputLine]:
        with self._news:
            return list(self._lines)

    def wait_for(
        self,
        pattern: str | re.Pattern[str],
        *,
        after: float = 0.0,
        timeout_s: float = 60.0,
        test: Callable[[re.Match[str]], bool] = bool,
    ) -> tuple[OutputLine, re.Match[str]]:
        """The first line printed since `after` with a `pattern` in it that passes `test`. Raises RunFailed."""
        deadline = time.monotonic() + timeout_s
        seen = -1
        with self._news:
            while True:
                ended = not any(reader.is_alive() for reader in self._readers)
                for line in list(self._lines):
                    if line.number <= seen or line.at < after:
                        continue
                    match = re.search(pattern, line.text)
                    if match and test(match):
                        return line, match
                seen = self._lines[-1].number if self._lines else -1
                left = deadline - time.monotonic()
                if left <= 0 or ended:
                    why = f"within {timeout_s:.0f} s" if left <= 0 else "before its end"
                    raise RunFailed(f"no line {getattr(pattern, 'pattern', pattern)!r} {why}\n{self._tail()}")
                self._news.wait(min(left, 1.0))

    def wait_for_step(self, step: int, *, after: float = 0.0, timeout_s: float = 60.0) -> OutputLine:
        """The first line since `after` that tells of `step` or a later one."""
        line, _ = self.wait_for(STEP, after=after, timeout_s=timeout_s, test=lambda match: int(match[1]) >= step)
        return line

    def last_step(self) -> int:
        """The newest step that was printed; 0 before the first."""
        return next((int(match[1]) for line in reversed(self.lines) if (match := STEP.search(line.text))), 0)

    def wait_for_end(self, timeout_s: float) -> int:
        """Exit code of the first process, when all have ended. Raises RunFailed when one goes on."""
        deadline = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self._processes]
        except subprocess.TimeoutExpired:
            raise RunFailed(f"it did not end within {timeout_s:.0f} s\n{self._tail()}") from None
        for reader in self._readers:
            reader.join(5.0)
        return codes[0]

    def _tail(self) -> str:
        return "\n".join(f"    {line.text}" for line in list(self._lines)[-TAIL:])

    def close(self, grace_s: float = 10.0) -> None:
        """End what still runs: politely, then not."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            alive = [process for process in self._processes if process.poll() is None]
            for process in alive:
                process.send_signal(number)
            for process in alive:
                try:
                    process.wait(wait_s)
                except subprocess.TimeoutExpired:
                    continue


def _end_with_parent() -> None:
    """In the child: SIGTERM when the process that watches is gone, however it went."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def torchrun() -> list[str]:
    """The torchrun beside this interpreter."""
    return [str(Path(sys.executable).with_name("torchrun"))]


def unbroken(*arguments: str) -> list[str]:
    """The command of this very installation."""
    return daemon_argv("supervisor.cli.main", *arguments)


def live_workers(local_root: Path) -> list[WorkerProcess]:
    """The ranks that keepers below `local_root` run now, by rank; empty while there is no keeper that answers."""
    workers: list[WorkerProcess] = []
    for path in local_root.glob("*/*/keeper.sock"):
        state = _ask_keeper(path)
        if state is not None:
            workers += [worker for worker in state.workers_of(state.newest_attempt) if worker.alive]
    return sorted(workers, key=lambda worker: worker.rank)


def _ask_keeper(path: Path) -> KeeperState | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(2.0)
            link.connect(str(path))
            link.sendall(b'{"op":"watch"}\n')
            with link.makefile("rb") as answer:
                return msgspec.json.decode(answer.readline(), type=KeeperState)
    except (OSError, msgspec.DecodeError):
        return None
