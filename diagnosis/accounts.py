"""What each ended rank says of its own end: wait status, traceback, and what rules read in its output."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis import exceptions, exits, rules, tracebacks
from diagnosis.incident import Culprit, Incident
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, ExitRecord, RankOutput, Word
from diagnosis.stacks import is_library
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import Traceback

_SIGNAL_RULES: Final = frozenset({"loader_bus"})
_CRASH_FRAME: Final = re.compile(r'File "([^"]{1,400})", line (\d{1,7}) in (\S{1,200})')
"""A frame as faulthandler writes it."""


class Account(Word, frozen=True, kw_only=True):
    """One rank that ended, or one log of a rank that nobody names."""

    rank: int | None
    node: str
    failure_class: FailureClass
    confidence: float
    summary: str
    """`raised ValueError: ... in step (train.py:7)`, `was killed by SIGKILL`."""
    is_cascade: bool = False
    """It failed because another rank had."""
    evidence: tuple[Evidence, ...] = ()
    symptoms: tuple[FailureClass, ...] = ()
    fingerprint: str = ""
    exit: ExitRecord | None = None
    """None: nobody told how it ended, but it says that it failed."""
    when: float = 0.0
    """Its place in the order of all accounts: Unix seconds, or a line where there is no time."""
    speaker: str = ""
    """Who says it, where that is no rank."""

    @property
    def failed(self) -> bool:
        return self.exit is None or exits.is_failure(self.exit)

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else self.speaker or "a rank"

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        return (Culprit(node=self.node, rank=self.rank),) if self.node or self.rank is not None else ()

    @property
    def exit_evidence(self) -> tuple[Evidence, ...]:
        return (exit_evidence(self.exit, self.node),) if self.exit is not None else ()

    def ended_by(self, *names: str) -> bool:
        """Whether one of these signals (`"SIGTERM"`) ended it."""
        return self.exit is not None and exits.ended_by(self.exit, *names)


def exit_evidence(record: ExitRecord, node: str) -> Evidence:
    """The wait status as a line of evidence."""
    return Evidence(
        text=f"rank {record.rank} (pid {record.pid}) {exits.describe(record)}",
        source="exit record",
        node=node,
        rank=record.rank,
        at=record.ended_at,
    )


def gather(incident: Incident) -> list[Account]:
    """One account for each ended rank, the first that ended first."""
    ended: dict[int, tuple[str, ExitRecord]] = {}
    outputs: dict[int, RankOutput] = {}
    for part in incident.evidence:
        for record in (*part.exits, *(sample.exit for sample in part.samples if sample.exit is not None)):
            ended.setdefault(record.rank, (part.node, record))
        for output in part.outputs:
            # A suspicion earlier in the attempt collected output too: what a rank said when it ended counts more.
            if part.request == 0 or output.rank not in outputs:
                outputs[output.rank] = output
    accounts = [_account(node, record, outputs.get(rank)) for rank, (node, record) in ended.items()]
    return sorted(accounts, key=order)


def order(account: Account) -> tuple[float, int, int]:
    """Sorts the first that ended first."""
    return account.when, account.exit.order if account.exit is not None else 0, account.rank or 0


def by_status(node: str, record: ExitRecord) -> Account:
    """What the wait status alone tells."""
    failure_class, confidence, why = exits.hint(record)
    return Account(
        rank=record.rank,
        node=node,
        exit=record,
        when=record.ended_at,
        failure_class=failure_class,
        confidence=confidence,
        summary=why,
        is_cascade=exits.ended_by(record, "SIGTERM") and record.order > 0,
        evidence=(exit_evidence(record, node),),
    )


def _account(node: str, record: ExitRecord, output: RankOutput | None) -> Account:
    account = by_status(node, record)
    if output is None or not exits.is_failure(record):
        return account
    lines = [line for line in (*output.traceback, *output.tail, *output.error_file.splitlines()) if line]
    matches = rules.default().scan_text(dict.fromkeys(lines))
    traceback = _traceback(output)
    if traceback is not None and by_itself(record):
        return _by_traceback(account, traceback, matches)
    return _by_rules(_by_crash(account, record, lines), record, matches)


def by_itself(record: ExitRecord) -> bool:
    """It ended by its own doing (an abort is one), not by a signal from outside or a fault."""
    return exits.ending_signal(record) is None or exits.ended_by(record, "SIGABRT")


def _by_traceback(account: Account, traceback: Traceback, matches: list[RuleMatch]) -> Account:
    reading = exceptions.read(traceback, matches)
    return msgspec.structs.replace(
        account,
        failure_class=reading.failure_class,
        confidence=reading.confidence,
        summary=raised(traceback),
        is_cascade=reading.is_cascade,
        evidence=(_line(traceback.line, account), *account.evidence),
        symptoms=reading.symptoms,
        fingerprint=tracebacks.fingerprint(traceback),
    )


def raised(traceback: Traceback) -> str:
    """`raised ValueError: too many in step (train.py:7)`."""
    frame = traceback.own_frame
    place = f" in {frame.function} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})" if frame else ""
    return f"raised {traceback.line[:200]}{place}"


def _by_crash(account: Account, record: ExitRecord, lines: list[str]) -> Account:
    """What faulthandler wrote before the process died: a crash inside a library is the library's."""
    start = next((index for index, line in enumerate(lines) if "Fatal Python error: Segmentation fault" in line), None)
    if start is None or not exits.ended_by(record, "SIGSEGV"):
        return account
    place = next((match for line in lines[start:] if (match := _CRASH_FRAME.search(line))), None)
    if place is None:
        return account
    found = msgspec.structs.replace(
        account,
        summary=f"{account.summary} in {place[3]} ({place[1].rsplit('/', 1)[-1]}:{place[2]})",
        evidence=(_line(place[0].strip(), account), *account.evidence),
        fingerprint=f"SIGSEGV in {place[3]} ({place[1]}:{place[2]})",
    )
    if is_library(place[1]) and "ctypes" not in place[1]:
        found = msgspec.structs.replace(found, failure_class=FailureClass.FRAMEWORK_BUG, confidence=0.7)
    return found


def _by_rules(account: Account, record: ExitRecord, matches: list[RuleMatch]) -> Account:
    """No traceback counts: what rules read, unless the wait status says more."""
    best = _best(matches)
    if best is None and record.code and not account.fingerprint:
        # All that is known: twice the same code at the same step is no accident.
        return msgspec.structs.replace(account, fingerprint=f"exit code {record.code} without a word")
    if best is None or (exits.ended_by(record, "SIGKILL") and best.rule.role == "cascade"):
        return account
    own_end = by_itself(record)
    # A signal from outside leaves whatever was printed before it: only lines about such an end explain it.
    confidence = best.confidence * (0.85 if own_end or best.rule.id in _SIGNAL_RULES else 0.5)
    if confidence < account.confidence and not own_end:
        return account
    return msgspec.structs.replace(
        account,
        failure_class=best.failure_class,
        confidence=confidence,
        summary=f"{exits.describe(record)} after it wrote: {best.text[:200]}",
        is_cascade=best.rule.role == "cascade",
        evidence=(_line(best.text, account), *account.evidence),
        symptoms=tuple(dict.fromkeys(one.failure_class for one in matches if one.rule.role == "symptom")),
    )


def _best(matches: list[RuleMatch]) -> RuleMatch | None:
    serious = [one for one in matches if one.rule.severity != "warning" and one.confidence >= 0.5]
    return max(
        serious, key=lambda one: (one.rule.role != "cascade", one.rule.role == "cause", one.confidence), default=None
    )


def _traceback(output: RankOutput) -> Traceback | None:
    return (
        tracebacks.last(output.traceback)
        or (tracebacks.from_error_file(output.error_file) if output.error_file else None)
        or tracebacks.last(output.tail)
    )


def _line(text: str, account: Account) -> Evidence:
    return Evidence(text=text[:500], source="output", node=account.node, rank=account.rank)
