"""From an incident, live or read from old logs, to a verdict: which rank or node failed first, and why.

Each rank that ended badly has an account: its wait status, its traceback, the lines that rules know. Most accounts are
consequences (a peer's connection closed, the launcher's SIGTERM). The first account that is no consequence is the
fault. Findings of kernel, GPU or host in the same window outrank what ranks say. Text is only matched, never run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from diagnosis import exceptions
from diagnosis.incident import (
    Alternative,
    Anomaly,
    Candidate,
    Culprit,
    Incident,
    LogEvidence,
    LogSummary,
    Slowdown,
    Verdict,
)
from diagnosis.kernel.log import read_stamp
from diagnosis.signals import Evidence
from diagnosis.tables import load
from diagnosis.taxonomy import TAXONOMY, FailureClass, RemedyAction
from diagnosis.tracebacks import split_prefix
from diagnosis.verdict import accounts, candidates, log_accounts
from diagnosis.verdict.accounts import Accounts
from diagnosis.verdict.candidates import (
    class_of,
    explained,
    from_accounts,
    from_findings,
    from_hang,
    from_logs,
    from_nodes,
    is_at_work,
    last_progress,
)
from diagnosis.verdict.named import with_named, with_single_nodes
from diagnosis.verdict.weights import Points, current

MAX_APART: Final = 2
"""Ranks that train together are at most this many steps apart, but for what their buffers hold back."""
MAX_CLUES: Final = 3
_GOOD: Final = re.compile(
    r"(?<!un)(?<!not )\b(?:pass(?:ed)?|healthy|ok)\b(?! ?[=:]? ?(?:false|no|0)\b)|\bInit COMPLETE\b|: Not Active\b"
    r"|\bECC\b\D{0,12}\b0\b|process group has NOT been destroyed before we destruct",
    re.IGNORECASE,
)
"""Lines of reports and starts in which all is well, and torch's notice at a regular exit."""
_REPORTS: Final = re.compile(
    r"\b(?:NVIDIA-SMI|NVSMI LOG|AMD-SMI|HL-SMI|npu-smi|xpu-smi)\b|\balgbw +busbw\b|\bROCm System Management\b"
)
_CELL: Final = re.compile(r"^\s{2,40}[A-Z][\w ()/.-]{1,50}\s{2,40}: \S")
LEAST_CELLS: Final = 20
"""A listing of a device's properties, one in a line: so many lines, most of them of this form."""
_STATES: Final = {name: re.compile("|".join(rows)) for name, rows in load("diagnosis", "states.toml").items()}
_ENDS: Final = {
    "finished": ": the work was completed",
    "goes_on": ", and the work was going on where it ends",
    "quiet": " of a node or its devices",
    "no_sign": "; no step and no end of the work shows that all is well, either",
}
"""How logs end that show no failure; each has its confidence in `weights.toml`."""
ADJUSTMENTS: Final = (*accounts.ROWS, *log_accounts.ROWS, *candidates.ROWS)
"""All rows that adjust a verdict; `weights.toml` has their factors."""


def conclude(incident: Incident) -> Verdict:
    """The verdict on an incident of a live job, or on what old logs show.

    There is always one. `unknown`: nothing is known. `none` (old logs only): nothing shows a failure.
    """
    logs = incident.logs
    described = accounts.describe(incident) if logs is None else log_accounts.describe(logs, incident.rank_nodes)
    lost_elsewhere = bool(incident.lost_nodes) or incident.hang is not None
    found = [
        *from_findings(described),
        *from_nodes(incident),
        *from_hang(incident),
        *(from_logs(logs, incident.rank_nodes, described.accounts) if logs is not None else ()),
        *from_accounts(
            described.accounts,
            incident.world_size,
            lost_elsewhere=lost_elsewhere or (logs is not None and logs.flight is not None),
        ),
        *described.others,
    ]
    if logs is None:
        return _weighed(found or [nothing(incident.trigger)], described, live=True)
    found = explained(ranked(found), logs)
    if not found:
        healthy = no_failure(logs, described)
        return with_named(healthy, nothing("no reading"), logs.logs)
    made_steps = any(log.progress_line is not None for log in logs.logs)
    found = [_once_and_again(one) if one.is_of_all or not made_steps else one for one in found]
    judged = _with_target(with_single_nodes(_weighed(found, described)))
    return with_single_nodes(with_named(judged, ranked(found)[0], logs.logs))


def _with_target(found: Verdict) -> Verdict:
    """Nothing can be cordoned where the logs name no rank, node or GPU: somebody has to find out first. Of a job that
    needs more memory than it asked for no restart helps."""
    if found.failure_class is FailureClass.HOST_OOM and _MEMORY_LIMIT.search(found.why) is not None:
        return msgspec.structs.replace(found, action="stop")
    cordons = found.action in ("cordon_gpu_and_restart", "cordon_node_and_restart")
    return msgspec.structs.replace(found, action="hold") if cordons and not found.culprits else found


def _once_and_again(one: Candidate) -> Candidate:
    """The next attempt fails as well from a bug that all ranks have, or that prevents the first step."""
    return msgspec.structs.replace(one, action="stop") if one.failure_class is FailureClass.SCRIPT_ERROR else one


def _weighed(found: list[Candidate], described: Accounts, *, live: bool = False) -> Verdict:
    return verdict(
        ranked(found),
        symptoms=(symptom for account in described.accounts for symptom in account.symptoms),
        more_evidence=(
            *(finding.evidence for finding in described.shown),
            *(line for account in described.accounts if account.is_cascade for line in account.evidence[:1]),
        ),
        seen=described.hints,
        live=live,
    )


def no_failure(evidence: LogEvidence, described: Accounts) -> Verdict:
    """The verdict if nothing shows a failure."""
    weights = current()
    read = [log for log in evidence.logs if log.matches or any(map(str.strip, log.tail))]
    if not read:
        return verdict([nothing("no line of text was given")], (), ())
    lines = sum(log.lines for log in read)
    finished = any(log.finished_line is not None for log in read)
    goes_on = any(last_progress(log) is not None for log in read)
    steps = {log.step for log in read if log.rank is not None and log.step is not None}
    apart = not finished and bool(steps) and max(steps) - min(steps) > MAX_APART
    doubts = () if finished else (_doubt(log) for log in read)
    doubt = next((said for said in doubts if said is not None), None)
    new = evidence.compared.at_end if evidence.compared is not None and not finished and goes_on else None
    well = not apart and doubt is None and new is None
    quiet = is_at_work(evidence) or all(log.kind in ("kernel", "scheduler") for log in read) or _are_all_well(read)
    end = "finished" if finished else "goes_on" if goes_on and well else "quiet" if quiet and well else "no_sign"
    # A log that was cut off shows no end; a log without a step may be anything.
    how = f", but some ranks are at step {min(steps)} and others at {max(steps)}" if apart else _ENDS[end]
    how = f", but no good run has this line before its end: {new.text[:180]}" if new is not None else how
    how = f", but a line sounds of trouble: {doubt.text[:180]}" if doubt is not None else how
    instead = {} if finished else dict(weights.instead["goes_on" if end == "goes_on" else "no_sign"])
    curves: list[Slowdown | Anomaly] = [*evidence.slow, *evidence.anomalies]
    for one in curves:
        failure_class = class_of(one)
        instead[failure_class] = instead.get(failure_class, 0.0) + one.confidence
    healthy = Candidate(
        failure_class=FailureClass.UNKNOWN if end == "no_sign" else FailureClass.NONE,
        confidence=weights.confidence[end],
        why=f"{_reported(lines, end)}{how}",
        evidence=tuple(dict.fromkeys(filter(None, (doubt, new)))),
        action="none",
        instead=instead,
    )
    clues = exceptions.clues([line for log in read for line in log.tail])
    clue = weights.verdict["clue"]
    hints = {
        key: described.hints.get(key, 0.0) + clue * min(clues[key], MAX_CLUES) for key in (*described.hints, *clues)
    }
    return verdict([healthy, *described.survived], (), (finding.evidence for finding in described.shown), hints)


def _reported(lines: int, end: str) -> str:
    of = f"{lines} line{'s' * (lines > 1)}"
    return f"no rule knows a failure in {of}" if end == "no_sign" else f"nothing in {of} tells of a failure"


def _doubt(log: LogSummary) -> Evidence | None:
    """A line that sounds of trouble at the end of a log, after the last sign of progress."""
    first = log.lines - len(log.tail) + 1
    progress = last_progress(log) or 0
    skipped = max(0, progress + 1 - first)
    # What the kernel only warns of is known, and no doubt. So is what was said before, and the work went on.
    known = {event.line for event in log.events}
    known |= {match.last_line or match.line for match in log.matches if match.line < progress}
    if log.kind == "kernel":
        known |= {first + at for at in _of_a_family(log)}
    if log.kind == "kernel":
        known |= {first + at for at in _of_a_boot(log.tail)}
    said = ["" if first + at in known else text for at, text in enumerate(log.tail)][skipped:]
    found = exceptions.trouble(said, of_kernel=log.kind == "kernel")
    if found is None and log.progress_line is None:
        found = _strange(said, of_kernel=log.kind == "kernel")
    if found is None:
        return None
    text = log.tail[skipped + found].strip()[:300]
    return Evidence(text=text, source=log.source, line=first + skipped + found, node=log.node, rank=log.rank)


_FAMILIES: Final = (
    re.compile(r"\b(?:EDAC|MCE|mce|Machine [Cc]heck|Hardware Error|CPER|GHES)\b"),
    re.compile(r"\b(?:AER|pcieport|PCIe Bus Error)\b"),
)
"""Reports of many lines of which the kernel's table knows the one that tells."""


def _of_a_family(log: LogSummary) -> list[int]:
    """Lines of reports of which the one that tells is known, and is a warning only."""
    told = [one for one in _FAMILIES if any(one.search(event.text) for event in log.events)]
    return [at for at, text in enumerate(log.tail) if any(one.search(text) for one in told)]


def _strange(lines: Sequence[str], *, of_kernel: bool) -> int | None:
    """A line about something that is not as it was, in words of a driver or a daemon that nobody knows; or a row of a
    table whose state is another one than the good one of the rows beside it."""
    found = next((at for at, text in enumerate(lines) if _STATES["strange"].search(text)), None)
    rows: dict[str, list[tuple[int, str]]] = {}
    for at, text in enumerate(lines if found is None and not of_kernel else ()):
        row = _ROW.match(text)
        if row is not None:
            rows.setdefault(_NUMBER.sub("0", row["of"]), []).append((at, row["state"].lower()))
    for told in rows.values():
        well = [one for _, one in told if one in _WELL]
        odd = [at for at, one in told if one not in _WELL and one not in _BUSY]
        if len(well) > len(odd) and len(well) > 1 and odd:
            return odd[0]
    return found


_ROW: Final = re.compile(
    r"^(?P<of>\s{0,20}\S{1,40}[\s:=|-].{0,80}?)[\s:=|]{1,40}(?P<state>[A-Za-z]{2,20})[\s|.]{0,20}$"
)
"""`device 2  state ok`, `| card3 | healthy |`."""
_WELL: Final = frozenset(
    "ok okay ready healthy good up active online normal nominal pass passed present enabled optimal".split()
)
_BUSY: Final = frozenset(
    "idle mix mixed alloc allocated busy running used free standby spare reserved yes on off no".split()
)


def _of_a_boot(lines: Sequence[str]) -> list[int]:
    """Lines of a boot that came to its end: drivers complain of much that is optional while they look for devices."""
    said = [read_stamp(text).uptime for text in lines]
    booted = any(one is not None and one >= log_accounts.BOOT_S for one in said)
    return [at for at, one in enumerate(said) if booted and one is not None and one < log_accounts.BOOT_S]


def _are_all_well(logs: Sequence[LogSummary]) -> bool:
    """Reports and starts that say that something is good, and of which no line sounds of trouble."""
    lines = [line for log in logs for line in log.tail]
    if len(lines) >= LEAST_CELLS and sum(map(bool, map(_CELL.search, lines))) > len(lines) / 2:
        return True
    if any(map(_REPORTS.search, lines)) or any(map(_GOOD.search, lines)):
        return True
    return any(map(_STATES["good"].search, lines)) and not any(map(_STATES["doubtful"].search, lines))


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


def nothing(what: str) -> Candidate:
    """The reading if there is no other."""
    return Candidate(
        failure_class=FailureClass.UNKNOWN,
        confidence=current().confidence["nothing_known"],
        why=f"nothing in the evidence says why ({what})",
    )


def action_for(failure_class: FailureClass) -> RemedyAction:
    """The default remedy of the taxonomy as an action; policy decides what is done."""
    return _ACTIONS.get(failure_class, _BY_RETRY[TAXONOMY[failure_class].retry])


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Best first."""
    return sorted(candidates, key=_weight, reverse=True)


def _weight(candidate: Candidate) -> float:
    return candidate.confidence + current().bonus.get(TAXONOMY[candidate.failure_class].kind, -0.5)


def calibrated(confidence: float, points: Points) -> float:
    """How often a verdict of this weight is right."""
    pairs = itertools.pairwise(points)
    low, high = next(((low, high) for low, high in pairs if confidence <= high[0]), (points[-2], points[-1]))
    share = (min(confidence, high[0]) - low[0]) / (high[0] - low[0])
    return low[1] + share * (high[1] - low[1])


def verdict(
    candidates: Sequence[Candidate],
    symptoms: Iterable[FailureClass],
    more_evidence: Iterable[Evidence],
    seen: Mapping[FailureClass, float] | None = None,
    *,
    live: bool = False,
) -> Verdict:
    """The verdict on ranked candidates (at least one). `seen`: classes in the evidence that are no readings (warnings,
    what the run survived), with their weights. `live`: of a job that runs, not of old logs."""
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
    taken = numbers["opposed"] * min(max(opposed, default=0.0), numbers["most_opposed"])
    trust = weights.trust.get(best.failure_class, 1.0)
    table = weights.calibration.live if live else weights.calibration.logs
    confidence = calibrated(min(best.confidence, numbers["most"]) * (1.0 - taken), table) * trust
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
        alternatives=_alternatives(rivals, _seen(best, seen or {}), instead, confidence, best.failure_class),
        evidence=_distinct(evidence)[:MAX_EVIDENCE],
        fingerprint=best.fingerprint,
    )


_MISMATCH: Final = re.compile(r"size mismatch for|(?:Missing|Unexpected) key\(s\)|Error\(s\) in loading state_dict")


_MEMORY_LIMIT: Final = re.compile(
    r"[Ee]xceeded (?:job |step )?memory limit|TERM_MEMLIMIT|PBS: job killed: p?v?mem |exceeded resource p?v?mem\b"
)
"""The job's own limit: the same job reaches it again."""


def _action(best: Candidate, culprits: tuple[Culprit, ...]) -> RemedyAction:
    action = best.action or action_for(best.failure_class)
    words = (best.why, *(line.text for line in best.evidence[:2]))
    if best.failure_class is FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH and any(map(_MISMATCH.search, words)):
        return "stop"  # an older checkpoint does not fit the model, either
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
    words = {one: current().verdict["by_words"] / (place + 1) for place, one in enumerate(classes[:MAX_ALTERNATIVES])}
    return {one: seen.get(one, 0.0) + words.get(one, 0.0) for one in (*seen, *words) if one is not best.failure_class}


def _alternatives(
    rivals: Mapping[FailureClass, float],
    seen: Mapping[FailureClass, float],
    instead: Mapping[FailureClass, float],
    confidence: float,
    best: FailureClass,
) -> tuple[Alternative, ...]:
    """Other readings of the evidence, other classes in it, then classes that it does not exclude.

    They share what the verdict leaves of certainty. A part of it stays with what nobody thought of.
    """
    numbers = current().verdict
    likely = numbers["of_class"] if rivals or seen else 1.0
    weights = {
        key: rivals.get(key, 0.0) + seen.get(key, 0.0) + likely * instead.get(key, 0.0)
        for key in (*rivals, *seen, *instead)
    }
    total = sum(weights.values()) + numbers["not_thought_of"]
    most = confidence if best is not FailureClass.UNKNOWN else 1.0
    shares = {key: min((1.0 - confidence) * weight / total, most) for key, weight in weights.items()}
    found = sorted(shares.items(), key=lambda one: -one[1])[:MAX_ALTERNATIVES]
    return tuple(
        Alternative(failure_class=key, confidence=round(share, 3))
        for key, share in found
        if share >= numbers["least_alternative"]
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
