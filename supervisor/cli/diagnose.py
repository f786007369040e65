"""`unbroken diagnose`: what went wrong, from what is left of a job: logs, dumps, stacks, our own folders."""

from __future__ import annotations

import datetime
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import click
import msgspec

from diagnosis import flight, stacks
from diagnosis.flight import timings
from diagnosis.flight.dumps import RankDump
from diagnosis.incident import (
    Anomaly,
    ComparedLine,
    FlightReport,
    Incident,
    LogEvidence,
    LogSummary,
    RunComparison,
    Slowdown,
    Verdict,
    of_logs,
)
from diagnosis.logs import compare, digest, reader
from diagnosis.logs import curves as logs_curves
from diagnosis.logs.compare import GoodRun
from diagnosis.logs.reader import LogReader
from diagnosis.signals import Evidence, RankStack, clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.text import redact
from diagnosis.verdict.triage import conclude
from supervisor import config
from supervisor.cli.output import print_answer, warn
from supervisor.cli.render import SHOWN, diagnosis, rank_list
from supervisor.config import read_toml
from supervisor.diagnose import log_files
from supervisor.diagnose.read import Reading, ReadOptions, joined_book, read_all, settings
from supervisor.errors import ExitCode, UnbrokenError

SHOWN_PROBLEMS: Final = 20
ODD_STEPS: Final = 20
FAILED: Final = 0.6
SURELY_FAILED: Final = 0.9
"""A run that is said to be good and gets a verdict this sure is good only up to its last step: the first number counts
where it made steps, so that something is left of it."""
COMPARED_RUNS: Final = 3
COMPARED_BYTES: Final = 64 << 20
"""Earlier attempts are read as long as they are no larger than this together, or than what is diagnosed."""
COMPARED_AT_ONCE: Final = 8 << 20
"""`why` is to answer in a second: it compares an attempt that is no larger with earlier ones, no larger together."""
Attempt = tuple[int, list[log_files.Source]]
"""Its number and its files."""
SUCCEEDED: Final = 0.97
"""The confidence of `none` if the job's own journal says that the job succeeded."""


def read(stream: IO[bytes], name: str) -> Reading:
    """Read one log to its end; a damaged one as far as it goes."""
    log = LogReader(name, place=reader.place(name))
    for block in log_files.blocks(stream):
        log.feed(block)
    log.end()
    return Reading(logs=(log.summary(),))


# ----- one incident of everything -----


def incident_of(readings: Sequence[Reading]) -> tuple[Incident, list[str]]:
    """Everything that was read, as one incident, and what could not be read, in words."""
    logs = tuple(log for one in readings for log in one.logs)
    dumps = [dump for one in readings for dump in one.dumps]
    found_stacks = tuple(stack for one in readings for stack in one.stacks)
    problems = [one.problem for one in readings if one.problem]
    rank_nodes = {one.rank: one.node for one in logs if one.rank is not None and one.node}
    curves = [curve for log in logs for curve in _with_rank(log.curves, log.rank)]
    late = timings.slowdowns(timings.of_dumps(dumps), rank_nodes)
    report = _analysed(dumps, found_stacks, () if _timed_out(logs) else late, problems)
    ranks = {one.rank for one in logs if one.rank is not None} | {one.rank for one in dumps if one.rank is not None}
    evidence = LogEvidence(
        logs=logs,
        flight=report,
        stacks=found_stacks,
        slow=logs_curves.input_stalls(curves, late, found_stacks),
        anomalies=_anomalies(logs),
    )
    return of_logs(evidence, rank_nodes, max(ranks, default=-1) + 1), problems


def _anomalies(logs: Sequence[LogSummary]) -> tuple[Anomaly, ...]:
    """The anomalies in the curves of each file, the surest failure first."""
    found = [
        msgspec.structs.replace(
            odd,
            evidence=tuple(msgspec.structs.replace(one, source=log.source, node=log.node) for one in odd.evidence),
        )
        for log in logs
        for odd in logs_curves.anomalies(_with_rank(log.curves, log.rank))
    ]
    return tuple(sorted(found, key=lambda one: -one.confidence))


def _with_rank(curves: Sequence[Any], rank: int | None) -> Iterator[Any]:
    for curve in curves:
        yield msgspec.structs.replace(curve, rank=rank) if curve.rank is None and rank is not None else curve


def _timed_out(logs: Sequence[LogSummary]) -> bool:
    """A collective timed out: the others do not wait for a rank that has always been late."""
    return any(one.failure_class is FailureClass.NCCL_TIMEOUT for log in logs for one in log.matches)


def _analysed(
    dumps: list[RankDump], found_stacks: Sequence[RankStack], late: Sequence[Slowdown], problems: list[str]
) -> FlightReport | None:
    problems += [f"rank {dump.rank}: {problem}" for dump in dumps for problem in dump.problems]
    try:
        return flight.analyse(dumps, found_stacks, late)
    except (ValueError, MemoryError, RecursionError) as error:
        problems.append(f"flight recorder: {error}")
        return None


# ----- the answer -----


def answer(readings: Sequence[Reading], good: Sequence[GoodRun] = ()) -> dict[str, Any]:
    """The object that is printed (docs/protocol.md). `good`: what to compare with."""
    incident, problems = incident_of(readings)
    evidence = incident.logs or LogEvidence()
    judged = _compared(evidence, readings, good)
    verdict = conclude(msgspec.structs.replace(incident, logs=judged))
    return {
        "schema": 1,
        "verdict": _verdict(verdict),
        "alternatives": [
            {"failure_class": one.failure_class.value, "confidence": one.confidence} for one in verdict.alternatives
        ],
        "symptoms": [symptom.value for symptom in verdict.symptoms],
        "evidence": list(map(_evidence, verdict.evidence)),
        "kernel_events": _events(evidence),
        "kernel_events_left_out": sum(log.events_left_out for log in evidence.logs),
        "flight_recorder": _flight(evidence.flight, sum(len(one.dumps) for one in readings)),
        "stacks": _stacks(evidence.stacks),
        "progress": _progress_of(evidence),
        "slowness": [
            msgspec.to_builtins(one) | {"evidence": list(map(_evidence, one.evidence))} for one in evidence.slow
        ]
        or None,
        "numerics": [
            msgspec.to_builtins(one) | {"evidence": list(map(_evidence, one.evidence))} for one in evidence.anomalies
        ]
        or None,
        "files": len(readings),
        "lines": sum(log.lines for log in evidence.logs),
        "problems": problems[:SHOWN_PROBLEMS],
        **({"compared": _comparison(judged.compared)} if judged.compared is not None else {}),
    }


def _compared(evidence: LogEvidence, readings: Sequence[Reading], good: Sequence[GoodRun]) -> LogEvidence:
    """The evidence beside good runs, without what they complain of as well."""
    templates = joined_book(readings).templates()
    if not good or not templates:
        return evidence
    found, logs = compare.compare(evidence.logs, templates, good)
    return msgspec.structs.replace(evidence, logs=tuple(logs), compared=found)


def _comparison(found: RunComparison) -> dict[str, Any]:
    return {
        "beside": list(found.beside),
        "share": found.share,
        "new": list(map(_line_of_run, found.new)),
        "new_left_out": found.new_left_out,
        "missing": list(map(_line_of_run, found.missing)),
        "slower": list(found.slower),
        "odd_ranks": list(map(_line_of_run, found.odd)),
        "known": [redact(one) for one in found.known],
    }


def beside_good_runs(value: dict[str, Any]) -> list[str]:
    """How a failed run differs from good ones, in words; what is shown as evidence is left out."""
    found, shown = value.get("compared"), {one["text"].strip() for one in value["evidence"]}
    if found is None:
        return []

    def rows(what: str, lines: Sequence[dict[str, Any]]) -> list[str]:
        return [f"{what}: {_in_words(one)}" for one in lines if one["text"].strip() not in shown]

    return [
        f"beside {', '.join(found['beside'])} ({found['share']:.0%} of the lines are there as well):",
        *rows("new", found["new"]),
        *rows("missing", found["missing"]),
        *(f"slower: {one}" for one in found["slower"]),
        *rows("odd", found["odd_ranks"]),
        *(f"no cause, as good runs say it too: {one}" for one in found["known"]),
    ]


def _in_words(one: dict[str, Any]) -> str:
    """`train.log:118 (rank 3, 2 lines): text`."""
    line = f":{one['line']}" if one["line"] else ""
    about = ", ".join(filter(None, (rank_list(one["ranks"]) if one["ranks"] else "", one["why"])))
    return f"{one['source']}{line}{f' ({about})' if about else ''}: {one['text'].strip()}"


def _line_of_run(one: ComparedLine) -> dict[str, Any]:
    told = {"source": one.source, "line": one.line, "ranks": list(one.ranks), "why": one.why}
    return told | {"text": redact(one.text)}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "failure_class": verdict.failure_class.value,
        "kind": verdict.kind,
        "domain": verdict.domain,
        "culprits": [
            {key: one[key] for key in ("node", "gpu", "rank", "kind", "name") if one.get(key, "") != ""}
            for one in ({"rank": None} | msgspec.to_builtins(culprit) for culprit in verdict.culprits)
        ],
        "confidence": verdict.confidence,
        "why": redact(verdict.why),
        "action": verdict.action,
    }


def _evidence(one: Evidence) -> dict[str, Any]:
    text = redact(one.text)  # verdicts are pasted into tickets and chats
    found = {"source": one.source, "line": one.line, "rank": one.rank, "at": log_time(one.at), "text": text}
    return found | ({"node": one.node} if one.node else {})


def log_time(at: float | None) -> str | None:
    """RFC 3339 in UTC; whole seconds stay whole, as most logs have them."""
    if at is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds" if at % 1 else "seconds").replace("+00:00", "Z")


def _events(evidence: LogEvidence) -> list[dict[str, Any]]:
    """Events in the order of the files and lines; with several files each names its own."""
    several = len({log.source for log in evidence.logs}) > 1
    events = []
    for log in evidence.logs:
        for event in log.events:
            entry: dict[str, Any] = {"kind": event.kind, "code": event.code, "device": event.device or None}
            entry |= {"line": event.line, "failure_class": event.failure_class.value, "severity": event.severity}
            events.append(entry | ({"file": log.source} if several else {}))
    return events


def _flight(report: FlightReport | None, dumps: int) -> dict[str, Any] | None:
    if not dumps:
        return None
    if report is None:
        why = f"{dumps} dumps: no rank waits for another"
        return {"kind": None, "culprit_ranks": [], "process_group": "", "collective_seq": None, "why": why}
    return {
        "kind": report.kind,
        "culprit_ranks": list(report.culprit_ranks),
        "process_group": report.process_group,
        "collective_seq": report.collective_seq,
        "why": report.why,
        "confidence": report.confidence,
        "waiting_ranks": list(report.waiting_ranks),
        "evidence": list(map(_evidence, report.evidence)),
        "ranks_seen": report.ranks_seen,
        "problems": list(report.problems),
    }


def _stacks(found_stacks: Sequence[RankStack]) -> list[dict[str, Any]] | None:
    """Ranks that are at one place, the largest group first."""
    return [
        {
            "ranks": list(one.ranks),
            "activity": one.activity,
            "place": stacks.place(RankStack(rank=one.ranks[0], frames=one.frames)),
        }
        for one in stacks.group(found_stacks)
    ] or None


def _progress_of(evidence: LogEvidence) -> dict[str, Any] | None:
    """The newest step of most ranks, and the ranks with another."""
    steps = {one.rank: one.step for one in evidence.logs if one.rank is not None and one.step is not None}
    if not steps:
        known = [one.step for one in evidence.logs if one.step is not None]
        return {"step": max(known), "others": []} if known else None
    usual, _ = Counter(steps.values()).most_common(1)[0]
    others: dict[int, list[int]] = {}
    for rank, step in sorted(steps.items()):
        if step != usual:
            others.setdefault(step, []).append(rank)
    odd = [{"step": step, "ranks": ranks} for step, ranks in sorted(others.items())]
    return {"step": usual, "others": odd[:ODD_STEPS]}


# ----- the command -----


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; called with bytes that were read."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total or None)
        yield lambda size: bar.advance(task, size)


def _site(job_dir: Path | None) -> dict[str, Any]:
    """The site's rows over our tables, with those of the rules in the job folder that is read."""
    site_file, problem = config.load_site_or_default(config.load_here().settings.run.site_file)
    problems = [problem, config.use_rules(site_file, job_dir)]
    for one in filter(None, problems):
        warn(f"{one}")
    if job_dir is None or problems[1]:
        return site_file.tables
    rows = [*site_file.tables.get("rule", []), *read_toml(job_dir / "rules.toml").get("rule", [])]
    return {**site_file.tables, "rule": rows}


def _read_paths(paths: Sequence[str], quiet: bool, templates: bool) -> list[Reading]:
    found = log_files.find(paths)
    if not found.sources:
        raise UnbrokenError(
            f"{', '.join(paths)}: there is no log, flight recorder dump or stack file in it", ExitCode.NOT_FOUND
        )
    if found.left_out:
        warn(f"there are more than {log_files.MAX_FILES} files: {found.left_out} of them are not read")
    readings = _readings(found.sources, paths, quiet, templates)
    for source, reading in zip(found.sources, readings, strict=True):
        if reading.unreadable and source.path in paths:
            raise UnbrokenError(reading.problem, ExitCode.NOT_FOUND)
    return readings


def _readings(
    found: Sequence[log_files.Source], paths: Sequence[str], quiet: bool, templates: bool, more_bytes: int = 0
) -> list[Reading]:
    """The readings of the files, in order. `more_bytes`: of runs that they are compared with."""
    places = reader.places([one.path for one in found])
    job_dir = next((Path(path) for path in paths if Path(path, "rules.toml").is_file()), None)
    how: ReadOptions = settings(found, _site(job_dir), templates=templates, more_bytes=more_bytes)
    with _progress(sum(one.size for one in found), quiet) as note:
        return list(read_all(found, [places[one.path] for one in found], how, note))


def main(paths: Sequence[str], as_json: bool, good: Sequence[str] = ()) -> None:
    """The command. Raises UnbrokenError when a path that was named cannot be read."""
    found = diagnosed(paths, good, quiet=as_json)
    print_answer(found, as_json, _show)


def diagnosed(paths: Sequence[str], good: Sequence[str] = (), *, quiet: bool) -> dict[str, Any]:
    """The answer as JSON types. `quiet`: no progress is shown. Raises UnbrokenError as `main`."""
    earlier = [] if good else _earlier(paths)
    readings = _read_or_end(paths, quiet, bool(good or earlier))
    found = answer(readings, _good_runs(good, earlier, paths, quiet))
    return _succeeded(paths, found) or found


def _show(value: dict[str, Any]) -> None:
    diagnosis(value)
    show_beside(value)


def show_beside(value: dict[str, Any] | None) -> None:
    """How it differs from good runs, if there are any."""
    lines = beside_good_runs(value) if value is not None else []
    for number, line in enumerate(lines):
        click.echo(f"  {clean_line(line, SHOWN)}" if number else clean_line(line, SHOWN))


def _succeeded(paths: Sequence[str], found: dict[str, Any]) -> dict[str, Any] | None:
    """The answer for one job folder whose journal says that the run has succeeded: whatever was found is over."""
    folder = Path(paths[0])
    if len(paths) != 1 or not any(folder.glob("journal.*.jsonl")):
        return None
    from supervisor.controller.report import fold

    try:
        job = fold(folder).job
    except OSError:
        return None
    if job.outcome is None or job.outcome.state != "succeeded":
        return None
    incidents, verdict = job.view().incidents_total, found["verdict"]
    why = f"the job has succeeded: {job.outcome.line}"
    if incidents and verdict["failure_class"] != "none":
        why += f" (it recovered from {verdict['failure_class']}: {verdict['why']}; all of it: unbroken incidents)"
    none = Verdict(failure_class=FailureClass.NONE, culprits=(), confidence=SUCCEEDED, why=why, action="none")
    evidence = found["evidence"] if incidents else []
    return found | {"verdict": _verdict(none), "alternatives": [], "symptoms": [], "evidence": evidence}


def main_digest(paths: Sequence[str], limit_bytes: int, good: Sequence[str]) -> None:
    """The command with `--digest`; `good`: logs of runs that went well."""
    readings = _read_or_end(paths, False, True)
    incident, _ = incident_of(readings)
    runs = _good_runs(good, [] if good else _earlier(paths), paths, False)
    built = digest.build(incident.logs or LogEvidence(), conclude(incident), joined_book(readings), runs)
    click.echo(digest.render(built, limit_bytes), nl=False)


def _earlier(paths: Sequence[str]) -> list[Attempt]:
    """The attempts before the newest in the folders, as many as are read in about its time."""
    found = log_files.attempts(paths)
    attempt = max((number for number, _ in found), default=0)
    return _before(
        attempt, found, max(COMPARED_BYTES, *(_size(files) for number, files in found if number == attempt), 0)
    )


def _before(attempt: int, found: Sequence[Attempt], room: int) -> list[Attempt]:
    """The newest attempts before this one, with so many bytes together."""
    kept = []
    for number, files in [one for one in found if one[0] < attempt][:COMPARED_RUNS]:
        room -= _size(files)
        if room < 0:
            break
        kept.append((number, files))
    return kept


def _size(files: Sequence[log_files.Source]) -> int:
    return sum(one.size for one in files)


def of_attempt(folder: str, attempt: int) -> dict[str, Any] | None:
    """The answer for one attempt of a job beside those before it; None: there are none, or it is too large to read."""
    found = log_files.attempts([folder])
    files, earlier = dict(found).get(attempt, []), _before(attempt, found, COMPARED_AT_ONCE)
    if not files or not earlier or _size(files) > COMPARED_AT_ONCE:
        return None
    more = sum(_size(one) for _, one in earlier)
    told = answer(_readings(files, [folder], True, True, more), _good_runs((), earlier, [folder], True))
    return told if "compared" in told else None


def _good_runs(good: Sequence[str], earlier: Sequence[Attempt], paths: Sequence[str], quiet: bool) -> list[GoodRun]:
    """The runs to compare with: those that were named, each path one of them; else earlier attempts that made steps.

    An earlier attempt went well until its last step: lines that appear only after that do not count.
    """
    runs = []
    for path in _newest(good):
        readings = _read_or_end([path], quiet, True)
        verdict = conclude(incident_of(readings)[0])
        logs = [log for one in readings for log in one.logs]
        limit = FAILED if any(log.progress_line is not None for log in logs) else SURELY_FAILED
        failed = TAXONOMY[verdict.failure_class].kind == "cause" and verdict.confidence >= limit
        if failed:
            warn(
                f"{path} is said to be good, and tells of {verdict.failure_class.value} itself: what it says after its "
                "last step is not taken for good"
            )
        runs.append(_good_run(path, logs, readings, failed))
    compared = sum(_size(found) for _, found in earlier)
    for number, found in earlier:
        readings = _readings(found, paths, True, True, compared)
        logs = [log for one in readings for log in one.logs]
        if any(log.progress_line is not None for log in logs):
            runs.append(_good_run(f"attempt {number}", logs, readings, True))
    return runs


def _good_run(name: str, logs: Sequence[LogSummary], readings: Sequence[Reading], failed: bool) -> GoodRun:
    return compare.good_run(name, logs, joined_book(readings).templates(), until_progress=failed)


def _newest(good: Sequence[str]) -> Sequence[str]:
    """The newest of the runs that were named. A path that cannot be read is told when it is read."""
    if len(good) <= COMPARED_RUNS:
        return good
    warn(f"of {len(good)} good runs the newest {COMPARED_RUNS} are compared with")
    return sorted(good, key=lambda path: os.path.getmtime(path) if os.path.exists(path) else 0.0)[-COMPARED_RUNS:]


def _read_or_end(paths: Sequence[str], quiet: bool, templates: bool) -> list[Reading]:
    try:
        return _read_paths(paths, quiet, templates)
    except OSError as error:
        name = log_files.Source(str(error.filename or ", ".join(paths))).name
        raise UnbrokenError(f"{name}: {error.strerror or error}", ExitCode.NOT_FOUND) from None
    except KeyboardInterrupt:
        raise UnbrokenError("interrupted: there is no verdict", ExitCode.INTERRUPTED) from None
