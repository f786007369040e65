"""How answers of `unbroken check` look: for people, for programs, for Slurm; and the table of docs/checks.md.

`python -m supervisor.cli.check_render docs/checks.md` writes the table anew.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from diagnosis.health import CRITICAL, OK, UNKNOWN, WARNING
from supervisor.controller.report import rfc3339
from supervisor.node_health.answer import AnsweredCheck, CheckAnswer
from supervisor.node_health.contract import Site
from supervisor.node_health.selection import CheckRow, table

WORDS: Final = {OK: "OK", WARNING: "WARNING", CRITICAL: "CRITICAL", UNKNOWN: "UNKNOWN"}
COLOURS: Final = {"OK": "green", "WARNING": "yellow", "CRITICAL": "red", "UNKNOWN": "magenta"}
NAMED: Final = 3
"""Problems that the first line names."""
NODE_SCOPES: Final = ("gpu", "node", "fabric")
"""What speaks of the node; not of a rank, a job, or storage that others use too."""
TABLE_BEGINS: Final = "| check |"


def _class(row: CheckRow) -> str:
    return str(getattr(row.check.failure_class, "value", row.check.failure_class))


def _threshold(row: CheckRow, site: Site) -> str:
    return row.check.threshold_text({**row.check.limits, **site.limits.get(row.check.id, {})})


# ----- for programs -----


def as_json(answer: CheckAnswer, site: Site) -> dict[str, Any]:
    return {
        "schema": 1,
        "node": answer.node,
        "boot_id": answer.boot_id,
        "at": rfc3339(answer.at),
        "from": answer.source,
        "status": WORDS[answer.exit_code].lower(),
        "exit_code": answer.exit_code,
        "problems": list(answer.problems),
        "checks": [_entry(one, site) for one in answer.seen],
    }


def _entry(one: AnsweredCheck, site: Site) -> dict[str, Any]:
    check, check_state, result = one.row.check, one.check_state, one.check_state.result
    return {
        "check": check.id,
        "probe": one.row.probe,
        "status": check_state.status,
        "level": check_state.level if check_state.status == "unhealthy" else None,
        "failure_class": _class(one.row),
        "scope": check.scope,
        "device": result.device,
        "gpu": result.gpu,
        "gpu_uuid": result.gpu_uuid,
        "rank": check_state.rank,
        "text": result.text,
        "values": result.values,
        "threshold": _threshold(one.row, site),
        "source": check.source,
        "since": rfc3339(check_state.since),
    }


# ----- for people -----


def nagios_line(answer: CheckAnswer) -> str:
    """`CRITICAL: 2 of 61 checks: gpu_ecc_uncorrected 0000:c1:00: 3 more; ...`"""
    bad = [one for one in _bad(answer) if one.check_state.status == "unhealthy"]
    total = len({one.row.check.id for one in answer.seen})
    word = WORDS[answer.exit_code]
    unseen = ""
    if answer.flaws:
        more = f" (and {len(answer.flaws) - 1} more)" if len(answer.flaws) > 1 else ""
        unseen = f"not everything could be looked at: {answer.flaws[0]}{more}"
    if not bad and unseen:
        return f"{word}: {unseen}"
    if not bad:
        well = len({one.row.check.id for one in answer.seen if one.check_state.status == "healthy"})
        return f"{word}: {well} of {total} checks are healthy, none is unhealthy"
    named = "; ".join(f"{_what(one)}: {_text(one)}" for one in bad[:NAMED])
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    return f"{word}: {len({one.row.check.id for one in bad})} of {total} checks: {named}{more}" + (
        f"; {unseen}" if unseen else ""
    )


def _what(one: AnsweredCheck) -> str:
    return f"{one.row.check.id} {one.check_state.result.device}".rstrip()


def _text(one: AnsweredCheck) -> str:
    """Without the device in front, which is named before."""
    result = one.check_state.result
    return result.text.removeprefix(f"{result.device}: ") if result.device else result.text


def _bad(answer: CheckAnswer) -> list[AnsweredCheck]:
    """What is not as it should be: critical, warnings, unknown."""
    order = ["critical", "warning", ""]
    bad = [one for one in answer.seen if one.check_state.status in ("unhealthy", "unknown")]
    return sorted(
        bad, key=lambda one: order.index(one.check_state.level if one.check_state.status == "unhealthy" else "")
    )


def show(answer: CheckAnswer, *, everything: bool) -> None:
    """One line first, as Nagios reads it; then what is not well, or everything; then how much of what there is."""
    _say(WORDS[answer.exit_code], nagios_line(answer))
    unhealthy = [one for one in _bad(answer) if one.check_state.status == "unhealthy"]
    for one in unhealthy:
        _say(one.check_state.level.upper(), _line(one.check_state.level.upper(), one, f"  [{_class(one.row)}]"))
    if everything:
        for one in answer.seen:
            if one.check_state.status != "unhealthy":
                click.echo(_line(one.check_state.status.replace("_", " "), one))
    else:
        for text, names in _unknown(answer).items():
            _say("UNKNOWN", f"{'UNKNOWN':<8}  {', '.join(names)}: {text}")
    for problem in answer.problems:
        click.echo(f"note: {problem}")
    click.echo(_summary(answer))


def _line(word: str, one: AnsweredCheck, tail: str = "") -> str:
    text = _text(one)
    return f"{word:<8}  {_what(one)}" + (f": {text}" if text else "") + tail


def _unknown(answer: CheckAnswer) -> dict[str, list[str]]:
    """Reason -> checks: what cannot be seen for one reason is one line."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for one in answer.seen:
        if one.check_state.status == "unknown":
            checks = reasons.setdefault(one.check_state.result.text or "no reason given", {})
            checks.setdefault(one.row.check.id, []).append(_what(one))
    return {
        text: _some(
            [found[0] if len(found) == 1 else f"{check} ({len(found)} devices)" for check, found in checks.items()]
        )
        for text, checks in reasons.items()
    }


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= 6 else [*names[:5], f"{len(names) - 5} more"]


def _summary(answer: CheckAnswer) -> str:
    counts = Counter(
        one.check_state.level if one.check_state.status == "unhealthy" else one.check_state.status
        for one in answer.seen
    )
    parts = [
        f"{counts[key]} {key.replace('_', ' ')}"
        for key in ("critical", "warning", "healthy", "unknown", "not_applicable")
        if counts[key]
    ]
    checks = len({one.row.check.id for one in answer.seen})
    whence = {
        "agent": f"by its agent, {max(0.0, time.time() - answer.at):.0f} s ago; --fresh looks now",
        "root": "a captured tree",
    }
    return (
        f"{checks} checks of {answer.node or '?'}, {len(answer.seen)} results "
        f"({whence.get(answer.source, 'looked just now')}): {', '.join(parts)}"
    )


def _say(word: str, line: str) -> None:
    click.secho(line, fg=COLOURS[word])  # without colours where it is no terminal


# ----- for Slurm -----


def slurm_lines(answer: CheckAnswer, *, node_only: bool) -> list[str]:
    """`unbroken: <failure class> <device> <text>` for each critical failure."""
    lines = []
    for one in _bad(answer):
        critical = (one.check_state.status, one.check_state.level) == ("unhealthy", "critical")
        if critical and (not node_only or one.row.check.scope in NODE_SCOPES):
            result = one.check_state.result
            lines.append(f"unbroken: {_class(one.row)} {result.device or '-'} {_text(one)} ({result.check})")
    return lines


# ----- the checks there are -----


def list_json(rows: Mapping[str, CheckRow], answer: CheckAnswer, site: Site) -> dict[str, Any]:
    entries = []
    for row in rows.values():
        applies, why = _applies(row, answer)
        entries.append(
            {
                "check": row.check.id,
                "probe": row.probe,
                "what": row.check.what,
                "source": row.check.source,
                "threshold": _threshold(row, site),
                "limits": {**row.check.limits, **site.limits.get(row.check.id, {})},
                "when": row.check.when,
                "failure_class": _class(row),
                "scope": row.check.scope,
                "looks": row.check.looks,
                "applies": applies,
                "why": why,
            }
        )
    return {"schema": 1, "node": answer.node, "from": answer.source, "checks": entries}


def _applies(row: CheckRow, answer: CheckAnswer) -> tuple[bool | None, str]:
    """Whether a check applies here: None where that is not known. And why it does not, or is not known."""
    seen = [one.check_state for one in answer.seen if one.row.check.id == row.check.id]
    if any(one.status in ("healthy", "unhealthy") for one in seen):
        return True, ""
    unknown = [one.result.text for one in seen if one.status == "unknown"]
    if unknown:
        return None, unknown[0]
    if seen:
        return False, seen[0].result.text
    return None, "made before a job only (--preflight)" if row.check.when == "preflight" else "left out by the site"


def show_list(listed: Mapping[str, Any]) -> None:
    """A paragraph for each on a terminal, else tab-separated."""
    columns = ("check", "applies", "when", "failure_class", "what", "threshold", "source", "why")
    words = {True: "yes", False: "no", None: "unknown"}
    if not sys.stdout.isatty():
        click.echo("\t".join(columns))
    for entry in listed["checks"]:
        entry = {**entry, "applies": words[entry["applies"]]}
        if not sys.stdout.isatty():
            click.echo("\t".join(str(entry[column]) for column in columns))
            continue
        click.secho(entry["check"], bold=True, nl=False)
        click.echo(f"  {entry['failure_class']}, {entry['when']}\n    {entry['what']}")
        click.echo(f"    unhealthy: {entry['threshold']}\n    read from: {entry['source']}")
        click.echo(f"    applies here: {entry['applies']}" + (f" ({entry['why']})" if entry["why"] else ""))


def as_markdown(rows: Iterable[CheckRow]) -> str:
    """The table of docs/checks.md."""
    lines = [
        f"{TABLE_BEGINS} unhealthy means | threshold | read from | when | class | scope |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        check = row.check
        cells = (check.id, check.what, check.threshold_text(), check.source, check.when, _class(row), check.scope)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: text.index(TABLE_BEGINS)] + as_markdown(table().values()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
