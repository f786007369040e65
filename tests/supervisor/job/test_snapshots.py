"""From which snapshot the next attempt starts, and what is done about replicas that differ."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import LossAlarm
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint, ResumeSituation, SetAside
from recovery.rollback import TRIES
from recovery.snapshot_choice import NodeSnapshot
from supervisor import messages as m

CORRUPT = Verdict(
    failure_class=FailureClass.SILENT_DATA_CORRUPTION,
    culprits=(Culprit(node="b", rank=2),),
    confidence=0.8,
    why="rank 2 differs",
    action="rollback_and_restart",
)


def checkpoint(driver: Any, step: int) -> None:
    found = Checkpoint(path=f"/c/{step}", step=step, format="x", complete=True, modified_at=driver.now)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(found,))


def again(driver: Any, *steps: int, attempt: int = 1, at: float | None = None, only: str = "ab") -> Any:
    """Rank 1 is killed, and the launchers come back: what was chosen."""
    driver.crash()
    if driver.state == "RECOVERING":
        driver.fire("backoff")
    for place, name in enumerate(driver.job.attempt.members):
        held = tuple(
            NodeSnapshot(
                attempt=attempt,
                step=step,
                first_rank=2 * place,
                ranks=2,
                world=4,
                at=driver.now if at is None else at,
            )
            for step in steps
            if name in only
        )
        offer = m.StoreOffer(host=name, port=1, local_world_size=2, snapshots=held)
        driver.tell(m.LauncherReady, node=name, attempt=driver.number, offer=offer)
    return driver.told["a"].round.snapshot


def test_all_ranks_start_from_the_newest_that_all_hold(running: Any) -> None:
    driver = running("a", "b")
    assert again(driver, 30, 40) == (1, 40)
    assert driver.told["b"].round.snapshot == (1, 40)


def test_a_newer_checkpoint_wins_and_an_older_one_does_not(running: Any) -> None:
    driver = running("a", "b")
    checkpoint(driver, 40)
    assert again(driver, 30, 40) is None
    driver.up(41)
    assert again(driver, 50, attempt=2) == (2, 50)


def test_what_one_node_lacks_is_not_used(running: Any) -> None:
    driver = running("a", "b")
    assert again(driver, 40, only="a") is None


def test_what_was_written_while_the_numbers_were_wrong_is_not_used_now_nor_later(running: Any) -> None:
    driver = running("a", "b")
    good = driver.now
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0,))
    driver.now += 5
    assert again(driver, 40) is None
    driver.up(1)
    assert again(driver, 30, at=good) is None  # an attempt has started from before it: that is another past
    driver.up(1)
    assert again(driver, 5, attempt=3) == (3, 5)


@pytest.fixture
def training(running: Any) -> Any:
    """Four ranks on a and b, c is spare, at step 450; checkpoints of 100 to 400; replicas were the same at step 310."""

    def start(guard: str = "enforce", spare: str = "c", **more: Any) -> Any:
        driver = running("a", "b", nodes_min=2, nodes_max=2, loss_guard=guard, **more)
        if spare:
            driver.join(spare, spare=True)
        save(driver, *(100, 200, 300, 400))
        driver.tell(m.Progressed, attempt=1, step=450)
        return driver

    return start


def save(driver: Any, *steps: int) -> None:
    """Each is written so many tenths of a second after the beginning."""
    found = tuple(
        Checkpoint(path=f"/c/step-{step}", step=step, format="x", complete=True, modified_at=1000.0 + step / 10)
        for step in steps
    )
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=found, after=max(0.0, 1000.0 + max(steps) / 10 - driver.now))


def differ(driver: Any, *odd: int, since: int | None = 310, step: int = 320) -> None:
    """Ranks `odd` differ at `step`; all were the same at step `since` of this attempt."""
    at = None if since is None else 1000.0 + since / 10
    driver.tell(m.ReplicasDiffer, attempt=driver.number, step=step, compared=4, odd=odd, since=at, since_step=since)


def offer(driver: Any, *held: tuple[int, int]) -> None:
    for place, name in enumerate(driver.job.attempt.members):
        snapshots = tuple(
            NodeSnapshot(attempt=one, step=step, first_rank=2 * place, ranks=2, world=4, at=1000.0 + step / 10)
            for one, step in held
        )
        given = m.StoreOffer(host=name, port=1, local_world_size=2, snapshots=snapshots)
        driver.tell(m.LauncherReady, node=name, attempt=driver.number, offer=given)


def test_the_run_goes_back_to_before_the_replicas_differed_and_leaves_the_node_out(training: Any) -> None:
    driver = training()
    differ(driver, 2)
    [incident] = driver.job.incidents.log.records
    assert (incident.trigger, incident.verdict.failure_class) == ("replicas", FailureClass.SILENT_DATA_CORRUPTION)
    assert [(one.node, one.rank) for one in incident.verdict.culprits] == [("b", 2)]
    assert [one.node for one in incident.plan.cordons] == ["b"]
    assert incident.plan.rollback.not_after_step == 310
    assert driver.job.incidents.budget.used == 1
    attempt = driver.job.attempt
    assert (attempt.number, attempt.members, attempt.resume.step) == (2, ("a", "c"), 300)
    assert [one.path for one in attempt.prepare if isinstance(one, SetAside)] == ["/c/step-400"]
    assert driver.replayed().attempt.resume == attempt.resume


@pytest.mark.parametrize(("held", "chosen"), [((310, 320), (1, 310)), ((320, 330), None), ((305,), None)])
def test_only_the_snapshot_in_which_they_were_the_same_may_be_gone_back_to(
    training: Any, held: tuple[int, ...], chosen: Any
) -> None:
    driver = training(spare="")  # nobody takes b's place, so the ranks are where they were
    differ(driver, 2)
    offer(driver, *((1, step) for step in held))
    assert driver.told["a"].round.snapshot == chosen
    assert driver.job.attempt.resume.step == 300
    driver.up(311)
    assert again(driver, 310, at=1031.0) is None, "an attempt has started from before it: that is another past"


def test_replicas_that_differ_from_the_start_of_an_attempt_lead_back_to_what_was_there(training: Any) -> None:
    driver = training()
    differ(driver, 2)
    driver.up(301)
    save(driver, 300, 500)
    driver.tell(m.ReplicasDiffer, after=5, attempt=2, step=510, compared=4, odd=(1,), since=1031.0)
    if driver.state == "RECOVERING":
        driver.fire("backoff")
    assert (driver.number, driver.job.attempt.resume.step) == (3, 300)


@pytest.mark.parametrize(
    ("guard", "since", "command"),
    [
        ("off", 310, ""),
        ("recommend", 310, "rollback 300"),
        ("recommend", 90, ""),
        ("enforce", 90, ""),
        ("enforce", None, ""),
    ],
)
def test_what_is_only_told(training: Any, guard: str, since: int | None, command: str) -> None:
    """Where nobody is to act, nothing is old enough, or nothing proves that they should be the same."""
    driver = training(guard)
    driver.verdict = CORRUPT
    differ(driver, 2, since=since)
    assert driver.state == "RUNNING"
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "incident_goes_on"]
    assert ("unbroken" in str(told.arguments["why"])) == bool(command)
    assert command in str(told.arguments["why"])
    [finding] = driver.seen[-1].findings
    assert (finding.node, finding.rank, finding.confidence > 0.5) == ("b", 2, since is not None)
    suspect = [one.suspect for one in driver.job.checkpoints.candidates()]
    assert suspect == [since is not None and (one.step or 0) > since for one in driver.job.checkpoints.candidates()]
    total = driver.job.incidents.log.total
    differ(driver, 2, since=since, step=330)
    assert driver.job.incidents.log.total == total == 1


def test_after_two_times_and_with_a_spent_budget_it_is_only_told(training: Any) -> None:
    driver = training(max_restarts=9)
    for rank in (0, 2)[:TRIES]:
        differ(driver, rank)
        if driver.state == "RECOVERING":
            driver.fire("backoff")
        driver.up(301)
    number = driver.number
    assert number == 1 + TRIES
    differ(driver, 1)
    assert (driver.state, driver.number) == ("RUNNING", number)
    spent = training(max_restarts=0)
    differ(spent, 2)
    assert (spent.state, spent.number) == ("RUNNING", 1)


def test_a_person_is_asked_and_the_attempt_trains_on(training: Any) -> None:
    driver, approved = training(), training()
    for one in (driver, approved):
        one.order("mode", "recommend")
        differ(one, 2)
        assert one.state == "RECOVERING"
    driver.order("reject")
    assert (driver.state, driver.number) == ("RUNNING", 1)
    wrong = LossAlarm(kind="spike", step=440)
    driver.tell(m.LossSeen, attempt=1, alarm=wrong, step=450)
    assert driver.job.incidents.approval_wanted, "that was about the replicas, not about the loss"
    approved.order("approve")
    assert (approved.number, approved.job.attempt.resume.step) == (2, 300)


@pytest.mark.parametrize(("since", "left_out"), [(None, []), (90, ["b"])])
def test_a_nan_is_blamed_on_the_odd_rank_only_if_it_was_like_the_others(
    training: Any, since: int | None, left_out: list[str]
) -> None:
    driver = training()
    driver.verdict = CORRUPT
    differ(driver, 2, since=since)
    driver.tell(m.LossSeen, attempt=1, alarm=LossAlarm(kind="nan", step=440), step=450)
    assert [one.node for one in driver.job.incidents.log.newest.plan.cordons] == left_out
    assert driver.number == 2, "else it is a NaN like any other"


def test_a_loss_that_comes_back_does_not_make_replicas_equal(training: Any) -> None:
    driver = training()
    driver.order("mode", "recommend")
    differ(driver, 2)
    driver.tell(m.LossSeen, attempt=1, alarm=None, step=330)
    assert driver.job.incidents.approval_wanted


def test_two_replicas_blame_nobody(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.ReplicasDiffer, attempt=1, step=20, compared=2, contents=2, since=driver.now)
    assert set(driver.loud) == {"replicas_differ"}
    assert driver.job.incidents.log.total == 0
    assert driver.job.checkpoints.suspect_open("replicas")


@pytest.mark.parametrize(
    "about",
    [
        {"odd": (2,)},  # never seen to be the same
        {"contents": 4, "since": 1001.0},  # statistics of batches: each rank has its own
    ],
)
@pytest.mark.parametrize("guard", ["off", "recommend", "enforce"])
def test_a_script_whose_ranks_differ_by_themselves_loses_no_checkpoint(
    training: Any, guard: str, about: dict[str, Any]
) -> None:
    driver = training(guard)
    driver.tell(m.ReplicasDiffer, attempt=1, step=20, compared=4, **about)
    save(driver, 500)
    assert (driver.state, driver.number) == ("RUNNING", 1)
    assert not any(one.suspect for one in driver.job.checkpoints.candidates())
    checkpoint, _ = driver.job.checkpoints.preview(ResumeSituation(kind="crash"), driver.job.attempt.members)
    assert checkpoint.step == 500


def test_a_rank_that_differs_on_another_node_again_is_told_and_blames_no_node(training: Any) -> None:
    """Only rank 0 keeps an average, in a state of which the script says that all ranks have the same."""
    driver = training(max_restarts=9)
    differ(driver, 0)
    assert (driver.number, driver.job.attempt.members) == (2, ("c", "b"))
    driver.up(301)
    save(driver, 500)
    driver.tell(m.ReplicasDiffer, attempt=2, step=510, compared=4, odd=(0,), since=1049.0, since_step=490)
    assert (driver.state, driver.number) == ("RUNNING", 2)
    assert {cordon.node for cordon in driver.job.nodes.cordons.all(driver.now)} == {"a"}
    assert not any(one.suspect for one in driver.job.checkpoints.candidates() if one.step == 500)


def test_ranks_of_several_nodes_that_differ_at_once_blame_none_of_them(training: Any) -> None:
    driver = training()
    driver.tell(m.ReplicasDiffer, attempt=1, step=320, compared=5, odd=(0, 2), since=1031.0, since_step=310)
    assert (driver.state, driver.number) == ("RUNNING", 1)
    assert not driver.job.nodes.cordons.all(driver.now)
    assert driver.job.checkpoints.suspect_open("replicas")


@pytest.mark.parametrize("numbers_first", [True, False])
def test_numbers_that_are_good_again_do_not_make_replicas_equal(running: Any, numbers_first: bool) -> None:
    driver = running("a", "b")
    tell = [
        lambda: driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=19, ranks=(0,)),
        lambda: driver.tell(m.ReplicasDiffer, after=5, attempt=1, step=20, compared=2, since=driver.now),
    ]
    for one in tell if numbers_first else tell[::-1]:
        one()
    assert driver.job.incidents.log.total == 1
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=False, step=21, ranks=(0,))
    driver.now += 5
    checkpoint(driver, 30)
    assert [one.suspect for one in driver.job.checkpoints.candidates()] == [True]
    assert again(driver, 40) is None


def test_a_start_from_a_snapshot_is_no_start_without_a_checkpoint(running: Any) -> None:
    driver = running("a", "b")
    assert again(driver, 40) == (1, 40)
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "attempt_starts"]
    assert not told.arguments.get("no_checkpoint")
    driver.up(41)
    assert again(driver, attempt=2) is None
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "attempt_starts"]
    assert told.arguments.get("no_checkpoint")


def test_a_snapshot_that_nobody_can_load_is_left_for_the_checkpoint(running: Any) -> None:
    driver = running("a", "b")
    checkpoint(driver, 30)
    assert again(driver, 40) == (1, 40)
    driver.up(None)
    assert again(driver, 40) == (1, 40)
    driver.up(None)
    assert again(driver, 40) is None
    driver.up(31)
    assert again(driver, 40, attempt=4) == (4, 40)


def test_a_snapshot_from_which_steps_were_made_is_used_again(running: Any) -> None:
    driver = running("a", "b")
    for _ in range(3):
        assert again(driver, 40) == (1, 40)
        driver.up(41)


def test_the_steps_after_a_snapshot_are_not_said_to_be_lost(running: Any) -> None:
    driver = running("a", "b")
    checkpoint(driver, 30)
    driver.tell(m.Progressed, attempt=1, step=43)
    assert again(driver, 40) == (1, 40)
    driver.up(42)
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "recovered"]
    assert (told.arguments["step"], told.arguments["lost_steps"]) == (41, 3)


def test_a_script_that_shows_no_steps_was_offered_the_snapshot(running: Any) -> None:
    driver = running("a", "b")
    checkpoint(driver, 30)
    assert again(driver, 40) == (1, 40)
    driver.up(None)
    driver.fire("settle")
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "recovered"]
    assert "step 40" in told.arguments["checkpoint"]
    assert (told.arguments["offered"], told.arguments["resumed"]) == (True, False)
