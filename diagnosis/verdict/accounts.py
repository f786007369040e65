"""How each rank ended: its wait status, and the statement of its output that says most.

The rules scan the end of a rank's output here, from the evidence that its agent collected after the end. The agent
scans the output while the rank runs, too. Those findings are not in its evidence: they serve the timeline, the metrics
and NaN. No account is made of them, because an agent that was started again has not seen all output, and the end of
the output is always there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from diagnosis import exits, rules, tracebacks
from diagnosis.incident import Culprit, Incident
from diagnosis.signals import Evidence, ExitRecord, Finding, Frozen, NodeEvidence, RankOutput
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import statements
from diagnosis.verdict.candidates import Candidate
from diagnosis.verdict.statements import Statement
from diagnosis.verdict.weights import current

EXIT_RECORD: Final = "exit record"
_SIGNAL_RULES: Final = frozenset({"loader_bus"})
"""Rules for lines that explain an end by a signal from outside."""


class Account(Frozen, frozen=True, kw_only=True):
    """One rank that ended, or one log whose rank is not known."""

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
    """None: the wait status is not known, but its output says that it failed."""
    when: float = 0.0
    """Its place in the order of all accounts: Unix seconds, or a line number if there is no time."""
    gpu: str = ""
    blames: str = ""
    """The host or address that it reports as gone."""
    said_by: str = ""
    """The source, if it is no rank."""
    of_job: bool = False
    """It concerns the whole job."""

    @property
    def failed(self) -> bool:
        return self.exit is None or exits.is_failure(self.exit)

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else self.said_by or "a rank"

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        if (self.of_job and self.exit is None) or not (self.node or self.gpu or self.rank is not None):
            return ()
        return (Culprit(node=self.node, gpu=self.gpu, rank=self.rank),)

    @property
    def exit_evidence(self) -> tuple[Evidence, ...]:
        """The wait status, else what a launcher reported of it."""
        if self.exit is None:
            return ()
        return tuple(one for one in self.evidence if one.source == EXIT_RECORD) or self.evidence[:1]

    @property
    def blames_peer(self) -> bool:
        """It failed because of a peer, or gloo aborted it because a peer sent something wrong or nothing."""
        aborted = self.ended_by("SIGABRT") and FailureClass.NCCL_NETWORK in self.symptoms
        return self.is_cascade or aborted

    def ended_by(self, *names: str) -> bool:
        """Whether one of these signals (`"SIGTERM"`) ended it."""
        return self.exit is not None and exits.ended_by(self.exit, *names)


class Accounts(Frozen, frozen=True, kw_only=True):
    """What is known of ranks and nodes, from a live job or from old logs: the input of all readings."""

    accounts: tuple[Account, ...] = ()
    """The first that ended first."""
    findings: tuple[Finding, ...] = ()
    """The findings that become readings (kernel, GPU, host, scheduler), the most serious first."""
    shown: tuple[Finding, ...] = ()
    """All findings, as evidence for people."""
    others: tuple[Candidate, ...] = ()
    """Readings of statements that no account uses."""
    places: frozenset[str] = frozenset()
    """The nodes on which something failed, not only as a consequence."""
    well: frozenset[str] | None = None
    """The nodes on which nothing failed; None: all others."""
    failed_at: float | None = None
    """Unix seconds of the first failure. Old logs only: agents send only findings of the right time."""
    hints: dict[FailureClass, float] = {}
    """Classes of everything else in the logs, warnings too, with their weight as alternatives."""
    survived: tuple[Candidate, ...] = ()
    """Readings of what training survived, the surest first."""


def exit_evidence(record: ExitRecord, node: str) -> Evidence:
    """The wait status as a line of evidence."""
    return Evidence(
        text=f"rank {record.rank} (pid {record.pid}) {exits.describe(record)}",
        source=EXIT_RECORD,
        node=node,
        rank=record.rank,
        at=record.ended_at,
    )


def order(account: Account) -> tuple[float, int, int]:
    """The sort key of accounts: the first that ended comes first."""
    return account.when, account.exit.order if account.exit is not None else 0, account.rank or 0


def describe(incident: Incident) -> Accounts:
    """What the agents of a live job collected."""
    accounts = of_ranks(incident.evidence)
    shown = distinct([*incident.findings, *(finding for one in incident.evidence for finding in one.findings)])
    places = {one.node for one in accounts if one.failed and not one.is_cascade} | set(incident.lost_nodes)
    if incident.hang is not None:
        places |= {incident.rank_nodes.get(rank, "") for rank in incident.hang.ranks}
    return Accounts(
        accounts=tuple(accounts),
        findings=tuple(one for one in shown if incident.trigger == "signal" or not _is_of_own_output(one)),
        shown=tuple(shown),
        places=frozenset(places - {""}),
    )


def _is_of_own_output(finding: Finding) -> bool:
    """The agent found it in a rank's output while the rank ran; `of_ranks` scans the end of that output itself."""
    return finding.evidence.source == "output" and finding.rank is not None


def distinct(found: Iterable[Finding]) -> list[Finding]:
    """All findings once each, the most serious first."""
    order = {"fatal": 0, "error": 1, "warning": 2}
    unique = {(one.rule, one.node, one.gpu, one.rank, one.evidence.text): one for one in found}
    return sorted(unique.values(), key=lambda one: (order[one.severity], -one.confidence, one.at))


def of_ranks(evidence: Iterable[NodeEvidence]) -> list[Account]:
    """One account for each ended rank, the first that ended first."""
    ended: dict[int, tuple[str, ExitRecord]] = {}
    outputs: dict[int, RankOutput] = {}
    for part in evidence:
        for record in (*part.exits, *(sample.exit for sample in part.samples if sample.exit is not None)):
            ended.setdefault(record.rank, (part.node, record))
        for output in part.outputs:
            # A suspected hang earlier in the attempt collected output, too. The output at the end counts more.
            if part.request == 0 or output.rank not in outputs:
                outputs[output.rank] = output
    return sorted((of_rank(node, record, outputs.get(rank)) for rank, (node, record) in ended.items()), key=order)


def of_rank(node: str, record: ExitRecord, output: RankOutput | None) -> Account:
    """The account of one ended rank; `output`: the end of its output, if known."""
    return joined(node, record, _said(output, node) if output is not None and exits.is_failure(record) else ())


def _said(output: RankOutput, node: str) -> list[Statement]:
    """The statements in the end of a rank's output. Only the last traceback counts: those before it were caught."""
    evidence = Evidence(text="", source="output", node=node, rank=output.rank)
    lines = [
        *dict.fromkeys(line for line in (*output.traceback, *output.tail, *output.error_file.splitlines()) if line)
    ]
    matches = rules.default().scan_text(lines)
    found = [statements.of_match(statements.as_line_match(one, 0), evidence) for one in matches]
    found.append(statements.of_crash(lines, msgspec.structs.replace(evidence, line=None)))
    traceback = (
        tracebacks.last(output.traceback)
        or (tracebacks.from_error_file(output.error_file) if output.error_file else None)
        or tracebacks.last(output.tail)
    )
    if traceback is not None:
        found.append(statements.of_traceback(traceback, evidence))
    return [one for one in found if one is not None]


# ----- status and statements -----


def by_status(node: str, record: ExitRecord) -> Account:
    """The account by the wait status alone."""
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


def joined(node: str, record: ExitRecord, said: Sequence[Statement]) -> Account:
    """The account by wait status and output, as far as the two agree."""
    factors = current().factor
    account = by_status(node, record)
    own_end = by_itself(record)
    # A signal from outside ended it, so no exception did: what it raised before was caught.
    weighed = statements.weigh(one for one in said if own_end or not one.is_traceback)
    if not weighed:
        if record.code:
            # The exit code is all that is known. The same code at the same step again is no accident.
            return msgspec.structs.replace(account, fingerprint=f"exit code {record.code} without a word")
        return account
    best, confidence = weighed[0]
    summary = best.summary
    if best.rule == statements.CRASH:
        summary = f"{summary} and {exits.describe(record)}"
    elif not best.is_traceback:
        in_full = own_end or best.rule in _SIGNAL_RULES
        confidence *= factors.written_line if in_full else factors.before_a_signal
        if not own_end and (best.role == "cascade" or confidence < account.confidence):
            return account
        summary = f"{exits.describe(record)} after it wrote: {summary.partition(': ')[2]}"
    return msgspec.structs.replace(
        of_statement(best, confidence, said),
        rank=record.rank,
        node=node,
        exit=record,
        when=record.ended_at,
        summary=summary,
        evidence=(best.evidence, *account.evidence),
    )


def of_statement(best: Statement, confidence: float, said: Sequence[Statement]) -> Account:
    """The account by statements alone: the wait status is not known."""
    evidence = best.evidence
    return Account(
        rank=evidence.rank,
        node=evidence.node,
        said_by="" if best.of_rank or evidence.rank is not None else "the log",
        failure_class=best.failure_class,
        confidence=confidence,
        summary=best.summary,
        is_cascade=best.role == "cascade",
        evidence=(evidence,),
        symptoms=statements.symptoms(said),
        fingerprint=best.fingerprint,
        gpu=best.gpu,
        of_job=best.of_job,
        blames=next((one.blames for one in said if one.blames), ""),
    )


def by_itself(record: ExitRecord) -> bool:
    """It ended by itself (also by an abort), not by a signal from outside or a fault."""
    return exits.ending_signal(record) is None or exits.ended_by(record, "SIGABRT")
