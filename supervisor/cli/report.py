"""`unbroken report`: what some jobs did with their time, as one file to hand on: HTML, Markdown or JSON."""

from __future__ import annotations

import contextlib
import datetime
import html
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from supervisor.cli.advise import advice_from_journal
from supervisor.cli.job_commands import (
    JobHandle,
    curve_from_journal,
    incidents_from_journal,
    status_from_journal,
)
from supervisor.cli.output import print_answer
from supervisor.errors import JobNotFound, UnbrokenError

DAY_S = 86_400.0
RATED_S = 1800.0
"""Time of nodes in training; less tells no rate of failures."""
SHORT = 24
"""Letters of a cell that is not broken into lines."""
TRAINING, STARTING, LOST = "training", "until the first step", "lost: "


@click.command()
@click.argument("job_names", metavar="[JOB]...", nargs=-1)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="FILE.html, .md or .json.")
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/protocol.md.")
def report(job_names: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Say what jobs did with their time: ETTR, incidents, failure rate, advice.

    JOB: job folders (their names will do); the newest job here if none is given. Without -o: Markdown.
    """
    form = output.suffix if output is not None else ".json" if as_json else ".md"
    if form not in FORMS:
        raise click.UsageError(f"{output}: the name must end with {', '.join(FORMS)}")
    answer = summary([_figures(JobHandle(name, "", "")) for name in job_names or ("",)])
    if output is None:
        print_answer(answer, as_json, lambda found: click.echo(markdown(found), nl=False))
        return
    try:
        output.write_text(FORMS[form](answer))
    except OSError as error:
        raise UnbrokenError(f"{output} cannot be written: {error.strerror}") from None
    click.echo(str(output))


def _figures(job: JobHandle) -> dict[str, Any]:
    return {
        "status": job.read("/v1/status", status_from_journal),
        "incidents": job.read("/v1/incidents", incidents_from_journal)["incidents"],
        "advice": job.read("/v1/advice", advice_from_journal),
        "curve": _curve(job),
    }


def _curve(job: JobHandle) -> dict[str, Any]:
    """From the journal where it can be read: a controller of an older version knows no curve."""
    if job.folder is not None:
        with contextlib.suppress(JobNotFound):
            return job.by_journal(curve_from_journal)
    return job.read("/v1/curve", curve_from_journal)


# ----- the figures -----


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One job or many. Times of all jobs are added up by rank, so that a large job counts for what it costs."""
    jobs = [_job(**one) for one in found]
    hours: dict[str, float] = defaultdict(float)
    for job in jobs:
        for name, share in job["shares"].items():
            hours[name] += share * job["gpu_hours"]
    failures = sum(job["failures"] for job in jobs)
    node_days = sum(job["node_days"] for job in jobs)
    gpu_hours = sum(job["gpu_hours"] for job in jobs)
    return {
        "schema": 1,
        "jobs": jobs,
        "gpu_hours": gpu_hours,
        "on_gpus": all(job["on_gpus"] for job in jobs),
        "ettr": hours[TRAINING] / gpu_hours if gpu_hours else None,
        "shares": {name: hours[name] / gpu_hours for name in sorted(hours, key=lambda name: -hours[name])}
        if gpu_hours
        else {},
        "failures": failures,
        "node_days": node_days,
        "rate": _rate(failures, node_days),
        "classes": _classes([one for job in jobs for one in job["incidents"]]),
    }


def _job(
    status: dict[str, Any], incidents: list[dict[str, Any]], advice: dict[str, Any], curve: dict[str, Any]
) -> dict[str, Any]:
    seen = advice["measured"]
    wall_s = _seconds(status["started_at"], status["ended_at"] or status["now"])
    lost: dict[str, float] = defaultdict(float)
    ettr = status["ettr"] or 0.0
    listed_s, left_out = sum(one["lost_s"] for one in incidents), status["incidents_total"] - len(incidents)
    lost_s = min(status["lost_s"], (1.0 - ettr) * wall_s)  # time that two incidents have in common counts once in it
    for one in incidents:
        lost[LOST + _class(one)] += one["lost_s"] * min(1.0, lost_s / listed_s) / wall_s if wall_s and listed_s else 0.0
    if left_out and wall_s:
        lost[LOST + "older incidents"] = max(0.0, lost_s - listed_s) / wall_s
    starting = max(0.0, 1.0 - ettr - sum(lost.values()))
    fields = ("name", "state", "step", "last_step", "started_at", "ended_at", "restarts", "lost_s", "ettr")
    return {field: status[field] for field in fields} | {
        "nodes": seen["nodes"],
        "gpus": seen["gpus"],
        "on_gpus": seen.get("on_gpus", False),
        "wall_s": wall_s,
        "gpu_hours": seen["gpus"] * wall_s / 3600.0,
        "node_days": seen["nodes"] * seen["trained_s"] / DAY_S,
        "failures": sum(seen["failures"].values()),
        "shares": {TRAINING: ettr, STARTING: starting, **lost},
        "incidents": [{"job": status["name"], **one} for one in incidents],
        "left_out": left_out,
        "advice": {key: advice[key] for key in ("advice", "figures", "lacks", "enough", "matters")},
        "curve": curve["points"],
    }


def _rate(failures: int, node_days: float) -> dict[str, float] | None:
    """Failures in 1,000 node-days, with the range that holds the true rate in 90 % of all cases. None: too short a time
    to say.
    """
    from recovery.cadence import observed_rate

    if node_days * DAY_S < RATED_S:
        return None
    rate = observed_rate(failures, node_days)
    return {name: 1000.0 * getattr(rate, name) for name in ("likely", "low", "high")}


def _classes(incidents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in incidents:
        found.setdefault(_class(one), []).append(one)
    rows = []
    for name, ones in found.items():
        down = [sum(one["seconds"].values()) for one in ones if one["next_attempt"] is not None]
        lost_s = sum(one["lost_s"] for one in ones)
        middle = statistics.median(down) if down else None
        rows.append({"class": name, "count": len(ones), "lost_s": lost_s, "median_down_s": middle})
    return sorted(rows, key=lambda row: -row["lost_s"])


def _class(incident: dict[str, Any]) -> str:
    return str(incident["verdict"]["failure_class"]) if incident["verdict"] else "not classified"


def _seconds(start: str | None, end: str | None) -> float:
    if not start or not end:
        return 0.0
    first, last = (datetime.datetime.fromisoformat(at.replace("Z", "+00:00")) for at in (start, end))
    return max(0.0, (last - first).total_seconds())


# ----- the text -----


class ReportPart(NamedTuple):
    """A heading and what is below it."""

    title: str
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    plots: Callable[[dict[str, Any]], Iterable[str]] = lambda _: ()
    """SVG, in HTML alone."""


def parts(answer: dict[str, Any]) -> Iterable[ReportPart]:
    """What the report says, whatever its form."""
    from supervisor.cli import report_plots
    from supervisor.cli.render import clock, culprits_text, rank_or_gpu, seconds

    unit = rank_or_gpu(answer)
    jobs = answer["jobs"]
    names = ", ".join(job["name"] for job in jobs) if len(jobs) < 4 else f"{len(jobs)} jobs"
    ettr = "not known" if answer["ettr"] is None else f"{answer['ettr']:.1%}"
    lines = [f"ETTR {ettr} of {answer['gpu_hours']:,.2f} {unit}-hours. {_failures(answer)}"]
    yield ReportPart(f"Report: {names}", lines)
    rows: list[tuple[str, ...]]
    rows = [(name, f"{share:.2%}", _figure(share * answer["gpu_hours"])) for name, share in answer["shares"].items()]
    columns: tuple[str, ...] = ("what", "share", f"{unit}-hours")
    yield ReportPart("Where the time went", (), columns, rows, report_plots.where_time_went)
    rows = [
        (row["class"], str(row["count"]), seconds(row["lost_s"]), seconds(row["median_down_s"]))
        for row in answer["classes"]
    ]
    columns = ("class", "incidents", "lost", "median time to the next step")
    yield ReportPart("Incidents by class", (), columns, rows, report_plots.lost_by_class)
    if rate := answer["rate"]:
        likely, low, high = (_figure(rate[name]) for name in ("likely", "low", "high"))
        seen = f"{answer['failures']} in {answer['node_days']:.3g} node-days"
        columns = ("failures", "in 1,000 node-days", "90 % sure")
        yield ReportPart("Failure rate", (), columns, [(seen, likely, f"{low} to {high}")])
    columns = ("job", "state", "started", "nodes", f"{unit}s", "wall time", "step", "restarts", "lost", "ETTR")
    rows = [
        (
            *(job["name"], job["state"], clock(job["started_at"])[:19], str(job["nodes"]), str(job["gpus"])),
            *(seconds(job["wall_s"]), "" if job["step"] is None else f"{job['step']:,}", str(job["restarts"])),
            *(seconds(job["lost_s"]), "" if job["ettr"] is None else f"{job['ettr']:.1%}"),
        )
        for job in jobs
    ]
    yield ReportPart("Jobs", (), columns, rows, report_plots.courses)
    rows = [
        (
            *(one["job"], one["id"], clock(one["opened_at"])[:19], _class(one), culprits_text(one["verdict"])),
            one["verdict"]["why"] if one["verdict"] else one["what"],
            f"{one['plan']['kind']}: {one['plan']['why']}" if one["plan"] else "",
            seconds(one["lost_s"]),
        )
        for job in jobs
        for one in job["incidents"]
    ]
    left_out = sum(job["left_out"] for job in jobs)
    older = [f"{left_out} older incidents are not listed: the job keeps the newest 200."] if left_out else []
    yield ReportPart("Incidents", older, ("job", "incident", "at", "class", "who", "why", "decided", "lost"), rows)
    yield ReportPart("Advice", [line for job in jobs for line in _advised(job)])


def _failures(answer: dict[str, Any]) -> str:
    rate = answer["rate"]
    if rate is None:
        return f"Failures: {answer['failures']}. Nodes trained for less than half an hour: that tells no rate."
    span = f"{_figure(rate['low'])} to {_figure(rate['high'])} with 90 % confidence"
    seen = f"Failures: {answer['failures']} in {answer['node_days']:.3g} node-days, {_figure(rate['likely'])}"
    return f"{seen} in 1,000 node-days ({span}; where a job has seen little, published fleets weigh more)."


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _advised(job: dict[str, Any]) -> Iterable[str]:
    from supervisor.cli.advice_text import change_text, spares_text
    from supervisor.cli.render import rank_or_gpu

    told, figures = job["advice"]["advice"], job["advice"]["figures"]
    if told is not None and job["advice"]["enough"] and not told["is_hopeless"]:
        yield f"{job['name']}: {change_text(told, figures, rank_or_gpu(job))}."
        yield f"{job['name']}: {spares_text(told, figures)}."
    else:
        lacks = "; ".join(job["advice"]["lacks"]) or "too little was seen"
        yield f"{job['name']}: no advice on how often to save, nor on spares: {lacks}."


def markdown(answer: dict[str, Any]) -> str:
    text: list[str] = []
    for number, part in enumerate(parts(answer)):
        text += [f"{'#' if number == 0 else '##'} {_cell(part.title)}", ""]
        text += [line for words in part.lines for line in (_cell(words), "")]
        if part.rows:
            table = [part.columns, ["---"] * len(part.columns), *part.rows]
            text += [*("| " + " | ".join(map(_cell, row)) + " |" for row in table), ""]
        elif part.columns:
            text += ["None.", ""]
    return "\n".join(text)


def _cell(text: str) -> str:
    """Text that no Markdown reader takes for markup: logs are quoted in it."""
    plain = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "\\|`*_[]<>#" and plain != "---" else letter for letter in plain)


def page(answer: dict[str, Any]) -> str:
    """One HTML file that loads nothing."""
    body: list[str] = []
    for number, part in enumerate(parts(answer)):
        level = 1 if number == 0 else 2
        body.append(f"<h{level}>{html.escape(part.title)}</h{level}>")
        body += [f"<p>{html.escape(words)}</p>" for words in part.lines]
        body += [f"<figure>{plot}</figure>" for plot in part.plots(answer)]
        if part.rows:
            head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in part.columns)
            rows = ("".join(map(_table_cell, row)) for row in part.rows)
            body.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
        elif part.columns:
            body.append("<p>None.</p>")
    return _FRAME.format(title=html.escape(next(iter(parts(answer))).title), body="\n".join(filter(None, body)))


def _table_cell(text: str) -> str:
    return f"<td{' class=short' if len(text) <= SHORT else ''}>{html.escape(text)}</td>"


_FRAME = """<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #8886 }}
td {{ overflow-wrap: anywhere }}
td.short {{ white-space: nowrap }}
figure {{ margin: .6rem 0 }}
figure svg {{ width: 100%; height: auto; max-height: 24rem }}
</style>
<body>
{body}
</body></html>
"""


def _json(answer: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(answer).decode() + "\n"


FORMS: dict[str, Callable[[dict[str, Any]], str]] = {".html": page, ".md": markdown, ".json": _json}
