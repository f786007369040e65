"""Short documents: reports of devices, nodes and pods, logs of other stacks; complaints; some show no trouble."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from supervisor.cli import diagnose


def reports(name: str = "short_reports.txt") -> list[object]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    found: list[object] = []
    for number, report in enumerate(text.split("\n@ ")[1:], start=1):
        accepted, _, log = report.partition("\n")
        found.append(pytest.param(accepted.split(), log + "\n", id=f"{number}-{accepted.split()[0]}"))
    return found


@pytest.mark.parametrize(("accepted", "log"), [*reports(), *reports("short_complaints.txt")])
def test_a_reader_on_call_would_say_the_same(accepted: list[str], log: str) -> None:
    verdict = diagnose.answer([diagnose.read(io.BytesIO(log.encode()), "given.txt")])["verdict"]
    assert verdict["failure_class"] in accepted, verdict["why"]


@pytest.mark.parametrize(("_name", "log"), reports("healthy_listings.txt"))
def test_listings_on_which_nothing_is_wrong_alarm_nobody(_name: list[str], log: str) -> None:
    verdict = diagnose.answer([diagnose.read(io.BytesIO(log.encode()), "given.txt")])["verdict"]
    assert verdict["failure_class"] in ("none", "unknown"), verdict["why"]
