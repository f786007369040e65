"""What this node is made of: versions and sizes that should be the same on all nodes of a job.

Read from files alone: nothing is executed, nothing is imported, no process's memory map is read (that can block).
`supervisor.node_diff` compares it across the nodes. It is cheap (about 3 ms on a large node), but the
training environment may lie on a network file system: call it where waiting hurts nobody.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Final

from diagnosis.signals import clean_text
from supervisor.files import version_of
from supervisor.node_health.contract import ProbeContext

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
