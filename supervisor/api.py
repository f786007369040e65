"""`import unbroken` in a notebook or a script: old logs diagnosed, and the journal of a job as tables.

`unbroken` gives these names and, for training scripts, `worker` and `snapshot`; docs/python-api.md has examples. What
stands there keeps its meaning within a major version; fields may be added.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnosis.health import Check, judged, unknown
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Probe

__all__ = ["Check", "FailureClass", "JobJournal", "Probe", "diagnose", "judged", "read_journal", "unknown"]


def diagnose(*paths: str | os.PathLike[str], good: Sequence[str | os.PathLike[str]] = ()) -> dict[str, Any]:
    """What `unbroken diagnose --json PATHS` prints. `good`: logs of runs that went well, to compare with.

    Raises UnbrokenError (of `supervisor.errors`) where a path cannot be read.
    """
    from supervisor.cli.diagnose import diagnosed

    return diagnosed([os.fspath(path) for path in paths], [os.fspath(path) for path in good], quiet=True)


def read_journal(job: str | os.PathLike[str]) -> JobJournal:
    """The journal of a job folder, or one file of it; the job may still run. Raises OSError where it cannot be read."""
    from supervisor.controller.report import fold

    return JobJournal(fold(Path(job)))


class JobJournal:
    """What a job's journal says, as lists of dictionaries: `pandas.DataFrame(journal.steps)` makes a table of each."""

    def __init__(self, folded: Any) -> None:
        from supervisor.controller.report import incidents_of, plain, status_of, timeline_rows

        view = folded.job.view()
        self.status: dict[str, Any] = status_of(view, None)
        """As `unbroken status --json`."""
        self.incidents: list[dict[str, Any]] = incidents_of(view)["incidents"]
        """As `unbroken incidents --json`."""
        self.timeline: list[dict[str, Any]] = timeline_rows(folded.history)
        """As `unbroken timeline --json`."""
        self.steps: list[dict[str, Any]] = [plain(one) for one in _steps(folded.history)]
        """The steps that were noted: `at` (Unix time), `attempt`, `step`. One every 10 s, and those around an event."""
        self.problems: list[str] = list(folded.history.problems)
        """What could not be read, in words."""

    def table(self, name: str) -> Any:
        """`steps`, `incidents` or `timeline` as a `pandas.DataFrame`; columns with times are of UTC.

        Raises ImportError where pandas is not installed, KeyError for another name.
        """
        import pandas

        rows = {"steps": self.steps, "incidents": self.incidents, "timeline": self.timeline}[name]
        table = pandas.DataFrame(rows)
        for column in table.columns:
            if column == "at" or str(column).endswith("_at"):
                table[column] = pandas.to_datetime(table[column], unit="s", utc=True)
        return table


def _steps(history: Any) -> list[dict[str, Any]]:
    from supervisor.controller.journal import steps
    from supervisor.messages import Progressed

    found = (one.event for one in steps(history.records))
    return [
        {"at": event.step_at or event.at, "attempt": event.attempt, "step": event.step}
        for event in found
        if isinstance(event, Progressed) and event.step is not None
    ]
