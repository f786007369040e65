"""The taxonomy and its page."""

from __future__ import annotations

from pathlib import Path

from diagnosis.taxonomy import TAXONOMY, FailureClass

PAGE = Path(__file__).parents[2] / "docs" / "taxonomy.md"


def test_every_class_has_an_entry():
    assert set(TAXONOMY) == set(FailureClass)


def test_the_page_is_the_table():
    text = PAGE.read_text(encoding="utf-8")
    head = ["| id | kind | domain | what it is, typical evidence | default remedy | retry |", "| --- " * 6 + "|"]
    rows = [
        f"| {name.value} | {entry.kind} | {entry.domain} | {entry.what} | {entry.remedy} | {entry.retry} |"
        for name, entry in TAXONOMY.items()
    ]
    assert text[text.index("| id |") :] == "\n".join([*head, *rows]) + "\n"
