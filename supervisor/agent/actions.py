"""What an agent does to its node: the steps of `reconcile`, carried out by the keeper and the desk.

Nothing here decides anything. Work that takes time runs beside the agent's loop, each kind at most once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from recovery.bounds import SeenByRanks
from recovery.quarantine import PreparationError, prepare
from supervisor.agent.checkpoints import CheckpointProbe
from supervisor.agent.collector import Collector
from supervisor.agent.launcher_socket import Desk
from supervisor.agent.reconcile import (
    Collect,
    Finished,
    Join,
    KillWorkers,
    Launch,
    Leave,
    Prepare,
    Release,
    Step,
    Stop,
    Wake,
)
from supervisor.agent.state import NotebookFile
from supervisor.keeper_client import Keeper
from supervisor.messages import Assignment
from supervisor.paths import LocalPaths, NodePlan

FIRST_LAUNCH_DELAY_S, LONGEST_LAUNCH_DELAY_S = 3.0, 30.0
"""Between launchers that end before they start any rank: the controller has to hear of an end, and may end the run."""
PREPARE_TOLD_S = 30.0
"""Bad checkpoints that are still not out of the way after this: it is said."""
RESUME_CHECKED_S = 30.0
ATTEMPTS_KEPT = 20
"""Output of so many attempts stays in the local folder."""

log = logging.getLogger("unbroken.agent")


class Deeds:
    """`take` does one step. `done_at`: monotonic time since which the node only waits to be heard; None before."""

    def __init__(
        self,
        plan: NodePlan,
        notebook: NotebookFile,
        keeper: Keeper,
        desk: Desk,
        collector: Collector,
        checkpoints: CheckpointProbe,
        say: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`say`: a line for the user's terminal."""
        self._plan = plan
        self._paths = LocalPaths(plan.local_dir)
        self._notebook = notebook
        self._book = notebook.book
        self._keeper = keeper
        self._desk = desk
        self._collector = collector
        self._checkpoints = checkpoints
        self._say = say
        self._on_change = on_change
        self._busy: dict[str, asyncio.Task[None]] = {}
        self.done_at: float | None = None
        self.joined_at = 0.0
        """Monotonic time at which a launcher was let into the newest attempt."""
        self.prepare_error = ""
        self._told: deque[str] = deque(maxlen=64)
        self._launches = 0
        """Since ranks were started last."""
        self._launched_after = -1
        """The newest attempt that had ranks when a launcher was started last."""
        self._launch_at = 0.0

    async def take(self, step: Step, assignment: Assignment) -> None:
        """Raises KeeperError when the keeper does not do it."""
        match step:
            case Launch():
                await self._launch()
            case KillWorkers(attempt=attempt):
                await self._keeper.order(op="kill", attempt=attempt)
            case Prepare(attempt=attempt):
                self._start("prepare", self._prepare(assignment, attempt))
            case Join(round=formed, rank=rank):
                await self._join(assignment, rank)
                log.info("attempt %d: this node is %d of %d", formed.attempt, rank, len(formed.nodes))
            case Release(order=order):
                self._desk.release(order)
            case Leave():
                self._desk.leave()
            case Stop(signal=name, grace_s=grace_s):
                self._start("stop", self._stop(name, grace_s))
            case Wake(ranks=ranks, number=number):
                self._book.woken = number
                await self._keeper.order(op="signal", signal=int(signal.SIGCONT), ranks=list(ranks))
            case Collect():
                assert assignment.evidence is not None
                self._book.collected = assignment.evidence.number
                self._start(f"evidence {assignment.evidence.number}", self._collector.requested(assignment.evidence))
            case Finished():
                self._finish(assignment)

    def collect_crash(self, attempt: int) -> None:
        """What the ranks that failed left behind."""
        self._book.crash_attempt = attempt
        self._start("crash", self._collector.crash(attempt))

    @property
    def collects_crash(self) -> bool:
        crash = self._busy.get("crash")
        return crash is not None and not crash.done()

    def end(self) -> None:
        """There is nothing left to do but to be heard."""
        if self.done_at is None:
            self.done_at = time.monotonic()

    def cancel(self) -> None:
        for task in self._busy.values():
            task.cancel()

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the loop, unless the same work is under way."""
        running = self._busy.get(name)
        if running is not None and not running.done():
            work.close()
            return
        if running is not None and running.exception() is not None:
            log.error("%s failed", name, exc_info=running.exception())
        self._busy = {key: task for key, task in self._busy.items() if not task.done()}
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._on_change())
        self._busy[name] = task

    @property
    def may_launch(self) -> bool:
        """A launcher that ends before it starts any rank is followed by others ever more slowly."""
        state = self._keeper.state
        ran = state.newest_attempt if state is not None else 0
        return ran != self._launched_after or time.monotonic() >= self._launch_at

    async def _launch(self) -> None:
        ran = self._keeper.state.newest_attempt if self._keeper.state is not None else 0
        self._launches = self._launches + 1 if ran == self._launched_after else 1
        self._launched_after = ran
        self._launch_at = time.monotonic() + min(
            LONGEST_LAUNCH_DELAY_S, FIRST_LAUNCH_DELAY_S * 2.0 ** min(self._launches - 1, 10)
        )
        env = {**os.environ, **self._plan.launcher_env}
        await self._keeper.order(op="launch", argv=list(self._plan.launcher_argv), env=env, cwd=self._plan.cwd)

    async def _prepare(self, assignment: Assignment, attempt: int) -> None:
        """No rank is left that could still write: look once more, so that nothing torn is taken for a checkpoint.

        What is found goes out before `prepared` does; where it changes the plan, the job forms another attempt.
        Whoever gives the order, nothing is touched that this node does not know for the job's.
        """
        await self._checkpoints.scan_now()
        bounds = self._checkpoints.bounds()
        work = asyncio.create_task(asyncio.to_thread(prepare, assignment.prepare, bounds))
        if not (await asyncio.wait({work}, timeout=PREPARE_TOLD_S))[0]:
            self._say(f"moving checkpoints has taken {PREPARE_TOLD_S:.0f} s so far: is the file system answering?")
        try:
            done = await work
        except (PreparationError, OSError, ValueError) as error:
            self.prepare_error = str(error) or repr(error)
            await asyncio.sleep(1.0)
            return
        for line in done:
            if line not in self._told:  # what is found in order is found so before each attempt
                self._told.append(line)
                self._say(line)
        if isinstance(bounds, SeenByRanks) and bounds.placed:
            self._checkpoints.placed(bounds.placed)
            await self._checkpoints.scan_now()
        self.prepare_error = ""
        self._book.prepared = attempt

    async def _join(self, assignment: Assignment, rank: int) -> None:
        formed, resume, attempt = assignment.round, assignment.resume, assignment.attempt
        assert formed is not None
        env = {"UNBROKEN_ATTEMPT": str(attempt), "UNBROKEN_JOB_DIR": self._plan.job_dir}
        args: list[str] = []
        if resume is not None and resume.path and await self._may_resume(resume.path, formed.nodes):
            env["UNBROKEN_RESUME_FROM"] = resume.path
            step = "" if resume.step is None else str(resume.step)
            if attempt > 1:
                args = [
                    word.replace("{resume_from}", resume.path).replace("{resume_step}", step)
                    for word in self._plan.restart_args
                ]
        await self._keeper.order(op="attempt", number=attempt, args=args, env=env)
        if attempt > ATTEMPTS_KEPT:  # their evidence is in the job folder
            old = self._paths.attempt(attempt - ATTEMPTS_KEPT)
            self._start("tidy", asyncio.to_thread(shutil.rmtree, old, ignore_errors=True))
        self._book.joined, self.joined_at = attempt, time.monotonic()
        self._notebook.write()
        self._desk.join(
            attempt=attempt,
            rank=rank,
            nodes=len(formed.nodes),
            store_host=formed.store_host,
            store_port=formed.store_port,
        )

    async def _may_resume(self, path: str, nodes: tuple[str, ...]) -> bool:
        look = asyncio.to_thread(self._checkpoints.why_no_resume, path, nodes)
        try:
            why = await asyncio.wait_for(look, RESUME_CHECKED_S)
        except asyncio.TimeoutError:
            why = f"whose it is was not found out within {RESUME_CHECKED_S:.0f} s"
        if why:
            self._say(f"the script is not told to resume from {path}: {why}")
        return not why

    async def _stop(self, name: str, grace_s: float) -> None:
        number = int(getattr(signal, name, signal.SIGTERM))
        await self._keeper.order(op="stop", signal=number, grace_s=grace_s)
        await asyncio.sleep(grace_s + 1.0)  # once in a grace period is enough

    def _finish(self, assignment: Assignment) -> None:
        if self.done_at is None:
            assert assignment.outcome is not None
            try:
                self._paths.write_surely(self._paths.outcome, msgspec.json.encode(assignment.outcome))
            except OSError as error:
                log.error("the outcome cannot be written (%s): trying again", error.strerror)
                return
            self.end()
            self._on_change()
