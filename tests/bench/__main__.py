"""Benches of the diagnoser, for who works on it: `python -m tests.bench diagnosis|flight|scan`, from the repository.

A table for people, `--json` for programs.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

import click

from supervisor.errors import LaunchRefused
from supervisor.run.prepare import training_python
from tests.bench import diagnosis as diagnosis_bench
from tests.bench import flight as flight_bench
from tests.bench import scan as scan_bench


@click.group()
def group() -> None:
    """Measure the diagnoser on this machine."""


@group.command()
@click.argument("corpus", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--weights", "file", type=click.Path(path_type=Path), help="Another weights.toml.")
@click.option("--without", multiple=True, help="Leave out a factor or a row of weights.toml by its name.")
@click.option("--each", is_flag=True, help="Only what changes without each factor and row, one at a time.")
def diagnosis(corpus: Path, as_json: bool, file: Path | None, without: tuple[str, ...], each: bool) -> int:
    """How often the diagnoser is right on labelled logs (JSON Lines: a file, or a folder of them)."""
    try:
        diagnosis_bench.use_weights(file, without)
        if each:
            rows = diagnosis_bench.without_each(corpus)
            print(json.dumps(rows)) if as_json else diagnosis_bench.show_each(rows)
            return 0
        found = diagnosis_bench.report(corpus)
    except diagnosis_bench.WrongCorpus as error:
        _log(str(error))
        return 2
    print(json.dumps(found)) if as_json else diagnosis_bench.show(found)
    return 0


@group.command()
@click.option("--cases", type=click.IntRange(0, 1000), default=20, show_default=True, help="Of each kind of fault.")
@click.option("--ranks", type=click.IntRange(0, 16_384), default=1024, show_default=True, help="Largest job.")
@click.option("--torchrun-up-to", type=click.IntRange(0, 4096), default=256, show_default=True, help="Its largest job.")
@click.option("--seed", type=int, help="Repeats the cases of an earlier run (default: a new one, printed).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def flight(cases: int, ranks: int, torchrun_up_to: int, seed: int | None, as_json: bool) -> int:
    """Which rank held up the others, by flight recorder dumps of generated jobs; beside torchrun's own analyser."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    _log(f"seed {seed}")
    try:
        python = training_python("torchrun", False, os.environ)
    except LaunchRefused as refused:
        _log(f"torchrun's analyser is left out: {refused}")
        python = ""
    size = flight_bench.Size(cases=cases, ranks=ranks, theirs_up_to=torchrun_up_to, seed=seed)
    with tempfile.TemporaryDirectory(prefix="unbroken-bench-") as folder:
        found = flight_bench.report(Path(folder), size, python, _log)
    print(json.dumps(found)) if as_json else flight_bench.show(found)
    return 0


@group.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def scan(paths: tuple[str, ...], as_json: bool) -> int:
    """How fast logs are read with all rules on (generated, or PATHS), beside ripgrep, Python's re and Drain3."""
    found = scan_bench.report(paths, _log)
    print(json.dumps(found)) if as_json else scan_bench.show(found)
    return 0 if scan_bench.met(found) else 1


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(group.main(prog_name="python -m tests.bench", standalone_mode=False) or 0)
