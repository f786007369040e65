"""What keeps NVLink and GPUDirect going beside the driver: fabric manager, IMEX, nvidia-peermem, nvidia-persistenced.

None of it is asked for where a node has no use for it. Whether a service runs is read from its control group, and
from the names of processes where it is not systemd that runs it (a driver container does): `systemctl` may hang.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final, Literal

from diagnosis.health import Check, Level, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes import pcie
from supervisor.probes.fabric_log import LOG, LogFacts, LogTail
from supervisor.probes.probe import Moment, Place

IMEX_NODES: Final = "etc/nvidia-imex/nodes_config.cfg"
DAY_S: Final = 86_400.0
# fmt: off
CHECKS: Final = (
    Check(id="fabric_manager", failure_class=FailureClass.NVLINK_ERROR, scope="node", looks=2,  # it may be starting
        what="the fabric manager does not run on a node whose NVSwitches need it",
        source="control group of nvidia-fabricmanager.service, /proc/*/comm",
        threshold="not running; asked only where there are NVSwitches, or where it ran earlier in this boot"),
    Check(id="fabric_manager_version", failure_class=FailureClass.NVLINK_ERROR, scope="node", when="periodic",
        what="fabric manager and driver are of different versions",
        source=f"/{LOG}, /proc/driver/nvidia/version",
        threshold="not equal: it refuses to start"),
    Check(id="fabric_manager_log", failure_class=FailureClass.NVLINK_ERROR, scope="node", when="periodic",
        what="errors in the log of the fabric manager",
        source=f"/{LOG}",
        threshold="since it last started: a fatal NVSwitch error or an unknown topology; warning for a non-fatal one "
        "within a day, or a GPU that is missing in a multicast team"),
    Check(id="imex", failure_class=FailureClass.NVLINK_ERROR, scope="node", when="periodic", looks=2,
        what="IMEX does not run on a node of an IMEX domain",
        source=f"/{IMEX_NODES}, /dev/nvidia-caps-imex-channels, control group of nvidia-imex.service",
        threshold="not running; asked only in a domain of two nodes or more with a channel"),
    Check(id="gpudirect_rdma", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", when="preflight",
        what="GPUs and NICs cannot talk without a copy through host memory",
        source="/sys/module/nvidia_peermem, /proc/driver/nvidia/version",
        threshold="neither nvidia_peermem, nor the open driver on Linux 5.12 or newer (DMA-BUF)"),
    Check(id="persistenced", failure_class=FailureClass.GPU_DRIVER, scope="node", when="preflight",
        what="nvidia-persistenced is enabled and does not run",
        source="control group of nvidia-persistenced.service, /proc/*/comm",
        threshold="not running; asked only where it is enabled"),
)
# fmt: on

Running = Literal["yes", "no", "unknown"]
_COMMS: Final = {  # the kernel keeps 15 characters of a process's name
    "nvidia-fabricmanager": "nv-fabricmanage",
    "nvidia-imex": "nvidia-imex",
    "nvidia-persistenced": "nvidia-persiste",
}
_SLICES: Final = ("sys/fs/cgroup", "sys/fs/cgroup/systemd", "sys/fs/cgroup/unified")


def enabled(place: Place, unit: str) -> bool:
    return place.link(f"etc/systemd/system/multi-user.target.wants/{unit}.service") is not None


class Services:
    """Which services run. Remembers the process of one, so that all processes are gone through only once."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}

    def running(self, place: Place, unit: str) -> Running:
        for root in _SLICES:
            if (place.text(f"{root}/system.slice/{unit}.service/cgroup.procs", 64) or "").strip():
                return "yes"
        comm = _COMMS[unit]
        pids: Iterable[int | str] = [self._pids[unit]] if unit in self._pids else []
        for pid in [*pids, *(name for name in place.names("proc", "[0-9]*", 1 << 20))]:
            if (place.text(f"proc/{pid}/comm", 32) or "").strip() == comm:
                self._pids[unit] = int(pid)
                return "yes"
        self._pids.pop(unit, None)
        # Inside of a container neither the host's systemd nor its processes are seen: nothing is known then.
        systemd = place.path("run/systemd/system").is_dir() or (place.text("proc/1/comm", 32) or "") == "systemd\n"
        return "no" if systemd else "unknown"


@dataclasses.dataclass(frozen=True)
class Node:
    """What the node has that NVLink's services may be needed for."""

    models: tuple[str, ...] = ()
    """Name of each GPU that the driver runs."""
    nvswitches: int = 0
    driver: str = ""
    """Version; empty when it is not loaded."""
    open_driver: bool = False


_VERSION: Final = re.compile(r"NVRM version:.*?Kernel Module\b.*?\s(\d{3,}\.\d[\d.]*)")
_RACK: Final = re.compile(r"\bG[BH]\d00\b")
_NVLINK5: Final = re.compile(r"\bB\d00\b")


def count_nvswitches(place: Place) -> int:
    on_bus = 0
    for address in place.names(pcie.DEVICES):
        pci_class = place.text(f"{pcie.DEVICES}/{address}/class", 64) or ""
        if pci_class.startswith("0x0680"):
            on_bus += (
                pcie.kind_of(pci_class, place.text(f"{pcie.DEVICES}/{address}/vendor", 64) or "", False) is not None
            )
    return max(on_bus, len(place.names("dev", "nvidia-nvswitch[0-9]*")))


def read_node(place: Place, nvswitches: int) -> Node:
    models = []
    for address in place.names("proc/driver/nvidia/gpus", limit=64):
        text = place.text(f"proc/driver/nvidia/gpus/{address}/information", 4096) or ""
        models.append(clean_text(text.partition("Model:")[2].partition("\n")[0].strip(), 80))
    text = place.text("proc/driver/nvidia/version", 4096) or ""
    version = _VERSION.search(text)
    return Node(tuple(models), nvswitches, version[1] if version else "", "Open Kernel Module" in text)


def judge_manager(node: Node, running: Running, ran: bool, is_enabled: bool) -> Reading:
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
        return unknown(check, "neither systemd's control groups nor the node's processes can be seen from here")
    if ran:
        return unhealthy(check, "the fabric manager ran earlier in this boot and does not run any more")
    if node.nvswitches:
        return unhealthy(check, f"the fabric manager does not run on a node with {node.nvswitches} NVSwitches")
    return unhealthy(check, "the fabric manager is enabled and does not run", level="warning")


def judge_imex(domain: int, channels: int, running: Running, ran: bool) -> Reading:
    """`domain`: nodes in the domain's list. One node needs no IMEX, and other than the node's may run it (DRA)."""
    if domain < 2 or not channels:
        why = "no list of nodes" if not domain else "only this node in the list" if domain < 2 else "no IMEX channel"
        return not_applicable("imex", f"not in an IMEX domain: {why}")
    if running == "unknown":
        return unknown("imex", "neither systemd's control groups nor the node's processes can be seen from here")
    if running == "yes":
        return healthy("imex", text=f"IMEX runs, {domain} nodes in its domain", values={"domain_nodes": domain})
    text = f"IMEX does not run, {domain} nodes in its domain"
    return unhealthy("imex", text, level="critical" if ran else "warning")


def judge_gpudirect(node: Node, modules: Iterable[str], release: str, nics: int) -> Reading:
    check, loaded = "gpudirect_rdma", frozenset(modules)
    if not node.driver or not nics:
        return not_applicable(check, "no GPU driver or no RDMA NIC here")
    if "mlx5_core" not in loaded:
        return not_applicable(check, "the RDMA NICs here are none that nvidia_peermem is for")
    values = {"gdrdrv": float("gdrdrv" in loaded)}
    kernel = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if by_module := loaded & {"nvidia_peermem", "nv_peer_mem"}:
        return healthy(check, text=f"{min(by_module)} is loaded", values=values)
    if node.open_driver and kernel >= (5, 12):
        return healthy(check, text="the open driver shares memory by DMA-BUF", values=values)
    why = "nvidia_peermem is not loaded, and the driver is not the open one" + " on Linux 5.12" * node.open_driver
    return unhealthy(check, why, level="warning", values=values)


def judge_log(facts: LogFacts, now: float) -> Reading:
    recent = [
        (level, text)
        for level, at, text in facts.found
        if level == "critical" or "non-fatal" not in text or not at or now - at < DAY_S
    ]
    if not recent:
        return healthy("fabric_manager_log", text="no error since the fabric manager started")
    worst: Level = "critical" if any(level == "critical" for level, _ in recent) else "warning"
    shown = [text for level, text in recent if level == worst]
    count = {"errors": float(len(recent))}
    return unhealthy("fabric_manager_log", f"fabric manager: {shown[-1]}", level=worst, values=count)


def judge_version(node: Node, facts: LogFacts, running: Running) -> Reading:
    """One that runs all the same was there before the driver was changed, or its log is an old one."""
    check = "fabric_manager_version"
    if not facts.version or not node.driver:
        return unknown(
            check, f"the log does not tell the version of the {'fabric manager' if node.driver else 'driver'}"
        )
    text = f"fabric manager {facts.version}, driver {node.driver}"
    if facts.version == node.driver:
        return healthy(check, text=text)
    return unhealthy(check, text, level="warning" if running == "yes" else "critical")


class FabricProbe:
    name = "fabric"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 20.0

    def __init__(self) -> None:
        self._services = Services()
        self._log = LogTail()
        self._node: tuple[list[str], Node] | None = None
        self._ran: set[str] | None = None

    def look(self, place: Place, now: Moment) -> list[Reading]:
        if self._ran is None:
            kept = place.load("fabric")
            self._ran = {str(unit) for unit in kept} if isinstance(kept, list) else set()
        node = self._read(place)
        readings = [*self._manager(place, node, now, self._ran), self._imex(place, self._ran)]
        if place.preflight:
            modules = [
                name for name in ("nvidia_peermem", "nv_peer_mem", "gdrdrv", "mlx5_core") if _module(place, name)
            ]
            release = (place.text("proc/sys/kernel/osrelease", 256) or "").strip()
            readings.append(judge_gpudirect(node, modules, release, len(place.names("sys/class/infiniband"))))
            readings.append(self._persistenced(place))
        return readings

    def _read(self, place: Place) -> Node:
        """Read again only when the driver lists other GPUs: asking it for their names may hang when it does."""
        listed = [
            *place.names("proc/driver/nvidia/gpus", limit=64),
            place.text("proc/driver/nvidia/version", 4096) or "",
        ]
        if self._node is None or self._node[0] != listed:
            # An NVSwitch that goes away later is the PCI probe's to tell.
            nvswitches = self._node[1].nvswitches if self._node else count_nvswitches(place)
            self._node = listed, read_node(place, nvswitches)
        return self._node[1]

    def _runs(self, place: Place, unit: str, ran: set[str]) -> tuple[Running, bool]:
        """Whether it runs, and whether it ran earlier in this boot."""
        before, running = unit in ran, self._services.running(place, unit)
        if running == "yes" and not before:
            ran.add(unit)
            place.keep("fabric", sorted(ran))
        return running, before

    def _manager(self, place: Place, node: Node, now: Moment, ran: set[str]) -> list[Reading]:
        unit, is_enabled = "nvidia-fabricmanager", enabled(place, "nvidia-fabricmanager")
        if node.nvswitches or unit in ran or (is_enabled and node.models):
            running, before = self._runs(place, unit, ran)
        else:
            running, before = "unknown", False
        reading = judge_manager(node, running, before, is_enabled)
        if reading.status == "not_applicable":
            why = reading.text
            return [
                reading,
                *(not_applicable(check, why) for check in ("fabric_manager_version", "fabric_manager_log")),
            ]
        text = self._log.read(place)
        if text is None:
            denied = place.denied(LOG)
            why = f"only root can read /{LOG}" if denied else f"there is no /{LOG}"
            return [reading, *(unknown(check, why) for check in ("fabric_manager_version", "fabric_manager_log"))]
        # A captured tree is judged as of its newest line.
        at = now.wall if place.live else self._log.facts.newest
        return [reading, judge_version(node, self._log.facts, running), judge_log(self._log.facts, at)]

    def _imex(self, place: Place, ran: set[str]) -> Reading:
        lines = (place.text(IMEX_NODES) or "").splitlines()
        domain = sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))
        channels = len(place.names("dev/nvidia-caps-imex-channels", "channel*"))
        if domain < 2 or not channels:
            return judge_imex(domain, channels, "unknown", False)
        running, before = self._runs(place, "nvidia-imex", ran)
        return judge_imex(domain, channels, running, before)

    def _persistenced(self, place: Place) -> Reading:
        check, unit = "persistenced", "nvidia-persistenced"
        if not enabled(place, unit):
            return not_applicable(check, "not enabled; NVML tells the persistence mode of each GPU")
        running = self._services.running(place, unit)
        if running == "unknown":
            return unknown(check, "neither systemd's control groups nor the node's processes can be seen from here")
        if running == "no":
            return unhealthy(check, "nvidia-persistenced is enabled and does not run", level="warning")
        return healthy(check, text="nvidia-persistenced runs")


def _module(place: Place, name: str) -> bool:
    return place.path(f"sys/module/{name}").is_dir()
