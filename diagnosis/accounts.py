"""What each ended rank says of its own end: wait status, traceback, and what rules read in its output."""

from __future__ import annotations

from typing import Final

from diagnosis import exceptions, exits, rules, tracebacks
from diagnosis.incident import Culprit, Incident
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, ExitRecord, RankOutput, Word
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import Traceback

_SIGNAL_RULES: Final = frozenset({"segfault", "loader_bus"})


class Account(Word, frozen=True, kw_only=True):
    """One ended rank."""

    rank: int
    node: str
    exit: ExitRecord
    failure_class: FailureClass
    confidence: float
    summary: str
    """`raised ValueError: ... in step (train.py:7)`, `was killed by SIGKILL`."""
    is_cascade: bool = False
    """It failed because another rank had."""
    evidence: tuple[Evidence, ...] = ()
    symptoms: tuple[FailureClass, ...] = ()
    fingerprint: str = ""

    @property
    def failed(self) -> bool:
        return exits.is_failure(self.exit)

    @property
    def culprit(self) -> Culprit:
        return Culprit(node=self.node, rank=self.rank)

    @property
    def exit_evidence(self) -> Evidence:
        return exit_evidence(self.exit, self.node)


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
    return sorted(accounts, key=_order)


def _order(account: Account) -> tuple[float, int, int]:
    return account.exit.ended_at, account.exit.order, account.rank


def _account(node: str, record: ExitRecord, output: RankOutput | None) -> Account:
    status = exit_evidence(record, node)
    failure_class, confidence, why = exits.hint(record)
    if output is None or not exits.is_failure(record):
        cascade = exits.ending_signal(record) == 15 and record.order > 0
        return Account(
            rank=record.rank,
            node=node,
            exit=record,
            failure_class=failure_class,
            confidence=confidence,
            summary=why,
            is_cascade=cascade,
            evidence=(status,),
        )
    traceback = _traceback(output)
    lines = [line for line in (*output.traceback, *output.tail, *output.error_file.splitlines()) if line]
    matches = rules.default().scan_text(dict.fromkeys(lines))
    reading = exceptions.read(traceback, matches) if traceback is not None else None
    by_signal = exits.ending_signal(record) is not None
    if reading is not None and not (by_signal and exits.ending_signal(record) not in (6,)):
        assert traceback is not None
        frame = traceback.own_frame
        place = f" in {frame.function} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})" if frame else ""
        return Account(
            rank=record.rank,
            node=node,
            exit=record,
            failure_class=reading.failure_class,
            confidence=reading.confidence,
            summary=f"raised {traceback.line[:200]}{place}",
            is_cascade=reading.is_cascade,
            evidence=(_line(traceback.line, node, record.rank), status),
            symptoms=reading.symptoms,
            fingerprint=tracebacks.fingerprint(traceback),
        )
    return _by_rules(node, record, matches, (failure_class, confidence, why))


def _by_rules(
    node: str, record: ExitRecord, matches: list[RuleMatch], hint: tuple[FailureClass, float, str]
) -> Account:
    """No traceback counts: what rules read, unless the wait status says more."""
    failure_class, confidence, why = hint
    best = _best(matches)
    status = exit_evidence(record, node)
    cascade = exits.ending_signal(record) == 15 and record.order > 0
    if best is None or (record.signal == 9 and best.rule.role == "cascade"):
        return Account(
            rank=record.rank,
            node=node,
            exit=record,
            failure_class=failure_class,
            confidence=confidence,
            summary=why,
            is_cascade=cascade,
            evidence=(status,),
        )
    # A signal from outside leaves whatever was printed before it: only lines about such an end explain it.
    weight = 0.85 if record.signal in (None, 6) or best.rule.id in _SIGNAL_RULES else 0.5
    if best.confidence * weight < confidence and record.signal not in (None, 6):
        return Account(
            rank=record.rank,
            node=node,
            exit=record,
            failure_class=failure_class,
            confidence=confidence,
            summary=why,
            is_cascade=cascade,
            evidence=(status,),
        )
    return Account(
        rank=record.rank,
        node=node,
        exit=record,
        failure_class=best.failure_class,
        confidence=best.confidence * weight,
        summary=f"{exits.describe(record)} after it wrote: {best.text[:200]}",
        is_cascade=best.rule.role == "cascade",
        evidence=(_line(best.text, node, record.rank), status),
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


def _line(text: str, node: str, rank: int) -> Evidence:
    return Evidence(text=text[:500], source="output", node=node, rank=rank)
