"""What the ranks say of their ends: the statements of their output, and for each rank one account of its end.

A statement is a traceback, a line that rules know, or a crash report. Most statements are consequences. The first cause
that the run did not survive counts most. Errors after a cancellation count little. An account is the wait status of a
rank, with its statement that says most.

The rules scan the end of a rank's output here, from the evidence that its agent collected after the end. The agent
scans the output while the rank runs, too. Those findings are not in its evidence: they serve the timeline, the metrics
and NaN. No account is made of them, because an agent that was started again has not seen all output, and the end of
the output is always there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis import exceptions, rules, tracebacks
from diagnosis.incident import Candidate, Culprit, Incident
from diagnosis.logs.steps import went_on
from diagnosis.rules import Role, RuleMatch
from diagnosis.signals import Evidence, ExitRecord, Finding, Frozen, NodeEvidence, RankOutput, clean_text
from diagnosis.stacks import is_library
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.tracebacks import Traceback
from diagnosis.verdict.weights import Row, current, in_use

MIN_CONFIDENCE: Final = 0.5
CERTAIN: Final = 0.75
"""An error that is not fatal shows a failure by itself only from this confidence on."""
ANOTHER_RUN_LINES: Final = 300
"""A traceback this many lines after the last error belongs to another run in the same file."""
_OF_STARTS: Final = (FailureClass.DEPENDENCY_IMPORT_ERROR, FailureClass.CONFIG_OR_ARGUMENT_ERROR)
"""An interrupt does not cause these: somebody started the run again."""
_RUN_OUT: Final = (FailureClass.GPU_OOM, FailureClass.HOST_OOM, FailureClass.DISK_FULL)
LAST_WORDS: Final = 10
"""A line among the last so many is why a rank ended, if no complaint after it and no exception says something else."""
MAX_WORDS: Final = 180
MAX_HEAD: Final = 60
DECISIVE_BEFORE: Final = 30
"""Of a longer line its beginning is shown, and the words that decide with so much before them."""
_DECISIVE: Final = re.compile(
    r"\[Errno \d|\b[A-Z]\w{0,60}(?:Error|Exception)\b|\b[A-Z]{2,12}_?ERROR_\w{2,40}|missing ranks?\b"
    r"|(?i:connection (?:refused|reset|timed out)|out of memory|permission denied|no such file|no space left)"
)
CRASH: Final = "crash"
_OF_THREADS: Final = ("_bootstrap", "_bootstrap_inner", "_feed")
_ADDRESS: Final = r"\[?(?:::ffff:)?((?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F.]*|[\w.-]{1,120})"
_PEER_NAME: Final = re.compile(_ADDRESS)
_PEER: Final = re.compile(
    r"(?:closed by (?:remote )?peer|from peer|remote=|[Cc]onnect to|(?:Read error|writev|Connect timeout) (?=\[)) ?"
    + _ADDRESS
)
_CPP_STACK: Final = re.compile(r"\s*Exception raised from \S")
"""Where torch begins to print the place in its C++."""
_CRASH: Final = re.compile(
    r"Fatal Python error: (?:Segmentation fault|Aborted|Bus error)|\*\*\* Process received signal"
)
_CRASH_FRAME: Final = re.compile(r'File "([^"]{1,400})", line (\d{1,7}) in (\S{1,200})')
"""A frame as faulthandler writes it."""
_THREAD: Final = re.compile(r"(?:^|[\s\]:])(?:Thread|Current thread) 0x[0-9a-f]{1,16} ")


class Statement(Frozen, frozen=True, kw_only=True):
    """One thing that a rank or a log says about a failure."""

    role: Role
    failure_class: FailureClass
    confidence: float
    summary: str
    """`raised ValueError: ... in step (train.py:7)`, `wrote: CUDA out of memory`; of a node or the job: `says: ...`."""
    evidence: Evidence
    last_line: int = 0
    rule: str = ""
    is_traceback: bool = False
    is_uncaught: bool = False
    """Its stack begins at the first line of the program: no code caught it."""
    by_words: bool = False
    """An exception that no rule and no type knows, by what its message complains of."""
    is_helper: bool = False
    """It ended a thread of a library, and no rank."""
    fingerprint: str = ""
    survived: bool = False
    """The run went on after it."""
    of_rank: bool = True
    """A rank says it about itself, not about the node or the job."""
    of_job: bool = False
    """It concerns the job: no rank and no node is the culprit."""
    gpu: str = ""
    """PCI address, if the line names one."""
    blames: str = ""
    """The host or address that it reports as gone."""
    benign: bool = False
    """Healthy logs contain it as well: it can explain a failure, and is no evidence of one."""

    @property
    def line(self) -> int:
        return self.evidence.line or 0


def statement_of_traceback(traceback: Traceback, evidence: Evidence) -> Statement:
    """The statement of a traceback; `evidence`: the place of its first line."""
    reading = exceptions.read(traceback)
    return Statement(
        role="cascade" if reading.is_cascade else _role(reading.failure_class),
        failure_class=reading.failure_class,
        confidence=reading.confidence * (current().factor["caught_traceback"] if traceback.is_passing else 1.0),
        summary=_raised(traceback),
        evidence=msgspec.structs.replace(evidence, text=clean_text(_exception_line(traceback))),
        last_line=(evidence.line or 0) + 2 * len(traceback.frames) + 1,
        is_traceback=True,
        is_uncaught=_is_uncaught(traceback),
        by_words=reading.by_words,
        is_helper=traceback.is_passing
        and traceback.own_frame is None
        and reading.failure_class not in (*_RUN_OUT, FailureClass.STORAGE_ERROR, FailureClass.SHM_EXHAUSTED)
        and any(frame.function in _OF_THREADS for frame in traceback.frames[:2]),
        fingerprint=tracebacks.fingerprint(traceback),
        benign=traceback.is_passing,
    )


def _is_uncaught(traceback: Traceback) -> bool:
    """A traceback that was caught and printed begins where it was caught, not at the first line of the program."""
    first = traceback.frames[0] if traceback.frames else None
    begins = first is not None and (
        (first.function == "<module>" and not is_library(first.file)) or first.function == "_run_module_as_main"
    )
    return begins and not traceback.is_passing


def _raised(traceback: Traceback) -> str:
    frame = traceback.own_frame
    place = f" in {frame.function} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})" if frame else ""
    if traceback.exception == tracebacks.CUT_OFF:
        return f"failed{place}: {_words(traceback.message)}" if traceback.message else f"raised an exception{place}"
    # NCCL names the reason last, after many words.
    last = traceback.message.rpartition("Last error:")[2].strip()
    said = f"{traceback.exception}: {last}" if last else traceback.line
    return f"raised {_words(_CPP_STACK.split(said)[0])}{place}"


def _exception_line(traceback: Traceback) -> str:
    """The line of the exception; if it is missing, the innermost place."""
    if traceback.exception != tracebacks.CUT_OFF:
        return traceback.line
    frame = traceback.frames[-1]
    return traceback.message or f'File "{frame.file}", line {frame.line}, in {frame.function} (the end is missing)'


def _words(text: str) -> str:
    """A line as people read it: without the rank before it, and cut; not the words that decide."""
    text = tracebacks.split_prefix(text)[1].strip()
    if len(text) <= MAX_WORDS:
        return text
    last = next((match.start() for match in reversed(list(_DECISIVE.finditer(text)))), 0)
    if last < MAX_WORDS - DECISIVE_BEFORE:
        return f"{text[:MAX_WORDS].rstrip()}…"
    start = last - DECISIVE_BEFORE
    shown = text[start : start + MAX_WORDS - MAX_HEAD].strip()
    return f"{text[:MAX_HEAD].rstrip()} … {shown}{'…' if len(text) > start + MAX_WORDS - MAX_HEAD else ''}"


def _role(failure_class: FailureClass) -> Role:
    kind = TAXONOMY[failure_class].kind
    return kind if kind in ("symptom", "outcome") else "cause"


def statement_of_match(match: RuleMatch, evidence: Evidence) -> Statement | None:
    """The statement of a line; None for warnings and for what is not sure: these explain nothing.

    One warning counts: that memory or a disk ran out explains the errors that follow.
    """
    caught = match.severity == "warning" and match.role == "cause" and match.failure_class in _RUN_OUT
    if not caught and (match.severity == "warning" or match.confidence < MIN_CONFIDENCE):
        return None
    return Statement(
        role=match.role,
        failure_class=match.failure_class,
        confidence=current().confidence["ran_out_and_caught"] if caught else match.confidence,
        summary=f"{_verb(match)}: {_words(match.text)}",
        evidence=msgspec.structs.replace(evidence, text=match.text),
        last_line=match.last_line or match.line,
        rule=match.rule,
        of_rank=match.scope == "rank",
        of_job=match.scope == "job",
        gpu=(match.fields.get("pci") or match.fields.get("gpu", "")).lower().partition(".")[0],
        blames=_blamed(match) if match.role in ("cascade", "symptom") or _is_of_wire(match) else "",
        benign=caught or (match.severity != "fatal" and match.confidence < CERTAIN),
    )


def _verb(match: RuleMatch) -> str:
    if match.scope != "rank":
        return "says"
    return "is named in" if match.fields.get("about", "").isdigit() else "wrote"


def _is_of_wire(match: RuleMatch) -> bool:
    """A connection has two ends: the end that reports the error need not be the faulty one."""
    return match.failure_class is FailureClass.NCCL_NETWORK


def _blamed(match: RuleMatch) -> str:
    """The peer that the line names, without a port."""
    named = match.fields.get("peer") or match.fields.get("host")
    found = _PEER.search(match.text) if not named else _PEER_NAME.match(named)
    return found[1] if found is not None and not found[1].startswith("127.") else ""


def statement_of_crash(lines: Sequence[str], evidence: Evidence, first_line: int = 1) -> Statement | None:
    """What faulthandler wrote before the process died. A crash inside a library is the library's fault."""
    start = next((index for index, line in enumerate(lines) if _CRASH.search(line)), None)
    dump = lines[start:] if start is not None else ()
    threads = [index for index, line in enumerate(dump) if _THREAD.search(line)]
    # Of several threads the one that crashed is marked; if none is, it ran no Python.
    marked = next((index for index in threads if "Current thread" in dump[index]), len(dump) if threads else 0)
    end = next((index for index in threads if index > marked), len(dump))
    places = (_CRASH_FRAME.search(line) for line in dump[marked:end])
    place = next((match for match in places if match is not None), None)
    if start is None or place is None:
        return None
    is_librarys = is_library(place[1]) and "ctypes" not in place[1]
    where = f"{place[3]} ({place[1].rsplit('/', 1)[-1]}:{place[2]})"
    confidences = current().confidence
    return Statement(
        role="cause" if is_librarys else "symptom",
        failure_class=FailureClass.FRAMEWORK_BUG if is_librarys else FailureClass.WORKER_CRASH,
        confidence=confidences["crash_in_a_library"] if is_librarys else confidences["crash_in_user_code"],
        summary=f"crashed in {where}",
        evidence=msgspec.structs.replace(evidence, text=clean_text(place[0].strip()), line=first_line + start),
        last_line=first_line + start,
        rule=CRASH,
        fingerprint=f"SIGSEGV in {place[3]} ({place[1]}:{place[2]})",
    )


class _Earlier(NamedTuple):
    """A statement, and what the same rank or log said before it."""

    one: Statement
    cancelled: bool
    caused: bool
    """An earlier statement names a cause."""
    broken: bool
    """Some statement shows a broken device."""
    node_failed: bool
    """The scheduler says that a node failed."""
    uncaught_line: int
    """Of the last exception that nobody caught; 0: there is none."""
    last_line: int
    source: str

    @property
    def ended_the_program(self) -> bool:
        return self.one.is_uncaught and self.one.line == self.uncaught_line


ORDER: Final = (
    Row[_Earlier](
        "after_a_cancellation",
        "factor",
        lambda seen: seen.cancelled and seen.one.of_rank,
        "an_interrupt_and_what_it_broke",
    ),
    Row[_Earlier](
        "beside_a_broken_device",
        "factor",
        lambda seen: _is_of_hardware(seen.one) != seen.broken,
        "a_gpu_named_in_a_ranks_output",
    ),
    Row[_Earlier](
        "beside_a_failed_node",
        "factor",
        lambda seen: seen.node_failed and seen.one.failure_class is FailureClass.CUDA_ILLEGAL_ACCESS,
        "a_cuda_error_of_a_node_that_failed",
    ),
    Row[_Earlier](
        "after_a_cause",
        "factor",
        lambda seen: not seen.broken and seen.caused and not seen.ended_the_program,
        "memory_that_was_caught",
    ),
    Row[_Earlier](
        "before_an_uncaught_exception",
        "factor",
        lambda seen: (
            not seen.broken
            and seen.uncaught_line > seen.one.line
            and not seen.one.is_traceback
            and seen.one.failure_class not in _RUN_OUT
        ),
        "a_bug_after_a_complaint",
    ),
)
"""How much of a statement's confidence holds: the smallest factor that applies."""
_NEW_RUN: Final = Row[_Earlier](
    "of_an_earlier_run",
    "factor",
    lambda seen: (
        seen.one.is_traceback
        and seen.one.role == "cause"
        and not seen.one.benign
        and seen.one.evidence.source == seen.source
        and (
            seen.one.line - seen.last_line > ANOTHER_RUN_LINES
            or (seen.cancelled and seen.one.failure_class in _OF_STARTS)
        )
    ),
    "a_start_after_an_interrupt",
)
"""This statement belongs to a new run: the statements before it ended an earlier one, or nothing."""
ROWS: Final = (*ORDER, _NEW_RUN)


def weigh(statements: Iterable[Statement]) -> list[tuple[Statement, float]]:
    """The statements of one rank or log with their confidence, the most telling first."""
    ordered = _in_order(statements)
    if not ordered:
        return []
    found: list[tuple[Statement, float]] = []
    factors = current().factor
    seen = _Earlier(
        one=ordered[0],
        cancelled=False,
        caused=False,
        broken=any(_is_of_hardware(one) for one in ordered),
        node_failed=any(one.failure_class is FailureClass.NODE_FAILURE and not one.benign for one in ordered),
        uncaught_line=max((one.line for one in ordered if one.is_uncaught and one.role == "cause"), default=0),
        last_line=0,
        source="",
    )
    for one in ordered:
        seen = seen._replace(one=one)
        for row in in_use((_NEW_RUN,), seen):
            found = [(before, confidence * factors[row.name]) for before, confidence in found]
            seen = seen._replace(cancelled=False, caused=False)
        holds = min((factors[row.name] for row in in_use(ORDER, seen)), default=1.0)
        found.append((one, one.confidence * holds))
        seen = seen._replace(
            cancelled=seen.cancelled or one.role == "outcome",
            caused=seen.caused or (one.role == "cause" and not one.benign),
            last_line=one.last_line,
            source=one.evidence.source,
        )
    return sorted(found, key=lambda pair: -weight(*pair))


def _is_of_hardware(one: Statement) -> bool:
    """A broken device explains what is said before it and after it; so does a node that failed."""
    of_device = TAXONOMY[one.failure_class].domain == "accelerator" or one.failure_class is FailureClass.NODE_FAILURE
    return one.role == "cause" and not one.benign and of_device


def _in_order(said: Iterable[Statement]) -> list[Statement]:
    """By time if all have one, else by line within a file."""
    found = sorted(said, key=lambda one: (one.evidence.source, one.line, not one.is_traceback))
    if all(one.evidence.at is not None for one in found):
        found.sort(key=lambda one: one.evidence.at or 0.0)
    return found


def weight(statement: Statement, confidence: float) -> float:
    """How much a statement says: a cause says more than its consequences."""
    return confidence * current().role[statement.role]


def symptoms(said: Iterable[Statement]) -> tuple[FailureClass, ...]:
    """The classes of the consequences."""
    return tuple(dict.fromkeys(one.failure_class for one in said if one.role in ("symptom", "cascade")))


EXIT_RECORD: Final = "exit record"
_SIGNAL_RULES: Final = frozenset({"loader_bus"})
"""Rules for lines that explain an end by a signal from outside."""


OUTRANKS: Final = frozenset(
    {
        FailureClass.GPU_ECC_UNCORRECTABLE,
        FailureClass.GPU_FALLEN_OFF_BUS,
        FailureClass.GPU_HANG,
        FailureClass.NVLINK_ERROR,
        FailureClass.PCIE_ERROR,
        FailureClass.CPU_OR_MEMORY_HW,
        FailureClass.KERNEL_FAULT,
        FailureClass.NODE_FAILURE,
        FailureClass.HOST_OOM,
        FailureClass.DISK_FULL,
    }
)
"""A kernel, GPU or host finding of these classes explains the failure, whatever the ranks say."""


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
    is_aside: bool = False
    """The rank wrote that, and what ended it may be something else: no reason to end the job for good."""

    @property
    def failed(self) -> bool:
        return self.exit is None or self.exit.failed

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
        return self.exit is not None and self.exit.ended_by(*names)


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


UNCONFIRMED: Final = 0.4
"""How sure a rank's words can make about what only the kernel, the scheduler or other nodes see: too little to act
against a node. Anybody can make a program print such a line."""


def exit_evidence(record: ExitRecord, node: str) -> Evidence:
    """The wait status as a line of evidence."""
    return Evidence(
        text=f"rank {record.rank} (pid {record.pid}) {record.how}",
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
    accounts = accounts_of_ranks(incident.evidence)
    shown = distinct([*incident.findings, *(finding for one in incident.evidence for finding in one.findings)])
    places = {one.node for one in accounts if one.failed and not one.is_cascade} | set(incident.lost_nodes)
    if incident.hang is not None:
        places |= {incident.rank_nodes.get(rank, "") for rank in incident.hang.ranks}
    numbers = [one for one in shown if _is_of_numbers(one)]
    aside = numbers if not _may_end_by_numbers(incident, accounts) else ()
    return Accounts(
        accounts=tuple(accounts),
        findings=tuple(
            one for one in shown if one not in aside and (incident.trigger == "signal" or not _is_of_own_output(one))
        ),
        shown=tuple(shown),
        places=frozenset(places - {""}),
        hints={one.failure_class: current().verdict["clue"] for one in aside},
    )


def _is_of_numbers(finding: Finding) -> bool:
    """An alarm about the loss of the whole job."""
    return finding.failure_class is FailureClass.LOSS_SPIKE_OR_NAN and finding.scope == "job" and finding.rank is None


def _may_end_by_numbers(incident: Incident, ended: Iterable[Account]) -> bool:
    """Whether an alarm about the loss can be why. No signal, hang or lost node comes from wrong numbers; a script
    that stops because of them ends by itself, and what it says then counts more than the alarm."""
    if incident.trigger in ("signal", "loss"):
        return True
    first = [one for one in ended if one.failed and not one.is_cascade]
    said = (FailureClass.WORKER_CRASH, FailureClass.LOSS_SPIKE_OR_NAN)
    return (
        incident.trigger == "exit"
        and bool(first)
        and all(one.exit is not None and one.exit.by_itself and one.failure_class in said for one in first)
    )


def _is_of_own_output(finding: Finding) -> bool:
    """The agent found it in a rank's output while the rank ran. The end of that output is scanned here."""
    return finding.evidence.source == "output" and finding.rank is not None


def distinct(found: Iterable[Finding]) -> list[Finding]:
    """All findings once each, the most serious first."""
    order = {"fatal": 0, "error": 1, "warning": 2}
    unique = {(one.rule, one.node, one.gpu, one.rank, one.evidence.text): one for one in found}
    return sorted(unique.values(), key=lambda one: (order[one.severity], -one.confidence, one.at))


def accounts_of_ranks(evidence: Iterable[NodeEvidence]) -> list[Account]:
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
    return sorted(
        (account_of_rank(node, record, outputs.get(rank)) for rank, (node, record) in ended.items()), key=order
    )


def account_of_rank(node: str, record: ExitRecord, output: RankOutput | None) -> Account:
    """The account of one ended rank; `output`: the end of its output, if known."""
    if output is None or not record.failed:
        return joined(node, record, ())
    said = _said(output, node)
    account = joined(node, record, said)
    if account.fingerprint or TAXONOMY[account.failure_class].retry not in ("never", "exclude"):
        return account
    return _beside_the_end(account, said, output)


def _beside_the_end(account: Account, said: Sequence[Statement], output: RankOutput) -> Account:
    """An account by a line, not an exception: anybody's text, or of something that the job can do without."""

    def stands_in(lines: Iterable[str]) -> bool:
        return any(
            one.failure_class is account.failure_class and (one.severity == "fatal" or one.confidence >= CERTAIN)
            for one in rules.default().scan_text(lines)
        )

    tail = [line for line in output.tail if line.strip()]
    after = tail[len(went_on(tail)) :]
    error = output.error_file.splitlines()
    if len(after) < len(tail) and TAXONOMY[account.failure_class].retry == "exclude":
        survived = not stands_in([*after, *output.traceback, *error])
        return (
            msgspec.structs.replace(account, confidence=min(account.confidence, UNCONFIRMED)) if survived else account
        )
    raised = any(one.is_uncaught and one.failure_class is not account.failure_class for one in said)
    last = [*after[-LAST_WORDS:], *error]
    complaint = next((line for line in reversed(last) if exceptions.complains(line) or stands_in([line])), "")
    return msgspec.structs.replace(account, is_aside=raised or not stands_in([complaint]))


def blames_peer(record: ExitRecord, output: RankOutput | None) -> bool:
    """Whether a rank that ended only reports that a peer is gone."""
    return account_of_rank("", record, output).blames_peer


def _said(output: RankOutput, node: str) -> list[Statement]:
    """The statements in the end of a rank's output. Only the last traceback counts: those before it were caught."""
    evidence = Evidence(text="", source="output", node=node, rank=output.rank)
    lines = [
        *dict.fromkeys(line for line in (*output.traceback, *output.tail, *output.error_file.splitlines()) if line)
    ]
    matches = rules.default().scan_text(lines)
    found = [statement_of_match(one, evidence) for one in matches]
    found.append(statement_of_crash(lines, msgspec.structs.replace(evidence, line=None)))
    traceback = (
        tracebacks.last(output.traceback)
        or (tracebacks.from_error_file(output.error_file) if output.error_file else None)
        or tracebacks.last(output.tail)
    )
    if traceback is not None:
        found.append(statement_of_traceback(traceback, evidence))
    return [one for one in found if one is not None]


# ----- status and statements -----


def by_status(node: str, record: ExitRecord) -> Account:
    """The account by the wait status alone."""
    failure_class, confidence, why = record.hint()
    return Account(
        rank=record.rank,
        node=node,
        exit=record,
        when=record.ended_at,
        failure_class=failure_class,
        confidence=confidence,
        summary=why,
        is_cascade=record.ended_by("SIGTERM") and record.order > 0,
        evidence=(exit_evidence(record, node),),
    )


def joined(node: str, record: ExitRecord, said: Sequence[Statement]) -> Account:
    """The account by wait status and output, as far as the two agree."""
    factors = current().factor
    account = by_status(node, record)
    own_end = record.by_itself
    # A signal from outside ended it, so no exception did: what it raised before was caught.
    weighed = weigh(one for one in said if own_end or not one.is_traceback)
    if not weighed:
        if record.code:
            # The exit code is all that is known. The same code at the same step again is no accident.
            return msgspec.structs.replace(account, fingerprint=f"exit code {record.code} without a word")
        return account
    best, confidence = weighed[0]
    summary = best.summary
    if best.rule == CRASH:
        summary = f"{summary} and {record.how}"
    elif not best.is_traceback:
        in_full = own_end or best.rule in _SIGNAL_RULES
        confidence *= factors["written_line"] if in_full else factors["before_a_signal"]
        if not own_end and (best.role == "cascade" or confidence < account.confidence):
            return account
        summary = f"{record.how} after it wrote: {summary.partition(': ')[2]}"
    if best.failure_class is FailureClass.NODE_FAILURE or rules.is_of_driver(best.evidence.text):
        confidence = min(confidence, UNCONFIRMED)
    return msgspec.structs.replace(
        account_of_statement(best, confidence, said),
        rank=record.rank,
        node=node,
        exit=record,
        when=record.ended_at,
        summary=summary,
        evidence=(best.evidence, *account.evidence),
        is_aside=best.by_words and TAXONOMY[best.failure_class].retry == "never",
    )


def account_of_statement(best: Statement, confidence: float, said: Sequence[Statement]) -> Account:
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
        symptoms=symptoms(said),
        fingerprint=best.fingerprint,
        gpu=best.gpu,
        of_job=best.of_job,
        blames=next((one.blames for one in said if one.blames), ""),
    )
