"""Readings of an incident, weighed against each other: the best becomes the verdict, the others its alternatives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from diagnosis import exceptions, exits
from diagnosis.incident import Alternative, Culprit, Verdict
from diagnosis.signals import Evidence, ExitRecord, Frozen
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction
from diagnosis.tracebacks import split_prefix
from diagnosis.verdict.weights import current

MAX_EVIDENCE: Final = 10
MAX_ALTERNATIVES: Final = 4
MAX_ALIKE: Final = 2
_NUMBER: Final = re.compile(r"\d+")

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


class Candidate(Frozen, frozen=True, kw_only=True):
    """One reading of the incident."""

    failure_class: FailureClass
    confidence: float
    why: str
    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    fingerprint: str = ""
    action: RemedyAction | None = None
    """The action that the table of this message asks for, if it differs from that of the class."""
    instead: dict[FailureClass, float] | None = None
    """The alternatives, if the reading is wrong; None: the classes that its class is confused with."""
    is_of_all: bool = False
    """No single rank or node is the culprit, whatever other readings say."""


def nothing(what: str) -> Candidate:
    """The reading if there is no other."""
    return Candidate(
        failure_class=FailureClass.UNKNOWN,
        confidence=current().confidence.nothing_known,
        why=f"nothing in the evidence says why ({what})",
    )


def action_for(failure_class: FailureClass) -> RemedyAction:
    """The default remedy of the taxonomy as an action; policy decides what is done."""
    return _ACTIONS.get(failure_class, _BY_RETRY[TAXONOMY[failure_class].retry])


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Best first."""
    return sorted(candidates, key=_weight, reverse=True)


def _weight(candidate: Candidate) -> float:
    return candidate.confidence + current().bonuses.get(TAXONOMY[candidate.failure_class].kind, -0.5)


def instead_by_end(record: ExitRecord) -> Mapping[FailureClass, float]:
    """What ends processes in this way, if nothing else is known."""
    ends = current().by_end
    by_signal = next((others for name, others in ends.items() if exits.ended_by(record, name)), None)
    return by_signal or ends["1" if record.code else "0"]


def calibrated(confidence: float) -> float:
    """How often a verdict of this weight is right."""
    points = current().calibration.points
    pairs = itertools.pairwise(points)
    low, high = next(((low, high) for low, high in pairs if confidence <= high[0]), (points[-2], points[-1]))
    share = (min(confidence, high[0]) - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1])


def verdict(
    candidates: Sequence[Candidate],
    symptoms: Iterable[FailureClass],
    more_evidence: Iterable[Evidence],
    seen: Mapping[FailureClass, float] | None = None,
) -> Verdict:
    """The verdict on ranked candidates (at least one). `seen`: classes in the evidence that are no readings (warnings,
    what the run survived), with their weights."""
    weights, best = current(), candidates[0]
    rivals: dict[FailureClass, float] = {}
    for candidate in candidates[1:]:
        if candidate.failure_class is not best.failure_class:
            rivals.setdefault(candidate.failure_class, candidate.confidence)
    shown = [key for key in rivals if TAXONOMY[key].kind == "symptom"]
    shown += [symptom for symptom in symptoms if symptom is not best.failure_class]
    # A reading that disagrees with the best one takes from its confidence.
    opposed = (value for key, value in rivals.items() if TAXONOMY[key].kind == "cause" and key not in shown)
    numbers = weights.verdict
    taken = numbers.opposed * min(max(opposed, default=0.0), numbers.most_opposed)
    trust = weights.trust.get(best.failure_class, 1.0)
    confidence = calibrated(min(best.confidence, numbers.most) * (1.0 - taken)) * trust
    named = [one.culprits for one in candidates if one.culprits and one.failure_class is best.failure_class]
    evidence = [*best.evidence, *(line for one in candidates[1:] for line in one.evidence), *more_evidence]
    culprits = best.culprits if best.is_of_all or not named else _joined(named)
    instead = best.instead if best.instead is not None else weights.confusable.get(best.failure_class, {})
    return Verdict(
        failure_class=best.failure_class,
        culprits=culprits,
        confidence=round(confidence, 3),
        why=best.why,
        action=_action(best, culprits),
        symptoms=tuple(dict.fromkeys(shown)),
        alternatives=_alternatives(rivals, _seen(best, seen or {}), instead, confidence),
        evidence=_distinct(evidence)[:MAX_EVIDENCE],
        fingerprint=best.fingerprint,
    )


def _action(best: Candidate, culprits: tuple[Culprit, ...]) -> RemedyAction:
    action = best.action or action_for(best.failure_class)
    # If all ranks are slow, none can be left out, and a restart makes none faster.
    return "none" if action == "restart_excluding" and not culprits else action


def _joined(named: Sequence[tuple[Culprit, ...]]) -> tuple[Culprit, ...]:
    """The culprits of the best reading. If it is one: also its rank or GPU as another reading names it."""
    singles = {one[0] for one in named if len(one) == 1}
    if len(named[0]) != 1 or len(singles) != 2:
        return named[0]
    known, other = named[0][0], next(iter(singles - {named[0][0]}))
    joined = Culprit(
        node=known.node or other.node,
        gpu=known.gpu or other.gpu,
        rank=other.rank if known.rank is None else known.rank,
    )
    agree = other.node in ("", joined.node) and other.gpu in ("", joined.gpu) and other.rank in (None, joined.rank)
    return (joined if agree else known,)


def _seen(best: Candidate, seen: Mapping[FailureClass, float]) -> dict[FailureClass, float]:
    """The classes in the evidence, with those that the words of the best line are about."""
    classes = exceptions.about(best.evidence[0].text) if best.evidence and best.instead is None else ()
    words = {one: current().verdict.by_words / (place + 1) for place, one in enumerate(classes[:MAX_ALTERNATIVES])}
    return {one: seen.get(one, 0.0) + words.get(one, 0.0) for one in (*seen, *words) if one is not best.failure_class}


def _alternatives(
    rivals: Mapping[FailureClass, float],
    seen: Mapping[FailureClass, float],
    instead: Mapping[FailureClass, float],
    confidence: float,
) -> tuple[Alternative, ...]:
    """Other readings of the evidence, other classes in it, then classes that it does not exclude.

    They share what the verdict leaves of certainty. A part of it stays with what nobody thought of.
    """
    numbers = current().verdict
    likely = numbers.of_class if rivals or seen else 1.0
    weights = {
        key: rivals.get(key, 0.0) + seen.get(key, 0.0) + likely * instead.get(key, 0.0)
        for key in (*rivals, *seen, *instead)
    }
    total = sum(weights.values()) + numbers.not_thought_of
    shares = {key: min((1.0 - confidence) * weight / total, confidence) for key, weight in weights.items()}
    found = sorted(shares.items(), key=lambda one: -one[1])[:MAX_ALTERNATIVES]
    return tuple(
        Alternative(failure_class=key, confidence=round(share, 3))
        for key, share in found
        if share >= numbers.least_alternative
    )


def _distinct(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Each line once; of lines that differ only in their numbers, two."""
    found: dict[str, list[Evidence]] = {}
    lines: set[tuple[str, int]] = set()
    for one in evidence:
        if one.line and (one.source, one.line) in lines:
            continue
        lines.add((one.source, one.line or 0))
        alike = found.setdefault(_NUMBER.sub("0", split_prefix(one.text)[1]), [])
        if len(alike) < MAX_ALIKE and all((one.rank, one.node) != (other.rank, other.node) for other in alike):
            alike.append(one)
    return tuple(one for alike in found.values() for one in alike)
