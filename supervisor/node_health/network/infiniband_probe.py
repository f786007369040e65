"""InfiniBand and RoCE ports: state, rate, lost links, error counters by rate. How they are read; rules judge them.

All from /sys/class/infiniband, whoever made the adapter: mlx5, hfi1, efa, bnxt_re, irdma, mana.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.health import Reading, healthy, unhealthy
from diagnosis.signals import clean_text
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.network import infiniband as rules
from supervisor.node_health.network.counters import Rates
from supervisor.node_health.network.infiniband import ROOT, Device, Port
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
    unsaid,
)

_COUNTERS: Final = (
    *(f"counters/{name}" for name in ("link_downed", "symbol_error", *rules.LINK_ERRORS.limits)),
    *(f"hw_counters/{name}" for name in rules.TRANSPORT.limits),
)


def read_device(place: Place, name: str) -> Device | None:
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
    return Device(
        name=name,
        kind=f"{word('hca_type')} {word('board_id')}".strip(),
        card=word("sys_image_guid"),
        bus=bus_address(place, f"{at}/device"),
        interfaces=tuple(place.names(f"{at}/device/net", limit=16)),
        ports=tuple(ports),
    )


def _files(place: Place, at: str, number: str, group: str) -> list[str]:
    return place.names(f"{at}/ports/{number}/{group}", limit=256)


def read_port(
    place: Place, device: Device, port: tuple[str, str, tuple[str, ...]], before: Port | None, thorough: bool
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


def _octets(place: Place, at: str) -> int:
    """The counters are of words of four bytes."""
    return 4 * sum(place.number(f"{at}/counters/{name}") or 0 for name in ("port_rcv_data", "port_xmit_data"))


def _named(text: str | None) -> str | None:
    """`4: ACTIVE` -> `ACTIVE`."""
    return clean_text(text.partition(":")[2].strip(), 32) or None if text else None


def _interfaces_down(place: Place, device: Device) -> tuple[str, ...]:
    if "bond" in device.name:  # it stands for several cards, and `device` is only one of them
        return ()
    states = [(place.text(f"sys/class/net/{name}/operstate", 32) or "").strip() for name in device.interfaces]
    return device.interfaces if states and all(state == "down" for state in states) else ()


def judge_missing(place: Place, known: dict[str, Link], devices: list[Device]) -> list[Reading]:
    """What is known of ports tells which devices there were."""
    there, buses = {device.name for device in devices}, {device.bus for device in devices}
    readings = [healthy(rules.MISSING.id, name) for name in sorted(there)]
    for name, link in {port.partition("/")[0]: link for port, link in known.items() if link.good}.items():
        if name in there or left_out(place, name) or (link.bus and link.bus in buses):  # the last: renamed
            continue
        why = gone_from_bus(place, link.bus)
        text = clean_text(f"{name}, which was active earlier in this boot, is gone: {why or 'its driver dropped it'}")
        readings.append(unhealthy(rules.MISSING.id, text, name, level="critical" if why else "warning"))
    return readings


class InfinibandProbe:
    """Looks at the ports of the node's InfiniBand, RoCE, Omni-Path and EFA adapters."""

    name = "infiniband"
    checks = (
        rules.MISSING,
        rules.COUNT,
        rules.STATE,
        rules.RATE,
        rules.LINK_LOST,
        rules.SYMBOLS,
        rules.LINK_ERRORS,
        rules.TRANSPORT,
        rules.NETDEV,
    )
    every_s = 10.0
    deadline_s = 20.0

    def __init__(self) -> None:
        self._links = Links(self.name)
        self._rates = Rates()
        self._devices: dict[str, Device | None] = {}
        self._before: dict[str, Port] = {}
        self._routes: set[str] = set()
        self._thorough_at: float | None = None
        self._devices_at: float | None = None

    def look(self, place: Place, now: Moment) -> list[Reading]:
        known = self._links.load(place)
        devices, ports = self._read(place, now)
        links: dict[str, Link] = {}
        for port in ports:
            downs = None if rules.full(port, "link_downed") else port.counters.get("link_downed")
            link = next_link(known.get(port.name), port.active, port.gbps, downs, now.wall)
            links[port.name] = msgspec.structs.replace(link, bus=port.device.bus)
        readings = judge_missing(place, known, devices)
        expect = place.site.expect
        if ports or expect.ib_ports is not None:
            readings.append(rules.judge_count(ports, expect.ib_ports, expect.ib_rate_gbps))
        readings += self._judge(place, ports, links, now)
        if known or links:
            self._links.keep(place, {**known, **links}, now.wall)
        return readings + unsaid(self.checks, readings, place, "no such adapter")

    def _read(self, place: Place, now: Moment) -> tuple[list[Device], list[Port]]:
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

    def _judge(self, place: Place, ports: list[Port], links: dict[str, Link], now: Moment) -> list[Reading]:
        expect = place.site.expect
        expected = rules.expected_ports(ports, expect.ib_ports, expect.ib_rate_gbps)
        rated = rules.expected_rates(ports, expect.ib_rate_gbps)
        idle, slow = rules.unlike_peers(ports)
        readings: list[Reading] = []
        for port in ports:
            name, link = port.name, links[port.name]
            state = rules.judge_state(port, link, expected=name in expected, unlike=name in idle)
            readings.append(state)
            if state.status == "not_applicable":
                continue
            for counter, value in port.counters.items():
                self._rates.add((name, counter), value, now.mono)
            minute = {counter: self._rates.increase((name, counter), 60, now.mono) for counter in port.counters}
            hour = self._rates.increase((name, "symbol_error"), 3600, now.mono)
            readings += [
                rules.judge_rate(port, link, expect.ib_rate_gbps if name in rated else None, slow.get(name)),
                judge_lost(rules.LINK_LOST, name, link, place, now.wall, "critical"),
                rules.judge_symbols(port, hour, minute.get("symbol_error", 0), place.limits(rules.SYMBOLS)),
                rules.judge_table(rules.LINK_ERRORS, port, minute, place.limits(rules.LINK_ERRORS)),
                rules.judge_table(rules.TRANSPORT, port, minute, place.limits(rules.TRANSPORT)),
                rules.judge_netdev(port),
            ]
        return readings
