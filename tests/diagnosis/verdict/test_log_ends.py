"""Collectives as NCCL prints them at INFO, compared over the ranks."""

from __future__ import annotations

from diagnosis.incident import LogEvidence, LogSummary, of_logs
from diagnosis.logs.reader import LogReader
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import calls, triage


def call(rank: int, op: str, count: int, number: str = "1f", comm: str = "", size: int = 2) -> str:
    comm = comm or f"0x55{rank}"
    return (
        f"n1:{70 + rank}:{90 + rank} [{rank}] NCCL INFO {op}: opCount {number} sendbuff 0x7f recvbuff 0x7f "
        f"count {count} datatype 7 op 0 root 0 comm {comm} [nranks={size}] stream 0x55"
    )


def test_ranks_that_call_different_operations():
    found = calls.disagreement(
        [
            call(0, "AllReduce", 64, "1e"),
            call(1, "AllReduce", 64, "1e"),
            call(0, "AllReduce", 64),
            call(1, "Broadcast", 64),
        ]
    )
    assert "AllReduce of 64 and Broadcast of 64" in found.why
    assert found.line == 3


def test_ranks_that_call_different_counts():
    lines = (call(0, "AllReduce", 64), call(1, "AllReduce", 65))
    verdict = triage.conclude(of_logs(LogEvidence(logs=(LogSummary(source="a.log", lines=9, tail=lines),))))
    assert verdict.failure_class is FailureClass.COLLECTIVE_MISMATCH
    assert verdict.evidence[0].line == 9


def test_what_tells_of_nothing():
    agree = [call(0, "AllReduce", 64), call(1, "AllReduce", 64)]
    assert calls.disagreement(agree) is None
    assert calls.disagreement([agree[0], call(1, "AllReduce", 65, "20")]) is None  # one is a call ahead
    assert calls.disagreement([call(0, "Send", 1), call(1, "Recv", 1)]) is None
    two_groups = [call(0, "AllReduce", 1), call(1, "AllReduce", 1), call(2, "AllReduce", 2), call(3, "AllReduce", 2)]
    assert calls.disagreement(two_groups) is None
    of_one_rank = [*agree, call(0, "AllGather", 9, comm="0x99")]
    assert calls.disagreement(of_one_rank) is None
    assert calls.disagreement([call(0, "AllReduce", 64, size=3), call(1, "Broadcast", 64, size=3)]) is None


def test_more_memory_is_asked_for_where_a_job_reached_its_own_limit():
    reader = LogReader("slurm.out")
    reader.feed(b"slurmstepd: error: Step 7.0 exceeded memory limit (67 > 60), being killed\n")
    reader.end()
    verdict = triage.conclude(of_logs(LogEvidence(logs=(reader.summary(),))))
    assert (verdict.failure_class, verdict.action) == (FailureClass.HOST_OOM, "stop")


def test_who_is_named_in_a_line_did_not_write_it():
    line = "[1,0]<stderr>: W horovod/common/operations.cc:588] Broadcast_0 [missing ranks: 1]"
    reader = LogReader("mpi.log")
    reader.feed(f"Stalled ops:\n{line}\n".encode())
    reader.end()
    verdict = triage.conclude(of_logs(LogEvidence(logs=(reader.summary(),))))
    assert [one.rank for one in verdict.culprits] == [1]
    assert "wrote" not in verdict.why
