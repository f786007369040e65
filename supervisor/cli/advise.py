"""`unbroken advise`: how often to save and how many spares to keep, for a job, or for figures that are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from recovery.cadence import DAY_S, Advice, Costs, Figures, exact_rate
from recovery.cadence import advise as computed
from supervisor.cli.job_commands import JOB_OPTIONS, JobHandle, with_options
from supervisor.cli.output import print_answer
from supervisor.errors import UnbrokenError

HOUR_S = 3600.0
LONGEST_S = 30 * DAY_S
MOST_NODES = 1_000_000


def _number(name: str, most: float, metavar: str, what: str, default: float | None = None) -> Any:
    def checked(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
        if value is not None and not 0.0 < value <= most:  # not NaN either
            raise click.BadParameter(f"a number over 0 is needed, and {most:,.0f} at most", param=parameter)
        return value

    return click.option(name, type=float, metavar=metavar, help=what, default=default, callback=checked)


def _count(name: str, most: int, what: str, default: int | None = None) -> Any:
    def checked(_: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
        if value is not None and not 0 < value <= most:
            raise click.BadParameter(f"1 to {most:,} is needed", param=parameter)
        return value

    return click.option(name, type=int, metavar="N", help=what, default=default, callback=checked)


PLAN_OPTIONS = (
    _count("--nodes", MOST_NODES, "Without a job: its nodes."),
    _number("--mttf-node", 1e9, "H", "Without a job: hours until one node fails, on average."),
    _number("--save", LONGEST_S, "S", "Without a job: seconds that a save holds training up."),
    _number("--restart", LONGEST_S, "S", "Without a job: seconds from a failure to the first new step."),
    _number("--durable", LONGEST_S, "S", "Without a job: seconds until a save could be used.  [as --save]"),
    _number("--interval", LONGEST_S, "S", "Without a job: training time between two saves now."),
    _count("--gpus-per-node", 1024, "Without a job.  [8]", 8),
)
SPARE_OPTIONS = (
    _number("--repair", 24 * 365, "H", "Hours until a broken node is replaced.  [24]", 24.0),
    _number("--waiting", 100, "PERCENT", "Time that may be lost waiting for a node.  [1]", 1.0),
)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    return with_options(command, (*JOB_OPTIONS, *PLAN_OPTIONS, *SPARE_OPTIONS))


@click.command()
@click.argument("job_name", metavar="[JOB]", default="")
@_options
def advise(
    job_name: str,
    job_dir: str,
    slurm_job: str,
    address: str,
    token_file: str,
    as_json: bool,
    repair: float,
    waiting: float,
    **plan: Any,
) -> None:
    """Say how often to save, and how many spares to keep.

    JOB is a job folder (its name will do): its own saves, restarts and failures are counted. To plan without a job,
    give --nodes, --mttf-node, --save and --restart.
    """
    from supervisor.cli.advice_text import advice
    from supervisor.controller.report import plain

    planned = {name: value for name, value in plan.items() if value is not None and name != "gpus_per_node"}
    named = job_name or job_dir or slurm_job or address
    if planned and named:
        raise click.UsageError(f"give a job, or --{next(iter(planned)).replace('_', '-')} and the like: not both")
    if job_name and job_dir:
        raise click.UsageError("JOB and --job-dir both name a job: give only one of them")
    answer: dict[str, Any]
    figures: Figures | None
    if planned:
        answer = {"schema": 1, "job": None, "measured": None, "lacks": [], "enough": True, "matters": False}
        figures = _given(plan)
    else:
        answer = JobHandle(job_name or job_dir, address, token_file, slurm_job).read("/v1/advice", advice_from_journal)
        figures = msgspec.convert(answer["figures"], Figures | None)
    if figures is not None:
        figures = msgspec.structs.replace(figures, repair_s=repair * HOUR_S, spare_share=waiting / 100.0)
        told = computed(figures)
        lacks = [*answer["lacks"], *_hopeless(figures, told)]
        answer |= {"figures": plain(figures), "advice": plain(told), "lacks": lacks}
    print_answer(answer, as_json, advice)


def _given(plan: dict[str, Any]) -> Figures:
    """What the options say. Raises UsageError where they do not say enough."""
    needed = ("nodes", "mttf_node", "save", "restart")
    missing = [f"--{name.replace('_', '-')}" for name in needed if plan[name] is None]
    if missing:
        raise click.UsageError(f"without a job, {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed too")
    durable_s = plan["save"] if plan["durable"] is None else plan["durable"]
    if durable_s < plan["save"]:
        raise click.UsageError("--durable is shorter than --save: a save cannot be used before training goes on")
    per_node_day = 24.0 / plan["mttf_node"]
    return Figures(
        nodes=plan["nodes"],
        gpus=plan["nodes"] * plan["gpus_per_node"],
        rate=exact_rate(per_node_day),
        node_rate=per_node_day,
        costs=Costs(stall_s=plan["save"], durable_s=durable_s, restart_s=plan["restart"]),
        interval_s=plan["interval"],
    )


def advice_from_journal(where: Path) -> dict[str, Any]:
    from supervisor.controller.report import advice_answer, fold, job_advice

    folded = fold(where)
    if not folded.history.records:
        raise UnbrokenError(f"the journal of {where} holds no record of a job")
    return advice_answer(folded.job.spec.name, job_advice(folded.job, folded.job.now))


def _hopeless(figures: Figures, advice: Advice) -> list[str]:
    if not advice.is_hopeless:
        return []
    pace = f"one in {advice.mtbf_s:.3g} s, a restart takes {figures.costs.restart_s:.3g} s"
    return [f"failures come too fast ({pace}): no interval helps, restarts or nodes have to get better first"]
