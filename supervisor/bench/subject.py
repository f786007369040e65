"""What is measured: the same script under plain torchrun and under unbroken, with the same eyes on both."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from supervisor.demo.rehearsal import Rehearsal, RehearsalFailed, torchrun, unbroken

SCRIPT = Path(__file__).with_name("toy.py")
UP = re.compile(r"rank (\d+) up, pid (\d+)")
RESTARTS = 1000
LIMIT_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Script(NamedTuple):
    """How the toy is run."""

    ranks: int = 2
    steps: int = 100_000
    step_ms: float = 20.0
    save_every: int = 20

    def command(self, out: Path) -> list[str]:
        options = {"--steps": self.steps, "--step-ms": self.step_ms, "--save-every": self.save_every}
        arguments = [f"{name}={value}" for name, value in options.items()]
        return ["--nproc-per-node", str(self.ranks), str(SCRIPT), f"--out={out}", *arguments]


def plain(script: Script, folder: Path) -> Rehearsal:
    """Plain torchrun at its best: with its shared store on, half of its restarts fail (docs/benchmarks.md)."""
    command = [*torchrun(), f"--max-restarts={RESTARTS}", *script.command(folder / "out")]
    return Rehearsal(command, folder=folder, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def supervised(script: Script, folder: Path, env: Mapping[str, str] | None = None) -> Rehearsal:
    """The same under unbroken, with nothing configured but where its files are."""
    command = unbroken("run", "--job-dir", str(folder / "job"), "--", *torchrun(), *script.command(folder / "out"))
    places = {"UNBROKEN_LOCAL_DIR": str(folder / "l"), "BENCH_FAULTS": str(folder)}
    return Rehearsal(command, folder=folder, env={**places, **(env or {})})


class Ranks(NamedTuple):
    """One generation of workers."""

    pids: dict[int, int]
    begun_at: float
    """When the last of them was created, monotonic."""
    reported_at: float
    """When the last of them had printed its first line."""


def wait_for_ranks(run: Rehearsal, script: Script, after: float) -> Ranks:
    """The generation of workers that reported for duty since `after`. Raises RehearsalFailed."""
    deadline = time.monotonic() + LIMIT_S
    pids: dict[int, int] = {}
    created: list[float] = []
    reported = after
    while len(pids) < script.ranks:
        line, match = run.wait_for(UP, after=after, timeout_s=deadline - time.monotonic(), test=_any_but(pids))
        reported = max(reported, line.at)
        pids[int(match[1])] = int(match[2])
        created.append(process_created(int(match[2])))
    return Ranks(pids, max(created), reported)


def process_created(pid: int) -> float:
    """When a process was created on the monotonic clock, to 10 ms. Raises RehearsalFailed when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        raise RehearsalFailed(f"process {pid} is gone") from None
    since_boot = int(stat[stat.rfind(")") + 2 :].split()[19]) / TICKS_PER_S
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def weights_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "out" / "weights.bin").read_bytes()).hexdigest()


def _any_but(pids: Mapping[int, int]) -> Callable[[re.Match[str]], bool]:
    known = frozenset(pids)
    return lambda match: int(match[1]) not in known
