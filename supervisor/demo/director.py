"""The demo from the first line to the proof."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from supervisor.demo.faults import FAULTS, Fault
from supervisor.demo.rehearsal import Rehearsal, RehearsalFailed
from supervisor.demo.show import PIPE_WIDTH, Show
from supervisor.demo.stage import Stage, weights_sha256

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
        with show.progress(run, stage.steps):
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
    view = stage.view()
    show.timeline(stage.summary())
    show.ettr(view)
    return _prove(stage, show)


def _wait_for_ground(run: Rehearsal, stage: Stage) -> None:
    """Until enough new steps were made, and the newest checkpoint is some steps old: work that must be done again."""
    newest = run.last_step()
    target = newest + STEPS_BETWEEN
    target += (4 - target) % stage.save_every
    run.wait_for_step(target, after=time.monotonic(), timeout_s=START_LIMIT_S)


def _endure(fault: Fault, number: int, stage: Stage, show: Show) -> None:
    known = stage.view().incidents_total
    told, moved = len(stage.summary()), stage.set_aside()
    at = time.monotonic()
    show.fault(number, len(FAULTS), fault.title, fault.do(stage))
    if fault.heals:
        again = stage.continued(at)
        rows = [row for row in stage.summary()[told:] if not row["detail"] and row["kind"] != "note"]
        show.recovered_alone(rows, again - at)
    else:
        incident = stage.settled_incident(known)
        show.incident(incident, stage.resumed_from(), [one for one in stage.set_aside() if one not in moved])


def _prove(stage: Stage, show: Show) -> bool:
    show.say("the same training again, undisturbed, by plain torchrun, for comparison")
    reference = stage.undisturbed()
    try:
        with show.progress(reference, stage.steps):
            code = reference.wait_for_end(END_LIMIT_S)
    finally:
        reference.close()
    if code != 0:
        raise RehearsalFailed(f"the undisturbed run ended with {code}: {reference.lines[-1].text}")
    supervised, undisturbed = weights_sha256(stage.checkpoints), weights_sha256(stage.folder / "undisturbed")
    show.proof(supervised, undisturbed)
    return supervised == undisturbed
