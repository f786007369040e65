"""The demo from the first line to the proof."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diagnosis.signals import clean_text
from supervisor.demo.rehearsal import Rehearsal, RehearsalFailed
from supervisor.demo.stage import FAULTS, Fault, Stage, weights_sha256
from supervisor.view import PHASES, IncidentView, JobView

EVIDENCE_SHOWN = 3
PIPE_WIDTH = 160


class Show:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        """Panels; else one line for each event."""
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
        text = "; ".join(row["text"] for row in rows)
        self.say(f"{text or 'progress again'}: training again after {quiet_s:.1f} s, nothing restarted", "green")

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


STEPS = 150
SAVE_EVERY = 10
STEPS_BETWEEN = 12
"""From one recovery to the next fault: long enough for a new checkpoint."""
START_LIMIT_S = 120.0
END_LIMIT_S = 120.0


@click.command()
@click.option("--ranks", type=click.IntRange(2, 4), default=2, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Play in this folder and keep it.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Record the show as a picture.")
def command(ranks: int, keep: Path | None, svg: Path | None) -> int:
    """Pretrain a small Llama under supervision while it is hurt, and prove that nothing was lost."""
    console = Console(
        record=svg is not None, force_terminal=svg is not None or None, width=_width(svg), highlight=False
    )
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"the demo trains for real and needs {' and '.join(missing)}: pip install 'unbroken\\[demo]'")
        return 1
    folder = keep or Path(tempfile.mkdtemp(prefix="unbroken-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    show = Show(console)
    stage = Stage(folder.resolve(), ranks=ranks, steps=STEPS, save_every=SAVE_EVERY)
    try:
        return 0 if play(stage, show) else 1
    except RehearsalFailed as failure:
        show.plain(f"the demo failed: {failure}", "bold red")
        show.plain(f"everything is kept in {folder}")
        keep = folder
        return 1
    finally:
        if svg is not None:
            picture = console.export_svg(title="unbroken demo")
            svg.write_text(
                re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8"
            )  # no web fonts
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _width(svg: Path | None) -> int | None:
    if svg is not None:
        return 130
    return None if Console().is_terminal else PIPE_WIDTH


def play(stage: Stage, show: Show) -> bool:
    """Whether the run came through everything with the weights of an undisturbed one. Raises RehearsalFailed."""
    show.plain(f"a small Llama, {stage.ranks} ranks, {stage.steps} steps, and {len(FAULTS)} faults on the way", "bold")
    show.plain("$ unbroken run -- torchrun --nproc-per-node " + f"{stage.ranks} train.py", "bold cyan")
    run = stage.begin()
    try:
        first = run.wait_for_step(1, timeout_s=START_LIMIT_S)
        show.say(f"first step {first.at - run.started:.1f} s after the command; a spare node joins")
        stage.bring_spare()
        for number, fault in enumerate(FAULTS, 1):
            _wait_for_ground(run, stage)
            _endure(fault, number, stage, show)
        code = run.wait_for_end(END_LIMIT_S)
    finally:
        run.close()
    if code != 0:
        raise RehearsalFailed(f"unbroken run ended with {code}: {run.lines[-1].text if run.lines else ''}")
    show.say(f"the run ended after {time.monotonic() - run.started:.1f} s with exit code 0", "bold green")
    show.ettr(stage.view())
    return _prove(stage, show)


def _wait_for_ground(run: Rehearsal, stage: Stage) -> None:
    """Until enough new steps were made, and the newest checkpoint is some steps old: work that must be done again."""
    newest = run.last_step()
    target = newest + STEPS_BETWEEN
    target += (4 - target) % stage.save_every
    run.wait_for_step(target, after=time.monotonic(), timeout_s=START_LIMIT_S)


def _endure(fault: Fault, number: int, stage: Stage, show: Show) -> None:
    known = stage.view().incidents_total
    before, moved = len(stage.summary()), stage.set_aside()
    at = time.monotonic()
    show.fault(number, len(FAULTS), fault.title, fault.do(stage))
    if fault.heals:
        again = stage.continued(at)
        rows = [row for row in stage.summary()[before:] if not row["detail"] and row["kind"] != "note"]
        show.recovered_alone(rows, again - at)
    else:
        incident = stage.settled_incident(known)
        show.incident(incident, stage.resumed_from(), [one for one in stage.set_aside() if one not in moved])


def _prove(stage: Stage, show: Show) -> bool:
    show.say("the same training again, undisturbed, by plain torchrun, for comparison")
    reference = stage.undisturbed()
    try:
        code = reference.wait_for_end(END_LIMIT_S)
    finally:
        reference.close()
    if code != 0:
        raise RehearsalFailed(f"the undisturbed run ended with {code}: {reference.lines[-1].text}")
    supervised, undisturbed = weights_sha256(stage.checkpoints), weights_sha256(stage.folder / "undisturbed")
    show.proof(supervised, undisturbed)
    return supervised == undisturbed
