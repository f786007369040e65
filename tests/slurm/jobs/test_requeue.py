"""No spare is left: the job starts again on other nodes, once, and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

Submit = Callable[..., Any]
AGAIN_S = 200
"""The job starts again after 15 or 45 s. Where the machine is so busy that this has passed when its last process ends,
slurmctld itself puts 121 s in between."""
XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def slurm_conf() -> str:
    """Slurm's own. With the other tests' 5 s a busy machine has the job killed before it has said what happens."""
    return "KillWait=30"


@pytest.mark.lasts(70)
def test_a_bad_node_and_no_spare(cluster: Any, submit: Submit) -> None:
    job = submit(nodes=2)
    job.wait_step(12)
    cluster.kernel_says("node2", XID_79)
    job.kill(1)
    job.wait_shown("requeued: slurm starts the job again")
    job.wait_slurm("RUNNING", within_s=AGAIN_S)
    assert (job.slurm("%x"), "node2" in cluster.run("ctl", "squeue", "-h", "-o", "%N")) == ("node2", False)
    job.wait_shown(r"resumed step-10\.pt")
    job.succeeds(within_s=120)
    assert [incident["id"] for incident in job.incidents()] == ["i-1"]
    assert job.told("status")["requeues"] == 1
    assert cluster.reason("node2").startswith("unbroken: gpu_fallen_off_bus ")


@pytest.mark.lasts(90)
def test_all_nodes_are_used_and_one_is_lost(cluster: Any, submit: Submit) -> None:
    """It is needed: to leave it out would be to wait for ever. The job starts again when it is back."""
    job = submit(nodes=4, run=("--wait-for-nodes", "20"))
    job.wait_step(12)
    cluster.kill_node("node3")
    job.wait_shown("requeued: slurm starts the job again")
    assert job.slurm("%x") == ""
    job.wait_slurm("PENDING")
    assert job.told("status")["state"] == "REQUEUED"
    assert cluster.states()["node3"].startswith("down"), "requeued before Slurm gave it up: it would forget the GPUs"
    cluster.boot("node3")
    job.wait_slurm("RUNNING", within_s=AGAIN_S)
    job.wait_shown(r"resumed step-\d+\.pt", within_s=AGAIN_S)
    job.succeeds(within_s=120)
    [incident] = job.incidents()
    assert [culprit["node"] for culprit in incident["verdict"]["culprits"]] == ["node3"]


@pytest.mark.lasts(195)
def test_the_first_node_is_lost(cluster: Any, submit: Submit) -> None:
    """With the batch script and the controller. Slurm lets the other node run on; that has the job started again."""
    job = submit(nodes=2)
    job.wait_step(12)
    cluster.kill_node("node1")
    job.wait_slurm("PENDING", within_s=180)
    job.wait_shown(r"resumed step-10\.pt", within_s=AGAIN_S)
    job.succeeds(within_s=120)
    assert {line.split(".")[1] for line in (path.name for path in job.job_dir.glob("journal.*"))} == {"1", "2"}
    [incident] = job.incidents()
    assert [culprit["node"] for culprit in incident["verdict"]["culprits"]] == ["node1"]
    assert "restart 1): node2 asked for it, because the first node, node1, was lost" in job.ask("timeline")


@pytest.mark.lasts(60)
def test_somebody_elses_requeue_is_no_stop(cluster: Any, submit: Submit) -> None:
    """An operator's, or a preemption: Slurm begins it with the signal of a stop, and is asked which of both it is."""
    job = submit(nodes=2, pace=0.2)
    job.wait_step(12)
    cluster.run("ctl", "scontrol", "requeue", job.id)
    job.wait_slurm("PENDING")
    status = job.told("status")
    assert (status["state"], status["outcome"]["exit_code"]) == ("REQUEUED", 75)
    cluster.run("ctl", "scontrol", "update", f"JobId={job.id}", "StartTime=now")
    job.wait_shown(r"resumed step-\d+\.pt")
    job.succeeds(within_s=120)
    assert job.incidents() == []
