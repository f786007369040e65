"""`recovery.schedulers.Slurm` against a real Slurm."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from recovery.schedulers import quarantine_name

pytestmark = pytest.mark.slurm

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
ASK = """
import asyncio, json, sys
from recovery.schedulers import Slurm
call, *arguments = json.loads(sys.argv[1])
answer = asyncio.run(getattr(Slurm(command_s=8.0), call)(*arguments))
print(json.dumps([answer.outcome, answer.text]))
"""
LEAVING = """
import asyncio, json
from recovery.schedulers import Slurm
found = asyncio.run(Slurm(command_s=8.0).leaving("7", ("node1", "node2", "node3", "node4")))
print(json.dumps([[one.node, one.kind, one.why] for one in found]))
"""
REASON = "unbroken: gpu_fell_off_bus gpu=0000:41:00 incident=7/i-1"


@pytest.fixture
def ask(cluster: Any) -> Callable[..., tuple[str, str]]:
    """One call of the scheduler, on the controller's host; as an ordinary user with `user=True`."""

    def ask(*call: Any, user: bool = False) -> tuple[str, str]:
        command = (*(NOBODY if user else ()), sys.executable, "-c", ASK, json.dumps(call))
        outcome, text = json.loads(cluster.run("ctl", *command))
        return outcome, text

    return ask


@pytest.fixture
def leaving(cluster: Any) -> Callable[[], list[list[str]]]:
    """Node, kind and why of those that Slurm takes out of service."""
    return lambda: json.loads(cluster.run("ctl", sys.executable, "-c", LEAVING))  # type: ignore[no-any-return]


def test_drains_are_of_one_node_and_what_others_wrote_stands(
    cluster: Any, ask: Callable[..., tuple[str, str]], leaving: Callable[[], list[list[str]]]
) -> None:
    assert ask("drain", "node2", REASON, user=True) == ("denied", "slurm_update error: Invalid user id")
    assert ask("drain", "node2", REASON)[0] == "done"
    assert cluster.reason("node2") == REASON
    assert cluster.states()["node2"] == "drained"
    assert ask("drain", "node2", "unbroken: something later")[0] == "already"
    assert cluster.reason("node2") == REASON
    assert ask("undrain", "node2", "8") == ("foreign", f"node2 is drained for another reason: {REASON}")
    assert cluster.states()["node2"] == "drained"
    assert ask("undrain", "node2", "7")[0] == "done"
    assert cluster.reason("node2") == ""
    assert cluster.states()["node2"].startswith("idle")
    assert ask("undrain", "node2", "7")[0] == "already"

    cluster.run("ctl", "scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=disk swap | ticket 42")
    for call in (("drain", "node3", REASON), ("undrain", "node3", "7")):
        outcome, text = ask(*call)
        assert (outcome, "disk swap | ticket 42" in text) == ("foreign", True)
    assert cluster.reason("node3") == "disk swap | ticket 42"
    assert [one[:2] for one in leaving()] == [["node3", "drained"]]
    assert "disk swap | ticket 42" in leaving()[0][2]
    soon = ("StartTime=now+3600", "Duration=60", "Users=root", "Nodes=node[2-4]", "Flags=MAINT,IGNORE_JOBS")
    cluster.run("ctl", "scontrol", "create", "reservation", "ReservationName=patch", *soon)
    assert [one[:2] for one in leaving()] == [["node2", "maintenance"], ["node3", "drained"], ["node4", "maintenance"]]
    cluster.run("ctl", "scontrol", "delete", "ReservationName=patch")
    assert cluster.states()["node3"] == "drained"

    for name in ("ALL", "node[1-4]", "node1,node2", "-x", "node9", ""):
        assert ask("drain", name, REASON)[0] == "failed", f"{name} would mean more than one node"
    assert cluster.states()["node1"] == cluster.states()["node4"] == "idle"

    assert ask("drain", "node1", 'a "b" $(c)\nState=DOWN\x1b[31m ' + "x" * 1000)[0] == "done"
    assert cluster.reason("node1").startswith("unbroken: a 'b' $(c) State=DOWN"), "hostile words stay words"
    assert len(cluster.reason("node1")) <= 200
    assert cluster.states()["node1"] == "drained"


@pytest.mark.slow
def test_a_daemon_that_is_down_is_unavailable(cluster: Any, ask: Callable[..., tuple[str, str]]) -> None:
    cluster.stop_slurmctld()
    for call in (("drain", "node1", REASON), ("undrain", "node1", "7"), ("requeue", "1", ["node1"])):
        assert ask(*call)[0] == "unavailable"
    cluster.start_slurmctld()
    assert ask("drain", "node1", REASON)[0] == "done"


@pytest.mark.slow
def test_a_job_starts_again_at_once_on_other_nodes(cluster: Any, ask: Callable[..., tuple[str, str]]) -> None:
    """By the order of its owner, who is no operator; nodes that the user excluded stay excluded."""
    script = cluster.folder / "job"
    script.write_text("#!/bin/sh\nsrun sleep 1000\n")
    user = (
        *NOBODY,
        "sbatch",
        "--chdir=/",
        "--nodes=1",
        "--exclude=node1",
        "--requeue",
        "--output=/dev/null",
        str(script),
    )
    job = cluster.run("ctl", *user).split()[-1]

    def shown(what: str) -> str:
        return str(cluster.run("ctl", "squeue", "-h", "-j", job, "-o", what).strip())

    cluster.until(lambda: shown("%T %N") == "RUNNING node2", 20, "the job to run")
    cluster.until(lambda: cluster.run("ctl", "squeue", "-h", "-s", "-j", job, "-o", "%i"), 10, "its step")
    outcome, text = ask("requeue", job, ["node2"], user=True)
    assert (outcome, text.startswith(f"job {job} is requeued without node2 (")) == ("done", True)
    cluster.until(lambda: shown("%T %N") == "RUNNING node3", 40, lambda: f"it to run again: {shown('%T %N %r %S')}")
    assert shown("%x") == "node[1-2]"
    assert ask("requeue", "99", ["node2"])[0] == "failed"
    assert ask("requeue", job, [], user=True)[0] == "done"
    assert ask("cancel", job, user=True)[0] == "done"
    cluster.until(lambda: shown("%T") in ("CANCELLED", ""), 20, lambda: f"its end: {shown('%T %r')}")


@pytest.mark.slow
def test_a_job_on_all_nodes_excludes_none_that_it_needs(cluster: Any, ask: Callable[..., tuple[str, str]]) -> None:
    """Else it would wait for ever, also when they are back."""
    script = cluster.folder / "job"
    script.write_text("#!/bin/sh\nsrun --no-kill sleep 1000\n")
    options = ("--nodes=4", "--ntasks-per-node=1", "--no-kill", "--requeue", "--output=/dev/null")
    job = cluster.run("ctl", *NOBODY, "sbatch", "--chdir=/", *options, str(script)).split()[-1]

    def shown(what: str) -> str:
        return str(cluster.run("ctl", "squeue", "-h", "-j", job, "-o", what).strip())

    cluster.until(lambda: shown("%T %N") == "RUNNING node[1-4]", 20, "the job to run")
    cluster.until(lambda: cluster.run("ctl", "squeue", "-h", "-s", "-j", job, "-o", "%i"), 10, "its step")
    assert ask("requeue", job, ["node2"], ["node3"], user=True) == (
        "unsupported",
        f"job {job} cannot start again: it needs 4 nodes, and partition main has 3 besides node2",
    )
    assert shown("%T") == "RUNNING"
    outcome, text = ask("requeue", job, [], ["node3"], user=True)
    assert (outcome, "node3 may be given to it again" in text) == ("done", True)
    cluster.until(lambda: shown("%T %N") == "RUNNING node[1-4]", 40, lambda: f"it to run again: {shown('%T %N %r %S')}")
    assert shown("%x") == ""


def test_a_quarantine_keeps_others_off_a_node_and_lets_its_tests_run(
    cluster: Any, ask: Callable[..., tuple[str, str]]
) -> None:
    outcome, text = ask("reserve", "node4", 3600.0, user=True)
    assert outcome == "denied", text
    outcome, text = ask("reserve", "node4", 3600.0)
    assert outcome == "done", text
    assert ask("reserve", "node4", 3600.0)[0] == "already"
    assert "reserved" in cluster.run("ctl", "srun", "--nodelist=node4", "--immediate=5", "hostname", check=False)
    name = quarantine_name("node4")
    assert cluster.run("ctl", "srun", f"--reservation={name}", "--nodelist=node4", "hostname").strip() == "node4"
    cluster.run("ctl", "scontrol", "create", "reservation", "ReservationName=theirs", "Nodes=node3", "Users=root",
                "StartTime=now", "Duration=60", "Flags=IGNORE_JOBS")  # fmt: skip
    assert ask("release", "node3")[0] == "already"
    assert ask("release", "node4")[0] == "done"
    assert ask("release", "node4")[0] == "already"
    left = cluster.run("ctl", "scontrol", "--oneliner", "show", "reservation")
    assert ("theirs" in left, name in left) == (True, False)
    cluster.run("ctl", "scontrol", "delete", "ReservationName=theirs")
    assert cluster.run("ctl", "srun", "--nodelist=node4", "--immediate=20", "hostname").strip() == "node4"
    for bad in ("ALL", "node[1-4]", "node1,node2", "-x", "node9", ""):
        assert ask("reserve", bad, 3600.0)[0] == "failed"
        assert ask("release", bad)[0] == "already"
