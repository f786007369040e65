"""What the kernel has said of late: one check for each class of failure of the node; a program's fault is none of it.

An agent reads the kernel log as it comes, and judges here what it heard (`results`). The probe is for `unbroken check`
without one: it reads everything of the window anew at each look, so nothing is kept but the time of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

from diagnosis.health import Check, CheckResult, Level, Scope, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import Finding, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.counters import recall

DEVICES: Final = 32
"""Of each class."""
STATE: Final = "kernel_past"
HALF_A_DAY_S: Final = 43_200.0
BECAME_WORSE: Final = ("warning", "critical")

WHATS: Final = {
    FailureClass.GPU_FALLEN_OFF_BUS: "the kernel says that a GPU has fallen off the bus",
    FailureClass.GPU_HANG: "the kernel says that a GPU hangs",
    FailureClass.GPU_ECC_UNCORRECTABLE: "the kernel tells of a GPU's memory errors",
    FailureClass.NVLINK_ERROR: "the kernel tells of NVLink errors",
    FailureClass.GPU_DRIVER: "the kernel tells of trouble of the GPU driver",
    FailureClass.GPU_THERMAL_POWER: "the kernel tells of a GPU's heat or power",
    FailureClass.PCIE_ERROR: "the kernel tells of PCIe errors",
    FailureClass.CPU_OR_MEMORY_HW: "the kernel tells of machine checks or memory errors",
    FailureClass.KERNEL_FAULT: "the kernel tells of a fault of its own: a lockup, an oops, hung tasks",
    FailureClass.NCCL_NETWORK: "the kernel tells of trouble of a network device",
    FailureClass.STORAGE_ERROR: "the kernel tells of trouble of a disk or file system",
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


class Said(NamedTuple):
    """What the kernel said of one device and class of failure."""

    level: Level
    finding: Finding


class KernelMessagesProbe:
    name = "kernel_log"
    checks = tuple(CHECKS.values())
    every_s = 3600.0
    deadline_s = 15.0

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
    """What the findings of the kernel log say at this Unix time. `limits`: of the site, by check."""
    said: list[CheckResult] = []
    for one, check in CHECKS.items():
        seconds = max({**check.limits, **limits.get(check.id, {})}["minutes"] * 60, at_least_s)
        late = [finding for finding in found if finding.failure_class is one and finding.at >= now - seconds]
        said += _results(check, judge(late), now)
    return said


def longest_s(limits: Mapping[str, Mapping[str, float]]) -> float:
    """So long anything that the kernel has said may matter."""
    return 60 * max({**check.limits, **limits.get(check.id, {})}["minutes"] for check in CHECKS.values())


def _all_not_applicable(why: str) -> list[CheckResult]:
    return [not_applicable(check.id, why) for check in CHECKS.values()]


def judge(found: Iterable[Finding]) -> dict[str, Said]:
    """Device -> the worst that was said of it."""
    said: dict[str, Said] = {}
    for finding in found:
        device = finding.fields.get("device", "")
        left_out = finding.severity == "error" and finding.fields.get("action", "").startswith("cordon")
        level: Level = "critical" if finding.severity == "fatal" or left_out else "warning"
        before = said.get(device)
        if (before is None and len(said) < DEVICES) or (before is not None and (before.level, level) == BECAME_WORSE):
            said[device] = Said(level, finding)
    return said


def _results(check: Check, said: Mapping[str, Said], now: float) -> list[CheckResult]:
    if not said:
        return [healthy(check.id, text="the kernel has said nothing of it lately")]
    return [
        unhealthy(
            check.id,
            clean_text(f"{_when(finding.at, now)}: {finding.evidence.text}", 300),
            clean_text(device, 100),
            level,
            gpu=finding.gpu,
            gpu_uuid=finding.gpu_uuid,
        )
        for device, (level, finding) in said.items()
    ]


def _when(at: float, now: float) -> str:
    """The time itself: an agent's answer is read later than it was written."""
    pattern = "%H:%M:%S UTC" if now - at < HALF_A_DAY_S else "%Y-%m-%d %H:%M UTC"
    return datetime.fromtimestamp(at, timezone.utc).strftime(pattern)
