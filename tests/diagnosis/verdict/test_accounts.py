"""Accounts of ended ranks."""

from __future__ import annotations

from diagnosis.signals import ExitRecord, NodeEvidence, RankOutput
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.accounts import accounts_of_ranks


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
