"""The checks of our own probes: the rows of `checks.toml`."""

from __future__ import annotations

from typing import Final

from diagnosis.health import Check
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass

_ROWS: Final = load("supervisor.node_health", "checks.toml")
CHECK: Final[dict[str, Check]] = {
    name: Check(**{**row, "id": name, "failure_class": FailureClass(row["failure_class"])})
    for rows in _ROWS.values()
    for name, row in rows.items()
}
"""By id."""


def checks_of(probe: str) -> tuple[Check, ...]:
    """In the order of the table."""
    return tuple(CHECK[name] for name in _ROWS[probe])
