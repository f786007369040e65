"""Readings of an incident, weighed against each other: the best becomes the verdict, the others its alternatives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from diagnosis import exits
from diagnosis.errors import last_words
from diagnosis.errors.tracebacks import split_prefix
from diagnosis.incident import Alternative, Culprit, RemedyAction, Verdict
from diagnosis.signals import Evidence, ExitRecord, Frozen
from diagnosis.taxonomy import TAXONOMY, FailureClass

_ALIKE: Final = """
gpu_ecc_uncorrectable: cuda_illegal_access 25, gpu_hang 20, nvlink_error 15
gpu_fallen_off_bus: pcie_error 35, gpu_hang 25, gpu_driver 20
gpu_hang: gpu_fallen_off_bus 30, gpu_driver 25, kernel_fault 15
nvlink_error: gpu_driver 25, gpu_fallen_off_bus 20, nccl_setup 15
gpu_driver: dependency_import_error 25, gpu_fallen_off_bus 20, config_or_argument_error 20, gpu_hang 15
gpu_thermal_power: straggler_or_slow 40, gpu_hang 15
pcie_error: gpu_fallen_off_bus 40, straggler_or_slow 20
cuda_illegal_access: script_error 30, framework_bug 30, gpu_ecc_uncorrectable 20
silent_data_corruption: loss_spike_or_nan 40, cpu_or_memory_hw 15
gpu_oom: config_or_argument_error 25, gpu_driver 20, framework_bug 10
host_oom: worker_crash 30, shm_exhausted 20, preempted_or_cancelled 15
shm_exhausted: host_oom 35, data_loading_error 25
cpu_or_memory_hw: kernel_fault 30, node_failure 20
kernel_fault: storage_error 30, cpu_or_memory_hw 25, host_oom 15
node_failure: nccl_network 25, kernel_fault 25, preempted_or_cancelled 20
nccl_network: worker_crash 30, node_failure 30, rendezvous_store 15
nccl_setup: nccl_network 30, config_or_argument_error 25, gpu_driver 20
rendezvous_store: dns_or_connect 30, nccl_network 25, node_failure 20, config_or_argument_error 15
dns_or_connect: rendezvous_store 25, permission_or_auth 20, config_or_argument_error 20
storage_error: data_loading_error 25, checkpoint_corrupt_or_mismatch 25, disk_full 15
disk_full: storage_error 35, shm_exhausted 20
checkpoint_corrupt_or_mismatch: config_or_argument_error 35, storage_error 30, script_error 20
data_loading_error: script_error 35, config_or_argument_error 25, storage_error 25
dependency_import_error: config_or_argument_error 30, script_error 30, gpu_driver 15
config_or_argument_error: script_error 40, data_loading_error 25, checkpoint_corrupt_or_mismatch 15
permission_or_auth: config_or_argument_error 30, dns_or_connect 25, storage_error 20
script_error: config_or_argument_error 35, data_loading_error 30, framework_bug 15
framework_bug: cuda_illegal_access 25, script_error 25, worker_crash 20
collective_mismatch: script_error 30, data_loading_error 20, nccl_timeout 15
loss_spike_or_nan: silent_data_corruption 25, config_or_argument_error 20
input_stall: storage_error 30, straggler_or_slow 30
straggler_or_slow: input_stall 30, gpu_thermal_power 25, pcie_error 15
nccl_timeout: silent_hang 30, nccl_network 25, collective_mismatch 20, straggler_or_slow 10
silent_hang: collective_mismatch 25, input_stall 20, storage_error 20, nccl_timeout 15
exit_hang: nccl_timeout 30, silent_hang 20, preempted_or_cancelled 15
worker_crash: host_oom 30, framework_bug 25, script_error 20, preempted_or_cancelled 15
preempted_or_cancelled: worker_crash 25, host_oom 20, node_failure 10
unknown: worker_crash 30, preempted_or_cancelled 20
"""

_BY_END = """
SIGKILL: host_oom 50, preempted_or_cancelled 20, node_failure 5
SIGTERM: preempted_or_cancelled 50, node_failure 10
SIGINT: preempted_or_cancelled 60
SIGABRT: framework_bug 30, nccl_timeout 20, cuda_illegal_access 15
SIGSEGV: framework_bug 40, cuda_illegal_access 15, dependency_import_error 15, cpu_or_memory_hw 10
SIGBUS: shm_exhausted 50, storage_error 15, host_oom 15
0: script_error 35, data_loading_error 30, collective_mismatch 15
1: script_error 35, config_or_argument_error 25, dependency_import_error 15
"""
"""How a process ended of which nothing else is known."""


def _table(text: str) -> dict[str, dict[FailureClass, float]]:
    rows = (line.split(": ") for line in text.strip().splitlines())
    return {
        name: {FailureClass(other): int(percent) / 100 for other, percent in map(str.split, others.split(", "))}
        for name, others in rows
    }


CONFUSABLE: Final[Mapping[FailureClass, Mapping[FailureClass, float]]] = {
    FailureClass(name): others for name, others in _table(_ALIKE).items()
}
_ENDS: Final = _table(_BY_END)

STOPPED: Final[Mapping[FailureClass, float]] = {
    FailureClass.PREEMPTED_OR_CANCELLED: 0.3,
    FailureClass.SILENT_HANG: 0.25,
    FailureClass.WORKER_CRASH: 0.25,
}
"""Of a log that no failure ends, and no end of the work either."""
GOES_ON: Final[Mapping[FailureClass, float]] = {
    FailureClass.LOSS_SPIKE_OR_NAN: 0.25,
    FailureClass.PREEMPTED_OR_CANCELLED: 0.2,
    FailureClass.STRAGGLER_OR_SLOW: 0.15,
    FailureClass.INPUT_STALL: 0.15,
}
"""Of a log in which training goes on to the last line."""


def instead_by_end(record: ExitRecord) -> Mapping[FailureClass, float]:
    """What ends processes like this one."""
    by_signal = next((others for name, others in _ENDS.items() if exits.ended_by(record, name)), None)
    return by_signal or _ENDS["1" if record.code else "0"]


MAX_EVIDENCE: Final = 10
MAX_ALTERNATIVES: Final = 4
MAX_ALIKE: Final = 2
MIN_ALTERNATIVE: Final = 0.005
_NOT_THOUGHT_OF: Final = 0.3
_OF_CLASS: Final = 0.5
"""How much of what a class is mistaken for in general counts where the evidence itself offers something."""
_BY_WORDS: Final = 0.3
_RIGHT: Final = ((0.0, 0.0), (0.3, 0.35), (0.5, 0.55), (0.6, 0.72), (0.7, 0.82), (0.8, 0.9), (0.9, 0.95), (1.0, 0.98))
"""Weight -> share of right verdicts, monotone. Fitted on 105 labelled real logs in bins of 0.1. Rules were written with
these logs at hand, so each bin counts half, and ten cases that are right as often as their weight says are added."""
_TRUST: Final = {FailureClass.SCRIPT_ERROR: 0.93}
"""What neither words nor places explain is called a bug of the script, and is often something else."""
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
_BONUS: Final = {"cause": 0.15, "outcome": 0.1, "symptom": 0.0}
"""A cause beats a symptom or an outcome unless it is much less sure."""


class Candidate(Frozen, frozen=True, kw_only=True):
    """One reading of the incident."""

    failure_class: FailureClass
    confidence: float
    why: str
    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    fingerprint: str = ""
    action: RemedyAction | None = None
    """What the tables of this very message ask for, where that differs from what its class does."""
    instead: dict[FailureClass, float] | None = None
    """What it may be where it is wrong; None: what is alike by its class."""
    is_of_all: bool = False
    """Nobody in particular is the culprit, whatever others say."""


def action_for(failure_class: FailureClass) -> RemedyAction:
    """The taxonomy's default remedy as an action; policy decides what is really done."""
    return _ACTIONS.get(failure_class, _BY_RETRY[TAXONOMY[failure_class].retry])


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Best first."""
    return sorted(candidates, key=_weight, reverse=True)


def _weight(candidate: Candidate) -> float:
    return candidate.confidence + _BONUS.get(TAXONOMY[candidate.failure_class].kind, -0.5)


def calibrated(confidence: float) -> float:
    """How often a verdict of this weight is right."""
    points = itertools.pairwise(_RIGHT)
    low, high = next(((low, high) for low, high in points if confidence <= high[0]), (_RIGHT[-2], _RIGHT[-1]))
    share = (min(confidence, high[0]) - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1])


def verdict(
    candidates: Sequence[Candidate],
    symptoms: Iterable[FailureClass],
    more_evidence: Iterable[Evidence],
    seen: Mapping[FailureClass, float] | None = None,
) -> Verdict:
    """The verdict of what `ranked` gave (at least one). `seen`: what else the evidence holds that is no reading of its
    own (warnings, what training outlived), and how much it weighs."""
    best = candidates[0]
    rivals: dict[FailureClass, float] = {}
    for candidate in candidates[1:]:
        if candidate.failure_class is not best.failure_class:
            rivals.setdefault(candidate.failure_class, candidate.confidence)
    shown = [key for key in rivals if TAXONOMY[key].kind == "symptom"]
    shown += [symptom for symptom in symptoms if symptom is not best.failure_class]
    # What disagrees with the best reading takes from its confidence.
    opposed = (value for key, value in rivals.items() if TAXONOMY[key].kind == "cause" and key not in shown)
    weight = min(best.confidence, 0.97) * (1.0 - 0.2 * min(max(opposed, default=0.0), 0.9))
    confidence = calibrated(weight) * _TRUST.get(best.failure_class, 1.0)
    named = [one.culprits for one in candidates if one.culprits and one.failure_class is best.failure_class]
    evidence = [*best.evidence, *(line for one in candidates[1:] for line in one.evidence), *more_evidence]
    culprits = best.culprits if best.is_of_all or not named else _joined(named)
    instead = best.instead if best.instead is not None else CONFUSABLE.get(best.failure_class, {})
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
    # Where all are slow there is nobody to go on without, and a restart would not make them faster.
    return "none" if action == "restart_excluding" and not culprits else action


def _joined(named: Sequence[tuple[Culprit, ...]]) -> tuple[Culprit, ...]:
    """The first that are named; of a single one also what else is known of it: its rank by one, its GPU by another."""
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
    """What else is in the evidence: also what the words of the best line are about, beside what was read in them."""
    told = last_words.about(best.evidence[0].text) if best.evidence and best.instead is None else ()
    words = {one: _BY_WORDS / (place + 1) for place, one in enumerate(told[:MAX_ALTERNATIVES])}
    return {one: seen.get(one, 0.0) + words.get(one, 0.0) for one in (*seen, *words) if one is not best.failure_class}


def _alternatives(
    rivals: Mapping[FailureClass, float],
    seen: Mapping[FailureClass, float],
    instead: Mapping[FailureClass, float],
    confidence: float,
) -> tuple[Alternative, ...]:
    """What else it may be: other readings of the evidence, what else is in it, then classes that it does not exclude.

    They share what the verdict leaves of certainty; a part of it stays with what nobody thought of.
    """
    likely = _OF_CLASS if rivals or seen else 1.0
    weights = {
        key: rivals.get(key, 0.0) + seen.get(key, 0.0) + likely * instead.get(key, 0.0)
        for key in (*rivals, *seen, *instead)
    }
    total = sum(weights.values()) + _NOT_THOUGHT_OF
    shares = {key: min((1.0 - confidence) * weight / total, confidence) for key, weight in weights.items()}
    found = sorted(shares.items(), key=lambda one: -one[1])[:MAX_ALTERNATIVES]
    return tuple(
        Alternative(failure_class=key, confidence=round(share, 3)) for key, share in found if share >= MIN_ALTERNATIVE
    )


def _distinct(evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Each line once; of what differs in its numbers only, two."""
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
