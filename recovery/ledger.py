"""What is known of the nodes of a cluster, over all jobs that ran on it.

Pure. Records are kept as they were written; text in them is hostile input, cleaned where it is read.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from diagnosis.signals import Frozen

TestVerdict = Literal["pass", "fail", "unknown"]
"""`unknown`: the test could not say, as where too few nodes were there to compare with."""


class TestResult(Frozen, frozen=True, kw_only=True):
    """What one active test said of a node, or of one of its GPUs."""

    __test__: ClassVar[bool] = False
    """To pytest: this is no test of ours."""

    node: str
    gpu: str = ""
    """The GPU's UUID; empty: the test is about the node as a whole."""
    test: str
    """Its name: `matmul_bf16_4096`."""
    value: float | None = None
    unit: str = ""
    digest: str = ""
    """What a test gives that compares bits, and not a size."""
    verdict: TestVerdict
    reason: str = ""
    """Why, in words: against which nodes, and by how much."""
    peers: tuple[str, ...] = ()
    """The other nodes that took part."""
    at: float
    """When it ended, Unix time."""
    kind: str = ""
    """Device, torch and CUDA: only results of one kind are compared."""
    seconds: float = 0.0
    """How long it took."""
