"""Accounts of ended ranks, and what a rank says, weighed."""

from __future__ import annotations

from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, ExitRecord, NodeEvidence, RankOutput
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import accounts
from diagnosis.verdict.accounts import Statement, accounts_of_ranks


def test_what_a_rank_said_at_its_end_counts_more_than_what_an_earlier_suspicion_saw() -> None:
    said = ("Traceback (most recent call last):", '  File "train.py", line 57, in step', "ValueError: 127 tokens")
    suspicion = NodeEvidence(node="n1", attempt=5, request=10, outputs=(RankOutput(rank=1),))
    end = NodeEvidence(
        node="n1",
        attempt=5,
        exits=(ExitRecord(rank=1, local_rank=1, pid=7, code=1, signal=None, ended_at=9.0),),
        outputs=(RankOutput(rank=1, tail=said, traceback=said),),
    )
    for evidence in ((suspicion, end), (end, suspicion)):
        (account,) = accounts_of_ranks(evidence)
        assert account.failure_class is not FailureClass.WORKER_CRASH
        assert "ValueError: 127 tokens" in account.summary


def said(line, role="cause", failure_class=FailureClass.SCRIPT_ERROR, confidence=0.8, **rest):
    return Statement(
        role=role, failure_class=failure_class, confidence=confidence, summary="raised X", last_line=line,
        evidence=Evidence(text="X", line=line), **rest,
    )  # fmt: skip


def best(*all_of_it):
    return accounts.weigh(all_of_it)[0][0].line


def test_a_cause_counts_more_than_its_consequences():
    assert best(said(1, "symptom", confidence=0.95), said(5), said(9, "cascade", confidence=0.95)) == 5


def test_of_two_causes_the_first_counts():
    assert best(said(1), said(5)) == 1
    assert best(said(1, confidence=0.6), said(5, confidence=0.95)) == 5


def test_errors_after_a_cancellation_come_from_it():
    cancelled = said(3, "outcome", FailureClass.PREEMPTED_OR_CANCELLED, 0.9, of_rank=False)
    assert best(cancelled, said(5)) == 3
    assert best(said(1), cancelled) == 1
    # What a node says is no consequence of it.
    assert best(cancelled, said(5, failure_class=FailureClass.HOST_OOM, confidence=0.92, of_rank=False)) == 5


def test_the_last_of_several_runs_in_one_file_counts():
    assert best(said(10, is_traceback=True), said(5000, is_traceback=True)) == 5000
    assert best(said(10, is_traceback=True), said(5000, "cascade", is_traceback=True)) == 10


def test_warnings_and_what_is_unsure_explain_nothing():
    match = RuleMatch(
        rule="x", role="cause", failure_class=FailureClass.GPU_DRIVER, confidence=0.6, severity="error", scope="node",
        text="x", line=1,
    )  # fmt: skip
    found = accounts.statement_of_match(match, Evidence(text=""))
    assert found is not None
    assert found.benign
    unsure = RuleMatch(**{name: getattr(match, name) for name in match.__struct_fields__} | {"severity": "warning"})
    assert accounts.statement_of_match(unsure, Evidence(text="")) is None


def test_a_crash_in_a_library_is_the_librarys():
    lines = ["x", "Fatal Python error: Segmentation fault", "", "Current thread 0x1 (most recent call first):"]
    library = '  File "/venv/lib/python3.11/site-packages/torch/x.py", line 12 in step'
    found = accounts.statement_of_crash([*lines, library], Evidence(text="", source="a.log"), 100)
    assert (found.failure_class, found.line) == (FailureClass.FRAMEWORK_BUG, 101)
    own = accounts.statement_of_crash([*lines, '  File "train.py", line 12 in step'], Evidence(text=""))
    assert own.failure_class is FailureClass.WORKER_CRASH
    assert accounts.statement_of_crash([library], Evidence(text="")) is None
