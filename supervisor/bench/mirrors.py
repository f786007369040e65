"""Step time with snapshots mirrored to another node's memory, and without: pairs of runs in turns, two nodes here."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from supervisor.bench.recovery import LIMIT_S, SCRIPT
from supervisor.demo.watched_run import WatchedRun, torchrun, unbroken
from supervisor.errors import RunFailed

STEP_MS: Final = 20.0
SNAPSHOT_EVERY: Final = 25
FIRST_STEP: Final = 100
"""Before it nothing is measured: the memory is taken, the first step to be mirrored is named."""
MEASURED_S: Final = 15.0
LIMIT_OF_NOISE: Final = 1.03
"""Of the medians: so much more is within the noise of runs that do the same."""


class MirroredRun(NamedTuple):
    step_ms: float
    mirrored: int
    """The newest step that was mirrored; 0: none."""


def measure(folder: Path, mib: int, *, on: bool) -> MirroredRun:
    """One run. The mean of its steps: snapshots and whatever else the ranks wait for are in it. Raises RunFailed."""
    (folder / "shared").mkdir(parents=True)
    script = [str(SCRIPT), f"--out={folder / 'out'}", "--steps=1000000", f"--step-ms={STEP_MS}", "--save-every=1000000"]
    script += [f"--snapshot-every={SNAPSHOT_EVERY}", f"--snapshot-mib={mib}"]
    job = ("--job-dir", str(folder / "job"))

    def node(name: str) -> tuple[list[str], dict[str, str]]:
        (folder / name).mkdir()
        own = ("--node-name", name, "--checkpoint-dir", str(folder / name), "--publish-to", str(folder / "shared"))
        command = unbroken("run", *job, *own, "--", *torchrun(), "--nnodes=2", "--nproc-per-node=1", *script)
        return command, {"UNBROKEN_LOCAL_DIR": str(folder / f"l{name}"), "UNBROKEN_MIRROR_SNAPSHOTS": str(int(on))}

    command, env = node("a")
    run = WatchedRun(command, folder=folder, env=env)
    try:
        command, env = node("b")
        run.join(command, folder=folder, env=env)
        first = run.wait_for_step(FIRST_STEP, timeout_s=LIMIT_S)
        time.sleep(MEASURED_S)
        last = run.wait_for_step(run.last_step() + 1, timeout_s=LIMIT_S)
        status = subprocess.run(unbroken("status", "--json", *job), capture_output=True, timeout=30, check=False)
        told = json.loads(status.stdout or b"{}")
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise RunFailed(f"`unbroken status` does not answer: {error}") from None
    finally:
        run.close(grace_s=20.0)
    steps = _step(last.text) - _step(first.text)
    return MirroredRun(1000 * (last.at - first.at) / steps, int((told.get("mirrored_snapshot") or {}).get("step", 0)))


def _step(line: str) -> int:
    return int(line.rpartition("step ")[2].partition("/")[0])


def report(folder: Path, mib: int, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Raises RunFailed: also where nothing was mirrored."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * pairs):
        on = turn % 4 in (0, 3)
        one = measure(folder / f"run-{turn}", mib, on=on)
        if on and not one.mirrored:
            raise RunFailed("no snapshot was mirrored: the machine is too busy, or has too little memory")
        found[on].append(one.step_ms)
        say(f"{turn + 1} of {2 * pairs}, mirrors {'on' if on else 'off'}: {one.step_ms:.2f} ms a step")
    ratios = [on / off for on, off in zip(found[True], found[False], strict=True)]
    ratio = statistics.median(ratios)
    goal = {"what": "step time with mirrors / without", "value": ratio, "goal": LIMIT_OF_NOISE}
    return {
        "mib": mib,
        "snapshot_every_s": round(SNAPSHOT_EVERY * STEP_MS / 1000, 3),
        "on_ms": [round(one, 3) for one in found[True]],
        "off_ms": [round(one, 3) for one in found[False]],
        "ratios": [round(one, 4) for one in ratios],
        "ratio_of_minima": round(min(found[True]) / min(found[False]), 4),
        "load": round(os.getloadavg()[0], 1),
        "goals": [{**goal, "met": ratio <= LIMIT_OF_NOISE}],
    }
