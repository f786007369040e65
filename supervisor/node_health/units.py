"""Services of systemd, seen through files alone: which are enabled, and which have processes.

`systemctl` asks a daemon over a socket and may hang with it; the cgroup of a service says the same for nothing.
"""

from __future__ import annotations

from typing import Final, Literal

from supervisor.node_health.contract import Place

UnitState = Literal["running", "stopped", "oneshot", "unknown"]

_ETC: Final = "etc/systemd/system"
_UNIT_FOLDERS: Final = (_ETC, "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_ALWAYS: Final = "systemd-journald.service"
"""Where it is not to be seen, no absence of another service means anything."""
_SLICES: Final = (  # unified; unified beside the old controllers; old
    "sys/fs/cgroup/system.slice",
    "sys/fs/cgroup/unified/system.slice",
    "sys/fs/cgroup/systemd/system.slice",
)


def service(name: str) -> str:
    """`slurmd` -> `slurmd.service`."""
    return name if "." in name.rpartition("@")[2] else f"{name}.service"


def enabled_units(place: Place) -> frozenset[str]:
    """Units that some target wants or requires."""
    folders = [f"{_ETC}/{name}" for suffix in ("wants", "requires") for name in place.names(_ETC, f"*.{suffix}")]
    return frozenset(unit for folder in folders for unit in place.names(folder))


def state_of(place: Place, name: str) -> UnitState:
    """`unknown` where there is no systemd (a container), or a captured tree lacks its cgroups."""
    unit = service(name)
    slices = [path for path in _SLICES if place.names(path, _ALWAYS)]
    if not slices:
        return "unknown"
    if any(_populated(place, f"{path}/{unit}") for path in slices):
        return "running"
    return "oneshot" if _is_oneshot(place, unit) else "stopped"


def _populated(place: Place, cgroup: str) -> bool:
    events = place.text(f"{cgroup}/cgroup.events", 256)
    if events is not None:
        return "populated 1" in events
    names = place.names(cgroup)  # the old hierarchy: processes here, or cgroups below
    return bool((place.text(f"{cgroup}/cgroup.procs", 256) or "").strip()) or any("." not in name for name in names)


def _is_oneshot(place: Place, unit: str) -> bool:
    """Whether it does its work and ends: then that no process is left says nothing."""
    stem, at, _ = unit.partition("@")
    file = f"{stem}@.service" if at else unit
    for folder in _UNIT_FOLDERS:
        text = place.text(f"{folder}/{file}")
        if text is not None:
            return any(line.replace(" ", "") == "Type=oneshot" for line in text.splitlines())
    return False
