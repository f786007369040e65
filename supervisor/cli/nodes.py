"""`unbroken nodes`, and `cordon` and `uncordon` for all jobs: they read and write the ledger, and need no job."""

from __future__ import annotations

import datetime
import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from diagnosis.signals import clean_line
from recovery.cordon import REASON_LIMIT
from recovery.ledger import (
    NAME_LIMIT,
    CordonLifted,
    LedgerEntry,
    LedgerRecord,
    NodeCordoned,
    NodeFailed,
    NodeRecord,
    TestResult,
    duration_s,
    merge,
)
from recovery.ledger_folder import LedgerFolder
from supervisor import config
from supervisor.cli.output import operator_name, print_answer, warn
from supervisor.errors import ConfigError, ExitCode, UnbrokenError
from supervisor.view import rfc3339, utc

DEADLINE_S = 20.0
NO_LEDGER = (
    "there is no ledger: name its folder, which all jobs of the cluster share, in `ledger.folder` of the configuration "
    "(UNBROKEN_LEDGER); `unbroken docs ledger`"
)
RESULTS_KEPT = 20_000
"""Of one test of many nodes."""
QUARANTINE = re.compile(r"(\d{1,4})h")
T = TypeVar("T")


# ----- the folder -----


def open_ledger() -> LedgerFolder:
    """Raises ConfigError where none is configured."""
    folder = config.load_here().settings.ledger.folder
    if not folder:
        raise ConfigError(NO_LEDGER)
    return LedgerFolder(config.working_folder() / folder)


def answered(work: Callable[[], T], folder: Path, what: str = "the ledger") -> T:
    """What `work` returns; a file system that hangs costs the deadline. Raises UnbrokenError."""
    import asyncio  # the other commands start without it

    from supervisor.blocking import BlockingCalls

    try:
        return asyncio.run(BlockingCalls("ledger").run(work, DEADLINE_S))
    except asyncio.TimeoutError:
        raise UnbrokenError(f"{what} in {folder} does not answer within {DEADLINE_S:.0f} s") from None
    except OSError as error:
        raise UnbrokenError(f"{what} in {folder}: {error.strerror or error}") from None


def records(ledger: LedgerFolder, now: float) -> dict[str, NodeRecord]:
    """Of every node; what cannot be read is said on stderr."""
    read = answered(lambda: ledger.read(now), ledger.folder)
    for problem in read.problems:
        warn(f"the ledger: {problem}")
    return merge(read.entries, now)


def add(ledger: LedgerFolder, what: LedgerRecord, now: float, by: str) -> None:
    answered(lambda: ledger.append([ledger.entry(what, now, by=by)], now), ledger.folder)


def keep_results(results: Sequence[TestResult]) -> None:
    """Results of active tests become part of each node's history, where there is a ledger; a problem is only said."""
    try:
        ledger = open_ledger() if config.load_here().settings.ledger.folder else None
        if ledger is not None and results:
            by, now = operator_name(), time.time()
            entries = [ledger.entry(one, one.at, by=by) for one in results[:RESULTS_KEPT]]
            answered(lambda: ledger.append(entries, now), ledger.folder)
    except UnbrokenError as error:
        warn(f"{error}. The results are not kept")


# ----- unbroken nodes -----


@click.command()
@click.argument("node", default="")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def nodes(node: str, as_json: bool) -> None:
    """List the nodes of the cluster, as all jobs know them.

    State, score, and why; with NODE all that is known of it. Needs the ledger of all jobs (`ledger.folder`), and no
    job. A node that fails again and again is shown as a lemon: nothing is done about it by itself.
    """
    print_answer(ledger_answer(node), as_json, _show_node if node else _show_all)


def ledger_answer(node: str = "") -> dict[str, Any]:
    """What the ledger knows of all nodes, or all that it knows of one. Raises UnbrokenError."""
    ledger, now = open_ledger(), time.time()
    known = records(ledger, now)
    if node and node not in known:
        raise UnbrokenError(f"the ledger in {ledger.folder} does not know {node}", ExitCode.UNKNOWN_NODE)
    shown = [known[node]] if node else sorted(known.values(), key=_first)
    return {
        "schema": 1,
        "now": rfc3339(utc(now)),
        "nodes": [_node(one, whole=bool(node)) for one in shown],
    }


def _first(record: NodeRecord) -> tuple[bool, bool, float, str]:
    return (not record.cordons, record.probation_until is None, -record.score.points, record.node)


def _node(record: NodeRecord, *, whole: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "node": record.node,
        "state": record.state,
        "score": record.score.points,
        "lemon": record.score.lemon,
        "outages": record.score.outages,
        "why": list(record.score.why),
        "cordons": [_cordon(one) for one in record.cordons],
        "proposals": [_cordon(one) for one in record.proposals],
        "probation_until": _at(record.probation_until),
        "retest_due": record.retest_due,
        "tests": _tests(record),
    }
    return {**answer, "history": [_event(one) for one in record.events]} if whole else answer


def _tests(record: NodeRecord) -> dict[str, Any]:
    """The newest verdict of each active test, of all devices the worst; when the newest was made."""
    newest: dict[tuple[str, str], TestResult] = {}
    for entry in record.events:
        if isinstance(entry.what, TestResult):
            newest[entry.what.test, entry.what.gpu] = entry.what
    found = {verdict: sorted({one.test for one in newest.values() if one.verdict == verdict}) for verdict in VERDICTS}
    return {**found, "at": _at(max((one.at for one in newest.values()), default=None))}


VERDICTS = ("fail", "unknown", "pass")


def _tested(tests: dict[str, Any]) -> str:
    if tests["at"] is None:
        return ""
    from supervisor.cli import render

    failed = f"failed: {', '.join(tests['fail'][:4])}" if tests["fail"] else f"{len(tests['pass'])} passed"
    return f"{failed} ({render.clock(tests['at'])[:10]})"


def _at(at: float | None) -> str | None:
    return None if at is None else rfc3339(utc(at))


def _cordon(entry: LedgerEntry) -> dict[str, Any]:
    what = entry.what
    assert isinstance(what, NodeCordoned)
    return {
        "at": _at(entry.at),
        "by": entry.by,
        "job": entry.job,
        "gpu": what.gpu,
        "failure_class": what.failure_class,
        "incident": what.incident,
        "reason": what.reason,
        "evidence": list(what.evidence),
        "until": _at(what.until),
    }


def _event(entry: LedgerEntry) -> dict[str, Any]:
    what = entry.what
    kind, text = type(what).__struct_config__.tag, ""
    if isinstance(what, NodeCordoned):
        kind = {"job": "left_out", "proposal": "proposed", "cluster": "cordoned"}[what.scope]
        text = what.reason
    elif isinstance(what, CordonLifted):
        kind, text = ("repaired", what.repair) if what.repair else ("taken_back", "")
    elif isinstance(what, NodeFailed):
        text = f"{what.failure_class}: {what.reason}" if what.reason else what.failure_class
    elif isinstance(what, TestResult):
        value = "" if what.value is None else f" {what.value:g} {what.unit}".rstrip()
        text = f"{what.test} {what.verdict}{value}" + (f": {what.reason}" if what.reason else "")
    incident = getattr(what, "incident", "")
    return {
        "at": _at(entry.at),
        "kind": kind,
        "by": entry.by,
        "job": entry.job,
        "incident": incident,
        "gpu": getattr(what, "gpu", ""),
        "text": text,
    }


def _show_all(answer: dict[str, Any]) -> None:
    from supervisor.cli import render

    found = answer["nodes"]
    if not found:
        click.echo("the ledger knows no node yet: jobs write down the nodes that they use")
        return
    counts = Counter(one["state"].lower() for one in found)
    counts["lemon"] = sum(one["lemon"] for one in found)
    said = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if count)
    cells = (
        (one["node"], one["state"], f"{one['score']:g}", _tested(one["tests"]), "; ".join(_why(one))) for one in found
    )
    render.rows(
        ("node", "state", "score", "tests", "why"), cells, below=f"{len(found)} node{'s' * (len(found) != 1)}: {said}"
    )


def _show_node(answer: dict[str, Any]) -> None:
    from supervisor.cli import render

    (one,) = answer["nodes"]
    cells = (
        (
            render.clock(event["at"])[:19],
            event["kind"].replace("_", " "),
            *(event[name] for name in ("by", "job", "incident", "gpu", "text")),
        )
        for event in one["history"]
    )
    head = "\n  ".join([f"{one['node']}  {one['state']}  score {one['score']:g}", *_why(one)])
    render.rows(("time", "what", "by", "job", "incident", "gpu", "why"), cells, above=head)


def _why(one: dict[str, Any]) -> list[str]:
    from supervisor.cli import render

    said = [f"cordoned by {held['by']}{_until(held['until'])}: {held['reason']}" for held in one["cordons"]]
    said += [f"a cordon is proposed by {held['by']}: {held['reason']}" for held in one["proposals"]]
    if one["probation_until"] is not None:
        said.append(f"repaired: on probation until {render.clock(one['probation_until'])[:16]}")
    said += ["to be tested again"] if one["retest_due"] else []
    said += ["LEMON: it fails again and again"] if one["lemon"] else []
    return [*said, *one["why"]]


def _until(at: str | None) -> str:
    from supervisor.cli import render

    return f" until {render.clock(at)[:16]}" if at is not None else ""


# ----- cordons for all jobs -----


def cordon_for_all(
    place: str, until: str, quarantine: str, *, reason: str, by: str, dry_run: bool, as_json: bool
) -> NoReturn:
    """`unbroken cordon NODE --cluster`."""
    ledger, now = open_ledger(), time.time()
    node, _, gpu = place.partition("/")
    if not node or any(name != clean_line(name, NAME_LIMIT).strip() for name in (node, gpu)):
        raise click.UsageError("NODE is no name of a node")  # no reader would know whom it means
    end = _end(until, now)
    hours = QUARANTINE.fullmatch(quarantine)
    if quarantine and hours is None:
        raise click.UsageError("--quarantine takes hours, for example 4h")
    known = records(ledger, now)
    what = NodeCordoned(
        node=node,
        gpu=gpu,
        scope="cluster",
        reason=clean_line(reason, REASON_LIMIT) or "an operator's command",
        until=end,
        fleet=len(known),
    )
    ends = "" if end is None else f" until {utc(end):%Y-%m-%d %H:%M} UTC"
    shown = f"{node} is cordoned for all jobs of the cluster{ends}"
    notes = [shown if not dry_run else f"would do: {shown}"]
    if node not in known:
        notes.append(f"no job has used {node} so far: is that its name?")
    if not dry_run:
        add(ledger, what, now, by)
        if hours is not None:
            notes.append(reserve(node, float(hours[1]) * 3600.0))
    _end_with(notes, as_json, ExitCode.DONE if node in known else ExitCode.UNKNOWN_NODE)


def uncordon_for_all(place: str, *, reason: str, by: str, dry_run: bool, as_json: bool) -> NoReturn:
    """`unbroken uncordon NODE --cluster`: the reason says what was repaired."""
    ledger, now = open_ledger(), time.time()
    node, _, gpu = place.partition("/")
    record = records(ledger, now).get(node)
    held = [] if record is None else [*record.cordons, *record.proposals]
    if gpu:
        held = [one for one in held if isinstance(one.what, NodeCordoned) and one.what.gpu == gpu]
    if not held:
        _end_with([f"{place} is not cordoned for the cluster: nothing was done"], as_json, ExitCode.NOT_DONE)
    repair = clean_line(reason, REASON_LIMIT)
    shown = f"{len(held)} cordon{'s' * (len(held) > 1)} of {place} lifted for all jobs" + (
        "; it is on probation for 7 days" if repair else "; without --reason it counts as no repair"
    )
    notes = [shown if not dry_run else f"would do: {shown}"]
    if not dry_run:
        add(ledger, CordonLifted(node=node, lifts=tuple(one.id for one in held), repair=repair), now, by)
        notes.append(release(node))
    _end_with([one for one in notes if one], as_json, ExitCode.DONE)


def _end(until: str, now: float) -> float | None:
    """`12h`, `3d`, or a time like `2026-11-25T08:00` (of this machine's zone, where it names none)."""
    if not until:
        return None
    seconds = duration_s(until)
    if seconds is not None:
        return now + seconds
    try:
        end = datetime.datetime.fromisoformat(until.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        raise click.UsageError(
            f"--until {until}: give a time (2026-11-25T08:00) or a duration (90m, 12h, 3d)"
        ) from None
    if end <= now:
        raise click.UsageError(f"--until {until} is over")
    return end


def _end_with(notes: list[str], as_json: bool, code: ExitCode) -> NoReturn:
    answer = {"schema": 1, "ok": code != ExitCode.NOT_DONE, "notes": notes}
    print_answer(answer, as_json, lambda _: click.echo("\n".join(notes)))
    raise SystemExit(code)


# ----- quarantine in a reservation of Slurm -----


def reserve(node: str, seconds: float) -> str:
    """What became of it, in words."""
    import asyncio

    from recovery.schedulers import Slurm

    answer = asyncio.run(Slurm().reserve(node, seconds))
    return f"quarantine: {answer.text or answer.outcome}"


def release(node: str) -> str:
    """What became of it; empty where there was no quarantine, or no Slurm."""
    import asyncio

    from recovery.schedulers import Slurm

    answer = asyncio.run(Slurm().release(node))
    return "" if answer.outcome in ("already", "unsupported") else f"quarantine: {answer.text or answer.outcome}"


# ----- as options of `cordon` and `uncordon` -----


def for_all_jobs(work: Callable[..., NoReturn], *, ends: bool) -> Callable[..., Any]:
    """A decorator: with `--cluster` the command is about all jobs, and `work` does it. `ends`: it may have an end."""
    options = [
        click.option("--cluster", is_flag=True, help="For all jobs, in the ledger (`ledger.folder`); needs no job.")
    ]
    if ends:
        options += [
            click.option("--until", default="", metavar="TIME", help="With --cluster: when it ends (12h, 3d, a time)."),
            click.option(
                "--quarantine",
                default="",
                metavar="HOURS",
                help="With --cluster: Slurm keeps NODE in a reservation for so long (4h), where you may run tests.",
            ),
        ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def chosen(node: str, cluster: bool, **others: Any) -> None:
            given = [others.pop("until"), others.pop("quarantine")] if ends else []
            if not cluster:
                if any(given):
                    raise click.UsageError("--until and --quarantine go with --cluster")
                command(node=node, **others)
                return
            given_on = {name: others[name] for name in ("reason", "dry_run", "as_json")}
            work(node, *given, by=operator_name(), **given_on)

        return functools.reduce(lambda function, option: option(function), reversed(options), chosen)

    return decorate
