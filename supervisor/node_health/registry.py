"""The list of probes: ours by name, others by the entry-point group `unbroken.probes`.

Two probe workers run them. `gpu` calls the GPU driver, whose calls may never return; `node` does everything else.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from diagnosis.health import Check
from supervisor.files import entry_points
from supervisor.node_health.contract import Probe
from supervisor.node_health.protocol import NOT_LOADED, raised

WORKERS: Final[dict[str, tuple[str, ...]]] = {
    "gpu": ("supervisor.node_health.gpu.probe:NvmlProbe",),
    "node": (
        "supervisor.node_health.pci:PciProbe",
        "supervisor.node_health.fabric:FabricProbe",
        "supervisor.node_health.network.infiniband:InfinibandProbe",
        "supervisor.node_health.network.ethernet:EthernetProbe",
        "supervisor.node_health.memory:MemoryProbe",
        "supervisor.node_health.hardware:HardwareProbe",
        "supervisor.node_health.processes:ProcessProbe",
        "supervisor.node_health.storage:StorageProbe",
        "supervisor.node_health.machine:MachineProbe",
        "supervisor.node_health.network.nccl:NcclProbe",
    ),
}
WITHOUT_AGENT: Final = ("supervisor.node_health.kernel_checks:KernelMessagesProbe",)
"""Probes that run in the probe worker `node` only without an agent: an agent reads the kernel log all the time."""
GROUP: Final = "unbroken.probes"
"""Entry points of this group name classes that follow `Probe`; they run in the probe worker `node`."""


def load(worker: str, *, for_agent: bool = False) -> tuple[list[Probe], list[str]]:
    """The probes of a worker, and a sentence for each that cannot be loaded: a broken plug-in is skipped."""
    found: list[Probe] = []
    problems: list[str] = []
    plug_ins = entry_points(GROUP, sys.path) if worker == "node" else []
    more = WITHOUT_AGENT if worker == "node" and not for_agent else ()
    for target in [*WORKERS[worker], *more, *plug_ins]:
        module, _, name = target.partition(":")
        try:
            probe = getattr(importlib.import_module(module), name)()
            if not isinstance(probe, Probe):
                raise TypeError("it has not what a Probe must have")
            found.append(probe)
        except (Exception, SystemExit) as error:  # whatever a plug-in raises
            problems.append(f"probe {target} {NOT_LOADED}{raised(error)}")
    return found, problems


def table(*workers: str) -> list[Check]:
    """All checks of the probe workers (of all by default), in order."""
    probes = [probe for worker in workers or WORKERS for probe in load(worker)[0]]
    return [check for probe in probes for check in probe.checks]
