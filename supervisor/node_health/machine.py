"""The machine: what it is made of, whether it was booted anew, how far its clock is from the controller's, and its
memory modules, CPUs and NVMe drives.

The inventory is what should be the same on all nodes of a job (`supervisor.node_diff` compares it). It is read from
files alone: nothing is executed, nothing is imported, no process's memory map is read (that can block). It is cheap
(about 3 ms on a large node), but the training environment may lie on a network file system: call it where waiting hurts
nobody.

Counters are judged by how they grow; what was counted before we first looked (in this boot) is at most a warning.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from diagnosis.health import CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from supervisor.files import version_of
from supervisor.node_health.contract import CHECK, Baseline, JobInfo, Moment, ProbeContext, Rates, checks_of, recall

# --- the inventory

_FILES: Final = {
    "kernel": "proc/sys/kernel/osrelease",
    "ofed": "sys/module/mlx5_core/version",  # only where it is not the kernel's own
    "efa": "sys/module/efa/version",
    "peermem": "sys/module/nvidia_peermem/version",
    "machine": "sys/class/dmi/id/product_name",
    "bios": "sys/class/dmi/id/bios_version",
    "governor": "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "numa_balancing": "proc/sys/kernel/numa_balancing",
    "cpus": "sys/devices/system/cpu/online",
}
"""Key -> file whose first line is the value."""
_PATTERNS: Final = {
    "os": ("etc/os-release", r'^PRETTY_NAME="?([^"\n]*)'),
    "thp": ("sys/kernel/mm/transparent_hugepage/enabled", r"\[(\w+)\]"),
    # Arm names no model, only implementer and part.
    "cpu": ("proc/cpuinfo", r"^model name\s*:(.*)|^CPU implementer\s*:(.*)(?:\n.+)*\nCPU part\s*:(.*)"),
    "microcode": ("proc/cpuinfo", r"^microcode\s*:(.*)"),
}
"""Key -> file, and the expression whose groups are the value."""

_PACKAGES: Final = {
    "nccl": "nvidia_nccl_cu*",
    "cuda": "nvidia_cuda_runtime*",
    "cudnn": "nvidia_cudnn_cu*",
    **{key: key for key in "torch triton numpy transformers deepspeed flash_attn transformer_engine".split()},
}
"""Key -> distribution in the training environment (`*`: a CUDA version)."""

_LIBRARIES: Final = {"nccl_library": "libnccl.so.2", "cuda_library": "libcuda.so.1"}
"""Key -> library of the system whose link names its version."""
_LIBRARY_FOLDERS: Final = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")

_DRIVER = re.compile(r"NVRM version:.*?Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_DISTRIBUTION = re.compile(r"([A-Za-z0-9_.]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def inventory(place: ProbeContext) -> dict[str, str]:
    """Key -> value, cleaned and bounded; a key that does not apply here is absent. Never raises."""
    found = {key: _first_line(place, path) for key, path in _FILES.items()}
    found |= {
        "driver": driver_version(place),
        "driver_kind": _driver_kind(place),
        "gpus": _gpus(place),
        "infiniband": _infiniband(place),
        "cuda_toolkit": _toolkit(place),
        "memory_gib": _memory_gib(place),
        **{key: _matched(place, *pattern) for key, pattern in _PATTERNS.items()},
        **{key: library_version(place, name) for key, name in _LIBRARIES.items()},
        **packages(place, place.job.python),
        "unbroken": version_of("unbroken", sys.path) if place.live else "",
    }
    return {key: clean_text(value, 200) for key, value in sorted(found.items()) if value}


def driver_version(place: ProbeContext) -> str:
    """Of the NVIDIA kernel module that is loaded; empty when none is."""
    found = _DRIVER.search(place.text("proc/driver/nvidia/version", 1024) or "")
    return found[1] if found else _first_line(place, "sys/module/nvidia/version")


def _driver_kind(place: ProbeContext) -> str:
    text = place.text("proc/driver/nvidia/version", 1024) or ""
    if not _DRIVER.search(text):
        return ""
    return "open" if "Open Kernel Module" in text else "proprietary"


def _first_line(place: ProbeContext, path: str) -> str:
    return (place.text(path, 256) or "").partition("\n")[0].strip()


def _matched(place: ProbeContext, path: str, pattern: str) -> str:
    found = re.search(pattern, place.text(path, 4096) or "", re.MULTILINE)
    return " ".join(group.strip() for group in found.groups("") if group) if found else ""


def _toolkit(place: ProbeContext) -> str:
    """`/usr/local/cuda -> cuda-12.4`, on some by way of `/etc/alternatives`."""
    for path in ("usr/local/cuda", "etc/alternatives/cuda"):
        found = re.search(r"cuda-(\d+\.\d+)", place.link(path) or "")
        if found:
            return found[1]
    return ""


def _memory_gib(place: ProbeContext) -> str:
    found = re.search(r"MemTotal:\s*(\d+) kB", place.text("proc/meminfo", 256) or "")
    return f"{int(found[1]) / (1 << 20):.1f}" if found else ""


def _gpus(place: ProbeContext) -> str:
    """`8 x 10de:2330`: counted on the PCI bus, so that it holds without the driver too."""
    models: Counter[str] = Counter()
    for name in place.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{name}"
        if _first_line(place, f"{folder}/vendor") != "0x10de":
            continue
        if _first_line(place, f"{folder}/class").startswith(("0x0300", "0x0302")):
            models[f"10de:{_first_line(place, f'{folder}/device').removeprefix('0x')}"] += 1
    return _counted(models)


def _infiniband(place: ProbeContext) -> str:
    """`8 x MT_0000000838 28.39.1002`: board and firmware."""
    boards: Counter[str] = Counter()
    for name in place.names("sys/class/infiniband"):
        folder = f"sys/class/infiniband/{name}"
        firmware = _first_line(place, f"{folder}/fw_ver")
        board = _first_line(place, f"{folder}/board_id")
        if firmware or board:
            boards[f"{board} {firmware}".strip()] += 1
    return _counted(boards)


def _counted(things: Counter[str]) -> str:
    return ", ".join(f"{count} x {thing}" for thing, count in sorted(things.items()))


def library_version(place: ProbeContext, name: str) -> str:
    """The version that the link of a system library names: `libcuda.so.1 -> libcuda.so.550.54.15`; empty: not seen."""
    for folder in _LIBRARY_FOLDERS:
        target = place.link(f"{folder}/{name}")
        if target and ".so." in target:
            return target.rpartition(".so.")[2]
    return ""


def packages(place: ProbeContext, python: str) -> dict[str, str]:
    """Versions of the training environment's distributions, by the names of their folders."""
    if not python:
        return {}
    installed: dict[str, str] = {}
    for folder in _site_folders(place, python):
        for name in place.names(folder, "*-info", limit=20_000):
            if match := _DISTRIBUTION.fullmatch(name):
                installed.setdefault(match[1].lower().replace(".", "_"), match[2])
    found = {}
    for key, pattern in _PACKAGES.items():
        stem = pattern.rstrip("*")
        for name, version in installed.items():
            if name == stem or (stem != pattern and name.startswith(stem)):
                found[key] = version
                break
    return found


def _site_folders(place: ProbeContext, python: str) -> list[str]:
    """Its site-packages, then those of the Python that a virtual environment adds, in the order of `sys.path`."""
    prefix = python.rpartition("/bin/")[0].strip("/")
    prefixes = [f"{prefix}/local", prefix]
    settings = place.text(f"{prefix}/pyvenv.cfg", 4096) or ""
    if re.search(r"^include-system-site-packages\s*=\s*true", settings, re.MULTILINE | re.IGNORECASE):
        home = re.search(r"^home\s*=\s*/?(.*)/bin\s*$", settings, re.MULTILINE)
        prefixes += [f"{home[1]}/local", home[1]] if home else []
    folders = []
    for one in prefixes:
        for library in ("lib", "lib64"):
            for version in place.names(f"{one}/{library}", "python3*"):
                folders += [f"{one}/{library}/{version}/{kind}-packages" for kind in ("site", "dist")]
        folders.append(f"{one}/lib/python3/dist-packages")
    return list(dict.fromkeys(folders))


# --- its boot and its clock

REBOOTED: Final = CHECK["node_rebooted"]
OFFSET: Final = CHECK["clock_offset"]

KEEP_EVERY_S: Final = 600.0


class Boot(NamedTuple):
    """What is known of this boot and the one before."""

    uptime_s: float
    before_at: float | None
    """When the node was last looked at in an earlier boot; None when it never was."""


class _Seen(Frozen, frozen=True, kw_only=True):
    """What is kept over boots."""

    boot_id: str = ""
    at: float | None = None
    before_at: float | None = None


def read_boot(place: ProbeContext, wall: float) -> Boot | None:
    """Also keeps, now and then, that the node was looked at."""
    try:
        uptime_s = float((place.text("proc/uptime", 64) or "").split()[0])
    except (ValueError, IndexError):
        return None
    kept, boot_id = recall(place, "machine", _Seen, any_boot=True), place.boot_id
    before_at = kept.before_at if kept.boot_id == boot_id else kept.at
    if boot_id and (kept.boot_id != boot_id or wall - (kept.at or 0.0) > KEEP_EVERY_S):
        place.keep("machine", _Seen(boot_id=boot_id, at=wall, before_at=before_at))
    return Boot(uptime_s, before_at)


def judge_reboot(boot: Boot | None, wall: float, limits: Mapping[str, float]) -> CheckResult:
    if boot is None:
        return unknown(REBOOTED.id, "the uptime cannot be read")
    values = {"uptime_s": boot.uptime_s}
    if boot.before_at is None or boot.uptime_s > limits["recent_s"]:
        return healthy(REBOOTED.id, values=values)
    text = f"booted anew at {_utc(wall - boot.uptime_s)}, last looked at before that at {_utc(boot.before_at)}"
    return unhealthy(REBOOTED.id, text, level="warning", values=values)


def judge_offset(job: JobInfo, limits: Mapping[str, float]) -> CheckResult:
    if job.clock_offset_s is None:
        return not_applicable(OFFSET.id, "no controller to compare with")
    offset_s, error_s = job.clock_offset_s, job.clock_error_s
    certain_s = abs(offset_s) - error_s
    way = "ahead of" if offset_s > 0 else "behind"
    text = f"{abs(offset_s):.3g} s {way} the controller's, give or take {error_s:.2g} s"
    level: Level = "critical" if certain_s > limits["critical_s"] else "warning"
    values = {"offset_s": offset_s, "error_s": error_s}
    return judged(OFFSET.id, level if certain_s > limits["warning_s"] else None, text, values=values)


def _utc(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


class MachineProbe:
    name = "machine"
    checks = checks_of("machine")
    every_s = 60.0
    deadline_s = 20.0
    once_s = 5.0

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        return [
            judge_reboot(read_boot(place, now.wall), now.wall, place.limits(REBOOTED)),
            judge_offset(place.job, place.limits(OFFSET)),
        ]


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


class HardwareProbe:
    name = "hardware"
    checks = checks_of("hardware")
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
