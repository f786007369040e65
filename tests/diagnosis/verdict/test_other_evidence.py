"""Readings of flight recorders, stacks and curves, in a case of old logs."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.incident import Anomaly, FlightReport, LogEvidence, LoggedTraceback, LogSummary, Slowdown, of_logs
from diagnosis.signals import Frame
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import Traceback
from diagnosis.verdict import candidates, triage
from diagnosis.verdict.accounts import Account


def report(kind="missing_rank", *ranks, **rest):
    return FlightReport(
        kind=kind, culprit_ranks=ranks or (2,), process_group="world", collective_seq=5, why="rank 2 did not come",
        confidence=rest.pop("confidence", 0.9), **rest,
    )  # fmt: skip


def raising(exception, rank):
    frame = Frame(function="step", file="/home/u/train.py", line=3)
    traceback = Traceback(exception=exception, message="x", frames=(frame,), rank=rank)
    one = LoggedTraceback(traceback=traceback, line=7, rank=rank)
    return LogSummary(source=f"rank{rank}.log", lines=9, tail=("x",), tracebacks=(one,))


@pytest.mark.parametrize(
    ("kind", "failure_class"),
    [
        ("missing_rank", FailureClass.SILENT_HANG),
        ("stalled_rank", FailureClass.SILENT_HANG),
        ("dead_rank", FailureClass.WORKER_CRASH),
        ("straggler", FailureClass.STRAGGLER_OR_SLOW),
        ("size_mismatch", FailureClass.COLLECTIVE_MISMATCH),
        ("order_inversion", FailureClass.COLLECTIVE_MISMATCH),
        ("p2p_missing", FailureClass.COLLECTIVE_MISMATCH),
    ],
)
def test_flight_recorders_alone(kind, failure_class):
    verdict = triage.conclude(of_logs(LogEvidence(flight=report(kind)), rank_nodes={2: "n1"}))
    assert verdict.failure_class is failure_class
    assert [(one.rank, one.node) for one in verdict.culprits] == [(2, "n1")]


def test_the_stack_of_the_missing_rank_says_why(at):
    frames = (
        Frame(function="__next__", file="/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line=9),
    )
    stacks = (at("collective", 0), at("collective", 1), msgspec.structs.replace(at("busy", 2), frames=frames))
    verdict = triage.conclude(of_logs(LogEvidence(flight=report(), stacks=stacks)))
    # Not `input_stall`: that slows a run which goes on, and nothing would be restarted.
    assert (verdict.failure_class, verdict.action) == (FailureClass.SILENT_HANG, "restart")
    assert "getting data" in verdict.why
    assert verdict.alternatives[0].failure_class is FailureClass.INPUT_STALL
    by_stacks = triage.conclude(of_logs(LogEvidence(stacks=stacks)))
    assert by_stacks.failure_class is FailureClass.SILENT_HANG
    assert by_stacks.confidence < verdict.confidence


def test_what_the_missing_rank_raised_explains_why_it_did_not_come():
    verdict = triage.conclude(of_logs(LogEvidence(logs=(raising("KeyError", 2),), flight=report())))
    assert verdict.failure_class is FailureClass.SCRIPT_ERROR
    assert FailureClass.SILENT_HANG in verdict.symptoms
    of_another = triage.conclude(
        of_logs(LogEvidence(logs=(raising("torch.distributed.DistBackendError", 1),), flight=report()))
    )
    assert of_another.failure_class is FailureClass.SILENT_HANG


def test_slowness_and_odd_numbers():
    slow = Slowdown(kind="input", ranks=(), cost_percent=40.0, why="steps wait for data", confidence=0.8)
    nan = Anomaly(kind="nan", curve="loss", why="the loss is NaN from step 31 on", confidence=0.9)
    passing = Anomaly(kind="spike", curve="loss", why="one spike", confidence=0.2)
    broken = Account(rank=0, node="", failure_class=FailureClass.GPU_OOM, confidence=0.9, summary="ran out of memory")
    (found,) = candidates.from_curves([slow], [passing], ())
    assert (found.failure_class, found.confidence) == (FailureClass.INPUT_STALL, 0.8)
    assert triage.conclude(of_logs(LogEvidence(anomalies=(nan,)))).failure_class is FailureClass.LOSS_SPIKE_OR_NAN
    assert candidates.from_curves([slow], [], (broken,))[0].confidence < 0.5


def test_where_all_are_slow_nobody_is_left_out():
    slow = Slowdown(kind="link", ranks=(), cost_percent=60.0, why="transfers are slow", confidence=0.8)
    one = Slowdown(kind="rank", ranks=(3,), cost_percent=60.0, why="rank 3 is late", confidence=0.8)
    assert triage.conclude(of_logs(LogEvidence(slow=(slow,)))).action == "none"
    assert triage.conclude(of_logs(LogEvidence(slow=(one,)))).action == "restart_excluding"
