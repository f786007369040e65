"""Jobs of deploy/slurm on a real cluster: whatever happens to them, they end with an undisturbed run's weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e, pytest.mark.timeout(300)]

Submit = Callable[..., Any]


def test_a_job_runs_to_its_end_and_survives_a_killed_rank(submit: Submit) -> None:
    job = submit(nodes=2)
    job.wait_step(12)
    assert job.places() == {0: "node1", 1: "node2"}
    job.kill(1)
    job.wait_shown(r"resumed step-\d+\.pt")
    job.succeeds()
    (incident,) = job.incidents()
    assert [(c["node"], c["rank"]) for c in incident["verdict"]["culprits"]] == [("node2", 1)]


@pytest.mark.slow
def test_a_job_of_one_node_is_reached_from_others_and_slurm_tells_its_story(cluster: Any, submit: Submit) -> None:
    job = submit(nodes=1, pace=0.3, options=("--time=UNLIMITED",))
    job.wait_step(5)
    targets = [json.loads(file.read_text())[0] for file in (job.job_dir.parent / "targets").glob("*.json")]
    assert {group["labels"]["unbroken_role"] for group in targets} == {"controller", "agent"}
    for group in targets:
        (address,) = group["targets"]
        assert address.startswith("10.77.0.1:")
        assert "unbroken_only_on" not in group["labels"]
        read = f"import urllib.request as r; print(r.urlopen('http://{address}/metrics', timeout=20).read().decode())"
        assert "unbroken_build_info" in cluster.run("ctl", sys.executable, "-c", read)
    job.ask("pause")  # an order from the login node
    job.ask("resume")
    assert "time limit" not in job.ask("status"), "it is unlimited"
    job.kill(0)
    cluster.until(lambda: job.slurm("%k").startswith("unbroken: i-1: "), 30, lambda: f"a comment: {job.slurm('%k')}")
    job.succeeds()


@pytest.mark.slow
@pytest.mark.lasts(60)
def test_a_node_is_killed_and_booted_again(cluster: Any, submit: Submit) -> None:
    """Before Slurm misses it, so that nobody tells srun of its task. A complete run gives them back all the same."""
    job = submit(nodes=3, spares=1)
    job.wait_step(12)
    cluster.kill_node("node2")
    cluster.boot("node2")
    job.wait_places({0: "node1", 1: "node3"})
    job.wait_shown("unbroken: the run is complete", within_s=60)
    job.succeeds(within_s=60)
    cluster.until(lambda: set(cluster.states().values()) == {"idle"}, 30, lambda: f"idle nodes: {cluster.states()}")


@pytest.mark.slow
@pytest.mark.lasts(60)
def test_a_link_is_cut_and_healed(cluster: Any, submit: Submit, after: Callable[[float], None]) -> None:
    """Nothing of the old side may write when the job has gone on: it sees the job folder, and ends while it is cut.

    Slurm gives the node up meanwhile, and srun's code is that of its task, 137: the job is complete all the same.
    """
    job = submit(nodes=3, spares=1, pace=0.4)
    job.wait_step(12)
    old = job.ranks()[1]
    cluster.cut("node2")  # for two seconds TCP carries on by itself, and so do we
    after(2)
    cluster.heal("node2")
    job.wait_step(job.step() + 5)
    assert (job.ranks()[1], job.incidents()) == (old, [])
    cluster.cut("node2")
    job.wait_places_but({0: "node1", 1: "node3"}, old)
    job.wait_places({0: "node1", 1: "node3"}, within_s=20)
    job.wait_step(job.step() + 5)
    cluster.until(lambda: cluster.states()["node2"].startswith("down"), 30, "Slurm to give node2 up")
    cluster.heal("node2")
    job.wait_shown("node2: task 1: Killed")  # whether it has come back before that, is a matter of milliseconds
    assert job.places() == {0: "node1", 1: "node3"}
    job.succeeds()
    (incident,) = job.incidents()
    assert incident["verdict"]["failure_class"] == "node_failure"
    assert [c["node"] for c in incident["verdict"]["culprits"]] == ["node2"]
    assert "error: Node failure on node2" in job.shown()


@pytest.mark.slow
@pytest.mark.lasts(60)
def test_a_script_that_saves_when_told_to_end(cluster: Any, submit: Submit) -> None:
    """Slurm tells every process of the job: ours take no notice, and the ranks have their time (`KillWait`)."""
    for options in ((), ("--signal=TERM",)):
        job = submit(nodes=2, script=("--save-at-term", "2", "--save-every", "1000"))
        job.wait_step(8)
        cluster.run("ctl", "scancel", *options, job.id)
        job.wait_shown(r"saved at SIGTERM: step \d+")
        assert job.wait_slurm(*job.ended) == ("FAILED" if options else "CANCELLED")
        cluster.until(lambda job=job: not job.living(), 20, lambda job=job: f"the end of ours: {job.living()}")
        assert set(cluster.states().values()) == {"idle"}
        assert job.incidents() == []
    again = submit(nodes=2)
    again.wait_shown(r"resumed step-\d+\.pt")
    again.succeeds()


@pytest.mark.slow
def test_the_time_limit(submit: Submit) -> None:
    """Slurm warns a while before the end; the ranks are stopped in order, and the journal says so."""
    job = submit(nodes=2, pace=1, options=("--time=1", "--signal=TERM@20"))
    job.wait_shown(r"^step 1/")
    assert "time limit: " in job.ask("status")
    job.wait_shown("unbroken: SIGTERM: stopping", within_s=90)
    assert job.wait_slurm(*job.ended, within_s=30) == "FAILED"
    job.wait_shown(r"unbroken: stopped by SIGTERM on node[12], \d+ s before the time limit of slurm")
    assert not job.living()
    assert job.incidents() == []
    again = submit(nodes=2)
    again.wait_shown(r"resumed step-\d+\.pt")
    again.succeeds()
