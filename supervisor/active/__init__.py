"""Active tests: devices, pairs and groups of nodes are tried, before a job, after a failure, and before a return."""

from __future__ import annotations

from diagnosis.signals import Frozen
from supervisor.messages import NodeTestOrder


class NodeTestSetup(Frozen, frozen=True, kw_only=True):
    """What an agent starts `supervisor.active.tester` with. It is here because agents need nothing else of all this."""

    node: str
    python: str
    """The training environment's."""
    cwd: str
    address: str
    """Under which the others reach this node."""
    order: NodeTestOrder
    """The first one."""
    ledger: str = ""
    site_file: str = ""
