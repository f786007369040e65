"""Each row of exceptions.toml: its samples match, its counter-samples do not."""

from __future__ import annotations

import re

import pytest

from diagnosis import exceptions
from diagnosis.tables import load
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.tracebacks import Traceback

TABLE = load("diagnosis", "exceptions.toml")
PATTERNS = [*TABLE["words"].items(), *TABLE["file"].items(), *((row["class"], row) for row in TABLE["about"])]


def class_of(line: str) -> FailureClass:
    name, _, message = line.partition(": ")
    return exceptions.read(Traceback(exception=name, message=message)).failure_class


@pytest.mark.parametrize("row", [*TABLE["type"], *TABLE["module"]], ids=lambda row: row["names"][0])
def test_types_and_modules(row: dict) -> None:
    assert FailureClass(row["class"]) in TAXONOMY
    assert row["samples"]
    for sample in row["samples"]:
        assert any(name in sample for name in row["names"])
        assert class_of(sample) is FailureClass(row["class"])
    for other in row.get("others", ()):
        assert class_of(other) is not FailureClass(row["class"])


@pytest.mark.parametrize("table", TABLE["decision"], ids=lambda table: table["names"][0])
def test_decisions_end_and_ask_for_what_is_known(table: dict) -> None:
    *_, (_, _, *last) = table["rows"]
    asked = {condition.removeprefix("not ") for _, _, *conditions in table["rows"] for condition in conditions}
    assert last == []
    assert asked <= TABLE["words"].keys() | exceptions._CODE.keys()
    assert TABLE["words"].keys().isdisjoint(exceptions._CODE)


@pytest.mark.parametrize("row", [row for _, row in PATTERNS], ids=[name for name, _ in PATTERNS])
def test_patterns(row: dict) -> None:
    pattern = re.compile(row["regex"])
    assert row["samples"]
    assert row["others"]
    assert all(pattern.search(sample) for sample in row["samples"])
    assert not any(pattern.search(other) for other in row["others"])


@pytest.mark.parametrize("row", TABLE["place"].values(), ids=list(TABLE["place"]))
def test_places(row: dict) -> None:
    for kind in ("file", "function", "code"):
        pattern = re.compile(row[kind])
        assert row[f"{kind}s"]
        assert all(pattern.search(sample) for sample in row[f"{kind}s"])
        assert not any(pattern.search(other) for other in row["others"])
