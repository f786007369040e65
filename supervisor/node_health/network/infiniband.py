"""The checks of InfiniBand and RoCE ports, and their judges: pure functions over one look.

Counters are judged by how much they grew while we watched, never by what they had reached before. Those of the
InfiniBand standard are narrow and stay at their maximum once they reach it: `link_downed` at 255.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.network.links import Link, outliers

ROOT: Final = "sys/class/infiniband"
_PORT: Final = f"/{ROOT}/*/ports/*"

# fmt: off
# a driver that is loaded anew takes some seconds
MISSING = Check(id="ib_device_missing", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=3,
    what="InfiniBand or RoCE device gone",
    source=f"/{ROOT}",
    threshold="there earlier in this boot; critical when it is gone from the PCI bus or without a driver")
COUNT = Check(id="ib_port_count", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=2,
    what="too few active ports",
    source=f"{_PORT}/state",
    threshold="fewer active than the site expects (`ib_ports`)")
STATE = Check(id="ib_port_state", failure_class=FailureClass.NCCL_NETWORK, scope="node", looks=2,
    what="InfiniBand or RoCE port not active",
    source=f"{_PORT}/state and phys_state",
    threshold="not ACTIVE although it was in this boot or is expected; warning: INIT, ARMED, unlike its peers, or it "
    "carried gigabytes as its active peers did")
RATE = Check(id="ib_port_rate", failure_class=FailureClass.STRAGGLER_OR_SLOW, scope="node", when="periodic", looks=2,
    what="port slower than it should be",
    source=f"{_PORT}/rate",
    threshold="below the site's `ib_rate_gbps`; warning: below what it had in this boot, or what its peers have")
LINK_LOST = Check(id="ib_link_lost", failure_class=FailureClass.NCCL_NETWORK, scope="node",
    what="link lost a short while ago",
    source=f"{_PORT}/counters/link_downed",
    threshold="once in {recent_min} minutes, or {flaps} times in {flap_hours} hours",
    limits={"recent_min": 10, "flaps": 3, "flap_hours": 12})
SYMBOLS = Check(id="ib_symbol_errors", failure_class=FailureClass.NCCL_NETWORK, scope="node", when="periodic",
    what="symbol errors",
    source=f"{_PORT}/counters/symbol_error",
    # 120 an hour is the bit error rate of 1e-12 that the InfiniBand standard allows.
    threshold="more than {per_hour} in an hour, or {per_s} a second over a minute",
    limits={"per_hour": 120, "per_s": 10})
LINK_ERRORS = Check(id="ib_link_errors", failure_class=FailureClass.NCCL_NETWORK, scope="node", when="periodic",
    what="errors on the link",
    source=f"{_PORT}/counters",
    threshold="more in a minute than: link_error_recovery {link_error_recovery}, port_rcv_errors {port_rcv_errors}, "
    "local_link_integrity_errors {local_link_integrity_errors}, excessive_buffer_overrun_errors "
    "{excessive_buffer_overrun_errors}, port_xmit_discards {port_xmit_discards}",
    limits={"link_error_recovery": 5, "port_rcv_errors": 10, "local_link_integrity_errors": 0,
        "excessive_buffer_overrun_errors": 0, "port_xmit_discards": 100})
TRANSPORT = Check(id="ib_transport_errors", failure_class=FailureClass.NCCL_NETWORK, scope="fabric", when="periodic",
    what="connections that repeat or time out",
    source=f"{_PORT}/hw_counters",
    # Connections give up when a rank elsewhere dies, too: a warning, whose place may be another node. Adaptive routing
    # makes out_of_sequence grow, and a busy receiver rnr_nak_retry_err: high limits.
    threshold="any connection that gave up; or more in a minute than: local_ack_timeout_err {local_ack_timeout_err}, "
    "packet_seq_err {packet_seq_err}, out_of_sequence {out_of_sequence}, rnr_nak_retry_err {rnr_nak_retry_err}, "
    "roce_slow_restart {roce_slow_restart}, roce_adp_retrans {roce_adp_retrans}",
    limits={"req_transport_retries_exceeded": 0, "local_ack_timeout_err": 10, "packet_seq_err": 600,
        "out_of_sequence": 60000, "rnr_nak_retry_err": 600, "roce_slow_restart": 600, "roce_adp_retrans": 600,
        # The same under other names: mlx4, bnxt_re, mana, efa.
        "sq_num_tree": 0, "max_retry_exceeded": 0, "requester_retries_exceeded": 0,
        "unresponsive_remote_events": 0})
NETDEV = Check(id="ib_netdev", failure_class=FailureClass.NCCL_NETWORK, scope="node", when="periodic", looks=2,
    what="RoCE port whose network interface is down",
    source="/sys/class/infiniband/*/device/net/*/operstate",
    threshold="the port says ACTIVE, all its interfaces are down")
# fmt: on
CHECKS: Final = (MISSING, COUNT, STATE, RATE, LINK_LOST, SYMBOLS, LINK_ERRORS, TRANSPORT, NETDEV)

_WIDTHS: Final = {  # Bits of the counters in the PortCounters attribute (InfiniBand volume 1, 16.1.3.5).
    "link_downed": 8,
    "symbol_error": 16,
    "link_error_recovery": 8,
    "port_rcv_errors": 16,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
    "port_xmit_discards": 16,
}


class Device(Frozen, frozen=True, kw_only=True):
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

    device: Device
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


def judge_state(port: Port, link: Link, *, expected: bool, unlike: bool) -> Reading:
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


def judge_rate(port: Port, link: Link, wanted: float | None, peers: float | None) -> Reading:
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


def judge_symbols(port: Port, in_hour: int, in_minute: int, limits: dict[str, float]) -> Reading:
    total = port.counters.get("symbol_error")
    if total is None:
        return not_applicable(SYMBOLS.id, "it has no such counter", port.name)
    values = {"symbol_errors_total": total, "in_1_h": in_hour, "in_1_min": in_minute}
    if in_minute > limits["per_s"] * 60 or in_hour > limits["per_hour"]:
        text = f"{port.name} counted {in_hour} symbol errors in an hour, {in_minute} in the last minute"
        return unhealthy(SYMBOLS.id, text, port.name, level="warning", values=values)
    return healthy(SYMBOLS.id, port.name, "its counter is full" if full(port, "symbol_error") else "", values=values)


def judge_table(check: Check, port: Port, in_minute: dict[str, int], limits: dict[str, float]) -> Reading:
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


def judge_netdev(port: Port) -> Reading:
    if not port.active or not port.ethernet or not port.device.interfaces:
        return not_applicable(NETDEV.id, "no network interface belongs to it", port.name)
    text = clean_text(", ".join(port.device.interfaces), 100)
    if port.interfaces_down:
        text = f"{port.name} is ACTIVE, {text} down"
    return judged(NETDEV.id, "warning" if port.interfaces_down else None, text, port.name)


def judge_count(ports: list[Port], wanted: int | None, wanted_gbps: float | None) -> Reading:
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
