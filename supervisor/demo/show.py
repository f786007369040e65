"""What the viewer sees: panels in a terminal, one plain line for each event in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from diagnosis.signals import clean_text
from supervisor.demo.rehearsal import STEP, Rehearsal
from supervisor.view import PHASES, IncidentView, JobView

EVIDENCE_SHOWN = 3
PIPE_WIDTH = 160
TOLD = frozenset({"controller_started", "node_joined", "rank_wake_wanted", "progressed"})
"""Events of the timeline that are shown beside the job's own loud notes."""


class Show:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        """Panels, a bar, the timeline; else one line for each event."""
        self.is_picture = console.record
        """Recorded for a picture: no moving bar, and the panels say it all."""
        self._began = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """A line with the seconds since the beginning; in a pipe a line stays one line."""
        clock = Text(f"{time.monotonic() - self._began:6.1f} s  ", style="dim")
        self.console.print(clock.append(text, style=style), soft_wrap=not self.live)

    def plain(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=not self.live)

    def fault(self, number: int, of: int, title: str, what: str) -> None:
        self.say(f"fault {number} of {of}: {title}", "bold red")
        self.say(clean_text(what, 200), "red")

    def incident(self, incident: IncidentView, resumed: str, moved: Sequence[str]) -> None:
        """`resumed`: the checkpoint the next attempt began with. `moved`: checkpoints set aside, each with its why."""
        done = _done(incident) + (f", from {resumed}" if incident.next_attempt is not None else "")
        done = "; ".join([*(f"moved aside {clean_text(what, 120)}" for what in moved), done])
        if self.live:
            panel = Panel(_findings(incident, done), title=f"incident {incident.id}", title_align="left")
            self.console.print(panel)
        else:
            self.say(f"{incident.id}: {_verdict(incident)}; {done}; {_seconds(incident)}")

    def recovered_alone(self, rows: Sequence[dict[str, Any]], quiet_s: float) -> None:
        told = "; ".join(row["text"] for row in rows)
        self.say(f"{told or 'progress again'}: training again after {quiet_s:.1f} s, nothing restarted", "green")

    @contextmanager
    def progress(self, run: Rehearsal, steps: int) -> Iterator[None]:
        """A bar that follows the run while the block lasts; nothing in a pipe."""
        if not self.live or self.is_picture:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(40), TextColumn("{task.fields[loss]}"))
        with Progress(*columns, console=self.console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("starting", total=steps, loss="")
            with run.followed(lambda line: self._advance(bar, task, line)):
                yield

    def _advance(self, bar: Progress, task: Any, line: str) -> None:
        if match := STEP.search(line):
            step = int(match[1])
            bar.update(task, completed=step, description=f"step {step}", loss=line[match.end() :][-40:], refresh=True)

    def timeline(self, rows: Sequence[dict[str, Any]]) -> None:
        """What was said aloud; the rest is in `unbroken timeline`."""
        if not self.live or self.is_picture:
            return
        table = Table(title="unbroken timeline", title_justify="left", show_header=False, box=None)
        for row in rows:
            if row["loud"] or (row["kind"] in TOLD and not row["detail"]):
                table.add_row(Text(row["at"][11:23], style="dim"), Text(clean_text(row["text"], 110)))
        self.console.print(table)

    def ettr(self, view: JobView) -> None:
        trained = "unknown" if view.ettr is None else f"{view.ettr:.1%}"
        self.plain(
            f"{view.incidents_total} incidents, {view.restarts} restarts, {view.lost_s:.1f} s lost; ETTR {trained} "
            "of the time since the start, with a fault every few seconds",
            "bold",
        )

    def proof(self, supervised: str, undisturbed: str) -> None:
        for name, digest in (("with all these faults", supervised), ("undisturbed, plain torchrun", undisturbed)):
            self.plain(f"sha256 of the final weights  {digest}  {name}")
        same = supervised == undisturbed
        self.plain(*(("equal, bit for bit", "bold green") if same else ("NOT EQUAL", "bold red")))


def _findings(incident: IncidentView, done: str) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold cyan", no_wrap=True)
    rows.add_column()
    rows.add_row("seen", Text(clean_text(incident.what, 300)))
    rows.add_row("verdict", Text(_verdict(incident), style="bold"))
    if incident.verdict is not None:
        shown = incident.verdict.evidence[:EVIDENCE_SHOWN]
        rows.add_row("evidence", Group(*(Text(f"· {clean_text(piece.text, 200)}") for piece in shown)))
    rows.add_row("done", Text(done, style="green"))
    rows.add_row("seconds", Text(_seconds(incident)))
    return rows


def _verdict(incident: IncidentView) -> str:
    verdict = incident.verdict
    if verdict is None:
        return "none"
    return f"{verdict.failure_class.value} ({verdict.confidence:.0%}): {clean_text(verdict.why, 300)}"


def _done(incident: IncidentView) -> str:
    return f"{incident.plan.kind}: {incident.plan.why}" if incident.plan is not None else incident.closed_why


def _seconds(incident: IncidentView) -> str:
    """Seconds by phase, and their sum."""
    spent = [(phase, incident.seconds[phase]) for phase in PHASES if phase in incident.seconds]
    parts = [f"{phase.replace('_', ' ')} {seconds:.2f}" for phase, seconds in spent]
    return " + ".join(parts) + f" = {sum(seconds for _, seconds in spent):.2f} s"
