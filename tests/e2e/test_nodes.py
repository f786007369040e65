"""Several agents: each `unbroken run` below is a node of its own, on one machine. With links: tests/slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.ledger import NodeRecord, merge
from recovery.ledger_folder import LedgerFolder

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def controller_address(job: Any) -> str:
    shown = job.job_dir / "controller.json"
    job.until(shown.exists, 20, "a controller")
    return str(json.loads(shown.read_text())["address"])


def states(job: Any) -> dict[str, str]:
    """Of the nodes that the controller knows."""
    return {node["node"]: node["state"] for node in job.told("status")["nodes"]}


def nodes(supervise: Supervise, trainer: str, **more: Any) -> tuple[Any, Any, Any]:
    """Nodes a and b with a rank each, c as a spare; a comes first, so it has the controller and rank 0."""
    shared = {"nproc": 1, "world": 2, "torchrun": ("--nnodes", "2"), **more}
    a = supervise(trainer, node="a", options=("--node-name", "a", "--spares", "1"), **shared)
    address = controller_address(a)
    others = []
    for name, extra in (("b", ()), ("c", ("--spare",))):
        options = ("--node-name", name, "--controller", address, "--spares", "1", *extra)
        job = supervise(trainer, node=name, options=options, **shared)
        # A spare that came before an ordinary node would be taken in its stead.
        job.until(lambda name=name: name in states(a), 30, f"node {name} to join")
        others.append(job)
    b, c = others
    (b if trainer == "megatron" else a).wait_step(12)
    assert set(a.ranks()) == {0}
    assert set(b.ranks()) == {1}
    assert c.ranks() == {}, "a spare trains"
    return a, b, c


def lost_nodes(job: Any) -> list[str]:
    """The culprit nodes of the only incident, whose class is node_failure."""
    (incident,) = job.incidents()
    assert incident["verdict"]["failure_class"] == "node_failure"
    return [culprit["node"] for culprit in incident["verdict"]["culprits"]]


def test_a_node_dies_and_the_spare_steps_in(supervise: Supervise) -> None:
    a, b, c = nodes(supervise, "plain", pace=0.25)
    for process in b.kin():
        process.kill()
    assert set(c.wait_ranks(1)) == {1}
    c.succeeds()
    a.succeeds()
    assert lost_nodes(a) == ["b"]


@pytest.mark.slow
def test_an_operator_moves_the_run_to_the_spare(supervise: Supervise) -> None:
    """Cordoned, it stays in use until the next attempt; given back, it is the spare."""
    a, b, c = nodes(supervise, "plain", pace=0.3)
    a.ask("cordon", "b", "-m", "its fan is loud")
    assert set(b.ranks()) == {1}
    would = a.told("restart", "--dry-run")
    assert (would["leave"], would["join"], would["interrupts"]) == (["b"], ["c"], True)
    a.ask("restart", "--yes")
    assert set(c.wait_ranks(1)) == {1}
    a.ask("uncordon", "b")
    a.until(lambda: states(a) == {"a": "ACTIVE", "b": "SPARE", "c": "ACTIVE"}, 30, "b to be the spare")
    for process in c.kin():
        process.kill()
    assert set(b.wait_ranks(1)) == {1}
    a.succeeds()
    b.succeeds()


@pytest.mark.slow
def test_a_node_freezes_and_comes_back(supervise: Supervise) -> None:
    """What ran there before it froze must not go on when it thaws: the run has moved to the spare."""
    a, b, c = nodes(supervise, "megatron", pace=0.3)
    old = b.ranks()
    for process in b.kin():
        os.kill(process.pid, signal.SIGSTOP)
    c.wait_ranks(1)
    c.wait_step(c.step() + 5)
    for process in b.kin():
        os.kill(process.pid, signal.SIGCONT)
    b.until(lambda: not set(b.ranks().values()) & set(old.values()), 10, "the end of the old epoch's rank")
    assert b.ranks() == {}
    a.succeeds()
    c.succeeds()


@pytest.mark.slow
def test_too_few_nodes_wait_for_one_that_comes(supervise: Supervise) -> None:
    shared = {"nproc": 1, "world": 2, "torchrun": ("--nnodes", "2"), "pace": 0.1}
    a = supervise("plain", node="a", options=("--node-name", "a"), **shared)
    more = ("--controller", controller_address(a))
    b = supervise("plain", node="b", options=("--node-name", "b", *more), **shared)
    a.wait_step(12)
    for process in b.kin():
        process.kill()
    a.until(lambda: not a.ranks(), 30, "rank 0 to be stopped")
    assert a.front.poll() is None
    again = supervise("plain", node="d", options=("--node-name", "d", *more), **shared)
    a.succeeds()
    again.succeeds()


@pytest.mark.slow
def test_a_rank_of_the_second_node_is_killed(supervise: Supervise) -> None:
    shared = {"nproc": 2, "world": 4, "torchrun": ("--nnodes", "2")}
    a = supervise("megatron", node="a", options=("--node-name", "a"), **shared)
    b = supervise("megatron", node="b", options=("--node-name", "b", "--controller", controller_address(a)), **shared)
    b.wait_step(12)  # the last rank prints
    assert set(b.ranks()) == {2, 3}
    b.kill(3)
    a.succeeds()
    b.succeeds()
    (incident,) = a.incidents()
    assert [(c["node"], c["rank"]) for c in incident["verdict"]["culprits"]] == [("b", 3)]


XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


@pytest.mark.slow
def test_two_jobs_share_what_one_of_them_found_out_about_a_node(supervise: Supervise, tmp_path: Path) -> None:
    """The first proves that a GPU of b is gone; the second, on b alone, waits until somebody has repaired it."""
    folder = tmp_path / "ledger"
    folder.mkdir()
    shared = {"UNBROKEN_LEDGER": str(folder), "UNBROKEN_LEDGER_CORDONS": "cordon"}
    a, b, c = nodes(supervise, "plain", pace=0.25, env=shared)
    with (b.rig / "kernel").open("a") as kernel:
        kernel.write(XID_79)
    b.kill(1)
    assert set(c.wait_ranks(1)) == {1}

    def known() -> NodeRecord:
        return merge(LedgerFolder(folder).read(time.time()).entries, time.time())["b"]

    a.until(lambda: known().state == "CORDONED", 20, "the ledger to have it")
    unbroken, script, there = (
        str(Path(sys.executable).with_name("unbroken")),
        tmp_path / "second.py",
        tmp_path / "second",
    )
    script.write_text("print('step 1 loss 1.0', flush=True)\n")
    run = (unbroken, "run", "--node-name", "b", "--job-dir", str(there), "--", sys.executable, str(script))
    environment = {**os.environ, **shared, "UNBROKEN_LOCAL_DIR": str(tmp_path / "second-local")}
    second = subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        shown = (unbroken, "status", "--json", "--job-dir", str(there))
        look = lambda: subprocess.run(shown, env=environment, capture_output=True, text=True).stdout  # noqa: E731
        a.until(lambda: '"state":"CORDONED"' in look(), 60, "the second job to leave b out")
        subprocess.run((unbroken, "uncordon", "b", "--cluster", "-m", "GPU replaced"), check=True, env=environment)
        assert second.wait(60) == 0
    finally:
        second.kill()
        second.wait()
    for job in (a, c):
        job.succeeds()
    assert (known().state, known().score.outages) == ("PROBATION", 1)
