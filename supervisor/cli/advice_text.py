"""`unbroken advise` in words: how often to save, and how many spares to keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from supervisor.cli.render import about, long_time, new_table, rank_or_gpu, seconds, show, two_digits


def advice(answer: dict[str, Any]) -> None:
    seen, figures, told = answer["measured"], answer["figures"], answer["advice"]
    parts = [Text(line) for line in (_seen(answer["job"], seen) if seen is not None else _planned(figures))]
    if told is not None:
        parts += [Text(line) for line in _interval(told, figures, seen)]
    parts += [Text(f"note: {one}", style="yellow") for one in answer["lacks"]]
    if told is None or told["is_hopeless"]:
        show(*parts, Text("no advice", style="bold"))
        return
    change = change_text(told, figures, rank_or_gpu(seen)) if answer["enough"] else _guess(told, figures)
    show(*parts, Text(change, style="bold"), Text(""), *_spares(told, figures, rank_or_gpu(seen)))


def _seen(job: str, seen: dict[str, Any]) -> Iterable[str]:
    """What a job has measured, a line for each kind."""
    ettr = "" if seen["ettr"] is None else f", ETTR {seen['ettr']:.3f}"
    size = f"{_many(seen['nodes'], 'node')}, {_many(seen['gpus'], rank_or_gpu(seen))}"
    yield f"job {job}: {size}, trained for {long_time(seen['trained_s'])}{ettr}"
    node_days = seen["nodes"] * seen["trained_s"] / 86_400.0
    yield f"failures: {_counts(seen['failures'])} in {node_days:.3g} node-days"
    if seen["not_counted"]:
        yield f"  not counted: {_counts(seen['not_counted'])}"
    saves = f"saves: {seen['saves']}"
    if seen["interval_s"] is not None:
        steps = f" ({seen['interval_steps']} steps)" if seen["interval_steps"] else ""
        saves += f", one every {about(seen['interval_s'])} of training{steps}"
    if seen["stall_s"] is not None:
        precision = f"± {seen['stall_error_s']:.2g} s, {seen['stalls_seen']} measured"
        saves += f"; each holds training up for {seconds(seen['stall_s'])} ({precision})"
    if seen["write_s"] is not None:
        saves += f"; {seconds(seen['write_s'])} from its first write to its end"
    yield saves
    if seen["restart_s"] is not None:
        mean = f"mean of {seen['restarts_seen']}"
        yield f"restart: {seconds(seen['restart_s'])} from a failure to the first new step ({mean})"
    if seen["redone_steps"]:
        yield f"done again: {seen['redone_steps']:,} steps, {long_time(seen['redone_s'])}"


def _planned(figures: dict[str, Any]) -> Iterable[str]:
    costs = figures["costs"]
    hours = 24.0 / figures["rate"]["likely"]
    yield f"{_many(figures['nodes'], 'node')}, {_many(figures['gpus'], 'GPU')}, a node fails once in {hours:,.6g} h"
    durable = f", can be used after {seconds(costs['durable_s'])}" if costs["durable_s"] > costs["stall_s"] else ""
    restart = f"a restart takes {seconds(costs['restart_s'])}"
    yield f"a save holds training up for {seconds(costs['stall_s'])}{durable}; {restart}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _counts(counts: dict[str, int]) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    return f"{sum(counts.values())} ({kinds})" if counts else "none"


def _interval(told: dict[str, Any], figures: dict[str, Any], seen: dict[str, Any] | None) -> Iterable[str]:
    sure = ""
    if told["mtbf_low_s"] < told["mtbf_high_s"]:
        sure = f" (90 % sure: {long_time(told['mtbf_low_s'])} to {long_time(told['mtbf_high_s'])})"
    yield f"the job fails once in {long_time(told['mtbf_s'])}{sure}"
    step_s = figures["costs"]["step_s"]
    steps = f" ({max(1.0, two_digits(told['interval_s'] / step_s)):,.0f} steps)" if seen and step_s else ""
    line = f"best interval: {about(told['interval_s'])} of training{steps}; "
    line += f"Young {about(told['young_s'])}, Daly {about(told['daly_s'])}"
    if told["interval_low_s"] < told["interval_high_s"]:
        line += f"; {about(told['interval_low_s'])} to {about(told['interval_high_s'])} within that range"
    yield line
    if told["is_least"]:
        yield "  as often as can be: the formula would save more often still"


def _guess(told: dict[str, Any], figures: dict[str, Any]) -> str:
    """No figure that is not known, and no gain."""
    now = "" if figures["interval_s"] is None else f" (now {about(figures['interval_s'])})"
    low, high = about(told["interval_low_s"]), about(told["interval_high_s"])
    return f"too little data for advice: somewhere between {low} and {high}{now}"


SMALL_GAIN = 0.0005


def change_text(told: dict[str, Any], figures: dict[str, Any], unit: str) -> str:
    """What to change, in a sentence."""
    best = about(told["interval_s"])
    if told["gain"] is None:
        return f"save every {best}: {told['ettr_advised']:.1%} useful time"
    now, useful = about(figures["interval_s"]), f"{told['ettr_now']:.1%} now, {told['ettr_advised']:.1%} then"
    if told["gain"] < SMALL_GAIN:
        return f"the interval is good as it is: {now}; {best} would gain less than 0.05 % ({useful})"
    hours = f", {told['gpu_hours_a_day']:,.3g} {unit}-hours a day" if figures["gpus"] else ""
    change = f"save every {best} instead of {now}: +{told['gain']:.1%} useful time ({useful}){hours}"
    return change if told["gain_low"] > 0.0 else f"{change}; at one end of the range it would gain nothing"


def _spares(told: dict[str, Any], figures: dict[str, Any], unit: str) -> list[RenderableType]:
    hours = f"{unit}-hours a day"
    table = new_table("spares", "time lost waiting for a node", f"{hours} lost", f"{hours} of idle spares")
    each = figures["gpus"] / figures["nodes"]
    for row in told["spares"]:
        lost, idle = 24.0 * figures["gpus"] * row["waits"], 24.0 * each * row["spares"]
        table.add_row(str(row["spares"]), f"{row['waits']:.2%}", f"{lost:,.1f}", f"{idle:,.0f}")
    return [Text(spares_text(told, figures)), table]


def spares_text(told: dict[str, Any], figures: dict[str, Any]) -> str:
    share, repair = f"{100 * figures['spare_share']:.3g} %", long_time(figures["repair_s"])
    few = told["spares_advised"]
    advised = (
        f"more than {told['spares'][-1]['spares']} spares" if few is None else f"{few} spare{'' if few == 1 else 's'}"
    )
    given = f"(a broken node is replaced after {repair}; --repair, --waiting)"
    return f"to wait less than {share} of the time for a node: {advised} {given}"
