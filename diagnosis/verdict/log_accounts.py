"""Old logs as accounts of ranks and as findings: the same form that the evidence of a live job takes.

Each rank that a log names has an account, and each log whose ranks are not known. What launchers report of the ends of
ranks is joined to these accounts. Statements that the run survived, and findings that recovered, do not count.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from diagnosis import tracebacks
from diagnosis.incident import Candidate, LauncherFailure, LogEvidence, LoggedTraceback, LogSummary
from diagnosis.kernel.causes import Causes, as_cause, is_elsewhere
from diagnosis.kernel.log import moment
from diagnosis.logs import launchers
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, ExitRecord, Finding, KernelEvent
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.verdict.accounts import (
    CERTAIN,
    CRASH,
    OUTRANKS,
    Account,
    Accounts,
    Statement,
    account_of_statement,
    by_status,
    distinct,
    order,
    statement_of_crash,
    statement_of_match,
    statement_of_traceback,
    weigh,
    weight,
)
from diagnosis.verdict.weights import Row, current, in_use

_Timed = TypeVar("_Timed", bound=msgspec.Struct)
_Said = TypeVar("_Said", Statement, LoggedTraceback, RuleMatch)

LEAST_SHARED: Final = 3
"""Two logs must share this many steps for their clocks to be compared."""
NOISE_S: Final = 2.0
"""Steps are printed some time after they were made: a smaller difference is not the clock's."""


def offsets(logs: Sequence[LogSummary]) -> dict[str, float]:
    """Source -> seconds its clock is ahead of the log with the most steps; 0 if it is not known.

    A log without steps (the kernel's) has the clock of its node.
    """
    seen = {log.source: _steps(log) for log in logs}
    reference = max(seen.values(), key=len, default={})
    found: dict[str, float] = {}
    for source, steps in seen.items():
        shared = [steps[step] - reference[step] for step in steps.keys() & reference.keys()]
        if len(shared) >= LEAST_SHARED:
            ahead = statistics.median(shared)
            found[source] = ahead if abs(ahead) > NOISE_S else 0.0
    by_node = {log.node: found[log.source] for log in logs if log.node and log.source in found}
    return {log.source: found.get(log.source, by_node.get(log.node, 0.0)) for log in logs}


def _steps(log: LogSummary) -> dict[int, float]:
    return {
        point.step: point.at
        for curve in log.curves
        for point in curve.points
        if point.step is not None and point.at is not None
    }


def aligned(logs: Sequence[LogSummary]) -> list[LogSummary]:
    """The logs with all times on one clock."""
    ahead = offsets(logs)
    return [_shifted(log, ahead[log.source]) if ahead[log.source] else log for log in logs]


def _shifted(log: LogSummary, ahead: float) -> LogSummary:
    return msgspec.structs.replace(
        log,
        matches=tuple(_back(one, ahead) for one in log.matches),
        tracebacks=tuple(_back(one, ahead) for one in log.tracebacks),
        events=tuple(_back(one, ahead) for one in log.events),
    )


def _back(one: _Timed, seconds: float) -> _Timed:
    at = getattr(one, "at", None)
    return one if at is None else msgspec.structs.replace(one, at=at - seconds)


LONG_AGO_S: Final = 3600.0
DAYS_AGO_S: Final = 86400.0
"""A message with a date is of another failure if a serious one follows so much later."""
BOOT_S: Final = 120.0
"""Links and mounts come up in the first minutes after a boot."""
_OF_RANK: Final = re.compile(r"\s{0,2}\[(?:rank|default)[ :=]?\d{1,6}\]", re.IGNORECASE)
_QUOTED: Final = re.compile(r"(?:[^\n]{61}|[^\n]{0,60}?[\"'`])[^\n]*?(?:NVRM: |SXid )")
_BACK: Final = (
    (re.compile(r"server (\S{1,120}) not responding"), re.compile(r"server \S{1,120} OK\b")),
    (re.compile(r"([\w.-]{1,40}):? [Ll]ink (?:is )?[Dd]own"), re.compile(r"[Ll]ink (?:is )?[Uu]p|link becomes ready")),
    (
        re.compile(r"(Lustre): .*(?:was lost; in progress|timed out for)"),
        re.compile(r"Connection restored|[Rr]ecovered"),
    ),
    (re.compile(r"(CPU)\d{1,5}: \w{1,12} temperature above"), re.compile(r"temperature/speed normal")),
)
"""Messages that something went away, and that the same thing came back."""
_OF_NCCL: Final = re.compile(r"(?:^|[\s>|])([A-Za-z][\w.-]{1,120}):\d{1,9}:\d{1,9} \[-?\d{1,3}\] ")
"""A line of NCCL names its node: `host:pid:thread [device]`."""


_DRAINED: Final = re.compile(
    r"\s[\w-]{1,32}\s{1,12}\d{4}-\d\d-\d\dT[\d:]{8}\s{1,12}(?P<node>[A-Za-z][\w.,\[\]-]{1,120})\W{0,3}$"
)
"""A row of `sinfo -R`: reason, user, time, nodes."""


def place_of(one: RuleMatch | LoggedTraceback, log: LogSummary) -> Evidence:
    """Evidence without a text yet: file, line, rank, node, time."""
    return Evidence(
        text="",
        source=log.source,
        line=one.line,
        node=_node(one, log),
        rank=_rank(one, log),
        at=one.at,
    )


def _is_of_job(one: RuleMatch | LoggedTraceback) -> bool:
    return isinstance(one, RuleMatch) and one.role == "outcome"


def _rank(one: RuleMatch | LoggedTraceback, log: LogSummary) -> int | None:
    """The rank that the line is about, where it says so; else the one that wrote it."""
    named = one.fields.get("about", "") if isinstance(one, RuleMatch) else ""
    if named.isdigit():
        return int(named)
    return one.rank if one.rank is not None or _is_of_job(one) else log.rank


def _node(one: RuleMatch | LoggedTraceback, log: LogSummary) -> str:
    """The node where it happened: the one that the line itself names counts most."""
    named = ""
    if isinstance(one, RuleMatch):
        named = one.fields.get("node") or (one.fields.get("host", "") if one.scope == "node" else "")
        drained = _DRAINED.search(one.text) if not named and one.scope in ("node", "gpu") else None
        named = drained["node"] if drained is not None else named
        # Who says that the wire or the set-up failed is not the one that failed.
        of_wire = one.failure_class is FailureClass.NCCL_NETWORK and "ocket" in one.text
        speaks = of_wire or one.failure_class is FailureClass.NCCL_SETUP
        nccl = _OF_NCCL.search(one.text[:200]) if not (speaks or named or one.node or log.node) else None
        named = nccl[1] if nccl is not None else named
    return named or one.node or log.node


def with_reported(log: LogSummary) -> LogSummary:
    """The log, with tracebacks that a launcher's report repeats as those of the worker that it names."""
    for failure in log.launcher:
        told = tracebacks.last(failure.message.split("\n")) if "Traceback" in failure.message else None
        if told is None or told.exception == tracebacks.CUT_OFF:
            continue
        repeated = [one for one in log.tracebacks if one.rank is None and one.traceback.frames[:1] == told.frames[:1]]
        said = [one for one in log.matches if one.rank is None and one.text.strip() in failure.message]
        line = min([*(one.line for one in said), *(one.line for one in repeated)], default=failure.line)
        workers = LoggedTraceback(traceback=told, line=line, rank=failure.rank, node=failure.host, at=failure.at)
        log = msgspec.structs.replace(
            log,
            tracebacks=(*(one for one in log.tracebacks if one not in repeated), workers),
            matches=tuple(one for one in log.matches if one not in said),
        )
    return log


class _Message(NamedTuple):
    """A kernel message that is a finding, in its log."""

    event: KernelEvent
    finding: Finding
    log: LogSummary
    newest_s: float
    """Uptime of the newest message."""
    newest_at: float = 0.0
    """Unix time of the newest serious message."""


class LogFinding(NamedTuple):
    """A finding in a log of a kernel or a scheduler."""

    finding: Finding
    survived: bool
    """Training went on after it, in the same log."""
    doubtful: bool
    """Alone it shows no failure: a rank printed it, or the fault recovered."""


def _is_long_ago(seen: _Message) -> bool:
    if seen.event.at is not None:
        return seen.newest_at - seen.event.at > DAYS_AGO_S
    return seen.newest_s - (seen.event.uptime or seen.newest_s) > LONG_AGO_S


def _is_of_boot(seen: _Message) -> bool:
    """Links and mounts come up while a node boots, and no job runs yet."""
    comes_up = seen.finding.failure_class in (FailureClass.NCCL_NETWORK, FailureClass.STORAGE_ERROR)
    return comes_up and seen.event.uptime is not None and seen.event.uptime < BOOT_S


def _is_unverified(seen: _Message) -> bool:
    """It looks like a kernel message, but a rank printed it or other words stand around it."""
    event, log = seen.event, seen.log
    if log.rank is not None and log.kind != "kernel":
        return True
    at = event.line - 1 - (log.lines - len(log.tail))
    whole = log.tail[at] if 0 <= at < len(log.tail) else event.text
    return any(_OF_RANK.match(text) is not None or _QUOTED.match(text) is not None for text in (whole, event.text))


MESSAGES: Final = (
    Row[_Message]("long_ago", "factor", _is_long_ago, "an_error_of_last_week"),
    Row[_Message]("among_output", "factor", lambda seen: seen.log.kind == "mixed", "killed_for_memory_within_the_step"),
    Row[_Message]("unverified", "factor", _is_unverified, "a_kernel_line_that_a_rank_prints"),
    Row[_Message]("while_the_node_boots", "warning", _is_of_boot, "a_node_that_boots"),
    Row[_Message]("printed_by_a_rank", "doubtful", _is_unverified, "an_oom_kill_that_a_rank_prints"),
    Row[_Message]("came_back", "doubtful", lambda seen: has_recovered(seen.finding, seen.log), "a_node_that_boots"),
    Row[_Message](
        "training_survived_the_message",
        "survived",
        lambda seen: survives(seen.log, seen.finding),
        "a_xid_that_training_survives",
    ),
)
"""How much a kernel message in an old log counts: all factors that apply are multiplied."""


def log_findings(log: LogSummary) -> list[LogFinding]:
    """The findings in a log of a kernel or a scheduler."""
    causes, found = Causes(), []
    lines: dict[str, int] = {}
    newest = max((event.uptime for event in log.events if event.uptime is not None), default=0.0)
    serious = (event.at for event in log.events if event.severity in ("fatal", "error") and not event.consequence)
    newest_at = max((at for at in serious if at is not None), default=0.0)
    crashes = _are_crashes_alone(log)
    for event in log.events:
        at = next((one for one in (event.at, event.uptime) if one is not None), 0.0)
        finding = None if is_elsewhere(event) and not crashes else causes.note(event, at)
        if finding is not None:
            line = lines.setdefault(finding.evidence.text, event.line)
            found.append(_judged(_Message(event, _placed(finding, log, line, event.at), log, newest, newest_at)))
    if log.kind in ("kernel", "scheduler"):
        of_rules = (_of_log(match, log) for match in log.matches)
        found += [LogFinding(one, survives(log, one), has_recovered(one, log)) for one in of_rules]
    return found


def _are_crashes_alone(log: LogSummary) -> bool:
    """Nothing but crashes of one program, again and again: somebody picked them out, whatever it is called."""
    said = [text for text in log.tail if text.strip() and " Code: " not in text]
    crashed = [event for event in log.events if event.kind == "segfault"]
    of_one = len({event.fields.get("process", "") for event in crashed}) == 1 < len(crashed)
    return of_one and log.lines == len(log.tail) and len(said) == len({event.line for event in crashed})


def _judged(seen: _Message) -> LogFinding:
    finding = seen.finding
    rows = list(in_use(MESSAGES, seen))
    effects = {row.effect for row in rows}
    holds = 1.0
    for row in rows:
        holds *= current().factor[row.name] if row.effect == "factor" else 1.0
    severity = "warning" if "warning" in effects else finding.severity
    finding = msgspec.structs.replace(finding, confidence=finding.confidence * holds, severity=severity)
    return LogFinding(finding, "survived" in effects, "doubtful" in effects)


def has_recovered(finding: Finding, log: LogSummary) -> bool:
    """The fault recovered, and the end of the same log says so."""
    for gone, back in _BACK:
        named = gone.search(finding.evidence.text)
        if named is not None:
            first = log.lines - len(log.tail) + 1
            ends = [
                first + at for at, text in enumerate(log.tail) if named[1] in text and back.search(text) is not None
            ]
            # A task that waits on after the answer waits for the same: the answer helped nobody.
            return bool(ends) and not any(one.kind == "hung_task" and one.line > ends[-1] for one in log.events)
    return False


def last_line(finding: Finding, log: LogSummary) -> int:
    """The last line at which the kernel wrote it."""
    return max((event.line for event in log.events if event.rule == finding.rule), default=finding.evidence.line or 0)


def _placed(finding: Finding, log: LogSummary, line: int, at: float | None) -> Finding:
    evidence = msgspec.structs.replace(finding.evidence, source=log.source, line=line, node=log.node, at=at)
    device = finding.fields.get("device", "")
    of_gpu = finding.failure_class is FailureClass.PCIE_ERROR or finding.scope == "gpu"
    of_bus = of_gpu and _PCI.match(device) is not None
    gpu = finding.gpu or (device.partition(".")[0] if of_bus and not _OF_PORT.search(finding.evidence.text) else "")
    return msgspec.structs.replace(finding, evidence=evidence, node=log.node, at=at or 0.0, gpu=gpu)


_PCI: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.\d)?$")
_OF_PORT: Final = re.compile(r"\bpcieport\b|\bmlx\d|\bnvme|\bigb\b|\bixgbe\b|\bsnd_")
"""Devices on the bus that are no GPU."""


def _of_log(match: RuleMatch, log: LogSummary) -> Finding:
    return Finding(
        rule=match.rule,
        failure_class=match.failure_class,
        confidence=match.confidence,
        scope=match.scope,
        severity="warning" if statement_of_match(match, place_of(match, log)) is None else match.severity,
        evidence=Evidence(text=match.text, source=log.source, line=match.line, node=_node(match, log), at=match.at),
        node=_node(match, log),
        rank=match.rank,
        fields=match.fields,
        at=match.at or 0.0,
    )


SURVIVED_LINES: Final = 3
"""Progress this many lines after an error: the rank that prints it was not ended by it."""
SURVIVED_BY_OTHERS_LINES: Final = 20
"""The same where several ranks write to the log: lines of the others may still come."""
LAST_LINES: Final = 30
QUIET_LINES: Final = 100
_OPTIONAL: Final = (
    FailureClass.DEPENDENCY_IMPORT_ERROR,
    FailureClass.DNS_OR_CONNECT,
    FailureClass.PERMISSION_OR_AUTH,
)
"""A script often goes on without these."""
_WITHOUT: Final = re.compile(
    r"not (?:available|installed|found|reachable).{0,80}(?:using|fall|will|disabl|instead|without|default|skip)"
    r"|\b(?:is|will be|are|now) disabled\b"
    r"|fall(?:ing)?[ -]?back|using (?:the )?default|(?:continu|proceed)\w* without|ignoring",
    re.IGNORECASE,
)
MAX_ANSWER: Final = 4
_DIGITS: Final = re.compile(r"\d{1,18}")
_STACK: Final = re.compile(r'frame #\d|\b0x[0-9a-f]{6}|File "|^\s+at \S')
_TRACKER: Final = "tracker_failed"
_RAISED: Final = re.compile(r"\b\w{1,60}(?:Error|Exception)\b: ")
"""The last line of a traceback."""
_RANKED: Final = re.compile(r"^\s{0,2}(?:\[(?:rank|default)\d+\]|\d{1,5}: )")
_OF_DEVICES: Final = tuple(one for one, entry in TAXONOMY.items() if entry.domain in ("accelerator", "host"))
_SLOWDOWN: Final = (FailureClass.INPUT_STALL, FailureClass.STRAGGLER_OR_SLOW, FailureClass.GPU_THERMAL_POWER)
_TRAINS: Final = re.compile(
    r"\b\w{0,20}loss\w{0,20}['\"]?\s{0,3}[:=]\s{0,3}-?\d|\b(?:it/s|s/it)\b"
    r"|\b(?:step|iter|iteration|epoch)\b.{0,3}\s?\d.{0,200}\bloss\b"
    r"|\d ?(?:samples|images|imgs|examples|tokens|sequences|words|(?:src |tgt )?tok)/s(?:ec)?\b"
    r"|\b(?:Attempted loss scale:|setting loss scale to:?) \d"
    r"|(?:\b|_)(?:step|iter|iteration|batch)[_ ]time['\"]?\s{0,3}[:=]\s{0,3}\d"
    r"|\bloss(?: is)?\s{1,4}\d{1,6}\.\d|\"key\": \"(?:block|epoch|eval)_(?:start|accuracy)\"|\bGflop/s\)"
    r"|^(?!.{0,200}(?:[Dd]ownload|[Uu]pload|[Ee]xtract|[Ff]etch)).{0,200}\d{1,3}%\|[^|]{0,120}\| ?\d+/\d+ \[",
    re.IGNORECASE,
)
"""A line of training."""
_LIFE: Final = re.compile(
    rf"(?<![\w.-])(?:INFO|DEBUG)(?![\w-])|^(?:\[\w+\]:? ?)?\[?[ID]\d{{4}}[ \]]|{_TRAINS.pattern}", re.IGNORECASE
)
"""An ordinary line: of a level below warning, or of training."""
_DEATH: Final = re.compile(
    r"NCCL INFO|\belastic\b|launch\.py|\b(?:fail|err(?:or)?\b|exception|fatal|abort|kill|cancel|terminat|shut|stop|exit"
    r"|quit|clos|clean|sig[a-z]{3,4}\b|destroy|restart|retry|rendezvous|worker group|timed? ?out|lost|dump|traceback)"
    r"|[:=]\s{0,3}-?(?:nan|inf)\b",
    re.IGNORECASE,
)
"""Words that a failing program writes as well, and programs that clean up after it."""


def shows_life(lines: tuple[str, ...], least: int = 1) -> bool:
    """Whether at least this many of the lines show a program that goes on."""
    signs = (_LIFE.search(text[:400]) is not None and _DEATH.search(text[:400]) is None for text in lines)
    return sum(signs) >= least


def last_training(lines: Sequence[str]) -> int | None:
    """The last of these lines that is of training, and not of a failure; None: there is none."""
    trains = (_TRAINS.search(text[:400]) is not None and _DEATH.search(text[:400]) is None for text in reversed(lines))
    back = next((at for at, one in enumerate(trains) if one), None)
    return None if back is None else len(lines) - 1 - back


COUNTED: Final = 8
_CLOCK_TIME: Final = re.compile(r"(?:\d{2,4}[-/]\d\d[-/]\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")
"""A clock goes on whatever the program does."""
_WAITS: Final = re.compile(r"wait|retr(?:y|ies)|attempt|tries|elapsed|timeout|remaining|stuck|pending", re.IGNORECASE)


def last_counted(lines: Sequence[str]) -> int | None:
    """The last of several lines of one form in which a number rises by the same each time: work that goes on.

    A program that waits or tries again counts as well: that is no work.
    """
    said = [(at, _CLOCK_TIME.sub("", text[:400])) for at, text in enumerate(lines) if text.strip()]
    for end in range(len(said), COUNTED - 1, -1):
        run = [text for _, text in said[end - COUNTED : end]]
        if len({_DIGITS.sub("", text) for text in run}) == 1 and _WAITS.search(run[0]) is None:
            # A number of many digits counts as several: lines may differ in how many they have.
            columns = zip(*(map(int, _DIGITS.findall(text)) for text in run), strict=False)
            if any(
                len({after - before for before, after in itertools.pairwise(one)}) == 1 and one[0] < one[1]
                for one in columns
            ):
                return said[end - 1][0]
    return None


def lines_after(log: LogSummary, line: int) -> tuple[str, ...]:
    """The lines after this one, as far as they are kept."""
    return log.tail[max(0, line - log.lines + len(log.tail)) :]


@dataclass(frozen=True)
class InLog(Generic[_Said]):
    """A statement, or a traceback or line that may become one, in its log."""

    one: _Said
    log: LogSummary
    others: Sequence[Statement] = ()
    """All statements of the log, where they are known."""


def _was_raised(seen: InLog[Statement]) -> bool:
    return seen.one.is_traceback or _RAISED.search(seen.one.evidence.text) is not None


def _trained_on(seen: InLog[Statement]) -> bool:
    one, several = seen.one, _is_of_several(seen.log)
    # A rank that is asked to end may make a few more steps.
    long = one.role == "outcome" or (one.is_traceback and (one.is_uncaught or several))
    lines = SURVIVED_BY_OTHERS_LINES if long else SURVIVED_LINES
    if one.benign and one.is_traceback and not several:
        lines = 1
    return goes_on(seen.log, one.last_line, lines, one.is_uncaught)


def _may_pass(one: Statement) -> bool:
    return one.benign or one.role in ("cascade", "symptom")


def _ends_the_log(seen: InLog[Statement]) -> bool:
    """No code caught a traceback at the very end, whatever it looks like, unless the work was completed."""
    one, log = seen.one, seen.log
    at_the_end = one.is_traceback and log.lines - one.line <= LAST_LINES
    return at_the_end and not one.is_helper and not is_finished(log, -1) and not _is_complete(log)


IN_LOG: Final = (
    Row[InLog[Statement]](
        "uncaught_at_the_end", "uncaught", _ends_the_log, "an_error_at_the_very_end_that_looks_caught"
    ),
    Row[InLog[Statement]](
        "slowness_of_a_run_that_goes_on",
        "counts",
        lambda seen: seen.one.failure_class in _SLOWDOWN and 2 * seen.one.last_line > seen.log.lines,
        "a_slow_rank_of_a_run_that_goes_on",
    ),
    Row[InLog[Statement]]("trained_on", "survived", _trained_on, "time_limit_of_a_healthy_run"),
    Row[InLog[Statement]](
        "goes_on_without_it",
        "survived",
        lambda seen: (
            _was_raised(seen) and seen.one.failure_class in _OPTIONAL and _is_done_without(seen.log, seen.one.last_line)
        ),
        "an_import_done_without",
    ),
    Row[InLog[Statement]](
        "complains_as_it_trains",
        "survived",
        lambda seen: (
            seen.one.failure_class is FailureClass.DEPENDENCY_IMPORT_ERROR
            and not seen.one.is_traceback
            and not seen.log.launcher
            and goes_on(seen.log, seen.one.line, 1)
            and seen.one.last_line > seen.one.line
        ),
        "a_library_missed_in_each_step",
    ),
    Row[InLog[Statement]](
        "start_goes_on",
        "survived",
        lambda seen: (
            (seen.one.benign or not _was_raised(seen))
            and seen.one.role == "cause"
            and _starts(seen.log, seen.one.last_line)
        ),
        "a_complaint_before_the_first_step",
    ),
    Row[InLog[Statement]](
        "long_before_a_quiet_end",
        "survived",
        lambda seen: seen.log.lines - seen.one.last_line > QUIET_LINES and _ends_quietly(seen.log),
        "a_complaint_long_ago",
    ),
    # A script may print that all is well after an exception, too.
    Row[InLog[Statement]](
        "work_completed_after_it",
        "survived",
        lambda seen: _may_pass(seen.one) and is_finished(seen.log, seen.one.last_line),
        "a_peer_that_goes_first_at_a_good_end",
    ),
    Row[InLog[Statement]](
        "complaint_after_complete_work",
        "survived",
        lambda seen: _is_after_the_work(seen) and not _is_stuck_at_the_end(seen),
        "a_tracker_that_fails_after_the_work",
    ),
    Row[InLog[Statement]](
        "stuck_after_complete_work", "exit_hang", lambda seen: _is_stuck_at_the_end(seen), "complete_and_then_stuck"
    ),
)
"""What the log shows around a statement. Of `counts` and `survived` the first row that applies decides."""


def in_its_log(one: Statement, log: LogSummary) -> Statement:
    """The statement as its log shows it: survived or not, benign or not."""
    rows = list(in_use(IN_LOG, InLog(one, log)))
    effects = {row.effect for row in rows}
    survival = next((row.effect for row in rows if row.effect in ("counts", "survived")), "")
    if "exit_hang" in effects:
        one = msgspec.structs.replace(one, failure_class=FailureClass.EXIT_HANG, role="symptom")
    return msgspec.structs.replace(
        one, survived=survival == "survived", benign=one.benign and "uncaught" not in effects
    )


def goes_on(log: LogSummary, line: int, lines: int, is_uncaught: bool = False) -> bool:
    """Whether training goes on after this line.

    After an exception that nobody caught the words of a good end prove nothing: a program can print anything.
    """
    if log.progress_line is None or log.progress_line <= line or _is_summary(log, log.progress_line):
        return False
    return log.progress_line - line >= lines or (not is_uncaught and is_finished(log, log.progress_line))


def _is_summary(log: LogSummary, line: int) -> bool:
    """The client of a tracker repeats the run's numbers after its process failed."""
    at = line - 1 - (log.lines - len(log.tail))
    failed = any(match.rule == _TRACKER and match.line < line for match in log.matches)
    return failed and 0 <= at < len(log.tail) and "wandb: " in log.tail[at]


def survives(log: LogSummary, finding: Finding) -> bool:
    """Whether training went on after the kernel's message, in the same log."""
    line = last_line(finding, log)
    return log.kind == "mixed" and (goes_on(log, line, SURVIVED_BY_OTHERS_LINES) or is_finished(log, line))


def is_finished(log: LogSummary, line: int) -> bool:
    """Whether the work was completed after this line, and no launcher reports a bad end after that."""
    end = log.finished_line
    if end is None or end <= line or _is_summary(log, end):
        return False
    return not any(failure.line > end for failure in log.launcher)


def _ends_quietly(log: LogSummary) -> bool:
    """The end of the log has no word of trouble: an error long before it did not end the run."""
    return not log.launcher and not any(_DEATH.search(text[:400]) or _STACK.search(text) for text in log.tail)


def _starts(log: LogSummary, line: int) -> bool:
    """The log shows no step yet, and ordinary lines follow."""
    following = lines_after(log, line)
    return (
        log.progress_line is None
        and not log.launcher
        and (last_training(following) is not None or shows_life(following, 2))
    )


def _is_complete(log: LogSummary) -> bool:
    """The last step was made."""
    return log.last_step is not None and log.step == log.last_step and not log.launcher


def _is_done_without(log: LogSummary, line: int) -> bool:
    """The next lines say that the program goes on without it, and more lines follow."""
    following = lines_after(log, line - 1) if line > log.lines - len(log.tail) else ()
    return len(following) > 1 and any(_WITHOUT.search(text) for text in following[:MAX_ANSWER])


def _is_of_several(log: LogSummary) -> bool:
    """Whether several ranks write to the log, as far as it shows."""
    ranks = {one.rank for one in log.matches} | {one.rank for one in log.tracebacks}
    return log.rank is None and (bool(log.launcher) or len(ranks - {None}) > 1 or any(map(_RANKED.search, log.tail)))


# ----- statements -----

AGAIN: Final = 20
_REPORTED: Final = re.compile(r"traceback\s*: Signal \d+ \(SIG\w+\) received by PID")
"""A line of torchrun's report: the report is read as a whole."""
NEAR_THE_END: Final = 5
ABORT_LINES: Final = 2


TRACEBACKS: Final = (
    Row[InLog[LoggedTraceback]](
        "helper_after_complete_work",
        "left_out",
        lambda seen: _is_of_teardown(seen.one, seen.log),
        "a_helper_that_dies_after_the_work",
    ),
    Row[InLog[LoggedTraceback]](
        "launchers_own_traceback",
        "left_out",
        lambda seen: seen.one.traceback.is_launchers,
        "a_launchers_traceback_beside_a_bug",
    ),
    Row[InLog[LoggedTraceback]](
        "wrapper_of_another_exception",
        "left_out",
        lambda seen: launchers.is_wrapper(seen.one.traceback.exception, seen.one.traceback.message),
        "a_wrapper_that_says_nothing",
    ),
)
LINES: Final = (
    Row[InLog[RuleMatch]](
        "numbers_skipped_to_the_end", "error", lambda seen: _is_lasting(seen.one, seen.log), "steps_skipped_to_the_end"
    ),
    Row[InLog[RuleMatch]](
        "line_of_a_report", "left_out", lambda seen: _REPORTED.search(seen.one.text) is not None, "a_report_made_flat"
    ),
    Row[InLog[RuleMatch]](
        "step_cancelled_after_an_end",
        "left_out",
        lambda seen: _follows_an_end(seen.one, seen.log),
        "a_step_that_slurm_cancels_after_a_crash",
    ),
    Row[InLog[RuleMatch]](
        "port_that_is_not_used", "left_out", lambda seen: _is_unused(seen.one, seen.log), "ports_that_nobody_uses"
    ),
)
AMONG: Final = (
    Row[InLog[Statement]](
        "headline_of_an_abort",
        "left_out",
        lambda seen: _is_head_of_abort(seen.one, seen.others),
        "a_watchdog_that_aborts",
    ),
    # Without a step nothing shows that a faulty device recovered before something else failed.
    Row[InLog[Statement]](
        "ended_an_earlier_run",
        "survived",
        lambda seen: _is_of_an_earlier_run(seen.log, seen.one.last_line, [one.line for one in seen.others]),
        "two_runs_in_one_log",
    ),
    Row[InLog[Statement]](
        "device_of_a_run_without_steps",
        "counts",
        lambda seen: (
            _is_of_device(seen.one)
            and seen.log.progress_line is None
            and any(not one.survived and not one.benign for one in seen.others)
        ),
        "a_fabric_that_was_not_ready",
    ),
)
ROWS: Final = (*TRACEBACKS, *LINES, *IN_LOG, *AMONG, *MESSAGES)


def log_statements(log: LogSummary) -> list[Statement]:
    """The statements of a log about failures."""
    found = [
        statement_of_traceback(one.traceback, place_of(one, log))
        for one in log.tracebacks
        if next(in_use(TRACEBACKS, InLog(one, log)), None) is None
    ]
    for match in log.matches:
        effects = {row.effect for row in in_use(LINES, InLog(match, log))}
        if "error" in effects:
            sure = current().confidence["numbers_skipped_to_the_end"]
            match = msgspec.structs.replace(match, severity="error", confidence=sure)
        statement = statement_of_match(match, place_of(match, log))
        if statement is not None and "left_out" not in effects:
            found.append(statement)
    crash = statement_of_crash(
        log.tail,
        Evidence(text="", source=log.source, node=log.node, rank=log.rank),
        log.lines - len(log.tail) + 1,
    )
    if crash is not None:
        found.append(crash)
    found = [in_its_log(one, log) for one in found]
    found = [one for one in found if "left_out" not in _effects(one, found, log)]
    found = [_among(one, _effects(one, found, log)) for one in found]
    whole = [one for one in found if one.is_traceback]
    return [one if one.is_traceback else _as_its_traceback(one, whole) for one in found]


def _among(one: Statement, effects: set[str]) -> Statement:
    if "survived" in effects:
        return msgspec.structs.replace(one, survived=True)
    return msgspec.structs.replace(one, survived=False) if "counts" in effects else one


def _is_of_an_earlier_run(log: LogSummary, line: int, others: Sequence[int] = ()) -> bool:
    """Somebody started the program again after this line, and the new run says something."""
    start = next((one for one in log.starts if one > line), None)
    said = (log.progress_line, log.finished_line, *others, *(one.line for one in log.launcher))
    return start is not None and any(one is not None and one > start for one in said)


def _effects(one: Statement, others: Sequence[Statement], log: LogSummary) -> set[str]:
    return {row.effect for row in in_use(AMONG, InLog(one, log, others))}


def _is_head_of_abort(one: Statement, others: Sequence[Statement]) -> bool:
    """C++ says that an exception ended the process, and names the exception in the next lines: those count."""
    return "terminate called" in one.evidence.text and any(
        other.rule != one.rule and 0 <= other.line - one.line <= ABORT_LINES and "what():" in other.evidence.text
        for other in others
    )


def _is_of_device(one: Statement) -> bool:
    is_sure = one.role == "cause" and one.confidence >= CERTAIN and not (one.is_traceback or one.benign)
    return is_sure and TAXONOMY[one.failure_class].domain == "accelerator"


def _as_its_traceback(one: Statement, tracebacks: Sequence[Statement]) -> Statement:
    """A line within a traceback counts no more than the traceback."""
    whole = next((each for each in tracebacks if each.line <= one.line and one.last_line <= each.last_line + 1), None)
    if whole is None:
        return one
    return msgspec.structs.replace(
        one,
        survived=one.survived or whole.survived,
        benign=one.benign or whole.benign,
        role="cascade" if whole.role == "cascade" else one.role,
    )


_PORT_UP: Final = re.compile(
    r"^\s{0,12}(?:Port)?State:?\s{0,4}[:.]{0,40}\s{0,3}(?:4: )?Active\b|^link \S{1,40} (?:.{0,80} )?state ACTIVE\b"
    r"|\bPORT_ACTIVE\b|Link detected: yes",
    re.IGNORECASE,
)
_OF_LISTINGS: Final = ("port_down", "link_down_in_a_listing")
_NVLINK_UP: Final = re.compile(r"^\s{0,12}Link \d{1,2}: (?:[\d.]{1,8} GB/s|<?active)|NVSwitch|\bSXM", re.IGNORECASE)


def _is_unused(match: RuleMatch, log: LogSummary) -> bool:
    """A port is down in a listing, and nothing says that it was up or is needed: hosts have ports without a cable, and
    cards have links without a bridge."""
    failed = any(one.rule not in _OF_LISTINGS and one.severity != "warning" for one in log.matches)
    if match.rule not in _OF_LISTINGS or failed or log.tracebacks:
        return False
    if match.rule == "link_down_in_a_listing":
        return "<inactive>" in match.text and not any(map(_NVLINK_UP.search, log.tail))
    return any(map(_PORT_UP.search, log.tail))


def _is_lasting(match: RuleMatch, log: LogSummary) -> bool:
    """Bad numbers are skipped with a warning again and again, to the end of the log."""
    again = match.count >= AGAIN and log.lines - (match.last_line or match.line) < LAST_LINES
    return again and match.severity == "warning" and match.failure_class is FailureClass.LOSS_SPIKE_OR_NAN


def _is_of_teardown(one: LoggedTraceback, log: LogSummary) -> bool:
    """A helper of a library died after the work was completed: the traceback has no line of the user's code."""
    is_after = log.finished_line is not None and log.finished_line < one.line
    return is_after and bool(one.traceback.frames) and one.traceback.own_frame is None


def _end_of_work(log: LogSummary) -> int | None:
    """The line at which the work was complete: it says so, or its last step was made."""
    if log.finished_line is not None:
        return log.finished_line
    return log.progress_line if _is_complete(log) else None


def _is_after_the_work(seen: InLog[Statement]) -> bool:
    """What complains after the end of the work ended nothing, unless a launcher reports a bad end or code raised."""
    one, end = seen.one, _end_of_work(seen.log)
    if end is None or one.line <= end or seen.log.launcher:
        return False
    if one.role == "outcome" and seen.log.finished_line is None:
        return False
    return not (one.is_uncaught or one.rule == CRASH or one.failure_class in (FailureClass.DISK_FULL, *_OF_DEVICES))


def _is_stuck_at_the_end(seen: InLog[Statement]) -> bool:
    """A time-out after the work was completed, or somebody ended a program that did not end by itself."""
    one, end = seen.one, _end_of_work(seen.log)
    if end is None or one.line < end:
        return False
    if one.failure_class is FailureClass.NCCL_TIMEOUT:
        return seen.log.finished_line is not None
    asked = one.failure_class is FailureClass.PREEMPTED_OR_CANCELLED
    return asked and (
        (one.is_traceback and seen.log.finished_line is not None) or _quiet_before(one, seen.log) >= STUCK_S
    )


STUCK_S: Final = 120.0


def _quiet_before(one: Statement, log: LogSummary) -> float:
    """Seconds without a line before this one; 0 where the times are not known."""
    first = log.lines - len(log.tail) + 1
    at = moment(log.tail[one.line - first]) if one.line >= first else None
    before = (moment(text) for text in reversed(log.tail[: max(0, one.line - first)]))
    last = next((stamp for stamp in before if stamp is not None), None)
    return 0.0 if at is None or last is None else at - last


def _follows_an_end(match: RuleMatch, log: LogSummary) -> bool:
    """Slurm cancels a step without a reason when one of its tasks ended badly; it may tell of the task later."""
    ended = any(failure.line < match.line or failure.code in range(1, 128) for failure in log.launcher)
    return match.rule == "step_cancelled" and ended


# ----- all logs together -----

MAX_SURVIVED: Final = 5
_ByRank = dict[tuple[str, int | None], list[Statement]]


def describe(evidence: LogEvidence, rank_nodes: Mapping[int, str]) -> Accounts:
    """The accounts, findings and other readings of old logs."""
    logs = list(map(with_reported, aligned(evidence.logs)))
    by_rank = _statements_by_rank(logs)
    failures = [(log.source, failure) for log in logs for failure in log.launcher if _counts(failure, log)]
    reported = [one for log in logs if (one := _of_launcher(log)) is not None]
    survived = [one for said in by_rank.values() for one in said if one.survived]
    if not failures and not reported and all(one.benign or one.survived for said in by_rank.values() for one in said):
        survived = [one for said in by_rank.values() for one in said]
        by_rank = _last_words(logs, by_rank)
    told: list[Account] = []
    others: list[Candidate] = []
    for said in by_rank.values():
        weighed = weigh(one for one in said if not one.survived)
        if weighed:
            told.append(account_of_statement(*weighed[0], said))
            others += [_other(*one) for one in weighed[1:5]]
    killed = [one for log in logs for one in _killed_by_srun(log)]
    told = [*_with_ends(told, failures, killed), *_quitters(logs, told)]
    told = [_on_its_node(account, rank_nodes) for account in told or reported]
    findings, survived_findings = _findings(logs, bool(told))
    counting = distinct(findings)
    timed = [at for one in told for at in (one.evidence[0].at,) if at is not None and not one.is_cascade]
    places = frozenset(one.node for one in told if not one.is_cascade and one.node)
    return Accounts(
        accounts=tuple(sorted(_comparable(told), key=order)),
        findings=tuple(counting),
        shown=tuple(counting),
        others=tuple(others),
        places=places,
        well=frozenset(log.node for log in logs if log.kind in ("output", "mixed") and log.node) - places,
        failed_at=min(timed, default=None),
        hints=_hints(logs, survived, findings),
        survived=_surest([*map(_as_survived, survived), *map(_of_survived_finding, survived_findings)]),
    )


def _statements_by_rank(logs: Sequence[LogSummary]) -> _ByRank:
    """The statements of each rank, and of each log whose ranks are not known."""
    by_rank: _ByRank = {}
    for log in logs:
        if log.kind in ("output", "mixed"):
            for statement in log_statements(log):
                rank = statement.evidence.rank
                # A rank may write several files (its stdout and its stderr).
                by_rank.setdefault(("" if rank is not None else log.source, rank), []).append(statement)
    return by_rank


def _findings(logs: Sequence[LogSummary], failed: bool) -> tuple[list[Finding], list[Finding]]:
    """The findings that count, and those that training survived. `failed`: a rank or a launcher reports a failure."""
    each = [(one, log) for log in logs for one in log_findings(log)]
    found = [one for one, _ in each]
    # A broken device is reported even if the work was completed. A fault that recovered ended nothing.
    complete = _all_finished(logs)

    def counts(one: LogFinding) -> bool:
        if one.survived:
            return False
        return failed or not (one.doubtful or (complete and one.finding.failure_class not in OUTRANKS))

    here = [one.finding for one in found if counts(one)]
    survived = [one.finding for one in found if one.survived]
    survived += [one.finding for one in found if not one.survived and not counts(one)]
    if not failed and all(one.severity == "warning" for one in here):
        picked = bool(logs) and all(map(_is_picked_out, logs))
        still = [one.finding for one, log in each if _is_left_open(one, log)]
        here = [as_cause(one) or (_counting(one) if picked or one in still else one) for one in here]
    if failed or any(one.severity != "warning" for one in here):
        holds = current().factor["survived_finding"]
        here += [msgspec.structs.replace(one, confidence=one.confidence * holds) for one in survived]
        survived = []
    return here, survived


_OPEN: Final = frozenset({"lustre", "link_trouble", "too_hot"})
"""Warnings of the kernel that soon pass: they tell of a fault if the same log does not say that it passed."""


def _is_left_open(found: LogFinding, log: LogSummary) -> bool:
    return found.finding.rule in _OPEN and log.kind == "kernel" and not found.doubtful and not found.survived


_CORRECTED: Final = re.compile(r"\b(?:EDAC|MCE|AER|mce|pcieport|Hardware Error|PCIe Bus Error)\b")


def _is_picked_out(log: LogSummary) -> bool:
    """Nothing but messages of corrected errors: somebody picked them out because there was trouble."""
    said = [text for text in log.tail if text.strip()]
    return log.kind == "kernel" and log.lines == len(log.tail) and all(map(_CORRECTED.search, said))


def _counting(finding: Finding) -> Finding:
    confidence = current().confidence["corrected_and_picked_out"]
    return msgspec.structs.replace(finding, severity="error", confidence=confidence)


def _all_finished(logs: Sequence[LogSummary]) -> bool:
    """All ranks that wrote something completed their work."""
    ranks = [log for log in logs if log.kind in ("output", "mixed")]
    return bool(ranks) and all(is_finished(log, -1) for log in ranks)


def _hints(
    logs: Sequence[LogSummary], survived: Sequence[Statement], findings: Sequence[Finding]
) -> dict[FailureClass, float]:
    """The classes of everything in the logs that is not read as a failure, with their weights."""
    holds = current().factor["survived_statement"]
    said: list[RuleMatch | Statement | Finding] = [match for log in logs for match in log.matches]
    said += [*survived, *(one for one in findings if one.severity == "warning")]
    found: dict[FailureClass, float] = {}
    for one in said:
        found[one.failure_class] = max(found.get(one.failure_class, 0.0), one.confidence * holds)
    return found


def _last_words(logs: Sequence[LogSummary], by_rank: _ByRank) -> _ByRank:
    """Benign statements that end a log without a step and without completed work: they count after all."""
    most = current().confidence["last_of_a_log"]
    stuck = {log.source: log for log in logs if log.progress_line is None and log.finished_line is None and log.lines}
    found: _ByRank = {}
    for said_by, said in by_rank.items():
        last = [
            msgspec.structs.replace(one, confidence=min(one.confidence, most))
            for one in said
            if one.role == "cause" and _ends_with(stuck.get(one.evidence.source), one.last_line)
        ]
        if last:
            found[said_by] = last
    return found


def _ends_with(log: LogSummary | None, line: int) -> bool:
    """Whether this line is among the last of a log, and no line after it shows a program that goes on."""
    return log is not None and log.lines - line < NEAR_THE_END and not shows_life(lines_after(log, line))


# ----- accounts -----


def _of_launcher(log: LogSummary) -> Account | None:
    """A launcher's own traceback without its report shows only that some worker failed."""
    for one in log.tracebacks:
        raised = one.traceback.name
        if one.traceback.is_launchers and raised != "SignalException" and not goes_on(log, one.line, SURVIVED_LINES):
            return Account(
                rank=None,
                node=log.node,
                said_by="the launcher",
                failure_class=FailureClass.WORKER_CRASH,
                confidence=current().confidence["launcher_alone"],
                summary="says that a worker failed, and nothing tells how",
                evidence=(msgspec.structs.replace(place_of(one, log), text=one.traceback.line[:200]),),
            )
    return None


def _counts(failure: LauncherFailure, log: LogSummary) -> bool:
    lines = [*(one.line for one in log.matches), *(one.line for one in log.tracebacks)]
    return not (goes_on(log, failure.line, SURVIVED_BY_OTHERS_LINES) or _is_of_an_earlier_run(log, failure.line, lines))


def _on_its_node(account: Account, nodes: Mapping[int, str]) -> Account:
    if account.node or account.rank is None or account.rank not in nodes:
        return account
    return msgspec.structs.replace(account, node=nodes[account.rank])


def _comparable(accounts: list[Account]) -> list[Account]:
    """The accounts in one order: by time if all have one, by line if all are in one file, else without an order."""
    if all(one.evidence[0].at is not None for one in accounts):
        return [msgspec.structs.replace(one, when=one.evidence[0].at) for one in accounts]
    if len({one.evidence[0].source for one in accounts}) == 1:
        return [msgspec.structs.replace(one, when=float(one.evidence[0].line or 0)) for one in accounts]
    return [msgspec.structs.replace(one, when=0.0) for one in accounts]


def _surest(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda one: -one.confidence)[:MAX_SURVIVED])


def _other(statement: Statement, confidence: float) -> Candidate:
    """A reading of a statement that is not the strongest one of its rank."""
    holds = current().factor["not_the_most_telling"]
    return Candidate(
        failure_class=statement.failure_class,
        confidence=holds * weight(statement, confidence),
        why=f"{'a rank' if statement.of_rank else 'the log'} {statement.summary}",
        evidence=(statement.evidence,),
        fingerprint=statement.fingerprint,
    )


def _as_survived(statement: Statement) -> Candidate:
    return _other(statement, statement.confidence * current().factor["survived_statement"])


def _of_survived_finding(finding: Finding) -> Candidate:
    return Candidate(
        failure_class=finding.failure_class,
        confidence=finding.confidence * current().factor["survived_statement"],
        why=finding.evidence.text[:200],
        evidence=(finding.evidence,),
    )


def _with_ends(
    accounts: list[Account], failures: Sequence[tuple[str, LauncherFailure]], killed: Sequence[LauncherFailure]
) -> list[Account]:
    """The accounts, with the ends that launchers report, and accounts of ranks that wrote nothing."""
    known = {account.rank: index for index, account in enumerate(accounts) if account.rank is not None}
    nameless = [index for index, account in enumerate(accounts) if account.rank is None and not account.said_by]
    found = list(accounts)
    # An abort is most often a consequence of a peer's end. So is an exit code without a word.
    # Who is asked to end explains nobody's end.
    records = [_record(failure, 0) for _, failure in failures if failure not in killed]
    explained = bool(accounts) or any(not (one.by_itself or one.ended_by("SIGTERM")) for one in records)
    failures = sorted(failures, key=lambda one: (not one[1].is_root, one[1].line))
    if not any(one.failure_class is FailureClass.NCCL_TIMEOUT for one in accounts) or any(
        _record(one, 0).ended_by("SIGSEGV", "SIGBUS", "SIGKILL", "SIGILL", "SIGFPE") for _, one in failures
    ):  # who waited in vain is no culprit
        failures = [(source, _of_one_node(one, failures)) for source, one in failures]
    for number, (source, failure) in enumerate(failures):
        record = _record(failure, number)
        index = known.get(failure.rank) if failure.rank is not None else None
        if (
            index is None
            and nameless
            and record.by_itself
            and (failure.is_root or len(failures) == 1 or (number == 0 and bool(failure.host)))
        ):
            index = nameless.pop(0)  # the only log, and the only end
        if index is not None:
            found[index] = _with_end(found[index], failure, record)
        else:
            end = _by_end(failure, source, record, explained and not failure.is_root)
            found.append(msgspec.structs.replace(end, is_cascade=end.is_cascade or failure in killed))
    return found


def _killed_by_srun(log: LogSummary) -> list[LauncherFailure]:
    """Tasks that srun killed because another one had ended with a code: victims, and no cause."""
    told = [one for one in log.launcher if one.text.lstrip().startswith("srun: error") and not one.message]
    ends = [one.line for one in told if one.signal is None and one.code]
    since = min([*ends, *(one.line for one in log.matches if one.rule == "step_cancelled")], default=0)
    return [one for one in told if ends and one.line > since and one.signal == 9]


def _of_one_node(failure: LauncherFailure, failures: Sequence[tuple[str, LauncherFailure]]) -> LauncherFailure:
    """The only report there is, of a launcher that counts within its node: with one node that is the rank."""
    if len(failures) > 1 or failure.rank is not None or failure.local_rank is None or failure.host:
        return failure
    return msgspec.structs.replace(failure, rank=failure.local_rank)


def _quitters(logs: Sequence[LogSummary], accounts: Sequence[Account]) -> list[Account]:
    """Ranks whose logs end well while others fail."""
    spoke = {account.rank for account in accounts}
    found: list[Account] = []
    for log in logs:
        if log.rank is None or log.rank in spoke or log.finished_line is None or not accounts:
            continue
        record = ExitRecord(rank=log.rank, local_rank=-1, pid=0, code=0, signal=None, ended_at=0.0)
        said = Evidence(
            text=next((line for line in reversed(log.tail) if line.strip()), ""),
            source=log.source,
            line=log.finished_line,
            node=log.node,
            rank=log.rank,
            at=log.last_at,
        )
        found.append(msgspec.structs.replace(by_status(log.node, record), evidence=(said,)))
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
    """The account of a rank of which only the end is known."""
    account = by_status(failure.host, record)
    if failure.message == launchers.OUT_OF_MEMORY:
        account = msgspec.structs.replace(
            account,
            failure_class=FailureClass.HOST_OOM,
            confidence=current().confidence["launcher_names_memory"],
            summary="was killed for its memory",
        )
    if account.ended_by("SIGINT"):
        account = msgspec.structs.replace(
            account,
            failure_class=FailureClass.PREEMPTED_OR_CANCELLED,
            confidence=current().confidence["all_terminated"],
        )
    follows = record.by_itself and explained
    return msgspec.structs.replace(
        account,
        rank=failure.rank,
        is_cascade=account.is_cascade or account.ended_by("SIGTERM") or follows,
        evidence=(
            Evidence(
                text=failure.text, source=source, line=failure.line, rank=failure.rank, node=failure.host, at=failure.at
            ),
        ),
    )
