"""Both probe workers, once: started, heard until a deadline, ended. Nothing here waits for longer than it was told to.

A process that does not die after SIGKILL (a call that hangs in a driver) is left where it is and written down: while it
lives no other one of its kind is started, however often somebody asks.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.health import CheckResult
from diagnosis.signals import Frozen, clean_text
from supervisor.node_health.protocol import PollReport, Problem, Setup, TimedOut, WorkerReady, decode_worker_message
from supervisor.node_health.runner import LINE_LIMIT, began_at, lives, threads_of
from supervisor.node_health.state import unkillable
from supervisor.paths import write_atomically
from supervisor.services import daemon_argv, daemon_env

REAP_S: Final = 5.0
"""So long a killed process may take to die before it counts as one that does not: a driver may first be unloaded."""
WORD_BEFORE_END_S: Final = 0.3
"""A probe worker says what its looks wait in so long before it is ended."""
COMPLAINT_KEPT: Final = 2000
"""Bytes of standard error."""
PROBLEMS_KEPT: Final = 32


class _Left(Frozen, frozen=True, kw_only=True):
    """A process that was killed and lived on."""

    group: str
    pid: int
    start_time: int
    at: float


@dataclasses.dataclass
class Told:
    """What one probe worker told."""

    group: str
    hello: WorkerReady | None = None
    reports: dict[str, PollReport] = dataclasses.field(default_factory=dict)
    """By probe."""
    timed_out: dict[str, TimedOut] = dataclasses.field(default_factory=dict)
    """By probe: looks that had not returned when the time was over."""
    problems: list[str] = dataclasses.field(default_factory=list)
    unkillable: CheckResult | None = None
    """The probe worker does not die, or one of an earlier check did not."""
    took_s: float = 0.0

    def take(self, line: bytes) -> None:
        try:
            word = decode_worker_message(line)
        except msgspec.DecodeError as error:
            self.complain(f"the probe worker {self.group} talks nonsense: {clean_text(str(error), 200)}")
            return
        if isinstance(word, WorkerReady):
            self.hello = word
        elif isinstance(word, PollReport):
            self.reports[word.probe] = word
            self.timed_out.pop(word.probe, None)
        elif isinstance(word, TimedOut):
            self.timed_out[word.probe] = word
        elif isinstance(word, Problem):
            self.complain(clean_text(word.text, 500))

    def complain(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)


class _Run:
    """One station's process."""

    def __init__(self, group: str, setup: Setup) -> None:
        self.told = Told(group)
        self.began = time.monotonic()
        self.rest = {"out": b"", "err": b""}
        self.threads: list[tuple[str, str]] = []
        """State and wait channel of each, when it had to be ended."""
        self.process = subprocess.Popen(
            daemon_argv("supervisor.node_health.worker", group),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",  # what lies where somebody stands is no module of ours
            env={**daemon_env(os.environ, _here()), "MALLOC_ARENA_MAX": "2"},
        )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(setup) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # how it ended tells why
            pass

    def take(self, stream: str, data: bytes) -> None:
        data = self.rest[stream] + data
        if stream == "out":
            *lines, data = data.split(b"\n")
            for line in lines:
                self.told.take(line)
            data = data if len(data) <= LINE_LIMIT else b"!"  # of a line without end nothing can be read
        else:
            data = data[-COMPLAINT_KEPT:]
        self.rest[stream] = data

    def cut_off(self) -> None:
        """End it, if it has not ended. What it waits in is read first: afterwards there may be nothing to read."""
        self.told.took_s = time.monotonic() - self.began
        if self.process.poll() is None:
            self.threads = threads_of(self.process.pid)
            self._guess()
            self.process.kill()

    def bury(self, reap_s: float) -> _Left | None:
        """What is left of it when it does not die."""
        process, told = self.process, self.told
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        try:
            process.wait(timeout=reap_s)
        except subprocess.TimeoutExpired:
            told.unkillable = unkillable(told.group, process.pid, threads_of(process.pid) or self.threads, reap_s)
            return _Left(group=told.group, pid=process.pid, start_time=began_at(process.pid), at=time.time())
        if told.hello is None:
            said = clean_text(self.rest["err"].decode(errors="replace").strip().rpartition("\n")[2], 200)
            how = f"ended with code {process.returncode}"
            if self.threads:
                how = f"did not start within {told.took_s:.1f} s"
            told.problems.append(f"the probe worker {told.group} {how}" + (f": {said}" if said else ""))
        return None

    def _guess(self) -> None:
        """It was cut off before it could say what its looks wait in: the worst of its threads stands for them."""
        told = self.told
        state, wchan = max(self.threads, key=lambda thread: "SD".find(thread[0]), default=("?", ""))
        for probe in told.hello.probes if told.hello is not None else ():
            if probe not in told.reports and probe not in told.timed_out:
                told.timed_out[probe] = TimedOut(probe=probe, since_s=round(told.took_s, 3), state=state, wchan=wchan)


def look(setups: Mapping[str, Setup], until: float, reap_s: float, notes: Path | None = None) -> list[Told]:
    """One look of each of these probe workers, until the monotonic time `until` (and `reap_s` more when one hangs).

    `notes`: where processes that do not die are written down.
    """
    left = [one for one in _read(notes) if lives(one.pid, one.start_time)]
    told = [_still_there(one) for one in {one.group: one for one in left}.values()]
    runs = []
    for group, setup in setups.items():
        if group in {one.group for one in left}:
            continue
        setup = msgspec.structs.replace(setup, once=True, until=until - WORD_BEFORE_END_S)
        try:
            runs.append(_Run(group, setup))
        except OSError as error:
            told.append(Told(group, problems=[f"the probe worker {group} cannot be run: {error}"]))
    _hear(runs, until)
    for run in runs:
        run.cut_off()
    reaped_by = time.monotonic() + reap_s
    more = [one for run in runs if (one := run.bury(max(0.05, reaped_by - time.monotonic()))) is not None]
    if notes is not None and (left or more or os.path.exists(notes)):
        _write(notes, [*left, *more])
    return [*told, *(run.told for run in runs)]


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError:  # the folder was removed
        return Path("/")


def _still_there(left: _Left) -> Told:
    return Told(
        left.group, unkillable=unkillable(left.group, left.pid, threads_of(left.pid), max(0.0, time.time() - left.at))
    )


def _hear(runs: list[_Run], until: float) -> None:
    """Until all have ended, or there is no time left. Children of theirs may hold the pipes open: they do not count."""
    with selectors.DefaultSelector() as selector:
        for run in runs:
            assert run.process.stdout is not None
            assert run.process.stderr is not None
            selector.register(run.process.stdout, selectors.EVENT_READ, (run, "out"))
            selector.register(run.process.stderr, selectors.EVENT_READ, (run, "err"))
        over = False
        while not over and time.monotonic() < until:
            over = all(run.process.poll() is not None for run in runs)  # and once more for what they said last
            while time.monotonic() < until and (ready := selector.select(0 if over else 0.05)):
                for key, _ in ready:
                    run, stream = key.data
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        run.take(stream, data)
                    else:
                        selector.unregister(key.fileobj)


def _read(notes: Path | None) -> list[_Left]:
    try:
        return msgspec.json.decode(notes.read_bytes(), type=list[_Left]) if notes is not None else []
    except (OSError, msgspec.DecodeError):
        return []


def _write(notes: Path, left: list[_Left]) -> None:
    try:
        notes.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(notes, msgspec.json.encode(left))
    except OSError:
        pass
