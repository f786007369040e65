"""Readings of what else was seen of a failure: lost nodes, launchers that ended, hangs."""

from __future__ import annotations

from typing import Final

from diagnosis import blame
from diagnosis.candidates import Candidate
from diagnosis.incident import Culprit, HangReport, Incident
from diagnosis.signals import Evidence
from diagnosis.taxonomy import FailureClass

# ----- lost nodes, launchers, preparations -----


def from_nodes(incident: Incident) -> list[Candidate]:
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


def from_hang(incident: Incident) -> list[Candidate]:
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
