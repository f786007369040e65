"""What stands on this node: every look of every probe settled, told once when it becomes bad. Pure.

A reading names its device; here it gets the rank that uses it, the step, the clock and the boot it belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis.health import (
    Check,
    Level,
    Reading,
    Standing,
    healthy,
    not_applicable,
    settle,
    to_finding,
    unhealthy,
    unknown,
)
from diagnosis.signals import Finding, Frozen
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import JobView
from supervisor.node_health.protocol import Overdue, Report

STANDINGS_KEPT: Final = 5000
"""Checks times devices; what comes after that is not kept (a node has about a thousand)."""
FINDINGS_A_MINUTE: Final = 60
"""What more becomes bad within a minute stands, but is not told one by one."""

STARVED_S: Final = 60.0
"""So long a process that was killed may wait for a CPU to die on."""

GPU_RESPONDS: Final = Check(
    id="gpu_driver_responds",
    what="a call of the GPU driver does not return",
    source="NVML calls in a process of their own; /proc/PID/task/*/{stat,wchan}",
    threshold="no return for {seconds} s, or a process that does not even die",
    failure_class=FailureClass.GPU_HANG,
    scope="node",
    limits={"seconds": 45.0},
)
NODE_RESPONDS: Final = Check(
    id="station_node_responds",
    what="a look at this node does not return",
    source="the probes' own deadlines; /proc/PID/task/*/{stat,wchan}",
    threshold="a look past its deadline; critical: a process that does not die",
    failure_class=FailureClass.KERNEL_FAULT,
    scope="node",
)
RESPONDS: Final[dict[str, Check]] = {"gpu": GPU_RESPONDS, "node": NODE_RESPONDS}
"""Station -> the check of its own answers. They are made by who runs the stations, not by a probe."""


class Cost(Frozen, frozen=True, kw_only=True):
    """What the looks of one probe took, since the agent began to hear of it."""

    looks: int = 0
    cpu_s: float = 0.0
    took_s: float = 0.0

    def plus(self, report: Report) -> Cost:
        return Cost(looks=self.looks + 1, cpu_s=self.cpu_s + report.cpu_s, took_s=self.took_s + report.took_s)


class HealthFile(Frozen, frozen=True, kw_only=True):
    """`health.json` of the local folder: what stands on this node, for whoever asks. Replaced when something changed
    (every 5 s at most), and every 60 s; who reads it believes it for two minutes, and only in the same boot."""

    schema: int
    """1."""
    node: str
    boot_id: str
    at: float
    """Unix seconds."""
    mono: float
    """Monotonic seconds of the node."""
    pid: int
    """The agent's."""
    waiting: tuple[str, ...] = ()
    """Probes that have not told anything yet: for their checks this file is no answer."""
    unseen: tuple[str, ...] = ()
    """What cannot be seen here, in words."""
    problems: tuple[str, ...] = ()
    """What is wrong with our own looking: plug-ins that cannot be loaded, processes that end."""
    gpus_released_until: float = 0.0
    """Unix seconds; 0 where no operator has asked for the GPUs."""
    standings: tuple[Standing, ...] = ()
    costs: dict[str, Cost] = {}
    """Probe -> what its looks took (`unbroken bench overhead`)."""


class Change(NamedTuple):
    check: Check
    before: Standing | None
    standing: Standing
    finding: Finding | None
    """What is to be told of it; None for what got better, or where too much is told already."""


@dataclasses.dataclass
class _Kept:
    standing: Standing
    missed: int = 0
    """Reports in a row that spoke of the check and not of this device."""


class Standings:
    """`note` takes reports in and gives what changed. `job` is to be kept current."""

    def __init__(self, node: str, boot_id: str = "", steps: Callable[[], Mapping[int, int]] = dict) -> None:
        """`steps`: rank -> its newest step, asked when something is told."""
        self.job = JobView()
        self.left_out = 0
        """Findings that were too many to be told."""
        self.changes = 0
        """Grows whenever a status, a level or an unhealthy text changes."""
        self._node = node
        self._boot_id = boot_id
        self.steps = steps
        self._checks: dict[str, Check] = {check.id: check for check in RESPONDS.values()}
        self._probes: dict[str, str] = {}
        self._kept: dict[str, dict[str, _Kept]] = {}
        """Check -> device -> what stands."""
        self._count = 0
        self._gpus: dict[str, str] = {}
        """PCI address -> UUID, of all GPUs that were ever spoken of."""
        self._gpu_ranks: dict[str, int] = {}
        """GPU -> rank, as the driver's own list of processes tells."""
        self._minute, self._told = 0.0, 0

    def learn(self, probes: Mapping[str, Sequence[Check]]) -> None:
        """The checks there are, of a station that has come up."""
        for probe, checks in probes.items():
            for check in checks:
                self._checks[check.id] = check
                self._probes[check.id] = probe

    def all(self) -> Iterator[Standing]:
        for devices in self._kept.values():
            for kept in devices.values():
                yield kept.standing

    def check(self, name: str) -> Check:
        return self._checks[name]

    def probe_of(self, check: str) -> str:
        """The probe that looks at this check; empty for those of the stations themselves."""
        return self._probes.get(check, "")

    @property
    def gpus(self) -> Mapping[str, str]:
        """PCI address -> UUID (empty: not known), of all GPUs that were ever spoken of."""
        return self._gpus

    def stands(self, check: str, device: str) -> bool:
        """Whether anything is known of it."""
        return device in self._kept.get(check, ())

    def finding(self, standing: Standing, at: float, mono: float) -> Finding:
        """What a standing says to a diagnosis."""
        found = to_finding(self._checks[standing.reading.check], standing, self._node, at)
        steps = self.steps()
        step = steps.get(standing.rank) if standing.rank is not None else max(steps.values(), default=None)
        return msgspec.structs.replace(found, step=step, mono=mono, boot_id=self._boot_id)

    def note(self, report: Report) -> list[Change]:
        """Settle every reading of a report; what became bad, worse or good again, in order."""
        taken = [self.take(reading, report.wall, report.mono) for reading in report.readings]
        spoken: dict[str, set[str]] = {}
        for reading in report.readings:
            spoken.setdefault(reading.check, set()).add(reading.device)
        anywhere = set[str]().union(*spoken.values())
        for check, devices in spoken.items():
            if len(self._kept.get(check, ())) > len(devices):
                # GPUs are asked in turns for what takes long: only one of which nothing at all is said is gone.
                self._forget(check, anywhere if self._checks[check].scope == "gpu" else devices)
        return [change for change in taken if change is not None]

    def overdue(self, word: Overdue, wall: float, mono: float) -> None:
        """A probe is silent: what it last saw well is not known to be well any more; what was bad stays so."""
        why = f"no look has returned for {word.since_s:.0f} s" + (f" (in {word.doing})" if word.doing else "")
        self.silent({word.probe}, why, wall, mono)

    def silent(self, probes: Collection[str], why: str, wall: float, mono: float) -> None:
        """As `overdue`, for whatever reason these probes do not look."""
        for check, probe in self._probes.items():
            if probe not in probes:
                continue
            for device, kept in self._kept.get(check, {}).items():
                if kept.standing.status == "healthy":
                    self.take(unknown(check, why, device), wall, mono)

    def take(self, reading: Reading, wall: float, mono: float) -> Change | None:
        """Settle one reading."""
        check = self._checks.get(reading.check)
        if check is None:
            return None
        self._learn_gpu(reading)
        devices = self._kept.setdefault(reading.check, {})
        kept = devices.get(reading.device)
        if kept is None and self._count >= STANDINGS_KEPT:
            return None
        before = None if kept is None else kept.standing
        after = settle(check, before, reading, wall)
        if after.status == "unhealthy":
            rank = self._rank_of(after.reading)
            if rank is not None and rank != after.rank:
                after = msgspec.structs.replace(after, rank=rank)
        if kept is None:
            self._count += 1
            devices[reading.device] = _Kept(after)
        else:
            kept.standing, kept.missed = after, 0
        return self._changed(check, before, after, wall, mono)

    def _changed(
        self, check: Check, before: Standing | None, after: Standing, wall: float, mono: float
    ) -> Change | None:
        was, level = ("unknown", "critical") if before is None else (before.status, before.level)
        bad = after.status == "unhealthy"
        if after.status == was and (not bad or after.level == level):
            self.changes += before is None or (bad and after.reading.text != before.reading.text)
            return None
        self.changes += 1
        if not bad:
            return Change(check, before, after, None) if was == "unhealthy" else None
        worse = was != "unhealthy" or after.level == "critical"
        tell = worse and self._may_tell(mono)
        return Change(check, before, after, self.finding(after, wall, mono) if tell else None)

    def _may_tell(self, mono: float) -> bool:
        if mono - self._minute >= 60.0:
            self._minute, self._told = mono, 0
        self._told += 1
        if self._told > FINDINGS_A_MINUTE:
            self.left_out += 1
        return self._told <= FINDINGS_A_MINUTE

    def _forget(self, check: str, spoken: set[str]) -> None:
        """Devices that are not spoken of any more: a process that ended, an interface that was taken away."""
        row, devices = self._checks[check], self._kept[check]
        for device in [device for device in devices if device not in spoken]:
            kept = devices[device]
            kept.missed += 1
            bad = kept.standing.status == "unhealthy"
            if kept.missed >= row.calm_looks and (row.clears or not bad):
                del devices[device]
                self._count -= 1
                self.changes += 1

    # ----- whose it is -----

    def _learn_gpu(self, reading: Reading) -> None:
        if not reading.gpu:
            return
        self._gpus[reading.gpu] = reading.gpu_uuid or self._gpus.get(reading.gpu, "")
        for pid in reading.pids:
            rank = self.job.ranks.get(pid)
            if rank is not None:
                self._gpu_ranks[reading.gpu] = rank

    def _rank_of(self, reading: Reading) -> int | None:
        """By its processes; else by the driver's list of processes; else by the devices that ranks were given."""
        ranks = self.job.ranks
        for pid in reading.pids:
            if pid in ranks:
                return ranks[pid]
        return self._rank_on(reading.gpu, reading.gpu_uuid) if reading.gpu else None

    def _rank_on(self, gpu: str, uuid: str) -> int | None:
        rank = self._gpu_ranks.get(gpu)
        if rank is not None and rank in self.job.ranks.values():
            return rank
        return rank_of_gpu(gpu, uuid, sorted(self._gpus), self.job.gpus_of_ranks)

    def placed(self, finding: Finding) -> Finding:
        """A finding of another origin with what is known of its GPU: the UUID, and the rank where it names none."""
        if not finding.gpu:
            return finding
        uuid = finding.gpu_uuid or self._gpus.get(finding.gpu, "")
        rank = finding.rank
        if rank is None and finding.scope == "gpu":
            rank = self._rank_on(finding.gpu, uuid)
        step = self.steps().get(rank, finding.step) if rank is not None else finding.step
        return msgspec.structs.replace(finding, gpu_uuid=uuid, rank=rank, step=step)


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


def responds(station: str, overdue: Overdue, limits: Mapping[str, float] | None = None) -> Reading:
    """What a look past its deadline says of the station it is in.

    A thread that is runnable is only starved: nobody's driver is to blame, so that is never critical.
    """
    check = RESPONDS[station]
    where = overdue.doing or f"a look of the probe {overdue.probe}"
    waits = f", waiting in {overdue.wchan}" if overdue.wchan else ""
    text = f"{where} has not returned for {overdue.since_s:.0f} s (state {overdue.state}{waits})"
    seconds = {**check.limits, **(limits or {})}.get("seconds")
    sure = seconds is not None and overdue.since_s >= seconds and overdue.state in "DS"
    values = {"since_s": overdue.since_s}
    device = "" if station == "gpu" else overdue.probe
    return unhealthy(check.id, text, device, "critical" if sure else "warning", values=values)


def undying(station: str, pid: int, threads: Iterable[tuple[str, str]], since_s: float) -> Reading:
    """A station that was killed and does not die. `threads`: (state, wait channel) of each.

    Never critical where no driver is to blame: one that only wants for a CPU, or that somebody has frozen.
    """
    threads = list(threads)
    held = sorted({f"{state} in {wchan}" if wchan else state for state, wchan in threads if state == "D"})
    where = f" ({'; '.join(held[:4])})" if held else ""
    starved = since_s < STARVED_S and all(state in "RZX" for state, _ in threads)
    frozen = any("refrigerator" in wchan or "freezer" in wchan for _, wchan in threads)
    text = f"the process {pid} that looks for us was killed {since_s:.0f} s ago and does not die{where}"
    level: Level = "warning" if starved or frozen else "critical"
    return unhealthy(RESPONDS[station].id, text, "", level, values={"since_s": since_s})


def responded(station: str, report: Report) -> Reading:
    """What a look that came back says of the station it is in."""
    check = RESPONDS[station]
    device = "" if station == "gpu" else report.probe
    if station == "gpu" and all(reading.status == "not_applicable" for reading in report.readings):
        return not_applicable(check.id, "no GPU driver here")
    return healthy(check.id, device, f"a look took {report.took_s * 1000:.1f} ms")
