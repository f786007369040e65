"""Where the demo plays: one folder with everything the run writes, and the run itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from supervisor.controller.journal import read_history
from supervisor.controller.report import fold, timeline_rows
from supervisor.demo.rehearsal import Rehearsal, RehearsalFailed, live_workers, torchrun, unbroken
from supervisor.keeper_client import WorkerProcess
from supervisor.view import IncidentView, JobView

SCRIPT = Path(__file__).with_name("train.py")
POLL_S = 0.1
RECOVERY_LIMIT_S = 90.0


RANK_WITHIN_S = 15.0
SHORT = 48


class Stage:
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
        self.run: Rehearsal | None = None

    def training_command(self, out: Path) -> list[str]:
        """The user's own command."""
        script = [str(SCRIPT), "--out", str(out), "--steps", str(self.steps), "--save-every", str(self.save_every)]
        return [*torchrun(), "--nproc-per-node", str(self.ranks), *script]

    def begin(self) -> Rehearsal:
        """Start the run on its first node; with a second one to come as a spare."""
        self.orders.mkdir(parents=True)
        self.kernel_log.touch()
        self.run = Rehearsal(self._node("n1", "--spares", "1"), folder=self.folder, env=self._env())
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

    def undisturbed(self) -> Rehearsal:
        """The same training by plain torchrun, nothing of ours around it."""
        return Rehearsal(self.training_command(self.folder / "undisturbed"), folder=self.folder)

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
        raise RehearsalFailed(f"rank {rank} does not run")

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
        """The incident after the first `known`, once it is closed. Raises RehearsalFailed."""
        return self._wait(lambda view: _closed(view, known), "the job did not recover")

    def continued(self, fault_at: float) -> float:
        """When a step was printed again after a pause since `fault_at` (monotonic). Raises RehearsalFailed."""
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
        raise RehearsalFailed(f"{else_say} within {RECOVERY_LIMIT_S:.0f} s")


_SAVED = re.compile(r"step-(\d+)\.pt")


def _closed(view: JobView, known: int) -> IncidentView | None:
    if view.incidents_total <= known or not view.incidents:
        return None
    newest = view.incidents[-1]
    return newest if newest.closed_at is not None else None


def weights_sha256(folder: Path) -> str:
    """Of the file with the final weights: bytes follow from the weights alone."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def signal_rank(stage: Stage, rank: int, number: int) -> int:
    """The pid that got the signal."""
    pid = stage.rank(rank).pid
    os.kill(pid, number)
    return pid


XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


class Fault(NamedTuple):
    title: str
    do: Callable[[Stage], str]
    """Does it, and says what exactly was done."""
    heals: bool = False
    """Nothing has to be restarted: the run goes on by itself or is helped on."""


def _kill(stage: Stage) -> str:
    return f"SIGKILL to pid {signal_rank(stage, 1, signal.SIGKILL)}"


def _hang(stage: Stage) -> str:
    stage.order(1, "hang")
    return "a deadlock, it waits for a lock of its own: nothing exits, nothing is printed"


def _stop(stage: Stage) -> str:
    return f"SIGSTOP to pid {signal_rank(stage, 0, signal.SIGSTOP)}"


def _tear(stage: Stage) -> str:
    path = stage.newest_checkpoint()
    size = path.stat().st_size
    os.truncate(path, size // 2)
    signal_rank(stage, 0, signal.SIGKILL)
    return f"{path.name} cut to {size // 2:,} of {size:,} bytes, then SIGKILL to rank 0"


def _exception(stage: Stage) -> str:
    stage.order(1, "exception")
    return "an IndexError that nobody catches"


def _lose_gpu(stage: Stage) -> str:
    stage.kernel_says(XID_79)
    stage.order(1, "cuda")
    return "kernel log: " + XID_79


FAULTS = (
    Fault("rank 1 is killed", _kill),
    Fault("rank 0 is stopped", _stop, heals=True),
    Fault("rank 1 is in a deadlock", _hang),
    Fault("a torn checkpoint", _tear),
    Fault("rank 1 raises an exception", _exception),
    Fault("the GPU of rank 1 falls off the bus of node n1", _lose_gpu),
)
