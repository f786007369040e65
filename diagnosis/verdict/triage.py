"""From an incident, or from a case of old logs, to a verdict: who failed first, and of what.

Every rank that ended badly gives an account of itself: its wait status, its traceback, what rules read in its output.
Most accounts are consequences (a peer's connection closed, the launcher's SIGTERM); the first that is not, is the
fault. Findings of the kernel, the GPU or the host in the same window outrank what the ranks say. Text is only matched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from diagnosis import stacks
from diagnosis.errors import last_words
from diagnosis.incident import Incident, Verdict
from diagnosis.log_evidence import Anomaly, LogEvidence, LogSummary, Slowdown
from diagnosis.signals import Evidence, Finding, RankStack
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import attribution, log_accounts, origin, other_evidence
from diagnosis.verdict import candidates as verdict_candidates
from diagnosis.verdict.accounts import Account, gather
from diagnosis.verdict.candidates import MAX_EVIDENCE, Candidate, action_for, ranked, verdict

MAX_APART: Final = 2
"""Ranks that train together are not further apart than so many steps, but for what their buffers hold back."""
_FINISHED: Final = 0.9
_GOES_ON: Final = 0.75
_CLUE: Final = 0.1
_DIFFER: Final = 0.6
_BEFORE_THE_END: Final = 0.66
WORDS_BEFORE: Final = 3
_LIVES: Final = 0.6
_NO_SIGN: Final = 0.45
"""How sure it is that nothing failed where nothing tells of it: what no rule knows is not seen either. Lines of an
ordinary level at its end say at least that the program goes on."""

__all__ = ["MAX_EVIDENCE", "action_for", "conclude", "conclude_case"]


def conclude(incident: Incident) -> Verdict:
    """The verdict on an incident. Always one: `unknown` when nothing is known."""
    accounts = gather(incident)
    findings = attribution.distinct(
        [*incident.findings, *(finding for one in incident.evidence for finding in one.findings)]
    )
    # A rank's own output is weighed with its account.
    outside = [one for one in findings if incident.trigger == "signal" or not _of_a_rank(one)]
    candidates = [
        *attribution.from_findings(outside, accounts, _places(incident, accounts)),
        *other_evidence.from_nodes(incident),
        *other_evidence.from_hang(incident),
        *origin.from_accounts(
            accounts,
            incident.world_size,
            lost_elsewhere=bool(incident.lost_nodes) or incident.hang is not None,
        ),
    ]
    return _weighed(candidates or [_nothing(incident.trigger)], findings, accounts)


def conclude_case(case: LogEvidence) -> Verdict:
    """The verdict on old logs, dumps and stacks: `none` where nothing tells of a failure, `unknown` without words."""
    heard = log_accounts.describe(case)
    accounts, findings = list(heard.accounts), attribution.distinct(heard.findings)
    places = {one.node for one in accounts if not one.is_cascade} - {""}
    candidates = [
        *attribution.from_findings(findings, accounts, places, heard.failed_at, _spoke(case) - places),
        *other_evidence.from_flight(case.flight, case.stacks, case.rank_nodes, accounts),
        *other_evidence.from_curves(case.slow, case.anomalies, accounts),
        *origin.from_accounts(accounts, case.world_size, lost_elsewhere=case.flight is not None),
        *heard.others,
    ]
    if candidates and all(one.failure_class is FailureClass.WORKER_CRASH for one in candidates):
        candidates += _of_words_before(case, ranked(candidates)[0])
    candidates = candidates or _of_calls(case) or _of_last_words(case)
    candidates = candidates or other_evidence.from_stack(case.stacks or _stacks_at_the_end(case))
    if not candidates:
        return _no_failure(case, heard, findings)
    made_steps = any(log.progress_line is not None for log in case.logs)
    candidates = [_once_and_again(one) if one.is_of_all or not made_steps else one for one in candidates]
    return _weighed(candidates, findings, accounts, heard.hints)


def _once_and_again(one: Candidate) -> Candidate:
    """A bug that all ranks have, or that lets no step be made, is there in the next attempt as well."""
    return msgspec.structs.replace(one, action="stop") if one.failure_class is FailureClass.SCRIPT_ERROR else one


def _of_words_before(case: LogEvidence, end: Candidate) -> list[Candidate]:
    """Of an end that nobody explains: the exception without its traceback that stands before the report of it."""
    found = []
    for log in case.logs:
        reports = [failure.line for failure in log.launcher]
        reports += [match.line for match in log.matches if match.failure_class is FailureClass.WORKER_CRASH]
        first = log.lines - len(log.tail) + 1
        before = log.tail[: max(min(reports) - first, 0)] if reports else ()
        said = last_words.read_exception(before, WORDS_BEFORE)
        if said is not None:
            evidence = Evidence(text=said.text, source=log.source, line=first + said.line, node=log.node, rank=log.rank)
            found.append(
                Candidate(
                    failure_class=said.failure_class,
                    confidence=_BEFORE_THE_END,
                    why=f"before the end somebody wrote: {said.text[:180]}",
                    culprits=end.culprits,
                    evidence=(evidence, *end.evidence[:1]),
                )
            )
    return found


def _of_calls(case: LogEvidence) -> list[Candidate]:
    """Collectives in which ranks differ, at the ends of logs of which nothing else tells of a failure."""
    told = [(log, index, line) for log in case.logs for index, line in enumerate(log.tail)]
    found = log_accounts.disagreement([line for _, _, line in told])
    if found is None or any(log.finished_line is not None for log in case.logs):
        return []
    log, index, _ = told[found.line]
    number = log.lines - len(log.tail) + 1 + index
    evidence = Evidence(text=found.text[:300], source=log.source, line=number, node=log.node, rank=log.rank)
    return [
        Candidate(
            failure_class=FailureClass.COLLECTIVE_MISMATCH, confidence=_DIFFER, why=found.why, evidence=(evidence,)
        )
    ]


def _stacks_at_the_end(case: LogEvidence) -> list[RankStack]:
    """Of logs that show no progress, and no more than stacks at their end."""
    ends = ("\n".join(log.tail).encode() for log in case.logs if log.progress_line is None)
    return [stack for end in ends if stacks.is_dump(end) for stack in stacks.read_dump(end, "")]


def _of_last_words(case: LogEvidence) -> list[Candidate]:
    """Errors that no rule knows, at the end of logs that do not show an end of the work."""
    found = []
    for log in case.logs:
        said = None if log.finished_line is not None else _last_words(log)
        if said is None:
            continue
        line = log.lines - len(log.tail) + 1 + said.line
        if log.kind != "kernel" and log_accounts.shows_life(log_accounts.lines_after(log, line)):
            continue
        evidence = Evidence(text=said.text, source=log.source, line=line, node=log.node, rank=log.rank)
        how = "a task sleeps and cannot be woken" if log.kind == "kernel" else "the log ends with an error"
        found.append(
            Candidate(
                failure_class=said.failure_class,
                confidence=last_words.CONFIDENCE,
                why=f"{how}: {said.text[:180]}",
                evidence=(evidence,),
            )
        )
    return found


def _last_words(log: LogSummary) -> last_words.LastWords | None:
    if log.kind == "kernel":
        return last_words.read_kernel(log.tail)
    return last_words.read_exception(log.tail) or (last_words.read(log.tail) if log.progress_line is None else None)


def _spoke(case: LogEvidence) -> set[str]:
    """The nodes whose ranks wrote something."""
    return {log.node for log in case.logs if log.kind in ("output", "mixed")} - {""}


def _no_failure(case: LogEvidence, heard: log_accounts.Told, findings: list[Finding]) -> Verdict:
    read = [log for log in case.logs if log.matches or any(map(str.strip, log.tail))]
    if not read:
        return verdict([_nothing("no line of text was given")], (), ())
    lines = sum(log.lines for log in read)
    finished = any(log.finished_line is not None for log in read)
    # A log of which only the middle is left shows no end; one that shows no step may be anything.
    goes_on = any(log.progress_line is not None for log in read)
    lives = any(log_accounts.shows_life(log.tail) for log in read)
    steps = {log.step for log in read if log.rank is not None and log.step is not None}
    if not finished and steps and max(steps) - min(steps) > MAX_APART:
        goes_on, lives, how = False, False, f", but some ranks are at step {min(steps)} and others at {max(steps)}"
    else:
        signs = ((finished, ": the work was completed"), (goes_on, ", and training goes on"), (lives, ""))
        how = next((words for shown, words in signs if shown), ", and nothing of a step or of an end of the work")
    instead = {} if finished else dict(verdict_candidates.GOES_ON if goes_on else verdict_candidates.STOPPED)
    shown: list[Slowdown | Anomaly] = [*case.slow, *case.anomalies]
    for one in shown:
        failure_class = other_evidence.class_of(one)
        instead[failure_class] = instead.get(failure_class, 0.0) + one.confidence
    healthy = Candidate(
        failure_class=FailureClass.NONE,
        confidence=_FINISHED if finished else _GOES_ON if goes_on else _LIVES if lives else _NO_SIGN,
        why=f"nothing in {lines} line{'s' * (lines > 1)} tells of a failure{how}",
        instead=instead,
    )
    clues = last_words.clues([line for log in read for line in log.tail])
    hints = {key: heard.hints.get(key, 0.0) + _CLUE * min(clues[key], 3) for key in (*heard.hints, *clues)}
    return verdict([healthy, *heard.survived], (), (finding.evidence for finding in findings), hints)


def _of_a_rank(finding: Finding) -> bool:
    return finding.evidence.source == "output" and finding.rank is not None


def _places(incident: Incident, accounts: list[Account]) -> set[str]:
    """The nodes on which something failed of itself."""
    places = {one.node for one in accounts if one.failed and not one.is_cascade} | set(incident.lost_nodes)
    if incident.hang is not None:
        places |= {incident.rank_nodes.get(rank, "") for rank in incident.hang.ranks}
    return places - {""}


def _weighed(
    candidates: list[Candidate],
    findings: list[Finding],
    accounts: list[Account],
    hints: Mapping[FailureClass, float] | None = None,
) -> Verdict:
    return verdict(
        ranked(candidates),
        symptoms=(symptom for account in accounts for symptom in account.symptoms),
        more_evidence=(
            *(finding.evidence for finding in findings),
            *(line for account in accounts if account.is_cascade for line in account.evidence[:1]),
        ),
        seen=hints,
    )


def _nothing(what: str) -> Candidate:
    return Candidate(
        failure_class=FailureClass.UNKNOWN, confidence=0.2, why=f"nothing in the evidence says why ({what})"
    )
