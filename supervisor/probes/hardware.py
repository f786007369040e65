"""Memory modules, CPUs and drives of the node: EDAC counters, throttling, CPUs gone offline, crash records, NVMe, BMC.

Counters are judged by how they grow; what was counted before we first looked (in this boot) is at most a warning.
"""

from __future__ import annotations

import os
import re
from typing import Final

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Word, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes import edac, nvme, sel
from supervisor.probes.counters import Rates, most_ever
from supervisor.probes.probe import Moment, Place

# fmt: off
CHECKS: Final = (
    Check(id="cpu_throttle", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", looks=3,
        what="a CPU package is throttled by its temperature",
        source="/sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_{total_time_ms,count}",
        threshold="{percent} % of the time, or {per_minute} times a minute where the time is not told",
        limits={"percent": 10, "per_minute": 30}),
    Check(id="cpus_online", failure_class=FailureClass.CPU_OR_MEMORY_HW, scope="node", when="periodic",
        what="CPUs went offline",
        source="/sys/devices/system/cpu/online",
        threshold="fewer than this node had, and not for want of hyper-threading"),
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


def judge_throttle(
    device: str, count: int, grown_ms: int | None, grown: int, window_s: float, limits: dict[str, float]
) -> Reading:
    """`count`: throttles since boot; `grown_ms`, `grown`: the same of the last `window_s` (None: not told)."""
    if grown_ms is not None:
        share = round(grown_ms / window_s / 10, 2)
        much, text, values = share >= limits["percent"], f"{share:g} % of the time", {"throttled_percent": share}
    else:
        rate = round(grown / window_s * 60, 2)
        much, text, values = rate >= limits["per_minute"], f"{rate:g} times a minute", {"throttles_per_minute": rate}
    level: Level | None = "warning" if much else None
    return judged("cpu_throttle", level, f"throttled {text}", device, values={"throttles": count, **values})


def judge_online(online: int, present: int, had: int, hyper_threading: str) -> Reading:
    """`had`: the most CPUs this node ever had online; `hyper_threading`: text of `smt/control`."""
    values = {"online": online, "present": present}
    text = f"{online} of {present} CPUs online"
    if online < had and not (hyper_threading != "on" and online * 2 >= had):
        return unhealthy("cpus_online", f"{text}, {had} before", level="warning", values=values)
    return healthy("cpus_online", text=text, values=values)


class Frequency(Word, frozen=True, kw_only=True):
    driver: str
    governor: str
    allowed_khz: int
    highest_khz: int


def read_frequencies(place: Place) -> list[Frequency]:
    base = f"{_CPUS}/cpufreq"
    return [
        Frequency(
            driver=(place.text(f"{base}/{name}/scaling_driver", 64) or "").strip(),
            governor=clean_text((place.text(f"{base}/{name}/scaling_governor", 64) or "").strip(), 40),
            allowed_khz=place.number(f"{base}/{name}/scaling_max_freq") or 0,
            highest_khz=place.number(f"{base}/{name}/cpuinfo_max_freq") or 0,
        )
        for name in place.names(base, "policy[0-9]*")
    ]


def judge_frequency(found: list[Frequency], limits: dict[str, float]) -> Reading:
    found = [one for one in found if min(one.allowed_khz, one.highest_khz) > 0]
    if not found:
        return not_applicable("cpu_frequency", "the CPUs' frequency is not the kernel's to set")
    scaling = ("intel_pstate", "amd-pstate-epp")
    slow = [one for one in found if one.allowed_khz < one.highest_khz * limits["percent"] / 100]
    lowest = [one for one in found if one.governor == "powersave" and one.driver not in scaling]
    governors = ", ".join(sorted({one.governor for one in found}))
    mhz = min(one.allowed_khz for one in found) / 1000
    text = f"governor {governors}, up to {mhz:.0f} MHz allowed"
    if slow or lowest:
        text = f"{len(slow or lowest)} of {len(found)} CPUs: {text}"
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
    checks = (*edac.CHECKS, *CHECKS, *nvme.CHECKS, sel.CHECK)
    every_s = 30.0
    deadline_s = 40.0
    """With time for the SMART logs of many drives and for ipmitool, which are only asked before a job."""

    def __init__(self) -> None:
        self._edac = edac.EdacLooks()
        self._packages: list[int] | None = None
        self._rates = Rates()
        self._had_cpus = 0

    def look(self, place: Place, now: Moment) -> list[Reading]:
        readings = [
            *self._edac.look(place, now),
            *self._throttling(place, now),
            self._online(place),
            look_at_crashes(place, now),
            *nvme.look(place),
        ]
        if place.preflight:
            readings.append(judge_frequency(read_frequencies(place), place.limits(CHECK["cpu_frequency"])))
            readings += sel.look(place, now)
        return readings

    def _throttling(self, place: Place, now: Moment) -> list[Reading]:
        if self._packages is None:
            self._packages = one_cpu_per_package(place)
        readings = []
        for number, cpu in enumerate(self._packages):
            base = f"{_CPUS}/cpu{cpu}/thermal_throttle/package_throttle"
            count, total_ms = place.number(f"{base}_count"), place.number(f"{base}_total_time_ms")
            if count is None:
                continue
            self._rates.add((cpu, "ms"), total_ms or 0, now.mono)
            self._rates.add(cpu, count, now.mono)
            grown_ms, grown = (self._rates.increase(key, self.every_s, now.mono) for key in ((cpu, "ms"), cpu))
            told_ms = None if total_ms is None else grown_ms  # not before Linux 5.6
            limits = place.limits(CHECK["cpu_throttle"])
            readings.append(judge_throttle(f"package {number}", count, told_ms, grown, self.every_s, limits))
        return readings or [not_applicable("cpu_throttle", "the CPUs do not count it")]

    def _online(self, place: Place) -> Reading:
        online, present = (len(parse_cpus(place.text(f"{_CPUS}/{name}") or "")) for name in ("online", "present"))
        if not online:
            return not_applicable("cpus_online", "the kernel does not tell which CPUs are online")
        if online > self._had_cpus:
            self._had_cpus = most_ever(place, "cpus", online)
        return judge_online(online, present, self._had_cpus, (place.text(f"{_CPUS}/smt/control") or "on").strip())
