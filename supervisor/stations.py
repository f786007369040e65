"""The agent's two stations as processes: started, heard, started again, and never piled up.

A process whose call into a driver never returns may not even die. Such a one is killed once, left where it is, told of,
and replaced by at most one new process in ten minutes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from diagnosis.signals import clean_text
from supervisor.deadline import timeout
from supervisor.probes.probe import JobView
from supervisor.probes.reports import Overdue, Report, Setup, StationWord, decode_station_word
from supervisor.probes.waiting import waiting_in
from supervisor.services import daemon_argv

TICK_S: Final = 10.0
SILENT_TICKS: Final = 7
"""So many ticks without a word, and it is given up: stations say something every 20 s. Counted in ticks, because after
a pause of the whole node one tick passes at once, not all."""
KILL_AFTER_S: Final = 600.0
"""A GPU call that has not returned for so long: perhaps a new process can do better."""
DYING_S: Final = 10.0
REPLACE_EVERY_S: Final = 600.0
LEFT_BEHIND: Final = 3
"""With so many processes that do not die there are no new ones."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S: Final = 60.0
LINE_LIMIT: Final = 8 << 20

log = logging.getLogger("unbroken.stations")

Threads = list[tuple[str, str]]


class Station:
    """Keeps one station running: `run` for ever, `tell` when the job has changed."""

    def __init__(
        self,
        group: str,
        setup: Callable[[], Setup],
        hear: Callable[[str, StationWord], None],
        undying: Callable[[str, int, Threads, float], None],
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`undying(group, pid, threads, seconds)`: told every minute of a process that was killed and lives."""
        self.group = group
        self.problem = ""
        """Why it is not running, in words."""
        self.pid = 0
        self._setup = setup
        self._hear = hear
        self._undying = undying
        self._env = {**(os.environ if env is None else env), "MALLOC_ARENA_MAX": "2"}
        self._process: Process | None = None
        self._stuck_s = 0.0
        self._left: list[tuple[Process, float]] = []
        """Processes that were killed and have not died, with when that was."""

    def tell(self, job: JobView) -> None:
        """What is new of the job; lost when no station runs (it gets all of it at its start)."""
        stdin = self._process.stdin if self._process is not None else None
        if stdin is None or stdin.is_closing() or stdin.transport.get_write_buffer_size() > 1 << 20:
            return
        stdin.write(msgspec.json.encode(job) + b"\n")

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                await self._live()
            except (OSError, ValueError) as error:
                self._explain(f"the station {self.group} cannot be run: {error}")
            finally:
                self._process, self.pid = None, 0
            lasted_s = time.monotonic() - began
            pause_s = FIRST_PAUSE_S if lasted_s > STEADY_S else min(LONGEST_PAUSE_S, pause_s * 2)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            while self._left_behind() and (
                len(self._left) >= LEFT_BEHIND or time.monotonic() - began < REPLACE_EVERY_S
            ):
                for process, since in self._left:
                    self._undying(self.group, process.pid, threads_of(process.pid), time.monotonic() - since)
                await asyncio.sleep(min(60.0, REPLACE_EVERY_S / 2))

    def _left_behind(self) -> bool:
        self._left = [(process, since) for process, since in self._left if process.returncode is None]
        return bool(self._left)

    def _explain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    async def _live(self) -> None:
        """The life of one process. It is not waited for when it does not die."""
        argv = daemon_argv("supervisor.probes.station", self.group)
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=None, env=self._env, limit=LINE_LIMIT
        )
        self._process, self.pid, self._stuck_s = process, process.pid, 0.0
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._setup()) + b"\n")
        try:
            why = await self._listen(process)
        finally:
            if process.returncode is None:
                await self._end(process)
        code = process.returncode
        self._explain(f"the station {self.group} ended: {why or f'code {code}'}")

    async def _listen(self, process: Process) -> str:
        """Until it ends (empty) or is to be ended (why)."""
        assert process.stdout is not None
        silent = 0
        while True:
            try:
                async with timeout(TICK_S):
                    line = await process.stdout.readline()
            except asyncio.TimeoutError:
                silent += 1
                if silent >= SILENT_TICKS:
                    return f"no word for {silent * TICK_S:.0f} s"
                continue
            if not line:
                return ""
            silent = 0
            self._take(line)
            if self.group == "gpu" and self._stuck_s > KILL_AFTER_S:
                return f"a call has not returned for {self._stuck_s:.0f} s"

    def _take(self, line: bytes) -> None:
        try:
            word = decode_station_word(line)
        except msgspec.DecodeError as error:
            self._explain(f"the station {self.group} talks nonsense: {clean_text(str(error), 200)}")
            return
        if isinstance(word, (Overdue, Report)):
            self._stuck_s = word.since_s if isinstance(word, Overdue) else 0.0
        self._hear(self.group, word)

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
            async with timeout(DYING_S):
                await process.wait()
        except asyncio.TimeoutError:
            self._left.append((process, killed_at))
            self._undying(self.group, process.pid, threads_of(process.pid) or threads, DYING_S)


def threads_of(pid: int) -> Threads:
    """State and wait channel of each thread of a process; empty when it is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [waiting_in(f"/proc/{pid}/task/{task}") for task in tasks[:64]]
