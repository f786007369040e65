"""Words of healthy logs: they speak only where nothing else does, and never against a word of trouble."""

from __future__ import annotations

import pytest

from diagnosis import health_words
from diagnosis.incident import LogEvidence, LogSummary, of_logs
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import triage

STARTS = (
    "building the tokenizer, vocabulary of 50304",
    "per device batch 4, 1.3 billion parameters",
    "learning rate 0.0003, warmup 200, total images 12000000",
    "training will be logged to tensorboard",
)


def concluded(*lines):
    log = LogSummary(source="a.log", lines=len(lines), tail=lines)
    return triage.conclude(of_logs(LogEvidence(logs=(log,))))


def test_a_log_that_reads_like_a_healthy_one_is_one_but_not_for_sure():
    verdict = concluded(*STARTS)
    assert verdict.failure_class is FailureClass.NONE
    assert 0.5 < verdict.confidence < 0.65
    assert verdict.action == "none"


def test_a_word_of_trouble_outweighs_all_words_of_health():
    assert concluded(*STARTS, "the grommet is unhealthy").failure_class is FailureClass.UNKNOWN


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("x q zz",) * 40,
        ("INFO training",),
        (
            "uncorrected memory errors on dimm 3",
            "fatal watchdog, cannot dump the socket of processor 0",
            "unable to kill",
        ),
    ],
    ids=["nothing", "no known word", "few words", "words of failures"],
)
def test_what_does_not_read_like_one(lines):
    assert health_words.score(lines) < health_words.LIKE_A_HEALTHY_LOG
