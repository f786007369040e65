"""The state of every check of this node, with hysteresis. A check that becomes unhealthy is reported once. Pure.

A result names its device. This module adds the rank that uses the device, the step, the clock and the boot.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis.health import (
    Check,
    CheckResult,
    CheckState,
    Level,
    healthy,
    not_applicable,
    settle,
    to_finding,
    unhealthy,
    unknown,
)
from diagnosis.signals import Finding, Signal
from supervisor.node_health.contract import JobInfo, checks_of
from supervisor.node_health.protocol import PollReport, TimedOut

STATES_KEPT: Final = 5000
"""Check states at most, one for each check and device. A node has about a thousand; more are not kept."""
FINDINGS_A_MINUTE: Final = 60
"""What more becomes bad within a minute is kept and counted, and not reported one by one."""

UNKILLABLE_AFTER_S: Final = 60.0
"""A killed process that is still runnable after this counts as unkillable; until then it may just lack CPU time."""

GPU_RESPONDS, NODE_RESPONDS = checks_of("responds")
GPU_CALL_S: Final = 10.0
"""A call of the GPU driver takes milliseconds; only the first one, which loads it, may take tens of seconds."""
RESPONDS: Final[dict[str, Check]] = {"gpu": GPU_RESPONDS, "node": NODE_RESPONDS}
"""Probe worker -> the check of whether it responds. The runner of the workers makes it, not a probe."""


class MinuteLimit:
    """At most `FINDINGS_A_MINUTE` of each kind a minute."""

    def __init__(self) -> None:
        self.left_out = 0
        self._minute = float("-inf")
        self._counts = Counter[str]()

    def allows(self, at: float, kind: str = "") -> bool:
        """Whether one more may be reported at this time, in seconds of any clock."""
        if abs(at - self._minute) >= 60.0:
            self._minute = at
            self._counts.clear()
        self._counts[kind] += 1
        allowed = self._counts[kind] <= FINDINGS_A_MINUTE
        self.left_out += not allowed
        return allowed


class Change(NamedTuple):
    check: Check
    before: CheckState | None
    check_state: CheckState
    finding: Finding | None
    """What to report; None for what got better, or when too much was reported within a minute."""


@dataclasses.dataclass
class _Kept:
    check_state: CheckState
    missed: int = 0
    """Reports in a row that had the check and not this device."""


class CheckStates:
    """`note` takes a report and returns what changed. The caller keeps `job` current."""

    def __init__(self, node: str, boot_id: str = "", steps: Callable[[], Mapping[int, int]] = dict) -> None:
        """`steps`: rank -> its newest step; called when something is reported."""
        self.job = JobInfo()
        self._gpus_of_ranks: dict[int, str] = {}
        """Of the newest ranks."""
        self.changes = 0
        """Grows whenever a status, a level or an unhealthy text changes."""
        self._node = node
        self._boot_id = boot_id
        self.steps = steps
        self._checks: dict[str, Check] = {check.id: check for check in RESPONDS.values()}
        self._probes: dict[str, str] = {}
        self._kept: dict[str, dict[str, _Kept]] = {}
        """Check -> device -> its state."""
        self._count = 0
        self._gpus: dict[str, str] = {}
        """PCI address -> UUID, of all GPUs in any result so far."""
        self._gpu_ranks: dict[str, int] = {}
        """GPU -> rank, by the driver's own list of processes."""
        self._limit = MinuteLimit()

    def learn(self, probes: Mapping[str, Sequence[Check]]) -> None:
        """Add the checks of a probe worker that has started."""
        for probe, checks in probes.items():
            for check in checks:
                self._checks[check.id] = check
                self._probes[check.id] = probe

    def all(self) -> Iterator[CheckState]:
        for devices in self._kept.values():
            for kept in devices.values():
                yield kept.check_state

    def check(self, name: str) -> Check:
        return self._checks[name]

    def probe_of(self, check: str) -> str:
        """The probe of this check; empty for the checks of the probe workers themselves."""
        return self._probes.get(check, "")

    @property
    def left_out(self) -> int:
        """Findings that were not reported because there were too many."""
        return self._limit.left_out

    @property
    def gpus(self) -> Mapping[str, str]:
        """PCI address -> UUID (empty: not known), of all GPUs in any result so far."""
        return self._gpus

    def stands(self, check: str, device: str) -> bool:
        """Whether anything is known of it."""
        return device in self._kept.get(check, ())

    def finding(self, check_state: CheckState, at: float, mono: float) -> Finding:
        """The finding that a diagnosis gets of an unhealthy check."""
        found = to_finding(self._checks[check_state.result.check], check_state, self._node, at)
        step = self._step_of(check_state.rank)
        return msgspec.structs.replace(found, step=step, mono=mono, boot_id=self._boot_id)

    def placed(self, finding: Finding, line: Signal, rank: int | None) -> Finding:
        """A finding of the kernel log with node, boot, step, the UUID of its GPU, and its rank.

        `line`: where it was seen. `rank`: by its process; None: the rank that has its GPU.
        """
        uuid = finding.gpu_uuid or line.gpu_uuid or self._gpus.get(finding.gpu, "")
        its_rank = self._rank_on(finding.gpu, uuid) if rank is None and finding.scope == "gpu" and finding.gpu else rank
        return msgspec.structs.replace(
            finding,
            node=self._node,
            boot_id=self._boot_id,
            rank=its_rank,
            gpu_uuid=uuid,
            step=self._step_of(its_rank),
            mono=line.mono,
            evidence=msgspec.structs.replace(finding.evidence, node=self._node, rank=rank),
        )

    def _step_of(self, rank: int | None) -> int | None:
        """The newest step of a rank; where there is none, of all ranks."""
        steps = self.steps()
        newest = max(steps.values(), default=None)
        return newest if rank is None else steps.get(rank, newest)

    def note(self, report: PollReport) -> list[Change]:
        """Settle every result of a report. Returns what became unhealthy, worse or healthy again, in order."""
        taken = [self.take(result, report.wall, report.mono) for result in report.results]
        spoken: dict[str, set[str]] = {}
        for result in report.results:
            spoken.setdefault(result.check, set()).add(result.device)
        anywhere = set[str]().union(*spoken.values())
        for check, devices in spoken.items():
            if len(self._kept.get(check, ())) > len(devices):
                # GPUs are asked in turns for what takes long: only one of which nothing at all is said is gone.
                self._forget(check, anywhere if self._checks[check].scope == "gpu" else devices)
        return [change for change in taken if change is not None]

    def timed_out(self, word: TimedOut, wall: float, mono: float) -> None:
        """A probe does not answer: its healthy checks become unknown, its unhealthy ones stay unhealthy."""
        why = f"no look has returned for {word.since_s:.0f} s" + (f" (in {word.doing})" if word.doing else "")
        self.silent({word.probe}, why, wall, mono)

    def silent(self, probes: Collection[str], why: str, wall: float, mono: float) -> None:
        """The same as `timed_out`, for any reason why these probes do not look."""
        for check, probe in self._probes.items():
            if probe not in probes:
                continue
            for device, kept in self._kept.get(check, {}).items():
                if kept.check_state.status == "healthy":
                    self.take(unknown(check, why, device), wall, mono)

    def take(self, result: CheckResult, wall: float, mono: float) -> Change | None:
        check = self._checks.get(result.check)
        if check is None:
            return None
        self._learn_gpu(result)
        devices = self._kept.setdefault(result.check, {})
        kept = devices.get(result.device)
        if kept is None and self._count >= STATES_KEPT:
            return None
        before = None if kept is None else kept.check_state
        after = settle(check, before, result, wall)
        if after.status == "unhealthy":
            rank = self._rank_of(after.result)
            if rank is not None and rank != after.rank:
                after = msgspec.structs.replace(after, rank=rank)
        if kept is None:
            self._count += 1
            devices[result.device] = _Kept(after)
        else:
            kept.check_state, kept.missed = after, 0
        return self._changed(check, before, after, wall, mono)

    def _changed(
        self, check: Check, before: CheckState | None, after: CheckState, wall: float, mono: float
    ) -> Change | None:
        was, level = ("unknown", "critical") if before is None else (before.status, before.level)
        bad = after.status == "unhealthy"
        if after.status == was and (not bad or after.level == level):
            self.changes += before is None or (bad and after.result.text != before.result.text)
            return None
        self.changes += 1
        if not bad:
            return Change(check, before, after, None) if was == "unhealthy" else None
        worse = was != "unhealthy" or after.level == "critical"
        tell = worse and self._limit.allows(mono)
        return Change(check, before, after, self.finding(after, wall, mono) if tell else None)

    def _forget(self, check: str, spoken: set[str]) -> None:
        """Forget devices that are no longer reported: a process that ended, an interface that was removed."""
        row, devices = self._checks[check], self._kept[check]
        for device in [device for device in devices if device not in spoken]:
            kept = devices[device]
            kept.missed += 1
            bad = kept.check_state.status == "unhealthy"
            if kept.missed >= row.calm_looks and (row.clears or not bad):
                del devices[device]
                self._count -= 1
                self.changes += 1

    # ----- whose it is -----

    def _learn_gpu(self, result: CheckResult) -> None:
        if not result.gpu:
            return
        self._gpus[result.gpu] = result.gpu_uuid or self._gpus.get(result.gpu, "")
        for pid in result.pids:
            rank = self.job.ranks.get(pid)
            if rank is not None:
                self._gpu_ranks[result.gpu] = rank

    def follow(self, job: JobInfo) -> None:
        if job.gpus_of_ranks and job.gpus_of_ranks != self._gpus_of_ranks:
            self._gpu_ranks.clear()  # the same rank may have another GPU now
            self._gpus_of_ranks = job.gpus_of_ranks
        self.job = job

    def _rank_of(self, result: CheckResult) -> int | None:
        """By the processes of the result, else by the driver's list of processes, else by the devices of ranks."""
        ranks = self.job.ranks
        for pid in result.pids:
            if pid in ranks:
                return ranks[pid]
        return self._rank_on(result.gpu, result.gpu_uuid) if result.gpu else None

    def _rank_on(self, gpu: str, uuid: str) -> int | None:
        rank = self._gpu_ranks.get(gpu)
        if rank is not None and rank in self.job.ranks.values():
            return rank
        return rank_of_gpu(gpu, uuid, sorted(self._gpus), self.job.gpus_of_ranks)


def rank_of_gpu(gpu: str, uuid: str, gpus: Sequence[str], given: Mapping[int, str]) -> int | None:
    """The rank whose device this is, by `CUDA_VISIBLE_DEVICES:index`; `gpus` are all of the node in PCI order."""
    for rank, visible in sorted(given.items()):
        names, _, index = visible.rpartition(":")
        devices = [name.strip() for name in names.split(",")] if names else [str(n) for n in range(len(gpus))]
        if not index.isdigit() or not devices or int(index) >= max(len(devices), 1):
            continue
        device = devices[int(index)]
        if device.isdigit() and int(device) < len(gpus) and gpus[int(device)] == gpu:
            return rank
        if device.startswith("GPU-") and uuid.startswith(device):
            return rank
    return None


def responds(worker: str, timed_out: TimedOut, limits: Mapping[str, float] | None = None) -> CheckResult:
    """The result for the probe worker when one of its looks is past its deadline.

    A runnable thread just lacks CPU time, and no driver is to blame: that is never critical.
    """
    check = RESPONDS[worker]
    where = timed_out.doing or f"a look of the probe {timed_out.probe}"
    waits = f", waiting in {timed_out.wchan}" if timed_out.wchan else ""
    text = f"{where} has not returned for {timed_out.since_s:.0f} s (state {timed_out.state}{waits})"
    seconds = {**check.limits, **(limits or {})}.get("seconds")
    sure = seconds is not None and timed_out.since_s >= seconds and timed_out.state in "DS"
    values = {"since_s": timed_out.since_s}
    device = "" if worker == "gpu" else timed_out.probe
    return unhealthy(check.id, text, device, "critical" if sure else "warning", values=values)


def unkillable(worker: str, pid: int, threads: Iterable[tuple[str, str]], since_s: float) -> CheckResult:
    """The result for a probe worker that was killed and does not die. `threads`: (state, wait channel) of each.

    Never critical when no driver is to blame: it only lacks CPU time, or somebody has frozen it.
    """
    threads = list(threads)
    held = sorted({f"{state} in {wchan}" if wchan else state for state, wchan in threads if state == "D"})
    where = f" ({'; '.join(held[:4])})" if held else ""
    starved = since_s < UNKILLABLE_AFTER_S and all(state in "RZX" for state, _ in threads)
    frozen = any("refrigerator" in wchan or "freezer" in wchan for _, wchan in threads)
    text = f"the process {pid} of a probe worker was killed {since_s:.0f} s ago and does not die{where}"
    level: Level = "warning" if starved or frozen else "critical"
    return unhealthy(RESPONDS[worker].id, text, "", level, values={"since_s": since_s})


def responded(worker: str, report: PollReport) -> CheckResult:
    """The result for the probe worker when a look has returned."""
    check = RESPONDS[worker]
    device = "" if worker == "gpu" else report.probe
    if worker == "gpu" and all(result.status == "not_applicable" for result in report.results):
        return not_applicable(check.id, "no GPU driver here")
    return healthy(check.id, device, f"a look took {report.took_s * 1000:.1f} ms")
