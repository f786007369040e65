"""Probe workers as processes: started, read and ended, and never piled up.

The agent keeps both workers running (`WorkerRunner`). `unbroken check` without an agent runs each of them once
(`run_once`). Both use the same process (`ProbeWorkerProcess`) and the same list of processes that cannot be killed.

A process whose call into a driver never returns may not even die of SIGKILL. It is killed once, left where it is, and
reported. The agent starts at most one new worker in ten minutes beside such processes, and none beside three of them,
those of other jobs counted. Beside one that hangs in the GPU driver and is not the agent's own, nobody starts another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from diagnosis.health import CheckResult
from diagnosis.signals import Frozen, clean_text
from supervisor.blocking import timeout
from supervisor.node_health.contract import JobInfo, keep_file
from supervisor.node_health.protocol import (
    PollReport,
    Problem,
    Setup,
    TimedOut,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
)
from supervisor.node_health.state import unkillable
from supervisor.node_health.worker import waiting_in
from supervisor.paths import daemon_argv, daemon_env

UNKILLABLE_KEPT: Final = 3
"""Beside so many processes that cannot be killed no new one is started."""
STEADY_S: Final = 60.0
LINE_LIMIT: Final = 8 << 20

log = logging.getLogger("unbroken.probe_workers")

Threads = list[tuple[str, str]]
"""State letter and wait channel of each thread."""


# ----- processes that cannot be killed -----


class Unkillable(Frozen, frozen=True, array_like=True):
    """A process that was killed and lives on."""

    pid: int
    start_time: int
    """Clock ticks after boot: with the pid, which process it is."""
    killed_at: float = 0.0
    """Seconds after boot; 0: not known."""

    @property
    def started_at(self) -> float:
        """Monotonic seconds. Unlike the time since boot, they do not count the time that a node was suspended."""
        since_s = _since_boot() - self.start_time / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - since_s

    def lives(self) -> bool:
        return lives(self.pid, self.start_time)


class UnkillableProcesses:
    """Those of one worker group. Files tell the next agent, agents of other jobs, and the next `unbroken check`."""

    def __init__(self, own: Path | None, shared: Path | None) -> None:
        """`own`: what this agent started, for the next agent. `shared`: for all agents, or all checks, of the user."""
        self._own = own
        self._shared = shared
        self._mine = _read(own)
        self._first_seen: dict[int, float] = {}
        """Pid -> seconds after boot, of those whose `killed_at` is not known."""

    def mine(self) -> list[Unkillable]:
        self._mine = [one for one in self._mine if one.lives()]
        return self._mine

    def of_others(self) -> list[Unkillable]:
        """What agents of other jobs, or an earlier check, could not kill."""
        own = {(one.pid, one.start_time) for one in self._mine}
        return [one for one in _read(self._shared) if (one.pid, one.start_time) not in own and one.lives()]

    def since_s(self, one: Unkillable) -> float:
        """Seconds since it was killed; where that is not known, since we first saw it."""
        return _since_boot() - (one.killed_at or self._first_seen.setdefault(one.pid, _since_boot()))

    def started(self, pid: int) -> None:
        _write(self._own, [*self._mine, Unkillable(pid, began_at(pid))])

    def add(self, pid: int) -> None:
        self._mine = [*self._mine, Unkillable(pid, began_at(pid), _since_boot())]
        _write(self._shared, [*self.of_others(), *self.mine()])


def may_start(unkillable_count: int, since_s: float, every_s: float) -> bool:
    """Whether to start a process beside those that cannot be killed, so long after the last start."""
    return unkillable_count == 0 or (unkillable_count < UNKILLABLE_KEPT and since_s >= every_s)


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


def threads_of(pid: int) -> Threads:
    """State and wait channel of each thread of a process; empty when it is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [waiting_in(f"/proc/{pid}/task/{task}") for task in tasks[:64]]


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _read(path: Path | None) -> list[Unkillable]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Unkillable]) if path is not None else []
    except (OSError, msgspec.DecodeError):
        return []
    return found[-UNKILLABLE_KEPT:]


def _write(path: Path | None, processes: list[Unkillable]) -> None:
    if path is not None:
        keep_file(path, processes)


# ----- one process -----


class ProbeWorkerProcess:
    """A probe worker that runs. Nothing here waits without a limit."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid
        self.threads: Threads = []
        """What its threads waited in when it had to be ended."""

    @classmethod
    async def start(
        cls, group: str, setup: Setup, env: Mapping[str, str], *, own_stderr: bool = False
    ) -> ProbeWorkerProcess:
        """`own_stderr`: what it writes there is read with `complaint`; else it goes where ours goes. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *daemon_argv("supervisor.node_health.worker", group),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE if own_stderr else None,
            env={**env, "MALLOC_ARENA_MAX": "2"},
            limit=LINE_LIMIT,
            cwd="/" if own_stderr else None,  # what lies where somebody stands is no module of ours
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        return cls(process)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def tell(self, job: JobInfo) -> None:
        """What is new of the job; lost when the worker does not read."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing() and stdin.transport.get_write_buffer_size() <= 1 << 20:
            stdin.write(msgspec.json.encode(job) + b"\n")

    def hang_up(self) -> None:
        """A worker that can still read ends by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def line(self, seconds: float) -> bytes | None:
        """The next line; empty when there will be none; None when none came in time. Raises ValueError for one without
        end."""
        assert self._process.stdout is not None
        try:
            async with timeout(seconds):
                return await self._process.stdout.readline()
        except asyncio.TimeoutError:
            return None

    async def complaint(self) -> str:
        """The last line of what it wrote on standard error."""
        if self._process.stderr is None:
            return ""
        try:
            async with timeout(0.2):
                said = await self._process.stderr.read(1 << 20)
        except asyncio.TimeoutError:
            return ""
        return clean_text(said.decode(errors="replace").strip().rpartition("\n")[2], 200)

    async def end(self, hang_up_s: float, dying_s: float) -> bool:
        """End it with one SIGKILL, if it does not end by itself. False: it does not die.

        What its threads wait in is read first: afterwards there may be nothing to read.
        """
        if self.returncode is not None:
            return True
        self.threads = threads_of(self.pid)
        self.hang_up()
        if await self._ended(hang_up_s):
            return True
        try:
            self._process.kill()
        except ProcessLookupError:
            return True
        if await self._ended(dying_s):
            return True
        self.threads = threads_of(self.pid) or self.threads
        return False

    async def _ended(self, seconds: float) -> bool:
        try:
            async with timeout(seconds):
                await self._process.wait()
        except asyncio.TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._process._transport.close()  # type: ignore[attr-defined]  # there is no other way to close its pipes


# ----- for an agent: kept running -----


class WorkerTimes(NamedTuple):
    """How long is waited for what, in seconds."""

    tick: float = 10.0
    silent_ticks: int = 7
    """After so many ticks without a message a worker is given up; it sends one every 20 s. Counted in ticks, because
    after a pause of the whole node one tick passes at once, not all."""
    kill_after: float = 600.0
    """A GPU call that has not returned for so long: perhaps a new process can do better."""
    dying: float = 10.0
    """A killed process that lives so long cannot be killed."""
    replace_every: float = 600.0
    """Between two starts beside processes that cannot be killed."""
    look_at_unkillable: float = 30.0
    look_at_hold: float = 1.0
    first_pause: float = 1.0
    longest_pause: float = 60.0
    write_every: float = 5.0
    """Between two writes of `health.json` at least."""


class WorkerRunner:
    """Keeps one probe worker running: `run` for ever, `tell` when the job has changed."""

    def __init__(
        self,
        group: str,
        setup: Callable[[], Setup],
        receive: Callable[[str, WorkerMessage], None],
        report_unkillable: Callable[[str, int, Threads, float], None],
        env: Mapping[str, str] | None = None,
        unkillable_processes: UnkillableProcesses | None = None,
        pace: WorkerTimes | None = None,
    ) -> None:
        """`report_unkillable(group, pid, threads, seconds)`: called every half minute for each process that was killed
        and lives.
        """
        self.group = group
        self.problem = ""
        """Why it is not running, in words."""
        self.pid = 0
        self._setup = setup
        self._receive = receive
        self._report_unkillable = report_unkillable
        self._env = dict(os.environ if env is None else env)
        self._process: ProbeWorkerProcess | None = None
        self._stuck_s = 0.0
        self._held_until = 0.0
        self._pace = WorkerTimes() if pace is None else pace
        self._unkillable = UnkillableProcesses(None, None) if unkillable_processes is None else unkillable_processes
        self._started_at = max((one.started_at for one in self._unkillable.mine()), default=float("-inf"))

    def tell(self, job: JobInfo) -> None:
        """What is new of the job; lost when no worker runs (it gets all of it at its start)."""
        if self._process is not None:
            self._process.tell(job)

    def hold(self, until: float) -> None:
        """Run nothing until this monotonic time: what runs is ended, at once. In the past: go on."""
        self._held_until = until
        if self.held and self._process is not None:
            self._process.hang_up()  # it ends by itself; else it is ended at the next tick

    @property
    def held(self) -> bool:
        return time.monotonic() < self._held_until

    def alive(self) -> list[int]:
        """All processes of it that are there, those that cannot be killed as well."""
        pids = [one.pid for one in self._unkillable.mine()]
        return [*pids, self.pid] if self.pid else pids

    async def run(self) -> None:
        pause_s = self._pace.first_pause
        while True:
            began = time.monotonic()
            try:
                await self._until_allowed()
                began = self._started_at = time.monotonic()
                await self._run_one()
            except Exception as error:  # no process, thread or memory left, a line without end: never the agent's end
                self._explain(f"the probe worker {self.group} cannot be run: {clean_text(repr(error), 200)}")
            finally:
                self._process, self.pid = None, 0
            lasted_s = time.monotonic() - began
            pause_s = self._pace.first_pause if lasted_s > STEADY_S else min(self._pace.longest_pause, pause_s * 2)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _until_allowed(self) -> None:
        """Beside processes that cannot be killed a new one is started at most every ten minutes, and never many."""
        while True:
            while self.held:
                await asyncio.sleep(self._pace.look_at_hold)
            mine, others = self._unkillable.mine(), self._unkillable.of_others()
            since_s = time.monotonic() - max([self._started_at, *(one.started_at for one in others)])
            hopeless = self.group == "gpu" and others  # the driver hangs; in `node` there is much else to see
            if not hopeless and may_start(len(mine) + len(others), since_s, self._pace.replace_every):
                return
            if others:
                pids = ", ".join(str(one.pid) for one in others)
                self._explain(f"the probe worker {self.group} is not started: of an earlier job {pids} does not die")
            for one in (*mine, *others):
                self._report_unkillable(self.group, one.pid, threads_of(one.pid), self._unkillable.since_s(one))
            await asyncio.sleep(self._pace.look_at_unkillable)

    def _explain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    async def _run_one(self) -> None:
        """The life of one process. It is not waited for when it does not die."""
        process = await ProbeWorkerProcess.start(self.group, self._setup(), self._env)
        self._process, self.pid, self._stuck_s = process, process.pid, 0.0
        self._unkillable.started(process.pid)
        try:
            why = await self._read(process)
        finally:
            if not await process.end(1.0, self._pace.dying):
                self._unkillable.add(process.pid)
                self._report_unkillable(self.group, process.pid, process.threads, self._pace.dying)
            process.close()
        why = why or ("it is held back" if self.held else f"code {process.returncode}")
        self._explain(f"the probe worker {self.group} ended: {why}")

    async def _read(self, process: ProbeWorkerProcess) -> str:
        """Until it ends (empty) or is to be ended (why)."""
        silent = 0
        while True:
            line = await process.line(self._pace.tick)
            if line is None:
                silent += 1
                if silent >= self._pace.silent_ticks and not self.held:
                    return f"no message for {silent * self._pace.tick:.0f} s"
            elif not line:
                return ""
            else:
                silent = 0
                self._take(line)
            if self.held:
                return ""
            if self.group == "gpu" and self._stuck_s > self._pace.kill_after:
                return f"a call has not returned for {self._stuck_s:.0f} s"

    def _take(self, line: bytes) -> None:
        try:
            message = decode_worker_message(line)
        except msgspec.DecodeError as error:
            self._explain(
                f"the probe worker {self.group} sent a message that cannot be read: {clean_text(str(error), 200)}"
            )
            return
        if isinstance(message, (TimedOut, PollReport)):
            self._stuck_s = message.since_s if isinstance(message, TimedOut) else 0.0
        try:
            self._receive(self.group, message)
        except Exception as error:  # a bug of ours costs this message, not the agent
            why = clean_text(repr(error), 200)
            self._explain(f"what the probe worker {self.group} sent is not understood: {why}")


# ----- for a check without an agent: once -----

DYING_S: Final = 5.0
"""So long a killed process may take to die before it counts as unkillable: a driver may first be unloaded."""
LAST_REPORT_S: Final = 0.3
"""A worker reports what its looks wait in so long before it is ended."""
ENDING_S: Final = 1.0
"""So long a worker may take to end after its last report."""
PROBLEMS_KEPT: Final = 32


@dataclasses.dataclass
class WorkerAnswer:
    group: str
    ready: WorkerReady | None = None
    reports: dict[str, PollReport] = dataclasses.field(default_factory=dict)
    """By probe."""
    timed_out: dict[str, TimedOut] = dataclasses.field(default_factory=dict)
    """By probe: looks that had not returned when the time was over."""
    problems: list[str] = dataclasses.field(default_factory=list)
    unkillable: CheckResult | None = None
    """The worker cannot be killed, or that of an earlier check could not."""

    @property
    def is_complete(self) -> bool:
        """Every probe has reported, or has been reported as timed out."""
        return self.ready is not None and self.ready.probes.keys() <= self.reports.keys() | self.timed_out.keys()

    def take(self, line: bytes) -> None:
        try:
            message = decode_worker_message(line)
        except msgspec.DecodeError as error:
            self.complain(
                f"the probe worker {self.group} sent a message that cannot be read: {clean_text(str(error), 200)}"
            )
            return
        if isinstance(message, WorkerReady):
            self.ready = message
        elif isinstance(message, PollReport):
            self.reports[message.probe] = message
            self.timed_out.pop(message.probe, None)
        elif isinstance(message, TimedOut):
            self.timed_out[message.probe] = message
        elif isinstance(message, Problem):
            self.complain(clean_text(message.text, 500))

    def complain(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)

    def cut_off(self, threads: Threads, took_s: float) -> None:
        """It was ended before it could report what its looks wait in: the worst of its threads stands for them."""
        state, wchan = max(threads, key=lambda thread: "SD".find(thread[0]), default=("?", ""))
        for probe in self.ready.probes if self.ready is not None else ():
            if probe not in self.reports and probe not in self.timed_out:
                self.timed_out[probe] = TimedOut(probe=probe, since_s=round(took_s, 3), state=state, wchan=wchan)


def run_once(
    setups: Mapping[str, Setup], until: float, dying_s: float = DYING_S, state_dir: Path | None = None
) -> list[WorkerAnswer]:
    """One look of each of these workers, until the monotonic time `until` (and `dying_s` more when one hangs).

    `state_dir`: where processes that cannot be killed are written down. While one lives, no other of its group starts.
    """

    async def all_groups() -> list[WorkerAnswer]:
        return await asyncio.gather(
            *(_run_group_once(group, setup, until, dying_s, state_dir) for group, setup in setups.items())
        )

    return asyncio.run(all_groups())


async def _run_group_once(
    group: str, setup: Setup, until: float, dying_s: float, state_dir: Path | None
) -> WorkerAnswer:
    answer = WorkerAnswer(group)
    known = UnkillableProcesses(None, state_dir / f"left-{group}.json" if state_dir is not None else None)
    if left := known.of_others():
        answer.unkillable = unkillable(group, left[0].pid, threads_of(left[0].pid), known.since_s(left[0]))
        return answer
    setup = msgspec.structs.replace(setup, once=True, until=until - LAST_REPORT_S)
    began = time.monotonic()
    try:
        process = await ProbeWorkerProcess.start(group, setup, daemon_env(os.environ, _here()), own_stderr=True)
    except OSError as error:
        answer.complain(f"the probe worker {group} cannot be run: {error}")
        return answer
    await _read_until(process, answer, until)
    took_s, was_cut_off = time.monotonic() - began, process.returncode is None
    if not await process.end(0.0, dying_s):
        known.add(process.pid)
        answer.unkillable = unkillable(group, process.pid, process.threads, dying_s)
    if was_cut_off:
        answer.cut_off(process.threads, took_s)
    if answer.ready is None and answer.unkillable is None:
        said = await process.complaint()
        how = f"did not start within {took_s:.1f} s" if was_cut_off else f"ended with code {process.returncode}"
        answer.problems.append(f"the probe worker {group} {how}" + (f": {said}" if said else ""))
    process.close()
    return answer


async def _read_until(process: ProbeWorkerProcess, answer: WorkerAnswer, until: float) -> None:
    """Until it has ended, or there is no time left. Children of its own may hold its output open: they do not count."""
    try:
        while (left_s := until - time.monotonic()) > 0:
            has_ended = process.returncode is not None  # then what it wrote last is read, and no more
            line = await process.line(min(0.05, left_s))
            if line:
                answer.take(line)
                if answer.is_complete:  # it ends now; one that hangs in a driver while it ends is not waited for
                    until = min(until, time.monotonic() + ENDING_S)
            elif line is not None or has_ended:
                break
        while process.returncode is None and time.monotonic() < until:  # it has closed its output, and ends
            await asyncio.sleep(0.01)
    except ValueError:
        answer.complain(f"the probe worker {answer.group} writes a line without end")


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError:  # the folder was removed
        return Path("/")
