"""`unbroken trace`: where the time of a step goes, from traces that the job's ranks make now, or from files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from supervisor.cli.output import print_answer

MOST_RANKS_SHOWN: Final = 64


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="JSON, documented in docs/traces.md.")
def trace(files: tuple[Path, ...], as_json: bool) -> None:
    """Say where the time of a step goes, rank by rank.

    FILE: Kineto traces of ranks, a folder of them, or one timeline of operations (Parquet or CSV): then what the slow
    operations cost.
    """
    from supervisor.diagnose.traces import TraceUnreadable, is_timeline, trace_files

    named = [found for file in files for found in (trace_files(file) if file.is_dir() else [file])]
    if not named:
        raise TraceUnreadable(f"{files[0]} has no trace: they are called kt_*.json or kt_*.json.gz")
    if is_timeline(named[0]):
        if len(named) > 1:
            raise TraceUnreadable(f"{named[0]} is a timeline of a whole job: give it alone")
        print_answer(what_if(named[0]), as_json, _show_what_if)
    else:
        print_answer(summary(named), as_json, show)


def summary(files: Sequence[Path]) -> dict[str, Any]:
    """Where the steps of the ranks went, as JSON types. Raises TraceUnreadable."""
    from diagnosis.step_time import slowest
    from supervisor.diagnose.traces import TraceUnreadable, read_rank

    times = sorted((read_rank(file, at) for at, file in enumerate(files)), key=lambda one: one.rank)
    twice = next((one.rank for one, other in itertools.pairwise(times) if one.rank == other.rank), None)
    if twice is not None:
        raise TraceUnreadable(f"two of the files are traces of rank {twice}: give one of each rank")
    worst = slowest(times)
    return {
        "schema": 1,
        "files": [str(file) for file in files],
        "ranks": [time._asdict() for time in times],
        "slowest": None if worst is None else {**worst._asdict(), "share": worst.share},
    }


def what_if(file: Path) -> dict[str, Any]:
    """What the slow operations of a timeline cost, as JSON types. Raises TraceUnreadable."""
    from diagnosis.whatif import WhatIfError, analyse
    from supervisor.diagnose.traces import TraceUnreadable, read_timeline

    try:
        found = analyse(read_timeline(file))
    except WhatIfError as error:
        raise TraceUnreadable(f"{file}: {error}") from None
    told = msgspec.to_builtins(found._asdict(), str_keys=True)
    told |= {"worst": found.worst._asdict(), "last_stage": found.last_stage._asdict()}
    return {"schema": 1, "files": [str(file)], "what_if": told}


# ----- in words -----


def show(answer: dict[str, Any]) -> None:
    for line in words(answer):
        click.echo(line)


def words(answer: dict[str, Any]) -> Iterable[str]:
    from diagnosis.step_time import PARTS, RankTime

    times = [RankTime(**one) for one in answer["ranks"]]
    yield "rank      step  " + "  ".join(f"{part:>13}" for part in PARTS)
    for time in times[:MOST_RANKS_SHOWN]:
        shares = (time.parts[part] / time.step_s if time.step_s else 0.0 for part in PARTS)
        yield f"{time.rank:>4}  {_time(time.step_s):>8}  " + "  ".join(f"{share:>12.0%} " for share in shares)
    if len(times) > MOST_RANKS_SHOWN:
        yield f"... and {len(times) - MOST_RANKS_SHOWN} more (--json has all)"
    if any(not time.steps for time in times):
        yield "No optimizer of torch took two steps in this time: `step` is the whole trace."
    if longest := max(times, key=lambda one: one.own_s).longest:
        rank = max(times, key=lambda one: one.own_s).rank
        yield f"Longest on rank {rank}: " + ", ".join(f"{name} {_time(length)}" for name, length in longest)
    worst = answer["slowest"]
    if worst is not None:
        yield (
            f"The others wait for rank {worst['rank']}: a step would take {_time(worst['without_s'])} instead of "
            f"{_time(worst['step_s'])} if it were as quick as they are ({worst['share']:.0%})"
        )
    elif len(times) > 1:
        yield "No rank is slower than the others by much."
    if left_out := sum(time.left_out for time in times):
        yield f"{left_out:,} events were left out: they are no events, or too many."


def _show_what_if(answer: dict[str, Any]) -> None:
    for line in _what_if_words(answer["what_if"]):
        click.echo(line)


def _what_if_words(told: dict[str, Any]) -> Iterable[str]:
    yield (
        f"{len(told['steps'])} steps of {_time(told['measured_s'])}. If every operation took what is usual for its "
        f"kind: {_time(told['usual_s'])}. Slow operations make a step {told['slowdown']:.2f} times as long"
    )
    one = len(told["worst_ranks"]) == 1
    asked = (f"rank{'' if one else 's'} {', '.join(map(str, told['worst_ranks']))}", "M_W", told["worst"])
    for who, measure, share in (asked, ("the last stage", "M_S", told["last_stage"])):
        yield f"With {who} as usual: {_time(share['without_s'])} ({measure}: {share['of_loss']:.1%} of the lost time)"
    for what in ("dp_rank", "stage", "kind"):
        ordered = sorted(told[f"by_{what}"].items(), key=lambda one: -one[1])[:3]
        factors = ", ".join(f"{name}: {factor:.2f}" for name, factor in ordered)
        yield f"Slowdown if nothing else were slow, by {what.replace('_', ' ')}: {factors}"
    yield f"What the timeline does not have, such as loading data: {told['launch_slowdown'] - 1:.1%} of a step"
    for left_out in told["left_out"]:
        yield f"Not used: {left_out}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
