"""Jobs that run: on nodes of nobody, and on those of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass


@pytest.fixture
def running(make_driver: Any) -> Callable[..., Any]:
    """Names of nodes, and what is to be special about the job -> one that runs on them and needs them all."""

    def start(*names: str, step: int | None = 1, **more: Any) -> Any:
        driver = make_driver(**{"nodes_min": len(names), "nodes_max": len(names), **more})
        driver.join(*names)
        driver.up(step)
        return driver

    return start


GPU = Verdict(
    failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
    culprits=(Culprit(node="b", rank=2, gpu="0000:c1:00"),),
    confidence=0.95,
    why="Xid 79: the GPU has fallen off the bus",
    action="cordon_node_and_restart",
)


@pytest.fixture
def slurm(make_driver: Any) -> Any:
    """Nodes a and b run, c is the spare; the scheduler has names of its own for them."""

    def start(verdict: Verdict = GPU, spares: tuple[str, ...] = ("c",), **spec: Any) -> Any:
        driver = make_driver(
            verdict, nodes_min=2, nodes_max=2, scheduler="slurm", scheduler_job="4711", spares=len(spares), **spec
        )
        for name in ("a", "b"):
            driver.join(name, scheduler_node=f"node{name}")
        for name in spares:
            driver.join(name, spare=True, scheduler_node=f"node{name}")
        driver.up()
        return driver

    return start
