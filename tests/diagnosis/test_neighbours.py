"""What a verdict names besides: likely classes, and no more certainty than it leaves."""

from __future__ import annotations

from diagnosis.candidates import Candidate, verdict
from diagnosis.neighbours import NEIGHBOURS
from diagnosis.taxonomy import FailureClass


def candidate(failure_class: FailureClass, confidence: float) -> Candidate:
    return Candidate(failure_class=failure_class, confidence=confidence, why="it says so")


def test_every_failure_has_neighbours_and_none_is_its_own() -> None:
    assert set(NEIGHBOURS) == set(FailureClass) - {FailureClass.NONE}
    assert all(name not in others and sum(others.values()) <= 1 for name, others in NEIGHBOURS.items())


def test_a_lone_reading_has_alternatives_that_share_what_it_leaves() -> None:
    told = verdict([candidate(FailureClass.NCCL_TIMEOUT, 0.7)], (), ())

    assert told.alternatives[0].failure_class is FailureClass.SILENT_HANG
    assert told.confidence + sum(one.confidence for one in told.alternatives) < 1


def test_a_rival_in_the_evidence_comes_before_what_is_only_alike() -> None:
    rivals = [candidate(FailureClass.GPU_FALLEN_OFF_BUS, 0.9), candidate(FailureClass.NCCL_NETWORK, 0.6)]

    told = verdict(rivals, (), ())

    assert told.alternatives[0].failure_class is FailureClass.NCCL_NETWORK
    assert FailureClass.PCIE_ERROR in [one.failure_class for one in told.alternatives]
