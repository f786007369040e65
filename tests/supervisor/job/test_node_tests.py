"""Active tests within a job: suspects before the next attempt, idle nodes by command."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.group_tests import GroupPart
from recovery.ledger import TestResult
from supervisor import messages as m
from supervisor.controller.metrics import job_samples

GPU = "H100, torch 2, CUDA 12"


def suspicion(*nodes: str, failure_class: FailureClass = FailureClass.NCCL_NETWORK) -> Verdict:
    return Verdict(
        failure_class=failure_class,
        culprits=tuple(Culprit(node=name) for name in nodes),
        confidence=0.8,
        why="connections to these nodes broke",
        action="wait_and_retry",
    )


class Fleet:
    """Answers for the nodes of a driver's job. `silent`: agents that say nothing of tests."""

    def __init__(
        self,
        driver: Any,
        failing: Collection[str] = (),
        slow: Mapping[str, float] | None = None,
        cut: Collection[frozenset[str]] = (),
        silent: Collection[str] = (),
        busy: Collection[str] = (),
    ) -> None:
        self.driver, self.failing, self.slow, self.cut = driver, set(failing), dict(slow or {}), set(cut)
        self.silent, self.busy = set(silent), set(busy)
        self.kinds: dict[str, str] = {}
        self.random = random.Random(7)
        self.done: set[tuple[str, int, int]] = set()
        self.rounds = 0

    def orders(self) -> dict[str, m.NodeTestOrder]:
        return {name: one.tests for name, one in self.driver.told.items() if one.tests is not None}

    def run(self) -> None:
        """Until nobody is asked for anything any more."""
        while pending := {
            name: order
            for name, order in self.orders().items()
            if name not in self.silent and (name, order.number, order.round) not in self.done
        }:
            groups = {(order.round, order.host, order.port): order for order in pending.values() if order.world}
            self.rounds = max(self.rounds, *(order.round for order in pending.values()), 0)
            members = {key: [n for n, o in self.orders().items() if (o.round, o.host, o.port) == key] for key in groups}
            for name, order in pending.items():
                self.done.add((name, order.number, order.round))
                if order.round and not order.world:
                    continue
                part = self.part(members[order.round, order.host, order.port]) if order.world else None
                self.answer(name, order, part)

    def part(self, group: list[str]) -> GroupPart:
        assert len(group) in (2, 3)
        links = {frozenset((one, other)) for one in group for other in group if one < other}
        if self.failing & set(group) or links & self.cut:
            return GroupPart(failed="all_reduce: timeout", waited=0.5 if set(group) <= self.busy else 0.0)
        factor = max(self.slow.get(name, 1.0) for name in group)
        return GroupPart(seconds={"all_reduce": 0.1 * factor * self.random.gauss(1.0, 0.01)})

    def answer(self, name: str, order: m.NodeTestOrder, part: GroupPart | None, **more: Any) -> None:
        port = 20000 + int(name[1:]) * 8 + order.round
        usual = {"number": order.number, "round": order.round, "address": name, "port": port, "devices": 8}
        usual["kind"] = self.kinds.get(name, GPU)
        report = m.NodeTestReport(**{**usual, "part": part, **more})
        self.driver.tell(m.NodeTested, after=0.001, node=name, report=report)


@pytest.fixture
def suspected(make_driver: Any) -> Any:
    """A running job of `count` nodes, in which a verdict suspects some of them."""

    def start(count: int, *suspects: str, spares: int = 4, verdict: Verdict | None = None, **spec: Any) -> Any:
        how = {"nodes_min": count, "nodes_max": count, "spares": spares, "test_suspects": True, "ledger": "propose"}
        driver = make_driver(verdict or suspicion(*suspects), **{**how, **spec})
        driver.join(*(f"n{number}" for number in range(count)))
        driver.join(*(f"n{number}" for number in range(count, count + spares)), spare=True)
        driver.up()
        driver.crash("n0", rank=1, code=1, signal=None)
        if driver.state == "DIAGNOSING":
            driver.fire("evidence")  # silence may still tell that a node is gone
        return driver

    return start


def view(driver: Any) -> Any:
    return driver.job.view().incidents[-1].tests


def left_out(driver: Any) -> set[str]:
    return {one.node for one in driver.job.nodes.cordons.all(driver.now)}


def started(driver: Any) -> bool:
    """The next attempt is on its way."""
    if "backoff" in driver.job.timers:
        driver.fire("backoff")
    return bool(driver.state == "STARTING")


def test_a_suspect_that_fails_twice_is_left_out(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver, failing={"n3"})
    asked = fleet.orders()
    assert "n3" in asked
    assert len(asked) == 4, "as few as are needed"
    assert all(driver.told[name].paused for name in asked if name in driver.job.attempt.member_set)
    fleet.run()
    assert left_out(driver) == {"n3"}
    assert started(driver)
    assert "n3" not in driver.job.attempt.members
    assert len(driver.job.attempt.members) == 8
    assert set(view(driver).failed) == {"n3"}
    assert view(driver).rounds == 2
    assert not fleet.orders(), "nobody is asked any more"
    assert driver.replayed().view() == driver.job.view()


def test_one_that_does_well_is_used_again(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver)
    fleet.run()
    assert fleet.rounds == 1, "only as far as needed"
    assert view(driver).passed == ("n3",)
    assert left_out(driver) == set()
    assert started(driver)
    assert "n3" in driver.job.attempt.members


def test_whatever_the_symptom_was(suspected: Any) -> None:
    """Of a class for which policy by itself leaves nobody out."""
    driver = suspected(8, verdict=suspicion("n3", failure_class=FailureClass.NCCL_TIMEOUT))
    Fleet(driver, failing={"n3"}).run()
    assert left_out(driver) == {"n3"}


@pytest.mark.parametrize("fault", ["slow", "failing"])
def test_another_one_is_bad(suspected: Any, fault: str) -> None:
    """A verdict may name the wrong end of a connection: what fails is looked into; what is only slow is not."""
    driver = suspected(8, "n3")
    fleet = Fleet(driver)
    *_, other = (name for name in fleet.orders() if name != "n3")
    fleet.failing, fleet.slow = ({other}, {}) if fault == "failing" else (set(), {other: 3.0})
    fleet.run()
    assert view(driver).passed == ("n3",)
    assert fleet.rounds == (2 if fault == "failing" else 1)
    assert left_out(driver) == ({other} if fault == "failing" else set())
    assert started(driver)


def test_the_partner_may_be_the_bad_one(suspected: Any) -> None:
    driver = suspected(8, "n3")
    Fleet(driver, failing={"n0"}).run()
    assert view(driver).passed == ("n3",)
    assert left_out(driver) == {"n0"}


def test_between_two_suspects(suspected: Any) -> None:
    driver = suspected(8, "n3", "n4")
    Fleet(driver, cut={frozenset(("n3", "n4"))}).run()
    assert view(driver).between == (("n3", "n4"),)
    assert left_out(driver) == set()
    assert started(driver)


@pytest.mark.parametrize("others", [(), ("n7",), ("n0",)])
def test_a_rack_of_which_all_nodes_fail(suspected: Any, others: tuple[str, ...]) -> None:
    """Then none of them is named; one that was not tested (n7), or does well (n0), speaks for the rack."""
    driver = suspected(8, "n3", "n4")
    driver.join("n3", "n4", *others, domain="rack 9")
    fleet = Fleet(driver, failing={"n3", "n4"})
    assert ("n7" in fleet.orders(), "n0" in fleet.orders()) == (False, True)
    fleet.run()
    assert left_out(driver) == (set() if not others else {"n3", "n4"})
    assert ("rack 9" in view(driver).unknown) == (not others)
    assert started(driver)


@pytest.mark.parametrize("count", [3, 4, 8, 33, 1024])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_fleets_in_which_up_to_half_are_bad(suspected: Any, count: int, share: float) -> None:
    """Failing and slow suspects are named, good ones never; what the breaker does not allow, people decide."""
    bad = [f"n{number}" for number in random.Random(count).sample(range(1, count), max(1, int(count * share)))]
    failing, slow = set(bad[::2]), dict.fromkeys(bad[1::2], 1.5)
    suspects = (*bad, *(f"n{number}" for number in range(count) if f"n{number}" not in bad))[: max(len(bad), 2)]
    driver = suspected(count, *suspects, spares=max(4, count // 2))
    Fleet(driver, failing, slow).run()
    assert set(view(driver).failed) == set(bad)
    allowed = max(2, count // 10)
    assert left_out(driver) == (set(bad) if len(bad) <= allowed else set())
    assert driver.job.incidents.breaker_tripped == (len(bad) > allowed)
    assert started(driver) == (len(bad) <= allowed)


def test_agents_that_know_no_tests_are_waited_for_once(suspected: Any) -> None:
    driver = suspected(8, "n3")
    began = driver.now
    Fleet(driver, silent={f"n{number}" for number in range(12)}).run()
    driver.fire("tests")
    assert driver.now - began <= 30.0
    assert view(driver).unknown
    assert left_out(driver) == set()
    assert started(driver)


def test_an_agent_that_falls_silent_is_not_blamed_for_it(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet, began = Fleet(driver), driver.now
    for name, order in fleet.orders().items():
        fleet.answer(name, order, None)
    fleet.silent = {"n3"}
    fleet.run()
    while "tests" in driver.job.timers:
        driver.fire("tests")
        fleet.run()
    assert driver.now - began <= 60.0
    assert not view(driver).failed
    assert "n3" not in view(driver).passed
    assert left_out(driver) == set()
    assert started(driver)


@pytest.mark.parametrize("how", ["silent", "started again"])
def test_one_failure_before_an_agent_falls_silent_is_no_proof(suspected: Any, how: str) -> None:
    """The first pair failed, and its other node is good: that may have been what is between them."""
    driver = suspected(8, "n3")
    fleet = Fleet(driver, failing={"n3"}, silent={"n3"})
    while not any(order.round == 2 for order in fleet.orders().values()):
        order = fleet.orders()["n3"]
        fleet.answer("n3", order, GroupPart(failed="all_reduce: timeout") if order.round else None)
        fleet.run()
    order = fleet.orders()["n3"]
    assert order.world
    if how == "started again":
        fleet.answer("n3", order, None, problem="its agent was started again while it was tested")
    fleet.run()
    while "tests" in driver.job.timers:
        driver.fire("tests")
        fleet.run()
    assert not view(driver).failed
    assert "n3" not in view(driver).passed
    assert left_out(driver) == set()
    assert started(driver)


def test_nodes_of_different_kinds_are_not_slow(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver, slow={"n3": 3.0})
    fleet.kinds = {"n3": "A100, torch 2, CUDA 12"}
    fleet.run()
    assert left_out(driver) == set()
    assert view(driver).passed == ("n3",)


def test_agents_of_an_older_version_are_not_waited_for(make_driver: Any) -> None:
    driver = make_driver(suspicion("n1"), nodes_min=4, nodes_max=4, spares=1, test_suspects=True)
    for name in ("n0", "n1", "n2", "n3", "n4"):
        spare, can_test = name == "n4", name in ("n0", "n1")
        driver.tell(m.NodeJoined, node=name, host=name, address="10.0.0.1", spare=spare, can_test=can_test)
    driver.up()
    driver.crash("n0", rank=1, code=1, signal=None)
    driver.fire("evidence")
    assert not Fleet(driver).orders()
    assert started(driver)


def test_what_could_not_be_tested_is_not_tried_again_at_once(suspected: Any) -> None:
    """Each try may cost half a minute."""
    driver = suspected(8, verdict=suspicion("n3", failure_class=FailureClass.NCCL_TIMEOUT))
    assert driver.told["n3"].tests is not None
    fleet = Fleet(driver, silent={f"n{number}" for number in range(12)})
    driver.fire("tests")
    assert started(driver)
    driver.up()
    driver.crash("n0", rank=1, code=1, signal=None)
    if driver.state == "DIAGNOSING":
        driver.fire("evidence")
    assert not fleet.orders()
    assert started(driver)


def test_nobody_else_is_waited_for_when_no_suspect_can_be_tested(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver)
    fleet.answer("n3", fleet.orders()["n3"], None, problem="ranks still live here after 20 s")
    assert "tests" not in driver.job.timers
    assert not fleet.orders()
    assert started(driver)


def test_the_job_ends_while_they_are_tested(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver)
    assert fleet.orders()
    driver.order("stop")
    assert not fleet.orders()
    assert driver.job.view().incidents[-1].tests is msgspec.UNSET


def test_a_lost_node_is_not_waited_for(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver, silent={"n3"})
    fleet.run()
    driver.tell(m.NodeLost, node="n3", silent_s=12.0)
    assert "tests" not in driver.job.timers
    assert started(driver)
    assert "n3" not in driver.job.attempt.members


def test_busy_cpus_and_ranks_that_remain_say_nothing(suspected: Any) -> None:
    driver = suspected(8, "n3")
    everybody = {f"n{number}" for number in range(12)}
    Fleet(driver, failing={"n3"}, busy=everybody).run()
    assert left_out(driver) == set()
    assert "CPUs" in view(driver).unknown
    driver = suspected(8, "n3")
    fleet = Fleet(driver, failing={"n3"})
    fleet.answer("n3", fleet.orders()["n3"], None, problem="ranks still run here")
    fleet.run()
    assert left_out(driver) == set()
    assert "ranks still run" in view(driver).unknown
    assert started(driver)


@pytest.mark.parametrize("wrong", [{"address": "h; rm"}, {"port": 0}, {"port": 70000}, {"devices": 0}])
def test_an_agent_that_names_an_impossible_place(suspected: Any, wrong: dict[str, Any]) -> None:
    """The others would obey no assignment with that in it."""
    driver = suspected(8, "n3")
    fleet = Fleet(driver)
    name, order = next((name, order) for name, order in fleet.orders().items() if name != "n3")
    fleet.answer(name, order, None, **wrong)
    fleet.done.add((name, order.number, order.round))
    fleet.run()
    assert view(driver).passed == ("n3",)
    assert name not in view(driver).partners


def test_a_new_controller_goes_on_where_the_old_one_was(suspected: Any) -> None:
    driver = suspected(8, "n3")
    fleet = Fleet(driver, failing={"n3"})
    for name, order in fleet.orders().items():
        fleet.answer(name, order, None)
    driver.tell(m.ControllerStarted, epoch=2)
    assert {order.round for order in fleet.orders().values()} == {1}
    for event in [event for event in driver.journal if isinstance(event, m.NodeTested)]:
        driver.tell(m.NodeTested, node=event.node, report=event.report)  # heard once more
    fleet.run()
    assert left_out(driver) == {"n3"}


@pytest.mark.parametrize(
    ("verdict", "spec"),
    [
        (suspicion(), {}),  # no node is named
        (suspicion("n3"), {"test_suspects": False}),
        (suspicion("n3"), {"spares": 0}),  # nobody could take its place
        (suspicion("n3"), {"mode": "recommend"}),
        (suspicion("n3", failure_class=FailureClass.WORKER_CRASH), {}),
    ],
)
def test_where_no_test_is_worth_it(suspected: Any, verdict: Verdict, spec: dict[str, Any]) -> None:
    driver = suspected(8, verdict=verdict, **spec)
    assert not Fleet(driver).orders()
    assert "tests" not in driver.job.timers


def test_two_nodes_are_too_few(suspected: Any) -> None:
    driver = suspected(1, "n0", spares=1)
    assert not Fleet(driver).orders()


def test_an_operator_does_not_wait(suspected: Any) -> None:
    driver = suspected(8, "n3")
    driver.order("restart")
    assert driver.state == "STARTING"
    assert not Fleet(driver).orders()


def test_a_pause_keeps_who_failed(suspected: Any) -> None:
    """Nothing is done while it is paused; what was found is told."""
    driver = suspected(8, "n3")
    driver.order("pause")
    Fleet(driver, failing={"n3"}).run()
    assert set(view(driver).failed) == {"n3"}
    assert left_out(driver) == set()
    assert driver.state == "RECOVERING"


def test_the_ledger_gets_what_was_found(suspected: Any) -> None:
    driver = suspected(8, "n3")
    Fleet(driver, failing={"n3"}).run()
    written = [one.what for one in driver.job.ledger._unwritten.values() if isinstance(one.what, TestResult)]
    assert {(one.node, one.verdict) for one in written} == {("n3", "fail")}


# ----- a node by itself -----


def test_a_spare_tests_itself(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, spares=1, ledger="propose")
    driver.join("n0", "n1")
    driver.join("n2", spare=True)
    driver.up()
    refused = [one for name in ("n0", "n9", "") for one in driver.order("qualify", name) if isinstance(one, m.Note)]
    assert [one.kind for one in refused if one.refused] == ["qualify_in_use", "qualify_absent", "needs_a_node"]
    driver.order("qualify", "n2 quick")
    order = driver.told["n2"].tests
    assert order.suite == "quick"
    assert [one.kind for one in driver.order("qualify", "n2") if getattr(one, "refused", False)] == ["qualify_twice"]
    result = TestResult(node="n2", test="memory_patterns", verdict="fail", reason="8 words changed", at=driver.now)
    other = TestResult(node="n0", test="memory_patterns", verdict="fail", at=driver.now)
    report = m.NodeTestReport(number=order.number, results=(result, other))
    driver.tell(m.NodeTested, node="n2", report=report)
    assert "qualify_failed" in driver.loud
    assert driver.told["n2"].tests is None
    assert set(driver.job.tests.results) == {"n2"}, "a node speaks for itself alone"
    assert "tests" not in driver.job.timers


def test_the_job_needs_the_spare(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, spares=1)
    driver.join("n0", "n1")
    driver.join("n2", spare=True)
    driver.up()
    driver.order("qualify", "n2")
    driver.tell(m.NodeLost, node="n1", silent_s=12.0)
    driver.fire("evidence")
    assert "n2" in driver.job.attempt.members
    assert driver.told["n2"].tests is None
    assert "tests" not in driver.job.timers


def test_a_node_that_never_answers(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, spares=1)
    driver.join("n0", "n1")
    driver.join("n2", spare=True)
    driver.up()
    driver.order("qualify", "n2 quick")
    driver.fire("tests")
    assert "qualify_unknown" in driver.loud
    assert driver.told["n2"].tests is None


# ----- after a repair -----


def repaired(driver: Any, *, due: bool) -> None:
    known = m.LedgerNode(node="n2", probation_until=driver.now + 6 * 86400.0, retest_due=due)
    driver.tell(m.LedgerSeen, nodes=(known,), fleet=3)


def test_a_repaired_spare_tests_itself_after_a_day(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, spares=1, ledger="propose", test_suspects=True)
    driver.join("n0", "n1")
    driver.join("n2", spare=True)
    driver.up()
    repaired(driver, due=False)
    assert driver.told["n2"].tests is None
    assert driver.told["n2"].on_probation, "its probes look more often"
    assert not driver.told["n0"].on_probation
    repaired(driver, due=True)
    order = driver.told["n2"].tests
    assert order.suite == "quick"
    driver.tell(m.NodeTested, node="n2", report=m.NodeTestReport(number=order.number, problem="no torch here"))
    repaired(driver, due=False)
    repaired(driver, due=True)
    assert driver.told["n2"].tests is None, "once a day"
    driver.now += 86400.0
    repaired(driver, due=False)
    repaired(driver, due=True)
    order = driver.told["n2"].tests
    result = TestResult(node="n2", test="memory_patterns", verdict="pass", at=driver.now)
    driver.tell(m.NodeTested, node="n2", report=m.NodeTestReport(number=order.number, results=(result,)))
    assert "qualify_passed" in driver.loud
    assert any(getattr(one.what, "test", "") == "memory_patterns" for one in driver.job.ledger._unwritten.values())


@pytest.mark.parametrize("spec", [{"test_suspects": False}, {"mode": "recommend"}])
def test_a_repaired_node_is_left_alone_where_that_is_wanted(make_driver: Any, spec: dict[str, Any]) -> None:
    usual = {"nodes_min": 2, "nodes_max": 2, "spares": 1, "ledger": "propose", "test_suspects": True}
    driver = make_driver(**{**usual, **spec})
    driver.join("n0", "n1")
    driver.join("n2", spare=True)
    driver.up()
    repaired(driver, due=True)
    assert driver.told["n2"].tests is None


def test_a_repaired_node_that_is_in_use_is_not_tested(make_driver: Any) -> None:
    driver = make_driver(nodes_min=3, nodes_max=3, ledger="propose", test_suspects=True)
    driver.join("n0", "n1", "n2")
    driver.up()
    repaired(driver, due=True)
    assert driver.told["n2"].tests is None


# ----- numbers -----


def test_what_metrics_tell_of_it(suspected: Any) -> None:
    driver = suspected(8, "n3")
    Fleet(driver, failing={"n3"}).run()
    name = "unbroken_job_active_test_verdict"
    told = {one.labels for one in job_samples(driver.job, driver.now) if one.name == name and one.value}
    assert ("n3", "pairs", "fail") in told
    assert {verdict for node, _, verdict in told if node != "n3"} == {"pass"}
    driver = suspected(1024, *(f"n{number}" for number in range(500)), spares=600)
    Fleet(driver).run()
    assert 0 < sum(one.name == name for one in job_samples(driver.job, driver.now)) <= 64 * 2 * 3
