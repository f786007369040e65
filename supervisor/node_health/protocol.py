"""The messages between a probe worker and its parent: one JSON object a line, each way.

The parent's first line is a `Setup`, every later one a `JobInfo`. The probe worker answers with the messages below,
`WorkerReady` first. This module imports nothing but msgspec and our own words: both ends are small processes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.health import Check, CheckResult
from diagnosis.signals import Frozen, Signal
from supervisor.node_health.contract import JobInfo, Site

FLAW: Final = "a probe failed: "
"""Begins the text of a result that is unknown because its probe raised: the probe is wrong, not the node."""
NOT_YET: Final = "so far it was looked at once"
"""Begins the text of a rate that is unknown until the second look."""


class Setup(Frozen, frozen=True, kw_only=True):
    """What a probe worker is to do."""

    root: str = "/"
    """`/`, or the folder of a captured tree: then nothing is executed or asked of this machine."""
    node: str = ""
    state_dir: str = ""
    """Where probes keep counters; empty: nowhere."""
    site: Site = Site()
    job: JobInfo = JobInfo()
    preflight: bool = False
    """The checks that are only made before a job, or when asked for, are wanted too."""
    once: bool = False
    """Every probe looks once, then the probe worker ends."""
    until: float = 0.0
    """Monotonic time at which every look is reported as timed out, whatever its probe's deadline; 0: never."""
    only: tuple[str, ...] = ()
    """Patterns of check ids and probe names; empty: all."""
    skip: tuple[str, ...] = ()


class WorkerReady(Frozen, frozen=True, kw_only=True, tag="hello"):
    """The first line: the checks that this worker makes."""

    worker: str
    pid: int
    probes: dict[str, tuple[Check, ...]] = {}
    """Probe -> its checks that are wanted. Probes without any are not run."""


class PollReport(Frozen, frozen=True, kw_only=True, tag="report"):
    """One look of one probe."""

    probe: str
    wall: float
    """Unix seconds at which the look began."""
    mono: float
    """Monotonic seconds of the node at which it began."""
    took_s: float
    cpu_s: float = 0.0
    """CPU time that the look took."""
    results: tuple[CheckResult, ...] = ()


class ProbeEvent(Frozen, frozen=True, kw_only=True, tag="heard"):
    """An event, as a listening probe got it."""

    probe: str
    signal: Signal
    count: int = 1
    """How often: repeats within seconds are sent as one message."""


class TimedOut(Frozen, frozen=True, kw_only=True, tag="overdue"):
    """A look that is past its deadline; sent again now and then while it lasts."""

    probe: str
    doing: str = ""
    """The call it is in, where the probe says so."""
    since_s: float = 0.0
    """Seconds since the look began."""
    tid: int = 0
    state: str = "?"
    """State letter of the thread; D: in the kernel, and not to be killed."""
    wchan: str = ""
    """Kernel function it waits in; empty: not known."""


class NodeInventory(Frozen, frozen=True, kw_only=True, tag="stock"):
    """What the node is made of (`inventory` in machine.py, and what probes with that attribute add), when it is new."""

    inventory: dict[str, str]


class Problem(Frozen, frozen=True, kw_only=True, tag="problem"):
    """Something a person should know that is not a result: a plug-in that cannot be loaded."""

    text: str


class Alive(Frozen, frozen=True, kw_only=True, tag="alive"):
    """Sent when there was nothing else to send for a while."""


WorkerMessage = WorkerReady | PollReport | ProbeEvent | TimedOut | NodeInventory | Problem | Alive

decode_worker_message = msgspec.json.Decoder(WorkerMessage).decode
