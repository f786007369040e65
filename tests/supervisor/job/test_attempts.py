"""Which nodes make an attempt, and how a job ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.signals import Evidence, Finding, NodeEvidence, RankSample
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.job.checkpoint_choice import FOLDERS_KEPT
from supervisor.job.view import startup_s
from supervisor.view import utc


def test_ranks_keep_their_order_and_nodes_may_say_theirs(make_driver: Any) -> None:
    driver = make_driver(nodes_min=3, nodes_max=3)
    for name, order in (("c", 2), ("a", 0), ("b", 1)):
        driver.join(name, index=order)
    driver.up()
    assert driver.told["a"].round is not None
    assert driver.told["a"].round.nodes == ("a", "b", "c")
    assert driver.told["a"].round.store_host == "a"


def test_fewer_nodes_are_enough_after_a_while(make_driver: Any) -> None:
    driver = make_driver(nodes_min=1, nodes_max=3, gather_s=30.0)
    driver.join("a", "b")
    assert driver.state == "IDLE"
    driver.fire("gather")
    assert driver.state == "STARTING"
    assert driver.job.attempt.members == ("a", "b")


def test_a_spare_that_comes_first_is_not_taken_for_an_ordinary_node(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2, gather_s=30.0)
    driver.join("s", spare=True)
    driver.join("a")
    assert driver.state == "IDLE"
    driver.join("b")
    assert driver.job.attempt.members == ("a", "b")
    late = make_driver(nodes_min=2, nodes_max=2, gather_s=30.0)
    late.join("s", spare=True)
    late.join("a")
    late.fire("gather")
    assert late.job.attempt.members == ("a", "s")


def test_a_member_that_is_cordoned_while_the_attempt_is_formed_is_replaced(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b")
    driver.join("s", spare=True)
    driver.tell(m.OperatorCommand, command="cordon", argument="b", by="ann")
    assert driver.job.attempt.members == ("a", "s")
    assert driver.told["b"].role == "excluded"


def test_how_long_a_job_is_held_is_set_and_shown(running: Any) -> None:
    driver = running("a", mode="recommend", hold_limit_s=600.0)
    driver.rank_ends()
    hold = driver.job.view().hold
    assert (hold.ends_at - hold.at).total_seconds() == 600.0
    assert "approve" in driver.job.waiting
    driver.fire("hold")
    assert (driver.state, driver.job.view().hold) == ("FAILED", None)


def test_a_limit_of_nothing_holds_for_ever(running: Any) -> None:
    driver = running("a", mode="recommend", hold_limit_s=0.0)
    driver.rank_ends()
    assert "hold" not in driver.job.timers
    assert driver.job.view().hold.ends_at is None


@pytest.mark.parametrize(
    ("ends_in", "said"),
    [
        (20.0, "stopped by SIGTERM on a, 20 s before the time limit of slurm"),
        (-0.5, "stopped by SIGTERM on a, at the time limit of slurm"),
        (7200.0, "stopped by SIGTERM on a"),
        (None, "stopped by SIGTERM on a"),
    ],
)
def test_a_stop_near_the_time_limit_names_it(slurm: Any, ends_in: float | None, said: str) -> None:
    begins = slurm().now
    driver = slurm(ends_at=None if ends_in is None else begins + ends_in)
    driver.now = begins
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    assert driver.job.outcome.line == said
    assert driver.job.view().ends_at == (None if ends_in is None else utc(begins + ends_in))


# ----- an attempt that is prepared, formed and finished by launchers -----


def test_a_preparation_that_fails_is_an_incident(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    driver.tell(m.PreparationFailed, node="a", attempt=1, error="no space left")
    assert driver.seen[0].trigger == "setup"
    assert driver.number == 2


def test_a_preparation_that_fails_during_the_back_off_is_not_forgotten(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.up(1)
    driver.rank_ends()
    assert "backoff" in driver.job.timers
    driver.tell(m.PreparationFailed, node="a", attempt=driver.number, error="no space left")
    assert len(driver.seen) == 2
    driver.fire("backoff")
    assert driver.seen[2].trigger == "setup"


def test_a_launcher_that_is_killed_before_it_starts_a_rank_is_tried_again_within_the_budget(make_driver: Any) -> None:
    driver = make_driver(max_restarts=3)
    driver.join("a")
    for _ in range(3):
        for _ in range(2):  # the first end may be that of the attempt before
            driver.tell(m.LauncherEnded, node="a", attempt=0, how="torchrun was killed by SIGKILL")
        if "backoff" in driver.job.timers:
            driver.fire("backoff")
    assert driver.state == "STARTING"
    for _ in range(2):
        driver.tell(m.LauncherEnded, node="a", attempt=0, how="torchrun was killed by SIGKILL")
    assert (driver.state, driver.job.outcome.exit_code) == ("FAILED", 91)


def test_a_run_that_has_trained_gets_a_second_try_when_torchrun_fails(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    for number in (1, 1):
        driver.tell(m.LauncherEnded, node="a", attempt=number, how="torchrun ended with code 1", code=1)
    assert (driver.state, driver.number) == ("RECOVERING", 3)
    driver.fire("backoff")
    for number in (1, 1):
        driver.tell(m.LauncherEnded, node="a", attempt=number, how="torchrun ended with code 1", code=1)
    assert (driver.state, driver.job.outcome.exit_code) == ("FAILED", 1)


def test_the_end_of_the_old_launcher_is_none_of_the_new_attempt(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert (driver.state, len(driver.seen)) == ("STARTING", 1)
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert len(driver.seen) == 2, "the second one was started for this attempt"


# ----- which nodes make the next attempt when some are silent just now -----


def test_a_silent_spare_is_the_last_choice(running: Any) -> None:
    driver = running("a", "b")
    driver.join("c", "d", "e", spare=True)
    driver.tell(m.NodeQuiet, node="c", silent_s=9.0)
    driver.tell(m.NodeQuiet, after=1.0, node="d", silent_s=3.1)
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.fire("evidence")
    assert driver.job.attempt.members == ("a", "e")
    driver.tell(m.NodeLost, node="e", silent_s=15.0)
    assert driver.job.attempt.members == ("a", "d"), "of the silent ones the one heard last"


def test_a_new_controller_prefers_the_nodes_that_have_come_to_it(running: Any) -> None:
    driver = running("a", "b")
    driver.join("c", "d", spare=True)
    driver.tell(m.ControllerStarted, epoch=2)
    driver.join("a", "b", "d")
    driver.tell(m.NodeLost, node="b", silent_s=20.0)
    driver.fire("evidence")
    assert driver.job.attempt.members == ("a", "d")
    assert driver.replayed().view() == driver.job.view()


def test_members_are_chosen_anew_only_when_a_node_has_changed(make_driver: Any) -> None:
    """With thousands of nodes most events change none of them."""
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b", "c")
    chosen = driver.job.attempts.next_members()
    driver.join("a")
    assert driver.job.attempts.next_members() is chosen
    driver.tell(m.NodeLost, node="a", silent_s=5.0)
    assert driver.job.attempts.next_members() == ("b", "c")
    driver.join("a")
    driver.order("cordon", "b")
    assert "b" not in driver.job.attempts.next_members()


def test_what_is_told_to_all_is_worked_out_only_for_those_that_it_can_concern(make_driver: Any) -> None:
    driver = make_driver(nodes_min=3, nodes_max=3, spares=1)
    driver.join("a", "b", "c")
    driver.join("d", spare=True)
    driver.up()
    driver.crash("a", 1)
    driver.up()
    driver.crash("a", 1)
    assert driver.state == "RECOVERING"
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    roles = {one.assignment.node: one.assignment.role for one in driver.actions if isinstance(one, m.Assign)}
    assert roles == {"b": "spare", "d": "member", "a": "member"}, "a shows that b is lost"


def test_who_spoke_for_the_job_before_is_told_that_it_does_not_any_more(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b")
    driver.up()
    driver.crash("a", 1)
    driver.up()
    driver.crash("a", 1)
    driver.order("cordon", "a")
    driver.order("cordon", "b")
    driver.tell(m.NodeLost, node="a", silent_s=5.0)
    assert driver.job.attempt.members == ()
    assert driver.told["b"].notices, "nobody else is there"
    driver.job.nodes.cordons.lift("a")
    driver.tell(m.NodeJoined, node="a", host="", address="")
    assert driver.job.attempt.members == ("a",)
    assert (bool(driver.told["a"].notices), driver.told["b"].notices) == (True, ())


# ----- what nodes are told -----


def test_a_new_epoch_says_everything_again(running: Any) -> None:
    driver = running("a")
    before = driver.told["a"]
    driver.tell(m.ControllerStarted, epoch=2)
    after = driver.told["a"]
    assert (after.epoch, after.round) == (2, before.round)
    assert after.version > before.version
    assert {a.timer for a in driver.actions if isinstance(a, m.SetTimer)} == set(driver.job.timers)


# ----- where checkpoints come is known to every node, to the next controller and after a requeue; what is s -----


def saved(step: int) -> Checkpoint:
    return Checkpoint(path=f"/c/save{step}", step=step, complete=True, format="folder", modified_at=step)


@pytest.fixture
def saving(running: Any) -> Callable[..., Any]:
    """Nodes a and b run, and a writes checkpoints to /c."""

    def start(**spec: Any) -> Any:
        driver = running("a", "b", **spec)
        driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved(20),), folders=("/c",))
        return driver

    return start


def test_every_node_is_told_where_one_of_them_writes(saving: Any) -> None:
    driver = saving()
    assert {name: told.checkpoint_folders for name, told in driver.told.items()} == {"a": ("/c",), "b": ("/c",)}
    driver.join("c")
    assert driver.told["c"].checkpoint_folders == ("/c",)
    driver.tell(m.CheckpointsSeen, node="b", checkpoints=(saved(20),))
    assert driver.job.checkpoints.folders == ("/c",), "who only looks has learned nothing of its own"


def test_after_a_requeue_new_nodes_look_there_before_it_is_told_what_is_known(saving: Any) -> None:
    driver = saving(scheduler="slurm", scheduler_job="7")
    driver.tell(m.JobRequeued, requeues=1)
    driver.tell(m.ControllerStarted, epoch=2)
    driver.tell(m.JobDefined, spec=m.JobSpec(name="test", nodes_min=2, nodes_max=2, requeues=1))
    driver.join("d", "e")
    assert driver.told["d"].checkpoint_folders == ("/c",)
    assert not [line.text for line in driver.job.story if line.text.startswith("attempt 2 starts")]
    for node in ("d", "e"):
        driver.tell(m.CheckpointsSeen, node=node, checkpoints=(saved(40), saved(20)))
    driver.up()
    told = [line.text for line in driver.job.story if line.text.startswith("attempt 2 starts")]
    assert told == ["attempt 2 starts on 2 nodes (d, e); newest good checkpoint: /c/save40"]


def test_checkpoints_that_are_gone_are_told_aloud(saving: Any) -> None:
    driver = saving()
    driver.crash("a", 1)
    for node in ("a", "b"):
        driver.tell(m.CheckpointsSeen, node=node, checkpoints=(), folders=("/c",))
    driver.up(step=1)
    (line,) = [line for line in driver.job.story if line.text.startswith("attempt 2 starts")]
    assert line.loud
    assert line.text.endswith(
        "no good checkpoint was found, but /c/save20 was there before: is its file system mounted?"
    )


def test_the_folders_written_to_last_are_kept(saving: Any) -> None:
    driver = saving()
    for number in range(3 * FOLDERS_KEPT):
        driver.tell(m.CheckpointsSeen, node="a", checkpoints=(), folders=(f"/{number}",))
        driver.tell(m.CheckpointsSeen, node="b", checkpoints=(), folders=("/c",))
    assert len(driver.job.checkpoints.folders) == FOLDERS_KEPT
    assert driver.job.checkpoints.folders[-2:] == (f"/{3 * FOLDERS_KEPT - 1}", "/c")


def test_a_checkpoint_after_a_bad_loss_is_suspect_by_whatever_clock(saving: Any) -> None:
    """The storage's clock is an hour behind: by its time the checkpoint of step 40 is older than the bad loss."""
    driver = saving()
    driver.tell(m.Progressed, attempt=1, step=30)
    finding = Finding(
        rule="loss_nan",
        failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
        confidence=0.9,
        scope="job",
        severity="error",
        at=driver.now,
        attempt=1,
        evidence=Evidence(source="stderr", text="loss is nan"),
    )
    driver.tell(m.FindingArrived, node="a", finding=finding, number=0)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved(40), saved(20)), folders=("/c",))
    driver.crash("a", 1)
    driver.up(step=21)
    assert driver.job.attempt.resume.path == "/c/save20"
    assert [one.path for one in driver.job.attempt.prepare] == ["/c/save40"]


# ----- how an attempt goes, whether it goes on where it should, and what incidents cost -----


def saves(driver: Any, *steps: int, complete: bool = True) -> None:
    seen = tuple(
        Checkpoint(path=f"/c/checkpoint-{step}", step=step, complete=complete, format="torch", modified_at=driver.now)
        for step in steps
    )
    driver.tell(m.CheckpointsSeen, after=10, node="a", checkpoints=seen)


def test_a_checkpoint_further_than_ever_is_progress_and_the_end_of_the_incident(running: Any) -> None:
    driver = running("a", step=None)
    driver.now += 100
    saves(driver, 20)
    driver.crash("a", 1)
    assert driver.job.incidents.budget.used == 1
    driver.up(step=None)
    moved_at = driver.now
    saves(driver, 20)
    assert driver.job.incidents.budget.used == 1, "written before, or no further"
    saves(driver, 30, complete=False)
    assert driver.job.incidents.budget.used == 1
    saves(driver, 30)
    assert driver.job.incidents.budget.used == 0
    (case,) = driver.job.incidents.log.records
    assert case.closed_why == "attempt 2 saved a checkpoint of step 30"
    assert case.lost_s(driver.now) == moved_at - case.failed_at, "training went on long before it saved"


def test_the_time_that_two_incidents_lasted_at_once_counts_once(running: Any) -> None:
    driver = running("a", "b")
    driver.now += 100
    failed_at = driver.now
    driver.crash("a", 1)
    driver.tell(m.NodeLost, after=50, node="b", silent_s=50.0)
    driver.join("b")
    for timer in ("evidence", "backoff"):
        if timer in driver.job.timers:
            driver.fire(timer)
    driver.up(step=1)
    back_at = driver.now
    driver.now += 10
    cases = driver.job.incidents.log.records
    assert len(cases) > 1
    assert all(case.closed_at is not None for case in cases)
    redo_s = sum(case.redone_s for case in cases)
    assert driver.job.incidents.log.lost_s(driver.now) == back_at - failed_at + redo_s
    assert sum(case.lost_s(driver.now) for case in cases) > back_at - failed_at + redo_s
    assert sum(driver.job.incidents.log.totals().badput_s.values()) == pytest.approx(back_at - failed_at + redo_s)


def test_a_failure_before_the_first_step_counts_once(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    started_at = driver.now
    driver.tell(m.LauncherEnded, after=50, node="a", attempt=1, how="code 1")
    for _ in range(3):
        for timer in ("evidence", "again"):
            if timer in driver.job.timers:
                driver.fire(timer)
    driver.up(step=1)
    (case,) = driver.job.incidents.log.records
    assert startup_s(driver.job, driver.now) == case.failed_at - started_at
    assert startup_s(driver.job, driver.now) + driver.job.incidents.log.lost_s(driver.now) == driver.now - started_at


# ----- the attempt after -----


def restarted(running: Any, first: int) -> Any:
    """The second attempt, which should go on at step 100, shows this step first."""
    driver = running("a")
    checkpoint = Checkpoint(path="/c/100", step=100, format="x", complete=True, modified_at=driver.now + 60)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.rank_ends(step=120)
    driver.up(first)
    return driver


def test_a_run_that_begins_again_is_held_once_its_second_step_shows_it(running: Any) -> None:
    driver = restarted(running, 0)
    assert driver.state == "RUNNING", "a progress bar that is being drawn says 0 too"
    driver.tell(m.Progressed, attempt=2, step=1)
    assert (driver.state, driver.told["a"].stage, driver.number) == ("RECOVERING", "form", 3)
    assert "operator" in driver.job.waiting


def test_a_bar_that_is_drawn_from_nothing_and_jumps_is_no_new_beginning(running: Any) -> None:
    driver = restarted(running, 0)
    driver.tell(m.Progressed, attempt=2, step=101)
    assert driver.state == "RUNNING"
    [incident] = driver.job.view().incidents
    assert incident.closed_at is not None


@pytest.mark.parametrize("step", [60, 99, 100, 101, 130])
def test_a_run_that_goes_on_somewhere_near_is_left_alone(running: Any, step: int) -> None:
    driver = restarted(running, step)
    driver.tell(m.Progressed, attempt=2, step=step + 1)
    assert driver.state == "RUNNING"


def test_a_checkpoint_that_counts_samples_is_no_measure_for_steps(running: Any) -> None:
    driver = running("a")
    checkpoint = Checkpoint(path="/c/64000", step=64000, format="x", complete=True, modified_at=driver.now + 60)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.rank_ends(step=510)
    driver.up(501)
    driver.tell(m.Progressed, attempt=2, step=502)
    assert driver.state == "RUNNING"


def test_what_an_earlier_job_left_behind_is_no_reason_to_hold(make_driver: Any) -> None:
    driver = make_driver()
    driver.join("a")
    old = Checkpoint(path="/c/5000", step=5000, format="x", complete=True, modified_at=driver.now - 86400)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(old,))
    driver.up(0)
    driver.rank_ends(step=7)
    driver.up(0)
    driver.tell(m.Progressed, attempt=2, step=1)
    assert driver.state == "RUNNING"


def test_an_incident_closes_even_if_no_step_is_ever_seen(running: Any) -> None:
    driver = running("a")
    driver.rank_ends()
    driver.tell(m.LauncherReady, node="a", attempt=2, offer=m.StoreOffer(host="a", port=1, local_world_size=2))
    driver.tell(m.WorkersStarted, node="a", attempt=2, ranks=(0, 1))
    driver.fire("stood")
    assert driver.job.view().incidents[0].closed_at is None
    driver.fire("settle")
    assert driver.job.view().incidents[0].closed_at is not None


def steps_until(driver: Any, first: int, last: int, pace: float) -> dict[int, float]:
    """Makes steps; the job hears of the last one as the controller tells it. Step -> when it was made."""
    made = {first: driver.now}
    driver.tell(m.Progressed, attempt=driver.number, step=first, step_at=driver.now)
    for step in range(first + 1, last + 1):
        driver.now += pace
        made[step] = driver.now
    driver.tell(m.Progressed, after=0.7, attempt=driver.number, step=last, step_at=made[last])
    return made


@pytest.mark.parametrize(("saved", "shown"), [(10, 11), (10, 15), (50, 51), (0, 1), (51, 53)])
@pytest.mark.parametrize("partial_s", [0.0, 3.0])
def test_what_is_lost_is_what_lies_between_the_same_step_made_twice(
    running: Any, saved: int, shown: int, partial_s: float
) -> None:
    """The next attempt resumes after `saved`, and the first step of it that is seen is `shown`."""
    driver = running("a", step=None)
    made = steps_until(driver, 1, 51, pace=2.0)
    driver.now = made[51] + partial_s
    driver.crash("a", 1)
    driver.now += 4.0
    driver.up(step=None)
    again_at = driver.now + (shown - saved) * 2.0
    driver.tell(m.Progressed, after=again_at + 1.0 - driver.now, attempt=2, step=shown, step_at=again_at)
    driver.tell(m.Progressed, after=2.0, attempt=2, step=shown + 1, step_at=again_at + 2.0)
    (case,) = driver.job.incidents.log.records
    assert case.step == 51
    would_have = made.get(shown, made[51] + 2.0 * (shown - 51))
    assert case.lost_s(driver.now) == pytest.approx(again_at - would_have, abs=0.01)


def test_the_last_words_of_a_rank_tell_its_step(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.Progressed, after=10, attempt=1, step=9)
    driver.rank_ends("b", 3)
    words = RankSample(rank=0, local_rank=0, pid=1, step=51, moved_age_s=0.5)
    driver.tell(m.EvidenceArrived, after=0.1, evidence=NodeEvidence(node="a", attempt=1, request=1, samples=(words,)))
    (case,) = driver.job.incidents.log.records
    assert case.verdict is not None
    assert case.step == 51
    assert driver.job.view().incidents[0].step == 51
