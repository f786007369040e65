"""The health of the agent's node: runs the two probe workers, settles their results, and keeps `health.json`.

The agent calls `update` with each of its own looks; `take` and `kernel_log.findings` return what is new. docs/adr/0008
says why there are two workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from diagnosis.health import CheckResult, CheckState, healthy, unknown
from diagnosis.signals import Finding, clean_text
from supervisor.node_health.contract import NOT_LOADED, JobInfo, Site, keep_file
from supervisor.node_health.health_file import LONGEST_RELEASE_S, Cost, GpuRelease, HealthFile
from supervisor.node_health.kernel_log import CHECKS, KERNEL, KernelLog
from supervisor.node_health.protocol import (
    FLAW,
    NOT_YET,
    NodeInventory,
    PollReport,
    ProbeEvent,
    Problem,
    Setup,
    TimedOut,
    WorkerMessage,
    WorkerReady,
)
from supervisor.node_health.runner import PROBLEMS_KEPT, Threads, UnkillableProcesses, WorkerRunner, WorkerTimes
from supervisor.node_health.state import RESPONDS, Change, CheckStates, responded, responds, unkillable

START_AFTER_S: Final = 1.0
"""The ranks start first."""
WRITE_AT_LEAST_S: Final = 60.0
SETTLED_S: Final = 30.0
"""By then every probe that works has looked once. What is still unknown cannot be seen on this node."""
KEPT: Final = 500
"""At most so many findings and events wait for the agent. More in half a second are one storm."""
REPEATS_KEPT: Final = 100
COUNTS_S: Final = 3600.0
"""What became unhealthy within this time goes with the evidence of an incident. Older flaws did no harm so far."""
REASONS_SAID: Final = 6
LETTING_GO_S: Final = 30.0
"""A probe worker may take so long to end, SIGKILL included."""

log = logging.getLogger("unbroken.health")


class HealthMonitor:
    """The health of the node, for an agent. `run` runs for as long as the agent lives."""

    def __init__(
        self,
        node: str,
        path: Path,
        state_dir: Path,
        *,
        site: Site | None = None,
        steps: Callable[[], Mapping[int, int]] = dict,
        on_change: Callable[[], None] = lambda: None,
        env: Mapping[str, str] | None = None,
        only: tuple[str, ...] = (),
        pace: WorkerTimes | None = None,
        shared_dir: Path | None = None,
        kernel_log: str = "",
    ) -> None:
        """`path`: of `health.json`. `steps`: rank -> its newest step. `only`: patterns of checks and probes.
        `shared_dir`: a folder of all agents of the user on this node. `kernel_log`: where it is read; empty: nowhere.
        """
        self._node = node
        self._path = path
        self._state_dir = state_dir
        self._shared_dir = shared_dir
        self._site = Site() if site is None else site
        self._only = only
        self._on_change = on_change
        self._boot_id = _boot_id()
        self._began, self._began_at = time.monotonic(), time.time()
        self._job = JobInfo()
        self._probes: dict[str, set[str]] = {}
        """Probe worker -> its probes."""
        self._silent: set[str] = set()
        """Probes that have not reported yet."""
        self._problems: dict[str, None] = {}
        self.costs: dict[str, Cost] = {}
        """Probe -> what its looks cost."""
        self.inventory: dict[str, str] = {}
        """Versions and sizes, as `supervisor.node_diff` compares them; empty until they are known."""
        self.inventory_version = 0
        """Grows with every change of `inventory`."""
        self._found: deque[Finding] = deque(maxlen=KEPT)
        self._written = (float("-inf"), (-1, -1, ""))
        """When the file was written last, and what `_version` was then."""
        self._pace = WorkerTimes() if pace is None else pace
        self._said_unseen = False
        self._release = GpuRelease.read(state_dir)
        self._to_say: deque[str] = deque(maxlen=KEPT)
        self.check_states = CheckStates(node, self._boot_id, steps)
        self.check_states.learn({KERNEL: tuple(CHECKS.values())})
        self.kernel_log = KernelLog(kernel_log, self._site, self.check_states)
        self.workers = {group: self._worker(group, env) for group in RESPONDS}

    def _worker(self, group: str, env: Mapping[str, str] | None) -> WorkerRunner:
        notes = self._state_dir / f"station-{group}.json"
        shared = self._shared_dir / f"left-{group}.json" if self._shared_dir is not None else None
        known = UnkillableProcesses(notes, shared)
        return WorkerRunner(group, self._setup, self._receive, self._report_unkillable, env, known, self._pace)

    # ----- for the agent -----

    async def run(self) -> None:
        await asyncio.sleep(START_AFTER_S)
        if self._release.until > time.time():
            self._hold()
        tasks = [asyncio.create_task(worker.run()) for worker in self.workers.values()]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a bug of ours
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def take(self) -> list[Finding]:
        """Checks that became unhealthy, or worse, since the last call."""
        found = list(self._found)
        self._found.clear()
        return found

    def states(self) -> list[CheckState]:
        """The state of every check, those of the kernel log included."""
        return [*self.check_states.all(), *self.kernel_log.states()]

    def current_findings(self) -> list[Finding]:
        """Checks that are unhealthy now and became so recently, for the evidence of an incident."""
        now, mono = time.time(), time.monotonic()
        bad = [one for one in self.check_states.all() if one.status == "unhealthy"]
        lately = [check_state for check_state in bad if now - check_state.since < COUNTS_S]
        worst_first = sorted(lately, key=lambda check_state: (check_state.level != "critical", -check_state.since))
        return [self.check_states.finding(check_state, now, mono) for check_state in worst_first[:20]]

    def update(self, job: JobInfo) -> None:
        """Send news of the job to the probe workers, and keep `health.json` current."""
        if job != self._job:
            self._job = job
            self.check_states.follow(job)
            for worker in self.workers.values():
                worker.tell(job)
        now = time.monotonic()
        if self._release.until and time.time() >= self._release.until:
            self._take_back()
        written, version = self._written
        changed = version != self._version and now - written >= self._pace.write_every
        if self._settled() and (changed or now - written >= WRITE_AT_LEAST_S):
            self._written = (now, self._version)
            self._write(now)

    @property
    def _version(self) -> tuple[int, int, str]:
        """Differs whenever the file has news."""
        return self.check_states.changes, self.kernel_log.count, self.kernel_log.problem

    def notice(self) -> str:
        """A line for people that was not returned before; else empty. Some time after the start one says what an
        ordinary user does not see.
        """
        if self._to_say:
            return self._to_say.popleft()
        if self._said_unseen or not self._settled():
            return ""
        self._said_unseen = True
        reasons = [self.kernel_log.problem] if self.kernel_log.problem else []
        reasons += self._reasons()
        if not reasons:
            return ""
        more = len(reasons) - REASONS_SAID
        text = "; ".join(reasons[:REASONS_SAID]) + (f"; and {more} more (unbroken check)" if more > 0 else "")
        if os.geteuid() == 0:
            log.info("not seen here: %s", text)
            return ""
        return f"as an ordinary user the agent does not see everything: {text}"

    # ----- an operator wants the GPUs -----

    async def release_gpus(self, seconds: float, by: str) -> dict[str, Any]:
        """Let go of the GPUs for so long (0: take them back). When nothing of ours has them open any more:
        `{"until": Unix seconds}`, else `{"error": why}`.
        """
        if seconds <= 0:
            self._take_back()
            return {"until": 0.0}
        self._release = GpuRelease(until=time.time() + min(seconds, LONGEST_RELEASE_S), by=clean_text(by, 64))
        self._release.keep(self._state_dir)
        self._hold()
        worker, deadline = self.workers["gpu"], time.monotonic() + LETTING_GO_S
        while worker.alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if not self._release.until:
            return {"error": "they were taken back meanwhile"}
        if worker.alive():
            return {"error": f"process {worker.alive()[0]} has them open, and does not die: reboot the node"}
        return {"until": self._release.until}

    def _hold(self) -> None:
        now = time.time()
        why = f"released by the operator {self._release.by} until {self._release.clock}"
        self.workers["gpu"].hold(time.monotonic() + self._release.until - now)
        self.check_states.silent(self._probes.get("gpu", ()), why, now, time.monotonic())
        self._note_one(unknown(RESPONDS["gpu"].id, why))
        self._to_say.append(f"the GPUs are not watched: {why}")
        self._written = (float("-inf"), (-1, -1, ""))

    def _take_back(self) -> None:
        if self._release.until:
            self._to_say.append(f"the GPUs are watched again ({time.strftime('%H:%M:%S')})")
        self._release = GpuRelease()
        self._release.keep(self._state_dir)
        self.workers["gpu"].hold(0.0)
        self._written = (float("-inf"), (-1, -1, ""))

    # ----- what comes in -----

    def _setup(self) -> Setup:
        return Setup(
            node=self._node,
            state_dir=str(self._state_dir),
            site=self._site,
            job=self._job,
            only=self._only,
        )

    def _receive(self, worker: str, word: WorkerMessage) -> None:
        if isinstance(word, PollReport):
            self._silent.discard(word.probe)
            self.costs[word.probe] = self.costs.get(word.probe, Cost()).plus(word)
            self._note(self.check_states.note(word))
            self._answered(worker, word)
        elif isinstance(word, ProbeEvent):
            self.kernel_log.events.extend([word.signal] * min(word.count, REPEATS_KEPT))
            self._on_change()
        elif isinstance(word, TimedOut):
            wall, mono = time.time(), time.monotonic()
            self._silent.discard(word.probe)
            self.check_states.timed_out(word, wall, mono)
            self._note_one(responds(worker, word, self._site.limits.get(RESPONDS[worker].id)))
        elif isinstance(word, WorkerReady):
            self.check_states.learn(word.probes)
            known = self._probes.get(worker)
            self._probes[worker] = set(word.probes)
            if known is None:
                self._silent |= self._probes[worker]
        elif isinstance(word, NodeInventory):
            self.inventory = {**self.inventory, **word.inventory}
            self.inventory_version += 1
            self._on_change()
        elif isinstance(word, Problem):
            self._complain(word.text)

    def _answered(self, worker: str, report: PollReport) -> None:
        """A look has returned: the probe worker responds."""
        self._note_one(responded(worker, report), report.wall)
        check = RESPONDS[worker].id
        if worker == "node" and self.check_states.stands(check, ""):
            self._note_one(healthy(check, "", "a new process answers"), report.wall)

    def _report_unkillable(self, worker: str, pid: int, threads: Threads, since_s: float) -> None:
        self._note_one(unkillable(worker, pid, threads, since_s))

    def _note_one(self, result: CheckResult, wall: float | None = None) -> None:
        change = self.check_states.take(result, time.time() if wall is None else wall, time.monotonic())
        if change is not None:
            self._note([change])

    def _note(self, changes: list[Change]) -> None:
        for change in changes:
            check_state, device = change.check_state, change.check_state.result.device
            where = f"{change.check.id} {device}".rstrip()
            if check_state.status == "unhealthy":
                log.warning("%s: %s (%s)", where, check_state.result.text, check_state.level)
            else:
                log.info("%s: no longer unhealthy (%s) %s", where, check_state.status, check_state.result.text)
            if change.finding is not None:
                self._found.append(change.finding)
        if changes:
            self._on_change()

    def _complain(self, text: str) -> None:
        if text not in self._problems and len(self._problems) < PROBLEMS_KEPT:
            log.warning("%s", text)
            self._problems[text] = None
            if text.startswith(FLAW) or NOT_LOADED in text:
                self._to_say.append(text)

    # ----- what is kept -----

    def _settled(self) -> bool:
        """Whether every probe has reported, or has had time enough."""
        heard_all = len(self._probes) == len(self.workers) and not self._silent
        return heard_all or time.monotonic() - self._began > SETTLED_S

    def _reasons(self) -> list[str]:
        hidden = [one.result for one in self.check_states.all() if one.status == "unknown" and not one.against]
        told = [one.text for one in hidden if not one.text.startswith(NOT_YET)]
        return list(dict.fromkeys(text[:120] for text in told if text))

    def _write(self, now: float) -> None:
        problems = [*self._problems, *(one.problem for one in self.workers.values() if one.problem and not one.pid)]
        if self.check_states.left_out:
            problems.append(f"{self.check_states.left_out} findings were not reported, because there were too many")
        file = HealthFile(
            schema=1,
            node=self._node,
            boot_id=self._boot_id,
            at=time.time(),
            mono=now,
            pid=os.getpid(),
            waiting=tuple(sorted(self._silent)),
            unseen=tuple(self._reasons()[:50]),
            problems=tuple(problems),
            gpus_released_until=self._release.until,
            check_states=tuple(sorted(self.states(), key=_order)),
            costs=self.costs,
        )
        keep_file(self._path, file)  # a full disk is a finding of its own


def _order(check_state: CheckState) -> tuple[bool, bool, str, str]:
    """The unhealthy ones first."""
    bad = check_state.status == "unhealthy"
    return not bad, check_state.level != "critical", check_state.result.check, check_state.result.device


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
