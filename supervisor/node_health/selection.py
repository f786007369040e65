"""The table of all checks, and the selection of those that somebody asks for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from diagnosis.health import Check
from diagnosis.signals import Frozen, clean_text
from supervisor.errors import CheckRefused
from supervisor.node_health import registry
from supervisor.node_health.contract import Site
from supervisor.node_health.state import RESPONDS

OF_RUNNER = "station"
"""The probe name of checks that the runner of the probe workers makes. It is in the JSON of `unbroken check`."""


class CheckRow(NamedTuple):
    """One check with its probe."""

    check: Check
    probe: str
    group: str
    """Its probe worker."""
    deadline_s: float
    """A look of its probe must not take longer."""


class Options(Frozen, frozen=True, kw_only=True):
    """What is asked for."""

    only: tuple[str, ...] = ()
    """Patterns of check ids and probe names."""
    skip: tuple[str, ...] = ()
    root: Path = Path("/")
    """`/`, or a captured tree."""
    preflight: bool = False
    site: Site = Site()
    fresh: bool = False
    """Not from an agent's file."""
    timeout_s: float = 20.0
    local_dir: str = ""
    """Local folder of the agent, or the folder above all; empty: where they are by default."""
    node: str = ""
    state_dir: Path | None = None
    """Where check states and counters are kept; None: where they are by default."""


def table(problems: list[str] | None = None) -> dict[str, CheckRow]:
    """All checks, in order. Appends a sentence to `problems` for each probe that cannot be loaded."""
    rows = {}
    for group in registry.WORKERS:
        rows[RESPONDS[group].id] = CheckRow(RESPONDS[group], OF_RUNNER, group, 0.0)
        probes, flaws = registry.load(group)
        if problems is not None:
            problems += flaws
        for probe in probes:
            rows |= {check.id: CheckRow(check, probe.name, group, probe.deadline_s) for check in probe.checks}
    return rows


def chosen(rows: Mapping[str, CheckRow], options: Options, *, all_known: bool = True) -> dict[str, CheckRow]:
    """The checks that are asked for. Raises CheckRefused for a pattern that fits none, if `all_known` are in `rows`."""
    for pattern in (*options.only, *options.skip) if all_known else ():
        refuse_unknown(rows, pattern)
    return {name: row for name, row in rows.items() if _wanted(row, options)}


def refuse_unknown(rows: Mapping[str, CheckRow], pattern: str) -> None:
    """Raises CheckRefused for a pattern that fits nothing."""
    known = {name for row in rows.values() for name in (row.check.id, row.probe)}
    if not any(fnmatchcase(name, pattern) for name in known):
        raise CheckRefused(f"no check or probe is called {clean_text(pattern, 80)}{_hint(pattern, known)}")


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.strip("*"), sorted(known), 3, 0.5)
    return f": did you mean {' or '.join(near)}?" if near else "; `unbroken check --list` shows all"


def _wanted(row: CheckRow, options: Options) -> bool:
    names = (row.check.id, row.probe)
    if row.check.when == "preflight" and not options.preflight and row.check.id not in options.only:
        return False
    if options.only and not fits(names, options.only):
        return False
    return not fits(names, (*options.skip, *options.site.skip))


def fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def site_problems(rows: Mapping[str, CheckRow], site: Site) -> list[str]:
    """A sentence for each check or limit of the site file that does not exist."""
    names = {*rows, *(row.probe for row in rows.values())}
    problems = [
        f"the site file skips {clean_text(pattern, 80)}, and no check or probe is called so"
        for pattern in site.skip
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    for name, numbers in site.limits.items():
        if name not in rows:
            problems.append(
                f"the site file sets limits of {clean_text(name, 80)}, which is no check{_hint(name, rows)}"
            )
            continue
        for number in numbers.keys() - rows[name].check.limits.keys():
            known = ", ".join(rows[name].check.limits) or "none"
            problems.append(f"the site file sets {clean_text(number, 80)} of {name}, whose limits are: {known}")
    return problems
