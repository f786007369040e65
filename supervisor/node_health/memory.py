"""Memory of the host: what is left, what waits for it, what was killed for want of it; and what the ranks may use.

`/proc/meminfo`, `/proc/pressure`, `/proc/vmstat`; the ranks' cgroups, `/dev/shm` and limits.
"""

from __future__ import annotations

import os
import re
from typing import Final

import msgspec

from diagnosis.health import CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen
from supervisor.node_health.contract import Moment, ProbeContext, checks_of

MIB: Final = 1 << 20
GIB: Final = 1 << 30
MOST: Final = 16
"""Ranks whose limits are read."""


# --- memory cgroups: how close to the limit, and what was killed for it


def parse_table(text: str) -> dict[str, int]:
    """`NAME[:] NUMBER [unit]` lines, as of /proc/meminfo (kB), /proc/vmstat, memory.stat and memory.events."""
    table = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        number = rest.split(None, 1)[:1]
        if number and number[0].isdecimal() and len(number[0]) < 20:
            table[name.rstrip(":")] = int(number[0])
    return table


class Cgroup(Frozen, frozen=True, kw_only=True):
    """Where the memory of some ranks is counted: their innermost cgroup with a limit, else their own."""

    path: str
    usage: str
    """File with the bytes in use."""
    limit: int | None
    stat: str
    counts: tuple[str, ...]
    """Files that count the kills: in v2 one counts all beneath it, in v1 each cgroup counts its own."""
    pids: tuple[int, ...] = ()


MOST_GROUPS: Final = 64
"""More than a node has ranks."""
_ROOT: Final = "sys/fs/cgroup"
_NO_LIMIT: Final = 1 << 60


def chain(place: ProbeContext, pid: int) -> tuple[bool, list[str]]:
    """Whether it is cgroup v1, and the folders of a process' cgroup and of all above it; none where nothing tells."""
    lines = [line.split(":", 2) for line in (place.text(f"proc/{pid}/cgroup") or "").splitlines()]
    paths = {kinds: path for _, kinds, path in (line for line in lines if len(line) == 3)}
    first = next((path for kinds, path in paths.items() if "memory" in kinds.split(",")), None)
    base, path = (f"{_ROOT}/memory", first) if first is not None else (_ROOT, paths.get(""))
    if path is None:
        return False, []
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not os.path.isdir(place.path("/".join([base, *parts]))):
        parts = []  # inside a container its own cgroup is what is mounted as the root
    return first is not None, ["/".join([base, *parts[:end]]) for end in range(len(parts), -1, -1)]


def cgroup_of(place: ProbeContext, pid: int) -> Cgroup | None:
    """None when /proc does not tell, or its cgroup is not to be seen from here."""
    v1, folders = chain(place, pid)
    limit_name, count_name = ("memory.limit_in_bytes", "memory.oom_control") if v1 else ("memory.max", "memory.events")
    limits = [_limit(place, f"{folder}/{limit_name}") for folder in folders]
    limited = (depth for depth, limit in enumerate(limits) if limit is not None)
    counted = (depth for depth, folder in enumerate(folders) if os.path.exists(place.path(f"{folder}/{count_name}")))
    depth = next(limited, next(counted, None))
    if depth is None:
        return None
    folder = folders[depth]
    return Cgroup(
        path=folder.removeprefix(_ROOT).removeprefix("/memory" if v1 else "") or "/",
        usage=f"{folder}/{'memory.usage_in_bytes' if v1 else 'memory.current'}",
        limit=limits[depth],
        stat=f"{folder}/memory.stat",
        counts=tuple(f"{each}/{count_name}" for each in (folders[: depth + 1] if v1 else [folder])),
        pids=(pid,),
    )


def _limit(place: ProbeContext, path: str) -> int | None:
    """None for no limit; v1 writes an absurdly high number for that, v2 `max`."""
    limit = place.number(path)
    return limit if limit is not None and limit < _NO_LIMIT else None


def merged(before: list[Cgroup], found: list[Cgroup]) -> list[Cgroup]:
    """One for each path, with all files that count its kills, and the ranks that are in it (were, when none is)."""
    joined = {group.path: group for group in before}
    ranks: dict[str, tuple[int, ...]] = {}
    for group in found:
        same = joined.get(group.path, group)
        ranks[group.path] = pids = ranks.get(group.path, ()) + group.pids
        counts = tuple(dict.fromkeys(same.counts + group.counts))
        joined[group.path] = msgspec.structs.replace(group, counts=counts, pids=pids)
    return list(joined.values())[-MOST_GROUPS:]


def unreclaimable(used: int, stat: dict[str, int]) -> int:
    """Bytes of `used` that cannot be given back: page cache can, shared memory (which is counted in it) cannot."""
    if "total_cache" in stat:
        return used - max(0, stat["total_cache"] - stat.get("total_shmem", 0))
    return used - max(0, stat.get("file", 0) - stat.get("shmem", 0)) - stat.get("slab_reclaimable", 0)


def judge_use(group: Cgroup, used: int, limits: dict[str, float]) -> CheckResult:
    """`used`: bytes, without what can be reclaimed."""
    assert group.limit is not None
    share = 100 * used / group.limit if group.limit else 0.0
    text = f"{used / GIB:.1f} of {group.limit / GIB:.1f} GiB in use"
    values = {"used_bytes": used, "limit_bytes": group.limit}
    level: Level | None = "warning" if share >= limits["percent"] else None
    return judged("cgroup_memory", level, text, group.path, values=values)


def judge_kills(grew: int, path: str, pids: tuple[int, ...] = ()) -> CheckResult:
    """`grew`: kills since the look before; `pids`: the rank whose cgroup it is, where there is only one."""
    text = f"{grew} processes of the job killed for want of memory since the look before"
    return judged("cgroup_oom_kill", "critical" if grew else None, text, path, pids=pids, values={"kills": grew})


def look_at_group(place: ProbeContext, group: Cgroup, limits: dict[str, float]) -> tuple[int | None, list[CheckResult]]:
    """Kills counted so far (None: the cgroup is gone) and how full it is."""
    counts = [parse_table(text).get("oom_kill", 0) for path in group.counts if (text := place.text(path)) is not None]
    if not counts:
        return None, []
    used = place.number(group.usage)
    if group.limit is None or used is None:
        return sum(counts), [not_applicable("cgroup_memory", "no memory limit", group.path)]
    if used >= group.limit * limits["percent"] / 100:  # most of the time it is not: `memory.stat` costs the kernel more
        used = unreclaimable(used, parse_table(place.text(group.stat) or ""))
    return sum(counts), [judge_use(group, used, limits)]


# --- /dev/shm


class Shm(Frozen, frozen=True, kw_only=True):
    size: int
    """Bytes; of a tmpfs the limit, not what is in use."""
    free: int | None = None
    """None in a captured tree."""


def read_shm(place: ProbeContext) -> Shm | None:
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


def _shm_of_mounts(place: ProbeContext) -> Shm | None:
    text = place.text("proc/mounts") or place.text("proc/self/mounts") or place.text("proc/1/mounts") or ""
    mount = re.search(r"^\S+ /dev/shm tmpfs (\S+)", text, re.MULTILINE)
    size = re.search(r"(?:^|,)size=(\d{1,18})([kmg]?)(?:,|$)", mount[1]) if mount else None
    return Shm(size=int(size[1]) * _UNITS[size[2]]) if size else None


def judge_shm(shm: Shm | None, ranks: int, limits: dict[str, dict[str, float]]) -> list[CheckResult]:
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


# --- limits of processes

_CAP_IPC_LOCK: Final = 1 << 14


class RankLimits(Frozen, frozen=True, kw_only=True):
    """Soft limits of one process."""

    pid: int
    memlock: float
    """Bytes."""
    files: float
    may_lock: bool
    """It has CAP_IPC_LOCK: the limit on locked memory does not bind it."""
    files_open: int = 0
    """0 where the kernel (before 6.2) does not tell for nothing."""


def read_limits(place: ProbeContext, pid: int | str) -> RankLimits | None:
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
    return RankLimits(
        pid=int(pid) if str(pid).isdigit() else 0,
        memlock=float(soft["Max locked memory"].replace("unlimited", "inf")),
        files=float(soft["Max open files"].replace("unlimited", "inf")),
        may_lock=bool(capabilities and int(capabilities[1], 16) & _CAP_IPC_LOCK),
        files_open=files_open,
    )


def judge_memlock(found: list[RankLimits], has_rdma: bool, limits: dict[str, float]) -> CheckResult:
    if not has_rdma:
        return not_applicable("limit_memlock", "no RDMA device")
    low = [one for one in found if not one.may_lock and one.memlock < limits["gib"] * GIB]
    if not low:
        return healthy("limit_memlock", text="enough memory may be locked")
    text = f"{len(low)} of {len(found)} processes may lock only {min(one.memlock for one in low) / MIB:g} MiB"
    return unhealthy("limit_memlock", text, level="warning", pids=tuple(one.pid for one in low if one.pid))


def judge_open_files(found: list[RankLimits], limits: dict[str, float]) -> CheckResult:
    fullest = max(found, key=lambda one: one.files_open / one.files if one.files else 1.0)
    least = min(one.files for one in found)
    pids = (fullest.pid,) if fullest.pid else ()
    used = f"{fullest.files_open} of {fullest.files:g} descriptors"
    if fullest.files_open >= fullest.files * limits["percent"] / 100:
        return unhealthy("limit_open_files", f"a rank has {used} open", level="warning", pids=pids)
    text = used if fullest.files_open and least >= limits["files"] else f"{least:g} files may be opened"
    return judged("limit_open_files", "warning" if least < limits["files"] else None, text, pids=pids)


def look_at_ranks(place: ProbeContext, limits: dict[str, dict[str, float]]) -> list[CheckResult]:
    """Results of all checks of ranks."""
    ranks = len(place.job.ranks) or place.site.expect.gpus or len(place.names("proc/driver/nvidia/gpus"))
    results = judge_shm(read_shm(place), ranks, limits)
    found = [one for pid in sorted(place.job.ranks)[:MOST] if (one := read_limits(place, pid))]
    if not found and place.live and os.geteuid() != 0:
        # A user's own shell or job step: ranks started from it would have its limits. Root's tell nothing of a job's.
        found = [one for one in (read_limits(place, "self"),) if one]
    if not found:
        why = "no rank of a job here whose limits could be read"
        return [*results, not_applicable("limit_memlock", why), not_applicable("limit_open_files", why)]
    has_rdma = bool(place.names("sys/class/infiniband"))
    return [
        *results,
        judge_memlock(found, has_rdma, limits["limit_memlock"]),
        judge_open_files(found, limits["limit_open_files"]),
    ]


def judge_available(memory: dict[str, int], limits: dict[str, float]) -> CheckResult:
    total, left = memory.get("MemTotal", 0) / 1024, memory.get("MemAvailable", -1024) / 1024
    if total <= 0 or left < 0:
        return not_applicable("memory_available", "/proc/meminfo has no such value")
    values = {"total_mib": round(total), "available_mib": round(left)}
    for name, key in (("AnonHugePages", "anon_huge_mib"), ("Hugetlb", "hugetlb_mib"), ("Shmem", "shmem_mib")):
        if name in memory:
            values[key] = memory[name] // 1024
    text = f"{left:.0f} of {total:.0f} MiB available"
    low = left < min(total * limits["percent"] / 100, limits["mib"])
    level: Level | None = "critical" if left < limits["critical_mib"] else "warning" if low else None
    return judged("memory_available", level, text, values=values)


_PRESSURE = re.compile(r"^(some|full) .*?avg60=(\d{1,3}\.?\d*) avg300=(\d{1,3}\.?\d*)", re.MULTILINE)


def judge_pressure(check: str, text: str | None, limits: dict[str, float], *, ranks_run: bool = True) -> CheckResult:
    """`text`: of /proc/pressure/*, in percent of the time; None where the kernel has no such file or it is off."""
    shares = {kind: (float(avg60), float(avg300)) for kind, avg60, avg300 in _PRESSURE.findall(text or "")}
    kind = next(iter(limits))
    if kind not in shares:
        return not_applicable(check, "the kernel does not measure pressure")
    minute, minutes = shares[kind]
    values = {f"{name}_avg60_percent": share[0] for name, share in shares.items()}
    summary = f"{kind} avg60={minute:g} % avg300={minutes:g} %"
    lasting = minute if check == "memory_pressure" else min(minute, minutes)
    high = lasting > limits[kind] and (ranks_run or check != "io_pressure")
    return judged(check, "warning" if high else None, summary, values=values)


class MemoryProbe:
    name = "memory"
    checks = checks_of("memory")
    every_s = 10.0
    deadline_s = 5.0
    once_s = 5.0

    def __init__(self) -> None:
        self._limits: dict[str, dict[str, float]] = {}
        self._kills: dict[str, int] = {}
        """Kills counted up to the look before, by cgroup; of the host under the name `""`."""
        self._groups: list[Cgroup] = []
        self._known: dict[int, int] = {}
        """The ranks that `_groups` was found for."""

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:  # noqa: ARG002
        limits = self._limits = {check.id: place.limits(check) for check in self.checks}
        memory = parse_table(place.text("proc/meminfo") or "")
        results = [judge_available(memory, limits["memory_available"])]
        for kind in ("memory", "io"):
            check = f"{kind}_pressure"
            text = place.text(f"proc/pressure/{kind}")
            results.append(judge_pressure(check, text, limits[check], ranks_run=bool(place.job.ranks)))
        kills, in_groups = self._look_at_groups(place)
        return [*results, *kills, self._host_kills(place, in_groups), *look_at_ranks(place, limits)]

    def _look_at_groups(self, place: ProbeContext) -> tuple[list[CheckResult], int]:
        """The ranks' cgroups; and how many were killed in them since the look before."""
        if place.job.ranks != self._known:
            self._known = dict(place.job.ranks)
            found = [group for pid in sorted(self._known) if (group := cgroup_of(place, pid))]
            # A killed rank is gone at once, its cgroup is not: the old ones are looked at for as long as they exist.
            self._groups = merged(self._groups, found)
        results: list[CheckResult] = []
        total = 0
        for group in list(self._groups):
            counted, of_group = look_at_group(place, group, self._limits["cgroup_memory"])
            if counted is None:
                self._groups.remove(group)
                self._kills.pop(group.path, None)
            else:
                grew = max(0, counted - self._kills.get(group.path, counted))
                total += grew
                self._kills[group.path] = counted
                pids = group.pids if len(group.pids) == 1 else ()
                of_group.append(judge_kills(grew, group.path, pids))
            results += of_group
        if not results:
            why = "no rank of a job here" if not self._known else "the memory cgroups of the ranks cannot be seen"
            results = [not_applicable("cgroup_oom_kill", why), not_applicable("cgroup_memory", why)]
        return results, total

    def _host_kills(self, place: ProbeContext, in_groups: int) -> CheckResult:
        found = re.search(r"^oom_kill (\d{1,19})$", place.text("proc/vmstat") or "", re.MULTILINE)
        if found is None:
            return not_applicable("host_oom_kill", "the kernel does not count them")
        counted = int(found[1])
        grew = counted - self._kills.get("", counted) - in_groups
        self._kills[""] = counted
        text = f"the kernel killed {max(0, grew)} processes for want of memory since the look before"
        return judged("host_oom_kill", "warning" if grew > 0 else None, text, values={"kills": counted})
