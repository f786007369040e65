"""What old logs tell, as accounts of ranks and as findings: the first half of a verdict without a live job.

Each rank that a log names, and each log of ranks that nobody names, speaks for itself; what launchers report of the
ends of ranks is joined to what these say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from diagnosis.kernel.causes import as_cause
from diagnosis.logs import launchers
from diagnosis.signals import Evidence, ExitRecord, Finding, Frozen
from diagnosis.story import Case, LauncherFailure, LineMatch, LoggedTraceback, LogStory
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.verdict import aftermath, clocks, log_findings, statements
from diagnosis.verdict.accounts import Account, by_itself, by_status, of_statement, order
from diagnosis.verdict.attribution import OUTRANKS
from diagnosis.verdict.candidates import Candidate
from diagnosis.verdict.log_findings import place
from diagnosis.verdict.statements import Statement

AGAIN: Final = 20
_SAID_TO_THE_END: Final = 0.75
_BESIDE: Final = 0.7
"""How much of the confidence in a statement holds that is not the most telling one of its speaker."""
MAX_OUTLIVED: Final = 5
_OUTLIVED: Final = 0.3
"""How much of the confidence in what ended nothing holds for another explanation of what did."""
_EARLIER: Final = 0.5
"""How much of a message of the kernel holds, for a later failure, after which training went on."""
_REPORTED: Final = re.compile(r"traceback\s*: Signal \d+ \(SIG\w+\) received by PID")
"""A line of torchrun's report, which is read as such."""
NEAR_THE_END: Final = 5
ABORT_LINES: Final = 2
_LAST_WORDS: Final = 0.55
_Speakers = dict[tuple[str, int | None], list[Statement]]


class Told(Frozen, frozen=True, kw_only=True):
    """What the logs of a case tell."""

    accounts: tuple[Account, ...] = ()
    others: tuple[Candidate, ...] = ()
    """Readings of what the accounts leave out."""
    findings: tuple[Finding, ...] = ()
    outlived: tuple[Candidate, ...] = ()
    """Readings of what training outlived, the surest first."""
    hints: dict[FailureClass, float] = {}
    """What else is in the logs, warnings too, and how much it weighs as another explanation."""
    failed_at: float | None = None
    """When the first rank failed of itself, in Unix seconds, where the logs tell."""


def tell(case: Case) -> Told:
    """Accounts (the first that ended first), findings, and what is left."""
    speakers: _Speakers = {}
    findings: list[Finding] = []
    earlier: list[Finding] = []
    doubtful: list[Finding] = []
    stories = list(map(log_findings.with_reported, clocks.aligned(case.stories)))
    for story in stories:
        for finding in log_findings.findings(story):
            (earlier if aftermath.outlives(story, finding) else findings).append(finding)
            if log_findings.SAID_BY in finding.fields or log_findings.has_recovered(finding, story):
                doubtful.append(finding)
        if story.kind in ("output", "mixed"):
            for statement in _statements(story):
                rank = statement.evidence.rank
                # A rank may speak in several files (its stdout and its stderr).
                speakers.setdefault(("" if rank is not None else story.source, rank), []).append(statement)
    failures = [(story.source, failure) for story in stories for failure in story.launcher if _counts(failure, story)]
    outlived = [one for said in speakers.values() for one in said if one.outlived]
    reported = [_of_launcher(story) for story in stories]
    if (
        not failures
        and not any(reported)
        and all(one.mild or one.outlived for said in speakers.values() for one in said)
    ):
        outlived = [one for said in speakers.values() for one in said]
        speakers = _last_words(stories, speakers)
    accounts: list[Account] = []
    others: list[Candidate] = []
    for said in speakers.values():
        weighed = statements.weighed(one for one in said if not one.outlived)
        if weighed:
            accounts.append(of_statement(*weighed[0], said))
            others += [_other(*one) for one in weighed[1:5]]
    accounts = [*_with_ends(accounts, failures), *_quitters(stories, accounts)]
    accounts = [_on_its_node(account, case.rank_nodes) for account in accounts or filter(None, reported)]
    if not accounts:
        # Nobody tells of a failure: what a rank prints as the kernel's word is none, nor what came back.
        passing = doubtful
        if _all_finished(stories):
            # A broken device is worth to be told of all the same; what flickers ended nothing.
            passing = [*doubtful, *(one for one in findings if one.failure_class not in OUTRANKS)]
        earlier += [one for one in findings if one in passing]
        findings = [one for one in findings if one not in passing]
    if all(finding.severity == "warning" for finding in findings) and not accounts:
        findings = [as_cause(finding) or finding for finding in findings]
    if accounts or any(finding.severity != "warning" for finding in findings):
        findings += [msgspec.structs.replace(one, confidence=one.confidence * _EARLIER) for one in earlier]
        earlier = []
    timed = [at for one in accounts for at in (one.evidence[0].at,) if at is not None and not one.is_cascade]
    return Told(
        accounts=tuple(sorted(_comparable(accounts), key=order)),
        failed_at=min(timed, default=None),
        others=tuple(others),
        findings=tuple(findings),
        hints=_hints(stories, outlived, findings),
        outlived=_surest(
            [_other(one, one.confidence * _OUTLIVED) for one in outlived]
            + [
                Candidate(
                    failure_class=one.failure_class,
                    confidence=one.confidence * _OUTLIVED,
                    why=one.evidence.text[:200],
                    evidence=(one.evidence,),
                )
                for one in earlier
            ]
        ),
    )


def _all_finished(stories: Sequence[LogStory]) -> bool:
    """The work of all ranks that wrote something is complete."""
    ranks = [story for story in stories if story.kind in ("output", "mixed")]
    return bool(ranks) and all(aftermath.is_finished(story, -1) for story in ranks)


def _hints(
    stories: Sequence[LogStory], outlived: Sequence[Statement], findings: Sequence[Finding]
) -> dict[FailureClass, float]:
    """What the logs hold besides what is read as a failure."""
    said: list[LineMatch | Statement | Finding] = [match for story in stories for match in story.matches]
    said += [*outlived, *(one for one in findings if one.severity == "warning")]
    found: dict[FailureClass, float] = {}
    for one in said:
        found[one.failure_class] = max(found.get(one.failure_class, 0.0), one.confidence * _OUTLIVED)
    return found


# ----- statements -----


def _statements(story: LogStory) -> list[Statement]:
    """What a log says of failures."""
    found = [
        statements.of_traceback(one.traceback, place(one, story))
        for one in story.tracebacks
        if not _is_of_teardown(one, story)
        and not one.traceback.is_launchers
        and not launchers.is_wrapper(one.traceback.exception, one.traceback.message)
    ]
    for match in story.matches:
        if _is_lasting(match, story):
            match = msgspec.structs.replace(match, severity="error", confidence=_SAID_TO_THE_END)
        statement = statements.of_match(match, place(match, story))
        if statement is not None and not _REPORTED.search(match.text) and not _follows_an_end(match, story):
            found.append(statement)
    crash = statements.of_crash(
        story.tail,
        Evidence(text="", source=story.source, node=story.node, rank=story.rank),
        story.lines - len(story.tail) + 1,
    )
    if crash is not None:
        found.append(crash)
    found = [
        msgspec.structs.replace(
            _of_the_end(story, one), outlived=aftermath.is_outlived(story, one), mild=aftermath.is_mild(story, one)
        )
        for one in found
    ]
    found = [one for one in found if not _is_head_of_abort(one, found)]
    if story.progress_line is None and any(not one.outlived and not one.mild for one in found):
        # Without a step nothing shows that a device that was out of order came back, and then something failed.
        found = [msgspec.structs.replace(one, outlived=False) if _is_of_device(one) else one for one in found]
    tracebacks = [one for one in found if one.is_traceback]
    return [one if one.is_traceback else _as_its_traceback(one, tracebacks) for one in found]


def _is_head_of_abort(one: Statement, said: Sequence[Statement]) -> bool:
    """C++ says that an exception ended it, and in the next lines which: these are what it died of."""
    return "terminate called" in one.evidence.text and any(
        other.rule != one.rule and 0 <= other.line - one.line <= ABORT_LINES and "what():" in other.evidence.text
        for other in said
    )


def _is_of_device(one: Statement) -> bool:
    is_sure = one.role == "cause" and one.confidence >= statements.CERTAIN and not (one.is_traceback or one.mild)
    return is_sure and TAXONOMY[one.failure_class].domain == "accelerator"


def _as_its_traceback(one: Statement, tracebacks: Sequence[Statement]) -> Statement:
    """A line of a traceback means no more than the traceback."""
    whole = next((each for each in tracebacks if each.line <= one.line and one.last_line <= each.last_line + 1), None)
    if whole is None:
        return one
    return msgspec.structs.replace(one, outlived=one.outlived or whole.outlived, mild=one.mild or whole.mild)


def _is_lasting(match: LineMatch, story: LogStory) -> bool:
    """Numbers that are skipped with a warning again and again, to the end of the log."""
    again = match.count >= AGAIN and story.lines - (match.last_line or match.line) < aftermath.LAST_LINES
    return again and match.severity == "warning" and match.failure_class is FailureClass.LOSS_SPIKE_OR_NAN


def _is_of_teardown(one: LoggedTraceback, story: LogStory) -> bool:
    """Helpers of libraries that die after the work is complete: no line of the user's code is in it."""
    is_after = story.finished_line is not None and story.finished_line < one.line
    return is_after and bool(one.traceback.frames) and one.traceback.own_frame is None


def _of_the_end(story: LogStory, one: Statement) -> Statement:
    """A time-out after the work is complete, or somebody's patience that ends, is one of the end."""
    stuck = one.failure_class is FailureClass.NCCL_TIMEOUT or (
        one.is_traceback and one.failure_class is FailureClass.PREEMPTED_OR_CANCELLED
    )
    if not stuck or story.finished_line is None or story.finished_line > one.line:
        return one
    return msgspec.structs.replace(one, failure_class=FailureClass.EXIT_HANG, role="symptom")


def _follows_an_end(match: LineMatch, story: LogStory) -> bool:
    """Slurm ends a step without a reason when one of its tasks ended badly."""
    return match.rule == "step_cancelled" and any(failure.line < match.line for failure in story.launcher)


def _last_words(stories: Sequence[LogStory], speakers: _Speakers) -> _Speakers:
    """Of what healthy logs say as well: what ends a log that shows no step and no end of the work."""
    stuck = {
        story.source: story
        for story in stories
        if story.progress_line is None and story.finished_line is None and story.lines
    }
    found: _Speakers = {}
    for speaker, said in speakers.items():
        last = [
            msgspec.structs.replace(one, confidence=min(one.confidence, _LAST_WORDS))
            for one in said
            if one.role == "cause" and _ends_with(stuck.get(one.evidence.source), one.last_line)
        ]
        if last:
            found[speaker] = last
    return found


def _ends_with(story: LogStory | None, line: int) -> bool:
    """Whether this line is among the last of a log, and nothing after it is said by a program that goes on."""
    return story is not None and story.lines - line < NEAR_THE_END and not aftermath.lives(aftermath.after(story, line))


# ----- accounts -----


def _of_launcher(story: LogStory) -> Account | None:
    """A launcher's own traceback, of whose report nothing is left, tells that some worker failed."""
    for one in story.tracebacks:
        raised = one.traceback.name
        if (
            one.traceback.is_launchers
            and raised != "SignalException"
            and not aftermath.goes_on(story, one.line, aftermath.OUTLIVED_LINES)
        ):
            return Account(
                rank=None,
                node=story.node,
                speaker="the launcher",
                failure_class=FailureClass.WORKER_CRASH,
                confidence=0.5,
                summary="says that a worker failed, and nothing tells how",
                evidence=(msgspec.structs.replace(place(one, story), text=one.traceback.line[:200]),),
            )
    return None


def _counts(failure: LauncherFailure, story: LogStory) -> bool:
    return not aftermath.goes_on(story, failure.line, aftermath.OUTLIVED_BY_OTHERS_LINES)


def _on_its_node(account: Account, nodes: dict[int, str]) -> Account:
    if account.node or account.rank is None or account.rank not in nodes:
        return account
    return msgspec.structs.replace(account, node=nodes[account.rank])


def _comparable(accounts: list[Account]) -> list[Account]:
    """The accounts in one order: by time if all have one, by line if all stand in one file; else all at once."""
    if all(one.evidence[0].at is not None for one in accounts):
        return [msgspec.structs.replace(one, when=one.evidence[0].at) for one in accounts]
    if len({one.evidence[0].source for one in accounts}) == 1:
        return [msgspec.structs.replace(one, when=float(one.evidence[0].line or 0)) for one in accounts]
    return [msgspec.structs.replace(one, when=0.0) for one in accounts]


def _surest(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda one: -one.confidence)[:MAX_OUTLIVED])


def _other(statement: Statement, confidence: float) -> Candidate:
    return Candidate(
        failure_class=statement.failure_class,
        confidence=_BESIDE * statements.weight(statement, confidence),
        why=f"{'a rank' if statement.of_rank else 'the log'} {statement.summary}",
        evidence=(statement.evidence,),
        fingerprint=statement.fingerprint,
    )


def _with_ends(accounts: list[Account], failures: Sequence[tuple[str, LauncherFailure]]) -> list[Account]:
    """The accounts with what launchers told of their ranks' ends, and those of ranks that said nothing."""
    known = {account.rank: index for index, account in enumerate(accounts) if account.rank is not None}
    nameless = [index for index, account in enumerate(accounts) if account.rank is None and not account.speaker]
    found = list(accounts)
    # An abort is most often what a peer's end leads to, as is an exit code without a word.
    explained = bool(accounts) or any(not by_itself(_record(failure, 0)) for _, failure in failures)
    failures = sorted(failures, key=lambda one: (not one[1].is_root, one[1].line))
    for number, (source, failure) in enumerate(failures):
        record = _record(failure, number)
        index = known.get(failure.rank) if failure.rank is not None else None
        if index is None and nameless and by_itself(record) and (failure.is_root or len(failures) == 1):
            index = nameless.pop(0)  # the only words there are, and the only end
        if index is not None:
            found[index] = _with_end(found[index], failure, record)
        else:
            found.append(_by_end(failure, source, record, explained and not failure.is_root))
    return found


def _quitters(stories: Sequence[LogStory], accounts: Sequence[Account]) -> list[Account]:
    """Ranks whose logs come to a good end while others fail."""
    spoke = {account.rank for account in accounts}
    found: list[Account] = []
    for story in stories:
        if story.rank is None or story.rank in spoke or story.finished_line is None or not accounts:
            continue
        record = ExitRecord(rank=story.rank, local_rank=-1, pid=0, code=0, signal=None, ended_at=0.0)
        said = Evidence(
            text=next((line for line in reversed(story.tail) if line.strip()), ""),
            source=story.source,
            line=story.finished_line,
            node=story.node,
            rank=story.rank,
            at=story.last_at,
        )
        found.append(msgspec.structs.replace(by_status(story.node, record), evidence=(said,)))
    return found


def _record(failure: LauncherFailure, number: int) -> ExitRecord:
    return ExitRecord(
        rank=failure.rank if failure.rank is not None else -1,
        local_rank=failure.local_rank if failure.local_rank is not None else -1,
        pid=failure.pid or 0,
        code=failure.code if failure.signal is None else None,
        signal=failure.signal,
        ended_at=failure.at or float(failure.line),
        order=number,
    )


def _with_end(account: Account, failure: LauncherFailure, record: ExitRecord) -> Account:
    rank = account.rank if account.rank is not None else failure.rank
    return msgspec.structs.replace(account, rank=rank, node=account.node or failure.host, exit=record)


def _by_end(failure: LauncherFailure, source: str, record: ExitRecord, explained: bool) -> Account:
    """All that is known of this rank is how it ended."""
    account = by_status(failure.host, record)
    if failure.message == launchers.OUT_OF_MEMORY:
        account = msgspec.structs.replace(
            account, failure_class=FailureClass.HOST_OOM, confidence=0.9, summary="was killed for its memory"
        )
    mild = by_itself(record) and explained
    return msgspec.structs.replace(
        account,
        rank=failure.rank,
        is_cascade=account.is_cascade or account.ended_by("SIGTERM") or mild,
        evidence=(
            Evidence(
                text=failure.text, source=source, line=failure.line, rank=failure.rank, node=failure.host, at=failure.at
            ),
        ),
    )
