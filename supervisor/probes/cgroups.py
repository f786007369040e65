"""The memory cgroups of the ranks, v1 and v2: how close to the limit, and what was killed for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import msgspec

from diagnosis.health import Check, Level, Reading, judged, not_applicable
from diagnosis.signals import Word
from diagnosis.taxonomy import FailureClass
from supervisor.probes.probe import Place

GIB: Final = 1 << 30

# fmt: off
CHECKS: Final = (
    Check(id="cgroup_oom_kill", failure_class=FailureClass.HOST_OOM, scope="job", calm_looks=6,
        what="the memory limit of the job killed a process",
        source="memory.events (cgroup v2), memory.oom_control (v1) of the ranks' cgroups",
        threshold="oom_kill grew"),
    Check(id="cgroup_memory", failure_class=FailureClass.HOST_OOM, scope="job", looks=2, limits={"percent": 95},
        what="the job is close to its memory limit",
        source="memory.current, memory.max, memory.stat of the ranks' cgroups",
        threshold="{percent} % of the limit in use, without what can be reclaimed"),
)
# fmt: on


def parse_table(text: str) -> dict[str, int]:
    """`NAME[:] NUMBER [unit]` lines, as of /proc/meminfo (kB), /proc/vmstat, memory.stat and memory.events."""
    table = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        number = rest.split(None, 1)[:1]
        if number and number[0].isdecimal() and len(number[0]) < 20:
            table[name.rstrip(":")] = int(number[0])
    return table


class Cgroup(Word, frozen=True, kw_only=True):
    """Where the memory of some ranks is counted: their innermost cgroup with a limit, else their own."""

    path: str
    usage: str
    """File with the bytes in use."""
    limit: int | None
    stat: str
    counts: tuple[str, ...]
    """Files that count the kills: in v2 one counts all beneath it, in v1 each cgroup counts its own."""
    pids: tuple[int, ...] = ()


MOST: Final = 64
"""Cgroups looked at; more than a node has ranks."""
_ROOT: Final = "sys/fs/cgroup"
_NO_LIMIT: Final = 1 << 60


def chain(place: Place, pid: int, controller: str) -> tuple[bool, list[str]]:
    """Whether it is cgroup v1, and the folders of a process' cgroup and of all above it; none where nothing tells."""
    lines = [line.split(":", 2) for line in (place.text(f"proc/{pid}/cgroup") or "").splitlines()]
    paths = {kinds: path for _, kinds, path in (line for line in lines if len(line) == 3)}
    first = next((path for kinds, path in paths.items() if controller in kinds.split(",")), None)
    base, path = (f"{_ROOT}/{controller}", first) if first is not None else (_ROOT, paths.get(""))
    if path is None:
        return False, []
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not os.path.isdir(place.path("/".join([base, *parts]))):
        parts = []  # inside a container its own cgroup is what is mounted as the root
    return first is not None, ["/".join([base, *parts[:end]]) for end in range(len(parts), -1, -1)]


def find(place: Place, pid: int) -> Cgroup | None:
    """None when /proc does not tell, or its cgroup is not to be seen from here."""
    v1, folders = chain(place, pid, "memory")
    limit_name, count_name = ("memory.limit_in_bytes", "memory.oom_control") if v1 else ("memory.max", "memory.events")
    limits = [_limit(place, f"{folder}/{limit_name}") for folder in folders]
    limited = (depth for depth, limit in enumerate(limits) if limit is not None)
    counted = (depth for depth, folder in enumerate(folders) if os.path.exists(place.path(f"{folder}/{count_name}")))
    depth = next(limited, next(counted, None))
    if depth is None:
        return None
    folder = folders[depth]
    return Cgroup(
        path=_shown(folder, "memory" if v1 else ""),
        usage=f"{folder}/{'memory.usage_in_bytes' if v1 else 'memory.current'}",
        limit=limits[depth],
        stat=f"{folder}/memory.stat",
        counts=tuple(f"{each}/{count_name}" for each in (folders[: depth + 1] if v1 else [folder])),
        pids=(pid,),
    )


def _shown(folder: str, controller: str) -> str:
    return folder.removeprefix(_ROOT).removeprefix(f"/{controller}" if controller else "") or "/"


def _limit(place: Place, path: str) -> int | None:
    """None for no limit; v1 writes an absurdly high number for that, v2 `max`."""
    limit = place.number(path)
    return limit if limit is not None and limit < _NO_LIMIT else None


def join(before: list[Cgroup], found: list[Cgroup]) -> list[Cgroup]:
    """One for each path, with all files that count its kills, and the ranks that are in it (were, when none is)."""
    joined = {group.path: group for group in before}
    ranks: dict[str, tuple[int, ...]] = {}
    for group in found:
        same = joined.get(group.path, group)
        ranks[group.path] = pids = ranks.get(group.path, ()) + group.pids
        counts = tuple(dict.fromkeys(same.counts + group.counts))
        joined[group.path] = msgspec.structs.replace(group, counts=counts, pids=pids)
    return list(joined.values())[-MOST:]


def unreclaimable(used: int, stat: dict[str, int]) -> int:
    """Bytes of `used` that cannot be given back: page cache can, shared memory (which is counted in it) cannot."""
    if "total_cache" in stat:
        return used - max(0, stat["total_cache"] - stat.get("total_shmem", 0))
    return used - max(0, stat.get("file", 0) - stat.get("shmem", 0)) - stat.get("slab_reclaimable", 0)


def judge_use(group: Cgroup, used: int, limits: dict[str, float]) -> Reading:
    """`used`: bytes, without what can be reclaimed."""
    assert group.limit is not None
    share = 100 * used / group.limit if group.limit else 0.0
    text = f"{used / GIB:.1f} of {group.limit / GIB:.1f} GiB in use"
    values = {"used_bytes": used, "limit_bytes": group.limit}
    level: Level | None = "warning" if share >= limits["percent"] else None
    return judged("cgroup_memory", level, text, group.path, values=values)


def judge_kills(grew: int, path: str, pids: tuple[int, ...] = ()) -> Reading:
    """`grew`: kills since the look before; `pids`: the rank whose cgroup it is, where there is only one."""
    text = f"{grew} processes of the job killed for want of memory since the look before"
    return judged("cgroup_oom_kill", "critical" if grew else None, text, path, pids=pids, values={"kills": grew})


def look(place: Place, group: Cgroup, limits: dict[str, float]) -> tuple[int | None, list[Reading]]:
    """Kills counted so far (None: the cgroup is gone) and how full it is."""
    counts = [parse_table(text).get("oom_kill", 0) for path in group.counts if (text := place.text(path)) is not None]
    if not counts:
        why = "the cgroup is gone"
        return None, [not_applicable(check.id, why, group.path) for check in CHECKS]
    used = place.number(group.usage)
    if group.limit is None or used is None:
        return sum(counts), [not_applicable("cgroup_memory", "no memory limit", group.path)]
    if used >= group.limit * limits["percent"] / 100:  # most of the time it is not: `memory.stat` costs the kernel more
        used = unreclaimable(used, parse_table(place.text(group.stat) or ""))
    return sum(counts), [judge_use(group, used, limits)]


def process_ids(place: Place, pids: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Of each cgroup that limits the threads of these processes: how many there are, and may be."""
    found: dict[str, tuple[int, int]] = {}
    for pid in pids:
        v1, folders = chain(place, pid, "pids")
        for folder in folders:
            limit, used = place.number(f"{folder}/pids.max"), place.number(f"{folder}/pids.current")
            if limit and used is not None:
                found[_shown(folder, "pids" if v1 else "")] = (used, limit)
                break
    return found
