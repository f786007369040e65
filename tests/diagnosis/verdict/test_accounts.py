"""Accounts of ended ranks, and what a rank says, weighed."""

from __future__ import annotations

import pytest

from diagnosis.incident import Incident
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, ExitRecord, NodeEvidence, RankOutput
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.verdict import accounts
from diagnosis.verdict.accounts import Statement, accounts_of_ranks
from diagnosis.verdict.triage import conclude
from recovery.policy import SURE_ENOUGH


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


STEPS = tuple(f"step {n} loss {3 - n / 10:.2f}" for n in range(1, 6))
RAISED = ("Traceback (most recent call last):", '  File "/x/t.py", line 2, in <module>', "FluxError: the governor fell")


@pytest.mark.parametrize(
    ("lines", "is_aside"),
    [
        ((*STEPS, "ERROR 401: Unauthorized"), False),
        (("usage: t.py [-h]", "t.py: error: unrecognized arguments: --x"), False),
        (("ERROR 401: Unauthorized", *STEPS), True),
        ((*STEPS, "ERROR 401: Unauthorized", "FluxError: the governor fell"), True),
        ((*STEPS, "ERROR 401: Unauthorized", *RAISED), True),
        ((*STEPS, "ERROR 401: Unauthorized", *(f"so it goes, for {n} times" for n in range(20))), True),
        ((*STEPS, *RAISED[:2], "PermissionError: [Errno 13] Permission denied: '/ckpt'"), False),
        ((*STEPS, *RAISED[:2], "acme.Refused: PERMISSION_DENIED: the caller is not on the list"), True),
        ((*STEPS, *RAISED[:2], "acme.Trouble: unknown flag --fast"), True),
    ],
)
def test_a_line_that_is_not_why_a_rank_ended_does_not_end_the_job(lines: tuple[str, ...], is_aside: bool) -> None:
    end = ExitRecord(rank=1, local_rank=1, pid=7, code=1, signal=None, ended_at=9.0)
    output = RankOutput(rank=1, tail=lines, traceback=lines[-3:] if "Traceback" in "".join(lines) else ())
    account = accounts.account_of_rank("n1", end, output)
    assert TAXONOMY[account.failure_class].retry == "never"
    assert account.is_aside is is_aside
    evidence = NodeEvidence(node="n1", attempt=1, exits=(end,), outputs=(output,))
    incident = Incident(id="i-1", opened_at=10.0, attempt=1, trigger="exit", evidence=(evidence,), world_size=2)
    assert (conclude(incident).action == "restart") is is_aside


def test_a_broken_device_that_a_rank_trained_on_with_does_not_cordon() -> None:
    end = ExitRecord(rank=1, local_rank=1, pid=7, code=1, signal=None, ended_at=9.0)
    broken = "CUDA error: uncorrectable ECC error encountered"
    confidences = [
        accounts.account_of_rank("n1", end, RankOutput(rank=1, tail=lines)).confidence
        for lines in ((*STEPS, broken), (broken, *STEPS))
    ]
    assert confidences[0] > SURE_ENOUGH > confidences[1]


@pytest.mark.parametrize(
    ("line", "shown", "left_out"),
    [
        (
            f"W platform.cc:256] no executor: {'a detail, ' * 20}call failed: CUDA_ERROR_NO_DEVICE here",
            "CUDA_ERROR_NO_DEVICE",
            "",
        ),
        (
            f"request to the hub failed {'/path' * 50} (Caused by [Errno 110] Connection timed out)",
            "Connection timed out",
            "",
        ),
        (
            f"OutOfMemoryError: it is too much, {'a hint ' * 40}the end of the hint",
            "it is too much",
            "the end of the hint",
        ),
    ],
)
def test_of_a_long_line_the_words_that_decide_are_shown(line: str, shown: str, left_out: str) -> None:
    found = accounts._words(line)
    assert shown in found
    assert line[:20] in found
    assert len(found) <= accounts.MAX_WORDS + 5
    assert not left_out or left_out not in found


def test_of_several_threads_the_one_that_is_marked_crashed():
    head, waits = (
        "Fatal Python error: Segmentation fault",
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
    )
    others = ["Thread 0x00007f5741fff700 (most recent call first):", waits]
    marked = ["Current thread 0x00007f5741aaa700 (most recent call first):", '  File "/w/train.py", line 9 in step']
    found = accounts.statement_of_crash([head, *others, *marked], Evidence(text="", source="a"))
    assert found is not None
    assert "step (train.py:9)" in found.summary
    assert accounts.statement_of_crash([head, *others], Evidence(text="", source="a")) is None
