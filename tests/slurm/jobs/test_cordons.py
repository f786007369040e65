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


@pytest.mark.slow
@pytest.mark.lasts(80)
def test_a_gpu_falls_off_the_bus_and_its_rank_trains_on(cluster: Any, submit: Submit) -> None:
    """The node leaves when a checkpoint has just become complete, and is drained."""
    job = submit(nodes=3, spares=1, pace=0.8)
    job.wait_step(11)
    node, pid = job.ranks()[1]
    cluster.kernel_says(node, XID_79.replace("'<unknown>'", str(pid)))
    job.wait_places({0: "node1", 1: "node3"})
    job.succeeds()
    struck, swap = job.incidents()
    assert (struck["trigger"], swap["trigger"]) == ("device", "swap")
    steps = re.findall(r"^step (\d+)/", job.shown(), re.MULTILINE)
    assert len(steps) - len(set(steps)) <= 1, "steps that were made twice"
    assert re.fullmatch(rf"unbroken: {swap['verdict']['failure_class']} .*", cluster.reason("node2"))
    assert f"incident={job.id}/i-2" in cluster.reason("node2")
    assert "gpu=0000:c1:00" in cluster.reason("node2")
    cluster.until(lambda: cluster.states()["node2"] == "drained", 20, "nothing of the job to be left there")


@pytest.mark.slow
def test_the_driver_tells_of_it(cluster: Any, submit: Submit, gpus: Callable[[str], Callable[..., None]]) -> None:
    """The same Xid as an event of NVML, on a node whose kernel log says nothing."""
    event = gpus("node2")
    job = submit(nodes=3, spares=1, pace=0.4)
    job.wait_step(12)
    event(3, 8, 79)  # GPU 3, an Xid
    cluster.until(lambda: "reported by NVML" in job.ask("timeline"), 20, "the word of the driver")
    job.kill(1)
    job.wait_places({0: "node1", 1: "node3"})
    job.succeeds()
    assert re.match(r"unbroken: gpu_fallen_off_bus gpu=[0-9a-f]{4}:[0-9a-f]{2}:00 incident=", cluster.reason("node2"))


@pytest.mark.slow
def test_the_job_ends_while_slurms_controller_is_down(cluster: Any, submit: Submit) -> None:
    """It stays a while for the drain; whatever comes of it is told."""
    job = submit(nodes=3, spares=1, pace=1.2)
    job.wait_step(11)
    cluster.stop_slurmctld()
    lose_a_gpu(cluster, job)
    job.wait_places({0: "node1", 1: "node3"})
    cluster.until(lambda: "slurm does not answer" in job.ask("timeline"), 30, "the first try of the drain")
    job.ask("stop", "--yes")
    cluster.until(lambda: not job.ranks(), 20, "the end of the ranks")
    cluster.start_slurmctld()
    cluster.until(lambda: cluster.reason("node2").startswith("unbroken: "), 30, "the drain")
    assert job.wait_slurm(*job.ended) == "FAILED"
    status = job.told("status")
    assert status["outcome"]["line"] == "stopped by an operator (so far slurm has not drained node2)"
    assert [cordon["scheduler"] for cordon in status["cordons"]] == ["drained"]


@pytest.mark.slow
def test_an_operators_cordon_and_its_end(cluster: Any, submit: Submit) -> None:
    job = submit(nodes=3, spares=1, pace=0.5)
    job.wait_step(3)
    assert "for the whole cluster" in job.ask("cordon", "node3", check=False)
    assert cluster.reason("node3") == ""
    job.ask("cordon", "node3", "--reason", "looks odd", "--yes")
    cluster.until(lambda: cluster.reason("node3"), 30, "a drain")
    assert cluster.reason("node3").startswith("unbroken: operator ")
    assert "looks odd" in cluster.reason("node3")
    job.ask("uncordon", "node3", "--yes")
    cluster.until(lambda: not cluster.reason("node3"), 30, "the node to be given back")
    assert job.places() == {0: "node1", 1: "node2"}
    job.succeeds()
    assert job.incidents() == []
