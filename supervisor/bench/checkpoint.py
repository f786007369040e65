"""How long a save holds up training: a snapshot beside a warm memory copy and other ways, the same state in one run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.errors import RunFailed

SCRIPT = Path(__file__).with_name("saves.py")
LIMIT_S = 900.0
COPY, OURS, DEFAULT = "memory copy, warm", "async_save, our stager", "async_save, defaults"
GOALS = ((COPY, 1.5), (DEFAULT, 0.25))
"""Of the fastest snapshot: so many times the fastest of these at most."""


def report(folder: Path, mib: int, rounds: int, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Raises RunFailed."""
    say(f"{mib} MiB, {rounds} rounds, {threads} thread{'s' if threads > 1 else ''}")
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, str(SCRIPT), str(folder), str(mib), str(rounds)]
    output = folder / "output.txt"
    with open(output, "wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"the saves took more than {LIMIT_S:.0f} s") from error
        finally:  # others leave servers behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = output.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith('{"threads"')]
    if code or not lines:
        raise RunFailed(f"exit code {code}: {text.strip()[-1000:]}")
    return summary(json.loads(lines[-1]), mib)


def summary(measured: dict[str, Any], mib: int) -> dict[str, Any]:
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
        "mib": mib,
        "threads": measured["threads"],
        "torch": measured["torch"],
        "load": round(os.getloadavg()[0], 1),
        "rows": rows,
        "goals": goals,
    }
