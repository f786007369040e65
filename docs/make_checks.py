"""Writes the table of docs/checks.md from the code: `python docs/make_checks.py`. A test compares."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from supervisor.node_health.check import CheckRow, table

PAGE = Path(__file__).with_name("checks.md")
TABLE_BEGINS = "| check |"


def as_markdown(rows: Iterable[CheckRow]) -> str:
    lines = [
        f"{TABLE_BEGINS} unhealthy means | threshold | read from | when | class | scope |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        check = row.check
        cells = (
            check.id,
            check.what,
            check.threshold_text(),
            check.source,
            check.when,
            row.failure_class,
            check.scope,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text[: text.index(TABLE_BEGINS)] + as_markdown(table().values())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
