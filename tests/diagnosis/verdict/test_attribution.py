"""Findings of kernel, GPU, host and scheduler, joined to ranks."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.signals import Evidence, ExitRecord, Finding
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import accounts, candidates
from diagnosis.verdict.accounts import Accounts


def finding(failure_class=FailureClass.GPU_FALLEN_OFF_BUS, node="n0", at=0.0, **fields):
    return Finding(
        rule="x", failure_class=failure_class, confidence=0.9, scope="node", severity="fatal", node=node, at=at,
        fields=fields, evidence=Evidence(text="it broke", source="kern.log"),
    )  # fmt: skip


def killed(rank, node="n0", signal=9):
    record = ExitRecord(rank=rank, local_rank=0, pid=100 + rank, code=None, signal=signal, ended_at=1.0)
    return accounts.by_status(node, record)


def read(found, *ended, places=frozenset({"n0"}), **rest):
    told = Accounts(accounts=ended, findings=(found,), places=frozenset(places), **rest)
    (candidate,) = candidates.from_findings(told)
    return candidate


@pytest.mark.parametrize(
    ("at", "counts"),
    [
        (99_500.0, True),  # 10 minutes before to 5 after
        (100_299.0, True),
        (99_000.0, False),
        (101_000.0, False),
        (100_000.0 + 8 * 3600, True),  # another zone
        (0.0, True),  # no time
    ],
)
def test_the_window_of_attribution(at, counts):
    assert (read(finding(at=at), killed(1), failed_at=100_000.0).confidence > 0.7) is counts


def test_a_kill_is_of_the_rank_with_that_pid():
    oom = finding(FailureClass.HOST_OOM, pid="102", process="python3")
    assert [one.rank for one in read(oom, killed(1), killed(2)).culprits] == [2]


def test_a_kill_of_somebody_else_explains_little():
    assert read(finding(FailureClass.HOST_OOM, pid="7", process="mysqld"), killed(1, signal=11)).confidence < 0.6
    assert read(finding(FailureClass.HOST_OOM, pid="7", process="python3"), killed(1, signal=11)).confidence > 0.8


def test_what_happened_where_nothing_failed_explains_little():
    assert read(finding(node="n7"), killed(1)).confidence < 0.5
    assert read(finding(node=""), killed(1)).confidence > 0.8


def test_what_a_table_asks_for_is_what_a_verdict_recommends():
    assert read(finding(action="cordon_gpu_and_restart"), killed(1)).action == "cordon_gpu_and_restart"
    assert read(finding(action="none"), killed(1)).action is None


def test_a_node_that_nobody_knows_may_be_any():
    unknown = read(finding(node="kern"), killed(1), well=frozenset({"n1"}))
    assert unknown.confidence > read(finding(node="n1.cluster"), killed(1), well=frozenset({"n1"})).confidence


@pytest.mark.parametrize(
    ("source", "line", "who"),
    [
        ("kernel", None, "kernel on n0"),
        ("plugin_of_ours", None, "plugin_of_ours on n0"),
        ("output", None, "rank 1's output on n0"),
        ("logs/train.log", 12, "rank 1's output on n0"),
    ],
)
def test_it_says_who_said_it(source, line, who):
    """The kernel or a check names a process, which is a rank: that makes it no word of that rank."""
    found = msgspec.structs.replace(finding(), rank=1, evidence=Evidence(text="it broke", source=source, line=line))
    assert read(found, killed(1)).why.startswith(f"{who} says: it broke")
