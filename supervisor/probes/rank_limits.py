"""What the ranks run under: the size of /dev/shm, and how much they may lock and open."""

from __future__ import annotations

import os
import re
from typing import Final

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Word
from diagnosis.taxonomy import FailureClass
from supervisor.probes.probe import Place

MIB: Final = 1 << 20
GIB: Final = 1 << 30
MOST: Final = 16
"""Ranks whose limits are read."""

# fmt: off
CHECKS: Final = (
    Check(id="shm_size", failure_class=FailureClass.SHM_EXHAUSTED, scope="job", when="periodic",
        what="/dev/shm is too small for the ranks (NCCL, data loaders)",
        source="statvfs /dev/shm as the ranks see it; of a captured tree /proc/mounts",
        threshold="below {gib_per_rank} GiB for each rank, or for each GPU while none runs",
        limits={"gib_per_rank": 1}),
    Check(id="shm_free", failure_class=FailureClass.SHM_EXHAUSTED, scope="job", looks=2,
        what="/dev/shm is full: writing there is a bus error",
        source="statvfs /dev/shm as the ranks see it",
        threshold="below {percent} % and {mib} MiB free: warning; below {critical_percent} % and {critical_mib} MiB:"
        " critical",
        limits={"percent": 5, "mib": 1024, "critical_percent": 1, "critical_mib": 64}),
    Check(id="limit_memlock", failure_class=FailureClass.NCCL_SETUP, scope="job", when="periodic", limits={"gib": 16},
        what="ranks may lock too little memory for RDMA (ibv_reg_mr fails)",
        source="/proc/PID/limits, CapEff of /proc/PID/status",
        threshold="a limit below {gib} GiB without CAP_IPC_LOCK, on a node with RDMA devices"),
    Check(id="limit_open_files", failure_class=FailureClass.CONFIG_OR_ARGUMENT_ERROR, scope="job", when="periodic",
        what="ranks may open too few files",
        source="/proc/PID/limits, size of /proc/PID/fd",
        # 1024 is what most distributions give, and most jobs live with it: only less, or almost all used, is trouble.
        threshold="a limit below {files}, or {percent} % of it in use",
        limits={"files": 1024, "percent": 90}),
)
# fmt: on


class Shm(Word, frozen=True, kw_only=True):
    size: int
    """Bytes; of a tmpfs the limit, not what is in use."""
    free: int | None = None
    """None in a captured tree."""


def read_shm(place: Place) -> Shm | None:
    """As the first rank sees it (it may live in a container of its own), else as we do; None where there is none."""
    if not place.live:
        return _shm_of_mounts(place)
    for path in [*(f"/proc/{pid}/root/dev/shm" for pid in sorted(place.job.ranks)[:1]), "/dev/shm"]:
        try:
            room = os.statvfs(path)
        except OSError:
            continue
        if room.f_blocks:
            return Shm(size=room.f_blocks * room.f_frsize, free=room.f_bavail * room.f_frsize)
    return None


_UNITS: Final = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB}


def _shm_of_mounts(place: Place) -> Shm | None:
    text = place.text("proc/mounts") or place.text("proc/self/mounts") or place.text("proc/1/mounts") or ""
    mount = re.search(r"^\S+ /dev/shm tmpfs (\S+)", text, re.MULTILINE)
    size = re.search(r"(?:^|,)size=(\d{1,18})([kmg]?)(?:,|$)", mount[1]) if mount else None
    return Shm(size=int(size[1]) * _UNITS[size[2]]) if size else None


def judge_shm(shm: Shm | None, ranks: int, limits: dict[str, dict[str, float]]) -> list[Reading]:
    """Both checks of /dev/shm; `ranks`: how many it is for (or GPUs; 0: it need not be large)."""
    if shm is None:
        why = "no /dev/shm here"
        return [not_applicable("shm_size", why), not_applicable("shm_free", why)]
    size, free = shm.size / MIB, shm.free
    text = f"/dev/shm has {size:.0f} MiB for {ranks} rank{'s' if ranks > 1 else ''}"
    low = size < 1024 * limits["shm_size"]["gib_per_rank"] * ranks
    sized = judged("shm_size", "warning" if low else None, text)
    if ranks == 0:
        sized = not_applicable("shm_size", f"no rank and no GPU; /dev/shm has {size:.0f} MiB")
    if free is None:
        return [sized, unknown("shm_free", "the free space is not in a captured tree")]
    text = f"{free / MIB:.0f} of {size:.0f} MiB free in /dev/shm"
    values = {"free_bytes": free, "size_bytes": shm.size}
    at = limits["shm_free"]
    few = free < min(shm.size * at["critical_percent"] / 100, at["critical_mib"] * MIB)
    low = free < min(shm.size * at["percent"] / 100, at["mib"] * MIB)
    level: Level | None = "critical" if few else "warning" if low else None
    return [sized, judged("shm_free", level, text, values=values)]


_CAP_IPC_LOCK: Final = 1 << 14
UNLIMITED: Final = float("inf")


class Limits(Word, frozen=True, kw_only=True):
    """Soft limits of one process."""

    pid: int
    memlock: float
    """Bytes."""
    files: float
    may_lock: bool
    """It has CAP_IPC_LOCK: the limit on locked memory does not bind it."""
    files_open: int = 0
    """0 where the kernel (before 6.2) does not tell for nothing."""


def read_limits(place: Place, pid: int | str) -> Limits | None:
    text, status = place.text(f"proc/{pid}/limits"), place.text(f"proc/{pid}/status")
    soft = dict(re.findall(r"^(Max locked memory|Max open files) +(\d+|unlimited) ", text or "", re.MULTILINE))
    if len(soft) < 2:
        return None
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})", status or "", re.MULTILINE)
    try:
        # The size of this folder is the number of descriptors; of a captured one it is nonsense.
        files_open = os.stat(place.path(f"proc/{pid}/fd")).st_size if place.live else 0
    except OSError:
        files_open = 0
    return Limits(
        pid=int(pid) if str(pid).isdigit() else 0,
        memlock=_bound(soft["Max locked memory"]),
        files=_bound(soft["Max open files"]),
        may_lock=bool(capabilities and int(capabilities[1], 16) & _CAP_IPC_LOCK),
        files_open=files_open,
    )


def _bound(text: str) -> float:
    return UNLIMITED if text == "unlimited" else float(text)


def judge_memlock(found: list[Limits], has_rdma: bool, limits: dict[str, float]) -> Reading:
    if not has_rdma:
        return not_applicable("limit_memlock", "no RDMA device")
    low = [one for one in found if not one.may_lock and one.memlock < limits["gib"] * GIB]
    if low:
        least = min(one.memlock for one in low)
        text = f"{len(low)} of {len(found)} processes may lock only {least / MIB:g} MiB"
        return unhealthy("limit_memlock", text, level="warning", pids=tuple(one.pid for one in low if one.pid))
    return healthy("limit_memlock", text="enough memory may be locked")


def judge_open_files(found: list[Limits], limits: dict[str, float]) -> Reading:
    fullest = max(found, key=lambda one: one.files_open / one.files if one.files else 1.0)
    least = min(one.files for one in found)
    pids = (fullest.pid,) if fullest.pid else ()
    used = f"{fullest.files_open} of {fullest.files:g} descriptors"
    if fullest.files_open >= fullest.files * limits["percent"] / 100:
        return unhealthy("limit_open_files", f"a rank has {used} open", level="warning", pids=pids)
    text = used if fullest.files_open and least >= limits["files"] else f"{least:g} files may be opened"
    return judged("limit_open_files", "warning" if least < limits["files"] else None, text, pids=pids)


def look(place: Place, limits: dict[str, dict[str, float]]) -> list[Reading]:
    """Readings of all checks here."""
    ranks = len(place.job.ranks) or place.site.expect.gpus or len(place.names("proc/driver/nvidia/gpus"))
    readings = judge_shm(read_shm(place), ranks, limits)
    found = [one for pid in sorted(place.job.ranks)[:MOST] if (one := read_limits(place, pid))]
    if not found and place.live and os.geteuid() != 0:
        # A user's own shell or job step: ranks started from it would have its limits. Root's tell nothing of a job's.
        found = [one for one in (read_limits(place, "self"),) if one]
    if not found:
        why = "no rank of a job here whose limits could be read"
        return [*readings, not_applicable("limit_memlock", why), not_applicable("limit_open_files", why)]
    has_rdma = bool(place.names("sys/class/infiniband"))
    return [
        *readings,
        judge_memlock(found, has_rdma, limits["limit_memlock"]),
        judge_open_files(found, limits["limit_open_files"]),
    ]
