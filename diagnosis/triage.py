"""From an incident to a verdict: who failed first, and of what.

Every rank that ended badly gives an account of itself: its wait status, its traceback, what rules read in its output.
Most accounts are consequences (a peer's connection closed, the launcher's SIGTERM); the first that is not, is the
fault. Findings of the kernel, the GPU or the host in the same window outrank what the ranks say. Text is only matched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diagnosis import blame, exits
from diagnosis.accounts import Account, gather
from diagnosis.incident import Alternative, Culprit, HangReport, Incident, RemedyAction, Verdict
from diagnosis.signals import Evidence, Finding, Word
from diagnosis.taxonomy import TAXONOMY, FailureClass

MAX_EVIDENCE: Final = 10

_ACTIONS: Final[dict[FailureClass, RemedyAction]] = {
    FailureClass.GPU_ECC_UNCORRECTABLE: "cordon_gpu_and_restart",
    FailureClass.GPU_OOM: "stop",
    FailureClass.NCCL_NETWORK: "wait_and_retry",
    FailureClass.CUDA_ILLEGAL_ACCESS: "restart",
    FailureClass.SILENT_DATA_CORRUPTION: "rollback_and_restart",
    FailureClass.DISK_FULL: "hold",
    FailureClass.SCRIPT_ERROR: "restart",
    FailureClass.PREEMPTED_OR_CANCELLED: "requeue",
    FailureClass.GPU_THERMAL_POWER: "restart_excluding",
    FailureClass.STRAGGLER_OR_SLOW: "restart_excluding",
}
_BY_RETRY: Final[dict[str, RemedyAction]] = {
    "same": "restart",
    "exclude": "cordon_node_and_restart",
    "back": "rollback_and_restart",
    "never": "stop",
    "wait": "wait_and_retry",
    "none": "none",
}

_OUTRANKS: Final = frozenset(
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


class Candidate(Word, frozen=True, kw_only=True):
    """One reading of the incident."""

    failure_class: FailureClass
    confidence: float
    why: str
    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    fingerprint: str = ""


def action_for(failure_class: FailureClass) -> RemedyAction:
    """The taxonomy's default remedy as an action; policy decides what is really done."""
    return _ACTIONS.get(failure_class, _BY_RETRY[TAXONOMY[failure_class].retry])


def conclude(incident: Incident) -> Verdict:
    """The verdict on an incident. Always one: `unknown` when nothing is known."""
    accounts = gather(incident)
    findings = _findings(incident)
    candidates = [
        *_from_findings(incident, findings, accounts),
        *_from_nodes(incident),
        *_from_hang(incident),
        *_from_accounts(incident, accounts),
    ]
    if not candidates:
        candidates = [_nothing(incident)]
    return _verdict(_ranked(candidates), findings, accounts)


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """Best first. A cause beats a symptom or an outcome unless it is much less sure."""

    def weight(candidate: Candidate) -> float:
        kind = TAXONOMY[candidate.failure_class].kind
        return candidate.confidence + {"cause": 0.15, "outcome": 0.1, "symptom": 0.0}.get(kind, -0.5)

    return sorted(candidates, key=weight, reverse=True)


def _verdict(ranked: list[Candidate], findings: list[Finding], accounts: list[Account]) -> Verdict:
    best = ranked[0]
    others: dict[FailureClass, float] = {}
    for candidate in ranked[1:]:
        if candidate.failure_class is not best.failure_class:
            others.setdefault(candidate.failure_class, candidate.confidence)
    # What disagrees with the best reading takes from its confidence.
    rival = max((value for key, value in others.items() if TAXONOMY[key].kind == "cause"), default=0.0)
    confidence = min(best.confidence, 0.97) * (1.0 - 0.2 * min(rival, 0.9))
    symptoms = [key for key in others if TAXONOMY[key].kind == "symptom"]
    for account in accounts:
        symptoms += [symptom for symptom in account.symptoms if symptom is not best.failure_class]
    evidence = [*best.evidence, *(line for one in ranked[1:] for line in one.evidence)]
    evidence += [finding.evidence for finding in findings]
    evidence += [line for account in accounts if account.is_cascade for line in account.evidence[:1]]
    return Verdict(
        failure_class=best.failure_class,
        culprits=best.culprits,
        confidence=round(confidence, 3),
        why=best.why,
        action=action_for(best.failure_class),
        symptoms=tuple(dict.fromkeys(symptoms)),
        alternatives=tuple(
            Alternative(failure_class=key, confidence=round(min(value, confidence) * 0.5, 3))
            for key, value in list(others.items())[:4]
        ),
        evidence=_distinct(evidence)[:MAX_EVIDENCE],
        fingerprint=best.fingerprint,
    )


def _distinct(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    return tuple({(one.text, one.rank, one.node): one for one in reversed(list(evidence))}.values())[::-1]


def _nothing(incident: Incident) -> Candidate:
    return Candidate(
        failure_class=FailureClass.UNKNOWN,
        confidence=0.2,
        why=f"nothing in the evidence says why ({incident.trigger})",
    )


# ----- findings of the node -----


def _findings(incident: Incident) -> list[Finding]:
    """All findings once each, the most serious first."""
    order = {"fatal": 0, "error": 1, "warning": 2}
    found = [*incident.findings, *(finding for one in incident.evidence for finding in one.findings)]
    unique = {(one.rule, one.node, one.gpu, one.rank, one.evidence.text): one for one in found}
    return sorted(unique.values(), key=lambda one: (order[one.severity], -one.confidence, one.at))


def _from_findings(incident: Incident, findings: list[Finding], accounts: list[Account]) -> list[Candidate]:
    candidates = []
    places = _places(incident, accounts)
    for finding in findings:
        if finding.severity == "warning":
            continue
        if finding.evidence.source == "output" and finding.rank is not None and incident.trigger != "signal":
            continue  # a rank's own output is weighed with its account
        ranks = _ranks_of(finding, accounts)
        confidence = finding.confidence * _bearing(finding, ranks, places)
        where = f" on {finding.node}" if finding.node else ""
        gpu = f" (GPU {finding.gpu})" if finding.gpu else ""
        who = f"rank {finding.rank}'s output" if finding.rank is not None else finding.evidence.source or "a check"
        candidates.append(
            Candidate(
                failure_class=finding.failure_class,
                confidence=confidence,
                why=f"{who}{where}{gpu} says: {finding.evidence.text[:200]}",
                culprits=_culprits(finding, ranks),
                evidence=(finding.evidence,),
            )
        )
    return candidates


def _culprits(finding: Finding, ranks: list[int]) -> tuple[Culprit, ...]:
    if finding.scope == "job":
        return ()
    if ranks:
        return tuple(Culprit(node=finding.node, gpu=finding.gpu, rank=rank) for rank in ranks)
    return (Culprit(node=finding.node, gpu=finding.gpu),) if finding.node or finding.gpu else ()


def _places(incident: Incident, accounts: list[Account]) -> set[str]:
    """The nodes on which something failed of itself."""
    places = {one.node for one in accounts if one.failed and not one.is_cascade} | set(incident.lost_nodes)
    if incident.hang is not None:
        places |= {incident.rank_nodes.get(rank, "") for rank in incident.hang.ranks}
    return places - {""}


def _bearing(finding: Finding, ranks: list[int], places: set[str]) -> float:
    """How much of a finding's confidence holds for this incident."""
    if finding.node and places and finding.node not in places:
        return 0.5  # it happened where nothing failed
    if finding.failure_class is FailureClass.HOST_OOM and not ranks:
        return 0.55  # somebody else's process was killed
    if finding.failure_class not in _OUTRANKS:
        return 0.8 if finding.evidence.source == "kernel" else 1.0
    return 0.85 if finding.severity == "error" else 1.0


def _ranks_of(finding: Finding, accounts: list[Account]) -> list[int]:
    """The ranks a node's finding is about: by process id, else by the rank it names, else who failed there."""
    if finding.rank is not None:
        return [finding.rank]
    pids = {finding.fields.get("pid", ""), finding.fields.get("pid2", "")} - {""}
    by_pid = [one.rank for one in accounts if str(one.exit.pid) in pids]
    if by_pid or (pids and finding.failure_class is not FailureClass.HOST_OOM):
        return by_pid
    here = [one for one in accounts if finding.node in ("", one.node) and one.failed and not one.is_cascade]
    if finding.failure_class is FailureClass.HOST_OOM:
        here = [
            one for one in here if exits.ended_by(one.exit, "SIGKILL") or one.failure_class is FailureClass.HOST_OOM
        ]
    return [here[0].rank] if here else []


# ----- lost nodes, launchers, preparations -----


def _from_nodes(incident: Incident) -> list[Candidate]:
    candidates = []
    if incident.lost_nodes:
        names = ", ".join(incident.lost_nodes[:6])
        ranks = {
            node: [rank for rank, where in incident.rank_nodes.items() if where == node] for node in incident.lost_nodes
        }
        candidates.append(
            Candidate(
                failure_class=FailureClass.NODE_FAILURE,
                confidence=0.9,
                why=f"node {names} fell silent and its ranks made no progress",
                culprits=tuple(
                    Culprit(node=node, rank=ranks[node][0] if len(ranks[node]) == 1 else None)
                    for node in incident.lost_nodes
                ),
                evidence=tuple(
                    Evidence(text=f"no word from {node}", source="agent", node=node) for node in incident.lost_nodes[:4]
                ),
            )
        )
    if incident.trigger == "setup":
        why = "the preparations of an attempt (moving or restoring a checkpoint) failed"
        candidates.append(Candidate(failure_class=FailureClass.STORAGE_ERROR, confidence=0.45, why=why))
    if incident.trigger == "launcher" or (incident.launcher_exits and incident.trigger != "setup"):
        for node, how in sorted(incident.launcher_exits.items())[:4]:
            first = incident.trigger == "launcher"
            candidates.append(
                Candidate(
                    failure_class=FailureClass.WORKER_CRASH,
                    confidence=0.75 if first else 0.3,
                    why=f"{how or 'the launcher ended'} on {node} while its workers still ran",
                    culprits=(Culprit(node=node),),
                    evidence=(Evidence(text=how or "the launcher ended", source="agent", node=node),),
                )
            )
    return candidates


# ----- hangs -----

_HANGS: Final[dict[str, tuple[FailureClass, float]]] = {
    "stopped": (FailureClass.SILENT_HANG, 0.9),
    "traced": (FailureClass.SILENT_HANG, 0.6),
    "missing": (FailureClass.SILENT_HANG, 0.88),
    "mismatch": (FailureClass.COLLECTIVE_MISMATCH, 0.8),
    "all_waiting": (FailureClass.SILENT_HANG, 0.65),
    "silent": (FailureClass.SILENT_HANG, 0.6),
    "exit_hang": (FailureClass.EXIT_HANG, 0.85),
    "early_exit": (FailureClass.WORKER_CRASH, 0.85),
}


def _from_hang(incident: Incident) -> list[Candidate]:
    report = incident.hang
    if report is None:
        return []
    failure_class, confidence = _HANGS[report.kind]
    ranks, why = report.ranks, report.why
    flights = [flight for one in incident.evidence for flight in one.flights]
    odd, disagreement = blame.mismatch(flights)
    if disagreement and report.kind in ("all_waiting", "mismatch", "missing", "silent"):
        failure_class, confidence = FailureClass.COLLECTIVE_MISMATCH, 0.85
        ranks, why = odd or ranks, disagreement
    elif not ranks and report.kind == "all_waiting":
        ranks = blame.laggards(flights)
    stacks = [stack for one in incident.evidence for stack in one.stacks]
    return [
        Candidate(
            failure_class=failure_class,
            confidence=confidence,
            why=_stopped_why(report) if report.kind == "stopped" else why,
            culprits=tuple(_culprit(incident, rank) for rank in ranks[:16]),
            evidence=(Evidence(text=report.why, source="agent"), *blame.stack_evidence(stacks, incident.rank_nodes)),
        )
    ]


def _stopped_why(report: HangReport) -> str:
    # A stopped process has not crashed: for the job it is a rank that silently does nothing.
    return f"{report.why}: somebody sent it SIGSTOP, or the host froze it"


def _culprit(incident: Incident, rank: int) -> Culprit:
    return Culprit(node=incident.rank_nodes.get(rank, ""), rank=rank)


# ----- what the ranks say -----


def _from_accounts(incident: Incident, accounts: list[Account]) -> list[Candidate]:
    failed = [one for one in accounts if one.failed]
    if not failed:
        return []
    if all(exits.ended_by(one.exit, "SIGTERM") for one in failed) and len(failed) >= max(2, incident.world_size):
        return [_all_terminated(failed)]
    first = [one for one in failed if not one.is_cascade]
    quitter = _quitter(accounts, first)
    if quitter is not None:
        return [_quit_candidate(quitter, failed)]
    if not first:
        return _only_cascades(incident, failed)
    origin = first[0]
    same = [one for one in first if one.fingerprint and one.fingerprint == origin.fingerprint]
    everyone = len(same) > 1 and len(same) >= max(len(accounts), incident.world_size)
    candidates = [_account_candidate(origin, len(same) if everyone else 0, len(failed))]
    candidates += [_account_candidate(one, 0, len(failed), 0.6) for one in first[1:6] if one not in same]
    return candidates


def _quitter(accounts: list[Account], first: list[Account]) -> Account | None:
    """A rank that ended with code 0 before the others failed only because it was gone."""
    # gloo aborts the receiver of what a gone peer left unfinished: an abort without words is a consequence as well.
    if any(
        one.failure_class is not FailureClass.WORKER_CRASH or not exits.ended_by(one.exit, "SIGABRT") for one in first
    ):
        return None
    failures = [one for one in accounts if one.failed]
    earliest = min(one.exit.ended_at for one in failures)
    gone = [one for one in accounts if one.exit.code == 0 and not one.exit.stopped_by_us]
    return next((one for one in gone if one.exit.ended_at <= earliest + 1.0), None)


def _quit_candidate(account: Account, failed: list[Account]) -> Candidate:
    return Candidate(
        failure_class=FailureClass.WORKER_CRASH,
        confidence=0.85,
        why=f"rank {account.rank} ended with code 0 while the others still trained; {len(failed)} failed for it",
        culprits=(account.culprit,),
        evidence=(account.exit_evidence, *(line for one in failed[:3] for line in one.evidence[:1])),
        # The line at which the others missed it: the same line at the same step again is no accident.
        fingerprint=f"code 0 before {failed[0].fingerprint}" if failed[0].fingerprint else "",
    )


def _only_cascades(incident: Incident, failed: list[Account]) -> list[Candidate]:
    """All failed over each other: the dead peer is elsewhere, or it is the network."""
    origin = failed[0]
    certain = 0.35 if incident.lost_nodes or incident.hang else 0.6
    return [
        Candidate(
            failure_class=origin.failure_class,
            confidence=certain,
            why=f"{len(failed)} ranks lost their connections and none of them failed of itself: {origin.summary}",
            culprits=() if len(failed) > 1 else (origin.culprit,),
            evidence=origin.evidence,
        )
    ]


def _all_terminated(accounts: list[Account]) -> Candidate:
    return Candidate(
        failure_class=FailureClass.PREEMPTED_OR_CANCELLED,
        confidence=0.7,
        why=f"all {len(accounts)} ranks got SIGTERM from outside",
        evidence=tuple(one.exit_evidence for one in accounts[:3]),
    )


def _account_candidate(account: Account, everyone: int, failed: int, factor: float = 1.0) -> Candidate:
    if everyone:
        why = f"all {everyone} ranks raised the same: {account.summary}"
    else:
        later = (
            f"; {failed - 1} other{'s' if failed > 2 else ''} ended after it" if failed > 1 and factor == 1.0 else ""
        )
        why = f"rank {account.rank} {account.summary}{later}"
    return Candidate(
        failure_class=account.failure_class,
        confidence=account.confidence * factor,
        why=why,
        # The same line of code on all ranks: the code, not a rank or a node.
        culprits=() if everyone else (account.culprit,),
        evidence=account.evidence,
        fingerprint=account.fingerprint,
    )
