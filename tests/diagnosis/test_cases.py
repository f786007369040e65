"""Stories of failures as logs tell them (`cases/*.toml`), and what must be concluded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis.incident import LogEvidence, LogSummary, Verdict, of_logs
from diagnosis.logs import launchers
from diagnosis.logs.reader import LogReader
from diagnosis.verdict import triage, weights

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = sorted((Path(__file__).parent / "cases").glob("*.toml"))


def story_of(text: str, name: str, node: str, rank: int | None) -> LogSummary:
    reader = LogReader(name)
    reader.feed(text.encode())
    reader.end()
    log = reader.summary()
    return msgspec.structs.replace(log, node=node, rank=rank, launcher=log.launcher or launchers.read(text.split("\n")))


def stories_of(file: dict[str, Any]) -> list[LogSummary]:
    text = file["text"].strip("\n")
    if "ranks" not in file:
        return [story_of(text, file["name"], file.get("node", ""), file.get("rank"))]
    return [
        story_of(
            text.replace("{rank}", str(rank)),
            file["name"].replace("{rank}", str(rank)),
            file["node"].replace("{node}", str(rank // 8)),
            rank,
        )
        for first, last in file["ranks"]
        for rank in range(first, last + 1)
    ]


def verdict_of(case: dict[str, Any]) -> Verdict:
    logs = [log for file in case["file"] for log in stories_of(file)]
    return triage.conclude(of_logs(LogEvidence(logs=tuple(logs)), world_size=case.get("world_size", 0)))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = tomllib.loads(path.read_text(encoding="utf-8"))
    expected = case["expect"]
    verdict = verdict_of(case)
    assert verdict.failure_class.value == expected["class"], verdict.why
    assert len(verdict.culprits) == expected.get("culprits", len(verdict.culprits))
    first = verdict.culprits[0] if verdict.culprits else None
    for name in ("rank", "node", "gpu"):
        if name in expected:
            assert first is not None, verdict.why
            assert getattr(first, name) == expected[name], verdict.why
    assert verdict.action == expected.get("action", verdict.action)
    assert set(expected.get("symptoms", ())) <= {one.value for one in verdict.symptoms}
    assert verdict.failure_class.value in ("none", "unknown") or verdict.evidence[0].source


@pytest.mark.parametrize("row", triage.ADJUSTMENTS, ids=lambda row: row.name)
def test_a_row_is_wanted_by_the_case_that_it_names(row: weights.Row[Any]) -> None:
    case = tomllib.loads((CASES[0].parent / f"{row.case}.toml").read_text(encoding="utf-8"))
    verdict = verdict_of(case)
    try:
        weights.use(weights.without(weights.packaged(), row.name))
        assert verdict_of(case) != verdict
    finally:
        weights.use(None)
