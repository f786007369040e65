"""Readings of other evidence: lost nodes, launchers that ended, hangs, flight recorders, stacks, curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from diagnosis import flight, stuck
from diagnosis.incident import Culprit, HangReport, Incident
from diagnosis.log_evidence import Anomaly, FlightKind, FlightReport, LogEvidence, Slowdown
from diagnosis.signals import Evidence, RankStack
from diagnosis.stacks import Activity, activity
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.verdict.accounts import Account
from diagnosis.verdict.candidates import Candidate
from diagnosis.verdict.weights import current

# ----- lost nodes, launchers, preparations -----

USAGE_ERROR: Final = 2
"""The exit code of argparse, which torchrun uses, for arguments that are wrong."""


def from_nodes(incident: Incident) -> list[Candidate]:
    candidates, confidences = [], current().confidence
    if incident.lost_nodes:
        names = ", ".join(incident.lost_nodes[:6])
        ranks = {
            node: [rank for rank, where in incident.rank_nodes.items() if where == node] for node in incident.lost_nodes
        }
        candidates.append(
            Candidate(
                failure_class=FailureClass.NODE_FAILURE,
                confidence=confidences.node_lost,
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
        candidates.append(
            Candidate(failure_class=FailureClass.STORAGE_ERROR, confidence=confidences.setup_failed, why=why)
        )
    if incident.trigger == "launcher" or (incident.launcher_exits and incident.trigger != "setup"):
        usage = incident.launcher_code == USAGE_ERROR and not incident.ranks_started
        when = "while its workers still ran" if incident.ranks_started else "before any rank was started"
        for node, how in sorted(incident.launcher_exits.items())[:4]:
            first = incident.trigger == "launcher"
            candidates.append(
                Candidate(
                    failure_class=FailureClass.CONFIG_OR_ARGUMENT_ERROR if usage else FailureClass.WORKER_CRASH,
                    confidence=confidences.launcher_first if first else confidences.launcher_later,
                    why=f"{how or 'the launcher ended'} on {node} {when}",
                    culprits=(Culprit(node=node),),
                    evidence=(Evidence(text=how or "the launcher ended", source="agent", node=node),),
                )
            )
    return candidates


# ----- hangs -----


def from_hang(incident: Incident) -> list[Candidate]:
    report = incident.hang
    if report is None:
        return []
    failure_class, confidence = current().hangs[report.kind]
    confidence = confidence if report.proven else current().confidence.unproven_hang
    ranks, why = report.ranks, report.why
    stacks = [stack for one in incident.evidence for stack in one.stacks]
    flights = [one for part in incident.evidence for one in part.flights]
    report_of_calls = flight.analyse(flight.from_rank_flights(flights), stacks)
    if report_of_calls is not None and report.proven and report.kind in ("all_waiting", "mismatch"):
        if report_of_calls.kind not in _FLIGHTS:
            failure_class, confidence = FailureClass.COLLECTIVE_MISMATCH, max(report_of_calls.confidence, confidence)
            ranks, why = report_of_calls.culprit_ranks or ranks, report_of_calls.why
        elif not ranks and report_of_calls.kind in ("missing_rank", "stalled_rank"):
            ranks, why = report_of_calls.culprit_ranks, f"{why}: {report_of_calls.why}"
    return [
        Candidate(
            failure_class=failure_class,
            confidence=confidence,
            why=_stopped_why(report) if report.kind == "stopped" else why,
            culprits=tuple(_culprit(incident, rank) for rank in ranks[:16]),
            evidence=(Evidence(text=report.why, source="agent"), *stuck.explain(stacks, nodes=incident.rank_nodes)),
        )
    ]


def _stopped_why(report: HangReport) -> str:
    # A stopped process has not crashed: for the job it is a rank that does nothing and says nothing.
    return f"{report.why}: somebody sent it SIGSTOP, or the host froze it"


def _culprit(incident: Incident, rank: int) -> Culprit:
    return Culprit(node=incident.rank_nodes.get(rank, ""), rank=rank)


# ----- dumps, stacks and curves -----

_FLIGHTS: Final[dict[FlightKind, FailureClass]] = {
    "missing_rank": FailureClass.SILENT_HANG,
    "stalled_rank": FailureClass.SILENT_HANG,
    "dead_rank": FailureClass.WORKER_CRASH,
    "straggler": FailureClass.STRAGGLER_OR_SLOW,
}
"""The other kinds are ranks that disagree."""
_STUCK_IN: Final[dict[Activity, FailureClass]] = {
    "teardown": FailureClass.EXIT_HANG,
    "collective": FailureClass.SILENT_HANG,
    "data": FailureClass.SILENT_HANG,
}
LASTING: Final = 0.5
"""A slowdown or anomaly that is less sure will pass."""


def from_logs(evidence: LogEvidence, nodes: dict[int, str], accounts: Sequence[Account]) -> list[Candidate]:
    """What flight recorders, stacks and curves beside old logs show."""
    return [
        *from_flight(evidence.flight, evidence.stacks, nodes, accounts),
        *from_curves(evidence.slow, evidence.anomalies, accounts),
    ]


def from_flight(
    report: FlightReport | None, stacks: Sequence[RankStack], nodes: dict[int, str], accounts: Sequence[Account] = ()
) -> list[Candidate]:
    """The culprits by the flight recorders of all ranks, else by their stacks, and what these ranks do."""
    weights, origin = current(), stuck.origin(stacks)
    doing: Activity | None = None
    if report is None:
        if origin is None:
            return []
        ranks, doing, why = origin
        found = Candidate(failure_class=FailureClass.SILENT_HANG, confidence=weights.confidence.by_stacks, why=why)
    else:
        ranks, why = report.culprit_ranks, report.why
        found = Candidate(
            failure_class=_FLIGHTS.get(report.kind, FailureClass.COLLECTIVE_MISMATCH),
            confidence=report.confidence,
            why=why,
        )
        if origin is not None and set(origin[0]) & set(ranks):
            doing = origin[1]
    if any(_explains(account, ranks) for account in accounts):
        found = msgspec.structs.replace(found, confidence=found.confidence * weights.factor.explained_wait)
    found = msgspec.structs.replace(
        found,
        culprits=tuple(Culprit(node=nodes.get(rank, ""), rank=rank) for rank in ranks[:16]),
        evidence=(*(report.evidence if report is not None else ()), *stuck.explain(stacks, report, nodes)),
    )
    if report is not None and report.kind == "dead_rank":
        return [msgspec.structs.replace(found, instead=weights.instead.no_dump)]
    if found.failure_class is not FailureClass.SILENT_HANG or doing not in ("data", "checkpoint"):
        return [found]
    if report is not None:
        found = msgspec.structs.replace(found, why=f"{why}: by its stack it is {stuck.DOING[doing]}")
    if doing == "data":
        # An input stall slows a run that goes on. Here the others wait for one rank without end: a hang.
        return [msgspec.structs.replace(found, instead=weights.instead.in_its_loader)]
    confidence = found.confidence * weights.factor.wait_in_a_checkpoint
    held = msgspec.structs.replace(found, failure_class=FailureClass.STORAGE_ERROR, confidence=confidence)
    return [held, found]


def from_stack(stacks: Sequence[RankStack]) -> list[Candidate]:
    """Stacks in which no rank differs, with no other sign of a failure: somebody asked where the ranks are."""
    doing = {activity(one) for one in stacks if one.frames}
    failure_class = _STUCK_IN.get(next(iter(doing))) if len(doing) == 1 else None
    if failure_class is None:
        return []
    why = f"{stuck.names({one.rank for one in stacks})}, asked for the stack: {stuck.DOING[doing.pop()]}"
    confidence = current().confidence.one_moment
    return [Candidate(failure_class=failure_class, confidence=confidence, why=why, evidence=stuck.explain(stacks))]


def _explains(account: Account, ranks: Sequence[int]) -> bool:
    """It explains why one of these ranks did not come."""
    is_cause = TAXONOMY[account.failure_class].kind == "cause" and not account.is_cascade
    return account.failed and is_cause and (account.rank is None or account.rank in ranks)


def class_of(one: Slowdown | Anomaly) -> FailureClass:
    """The class of what curves show."""
    if isinstance(one, Anomaly):
        return FailureClass.LOSS_SPIKE_OR_NAN
    return FailureClass.INPUT_STALL if one.kind == "input" else FailureClass.STRAGGLER_OR_SLOW


def from_curves(slow: Sequence[Slowdown], anomalies: Sequence[Anomaly], accounts: Sequence[Account]) -> list[Candidate]:
    """Readings of slowdowns and of anomalies in numbers."""
    factors = current().factor
    factor = factors.beside_a_failure if accounts else 1.0
    # An error message about the loss says more than the loss itself.
    named = any(one.failure_class is FailureClass.LOSS_SPIKE_OR_NAN for one in accounts)
    of_numbers = factors.numbers_already_named if named else 1.0
    found = [
        Candidate(
            failure_class=class_of(one),
            confidence=one.confidence * factor,
            why=one.why,
            culprits=tuple(Culprit(node=one.node, rank=rank) for rank in one.ranks[:16])
            or ((Culprit(node=one.node),) if one.node else ()),
            evidence=one.evidence,
        )
        for one in slow
        if one.confidence >= LASTING
    ]
    found += [
        Candidate(
            failure_class=class_of(one),
            confidence=one.confidence * (factor if one.kind in ("spike", "divergence") else of_numbers),
            why=one.why,
            evidence=one.evidence,
        )
        for one in anomalies
        if one.confidence >= LASTING
    ]
    return found
