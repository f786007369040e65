"""What keeps NVLink going beside the driver: fabric manager and IMEX. Without them a job cannot start.

None of it is asked for where a node has no use for it. Whether a service runs is read from its control group, and
from the names of processes where it is not systemd that runs it (a driver container does): `systemctl` may hang.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Literal

from diagnosis.health import CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from supervisor.node_health import pci
from supervisor.node_health.contract import Moment, ProbeContext, checks_of, recall
from supervisor.node_health.machine import driver_version

IMEX_NODES: Final = "etc/nvidia-imex/nodes_config.cfg"
_UNSEEN: Final = "neither systemd's control groups nor the node's processes can be seen from here"
CHECKS: Final = checks_of("fabric")
Running = Literal["yes", "no", "unknown"]
_COMMS: Final = {"nvidia-fabricmanager": "nv-fabricmanage", "nvidia-imex": "nvidia-imex"}
"""Unit -> name of its process, of which the kernel keeps 15 characters."""


@dataclasses.dataclass(frozen=True)
class FabricNode:
    """What the node has that NVLink's services may be needed for."""

    models: tuple[str, ...] = ()
    """Name of each GPU that the driver runs."""
    nvswitches: int = 0


_RACK: Final = re.compile(r"\bG[BH]\d00\b")
_NVLINK5: Final = re.compile(r"\bB\d00\b")


def count_nvswitches(place: ProbeContext) -> int:
    classes = {address: place.text(f"{pci.DEVICES}/{address}/class", 64) for address in place.names(pci.DEVICES)}
    bridges = [address for address, text in classes.items() if (text or "").startswith("0x0680")]
    on_bus = sum(pci.read_device(place, address) is not None for address in bridges)
    return max(on_bus, len(place.names("dev", "nvidia-nvswitch[0-9]*")))


def read_node(place: ProbeContext, nvswitches: int) -> FabricNode:
    models = []
    for address in place.names("proc/driver/nvidia/gpus", limit=64):
        text = place.text(f"proc/driver/nvidia/gpus/{address}/information", 4096) or ""
        models.append(clean_text(text.partition("Model:")[2].partition("\n")[0].strip(), 80))
    return FabricNode(tuple(models), nvswitches)


# --- services of systemd, by files: `systemctl` asks a daemon over a socket and may hang with it

_ETC: Final = "etc/systemd/system"
_ALWAYS: Final = "systemd-journald.service"
"""Where it is not to be seen, no absence of another service means anything."""
_SLICES: Final = (  # unified; unified beside the old controllers; old
    "sys/fs/cgroup/system.slice",
    "sys/fs/cgroup/unified/system.slice",
    "sys/fs/cgroup/systemd/system.slice",
)


def enabled_units(place: ProbeContext) -> frozenset[str]:
    """Units that some target wants or requires."""
    folders = [f"{_ETC}/{name}" for suffix in ("wants", "requires") for name in place.names(_ETC, f"*.{suffix}")]
    return frozenset(unit for folder in folders for unit in place.names(folder))


def state_of(place: ProbeContext, unit: str) -> Literal["running", "stopped", "unknown"]:
    """`unknown` where there is no systemd (a container), or a captured tree lacks its cgroups."""
    slices = [path for path in _SLICES if place.names(path, _ALWAYS)]
    if not slices:
        return "unknown"
    if any(_populated(place, f"{path}/{unit}.service") for path in slices):
        return "running"
    return "stopped"


def _populated(place: ProbeContext, cgroup: str) -> bool:
    events = place.text(f"{cgroup}/cgroup.events", 256)
    if events is not None:
        return "populated 1" in events
    names = place.names(cgroup)  # the old hierarchy: processes here, or cgroups below
    return bool((place.text(f"{cgroup}/cgroup.procs", 256) or "").strip()) or any("." not in name for name in names)


# --- judging


def judge_manager(node: FabricNode, running: Running, ran: bool, is_enabled: bool) -> CheckResult:
    """`ran`: it ran earlier in this boot."""
    check = "fabric_manager"
    if not node.nvswitches and not ran:
        if not node.models:
            return not_applicable(check, "no NVSwitch and no NVIDIA GPU here")
        if any(_RACK.search(model) for model in node.models):
            return not_applicable(check, "the NVSwitches of such a GPU are in trays of their own and managed there")
        if not (is_enabled and len(node.models) > 1 and any(_NVLINK5.search(model) for model in node.models)):
            return not_applicable(check, "no NVSwitch here")
    if running == "yes":
        return healthy(check, text=f"the fabric manager runs; {node.nvswitches} NVSwitches on the PCI bus")
    if running == "unknown":
        return unknown(check, _UNSEEN)
    if ran:
        return unhealthy(check, "the fabric manager ran earlier in this boot and does not run any more")
    if node.nvswitches:
        return unhealthy(check, f"the fabric manager does not run on a node with {node.nvswitches} NVSwitches")
    return unhealthy(check, "the fabric manager is enabled and does not run", level="warning")


class FabricProbe:
    name = "fabric"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 20.0
    once_s = 5.0

    def __init__(self) -> None:
        self._node: tuple[list[str], FabricNode] | None = None
        self._pids: dict[str, str] = {}
        """Unit -> its process: all processes are gone through only once."""
        self._ran: set[str] | None = None
        """Units that ran in this boot."""

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:  # noqa: ARG002
        if self._ran is None:
            self._ran = recall(place, "fabric", set[str])
        node = self._read(place)
        return [self._manager(place, node, self._ran), self._imex(place, self._ran)]

    def _read(self, place: ProbeContext) -> FabricNode:
        """Read again only when the driver lists other GPUs: asking it for their names may hang when it does."""
        listed = [*place.names("proc/driver/nvidia/gpus", limit=64), driver_version(place)]
        if self._node is None or self._node[0] != listed:
            # An NVSwitch that goes away later is the PCI probe's to tell.
            nvswitches = self._node[1].nvswitches if self._node else count_nvswitches(place)
            self._node = listed, read_node(place, nvswitches)
        return self._node[1]

    def _runs(self, place: ProbeContext, unit: str, ran: set[str]) -> tuple[Running, bool]:
        """Whether it runs, and whether it ran earlier in this boot."""
        state, before = state_of(place, unit), unit in ran
        if state != "running" and not self._has_process(place, unit):
            # Inside of a container neither the host's systemd nor its processes are seen: nothing is known then.
            return ("no" if state == "stopped" else "unknown"), before
        if not before:
            ran.add(unit)
            place.keep("fabric", sorted(ran))
        return "yes", before

    def _has_process(self, place: ProbeContext, unit: str) -> bool:
        known = [self._pids.pop(unit)] if unit in self._pids else []
        for pid in [*known, *place.names("proc", "[0-9]*", 1 << 20)]:
            if (place.text(f"proc/{pid}/comm", 32) or "").strip() == _COMMS[unit]:
                self._pids[unit] = pid
                return True
        return False

    def _manager(self, place: ProbeContext, node: FabricNode, ran: set[str]) -> CheckResult:
        unit = "nvidia-fabricmanager"
        is_enabled = f"{unit}.service" in enabled_units(place) if node.models else False
        if node.nvswitches or unit in ran or is_enabled:
            running, before = self._runs(place, unit, ran)
        else:
            running, before = "unknown", False
        return judge_manager(node, running, before, is_enabled)

    def _imex(self, place: ProbeContext, ran: set[str]) -> CheckResult:
        """One node needs no IMEX, and other than the node's may run it (DRA)."""
        lines = (place.text(IMEX_NODES) or "").splitlines()
        domain = sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if domain < 2 or not place.names("dev/nvidia-caps-imex-channels", "channel*"):
            why = ("no list of nodes", "only this node in the list", "no IMEX channel")[min(domain, 2)]
            return not_applicable("imex", f"not in an IMEX domain: {why}")
        running, before = self._runs(place, "nvidia-imex", ran)
        if running == "unknown":
            return unknown("imex", _UNSEEN)
        level: Level | None = None if running == "yes" else "critical" if before else "warning"
        text = f"IMEX {'does not run' if level else 'runs'}, {domain} nodes in its domain"
        return judged("imex", level, text, values={"domain_nodes": domain})
