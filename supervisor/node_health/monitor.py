"""The health of the agent's node: runs the two probe workers, settles their results, and keeps `health.json`.

The agent calls `tend` with each of its own looks; `take` and `events` return what is new. Why there are two workers:
docs/adr/0008.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from diagnosis.health import CheckResult, CheckState, healthy, unknown
from diagnosis.signals import Finding, Signal, clean_text
from supervisor.node_health import kernel_checks
from supervisor.node_health.contract import JobInfo, Site
from supervisor.node_health.protocol import (
    FLAW,
    NOT_LOADED,
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
from supervisor.node_health.release import LONGEST_RELEASE_S, GpuRelease
from supervisor.node_health.runner import Pace, Threads, WorkerRunner
from supervisor.node_health.state import (
    RESPONDS,
    Change,
    CheckStates,
    Cost,
    HealthFile,
    responded,
    responds,
    unkillable,
)
from supervisor.paths import write_atomically

START_AFTER_S: Final = 1.0
"""The ranks come first."""
WRITE_AT_LEAST_S: Final = 60.0
SETTLED_S: Final = 30.0
"""After so long every probe that works has looked once: what is unknown by then cannot be seen."""
KEPT: Final = 500
"""Findings and heard signals that wait to be taken; more in half a second are one storm."""
REPEATS_KEPT: Final = 100
PROBLEMS_KEPT: Final = 32
COUNTS_S: Final = 3600.0
"""What became bad so long ago goes with the evidence of an incident; older flaws did no harm all that time."""
REASONS_SAID: Final = 6
KERNEL: Final = kernel_checks.KernelMessagesProbe.name
OF_KERNEL: Final = frozenset(check.id for check in kernel_checks.CHECKS.values())
"""What they stand for was told when it was heard, as findings of its own."""
JUDGE_KERNEL_S: Final = 60.0
LETTING_GO_S: Final = 30.0
"""So long a probe worker may take to end, SIGKILL included."""

log = logging.getLogger("unbroken.health")


class HealthMonitor:
    """What the probes see, for an agent (`run` for as long as it lives)."""

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
        pace: Pace | None = None,
        shared_dir: Path | None = None,
    ) -> None:
        """`path`: of `health.json`. `steps`: rank -> its newest step. `only`: patterns of checks and probes.
        `shared_dir`: a folder of all agents of the user on this node.
        """
        self._node = node
        self._path = path
        self._state_dir = state_dir
        self._shared_dir = shared_dir
        self._site = Site() if site is None else site
        self._only = only
        self._on_change = on_change
        self._boot_id = _boot_id()
        self._began = time.monotonic()
        self._job = JobInfo()
        self._probes: dict[str, set[str]] = {}
        """Station -> its probes."""
        self._silent: set[str] = set()
        """Probes that have not told anything yet."""
        self._problems: dict[str, None] = {}
        self._costs: dict[str, Cost] = {}
        self.inventory: dict[str, str] = {}
        """Versions and sizes, as `supervisor.node_diff` compares them; empty until they are known."""
        self.inventory_version = 0
        """Grows with every change of `inventory`."""
        self._found: deque[Finding] = deque(maxlen=KEPT)
        self._events: deque[Signal] = deque(maxlen=KEPT)
        self._written = (float("-inf"), -1)
        self._pace = Pace() if pace is None else pace
        self._said_unseen = False
        self._release = GpuRelease.read(state_dir)
        self._kernel: deque[Finding] = deque(maxlen=KEPT)
        """What the kernel has said within the window of its checks."""
        self._kernel_problem = ""
        self._kernel_judged = float("-inf")
        self._to_say: deque[str] = deque(maxlen=KEPT)
        self.check_states = CheckStates(node, self._boot_id, steps)
        self.check_states.learn({KERNEL: tuple(kernel_checks.CHECKS.values())})
        self.workers = {group: self._worker(group, env) for group in RESPONDS}

    def _worker(self, group: str, env: Mapping[str, str] | None) -> WorkerRunner:
        notes = self._state_dir / f"station-{group}.json"
        shared = self._shared_dir / f"left-{group}.json" if self._shared_dir is not None else None
        return WorkerRunner(group, self._setup, self._hear, self._unkillable, env, notes, self._pace, shared)

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Probe -> what its looks took."""
        return self._costs

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
        """What has become bad, or worse, since the last call."""
        found = list(self._found)
        self._found.clear()
        return found

    def events(self) -> list[Signal]:
        """What listening probes were told since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def kernel(self, found: Sequence[Finding]) -> list[Finding]:
        """What the kernel log tells, as it can be told on; it stands for a while, too."""
        placed = [self.check_states.placed(finding) for finding in found]
        if placed:
            now = time.time()  # a storm is told again and again, and stands for as long
            self._kernel.extend(msgspec.structs.replace(finding, at=now) for finding in placed)
            self._kernel_judged = float("-inf")
        return placed

    def _judge_kernel(self, now: float) -> None:
        wall, limits = time.time(), self._site.limits
        self._kernel_judged = now
        while self._kernel and self._kernel[0].at < wall - kernel_checks.longest_s(limits):
            self._kernel.popleft()
        said = kernel_checks.results(self._kernel, wall, limits)
        if self._kernel_problem:
            said = [unknown(check, self._kernel_problem) for check in sorted(OF_KERNEL)]
        skipped = self._site.skip
        told = tuple(
            one for one in said if not any(fnmatchcase(name, p) for name in (one.check, KERNEL) for p in skipped)
        )
        self.check_states.note(PollReport(probe=KERNEL, wall=wall, mono=now, took_s=0.0, results=told))

    def attributed(self, signals: Sequence[Signal]) -> list[Signal]:
        """The same with node, step, clock and boot: what was seen just now."""
        if not signals:
            return []
        step = max(self.check_states.steps().values(), default=None)
        mono = time.monotonic()
        return [
            msgspec.structs.replace(signal, node=self._node, boot_id=self._boot_id, step=step, mono=signal.mono or mono)
            for signal in signals
        ]

    def current_findings(self) -> list[Finding]:
        """What is bad at this moment and became so lately: for the evidence of an incident. It stands now."""
        now, mono = time.time(), time.monotonic()
        bad = [
            one for one in self.check_states.all() if one.status == "unhealthy" and one.result.check not in OF_KERNEL
        ]
        lately = [check_state for check_state in bad if now - check_state.since < COUNTS_S]
        worst_first = sorted(lately, key=lambda check_state: (check_state.level != "critical", -check_state.since))
        return [self.check_states.finding(check_state, now, mono) for check_state in worst_first[:20]]

    def tend(self, job: JobInfo) -> None:
        """Tell the probe workers what is new of the job; keep the file current."""
        if job != self._job:
            self._job = self.check_states.job = job
            for worker in self.workers.values():
                worker.tell(job)
        now = time.monotonic()
        if now - self._kernel_judged >= JUDGE_KERNEL_S:
            self._judge_kernel(now)
        if self._release.until and time.time() >= self._release.until:
            self._take_back()
        written, changes = self._written
        changed = changes != self.check_states.changes and now - written >= self._pace.write_every
        if self._settled() and (changed or now - written >= WRITE_AT_LEAST_S):
            self._written = (now, self.check_states.changes)
            self._write(now)

    def unseen(self, kernel_problem: str) -> str:
        """Once, some time after the start: one line of what an ordinary user does not see; else empty. And what else
        is to be told of our eyes, one at a time.
        """
        if kernel_problem != self._kernel_problem:
            self._kernel_problem = kernel_problem
            self._judge_kernel(time.monotonic())
        if self._to_say:
            return self._to_say.popleft()
        if self._said_unseen or not self._settled():
            return ""
        self._said_unseen = True
        reasons = [kernel_problem] if kernel_problem else []
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
        self._written = (float("-inf"), -1)

    def _take_back(self) -> None:
        if self._release.until:
            self._to_say.append(f"the GPUs are watched again ({time.strftime('%H:%M:%S')})")
        self._release = GpuRelease()
        self._release.keep(self._state_dir)
        self.workers["gpu"].hold(0.0)
        self._written = (float("-inf"), -1)

    # ----- what comes in -----

    def _setup(self) -> Setup:
        return Setup(
            node=self._node,
            state_dir=str(self._state_dir),
            site=self._site,
            job=self._job,
            only=self._only,
            skip=(KERNEL,),
        )

    def _hear(self, worker: str, word: WorkerMessage) -> None:
        if isinstance(word, PollReport):
            self._silent.discard(word.probe)
            self._costs[word.probe] = self._costs.get(word.probe, Cost()).plus(word)
            self._note(self.check_states.note(word))
            self._answered(worker, word)
        elif isinstance(word, ProbeEvent):
            self._events.extend([word.signal] * min(word.count, REPEATS_KEPT))
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
        """A look has returned: its probe worker responds."""
        self._note_one(responded(worker, report), report.wall)
        check = RESPONDS[worker].id
        if worker == "node" and self.check_states.stands(check, ""):
            self._note_one(healthy(check, "", "a new process answers"), report.wall)

    def _unkillable(self, worker: str, pid: int, threads: Threads, since_s: float) -> None:
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
        """Whether all that can be told at first was told."""
        heard_all = len(self._probes) == len(self.workers) and not self._silent
        return heard_all or time.monotonic() - self._began > SETTLED_S

    def _reasons(self) -> list[str]:
        hidden = [one.result for one in self.check_states.all() if one.status == "unknown" and not one.against]
        told = [one.text for one in hidden if one.check not in OF_KERNEL and not one.text.startswith(NOT_YET)]
        return list(dict.fromkeys(text[:120] for text in told if text))

    def _write(self, now: float) -> None:
        problems = [*self._problems, *(one.problem for one in self.workers.values() if one.problem and not one.pid)]
        if self.check_states.left_out:
            problems.append(f"{self.check_states.left_out} findings were too many to be told")
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
            check_states=tuple(sorted(self.check_states.all(), key=_order)),
            costs=self._costs,
        )
        try:
            write_atomically(self._path, msgspec.json.encode(file))
        except (OSError, ValueError):  # a full disk is a finding of its own; a name that is no UTF-8 ends nothing
            pass


def _order(check_state: CheckState) -> tuple[bool, bool, str, str]:
    """The bad first."""
    bad = check_state.status == "unhealthy"
    return not bad, check_state.level != "critical", check_state.result.check, check_state.result.device


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
