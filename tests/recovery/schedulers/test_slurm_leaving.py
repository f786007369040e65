"""Which nodes Slurm takes out of service, read from what its commands print."""

from __future__ import annotations

import time

from recovery.schedulers import drained_of, maintenance_of


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def test_drained_nodes_but_not_those_of_this_job() -> None:
    lines = [
        "n1|drained|root(0)|disk swap | ticket 42",
        "n2|draining|ann(1000)|none",
        "n3|drained|root(0)|unbroken: gpu_hang incident=7/i-1 Xid 62",
        "n4|drained|root(0)|unbroken: gpu_hang incident=8/i-1 Xid 62",
        "n5|allocated||none",
        "n6|down*|root(0)|not responding",
        "n1|drained|root(0)|disk swap | ticket 42",
        "garbage",
    ]
    found = drained_of("\n".join(lines), "7")
    assert [(one.node, one.kind) for one in found] == [("n1", "drained"), ("n2", "drained"), ("n4", "drained")]
    assert (found[0].why, found[1].why) == ("drained by root: disk swap | ticket 42", "drained by ann")


def test_maintenance_that_is_in_force_or_begins_within_a_day() -> None:
    now = 1_700_000_000.0

    def line(name: str, begins: float, ends: float, flags: str = "MAINT,SPEC_NODES") -> str:
        times = f"StartTime={stamp(begins)} EndTime={stamp(ends)} Duration=1"
        return f"ReservationName={name} {times} Nodes=n[1-2] Flags={flags}"

    hour, day = 3600.0, 86400.0
    lines = [
        line("now", now - hour, now + hour),
        line("soon", now + hour, now + 2 * hour),
        line("later", now + 2 * day, now + 3 * day),
        line("over", now - 2 * hour, now - hour),
        line("course", now + hour, now + 2 * hour, "SPEC_NODES"),
        "No reservations in the system",
        "ReservationName=broken StartTime=soon Flags=MAINT",
    ]
    found = maintenance_of("\n".join(lines), now)
    assert [nodes for nodes, _ in found] == ["n[1-2]", "n[1-2]"]
    assert ["now" in found[0][1], "soon" in found[1][1]] == [True, True]
