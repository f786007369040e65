"""The picture of `unbroken watch`, made of the answer of `status`: what fits on the terminal, the most urgent first."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.text import Text

from diagnosis.signals import clean_line
from supervisor.cli.render import (
    STYLES,
    clock,
    controller_text,
    new_table,
    ranges,
    restart_line,
    seconds,
    standstill,
    step_text,
)

SHOWN: Final = 400
RATE_S: Final = 30.0
NODE_LINES: Final = 3
STORY_LINES: Final = 5
"""At least so many lines, where there are so many."""


class StepRate:
    """Steps a second over the last half minute, by when they were seen."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=1000)
        self._scale: tuple[int, bool] = (0, False)
        """Attempt, and whether steps are the script's numbers: a count since the start is another scale."""

    def see(self, answer: dict[str, Any], now: float) -> None:
        step = answer["step"] if answer["step"] is not None else answer.get("counted") or None
        scale = (answer["attempt"], answer["step"] is not None)
        if scale != self._scale or (self._seen and step is not None and step < self._seen[-1][1]):
            self._scale = scale
            self._seen.clear()
        if step is not None and (not self._seen or step > self._seen[-1][1]):
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] > RATE_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float | None:
        """None: fewer than two steps were seen."""
        if len(self._seen) < 2:
            return None
        (begun, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - begun) if ended > begun else None


def picture(
    answer: dict[str, Any], pace: StepRate, size: tuple[int, int], below: Sequence[str], color_system: Any
) -> list[str]:
    """Lines for a terminal of this size. `below`: what stands at its end, such as a question."""
    width, height = size
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=color_system, markup=False, highlight=False
    )

    def drawn(parts: Iterable[RenderableType]) -> list[str]:
        with console.capture() as capture:
            for part in parts:
                console.print(part)
        return capture.get().split("\n")[:-1]

    end = drawn([_text(line, "bold") for line in below])
    if len(end) > max(1, height // 2):  # the question itself is the last line
        end = [*end[: max(1, height // 2) - 1], end[-1]]
    top = drawn(_head(answer, pace))[: max(2, height - len(end) - 2)]
    left = height - len(top) - len(end)
    headline, told = _story(answer)
    title, entries = drawn(headline), [drawn([one]) for one in told]
    nodes, ranks = (drawn(table(answer, left)) for table in (_nodes, _ranks))
    story_lines = min(sum(map(len, entries)), max(STORY_LINES, left // 3)) + len(title)
    node_lines = min(len(nodes), max(NODE_LINES, left - story_lines - len(ranks)))
    body = [*_cut(nodes, node_lines), *_cut(ranks, left - story_lines - node_lines)]
    story_lines = left - len(body) - len(title)
    body = [*body, *title, *_newest(entries, story_lines)][: max(0, left)]
    return [*top, *body, *[""] * (left - len(body)), *end]


def _newest(entries: list[list[str]], most: int) -> list[str]:
    """The newest entries that fit as a whole; of one that is longer than that, its beginning."""
    shown: list[str] = []
    for entry in reversed(entries):
        if len(shown) + len(entry) > most:
            return shown or entry[: max(0, most)]
        shown = [*entry, *shown]
    return shown


def _cut(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], "..."] if most > 3 else []


def _text(text: str, style: str = "") -> Text:
    return Text(clean_line(text, SHOWN), style=style)


def _head(answer: dict[str, Any], pace: StepRate) -> Iterable[RenderableType]:
    state = answer["state"]
    yield Text.assemble(
        f"job {clean_line(answer['name'] or '?', 60)}: ",
        (state, STYLES.get(state, "")),
        ", paused" if answer["paused"] and not answer["outcome"] else "",
        f", attempt {answer['attempt']}{step_text(answer)}",
        "" if answer["mode"] == "enforce" else f", mode {answer['mode']}",
    )
    yield _text(", ".join(_figures(answer, pace)))
    if answer["restart"] is not None:
        yield _text(restart_line({**answer["restart"], "path": os.path.basename(answer["restart"]["path"])}))
    if answer["outcome"]:
        yield _text(f"ended: {answer['outcome']['line']} (exit code {answer['outcome']['exit_code']})")
    elif answer["controller"] is None or answer["controller"]["journal"] != "ok":
        yield _text(controller_text(answer), "yellow")
    if waits := answer["waiting"] or answer.get("forming"):
        yield _text(f"waits for: {waits}", "yellow")
    if answer["pause"] and not answer["outcome"]:
        yield _text(f"paused since {clock(answer['pause']['at'])[:19]}: nothing is done about failures", "yellow")
    yield from (_text(part.plain, str(part.style)) for part in standstill(answer))
    yield from (_text(f"degraded: {one}", "yellow") for one in answer.get("degraded", ()))
    yield from (_text(one["text"], "yellow") for one in answer.get("swaps", ()))
    told = [one["text"] for one in (answer.get("stragglers"), answer.get("input_wait")) if one]
    yield from (_text(one, "yellow") for one in told)


def _figures(answer: dict[str, Any], pace: StepRate) -> Iterable[str]:
    """`12.3 steps/s, 1 min 05 s left, loss 2.31, last checkpoint: step 200, 3.1 s ago, lost 2.10 s, ETTR 0.912`."""
    running = answer["state"] in ("RUNNING", "HUNG")
    if pace.per_s and running:
        yield f"{pace.per_s:.3g} steps/s" if pace.per_s >= 0.1 else f"{seconds(1 / pace.per_s)} a step"
        if answer["last_step"] is not None and answer["step"] is not None:
            yield f"{seconds((answer['last_step'] - answer['step']) / pace.per_s)} left"
    if answer.get("loss") is not None:
        yield f"loss {answer['loss']:.5g}"
    whole = [one for one in answer["checkpoints"] if one["complete"] and not one.get("copy_of")]
    if whole:
        newest = max(whole, key=lambda one: str(one["modified_at"]))
        step = "" if newest["step"] is None else f"step {newest['step']}, "
        yield f"last checkpoint: {step}{clock(newest['modified_at'])[11:19]}"
    yield f"incidents: {answer['incidents_total']}"
    yield f"lost: {seconds(answer['lost_s'])}"
    if answer["ettr"] is not None:
        yield f"ETTR: {answer['ettr']:.3f}"


def _nodes(answer: dict[str, Any], most: int) -> Iterable[RenderableType]:
    nodes = sorted(answer["nodes"], key=lambda node: node["state"] in ("ACTIVE", "SPARE"))
    if not nodes:
        return
    table = new_table("node", "state", "ranks", "why")
    for node in nodes[:most]:
        why = node["why"] or ("" if node["host"] == node["node"] else f"on {node['host']}")
        state = Text(node["state"], style=STYLES.get(node["state"], ""))
        _add(table.add_row, node["node"], state, ranges(node["ranks"], 4), why)
    yield Text("")
    yield table


def _ranks(answer: dict[str, Any], most: int) -> Iterable[RenderableType]:
    rows = answer.get("ranks") or []
    if not rows or answer["outcome"]:
        return
    table = new_table("rank", "node", "step", "last sign", "doing")
    for row in rows[:most]:
        step = "" if row["step"] is None else str(row["step"])
        quiet = "" if row["quiet_s"] is None else f"{row['quiet_s']:.1f} s ago"
        _add(table.add_row, str(row["rank"]), row["node"], step, quiet, row["text"])
    yield Text("")
    yield table


def _add(add_row: Callable[..., None], *cells: str | Text) -> None:
    """One line for each row, whatever is in it."""
    texts = [cell if isinstance(cell, Text) else _text(cell) for cell in cells]
    for text in texts:
        text.no_wrap, text.overflow = True, "ellipsis"
    add_row(*texts)


def _story(answer: dict[str, Any]) -> tuple[list[Text], list[Text]]:
    """The newest incident, and what the job said last: how it unfolds."""
    title = [Text("")]
    for one in answer["incidents"][-1:]:
        verdict = f"{one['failure_class']}: " if one["failure_class"] else ""
        title.append(_text(f"{one['id']}{' (open)' if one['open'] else ''}: {verdict}{one['why']}", "bold"))
    lines = []
    for line in answer.get("story") or ():
        incident = f"{line['incident']}: " if line["incident"] not in line["text"] else ""
        lines.append(_text(f"{clock(line['at'])[11:19]} {incident}{line['text']}", "" if line["loud"] else "dim"))
    return title, lines
