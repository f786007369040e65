"""Whose processes hold memory of a GPU: the job's ranks, the node's own services, somebody else's, or nobody's."""

from __future__ import annotations

import os
import re
from typing import Final

from diagnosis.signals import clean_text
from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.gpu.facts import NO_PERMISSION, Fact, Gap, Owner, Process

_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"
_SYSTEM: Final = re.compile(r"nvidia-|nv-hostengine|dcgm|Xorg|Xwayland|gnome-shell")
"""Programs that may hold memory of a GPU on a healthy node: the driver's daemons, monitoring, a display."""
_UNTOLD_MEMORY: Final = 1 << 63
"""NVML gives all ones for memory that it cannot tell."""


def processes(compute: Fact, graphics: Fact, place: ProbeContext) -> tuple[Process, ...] | Gap:
    """Who they are, from pairs of pid and bytes as NVML lists them."""
    if isinstance(compute, Gap):
        return compute
    if place.link("proc/self/ns/pid") != _INITIAL_PID_NAMESPACE:
        return Gap(NO_PERMISSION, "", "in a pid namespace of its own NVML does not show the processes of others")
    found: dict[int, int] = dict(graphics) if isinstance(graphics, tuple) else {}
    found.update(compute if isinstance(compute, tuple) else ())
    return tuple(_process(pid, memory, place) for pid, memory in found.items())


def _process(pid: int, memory: int, place: ProbeContext) -> Process:
    name = clean_text((place.text(f"proc/{pid}/comm", 64) or "").strip(), 16)
    return Process(pid, 0 if memory >= _UNTOLD_MEMORY else memory, name, _owner(pid, name, place))


def _owner(pid: int, name: str, place: ProbeContext) -> Owner:
    at = pid
    for _ in range(16):
        if at in place.job.ranks:
            return "rank"
        stat = (place.text(f"proc/{at}/stat", 512) or "").rpartition(")")[2].split()
        at = int(stat[1]) if len(stat) > 1 and stat[1].isdecimal() else 0
        if at <= 1:
            break
    if _SYSTEM.match(name):
        return "system"
    return "other" if name or _alive(pid) else "gone"


def _alive(pid: int) -> bool:
    """Also of a process that /proc hides from us."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def of_this_job(minor: str) -> bool:
    """Whether a GPU, by the number of its device file, is one of the Slurm job for which we look (in its prolog, say).

    Without Slurm, or where the number is not known, it is.
    """
    listed = os.environ.get("SLURM_JOB_GPUS", "")
    if not minor or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
        return True
    ranges = [part.partition("-") for part in listed.split(",")]
    return any(int(low) <= int(minor) <= int(high or low) for low, _, high in ranges)
