"""What a verdict names besides: likely classes, no more certainty than it leaves, and all of a culprit."""

from __future__ import annotations

from diagnosis.incident import Culprit
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.triage import Candidate, verdict
from diagnosis.verdict.weights import current


def candidate(failure_class: FailureClass, confidence: float, *culprits: Culprit) -> Candidate:
    return Candidate(failure_class=failure_class, confidence=confidence, why="it says so", culprits=culprits)


def test_every_class_is_confusable_with_others_and_none_with_itself() -> None:
    confusable = current().confusable
    assert set(confusable) == set(FailureClass) - {FailureClass.NONE}
    assert all(name not in others and sum(others.values()) <= 1 for name, others in confusable.items())


def test_a_lone_reading_has_alternatives_that_share_what_it_leaves() -> None:
    told = verdict([candidate(FailureClass.NCCL_TIMEOUT, 0.7)], (), ())

    assert told.alternatives[0].failure_class is FailureClass.SILENT_HANG
    assert told.confidence + sum(one.confidence for one in told.alternatives) < 1


def test_a_rival_in_the_evidence_comes_before_what_is_only_alike() -> None:
    rivals = [candidate(FailureClass.GPU_FALLEN_OFF_BUS, 0.9), candidate(FailureClass.NCCL_NETWORK, 0.6)]

    told = verdict(rivals, (), ())

    assert told.alternatives[0].failure_class is FailureClass.NCCL_NETWORK
    assert FailureClass.PCIE_ERROR in [one.failure_class for one in told.alternatives]


def test_a_culprit_is_put_together_where_only_one_can_be_meant() -> None:
    ecc = FailureClass.GPU_ECC_UNCORRECTABLE
    said = candidate(ecc, 0.95, Culprit(rank=5))
    kernel = [candidate(ecc, 0.9, Culprit(node="n7", gpu=f"0000:{bus}:00")) for bus in ("9b", "4e")]

    assert verdict([said, kernel[0]], (), ()).culprits == (Culprit(node="n7", gpu="0000:9b:00", rank=5),)
    assert verdict([said, *kernel], (), ()).culprits == (Culprit(rank=5),)
    assert verdict(kernel, (), ()).culprits == (Culprit(node="n7", gpu="0000:9b:00"),)
