"""Memory modules, CPUs and drives of the node: EDAC counters, throttling, crash records, NVMe, RAID, BMC.

Counters are judged by how they grow; what was counted before we first looked (in this boot) is at most a warning.
"""

from __future__ import annotations

import os
import re
from typing import Final

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health import drives, sel
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.network.counters import Baseline, Rates

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
        threshold="{percent} % of the time, or {per_minute} times a minute where the time is not told",
        limits={"percent": 10, "per_minute": 30}),
    Check(id="cpu_frequency", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", when="preflight",
        what="the CPUs are held below their speed",
        source="/sys/devices/system/cpu/cpufreq/policy*",
        # The governor "powersave" of intel_pstate and amd-pstate-epp scales with the load; that of other drivers is
        # the lowest frequency for ever.
        threshold="allowed less than {percent} % of the highest frequency, or a governor that keeps to the lowest",
        limits={"percent": 50}),
    Check(id="crash_records", failure_class=FailureClass.KERNEL_FAULT, scope="node", when="periodic",
        what="the kernel crashed before this boot",
        source="/sys/fs/pstore, /var/lib/systemd/pstore",
        threshold="a panic or oops recorded within {days} days",
        limits={"days": 7}),
)
# fmt: on
CHECK: Final = {check.id: check for check in CHECKS}
_CPUS: Final = "sys/devices/system/cpu"
_EDAC: Final = "sys/devices/system/edac/mc"


# --- memory, as the kernel's EDAC drivers count its errors for each memory controller and module


def read_controllers(place: Place) -> dict[str, tuple[int, int]]:
    """Memory controller -> corrected and uncorrected errors since the node was booted."""
    found = {}
    for name in place.names(_EDAC, "mc[0-9]*", 64):
        corrected, uncorrected = (place.number(f"{_EDAC}/{name}/{kind}_count") for kind in ("ce", "ue"))
        if corrected is not None and uncorrected is not None and min(corrected, uncorrected) >= 0:
            found[name] = corrected, uncorrected
    return found


def where(place: Place, controller: str, kind: str) -> str:
    """The modules that have errors, the worst first; empty where the board does not tell. There may be 32 of them."""
    base, counts = f"{_EDAC}/{controller}", {}
    for name in place.names(base, "*[0-9]", 64):
        if name.startswith(("dimm", "rank")):
            label = clean_text((place.text(f"{base}/{name}/dimm_label", 256) or "").strip(), 60) or name
            counts[label] = place.number(f"{base}/{name}/dimm_{kind}_count") or 0
    worst = sorted((label for label, count in counts.items() if count), key=lambda label: -counts[label])
    return f" ({', '.join(worst[:3])})" if worst else ""


def judge_uncorrected(controller: str, count: int, at_first: int, modules: str) -> Reading:
    """`at_first`: what its counter said when it was first seen in this boot."""
    new = count - at_first
    level: Level | None = "critical" if new else "warning" if count else None
    text = f"{new or count or 'no'} uncorrected memory errors{'' if new else ' since the node was booted'}{modules}"
    return judged("edac_uncorrected", level, text, controller, values={"uncorrected": count})


def judge_corrected(
    controller: str, count: int, hour: int, minutes: int, modules: str, limits: dict[str, float]
) -> Reading:
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


def one_cpu_per_package(place: Place) -> list[int]:
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


def look_at_frequency(place: Place) -> Reading:
    slow, lowest, governors, allowed = 0, 0, set(), []
    limits, base = place.limits(CHECK["cpu_frequency"]), f"{_CPUS}/cpufreq"
    for name in place.names(base, "policy[0-9]*"):
        khz, highest = (place.number(f"{base}/{name}/{file}") or 0 for file in ("scaling_max_freq", "cpuinfo_max_freq"))
        driver, governor = (
            clean_text((place.text(f"{base}/{name}/scaling_{what}", 64) or "").strip(), 40)
            for what in ("driver", "governor")
        )
        if min(khz, highest) > 0:
            allowed.append(khz)
            governors.add(governor)
            slow += khz < highest * limits["percent"] / 100
            lowest += governor == "powersave" and driver not in ("intel_pstate", "amd-pstate-epp")
    if not allowed:
        return not_applicable("cpu_frequency", "the CPUs' frequency is not the kernel's to set")
    mhz = min(allowed) / 1000
    text = f"governor {', '.join(sorted(governors))}, up to {mhz:.0f} MHz allowed"
    if slow or lowest:
        text = f"{slow or lowest} of {len(allowed)} CPUs: {text}"
    return judged("cpu_frequency", "warning" if slow or lowest else None, text, values={"allowed_mhz": mhz})


# --- crashes


def look_at_crashes(place: Place, now: Moment) -> Reading:
    """Records of panics and oopses that the firmware kept; systemd moves them away at boot."""
    if place.denied("sys/fs/pstore"):
        return unknown("crash_records", "only root can read the firmware's crash records")
    if not place.path("sys/fs/pstore").is_dir():
        return not_applicable("crash_records", "the kernel keeps no crash records")
    oldest = now.wall - place.limits(CHECK["crash_records"])["days"] * 86400 if place.live else 0.0
    found = []
    for name in place.names("sys/fs/pstore", "dmesg-*", 256):
        # Its first line: `Panic#2 Part1`. Also written at an orderly shutdown, if the kernel is told to.
        head = (place.text(f"sys/fs/pstore/{name}", 256) or "").split("\n", 1)[0]
        if head[:5] in ("Panic", "Oops#", "") and _written_at(place, f"sys/fs/pstore/{name}") >= oldest:
            found.append(clean_text(head, 40) or name)
    if place.live:  # in a captured tree the times of files are not those of the node
        archive = "var/lib/systemd/pstore"
        found += [n for n in place.names(archive, "*", 256) if _written_at(place, f"{archive}/{n}") >= oldest]
    if found:
        text = f"{len(found)} crash records of the kernel from before this boot, as {found[0]}"
        return unhealthy("crash_records", text, level="warning", values={"records": len(found)})
    return healthy("crash_records", text="no crash record")


def _written_at(place: Place, relative: str) -> float:
    try:
        return os.stat(place.path(relative)).st_mtime if place.live else 0.0
    except OSError:
        return -1.0


# --- the probe


class HardwareProbe:
    name = "hardware"
    checks = (*CHECKS, *drives.CHECKS, sel.CHECK)
    every_s = 30.0
    deadline_s = 40.0
    """With time for the SMART logs of many drives and for ipmitool, which are only asked before a job."""

    def __init__(self) -> None:
        self._uncorrected = Baseline("edac")
        self._drives = drives.DriveLooks()
        self._packages: list[int] | None = None
        self._rates = Rates()

    def look(self, place: Place, now: Moment) -> list[Reading]:
        readings = [
            *self._memory(place, now),
            *self._throttling(place, now),
            look_at_crashes(place, now),
            *self._drives.look(place),
        ]
        return [*readings, look_at_frequency(place), *sel.look(place, now)] if place.preflight else readings

    def _memory(self, place: Place, now: Moment) -> list[Reading]:
        counts = read_controllers(place)
        if not counts:
            why = "no EDAC driver counts memory errors here"
            return [not_applicable("edac_uncorrected", why), not_applicable("edac_corrected", why)]
        at_first = self._uncorrected.of(place, {name: uncorrected for name, (_, uncorrected) in counts.items()})
        readings = []
        for name, (corrected, uncorrected) in counts.items():
            self._rates.add(name, corrected, now.mono)
            hour, minutes = (self._rates.increase(name, window, now.mono) for window in (3600, 300))
            modules = where(place, name, "ue") if uncorrected else ""
            readings.append(judge_uncorrected(name, uncorrected, at_first[name], modules))
            modules = where(place, name, "ce") if hour else ""
            limits = place.limits(CHECK["edac_corrected"])
            readings.append(judge_corrected(name, corrected, hour, minutes, modules, limits))
        return readings

    def _throttling(self, place: Place, now: Moment) -> list[Reading]:
        if self._packages is None:
            self._packages = one_cpu_per_package(place)
        limits, readings = place.limits(CHECK["cpu_throttle"]), []
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
            readings.append(judged("cpu_throttle", level, text, f"package {number}", values=values))
        return readings or [not_applicable("cpu_throttle", "the CPUs do not count it")]
