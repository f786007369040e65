"""What keeps NVLink and GPUDirect going beside the driver: fabric manager, IMEX, nvidia-peermem.

None of it is asked for where a node has no use for it. Whether a service runs is read from its control group, and
from the names of processes where it is not systemd that runs it (a driver container does): `systemctl` may hang.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterable
from typing import Final, Literal

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health import pci_devices
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.inventory import driver_version
from supervisor.node_health.network.counters import recall
from supervisor.node_health.units import enabled_units, service, state_of

LOG: Final = "var/log/fabricmanager.log"
CONFIG: Final = "usr/share/nvidia/nvswitch/fabricmanager.cfg"
IMEX_NODES: Final = "etc/nvidia-imex/nodes_config.cfg"
DAY_S: Final = 86_400.0
_UNSEEN: Final = "neither systemd's control groups nor the node's processes can be seen from here"
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
)
# fmt: on
OF_LOG: Final = ("fabric_manager_version", "fabric_manager_log")
Running = Literal["yes", "no", "unknown"]
_COMMS: Final = {"nvidia-fabricmanager": "nv-fabricmanage", "nvidia-imex": "nvidia-imex"}
"""Unit -> name of its process, of which the kernel keeps 15 characters."""


@dataclasses.dataclass(frozen=True)
class Node:
    """What the node has that NVLink's services may be needed for."""

    models: tuple[str, ...] = ()
    """Name of each GPU that the driver runs."""
    nvswitches: int = 0
    driver: str = ""
    """Version; empty when it is not loaded."""
    open_driver: bool = False


_MODULES: Final = ("nvidia_peermem", "nv_peer_mem", "gdrdrv", "mlx5_core")
_RACK: Final = re.compile(r"\bG[BH]\d00\b")
_NVLINK5: Final = re.compile(r"\bB\d00\b")


def count_nvswitches(place: Place) -> int:
    classes = {
        address: place.text(f"{pci_devices.DEVICES}/{address}/class", 64)
        for address in place.names(pci_devices.DEVICES)
    }
    bridges = [address for address, text in classes.items() if (text or "").startswith("0x0680")]
    on_bus = sum(pci_devices.read_device(place, address) is not None for address in bridges)
    return max(on_bus, len(place.names("dev", "nvidia-nvswitch[0-9]*")))


def read_node(place: Place, nvswitches: int) -> Node:
    models = []
    for address in place.names("proc/driver/nvidia/gpus", limit=64):
        text = place.text(f"proc/driver/nvidia/gpus/{address}/information", 4096) or ""
        models.append(clean_text(text.partition("Model:")[2].partition("\n")[0].strip(), 80))
    is_open = "Open Kernel Module" in (place.text("proc/driver/nvidia/version", 4096) or "")
    return Node(tuple(models), nvswitches, driver_version(place), is_open)


# --- the log of the fabric manager


_STARTED: Final = re.compile(r"Fabric Manager version (\d[\d.]*) is running with")
_CONFIGURED: Final = "Successfully configured all the available"
_ERRORS: Final[tuple[tuple[str, Level], ...]] = (
    ("detected NVSwitch fatal error", "critical"),
    ("detected NVSwitch non-fatal error", "warning"),
    ("in the multicast team", "warning"),
    ("don't match with any supported system topology", "critical"),
    ("Failed to configure all the available", "critical"),
)


def _stamp(line: str) -> float:
    """`[Jul 23 2024 07:53:55] ...` in the node's zone; 0 where there is none."""
    try:
        return time.mktime(time.strptime(line[:22], "[%b %d %Y %H:%M:%S]"))
    except (OverflowError, ValueError):
        return 0.0


class LogTail:
    """Reads what was added to the log since the last look; at most the last `LIMIT` bytes."""

    LIMIT: Final = 256 * 1024

    def __init__(self) -> None:
        self.version = ""
        self.newest = 0.0
        """Unix time of the newest line."""
        self.found: list[tuple[Level, float, str]] = []
        """Level, time (0: not known) and text of the errors since the fabric manager last started or last had
        everything configured; at most 50, the newest kept."""
        self._at = 0
        self._inode = 0

    def read(self, place: Place) -> str | None:
        """What was added; None when there is no log that can be read."""
        configured = re.search(r"^LOG_FILE_NAME=(/\S+)", place.text(CONFIG) or "", re.MULTILINE)
        name = configured[1].lstrip("/") if configured else LOG
        try:
            descriptor = os.open(place.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            info = os.fstat(descriptor)
            if info.st_ino != self._inode or info.st_size < self._at:
                self._at = 0  # a new file: it was rotated, or begun anew
            self._inode = info.st_ino
            start = max(self._at, info.st_size - self.LIMIT)
            data = os.pread(descriptor, self.LIMIT, start)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        whole = data[: data.rfind(b"\n") + 1]
        self._at = start + len(whole)
        text = whole.decode(errors="replace")
        self._take(text.splitlines())
        return text

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            if started := _STARTED.search(line):
                self.version, self.found = started[1], []
            elif _CONFIGURED in line:
                self.found = []
            elif level := next((level for pattern, level in _ERRORS if pattern in line), None):
                self.found = [*self.found[-49:], (level, _stamp(line), clean_text(line, 200))]
        self.newest = next((at for line in reversed(lines) if (at := _stamp(line))), self.newest)


# --- judging


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
        return unknown(check, _UNSEEN)
    if ran:
        return unhealthy(check, "the fabric manager ran earlier in this boot and does not run any more")
    if node.nvswitches:
        return unhealthy(check, f"the fabric manager does not run on a node with {node.nvswitches} NVSwitches")
    return unhealthy(check, "the fabric manager is enabled and does not run", level="warning")


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


def judge_log(log: LogTail, now: float) -> Reading:
    recent = [
        (level, text)
        for level, at, text in log.found
        if level == "critical" or "non-fatal" not in text or not at or now - at < DAY_S
    ]
    if not recent:
        return healthy("fabric_manager_log", text="no error since the fabric manager started")
    worst, text = max(reversed(recent), key=lambda one: one[0] == "critical")
    return unhealthy("fabric_manager_log", f"fabric manager: {text}", level=worst, values={"errors": len(recent)})


def judge_version(node: Node, version: str, running: Running) -> Reading:
    """One that runs all the same was there before the driver was changed, or its log is an old one."""
    check = "fabric_manager_version"
    if not version or not node.driver:
        whose = "fabric manager" if node.driver else "driver"
        return unknown(check, f"the version of the {whose} is not told")
    level: Level = "warning" if running == "yes" else "critical"
    text = f"fabric manager {version}, driver {node.driver}"
    return judged(check, None if version == node.driver else level, text)


class FabricProbe:
    name = "fabric"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 20.0

    def __init__(self) -> None:
        self._log = LogTail()
        self._node: tuple[list[str], Node] | None = None
        self._pids: dict[str, str] = {}
        """Unit -> its process: all processes are gone through only once."""
        self._ran: set[str] | None = None
        """Units that ran in this boot."""

    def look(self, place: Place, now: Moment) -> list[Reading]:
        if self._ran is None:
            self._ran = recall(place, "fabric", set[str])
        node = self._read(place)
        readings = [*self._manager(place, node, now, self._ran), self._imex(place, self._ran)]
        if place.preflight:
            modules = [name for name in _MODULES if place.path(f"sys/module/{name}").is_dir()]
            release = (place.text("proc/sys/kernel/osrelease", 256) or "").strip()
            readings.append(judge_gpudirect(node, modules, release, len(place.names("sys/class/infiniband"))))
        return readings

    def _read(self, place: Place) -> Node:
        """Read again only when the driver lists other GPUs: asking it for their names may hang when it does."""
        listed = [*place.names("proc/driver/nvidia/gpus", limit=64), driver_version(place)]
        if self._node is None or self._node[0] != listed:
            # An NVSwitch that goes away later is the PCI probe's to tell.
            nvswitches = self._node[1].nvswitches if self._node else count_nvswitches(place)
            self._node = listed, read_node(place, nvswitches)
        return self._node[1]

    def _runs(self, place: Place, unit: str, ran: set[str]) -> tuple[Running, bool]:
        """Whether it runs, and whether it ran earlier in this boot."""
        state, before = state_of(place, unit), unit in ran
        if state != "running" and not self._has_process(place, unit):
            # Inside of a container neither the host's systemd nor its processes are seen: nothing is known then.
            return ("no" if state == "stopped" else "unknown"), before
        if not before:
            ran.add(unit)
            place.keep("fabric", sorted(ran))
        return "yes", before

    def _has_process(self, place: Place, unit: str) -> bool:
        known = [self._pids.pop(unit)] if unit in self._pids else []
        for pid in [*known, *place.names("proc", "[0-9]*", 1 << 20)]:
            if (place.text(f"proc/{pid}/comm", 32) or "").strip() == _COMMS[unit]:
                self._pids[unit] = pid
                return True
        return False

    def _manager(self, place: Place, node: Node, now: Moment, ran: set[str]) -> list[Reading]:
        unit = "nvidia-fabricmanager"
        is_enabled = service(unit) in enabled_units(place) if node.models else False
        if node.nvswitches or unit in ran or is_enabled:
            running, before = self._runs(place, unit, ran)
        else:
            running, before = "unknown", False
        reading = judge_manager(node, running, before, is_enabled)
        if reading.status == "not_applicable":
            return [reading, *(not_applicable(check, reading.text) for check in OF_LOG)]
        if self._log.read(place) is None:
            why = f"only root can read /{LOG}" if place.denied(LOG) else f"there is no /{LOG}"
            return [reading, *(unknown(check, why) for check in OF_LOG)]
        # A captured tree is judged as of its newest line.
        at = now.wall if place.live else self._log.newest
        return [reading, judge_version(node, self._log.version, running), judge_log(self._log, at)]

    def _imex(self, place: Place, ran: set[str]) -> Reading:
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
