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
from supervisor.bench import checkpoint as checkpoint_bench
from supervisor.bench import control_plane as control_plane_bench
from supervisor.bench import mirrors as mirrors_bench
from supervisor.bench import overhead as overhead_bench
from supervisor.bench import recovery as recovery_bench
from supervisor.errors import RunFailed

NAMES = {
    "first_start": "command to first step",
    "new_workers": "killed rank to new workers",
    "new_step": "killed rank to first new step",
}

MIRROR_PAIRS = 3
"""Less than three minutes."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Measure on this machine; needs torch."""


@group.command()
@click.option("--repetitions", type=click.IntRange(1, 50), default=3, show_default=True)
@click.option(
    "--script",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="Measure this training script instead of our own (docs/benchmarks.md).",
)
@click.option("--fault", type=click.Choice(["xid"]), help="Only this: a GPU falls off the bus, its rank hangs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def recovery(repetitions: int, script: Path | None, fault: str | None, as_json: bool) -> int:
    """Recovery times beside plain torchrun's, in one run."""
    if fault:
        found = _in_scratch(lambda folder: recovery_bench.report_xid(folder, repetitions, _say))
    elif script is None:
        found = _in_scratch(lambda folder: recovery_bench.report(folder, repetitions, _say))
    else:
        found = _in_scratch(lambda folder: recovery_bench.report_script(folder, script, repetitions, _say))
    if found is None:
        return 1
    show = _show_xid if fault else _show_recovery
    print(json.dumps(found)) if as_json else show(found)
    return 0


@group.command()
@click.option("--kills", type=click.IntRange(1, 10_000), default=30, show_default=True)
@click.option("--seed", type=int, help="Repeats the kills of an earlier run (default: a new one, printed).")
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


@group.command()
@click.option("--mib", type=click.IntRange(1, 1 << 20), default=256, show_default=True, help="Size of the state.")
@click.option(
    "--tensor-mib", type=click.FloatRange(0.001, 4096), default=64.0, show_default=True, help="Of each tensor."
)
@click.option("--rounds", type=click.IntRange(1, 100), default=8, show_default=True, help="At most; three minutes.")
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="torchrun's default is 1.")
@click.option("--mirrors", is_flag=True, help="Instead: the time of a step with mirrored snapshots, and without.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def checkpoint(mib: int, tensor_mib: float, rounds: int, threads: int, mirrors: bool, as_json: bool) -> int:
    """How long a save holds up training: snapshots, torch.save, torch's distributed checkpoints."""
    if mirrors:
        found = _in_scratch(lambda folder: mirrors_bench.report(folder, mib, MIRROR_PAIRS, _say))
        return _show_and_judge(found, as_json, _show_mirrors)
    size = checkpoint_bench.Size(mib, tensor_mib)
    found = _in_scratch(lambda folder: checkpoint_bench.report(folder, size, rounds, threads, _say))
    return _show_and_judge(found, as_json, _show_checkpoint)


@group.command()
@click.option("--seconds", type=click.FloatRange(1, 86_400), default=60.0, show_default=True)
@click.option("--ranks", type=click.IntRange(1, 128), default=8, show_default=True)
@click.option("--job-dir", default="", help="Measure the node of this job that runs here, and start nothing.")
@click.option("--local-dir", default="", help="The same, by the node's local folder.")
@click.option("--gpu-library", default="", help="A stand-in for libnvidia-ml.so.1.")
@click.option("--gpus", type=click.IntRange(0, 16), default=0, help="Stand in for so many GPUs on the PCI bus (root).")
@click.option("--ports", type=click.IntRange(0, 32), default=0, help="Stand in for so many InfiniBand ports (root).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def overhead(
    seconds: float, ranks: int, job_dir: str, local_dir: str, gpu_library: str, gpus: int, ports: int, as_json: bool
) -> int:
    """What the agent with all its probes costs a node: CPU and memory, beside what others publish."""
    load = overhead_bench.Load(ranks=ranks, gpu_library=gpu_library, gpus=gpus, ports=ports)

    def measure(folder: Path) -> dict[str, Any]:
        if not (job_dir or local_dir):
            return overhead_bench.report(folder, load, seconds, _say)
        return overhead_bench.measure(overhead_bench.running(job_dir, local_dir), seconds)

    found = _in_scratch(measure)
    return _show_and_judge(found, as_json, _show_overhead)


@group.command(name="control-plane")
@click.option("--nodes", "sizes", multiple=True, type=click.IntRange(4, 16_384), help="Repeat for more sizes.")
@click.option("--phase", "phases", multiple=True, type=click.Choice(control_plane_bench.PHASES), help="Only these.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def control_plane(sizes: tuple[int, ...], phases: tuple[str, ...], as_json: bool) -> int:
    """A controller with 16 to 4,096 fake agents over real sockets: what it costs, how quickly it answers."""
    chosen = sorted(sizes) or [16, 256, 1024]

    def measure(folder: Path) -> dict[str, Any]:
        return control_plane_bench.report(folder, chosen, phases or control_plane_bench.PHASES, _say)

    found = _in_scratch(measure)
    return _show_and_judge(found, as_json, _show_control_plane)


def _in_scratch(measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    folder = Path(tempfile.mkdtemp(prefix="unbroken-bench-"))
    try:
        found = measure(folder)
    except RunFailed as failure:
        _say(f"failed: {failure}\neverything is kept in {folder}")
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _show_and_judge(found: dict[str, Any] | None, as_json: bool, show: Callable[[dict[str, Any]], None]) -> int:
    """The exit code: 0 where all goals are met."""
    if found is None:
        return 1
    print(json.dumps(found)) if as_json else show(found)
    return 0 if all(goal["met"] for goal in found["goals"]) else 1


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
    if "equal_weights" in found:
        console.print(f"weights at the end: {'equal' if found['equal_weights'] else 'NOT EQUAL'}")
        return
    hangs = Table(
        title="proven hangs: seconds from the fault (plain torchrun notices none before the collective times out)"
    )
    for heading in ("rank 1 is made to", "slowest step before", "suspected", "confirmed"):
        hangs.add_column(heading, justify="right")
    for fault, times in found["hang"].items():
        hangs.add_row(fault, *(f"{times[name]:.2f}" for name in ("slowest_step", "suspected", "confirmed")))
    console.print(hangs)


def _show_xid(found: dict[str, Any]) -> None:
    table = Table(title=f"an Xid 79 whose rank hangs: seconds from the kernel's line; load {found['load']:.1f}")
    phases = list(found["xid"][0]["phases"])
    last = f"to first step, less a slow step (goal {found['goal_s']})"
    for heading in ("steps of", "slow step", "to incident", "to cordon", *phases, "to first step", last):
        table.add_column(heading, justify="right")
    for row in found["xid"]:
        before = [row[name] for name in ("slow_step", "finding", "verdict")]
        times = [*before, *(row["phases"].get(name, 0.0) for name in phases), row["new_step"], row["after_slow_step"]]
        table.add_row(f"{row['step_ms']:.0f} ms", *(f"{one:.2f}" for one in times))
    Console(width=140).print(table)


def _show_checkpoint(found: dict[str, Any]) -> None:
    console = Console(width=110)
    what = f"{found['mib']} MiB in tensors of {found['tensor_mib']:g} MiB, {found['rounds']} rounds"
    about = f"{what}, torch {found['torch']}, threads: {found['threads']}, load {found['load']}"
    table = Table(title=about)
    for heading in ("the script waits for", "best s", "median s", "memory copies"):
        table.add_column(heading, justify="left" if heading.startswith("the") else "right")
    for row in found["rows"]:
        if not row["why_not"]:
            times = (row["best_s"], statistics.median(row["stall_s"]))
            table.add_row(row["way"], *(f"{one:.3f}" for one in times), f"{row['copies']:.2f}")
    console.print(table)
    for row in found["rows"]:
        if row["why_not"]:
            console.print(f"skipped: {row['way']} ({row['why_not'][:100]})", highlight=False)
    _show_goals(found)


def _show_mirrors(found: dict[str, Any]) -> None:
    print(
        f"a step with mirrors: {_cell(found['on_ms'])} ms, without: {_cell(found['off_ms'])} ms; {found['mib']} MiB a "
        f"rank every {found['snapshot_every_s']:g} s, load {found['load']}\n"
        f"ratios of pairs: {_cell(found['ratios'])}; of minima {found['ratio_of_minima']:.3f}"
    )
    _show_goals(found)


def _show_overhead(found: dict[str, Any]) -> None:
    console = Console(width=110)
    table = Table(title=f"{found['seconds']:.0f} s; {found['about']}")
    for heading in ("process", "CPU %", "ended children %", "RSS MiB", "peak MiB", "PSS MiB"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for row in found["processes"]:
        beside = "" if row["role"] in overhead_bench.COUNTED else " (not counted)"
        memory = (f"{row[name]:.1f}" for name in ("rss_mib", "peak_mib", "pss_mib"))
        table.add_row(f"{row['role']}{beside}", f"{row['cpu_percent']:.3f}", f"{row['children_percent']:.3f}", *memory)
    console.print(table)
    probes = Table(title="looks of the probes (part of the stations' CPU)")
    for heading in ("probe", "looks", "CPU ms a look", "ms a look", "CPU %"):
        probes.add_column(heading, justify="left" if heading == "probe" else "right")
    for row in found["probes"]:
        times = (f"{row[name]:.2f}" if name in row else "" for name in ("cpu_ms", "took_ms"))
        share = "" if row["cpu_percent"] is None else f"{row['cpu_percent']:.3f}"
        probes.add_row(row["probe"], str(row["looks"]), *times, share)
    console.print(probes)
    _show_goals(found)
    for other in found["published"]:
        line = f"{other['what']}: {other['mib']} MiB, {other['cpu']} ({other['source']})"
        console.print(f"published, not measured here: {line}", highlight=False)


def _show_control_plane(found: dict[str, Any]) -> None:
    console = Console(width=120)
    rows = found["rows"]
    table = Table(title=f"load {found['load']:.1f}")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['nodes']} nodes", justify="right")
    table.add_column("exponent", justify="right")
    for name in rows[-1]:
        if name != "nodes":
            growth = found["growth"].get(name)
            values = (f"{row[name]:g}" if name in row else "" for row in rows)
            table.add_row(name, *values, "" if growth is None else f"{growth:.2f}")
    console.print(table)
    _show_goals(found)


def _show_goals(found: dict[str, Any]) -> None:
    for goal in found["goals"]:
        value = "not measured" if goal["value"] is None else f"{goal['value']:.4g}"
        print(f"{goal['what']}: {value}, goal {goal['goal']:g}: {'met' if goal['met'] else 'NOT MET'}")


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in sorted(values))})"
