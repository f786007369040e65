"""What the kernel, the GPUs, the host and the scheduler told, joined to the ranks that it explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from diagnosis.incident import Culprit, RemedyAction
from diagnosis.kernel.causes import is_of_training
from diagnosis.signals import Finding
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.verdict.accounts import Account
from diagnosis.verdict.candidates import Candidate

BEFORE_S: Final = 600.0
AFTER_S: Final = 300.0
"""What happened in this window around a failure may explain it."""
ZONE_S: Final = 3600.0
MAX_ZONE_S: Final = 14 * 3600.0

_OBSERVERS: Final = frozenset({"kernel", "gpu", "host", "network", "storage", "scheduler", "agent"})
_ASKED: Final[dict[str, RemedyAction]] = {
    "restart": "restart",
    "cordon_gpu_and_restart": "cordon_gpu_and_restart",
    "cordon_node_and_restart": "cordon_node_and_restart",
}
"""What tables of kernel messages may ask for."""
OUTRANKS: Final = frozenset(
    {
        FailureClass.GPU_ECC_UNCORRECTABLE,
        FailureClass.GPU_FALLEN_OFF_BUS,
        FailureClass.GPU_HANG,
        FailureClass.NVLINK_ERROR,
        FailureClass.PCIE_ERROR,
        FailureClass.CPU_OR_MEMORY_HW,
        FailureClass.KERNEL_FAULT,
        FailureClass.NODE_FAILURE,
        FailureClass.HOST_OOM,
        FailureClass.DISK_FULL,
    }
)
"""Classes whose kernel, GPU or host finding explains whatever the ranks say."""


def distinct(found: Iterable[Finding]) -> list[Finding]:
    """All findings once each, the most serious first."""
    order = {"fatal": 0, "error": 1, "warning": 2}
    unique = {(one.rule, one.node, one.gpu, one.rank, one.evidence.text): one for one in found}
    return sorted(unique.values(), key=lambda one: (order[one.severity], -one.confidence, one.at))


def from_findings(
    findings: Sequence[Finding],
    accounts: Sequence[Account],
    places: set[str],
    failed_at: float | None = None,
    well: set[str] | None = None,
) -> list[Candidate]:
    """A reading for each serious finding.

    `places`: the nodes on which something failed of itself; `well`: those where nothing did, None: all others.
    `failed_at`: when the first rank failed, where only that tells whether a finding belongs to the failure (old logs;
    agents send only what does).
    """
    candidates = []
    for finding in findings:
        if finding.severity == "warning":
            continue
        struck = _struck(finding, accounts)
        node = finding.node or next((one.node for one in struck), "")
        ranks = [finding.rank] if finding.rank is not None else [one.rank for one in struck if one.rank is not None]
        where = f" on {finding.node}" if finding.node else ""
        gpu = f" (GPU {finding.gpu})" if finding.gpu else ""
        source = finding.evidence.source.rsplit("/", 1)[-1] or "a check"
        of_a_rank = finding.rank is not None and source not in _OBSERVERS  # they name ranks by their processes
        who = f"rank {finding.rank}'s output" if of_a_rank else source
        candidates.append(
            Candidate(
                failure_class=finding.failure_class,
                confidence=finding.confidence
                * _bearing(finding, struck, accounts, _is_elsewhere(finding, places, well))
                * _timely(finding, failed_at),
                why=f"{who}{where}{gpu} says: {finding.evidence.text[:200]}",
                culprits=_culprits(finding, node, ranks),
                evidence=(finding.evidence,),
                action=_ASKED.get(finding.fields.get("action", "")),
            )
        )
    return candidates


def _culprits(finding: Finding, node: str, ranks: list[int]) -> tuple[Culprit, ...]:
    if finding.scope == "job":
        return ()
    if ranks:
        return tuple(Culprit(node=node, gpu=finding.gpu, rank=rank) for rank in ranks)
    return (Culprit(node=node, gpu=finding.gpu),) if node or finding.gpu else ()


def _is_elsewhere(finding: Finding, places: set[str], well: set[str] | None) -> bool:
    """It happened where nothing failed."""
    if not finding.node or not places or _host(finding.node) in map(_host, places):
        return False
    return well is None or _host(finding.node) in map(_host, well)


def _bearing(finding: Finding, struck: list[Account], accounts: Sequence[Account], elsewhere: bool) -> float:
    """How much of a finding's confidence holds for this incident."""
    if elsewhere:
        return 0.5
    if finding.failure_class is FailureClass.HOST_OOM and not struck and finding.rank is None and _pids(finding):
        # By its name it may be one of ours, else somebody else's process was killed.
        ours = is_of_training(finding.fields.get("process", ""))
        explained = any(TAXONOMY[one.failure_class].kind == "cause" and not one.is_cascade for one in accounts)
        return 0.9 if ours and not explained else 0.55
    if finding.failure_class not in OUTRANKS:
        return 0.8 if finding.evidence.source == "kernel" else 1.0
    return 0.85 if finding.severity == "error" else 1.0


def _timely(finding: Finding, failed_at: float | None) -> float:
    """How much of it holds by its time. Logs without a zone may be whole hours apart, and mean the same moment."""
    if failed_at is None or not finding.at:
        return 1.0
    late = finding.at - failed_at
    if -BEFORE_S <= late <= AFTER_S:
        return 1.0
    zone = round(late / ZONE_S) * ZONE_S
    if abs(zone) <= MAX_ZONE_S and -BEFORE_S <= late - zone <= AFTER_S:
        return 0.9
    return 0.4


def _struck(finding: Finding, accounts: Sequence[Account]) -> list[Account]:
    """Whom a node's finding is about: by process id, else who failed of itself there."""
    pids = _pids(finding)
    by_pid = [one for one in accounts if _has_pid(one, pids)]
    told = any(one.exit is not None and one.exit.pid for one in accounts)
    is_oom = finding.failure_class is FailureClass.HOST_OOM
    if by_pid or (pids and told and not is_oom):
        return by_pid
    first = [one for one in accounts if one.failed and not one.is_cascade]
    here = [one for one in first if _is_there(one, finding.node)] or [one for one in first if not one.node]
    if is_oom:
        here = [one for one in here if one.ended_by("SIGKILL") or one.failure_class is FailureClass.HOST_OOM]
    elif pids or not all(one.node for one in here):
        # Nobody's process id is known: only one can be meant, and not one that tells of a mere symptom.
        causes = [one for one in here if TAXONOMY[one.failure_class].kind == "cause"]
        return causes if len(causes) == 1 else here if len(here) == 1 else []
    return here[:1]


def _pids(finding: Finding) -> set[str]:
    return {finding.fields.get("pid", ""), finding.fields.get("pid2", "")} - {""}


def _is_there(account: Account, node: str) -> bool:
    return not node or _host(account.node) == _host(node)


def _host(node: str) -> str:
    """`n1` of `n1.cluster.example`; an address stays whole."""
    first = node.partition(".")[0]
    return node if first.isdigit() else first


def _has_pid(account: Account, pids: set[str]) -> bool:
    """It is that process, or names it as one of its own (a data loader's worker)."""
    if account.exit is not None and str(account.exit.pid) in pids:
        return True
    return any(pid in re.findall(r"\bpid\D{0,8}(\d+)", line.text) for line in account.evidence[:1] for pid in pids)
