"""Clocks of several logs."""

from __future__ import annotations

from diagnosis.incident import Curve, LogSummary, Point
from diagnosis.rules import RuleMatch
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import log_accounts


def clocked(source, node, ahead=0.0, steps=range(10), **rest):
    points = tuple(Point(step=step, value=1.0, line=step + 1, at=1000.0 + step * 5 + ahead) for step in steps)
    return LogSummary(source=source, node=node, curves=(Curve(name="loss", points=points),), **rest)


def match(at):
    return RuleMatch(
        rule="x", role="cause", failure_class=FailureClass.DISK_FULL, confidence=0.9, severity="fatal",
        scope="storage", text="x", line=3, at=at,
    )  # fmt: skip


def test_steps_tell_how_far_clocks_are_apart():
    logs = [clocked("a", "n0", steps=range(20)), clocked("b", "n1", 40.0), clocked("c", "n2", 0.4)]
    assert log_accounts.offsets(logs) == {"a": 0.0, "b": 40.0, "c": 0.0}


def test_a_kernel_log_has_the_clock_of_its_node():
    kernel = LogSummary(source="kern", kind="kernel", node="n1", matches=(match(1050.0), match(None)))
    logs = log_accounts.aligned([clocked("a", "n0", steps=range(20)), clocked("b", "n1", 40.0), kernel])
    assert [one.at for one in logs[2].matches] == [1010.0, None]
    assert logs[0] == clocked("a", "n0", steps=range(20))


def test_without_shared_steps_nothing_is_known():
    assert log_accounts.offsets([clocked("a", "n0"), clocked("b", "n1", 40.0, steps=range(8, 12))]) == {
        "a": 0.0,
        "b": 0.0,
    }
    assert log_accounts.aligned([]) == []
