"""Memory modules, CPUs and NVMe drives of the node: EDAC counters, throttling, controllers that died.

Counters are judged by how they grow; what was counted before we first looked (in this boot) is at most a warning.
"""

from __future__ import annotations

import re
from typing import Final

from diagnosis.health import Check, CheckResult, Level, judged, not_applicable
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.counters import Baseline, Rates

# fmt: off
CHECKS: Final = (
    Check(id="edac_uncorrected", failure_class=FailureClass.CPU_OR_MEMORY_HW, scope="node", clears=False,
        what="uncorrected errors in the host's memory",
        source="/sys/devices/system/edac/mc/*/ue_count",
        # A node that was booted after its repair counts from 0 again, so any count is of this boot.
        threshold="grew since it was first seen in this boot: critical; any before that: warning"),
    Check(id="edac_corrected", failure_class=FailureClass.CPU_OR_MEMORY_HW, scope="node", calm_looks=20,
        what="a storm of corrected errors in the host's memory",
        source="/sys/devices/system/edac/mc/*/ce_count",
        # Single corrected errors are normal. A module that gives hundreds an hour is failing, and thousands in
        # minutes cost the CPUs themselves: each is an interrupt, or firmware that stops all CPUs.
        threshold="{per_hour} in an hour: warning; {storm} in 5 minutes: critical",
        limits={"per_hour": 100, "storm": 3000}),
    Check(id="cpu_throttle", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", looks=3,
        what="a CPU package is throttled by its temperature",
        source="/sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_{total_time_ms,count}",
        threshold="{percent} % of the time, or {per_minute} times a minute where the kernel does not count the time",
        limits={"percent": 10, "per_minute": 30}),
    Check(id="nvme_state", failure_class=FailureClass.STORAGE_ERROR, scope="node", looks=2,
        what="an NVMe controller is dead, or resets again and again",
        source="/sys/class/nvme/*/state",
        threshold="dead: critical; new, resetting or connecting: warning"),
)
# fmt: on
CHECK: Final = {check.id: check for check in CHECKS}
_CPUS: Final = "sys/devices/system/cpu"
_EDAC: Final = "sys/devices/system/edac/mc"


# --- memory, as the kernel's EDAC drivers count its errors for each memory controller and module


def read_controllers(place: ProbeContext) -> dict[str, tuple[int, int]]:
    """Memory controller -> corrected and uncorrected errors since the node was booted."""
    found = {}
    for name in place.names(_EDAC, "mc[0-9]*", 64):
        corrected, uncorrected = (place.number(f"{_EDAC}/{name}/{kind}_count") for kind in ("ce", "ue"))
        if corrected is not None and uncorrected is not None and min(corrected, uncorrected) >= 0:
            found[name] = corrected, uncorrected
    return found


def where(place: ProbeContext, controller: str, kind: str) -> str:
    """The modules that have errors, the worst first; empty where the board does not tell. There may be 32 of them."""
    base, counts = f"{_EDAC}/{controller}", {}
    for name in place.names(base, "*[0-9]", 64):
        if name.startswith(("dimm", "rank")):
            label = clean_text((place.text(f"{base}/{name}/dimm_label", 256) or "").strip(), 60) or name
            counts[label] = place.number(f"{base}/{name}/dimm_{kind}_count") or 0
    worst = sorted((label for label, count in counts.items() if count), key=lambda label: -counts[label])
    return f" ({', '.join(worst[:3])})" if worst else ""


def judge_uncorrected(controller: str, count: int, at_first: int, modules: str) -> CheckResult:
    """`at_first`: what its counter said when it was first seen in this boot."""
    new = count - at_first
    level: Level | None = "critical" if new else "warning" if count else None
    text = f"{new or count or 'no'} uncorrected memory errors{'' if new else ' since the node was booted'}{modules}"
    return judged("edac_uncorrected", level, text, controller, values={"uncorrected": count})


def judge_corrected(
    controller: str, count: int, hour: int, minutes: int, modules: str, limits: dict[str, float]
) -> CheckResult:
    """`hour`, `minutes`: errors in the last hour and in the last five minutes."""
    level: Level | None = (
        "critical" if minutes >= limits["storm"] else "warning" if hour >= limits["per_hour"] else None
    )
    text = f"{hour} corrected memory errors within an hour, {minutes} within 5 minutes{modules}"
    return judged("edac_corrected", level, text, controller, values={"corrected": count, "corrected_last_hour": hour})


# --- CPUs


def parse_cpus(text: str) -> set[int]:
    """`0-3,8,10-11` as a set; at most 8192 CPUs."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", text):
        cpus.update(range(int(first), min(int(last or first), 8191) + 1))
    return cpus


def one_cpu_per_package(place: ProbeContext) -> list[int]:
    rest = parse_cpus(place.text(f"{_CPUS}/online") or "")
    found: list[int] = []
    while rest and len(found) < 16:
        cpu = min(rest)
        found.append(cpu)
        topology = f"{_CPUS}/cpu{cpu}/topology"
        package = place.text(f"{topology}/package_cpus_list") or place.text(f"{topology}/core_siblings_list")
        if not package:
            break
        rest -= parse_cpus(package) | {cpu}
    return found


# --- NVMe drives


def look_at_drives(place: ProbeContext) -> list[CheckResult]:
    results = []
    for name in place.names("sys/class/nvme", "nvme[0-9]*", 64):
        state, model, firmware = (
            clean_text(" ".join((place.text(f"sys/class/nvme/{name}/{file}", 128) or "").split()), 80)
            for file in ("state", "model", "firmware_rev")
        )
        changing = state in ("new", "resetting", "connecting")
        level: Level | None = "critical" if state == "dead" else "warning" if changing else None
        text = " ".join(word for word in (state or "state unknown", model, firmware) if word)
        results.append(judged("nvme_state", level, text, name))
    return results or [not_applicable("nvme_state", "no NVMe controller")]


# --- the probe


class HardwareProbe:
    name = "hardware"
    checks = CHECKS
    every_s = 30.0
    deadline_s = 20.0
    once_s = 5.0

    def __init__(self) -> None:
        self._uncorrected = Baseline("edac")
        self._packages: list[int] | None = None
        self._rates = Rates()

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        return [*self._memory(place, now), *self._throttling(place, now), *look_at_drives(place)]

    def _memory(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        counts = read_controllers(place)
        if not counts:
            why = "no EDAC driver counts memory errors here"
            return [not_applicable("edac_uncorrected", why), not_applicable("edac_corrected", why)]
        at_first = self._uncorrected.of(place, {name: uncorrected for name, (_, uncorrected) in counts.items()})
        results = []
        for name, (corrected, uncorrected) in counts.items():
            self._rates.add(name, corrected, now.mono)
            hour, minutes = (self._rates.increase(name, window, now.mono) for window in (3600, 300))
            modules = where(place, name, "ue") if uncorrected else ""
            results.append(judge_uncorrected(name, uncorrected, at_first[name], modules))
            modules = where(place, name, "ce") if hour else ""
            limits = place.limits(CHECK["edac_corrected"])
            results.append(judge_corrected(name, corrected, hour, minutes, modules, limits))
        return results

    def _throttling(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        if self._packages is None:
            self._packages = one_cpu_per_package(place)
        limits, results = place.limits(CHECK["cpu_throttle"]), []
        for number, cpu in enumerate(self._packages):
            base = f"{_CPUS}/cpu{cpu}/thermal_throttle/package_throttle"
            count, total_ms = place.number(f"{base}_count"), place.number(f"{base}_total_time_ms")
            if count is None:
                continue
            self._rates.add(cpu, count if total_ms is None else total_ms, now.mono)
            rate = self._rates.increase(cpu, self.every_s, now.mono) / self.every_s
            if total_ms is None:  # before Linux 5.6
                rate, limit, what = round(rate * 60, 2), limits["per_minute"], "times a minute"
            else:
                rate, limit, what = round(rate / 10, 2), limits["percent"], "% of the time"
            level: Level | None = "warning" if rate >= limit else None
            text, values = f"throttled {rate:g} {what}", {"throttles": count, "rate": rate}
            results.append(judged("cpu_throttle", level, text, f"package {number}", values=values))
        return results or [not_applicable("cpu_throttle", "the CPUs do not count it")]
