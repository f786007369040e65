"""Ethernet interfaces of the node: carrier, speed, errors.

Only physical interfaces count: a bond's or bridge's parts are looked at one by one, InfiniBand has its own probe, and
what was never up in this boot is nobody's fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.network.counters import Rates
from supervisor.node_health.network.links import (
    MOST_LINKS,
    Link,
    Links,
    bus_address,
    default_routes,
    gone_from_bus,
    judge_lost,
    left_out,
    next_link,
    outliers,
    unsaid,
)

# fmt: off
CARRIER = Check(id="eth_carrier", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=2,
    what="network interface without carrier",
    source="/sys/class/net/*/operstate",
    threshold="down although it was up in this boot; critical where the default route goes through it; "
    "a bond's part that is down beside one that is up: a warning")
# a driver that is loaded anew takes some seconds
MISSING = Check(id="eth_missing", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=3,
    what="network interface gone",
    source="/sys/class/net",
    threshold="there earlier in this boot, and its device is gone from the bus or without a driver")
LINK_LOST = Check(id="eth_link_lost", failure_class=FailureClass.NCCL_NETWORK, scope="node",
    what="carrier lost a short while ago",
    source="/sys/class/net/*/carrier_down_count",
    threshold="once in {recent_min} minutes, or {flaps} times in {flap_hours} hours",
    limits={"recent_min": 10, "flaps": 3, "flap_hours": 12})
SPEED = Check(id="eth_speed", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", when="periodic",
    what="network interface slower than before",
    source="/sys/class/net/*/speed",
    threshold="less than it had in this boot, or than {least_mbps} Mb/s (0: not asked for)",
    limits={"least_mbps": 0})
ERRORS = Check(id="eth_errors", failure_class=FailureClass.NCCL_NETWORK, scope="node", when="periodic",
    what="damaged frames",
    source="/proc/net/dev",
    threshold="more than {errors_per_min} errors a minute over five minutes",
    limits={"errors_per_min": 60})
MTU = Check(id="eth_mtu", failure_class=FailureClass.NCCL_SETUP, scope="node", when="preflight",
    what="MTU other than expected",
    source="/sys/class/net/*/mtu",
    threshold="less than {least_mtu} (0: not asked for), or less than three of four interfaces of the same driver have",
    limits={"least_mtu": 0})
# fmt: on


class Interface(Frozen, frozen=True, kw_only=True):
    """One look at one interface."""

    name: str
    up: bool | None = None
    """None: not to be seen."""
    by_hand: bool = False
    """Somebody has taken it down (`ip link set down`)."""
    mbps: int | None = None
    downs: int | None = None
    mtu: int | None = None
    driver: str = ""
    bus: str = ""
    errors: int = 0
    received: int = 0
    """Bytes since the driver was loaded."""


_REPRESENTOR: Final = re.compile(r"pf\d+(vf|sf)\d+")
_ETHERNET: Final = 1
"""ARPHRD_ETHER; IP over InfiniBand is 32."""


def is_physical(place: Place, name: str) -> bool:
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


def read_totals(place: Place, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Interface -> errors (both ways) and bytes received: all in one file."""
    table: dict[str, tuple[int, int]] = {}
    for line in (place.text("proc/net/dev", 256 * 1024) or "").splitlines():
        name, colon, rest = line.rpartition(":")
        fields = rest.split()
        if colon and len(fields) >= 16 and all(field.isdigit() for field in fields[:12]):
            table[name.strip()] = int(fields[2]) + int(fields[10]), int(fields[0])
    # Of a tree without /proc it is enough to know what was ever used.
    return table or {name: (0, place.number(f"sys/class/net/{name}/statistics/rx_bytes") or 0) for name in names}


def read_interface(
    place: Place, name: str, totals: tuple[int, int], before: Interface | None, thorough: bool
) -> Interface:
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
        mtu=same.mtu if same else place.number(f"{at}/mtu"),
        driver=before.driver if before else (place.link(f"{at}/device/driver") or "").rpartition("/")[2],
        bus=before.bus if before else bus_address(place, f"{at}/device"),
        errors=totals[0],
        received=totals[1],
    )


def _downs(place: Place, at: str) -> int | None:
    downs = place.number(f"{at}/carrier_down_count")
    if downs is None and (changes := place.number(f"{at}/carrier_changes")) is not None:  # before Linux 4.16
        downs = changes // 2
    return downs


def bond_of(place: Place, name: str) -> tuple[str, list[str]]:
    """The bond that an interface is a part of, and all its parts; nothing for one that is in none."""
    master = place.link(f"sys/class/net/{name}/master")
    # Captured trees may lack that link.
    bonds = [master.rpartition("/")[2]] if master else [] if place.live else place.names("sys/class/net")
    for bond in bonds:
        parts = (place.text(f"sys/class/net/{bond}/bonding/slaves", 1024) or "").split()
        if name in parts:
            return bond, parts
    return "", []


def judge_carrier(one: Interface, link: Link, alone: bool, bond: str = "") -> Reading:
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


def judge_speed(one: Interface, link: Link, least: float) -> Reading:
    if not one.up or one.mbps is None or one.mbps <= 0:  # -1: virtual functions, virtio
        return not_applicable(SPEED.id, "its driver tells no speed" if one.up else "not up", one.name)
    text, wanted = f"{one.mbps} Mb/s", max(link.rate, least)
    if slow := one.mbps < wanted:
        text += f", {wanted:g} Mb/s {'earlier in this boot' if wanted == link.rate else 'are expected'}"
    return judged(SPEED.id, "warning" if slow else None, text, one.name, values={"mbps": one.mbps})


def judge_errors(one: Interface, in_five_minutes: int, limit_per_min: float) -> Reading:
    values = {"errors_total": one.errors, "errors_in_5_min": in_five_minutes}
    text, many = f"{in_five_minutes} damaged frames in five minutes", in_five_minutes > limit_per_min * 5
    return judged(ERRORS.id, "warning" if many else None, text, one.name, values=values)


def judge_mtu(found: list[Interface], least: float) -> list[Reading]:
    readings = []
    for driver in sorted({one.driver for one in found}):
        peers = {one.name: float(one.mtu) for one in found if one.driver == driver and one.up and one.mtu}
        odd = outliers(peers) if driver else {}
        for name, mtu in peers.items():
            text, wanted = f"MTU {mtu:g}", max(least, odd.get(name, 0.0))
            if low := mtu < wanted:
                text += f", {wanted:g} {'on its peers' if name in odd else 'expected'}"
            readings.append(judged(MTU.id, "warning" if low else None, text, name, values={"mtu": mtu}))
    return readings


class EthernetProbe:
    """Looks at the node's physical Ethernet interfaces."""

    name = "ethernet"
    checks = (CARRIER, MISSING, LINK_LOST, SPEED, ERRORS, MTU)
    every_s = 10.0
    deadline_s = 20.0

    def __init__(self) -> None:
        self._links = Links(self.name)
        self._rates = Rates()
        self._physical: dict[str, bool] = {}
        self._routes: set[str] = set()
        self._before: dict[str, Interface] = {}
        self._thorough_at: float | None = None

    def look(self, place: Place, now: Moment) -> list[Reading]:
        known = self._links.load(place)
        found = self._read(place, now)
        links: dict[str, Link] = {}
        for one in found:
            up = one.up is True or (one.up is None and (before := known.get(one.name)) is not None and before.up)
            link = next_link(known.get(one.name), up, float(one.mbps or 0), one.downs, now.wall)
            routes = link.routes or one.name in self._routes
            links[one.name] = msgspec.structs.replace(link, routes=routes, bus=one.bus or link.bus)
        readings = self._judge_missing(place, known, links)
        for one in found:
            readings += self._judge(place, one, links, now)
        if place.preflight:
            readings += judge_mtu(found, place.limits(MTU)["least_mtu"])
        self._links.keep(place, {**known, **links}, now.wall)
        why = "no physical Ethernet interface" if not found else "no interface is up"
        return readings + unsaid(self.checks, readings, place, why)

    def _read(self, place: Place, now: Moment) -> list[Interface]:
        names = [name for name in place.names("sys/class/net") if not left_out(place, name)]
        thorough = self._thorough_at is None or now.mono - self._thorough_at >= 60
        if thorough:
            self._thorough_at, self._routes = now.mono, default_routes(place)
            self._physical.clear()
        for name in names:
            if name not in self._physical:
                self._physical[name] = is_physical(place, name)
        names = [name for name in names if self._physical[name]][:MOST_LINKS]
        totals = read_totals(place, names) if names else {}
        found = [
            read_interface(place, name, totals.get(name, (0, 0)), self._before.get(name), thorough) for name in names
        ]
        self._before = {one.name: one for one in found}
        return found

    def _judge(self, place: Place, one: Interface, links: dict[str, Link], now: Moment) -> list[Reading]:
        name, link = one.name, links[one.name]
        self._rates.add(name, one.errors, now.mono)
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
            judge_errors(one, self._rates.increase(name, 300, now.mono), place.limits(ERRORS)["errors_per_min"]),
        ]

    @staticmethod
    def _judge_missing(place: Place, known: dict[str, Link], links: dict[str, Link]) -> list[Reading]:
        readings: list[Reading] = []
        for name, link in known.items():
            if name in links or not link.good or left_out(place, name):
                continue
            renamed = any(other.bus == link.bus for other in links.values() if link.bus)
            # One that is still on the bus may be in another network namespace.
            if not renamed and (why := gone_from_bus(place, link.bus)):
                level: Level = "critical" if link.routes else "warning"
                text = clean_text(f"{name}, which was up earlier in this boot, is gone: {why}")
                readings.append(unhealthy(MISSING.id, text, name, level=level))
        return readings + [healthy(MISSING.id, name) for name in links]
