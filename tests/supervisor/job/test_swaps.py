"""Devices that fail while their ranks train, and nodes that leave at a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport, Verdict
from diagnosis.signals import Evidence, Finding, NodeEvidence, Outlook
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from recovery.cordon import breaker_limit
from recovery.scheduling import LeavingNode
from supervisor import messages as m
from supervisor.job.swaps import PROPOSED_MOST

OFF_BUS = Verdict(
    failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
    culprits=(Culprit(node="b", rank=2, gpu="0000:c1:00"),),
    confidence=0.95,
    why="Xid 79",
    action="cordon_node_and_restart",
)
CRASHED = Verdict(failure_class=FailureClass.WORKER_CRASH, culprits=(), confidence=0.5, why="", action="restart")
STRUCK = HangReport(
    kind="device", ranks=(2,), quiet_s=1.2, limit_s=1.0, phase="steady", why="no step for 1.2 s", early=True
)


def finding(
    outlook: Outlook,
    node: str = "b",
    rank: int | None = 2,
    failure_class: FailureClass = FailureClass.GPU_FALLEN_OFF_BUS,
    severity: Any = "fatal",
    source: str = "kernel",
    at: float = 1000.0,
) -> Finding:
    return Finding(
        rule="xid_79",
        failure_class=failure_class,
        confidence=0.92,
        scope="gpu",
        severity=severity,
        evidence=Evidence(text="Xid 79", source=source),
        node=node,
        rank=rank,
        gpu=f"0000:c1:0{rank}",
        outlook=outlook,
        at=at,
    )


class Story:
    """A job with spares whose nodes get findings and save checkpoints."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.job = driver, driver.job
        self.findings: Counter[str] = Counter()
        driver.verdict = OFF_BUS
        self.save(1)

    def step(self, step: int) -> None:
        self.driver.tell(m.Progressed, attempt=self.driver.number, step=step, after=10.0)

    def finds(self, outlook: Outlook, node: str = "b", **more: Any) -> None:
        number, self.findings[node] = self.findings[node], self.findings[node] + 1
        found = finding(outlook, node, at=self.driver.now, **more)
        self.driver.tell(m.FindingArrived, node=node, finding=found, number=number, after=0.01)

    def save(self, step: int, *, complete: bool = True) -> None:
        self.driver.now += 1.0
        seen = Checkpoint(
            path=f"/c/step-{step}", step=step, format="x", complete=complete, modified_at=self.driver.now - 0.5
        )
        self.driver.tell(m.CheckpointsSeen, node="a", checkpoints=(seen,))

    def sees(self, *steps: tuple[int, bool, float], node: str = "a", folder: str = "/c") -> None:
        """Number, whether it is complete, seconds ago."""
        self.driver.now += 1.0
        found = (
            Checkpoint(
                path=f"{folder}/step-{step}", step=step, format="x", complete=whole, modified_at=self.driver.now - ago
            )
            for step, whole, ago in steps
        )
        self.driver.tell(m.CheckpointsSeen, node=node, checkpoints=tuple(found))

    def answer(self) -> None:
        for node in ("a", "b"):
            number = self.job.nodes.request_number
            self.driver.tell(
                m.EvidenceArrived, evidence=NodeEvidence(node=node, attempt=self.driver.number, request=number)
            )

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.job.attempt.members)

    @property
    def states(self) -> dict[str, str]:
        return {swap.node: swap.state for swap in self.job.view().swaps or ()}

    @property
    def incidents(self) -> list[str]:
        return [record.trigger for record in self.job.incidents.log.records]


@pytest.fixture
def story(running: Callable[..., Any]) -> Callable[..., Story]:
    def make(*, nodes: str = "ab", spares: str = "s", swap_mode: str = "automatic", **more: Any) -> Story:
        driver = running(*nodes, swap_mode=swap_mode, **more)
        driver.join(*spares, spare=True)
        return Story(driver)

    return make


# ----- early incidents -----


def test_a_failed_device_is_an_incident_at_once_and_evidence_is_collected(story: Any) -> None:
    job = story()
    job.finds("fails")
    assert job.incidents == ["device"]
    assert (job.driver.state, job.members) == ("RUNNING", ("a", "b"))
    assert {node for node in ("a", "b") if job.driver.told[node].evidence is not None} == {"a", "b"}


def test_without_another_step_the_run_restarts_without_the_node(story: Any) -> None:
    job = story()
    job.finds("fails")
    job.driver.now += 0.5
    job.answer()
    job.driver.tell(m.HangConfirmed, attempt=1, report=STRUCK, after=0.7)
    assert (job.driver.state, job.members) == ("STARTING", ("a", "s"))
    assert job.incidents == ["hang"], "what is known of the device goes on as this failure"
    assert job.job.nodes.cordoned() == {"b"}


def test_evidence_that_does_not_come_is_waited_for_a_moment_only(story: Any) -> None:
    job = story()
    job.finds("fails")
    job.driver.tell(m.HangConfirmed, attempt=1, report=STRUCK, after=0.3)
    assert job.driver.state == "DIAGNOSING"
    assert 0 < job.job.timers["evidence"] - job.driver.now < 0.5
    job.driver.fire("evidence")
    assert job.members == ("a", "s")


def test_a_rank_that_dies_of_it_is_the_same_incident(story: Any) -> None:
    job = story()
    job.finds("fails")
    job.driver.crash("b", 2)
    assert job.incidents == ["exit"]
    assert job.members == ("a", "s")


def test_if_training_goes_on_it_becomes_a_planned_swap(story: Any) -> None:
    job = story()
    job.step(10)
    job.finds("fails")
    job.step(11)
    assert job.states == {}
    job.step(12)
    assert job.states == {"b": "planned"}
    job.save(13)
    assert job.members == ("a", "s")
    assert job.incidents == ["device", "swap"]
    assert job.job.nodes.cordoned() == {"b"}


def test_a_stopped_rank_that_sigcont_wakes_does_not_hide_its_failed_device(story: Any) -> None:
    """The attempt goes on, so the device's incident does too."""
    job = story()
    job.step(10)
    job.finds("fails")
    job.driver.tell(m.RankWakeWanted, attempt=1, ranks=(2,), stopped_s=5.7)
    assert [(one.trigger, one.closed_at is None) for one in job.job.incidents.log.records] == [
        ("device", True),
        ("hang", False),
    ]
    for step in (11, 12):
        job.step(step)
    assert job.states == {"b": "planned"}


def test_a_device_that_fails_again_may_end_its_ranks_this_time(story: Any) -> None:
    """It is the same incident, whose ranks had trained on; evidence is collected anew, and one slow step decides."""
    job = story(swap_mode="recommend")
    job.step(10)
    job.finds("fails")
    job.finds("fails")
    job.step(14)
    (record,) = job.job.incidents.log.records
    assert (record.early, record.further_failures) == (False, 0), "of a moment they are one"
    asked = job.job.nodes.request_number
    job.driver.now += 80.0
    job.finds("fails")
    assert (record.early, record.further_failures) == (True, 1)
    assert job.job.nodes.request_number > asked
    job.driver.tell(m.HangConfirmed, attempt=1, report=STRUCK, after=0.7)
    assert (job.driver.state, job.members) == ("STARTING", ("a", "s"))
    assert job.incidents == ["hang"]


def test_a_script_that_shows_no_steps_trains_on_when_it_saves(story: Any) -> None:
    job = story(step=None)
    job.finds("fails")
    job.save(2)
    assert (job.states, job.members) == ({"b": "planned"}, ("a", "b"))
    job.save(3)
    assert job.members == ("a", "s")


@pytest.mark.parametrize("more", [{"source": "output"}, {"rank": None}, {"node": "s"}])
def test_what_ranks_write_and_devices_that_no_rank_uses_are_nothing(story: Any, more: dict[str, Any]) -> None:
    job = story()
    job.finds("fails", **more)
    job.finds("degrades", **more)
    job.step(50)
    job.save(51)
    assert (job.incidents, job.states, job.members) == ([], {}, ("a", "b"))


def test_a_storm_is_one_incident_and_trips_the_breaker(story: Any) -> None:
    """Devices of many nodes fail within moments: what they share is to blame, and nobody is left out."""
    job = story(nodes="abcdefgh", spares="stuvwxyz")
    for node, rank in zip("bcdef", (2, 4, 6, 8, 10), strict=True):
        job.finds("fails", node, rank=rank)
    assert job.incidents == ["device"]
    job.driver.tell(m.HangConfirmed, attempt=1, report=STRUCK, after=2.0)
    assert (job.driver.state, job.job.incidents.breaker_tripped) == ("RECOVERING", True)
    assert job.job.nodes.cordoned() == set()


def test_a_storm_that_trains_on_swaps_nobody(story: Any) -> None:
    job = story(nodes="abcdefgh", spares="stuvwxyz")
    job.step(10)
    for node, rank in zip("bcdef", (2, 4, 6, 8, 10), strict=True):
        job.finds("fails", node, rank=rank)
    job.step(14)
    assert set(job.states.values()) == {"blocked"}
    job.save(15)
    assert job.members == tuple("abcdefgh")


@pytest.mark.parametrize("outlook", ["fails", "slows"])
def test_a_storm_is_one_long_after_it_too(story: Any, outlook: Outlook) -> None:
    """Heat or a switch that many nodes share is not cured a minute later: none of them leaves."""
    job = story(nodes="abcdefgh", spares="stuvwxyz")
    job.step(10)
    for node, rank in zip("bcdef", (2, 4, 6, 8, 10), strict=True):
        job.finds(outlook, node, rank=rank)
        job.driver.now += 10.0
    job.step(14)
    job.driver.now += 90.0
    job.save(15)
    assert (job.members, set(job.states.values())) == (tuple("abcdefgh"), {"blocked"})


def test_one_node_after_the_other_is_no_storm(story: Any) -> None:
    job = story(nodes="abcdefgh", spares="stuvwxyz")
    for node, rank in zip("bcd", (2, 4, 6), strict=True):
        job.finds("degrades", node, rank=rank)
        job.driver.now += 2000.0
    assert set(job.states.values()) == {"planned"}


# ----- planned swaps -----


def test_a_node_leaves_at_the_next_complete_checkpoint(story: Any) -> None:
    job = story()
    job.finds("degrades", severity="error")
    assert job.states == {"b": "planned"}
    job.save(2, complete=False)
    assert job.members == ("a", "b")
    job.save(2)
    assert (job.driver.state, job.members) == ("STARTING", ("a", "s"))
    assert job.job.incidents.budget.used == 0, "it is charged to nobody"
    job.driver.up(3)
    assert job.job.view().incidents[-1].closed_at is not None
    assert job.job.nodes.cordoned() == {"b"}


def test_it_is_shown_with_its_time_and_its_price(story: Any) -> None:
    job = story()
    for step in (10, 20, 30):
        job.driver.now += 59.0
        job.save(step)
    job.finds("degrades", severity="error", failure_class=FailureClass.NVLINK_ERROR)
    (swap,) = job.job.view().swaps
    assert (swap.node, swap.state, swap.why) == ("b", "planned", "NVLink errors")
    assert swap.about is not None
    assert 55 < swap.about.timestamp() - job.driver.now < 61
    assert swap.cost_s is not None


@pytest.mark.parametrize(
    ("outlook", "more"),
    [("repair", {"severity": "warning"}), ("slows", {"severity": "warning"}), ("repair", {"severity": "error"})],
)
def test_what_is_not_proven_is_recommended(story: Any, outlook: Outlook, more: dict[str, Any]) -> None:
    job = story()
    job.finds(outlook, **more)
    assert job.states == {"b": "recommended"}
    job.save(2)
    assert job.members == ("a", "b")
    job.driver.order("approve", "b")
    assert job.states == {"b": "planned"}
    job.save(3)
    assert job.members == ("a", "s")


def test_what_is_approved_while_a_checkpoint_is_written_waits_for_it(story: Any) -> None:
    job = story()
    job.finds("repair", severity="error")
    job.sees((2, True, 0.5))
    job.driver.now += 500.0
    job.driver.order("approve", "b")
    job.sees((2, True, 501.5), (3, False, 0.1))
    assert job.members == ("a", "b")
    job.sees((2, True, 502.5), (3, True, 0.1))
    assert job.members == ("a", "s")


def test_a_spare_that_comes_while_a_checkpoint_is_written_waits_for_it(story: Any) -> None:
    job = story(spares="")
    job.finds("degrades", severity="error")
    job.sees((2, True, 0.5))
    job.driver.now += 500.0
    job.driver.join("s", spare=True)
    job.sees((2, True, 501.5), (3, False, 0.1))
    assert job.members == ("a", "b")


@pytest.mark.parametrize(
    "then", [((2, True, 61.0),), ((2, True, 61.0), (3, False, 0.1))], ids=["it was deleted", "it is torn now"]
)
def test_an_older_checkpoint_is_no_new_one(story: Any, then: Any) -> None:
    job = story()
    job.sees((2, True, 60.0), (3, True, 0.1))
    job.finds("degrades", severity="error")
    job.sees(*then)
    assert (job.states, job.members) == ({"b": "planned"}, ("a", "b"))


def test_a_copy_of_the_same_step_is_no_new_one(story: Any) -> None:
    job = story()
    job.sees((3, True, 60.0), folder="/local")
    job.finds("degrades", severity="error")
    job.sees((3, True, 0.1), folder="/shared")
    assert job.members == ("a", "b")


def test_a_node_does_not_take_the_only_checkpoint_with_it(story: Any) -> None:
    job = story()
    job.sees(node="a", folder="/local")
    job.sees((3, True, 0.1), node="b", folder="/local")
    job.finds("degrades", severity="error")
    job.sees((4, True, 0.1), node="b", folder="/local")
    assert (job.states, job.members) == ({"b": "blocked"}, ("a", "b"))


@pytest.mark.parametrize("by_operator", [False, True])
def test_if_the_spare_fails_the_node_that_it_replaced_goes_on(story: Any, by_operator: bool) -> None:
    job = story()
    job.finds("slows", severity="error")
    if by_operator:
        job.driver.order("swap", "b")
    job.save(2)
    assert job.members == ("a", "s")
    job.driver.tell(m.NodeLost, node="s", silent_s=6.0, after=5.0)
    if by_operator:
        assert (job.driver.state, job.job.nodes.cordoned()) == ("RECOVERING", {"b"})
        return
    assert (job.driver.state, job.members, job.job.nodes.cordoned()) == ("STARTING", ("a", "b"), set())
    assert "swap_undone" in job.driver.loud
    assert job.driver.replayed().view() == job.job.view()


@pytest.mark.parametrize("gpu", ["0000:c1:00", ""], ids=["another job's GPU", "a disk"])
def test_a_slow_link_of_what_no_rank_uses_moves_nobody(story: Any, gpu: str) -> None:
    job = story()
    slow = msgspec.structs.replace(finding("slows", severity="error", rank=None), scope="node", gpu=gpu)
    job.driver.tell(m.FindingArrived, node="b", finding=slow, number=0, after=0.01)
    assert job.states == ({} if gpu else {"b": "recommended"})


def test_maintenance_of_a_whole_cluster_is_not_told_of_each_node(running: Any) -> None:
    names = [f"n{number}" for number in range(PROPOSED_MOST + 4)]
    driver = running(*names, swap_mode="automatic")
    driver.join("s", spare=True)
    leaving = tuple(LeavingNode(node=name, kind="maintenance", why="reservation") for name in names)
    driver.tell(m.NodesLeaving, nodes=leaving)
    assert len(driver.job.view().swaps) == PROPOSED_MOST


def test_without_a_spare_it_is_told_and_not_done(story: Any) -> None:
    job = story(spares="")
    job.finds("degrades", severity="error")
    assert job.states == {"b": "blocked"}
    job.save(2)
    assert job.members == ("a", "b")
    job.driver.join("s", spare=True)
    job.save(3)
    assert job.members == ("a", "s"), "a spare has come meanwhile"


def test_a_rejected_node_stays_and_is_not_proposed_again_for_the_same(story: Any) -> None:
    job = story()
    job.finds("degrades", severity="error")
    job.driver.order("reject", "b")
    job.finds("degrades", severity="error")
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))
    job.finds("degrades", severity="error", failure_class=FailureClass.NVLINK_ERROR)
    assert job.states == {"b": "planned"}


def test_swaps_are_bounded_for_a_day(story: Any) -> None:
    job = story(nodes="ab", spares="stuvwxyz"[:6])
    for number in range(breaker_limit(2)):
        job.driver.now += 2000.0
        node = job.members[1]
        job.finds("degrades", node, severity="error")
        job.save(10 * (number + 2))
        assert job.members[1] != node
        job.driver.up(10 * (number + 2) + 1)
    job.driver.now += 2000.0
    node = job.members[1]
    job.finds("degrades", node, severity="error")
    assert job.states == {node: "recommended"}


@pytest.mark.parametrize(
    ("mode", "setting"), [("observe", "automatic"), ("recommend", "automatic"), ("enforce", "recommend")]
)
def test_mode_and_setting_bound_it(story: Any, mode: str, setting: str) -> None:
    job = story(mode=mode, swap_mode=setting)
    job.finds("degrades", severity="error")
    assert job.states == {"b": "recommended"}
    job.save(2)
    assert job.members == ("a", "b")


def test_switched_off_nothing_is_said(story: Any) -> None:
    job = story(swap_mode="off")
    job.finds("degrades", severity="error")
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))


def test_an_operator_swaps_at_the_next_checkpoint_or_at_once(story: Any) -> None:
    job = story(mode="observe")
    job.driver.order("swap", "b")
    assert (job.states, job.members) == ({"b": "planned"}, ("a", "b"))
    job.save(2)
    assert (job.driver.state, job.members) == ("STARTING", ("a", "s"))
    job.driver.up(3)
    job.driver.order("uncordon", "b")
    job.driver.order("swap", "s --now")
    assert (job.driver.state, job.members) == ("STARTING", ("a", "b"))
    assert job.incidents == ["swap", "swap"]
    assert job.driver.replayed().view() == job.job.view()


@pytest.mark.parametrize(
    ("argument", "kind"), [("s", "swap_no_member"), ("nobody", "swap_no_member"), ("", "needs_a_node")]
)
def test_a_swap_of_nobody_is_refused(story: Any, argument: str, kind: str) -> None:
    job = story()
    (refused,) = [one for one in job.driver.order("swap", argument) if isinstance(one, m.Note) and one.refused]
    assert refused.kind == kind


def test_a_run_that_restarts_anyway_leaves_it_behind(story: Any) -> None:
    job = story()
    job.finds("degrades", severity="error")
    job.driver.verdict = Verdict(
        failure_class=FailureClass.WORKER_CRASH, culprits=(), confidence=0.6, why="killed", action="restart"
    )
    job.driver.crash("a", 1)
    assert job.members == ("a", "s")
    assert job.states == {}


def test_a_straggler_is_recommended_with_its_price_and_withdrawn(story: Any) -> None:
    job = story()
    slow = {"attempt": 1, "ranks": (2,), "cost": 0.22, "since": job.driver.now}
    job.driver.tell(m.StragglersSeen, **slow)
    (swap,) = job.job.view().swaps
    assert (swap.state, swap.share_percent) == ("recommended", 22.0)
    job.driver.tell(m.StragglersSeen, **{**slow, "ranks": ()})
    assert job.states == {}


@pytest.mark.parametrize(("others", "state"), [("", "planned"), ("a", "recommended")])
def test_a_straggler_whose_own_gpu_a_check_finds_slowed_leaves(story: Any, others: str, state: str) -> None:
    """Where another node's GPUs are slowed down too, the fault is not this node's alone."""
    job = story()
    for node in others + "b":
        hot = finding("slows", node, severity="warning", at=job.driver.now, rank={"a": 0, "b": 2}[node])
        hot = msgspec.structs.replace(hot, failure_class=FailureClass.GPU_THERMAL_POWER, scope="gpu")
        job.driver.tell(m.FindingArrived, node=node, finding=hot, number=0, after=0.01)
    job.driver.tell(m.StragglersSeen, attempt=1, ranks=(2,), cost=0.22, since=job.driver.now)
    assert job.states["b"] == state


def fires(job: Story, node: str, **more: Any) -> m.OutsideAlert:
    alert = m.OutsideAlert(key=f"{node}-1", node=node, name="Fabric", at=job.driver.now, swap=True, **more)
    job.driver.tell(m.AlertsSeen, firing=(alert,))
    return alert


def test_an_alert_may_plan_a_swap_and_never_stops_the_run(story: Any) -> None:
    job = story()
    fires(job, "b", failure_class=FailureClass.GPU_ECC_UNCORRECTABLE)
    assert (job.states, job.driver.state, job.incidents) == ({"b": "planned"}, "RUNNING", [])
    assert job.members == ("a", "b"), "it stays until a checkpoint is complete"
    job.save(2)
    assert (job.members, job.incidents) == (("a", "s"), ["swap"])
    cordon = job.job.nodes.cordons.of_job("b", job.driver.now)
    assert cordon.failure_class is None, "an alert is no proof: nothing is held against the node"


def test_a_swap_for_an_alert_ends_with_it(story: Any) -> None:
    job = story()
    alert = fires(job, "b")
    job.driver.tell(m.AlertsSeen, ended=(alert.key,))
    assert job.states == {}
    job.save(2)
    assert job.members == ("a", "b")


def test_a_swap_for_an_alert_can_be_rejected_and_stays_so(story: Any) -> None:
    job = story()
    fires(job, "b")
    job.driver.tell(m.OperatorCommand, command="reject", argument="b", by="ann")
    assert job.states == {}
    fires(job, "b")
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))


def test_alerts_for_many_nodes_swap_none_and_other_settings_hold(story: Any) -> None:
    job = story(nodes="abcde", spares="stuv")
    for node in "bcd":
        fires(job, node)
    assert job.states == dict.fromkeys("bcd", "blocked")
    job.save(2)
    assert job.members == tuple("abcde"), "three nodes at once have a common cause"
    slow = story(nodes="abcde", spares="stuv")
    for step, node in enumerate("bcd"):
        fires(slow, node)
        slow.save(step + 2)
    assert "d" in slow.members, "within minutes they have a common cause, too"
    quiet = story(swap_mode="recommend")
    fires(quiet, "b")
    assert quiet.states == {"b": "recommended"}
    off = story(swap_mode="off")
    fires(off, "b")
    assert off.states == {}


def test_alerts_that_began_together_stay_together(story: Any) -> None:
    job = story(nodes="abcde", spares="stuv")
    alerts = [fires(job, node) for node in "bcd"]
    job.driver.now += 7200.0
    job.save(2)
    assert job.members == tuple("abcde"), "also hours later"
    job.driver.tell(m.AlertsSeen, ended=(alerts[0].key,))
    job.save(3)
    assert job.members == tuple("abcde"), "and when one has ended"
    fires(job, "e")
    job.save(4)
    assert job.members == (*"abcd", "s"), "another one, later, is alone"


def test_no_alert_hides_what_is_proven_of_a_device(story: Any) -> None:
    job = story()
    alert = fires(job, "b")
    job.finds("degrades", severity="error")
    job.driver.tell(m.AlertsSeen, ended=(alert.key,))
    assert job.states == {"b": "planned"}
    many = "bcdefghijklmnopq"
    noisy = story(nodes=f"a{many}r", spares="st")
    for node in many:
        fires(noisy, node)
    noisy.finds("degrades", node="r", severity="error", rank=34)
    assert (noisy.states["r"], noisy.states["b"]) == ("planned", "blocked")


def test_ranks_are_not_asked_for_a_checkpoint_by_an_alert(story: Any) -> None:
    job = story(swap_signal="SIGTERM")
    fires(job, "b")
    assert job.states == {"b": "planned"}
    assert {job.driver.told[node].ask for node in ("a", "b")} == {""}, (
        "who ends when asked would restart again and again"
    )


def test_no_node_moves_to_one_that_an_alert_wants_out(story: Any) -> None:
    job = story(spares="s")
    fires(job, "s")
    job.finds("degrades", severity="error")
    assert job.states == {"b": "blocked"}
    job.driver.join("t", spare=True)
    job.save(2)
    assert job.members == ("a", "t")


def test_who_rejects_a_swap_keeps_the_node_from_alerts_too(story: Any) -> None:
    job = story()
    job.finds("degrades", severity="error")
    fires(job, "b")
    job.driver.tell(m.OperatorCommand, command="reject", argument="b", by="ann")
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))


def leaving(job: Story, *nodes: str, kind: Any = "drained") -> None:
    found = (m.LeavingNode(node=node, kind=kind, why="drained by root: fan") for node in nodes)
    job.driver.tell(m.NodesLeaving, nodes=tuple(found))


@pytest.mark.parametrize("kind", ["drained", "maintenance"])
def test_a_node_that_the_scheduler_takes_away_leaves_and_may_come_back(story: Any, kind: Any) -> None:
    job = story(scheduler="slurm", scheduler_job="7")
    leaving(job, "b", kind=kind)
    assert job.states == {"b": "planned"}
    job.save(2)
    assert (job.members, job.incidents) == (("a", "s"), ["swap"])
    assert job.job.scheduler.drains == {}, "the scheduler takes it out of service itself"
    leaving(job)
    assert job.job.nodes.cordoned() == set()
    assert "swap_undone" in job.driver.loud
    assert job.members == ("a", "s"), "nothing restarts for it"


def test_a_node_that_comes_back_in_time_does_not_leave(story: Any) -> None:
    job = story()
    leaving(job, "b")
    leaving(job)
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))


def test_where_the_scheduler_takes_several_nodes_away_people_decide(story: Any) -> None:
    job = story(nodes="abcd", spares="stuv")
    leaving(job, "b", "c", "d")
    assert set(job.states.values()) == {"recommended"}
    job.save(2)
    assert job.members == ("a", "b", "c", "d")
    job.driver.order("approve", "b")
    job.save(3)
    assert "b" not in job.members


def test_an_idle_node_that_the_scheduler_takes_away_is_no_spare(story: Any) -> None:
    job = story()
    leaving(job, "s")
    job.finds("degrades", severity="error")
    assert job.states == {"b": "blocked"}
    leaving(job)
    job.save(2)
    assert job.members == ("a", "s")


def test_ranks_are_asked_for_a_checkpoint_and_may_end_after_it(story: Any) -> None:
    job = story(swap_signal="SIGTERM")
    job.finds("degrades", severity="error")
    assert {job.driver.told[node].ask for node in ("a", "b")} == {"SIGTERM"}
    job.driver.finish()
    assert (job.driver.state, job.members) == ("STARTING", ("a", "s")), "work is left"
    job.driver.up(5)
    job.driver.finish()
    assert job.job.attempt.finishing, "nobody has asked this attempt"


@pytest.mark.parametrize(("saves", "after_s", "again"), [(False, 4.0, False), (True, 4.0, True), (False, 400.0, True)])
def test_a_run_that_breaks_of_the_signal_is_not_sent_it_again(
    story: Any, saves: bool, after_s: float, again: bool
) -> None:
    job = story(swap_signal="SIGTERM", nodes="abc", spares="st")
    job.driver.verdict = CRASHED
    job.finds("degrades", severity="error")
    if saves:
        job.driver.tell(m.OperatorCommand, command="mode", argument="recommend", by="ann", reason="")
        job.save(7)
        job.driver.tell(m.OperatorCommand, command="mode", argument="enforce", by="ann", reason="")
    job.driver.now += after_s
    job.driver.crash("b", 2, code=1, signal=None)
    assert ("swap_signal_harms" in job.driver.loud) is not again
    assert "b" not in job.members
    job.driver.up(8)
    number = job.job.nodes.get("a").ask_number
    job.finds("degrades", "c", rank=4, severity="error")
    assert (job.job.nodes.get("a").ask_number > number) is again
    assert job.driver.replayed().view() == job.job.view()


def test_a_device_that_fails_just_then_is_not_the_signals_doing(story: Any) -> None:
    job = story(swap_signal="SIGTERM")
    job.finds("degrades", severity="error")
    job.driver.crash("b", 2, code=1, signal=None)  # Xid 79
    assert (job.members, "swap_signal_harms" in job.driver.loud) == (("a", "s"), False)


def test_the_schedulers_reason_says_once_who_wants_a_node_out(story: Any) -> None:
    job = story(scheduler="slurm", scheduler_job="7")
    (drain,) = [one for one in job.driver.order("swap", "b --now", "bob") if isinstance(one, m.SchedulerRequest)]
    assert drain.reason.count("bob") == 1


def test_another_start_by_the_scheduler_knows_nothing_of_its_nodes(story: Any) -> None:
    job = story(scheduler="slurm", scheduler_job="7")
    job.finds("degrades", severity="error")
    assert job.driver.told["a"].save_awaited
    job.driver.tell(m.JobRequeued, requeues=1)
    assert job.states == {}
    assert not job.job.nodes.save_awaited


# ----- nodes that another job, or a person, cordons for the cluster -----


def cordons(job: Story, *nodes: str, **more: Any) -> None:
    known = tuple(m.LedgerNode(node=name, cordon="memory errors", by="ann", **more) for name in nodes)
    job.driver.tell(m.LedgerSeen, nodes=known, fleet=100)


def test_a_member_that_is_cordoned_for_the_cluster_leaves_at_the_next_checkpoint(story: Any) -> None:
    """And this job tells the ledger nothing that it has only heard."""
    job = story(ledger="cordon")
    cordons(job, "b")
    assert (job.states, job.members) == ({"b": "planned"}, ("a", "b"))
    assert {"cluster_cordoned", "swap_planned"} <= set(job.driver.loud)
    assert "node_in_use" not in job.driver.loud
    job.save(2)
    assert (job.members, job.incidents) == (("a", "s"), ["swap"])
    job.driver.up(3)
    assert job.job.ledger._unwritten == {}
    assert job.job.nodes.cordons.of_job("b", job.driver.now) is None
    assert job.driver.replayed().view() == job.job.view()


def test_one_that_is_lifted_or_over_stays(story: Any) -> None:
    job = story()
    cordons(job, "b")
    cordons(job)
    assert (job.states, "swap_withdrawn" in job.driver.loud) == ({}, True)
    cordons(job, "b", until=job.driver.now + 60)
    assert job.states == {"b": "planned"}
    job.driver.now += 100
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))


def test_a_cordon_for_the_cluster_can_be_rejected(story: Any) -> None:
    """It is not proposed again; the next attempt leaves the node out all the same."""
    job = story()
    cordons(job, "b")
    job.driver.order("reject", "b")
    cordons(job, "b", points=1.0)
    job.save(2)
    assert (job.states, job.members) == ({}, ("a", "b"))
    job.driver.verdict = Verdict(
        failure_class=FailureClass.UNKNOWN, culprits=(), confidence=0.5, why="", action="restart"
    )
    job.driver.crash("a", 1)
    assert job.members == ("a", "s")


def test_many_cordons_at_once_are_told_and_move_nobody(story: Any) -> None:
    job = story(nodes="abcdefgh", spares="stuvwxyz")
    cordons(job, "b", "c", "d")
    assert set(job.states.values()) == {"recommended"}
    job.save(2)
    assert job.members == tuple("abcdefgh")
    cordons(job, "b", "c")
    job.save(3)
    assert set("bc").isdisjoint(job.members)


def test_a_cordoned_member_needs_a_spare_and_takes_only_one(story: Any) -> None:
    job = story(nodes="abc", spares="s")
    cordons(job, "b", "c")
    assert set(job.states.values()) == {"blocked"}
    job.driver.join("t", spare=True)
    job.save(2)
    assert sorted(job.members) == ["a", "s", "t"]


@pytest.mark.parametrize("signal", ["", "SIGTERM"])
def test_a_cordon_whose_time_is_over_is_not_made_this_jobs_own(story: Any, signal: str) -> None:
    """Not by a restart for another reason, and not when all ranks end after they were asked to save."""
    job = story(ledger="cordon", swap_signal=signal)
    cordons(job, "b", until=job.driver.now + 60)
    job.driver.verdict = CRASHED
    job.driver.now += 100
    if signal:
        job.driver.finish()
    else:
        job.driver.crash("a", 1)
    assert (job.states, job.members, job.driver.number) == ({}, ("a", "b"), 2)
    assert job.job.nodes.cordons.of_job("b", job.driver.now) is None
    assert job.job.ledger._unwritten == {}


def test_an_operators_cordon_as_well_does_not_keep_it(story: Any) -> None:
    job = story()
    cordons(job, "b")
    job.driver.order("cordon", "b")
    job.save(2)
    assert job.members == ("a", "s")
    assert "swap_withdrawn" not in job.driver.loud


@pytest.mark.parametrize("when", ["b", "b --now"])
def test_an_operator_may_swap_one_that_is_cordoned_for_the_cluster(story: Any, when: str) -> None:
    """It takes the only spare, as `status` says."""
    job = story()
    cordons(job, "b")
    job.driver.order("swap", when)
    job.save(2)
    assert job.members == ("a", "s")


# ----- spares that are not well -----


@pytest.mark.parametrize("outlook", ["fails", "degrades"])
def test_a_run_that_trains_does_not_move_to_a_spare_with_a_bad_device(story: Any, outlook: Outlook) -> None:
    job = story()
    job.finds(outlook, "s", rank=None, severity="error")
    assert "spare_unwell" in job.driver.loud
    job.finds("degrades", severity="error")
    job.save(2)
    assert (job.states, job.members) == ({"b": "blocked"}, ("a", "b"))
    job.driver.order("uncordon", "s")
    job.save(3)
    job.save(4)
    assert job.members == ("a", "s"), "an operator vouches for it"
    assert job.driver.replayed().view() == job.job.view()


def test_another_spare_is_taken_first_and_a_bad_one_before_none(story: Any) -> None:
    job = story(spares="st")
    job.finds("fails", "s", rank=None)
    job.finds("degrades", severity="error")
    job.save(2)
    assert job.members == ("a", "t")
    job.driver.up(3)
    job.driver.tell(m.NodeLost, node="t", silent_s=10.0)
    job.driver.fire("evidence")
    assert job.members == ("a", "s")


@pytest.mark.parametrize("more", [{"source": "output"}, {"severity": "warning"}, {"outlook": "slows"}])
def test_what_proves_nothing_leaves_a_spare_one(story: Any, more: dict[str, Any]) -> None:
    job = story()
    job.finds(**{"outlook": "fails", "node": "s", "rank": None, **more})
    job.finds("degrades", severity="error")
    assert job.states == {"b": "planned"}


# ----- the signal -----


def test_ranks_are_asked_once_for_one_checkpoint(story: Any) -> None:
    """Neither another node that should leave, nor a spare that is silent and back, asks them while they save."""
    job = story(swap_signal="SIGTERM", nodes="abcd", spares="st")
    job.finds("degrades", severity="error")
    asked = job.job.nodes.get("a").ask_number
    job.finds("degrades", "c", rank=4, severity="error")
    for silent_s, state in ((3.0, "blocked"), (0.0, "planned")):
        for spare in "st":
            job.driver.tell(m.NodeQuiet, node=spare, silent_s=silent_s)
        job.sees((1, True, 60.0))
        assert set(job.states.values()) == {state}
    assert job.job.nodes.get("a").ask_number == asked == 1
