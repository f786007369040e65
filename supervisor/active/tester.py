"""The process that makes active tests for an agent: `python -m supervisor.active.tester SETUP`.

It says on its standard output what came of each order; further rounds are ordered on its standard input. It ends when
that is closed or its agent has ended, and takes its children along.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from diagnosis.signals import clean_line
from recovery.active_verdicts import Figure, earlier_figures
from recovery.ledger import TestResult
from recovery.ledger_folder import LedgerFolder
from supervisor.active import NodeTestSetup
from supervisor.active.meeting import with_interface
from supervisor.active.suite import (
    SUITES,
    ActiveSetup,
    Devices,
    GroupOrder,
    busy_gpus,
    find_devices,
    part_of,
    run_alone,
    run_group,
    warmed,
)
from supervisor.config import load_site_or_default
from supervisor.errors import ActiveTestsImpossible
from supervisor.messages import NodeTestOrder, NodeTestReport

PR_SET_PDEATHSIG = 1
FLOORS = "active_tests"
"""`[limits.active_tests] TEST = NUMBER` of the site file: what a site demands, whatever others of the kind have."""


def in_groups(setup: NodeTestSetup, orders: Iterable[bytes]) -> Iterator[NodeTestReport]:
    """First that it is ready, then what came of each round. Raises ActiveTestsImpossible and OSError."""
    suite, number = SUITES["quick"], setup.order.number
    with warmed(with_interface(_bench(setup), setup.address), suite) as bench:
        devices = _devices(bench, suite.look_s)
        listening = socket.create_server((setup.address, 0))
        ready = NodeTestReport(
            number=number,
            address=setup.address,
            port=listening.getsockname()[1],
            devices=len(devices.devices),
            kind=devices.kind,
        )
        yield ready
        for line in orders:
            order = msgspec.json.decode(line, type=NodeTestOrder)
            here = GroupOrder(
                first_rank=order.first_rank,
                world=order.world,
                host=order.host,
                port=order.port,
                listen=listening.fileno() if order.first_rank == 0 else -1,
            )
            part = part_of(run_group(bench, devices, suite, here))
            listening.close()
            listening = socket.create_server((setup.address, 0))
            port = listening.getsockname()[1]
            yield msgspec.structs.replace(ready, round=order.round, port=port, part=part)


def alone(setup: NodeTestSetup) -> NodeTestReport:
    """Raises ActiveTestsImpossible and OSError."""
    assert setup.order.suite is not None
    suite = SUITES[setup.order.suite]
    floors = load_site_or_default(setup.site_file)[0].site.limits.get(FLOORS, {})
    with warmed(_bench(setup), suite) as bench:
        devices = _devices(bench, suite.look_s)
        found = run_alone(bench, devices, suite, earlier=_earlier(setup), floors=floors)
    return NodeTestReport(number=setup.order.number, devices=len(devices.devices), kind=devices.kind, results=found)


def _bench(setup: NodeTestSetup) -> ActiveSetup:
    return ActiveSetup(setup.node, setup.python, dict(os.environ), Path(setup.cwd), leader=sys.stdin.fileno())


def _devices(bench: ActiveSetup, look_s: float) -> Devices:
    devices = find_devices(bench, SUITES["quick"]._replace(look_s=look_s))
    busy = busy_gpus() if devices.devices != ("cpu",) else {}
    if busy:
        gpu, who = next(iter(busy.items()))
        raise ActiveTestsImpossible(f"{len(busy)} of its GPUs are in use: {gpu} by {who}")
    return devices


def _earlier(setup: NodeTestSetup) -> tuple[Figure, ...]:
    """What other nodes gave before."""
    if not setup.ledger:
        return ()
    now = time.time()
    try:
        entries = LedgerFolder(Path(setup.ledger)).read(now).entries
    except OSError:
        return ()  # compared without
    return earlier_figures([one.what for one in entries if isinstance(one.what, TestResult)], now)


def main(argv: list[str]) -> int:
    setup = msgspec.json.decode(argv[1], type=NodeTestSetup)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it waits for torch, and reads nothing
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        for report in [alone(setup)] if setup.order.suite is not None else in_groups(setup, sys.stdin.buffer):
            out.write(msgspec.json.encode(report) + b"\n")
    except (ActiveTestsImpossible, OSError) as error:
        problem = clean_line(str(error) or type(error).__name__, 300)
        out.write(msgspec.json.encode(NodeTestReport(number=setup.order.number, problem=problem)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
