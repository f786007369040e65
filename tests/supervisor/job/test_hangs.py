"""What the hang watch tells the job: proofs are acted on, silence is told and waited out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diagnosis.incident import HangReport, Verdict
from diagnosis.signals import NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from recovery.policy import AUTOMATIC_LEAST_S
from supervisor import messages as m
from supervisor.controller.metrics import job_samples

HANG = Verdict(failure_class=FailureClass.SILENT_HANG, culprits=(), confidence=0.3, why="stands", action="restart")
PLACE = ("upload /home/ann/train.py:88", "main /home/ann/train.py:120")


def report(quiet_s: float = 5.0, *, kind: Any = "missing", proven: bool = False, **more: Any) -> HangReport:
    usual = {"ranks": (0,), "limit_s": 2.0, "phase": "steady", "why": "rank 0 has been in upload", "waiting": 3}
    usual |= {"place": "upload (train.py:88)", "places": PLACE, "step": 40}
    return HangReport(kind=kind, proven=proven, quiet_s=quiet_s, **{**usual, **more})


def silent(driver: Any, quiet_s: float = 5.0, **more: Any) -> None:
    driver.tell(m.SilenceSeen, after=quiet_s, attempt=driver.number, report=report(quiet_s, **more))


def wait(driver: Any, seconds: float) -> None:
    """Time passes, and timers fire, until a restart; of requests for evidence none is answered."""
    until, number = driver.now + seconds, driver.number
    while due := [(at, name) for name, at in driver.job.timers.items() if at <= until]:
        if driver.number != number:
            return
        at, name = min(due)
        driver.now = max(driver.now, at)
        driver.tell(m.TimerFired, timer=name)
    driver.now = until


def again(driver: Any, **more: Any) -> float:
    """The silence comes; seconds until a restart is decided on."""
    if driver.state == "STARTING":
        driver.up(30)
    began, number = driver.now, driver.number
    silent(driver, **more)
    wait(driver, 40 * AUTOMATIC_LEAST_S)
    assert driver.number == number + 1
    case = driver.job.incidents.log.records[-1]
    return float(case.opened_at - began)


def test_a_silence_is_told_and_shown_and_nothing_is_done(running: Any) -> None:
    driver = running("a")
    silent(driver)
    assert "upload (train.py:88)" in driver.loud["silence"]["what"]
    wait(driver, 300)
    view = driver.job.view(driver.now)
    assert (view.state, view.restarts, view.incidents_total) == ("RUNNING", 0, 0)
    assert (view.silence.ranks, view.silence.waiting, view.silence.place) == ((0,), 3, "upload (train.py:88)")
    assert (view.now - view.silence.since).total_seconds() == pytest.approx(305)
    assert any(
        one.name == "unbroken_job_silence_start_timestamp_seconds" for one in job_samples(driver.job, driver.now)
    )
    driver.tell(m.HangCleared, attempt=1, quiet_s=305.0)
    assert driver.job.view().silence is None
    assert "silence" not in driver.job.timers
    assert driver.job.view().lost_s == 0


@pytest.mark.parametrize("why", ["end", "observe", "recommend", "paused"])
def test_no_restart_is_announced_where_there_will_be_none(running: Any, why: str) -> None:
    driver = running("a")
    if why in ("observe", "recommend"):
        driver.order("mode", why)
    elif why == "paused":
        driver.order("pause")
    silent(driver, kind="exit_hang" if why == "end" else "missing")
    assert "Nothing is done about it" in driver.loud["silence"]["how"]


@pytest.mark.parametrize("set_to", [{"patience_off": True}, {"patience_s": 90.0}, {"patience_s": 1.0}])
def test_what_is_set_holds(running: Any, set_to: dict[str, Any]) -> None:
    driver = running("a", **set_to)
    driver.verdict = HANG
    silent(driver)
    wait(driver, 50)
    assert driver.number == 1
    wait(driver, 60)
    assert driver.number == (1 if "patience_off" in set_to else 2)
    if "patience_off" in set_to:
        wait(driver, 10_000)
        assert (driver.number, driver.job.incidents.log.total) == (1, 0)


def test_steps_that_would_be_lost_are_waited_for(running: Any) -> None:
    driver = running("a")
    wait(driver, 3000)
    silent(driver)
    assert driver.job.hangs.silence_limit.seconds == pytest.approx(3000)
    good = Checkpoint(path="/c/1", step=1, format="torch_save", complete=True, modified_at=driver.now - 1000)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(good,))
    assert driver.job.hangs.silence_limit.seconds == pytest.approx(995)


def test_a_restart_that_did_not_help_is_evidence(running: Any) -> None:
    driver = running("a")
    driver.verdict = HANG
    first, second = again(driver), again(driver)
    assert first == pytest.approx(AUTOMATIC_LEAST_S)
    assert second == pytest.approx(4 * AUTOMATIC_LEAST_S)
    driver.up(30)
    silent(driver)
    wait(driver, 100 * AUTOMATIC_LEAST_S)
    view = driver.job.view(driver.now)
    assert (driver.number, view.restarts, view.state) == (3, 2, "HUNG")
    assert view.hung is not None
    assert not view.hung.proven
    assert view.lost_s > 50 * AUTOMATIC_LEAST_S
    driver.tell(m.HangCleared, attempt=3, quiet_s=driver.now - 1000)
    view = driver.job.view()
    assert (view.state, view.hung) == ("RUNNING", None)
    assert view.incidents[-1].closed_at is not None
    assert view.incidents[-1].lost_s == 0, "it was an honest wait"


@pytest.mark.parametrize("other", [{"step": 80}, {"places": ("save /home/ann/train.py:20",)}])
def test_another_place_or_step_is_another_matter(running: Any, other: dict[str, Any]) -> None:
    driver = running("a")
    driver.verdict = HANG
    assert [again(driver), again(driver, **other)] == [AUTOMATIC_LEAST_S, AUTOMATIC_LEAST_S]


def test_what_turned_out_honest_is_remembered_over_attempts_and_requeues(running: Any) -> None:
    driver = running("a", scheduler="slurm")
    driver.verdict = HANG
    silent(driver)
    driver.tell(m.HangCleared, after=400, attempt=1, quiet_s=405.0)
    driver.crash()
    driver.up(2)
    silent(driver, places=("poll /home/ann/train.py:90", PLACE[1]))
    assert not driver.loud, "it is known to take as long"
    assert driver.job.hangs.silence_limit.seconds == pytest.approx(3 * 405.0)
    assert driver.replayed().hangs.silence_limit.seconds == driver.job.hangs.silence_limit.seconds
    driver.tell(m.JobRequeued, requeues=1)
    driver.tell(m.ControllerStarted, epoch=2)
    driver.tell(m.JobDefined, spec=driver.job.spec)
    driver.join("z")
    driver.up(2)
    silent(driver)
    assert driver.job.hangs.silence_limit.seconds == pytest.approx(3 * 405.0)


def proven(driver: Any, **more: Any) -> None:
    if driver.state == "STARTING":
        driver.up(40)
    usual = {"kind": "deadlock", "step": None, "waiting": 0}
    told = report(4.0, proven=True, **{**usual, **more})
    driver.tell(m.HangConfirmed, after=10, attempt=driver.number, report=told)
    driver.fire("evidence")
    if "backoff" in driver.job.timers:
        driver.fire("backoff")


@pytest.mark.parametrize("known", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("kind", ["deadlock", "all_waiting", "teardown", "dead"])
def test_a_proof_that_restarts_did_not_help_is_left_to_a_person(running: Any, kind: str, known: bool) -> None:
    driver = running("a", step=40 if known else None)
    driver.verdict = HANG
    for number, step in (2, 39), (3, 40):
        proven(driver, kind=kind)
        assert driver.number == number
        driver.up(step if known else None)
    proven(driver, kind=kind)
    wait(driver, 5000)
    view = driver.job.view(driver.now)
    assert (driver.number, view.restarts, view.state) == (3, 2, "HUNG")
    assert (view.hung.proven, view.incidents[-1].closed_at, view.incidents[-1].plan.until) == (True, None, "progress")
    assert driver.replayed().view(driver.now).state == "HUNG"
    driver.order("mode", "enforce")
    wait(driver, 100)
    assert (driver.number, driver.job.view().state) == (3, "HUNG"), "that is no word about this hang"
    driver.order("restart")
    assert driver.number == 4


@pytest.mark.parametrize("other", [{"step": 80}, {"places": ("save /home/ann/train.py:20",)}, {"kind": "all_waiting"}])
def test_a_proof_at_another_place_or_step_or_of_another_kind_is_another_matter(running: Any, other: Any) -> None:
    driver = running("a", step=40)
    driver.verdict = HANG
    for more in ({}, {}, other):
        proven(driver, **more)
    assert driver.number == 4


def test_a_mismatch_again_without_progress_ends_the_run(running: Any) -> None:
    driver = running("a", step=40)
    driver.verdict = msgspec.structs.replace(HANG, failure_class=FailureClass.COLLECTIVE_MISMATCH, confidence=0.9)
    for _ in range(2):
        proven(driver, kind="mismatch")
    assert driver.job.outcome.exit_code == 90


def test_observe_shows_a_hang_as_what_it_is(running: Any) -> None:
    driver = running("a", mode="observe")
    driver.verdict = HANG
    driver.tell(m.HangConfirmed, after=60, attempt=1, report=report(4.0, kind="deadlock", proven=True))
    driver.fire("evidence")
    wait(driver, 940)
    view = driver.job.view(driver.now)
    assert (view.state, view.restarts) == ("HUNG", 0)
    assert view.hung.proven
    assert view.lost_s == pytest.approx(950, abs=10)
    assert view.ettr == pytest.approx(0.06, abs=0.02)
    samples = {(one.name, one.labels): one.value for one in job_samples(driver.job, driver.now)}
    assert samples["unbroken_job_state", ("HUNG",)] == 1
    assert samples["unbroken_job_state", ("RUNNING",)] == 0
    assert samples["unbroken_job_hung_start_timestamp_seconds", ()] == pytest.approx(1056)
    assert samples["unbroken_job_open_incidents", ("silent_hang",)] == 1
    lost = view.lost_s
    driver.tell(m.HangCleared, attempt=1, quiet_s=950.0)
    view = driver.job.view(driver.now + 100)
    assert (view.state, view.lost_s) == ("RUNNING", pytest.approx(lost, abs=10)), "a proven hang cost its time"


def test_enforce_acts_on_a_hang_that_was_only_watched(running: Any) -> None:
    driver = running("a", mode="observe")
    driver.verdict = HANG
    driver.tell(m.HangConfirmed, attempt=1, report=report(4.0, kind="deadlock", proven=True))
    driver.fire("evidence")
    assert driver.job.view().state == "HUNG"
    driver.order("mode", "enforce")
    driver.fire("again")
    wait(driver, 10)
    assert (driver.state, driver.number, driver.job.incidents.log.total) == ("STARTING", 2, 1)


@pytest.mark.parametrize("how", ["recommend", "paused"])
def test_a_hang_that_waits_for_somebodys_word_is_shown_too(running: Any, how: str) -> None:
    driver = running("a", mode="recommend" if how == "recommend" else "enforce")
    driver.verdict = HANG
    if how == "paused":
        driver.order("pause")
    driver.tell(m.HangConfirmed, attempt=1, report=report(4.0, kind="deadlock", proven=True))
    driver.fire("evidence")
    wait(driver, 100)
    view = driver.job.view(driver.now)
    assert view.hung is not None
    assert view.lost_s > 100
    driver.tell(m.HangCleared, attempt=1, quiet_s=104.0)
    assert driver.job.view().hung is None
    assert driver.state == "RUNNING"


def test_a_hang_that_was_left_alone_and_lasts_is_acted_on(running: Any) -> None:
    driver = running("a")
    driver.verdict = Verdict(
        failure_class=FailureClass.NONE, culprits=(), confidence=0.9, why="all is well", action="none"
    )
    driver.tell(m.HangConfirmed, attempt=1, report=report(600.0, kind="all_waiting", proven=True))
    driver.tell(m.EvidenceArrived, evidence=NodeEvidence(node="a", attempt=1, request=1))
    assert driver.state == "RUNNING"
    driver.fire("again")
    driver.fire("evidence")
    assert (driver.state, driver.number) == ("STARTING", 2)
