"""The demo: a small Llama is trained under supervision, six faults are injected, the final weights are compared."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diagnosis.signals import clean_text
from supervisor.controller.journal import read_history
from supervisor.controller.report import fold, timeline_rows
from supervisor.demo.watched_run import WatchedRun, live_workers, torchrun, unbroken
from supervisor.errors import RunFailed
from supervisor.keeper_client import WorkerProcess
from supervisor.view import PHASES, IncidentView, JobView

SCRIPT = Path(__file__).with_name("train.py")
POLL_S = 0.1
RECOVERY_LIMIT_S = 90.0


RANK_WITHIN_S = 15.0
SHORT = 48


class DemoRun:
    """The supervised run. `begin` starts it; what is asked of it after that comes from outside of it."""

    def __init__(self, folder: Path, *, ranks: int, steps: int, save_every: int) -> None:
        self.folder = folder
        self.ranks, self.steps, self.save_every = ranks, steps, save_every
        self.checkpoints = folder / "run"
        self.job_dir = folder / "job"
        self.orders = folder / "faults"
        self.kernel_log = folder / "kernel.log"
        # Unix sockets lie in it, and their paths are short: below a long folder it is elsewhere, and not kept.
        self._short = tempfile.TemporaryDirectory(prefix="ub-") if len(str(folder)) > SHORT else None
        self._local = Path(self._short.name) if self._short is not None else folder / "l"
        self.run: WatchedRun | None = None

    def training_command(self, out: Path) -> list[str]:
        """The user's own command."""
        script = [str(SCRIPT), "--out", str(out), "--steps", str(self.steps), "--save-every", str(self.save_every)]
        return [*torchrun(), "--nproc-per-node", str(self.ranks), *script]

    def begin(self) -> WatchedRun:
        """Start the run on its first node; with a second one to come as a spare."""
        self.orders.mkdir(parents=True)
        self.kernel_log.touch()
        self.run = WatchedRun(self._node("n1", "--spares", "1"), folder=self.folder, env=self._env())
        return self.run

    def bring_spare(self) -> None:
        """Another node, here on the same machine: idle until it is needed."""
        assert self.run is not None
        self.run.join(self._node("n2", "--spare"), folder=self.folder, env=self._env())

    def _node(self, name: str, *options: str) -> list[str]:
        kernel_log = self.kernel_log if name == "n1" else os.devnull
        places = ("--job-dir", self.job_dir, "--checkpoint-dir", self.checkpoints, "--kernel-log", kernel_log)
        command = ["run", "--node-name", name, *options, *map(str, places), "--"]
        return unbroken(*command, *self.training_command(self.checkpoints))

    def _env(self) -> dict[str, str]:
        return {"UNBROKEN_LOCAL_DIR": str(self._local), "DEMO_FAULTS": str(self.orders)}

    def undisturbed(self) -> WatchedRun:
        """The same training by plain torchrun, nothing of ours around it."""
        return WatchedRun(self.training_command(self.folder / "undisturbed"), folder=self.folder)

    def view(self) -> JobView:
        """The job as its journal tells it."""
        view: JobView = fold(self.job_dir).job.view()
        return view

    def summary(self) -> list[dict[str, Any]]:
        return timeline_rows(read_history(self.job_dir))

    def rank(self, rank: int) -> WorkerProcess:
        """Its process, waited for a little: what the output says may come before what the keeper says."""
        deadline = time.monotonic() + RANK_WITHIN_S
        while time.monotonic() < deadline:
            for worker in live_workers(self._local):
                if worker.rank == rank:
                    return worker
            time.sleep(0.1)
        raise RunFailed(f"rank {rank} does not run")

    def newest_checkpoint(self) -> Path:
        found = {int(match[1]): path for path in self.checkpoints.iterdir() if (match := _SAVED.fullmatch(path.name))}
        return found[max(found)]

    def resumed_from(self) -> str:
        """Name of the checkpoint that the current attempt began with."""
        resume = self.view().resume
        return Path(resume.path).name if resume is not None and resume.path else "the beginning"

    def set_aside(self) -> list[str]:
        """Every checkpoint that was moved out of the way so far, with the reason."""
        notes = [
            json.loads(path.read_bytes()) for path in sorted(self.checkpoints.glob(".unbroken-set-aside/*.why.json"))
        ]
        return [f"{Path(note['path']).name}: {note['why']}" for note in notes]

    def order(self, rank: int, fault: str) -> None:
        """Have the script act out a fault before its next step."""
        (self.orders / f"rank{rank}.{fault}").touch()

    def kernel_says(self, text: str) -> None:
        with self.kernel_log.open("a") as log:
            log.write(f"4,{time.time_ns() % 100_000},{time.monotonic_ns() // 1000},-;{text}\n")

    def settled_incident(self, known: int) -> IncidentView:
        """The incident after the first `known`, once it is closed. Raises RunFailed."""
        return self._wait(lambda view: _closed(view, known), "the job did not recover")

    def continued(self, fault_at: float) -> float:
        """When a step was printed again after a pause since `fault_at` (monotonic). Raises RunFailed."""
        assert self.run is not None
        line, _ = self.run.wait_for(r"\bstep \d+/", after=fault_at + 1.0, timeout_s=RECOVERY_LIMIT_S)
        return line.at

    def _wait(self, seen: Callable[[JobView], IncidentView | None], else_say: str) -> IncidentView:
        assert self.run is not None
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while time.monotonic() < deadline:
            found = seen(self.view())
            if found is not None:
                return found
            if self.run.process.poll() is not None:
                self.run.wait_for("$^", timeout_s=5.0)  # raises, with the last lines
            time.sleep(POLL_S)
        raise RunFailed(f"{else_say} within {RECOVERY_LIMIT_S:.0f} s")


_SAVED = re.compile(r"step-(\d+)\.pt")


def _closed(view: JobView, known: int) -> IncidentView | None:
    if view.incidents_total <= known or not view.incidents:
        return None
    newest = view.incidents[-1]
    return newest if newest.closed_at is not None else None


def weights_sha256(folder: Path) -> str:
    """Of the file with the final weights: bytes follow from the weights alone."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def signal_rank(demo: DemoRun, rank: int, number: int) -> int:
    """The pid that got the signal."""
    pid = demo.rank(rank).pid
    os.kill(pid, number)
    return pid


XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Fault(NamedTuple):
    title: str
    do: Callable[[DemoRun], str]
    """Does it, and says what exactly was done."""
    heals: bool = False
    """Nothing has to be restarted: the run goes on by itself or is helped on."""


def _kill(demo: DemoRun) -> str:
    return f"SIGKILL to pid {signal_rank(demo, 1, signal.SIGKILL)}"


def _hang(demo: DemoRun) -> str:
    demo.order(1, "hang")
    return "a deadlock, it waits for a lock of its own: nothing exits, nothing is printed"


def _stop(demo: DemoRun) -> str:
    return f"SIGSTOP to pid {signal_rank(demo, 0, signal.SIGSTOP)}"


def _tear(demo: DemoRun) -> str:
    path = demo.newest_checkpoint()
    size = path.stat().st_size
    os.truncate(path, size // 2)
    signal_rank(demo, 0, signal.SIGKILL)
    return f"{path.name} cut to {size // 2:,} of {size:,} bytes, then SIGKILL to rank 0"


def _exception(demo: DemoRun) -> str:
    demo.order(1, "exception")
    return "an IndexError that nobody catches"


def _lose_gpu(demo: DemoRun) -> str:
    demo.kernel_says(XID_79)
    demo.order(1, "cuda")
    return "kernel log: " + XID_79


FAULTS = (
    Fault("rank 1 is killed", _kill),
    Fault("rank 0 is stopped", _stop, heals=True),
    Fault("rank 1 is in a deadlock", _hang),
    Fault("a torn checkpoint", _tear),
    Fault("rank 1 raises an exception", _exception),
    Fault("the GPU of rank 1 falls off the bus of node n1", _lose_gpu),
)


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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", type=click.IntRange(2, 4), default=2, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Run in this folder and keep it.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Save the output as a picture (SVG).")
def command(ranks: int, keep: Path | None, svg: Path | None) -> int:
    """Pretrain a small Llama under supervision while faults are injected, and prove that nothing was lost."""
    console = Console(
        record=svg is not None, force_terminal=svg is not None or None, width=_width(svg), highlight=False
    )
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        needs = " ".join(missing)
        console.print(f"the demo trains for real: pip install {needs} (the CPU build of torch is enough)")
        return 1
    folder = keep or Path(tempfile.mkdtemp(prefix="unbroken-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    show = Show(console)
    demo = DemoRun(folder.resolve(), ranks=ranks, steps=STEPS, save_every=SAVE_EVERY)
    try:
        return 0 if play(demo, show) else 1
    except RunFailed as failure:
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


def play(demo: DemoRun, show: Show) -> bool:
    """Whether the run came through everything with the weights of an undisturbed one. Raises RunFailed."""
    show.plain(f"a small Llama, {demo.ranks} ranks, {demo.steps} steps, and {len(FAULTS)} faults on the way", "bold")
    show.plain("$ unbroken run -- torchrun --nproc-per-node " + f"{demo.ranks} train.py", "bold cyan")
    run = demo.begin()
    try:
        first = run.wait_for_step(1, timeout_s=START_LIMIT_S)
        show.say(f"first step {first.at - run.started:.1f} s after the command; a spare node joins")
        demo.bring_spare()
        for number, fault in enumerate(FAULTS, 1):
            _wait_for_ground(run, demo)
            _endure(fault, number, demo, show)
        code = run.wait_for_end(END_LIMIT_S)
    finally:
        run.close()
    if code != 0:
        raise RunFailed(f"unbroken run ended with {code}: {run.lines[-1].text if run.lines else ''}")
    show.say(f"the run ended after {time.monotonic() - run.started:.1f} s with exit code 0", "bold green")
    show.ettr(demo.view())
    return _prove(demo, show)


def _wait_for_ground(run: WatchedRun, demo: DemoRun) -> None:
    """Until enough new steps were made, and the newest checkpoint is some steps old: work that must be done again."""
    newest = run.last_step()
    target = newest + STEPS_BETWEEN
    target += (4 - target) % demo.save_every
    run.wait_for_step(target, after=time.monotonic(), timeout_s=START_LIMIT_S)


def _endure(fault: Fault, number: int, demo: DemoRun, show: Show) -> None:
    known = demo.view().incidents_total
    before, moved = len(demo.summary()), demo.set_aside()
    at = time.monotonic()
    show.fault(number, len(FAULTS), fault.title, fault.do(demo))
    if fault.heals:
        again = demo.continued(at)
        rows = [row for row in demo.summary()[before:] if not row["detail"] and row["kind"] != "note"]
        show.recovered_alone(rows, again - at)
    else:
        incident = demo.settled_incident(known)
        show.incident(incident, demo.resumed_from(), [one for one in demo.set_aside() if one not in moved])


def _prove(demo: DemoRun, show: Show) -> bool:
    show.say("the same training again, undisturbed, by plain torchrun, for comparison")
    reference = demo.undisturbed()
    try:
        code = reference.wait_for_end(END_LIMIT_S)
    finally:
        reference.close()
    if code != 0:
        raise RunFailed(f"the undisturbed run ended with {code}: {reference.lines[-1].text}")
    supervised, undisturbed = weights_sha256(demo.checkpoints), weights_sha256(demo.folder / "undisturbed")
    show.proof(supervised, undisturbed)
    return supervised == undisturbed
