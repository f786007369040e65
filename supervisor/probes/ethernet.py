"""Ethernet interfaces of the node: carrier, drops, speed, errors.

Only physical interfaces count: a bond's or bridge's parts are looked at one by one, InfiniBand has its own probe, and
what was never up in this boot is nobody's fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from diagnosis.health import Check, Level, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import Word, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes.counters import Rates
from supervisor.probes.links import (
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
)
from supervisor.probes.probe import Moment, Place

# fmt: off
CARRIER = Check(id="eth_carrier", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=2,
    what="network interface without carrier",
    source="/sys/class/net/*/operstate",
    threshold="down although it was up in this boot; critical where the default route goes through it")
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
DROPS = Check(id="eth_drops", failure_class=FailureClass.NCCL_NETWORK, scope="node", when="periodic",
    what="dropped packets",
    source="/proc/net/dev",
    # Every host drops a few: frames of protocols that nobody listens to count as drops.
    threshold="more than {drops_per_s} a second over a minute, and more than {percent} % of all packets",
    limits={"drops_per_s": 100, "percent": 1})
MTU = Check(id="eth_mtu", failure_class=FailureClass.NCCL_SETUP, scope="node", when="preflight",
    what="MTU other than expected",
    source="/sys/class/net/*/mtu",
    threshold="less than {least_mtu} (0: not asked for), or less than three of four interfaces of the same driver have",
    limits={"least_mtu": 0})
# fmt: on


class Interface(Word, frozen=True, kw_only=True):
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
    packets: int = 0
    errors: int = 0
    dropped: int = 0
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


def read_totals(place: Place, names: Iterable[str]) -> dict[str, tuple[int, int, int, int]]:
    """Interface -> packets, errors, drops (both ways) and bytes received: all in one file."""
    table: dict[str, tuple[int, int, int, int]] = {}
    for line in (place.text("proc/net/dev", 256 * 1024) or "").splitlines():
        name, colon, rest = line.rpartition(":")
        fields = rest.split()
        if colon and len(fields) >= 16 and all(field.isdigit() for field in fields[:12]):
            n = [int(field) for field in fields[:12]]
            table[name.strip()] = (n[1] + n[9], n[2] + n[10], n[3] + n[11], n[0])
    if table:
        return table
    return {name: _statistics(place, f"sys/class/net/{name}/statistics") for name in names}  # a tree without /proc


def _statistics(place: Place, at: str) -> tuple[int, int, int, int]:
    def total(*counters: str) -> int:
        return sum(place.number(f"{at}/{counter}") or 0 for counter in counters)

    return (
        total("rx_packets", "tx_packets"),
        total("rx_errors", "tx_errors"),
        total("rx_dropped", "tx_dropped", "rx_missed_errors"),
        total("rx_bytes"),
    )


def read_interface(
    place: Place, name: str, totals: tuple[int, int, int, int], before: Interface | None, thorough: bool
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
    thorough = thorough or before is None or before.up != up
    packets, errors, dropped, received = totals
    return Interface(
        name=name,
        up=up,
        by_hand=flags is not None and not flags & 1,
        mbps=(place.number(f"{at}/speed") if up else None) if thorough or before is None else before.mbps,
        downs=_downs(place, at),
        mtu=place.number(f"{at}/mtu") if thorough or before is None else before.mtu,
        driver=before.driver if before else (place.link(f"{at}/device/driver") or "").rpartition("/")[2],
        bus=before.bus if before else bus_address(place, f"{at}/device"),
        packets=packets,
        errors=errors,
        dropped=dropped,
        received=received,
    )


def _downs(place: Place, at: str) -> int | None:
    downs = place.number(f"{at}/carrier_down_count")
    if downs is None and (changes := place.number(f"{at}/carrier_changes")) is not None:  # before Linux 4.16
        downs = changes // 2
    return downs


def judge_carrier(one: Interface, link: Link, alone: bool) -> Reading:
    """`alone`: the default route goes through it, and through no other that is up."""
    if one.up is None:
        return unknown(CARRIER.id, "its state cannot be read", one.name)
    if one.up:
        return healthy(CARRIER.id, one.name, "up")
    if not link.good and not one.received:
        return not_applicable(CARRIER.id, "never up in this boot", one.name)
    how = "taken down" if one.by_hand else "no carrier"
    text = f"{how}, although it was up earlier" + ("; the default route goes through it" if alone else "")
    return unhealthy(CARRIER.id, text, one.name, level="critical" if alone else "warning")


def judge_link_lost(name: str, link: Link, limits: dict[str, float], at: float) -> Reading:
    recent, flaps = judge_lost(link, limits, at)
    values = {"lost": float(link.downs or 0), "lost_in_window": float(flaps)}
    if recent or flaps >= limits["flaps"]:
        text = f"carrier lost {recent} times in {limits['recent_min']:g} minutes, {flaps} in {limits['flap_hours']:g} h"
        return unhealthy(LINK_LOST.id, text, name, level="warning", values=values)
    return healthy(LINK_LOST.id, name, values=values)


def judge_speed(one: Interface, link: Link, least: float) -> Reading:
    if not one.up or one.mbps is None or one.mbps <= 0:  # -1: virtual functions, virtio
        return not_applicable(SPEED.id, "its driver tells no speed" if one.up else "not up", one.name)
    values = {"mbps": float(one.mbps)}
    if one.mbps < link.rate:
        text = f"{one.mbps} Mb/s, {link.rate:g} Mb/s earlier in this boot"
        return unhealthy(SPEED.id, text, one.name, level="warning", values=values)
    if one.mbps < least:
        text = f"{one.mbps} Mb/s, {least:g} Mb/s are expected"
        return unhealthy(SPEED.id, text, one.name, level="warning", values=values)
    return healthy(SPEED.id, one.name, f"{one.mbps} Mb/s", values=values)


def judge_errors(one: Interface, in_five_minutes: int, limit_per_min: float) -> Reading:
    values = {"errors_total": float(one.errors), "errors_in_5_min": float(in_five_minutes)}
    if in_five_minutes > limit_per_min * 5:
        text = f"{in_five_minutes} damaged frames in five minutes"
        return unhealthy(ERRORS.id, text, one.name, level="warning", values=values)
    return healthy(ERRORS.id, one.name, values=values)


def judge_drops(one: Interface, dropped: int, packets: int, limits: dict[str, float]) -> Reading:
    """`dropped` and `packets` of the last minute."""
    values = {"dropped_total": float(one.dropped), "dropped_in_1_min": float(dropped)}
    share = 100 * dropped / max(1, dropped + packets)
    if dropped > limits["drops_per_s"] * 60 and share > limits["percent"]:
        text = f"{dropped} packets dropped in a minute, {share:.1f} % of all"
        return unhealthy(DROPS.id, text, one.name, level="warning", values=values)
    return healthy(DROPS.id, one.name, values=values)


def judge_mtu(found: list[Interface], least: float) -> list[Reading]:
    readings = []
    for driver in sorted({one.driver for one in found}):
        peers = {one.name: float(one.mtu) for one in found if one.driver == driver and one.up and one.mtu}
        odd = outliers(peers) if driver else {}
        for name, mtu in peers.items():
            if mtu < (wanted := max(least, odd.get(name, 0.0))):
                text = f"MTU {mtu:g}, {wanted:g} {'on its peers' if name in odd else 'expected'}"
                readings.append(unhealthy(MTU.id, text, name, level="warning", values={"mtu": mtu}))
            else:
                readings.append(healthy(MTU.id, name, f"MTU {mtu:g}", values={"mtu": mtu}))
    return readings


class EthernetProbe:
    """Looks at the node's physical Ethernet interfaces."""

    name = "ethernet"
    checks = (CARRIER, MISSING, LINK_LOST, SPEED, ERRORS, DROPS, MTU)
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
        said = {reading.check for reading in readings}
        wanted = [check for check in self.checks if check.when != "preflight" or place.preflight]
        why = "no physical Ethernet interface" if not found else "no interface is up"
        return readings + [not_applicable(check.id, why) for check in wanted if check.id not in said]

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
            read_interface(place, name, totals.get(name, (0, 0, 0, 0)), self._before.get(name), thorough)
            for name in names
        ]
        self._before = {one.name: one for one in found}
        return found

    def _judge(self, place: Place, one: Interface, links: dict[str, Link], now: Moment) -> list[Reading]:
        name, link = one.name, links[one.name]
        for key, value in (("errors", one.errors), ("dropped", one.dropped), ("packets", one.packets)):
            self._rates.add((name, key), value, now.mono)
        alone = link.routes and not any(other.routes and other.up for other in links.values())
        grown = self._rates.increase
        carrier = judge_carrier(one, link, alone)
        if carrier.status == "not_applicable":
            return [carrier]
        return [
            carrier,
            judge_link_lost(name, link, place.limits(LINK_LOST), now.wall),
            judge_speed(one, link, place.limits(SPEED)["least_mbps"]),
            judge_errors(one, grown((name, "errors"), 300, now.mono), place.limits(ERRORS)["errors_per_min"]),
            judge_drops(
                one,
                grown((name, "dropped"), 60, now.mono),
                grown((name, "packets"), 60, now.mono),
                place.limits(DROPS),
            ),
        ]

    @staticmethod
    def _judge_missing(place: Place, known: dict[str, Link], links: dict[str, Link]) -> list[Reading]:
        readings: list[Reading] = []
        for name, link in known.items():
            if name in links or not link.good or left_out(place, name):
                continue
            if any(other.bus == link.bus for other in links.values() if link.bus):  # renamed
                readings.append(not_applicable(MISSING.id, "it has another name now", name))
            elif why := gone_from_bus(place, link.bus):
                level: Level = "critical" if link.routes else "warning"
                text = clean_text(f"{name}, which was up earlier in this boot, is gone: {why}")
                readings.append(unhealthy(MISSING.id, text, name, level=level))
            else:
                readings.append(
                    not_applicable(MISSING.id, "no longer seen: it may be in another network namespace", name)
                )
        return readings + [healthy(MISSING.id, name) for name in links]
