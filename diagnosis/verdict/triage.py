"""From an incident, or from a case of old logs, to a verdict: who failed first, and of what.

Every rank that ended badly gives an account of itself: its wait status, its traceback, what rules read in its output.
Most accounts are consequences (a peer's connection closed, the launcher's SIGTERM); the first that is not, is the
fault. Findings of the kernel, the GPU or the host in the same window outrank what the ranks say. Text is only matched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from diagnosis.errors import last_words
from diagnosis.incident import Incident, Verdict
from diagnosis.signals import Evidence, Finding, RankStack
from diagnosis.stacks import dumps
from diagnosis.story import Case, LogStory, Oddity, Slowness
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


def conclude_case(case: Case) -> Verdict:
    """The verdict on old logs, dumps and stacks: `none` where nothing tells of a failure, `unknown` without words."""
    heard = log_accounts.tell(case)
    accounts, findings = list(heard.accounts), attribution.distinct(heard.findings)
    places = {one.node for one in accounts if not one.is_cascade} - {""}
    candidates = [
        *attribution.from_findings(findings, accounts, places, heard.failed_at, _spoke(case) - places),
        *other_evidence.from_flight(case.flight, case.stacks, case.rank_nodes, accounts),
        *other_evidence.from_curves(case.slow, case.oddities, accounts),
        *origin.from_accounts(accounts, case.world_size, lost_elsewhere=case.flight is not None),
        *heard.others,
    ]
    if candidates and all(one.failure_class is FailureClass.WORKER_CRASH for one in candidates):
        candidates += _of_words_before(case, ranked(candidates)[0])
    candidates = candidates or _of_calls(case) or _of_last_words(case)
    candidates = candidates or other_evidence.from_stack(case.stacks or _stacks_at_the_end(case))
    if not candidates:
        return _no_failure(case, heard, findings)
    made_steps = any(story.progress_line is not None for story in case.stories)
    candidates = [_once_and_again(one) if one.is_of_all or not made_steps else one for one in candidates]
    return _weighed(candidates, findings, accounts, heard.hints)


def _once_and_again(one: Candidate) -> Candidate:
    """A bug that all ranks have, or that lets no step be made, is there in the next attempt as well."""
    return msgspec.structs.replace(one, action="stop") if one.failure_class is FailureClass.SCRIPT_ERROR else one


def _of_words_before(case: Case, end: Candidate) -> list[Candidate]:
    """Of an end that nobody explains: the exception without its traceback that stands before the report of it."""
    found = []
    for story in case.stories:
        reports = [failure.line for failure in story.launcher]
        reports += [match.line for match in story.matches if match.failure_class is FailureClass.WORKER_CRASH]
        first = story.lines - len(story.tail) + 1
        before = story.tail[: max(min(reports) - first, 0)] if reports else ()
        said = last_words.read_exception(before, WORDS_BEFORE)
        if said is not None:
            evidence = Evidence(
                text=said.text, source=story.source, line=first + said.line, node=story.node, rank=story.rank
            )
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


def _of_calls(case: Case) -> list[Candidate]:
    """Collectives in which ranks differ, at the ends of logs of which nothing else tells of a failure."""
    told = [(story, index, line) for story in case.stories for index, line in enumerate(story.tail)]
    found = log_accounts.disagreement([line for _, _, line in told])
    if found is None or any(story.finished_line is not None for story in case.stories):
        return []
    story, index, _ = told[found.line]
    number = story.lines - len(story.tail) + 1 + index
    evidence = Evidence(text=found.text[:300], source=story.source, line=number, node=story.node, rank=story.rank)
    return [
        Candidate(
            failure_class=FailureClass.COLLECTIVE_MISMATCH, confidence=_DIFFER, why=found.why, evidence=(evidence,)
        )
    ]


def _stacks_at_the_end(case: Case) -> list[RankStack]:
    """Of logs that show no progress, and no more than stacks at their end."""
    ends = ("\n".join(story.tail).encode() for story in case.stories if story.progress_line is None)
    return [stack for end in ends if dumps.is_dump(end) for stack in dumps.read_dump(end, "")]


def _of_last_words(case: Case) -> list[Candidate]:
    """Errors that no rule knows, at the end of logs that do not show an end of the work."""
    found = []
    for story in case.stories:
        said = None if story.finished_line is not None else _last_words(story)
        if said is None:
            continue
        line = story.lines - len(story.tail) + 1 + said.line
        if story.kind != "kernel" and log_accounts.lives(log_accounts.after(story, line)):
            continue
        evidence = Evidence(text=said.text, source=story.source, line=line, node=story.node, rank=story.rank)
        how = "a task sleeps and cannot be woken" if story.kind == "kernel" else "the log ends with an error"
        found.append(
            Candidate(
                failure_class=said.failure_class,
                confidence=last_words.CONFIDENCE,
                why=f"{how}: {said.text[:180]}",
                evidence=(evidence,),
            )
        )
    return found


def _last_words(story: LogStory) -> last_words.LastWords | None:
    if story.kind == "kernel":
        return last_words.read_kernel(story.tail)
    return last_words.read_exception(story.tail) or (
        last_words.read(story.tail) if story.progress_line is None else None
    )


def _spoke(case: Case) -> set[str]:
    """The nodes whose ranks wrote something."""
    return {story.node for story in case.stories if story.kind in ("output", "mixed")} - {""}


def _no_failure(case: Case, heard: log_accounts.Told, findings: list[Finding]) -> Verdict:
    read = [story for story in case.stories if story.matches or any(map(str.strip, story.tail))]
    if not read:
        return verdict([_nothing("no line of text was given")], (), ())
    lines = sum(story.lines for story in read)
    finished = any(story.finished_line is not None for story in read)
    # A log of which only the middle is left shows no end; one that shows no step may be anything.
    goes_on = any(story.progress_line is not None for story in read)
    lives = any(log_accounts.lives(story.tail) for story in read)
    steps = {story.step for story in read if story.rank is not None and story.step is not None}
    if not finished and steps and max(steps) - min(steps) > MAX_APART:
        goes_on, lives, how = False, False, f", but some ranks are at step {min(steps)} and others at {max(steps)}"
    else:
        signs = ((finished, ": the work was completed"), (goes_on, ", and training goes on"), (lives, ""))
        how = next((words for shown, words in signs if shown), ", and nothing of a step or of an end of the work")
    instead = {} if finished else dict(verdict_candidates.GOES_ON if goes_on else verdict_candidates.STOPPED)
    shown: list[Slowness | Oddity] = [*case.slow, *case.oddities]
    for one in shown:
        failure_class = other_evidence.class_of(one)
        instead[failure_class] = instead.get(failure_class, 0.0) + one.confidence
    healthy = Candidate(
        failure_class=FailureClass.NONE,
        confidence=_FINISHED if finished else _GOES_ON if goes_on else _LIVES if lives else _NO_SIGN,
        why=f"nothing in {lines} line{'s' * (lines > 1)} tells of a failure{how}",
        instead=instead,
    )
    clues = last_words.clues([line for story in read for line in story.tail])
    hints = {key: heard.hints.get(key, 0.0) + _CLUE * min(clues[key], 3) for key in (*heard.hints, *clues)}
    return verdict([healthy, *heard.outlived], (), (finding.evidence for finding in findings), hints)


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
