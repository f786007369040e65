"""Planned swaps: which node should leave at a checkpoint, and whether that is done or only recommended. Pure.

A node that degrades may fail at any time, and has not yet. So it leaves at a moment that costs seconds: when a
checkpoint has just become complete. What is not proven to be bad hardware is only recommended: people decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final, Literal

from diagnosis.signals import Frozen, Outlook
from diagnosis.taxonomy import FailureClass
from recovery.cordon import ALWAYS_ALLOWED
from recovery.policy import Mode

SwapMode = Literal["off", "recommend", "automatic"]
SwapSignal = Literal["", "SIGUSR1", "SIGUSR2", "SIGTERM"]
"""What scripts take for a request to save."""
Cause = Literal["device", "straggler", "drained", "maintenance", "operator", "cordoned", "alert"]
"""`device`: a finding about hardware. `drained`, `maintenance`: the scheduler says so. `cordoned`: the ledger of all
jobs does. `alert`: monitoring says so, where a rule of the site wants it."""
BY_SCHEDULER: Final[frozenset[Cause]] = frozenset({"drained", "maintenance"})

DAY_S: Final = 86400.0
STORM_NODES: Final = 3
"""So many nodes whose devices fail within moments share a cause: none of them is left out for it."""
STORM_S: Final = 60.0
RACK_MOST: Final = 64
"""Nodes of the job. Below a switch with more of them two may fail by chance, or it is the name of the whole fabric."""
SHARED_S: Final = 900.0
"""The same for devices that get worse in the same way: heat and a power brake are found over minutes."""


def have_a_common_cause(nodes: Set[str], domains: Mapping[str, str]) -> bool:
    """Whether it is not a node by itself, where devices of all of these fail or get worse together.

    `domains`: node of the job -> its switch or rack; empty: not known. Two of one rack are enough, where the job has
    nodes elsewhere.
    """
    if len(nodes) < 2 or len(nodes) >= STORM_NODES:
        return len(nodes) >= STORM_NODES
    theirs = {domains.get(node, "") for node in nodes}
    if len(theirs) > 1 or "" in theirs:
        return False
    known = [domain for domain in domains.values() if domain]
    below = sum(domain in theirs for domain in known)
    return below < len(known) and below <= RACK_MOST


PROVEN: Final[frozenset[Outlook]] = frozenset({"fails", "degrades", "slows"})
"""Outlooks of hardware that is proven bad. (`repair` harms nobody before the next reset.)"""

WORDS: Final[dict[FailureClass, str]] = {
    FailureClass.GPU_ECC_UNCORRECTABLE: "GPU memory errors",
    FailureClass.GPU_FALLEN_OFF_BUS: "a GPU has fallen off the bus",
    FailureClass.GPU_HANG: "a GPU wants a reset",
    FailureClass.NVLINK_ERROR: "NVLink errors",
    FailureClass.PCIE_ERROR: "a bad PCIe link",
    FailureClass.GPU_THERMAL_POWER: "a GPU is slowed down by heat or power",
    FailureClass.CPU_OR_MEMORY_HW: "CPU or memory errors",
    FailureClass.STRAGGLER_OR_SLOW: "a rank is slow",
}


class SwapCase(Frozen, frozen=True, kw_only=True):
    """A node that might leave, and what stands in the way now."""

    cause: Cause
    proven: bool = False
    """Hardware is proven to be bad, and not only warned of; or no job is to use the node; or a rule of the site, or its
    scheduler, says that it leaves; or a check tells why its rank slows the others down."""
    wanted: bool = False
    """An operator has asked for it, or approved it."""
    setting: SwapMode = "automatic"
    mode: Mode = "enforce"
    paused: bool = False
    spares: int = 0
    """Nodes that could take its place."""
    storm: bool = False
    """Several nodes fail, get worse or are taken out of service together."""
    within_day: int = 0
    """Swaps of the last 24 h that nobody had asked for."""
    per_day: int = ALWAYS_ALLOWED
    """As many as policy may cordon within an hour."""
    holds_checkpoint: bool = False
    """It alone has the newest checkpoint."""
    may_cordon: bool = True
    """The circuit breaker lets policy cordon it."""
    left_s: float | None = None
    """Seconds until the run is complete; None: not known."""
    cost_s: float | None = None
    """What a swap takes; None: not known."""


class SwapDecision(Frozen, frozen=True, kw_only=True):
    """`planned`: it leaves at the next checkpoint. `recommended`: people decide. `blocked`: it cannot leave now."""

    state: Literal["planned", "recommended", "blocked"]
    because: str = ""
    """What stands in the way, in words."""


def decide(case: SwapCase) -> SwapDecision:
    """What becomes of one node. The same question is asked again at each checkpoint."""
    if case.spares < 1:
        return _blocked("no spare can take its place")
    if case.left_s is not None and case.left_s <= (case.cost_s or 0.0):
        return _blocked("the run is complete sooner than a swap takes")
    if case.holds_checkpoint:
        return _blocked("the newest checkpoint is on its own disk, where no other node sees it")
    if case.wanted:
        return SwapDecision(state="planned")
    if case.paused:
        return _blocked("the job is paused")
    if case.storm and case.cause not in BY_SCHEDULER:
        return _blocked("devices of several nodes failed or got worse together, which one node is not to blame for")
    if case.mode != "enforce":
        return _recommended(f"mode {case.mode}")
    if case.setting != "automatic":
        return _recommended(f"swap.mode is {case.setting}")
    if case.storm:
        return _recommended("the scheduler takes several of the job's nodes out of service")
    if not case.proven:
        return _recommended("no hardware is proven to be bad")
    if not case.may_cordon:
        return _recommended("too many nodes are cordoned at once")
    if case.within_day >= case.per_day:
        return _recommended(f"{case.within_day} swaps were made within 24 h")
    return SwapDecision(state="planned")


def _blocked(because: str) -> SwapDecision:
    return SwapDecision(state="blocked", because=because)


def _recommended(because: str) -> SwapDecision:
    return SwapDecision(state="recommended", because=because)
