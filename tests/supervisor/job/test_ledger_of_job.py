"""What a job takes from the ledger of all jobs, and what it adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.ledger import CordonLifted, NodeCordoned, NodeFailed
from supervisor import messages as m
from supervisor.job.job import Job
from supervisor.job.ledger import BAD_POINTS, proves_hardware
from tests.supervisor.job.conftest import GPU

NETWORK = Verdict(
    failure_class=FailureClass.NCCL_NETWORK,
    culprits=(Culprit(node="b", rank=2),),
    confidence=0.9,
    why="the link of b was down",
    action="restart_excluding",
)


def said(driver: Any, *nodes: m.LedgerNode, problem: str = "") -> list[m.Action]:
    actions: list[m.Action] = driver.tell(m.LedgerSeen, nodes=nodes, fleet=100, problem=problem)
    return actions


def cordoned(name: str, **more: Any) -> m.LedgerNode:
    return m.LedgerNode(node=name, **{"cordon": "memory errors", "by": "ann", **more})


def writes(driver: Any) -> list[m.LedgerWrite]:
    return [one for one in driver.actions if isinstance(one, m.LedgerWrite)]


def records(job: Job, kind: type) -> list[Any]:
    return [one.what for one in job.ledger._unwritten.values() if isinstance(one.what, kind)]


# ----- what it says -----


def test_a_node_that_is_cordoned_for_the_cluster_takes_no_part(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    said(driver, cordoned("b"))
    driver.join("a", "b")
    assert "cluster_cordoned" in driver.loud
    assert driver.state == "IDLE"
    driver.join("c")
    assert driver.job.attempt.members == ("a", "c")
    views = driver.job.view()
    assert [(one.node, one.scope) for one in views.cordons] == [("b", "cluster")]
    assert {one.node: one.state for one in views.nodes}["b"] == "CORDONED"
    assert driver.replayed().view() == views


def test_a_node_is_known_by_the_schedulers_name(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=1, scheduler="slurm")
    said(driver, cordoned("node7"))
    driver.join("b", scheduler_node="node7")
    assert driver.job.nodes.cordoned() == {"b"}


def test_a_cordon_that_is_over_gives_the_node_back(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=1)
    said(driver, cordoned("a"))
    driver.join("a")
    assert driver.state == "IDLE"
    said(driver)
    assert "cluster_cordon_over" in driver.loud
    assert driver.state == "STARTING"


def test_a_cordon_ends_at_its_time_without_a_word(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=1)
    said(driver, cordoned("a", until=driver.now + 60))
    driver.join("a")
    assert driver.state == "IDLE"
    driver.now += 61
    driver.join("b")
    assert driver.job.nodes.cordoned() == set()


def test_a_running_attempt_is_not_interrupted(running: Callable[..., Any]) -> None:
    driver = running("a", "b")
    said(driver, cordoned("b"))
    assert driver.state == "RUNNING"
    assert {"cluster_cordoned", "node_in_use"} <= set(driver.loud)
    driver.join("c")
    driver.verdict = GPU
    driver.crash("a", 1)
    assert driver.job.attempt.members == ("a", "c")


def test_an_attempt_that_only_begins_is_begun_again(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, spares=1)
    driver.join("a", "b")
    driver.join("c", spare=True)
    assert (driver.state, driver.job.attempt.members) == ("STARTING", ("a", "b"))
    said(driver, cordoned("b"))
    assert driver.job.attempt.members == ("a", "c")


def test_a_ledger_that_cannot_be_read_changes_nothing(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=1)
    said(driver, cordoned("a"))
    said(driver, problem="it does not answer")
    assert "ledger_unreadable" in driver.loud
    driver.join("a")
    assert driver.job.nodes.cordoned() == {"a"}
    said(driver, problem="it does not answer")
    assert driver.loud == {}


def test_a_ledger_that_cannot_be_written_is_said_and_what_it_says_holds(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=1)
    for unwritten, loud in (("read-only", True), ("read-only", False), ("", False)):
        driver.tell(m.LedgerSeen, nodes=(cordoned("a"),), fleet=8, unwritten=unwritten)
        assert ("ledger_unwritable" in driver.loud) == loud
    driver.join("a")
    assert driver.job.nodes.cordoned() == {"a"}


def test_a_jobs_uncordon_does_not_lift_what_holds_for_all(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=1, ledger="propose")
    said(driver, cordoned("a"))
    driver.join("a")
    driver.order("uncordon", "a")
    assert driver.job.nodes.cordoned() == {"a"}
    assert writes(driver) == []


def test_a_job_whose_nodes_are_all_cordoned_says_so_and_names_the_way_out(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, ledger="propose")
    said(driver, cordoned("a"), cordoned("b"))
    driver.join("a", "b")
    driver.order("uncordon", "a")
    [left] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "still_left_out"]
    assert left.arguments["cluster"]
    driver.fire("nodes")
    assert "2 cordoned: a, b" in driver.job.outcome.line


# ----- probation -----


@pytest.mark.parametrize(
    "doubt", [{"probation_until": 9e9}, {"points": BAD_POINTS}], ids=["on probation", "with a bad score"]
)
def test_a_doubtful_node_is_first_a_spare(make_driver: Any, doubt: dict[str, Any]) -> None:
    """And nobody waits for one more node because of that: all that were to come are there."""
    driver = make_driver(nodes_min=2, nodes_max=2, spares=1)
    said(driver, m.LedgerNode(node="a", **doubt))
    driver.join("a")
    driver.join("c", spare=True)
    driver.join("b")
    assert sorted(driver.job.attempt.members) == ["b", "c"]


def test_a_doubtful_node_is_used_where_there_is_no_other(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    said(driver, m.LedgerNode(node="a", probation_until=9e9))
    driver.join("a", "b")
    assert driver.job.attempt.members == ("a", "b")


def test_a_member_that_becomes_doubtful_keeps_its_place(running: Callable[..., Any]) -> None:
    driver = running("a", "b")
    driver.join("c", spare=True)
    said(driver, m.LedgerNode(node="b", points=9.0, lemon=True, why=("2 outages",)))
    assert "lemon_proposed" in driver.loud
    driver.crash("a", 1)
    assert driver.job.attempt.members == ("a", "b")


@pytest.mark.parametrize("repaired", [False, True])
def test_the_first_network_failure_after_a_repair_is_not_the_first(running: Callable[..., Any], repaired: bool) -> None:
    """Watched more closely: without a repair one bad word from a link is forgiven."""
    driver = running("a", "b")
    driver.join("c", spare=True)
    if repaired:
        said(driver, m.LedgerNode(node="b", probation_until=driver.now + 3600))
    driver.verdict = NETWORK
    driver.crash("b", 2)
    while driver.state == "DIAGNOSING":
        driver.fire("evidence")
    assert ("b" in driver.job.nodes.cordoned()) == repaired


def test_probation_is_over_at_its_time(running: Callable[..., Any]) -> None:
    driver = running("a", "b")
    driver.join("c", spare=True)
    said(driver, m.LedgerNode(node="b", probation_until=driver.now + 60))
    driver.now += 61
    driver.verdict = NETWORK
    driver.crash("b", 2)
    while driver.state == "DIAGNOSING":
        driver.fire("evidence")
    assert driver.job.nodes.cordoned() == set()


def test_a_test_that_is_due_is_said_once(running: Callable[..., Any]) -> None:
    driver = running("a", "b")
    due = m.LedgerNode(node="b", probation_until=9e9, retest_due=True)
    said(driver, due)
    assert "retest_due" in driver.loud
    said(driver, due, cordoned("z"))
    assert "retest_due" not in driver.loud


# ----- what the job adds -----


def test_without_a_ledger_nothing_is_written(running: Callable[..., Any]) -> None:
    driver = running("a", "b")
    driver.join("c", spare=True)
    driver.verdict = GPU
    driver.crash("b", 2)
    assert records(driver.job, object) == []


@pytest.mark.parametrize(("setting", "scope"), [("propose", "proposal"), ("cordon", "cluster")])
def test_a_proven_hardware_fault_is_written_for_all_jobs(slurm: Any, setting: str, scope: str) -> None:
    driver = slurm(ledger=setting)
    driver.crash("b", 2)
    [what] = records(driver.job, NodeCordoned)
    assert (what.node, what.scope, what.failure_class, what.gpu) == (
        "nodeb",
        scope,
        "gpu_fallen_off_bus",
        "0000:c1:00",
    )
    assert driver.job.ledger._unwritten[1].by == "policy"
    driver.up(5)
    [failure] = records(driver.job, NodeFailed)
    assert (failure.node, failure.incident) == ("nodeb", "i-1")


def test_a_cordon_without_a_proof_of_the_hardware_is_the_jobs_own(running: Callable[..., Any]) -> None:
    driver = running("a", "b", ledger="cordon")
    driver.order("cordon", "b")
    [what] = records(driver.job, NodeCordoned)
    assert what.scope == "job"


@pytest.mark.parametrize(
    ("failure_class", "proven"),
    [
        (FailureClass.GPU_ECC_UNCORRECTABLE, True),
        (FailureClass.CPU_OR_MEMORY_HW, True),
        (FailureClass.NCCL_NETWORK, False),
        (FailureClass.GPU_DRIVER, False),
        (FailureClass.SCRIPT_ERROR, False),
        (FailureClass.UNKNOWN, False),
        (None, False),
    ],
)
def test_what_proves_the_hardware(failure_class: FailureClass | None, proven: bool) -> None:
    assert proves_hardware(failure_class) == proven


def test_an_operators_uncordon_lifts_what_the_job_wrote(slurm: Any) -> None:
    driver = slurm(ledger="cordon")
    driver.crash("b", 2)
    (entry,) = (one.id for one in writes(driver) if isinstance(one.what, NodeCordoned))
    driver.tell(m.OperatorCommand, command="uncordon", argument="b", by="ann", reason="GPU replaced")
    [lift] = records(driver.job, CordonLifted)
    assert (lift.node, lift.lifts, lift.repair) == ("nodeb", (entry,), "GPU replaced")


def test_what_was_not_written_is_given_again_with_the_same_name(slurm: Any) -> None:
    driver = slurm(ledger="cordon")
    driver.crash("b", 2)
    (first, *_) = writes(driver)
    driver.tell(m.ControllerStarted, epoch=2)
    assert [one.id for one in writes(driver)] == [first.id]
    driver.tell(m.LedgerWritten, number=first.number)
    driver.tell(m.ControllerStarted, epoch=3)
    assert writes(driver) == []
    assert driver.replayed().view() == driver.job.view()


def test_a_failure_of_the_script_is_no_nodes(running: Callable[..., Any]) -> None:
    driver = running("a", "b", ledger="propose")
    driver.verdict = Verdict(
        failure_class=FailureClass.SCRIPT_ERROR,
        culprits=(Culprit(node="b", rank=2),),
        confidence=0.9,
        why="KeyError",
        action="restart",
    )
    driver.crash("b", 2)
    driver.up(5)
    assert records(driver.job, NodeFailed) == []


def test_the_end_of_the_job_writes_down_what_is_open(running: Callable[..., Any]) -> None:
    driver = running("a", "b", ledger="propose", nodes_min=2)
    driver.verdict = GPU
    driver.crash("b", 2)
    assert records(driver.job, NodeFailed) == []
    driver.order("stop")
    assert [one.node for one in records(driver.job, NodeFailed)] == ["b"]


@pytest.mark.parametrize(("event", "written"), [("killed", []), ("silent", ["b"])])
def test_a_killed_front_is_no_failure_of_its_node(running: Callable[..., Any], event: str, written: list[str]) -> None:
    driver = running("a", "b", ledger="propose")
    driver.verdict = Verdict(
        failure_class=FailureClass.NODE_FAILURE,
        culprits=(Culprit(node="b"),),
        confidence=0.95,
        why="node b was lost",
        action="restart",
    )
    if event == "killed":
        driver.tell(m.StopRequested, node="b", signal="FRONT_GONE")
    else:
        driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    driver.order("stop")
    assert driver.job.incidents.log.records
    assert [one.node for one in records(driver.job, NodeFailed)] == written
