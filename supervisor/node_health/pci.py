"""The PCI bus: GPUs and NVSwitches that are gone, links that lost lanes, AER counters.

GPUs are counted here without asking their driver, whose calls may never return. What was there earlier in this boot
and is not now is lost; what was never there is missing only where the site says how many there must be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from diagnosis.health import Check, CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.taxonomy import FailureClass
from supervisor.node_health import pci_devices
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.counters import Baseline, Rates, recall
from supervisor.node_health.pci_devices import DEVICES, Kind, PciDevice, tally

DRIVER_GPUS: Final = "proc/driver/nvidia/gpus"
# fmt: off
CHECKS: Final = (
    # a reset makes a GPU unreadable for a moment
    Check(id="gpu_on_bus", failure_class=FailureClass.GPU_FALLEN_OFF_BUS, scope="gpu", looks=2,
        what="a GPU that was on the PCI bus in this boot does not answer there",
        source=f"/{DEVICES}/*/config (a captured tree without it: revision, current_link_width, current_link_speed)",
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
        threshold="any since this boot was first looked at; older ones of this boot: a warning"),
    Check(id="pcie_aer_nonfatal", failure_class=FailureClass.PCIE_ERROR, scope="node",
        what="uncorrected, non-fatal PCIe errors (unsupported requests left out)",
        source=f"/{DEVICES}/*/aer_dev_nonfatal",
        threshold="any in this boot (a warning)"),
    Check(id="pcie_aer_corrected", failure_class=FailureClass.PCIE_ERROR, scope="node", looks=3,
        what="a storm of corrected PCIe errors",
        source=f"/{DEVICES}/*/aer_dev_correctable",
        threshold="more than {per_min} in a minute at one port, three looks in a row",
        # What a Gen5 x16 link may have at the bit error rate 1e-12 that PCIe allows; healthy links have next to none.
        limits={"per_min": 31}),
)
# fmt: on
BY_ID: Final = {check.id: check for check in CHECKS}
_PRESENCE: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("gpu", "gpu_on_bus", "NVIDIA GPU"),
    ("nvswitch", "nvswitch_on_bus", "NVSwitch"),
)


@dataclasses.dataclass(frozen=True)
class Bus:
    """One look at the bus."""

    devices: Mapping[str, PciDevice]
    listed: frozenset[str]
    """Addresses of all that is on the bus, whatever it is."""
    gone: frozenset[str]
    """Addresses that answer with all ones."""
    driver_gpus: frozenset[str] | None
    """Addresses of the GPUs that the driver runs; None when it is not loaded."""

    def of(self, *kinds: str) -> list[PciDevice]:
        return [device for device in self.devices.values() if device.kind in kinds]


@dataclasses.dataclass
class SeenDevices:
    """What this boot had: kept on disk, so that it outlives the agent."""

    seen: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    """Kind -> addresses that were there and answered. `driver`: those that had one."""
    widest: dict[str, int] = dataclasses.field(default_factory=dict)

    def had(self, kind: str, now: Iterable[str] = ()) -> set[str]:
        """Those of a kind that were there before or are `now`."""
        self.seen[kind] = self.seen.get(kind, set()) | set(now)
        return self.seen[kind]


def judge_gone(bus: Bus, kind: Kind, check: str, had: Iterable[str]) -> dict[str, CheckResult]:
    """Unhealthy results of the GPUs or NVSwitches that were there in this boot and are not."""
    bad = {}
    for address in sorted(had):
        device = bus.devices.get(address) or PciDevice(address, kind)
        if address not in bus.listed:
            text = f"{device} is not on the PCI bus any more"
        elif address in bus.gone:
            text = f"{device} does not answer on the PCI bus: it reads as all ones"
        else:
            continue
        bad[address] = unhealthy(check, text, device.where, gpu=device.gpu)
    return bad


def judge_count(bus: Bus, expected: int | None) -> CheckResult:
    there = len({device.address for device in bus.of("gpu")} - bus.gone)
    values = {"gpus": float(there)}
    if expected is None:
        if not there:
            return not_applicable("gpu_count", "no NVIDIA GPU on the PCI bus, and none is expected")
        return healthy("gpu_count", text=f"{there} GPUs on the PCI bus; the site expects no number", values=values)
    # More: the site file is wrong, or the node is not the one that was meant. Nothing is broken.
    level: Level | None = "critical" if there < expected else "warning" if there > expected else None
    return judged("gpu_count", level, f"{there} GPUs on the PCI bus, {expected} expected", values=values)


def judge_drivers(bus: Bus, memory: SeenDevices) -> dict[str, CheckResult]:
    bad = {}
    runs = bus.driver_gpus or frozenset()
    for device in bus.of("gpu"):
        before = device.address in memory.had("driver")
        if device.address not in runs | bus.gone and (runs or before):
            text = f"{device} is on the PCI bus, and the NVIDIA driver {'lost it' if before else 'has not taken it'}"
            level: Level = "critical" if before else "warning"
            bad[device.address] = unhealthy("gpu_has_driver", text, device.where, level, gpu=device.gpu)
    return bad


class PciProbe:
    name = "pci"
    checks = CHECKS
    every_s = 30.0
    deadline_s = 20.0
    once_s = 5.0

    def __init__(self) -> None:
        self._known: dict[str, PciDevice | None] = {}
        """Every address that was on the bus at the last look; None for what is nothing to us."""
        self._memory: SeenDevices | None = None
        self._aer = Baseline("pci_errors")
        self._rates = Rates()
        self._no_aer: set[str] = set()
        self._kept: object = None

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        if self._memory is None:
            self._memory = recall(place, "pci", SeenDevices)
        memory = self._memory
        bus = self._read(place)
        if not bus.listed and any(memory.seen.values()):  # a bus is never empty: the list could not be read
            return [unknown(check.id, f"/{DEVICES} cannot be read") for check in CHECKS]
        results = [
            judge_count(bus, place.site.expect.gpus),
            *self._presence(bus, memory),
            *self._drivers(bus, memory),
            *self._links(place, bus, memory),
            *self._errors(place, bus, now),
            *(self._preflight(place, bus) if place.preflight else ()),
        ]
        if (kept := msgspec.to_builtins(memory, order="deterministic")) != self._kept:
            place.keep("pci", kept)
            self._kept = kept
        return results

    def _read(self, place: ProbeContext) -> Bus:
        names = place.names(DEVICES)
        self._known = {
            name: self._known[name] if name in self._known else pci_devices.read_device(place, name) for name in names
        }
        devices = {address: device for address, device in self._known.items() if device}
        driver = place.names(DRIVER_GPUS)
        if not names:  # a tree, or a sandbox, that shows the driver's list only
            devices = {address: PciDevice(address, "gpu") for address in driver}
        driver_gpus = frozenset(driver) if driver or place.text("proc/driver/nvidia/version") else None
        gone = {
            device.address
            for device in devices.values()
            if device.kind != "bridge"
            and not pci_devices.asleep(place, device.address)
            and pci_devices.is_gone(place, device.address)
        }
        if not place.live:
            gone |= pci_devices.seem_gone(place, (device for device in devices.values() if device.kind == "gpu"))
        return Bus(devices, frozenset(names or driver), frozenset(gone), driver_gpus)

    @staticmethod
    def _presence(bus: Bus, memory: SeenDevices) -> list[CheckResult]:
        results = []
        kind: Kind
        for kind, check, what in _PRESENCE:
            there = {device.address for device in bus.of(kind)}
            # A GPU that the driver still has is one that this boot had, whether we saw it on the bus or not.
            known = (bus.driver_gpus or frozenset()) if kind == "gpu" and there else frozenset()
            had = memory.had(kind, there - bus.gone) | there | known
            if had:
                bad = judge_gone(bus, kind, check, had)
                results += tally(
                    check, bad, len(had), f"{what}{'es' * what.endswith('h') or 's'} answer on the PCI bus"
                )
            else:
                results.append(not_applicable(check, f"no {what} here"))
        return results

    @staticmethod
    def _drivers(bus: Bus, memory: SeenDevices) -> list[CheckResult]:
        gpus, check = bus.of("gpu"), "gpu_has_driver"
        if not gpus or bus.driver_gpus is None:
            return [not_applicable(check, "the NVIDIA driver is not loaded" if gpus else "no NVIDIA GPU here")]
        bad = judge_drivers(bus, memory)
        memory.had("driver", bus.driver_gpus)
        return tally(check, bad, len(gpus), "GPUs are run by the driver")

    @staticmethod
    def _links(place: ProbeContext, bus: Bus, memory: SeenDevices) -> list[CheckResult]:
        links = pci_devices.read_links(place, bus.devices, bus.gone)
        if not links:
            return [not_applicable("pcie_link_width", "no PCIe link of a GPU, NIC or NVMe drive reports its width")]
        bad = pci_devices.judge_widths(links, memory.widest)
        for link in links:
            memory.widest[link.device.address] = max(link.width, memory.widest.get(link.device.address, 0))
        return tally("pcie_link_width", bad, len(links), "links have the lanes of their kind here")

    def _errors(self, place: ProbeContext, bus: Bus, now: Moment) -> list[CheckResult]:
        ports = {end for pair in pci_devices.ends_of_links(bus.devices).items() for end in pair if end in bus.devices}
        counts: dict[str, dict[str, int]] = {}
        for address in sorted(ports - bus.gone - self._no_aer):
            if (found := pci_devices.read_aer(place, address)) is not None:
                counts[address] = found
            else:
                self._no_aer.add(address)
        uncorrected = ((address, kind) for address in counts for kind in ("fatal", "nonfatal"))
        first = self._aer.of(place, {f"{address} {kind}": counts[address][kind] for address, kind in uncorrected})
        results = []
        for kind in ("fatal", "nonfatal", "corrected"):
            check = BY_ID[f"pcie_aer_{kind}"]
            if not counts:
                results.append(not_applicable(check.id, "no port here counts PCIe errors (AER)"))
                continue
            bad = {}
            for address, each in counts.items():
                old = 0
                if kind == "corrected":
                    self._rates.add(address, each[kind], now.mono)
                    new = self._rates.increase(address, 60, now.mono)
                else:
                    old = first[f"{address} {kind}"]
                    new = each[kind] - old
                result = pci_devices.judge_aer(
                    bus.devices[address], kind, new, place.limits(check).get("per_min", 0), old
                )
                if result:
                    bad[address] = result
            results += tally(check.id, bad, len(counts), "ports without such errors")
        return results

    @staticmethod
    def _preflight(place: ProbeContext, bus: Bus) -> list[CheckResult]:
        seen, bad = pci_devices.slow_links(place, bus.devices)
        if not seen:
            return [not_applicable("pcie_link_speed", "no PCIe link of a NIC or NVMe drive reports its speed")]
        return tally("pcie_link_speed", bad, seen, "links run at full speed")
