"""The ledger's records and what is made of them."""

from __future__ import annotations

import msgspec

from recovery.ledger import TestResult


def test_a_result_keeps_all_that_is_known_through_json() -> None:
    result = TestResult(
        node="n7",
        gpu="GPU-1",
        test="matmul_bf16_4096",
        value=612.5,
        unit="TFLOP/s",
        verdict="fail",
        reason="14 % below the median of 8 nodes",
        peers=("n8",),
        at=1000.0,
        kind="H100 torch 2.13.0 CUDA 12.8",
        seconds=1.5,
    )
    assert msgspec.json.decode(msgspec.json.encode(result), type=TestResult) == result


def test_a_result_needs_no_value() -> None:
    assert TestResult(node="n7", test="step_digest", digest="ab12", verdict="unknown", at=1.0).value is None
