"""The agent's two probe workers as processes: started, heard, started again, and never piled up.

A process whose call into a driver never returns may not even die. Such a one is killed once, left where it is, told of,
and replaced by at most one new process in ten minutes, by none beside three, those of other jobs counted. Beside one
that another job has left in the GPU driver there is none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from diagnosis.signals import clean_text
from supervisor.blocking import timeout
from supervisor.node_health.contract import JobInfo
from supervisor.node_health.protocol import PollReport, Setup, TimedOut, WorkerMessage, decode_worker_message
from supervisor.node_health.worker import waiting_in
from supervisor.paths import write_atomically
from supervisor.services import daemon_argv

LEFT_BEHIND: Final = 3
"""With so many processes that do not die there are no new ones."""
STEADY_S: Final = 60.0
LINE_LIMIT: Final = 8 << 20


class Pace(NamedTuple):
    """How long is waited for what, in seconds."""

    tick: float = 10.0
    silent_ticks: int = 7
    """After so many ticks without a message a worker is given up; it sends one every 20 s. Counted in ticks, because
    after a pause of the whole node one tick passes at once, not all."""
    kill_after: float = 600.0
    """A GPU call that has not returned for so long: perhaps a new process can do better."""
    dying: float = 10.0
    """A killed process that lives so long does not die."""
    replace_every: float = 600.0
    """Between two starts while there are processes that do not die."""
    look_at_left: float = 30.0
    look_at_hold: float = 1.0
    first_pause: float = 1.0
    longest_pause: float = 60.0
    write_every: float = 5.0
    """Between two writes of `health.json` at least."""


log = logging.getLogger("unbroken.stations")

Threads = list[tuple[str, str]]


class Left(NamedTuple):
    """A process that was killed and has not died."""

    pid: int
    start_time: int
    since: float
    """Monotonic time."""


class WorkerRunner:
    """Keeps one probe worker running: `run` for ever, `tell` when the job has changed."""

    def __init__(
        self,
        group: str,
        setup: Callable[[], Setup],
        hear: Callable[[str, WorkerMessage], None],
        unkillable: Callable[[str, int, Threads, float], None],
        env: Mapping[str, str] | None = None,
        notes: Path | None = None,
        pace: Pace | None = None,
        shared: Path | None = None,
    ) -> None:
        """`undying(group, pid, threads, seconds)`: told every minute of a process that was killed and lives.
        `notes`: where the processes are written down, so that the next agent knows of those that live on.
        `shared`: where all agents of the user on this node write down those that were killed and live.
        """
        self.group = group
        self.problem = ""
        """Why it is not running, in words."""
        self.pid = 0
        self._setup = setup
        self._hear = hear
        self._unkillable = unkillable
        self._env = {**(os.environ if env is None else env), "MALLOC_ARENA_MAX": "2"}
        self._process: Process | None = None
        self._stuck_s = 0.0
        self._left = _read_notes(notes)
        """Processes that ought to be dead and are not."""
        self._notes = notes
        self._shared = shared
        self._held_until = 0.0
        self._met: dict[int, float] = {}
        """Process that another agent left behind -> when we first saw it."""
        self._pace = Pace() if pace is None else pace
        self._started_at = max((_started_at(left) for left in self._left if _lives(left)), default=float("-inf"))

    def tell(self, job: JobInfo) -> None:
        """What is new of the job; lost when no probe worker runs (it gets all of it at its start)."""
        stdin = self._process.stdin if self._process is not None else None
        if stdin is None or stdin.is_closing() or stdin.transport.get_write_buffer_size() > 1 << 20:
            return
        stdin.write(msgspec.json.encode(job) + b"\n")

    def hold(self, until: float) -> None:
        """Run nothing until this monotonic time: what runs is ended, at once. In the past: go on."""
        self._held_until = until
        stdin = self._process.stdin if self._process is not None else None
        if self.held and stdin is not None:
            stdin.close()  # it ends of itself; else it is ended at the next tick

    @property
    def held(self) -> bool:
        return time.monotonic() < self._held_until

    def alive(self) -> list[int]:
        """All processes of it that are there, those that do not die as well."""
        pids = [left.pid for left in self._left if _lives(left)]
        return [*pids, self.pid] if self.pid else pids

    async def run(self) -> None:
        pause_s = self._pace.first_pause
        while True:
            began = time.monotonic()
            try:
                await self._until_allowed()
                began = self._started_at = time.monotonic()
                await self._live()
            except Exception as error:  # no process, thread or memory left, a line without end: never the agent's end
                self._explain(f"the probe worker {self.group} cannot be run: {clean_text(repr(error), 200)}")
            finally:
                self._process, self.pid = None, 0
            lasted_s = time.monotonic() - began
            pause_s = self._pace.first_pause if lasted_s > STEADY_S else min(self._pace.longest_pause, pause_s * 2)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _until_allowed(self) -> None:
        """Beside processes that do not die a new one is started at most every ten minutes, and never many."""
        while True:
            while self.held:
                await asyncio.sleep(self._pace.look_at_hold)
            self._left = [left for left in self._left if _lives(left)]
            others = self._of_others()
            now = time.monotonic()
            started = max([self._started_at, *map(_started_at, others)])
            hopeless = self.group == "gpu" and others  # the driver hangs; in `node` there is much else to see
            if not hopeless and may_start(len(self._left) + len(others), now - started, self._pace.replace_every):
                return
            if others:
                pids = ", ".join(str(left.pid) for left in others)
                self._explain(f"the probe worker {self.group} is not started: of an earlier job {pids} does not die")
            for left in (*self._left, *others):
                self._unkillable(self.group, left.pid, threads_of(left.pid), now - left.since)
            await asyncio.sleep(self._pace.look_at_left)

    def _of_others(self) -> list[Left]:
        """What agents of other jobs have left behind, and does not die."""
        own = {(left.pid, left.start_time) for left in self._left}
        found = [left for left in _read_notes(self._shared) if (left.pid, left.start_time) not in own and _lives(left)]
        self._met = {left.pid: self._met.get(left.pid, left.since) for left in found}
        return [left._replace(since=self._met[left.pid]) for left in found]

    def _explain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    async def _live(self) -> None:
        """The life of one process. It is not waited for when it does not die."""
        argv = daemon_argv("supervisor.node_health.worker", self.group)
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=None, env=self._env, limit=LINE_LIMIT
        )
        self._process, self.pid, self._stuck_s = process, process.pid, 0.0
        self._write_notes()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._setup()) + b"\n")
        try:
            why = await self._listen(process)
        finally:
            if process.returncode is None:
                await self._end(process)
            process._transport.close()  # type: ignore[attr-defined]  # there is no other way to close its pipes
        why = why or ("it is held back" if self.held else f"code {process.returncode}")
        self._explain(f"the probe worker {self.group} ended: {why}")

    async def _listen(self, process: Process) -> str:
        """Until it ends (empty) or is to be ended (why)."""
        assert process.stdout is not None
        silent = 0
        while True:
            try:
                async with timeout(self._pace.tick):
                    line = await process.stdout.readline()
            except asyncio.TimeoutError:
                silent += 1
                if self.held:
                    return ""
                if silent >= self._pace.silent_ticks:
                    return f"no word for {silent * self._pace.tick:.0f} s"
                continue
            if not line:
                return ""
            silent = 0
            self._take(line)
            if self.held:
                return ""
            if self.group == "gpu" and self._stuck_s > self._pace.kill_after:
                return f"a call has not returned for {self._stuck_s:.0f} s"

    def _take(self, line: bytes) -> None:
        try:
            word = decode_worker_message(line)
        except msgspec.DecodeError as error:
            self._explain(f"the probe worker {self.group} talks nonsense: {clean_text(str(error), 200)}")
            return
        if isinstance(word, (TimedOut, PollReport)):
            self._stuck_s = word.since_s if isinstance(word, TimedOut) else 0.0
        try:
            self._hear(self.group, word)
        except Exception as error:  # a bug of ours costs this word, not the agent
            self._explain(f"what the probe worker {self.group} says is not understood: {clean_text(repr(error), 200)}")

    async def _end(self, process: Process) -> None:
        """One SIGKILL. What it waits in is read first: afterwards there may be nothing to read."""
        threads = threads_of(process.pid)
        if process.stdin is not None:
            process.stdin.close()  # the end, for one that hears
        try:
            async with timeout(1.0):
                await process.wait()
                return
        except asyncio.TimeoutError:
            pass
        killed_at = time.monotonic()
        try:
            process.kill()
        except ProcessLookupError:
            return
        try:
            async with timeout(self._pace.dying):
                await process.wait()
        except asyncio.TimeoutError:
            self._left.append(Left(process.pid, began_at(process.pid), killed_at))
            self._tell_others()
            self._unkillable(self.group, process.pid, threads_of(process.pid) or threads, self._pace.dying)

    def _write_notes(self) -> None:
        pids = [*(left.pid for left in self._left), self.pid]
        _write_notes(self._notes, [(pid, began_at(pid)) for pid in pids])

    def _tell_others(self) -> None:
        known = {(left.pid, left.start_time) for left in (*_read_notes(self._shared), *self._left) if _lives(left)}
        _write_notes(self._shared, sorted(known))


def may_start(left: int, since_s: float, every_s: float) -> bool:
    """Whether to start a process beside `left` that do not die, so long after the start before."""
    return left == 0 or (left < LEFT_BEHIND and since_s >= every_s)


def began_at(pid: int) -> int:
    """Start time of a process in clock ticks after boot, of a zombie too; 0 when it is gone. Raises OSError when that
    cannot be told just now."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def lives(pid: int, began: int) -> bool:
    """Whether this very process is there. One whose first thread is a zombie lives on in the thread that hangs."""
    try:
        if began == 0 or began_at(pid) != began:
            return False
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return any(waiting_in(f"/proc/{pid}/task/{task}")[0] not in "ZX" for task in tasks)


def _lives(left: Left) -> bool:
    return lives(left.pid, left.start_time)


def _started_at(left: Left) -> float:
    """In monotonic time, which does not count the time a node was suspended."""
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - left.start_time / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - since_s


def _read_notes(notes: Path | None) -> list[Left]:
    """What the agent before started and does not die with it, as it should have."""
    try:
        found = msgspec.json.decode(notes.read_bytes(), type=list[tuple[int, int]]) if notes is not None else []
    except (OSError, msgspec.DecodeError):
        return []
    now = time.monotonic()
    return [Left(pid, began, now) for pid, began in found[-LEFT_BEHIND:]]


def _write_notes(notes: Path | None, processes: Sequence[tuple[int, int]]) -> None:
    if notes is None:
        return
    try:
        notes.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(notes, msgspec.json.encode(processes))
    except OSError:
        pass


def threads_of(pid: int) -> Threads:
    """State and wait channel of each thread of a process; empty when it is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [waiting_in(f"/proc/{pid}/task/{task}") for task in tasks[:64]]
