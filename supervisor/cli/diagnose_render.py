"""What `unbroken diagnose` found, for people: the verdict first, then what it rests on, then everything else."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, Final

import click

from diagnosis.signals import clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass

MAX_EVENTS: Final = 100
SHOWN: Final = 2000
"""Characters of a line."""
MIN_SHOWN: Final = 0.01
_ACTIONS: Final = {
    "none": "nothing",
    "restart": "restart",
    "restart_excluding": "restart without the node",
    "rollback_and_restart": "go back to an earlier checkpoint and restart",
    "cordon_gpu_and_restart": "cordon the GPU and restart",
    "cordon_node_and_restart": "cordon the node and restart",
    "wait_and_retry": "wait, then try again",
    "stop": "stop: a restart would fail the same way",
    "hold": "hold until somebody has looked",
    "requeue": "requeue the job",
}


def show(value: dict[str, Any]) -> None:
    """The object of `diagnose --json`, in words."""
    verdict = value["verdict"]
    headline = f"{verdict['failure_class']} ({verdict['confidence']:.0%}): {verdict['why']}"
    click.echo(click.style(clean_line(headline, SHOWN), bold=True))
    for culprit in verdict["culprits"]:
        _field("culprit", culprit_text(culprit))
    remedy = TAXONOMY[FailureClass(verdict["failure_class"])].remedy
    if verdict["action"] != "none":
        words = _ACTIONS.get(verdict["action"], verdict["action"])
        action = words if words == verdict["action"] else f"{words} ({verdict['action']})"
        _field("do", f"{action}; as a rule: {remedy}")
    for one in [one for one in value["alternatives"] if one["confidence"] >= MIN_SHOWN]:
        _field("or", f"{one['failure_class']} ({one['confidence']:.0%})")
    if value["symptoms"]:
        _field("symptoms", ", ".join(value["symptoms"]))
    _list("evidence", map(evidence_text, value["evidence"]))
    _events(value["kernel_events"], value["kernel_events_left_out"])
    _flight(value["flight_recorder"], {one["text"] for one in value["evidence"]})
    _steps(value["progress"])
    _list("where ranks are", (f"{ranks(one['ranks'])}: {one['place']}" for one in value["stacks"] or ()))
    _list("slow", (one["why"] for one in value["slowness"] or ()))
    _list("numbers", (one["why"] for one in value["numerics"] or ()))
    _list("not read", value["problems"])
    lines, files = value["lines"], value["files"]
    click.echo(f"({lines} line{'s' * (lines != 1)} of {files} file{'s' * (files != 1)})")


def culprit_text(culprit: dict[str, Any]) -> str:
    """`node n7, GPU 0000:c1:00, rank 57`."""
    names = (("node", "node"), ("gpu", "GPU"), ("rank", "rank"))
    return ", ".join(f"{name} {culprit[key]}" for key, name in names if culprit.get(key) not in (None, ""))


def evidence_text(one: dict[str, Any]) -> str:
    """`file:118 rank 57 at 12:00:01: text`."""
    where = f"{one['source']}:{one['line']}" if one["line"] else one["source"]
    rank = f" rank {one['rank']}" if one["rank"] is not None else ""
    at = f" {one['at']}" if one.get("at") else ""
    return f"{where}{rank}{at}: {one['text']}"


def ranks(numbers: Iterable[int]) -> str:
    """`ranks 0-6, 9`."""
    found = sorted(numbers)
    spans: list[list[int]] = []
    for number in found:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans[:12])
    return f"rank{'s' if len(found) > 1 else ''} {text}{', ...' if len(spans) > 12 else ''}"


def rfc3339(at: float | None) -> str | None:
    """Of Unix seconds, in UTC."""
    if at is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds" if at % 1 else "seconds").replace("+00:00", "Z")


def _field(name: str, text: str) -> None:
    click.echo(f"  {name:9} {clean_line(text, SHOWN)}")


def _list(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        click.echo(f"{title}:")
    for line in lines:
        click.echo(f"  {clean_line(line, SHOWN)}")


def _events(events: list[dict[str, Any]], left_out: int) -> None:
    if not events:
        return
    told = len(events) + left_out
    click.echo(f"{told} kernel event{'s' * (told != 1)}:")
    for one in events[:MAX_EVENTS]:
        where = f"{one['file']}:{one['line']}" if "file" in one else f"line {one['line']}"
        code = f" {one['code']}" if one["code"] is not None else ""
        click.echo(f"  {where}: {one['kind']}{code} {one['device'] or ''}".rstrip())
    if len(events) > MAX_EVENTS:
        click.echo(f"  and {len(events) - MAX_EVENTS} more (--json has them)")


def _steps(progress: dict[str, Any] | None) -> None:
    if progress is None:
        return
    others = "; ".join(f"{ranks(one['ranks'])} at {one['step']}" for one in progress["others"])
    click.echo(f"newest step: {progress['step']}" + (f"; {others}" if others else ""))


def _flight(report: dict[str, Any] | None, told: set[str]) -> None:
    if report is None:
        return
    if report["kind"] is None:
        click.echo(f"flight recorder: {report['why']}")
        return
    seq = f" {report['collective_seq']}" if report["collective_seq"] is not None else ""
    who = ranks(report["culprit_ranks"]) if report["culprit_ranks"] else "nobody to name"
    click.echo(f"flight recorder: {report['kind']}, {who}, collective{seq} of {report['process_group']}")
    if not told:
        click.echo(f"  {clean_line(report['why'], SHOWN)}")
    for one in report["evidence"]:
        if one["text"] not in told:
            click.echo(f"  {clean_line(one['text'], SHOWN)}")
