"""Findings of kernel, GPU, host and scheduler, joined to the ranks whose failure they explain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from diagnosis.incident import Culprit
from diagnosis.kernel.causes import is_of_training
from diagnosis.signals import Finding
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction
from diagnosis.verdict.accounts import Account, Accounts
from diagnosis.verdict.candidates import Candidate
from diagnosis.verdict.weights import Row, first_factor

BEFORE_S: Final = 600.0
AFTER_S: Final = 300.0
"""A finding may explain a failure if it lies in this window around it."""
ZONE_S: Final = 3600.0
MAX_ZONE_S: Final = 14 * 3600.0

_OBSERVERS: Final = frozenset({"kernel", "gpu", "host", "network", "storage", "scheduler", "agent"})
_ASKED: Final[dict[str, RemedyAction]] = {
    "restart": "restart",
    "cordon_gpu_and_restart": "cordon_gpu_and_restart",
    "cordon_node_and_restart": "cordon_node_and_restart",
}
"""The actions that tables of kernel messages can ask for."""
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
"""A kernel, GPU or host finding of these classes explains the failure, whatever the ranks say."""


def from_findings(described: Accounts) -> list[Candidate]:
    """A reading for each serious finding."""
    accounts = described.accounts
    candidates = []
    for finding in described.findings:
        if finding.severity == "warning":
            continue
        struck = _struck(finding, accounts)
        late_s = None if described.failed_at is None or not finding.at else finding.at - described.failed_at
        seen = _Seen(finding, struck, accounts, _is_elsewhere(finding, described), late_s)
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
                confidence=finding.confidence * first_factor(BEARING, seen) * first_factor(TIMELY, seen),
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


def _is_elsewhere(finding: Finding, described: Accounts) -> bool:
    """It happened on a node where nothing failed."""
    if not finding.node or not described.places or _host(finding.node) in map(_host, described.places):
        return False
    return described.well is None or _host(finding.node) in map(_host, described.well)


class _Seen(NamedTuple):
    """A finding beside an incident."""

    finding: Finding
    struck: Sequence[Account]
    """The accounts that it concerns."""
    accounts: Sequence[Account]
    elsewhere: bool
    """It happened on a node where nothing failed."""
    late_s: float | None
    """Seconds after the first failure; None: not known."""


def _is_near(late_s: float | None) -> bool:
    return late_s is None or -BEFORE_S <= late_s <= AFTER_S


def _is_in_another_zone(late_s: float | None) -> bool:
    """Logs without a zone may be whole hours apart and mean the same moment."""
    zone_s = round((late_s or 0.0) / ZONE_S) * ZONE_S
    return late_s is not None and abs(zone_s) <= MAX_ZONE_S and _is_near(late_s - zone_s)


def _is_killed_process(seen: _Seen) -> bool:
    """The OOM killer names a process that is no rank of this job."""
    finding = seen.finding
    is_oom = finding.failure_class is FailureClass.HOST_OOM
    return is_oom and not seen.struck and finding.rank is None and bool(_pids(finding))


def _is_unexplained_training(seen: _Seen) -> bool:
    """The process has the name of a training process, and no rank explains its own failure."""
    ours = is_of_training(seen.finding.fields.get("process", ""))
    return ours and not any(TAXONOMY[one.failure_class].kind == "cause" and not one.is_cascade for one in seen.accounts)


BEARING: Final = (
    Row[_Seen]("elsewhere", "factor", lambda seen: seen.elsewhere),
    Row[_Seen](
        "killed_process_of_ours",
        "factor",
        lambda seen: _is_killed_process(seen) and _is_unexplained_training(seen),
    ),
    Row[_Seen]("killed_process_of_others", "factor", _is_killed_process),
    Row[_Seen](
        "kernel_that_does_not_outrank",
        "factor",
        lambda seen: seen.finding.failure_class not in OUTRANKS and seen.finding.evidence.source == "kernel",
    ),
    Row[_Seen](
        "error_not_fatal",
        "factor",
        lambda seen: seen.finding.failure_class in OUTRANKS and seen.finding.severity == "error",
        "a_stack_without_a_headline",
    ),
)
"""How much of a finding's confidence holds for this incident: the first row that applies."""
TIMELY: Final = (
    Row[_Seen](
        "whole_hours_apart",
        "factor",
        lambda seen: not _is_near(seen.late_s) and _is_in_another_zone(seen.late_s),
    ),
    Row[_Seen]("at_another_time", "factor", lambda seen: not _is_near(seen.late_s)),
)
"""How much of it holds by its time."""
ROWS: Final = (*BEARING, *TIMELY)


def _struck(finding: Finding, accounts: Sequence[Account]) -> list[Account]:
    """The accounts that a finding concerns: by process id, else the first failures on its node."""
    pids = _pids(finding)
    by_pid = [one for one in accounts if _has_pid(one, pids)]
    known = any(one.exit is not None and one.exit.pid for one in accounts)
    is_oom = finding.failure_class is FailureClass.HOST_OOM
    if by_pid or (pids and known and not is_oom):
        return by_pid
    first = [one for one in accounts if one.failed and not one.is_cascade]
    here = [one for one in first if _is_there(one, finding.node)] or [one for one in first if not one.node]
    if is_oom:
        here = [one for one in here if one.ended_by("SIGKILL") or one.failure_class is FailureClass.HOST_OOM]
    elif pids or not all(one.node for one in here):
        # No process id is known: a single account is meant, and not one that shows only a symptom.
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
