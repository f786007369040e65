"""The processes a front starts: each in a session of its own, started again with back-off when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
EX_CONFIG = 78
CONFIG_DELAY_S = 60.0
"""Pause after an exit code that says that a person has to change something first."""
LONGEST_DELAY_AFTER_KILL_S = 0.5
"""Pause after a process was killed from outside: it is not at fault."""
STEADY_S = 10.0
"""A process that lived this long did not fail at its start: the back-off begins anew."""

START = Path(__file__).resolve().parent.parent / "unbroken.py"

LOG_LIMIT = 8 << 20
"""Bytes of each log; as much of what came before is kept beside it."""
NEVER = float("inf")


class ServiceProcess:
    """One process that is kept running until `end`."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path | None = None,
        last_codes: Sequence[int] = (),
        restart_args: Sequence[str] = (),
    ) -> None:
        """`log` None: it shares our descriptors. After an exit code in `last_codes` it is not started again."""
        self.name = name
        self.failures = 0
        """Ends in a row, each soon after the start and by its own fault: not killed by a signal."""
        self.finished = False
        self._argv = list(argv)
        self._restart_args = list(restart_args)
        self._env = dict(env)
        self._cwd = cwd
        self._log = log
        self._last_codes = last_codes
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._next_at = 0.0
        self._short_lives = 0

    @property
    def pid(self) -> int:
        """0 while it is not running."""
        return self._process.pid if self._process is not None else 0

    def tend(self, now: float) -> float:
        """Start the process when it is due. Returns the seconds until the next call is needed."""
        self._bound_log()
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.returncode, now)
        if self._process is not None or self.finished:
            return NEVER
        if now >= self._next_at:
            try:
                self._start(now)
            except OSError:  # no process, memory or descriptor left just now: the run goes on, we try again
                self._started_at = now
                self._ended(126, now)
                return max(0.0, self._next_at - now)
            return NEVER
        return self._next_at - now

    def _start(self, now: float) -> None:
        again = self._restart_args if self._started_at else []
        output = None
        if self._log is not None:
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                [*self._argv, *again],
                env=self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL if output is not None else None,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if output is not None:
                os.close(output)
        self._started_at = now

    def _bound_log(self) -> None:
        """Keep its log small, whoever writes to it (its own children do). It is open for appending, and stays so: what
        is in it is copied aside, and the file begins anew."""
        if self._log is None:
            return
        try:
            if os.stat(self._log).st_size <= LOG_LIMIT:
                return
            with open(self._log, "r+b") as log, open(self._log.with_suffix(".log.1"), "wb") as aside:
                log.seek(-LOG_LIMIT, os.SEEK_END)
                aside.write(log.read(LOG_LIMIT))
                log.truncate(0)
        except FileNotFoundError:
            pass  # it has not written anything yet
        except OSError:  # a full disk: then nothing is kept of it
            with contextlib.suppress(OSError):
                os.truncate(self._log, 0)

    def _ended(self, code: int, now: float) -> None:
        self._process = None
        self.finished = code in self._last_codes
        if now - self._started_at > STEADY_S:
            self._short_lives = self.failures = 0
        self._short_lives += 1
        self.failures += code >= 0
        longest_s = LONGEST_DELAY_S if code >= 0 else LONGEST_DELAY_AFTER_KILL_S
        delay_s = min(longest_s, FIRST_DELAY_S * 2.0 ** min(self._short_lives - 1, 10))
        self._next_at = now + (CONFIG_DELAY_S if code == EX_CONFIG else delay_s)

    def last_line(self) -> str:
        """The last line of its log, which usually says why it failed."""
        try:
            lines = self._log.read_bytes()[-4096:].decode(errors="replace").split("\n") if self._log else []
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "no word from it")[:300]

    def end(self, patience_s: float, *, polite: bool = True) -> None:
        """Wait for its own end, then end it: SIGTERM and a second, if `polite`, then SIGKILL with all its group."""
        self.finished = True
        process, self._process = self._process, None
        if process is None or _ended_within(process, patience_s):
            return
        if polite:
            process.terminate()
            if _ended_within(process, 1.0):
                return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        _ended_within(process, 5.0)


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def daemon_argv(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules; it is found whatever PYTHONPATH and the working folder hold."""
    return [sys.executable, str(START), "-m", module, *arguments]


def daemon_env(environment: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """The user's environment for a process in another folder: relative entries of PYTHONPATH made absolute."""
    path = environment.get("PYTHONPATH", "")
    entries = [str(cwd / entry) for entry in path.split(os.pathsep)] if path else []
    return {**environment, **({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})}


def ask_keeper(path: Path, request: Mapping[str, object], timeout_s: float = 1.0) -> dict[str, Any] | None:
    """One request to the keeper and its answer; None when it does not answer in time."""
    deadline = time.monotonic() + timeout_s
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            while not answer.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = connection.recv(65536)
                if not chunk:
                    return None
                answer += chunk
        found = json.loads(answer.split(b"\n", 1)[0])
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
