"""What commands print. On a terminal with colours and boxes; into a pipe the same content without them.

Text from logs was cleaned when it came in. Nothing in it is read as markup.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from diagnosis.signals import clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass
from supervisor.cli.output import class_text, done_text, past_fields, recurrence_lines

if TYPE_CHECKING:
    from supervisor.node_health.check import AnsweredCheck, CheckAnswer

STYLES = {
    "RUNNING": "green",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "STOPPED": "yellow",
    "REQUEUED": "yellow",
    "HUNG": "bold red",
    "DIAGNOSING": "yellow",
    "RECOVERING": "yellow",
    "STARTING": "cyan",
    "ACTIVE": "green",
    "SPARE": "cyan",
    "SUSPECT": "yellow",
    "CORDONED": "red",
    "LOST": "red",
}
LEAST_SHOWN = 0.01
"""A less likely alternative is only in `--json`."""
CLOCK_SHOWN_S = 0.05
"""A smaller difference from the controller's clock is not shown."""


def console() -> Console:
    if sys.stdout.isatty():
        return Console(markup=False, highlight=False)
    return Console(markup=False, highlight=False, color_system=None, width=10_000, force_terminal=False)


def new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show(*parts: RenderableType) -> None:
    out = console()
    for part in parts:
        if isinstance(part, Table) and not out.is_terminal:
            _print_plain(part)
        else:
            out.print(part, soft_wrap=not isinstance(part, Table))


def _print_plain(table: Table) -> None:
    """Tab-separated, without padding: for `cut` and `awk`."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    print("\t".join(str(column.header) for column in table.columns))
    for row in zip(*columns, strict=True):
        print("\t".join(row))


def rows(columns: Sequence[str], cells: Iterable[Sequence[str]], *, above: str = "", below: str = "") -> None:
    table = new_table(*columns)
    for row in cells:
        table.add_row(*row)
    show(*([Text(above), Text("")] if above else []), table, *([Text(""), Text(below)] if below else []))


def _styled(word: str) -> Text:
    return Text(word, style=STYLES.get(word, ""))


def clock(at: str | None) -> str:
    """A time in the reader's time zone."""
    if not at:
        return ""
    return time_of(at).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def time_of(at: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(at.replace("Z", "+00:00"))


def seconds(value: float | None) -> str:
    """`0.18 s`, `12.3 s`, `4 min 10 s`, `3 h 02 min`."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    return f"{int(value // 3600)} h {int(value % 3600 // 60):02d} min"


# ----- checkpoints -----

PATH_LIMIT: Final = 4096
VERDICT_STYLES: Final = {"whole": "green", "incomplete": "yellow", "in doubt": "yellow"}


def checkpoints(answer: dict[str, Any]) -> None:
    now = time_of(answer["now"])
    parts: list[RenderableType] = []
    if answer["restart"] is not None:
        parts.append(Text(restart_line(answer["restart"])))
        if answer["restart"].get("after_node_loss"):
            parts.append(Text(f"if a node were lost, {restart_line(answer['restart']['after_node_loss'])}"))
    parts += _in_memory(answer)
    if not answer["checkpoints"]:
        parts.append(Text(f"job {answer['name'] or '?'}: no checkpoint has been seen"))
    else:
        table = new_table("step", "age", "size", "format", "ranks", "verdict", "where", "path", "why")
        for one in answer["checkpoints"]:
            age = seconds(max(0.0, (now - time_of(one["modified_at"])).total_seconds()))
            where = ", ".join(one.get("where") or ())
            path = clean_line(f"{one['path']} (of {one['copy_of']})" if one.get("copy_of") else one["path"], PATH_LIMIT)
            table.add_row(*_what(one)[:1], age, *_what(one)[1:], _verdict(one), where, path, one.get("why", ""))
        parts += [Text(""), table]
    for one in answer.get("left") or ():
        told = f"{one['node']}: {one['path']} has copies of {one['jobs']} other jobs ({size_text(one['size_bytes'])})"
        parts.append(Text(f"{told}: remove them when those jobs have ended"))
    show(*parts)


def _in_memory(answer: Mapping[str, Any]) -> list[Text]:
    """The newest snapshots: `in memory: step 44 on all 4 ranks (12:00:07), step 40 mirrored (12:00:03)`."""
    local, mirrored = answer.get("snapshot"), answer.get("mirrored_snapshot")
    told = [f"step {local['step']} on all {local['ranks']} ranks ({clock(local['at'])})"] if local else []
    told += [f"step {mirrored['step']} mirrored ({clock(mirrored['at'])})"] if mirrored else []
    return [Text(f"in memory: {', '.join(told)}")] if told else []


def restart_line(restart: Mapping[str, Any]) -> str:
    """`a restart now resumes from step 40 (/out/ckpt_40.pt), and loses 12 steps (3 min 20 s)`."""
    if restart["why"]:
        return f"what a restart would resume from now is not known: {restart['why']}"
    steps = restart["loses_steps"]
    lost = [] if steps is None else [f"{steps} step{'' if steps == 1 else 's'}"]
    lost += [] if restart["loses_s"] is None else [seconds(restart["loses_s"])]
    loses = f", and lose {lost[0]}{f' ({lost[1]})' if len(lost) > 1 else ''}" if lost else ""
    if restart.get("from_memory"):
        return f"a restart would start from step {restart['step']} (a snapshot in memory) now{loses}"
    if not restart["path"]:
        return f"a restart would begin at the beginning now{loses}"
    step = "" if restart["step"] is None else f"step {restart['step']} "
    return f"a restart would resume from {step}({restart['path']}) now{loses}"


def _what(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Step, size, format, ranks."""
    layout = one.get("layout") or {}
    split = [f"{name[0].upper()}P{layout[name]}" for name in ("tensor", "pipeline", "data") if layout.get(name)]
    ranks = str(layout.get("world_size") or "") + (f" ({' '.join(split)})" if split else "")
    return ("" if one["step"] is None else str(one["step"]), size_text(one["size_bytes"]), one["format"], ranks)


def _verdict(one: Mapping[str, Any]) -> Text:
    return Text(one["verdict"], style=VERDICT_STYLES.get(one["verdict"], "bold red"))


def size_text(size: float) -> str:
    """`913 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def verified(answer: dict[str, Any]) -> None:
    table = new_table("verdict", "step", "size", "format", "ranks", "tensors", "path", "why")
    for one in answer["checkpoints"]:
        table.add_row(_verdict(one), *_what(one), str(one["tensors"]), clean_line(one["path"], PATH_LIMIT), one["why"])
    remarks = [
        Text(clean_line(f"{one['path']}: {remark}", PATH_LIMIT))
        for one in answer["checkpoints"]
        for remark in one["remarks"]
    ]
    show(table, *remarks)


# ----- status -----


def status(answer: dict[str, Any]) -> None:
    show(*_status_parts(answer))


def _pending(answer: dict[str, Any]) -> list[RenderableType]:
    return [
        Text(f"proposed by a model, not in use: {name} (`unbroken approve {name}` or `reject`)", style="yellow")
        for name in answer.get("pending_rules", ())
    ]


def _status_parts(answer: dict[str, Any]) -> list[RenderableType]:
    head = Text.assemble(
        f"job {answer['name'] or '?'}: ",
        _styled(answer["state"]),
        ", paused" if answer["paused"] and not answer["outcome"] else "",
        f", attempt {answer['attempt']}",
        step_text(answer),
        "" if answer["mode"] == "enforce" else f", mode {answer['mode']}",
    )
    parts: list[RenderableType] = [head]
    parts += standstill(answer)
    if waits := answer["waiting"] or answer.get("forming"):
        parts.append(Text(f"waits for: {waits}"))
    if answer.get("ends_at") and not answer["outcome"]:
        parts.append(Text(f"time limit: {_limit(answer['ends_at'])}"))
    if answer["pause"] and not answer["outcome"]:
        parts.append(Text(_paused(answer["pause"]), style="yellow"))
    parts.append(Text(_figures(answer)))
    if answer.get("tiers"):
        newest = (f"step {one['step']} {one['tier']}" for one in answer["tiers"])
        parts.append(Text(f"newest checkpoints: {', '.join(newest)}"))
    if not answer["outcome"]:
        parts += [*_in_memory(answer), Text(controller_text(answer))]
    else:
        parts.append(Text(f"ended: {answer['outcome']['line']} (exit code {answer['outcome']['exit_code']})"))
    if answer["nodes"]:
        nodes = new_table("node", "state", "ranks", "host", "why")
        for node in answer["nodes"]:
            nodes.add_row(node["node"], _styled(node["state"]), ranges(node["ranks"]), node["host"], _why(node))
        parts += [Text(""), nodes]
    parts += [Text(f"the nodes differ: {one['text']}", style="yellow") for one in answer.get("skew", ())]
    parts += [Text(f"degraded: {one}", style="yellow") for one in answer.get("degraded", ())]
    parts += [Text(one["text"], style="yellow") for one in answer.get("swaps", ())]
    if answer.get("advice") and not answer["outcome"]:
        parts.append(Text(advised(answer["advice"])))
    if answer.get("stragglers"):
        parts.append(Text(answer["stragglers"]["text"], style="yellow"))
    if answer.get("input_wait"):
        parts.append(Text(answer["input_wait"]["text"], style="yellow"))
    if answer["incidents"]:
        incidents_ = new_table("incident", "at", "class", "why")
        for one in answer["incidents"]:
            open_ = " (open)" if one["open"] else ""
            incidents_.add_row(one["id"] + open_, clock(one["opened_at"]), one["failure_class"] or "", one["why"])
        parts += [Text(""), incidents_]
    parts += _pending(answer)
    return parts


def standstill(answer: dict[str, Any]) -> list[Text]:
    """A hang that nobody acts on, or a silence that may be one."""
    parts: list[Text] = []
    hung, silence = answer.get("hung"), answer.get("silence")
    if hung and not answer["outcome"]:
        sure = "hung" if hung["proven"] else "hung (not proven)"
        parts.append(
            Text(f"{sure} since {clock(hung['since'])[:19]} ({hung['incident']}): {hung['text']}", style="red")
        )
    if silence and not answer["outcome"]:
        acts = f"acted on at {clock(silence['acts_at'])[:19]}" if silence["acts_at"] else "only reported"
        since = f"no progress since {clock(silence['since'])[:19]}"
        parts.append(Text(f"{since}, no proof of a hang: {silence['text']} ({acts})", style="yellow"))
    return parts


def _paused(pause: dict[str, Any]) -> str:
    who = pause["by"] or "an operator"
    reason = f": {pause['reason']}" if pause["reason"] else ""
    return f"paused since {clock(pause['at'])} by {who}{reason}"


def _why(node: dict[str, Any]) -> str:
    offset_s = node.get("clock_offset_s") or 0.0
    which = "ahead" if offset_s > 0 else "behind"
    clock = f"its clock is {abs(offset_s):.3g} s {which}" if abs(offset_s) > CLOCK_SHOWN_S else ""
    return "; ".join(filter(None, (node["why"], clock)))


def step_text(answer: dict[str, Any]) -> str:
    if answer["step"] is None:
        counted = answer.get("counted")
        return f", {counted} steps since its start" if counted else ""
    return f", step {answer['step']}" + (f" of {answer['last_step']}" if answer["last_step"] is not None else "")


def _limit(ends_at: str) -> str:
    """`2026-03-01 14:02:00 (in 3 h 10 min)`."""
    left_s = (time_of(ends_at) - datetime.datetime.now().astimezone()).total_seconds()
    return f"{clock(ends_at)[:19]} ({f'in {seconds(left_s)}' if left_s > 0 else 'over'})"


def _figures(answer: dict[str, Any]) -> str:
    budget = answer["budget"]
    words = [
        f"incidents: {answer['incidents_total']}",
        f"restarts: {answer['restarts']} ({budget['used']} of {budget['max_restarts']} without progress)",
        f"lost: {seconds(answer['lost_s'])}",
    ]
    if answer["ettr"] is not None:
        words.append(f"ETTR: {answer['ettr']:.3f}")
    if answer["requeues"]:
        words.append(f"started again by the scheduler: {answer['requeues']}")
    if answer["cordons"]:
        words.append("cordoned: " + ", ".join(map(_cordoned, answer["cordons"])))
    if answer["breaker"]["tripped"]:
        words.append(f"breaker: tripped ({answer['breaker']['used']} of {answer['breaker']['limit']} in the hour)")
    return ", ".join(words)


def _cordoned(cordon: dict[str, Any]) -> str:
    scheduler = f" ({cordon['scheduler']})" if cordon["scheduler"] else ""
    scheduler += " (for all jobs)" if cordon.get("scope") == "cluster" else ""
    return "/".join(filter(None, (cordon["node"], cordon["gpu"]))) + scheduler


def controller_text(answer: dict[str, Any]) -> str:
    control = answer["controller"]
    if control is None:
        return f"read from the journal as of {clock(answer['now'])}: no controller answers"
    journal = "" if control["journal"] == "ok" else f", THE JOURNAL CANNOT BE WRITTEN: {control['journal']}"
    return f"controller: epoch {control['epoch']}, agents: {len(control['agents'])} connected{journal}"


def ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """`0-7, 12`; `most`: so many spans, then dots."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans[:most])
    return f"{text}, ..." if most is not None and len(spans) > most else text


def rank_or_gpu(seen: dict[str, Any] | None) -> str:
    """Whose hours are counted: a rank's, unless each has a GPU of its own. None: a plan without a job."""
    return "GPU" if seen is None or seen.get("on_gpus") else "rank"


# ----- lengths of time -----


def advised(told: dict[str, Any]) -> str:
    """The line of `status`."""
    hours = f", {told['gpu_hours_a_day']:,.3g} {rank_or_gpu(told)}-hours a day" if told["gpu_hours_a_day"] else ""
    change = f"save every {about(told['interval_s'])} instead of {about(told['interval_now_s'])}"
    return f"advice: {change}: +{told['gain']:.1%} useful time{hours} (`unbroken advise`)"


def about(value: float) -> str:
    """To two digits: `3.4 s`, `340 s`, `1,800 s`; from three hours on `5 h 20 min`."""
    if value >= 10_800:
        return long_time(value)
    return f"{two_digits(value):,.{0 if value >= 9.95 else 1 if value >= 0.95 else 2}f} s"


def two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(max(value, 0.1))))


def long_time(value: float) -> str:
    """As `seconds`; from three days on in days."""
    return seconds(value) if value < 3 * 86_400 else f"{value / 86_400:,.1f} days"


# ----- incidents -----


def culprits_text(verdict: dict[str, Any] | None) -> str:
    """`node n7, rank 57, GPU 0000:c1:00; node n8`."""
    names = (("node", "node"), ("rank", "rank"), ("gpu", "GPU"))
    return "; ".join(
        ", ".join(
            [f"{name} {culprit[key]}" for key, name in names if culprit.get(key) not in (None, "")]
            + ([f"{culprit['kind']} {culprit['name']}"] if culprit.get("name") else [])
        )
        for culprit in (verdict or {}).get("culprits", [])
    )


def incidents(answer: dict[str, Any]) -> None:
    if not answer["incidents"]:
        show(Text(f"job {answer['job']}: no incidents"), *_pending(answer))
        return
    table = new_table("incident", "at", "attempt", "class", "who", "sure", "lost", "what was done")
    for one in answer["incidents"]:
        verdict = one["verdict"]
        table.add_row(
            one["id"] + ("" if one["closed_at"] else " (open)"),
            clock(one["opened_at"]),
            str(one["attempt"]),
            class_text(one),
            culprits_text(verdict),
            f"{verdict['confidence']:.2f}" if verdict else "",
            seconds(one["lost_s"]),
            done_text(one),
        )
    show(table, *map(Text, recurrence_lines(answer["incidents"])), *_pending(answer))


def why(answer: dict[str, Any]) -> None:
    one = answer["incident"]
    verdict, plan = one["verdict"], one["plan"]
    step = "" if one["step"] is None else f", step {one['step']}"
    parts: list[RenderableType] = [
        Text(f"{one['id']}, {clock(one['opened_at'])}, attempt {one['attempt']}{step}", style="bold"),
        _field("seen", one["what"] or one["trigger"]),
    ]
    if verdict is None:
        parts.append(_field("verdict", "none: it ended before there was one" if one["closed_at"] else "not yet"))
    else:
        parts += _verdict_parts(verdict)
    parts += [_field(name, text) for name, text in past_fields(one, clock)]
    if one["opinion"] is not None:
        parts += _opinion_parts(one["opinion"])
    if one["opinion_failed"] is not None:
        parts.append(_field("", f"asked again, without an answer: {one['opinion_failed']['problem']}"))
    if one["opinion_wanted"]:
        parts.append(_field("opinion", "a model is asked, and has not answered yet"))
    if plan is not None:
        parts.append(_field("plan", f"{plan['kind']}: {plan['why']}"))
    parts += [_field("at first", f"{one['revised']} (then more evidence came)")] if one.get("revised") else []
    parts += [_field("tested", one["tests"]["text"])] if one.get("tests") else []
    if plan is not None:
        parts += [_field("cordoned", _cordon(cordon)) for cordon in plan["cordons"]]
    if one["next_attempt"] is not None:
        parts.append(_field("done", f"attempt {one['next_attempt']} started"))
    if one["closed_at"]:
        parts.append(_field("closed", f"{clock(one['closed_at'])} {one['closed_why']}"))
    if one["seconds"]:
        parts.append(_field("took", took_text(one["seconds"])))
    parts.append(_field("lost", seconds(one["lost_s"])))
    parts += [_field("kept in", _place(folder, answer.get("job_dir", ""))) for folder in one["folders"]]
    show(*parts)


PHASE_WORDS: Final = {
    "detect": "until it was seen",
    "diagnose": "to find the cause",
    "decide": "to decide",
    "stop": "to stop the ranks",
    "rendezvous": "until all nodes met",
    "start": "to start the ranks",
    "first_step": "until the first step",
}


def took_text(phases: dict[str, float]) -> str:
    """`2.10 s: 0.10 s until it was seen, 0.20 s to find the cause, ...`."""
    each = [f"{seconds(took)} {PHASE_WORDS.get(phase, phase)}" for phase, took in phases.items() if took >= 0.005]
    return seconds(sum(phases.values())) + (f": {', '.join(each)}" if each else "")


def _place(folder: str, job_dir: str) -> str:
    """`node:folder` of the job folder as a path, where that is known."""
    return os.path.join(job_dir, folder.partition(":")[2]) if job_dir else folder


def _verdict_parts(verdict: dict[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = [
        _field("verdict", f"{verdict['failure_class']} ({verdict['kind']}), {verdict['confidence']:.0%} sure"),
        _field("why", verdict["why"]),
        _field("culprit", culprits_text(verdict) or "none can be named"),
    ]
    if verdict["symptoms"]:
        parts.append(_field("symptoms", ", ".join(verdict["symptoms"])))
    likely = [one for one in verdict["alternatives"] if one["confidence"] >= LEAST_SHOWN]
    parts += [_field("or", f"{one['failure_class']} ({one['confidence']:.0%})") for one in likely]
    for number, evidence in enumerate(verdict["evidence"]):
        parts.append(_field("evidence" if number == 0 else "", _evidence(evidence)))
    return parts


def _opinion_parts(opinion: dict[str, Any]) -> list[RenderableType]:
    """A language model's opinion. It says that it is one, and that nobody acts on it."""
    model = opinion["model"] or "a model"
    if opinion["problem"]:
        return [_field("opinion", f"none from {model}: {opinion['problem']}")]
    tokens = opinion["tokens_read"] + opinion["tokens_written"]
    cost = f", cost {opinion['cost']:.2g}" if opinion.get("cost") else ""
    took = seconds(opinion["took_s"]) + (f", {tokens} tokens" if tokens else "") + cost
    parts: list[RenderableType] = [
        _field("opinion", f"{opinion['failure_class']} ({model}, in {took}; never acted upon)"),
        _field("", culprits_text(opinion) or "no culprit"),
        _field("", opinion["why"]),
    ]
    parts += [_field("rests on" if number == 0 else "", line) for number, line in enumerate(opinion["lines"])]
    parts += [_field("", line) for line in opinion.get("past", ())]
    rule = opinion["rule"]
    if rule is not None:
        means = "is no failure" if rule["failure_class"] == "none" else f"means {rule['failure_class']}"
        parts.append(_field("proposes", f"{rule['id']}: {rule['text']!r} {means} (`approve {rule['id']} --dry-run`)"))
    elif opinion["rule_rejected"]:
        parts.append(_field("proposed", f"a rule that is not kept ({opinion['rule_rejected']})"))
    return parts


def _evidence(one: dict[str, Any]) -> str:
    """`stdout:118, node n7, rank 57, 2026-03-01T12:00:01Z: text`."""
    line = f":{one['line']}" if one["line"] else ""
    node = f"node {one['node']}" if one.get("node") else ""
    rank = f"rank {one['rank']}" if one["rank"] is not None else ""
    place = ", ".join(filter(None, (f"{one['source']}{line}", node, rank, one.get("at"))))
    return f"{place}: {one['text']}" if place else str(one["text"])


def _cordon(cordon: dict[str, Any]) -> str:
    until = f" until {clock(cordon['until'])}" if cordon["until"] is not None else ""
    return f"{'/'.join(filter(None, (cordon['node'], cordon['gpu'])))}{until}: {cordon['reason']}"


def _field(name: str, value: str) -> Text:
    return Text.assemble((f"{name:<10}", "bold"), value)


def _lines(title: str, lines: Iterable[str]) -> list[RenderableType]:
    shown = [Text(f"  {clean_line(line, SHOWN)}") for line in lines]
    return [Text(f"{title}:"), *shown] if shown else []


# ----- the rest -----


def timeline(answer: dict[str, Any]) -> None:
    for row in answer["rows"]:
        incident = f"{row['incident']}: " if row["incident"] else ""
        style = "bold" if row["loud"] else "" if row["kind"] == "note" else "dim" if row["detail"] else ""
        show(Text(f"{clock(row['at'])}  {incident}{row['text']}", style=style))


def settings(answer: dict[str, Any]) -> None:
    table = new_table("key", "value", "from", "what it is")
    for row in answer["settings"]:
        table.add_row(row["key"], setting(row["value"]), row["from"], row["what"])
    show(table)


def setting(value: object) -> str:
    """A value as it is written in `unbroken.toml`, without quotes; nothing where there is no value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, tuple):
        return " ".join(value)
    return "" if value is None else str(value)


def replay(answer: dict[str, Any]) -> None:
    for problem in answer["problems"]:
        show(Text(f"journal: {problem}"))
    for difference in answer["differences"]:
        show(Text(f"event {difference['seq']}: {difference['text']}", style="bold"))
        for when in ("then", "now"):
            for action in difference[when]:
                show(Text(f"  {when:<5}{json.dumps(action)[:2000]}"))
    show(Text(f"{answer['events']} events, {len(answer['differences'])} decided differently"))


MAX_EVENTS: Final = 100
SHOWN: Final = 2000
"""Characters of a line."""
_ACTIONS: Final = {
    "none": "nothing",
    "restart": "restart",
    "restart_excluding": "restart without the node",
    "rollback_and_restart": "go back to an earlier checkpoint and restart",
    "cordon_gpu_and_restart": "cordon the GPU and restart",
    "cordon_node_and_restart": "cordon the node and restart",
    "wait_and_retry": "wait, then try again",
    "stop": "stop: a restart would fail the same way",
    "hold": "hold until somebody has looked",
    "requeue": "requeue the job",
}


_LOOK: Final = "give more: each rank's own output to its end, the launcher's and scheduler's log, `dmesg` of the nodes"


def diagnosis(value: dict[str, Any]) -> None:
    """The object of `diagnose --json`, in words."""
    verdict = value["verdict"]
    known = verdict["failure_class"] != FailureClass.UNKNOWN.value
    sure = (
        f" ({verdict['confidence']:.0%})" if known else ""
    )  # beside it the likeliest alternative would seem the answer
    headline = f"{verdict['failure_class']}{sure}: {verdict['why']}"
    fields: list[tuple[str, str]] = []
    if verdict["culprits"]:
        fields.append(("culprit", culprits_text(verdict)))
    if verdict["action"] != "none":
        remedy = TAXONOMY[FailureClass(verdict["failure_class"])].remedy
        words = _ACTIONS.get(verdict["action"], verdict["action"])
        action = words if words == verdict["action"] else f"{words} ({verdict['action']})"
        cordons = verdict["action"].startswith("cordon")
        nameless = cordons and not any(one.get("node") for one in verdict["culprits"])
        which = ". The node is the one that this log is from: its name is not in it" if nameless else ""
        fields.append(("do", f"{action}; as a rule: {remedy}{which}"))
    elif not known:
        fields.append(("do", _LOOK))
    likely = [one for one in value["alternatives"] if one["confidence"] >= LEAST_SHOWN]
    fields += [("or" if known else "perhaps", f"{one['failure_class']} ({one['confidence']:.0%})") for one in likely]
    if value["symptoms"]:
        fields.append(("symptoms", ", ".join(value["symptoms"])))
    lines, files = value["lines"], value["files"]
    show(
        Text(clean_line(headline, SHOWN), style="bold"),
        *(Text("  ") + _field(name, clean_line(text, SHOWN)) for name, text in fields),
        *_lines("evidence", map(_evidence, value["evidence"])),
        *_events(value["kernel_events"], value["kernel_events_left_out"]),
        *_flight(value["flight_recorder"], {one["text"] for one in value["evidence"]}),
        *_steps(value["progress"]),
        *_lines("where ranks are", (f"{rank_list(one['ranks'])}: {one['place']}" for one in value["stacks"] or ())),
        *_lines("slow", (one["why"] for one in value["slowness"] or ())),
        *_lines("numbers", (one["why"] for one in value["numerics"] or ())),
        *_lines("not read", value["problems"]),
        Text(f"({lines} line{'s' * (lines != 1)} of {files} file{'s' * (files != 1)})"),
    )


def rank_list(numbers: Iterable[int]) -> str:
    """`ranks 0-6, 9`."""
    found = list(numbers)
    return f"rank{'s' if len(found) > 1 else ''} {ranges(found, 12)}"


def _events(events: list[dict[str, Any]], left_out: int) -> list[RenderableType]:
    lines = []
    for one in events[:MAX_EVENTS]:
        where = f"{one['file']}:{one['line']}" if "file" in one else f"line {one['line']}"
        code = f" {one['code']}" if one["code"] is not None else ""
        lines.append(f"{where}: {one['kind']}{code} {one['device'] or ''}".rstrip())
    if len(events) > MAX_EVENTS:
        lines.append(f"and {len(events) - MAX_EVENTS} more (--json has them)")
    count = len(events) + left_out
    return _lines(f"{count} kernel event{'s' * (count != 1)}", lines)


def _steps(progress: dict[str, Any] | None) -> list[RenderableType]:
    if progress is None:
        return []
    others = "; ".join(f"{rank_list(one['ranks'])} at {one['step']}" for one in progress["others"])
    return [Text(f"newest step: {progress['step']}" + (f"; {others}" if others else ""))]


def _flight(report: dict[str, Any] | None, shown: set[str]) -> list[RenderableType]:
    if report is None:
        return []
    if report["kind"] is None:
        return [Text(f"flight recorder: {report['why']}")]
    seq = f" {report['collective_seq']}" if report["collective_seq"] is not None else ""
    who = rank_list(report["culprit_ranks"]) if report["culprit_ranks"] else "no rank can be named"
    found = [
        *([] if shown else [report["why"]]),
        *(one["text"] for one in report["evidence"] if one["text"] not in shown),
    ]
    return [
        Text(f"flight recorder: {report['kind']}, {who}, collective{seq} of {report['process_group']}"),
        *(Text(f"  {clean_line(line, SHOWN)}") for line in found),
    ]


# ----- the checks of a node -----

COLOURS: Final = {"OK": "green", "WARNING": "yellow", "CRITICAL": "red", "UNKNOWN": "magenta"}
NAMED: Final = 3
"""Problems that the first line names."""


def nagios_line(answer: CheckAnswer) -> str:
    """`CRITICAL: 2 of 61 checks: gpu_ecc_uncorrected 0000:c1:00: 3 more; ...`"""
    bad = answer.unhealthy
    total = len({one.row.check.id for one in answer.seen})
    word = answer.word
    unseen = ""
    if answer.flaws:
        more = f" (and {len(answer.flaws) - 1} more)" if len(answer.flaws) > 1 else ""
        unseen = f"not everything could be checked: {answer.flaws[0]}{more}"
    if not bad and unseen:
        return f"{word}: {unseen}"
    if not bad:
        well = len({one.row.check.id for one in answer.seen if one.check_state.status == "healthy"})
        return f"{word}: {well} of {total} checks are healthy, none is unhealthy"
    named = "; ".join(f"{one.name}: {one.text}" for one in bad[:NAMED])
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    return f"{word}: {len({one.row.check.id for one in bad})} of {total} checks: {named}{more}" + (
        f"; {unseen}" if unseen else ""
    )


def check(answer: CheckAnswer, *, everything: bool) -> None:
    """One line for Nagios; then what is unhealthy or unknown, or everything; then the counts."""
    _coloured(answer.word, nagios_line(answer))
    for one in answer.unhealthy:
        word = one.word.upper()
        _coloured(word, _check_line(word, one, f"  [{one.row.failure_class}]"))
    if everything:
        for one in answer.seen:
            if one.check_state.status != "unhealthy":
                click.echo(_check_line(one.check_state.status.replace("_", " "), one))
    else:
        for text, names in _unknown_checks(answer).items():
            _coloured("UNKNOWN", f"{'UNKNOWN':<8}  {', '.join(names)}: {text}")
    for problem in answer.problems:
        click.echo(f"note: {problem}")
    click.echo(_check_summary(answer))


def _check_line(word: str, one: AnsweredCheck, tail: str = "") -> str:
    text = one.text
    return f"{word:<8}  {one.name}" + (f": {text}" if text else "") + tail


def _unknown_checks(answer: CheckAnswer) -> dict[str, list[str]]:
    """Reason -> checks: what cannot be seen for one reason is one line."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for one in answer.seen:
        if one.check_state.status == "unknown":
            checks = reasons.setdefault(one.check_state.result.text or "no reason given", {})
            checks.setdefault(one.row.check.id, []).append(one.name)
    return {
        text: _some(
            [found[0] if len(found) == 1 else f"{check} ({len(found)} devices)" for check, found in checks.items()]
        )
        for text, checks in reasons.items()
    }


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= 6 else [*names[:5], f"{len(names) - 5} more"]


def _check_summary(answer: CheckAnswer) -> str:
    counts = Counter(one.word for one in answer.seen)
    parts = [
        f"{counts[key]} {key.replace('_', ' ')}"
        for key in ("critical", "warning", "healthy", "unknown", "not_applicable")
        if counts[key]
    ]
    checks = len({one.row.check.id for one in answer.seen})
    whence = {
        "agent": f"by its agent, {max(0.0, time.time() - answer.at):.0f} s ago; --fresh checks now",
        "root": "a captured tree",
    }
    return (
        f"{checks} checks of {answer.node or '?'}, {len(answer.seen)} results "
        f"({whence.get(answer.source, 'checked just now')}): {', '.join(parts)}"
    )


def _coloured(word: str, line: str) -> None:
    click.secho(line, fg=COLOURS[word])  # without colours where it is no terminal


def check_list(listed: Mapping[str, Any]) -> None:
    """A paragraph for each on a terminal, else tab-separated."""
    columns = ("check", "applies", "when", "failure_class", "what", "threshold", "source", "why")
    words = {True: "yes", False: "no", None: "unknown"}
    if not sys.stdout.isatty():
        click.echo("\t".join(columns))
    for entry in listed["checks"]:
        entry = {**entry, "applies": words[entry["applies"]]}
        if not sys.stdout.isatty():
            click.echo("\t".join(str(entry[column]) for column in columns))
            continue
        click.secho(entry["check"], bold=True, nl=False)
        click.echo(f"  {entry['failure_class']}, {entry['when']}\n    {entry['what']}")
        click.echo(f"    unhealthy: {entry['threshold']}\n    read from: {entry['source']}")
        click.echo(f"    applies here: {entry['applies']}" + (f" ({entry['why']})" if entry["why"] else ""))
