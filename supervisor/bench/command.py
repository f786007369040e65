"""The command line of the benchmarks: a table for people, `--json` for programs."""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from supervisor.bench import chaos as chaos_bench
from supervisor.bench import recovery as recovery_bench
from supervisor.demo.rehearsal import RehearsalFailed

NAMES = {
    "first_start": "command to first step",
    "new_workers": "killed rank to new workers",
    "new_step": "killed rank to first new step",
}


@click.group()
def group() -> None:
    """Measure on this machine; needs torch."""


@group.command()
@click.option("--repetitions", type=click.IntRange(1, 50), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def recovery(repetitions: int, as_json: bool) -> int:
    """Recovery times beside plain torchrun's, in one run."""
    found = _in_scratch(lambda folder: recovery_bench.report(folder, repetitions, _say))
    if found is None:
        return 1
    print(json.dumps(found)) if as_json else _show_recovery(found)
    return 0


@group.command()
@click.option("--kills", type=click.IntRange(1, 10_000), default=30, show_default=True)
@click.option("--seed", type=int, help="Repeats the blows of an earlier run (default: a new one, printed).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def chaos(kills: int, seed: int | None, as_json: bool) -> int:
    """SIGKILL to controller, agent or both at random moments."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    _say(f"seed {seed}")
    found = _in_scratch(lambda folder: chaos_bench.report(folder, kills, seed, _say))
    if found is None:
        return 1
    if as_json:
        print(json.dumps(found))
    else:
        equal = "equal" if found["equal_weights"] else "NOT EQUAL"
        print(f"{found['kills']} killed, all {found['steps']} steps in {found['took_s']:.0f} s, final weights {equal}")
    return 0 if found["equal_weights"] else 1


def _in_scratch(measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    folder = Path(tempfile.mkdtemp(prefix="unbroken-bench-"))
    try:
        found = measure(folder)
    except RehearsalFailed as failure:
        _say(f"failed: {failure}\neverything is kept in {folder}")
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show_recovery(found: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"seconds, median of {found['repetitions']} (all values); load {found['load']:.1f}")
    for heading in ("", "torchrun", "unbroken", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in found["recovery"]:
        table.add_row(NAMES[row["what"]], _cell(row["torchrun_s"]), _cell(row["unbroken_s"]), f"{row['ratio']:.2f}")
    console.print(table)
    hangs = Table(title="seconds from the fault (plain torchrun notices none before the collective times out)")
    for heading in ("rank 1 is made to", "slowest step before", "suspected", "confirmed"):
        hangs.add_column(heading, justify="right")
    for fault, times in found["hang"].items():
        hangs.add_row(fault, *(f"{times[name]:.2f}" for name in ("slowest_step", "suspected", "confirmed")))
    console.print(hangs)


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in sorted(values))})"
