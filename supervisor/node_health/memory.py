"""Memory of the host: what is left, what waits for it, what was killed for want of it; and what the ranks may use.

`/proc/meminfo`, `/proc/pressure`, `/proc/vmstat`; the ranks' side is in `rank_limits.py`.
"""

from __future__ import annotations

import re
from typing import Final

from diagnosis.health import Check, Level, Reading, judged, not_applicable
from diagnosis.taxonomy import FailureClass
from supervisor.node_health import rank_limits
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.rank_limits import parse_table

# fmt: off
CHECKS: Final = (
    Check(id="memory_available", failure_class=FailureClass.HOST_OOM, scope="node", looks=2,
        what="the host is almost out of memory",
        source="/proc/meminfo",
        # Caches count as available, so a node that works well is never near this; a share alone would cry wolf on
        # nodes with terabytes.
        threshold="below {percent} % of the memory and {mib} MiB: warning; below {critical_mib} MiB: critical",
        limits={"percent": 2, "mib": 2048, "critical_mib": 100}),
    Check(id="memory_pressure", failure_class=FailureClass.HOST_OOM, scope="node", looks=2, limits={"full": 20},
        what="all processes wait for memory",
        source="/proc/pressure/memory",
        threshold="full avg60 above {full} %"),
    Check(id="io_pressure", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", looks=3, limits={"full": 60},
        what="all processes wait for storage, for minutes",
        source="/proc/pressure/io",
        # On an idle node one copying process is "all processes", and saving a checkpoint takes a minute or two: only
        # what lasts for five minutes while ranks run is worth a word.
        threshold="full avg60 and full avg300 above {full} % while ranks run"),
    Check(id="host_oom_kill", failure_class=FailureClass.HOST_OOM, scope="node", calm_looks=6,
        what="the kernel killed a process for want of memory",
        source="/proc/vmstat",
        threshold="oom_kill grew by more than in the ranks' cgroups"),
)
# fmt: on


def judge_available(memory: dict[str, int], limits: dict[str, float]) -> Reading:
    total, left = memory.get("MemTotal", 0) / 1024, memory.get("MemAvailable", -1024) / 1024
    if total <= 0 or left < 0:
        return not_applicable("memory_available", "/proc/meminfo does not tell")
    values = {"total_mib": round(total), "available_mib": round(left)}
    for name, key in (("AnonHugePages", "anon_huge_mib"), ("Hugetlb", "hugetlb_mib"), ("Shmem", "shmem_mib")):
        if name in memory:
            values[key] = memory[name] // 1024
    text = f"{left:.0f} of {total:.0f} MiB available"
    low = left < min(total * limits["percent"] / 100, limits["mib"])
    level: Level | None = "critical" if left < limits["critical_mib"] else "warning" if low else None
    return judged("memory_available", level, text, values=values)


_PRESSURE = re.compile(r"^(some|full) .*?avg60=(\d{1,3}\.?\d*) avg300=(\d{1,3}\.?\d*)", re.MULTILINE)


def judge_pressure(check: str, text: str | None, limits: dict[str, float], *, ranks_run: bool = True) -> Reading:
    """`text`: of /proc/pressure/*, in percent of the time; None where the kernel has no such file or it is off."""
    shares = {kind: (float(avg60), float(avg300)) for kind, avg60, avg300 in _PRESSURE.findall(text or "")}
    kind = next(iter(limits))
    if kind not in shares:
        return not_applicable(check, "the kernel does not measure pressure")
    minute, minutes = shares[kind]
    values = {f"{name}_avg60_percent": share[0] for name, share in shares.items()}
    said = f"{kind} avg60={minute:g} % avg300={minutes:g} %"
    lasting = minute if check == "memory_pressure" else min(minute, minutes)
    high = lasting > limits[kind] and (ranks_run or check != "io_pressure")
    return judged(check, "warning" if high else None, said, values=values)


class MemoryProbe:
    name = "memory"
    checks = (*CHECKS, *rank_limits.CHECKS)
    every_s = 10.0
    deadline_s = 5.0

    def __init__(self) -> None:
        self._limits: dict[str, dict[str, float]] = {}
        self._kills: dict[str, int] = {}
        """Kills counted up to the look before, by cgroup; of the host under the name `""`."""
        self._groups: list[rank_limits.Cgroup] = []
        self._known: dict[int, int] = {}
        """The ranks that `_groups` was found for."""

    def look(self, place: Place, now: Moment) -> list[Reading]:  # noqa: ARG002
        limits = self._limits = {check.id: place.limits(check) for check in self.checks}
        memory = parse_table(place.text("proc/meminfo") or "")
        readings = [judge_available(memory, limits["memory_available"])]
        for kind in ("memory", "io"):
            check = f"{kind}_pressure"
            text = place.text(f"proc/pressure/{kind}")
            readings.append(judge_pressure(check, text, limits[check], ranks_run=bool(place.job.ranks)))
        kills, in_groups = self._look_at_groups(place)
        return [*readings, *kills, self._host_kills(place, in_groups), *rank_limits.look(place, limits)]

    def _look_at_groups(self, place: Place) -> tuple[list[Reading], int]:
        """The ranks' cgroups; and how many were killed in them since the look before."""
        if place.job.ranks != self._known:
            self._known = dict(place.job.ranks)
            found = [group for pid in sorted(self._known) if (group := rank_limits.find(place, pid))]
            # A killed rank is gone at once, its cgroup is not: the old ones are looked at for as long as they exist.
            self._groups = rank_limits.join(self._groups, found)
        readings: list[Reading] = []
        total = 0
        for group in list(self._groups):
            counted, said = rank_limits.look_at_group(place, group, self._limits["cgroup_memory"])
            if counted is None:
                self._groups.remove(group)
                self._kills.pop(group.path, None)
            else:
                grew = max(0, counted - self._kills.get(group.path, counted))
                total += grew
                self._kills[group.path] = counted
                pids = group.pids if len(group.pids) == 1 else ()
                said.append(rank_limits.judge_kills(grew, group.path, pids))
            readings += said
        if not readings:
            why = "no rank of a job here" if not self._known else "the ranks' memory cgroups are not to be seen"
            readings = [not_applicable("cgroup_oom_kill", why), not_applicable("cgroup_memory", why)]
        return readings, total

    def _host_kills(self, place: Place, in_groups: int) -> Reading:
        found = re.search(r"^oom_kill (\d{1,19})$", place.text("proc/vmstat") or "", re.MULTILINE)
        if found is None:
            return not_applicable("host_oom_kill", "the kernel does not count them")
        counted = int(found[1])
        grew = counted - self._kills.get("", counted) - in_groups
        self._kills[""] = counted
        text = f"the kernel killed {max(0, grew)} processes for want of memory since the look before"
        return judged("host_oom_kill", "warning" if grew > 0 else None, text, values={"kills": counted})
