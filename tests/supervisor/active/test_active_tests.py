"""The program that makes the tests, with real torch: faults are planted in it from outside."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from recovery.active_verdicts import Figure, judge
from supervisor.active.suite import SUITES, ActiveSetup, Devices, find_devices, run_node, warmed

FLIP = """
import os, torch
real, calls = torch.Tensor.backward, [0]
def backward(self, *arguments, **more):
    leaves, waiting = [], [self.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [one for one, _ in node.next_functions if one is not None]
    real(self, *arguments, **more)
    calls[0] += 1
    if calls[0] in eval(os.environ["TEST_FLIP"]):
        leaves[0].grad.view(torch.int32).view(-1)[7] ^= 1
torch.Tensor.backward = backward
"""
"""As `sitecustomize`: the lowest bit of one gradient is flipped in these calls."""


PATIENT = SUITES["quick"]._replace(node_s=150.0)


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(FLIP)
    return tmp_path


def setup(node: str, tmp_path: Path, more: Mapping[str, str]) -> ActiveSetup:
    return ActiveSetup(node, sys.executable, {**os.environ, **more}, tmp_path)


def bits(node: str, tmp_path: Path, more: Mapping[str, str]) -> Figure:
    (figure,) = run_node(setup(node, tmp_path, more), Devices(("cpu",), "CPU"), PATIENT, ["training_bits"])
    return figure


@pytest.mark.slow
def test_a_flipped_bit_of_a_gradient_is_found(flipped: Path) -> None:
    """Between two runs on one device; and, where every run has it, beside other nodes."""
    plant = {"PYTHONPATH": str(flipped)}
    once = bits("n1", flipped, {**plant, "TEST_FLIP": "{5}"})
    assert "gradients" in once.fault
    always = bits("n2", flipped, {**plant, "TEST_FLIP": "range(99)"})
    well = bits("n3", flipped, {})
    assert not always.fault
    assert always.digest != well.digest
    fleet = [always, well, Figure(node="n4", test=well.test, kind=well.kind, digest=well.digest)]
    results = judge(fleet, again=[always])
    assert [one.verdict for one in results] == ["fail", "pass", "pass"]


@pytest.mark.slow
def test_forked_children_compute_what_fresh_ones_do(tmp_path: Path) -> None:
    fresh = bits("n1", tmp_path, {})
    with warmed(setup("n1", tmp_path, {}), PATIENT._replace(look_s=100.0)) as bench:
        assert bench.warm is not None, "nothing of the import of torch stands against forks"
        devices = find_devices(bench, PATIENT)
        first, again = (
            run_node(bench, Devices(("cpu",), devices.kind), PATIENT, ["training_bits"])[0] for _ in range(2)
        )
    assert fresh.digest
    assert {first.digest, again.digest} == {fresh.digest}
    assert (first.kind, first.fault, first.unfinished) == (fresh.kind, "", "")


@pytest.mark.gpu
def test_the_quick_suite_of_a_gpu_node(tmp_path: Path) -> None:
    """Within its time; every family gives a figure, and nothing of a GPU that is well fails."""
    suite, own = SUITES["quick"], setup("n1", tmp_path, {})
    started = time.monotonic()
    with warmed(own, suite) as bench:
        assert bench.warm is not None
        devices = find_devices(bench, suite)
        assert devices.devices[0] == "cuda:0"
        figures = run_node(bench, devices, suite)
    assert time.monotonic() - started < suite.whole_s + suite.look_s
    first = {one.test: one for one in figures if one.gpu == figures[0].gpu}
    assert {one.partition("_")[0] for one in first} >= {"matmul", "memory", "copy", "training"}
    assert not [one for one in figures if one.fault or one.hung or one.unfinished]
    assert first["training_bits"].digest
    assert first["training_bits"].gpu.startswith("GPU-")
    bf16 = max(one.value or 0.0 for one in figures if one.test.startswith("matmul_bf16"))
    fp32 = max(one.value or 0.0 for one in figures if one.test.startswith("matmul_fp32"))
    assert bf16 > 2 * fp32 > 0.0


@pytest.mark.gpu
def test_a_flipped_bit_on_a_gpu(flipped: Path) -> None:
    own = setup("n1", flipped, {"PYTHONPATH": str(flipped), "TEST_FLIP": "{5}"})
    devices = find_devices(own, SUITES["quick"])
    figures = run_node(own, devices, SUITES["quick"], ["training_bits"])
    assert all("gradients" in one.fault for one in figures)
