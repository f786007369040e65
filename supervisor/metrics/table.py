"""The table of all metrics that Prometheus can scrape.

Nothing is kept for it: every number is read from the state that is there anyway, so a daemon that nobody scrapes pays
nothing. Labels hold names from closed lists (states, classes, phases, checks), nodes, GPUs and ranks; never text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from diagnosis.signals import clean_line
from diagnosis.tables import load

UNHEALTHY_NAMED: Final = 64
"""Rows of unhealthy checks; all of them are counted."""
CORDONS_NAMED: Final = 64
"""Cordons with series of their own; all of them are counted."""
NAME_LIMIT: Final = 100

Kind = Literal["gauge", "counter", "info", "stateset", "summary"]


class Family(NamedTuple):
    """One metric: a row of docs/metrics.md."""

    name: str
    """As in a query; a summary's without `_sum` and `_count`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    name: str
    value: float
    labels: tuple[str, ...] = ()
    """Values, in the order of the family's labels."""
    suffix: str = ""
    """`_sum` or `_count` of a summary."""


OUTCOMES: Final = ("succeeded", "failed", "stopped", "requeued")
WAITING: Final = ("nodes", "backoff", "approval", "operator", "evidence", "space")


def _families(table: str) -> tuple[Family, ...]:
    numbers = {"CORDONS_NAMED": CORDONS_NAMED, "UNHEALTHY_NAMED": UNHEALTHY_NAMED}
    return tuple(
        Family(name, row["kind"], row["help"].format(**numbers), tuple(row.get("labels", ())))
        for name, row in _TABLES[table].items()
    )


_TABLES: Final = load("supervisor.metrics", "metrics.toml")
CONTROLLER: Final = (*_families("both"), *_families("controller"))
AGENT: Final = (*_families("both"), *_families("agent"))


def job_name(name: str) -> str:
    return clean_line(name, NAME_LIMIT) or "unnamed"


def states(name: str, known: tuple[str, ...], current: str, labels: tuple[str, ...] = ()) -> Iterator[Sample]:
    """A stateset: a row for each state."""
    for state in known:
        yield Sample(name, state == current, (*labels, state))
