"""InfiniBand and RoCE ports: state, rate, lost links, error counters by rate. How they are read; rules judge them.

All from /sys/class/infiniband, whoever made the adapter: mlx5, hfi1, efa, bnxt_re, irdma, mana.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from diagnosis.health import Check, CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from supervisor.node_health.contract import Moment, ProbeContext, Rates, checks_of
from supervisor.node_health.network import (
    MOST_LINKS,
    Links,
    NetworkLink,
    bus_address,
    default_routes,
    gone_from_bus,
    judge_lost,
    left_out,
    next_link,
    outliers,
    without_result,
)

ROOT: Final = "sys/class/infiniband"

MISSING, COUNT, STATE, RATE, LINK_LOST, SYMBOLS, LINK_ERRORS, TRANSPORT, NETDEV = CHECKS = checks_of("infiniband")

_WIDTHS: Final = {  # Bits of the counters in the PortCounters attribute (InfiniBand volume 1, 16.1.3.5).
    "link_downed": 8,
    "symbol_error": 16,
    "link_error_recovery": 8,
    "port_rcv_errors": 16,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
    "port_xmit_discards": 16,
}


class RdmaDevice(Frozen, frozen=True, kw_only=True):
    """What of a device changes only with its driver or firmware."""

    name: str
    kind: str = ""
    """Type and board: devices of one kind are peers."""
    card: str = ""
    """GUID of the card: ports of one card share it."""
    bus: str = ""
    interfaces: tuple[str, ...] = ()
    ports: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """Number, link layer, and those counters of `_COUNTERS` that it has."""


class Port(Frozen, frozen=True, kw_only=True):
    """One look at one port."""

    device: RdmaDevice
    number: str
    ethernet: bool
    """RoCE (or iWARP): its link layer is Ethernet."""
    state: str | None = None
    """`ACTIVE`, `DOWN`, `INIT`, ...; None: cannot be read."""
    phys: str | None = None
    """`LinkUp`, `Polling`, `Disabled`, ..."""
    rate_text: str = ""
    counters: dict[str, int] = {}
    carried: bool = False
    """Not active, but its counters tell that it has carried traffic and lost its link."""
    octets: int = 0
    """What it has sent and received so far; read only while it is not active."""
    interfaces_down: tuple[str, ...] = ()
    """All its network interfaces, when all are down."""

    @property
    def name(self) -> str:
        return f"{self.device.name}/{self.number}"

    @property
    def active(self) -> bool:
        return self.state in ("ACTIVE", "ACTIVE_DEFER")

    @property
    def card(self) -> str:
        """Ports of one card share it. A slot tells: behind virtual functions, cards may share a GUID."""
        return self.device.bus.rpartition(".")[0] or self.device.card or self.name

    @property
    def group(self) -> str:
        return f"{self.device.kind} {'Ethernet' if self.ethernet else 'InfiniBand'}"

    @property
    def gbps(self) -> float:
        try:
            return float(self.rate_text.split()[0])
        except (ValueError, IndexError):
            return 0.0


def fast(port: Port, wanted_gbps: float | None) -> bool:
    return port.active and port.gbps >= (wanted_gbps or 0.0)


def expected_ports(ports: list[Port], wanted: int | None, wanted_gbps: float | None) -> set[str]:
    """The ports that ought to be active, where the site expects more active (and fast) ones than there are."""
    enough = [port for port in ports if fast(port, wanted_gbps)]
    if wanted is None or len(enough) >= wanted:
        return set()
    groups = {port.group for port in enough}
    return {port.name for port in ports if not port.active and (not groups or port.group in groups)}


def expected_rates(ports: list[Port], wanted_gbps: float | None) -> set[str]:
    """The ports that ought to have the site's rate: those of a kind that reaches it; all where none does."""
    groups = {port.group for port in ports if wanted_gbps and fast(port, wanted_gbps)}
    return {port.name for port in ports if wanted_gbps and (not groups or port.group in groups)}


def unlike_peers(ports: list[Port]) -> tuple[set[str], dict[str, float]]:
    """Ports that are not active, and ports that are slower, while at least three of four of their peers are not.

    A card's second port is often unused: only cards with one port are compared by state. Whose card has no port that is
    active is also unlike its peers when it carried gigabytes: disabling a port may not count as a lost link.
    """
    cards = [port.card for port in ports]
    working = {port.card for port in ports if port.active}
    groups: dict[str, list[Port]] = defaultdict(list)
    for port in ports:
        groups[port.group].append(port)
    idle: set[str] = set()
    slow: dict[str, float] = {}
    for group in groups.values():
        idle.update(outliers({port.name: float(port.active) for port in group if cards.count(port.card) == 1}))
        if any(port.active for port in group):
            idle.update(port.name for port in group if port.octets > USED_OCTETS and port.card not in working)
        slow.update(outliers({port.name: port.gbps for port in group if port.active and port.gbps}))
    return idle, slow


USED_OCTETS: Final = 4_000_000_000
"""More than a port carries that is only tried out, or that a node was installed through."""
_LINK_NOT_UP: Final = ("Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkErrorRecovery", "Phy Test")
"""Words of `phys_state` that contradict ACTIVE; drivers without such a state write others."""


def judge_state(port: Port, link: NetworkLink, *, expected: bool, unlike: bool) -> CheckResult:
    name, state, phys = port.name, port.state, port.phys or "phys_state unknown"
    if state is None:
        return unknown(STATE.id, "its state cannot be read", name)
    if port.active:
        if state == "ACTIVE" and port.phys not in _LINK_NOT_UP:
            return healthy(STATE.id, name, f"ACTIVE, {port.rate_text}")
        return unhealthy(STATE.id, f"{name} is {state}, but its link is {phys}", name, level="warning")
    waiting = state in ("INIT", "ARMED")
    level: Level = "warning" if waiting else "critical"
    if link.good:
        why = "it was ACTIVE earlier in this boot"
    elif expected:
        why = "the site expects more active ports"
    elif port.carried:
        # What an Ethernet port carried may have been the installation of the node.
        why, level = "it has carried traffic before", "warning" if port.ethernet else level
    elif unlike:
        carried = f", and it has carried {port.octets / 1e9:.0f} GB" if port.octets > USED_OCTETS else ""
        why, level = f"its peers are ACTIVE{carried}", "warning"
    elif waiting and not port.ethernet:
        why = "no subnet manager has made it active"
    else:
        return not_applicable(STATE.id, f"{state} ({phys}), and never ACTIVE in this boot", name)
    return unhealthy(STATE.id, f"{name} is {state} ({phys}): {why}", name, level=level)


def judge_rate(port: Port, link: NetworkLink, wanted: float | None, peers: float | None) -> CheckResult:
    gbps, name = port.gbps, port.name
    if not port.active:
        return not_applicable(RATE.id, "not active", name)
    if not gbps:
        return unknown(RATE.id, "its rate cannot be read", name)
    values = {"gbps": gbps}
    for limit, what in ((wanted, "expected by the site"), (link.rate, "earlier in this boot"), (peers, "on its peers")):
        if limit and gbps < limit:
            text = f"{name} runs at {port.rate_text}; {limit:g} Gb/s {what}"
            return unhealthy(RATE.id, text, name, "critical" if limit is wanted else "warning", values=values)
    return healthy(RATE.id, name, port.rate_text, values=values)


def full(port: Port, counter: str) -> bool:
    """At its maximum: it cannot tell any more. A driver whose counters are wider may pass through that value."""
    return counter in _WIDTHS and port.counters.get(counter) == (1 << _WIDTHS[counter]) - 1


def judge_symbols(port: Port, in_hour: int, in_minute: int, limits: dict[str, float]) -> CheckResult:
    total = port.counters.get("symbol_error")
    if total is None:
        return not_applicable(SYMBOLS.id, "it has no such counter", port.name)
    values = {"symbol_errors_total": total, "in_1_h": in_hour, "in_1_min": in_minute}
    if in_minute > limits["per_s"] * 60 or in_hour > limits["per_hour"]:
        text = f"{port.name} counted {in_hour} symbol errors in an hour, {in_minute} in the last minute"
        return unhealthy(SYMBOLS.id, text, port.name, level="warning", values=values)
    return healthy(SYMBOLS.id, port.name, "its counter is full" if full(port, "symbol_error") else "", values=values)


def judge_table(check: Check, port: Port, in_minute: dict[str, int], limits: dict[str, float]) -> CheckResult:
    """Counters of a table, each by its own limit for a minute."""
    values = {f"{name}_total": port.counters[name] for name in limits if name in port.counters}
    if not values:
        return not_applicable(check.id, "it has no such counters", port.name)
    over = {name: count for name, count in in_minute.items() if count > limits.get(name, float("inf"))}
    if over:
        text = f"{port.name} in a minute: " + ", ".join(f"{name} +{count}" for name, count in over.items())
        return unhealthy(check.id, text, port.name, level="warning", values=values)
    at_end = [name for name in limits if full(port, name)]
    return healthy(check.id, port.name, f"full, cannot grow: {', '.join(at_end)}" if at_end else "", values=values)


def judge_netdev(port: Port) -> CheckResult:
    if not port.active or not port.ethernet or not port.device.interfaces:
        return not_applicable(NETDEV.id, "no network interface belongs to it", port.name)
    text = clean_text(", ".join(port.device.interfaces), 100)
    if port.interfaces_down:
        text = f"{port.name} is ACTIVE, {text} down"
    return judged(NETDEV.id, "warning" if port.interfaces_down else None, text, port.name)


def judge_count(ports: list[Port], wanted: int | None, wanted_gbps: float | None) -> CheckResult:
    active = sum(fast(port, wanted_gbps) for port in ports)
    values = {"active": active, "ports": len(ports)}
    if wanted is None:
        return not_applicable(COUNT.id, "the site expects no number")
    if active >= wanted:
        return healthy(COUNT.id, text=f"{active} active", values=values)
    idle = clean_text(", ".join(port.name for port in ports if not port.active), 200)
    at = f" at {wanted_gbps:g} Gb/s" if wanted_gbps else ""
    text = f"{active} active ports{at}, {wanted} are expected" + (f"; not active: {idle}" if idle else "")
    return unhealthy(COUNT.id, text, values=values)


_COUNTERS: Final = (
    *(f"counters/{name}" for name in ("link_downed", "symbol_error", *LINK_ERRORS.limits)),
    *(f"hw_counters/{name}" for name in TRANSPORT.limits),
)


def read_device(place: ProbeContext, name: str) -> RdmaDevice | None:
    """None for what is no adapter of the machine: soft RoCE (rxe), soft iWARP (siw)."""
    at = f"{ROOT}/{name}"
    if "/virtual/" in (place.link(at) or "") or name.startswith(("rxe", "siw")):
        return None

    def word(file: str) -> str:
        return clean_text((place.text(f"{at}/{file}", 256) or "").strip(), 64)

    ports = []
    for number in place.names(f"{at}/ports", "[1-9]*", 8):  # 0 is a switch's own port
        there = {f"{group}/{one}" for group in ("counters", "hw_counters") for one in _files(place, at, number, group)}
        ports.append((number, word(f"ports/{number}/link_layer"), tuple(one for one in _COUNTERS if one in there)))
    return RdmaDevice(
        name=name,
        kind=f"{word('hca_type')} {word('board_id')}".strip(),
        card=word("sys_image_guid"),
        bus=bus_address(place, f"{at}/device"),
        interfaces=tuple(place.names(f"{at}/device/net", limit=16)),
        ports=tuple(ports),
    )


def _files(place: ProbeContext, at: str, number: str, group: str) -> list[str]:
    return place.names(f"{at}/ports/{number}/{group}", limit=256)


def read_port(
    place: ProbeContext, device: RdmaDevice, port: tuple[str, str, tuple[str, ...]], before: Port | None, thorough: bool
) -> Port:
    """State and lost links at every look; the rest, for which the driver asks its firmware, when `thorough`."""
    number, layer, counters = port
    at = f"{ROOT}/{device.name}/ports/{number}"
    state = _named(place.text(f"{at}/state", 64))
    thorough = thorough or before is None or before.state != state
    wanted = counters if thorough else tuple(one for one in counters if one.endswith("/link_downed"))
    values = {one.partition("/")[2]: value for one in wanted if (value := place.number(f"{at}/{one}")) is not None}
    active = state in ("ACTIVE", "ACTIVE_DEFER")
    if before is not None and not thorough:
        return msgspec.structs.replace(before, state=state, counters={**before.counters, **values})
    return Port(
        device=device,
        number=number,
        ethernet=layer == "Ethernet",
        state=state,
        phys=_named(place.text(f"{at}/phys_state", 64)),
        rate_text=clean_text((place.text(f"{at}/rate", 64) or "").strip(), 40),
        counters=values,
        carried=not active
        and values.get("link_downed", 1) > 0
        and (place.number(f"{at}/counters/port_rcv_data") or 0) > 0,
        octets=0 if active else _octets(place, at),
        interfaces_down=_interfaces_down(place, device) if active and layer == "Ethernet" else (),
    )


def _octets(place: ProbeContext, at: str) -> int:
    """The counters are of words of four bytes."""
    return 4 * sum(place.number(f"{at}/counters/{name}") or 0 for name in ("port_rcv_data", "port_xmit_data"))


def _named(text: str | None) -> str | None:
    """`4: ACTIVE` -> `ACTIVE`."""
    return clean_text(text.partition(":")[2].strip(), 32) or None if text else None


def _interfaces_down(place: ProbeContext, device: RdmaDevice) -> tuple[str, ...]:
    if "bond" in device.name:  # it stands for several cards, and `device` is only one of them
        return ()
    states = [(place.text(f"sys/class/net/{name}/operstate", 32) or "").strip() for name in device.interfaces]
    return device.interfaces if states and all(state == "down" for state in states) else ()


def judge_missing(place: ProbeContext, known: dict[str, NetworkLink], devices: list[RdmaDevice]) -> list[CheckResult]:
    """What is known of ports tells which devices there were."""
    there, buses = {device.name for device in devices}, {device.bus for device in devices}
    results = [healthy(MISSING.id, name) for name in sorted(there)]
    for name, link in {port.partition("/")[0]: link for port, link in known.items() if link.good}.items():
        if name in there or left_out(place, name) or (link.bus and link.bus in buses):  # the last: renamed
            continue
        why = gone_from_bus(place, link.bus)
        text = clean_text(f"{name}, which was active earlier in this boot, is gone: {why or 'its driver dropped it'}")
        results.append(unhealthy(MISSING.id, text, name, level="critical" if why else "warning"))
    return results


class InfinibandProbe:
    """Looks at the ports of the node's InfiniBand, RoCE, Omni-Path and EFA adapters."""

    name = "infiniband"
    checks = (
        MISSING,
        COUNT,
        STATE,
        RATE,
        LINK_LOST,
        SYMBOLS,
        LINK_ERRORS,
        TRANSPORT,
        NETDEV,
    )
    every_s = 10.0
    deadline_s = 20.0
    once_s = 5.0

    def __init__(self) -> None:
        self._links = Links(self.name)
        self._rates = Rates()
        self._devices: dict[str, RdmaDevice | None] = {}
        self._before: dict[str, Port] = {}
        self._routes: set[str] = set()
        self._thorough_at: float | None = None
        self._devices_at: float | None = None

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        known = self._links.load(place)
        devices, ports = self._read(place, now)
        links: dict[str, NetworkLink] = {}
        for port in ports:
            downs = None if full(port, "link_downed") else port.counters.get("link_downed")
            link = next_link(known.get(port.name), port.active, port.gbps, downs, now.wall)
            links[port.name] = msgspec.structs.replace(link, bus=port.device.bus)
        results = judge_missing(place, known, devices)
        expect = place.site.expect
        if ports or expect.ib_ports is not None:
            results.append(judge_count(ports, expect.ib_ports, expect.ib_rate_gbps))
        results += self._judge(place, ports, links, now)
        if known or links:
            self._links.keep(place, {**known, **links}, now.wall)
        return results + without_result(self.checks, results, place, "no such adapter")

    def _read(self, place: ProbeContext, now: Moment) -> tuple[list[RdmaDevice], list[Port]]:
        names = place.names(ROOT, limit=MOST_LINKS)
        if set(names) != set(self._devices) or self._devices_at is None or now.mono - self._devices_at >= 600:
            self._devices = {name: read_device(place, name) for name in names}
            self._devices_at, self._thorough_at = now.mono, None
        thorough = self._thorough_at is None or now.mono - self._thorough_at >= 30
        if thorough and names:
            self._thorough_at, self._routes = now.mono, default_routes(place)
        devices = [one for one in self._devices.values() if one and not left_out(place, one.name, *one.interfaces)]
        ports = []
        for device in devices:
            for port in device.ports:
                # The probe of Ethernet judges what carries the default route.
                if port[1] != "Ethernet" or not self._routes.intersection(device.interfaces):
                    before = self._before.get(f"{device.name}/{port[0]}")
                    ports.append(read_port(place, device, port, before, thorough))
        self._before = {port.name: port for port in ports}
        return devices, ports

    def _judge(
        self, place: ProbeContext, ports: list[Port], links: dict[str, NetworkLink], now: Moment
    ) -> list[CheckResult]:
        expect = place.site.expect
        expected = expected_ports(ports, expect.ib_ports, expect.ib_rate_gbps)
        rated = expected_rates(ports, expect.ib_rate_gbps)
        idle, slow = unlike_peers(ports)
        results: list[CheckResult] = []
        for port in ports:
            name, link = port.name, links[port.name]
            state = judge_state(port, link, expected=name in expected, unlike=name in idle)
            results.append(state)
            if state.status == "not_applicable":
                continue
            for counter, value in port.counters.items():
                self._rates.add((name, counter), value, now.mono)
            minute = {counter: self._rates.increase((name, counter), 60, now.mono) for counter in port.counters}
            hour = self._rates.increase((name, "symbol_error"), 3600, now.mono)
            results += [
                judge_rate(port, link, expect.ib_rate_gbps if name in rated else None, slow.get(name)),
                judge_lost(LINK_LOST, name, link, place, now.wall, "critical"),
                judge_symbols(port, hour, minute.get("symbol_error", 0), place.limits(SYMBOLS)),
                judge_table(LINK_ERRORS, port, minute, place.limits(LINK_ERRORS)),
                judge_table(TRANSPORT, port, minute, place.limits(TRANSPORT)),
                judge_netdev(port),
            ]
        return results
