"""Logs as accounts of ranks, and the clocks of several logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.incident import Curve, LauncherFailure, LogEvidence, LogSummary, Point, of_logs
from diagnosis.rules import RuleMatch
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import log_accounts, triage


def match(line=10, **rest):
    fields = {
        "rule": "x", "role": "cause", "failure_class": FailureClass.GPU_OOM, "confidence": 0.95, "severity": "fatal",
        "scope": "rank", "text": "CUDA out of memory",
    }  # fmt: skip
    return RuleMatch(**fields | rest, line=line)


def log(*matches, **rest):
    return LogSummary(
        source=rest.pop("source", "a.log"), lines=rest.pop("lines", 100), tail=("x",), matches=matches, **rest
    )


@pytest.mark.parametrize(
    ("rest", "failed"),
    [
        ({}, True),
        ({"progress_line": 9}, True),
        ({"progress_line": 12}, True),  # another rank's last step
        ({"progress_line": 60}, False),
        ({"progress_line": 12, "finished_line": 20}, False),
        ({"finished_line": 20}, True),  # last words after an exception
    ],
)
def test_what_training_survived_is_no_failure(rest, failed):
    verdict = triage.conclude(of_logs(LogEvidence(logs=(log(match(), **rest),))))
    assert (verdict.failure_class is FailureClass.GPU_OOM) is failed
    assert (verdict.failure_class is FailureClass.NONE) is not failed


def test_an_error_that_came_again_at_the_end_was_not_survived():
    again = match(10, last_line=99)
    assert (
        triage.conclude(of_logs(LogEvidence(logs=(log(again, progress_line=60),)))).failure_class
        is FailureClass.GPU_OOM
    )


def test_the_launchers_report_names_the_rank_that_nobody_named():
    report = LauncherFailure(rank=3, line=90, text="rank 3: exit code 1", code=1, is_root=True, host="n1")
    (account,) = log_accounts.describe(LogEvidence(logs=(log(match(), launcher=(report,)),)), {}).accounts
    assert (account.rank, account.node, account.failure_class) == (3, "n1", FailureClass.GPU_OOM)


def test_a_killed_rank_speaks_for_itself():
    report = LauncherFailure(rank=3, line=90, text="rank 3: exit code -9", signal=9, is_root=True, host="n1")
    lost = match(role="cascade", failure_class=FailureClass.NCCL_NETWORK, confidence=0.6)
    verdict = triage.conclude(of_logs(LogEvidence(logs=(log(lost, launcher=(report,)),))))
    assert verdict.failure_class is FailureClass.WORKER_CRASH
    assert verdict.culprits[0].rank == 3
    assert FailureClass.HOST_OOM in [one.failure_class for one in verdict.alternatives]


_match = st.builds(
    match,
    line=st.integers(1, 100),
    role=st.sampled_from(["cause", "symptom", "cascade", "outcome"]),
    failure_class=st.sampled_from(FailureClass),
    confidence=st.floats(0, 1),
    severity=st.sampled_from(["fatal", "error", "warning"]),
    scope=st.sampled_from(["rank", "node", "job"]),
    rank=st.none() | st.integers(0, 3),
    at=st.none() | st.floats(0, 1e9),
)
_failure = st.builds(
    LauncherFailure,
    rank=st.none() | st.integers(0, 3),
    line=st.integers(1, 100),
    text=st.just("x"),
    code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 31),
    is_root=st.booleans(),
)
_log = st.builds(
    lambda matches, **rest: log(*matches, **rest),
    source=st.sampled_from(["a", "b"]),
    kind=st.sampled_from(["output", "kernel", "scheduler", "mixed"]),
    rank=st.none() | st.integers(0, 3),
    progress_line=st.none() | st.integers(1, 100),
    finished_line=st.none() | st.integers(1, 100),
    launcher=st.lists(_failure, max_size=3).map(tuple),
    matches=st.lists(_match, max_size=6).map(tuple),
)


@given(st.lists(_log, max_size=4))
def test_there_is_always_one_verdict_and_always_the_same(logs):
    incident = of_logs(LogEvidence(logs=tuple(logs)), world_size=4)
    verdict = triage.conclude(incident)
    assert 0 < verdict.confidence <= 1
    assert verdict.why
    assert verdict == triage.conclude(incident)
    assert verdict.failure_class not in [one.failure_class for one in verdict.alternatives]


def clocked(source, node, ahead=0.0, steps=range(10), **rest):
    points = tuple(Point(step=step, value=1.0, line=step + 1, at=1000.0 + step * 5 + ahead) for step in steps)
    return LogSummary(source=source, node=node, curves=(Curve(name="loss", points=points),), **rest)


def match_at(at):
    return RuleMatch(
        rule="x", role="cause", failure_class=FailureClass.DISK_FULL, confidence=0.9, severity="fatal",
        scope="storage", text="x", line=3, at=at,
    )  # fmt: skip


def test_steps_tell_how_far_clocks_are_apart():
    logs = [clocked("a", "n0", steps=range(20)), clocked("b", "n1", 40.0), clocked("c", "n2", 0.4)]
    assert log_accounts.offsets(logs) == {"a": 0.0, "b": 40.0, "c": 0.0}


def test_a_kernel_log_has_the_clock_of_its_node():
    kernel = LogSummary(source="kern", kind="kernel", node="n1", matches=(match_at(1050.0), match_at(None)))
    logs = log_accounts.aligned([clocked("a", "n0", steps=range(20)), clocked("b", "n1", 40.0), kernel])
    assert [one.at for one in logs[2].matches] == [1010.0, None]
    assert logs[0] == clocked("a", "n0", steps=range(20))


def test_without_shared_steps_nothing_is_known():
    assert log_accounts.offsets([clocked("a", "n0"), clocked("b", "n1", 40.0, steps=range(8, 12))]) == {
        "a": 0.0,
        "b": 0.0,
    }
    assert log_accounts.aligned([]) == []


def test_numbers_of_many_digits_are_no_error() -> None:
    lines = [f"epoch: 2 loss: 0.0{at}" for at in range(7)]
    assert log_accounts.last_counted([*lines, "epoch: 2 loss: 0.0028811171650886536"]) is None
    counted = [f"batch {at} of 50, loss 0.00288111716508865{10 ** (at % 3)}" for at in range(8)]
    assert log_accounts.last_counted(counted) == 7
