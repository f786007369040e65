"""Operators' orders as the job takes them: what holds, what is answered, what is on record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport
from diagnosis.signals import ExitRecord
from supervisor import messages as m
from supervisor.cli import render
from supervisor.controller.journal import Decided, Entry, open_journal, read_history
from supervisor.controller.report import status_of, timeline_rows
from supervisor.job.job import Job
from supervisor.notes import text_of

DAYS = 100 * 24 * 3600.0


def said(driver: Any) -> dict[str, dict[str, Any]]:
    """What the operator is answered after the order itself: kind -> arguments."""
    first, *notes = [one for one in driver.actions if isinstance(one, m.Note)]
    assert first.kind == "command" or first.refused
    return {one.kind: one.arguments for one in (notes or [first])}


def notes(driver: Any) -> list[str]:
    return [text_of(one) for one in driver.actions if isinstance(one, m.Note)]


def let_pass(driver: Any, seconds: float) -> None:
    """All timers fire that are due until then."""
    until = driver.now + seconds
    while driver.job.timers and (first := min(driver.job.timers, key=driver.job.timers.__getitem__)):
        if driver.job.timers[first] > until:
            break
        driver.fire(first)
    driver.now = until


@pytest.mark.parametrize("mode", ["enforce", "recommend", "observe"])
def test_a_pause_holds_a_broken_job_until_the_operators_next_word(running: Any, mode: str) -> None:
    driver = running("a", mode=mode)
    driver.order("pause")
    driver.crash("a", 1)
    let_pass(driver, DAYS)
    assert (driver.state, driver.number, driver.job.outcome) == ("RECOVERING", 1, None)
    driver.order("resume")
    if mode == "enforce":
        assert (driver.state, driver.number) == ("STARTING", 2)
        return
    assert said(driver)["approval_awaited"]["plan"] == "restart"
    driver.order("approve")
    assert (driver.state, driver.number) == ("STARTING", 2)


def test_status_says_since_when_by_whom_and_why_it_is_paused(running: Any, capsys: Any) -> None:
    driver = running("a")
    assert driver.job.view().pause is None
    driver.tell(m.OperatorCommand, command="pause", by="ann@login", reason="new switch")
    answer = status_of(driver.job.view(), None)
    assert answer["pause"] == {"at": "1970-01-01T00:16:40.000Z", "by": "ann@login", "reason": "new switch"}
    render.status(answer)
    assert "by ann@login: new switch" in capsys.readouterr().out
    driver.order("resume")
    assert driver.job.view().pause is None
    driver.order("resume")
    assert "nothing_paused" in said(driver)


def test_the_first_attempt_too(make_driver: Any) -> None:
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.join("a")
    driver.order("restart")
    assert "1 of 2" in said(driver)["nothing_runs_yet"]["what"]
    driver.order("pause")
    driver.order("restart")
    assert "first_attempt_waits" in said(driver)
    driver.order("pause")
    driver.order("resume")
    driver.order("pause")
    driver.join("b")
    assert (driver.state, driver.job.waiting) == ("IDLE", "`unbroken resume`"), "the newest word holds"


def test_status_says_until_when_a_job_waits_and_who_cordoned(running: Any) -> None:
    driver = running("a", mode="recommend")
    driver.crash("a", 1)
    assert "1970-01-02 00:16 UTC" in driver.job.waiting
    assert driver.job.view().hold.ends_at is not None
    driver.order("reject")
    driver.order("approve")
    assert "an operator" in said(driver)["nothing_waits_for_approval"]["what"]
    driver.order("cordon", "a")
    (node,) = driver.job.view().nodes
    assert node.why == "an operator's command (by ann)"


def test_culprits_that_ranks_name_by_address_are_named_as_nodes(make_driver: Any) -> None:
    culprits = tuple(Culprit(node=name) for name in ("10.0.0.2", "host-a", "10.0.0.9"))
    driver = make_driver(nodes_min=2, nodes_max=2)
    driver.verdict = msgspec.structs.replace(driver.verdict, culprits=culprits)
    for number, name in enumerate("ab", 1):
        driver.tell(m.NodeJoined, node=name, host=f"host-{name}", address=f"10.0.0.{number}")
    driver.up()
    driver.crash("a", 1)
    (incident,) = driver.job.view().incidents
    assert [culprit.node for culprit in incident.verdict.culprits] == ["b", "a", "10.0.0.9"]


def test_a_journal_that_stood_still_is_told_afterwards(running: Any) -> None:
    driver = running("a")
    driver.tell(m.JournalStalled, seconds=20.4)
    assert driver.loud == {"journal_stalled": {"seconds": 20.4}}


def test_the_last_steps_before_a_stop_are_seen(running: Any) -> None:
    driver = running("a")
    driver.order("stop")
    record = ExitRecord(rank=0, local_rank=0, pid=1, code=None, signal=15, ended_at=driver.now, stopped_by_us=True)
    driver.tell(m.RankEnded, node="a", attempt=1, exit=record, step=16)
    assert driver.job.view().step == 16


@pytest.mark.parametrize("command", ["restart", "stop"])
def test_a_run_whose_ranks_have_ended_well_is_left_to_end(running: Any, command: str) -> None:
    driver = running("a")
    driver.finish()
    driver.order(command)
    assert "ends_by_itself" in said(driver)
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="torchrun ended with code 0")
    assert driver.job.outcome.state == "succeeded"


def test_one_gpu_is_given_back_and_the_others_stay_cordoned(running: Any) -> None:
    driver = running("a", "b", scheduler="slurm", scheduler_job="7")
    for gpu in ("0", "3"):
        driver.order("cordon", f"b/{gpu}")
    driver.order("uncordon", "b/7")
    assert said(driver)["gpu_not_cordoned"]["where"] == "b/0"
    driver.order("uncordon", "b/0")
    assert said(driver)["still_left_out"]["place"] == "b/3"
    assert [(cordon.node, cordon.gpu) for cordon in driver.job.nodes.cordons.all(driver.now)] == [("b", "3")]
    driver.order("uncordon", "b/3")
    assert said(driver) == {"undrain_asked": {"scheduler": "slurm", "node": "b"}}
    assert driver.job.nodes.cordons.all(driver.now) == ()
    driver.order("cordon", "b")
    driver.order("uncordon", "b/3")
    assert said(driver)["gpu_not_cordoned"]["where"] == "b"
    driver.order("uncordon", "b")
    driver.order("uncordon", "b/3")
    assert said(driver)["gpu_not_cordoned"]["where"] == ""


def test_a_requeued_job_is_not_called_failed(running: Any) -> None:
    driver = running("a", scheduler="slurm", scheduler_job="7", max_requeues=1)
    driver.tell(m.NodeLost, node="a", silent_s=5.0)
    let_pass(driver, 60.0)
    (order,) = driver.orders
    driver.tell(m.SchedulerAnswered, number=order.number, outcome="done")
    assert driver.job.outcome.state == "requeued"
    assert driver.job.view().state == "REQUEUED"


def stop_rank(driver: Any, seconds: float = 5.6) -> None:
    """What the watch tells of rank 1 in state T: a wish to continue it, and soon after that it stays stopped."""
    driver.tell(m.RankWakeWanted, attempt=driver.number, ranks=(1,), stopped_s=seconds)
    why = f"rank 1 is stopped (state T) for {seconds + 2} s and stays so after SIGCONT"
    report = HangReport(kind="stopped", ranks=(1,), quiet_s=seconds + 2, limit_s=5.6, phase="steady", why=why)
    driver.tell(m.HangConfirmed, after=2.0, attempt=driver.number, report=report)
    if driver.state == "DIAGNOSING":
        driver.fire("evidence")


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_a_stopped_rank_that_was_left_alone_is_continued_before_anything_else(running: Any, mode: str) -> None:
    """Nobody has sent it SIGCONT so far, and nobody says so; that may be all that it needs."""
    driver = running("a", mode=mode)
    if mode == "enforce":
        driver.order("pause")
    stop_rank(driver)
    assert driver.told["a"].wake == ()
    assert "SIGCONT" not in str(driver.job.view().incidents)
    if mode == "enforce":
        assert driver.job.waiting == "`unbroken resume`"
        driver.order("resume")
    else:
        driver.order("mode", "enforce")
        driver.fire("again")
        driver.fire("evidence")
    assert (driver.state, driver.number, driver.told["a"].wake) == ("RUNNING", 1, (1,))
    assert driver.job.view().lost_s >= 7.6, "it stood still all the same"
    driver.tell(m.HangCleared, attempt=1, quiet_s=9.0)
    assert notes(driver) == ["progress again after 9.0 s"], "it was a hang, which SIGCONT has ended"
    driver.tell(m.HangCleared, attempt=1, quiet_s=2.0)
    assert notes(driver) == ["progress again after 2.0 s: it was not a hang"]
    let_pass(driver, 700.0)
    assert (driver.state, driver.job.attempts.restarts) == ("RUNNING", 0)


@pytest.fixture
def timeline(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The timeline of what a driver was told and decided, as a controller journals it."""

    def rows(driver: Any) -> list[dict[str, Any]]:
        journal, _ = open_journal(tmp_path)
        again = Job(conclude=lambda _: driver.verdict)
        for event in driver.journal:
            seq = journal.write([Entry("event", event.at, m.encode(event))])
            actions = tuple(again.handle(event))
            journal.write([Entry("decided", event.at, m.encode(Decided(of=seq, actions=actions)))])
        journal.close()
        return timeline_rows(read_history(tmp_path))

    return rows


def test_an_order_stands_in_the_timeline_once_and_what_was_refused_says_so(running: Any, timeline: Any) -> None:
    driver = running("a")
    for command, argument in (("pause", ""), ("cordon", "b/0"), ("approve", "i-9")):
        driver.order(command, argument)
    rows = [row["text"] for row in timeline(driver)]
    for order in ("pause", "cordon b/0", "approve i-9"):
        assert [row for row in rows if order in row] == [f"ann: {order}"]
    assert "refused: nothing waits for approval" in rows


def test_what_happened_is_told_once(running: Any, timeline: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.ControllerStarted, epoch=2)
    report = HangReport(kind="silent", ranks=(0,), quiet_s=4.0, limit_s=3.0, phase="steady", why="rank 0 is quiet")
    driver.tell(m.HangSuspected, attempt=1, report=report)
    driver.tell(m.HangCleared, attempt=1, quiet_s=5.0)
    driver.crash("a", 1)
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.join("b")
    driver.tell(m.StopRequested, node="a", signal="SIGTERM")
    rows = [row["text"] for row in timeline(driver) if not row["detail"]]
    once = ("a joined", "is back", "epoch 2", "rank 0 is quiet", "progress again", "b is lost", "SIGTERM")
    assert {word: sum(word in row for row in rows) for word in once} == dict.fromkeys(once, 1)
    assert [row for row in rows if "killed by" in row and "rank 1 on a" in row] == ["rank 1 on a was killed by SIGKILL"]
    assert any("from host-a (10.0.0.1)" in row for row in rows)


def test_an_order_that_was_done_before_the_journal_had_it_is_told_on_the_terminal(running: Any) -> None:
    driver = running("a")
    driver.tell(m.OperatorCommand, command="pause", by="ann", unrecorded="No space left on device")
    assert driver.job.paused
    assert driver.loud == {"command_unrecorded": {"command": "pause", "why": "No space left on device"}}


# ----- what operators and modes allow policy to do -----


def test_what_an_operator_uncordons_is_not_cordoned_again_for_the_same_incident(slurm: Any) -> None:
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    assert driver.job.view().incidents[0].plan.cordons
    driver.order("uncordon", "b")
    driver.order("approve", "i-1")
    assert driver.job.view().cordons == ()
    assert driver.orders == []
    assert driver.job.attempt.members == ("a", "b")
    driver.up()
    driver.now += 1.0
    driver.crash("b", 2)
    driver.order("approve", "i-2")
    assert [cordon.node for cordon in driver.job.view().cordons] == ["b"], "the next incident is another matter"


def test_a_plan_that_has_changed_since_it_was_shown_is_not_approved(slurm: Any) -> None:
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    seen = driver.job.view().hold.approves
    assert seen.startswith("i-1@")
    assert seen in driver.job.waiting
    record = driver.job.incidents.active
    record.plan = msgspec.structs.replace(record.plan, why="late evidence", cordons=())
    now = driver.job.view().hold.approves
    assert now != seen
    for command in ("approve", "reject"):
        (refusal,) = [one for one in driver.order(command, seen) if isinstance(one, m.Note) and one.refused]
        assert (refusal.kind, refusal.arguments["now"]) == ("plan_changed", now)
        assert driver.job.view().hold.approves == now
    driver.order("approve", now)
    assert driver.job.view().hold is None
    assert driver.job.view().cordons == ()


def test_an_operators_cordon_is_never_lifted_by_policy(slurm: Any) -> None:
    driver = slurm()
    driver.order("cordon", "b", by="ann")
    driver.crash("b", 2)
    driver.up()
    [cordon] = driver.job.view().cordons
    assert (cordon.node, cordon.by) == ("b", "ann")


def test_the_breaker_bounds_drains_and_starts_anew_with_resume(slurm: Any) -> None:
    driver = slurm(spares=("c", "d", "e"))
    driver.verdict = msgspec.structs.replace(driver.verdict, culprits=tuple(Culprit(node=name) for name in "abc"))
    driver.crash("b", 2)
    assert driver.orders == []
    breaker = driver.job.view().breaker
    assert (breaker.used, breaker.limit, breaker.tripped) == (0, 2, True)
    driver.order("resume")
    assert driver.state == "STARTING"
    assert not driver.job.view().breaker.tripped


def test_observe_that_is_given_while_a_plan_waits_keeps_it_waiting(slurm: Any) -> None:
    driver = slurm()
    driver.order("pause")
    driver.crash("b", 2)
    driver.order("mode", "observe")
    driver.order("resume")
    assert driver.orders == []
    assert (driver.state, driver.number) == ("RECOVERING", 1)
    driver.order("approve")
    assert driver.state == "STARTING"
    assert [order.node for order in driver.orders] == ["nodeb"], "that was an operator's own word"


def test_nothing_is_prepared_while_paused(slurm: Any) -> None:
    driver = slurm()
    driver.crash("a", 0)
    driver.up(1)
    driver.crash("a", 0)
    assert "backoff" in driver.job.timers
    driver.order("pause")
    assert driver.told["a"].paused
    driver.fire("backoff")
    assert driver.state == "RECOVERING"
    driver.order("resume")
    assert driver.state == "STARTING"
    assert not driver.told["a"].paused


def test_an_approval_ends_with_the_attempt_that_the_journal_has_lost(slurm: Any) -> None:
    """It would keep the next attempt back, and no command could answer it."""
    driver = slurm(mode="recommend")
    driver.crash("b", 2)
    assert driver.job.view().hold is not None
    driver.tell(m.JournalDamaged, what="", lost=1, events=True, attempt=2)
    assert driver.job.view().hold is None
    driver.order("approve")
    assert [action.kind for action in driver.actions if isinstance(action, m.Note) and action.refused]
    driver.order("restart")
    assert driver.state == "STARTING"
