"""Hangs are found in time, and pauses are not hangs."""

from __future__ import annotations

import random
import time

import pytest

from diagnosis.hang.watch import Cleared, Confirmed, HangWatch, Learned, Suspected, Wake
from diagnosis.signals import Frame, RankSample, RankStack


def test_a_sleeping_rank_is_suspected_and_confirmed_in_time(watched):
    job = watched()
    job.hang(1, "sleep")
    job.run(8)
    assert job.first(Suspected) <= 3.0
    assert job.first(Confirmed) - job.first(Suspected) <= 3.0
    (report,) = job.confirmed()
    assert (report.kind, report.ranks) == ("missing", (1,))
    assert "sleep" in report.why
    assert report.quiet_s >= report.limit_s


@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.0, 4.0])
def test_slow_steps_stretch_the_limit(watched, step_s):
    job = watched(step_s=step_s, warm_s=60)
    assert not job.confirmed()
    job.hang(1, "sleep")
    job.run(40)
    assert job.first(Suspected) <= max(3.0, 5 * step_s)
    assert job.first(Confirmed) - job.first(Suspected) <= 3.0
    assert job.confirmed()[0].ranks == (1,)


def test_a_busy_loop_in_one_line_is_confirmed_by_its_stack(watched):
    job = watched()
    job.hang(1, "busy", state="R")
    job.run(25)
    assert job.confirmed()[0].kind == "missing"


def test_honest_work_with_changing_stacks_is_not(watched):
    job = watched()
    job.hang(1, "busy", state="R")
    job.changing.add(1)
    job.run(120)
    assert not job.confirmed()
    job.go_on()
    job.run(5)
    assert job.count(Cleared) == 1


@pytest.mark.parametrize(("place", "seconds"), [("checkpoint", 60), ("evaluation", 120)])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_checkpoints_and_evaluations_are_pauses(watched, place, seconds, ranks):
    job = watched()
    job.hang(0, place)
    for rank in ranks:
        job.places[rank] = place
        job.waits_from[rank] = None
    job.run(seconds)
    assert not job.confirmed()
    job.go_on()
    job.run(5)
    learned = [notice for _, notice in job.notices if isinstance(notice, Learned)]
    assert learned[-1].longest_s[place] == pytest.approx(seconds, abs=2)


def test_a_pause_does_not_slow_down_what_comes_after_it(watched):
    job = watched()
    job.hang(0, "checkpoint")
    job.run(50)
    job.go_on()
    job.run(10)
    job.notices.clear()
    job.hang(1, "sleep")
    job.run(8)
    assert job.first(Suspected) <= 3.0
    assert job.confirmed()


def test_output_that_names_a_pause_excuses_it(watched):
    job = watched()
    job.hang(0, "sleep")
    job.hints[0] = "checkpoint"
    job.run(60)
    assert not job.confirmed()


def test_five_seconds_of_sigstop_are_no_reason_to_act(watched):
    job = watched()
    job.hang(1, "sleep", state="T")
    job.run(5)
    job.go_on()
    job.run(10)
    assert job.count(Suspected) == 1
    assert not job.confirmed()
    assert not job.count(Wake)
    assert not job.count(Learned)


def test_a_stopped_rank_is_woken_first_and_confirmed_when_that_does_not_help(watched):
    job = watched()
    job.hang(1, "sleep", state="T")
    job.run(12)
    assert job.first(Suspected) <= 3.0
    assert 5.5 <= job.first(Wake) <= 6.25
    assert job.first(Confirmed) >= job.first(Wake) + 1.5
    assert job.confirmed()[0].kind == "stopped"
    assert job.count(Wake) == 1


def test_a_woken_rank_that_goes_on_is_left_alone(watched):
    job = watched()
    job.hang(1, "sleep", state="T")
    job.run(6.25)
    job.go_on()
    job.run(10)
    assert job.count(Wake) == 1
    assert not job.confirmed()


def test_a_woken_rank_without_progress_is_confirmed(watched):
    job = watched()
    job.hang(1, "sleep", state="T")
    job.run(6.25)
    job.states[1], job.stopped_from[1] = "S", None
    job.run(15)
    assert job.confirmed()[0].kind == "missing"


def test_a_debugger_is_reported_and_left_alone(watched):
    job = watched()
    job.hang(1, "sleep", state="t")
    job.run(900)
    kinds = [notice.report.kind for _, notice in job.notices if isinstance(notice, Suspected)]
    assert "traced" in kinds
    assert not job.confirmed()
    assert not job.count(Wake)


def test_all_ranks_waiting_is_a_hang(watched):
    job = watched()
    job.hang(1, "collective")
    job.waits_from[1] = job.now
    job.run(8)
    assert job.confirmed()[0].kind == "all_waiting"


def test_a_skipped_collective_names_the_rank_that_is_behind(watched):
    job = watched(ranks=4)
    job.hang(2, "collective")
    job.waits_from[2] = job.now
    job.steps[2] -= 1
    job.run(8)
    report = job.confirmed()[0]
    assert (report.kind, report.ranks) == ("mismatch", (2,))


def test_slow_starts_are_not_hangs(watched):
    job = watched(warm_s=0)
    job.step_s = None
    job.places = ["sleep", "sleep"]
    job.run(400)
    assert not job.confirmed()
    job.hang(0, "sleep")
    job.run(100)
    assert not job.confirmed()


def test_irregular_steps_are_not_hangs(watched):
    job = watched()
    job.step_s = None
    random_ = random.Random(7)
    for _ in range(150):
        job.hang(1, "sleep")
        job.run(random_.choice([0.25, 0.25, 0.5, 0.75, 2.5]))
        job.go_on()
        job.run(0.25)
    assert not job.confirmed()


def test_a_rank_that_exits_0_early_is_named(watched):
    job = watched(last_step=10_000)
    job.end(1)
    job.hang(1, "sleep")
    job.run(10)
    report = job.confirmed()[0]
    assert (report.kind, report.ranks) == ("early_exit", (1,))


def test_an_end_that_hangs_is_recognized(watched):
    job = watched(last_step=100)
    assert job.steps[0] >= 100
    job.end(1)
    job.hang(1, "sleep")
    job.places[0] = "destroy"
    job.run(10)
    report = job.confirmed()[0]
    assert (report.kind, report.ranks) == ("exit_hang", (0,))


def test_a_rank_stuck_in_a_destructor_at_the_end_is_an_end_that_hangs(watched):
    job = watched(last_step=100)
    job.end(1)
    job.hang(0, "sleep")
    job.run(15)
    assert not job.confirmed()
    job.run(10)
    report = job.confirmed()[0]
    assert (report.kind, report.ranks) == ("exit_hang", (0,))


def test_rank_0_may_save_after_the_others_have_ended(watched):
    job = watched(last_step=100)
    job.end(1)
    job.hang(0, "checkpoint")
    job.run(60)
    assert not job.confirmed()


def test_a_dead_agent_is_no_hang(watched):
    job = watched()
    job.heard = False
    job.run(60)
    assert not job.notices
    job.heard = True
    job.run(10)
    assert not job.notices


def test_a_rank_that_ended_badly_is_not_the_watchs_business(watched):
    job = watched()
    job.end(1, code=1)
    job.hang(1, "sleep")
    job.run(30)
    assert not job.notices


def test_gil_held_with_a_stale_beacon_names_the_rank():
    """Its last counters may have been written in the middle of a collective that has completed since."""
    watch = HangWatch()
    watch.start(0.0, 1)
    sample = RankSample(rank=1, local_rank=1, pid=3, step=9, groups={"0": (5, 4)}, waiting_s=4.0, beat_age_s=4.0)
    watch.observe(0.0, [sample])
    assert not watch._ranks[1].waits


@pytest.mark.slow
def test_4000_nodes_cost_little():
    watch = HangWatch()
    watch.start(0.0, 1)
    beats = [
        [RankSample(rank=node * 8 + i, local_rank=i, pid=7, step=5, groups={"0": (9, 9)}) for i in range(8)]
        for node in range(4000)
    ]
    for beat in beats:
        watch.observe(1.0, beat)
    before = time.process_time()
    for beat in beats:
        watch.observe(2.0, beat)
    observed = time.process_time() - before
    before = time.process_time()
    for k in range(10):
        watch.tick(2.0 + k / 10)
    assert observed < 1.0
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("step_s", [8, 20, 45])
def test_a_long_step_of_queued_collectives_is_no_hang(step_s: int) -> None:
    """NCCL: the host queues the whole step and waits for a number; the counters run ahead while the GPUs compute."""
    watch = HangWatch()
    watch.start(0.0, 1)
    notices: list[object] = []
    queued = completed = 0
    moved = 0.0
    for now in range(1, 400):
        step, inside = divmod(now - 10, step_s)
        before = queued, completed
        if now < 10:
            moved = float(now)  # a chatty start
        else:
            queued = 10 * (step + 1)
            completed = 10 * step + (5 if inside == step_s - 1 else 0)
        if (queued, completed) != before:
            moved = float(now)
        frames = tuple(Frame(function=name, file="train.py", line=88) for name in ("train", "<module>"))
        for rank in range(4):
            sample = RankSample(
                rank=rank,
                local_rank=rank,
                pid=100 + rank,
                state="S",
                step=step if now >= 10 and step > 0 else None,
                groups={"0": (queued, completed)} if now >= 10 else {},
                moved_age_s=now - moved,
                waiting_s=now - moved if queued > completed else None,
                beat_age_s=0.3,
            )
            watch.observe(now, [sample])
        if watch.suspected:
            watch.note_stacks(now, [RankStack(rank=rank, frames=frames, sample=i) for rank in range(4) for i in (0, 1)])
        for quarter in range(4):
            notices += watch.tick(now + quarter / 4)
    assert not [notice for notice in notices if isinstance(notice, Confirmed)]


@pytest.mark.parametrize(("bytes_a_second", "hangs"), [(0, True), (10**9, False)])
def test_a_load_is_hung_when_it_moves_no_bytes(bytes_a_second: int, hangs: bool) -> None:
    watch = HangWatch()
    watch.start(0.0, 1)
    frames = tuple(Frame(function=name, file="train.py", line=9) for name in ("read", "load_checkpoint", "<module>"))
    confirmed = False
    for now in range(1, 900):
        sample = RankSample(rank=0, local_rank=0, pid=7, state="S", moved_age_s=now, io_bytes=now * bytes_a_second)
        watch.observe(now, [sample])
        if watch.suspected:
            watch.note_stacks(now, [RankStack(rank=0, frames=frames, sample=i) for i in (0, 1)])
        confirmed = confirmed or any(isinstance(notice, Confirmed) for notice in watch.tick(now))
    assert confirmed is hangs
