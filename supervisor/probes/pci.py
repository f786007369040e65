"""The PCI bus: GPUs and NVSwitches that are gone, links that lost lanes, AER counters, NVMe drives, RAID arrays.

GPUs are counted here without asking their driver, whose calls may never return. What was there earlier in this boot
and is not now is lost; what was never there is missing only where the site says how many there must be.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from diagnosis.health import Check, Level, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.taxonomy import FailureClass
from supervisor.probes import drives, pcie
from supervisor.probes.pcie import DEVICES, Counts, Device, Link, tally
from supervisor.probes.probe import Moment, Place

DRIVER_GPUS: Final = "proc/driver/nvidia/gpus"
# fmt: off
CHECKS: Final = (
    # a reset makes a GPU unreadable for a moment
    Check(id="gpu_on_bus", failure_class=FailureClass.GPU_FALLEN_OFF_BUS, scope="gpu", looks=2,
        what="a GPU that was on the PCI bus in this boot does not answer there",
        source=f"/{DEVICES}/*/config",
        threshold="gone from the list, or its configuration space reads all ones"),
    Check(id="gpu_count", failure_class=FailureClass.GPU_FALLEN_OFF_BUS, scope="node", looks=2,
        what="fewer GPUs on the PCI bus than the site expects",
        source=f"/{DEVICES}, /{DRIVER_GPUS}",
        threshold="not `gpus` of the site's `[expect]`"),
    Check(id="gpu_has_driver", failure_class=FailureClass.GPU_DRIVER, scope="gpu", when="periodic", looks=2,
        what="a GPU on the PCI bus that the NVIDIA driver does not run, though it runs others",
        source=f"/{DEVICES}/*/driver, /{DRIVER_GPUS}",
        threshold="critical when the driver ran it earlier in this boot, else a warning"),
    Check(id="nvswitch_on_bus", failure_class=FailureClass.NVLINK_ERROR, scope="node", looks=2,
        what="an NVSwitch that was on the PCI bus in this boot does not answer there",
        source=f"/{DEVICES}/*/config",
        threshold="gone from the list, or its configuration space reads all ones"),
    Check(id="pcie_link_width", failure_class=FailureClass.PCIE_ERROR, scope="node", when="periodic", looks=2,
        what="a PCIe link with fewer lanes than it had, or than its peers have",
        source=f"/{DEVICES}/*/current_link_width, max_link_width",
        threshold="fewer than earlier in this boot, or than a peer of the same model in an equal slot"),
    Check(id="pcie_link_speed", failure_class=FailureClass.PCIE_ERROR, scope="node", when="preflight",
        what="the PCIe link of a NIC or NVMe drive below the speed that both ends can do",
        source=f"/{DEVICES}/*/current_link_speed, max_link_speed",
        threshold="below the lower of both ends"),
    Check(id="pcie_aer_fatal", failure_class=FailureClass.PCIE_ERROR, scope="node",
        what="fatal PCIe errors",
        source=f"/{DEVICES}/*/aer_dev_fatal",
        threshold="any since this boot was first looked at"),
    Check(id="pcie_aer_nonfatal", failure_class=FailureClass.PCIE_ERROR, scope="node",
        what="uncorrected, non-fatal PCIe errors (unsupported requests left out)",
        source=f"/{DEVICES}/*/aer_dev_nonfatal",
        threshold="any since this boot was first looked at"),
    Check(id="pcie_aer_corrected", failure_class=FailureClass.PCIE_ERROR, scope="node", looks=3,
        what="a storm of corrected PCIe errors",
        source=f"/{DEVICES}/*/aer_dev_correctable",
        threshold="more than {per_min} in a minute at one port, three looks in a row",
        # What a Gen5 x16 link may have at the bit error rate 1e-12 that PCIe allows; healthy links have next to none.
        limits={"per_min": 31}),
    Check(id="pcie_acs", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", when="preflight",
        what="ACS redirect on a bridge above a GPU or NIC: traffic between the two goes through the root port",
        source=f"/{DEVICES}/*/config",
        threshold="request or completion redirect is on, outside of a virtual machine"),
    *drives.CHECKS,
)
# fmt: on
BY_ID: Final = {check.id: check for check in CHECKS}
STATE: Final = "pci"


@dataclasses.dataclass(frozen=True)
class Bus:
    """One look at the bus."""

    devices: Mapping[str, Device]
    listed: frozenset[str]
    """Addresses of all that is on the bus, whatever it is."""
    gone: frozenset[str]
    """Addresses that answer with all ones."""
    driver_gpus: frozenset[str] | None
    """Addresses of the GPUs that the driver runs; None when it is not loaded."""

    def of(self, *kinds: str) -> list[Device]:
        return [device for device in self.devices.values() if device.kind in kinds]


@dataclasses.dataclass
class Memory:
    """What this boot had: kept on disk, so that it outlives the agent."""

    seen: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Kind -> addresses that were there and answered. `driver`: GPUs the driver ran; `raid`: active arrays."""
    widest: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """AER counts at the first look."""
    spoken: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, kept: Any) -> Memory:
        try:
            return msgspec.convert(kept, cls)
        except msgspec.ValidationError:  # an older version wrote it, or somebody else did
            return cls()

    def remember(self, kind: str, addresses: list[str]) -> None:
        self.seen[kind] = sorted({*self.seen.get(kind, ()), *addresses})


def judge_gone(bus: Bus, kind: str, check: str, memory: Memory) -> dict[str, Reading]:
    """Unhealthy readings of the GPUs or NVSwitches that were there in this boot and are not."""
    there = {device.address for device in bus.of(kind)}
    # A GPU that the driver still has is one that this boot had, whether we saw it on the bus or not.
    known = (bus.driver_gpus or frozenset()) if kind == "gpu" and there else frozenset()
    bad = {}
    for address in sorted({*memory.seen.get(kind, ()), *there, *known}):
        device = bus.devices.get(address) or Device(address, "gpu" if kind == "gpu" else "nvswitch")
        where = device.gpu or address
        if address not in bus.listed:
            text = f"{device} is not on the PCI bus any more"
        elif address in bus.gone:
            text = f"{device} does not answer on the PCI bus: its configuration space reads all ones"
        else:
            continue
        bad[address] = unhealthy(check, text, where, gpu=device.gpu)
    return bad


def judge_count(bus: Bus, expected: int | None) -> Reading:
    there = len({device.address for device in bus.of("gpu")} - bus.gone)
    values = {"gpus": float(there)}
    if expected is None:
        if not there:
            return not_applicable("gpu_count", "no NVIDIA GPU on the PCI bus, and none is expected")
        return healthy("gpu_count", text=f"{there} GPUs on the PCI bus; the site expects no number", values=values)
    text = f"{there} GPUs on the PCI bus, {expected} expected"
    if there < expected:
        return unhealthy("gpu_count", text, values=values)
    if there > expected:  # the site file is wrong, or the node is not the one that was meant: nothing is broken
        return unhealthy("gpu_count", text, level="warning", values=values)
    return healthy("gpu_count", text=text, values=values)


def judge_drivers(bus: Bus, memory: Memory) -> dict[str, Reading]:
    bad = {}
    runs = bus.driver_gpus or frozenset()
    for device in bus.of("gpu"):
        before = device.address in memory.seen.get("driver", ())
        if device.address not in runs | bus.gone and (runs or before):
            text = f"{device} is on the PCI bus, and the NVIDIA driver {'lost it' if before else 'has not taken it'}"
            level: Level = "critical" if before else "warning"
            bad[device.address] = unhealthy("gpu_has_driver", text, device.gpu, level, gpu=device.gpu)
    return bad


def is_virtual(place: Place) -> bool:
    """Whether this is a virtual machine, by the processor's flag or, where it has none, the firmware's maker."""
    if re.search(r"^flags\s*:.*\bhypervisor\b", place.text("proc/cpuinfo", 8192) or "", re.MULTILINE):
        return True
    maker = (place.text("sys/class/dmi/id/sys_vendor", 128) or "").strip().lower()
    return maker.startswith(("qemu", "kvm", "xen", "vmware", "innotek"))


class PciProbe:
    name = "pci"
    checks = CHECKS
    every_s = 30.0
    deadline_s = 20.0

    def __init__(self) -> None:
        self._known: dict[str, Device | None] = {}
        """Every address that was on the bus at the last look; None for what is nothing to us."""
        self._memory: Memory | None = None
        self._aer: dict[str, Counts] = {}
        self._aer_at = 0.0
        self._no_aer: set[str] = set()
        self._kept: Any = None

    def look(self, place: Place, now: Moment) -> list[Reading]:
        if self._memory is None:
            self._kept = place.load(STATE)
            self._memory = Memory.of(self._kept)
        memory, spoken = self._memory, set(self._memory.spoken)
        bus = self._read(place)
        if not bus.listed and any(memory.seen.values()):  # a bus is never empty: the list could not be read
            return [unknown(check.id, f"/{DEVICES} cannot be read") for check in CHECKS]
        readings = self._presence(bus, memory, spoken, place.site.expect.gpus)
        readings += self._links(place, bus, memory, spoken)
        readings += self._errors(place, bus, memory, spoken, now)
        nvme = [device.address for device in bus.of("nvme") if device.address not in bus.gone]
        readings += drives.look(place, nvme, bus.listed - bus.gone, memory.seen, spoken)
        if place.preflight:
            readings += self._preflight(place, bus, spoken)
        memory.spoken = sorted(spoken)
        if (kept := msgspec.to_builtins(memory)) != self._kept:
            place.keep(STATE, kept)
            self._kept = kept
        return readings

    def _read(self, place: Place) -> Bus:
        names = place.names(DEVICES)
        self._known = {
            name: self._known[name] if name in self._known else pcie.read_device(place, name) for name in names
        }
        devices = {address: device for address, device in self._known.items() if device}
        driver = place.names(DRIVER_GPUS)
        for address in driver:
            if not names:  # a tree, or a sandbox, that shows the driver's list only
                devices[address] = Device(address, "gpu")
        driver_gpus = frozenset(driver) if driver or place.text("proc/driver/nvidia/version") else None
        gone = {
            device.address
            for device in devices.values()
            if device.kind != "bridge"
            and not pcie.asleep(place, device.address)
            and pcie.is_gone(place, device.address)
        }
        return Bus(devices, frozenset(names or driver), frozenset(gone), driver_gpus)

    @staticmethod
    def _presence(bus: Bus, memory: Memory, spoken: set[str], expected: int | None) -> list[Reading]:
        readings = [judge_count(bus, expected)]
        for kind, check, what in (
            ("gpu", "gpu_on_bus", "GPUs answer on the PCI bus"),
            ("nvswitch", "nvswitch_on_bus", "NVSwitches answer on the PCI bus"),
        ):
            memory.remember(kind, [device.address for device in bus.of(kind) if device.address not in bus.gone])
            bad = judge_gone(bus, kind, check, memory)
            looked = len({*memory.seen[kind], *(device.address for device in bus.of(kind)), *bad})
            if looked:
                readings += tally(BY_ID[check], bad, looked, what, spoken)
            else:
                readings.append(not_applicable(check, f"no {'NVSwitch' if kind == 'nvswitch' else 'NVIDIA GPU'} here"))
        gpus = bus.of("gpu")
        if gpus and bus.driver_gpus is not None:
            bad = judge_drivers(bus, memory)
            memory.remember("driver", sorted(bus.driver_gpus))
            readings += tally(BY_ID["gpu_has_driver"], bad, len(gpus), "GPUs are run by the driver", spoken)
        else:
            why = "the NVIDIA driver is not loaded" if gpus else "no NVIDIA GPU here"
            readings.append(not_applicable("gpu_has_driver", why))
        return readings

    @staticmethod
    def _links(place: Place, bus: Bus, memory: Memory, spoken: set[str]) -> list[Reading]:
        links: list[Link] = pcie.read_links(place, bus.devices, bus.gone)
        if not links:
            return [not_applicable("pcie_link_width", "no PCIe link of a GPU, NIC or NVMe drive tells its width")]
        bad = pcie.judge_widths(links, memory.widest)
        for link in links:
            memory.widest[link.device.address] = max(link.width, memory.widest.get(link.device.address, 0))
        return tally(BY_ID["pcie_link_width"], bad, len(links), "links have the lanes of their kind here", spoken)

    def _errors(self, place: Place, bus: Bus, memory: Memory, spoken: set[str], now: Moment) -> list[Reading]:
        ports = {end for pair in pcie.ends_of_links(bus.devices).items() for end in pair if end in bus.devices}
        counts: dict[str, Counts] = {}
        for address in sorted(ports - bus.gone - self._no_aer):
            if (found := pcie.read_aer(place, address)) is not None:
                counts[address] = found
            else:
                self._no_aer.add(address)
        checks = ("pcie_aer_fatal", "pcie_aer_nonfatal", "pcie_aer_corrected")
        if not counts:
            return [not_applicable(check, "no port here counts PCIe errors (AER)") for check in checks]
        minutes = (now.mono - self._aer_at) / 60
        rates = {
            address: (found[0] - self._aer[address][0]) / minutes
            for address, found in counts.items()
            if address in self._aer and minutes > 0
        }
        for address, found in counts.items():
            start = memory.errors.get(address)
            if start is None or any(new < old for new, old in zip(found, start, strict=False)):  # counted anew
                memory.errors[address] = list(found)
        first = {address: (0, start[1], start[2]) for address, start in memory.errors.items() if len(start) == 3}
        self._aer, self._aer_at = counts, now.mono
        bad = pcie.judge_aer(bus.devices, counts, first, rates, place.limits(BY_ID["pcie_aer_corrected"]))
        return [
            reading
            for check in checks
            for reading in tally(BY_ID[check], bad[check], len(counts), "ports without such errors", spoken)
        ]

    @staticmethod
    def _preflight(place: Place, bus: Bus, spoken: set[str]) -> list[Reading]:
        seen, bad = pcie.slow_links(place, bus.devices)
        readings = (
            tally(BY_ID["pcie_link_speed"], bad, seen, "links run at full speed", spoken)
            if seen
            else [not_applicable("pcie_link_speed", "no PCIe link of a NIC or NVMe drive tells its speed")]
        )
        if is_virtual(place):
            return [*readings, not_applicable("pcie_acs", "a virtual machine: its bridges are not the real ones")]
        above = {port for device in bus.of("gpu", "nic") for port in device.upstream if port in bus.devices}
        if not above or not bus.of("gpu"):
            return [*readings, not_applicable("pcie_acs", "no PCI bridge above a GPU here")]
        spaces = {port: pcie.read_bytes(place, f"{DEVICES}/{port}/config", 4096) for port in sorted(above)}
        if all(len(space) <= 64 for space in spaces.values()):
            return [*readings, unknown("pcie_acs", "only root can read the whole configuration space of a bridge")]
        bad = {
            port: unhealthy("pcie_acs", f"ACS redirect is on at {bus.devices[port]}", port, "warning")
            for port, space in spaces.items()
            if pcie.acs_redirects(space)
        }
        return readings + tally(BY_ID["pcie_acs"], bad, len(spaces), "bridges do not redirect", spoken)
