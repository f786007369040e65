"""Ends of logs in words that no rule knows."""

from __future__ import annotations

import pytest

from diagnosis import exceptions
from diagnosis.incident import LogEvidence, LogSummary, of_logs
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import triage


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("FATAL:   could not open image /scratch/x.sif: no such file or directory", "config_or_argument_error"),
        ("fetch: error: 403 from the model hub", "permission_or_auth"),
        ("ERROR: the volume has no space", "disk_full"),
        ("[rank3]: trainer[77]: fatal: unable to reach the parameter host", "dns_or_connect"),
    ],
)
def test_what_they_are_about(line, failure_class):
    found = exceptions.last_words(["starting", line, ""])
    assert (found.failure_class.value, found.line) == (failure_class, 1)


@pytest.mark.parametrize(
    "line",
    [
        "error rate: 0.3",
        "WARNING: error: could not connect, retrying",
        "train error: 0.45 val error: 0.5 epoch 3",
        "E external/xla/cuda_dnn.cc:9261] Unable to register cuDNN factory",
        "an error: of no known kind",
        "error analysis written to out/errors.csv",
        "Downloading model weights... failed, using mirror",
        "all is well",
    ],
)
def test_what_healthy_logs_say(line):
    assert exceptions.last_words([line]) is None


def test_only_what_comes_after_the_last_progress_counts():
    line = "ERROR: permission denied by the licence server"
    log = LogSummary(source="a.log", lines=9, tail=("x", line))
    verdict = triage.conclude(of_logs(LogEvidence(logs=(log,))))
    assert verdict.failure_class is FailureClass.PERMISSION_OR_AUTH
    assert verdict.confidence < 0.8
    assert verdict.evidence[0].line == 9
    healthy = LogSummary(source="a.log", lines=9, tail=(line, "x"), progress_line=9)
    assert triage.conclude(of_logs(LogEvidence(logs=(healthy,)))).failure_class is FailureClass.NONE


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        ("zsh: killed     python train.py", "worker_crash"),
        ("[trainer] child returned -9", "worker_crash"),
        ("job ended, rc=139", "worker_crash"),
        ("exit status 1", "worker_crash"),
        ("make: *** [Makefile:12: train] Error 2", "worker_crash"),
        ("Crashed.", "worker_crash"),
        ("Hangup", "preempted_or_cancelled"),
        ("^C", "preempted_or_cancelled"),
        ("the wrapper exited with code 143", "preempted_or_cancelled"),
        ("exit status 0", "none"),
        ("epoch 3 returned 12 batches", "none"),
        ("the evaluation returned 12", "none"),
        ("exit criteria: 3", "none"),
    ],
)
def test_a_bare_last_word_ends_a_log_with_steps(line, failure_class):
    log = LogSummary(source="a.log", lines=2, tail=("step 7/90 loss 2.0", line), progress_line=1, step=7)
    assert triage.conclude(of_logs(LogEvidence(logs=(log,)))).failure_class.value == failure_class
    if failure_class != "none":
        goes_on = LogSummary(source="a.log", lines=2, tail=(line, "step 7/90 loss 2.0"), progress_line=2, step=7)
        assert triage.conclude(of_logs(LogEvidence(logs=(goes_on,)))).failure_class is FailureClass.NONE
