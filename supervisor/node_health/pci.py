"""The PCI bus: GPUs and NVSwitches that are gone, links that lost lanes, AER counters.

GPUs are counted here without asking their driver, whose calls may never return. What was there earlier in this boot
and is not now is lost; what was never there is missing only where the site says how many there must be.

Devices are read from sysfs, without their drivers. Listing costs nothing to a device: class, vendor and driver are the
kernel's own copies. `config` and the current link width are read from the device itself; a device that is gone answers
both with all ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from diagnosis.health import CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from supervisor.files import head_of
from supervisor.node_health.contract import CHECK, Baseline, Moment, ProbeContext, Rates, checks_of, recall

Kind = Literal["gpu", "nvswitch", "nic", "nvme", "bridge"]
DEVICES: Final = "sys/bus/pci/devices"
ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})
"""Anything else (0, 63, 255) is how sysfs writes that there is no link, or that the device does not answer."""
_ALL_ONES: Final = (63, 255)
"""How the kernel writes a width that it read as all ones."""
_NAMES: Final = {"gpu": "GPU", "nvswitch": "NVSwitch", "nic": "NIC", "nvme": "NVMe", "bridge": "bridge"}


@dataclasses.dataclass(frozen=True)
class PciDevice:
    address: str
    """`0000:c1:00.0`."""
    kind: Kind
    model: str = ""
    """Vendor and device id: devices of one model are each other's peers."""
    upstream: tuple[str, ...] = ()
    """Bridges above it, the root port first; empty where the tree does not tell."""
    display: bool = False
    """A VGA controller: a board for desktops, which share their lanes as they like."""

    @property
    def gpu(self) -> str:
        return slot(self.address) if self.kind == "gpu" else ""

    @property
    def where(self) -> str:
        """How it is named in a result: GPUs as everywhere else, others with their function."""
        return self.gpu or self.address

    def __str__(self) -> str:
        return f"{_NAMES[self.kind]} {self.address}"


def slot(address: str) -> str:
    """`0000:c1:00.0` -> `0000:c1:00`; a domain of eight digits becomes one of four."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def kind_of(pci_class: str, vendor: str, rdma: bool) -> Kind | None:
    """What a device is to us, by its class (`0x030200`) and vendor (`0x10de`)."""
    code = pci_class.strip().lower().removeprefix("0x")[:4]
    nvidia = vendor.strip().lower() == "0x10de"
    if code in ("0300", "0302"):
        return "gpu" if nvidia else None
    if code == "0680":
        return "nvswitch" if nvidia else None
    if code == "0207" or (code == "0200" and rdma):
        return "nic"
    return {"0108": "nvme", "0604": "bridge"}.get(code)  # type: ignore[return-value]


def read_device(place: ProbeContext, address: str) -> PciDevice | None:
    """None for what is nothing to us, and for virtual functions, which have no link and no vendor of their own."""
    folder = f"{DEVICES}/{address}"
    pci_class = place.text(f"{folder}/class", 64) or ""
    vendor = place.text(f"{folder}/vendor", 64) or ""
    kind = kind_of(pci_class, vendor, bool(place.names(f"{folder}/infiniband")))
    if kind is None or place.link(f"{folder}/physfn") is not None:
        return None
    model = f"{vendor.strip()}:{(place.text(f'{folder}/device', 64) or '').strip()}"
    above = ADDRESS.findall((place.link(folder) or "").rpartition("/")[0])
    return PciDevice(address, kind, model, tuple(above), display=pci_class.strip().lower().startswith("0x0300"))


def asleep(place: ProbeContext, address: str) -> bool:
    """A device that was put to sleep is not asked: that would wake it, or it could not answer."""
    return (place.text(f"{DEVICES}/{address}/power/runtime_status", 32) or "").strip() == "suspended"


def is_gone(place: ProbeContext, address: str) -> bool:
    """Whether the device answers a read of its configuration space with all ones: it is not on the bus any more."""
    return head_of(str(place.path(f"{DEVICES}/{address}/config")), 4) == b"\xff\xff\xff\xff"


def seem_gone(place: ProbeContext, devices: Iterable[PciDevice]) -> set[str]:
    """Those of a captured tree without `config` files whose other files were read as all ones, and of a peer's not."""
    silent: list[PciDevice] = []
    speak: set[str] = set()
    for device in devices:
        folder = f"{DEVICES}/{device.address}"
        width, speed = place.number(f"{folder}/current_link_width"), place.text(f"{folder}/current_link_speed", 64)
        no_link = width not in _WIDTHS and (width in _ALL_ONES or (speed or "").startswith("Unknown"))
        if not place.path(f"{folder}/config").exists() and (no_link or place.number(f"{folder}/revision") == 0xFF):
            silent.append(device)
        elif width in _WIDTHS:
            speak.add(device.model)
    return {device.address for device in silent if device.model in speak}


@dataclasses.dataclass(frozen=True)
class PciLink:
    """The link between a device and the port above it."""

    device: PciDevice
    width: int
    """Lanes now."""
    possible: int
    """Lanes that both ends can do, as far as both are known."""
    both: bool = True
    """Both ends are known: a virtual machine shows no bridges, and a card may sit in a slot with fewer lanes."""


def ends_of_links(devices: Mapping[str, PciDevice]) -> dict[str, str]:
    """Lower end -> upper end of each link on the way to a device that matters (the upper end `` where unknown).

    From a device upwards ports come in pairs: it and the port it is plugged into, then the upper port of that switch
    and the port that one is plugged into. What lies between the two pairs is inside of a switch and no link.
    """
    ends: dict[str, str] = {}
    for device in devices.values():
        if device.kind != "bridge":
            chain = (*device.upstream, device.address)
            for lower in range(len(chain) - 1, -1, -2):
                if lower or len(chain) == 1:
                    ends[chain[lower]] = chain[lower - 1] if lower else ""
    return ends


def read_links(place: ProbeContext, devices: Mapping[str, PciDevice], gone: Iterable[str]) -> list[PciLink]:
    left_out = frozenset(gone)
    links = []
    for lower, upper in ends_of_links(devices).items():
        if lower in left_out or lower not in devices or asleep(place, lower):
            continue
        width = place.number(f"{DEVICES}/{lower}/current_link_width") or 0
        most = [place.number(f"{DEVICES}/{end}/max_link_width") or 0 for end in (lower, upper) if end]
        possible = [lanes for lanes in most if lanes in _WIDTHS]
        if width in _WIDTHS and possible:
            links.append(PciLink(devices[lower], width, min(possible), both=len(possible) == 2))
    return links


def judge_widths(links: list[PciLink], widest: Mapping[str, int]) -> dict[str, CheckResult]:
    """Unhealthy results by address. `widest`: the most lanes that each device had in this boot.

    That a link is narrower than both ends could do is no fault where all devices of that model are alike: then it is
    how the node is wired. It is one when the link was wider before, or when a peer's is.
    """
    bad = {}
    for link in links:
        if link.width >= link.possible:
            continue
        device = link.device
        peers = [
            other.width
            for other in links
            if other.device.model == device.model and other.possible == link.possible and other is not link
        ]
        before, best = widest.get(device.address, 0), max(peers, default=0)
        level: Level = "critical"
        if before > link.width:
            why = f"it had x{before} earlier in this boot"
        elif best > link.width and device.kind != "bridge":
            why = f"another of its kind has x{best}"
            level = "warning" if device.kind == "nvme" or device.display else "critical"
        elif not peers and link.both and device.kind == "gpu" and not device.display:
            why, level = f"both ends can do x{link.possible}", "warning"
        else:
            continue
        text = f"PCIe link of {device} has x{link.width} of x{link.possible}: {why}"
        values = {"width_lanes": link.width, "possible_lanes": link.possible}
        bad[device.address] = unhealthy("pcie_link_width", text, device.where, level, gpu=device.gpu, values=values)
    return bad


def speed_gts(text: str | None) -> float:
    """`16.0 GT/s PCIe` -> 16; 0 where nothing is said."""
    words = (text or "").split()
    try:
        return float(words[0]) if len(words) > 1 and words[1].startswith("GT/s") else 0.0
    except ValueError:
        return 0.0


def slow_links(place: ProbeContext, devices: Mapping[str, PciDevice]) -> tuple[int, dict[str, CheckResult]]:
    """Speed of NICs and NVMe against what both ends can do. GPUs slow their idle links down: NVML sees them at work."""
    bad, seen = {}, 0
    for lower, upper in ends_of_links(devices).items():
        device = devices.get(lower)
        if device is None or device.kind not in ("nic", "nvme"):
            continue
        now = speed_gts(place.text(f"{DEVICES}/{lower}/current_link_speed", 64))
        most = [speed_gts(place.text(f"{DEVICES}/{end}/max_link_speed", 64)) for end in (lower, upper) if end]
        possible = min((speed for speed in most if speed), default=0.0)
        seen += bool(now and possible)
        if now and possible and now < possible:
            text = f"PCIe link of {device} runs at {now:g} GT/s of {possible:g} GT/s"
            bad[lower] = unhealthy("pcie_link_speed", text, lower, "warning", values={"speed_gts": now})
    return seen, bad


_AER: Final = {
    "corrected": ("aer_dev_correctable", "COR"),
    "nonfatal": ("aer_dev_nonfatal", "NONFATAL"),
    "fatal": ("aer_dev_fatal", "FATAL"),
}


def aer_total(text: str, suffix: str) -> int | None:
    """`TOTAL_ERR_COR 12` of an `aer_dev_*` file; unsupported requests are left out.

    Whoever asks a device for something that it does not have (a driver that probes, a tool that reads) makes one of
    those, and nothing is wrong.
    """
    total = _number_after(text, f"TOTAL_ERR_{suffix} ")
    return None if total is None else max(0, total - (_number_after(text, "UnsupReq ") or 0))


def _number_after(text: str, name: str) -> int | None:
    start = text.find(name)
    word = text[start + len(name) :].split("\n", 1)[0].strip() if start >= 0 else ""
    return int(word) if word.isdecimal() and len(word) < 20 else None


def read_aer(place: ProbeContext, address: str) -> dict[str, int] | None:
    """Errors of one port since the node was booted, by kind; None for a port that counts none (or an old kernel)."""
    counts = {}
    for kind, (name, suffix) in _AER.items():
        total = aer_total(place.text(f"{DEVICES}/{address}/{name}", 4096) or "", suffix)
        if total is None:
            return None
        counts[kind] = total
    return counts


def judge_aer(device: PciDevice, kind: str, new: int, per_min: float, old: int = 0) -> CheckResult | None:
    """`new`: corrected errors of the last minute, others since the port was first looked at in this boot.

    `old`: uncorrected ones of this boot from before that look; nobody knows whether they matter still.
    """
    count = new if kind == "corrected" else new + old
    if count <= (per_min if kind == "corrected" else 0):
        return None
    level: Level = "critical" if kind == "fatal" and new else "warning"
    when = "in a minute" if kind == "corrected" else "in this boot" + ("" if new else ", before we first looked")
    text = f"{count} {'non-fatal' if kind == 'nonfatal' else kind} PCIe errors at {device} {when}"
    values = {"corrected_per_min" if kind == "corrected" else "errors": count}
    return unhealthy(f"pcie_aer_{kind}", text, device.where, level, gpu=device.gpu, values=values)


def tally(check: str, bad: Mapping[str, CheckResult], looked: int, what: str) -> list[CheckResult]:
    """The unhealthy results, and one for all the rest. Who is not spoken of any more is forgotten."""
    good = max(0, looked - len(bad))
    rest = f"{good} of {looked} {what}"
    return [
        *bad.values(),
        healthy(check, text=rest) if good else not_applicable(check, "each has a result of its own"),
    ]


DRIVER_GPUS: Final = "proc/driver/nvidia/gpus"
CHECKS: Final = checks_of("pci")
_PRESENCE: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("gpu", "gpu_on_bus", "NVIDIA GPU"),
    ("nvswitch", "nvswitch_on_bus", "NVSwitch"),
)


@dataclasses.dataclass(frozen=True)
class Bus:
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
        self._known = {name: self._known[name] if name in self._known else read_device(place, name) for name in names}
        devices = {address: device for address, device in self._known.items() if device}
        driver = place.names(DRIVER_GPUS)
        if not names:  # a tree, or a sandbox, that shows the driver's list only
            devices = {address: PciDevice(address, "gpu") for address in driver}
        driver_gpus = frozenset(driver) if driver or place.text("proc/driver/nvidia/version") else None
        gone = {
            device.address
            for device in devices.values()
            if device.kind != "bridge" and not asleep(place, device.address) and is_gone(place, device.address)
        }
        if not place.live:
            gone |= seem_gone(place, (device for device in devices.values() if device.kind == "gpu"))
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
        links = read_links(place, bus.devices, bus.gone)
        if not links:
            return [not_applicable("pcie_link_width", "no PCIe link of a GPU, NIC or NVMe drive reports its width")]
        bad = judge_widths(links, memory.widest)
        for link in links:
            memory.widest[link.device.address] = max(link.width, memory.widest.get(link.device.address, 0))
        return tally("pcie_link_width", bad, len(links), "links have the lanes of their kind here")

    def _errors(self, place: ProbeContext, bus: Bus, now: Moment) -> list[CheckResult]:
        ports = {end for pair in ends_of_links(bus.devices).items() for end in pair if end in bus.devices}
        counts: dict[str, dict[str, int]] = {}
        for address in sorted(ports - bus.gone - self._no_aer):
            if (found := read_aer(place, address)) is not None:
                counts[address] = found
            else:
                self._no_aer.add(address)
        uncorrected = ((address, kind) for address in counts for kind in ("fatal", "nonfatal"))
        first = self._aer.of(place, {f"{address} {kind}": counts[address][kind] for address, kind in uncorrected})
        results = []
        for kind in ("fatal", "nonfatal", "corrected"):
            check = CHECK[f"pcie_aer_{kind}"]
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
                result = judge_aer(bus.devices[address], kind, new, place.limits(check).get("per_min", 0), old)
                if result:
                    bad[address] = result
            results += tally(check.id, bad, len(counts), "ports without such errors")
        return results

    @staticmethod
    def _preflight(place: ProbeContext, bus: Bus) -> list[CheckResult]:
        seen, bad = slow_links(place, bus.devices)
        if not seen:
            return [not_applicable("pcie_link_speed", "no PCIe link of a NIC or NVMe drive reports its speed")]
        return tally("pcie_link_speed", bad, seen, "links run at full speed")
