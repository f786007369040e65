"""How long a save holds up training: a snapshot beside a warm memory copy and other ways, the same state in one run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from supervisor.errors import RunFailed

SCRIPT = Path(__file__).with_name("saves.py")
BUDGET_S = 150.0
"""After so long no further round begins. One of 256 MiB takes 4 to 20 s on two cores, as busy as they are."""
LIMIT_S = 900.0
OUTPUT_KEPT = 20_000
COPY, OURS, DEFAULT = "memory copy, warm", "async_save, our stager", "async_save, defaults"
GOALS = ((COPY, 1.5), (DEFAULT, 0.25))
"""Of the fastest snapshot: so many times the fastest of these at most."""


class Size(NamedTuple):
    """What is saved."""

    mib: int = 256
    tensor_mib: float = 64.0
    """Of each tensor. Memory for tensors of less than 32 MiB is reused by malloc, which flatters copies that are made
    anew each time."""


def report(folder: Path, size: Size, rounds: int, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Raises RunFailed."""
    about = f"{size.mib} MiB in tensors of {size.tensor_mib:g} MiB, {threads} thread{'s' if threads > 1 else ''}"
    say(f"{about}: {rounds} rounds and one before to warm up, or as many as begin within {BUDGET_S:.0f} s")
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, str(SCRIPT), str(folder), str(size.mib), str(size.tensor_mib), str(rounds)]
    process = subprocess.Popen(
        [*command, str(BUDGET_S)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    late = threading.Timer(LIMIT_S, _kill, (process,))
    late.start()
    text = ""
    found: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            if line.startswith('{"threads"'):
                found = json.loads(line)
                break  # what others have left behind may hold the pipe open
            text = (text + line)[-OUTPUT_KEPT:]
            if line.startswith('{"rounds"'):
                say(_progress(json.loads(line), rounds))
    finally:
        late.cancel()
        _kill(process)
        process.wait()
    if not found:
        why = f"they took more than {LIMIT_S:.0f} s" if late.finished.is_set() and not text else text.strip()[-1000:]
        raise RunFailed(f"the saves were not measured (exit code {process.returncode}): {why}")
    return summary(found, size)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started: others leave servers behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _progress(told: dict[str, Any], rounds: int) -> str:
    done, seconds = told["rounds"], told["seconds"]
    if not done:
        return "round 0, to warm up"
    left = min(seconds / done * (rounds + 1 - done), max(BUDGET_S - seconds, seconds / done))
    return f"round {done} of {rounds}, after {seconds:.0f} s; about {left:.0f} s are left"


def summary(measured: dict[str, Any], size: Size) -> dict[str, Any]:
    """Ratios of minima: what else the machine does only ever adds."""
    ways: dict[str, Any] = measured["ways"]
    best = {name: min(times) for name, times in ways.items() if not isinstance(times, str)}
    rows = [
        {
            "way": name,
            "stall_s": [] if isinstance(times, str) else [round(one, 4) for one in times],
            "best_s": best.get(name),
            "copies": round(best[name] / best[COPY], 2) if name in best and COPY in best else None,
            "why_not": times if isinstance(times, str) else "",
        }
        for name, times in ways.items()
    ]
    goals = []
    for name, limit in GOALS:
        value = best[OURS] / best[name] if OURS in best and name in best else None
        met = value is not None and value <= limit
        goals.append({"what": f"{OURS} / {name}", "value": value, "goal": limit, "met": met})
    return {
        "mib": size.mib,
        "tensor_mib": size.tensor_mib,
        "rounds": max((len(times) for times in ways.values() if not isinstance(times, str)), default=0),
        "threads": measured["threads"],
        "torch": measured["torch"],
        "load": round(os.getloadavg()[0], 1),
        "rows": rows,
        "goals": goals,
    }
