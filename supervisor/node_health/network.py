"""Ethernet interfaces of the node (carrier, speed), what all network links have in common, and how NCCL is set up.

`NetworkLink` is what is remembered of a link, for ports of InfiniBand and interfaces alike. A link that was never up in
this boot is nobody's fault. Only physical interfaces count: a bond's or bridge's parts are looked at one by one, and
InfiniBand has its own probe.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from diagnosis.health import Check, CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from supervisor.node_health.contract import Moment, ProbeContext, checks_of, fits, recall
from supervisor.node_health.pci import ADDRESS

# --- what links have in common

_T = TypeVar("_T")
MOST_LINKS: Final = 64
"""So many links of a kind are looked at; no node has more of its own."""


class NetworkLink(Frozen, frozen=True, kw_only=True):
    """What one link (interface or port) has shown since the node was booted; kept over restarts of the agent."""

    up: bool = False
    """At the newest look."""
    good: bool = False
    """It was up at some look of this boot."""
    rate: float = 0.0
    """The most it had in this boot, in the unit of its probe."""
    bus: str = ""
    """Address of its device on the PCI bus; empty where it is on none."""
    routes: bool = False
    """The default route went through it in this boot."""
    downs: int | None = None
    """The kernel's own count of lost links; None where it does not count, or can count no further."""
    lost: tuple[float, ...] = ()
    """Unix times at which the link was lost, the newest twenty."""
    at: float = 0.0
    """Unix time of the newest look."""


_SAME_LOSS_S = 30.0
"""State and counter are read one after the other: what both tell within this time is one loss."""


def next_link(before: NetworkLink | None, up: bool, rate: float, downs: int | None, at: float) -> NetworkLink:
    """What is known of a link after one more look. Losses that nobody watched date from the last look before them."""
    if before is None:
        return NetworkLink(up=up, good=up, rate=rate if up else 0.0, downs=downs, at=at)
    fresh = downs - before.downs if downs is not None and before.downs is not None else 0
    lost = before.lost
    if fresh <= 0 and before.up and not up and not (lost and at - lost[-1] < _SAME_LOSS_S):
        fresh = 1
    if fresh > 0:
        unseen = at - before.at > 10 * 60
        lost = (*lost, *[before.at if unseen else at] * min(fresh, 20))[-20:]
    return msgspec.structs.replace(
        before,
        up=up,
        good=before.good or up,
        rate=max(before.rate, rate) if up else before.rate,
        downs=downs,
        lost=lost,
        at=at,
    )


class Links:
    """All links of a probe, kept under its name. Written when something changed, or after five minutes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[str, NetworkLink] | None = None
        self._written: tuple[float, dict[str, NetworkLink]] = (0.0, {})

    def load(self, place: ProbeContext) -> dict[str, NetworkLink]:
        if self.known is None:
            self.known = recall(place, self.name, dict[str, NetworkLink]) if place.boot_id else {}
        return self.known

    def keep(self, place: ProbeContext, known: dict[str, NetworkLink], at: float) -> None:
        self.known = known
        when, written = self._written
        timeless = {name: msgspec.structs.replace(link, at=0.0) for name, link in known.items()}
        if timeless != written or not 0 <= at - when < 300:
            self._written = (at, timeless)
            place.keep(self.name, known)


def judge_lost(check: Check, name: str, link: NetworkLink, place: ProbeContext, at: float, level: Level) -> CheckResult:
    """How often the link was lost lately, and over the hours that flaps are counted in."""
    limits = place.limits(check)
    recent = sum(1 for when in link.lost if at - when <= limits["recent_min"] * 60)
    flaps = sum(1 for when in link.lost if at - when <= limits["flap_hours"] * 3600)
    values = {"lost_in_window": flaps} | ({} if link.downs is None else {"lost_total": link.downs})
    lost = f"lost its link {recent} times in {limits['recent_min']:g} minutes, {flaps} in {limits['flap_hours']:g} h"
    unseen = "; only its state tells" * (link.downs is None)
    bad = level if recent or flaps >= limits["flaps"] else None
    return judged(check.id, bad, f"{name} {lost}{unseen}", name, values=values)


def without_result(
    checks: Iterable[Check], results: Iterable[CheckResult], place: ProbeContext, why: str
) -> list[CheckResult]:
    """`not_applicable` for each check that is wanted and that no result speaks of."""
    reported = {result.check for result in results}
    wanted = (check.id for check in checks if check.when != "preflight" or place.preflight)
    return [not_applicable(check, why) for check in wanted if check not in reported]


def usual_of(values: Collection[_T]) -> _T | None:
    """What at least three of four of four or more have."""
    most = Counter(values).most_common(1)
    return most[0][0] if len(values) >= 4 and most[0][1] >= 0.75 * len(values) else None


def outliers(values: dict[str, float]) -> dict[str, float]:
    """Name -> what its peers have, for those that have less than is usual."""
    usual = usual_of(values.values())
    return {name: usual for name, value in values.items() if usual is not None and value < usual}


def default_routes(place: ProbeContext) -> set[str]:
    """Interfaces that default routes go through, with all that they are made of (bond, bridge, VLAN)."""
    rows = [line.split() for line in (place.text("proc/net/route") or "").splitlines()[1:]]
    found = {row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"}
    # A router's reject routes (RTF_REJECT, 0x200) and loopback appear in the IPv6 table too.
    for line in (place.text("proc/net/ipv6_route") or "").splitlines():
        row = line.split()
        if len(row) == 10 and row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo" and not int(row[8], 16) & 0x200:
            found.add(row[9])
    wanted = list(found)
    while wanted and len(found) < MOST_LINKS:
        lower = [name[6:] for name in place.names(f"sys/class/net/{wanted.pop()}", "lower_*")]
        wanted += [name for name in lower if name not in found]
        found.update(lower)
    return found


def left_out(place: ProbeContext, *names: str) -> bool:
    return fits(names, place.site.interfaces_left_out)


def bus_address(place: ProbeContext, device: str) -> str:
    """PCI address of a `device` link of sysfs; empty when it is on another bus."""
    address = (place.link(device) or "").rpartition("/")[2]
    if not ADDRESS.fullmatch(address):  # some captured trees: `../..`, or none; it is then in the path of the class
        address = [*(place.link(device.rpartition("/")[0]) or "").split("/")[-3:], ""][0]
    return address if ADDRESS.fullmatch(address) else ""


def gone_from_bus(place: ProbeContext, bus: str) -> str:
    """Why a device that sysfs no longer lists is really gone; empty when it has only moved (into a container's
    network namespace, to a virtual machine) or was renamed.
    """
    if not bus or not place.path("sys/bus/pci/devices").exists():
        return ""
    if not place.path(f"sys/bus/pci/devices/{bus}").exists():
        return f"{bus} is gone from the PCI bus"
    return "" if place.path(f"sys/bus/pci/devices/{bus}/driver").exists() else f"{bus} has no driver"


# --- Ethernet

CARRIER, LINK_LOST, SPEED = checks_of("ethernet")


class Interface(Frozen, frozen=True, kw_only=True):
    """One look at one interface."""

    name: str
    up: bool | None = None
    """None: not to be seen."""
    by_hand: bool = False
    """Somebody has taken it down (`ip link set down`)."""
    mbps: int | None = None
    downs: int | None = None
    received: int = 0
    """Bytes since the driver was loaded; read only while it is not up."""


_REPRESENTOR: Final = re.compile(r"pf\d+(vf|sf)\d+")
_ETHERNET: Final = 1
"""ARPHRD_ETHER; IP over InfiniBand is 32."""


def is_physical(place: ProbeContext, name: str) -> bool:
    """Whether it is an Ethernet port of this machine: nothing virtual or wireless, no BMC's on USB, no stand-in."""
    at = f"sys/class/net/{name}"
    where = f"{place.link(at) or ''} {place.link(f'{at}/device') or ''}"
    if place.path(f"{at}/phy80211").exists() or "/usb" in where or "/virtual/" in where:
        return False
    if place.link(f"{at}/device") is None and not place.path(f"{at}/device").exists():
        # Captured trees may lack the link; only names that the kernel and udev give to ports are believed then.
        return not place.live and where == " " and name.startswith(("eth", "en"))
    kind, stand_in = place.number(f"{at}/type"), place.text(f"{at}/phys_port_name", 64) or ""
    return kind in (None, _ETHERNET) and not _REPRESENTOR.match(stand_in)


def read_interface(place: ProbeContext, name: str, before: Interface | None, thorough: bool) -> Interface:
    """`speed` is asked of the driver under a lock that all networking shares: only when `thorough`, and when up."""
    at = f"sys/class/net/{name}"
    state = (place.text(f"{at}/operstate", 32) or "").strip()
    if state == "up":
        up: bool | None = True
    elif state in ("", "unknown"):  # drivers that do not report it
        carrier = place.number(f"{at}/carrier")
        up = None if carrier is None else carrier == 1
    else:
        up = state == "dormant"
    flags = place.number(f"{at}/flags") if up is not True else None
    same = before if before and before.up == up and not thorough else None
    return Interface(
        name=name,
        up=up,
        by_hand=flags is not None and not flags & 1,
        mbps=same.mbps if same else place.number(f"{at}/speed") if up else None,
        downs=_downs(place, at),
        received=0 if up else place.number(f"{at}/statistics/rx_bytes") or 0,
    )


def _downs(place: ProbeContext, at: str) -> int | None:
    downs = place.number(f"{at}/carrier_down_count")
    if downs is None and (changes := place.number(f"{at}/carrier_changes")) is not None:  # before Linux 4.16
        downs = changes // 2
    return downs


def bond_of(place: ProbeContext, name: str) -> tuple[str, list[str]]:
    """The bond that an interface is a part of, and all its parts; nothing for one that is in none."""
    master = place.link(f"sys/class/net/{name}/master")
    # Captured trees may lack that link.
    bonds = [master.rpartition("/")[2]] if master else [] if place.live else place.names("sys/class/net")
    for bond in bonds:
        parts = (place.text(f"sys/class/net/{bond}/bonding/slaves", 1024) or "").split()
        if name in parts:
            return bond, parts
    return "", []


def judge_carrier(one: Interface, link: NetworkLink, alone: bool, bond: str = "") -> CheckResult:
    """`alone`: the default route goes through it, and through no other that is up. `bond`: it has a part that is up."""
    if one.up is None:
        return unknown(CARRIER.id, "its state cannot be read", one.name)
    if one.up:
        return healthy(CARRIER.id, one.name, "up")
    used = link.good or one.received > 0
    if not used and not bond:
        return not_applicable(CARRIER.id, "never up in this boot", one.name)
    text = "taken down" if one.by_hand else "no carrier"
    text += ", although it was up earlier" * used + clean_text(f"; {bond} has to do without it", 64) * bool(bond)
    text += "; the default route goes through it" * alone
    return unhealthy(CARRIER.id, text, one.name, level="critical" if alone else "warning")


def judge_speed(one: Interface, link: NetworkLink, least: float) -> CheckResult:
    if not one.up or one.mbps is None or one.mbps <= 0:  # -1: virtual functions, virtio
        return not_applicable(SPEED.id, "its driver reports no speed" if one.up else "not up", one.name)
    text, wanted = f"{one.mbps} Mb/s", max(link.rate, least)
    if slow := one.mbps < wanted:
        text += f", {wanted:g} Mb/s {'earlier in this boot' if wanted == link.rate else 'are expected'}"
    return judged(SPEED.id, "warning" if slow else None, text, one.name, values={"mbps": one.mbps})


class EthernetProbe:
    """Looks at the node's physical Ethernet interfaces."""

    name = "ethernet"
    checks = checks_of("ethernet")
    every_s = 10.0
    deadline_s = 20.0
    once_s = 5.0

    def __init__(self) -> None:
        self._links = Links(self.name)
        self._physical: dict[str, bool] = {}
        self._routes: set[str] = set()
        self._before: dict[str, Interface] = {}
        self._thorough_at: float | None = None

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        known = self._links.load(place)
        found = self._read(place, now)
        links: dict[str, NetworkLink] = {}
        for one in found:
            up = one.up is True or (one.up is None and (before := known.get(one.name)) is not None and before.up)
            link = next_link(known.get(one.name), up, float(one.mbps or 0), one.downs, now.wall)
            routes = link.routes or one.name in self._routes
            links[one.name] = msgspec.structs.replace(link, routes=routes)
        results: list[CheckResult] = []
        for one in found:
            results += self._judge(place, one, links, now)
        self._links.keep(place, {**known, **links}, now.wall)
        why = "no physical Ethernet interface" if not found else "no interface is up"
        return results + without_result(self.checks, results, place, why)

    def _read(self, place: ProbeContext, now: Moment) -> list[Interface]:
        names = [name for name in place.names("sys/class/net") if not left_out(place, name)]
        thorough = self._thorough_at is None or now.mono - self._thorough_at >= 60
        if thorough:
            self._thorough_at, self._routes = now.mono, default_routes(place)
            self._physical.clear()
        for name in names:
            if name not in self._physical:
                self._physical[name] = is_physical(place, name)
        names = [name for name in names if self._physical[name]][:MOST_LINKS]
        found = [read_interface(place, name, self._before.get(name), thorough) for name in names]
        self._before = {one.name: one for one in found}
        return found

    def _judge(
        self, place: ProbeContext, one: Interface, links: dict[str, NetworkLink], now: Moment
    ) -> list[CheckResult]:
        name, link = one.name, links[one.name]
        alone = link.routes and not any(other.routes and other.up for other in links.values())
        bond, parts = bond_of(place, name) if one.up is False else ("", [])
        works = any(links[part].up for part in parts if part in links)
        carrier = judge_carrier(one, link, alone, bond if works else "")
        if carrier.status == "not_applicable":
            return [carrier]
        return [
            carrier,
            judge_lost(LINK_LOST, name, link, place, now.wall, "warning"),
            judge_speed(one, link, place.limits(SPEED)["least_mbps"]),
        ]


SETTINGS, RECORDER = CHECKS = checks_of("nccl")


# --- how NCCL is set up in a rank

KEYS: Final = frozenset(
    """
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE
    TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_DEBUG_INFO_PIPE_FILE
    """.split()
)
SLOW: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")
ENVIRON_LIMIT: Final = 1 << 20


@dataclasses.dataclass(frozen=True)
class RankNccl:
    rank: int
    pid: int
    settings: Mapping[str, str]


def read_settings(place: ProbeContext, pid: int) -> dict[str, str] | None:
    """None when the process is gone or another user's."""
    text = place.text(f"proc/{pid}/environ", ENVIRON_LIMIT)
    if text is None:
        return None
    found = {}
    for entry in text.split("\0"):
        key, _, value = entry.partition("=")
        if key in KEYS:
            found[key] = clean_text(value, 500)
    return found


def names_nothing(value: str, names: list[str]) -> list[str]:
    """Entries of `NCCL_SOCKET_IFNAME` or `NCCL_IB_HCA` that no name fits: prefixes, or with `=` whole names.

    With `^` the entries are left out, and may name what is not there.
    """
    if value.startswith("^"):
        return []
    whole, wanted = value.startswith("="), (entry.strip().partition(":")[0] for entry in value.lstrip("=").split(","))
    return [one for one in wanted if one and not any(name == one if whole else name.startswith(one) for name in names)]


def wrong_names(ranks: Iterable[RankNccl], interfaces: list[str], devices: list[str] | None) -> list[str]:
    """What is wrong, in words. `devices`: RDMA devices; None when they cannot be known."""
    wrong: dict[str, str] = {}
    for each in ranks:
        for variable, there, what in (
            ("NCCL_SOCKET_IFNAME", interfaces or None, "network interface"),
            ("NCCL_IB_HCA", devices, "RDMA device"),
        ):
            value = each.settings.get(variable, "")
            missing = names_nothing(value, there) if there is not None else []
            # Of several interfaces one is enough; a missing HCA is bandwidth that is missing.
            if missing and (variable == "NCCL_IB_HCA" or len(missing) == len(value.split(","))):
                text = clean_text(f"{variable}={value}: no {what} {', '.join(missing)} on this node", 300)
                wrong.setdefault(variable, text)
    return list(wrong.values())


def recorder_size(settings: Mapping[str, str]) -> int | None:
    """Entries of torch's flight recorder as it is set; None when it is left to torch (2000 since torch 2.8 or so)."""
    for key in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if (value := settings.get(key, "")).strip().isdecimal():
            return int(value)
    return None


class NcclProbe:
    name = "nccl"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 10.0
    once_s = 5.0

    def __init__(self) -> None:
        self._ranks: dict[int, RankNccl] = {}
        """Pid -> what was read of it: once, for what it was started with does not change."""

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:  # noqa: ARG002
        if not place.job.ranks:
            self._ranks = {}
            return [not_applicable(check.id, "no rank of a job here") for check in CHECKS]
        hidden = self._read(place)
        ranks = sorted(self._ranks.values(), key=lambda each: each.rank)
        if not ranks:
            why = "only the user of the job or root can read its ranks" if hidden else "the ranks are gone"
            return [unknown(check.id, why) for check in CHECKS]
        if not place.names("proc/driver/nvidia/gpus"):
            return [not_applicable(check.id, "no NVIDIA GPU here") for check in CHECKS]
        return [_judge_settings(place, ranks), _judge_recorder(ranks)]

    def _read(self, place: ProbeContext) -> bool:
        """Read the ranks that are new; whether there are any that cannot be read."""
        wanted = place.job.ranks
        self._ranks = {pid: each for pid, each in self._ranks.items() if pid in wanted}
        hidden = False
        for pid, rank in wanted.items():
            if pid in self._ranks:
                continue
            if (settings := read_settings(place, pid)) is not None:
                self._ranks[pid] = RankNccl(rank, pid, settings)
            else:
                hidden = hidden or place.denied(f"proc/{pid}/environ")
        return hidden


def _judge_settings(place: ProbeContext, ranks: list[RankNccl]) -> CheckResult:
    lines = (place.text(f"proc/{ranks[0].pid}/net/dev") or "").splitlines()
    interfaces = [line.partition(":")[0].strip() for line in lines if ":" in line]
    known = place.live or place.path("sys/class/infiniband").is_dir()
    devices = place.names("sys/class/infiniband") if known else None
    wrong = wrong_names(ranks, interfaces, devices)
    return judged(SETTINGS.id, "warning" if wrong else None, "; ".join(wrong) or _summary(ranks[0]))


def _judge_recorder(ranks: list[RankNccl]) -> CheckResult:
    sizes = [recorder_size(each.settings) for each in ranks]
    if 0 in sizes:
        return unhealthy(RECORDER.id, "torch's flight recorder is off: a hang leaves no trace", level="warning")
    pipes = sum("TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in each.settings for each in ranks)
    kept = "as many entries as torch likes" if sizes[0] is None else f"{sizes[0]} entries"
    text = f"the flight recorder keeps {kept}; {pipes} pipes to have it dumped"
    return healthy(RECORDER.id, text=text, values={"pipes": pipes})


def _summary(each: RankNccl) -> str:
    level = each.settings.get("NCCL_DEBUG", "")
    text = f"NCCL_DEBUG={level}" if level else "NCCL_DEBUG is not set: NCCL keeps its warnings to itself"
    slow = [f"{key}=1" for key in SLOW if each.settings.get(key) == "1"]
    return clean_text(", ".join([text, *slow]), 200)
