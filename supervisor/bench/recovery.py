"""How long a first start, a killed rank, a stopped one and one in a deadlock take, beside plain torchrun in one run."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from supervisor.bench.subject import LIMIT_S, Script, plain, supervised, wait_for_ranks
from supervisor.controller.journal import read_history
from supervisor.controller.report import timeline_rows
from supervisor.demo.rehearsal import Rehearsal, RehearsalFailed

STEPS_BEFORE = 45
"""Before each fault: two checkpoints of new work."""
KILLS = 2
"""Killed ranks in each run."""
HANG_LIMIT_S = 30.0

Starter = Callable[[Script, Path], Rehearsal]


class Samples(NamedTuple):
    """Seconds, one value a repetition."""

    first_start: list[float]
    """Command to first step."""
    new_workers: list[float]
    """Killed rank to the creation of the last new worker."""
    new_step: list[float]
    """Killed rank to the first step of the new workers."""


class HangTimes(NamedTuple):
    """Seconds from the fault."""

    slowest_step: float
    """The slowest of the steps just before."""
    suspected: float
    confirmed: float


def measure(start: Starter, folder: Path, samples: Samples) -> None:
    """One run: its first start, then two killed ranks."""
    script = Script()
    folder.mkdir(parents=True)
    run = start(script, folder)
    try:
        samples.first_start.append(run.wait_for_step(1, timeout_s=LIMIT_S).at - run.started)
        for _ in range(KILLS):
            _kill_one(run, script, samples)
    finally:
        run.close(grace_s=20.0)


def _kill_one(run: Rehearsal, script: Script, samples: Samples) -> None:
    run.wait_for_step(run.last_step() + STEPS_BEFORE, after=time.monotonic(), timeout_s=LIMIT_S)
    victim = next(int(line.text.split()[-1]) for line in reversed(run.lines) if line.text.startswith("rank 1 up"))
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    workers = wait_for_ranks(run, script, at)
    samples.new_workers.append(workers.begun_at - at)
    samples.new_step.append(run.wait_for_step(1, after=workers.reported_at, timeout_s=LIMIT_S).at - at)


def measure_hang(fault: str, folder: Path) -> HangTimes:
    """A rank that is stopped (`stop`) or in a deadlock (`deadlock`) under unbroken. Raises RehearsalFailed."""
    script = Script()
    folder.mkdir(parents=True)
    run = supervised(script, folder)
    try:
        ranks = wait_for_ranks(run, script, run.started)
        run.wait_for_step(STEPS_BEFORE, timeout_s=LIMIT_S)
        recent = [line.at for line in run.lines if "step " in line.text][-STEPS_BEFORE:]
        at = time.time()
        if fault == "stop":
            os.kill(ranks.pids[1], signal.SIGSTOP)
        else:
            (folder / "rank1.hang").touch()
        suspected = _time_of(folder / "job", ("hang_suspected",), at)
        confirmed = _time_of(folder / "job", ("hang_confirmed", "rank_wake_wanted"), at)
    finally:
        run.close(grace_s=20.0)
    slowest = max(later - earlier for earlier, later in itertools.pairwise(recent))
    return HangTimes(slowest, suspected - at, confirmed - at)


def _time_of(job_dir: Path, kinds: tuple[str, ...], after: float) -> float:
    """Unix time of the first row of one of these kinds in the job's timeline."""
    deadline = time.monotonic() + HANG_LIMIT_S
    while time.monotonic() < deadline:
        for row in timeline_rows(read_history(job_dir)):
            if row["kind"] in kinds and unix_time(row) >= after:
                return unix_time(row)
        time.sleep(0.1)
    raise RehearsalFailed(f"no {' or '.join(kinds)} within {HANG_LIMIT_S:.0f} s")


def unix_time(row: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(row["at"].replace("Z", "+00:00")).timestamp()


def report(folder: Path, repetitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements as one JSON object; medians decide."""
    torchrun, ours = Samples([], [], []), Samples([], [], [])
    for number in range(1, repetitions + 1):  # in turns: the machine's other load changes
        say(f"{number} of {repetitions}: plain torchrun (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), then unbroken")
        measure(plain, folder / f"torchrun-{number}", torchrun)
        measure(supervised, folder / f"unbroken-{number}", ours)
    rows = [
        {"what": what, "torchrun_s": theirs, "unbroken_s": mine, "ratio": _ratio(mine, theirs)}
        for what, theirs, mine in zip(Samples._fields, torchrun, ours, strict=True)
    ]
    hangs: dict[str, Any] = {}
    for fault in ("stop", "deadlock"):
        say(f"a proven hang of one rank: {fault}")
        hangs[fault] = measure_hang(fault, folder / fault)._asdict()
    return {"schema": 1, "repetitions": repetitions, "load": os.getloadavg()[0], "recovery": rows, "hang": hangs}


def _ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(mine) / statistics.median(theirs)
