"""The faults, in the order of the show: done to the run from outside, or acted out by a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from supervisor.demo.stage import Stage, signal_rank

XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Fault(NamedTuple):
    title: str
    do: Callable[[Stage], str]
    """Does it, and says what exactly was done."""
    heals: bool = False
    """Nothing has to be restarted: the run goes on by itself or is helped on."""


def _kill(stage: Stage) -> str:
    return f"SIGKILL to pid {signal_rank(stage, 1, signal.SIGKILL)}"


def _hang(stage: Stage) -> str:
    stage.order(1, "hang")
    return "a deadlock, it waits for a lock of its own: nothing exits, nothing is printed"


def _stop(stage: Stage) -> str:
    return f"SIGSTOP to pid {signal_rank(stage, 0, signal.SIGSTOP)}"


def _tear(stage: Stage) -> str:
    path = stage.newest_checkpoint()
    size = path.stat().st_size
    os.truncate(path, size // 2)
    signal_rank(stage, 0, signal.SIGKILL)
    return f"{path.name} cut to {size // 2:,} of {size:,} bytes, then SIGKILL to rank 0"


def _exception(stage: Stage) -> str:
    stage.order(1, "exception")
    return "an IndexError that nobody catches"


def _lose_gpu(stage: Stage) -> str:
    stage.kernel_says(XID_79)
    stage.order(1, "cuda")
    return "kernel log: " + XID_79


FAULTS = (
    Fault("rank 1 is killed", _kill),
    Fault("rank 0 is stopped", _stop, heals=True),
    Fault("rank 1 is in a deadlock", _hang),
    Fault("a torn checkpoint", _tear),
    Fault("rank 1 raises an exception", _exception),
    Fault("the GPU of rank 1 falls off the bus of node n1", _lose_gpu),
)
