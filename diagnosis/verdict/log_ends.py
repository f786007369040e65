"""The ends of old logs that no account explains: an error that no rule knows, collectives that differ, stacks.

Also the verdict if nothing shows a failure. It is not very sure: an error that no rule knows is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from diagnosis import exceptions, stacks
from diagnosis.incident import Verdict
from diagnosis.log_evidence import Anomaly, LogEvidence, LogSummary, Slowdown
from diagnosis.signals import Evidence, RankStack
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import other_evidence
from diagnosis.verdict.accounts import Accounts
from diagnosis.verdict.candidates import Candidate, nothing, ranked, verdict
from diagnosis.verdict.log_accounts import lines_after, shows_life
from diagnosis.verdict.weights import current

MAX_APART: Final = 2
"""Ranks that train together are at most this many steps apart, but for what their buffers hold back."""
WORDS_BEFORE: Final = 3
"""Lines before the report of an end in which the exception may stand."""
MAX_CLUES: Final = 3


def explained(candidates: list[Candidate], evidence: LogEvidence) -> list[Candidate]:
    """The readings with what the ends of the logs add; empty if nothing shows a failure."""
    if candidates and all(one.failure_class is FailureClass.WORKER_CRASH for one in candidates):
        return candidates + _of_words_before(evidence, ranked(candidates)[0])
    return (
        candidates
        or _of_calls(evidence)
        or _of_last_words(evidence)
        or other_evidence.from_stack(evidence.stacks or _stacks_at_the_end(evidence))
    )


def _of_words_before(evidence: LogEvidence, end: Candidate) -> list[Candidate]:
    """An exception without its traceback, right before the report of an end that nothing else explains."""
    found = []
    for log in evidence.logs:
        reports = [failure.line for failure in log.launcher]
        reports += [match.line for match in log.matches if match.failure_class is FailureClass.WORKER_CRASH]
        first = log.lines - len(log.tail) + 1
        before = log.tail[: max(min(reports) - first, 0)] if reports else ()
        words = exceptions.last_exception(before, WORDS_BEFORE)
        if words is not None:
            line = Evidence(text=words.text, source=log.source, line=first + words.line, node=log.node, rank=log.rank)
            found.append(
                Candidate(
                    failure_class=words.failure_class,
                    confidence=current().confidence.exception_before_the_end,
                    why=f"before the end somebody wrote: {words.text[:180]}",
                    culprits=end.culprits,
                    evidence=(line, *end.evidence[:1]),
                )
            )
    return found


def _of_calls(evidence: LogEvidence) -> list[Candidate]:
    """Ranks that call different collectives, at the ends of logs in which nothing else shows a failure."""
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
    """Stacks at the end of logs that show no progress."""
    ends = ("\n".join(log.tail).encode() for log in evidence.logs if log.progress_line is None)
    return [stack for end in ends if stacks.is_dump(end) for stack in stacks.read_dump(end, "")]


def _of_last_words(evidence: LogEvidence) -> list[Candidate]:
    """Errors that no rule knows, at the end of logs whose work was not completed."""
    found = []
    for log in evidence.logs:
        words = None if log.finished_line is not None else _last_words(log)
        if words is None:
            continue
        number = log.lines - len(log.tail) + 1 + words.line
        if log.kind != "kernel" and shows_life(lines_after(log, number)):
            continue
        line = Evidence(text=words.text, source=log.source, line=number, node=log.node, rank=log.rank)
        how = "a task sleeps and cannot be woken" if log.kind == "kernel" else "the log ends with an error"
        found.append(
            Candidate(
                failure_class=words.failure_class,
                confidence=exceptions.LAST_WORDS_CONFIDENCE,
                why=f"{how}: {words.text[:180]}",
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


def no_failure(evidence: LogEvidence, described: Accounts) -> Verdict:
    """The verdict if nothing shows a failure."""
    weights = current()
    read = [log for log in evidence.logs if log.matches or any(map(str.strip, log.tail))]
    if not read:
        return verdict([nothing("no line of text was given")], (), ())
    lines = sum(log.lines for log in read)
    finished = any(log.finished_line is not None for log in read)
    # A log that was cut off shows no end. A log without a step may be anything.
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
    hints = {
        key: described.hints.get(key, 0.0) + clue * min(clues[key], MAX_CLUES) for key in (*described.hints, *clues)
    }
    return verdict([healthy, *described.survived], (), (finding.evidence for finding in described.shown), hints)


# ----- collectives as NCCL prints them at the level INFO -----

_CALL: Final = re.compile(
    r"(?P<process>[\w.-]{1,80}:\d{1,9}):\d{1,9} \[(?P<device>\d{1,3})\] NCCL INFO "
    r"(?P<op>[A-Z]\w{2,30}): opCount (?P<number>[0-9a-f]{1,16}) "
    r".{0,120}?\bcount (?P<count>\d{1,18}) .{0,120}?\bcomm (?P<comm>\w{1,40}) \[nranks=(?P<size>\d{1,6})\]"
)
_UNEVEN: Final = frozenset(("Send", "Recv"))
"""Calls that differ at both ends by nature."""


class Disagreement(NamedTuple):
    """The ranks of one communicator call different collectives at the same place."""

    why: str
    line: int
    """Position among the lines given."""
    text: str


def disagreement(lines: Sequence[str]) -> Disagreement | None:
    """The first call in which the ranks of a communicator differ; None if they agree, or if some are not seen.

    NCCL names a communicator by an address in each process. So ranks are certain to share one only if every process
    has one communicator of that size, and there are as many processes as ranks in it.
    """
    calls: dict[tuple[int, int], dict[str, tuple[str, int, int]]] = {}
    comms: dict[int, set[tuple[str, str]]] = {}
    for index, line in enumerate(lines):
        found = _CALL.search(line)
        if found is None or found["op"] in _UNEVEN:
            continue
        size, rank = int(found["size"]), f"{found['process']} {found['device']}"
        comms.setdefault(size, set()).add((rank, found["comm"]))
        told = calls.setdefault((size, int(found["number"], 16)), {})
        told.setdefault(rank, (found["op"], int(found["count"]), index))
    for (size, number), told in sorted(calls.items()):
        is_whole = len(comms[size]) == size == len({rank for rank, _ in comms[size]}) and len(told) == size
        if is_whole and len({(op, count) for op, count, _ in told.values()}) > 1:
            kinds = sorted({f"{op} of {count}" for op, count, _ in told.values()})
            last = max(index for _, _, index in told.values())
            why = f"the {size} ranks of a communicator call {' and '.join(kinds[:3])} as operation {number}"
            return Disagreement(why, last, lines[last])
    return None
