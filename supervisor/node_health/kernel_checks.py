"""What the kernel reported recently: one check for each failure class of the node. Faults of programs do not count.

An agent reads the kernel log as it comes (`KernelMonitor`), and folds its recent findings into these checks whenever
`health.json` is written (`states`). The probe is for `unbroken check` without an agent: at each look it reads the whole
window anew, so it keeps nothing but the time of the last look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from diagnosis.health import Check, CheckResult, CheckState, Level, Scope, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import Finding, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, ProbeContext, Site
from supervisor.node_health.counters import recall

DEVICES: Final = 32
"""Of each class."""
STATE: Final = "kernel_past"
HALF_A_DAY_S: Final = 43_200.0
BECAME_WORSE: Final = ("warning", "critical")

WHATS: Final = {
    FailureClass.GPU_FALLEN_OFF_BUS: "the kernel reported that a GPU has fallen off the bus",
    FailureClass.GPU_HANG: "the kernel reported that a GPU hangs",
    FailureClass.GPU_ECC_UNCORRECTABLE: "the kernel reported memory errors of a GPU",
    FailureClass.NVLINK_ERROR: "the kernel reported NVLink errors",
    FailureClass.GPU_DRIVER: "the kernel reported a problem of the GPU driver",
    FailureClass.GPU_THERMAL_POWER: "the kernel reported a problem with the heat or power of a GPU",
    FailureClass.PCIE_ERROR: "the kernel reported PCIe errors",
    FailureClass.CPU_OR_MEMORY_HW: "the kernel reported machine checks or memory errors",
    FailureClass.KERNEL_FAULT: "the kernel reported a fault of its own: a lockup, an oops, hung tasks",
    FailureClass.NCCL_NETWORK: "the kernel reported a problem of a network device",
    FailureClass.STORAGE_ERROR: "the kernel reported a problem of a disk or file system",
}
_SCOPES: Final[dict[FailureClass, Scope]] = {
    FailureClass.GPU_FALLEN_OFF_BUS: "gpu",
    FailureClass.GPU_HANG: "gpu",
    FailureClass.GPU_ECC_UNCORRECTABLE: "gpu",
    FailureClass.NVLINK_ERROR: "gpu",
    FailureClass.GPU_DRIVER: "gpu",
    FailureClass.GPU_THERMAL_POWER: "gpu",
    FailureClass.PCIE_ERROR: "node",
    FailureClass.CPU_OR_MEMORY_HW: "node",
    FailureClass.KERNEL_FAULT: "node",
    FailureClass.NCCL_NETWORK: "fabric",
    FailureClass.STORAGE_ERROR: "storage",
}
CHECKS: Final[dict[FailureClass, Check]] = {
    one: Check(
        id=f"kernel_log_{one.value}",
        what=WHATS[one],
        source="/dev/kmsg, else `journalctl -k`",
        threshold="a message in the last {minutes} min, or since the last check; critical: a fatal one, or one after "
        "which the GPU or node is to be left out",
        limits={"minutes": 10.0},
        failure_class=one,
        scope=scope,
        when="periodic",
        calm_looks=1,
    )
    for one, scope in _SCOPES.items()
}


_CLASSES: Final = {check.id: one for one, check in CHECKS.items()}
KERNEL: Final = "kernel_log"
"""The probe that these checks belong to, whoever makes them."""


class WorstMessage(NamedTuple):
    """The worst that the kernel reported about one device and failure class."""

    level: Level
    finding: Finding


class KernelMessagesProbe:
    name = KERNEL
    checks = tuple(CHECKS.values())
    every_s = 3600.0
    deadline_s = 15.0
    once_s = 10.0

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        if not place.live:
            return _all_not_applicable("`unbroken diagnose` reads the logs of a captured tree")
        last = recall(place, STATE, float)
        last = last if 0 < last < now.mono else 0.0
        seconds = max(longest_s(place.site.limits), now.mono - last if last else 0.0)
        from supervisor.node_health import kernel_log  # an agent's probe worker has no use for the tables

        try:
            lines = kernel_log.lines(seconds, now)
        except OSError as error:
            return [unknown(check.id, clean_text(str(error), 200)) for check in self.checks]
        place.keep(STATE, now.mono)
        found = kernel_log.findings(lines, place.site.tables)
        return results(found, now.wall, place.site.limits, now.mono - last if last else 0.0)


def results(
    found: Sequence[Finding], now: float, limits: Mapping[str, Mapping[str, float]], at_least_s: float = 0.0
) -> list[CheckResult]:
    """The results at this Unix time, by the findings of the kernel log. `limits`: of the site, by check."""
    worst: list[CheckResult] = []
    for one, check in CHECKS.items():
        seconds = max({**check.limits, **limits.get(check.id, {})}["minutes"] * 60, at_least_s)
        late = [finding for finding in found if finding.failure_class is one and finding.at >= now - seconds]
        worst += _results(check, judge(late), now)
    return worst


def states(
    found: Sequence[Finding], now: float, site: Site, *, since: float = 0.0, problem: str = ""
) -> list[CheckState]:
    """The same as check states. `since`: from when on the kernel log was read. `problem`: why it cannot be read."""
    worst = [unknown(check.id, problem) for check in CHECKS.values()] if problem else results(found, now, site.limits)
    first = {(finding.failure_class, finding.fields.get("device", "")): finding for finding in reversed(found)}
    return [
        CheckState(
            result=one,
            status=one.status,
            level=one.level,
            since=first[of].at if (of := (_CLASSES[one.check], one.device)) in first else since,
            looked_at=now,
            rank=first[of].rank if of in first else None,
        )
        for one in worst
        if not any(fnmatchcase(name, pattern) for name in (one.check, KERNEL) for pattern in site.skip)
    ]


def longest_s(limits: Mapping[str, Mapping[str, float]]) -> float:
    """The longest time for which a message of the kernel counts."""
    return 60 * max({**check.limits, **limits.get(check.id, {})}["minutes"] for check in CHECKS.values())


def _all_not_applicable(why: str) -> list[CheckResult]:
    return [not_applicable(check.id, why) for check in CHECKS.values()]


def judge(found: Iterable[Finding]) -> dict[str, WorstMessage]:
    """Device -> the worst report about it."""
    worst: dict[str, WorstMessage] = {}
    for finding in found:
        device = finding.fields.get("device", "")
        left_out = finding.severity == "error" and finding.fields.get("action", "").startswith("cordon")
        level: Level = "critical" if finding.severity == "fatal" or left_out else "warning"
        before = worst.get(device)
        if (before is None and len(worst) < DEVICES) or (before is not None and (before.level, level) == BECAME_WORSE):
            worst[device] = WorstMessage(level, finding)
    return worst


def _results(check: Check, worst: Mapping[str, WorstMessage], now: float) -> list[CheckResult]:
    if not worst:
        return [healthy(check.id, text="the kernel reported nothing of this kind recently")]
    return [
        unhealthy(
            check.id,
            clean_text(f"{_when(finding.at, now)}: {finding.evidence.text}", 300),
            clean_text(device, 100),
            level,
            gpu=finding.gpu,
            gpu_uuid=finding.gpu_uuid,
        )
        for device, (level, finding) in worst.items()
    ]


def _when(at: float, now: float) -> str:
    """The time itself: an agent's answer is read later than it was written."""
    pattern = "%H:%M:%S UTC" if now - at < HALF_A_DAY_S else "%Y-%m-%d %H:%M UTC"
    return datetime.fromtimestamp(at, timezone.utc).strftime(pattern)
