"""`unbroken trace`: where the time of a step goes, from traces that the job's ranks make now, or from files."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from supervisor.cli.job_commands import JobHandle, job_options_later, send, status_from_journal
from supervisor.cli.output import operator_name, print_answer, warn
from supervisor.errors import ExitCode, JobNotFound, UnbrokenError
from supervisor.messages import CommandRequest

if TYPE_CHECKING:
    from diagnosis.step_time import RankTime

MOST_RANKS: Final = 64
USUAL_RANKS: Final = 8
LOOK_EVERY_S: Final = 0.25
GRACE_S: Final = 30.0
"""Nodes pack their traces, and a shared file system shows them late."""

MOST_RANKS_SHOWN: Final = 64


def _ranks(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """`0,3-5`."""
    found: set[int] = set()
    for part in (value or "").split(",") if value else ():
        first, _dash, last = part.partition("-")
        last = last or first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and len(last) < 8):
            raise click.BadParameter("give numbers as in 0,3-5", param=parameter)
        if int(last) - int(first) >= MOST_RANKS:
            raise click.BadParameter(f"at most {MOST_RANKS} ranks at once", param=parameter)
        found |= set(range(int(first), int(last) + 1))
    if len(found) > MOST_RANKS:
        raise click.BadParameter(f"at most {MOST_RANKS} ranks at once", param=parameter)
    return tuple(sorted(found))


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE...]", type=click.Path(path_type=Path))
@click.option("--ranks", callback=_ranks, metavar="R,R-R", help="Ask these ranks.  [a few, the slow ones among them]")
@click.option("--steps", type=click.IntRange(1, 100), default=3, metavar="N", help="Trace N whole steps.  [3]")
@click.option("--wait", "wait_s", type=click.IntRange(1, 600), default=60, metavar="S", help="Wait S seconds.  [60]")
@click.option("--input", "of_input", is_flag=True, help="Say which stage of loading data is slow; works in every job.")
@job_options_later
def trace(
    as_json: bool,
    files: tuple[Path, ...],
    ranks: tuple[int, ...],
    steps: int,
    wait_s: int,
    of_input: bool,
    **where: str,
) -> None:
    """Say where the time of a step goes, rank by rank.

    Ranks of the running job make a trace now (`unbroken run --traceable`); it is kept in the job folder.
    With FILE, what is there is read: Kineto traces of ranks, a folder of them, or one timeline of operations (Parquet
    or CSV): then what the slow operations cost.
    """
    if where["job_dir"] and where["slurm_job"]:
        raise click.UsageError("--job and --job-dir both name a job: give only one of them")
    if files and of_input:
        raise click.UsageError("--input asks a running job: it takes no FILE")
    if not files:
        job = JobHandle(where["job_dir"], where["address"], where["token_file"], where["slurm_job"])
        _ask(job, Order(what="--input" if of_input else "", ranks=ranks, steps=steps, wait_s=wait_s), as_json)
        return
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


# ----- a running job -----


class Order(NamedTuple):
    what: str
    """Empty: a trace of steps. `--input`: what the data loader's workers do."""
    ranks: tuple[int, ...]
    steps: int
    wait_s: int

    def words(self, name: str) -> str:
        """As the job reads it (`supervisor.job.traces`)."""
        ranks = ",".join(map(str, self.ranks))
        return f"{name} --ranks {ranks} --wait {self.wait_s} " + (self.what or f"--steps {self.steps}")


def _ask(job: JobHandle, order: Order, as_json: bool) -> None:
    if job.folder is None:
        raise JobNotFound("the answer is put into the job folder: name it with --job-dir")
    status = job.read("/v1/status", status_from_journal)
    places = {rank: node["node"] for node in status["nodes"] for rank in node["ranks"]}
    if not places or status["outcome"] is not None:
        raise UnbrokenError("no attempt runs: there is nothing to trace")
    order = order._replace(ranks=order.ranks or _chosen(sorted(places), (status.get("stragglers") or {}).get("ranks")))
    name = secrets.token_hex(4)
    command = CommandRequest(command="trace", argument=order.words(name), by=operator_name())
    answer = send(command, job)
    if answer.get("refused"):
        raise UnbrokenError("; ".join(answer["notes"]))
    nodes = {places[rank] for rank in order.ranks if rank in places}
    if not as_json:
        warn(f"rank{'s' * (len(order.ranks) > 1)} {', '.join(map(str, order.ranks))} asked: at most {order.wait_s} s")
    attempt = job.folder / "attempts" / str(status["attempt"])
    answers = _awaited(attempt, name, nodes, order.wait_s + GRACE_S)
    problems = _problems(answers, nodes)
    if order.what:
        found = sorted((rank for one in answers for rank in one.get("inputs", ())), key=lambda one: int(one["rank"]))
        for problem in problems:
            warn(problem)
        print_answer({"schema": 1, "ranks": found, "problems": problems}, as_json, _show_inputs)
        return
    files = [
        attempt / one["node"] / rank["file"] for one in answers for rank in one.get("ranks", ()) if rank.get("file")
    ]
    times = _readable(files, problems)
    for problem in problems:
        warn(problem)
    if not times:
        raise UnbrokenError("there is no trace", ExitCode.NOT_DONE)
    print_answer({**_summary(files, times), "problems": problems}, as_json, show)
    if not as_json:
        click.echo(f"The traces are in {attempt}; open them in Perfetto (ui.perfetto.dev)")


def _show_inputs(answer: dict[str, Any]) -> None:
    from supervisor.agent.loader_watch import RankInput

    told: set[str] = set()
    for one in (msgspec.convert(rank, RankInput) for rank in answer["ranks"]):
        click.echo(one.text)
        for line in one.advice:
            if line not in told:
                click.echo(f"  {line}")
            told.add(line)


def _chosen(ranks: Sequence[int], slow: Sequence[int] | None) -> tuple[int, ...]:
    """A few that are spread over the job, the slow ones among them."""
    slow = [rank for rank in slow or () if rank in ranks][: USUAL_RANKS // 2]
    left = USUAL_RANKS - len(slow)
    others = [rank for rank in ranks if rank not in slow]
    spread = others if len(others) <= left else [others[at * len(others) // left] for at in range(left)]
    return tuple(sorted({*slow, *spread}))


def _awaited(attempt: Path, name: str, nodes: Collection[str], wait_s: float) -> list[dict[str, Any]]:
    """The answers of the nodes; of those that gave none until then, nothing."""
    found: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + wait_s
    while len(found) < len(nodes) and time.monotonic() < until:
        for node in set(nodes) - set(found):
            try:
                found[node] = msgspec.json.decode((attempt / node / f"trace-{name}.json").read_bytes())
            except (OSError, msgspec.DecodeError):
                continue
        time.sleep(LOOK_EVERY_S)
    return [found[node] for node in sorted(found)]


def _problems(answers: Sequence[dict[str, Any]], nodes: Collection[str]) -> list[str]:
    told = [f"{one['node']}: {one['problem']}" for one in answers if one.get("problem")]
    told += [
        f"rank {rank['rank']}: {rank['problem']}"
        for one in answers
        for rank in one.get("ranks", ())
        if rank.get("problem")
    ]
    silent = sorted(set(nodes) - {one["node"] for one in answers})
    return told + ([f"no answer from {', '.join(silent)}"] if silent else [])


# ----- files -----


def summary(files: Sequence[Path]) -> dict[str, Any]:
    """Where the steps of the ranks went, as JSON types. Raises TraceUnreadable."""
    from supervisor.diagnose.traces import TraceUnreadable, read_rank

    times = [read_rank(file, at) for at, file in enumerate(files)]
    ranks = sorted(one.rank for one in times)
    twice = next((one for one, other in itertools.pairwise(ranks) if one == other), None)
    if twice is not None:
        raise TraceUnreadable(f"two of the files are traces of rank {twice}: give one of each rank")
    return _summary(files, times)


def _readable(files: Sequence[Path], problems: list[str]) -> list[RankTime]:
    """Of those that ranks have just made: one that has nothing in it does not take the others with it."""
    from supervisor.diagnose.traces import TraceUnreadable, read_rank

    times = []
    for at, file in enumerate(files):
        try:
            times.append(read_rank(file, at))
        except TraceUnreadable as error:
            problems.append(str(error))
    return times


def _summary(files: Sequence[Path], times: Sequence[RankTime]) -> dict[str, Any]:
    from diagnosis.step_time import slowest

    worst = slowest(times)
    return {
        "schema": 1,
        "files": [str(file) for file in files],
        "ranks": [one._asdict() for one in sorted(times, key=lambda one: one.rank)],
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
    for one in times[:MOST_RANKS_SHOWN]:
        shares = (one.parts[part] / one.step_s if one.step_s else 0.0 for part in PARTS)
        yield f"{one.rank:>4}  {_time(one.step_s):>8}  " + "  ".join(f"{share:>12.0%} " for share in shares)
    if len(times) > MOST_RANKS_SHOWN:
        yield f"... and {len(times) - MOST_RANKS_SHOWN} more (--json has all)"
    if any(not one.steps for one in times):
        yield "No optimizer of torch took two steps in this time: `step` is the whole trace."
    if longest := max(times, key=lambda one: one.own_s).longest:
        rank = max(times, key=lambda one: one.own_s).rank
        yield f"Longest on rank {rank}: " + ", ".join(f"{name} {_time(length)}" for name, length in longest)
    worst = answer["slowest"]
    if worst is not None:
        yield (
            f"In these steps the others wait for rank {worst['rank']}: a step would take "
            f"{_time(worst['without_s'])} instead of {_time(worst['step_s'])} if it were as quick as they are "
            f"({worst['share']:.0%})"
        )
    elif len(times) > 1:
        yield "No rank is slower than the others by much."
    if left_out := sum(one.left_out for one in times):
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
