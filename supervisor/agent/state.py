"""What the agent of a node knows: one value that its parts share, and the part of it that outlives the agent.

Each field of `AgentState` has one writer, named beside it; everybody may read it. A part that has changed something
which the agent must act on, or report, sets `wakeup`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diagnosis.signals import Finding, NodeEvidence, clean_line
from supervisor.config import NodePlan
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.messages import Assignment, SpaceReported, StoreOffer
from supervisor.paths import LocalPaths, write_atomically

OFFSETS_EVERY_S = 6.0
"""Output grows all the time. The next agent may read the output of so many seconds twice."""
FINDINGS_KEPT = 200
NOTICE_LIMIT = 8000
NOTICES_REPORTED = 16

log = logging.getLogger("unbroken.agent")


class SavedState(msgspec.Struct, kw_only=True):
    """`agent.json`: counters that a new agent must not start again. The keeper's state is not in it."""

    epoch: int = 0
    """Newest epoch that was accepted: an older controller is not obeyed."""
    joined: int = 0
    """Newest attempt that a launcher was let into."""
    joined_wall: float = 0.0
    """When, Unix time."""
    prepared: int = 0
    """Newest attempt whose preparations are done."""
    collected: int = 0
    """Newest evidence request that was taken up."""
    woken: int = 0
    """Newest request to wake stopped ranks that was carried out."""
    asked: int = 0
    """Newest request to ask ranks for a checkpoint that was carried out."""
    traced: int = 0
    """Newest request for traces that was taken up."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs with which the newest launcher was started; empty: with all."""
    notice: int = 0
    """Newest notice of the controller that was shown."""
    crash_attempt: int = 0
    """Newest attempt whose crash evidence was collected."""
    findings_from: int = 0
    """How many findings the controller has acknowledged."""
    stop_request: str = ""
    """The signal that the front received, or `FRONT_GONE`."""
    drain_request: str = ""
    """The reason in the drain request that was written. A request that root's programs have read is not repeated."""
    offsets: dict[str, int] = {}
    """Path of a rank's output -> how far it was read."""


class SavedStateFile:
    """Reads the previous agent's state at the start. `write()` saves what has changed since."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = monotonic
        self._written: SavedState | None = None
        self._written_at = -OFFSETS_EVERY_S
        try:
            self.state = msgspec.json.decode(path.read_bytes(), type=SavedState)
        except (OSError, msgspec.DecodeError):
            self.state = SavedState()

    def write(self) -> None:
        """A full disk is no reason to end: the agent tries again in half a second."""
        state, now = self.state, self._now()
        same = self._written is not None and msgspec.structs.replace(self._written, offsets=state.offsets) == state
        if same and (now - self._written_at < OFFSETS_EVERY_S or self._written == state):
            return
        try:
            write_atomically(self._path, msgspec.json.encode(state))
        except OSError:
            return
        self._written, self._written_at = msgspec.structs.replace(state), now


class Wakeup:
    """Like an `asyncio.Event` with a timeout, but its `wait` raises nothing: a `TimeoutError` costs some CPU time."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task that waits, or the next one that does."""
        self.is_set = True
        if self._waiter is not None:
            fulfil(self._waiter)

    def clear(self) -> None:
        self.is_set = False

    async def wait(self, seconds: float) -> None:
        """Until it is set, at most `seconds`."""
        if self.is_set:
            return
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(seconds, fulfil, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None


def fulfil(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class BackgroundWork:
    """Work that takes time, beside the agent's loop: of each kind one at most."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def is_running(self, name: str) -> bool:
        return name in self.tasks and not self.tasks[name].done()

    def start(self, name: str, work: Coroutine[Any, Any, None], *, wakes: bool = True) -> None:
        """Begin `work`, unless work of that name is under way. `wakes`: its end wakes the agent."""
        if self.is_running(name):
            work.close()
            return
        before = self.tasks.get(name)
        if before is not None and not before.cancelled() and before.exception() is not None:
            log.error("%s failed", name, exc_info=before.exception())
        self.tasks = {key: task for key, task in self.tasks.items() if not task.done()}
        self.tasks[name] = task = asyncio.get_running_loop().create_task(work)
        if wakes:
            task.add_done_callback(lambda _: self._wakeup.set())

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()


class Notices:
    """Lines for people. The front prints the lines of the file on the user's terminal."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.reported: tuple[str, ...] = ()
        """The newest lines that the controller gets, too."""

    def show(self, text: str) -> None:
        """Show a line to the user."""
        try:
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(clean_line(text, NOTICE_LIMIT) + "\n")
        except OSError as error:  # a full disk is no reason to end
            log.warning("not shown (%s): %s", error.strerror, text)

    def report(self, text: str) -> None:
        """Report something that the agent cannot do or see, once, to the user and to the controller."""
        if text and text not in self.reported:
            self.reported = (*self.reported, text)[-NOTICES_REPORTED:]
            self.show(text)


class FindingQueue:
    """Findings that the controller has not acknowledged yet. A number always means the same finding."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved
        self._queue: list[Finding] = []

    def add(self, found: Sequence[Finding]) -> None:
        self._queue += found
        too_many = max(0, len(self._queue) - FINDINGS_KEPT)
        del self._queue[:too_many]
        self._saved.findings_from += too_many

    def acknowledge(self, count: int) -> None:
        """The controller has received the first `count` of all findings."""
        new = count - self._saved.findings_from
        if new > 0:
            del self._queue[:new]
            self._saved.findings_from = count

    def oldest(self, count: int) -> tuple[Finding, ...]:
        return tuple(self._queue[:count])


class AgentState:
    """What this node knows."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.paths = LocalPaths(plan.local_dir)
        self.saved_file = SavedStateFile(self.paths.agent_state)
        self.saved = self.saved_file.state
        """What the next agent must know: changed by whoever does it, written by `NodeAgent` with each look."""
        self.wakeup = Wakeup()
        self.work = BackgroundWork(self.wakeup)
        self.notices = Notices(self.paths.notices)
        self.findings = FindingQueue(self.saved)
        self.assignment: Assignment | None = None
        """The newest assignment of the controller. By `NodeAgent`."""
        self.keeper: KeeperState | None = None
        """The node's processes as the keeper sees them; None without a keeper. By `set_keeper`."""
        self.offer: StoreOffer | None = None
        """Set while a launcher waits in rendezvous. By `LauncherSocket`."""
        self.watching: int | None = None
        """The attempt whose workers a launcher watches. By `LauncherSocket`."""
        self.replaced_launcher = 0
        """The process that was ended to be followed by one with another number of processes. By `ActionRunner`."""
        self.joined_at = 0.0
        """Monotonic time at which a launcher was let into the newest attempt. By `ActionRunner`."""
        self.joined_wall = self.saved.joined_wall
        """The same as Unix time, known after a restart of the agent. By `ActionRunner`."""
        self.prepare_error = ""
        """Why the preparations for the next attempt failed. By `ActionRunner`."""
        self.done_at: float | None = None
        """Monotonic time since which only a last heartbeat is left to be sent. By `ActionRunner`."""
        self.evidence: dict[tuple[int, int], NodeEvidence] = {}
        """(attempt, request) -> evidence that the controller has not acknowledged. By `EvidenceCollector`."""
        self.collecting_crash = False
        """Ranks have failed, and their evidence is not complete yet. By `EvidenceCollector`."""
        self.written_folders: tuple[Path, ...] = ()
        """Folders that the ranks write checkpoints to. By `NodeAgent`."""
        self.space: SpaceReported | None = None
        """Whether the disks have room again; None when the controller does not ask. By `SpaceMonitor`."""

    def set_keeper(self, keeper: KeeperState | None) -> None:
        self.keeper = keeper
        self.wakeup.set()

    @property
    def newest_attempt(self) -> int:
        """The newest attempt that has or had ranks here; 0 for none."""
        return self.keeper.newest_attempt if self.keeper is not None else 0

    @property
    def living_attempt(self) -> int:
        """The newest attempt that has living ranks here; 0 for none."""
        workers = self.keeper.workers if self.keeper is not None else ()
        return max((worker.attempt for worker in workers if worker.alive), default=0)

    @property
    def is_replaced(self) -> bool:
        """The launcher is to end, and the next one starts another number of processes."""
        assigned = self.assignment
        if assigned is None or assigned.role != "member" or self.saved.joined >= assigned.attempt:
            return False
        launcher = self.keeper.launcher if self.keeper is not None else None
        return assigned.gpus != self.saved.gpus or (launcher is not None and launcher.pid == self.replaced_launcher)

    def workers_of(self, attempt: int) -> tuple[WorkerProcess, ...]:
        return self.keeper.workers_of(attempt) if self.keeper is not None else ()
