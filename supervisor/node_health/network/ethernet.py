"""Ethernet interfaces of the node: carrier and speed.

Only physical interfaces count: a bond's or bridge's parts are looked at one by one, InfiniBand has its own probe, and
what was never up in this boot is nobody's fault.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis.health import Check, CheckResult, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.network.links import (
    MOST_LINKS,
    Links,
    NetworkLink,
    default_routes,
    judge_lost,
    left_out,
    next_link,
    without_result,
)

# fmt: off
CARRIER = Check(id="eth_carrier", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=2,
    what="network interface without carrier",
    source="/sys/class/net/*/operstate",
    threshold="down although it was up in this boot; critical where the default route goes through it; "
    "a bond's part that is down beside one that is up: a warning")
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
    checks = (CARRIER, LINK_LOST, SPEED)
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
