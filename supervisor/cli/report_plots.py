"""The plots of `unbroken report`, as SVG that loads nothing and runs nothing. Drawn by pygal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any, Final

import pygal
from pygal.style import Style

from supervisor.cli.render import seconds, time_of

GREY: Final = "#808790"
TIME_COLOURS: Final = {"training": "#1a7f37", "until the first step": "#9aa4af"}
COLOURS: Final = ("#b3261e", "#d98200", "#9c6ade", "#2f80ed", "#c2477f", "#8a5a00", "#00838f")
JOBS: Final = 40
"""So many have a bar of their own, and"""
COURSES: Final = 6
"""so many the course of their steps."""
HUGE: Final = 1e300
"""No axis can be drawn from a loss like -1e308 to one like 1e308."""
_SCRIPT: Final = re.compile(r"<script.*?</script>", re.DOTALL)


def where_time_went(answer: dict[str, Any]) -> Iterable[str]:
    """A bar for each job: what part of its time was training, and what was lost to what."""
    jobs = [job for job in answer["jobs"] if job["gpu_hours"]][:JOBS]
    if not jobs:
        return
    losses = itertools.cycle(COLOURS)
    colours = [TIME_COLOURS.get(name) or next(losses) for name in answer["shares"]]
    chart = pygal.HorizontalStackedBar(
        **_looks(*colours), height=110 + 34 * len(jobs), range=(0, 1), value_formatter=lambda value: f"{value:.1%}"
    )
    chart.x_labels = [job["name"] for job in reversed(jobs)]
    for name in answer["shares"]:
        chart.add(name, [job["shares"].get(name, 0.0) for job in reversed(jobs)])
    yield _drawn(chart)


def lost_by_class(answer: dict[str, Any]) -> Iterable[str]:
    rows = [row for row in answer["classes"] if row["lost_s"] > 0][:20]
    if not rows:
        return
    chart = pygal.HorizontalBar(
        **_looks(COLOURS[0]), height=90 + 26 * len(rows), show_legend=False, value_formatter=seconds
    )
    chart.x_labels = [f"{row['class']} ({row['count']})" for row in reversed(rows)]
    chart.add("lost", [row["lost_s"] for row in reversed(rows)])
    yield _drawn(chart)


def courses(answer: dict[str, Any]) -> Iterable[str]:
    """Steps over time, and the loss over steps: where a line goes back or stands, training was lost."""
    for job in answer["jobs"][:COURSES]:
        steps = [(time_of(point["at"]), point["step"]) for point in job["curve"] if point["step"] is not None]
        if len(steps) > 1:
            begun = steps[0][0]
            line = [((at - begun).total_seconds(), step) for at, step in steps]
            title = f"{job['name']}: steps over time"
            chart = pygal.XY(**_looks("#1a7f37"), title=title, x_value_formatter=seconds, **_LINE)
            chart.add("step", line)
            yield _drawn(chart)
        told = [(point["step"], point["loss"]) for point in job["curve"]]
        losses = [(step, loss) for step, loss in told if step is not None and loss is not None and abs(loss) < HUGE]
        if len(losses) > 1:
            chart = pygal.XY(**_looks(COLOURS[3]), title=f"{job['name']}: loss over steps", **_LINE)
            chart.add("loss", losses)
            yield _drawn(chart)


_LINE: Final[dict[str, Any]] = {"height": 300, "show_legend": False, "show_dots": False, "stroke_style": {"width": 2}}


def _looks(*colours: str) -> dict[str, Any]:
    clear = "transparent"
    style = Style(
        background=clear,
        plot_background=clear,
        foreground=GREY,
        foreground_strong=GREY,
        foreground_subtle=GREY,
        guide_stroke_color=GREY,
        major_guide_stroke_color=GREY,
        font_family="system-ui, sans-serif",
        label_font_size=12,
        major_label_font_size=12,
        legend_font_size=13,
        title_font_size=14,
        opacity="1",
        colors=colours,
    )
    return {
        "style": style,
        "js": (),
        "width": 1000,
        "margin": 6,
        "legend_at_bottom": True,
        "truncate_legend": 40,
        "truncate_label": 40,
    }


def _drawn(chart: Any) -> str:
    """Names of jobs and classes are escaped by pygal; of its own script, which shows values, none is wanted."""
    return _SCRIPT.sub("", str(chart.render(is_unicode=True, disable_xml_declaration=True)))
