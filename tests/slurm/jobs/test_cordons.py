"""A node with a bad GPU: the spare steps in, and Slurm is told, by our rules for its reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e, pytest.mark.timeout(300)]

Submit = Callable[..., Any]
XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def lose_a_gpu(cluster: Any, job: Any, node: str = "node2", rank: int = 1) -> None:
    """As it looks in life: the kernel says so, and the rank that used it dies."""
    job.wait_step(12)
    assert job.places()[rank] == node
    cluster.kernel_says(node, XID_79)
    job.kill(rank)


def test_a_gpu_falls_off_the_bus(cluster: Any, submit: Submit) -> None:
    job = submit(nodes=3, spares=1)
    lose_a_gpu(cluster, job)
    job.wait_places({0: "node1", 1: "node3"})
    job.succeeds()
    (incident,) = job.incidents()
    assert re.fullmatch(rf"unbroken: {incident['verdict']['failure_class']} .*", cluster.reason("node2"))
    assert f"incident={job.id}/i-1" in cluster.reason("node2")
    assert "gpu=0000:c1:00" in cluster.reason("node2")
    assert cluster.states()["node2"] == "drained"


@pytest.mark.slow
def test_somebody_elses_reason_stands(cluster: Any, submit: Submit) -> None:
    job = submit(nodes=3, spares=1)
    job.wait_step(5)
    cluster.run("ctl", "scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=disk swap, ticket 42")
    lose_a_gpu(cluster, job)
    job.succeeds()
    assert cluster.reason("node2") == "disk swap, ticket 42"
    assert "disk swap, ticket 42" in job.ask("timeline")


@pytest.mark.slow
def test_slurms_controller_is_down_meanwhile(cluster: Any, submit: Submit, after: Callable[[float], None]) -> None:
    """Thirty seconds: the spare does not wait for it, and the node is drained once it is back."""
    job = submit(nodes=3, spares=1, pace=0.8)
    job.wait_step(11)
    cluster.stop_slurmctld()
    lose_a_gpu(cluster, job)
    job.wait_places({0: "node1", 1: "node3"})
    after(30)
    assert job.step() > 20
    cluster.start_slurmctld()
    cluster.until(lambda: cluster.reason("node2").startswith("unbroken: "), 60, "the drain")
    job.succeeds()
