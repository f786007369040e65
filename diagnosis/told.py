"""What old logs tell, as accounts of ranks and as findings: the first half of a verdict without a live job.

A log says many things of a failure, most of them consequences. What training outlived is no cause; of what is left
the first cause counts most, and a cancellation makes little of the errors that it leads to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from diagnosis import clocks, exceptions, launchers, tracebacks
from diagnosis.accounts import Account, by_itself, by_status, order, raised
from diagnosis.candidates import Candidate
from diagnosis.kernel_causes import Causes, as_cause, is_elsewhere
from diagnosis.signals import Evidence, ExitRecord, Finding, Word, clean_text
from diagnosis.story import Case, LauncherFailure, LineMatch, LoggedTraceback, LogStory, Role
from diagnosis.taxonomy import TAXONOMY, FailureClass

OUTLIVED_LINES: Final = 3
"""Progress this many lines after an error: the rank that prints it was not ended by it."""
OUTLIVED_TRACEBACK_LINES: Final = 20
"""The same for a traceback: the lines of other ranks may still come."""
_WEIGHT: Final[dict[Role, float]] = {"cause": 1.0, "outcome": 0.95, "symptom": 0.6, "cascade": 0.55}
_LATER: Final = 0.85
"""An error after an earlier one of the same log is often its consequence."""
_AFTER_THE_END: Final = 0.5
"""One after a cancellation nearly always is."""
_OUTLIVED: Final = 0.3
_MIN_CONFIDENCE: Final = 0.5
_CERTAIN: Final = 0.75


_REPORTED: Final = re.compile(r"traceback\s*: Signal \d+ \(SIG\w+\) received by PID")
"""A line of torchrun's report, which is read as such."""


class Statement(Word, frozen=True, kw_only=True):
    """One thing that a log says of a failure."""

    role: Role
    failure_class: FailureClass
    confidence: float
    summary: str
    evidence: Evidence
    last_line: int
    is_traceback: bool = False
    fingerprint: str = ""
    outlived: bool = False
    """Training went on after it."""
    of_rank: bool = True
    """Said by a rank of itself, not of the node or the job."""
    mild: bool = False
    """Said in healthy logs as well: it explains a failure, but tells of none."""

    @property
    def line(self) -> int:
        return self.evidence.line or 0


class Told(Word, frozen=True, kw_only=True):
    """What the logs of a case tell."""

    accounts: tuple[Account, ...] = ()
    others: tuple[Candidate, ...] = ()
    """Readings of what the accounts leave out."""
    findings: tuple[Finding, ...] = ()
    outlived: tuple[Statement, ...] = ()
    failed_at: float | None = None
    """When the first rank failed of itself, in Unix seconds, where the logs tell."""


def tell(case: Case) -> Told:
    """Accounts (the first that ended first), findings, and what is left."""
    speakers: dict[tuple[str, int | None], list[Statement]] = {}
    findings: list[Finding] = []
    stories = clocks.aligned(case.stories)
    for story in stories:
        findings += _findings(story)
        if story.kind in ("output", "mixed"):
            for statement in statements(story):
                rank = statement.evidence.rank
                place = statement.evidence.node if rank is not None else story.source
                speakers.setdefault((place, rank), []).append(statement)
    failures = [(story.source, failure) for story in stories for failure in story.launcher if _counts(failure, story)]
    if not failures and all(one.mild or one.outlived for said in speakers.values() for one in said):
        speakers.clear()
    accounts: list[Account] = []
    others: list[Candidate] = []
    outlived: list[Statement] = []
    for said in speakers.values():
        outlived += [one for one in said if one.outlived]
        weighed = _weighed([one for one in said if not one.outlived])
        if weighed:
            accounts.append(_account(*weighed[0], said))
            others += [_other(*one) for one in weighed[1:5]]
    accounts = [*_with_ends(accounts, failures), *_quitters(stories, accounts)]
    if all(finding.severity == "warning" for finding in findings) and not accounts:
        findings = [as_cause(finding) or finding for finding in findings]
    timed = [at for one in accounts for at in (one.evidence[0].at,) if at is not None and not one.is_cascade]
    return Told(
        accounts=tuple(sorted(_comparable(accounts), key=order)),
        failed_at=min(timed, default=None),
        others=tuple(others),
        findings=tuple(findings),
        outlived=tuple(outlived),
    )


# ----- statements -----


def statements(story: LogStory) -> list[Statement]:
    """What a log says of failures, in the order of its lines."""
    found = [_of_traceback(one, story) for one in story.tracebacks if not _is_wrapper(one)]
    found += [_of_match(one, story) for one in story.matches if _is_serious(one) and not _REPORTED.search(one.text)]
    return sorted(found, key=lambda one: (one.line, not one.is_traceback))


def _is_wrapper(one: LoggedTraceback) -> bool:
    return one.traceback.is_launchers or launchers.is_wrapper(one.traceback.exception, one.traceback.message)


def _is_serious(match: LineMatch) -> bool:
    return match.severity == "fatal" or (match.severity == "error" and match.confidence >= _MIN_CONFIDENCE)


def _of_traceback(one: LoggedTraceback, story: LogStory) -> Statement:
    reading = exceptions.read(one.traceback, [])
    return Statement(
        role="cascade" if reading.is_cascade else _role(reading.failure_class),
        failure_class=reading.failure_class,
        confidence=reading.confidence,
        summary=raised(one.traceback),
        evidence=Evidence(
            text=clean_text(one.traceback.line),
            source=story.source,
            line=one.line,
            node=one.node or story.node,
            rank=one.rank if one.rank is not None else story.rank,
            at=one.at,
        ),
        last_line=one.line,
        is_traceback=True,
        fingerprint=tracebacks.fingerprint(one.traceback),
        outlived=_is_outlived(story, one.line, OUTLIVED_TRACEBACK_LINES),
    )


def _of_match(match: LineMatch, story: LogStory) -> Statement:
    last_line = match.last_line or match.line
    return Statement(
        role=match.role,
        failure_class=match.failure_class,
        confidence=match.confidence,
        summary=f"says: {match.text[:200]}",
        evidence=Evidence(
            text=match.text,
            source=story.source,
            line=match.line,
            node=_node(match, story),
            rank=match.rank if match.rank is not None else story.rank,
            at=match.at,
        ),
        last_line=last_line,
        outlived=_is_outlived(story, last_line, OUTLIVED_LINES),
        of_rank=match.scope == "rank",
        mild=match.severity != "fatal" and match.confidence < _CERTAIN,
    )


def _node(match: LineMatch, story: LogStory) -> str:
    """Where it happened: what the line says itself counts most."""
    named = match.fields.get("node") or (match.fields.get("host") if match.scope == "node" else "")
    return named or match.node or story.node


def _role(failure_class: FailureClass) -> Role:
    kind = TAXONOMY[failure_class].kind
    return kind if kind in ("symptom", "outcome") else "cause"


def _is_outlived(story: LogStory, line: int, lines: int) -> bool:
    if story.finished_line is not None and story.finished_line > line:
        return True
    return story.progress_line is not None and story.progress_line - line > lines


def _counts(failure: LauncherFailure, story: LogStory) -> bool:
    return not _is_outlived(story, failure.line, OUTLIVED_TRACEBACK_LINES)


def _weighed(said: Sequence[Statement]) -> list[tuple[Statement, float]]:
    """The statements of one speaker with their confidence, the most telling first."""
    weighed: list[tuple[Statement, float]] = []
    cancelled = caused = False
    for one in said:
        factor = _AFTER_THE_END if cancelled and one.of_rank else _LATER if caused else 1.0
        weighed.append((one, one.confidence * factor))
        cancelled = cancelled or one.role == "outcome"
        caused = caused or one.role == "cause"
    return sorted(weighed, key=lambda pair: -pair[1] * _WEIGHT[pair[0].role])


# ----- accounts -----


def _account(statement: Statement, confidence: float, said: Sequence[Statement]) -> Account:
    evidence = statement.evidence
    return Account(
        rank=evidence.rank,
        node=evidence.node,
        speaker="" if statement.is_traceback or evidence.rank is not None else "the log",
        failure_class=statement.failure_class,
        confidence=confidence,
        summary=statement.summary,
        is_cascade=statement.role == "cascade",
        evidence=(evidence,),
        symptoms=tuple(dict.fromkeys(one.failure_class for one in said if one.role in ("symptom", "cascade"))),
        fingerprint=statement.fingerprint,
    )


def _comparable(accounts: list[Account]) -> list[Account]:
    """The accounts in one order: by time if all have one, by line if all stand in one file; else all at once."""
    if all(one.evidence[0].at is not None for one in accounts):
        return [msgspec.structs.replace(one, when=one.evidence[0].at) for one in accounts]
    if len({one.evidence[0].source for one in accounts}) == 1:
        return [msgspec.structs.replace(one, when=float(one.evidence[0].line or 0)) for one in accounts]
    return [msgspec.structs.replace(one, when=0.0) for one in accounts]


def _other(statement: Statement, confidence: float) -> Candidate:
    return Candidate(
        failure_class=statement.failure_class,
        confidence=confidence * 0.7 * _WEIGHT[statement.role],
        why=f"{'a rank' if statement.is_traceback else 'the log'} {statement.summary}",
        evidence=(statement.evidence,),
        fingerprint=statement.fingerprint,
    )


def _with_ends(accounts: list[Account], failures: Sequence[tuple[str, LauncherFailure]]) -> list[Account]:
    """The accounts with what launchers told of their ranks' ends, and those of ranks that said nothing."""
    known = {account.rank: index for index, account in enumerate(accounts) if account.rank is not None}
    nameless = [index for index, account in enumerate(accounts) if account.rank is None]
    found = list(accounts)
    failures = sorted(failures, key=lambda one: (not one[1].is_root, one[1].line))
    for place, (source, failure) in enumerate(failures):
        record = _record(failure, place)
        index = known.get(failure.rank) if failure.rank is not None else None
        if index is None and nameless and by_itself(record) and (failure.is_root or len(failures) == 1):
            index = nameless.pop(0)  # the only words there are, and the only end
        if index is not None:
            found[index] = _with_end(found[index], failure, record)
        else:
            found.append(_by_end(failure, source, record, bool(accounts)))
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


def _record(failure: LauncherFailure, place: int) -> ExitRecord:
    return ExitRecord(
        rank=failure.rank if failure.rank is not None else -1,
        local_rank=failure.local_rank if failure.local_rank is not None else -1,
        pid=failure.pid or 0,
        code=failure.code if failure.signal is None else None,
        signal=failure.signal,
        ended_at=failure.at or float(failure.line),
        order=place,
    )


def _with_end(account: Account, failure: LauncherFailure, record: ExitRecord) -> Account:
    rank = account.rank if account.rank is not None else failure.rank
    return msgspec.structs.replace(account, rank=rank, node=account.node or failure.host, exit=record)


def _by_end(failure: LauncherFailure, source: str, record: ExitRecord, others_spoke: bool) -> Account:
    """All that is known of this rank is how it ended."""
    account = by_status(failure.host, record)
    mild = by_itself(record) and others_spoke
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


# ----- findings -----


def _findings(story: LogStory) -> list[Finding]:
    """What the kernel and the scheduler told."""
    causes, found = Causes(), []
    lines: dict[str, int] = {}
    for event in story.events:
        at = next((one for one in (event.at, event.uptime) if one is not None), 0.0)
        finding = None if is_elsewhere(event) else causes.note(event, at)
        if finding is not None:
            line = lines.setdefault(finding.evidence.text, event.line)
            found.append(_placed(finding, story, line, event.at))
    if story.kind in ("kernel", "scheduler"):
        found += [_of_log(match, story) for match in story.matches]
    return found


def _placed(finding: Finding, story: LogStory, line: int, at: float | None) -> Finding:
    evidence = msgspec.structs.replace(finding.evidence, source=story.source, line=line, node=story.node, at=at)
    return msgspec.structs.replace(finding, evidence=evidence, node=story.node, at=at or 0.0)


def _of_log(match: LineMatch, story: LogStory) -> Finding:
    return Finding(
        rule=match.rule,
        failure_class=match.failure_class,
        confidence=match.confidence,
        scope=match.scope,
        severity="error" if _is_serious(match) else "warning",
        evidence=Evidence(text=match.text, source=story.source, line=match.line, node=_node(match, story), at=match.at),
        node=_node(match, story),
        rank=match.rank,
        fields=match.fields,
        at=match.at or 0.0,
    )
