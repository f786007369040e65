"""How old logs end where their accounts explain nothing: an error that no rule knows, collectives that differ, stacks.

Also the verdict where nothing tells of a failure, and how sure that is: what no rule knows is not seen either.
"""

from __future__ import annotations

from typing import Final

from diagnosis import exceptions, stacks
from diagnosis.incident import Verdict
from diagnosis.log_evidence import Anomaly, LogEvidence, LogSummary, Slowdown
from diagnosis.signals import Evidence, RankStack
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import other_evidence
from diagnosis.verdict.accounts import Accounts
from diagnosis.verdict.candidates import Candidate, nothing, ranked, verdict
from diagnosis.verdict.log_accounts import disagreement, lines_after, shows_life
from diagnosis.verdict.weights import current

MAX_APART: Final = 2
"""Ranks that train together are at most this many steps apart, but for what their buffers hold back."""
WORDS_BEFORE: Final = 3
"""Lines before the report of an end in which the exception may stand."""
MAX_CLUES: Final = 3


def explained(candidates: list[Candidate], evidence: LogEvidence) -> list[Candidate]:
    """The readings, with what the ends of the logs add; empty where nothing tells of a failure."""
    if candidates and all(one.failure_class is FailureClass.WORKER_CRASH for one in candidates):
        return candidates + _of_words_before(evidence, ranked(candidates)[0])
    return (
        candidates
        or _of_calls(evidence)
        or _of_last_words(evidence)
        or other_evidence.from_stack(evidence.stacks or _stacks_at_the_end(evidence))
    )


def _of_words_before(evidence: LogEvidence, end: Candidate) -> list[Candidate]:
    """Of an end that nobody explains: the exception without its traceback that stands before the report of it."""
    found = []
    for log in evidence.logs:
        reports = [failure.line for failure in log.launcher]
        reports += [match.line for match in log.matches if match.failure_class is FailureClass.WORKER_CRASH]
        first = log.lines - len(log.tail) + 1
        before = log.tail[: max(min(reports) - first, 0)] if reports else ()
        said = exceptions.last_exception(before, WORDS_BEFORE)
        if said is not None:
            line = Evidence(text=said.text, source=log.source, line=first + said.line, node=log.node, rank=log.rank)
            found.append(
                Candidate(
                    failure_class=said.failure_class,
                    confidence=current().confidence.exception_before_the_end,
                    why=f"before the end somebody wrote: {said.text[:180]}",
                    culprits=end.culprits,
                    evidence=(line, *end.evidence[:1]),
                )
            )
    return found


def _of_calls(evidence: LogEvidence) -> list[Candidate]:
    """Collectives in which ranks differ, at the ends of logs of which nothing else tells of a failure."""
    tails = [(log, index, line) for log in evidence.logs for index, line in enumerate(log.tail)]
    found = disagreement([line for _, _, line in tails])
    if found is None or any(log.finished_line is not None for log in evidence.logs):
        return []
    log, index, _ = tails[found.line]
    number = log.lines - len(log.tail) + 1 + index
    line = Evidence(text=found.text[:300], source=log.source, line=number, node=log.node, rank=log.rank)
    sure = current().confidence.calls_differ
    return [Candidate(failure_class=FailureClass.COLLECTIVE_MISMATCH, confidence=sure, why=found.why, evidence=(line,))]


def _stacks_at_the_end(evidence: LogEvidence) -> list[RankStack]:
    """Of logs that show no progress, and no more than stacks at their end."""
    ends = ("\n".join(log.tail).encode() for log in evidence.logs if log.progress_line is None)
    return [stack for end in ends if stacks.is_dump(end) for stack in stacks.read_dump(end, "")]


def _of_last_words(evidence: LogEvidence) -> list[Candidate]:
    """Errors that no rule knows, at the end of logs that do not show an end of the work."""
    found = []
    for log in evidence.logs:
        said = None if log.finished_line is not None else _last_words(log)
        if said is None:
            continue
        number = log.lines - len(log.tail) + 1 + said.line
        if log.kind != "kernel" and shows_life(lines_after(log, number)):
            continue
        line = Evidence(text=said.text, source=log.source, line=number, node=log.node, rank=log.rank)
        how = "a task sleeps and cannot be woken" if log.kind == "kernel" else "the log ends with an error"
        found.append(
            Candidate(
                failure_class=said.failure_class,
                confidence=exceptions.LAST_WORDS_CONFIDENCE,
                why=f"{how}: {said.text[:180]}",
                evidence=(line,),
            )
        )
    return found


def _last_words(log: LogSummary) -> exceptions.LastWords | None:
    if log.kind == "kernel":
        return exceptions.last_sleeper(log.tail)
    return exceptions.last_exception(log.tail) or (
        exceptions.last_words(log.tail) if log.progress_line is None else None
    )


def no_failure(evidence: LogEvidence, told: Accounts) -> Verdict:
    """The verdict where nothing tells of a failure."""
    weights = current()
    read = [log for log in evidence.logs if log.matches or any(map(str.strip, log.tail))]
    if not read:
        return verdict([nothing("no line of text was given")], (), ())
    lines = sum(log.lines for log in read)
    finished = any(log.finished_line is not None for log in read)
    # A log of which only the middle is left shows no end; one that shows no step may be anything.
    goes_on = any(log.progress_line is not None for log in read)
    lives = any(shows_life(log.tail) for log in read)
    steps = {log.step for log in read if log.rank is not None and log.step is not None}
    if not finished and steps and max(steps) - min(steps) > MAX_APART:
        goes_on, lives, how = False, False, f", but some ranks are at step {min(steps)} and others at {max(steps)}"
    else:
        signs = ((finished, ": the work was completed"), (goes_on, ", and training goes on"), (lives, ""))
        how = next((words for shown, words in signs if shown), ", and nothing of a step or of an end of the work")
    instead = {} if finished else dict(weights.instead.goes_on if goes_on else weights.instead.no_sign)
    curves: list[Slowdown | Anomaly] = [*evidence.slow, *evidence.anomalies]
    for one in curves:
        failure_class = other_evidence.class_of(one)
        instead[failure_class] = instead.get(failure_class, 0.0) + one.confidence
    sure = weights.confidence
    confidences = ((finished, sure.finished), (goes_on, sure.goes_on), (lives, sure.shows_life), (True, sure.no_sign))
    healthy = Candidate(
        failure_class=FailureClass.NONE,
        confidence=next(value for shown, value in confidences if shown),
        why=f"nothing in {lines} line{'s' * (lines > 1)} tells of a failure{how}",
        instead=instead,
    )
    clues = exceptions.clues([line for log in read for line in log.tail])
    clue = weights.verdict.clue
    hints = {key: told.hints.get(key, 0.0) + clue * min(clues[key], MAX_CLUES) for key in (*told.hints, *clues)}
    return verdict([healthy, *told.survived], (), (finding.evidence for finding in told.shown), hints)
