"""The taxonomy and its page."""

from __future__ import annotations

from pathlib import Path

from diagnosis.taxonomy import TAXONOMY, FailureClass, as_markdown

PAGE = Path(__file__).parents[2] / "docs" / "taxonomy.md"


def test_every_class_has_an_entry():
    assert set(TAXONOMY) == set(FailureClass)


def test_the_page_is_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index("| id |") :] == as_markdown()
