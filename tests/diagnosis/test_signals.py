"""Wait statuses in words."""

from __future__ import annotations

import pytest

from diagnosis.signals import ExitRecord, from_wait_status
from diagnosis.taxonomy import FailureClass


def record(code=None, signal=None, **rest):
    return ExitRecord(rank=0, local_rank=0, pid=1, code=code, signal=signal, ended_at=0.0, **rest)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(0, (0, None, False)), (256, (1, None, False)), (9, (None, 9, False)), (0x8B, (None, 11, True))],
)
def test_wait_statuses(status, expected):
    assert from_wait_status(status) == expected


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (record(signal=9), "was killed by SIGKILL"),
        (record(signal=11, core_dumped=True), "was killed by SIGSEGV (core dumped)"),
        (record(code=1), "ended with code 1"),
        (record(code=137), "ended with code 137 (SIGKILL of its child)"),
        (record(signal=200), "was killed by signal 200"),
    ],
)
def test_words(ended, words):
    assert ended.how == words


@pytest.mark.parametrize(
    ("ended", "failure_class"),
    [
        (record(signal=7), FailureClass.SHM_EXHAUSTED),
        (record(signal=9), FailureClass.WORKER_CRASH),
        (record(signal=15), FailureClass.WORKER_CRASH),
        (record(signal=24), FailureClass.PREEMPTED_OR_CANCELLED),
        (record(signal=25), FailureClass.STORAGE_ERROR),
        (record(code=138), FailureClass.PREEMPTED_OR_CANCELLED),
        (record(code=127), FailureClass.CONFIG_OR_ARGUMENT_ERROR),
        (record(code=1), FailureClass.WORKER_CRASH),
    ],
)
def test_hints(ended, failure_class):
    found, confidence, why = ended.hint()
    assert found is failure_class
    assert 0 < confidence < 0.8
    assert why


def test_what_we_did_ourselves_is_no_failure():
    assert not record(signal=9, stopped_by_us=True).failed
    assert not record(code=0).failed
    assert record(code=1).failed
