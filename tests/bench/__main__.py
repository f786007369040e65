"""Benches of the diagnoser, for who works on it: `python -m tests.bench --help`, from the repository.

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

from supervisor import config
from supervisor.errors import ConfigError, LaunchRefused
from supervisor.opinion.client import Endpoint, LocalModel
from supervisor.opinion.queue import backend_of
from supervisor.run.prepare import training_python
from tests.bench import diagnosis as diagnosis_bench
from tests.bench import flight as flight_bench
from tests.bench import good_runs
from tests.bench import hazards as hazards_bench
from tests.bench import learning as learning_bench
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
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Only every Nth item.")
@click.option("--configured", is_flag=True, help="Ask the model of [opinion], not the stand-in that always obeys.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def hazards(seed: int, every: int, configured: bool, as_json: bool) -> int:
    """What hostile logs and a model that obeys them lead to: nothing, or it is named. Exit code 1: something."""
    answerer = hazards_bench.obeys
    if configured:
        backend = _configured()
        if backend is None:
            return 2
        answerer = hazards_bench.configured(backend)
    found = hazards_bench.report(answerer, hazards_bench.items(seed)[::every], _log)
    print(json.dumps(found)) if as_json else hazards_bench.show(found)
    return 1 if found["failed"] else 0


def _configured() -> Endpoint | LocalModel | None:
    """The model of [opinion]; None, after a word about why, where there is none to ask."""
    given = config.load_here().settings.opinion
    try:
        config.check_opinion(given)
        python = training_python("python", True, os.environ) if given.backend == "transformers" else ""
    except (ConfigError, LaunchRefused) as error:
        _log(str(error))
        return None
    backend = backend_of(given, python)
    if backend is None:
        _log("no model is configured: set opinion.backend (docs/opinion.md)")
    return backend


@group.command()
@click.argument("corpus", required=False, type=click.Path(path_type=Path))
@click.option("--answers", type=click.Path(path_type=Path), help="Recorded answers, not the stand-in's.")
@click.option("--configured", is_flag=True, help="Ask the model of [opinion]; --record keeps its answers.")
@click.option("--record", type=click.Path(path_type=Path), help="Append the model's answers to this file.")
@click.option("--from-nothing", is_flag=True, help="Switch off all packaged rules of output before.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def learning(
    corpus: Path | None, answers: Path | None, configured: bool, record: Path | None, from_nothing: bool, as_json: bool
) -> int:
    """What rules that a model proposes are worth on later cases of CORPUS (default: the samples of our rules)."""
    try:
        cases = learning_bench.load(corpus) if corpus is not None else learning_bench.of_samples()
        answerer = learning_bench.recorded(answers) if answers is not None else learning_bench.stand_in
    except learning_bench.WrongCorpus as error:
        _log(str(error))
        return 2
    if configured:
        backend = _configured()
        if backend is None:
            return 2
        answerer = learning_bench.recording(backend, record)
    found = learning_bench.report(learning_bench.run(cases, answerer, from_nothing=from_nothing, note=_log))
    print(json.dumps(found)) if as_json else learning_bench.show(found)
    return 0


@group.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def scan(paths: tuple[str, ...], as_json: bool) -> int:
    """How fast logs are read with all rules on (generated, or PATHS), beside ripgrep, Python's re and Drain3."""
    found = scan_bench.report(paths, _log)
    print(json.dumps(found)) if as_json else scan_bench.show(found)
    return 0 if scan_bench.met(found) else 1


@group.command()
@click.argument("corpora", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def good(corpora: tuple[Path, ...], as_json: bool) -> int:
    """What a comparison with good runs does to verdicts on labelled logs."""
    found = good_runs.report(corpora)
    print(json.dumps(found)) if as_json else good_runs.show(found)
    return 0


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(group.main(prog_name="python -m tests.bench", standalone_mode=False) or 0)
