"""Going back: what an operator orders, what the loss guard does, and that it is remembered over a replay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from diagnosis.signals import LossAlarm
from recovery.checkpoint import Checkpoint, PutBack, SetAside
from supervisor import messages as m
from supervisor.job.checkpoint_choice import SPANS_KEPT
from supervisor.job.job import Job
from supervisor.job.loss import ALARMS_REPORTED
from supervisor.messages import Note


def checkpoints(steps: Iterable[int], at: float = 0.0) -> tuple[Checkpoint, ...]:
    return tuple(
        Checkpoint(path=f"/c/step-{step}", step=step, format="hf", complete=True, modified_at=at or 1000.0 + step / 100)
        for step in sorted(steps, reverse=True)
    )


@pytest.fixture
def job(make_driver: Any) -> Any:
    """It runs at step 450, with four checkpoints."""
    driver = make_driver(loss_guard="enforce")
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 200, 300, 400)))
    driver.tell(m.Progressed, after=450.0, attempt=1, step=450)
    return driver


LAUNCHER = {"node": "a", "offer": m.StoreOffer(host="a", port=1, local_world_size=2)}


def told(driver: Any, kind: str) -> Note | None:
    return next((one for one in driver.actions if isinstance(one, Note) and one.kind == kind), None)


def prepared(driver: Any) -> list[Any]:
    return list(driver.job.attempt.prepare)


def alarm(driver: Any, step: int | None, kind: str = "spike") -> None:
    wrong = LossAlarm(kind=kind, step=step)  # type: ignore[arg-type]
    driver.tell(m.LossSeen, attempt=driver.number, alarm=wrong, ranks=(0,), step=450)


@pytest.mark.parametrize(
    ("argument", "resume", "skip"),
    [("", 300, 0), ("200", 200, 0), ("200 --skip 70", 200, 70), (" --skip 70", 300, 70), ("400", 400, 0)],
)
def test_an_operator_goes_back(job: Any, argument: str, resume: int, skip: int) -> None:
    job.order("rollback", argument)
    found = job.job.attempt.resume
    assert (job.number, found.step, found.skip_batches) == (2, resume, skip)
    assert [one.path for one in prepared(job)] == [f"/c/step-{step}" for step in (300, 400) if step > resume]
    note = told(job, "rolled_back")
    assert note is not None
    assert note.arguments["lost_steps"] == 450 - resume
    assert note.arguments["lost_min"] in ((450 - resume) // 60, (450 - resume) // 60 + 1)


def test_a_newest_one_that_was_written_a_moment_ago_is_gone_back_from(make_driver: Any) -> None:
    """It is not known to be whole yet, and turns out to be: the attempt goes back to the one before it all the same."""
    driver = make_driver()
    driver.join("a")
    driver.up(step=1)
    good, newest = (*checkpoints((100,)), *checkpoints((200,)))
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(good,))
    driver.order("rollback")
    assert driver.number == 1
    assert told(driver, "one_checkpoint") is not None
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(msgspec.structs.replace(newest, complete=False), good))
    driver.order("rollback")
    assert (driver.number, driver.job.attempt.resume.step) == (2, 100)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(newest, good))
    assert driver.job.attempt.resume.step == 100
    assert {one.path for one in prepared(driver)} == {"/c/step-200"}


def test_a_checkpoint_that_is_gone_before_the_start_is_told(job: Any) -> None:
    """The script saves often and keeps few: what was named is removed while its ranks are stopped."""
    job.order("rollback", "300")
    note = told(job, "rolled_back")
    assert note is not None
    assert note.arguments["unsure"]
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((200, 400, 500)))
    job.tell(m.LauncherReady, **LAUNCHER, attempt=job.number)
    other = told(job, "rolled_back_elsewhere")
    assert other is not None
    assert (other.arguments["step"], other.arguments["said"]) == (200, "/c/step-300")


def test_a_checkpoint_that_is_still_there_is_not_told_again(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(*checkpoints((300,), 1300.0), *checkpoints((200,), 1200.0)))
    driver.order("rollback", "200")
    note = told(driver, "rolled_back")
    assert note is not None
    assert not note.arguments["unsure"]
    driver.tell(m.LauncherReady, **LAUNCHER, attempt=driver.number)
    assert told(driver, "attempt_starts") is not None
    assert told(driver, "rolled_back_elsewhere") is None


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("350", "no_such_step"),
        ("x", "no_such_step"),
        ("200 --skip x", "no_such_step"),
        ("200 --skip -1", "no_such_step"),
        ("200 --skip 9999999", "no_such_step"),
        ("--undo", "no_rollback"),
    ],
)
def test_bad_input_is_refused_and_nothing_happens(job: Any, argument: str, kind: str) -> None:
    job.order("rollback", argument)
    refused = told(job, kind)
    assert refused is not None
    assert refused.refused
    assert job.number == 1
    if kind == "no_such_step":
        assert refused.arguments["steps"] == (400, 300, 200, 100)


def test_before_the_newest_means_before_a_suspect_one_as_well(job: Any) -> None:
    job.job.checkpoints.suspect_from("numbers", 1003.5, None)
    job.order("rollback")
    assert job.job.attempt.resume.step == 300
    assert [one.path for one in prepared(job)] == ["/c/step-400"]


def test_what_is_done_already_makes_no_further_attempt_and_what_appears_does(job: Any) -> None:
    job.order("rollback", "200")
    before = prepared(job)
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((50, 100, 200)))
    assert (job.number, prepared(job)) == (2, before), "300 and 400 were moved"
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((50, 100, 200, 250)))
    assert job.number == 3
    assert [one.path for one in prepared(job)] == ["/c/step-300", "/c/step-400", "/c/step-250"]


def test_the_limit_is_of_one_attempt_only(job: Any) -> None:
    job.order("rollback", "200")
    job.up(step=201)
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 200, 300), at=job.now))
    job.crash("a", 1)
    assert job.job.attempt.resume.step == 300
    assert not prepared(job)


def test_what_could_not_be_moved_is_not_resumed_from(job: Any) -> None:
    job.order("rollback", "200")
    job.up(step=201)
    job.crash("a", 1)
    assert job.job.attempt.resume.step == 200


def test_undo_puts_back_what_was_moved(job: Any) -> None:
    job.order("rollback", "200 --skip 5")
    job.up(step=201)
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 200)))
    job.order("rollback", "--undo")
    assert prepared(job) == [PutBack(path="/c/step-300"), PutBack(path="/c/step-400")]
    number = job.number
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 200, 300, 400)))
    assert job.number == number
    assert (job.job.attempt.resume.step, job.job.attempt.resume.skip_batches) == (400, 0)
    job.up(step=401)
    job.order("rollback", "--undo")
    assert told(job, "no_rollback") is not None


def test_a_rollback_that_finds_nothing_in_the_end_is_taken_back(job: Any) -> None:
    """The script has pruned what the job knew of."""
    job.order("rollback", "200")
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((300, 400)))
    assert told(job, "rollback_given_up") is not None
    assert prepared(job) == [PutBack(path="/c/step-300"), PutBack(path="/c/step-400")]


def test_good_ones_that_a_node_does_not_report_any_more_are_known(job: Any) -> None:
    """A node reports its newest eight, and those may all be from after the spike."""
    alarm(job, None)  # no step is known: it only tells
    later = checkpoints(range(500, 580, 10), at=job.now + 1)
    job.tell(m.CheckpointsSeen, node="a", checkpoints=later)
    job.order("rollback", "300")
    assert job.job.attempt.resume.step == 300
    assert len(prepared(job)) == 9, "the eight, and 400"
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((300, 200)))
    assert job.job.attempt.resume.step == 300


def test_pruned_ones_are_not_remembered(job: Any) -> None:
    alarm(job, None)
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((500, 510), at=job.now + 1))
    job.order("rollback", "300")
    refused = told(job, "no_such_step")
    assert refused is not None
    assert refused.arguments["steps"] == (510, 500)


def test_the_guard_goes_back_and_nothing_is_decided_twice(job: Any) -> None:
    alarm(job, 430)
    assert (job.number, job.job.attempt.resume.step) == (2, 400)
    assert job.job.attempt.resume.skip_batches == 450 + 21 - 400
    assert not prepared(job), "nothing is newer than that"
    assert job.job.incidents.budget.used == 1
    alarm(job, 430)
    assert job.number == 2


def test_a_newer_one_that_the_last_look_finds_has_less_data_left_out(job: Any) -> None:
    """Up to the same step."""
    alarm(job, 430)
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((300, 400, 405, 425)))
    assert (job.job.attempt.resume.step, job.job.attempt.resume.skip_batches) == (405, 450 + 21 - 405)
    assert [one.path for one in prepared(job)] == ["/c/step-425"]


@pytest.mark.parametrize("guard", ["off", "recommend"])
def test_a_guard_that_may_not_act(make_driver: Any, guard: str) -> None:
    driver = make_driver(loss_guard=guard)
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 400)))
    driver.tell(m.Progressed, after=450.0, attempt=1, step=450)
    alarm(driver, 430)
    assert (driver.state, driver.number) == ("RUNNING", 1)
    opened = [one.trigger for one in driver.job.incidents.log.records]
    assert opened == (["signal"] if guard == "recommend" else [])
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 400, 440), at=driver.now))
    driver.crash("a", 1)
    assert driver.job.attempt.resume.step == 440, "what is only told costs nothing"


@pytest.mark.parametrize(("argument", "resume"), [("", 300), (" --skip 9", 300), ("200", 200)])
def test_an_operator_without_a_step_goes_where_the_guard_recommends(
    make_driver: Any, argument: str, resume: int
) -> None:
    """The one before the newest was written after the loss went wrong."""
    driver = start(make_driver, loss_guard="recommend")
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 200, 300, 400, 440)))
    alarm(driver, 390)
    advice = driver.job.guard.recommended
    assert advice is not None
    assert (advice.step, advice.skip_batches > 0) == (300, True)
    driver.order("rollback", argument)
    found = driver.job.attempt.resume
    skip = {"": advice.skip_batches, " --skip 9": 9, "200": 0}[argument]
    assert (found.step, found.skip_batches) == (resume, skip)
    assert driver.job.guard.recommended is None


def test_a_loss_that_came_back_leaves_no_recommendation(make_driver: Any) -> None:
    driver = start(make_driver, loss_guard="recommend")
    alarm(driver, 290)
    driver.tell(m.LossSeen, attempt=1, alarm=None, ranks=(), step=450)
    driver.order("rollback")
    assert driver.job.attempt.resume.step == 300


def test_policy_does_not_go_back_again_what_an_operator_undid(job: Any) -> None:
    alarm(job, 330)
    job.up(step=301)
    job.order("rollback", "--undo")
    job.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((300, 400)))
    job.up(step=401)
    number = job.number
    alarm(job, 402)
    assert job.number == number
    assert job.job.incidents.degraded_by("signal") is not None, "it tells"
    job.order("rollback", "300")
    job.up(step=301)
    number = job.number
    alarm(job, 330)
    assert job.number == number + 1


@pytest.mark.parametrize("how", ["pause", "mode observe"])
def test_operators_hold_the_guard_back(job: Any, how: str) -> None:
    job.order(*how.split())
    alarm(job, 430)
    assert job.number == 1
    if how == "pause":
        job.order("resume")
        assert (job.number, job.job.attempt.resume.step) == (2, 400)


def test_a_spent_budget_lets_the_attempt_go_on(make_driver: Any) -> None:
    driver = make_driver(loss_guard="enforce", max_restarts=0)
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 400)))
    driver.tell(m.Progressed, after=450.0, attempt=1, step=450)
    alarm(driver, 430)
    assert (driver.job.outcome, driver.state, driver.number) == (None, "RUNNING", 1)
    assert driver.job.incidents.degraded_by("signal") is not None, "it tells"


def start(make_driver: Any, **spec: Any) -> Any:
    driver = make_driver(**spec)
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=checkpoints((100, 200, 300, 400)))
    driver.tell(m.Progressed, after=450.0, attempt=1, step=450)
    return driver


def save(driver: Any, step: int) -> None:
    driver.tell(m.Progressed, after=60.0, attempt=driver.number, step=step + 5)
    new = Checkpoint(path=f"/c/step-{step}", step=step, format="hf", complete=True, modified_at=driver.now - 1)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(new, *checkpoints((100, 200, 300, 400))))


def well(driver: Any) -> None:
    driver.tell(m.LossSeen, after=5.0, attempt=driver.number, alarm=None, ranks=(), step=505)


@pytest.mark.parametrize("how", ["reject", "resume", "nobody decides", "crash"])
def test_a_plan_that_nobody_approves_lets_the_attempt_go_on(make_driver: Any, how: str) -> None:
    driver = start(make_driver, loss_guard="enforce", mode="recommend")
    alarm(driver, 430)
    assert driver.job.incidents.approval_wanted
    save(driver, 500)
    if how == "crash":
        driver.crash("a", 1)
        assert driver.job.incidents.active.trigger == "exit"
        driver.order("approve")
        assert (driver.number, driver.job.attempt.resume.step) == (2, 500), "as after every other crash"
        return
    if how == "nobody decides":
        driver.tell(m.Progressed, after=24 * 3600.0, attempt=1, step=90_000)
        driver.fire("hold")
    else:
        driver.order(how)
    assert (driver.state, driver.number, driver.job.outcome) == ("RUNNING", 1, None)
    assert "hold" not in driver.job.core.timers
    alarm(driver, 430, "divergence")
    assert driver.state == "RUNNING", "it is not asked again"
    well(driver)
    assert driver.job.incidents.log.open_degradations() == []
    alarm(driver, 530)
    assert driver.job.incidents.approval_wanted, "another one is"


@pytest.mark.parametrize("step", [None, 50])
def test_where_no_way_leads_back_a_crash_is_recovered_as_always(make_driver: Any, step: int | None) -> None:
    driver = start(make_driver, loss_guard="enforce")
    alarm(driver, step)
    assert (driver.state, driver.job.incidents.held) == ("RUNNING", "")
    save(driver, 500)
    driver.crash("a", 1)
    assert (driver.number, driver.job.attempt.resume.step) == (2, 500)


def test_a_false_alarm_while_the_job_is_paused_makes_nothing_suspect(make_driver: Any) -> None:
    driver = start(make_driver, loss_guard="enforce")
    driver.order("pause")
    alarm(driver, 430)
    save(driver, 500)
    assert [one.step for one in driver.job.checkpoints.candidates() if one.suspect] == [500]
    well(driver)
    assert [one.step for one in driver.job.checkpoints.candidates() if one.suspect] == []


def test_undo_puts_back_suspects_that_a_restart_moved(make_driver: Any) -> None:
    driver = start(make_driver)
    alarm(driver, 450, "nan")
    save(driver, 500)
    driver.crash("a", 1)
    assert driver.job.attempt.resume.step == 400
    assert [one.path for one in prepared(driver)] == ["/c/step-500"]
    driver.up(step=401)
    driver.order("rollback", "--undo")
    assert prepared(driver) == [PutBack(path="/c/step-500")]


def test_a_loss_that_flaps_does_not_flood(make_driver: Any) -> None:
    driver = start(make_driver)
    for step in range(450, 500):
        alarm(driver, step)
        well(driver)
    assert driver.job.incidents.log.total == ALARMS_REPORTED


def test_spans_of_suspicion_are_bounded(make_driver: Any) -> None:
    driver = start(make_driver)
    for step in range(450, 550):
        alarm(driver, step, "nan")
        well(driver)
    assert len(driver.job.checkpoints._suspect_spans) <= SPANS_KEPT
    save(driver, 560)
    assert not driver.job.checkpoints.candidates()[0].suspect


def test_a_number_that_counts_epochs_is_no_step(make_driver: Any) -> None:
    """Epochs 3 and 4 were written after the first bad step, whatever their numbers are."""
    driver = make_driver(loss_guard="enforce")
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.Progressed, after=45000.0, attempt=1, step=44000)
    epochs = tuple(
        Checkpoint(
            path=f"/c/checkpoint_{n}.pt", step=n, format="torch_save", complete=True, modified_at=1000.0 + 11000 * n
        )
        for n in (4, 3, 2, 1)
    )
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=epochs)
    alarm(driver, 30000)
    assert (driver.number, driver.job.attempt.resume.path) == (2, "/c/checkpoint_2.pt")
    assert [one.path for one in prepared(driver)] == ["/c/checkpoint_3.pt", "/c/checkpoint_4.pt"]


def test_a_replay_comes_to_the_same(job: Any) -> None:
    alarm(job, 430)
    job.up(step=401)
    job.tell(m.Progressed, after=60.0, attempt=job.number, step=450)
    alarm(job, 430)
    job.fire("backoff")
    job.up(step=401)
    job.order("rollback", "100")
    again = Job(job._conclude, lambda found, situation: job.choose(found, situation))
    for event in job.journal:
        again.handle(event)
    assert again.view() == job.job.view()
    assert again.attempts.current.prepare == tuple(prepared(job))
    assert any(isinstance(one, SetAside) for one in prepared(job))


def test_an_alarm_about_the_loss_that_is_over_explains_no_later_failure(make_driver: Any) -> None:
    driver = make_driver(loss_guard="recommend")
    driver.join("a")
    driver.up(step=1)
    driver.tell(m.Progressed, after=450.0, attempt=1, step=450)

    def known() -> list[str]:
        return [one.rule for one in driver.job.incidents.log.findings_near(driver.now, 1)]

    alarm(driver, 440)
    driver.tell(m.NumbersSeen, attempt=1, bad=True, step=450, ranks=(0,))
    assert sorted(known()) == ["bad_numbers", "loss_guard"]
    driver.tell(m.LossSeen, after=20.0, attempt=1, alarm=None, ranks=(0,), step=460)
    assert known() == ["bad_numbers"]
    driver.tell(m.NumbersSeen, attempt=1, bad=False, step=470)
    assert known() == []
