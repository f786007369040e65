"""What network links have in common: what is remembered of them (`NetworkLink`), and who is at fault.

Made for ports and interfaces alike. A link that was never up in this boot is nobody's fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Final, TypeVar

import msgspec

from diagnosis.health import Check, CheckResult, Level, judged, not_applicable
from diagnosis.signals import Frozen
from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.counters import recall
from supervisor.node_health.pci_devices import ADDRESS

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
    return any(fnmatchcase(name, pattern) for name in names for pattern in place.site.interfaces_left_out)


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
