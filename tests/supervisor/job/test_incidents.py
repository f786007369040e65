"""From the first sign of a failure to what is done about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Incident, Verdict
from diagnosis.kernel.causes import finding_of
from diagnosis.kernel.log import KernelReader
from diagnosis.signals import Evidence, ExitRecord, Finding, NodeEvidence
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import triage
from recovery.checkpoint import Checkpoint
from recovery.cordon import Cordon
from recovery.policy import WINDOW_S
from supervisor import messages as m
from supervisor.controller.metrics import job_samples
from supervisor.job.degraded import DEVICE_LASTS_S, NUMBERS_REPORTED
from supervisor.job.incidents import REVIEW_S, REVIEWS
from supervisor.job.job import Job


def test_a_node_that_was_only_silent_needs_no_restart(running: Any) -> None:
    driver = running("a", "b", "c")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.tell(m.NodeLost, node="c", silent_s=5.0)
    driver.tell(m.NodeJoined, node="b", host="", address="")
    assert driver.state == "DIAGNOSING"
    driver.tell(m.NodeJoined, node="c", host="", address="")
    assert (driver.state, driver.seen, driver.number) == ("RUNNING", [], 1)


def test_a_node_that_came_back_with_a_dead_rank_is_diagnosed(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.rank_ends(node="a", rank=1)
    driver.tell(m.NodeJoined, node="b", host="", address="")
    assert driver.state == "DIAGNOSING"
    driver.fire("evidence")
    assert driver.number == 2


def test_a_diagnosis_that_fails_does_not_stop_the_run(make_driver: Any) -> None:
    def broken(_: Incident) -> Verdict:
        raise KeyError("a defect")

    driver = make_driver()
    driver.conclude = broken
    driver.join("a")
    driver.up()
    driver.rank_ends()
    assert driver.state == "STARTING"
    verdict = driver.job.view().incidents[0].verdict
    assert verdict is not None
    assert verdict.failure_class is FailureClass.UNKNOWN


def test_a_choice_of_checkpoint_that_fails_does_not_stop_the_run(running: Any) -> None:
    def broken(_: Any) -> Any:
        raise OSError("a defect")

    driver = running("a")
    driver.choose = broken
    driver.rank_ends()
    assert driver.state == "STARTING"


def test_findings_are_acknowledged_and_reach_the_diagnosis_once(running: Any) -> None:
    driver = running("a")
    finding = Finding(
        rule="xid",
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        confidence=0.9,
        scope="gpu",
        severity="fatal",
        evidence=Evidence(text="Xid 79"),
        at=driver.now,
    )
    for number in (0, 0, 1):
        driver.tell(m.FindingArrived, node="a", finding=finding, number=number)
    assert driver.told["a"].findings_seen == 2
    driver.rank_ends(ended_at=driver.now)
    assert len(driver.seen[0].findings) == 2


# ----- evidence that comes after the verdict -----


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


# ----- what is wrong while an attempt goes on -----


NAN = Verdict(
    failure_class=FailureClass.LOSS_SPIKE_OR_NAN, culprits=(), confidence=0.9, why="the loss is NaN", action="none"
)


def failed_gpu(node: str = "a", rank: int | None = 1, gpu: str = "0000:c1:00", **more: Any) -> Finding:
    usual: dict[str, Any] = {
        "rule": "xid",
        "failure_class": FailureClass.GPU_FALLEN_OFF_BUS,
        "confidence": 0.95,
        "scope": "gpu",
        "severity": "fatal",
        "evidence": Evidence(text=f"NVRM: Xid (PCI:{gpu}): 79, GPU has fallen off the bus.", source="kernel"),
        "node": node,
        "rank": rank,
        "gpu": gpu,
    }
    return Finding(**{**usual, **more})


def open_ones(driver: Any) -> list[str]:
    return [case.trigger for case in driver.job.incidents.log.open_degradations()]


def series(driver: Any, name: str) -> dict[tuple[str, ...], float]:
    return {one.labels: one.value for one in job_samples(driver.job, driver.now) if one.name == name}


# ----- numbers -----


def test_numbers_that_come_back_close_the_incident_and_what_is_saved_then_is_good(running: Any) -> None:
    driver = running("a")
    driver.verdict = NAN
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0,))
    assert open_ones(driver) == ["signal"]
    assert driver.state == "RUNNING"
    assert driver.job.checkpoints.suspect_open("numbers")
    assert series(driver, "unbroken_job_open_incidents") == {("loss_spike_or_nan",): 1.0}
    driver.tell(m.NumbersSeen, after=20, attempt=1, bad=False, step=55)
    assert open_ones(driver) == []
    assert not driver.job.checkpoints.suspect_open("numbers")
    assert driver.job.attempts.restarts == 0
    assert driver.job.incidents.log.lost_s(driver.now) == 0.0


def test_a_run_that_ends_with_every_loss_nan_says_so_though_it_exits_with_0(running: Any) -> None:
    driver = running("a")
    driver.verdict = NAN
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0, 1))
    driver.finish()
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="with code 0")
    outcome = driver.job.outcome
    assert outcome.state == "succeeded"
    assert outcome.exit_code == 0
    assert "from step 40 on" in outcome.line
    last = driver.job.view().incidents[-1]
    assert last.closed_at is not None
    assert "to the end" in last.closed_why


def test_a_warning_of_a_skipped_step_is_no_incident(running: Any) -> None:
    driver = running("a")
    skipped = failed_gpu(failure_class=FailureClass.LOSS_SPIKE_OR_NAN, scope="job", severity="warning", attempt=1)
    driver.tell(m.FindingArrived, node="a", finding=skipped, number=0)
    assert not driver.job.incidents.log.records


def test_a_loss_that_comes_and_goes_is_told_so_often_and_no_more(running: Any) -> None:
    driver = running("a")
    for _ in range(3 * NUMBERS_REPORTED):
        driver.tell(m.NumbersSeen, after=20, attempt=1, bad=True, step=40, ranks=(0,))
        driver.tell(m.NumbersSeen, after=20, attempt=1, bad=False, step=41)
    assert driver.job.incidents.log.total == NUMBERS_REPORTED


def test_a_crash_closes_it_and_the_next_attempt_may_have_one_of_its_own(running: Any) -> None:
    driver = running("a")
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0,))
    driver.crash("a", 1)
    driver.up(step=31)
    assert [case.closed_at is not None for case in driver.job.incidents.log.records] == [True, True]
    driver.tell(m.NumbersSeen, after=5, attempt=2, bad=True, step=40, ranks=(0,))
    assert driver.job.incidents.log.total == 3
    assert open_ones(driver) == ["signal"]


# ----- devices -----


def test_a_device_that_fails_under_a_living_rank_is_an_incident_and_restarts_nothing(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.FindingArrived, node="a", finding=failed_gpu(at=driver.now), number=0)
    assert not driver.job.incidents.log.records
    driver.fire("device")
    assert open_ones(driver) == ["device"]
    assert driver.state == "RUNNING"
    assert driver.number == 1
    case = driver.job.incidents.log.records[-1]
    assert case.plan.kind == "ignore"
    assert driver.loud
    assert not driver.job.nodes.cordons.all(driver.now)
    assert series(driver, "unbroken_job_open_incidents")
    assert [node.state for node in driver.job.view().nodes if node.node == "a"] == ["SUSPECT"]
    assert driver.job.incidents.log.lost_s(driver.now) == 0.0


def test_one_that_dies_of_it_later_closes_it(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.FindingArrived, node="a", finding=failed_gpu(at=driver.now), number=0)
    driver.fire("device")
    driver.now += 30
    driver.crash("a", 1)
    first, second = driver.job.incidents.log.records
    assert second.id in first.closed_why
    assert [one.rule for one in driver.seen[-1].findings] == ["xid"]


def test_a_storm_is_one_incident_and_cordons_nobody(running: Any) -> None:
    driver = running(*"abcdefgh")
    for number, node in enumerate("abcdefgh"):
        for gpu in range(4):
            finding = failed_gpu(node, 2 * number, f"0000:c{gpu}:00")
            driver.tell(m.FindingArrived, after=0.01, node=node, finding=finding, number=gpu)
    driver.fire("device")
    assert driver.job.incidents.log.total == 1
    assert driver.job.incidents.log.records[0].further_failures == 31
    assert not driver.job.nodes.cordons.all(driver.now)
    assert driver.state == "RUNNING"
    driver.tell(m.FindingArrived, after=5, node="a", finding=failed_gpu("a", 0, "0000:d9:00"), number=9)
    driver.fire("device")
    assert driver.job.incidents.log.total == 1
    assert driver.job.incidents.log.records[0].further_failures == 32


@pytest.mark.parametrize(
    "finding",
    [
        failed_gpu(rank=None),
        failed_gpu(severity="warning"),
        failed_gpu(failure_class=FailureClass.GPU_THERMAL_POWER),
        failed_gpu(node="elsewhere"),
        failed_gpu(evidence=Evidence(text="NVRM: Xid 79", source="output")),
    ],
)
def test_what_is_no_failed_device_of_a_rank_stays_a_line_of_the_timeline(running: Any, finding: Finding) -> None:
    driver = running("a")
    driver.tell(m.FindingArrived, node="a", finding=finding, number=0)
    assert "device" not in driver.job.timers


def test_an_attempt_that_trains_on_for_long_is_not_degraded_any_more(running: Any) -> None:
    driver = running("a")
    driver.tell(m.FindingArrived, node="a", finding=failed_gpu(at=driver.now), number=0)
    driver.fire("device")
    began = driver.now
    driver.fire("degraded")
    assert driver.now == began + DEVICE_LASTS_S
    assert open_ones(driver) == []
    assert driver.state == "RUNNING"


# ----- a full disk, or a quota used up -----


FULL = Verdict(
    failure_class=FailureClass.DISK_FULL,
    culprits=(),
    confidence=0.93,
    why="no space",
    action="hold",
    evidence=(Evidence(text="OSError: [Errno 28] No space left on device: '/ckpt/step-10.pt'"),),
)
QUOTA = msgspec.structs.replace(
    FULL,
    failure_class=FailureClass.STORAGE_ERROR,
    action="wait_and_retry",
    evidence=(Evidence(text="OSError: [Errno 122] Disk quota exceeded: '/ckpt/step-10.pt'"),),
)


def waiting(running: Any, *names: str, verdict: Verdict = FULL) -> Any:
    """A job that waits for room, its back-off over."""
    driver = running(*(names or ("a",)))
    saved = Checkpoint(path="/ckpt/step-5.pt", step=5, format="torch", complete=True, size_bytes=1_000_000)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved,), folders=("/ckpt",))
    driver.verdict = verdict
    driver.crash("a", 1)
    assert driver.state == "RECOVERING"
    driver.fire("backoff")
    assert driver.state == "RECOVERING"
    return driver


def tell(driver: Any, node: str = "a", *full: str, after: float = 1.0) -> None:
    number = driver.told[node].space.number
    driver.tell(m.SpaceSeen, after=after, node=node, number=number, full=full)


@pytest.mark.parametrize("verdict", [FULL, QUOTA])
def test_the_job_holds_until_there_is_room_and_goes_on_by_itself(running: Any, verdict: Verdict) -> None:
    driver = waiting(running, verdict=verdict)
    told = driver.told["a"]
    assert told.stage == "form"
    assert told.paused, "old workers end; nothing is prepared, moved or started"
    assert told.space.folders == ("/ckpt",)
    assert told.space.need_bytes > 1_000_000
    tell(driver, "a", "/ckpt: no space left")
    assert driver.state == "RECOVERING"
    assert "/ckpt" in driver.job.view().waiting
    waits = {s.labels: s.value for s in job_samples(driver.job, driver.now) if s.name == "unbroken_job_waiting"}
    assert [labels for labels, value in waits.items() if value] == [("space",)]
    tell(driver, after=3000.0)
    assert driver.state == "STARTING"
    assert driver.told["a"].space is None
    assert not driver.told["a"].paused
    assert driver.job.incidents.budget.used == 0
    driver.up(step=11)
    assert driver.job.incidents.log.records[-1].closed_at is not None
    assert driver.job.view().waiting == ""


def test_a_disk_that_is_full_again_each_time_is_tried_more_and_more_seldom(running: Any) -> None:
    driver = running("a")
    driver.verdict = FULL
    waits = []
    for _ in range(8):
        driver.crash("a", 1)
        began = driver.now
        tell(driver)
        driver.fire("backoff")
        waits.append(round(driver.now - began))
        driver.up(step=None)
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    assert driver.job.incidents.budget.used == 0


def test_an_operator_may_go_on_without_room_and_a_pause_holds(running: Any) -> None:
    driver = waiting(running)
    driver.order("pause")
    tell(driver)
    assert driver.state == "RECOVERING"
    driver.order("resume")
    assert driver.state == "STARTING"
    again = waiting(running)
    again.order("resume")
    assert again.state == "STARTING"
    third = waiting(running)
    third.order("restart")
    assert third.state == "STARTING"


def test_it_ends_when_nobody_makes_room_for_as_long_as_a_job_may_be_held(running: Any) -> None:
    driver = waiting(running)
    tell(driver, "a", "/ckpt: no space left")
    driver.fire("hold")
    assert driver.state == "FAILED"
    assert "/ckpt" in driver.job.outcome.line
