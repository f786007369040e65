"""Evidence that comes after the verdict: another plan for the same incident, once, and never against an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.incident import Verdict
from diagnosis.kernel.causes import finding_of
from diagnosis.kernel.log import KernelReader
from diagnosis.signals import ExitRecord, Finding, NodeEvidence
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import triage
from recovery.cordon import Cordon
from recovery.policy import WINDOW_S
from supervisor import messages as m
from supervisor.job.incidents import REVIEW_S, REVIEWS
from supervisor.job.job import Job

XID = "NVRM: Xid (PCI:0000:{gpu}:00): 79, pid=77, name=python, GPU has fallen off the bus."


def xid(node: str, at: float, gpu: str = "c1") -> Finding:
    """As the agent of `node` tells of it, by the kernel log's line."""
    [event] = KernelReader().feed(XID.format(gpu=gpu))
    found = finding_of(event, at)
    return Finding(**{name: getattr(found, name) for name in found.__struct_fields__} | {"node": node})


@pytest.fixture
def start(running: Any) -> Callable[..., Any]:
    """A job with the real diagnoser on a and b, with c as a spare, of which a rank on b was killed and restarted."""

    def crashed(spares: tuple[str, ...] = ("c",), after: Callable[[Any], object] | None = None, **spec: Any) -> Any:
        driver = running("a", "b", **spec)
        driver.conclude = triage.conclude
        driver.join(*spares, spare=True)
        driver.failed_at = driver.now = driver.now + 50.0
        if after is not None:
            after(driver)
        driver.crash("b", 2)
        return driver

    return crashed


def late(driver: Any, node: str = "b", after: float = 0.018, **more: Any) -> None:
    driver.now += after
    finding = xid(node, driver.failed_at, **more)
    driver.tell(m.FindingArrived, node=node, finding=finding, number=driver.job.nodes.get(node).findings_seen)


def cordoned(driver: Any) -> list[str]:
    return [cordon.node for cordon in driver.job.nodes.cordons.all(driver.now)]


def looks(driver: Any) -> list[str]:
    return [line.text for line in driver.job.story if "diagnosed again" in line.text]


def replays(driver: Any) -> None:
    """A job that hears the same again is in the same state, and says the same."""
    again = Job()
    for event in driver.journal:
        again.handle(event)
    assert again.view() == driver.job.view()
    assert again.story == driver.job.story


def test_a_gpu_of_which_the_kernel_tells_after_the_verdict_is_left_out_of_the_start_that_has_begun(start: Any) -> None:
    driver = start()
    case = driver.job.incidents.log.records[-1]
    assert (driver.state, driver.number, driver.job.attempt.members) == ("STARTING", 2, ("a", "b"))
    first = case.verdict.failure_class.value
    late(driver)
    assert (driver.state, driver.number, driver.job.attempt.members) == ("STARTING", 2, ("a", "c"))
    assert cordoned(driver) == ["b"]
    assert case.verdict.failure_class is FailureClass.GPU_FALLEN_OFF_BUS
    assert (case.revised.split()[0], case.plan.kind, case.next_attempt) == (first, "restart", 2)
    [told] = looks(driver)
    assert told.startswith("i-1: diagnosed again: gpu_fallen_off_bus (")
    assert told.endswith("; without node b (gpu_fallen_off_bus)")
    assert (driver.job.incidents.budget.used, driver.job.attempts.restarts, driver.job.incidents.log.total) == (1, 1, 1)
    assert driver.told["b"].role == "excluded"
    driver.up(step=5)
    assert (driver.state, case.closed_why) == ("RUNNING", "attempt 2 reached step 5")
    assert driver.job.incidents.log.totals().incidents == {case.verdict.failure_class: 1}
    assert list(case.seconds()) == ["detect", "diagnose", "decide", "stop", "rendezvous", "start", "first_step"]
    replays(driver)


def test_ranks_that_have_been_started_already_are_ended_again(start: Any) -> None:
    driver = start()
    for name in ("a", "b"):
        offer = m.StoreOffer(host=name, port=1, local_world_size=2)
        driver.tell(m.LauncherReady, node=name, attempt=2, offer=offer)
    assert driver.job.attempt.round is not None
    late(driver, after=4.0)
    assert (driver.state, driver.number, driver.job.attempt.members) == ("STARTING", 3, ("a", "c"))
    assert driver.told["a"].round is None
    assert driver.job.incidents.budget.used == 1
    driver.up(step=5)
    assert driver.state == "RUNNING"
    replays(driver)


def test_once_an_incident(start: Any) -> None:
    driver = start(spares=("c", "d"))
    late(driver)
    late(driver, node="a", gpu="41")
    assert (cordoned(driver), len(looks(driver))) == (["b"], 1)
    assert driver.number == 2
    replays(driver)


def test_not_after_the_first_step_and_not_after_a_minute(start: Any) -> None:
    driver = start()
    driver.up(step=5)
    late(driver)
    assert (driver.state, cordoned(driver), looks(driver)) == ("RUNNING", [], [])
    driver = start()
    driver.up(step=None)
    late(driver, after=REVIEW_S + 1.0)
    assert (driver.state, cordoned(driver)) == ("RUNNING", [])
    replays(driver)


def test_not_for_what_happened_after_the_failure(start: Any) -> None:
    driver = start()
    driver.failed_at += 20.0
    late(driver, after=20.0)
    assert (cordoned(driver), looks(driver), driver.number) == ([], [], 2)


def test_where_no_node_can_take_its_place_the_verdict_alone_changes(start: Any) -> None:
    driver = start(spares=())
    late(driver)
    case = driver.job.incidents.log.records[-1]
    assert (driver.state, driver.number, cordoned(driver)) == ("STARTING", 2, [])
    assert case.verdict.failure_class is FailureClass.GPU_FALLEN_OFF_BUS
    [told] = looks(driver)
    assert told.endswith("; the plan stays")
    late(driver)
    assert len(looks(driver)) == 1, "the same again is no news"
    replays(driver)


def test_an_order_that_waits_in_a_pause_is_looked_at_again_with_it(start: Any) -> None:
    driver = start(after=lambda one: one.order("pause"))
    assert driver.job.incidents.approval_wanted
    late(driver, after=3600.0)
    assert (driver.job.incidents.approval_wanted, cordoned(driver), driver.number) == (True, [], 1)
    driver.order("resume")
    assert (driver.state, cordoned(driver), driver.job.attempt.members) == ("STARTING", ["b"], ("a", "c"))
    assert driver.job.incidents.budget.used == 1
    replays(driver)


def test_while_paused_it_is_told_and_done_after_resume(start: Any) -> None:
    driver = start()
    driver.order("pause")
    late(driver)
    late(driver)
    assert (cordoned(driver), driver.job.attempt.members) == ([], ("a", "b"))
    [told] = looks(driver)
    assert told.endswith("not done, the job is paused (`unbroken cordon NODE` excludes a node)")
    driver.order("resume")
    assert (cordoned(driver), driver.job.attempt.members, driver.number) == (["b"], ("a", "c"), 2)
    replays(driver)


def test_a_node_that_an_operator_vouched_for_stays(start: Any) -> None:
    driver = start()
    driver.order("uncordon", "b")
    late(driver)
    assert (cordoned(driver), driver.job.attempt.members) == ([], ("a", "b"))


def test_the_breaker_holds_no_start_that_has_begun(start: Any) -> None:
    driver = start()
    for name in ("x", "y"):
        driver.job.nodes.cordons.add(Cordon(node=name, reason="r", at=driver.now))
    late(driver)
    assert (driver.state, driver.job.incidents.held, cordoned(driver)) == ("STARTING", "", ["x", "y"])
    assert "too many were within the hour" in looks(driver)[0]
    driver.now += WINDOW_S
    late(driver)
    assert cordoned(driver) == ["x", "y", "b"], "nothing has started yet"


def test_the_same_failure_again_is_not_known_by_the_first_look(start: Any) -> None:
    """What was remembered of the first verdict must not count as an earlier failure in the second."""
    driver = start()
    late(driver)
    assert +Counter(driver.job.incidents._classes) == {FailureClass.GPU_FALLEN_OFF_BUS: 1}
    assert [name for _, name in driver.job.incidents._blamed] == ["b"]


def test_a_fabric_of_which_all_nodes_tell_costs_few_diagnoses(start: Any) -> None:
    driver = start(spares=())
    seen = []

    def conclude(incident: Any) -> Verdict:
        seen.append(incident)
        return driver.job.incidents.log.records[-1].verdict

    driver.conclude = conclude
    for number in range(100):
        finding = xid("a", driver.failed_at, gpu=f"{number:02x}")
        driver.tell(m.FindingArrived, node="a", finding=finding, number=number)
    assert len(seen) == REVIEWS


# ----- what an operator knew -----


def test_what_was_known_of_a_node_when_an_operator_gave_it_back_explains_nothing_later(start: Any) -> None:
    """A GPU fell off the bus, was reset, and its node uncordoned: the next crash there is another's."""

    def known_and_uncordoned(driver: Any) -> None:
        driver.tell(m.FindingArrived, node="b", finding=xid("b", driver.now))
        driver.tell(m.OperatorCommand, after=10.0, command="uncordon", argument="b", by="ann")
        driver.now += 1.0

    driver = start(after=known_and_uncordoned)
    assert (driver.state, cordoned(driver), driver.job.attempt.members) == ("STARTING", [], ("a", "b"))
    assert driver.job.incidents.log.records[-1].verdict.failure_class is not FailureClass.GPU_FALLEN_OFF_BUS
    driver.failed_at = driver.now
    late(driver)
    assert cordoned(driver) == ["b"], "it fell off again"
    replays(driver)


def test_a_node_left_out_already_is_not_counted_on(start: Callable[..., Any]) -> None:
    """b is left out and c has taken its place; what comes late of a would leave the start with one node of two."""
    driver = start(after=lambda driver: late(driver, "b"))
    assert (cordoned(driver), driver.job.attempt.members) == (["b"], ("a", "c"))
    for node in driver.job.attempt.members:
        offer = m.StoreOffer(host=node, port=1, local_world_size=2)
        driver.tell(m.LauncherReady, node=node, attempt=2, offer=offer)
    first = ExitRecord(rank=1, local_rank=1, pid=1, code=None, signal=6, ended_at=driver.failed_at - 2.5)
    words = xid("a", driver.failed_at - 3.0, gpu="41")
    piece = NodeEvidence(node="a", attempt=1, request=1, exits=(first,), findings=(words,))
    driver.tell(m.EvidenceArrived, after=2.0, evidence=piece)
    assert (cordoned(driver), driver.number, driver.job.attempt.members) == (["b"], 2, ("a", "c"))
