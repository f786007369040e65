"""Hangs that can be proven are found in time; what may be an honest wait is told, and never called a hang."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from diagnosis.hang.watch import Cleared, Confirmed, HangWatch, Silent, Suspected, Wake
from diagnosis.signals import CollectiveEntry, Evidence, Finding, Frame, RankFlight, RankSample, RankStack
from diagnosis.taxonomy import FailureClass

# ----- honest waits: told within seconds, never confirmed -----


@pytest.mark.parametrize(
    ("place", "state"),
    [
        ("sleep", "S"),
        ("poll", "S"),
        ("program", "S"),
        ("future", "S"),
        ("request", "S"),
        ("busy", "R"),
        ("busy", "D"),
        ("checkpoint", "S"),
        ("evaluation", "R"),
        ("pickling", "R"),
        ("other library", "S"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_is_alive_elsewhere_is_no_proof(watched, place, state, alone):
    job = watched(ranks=4)
    job.hang(0, place, state=state)
    if not alone:
        job.places, job.waits_from = [place] * 4, [None] * 4
    job.run(300)
    assert not job.confirmed()
    (report,) = job.silences()
    assert not report.proven
    assert job.first(Silent) <= 6
    assert (report.ranks, report.waiting) == (((0,), 3) if alone else ((0, 1, 2, 3), 0))
    assert report.place in report.why
    job.go_on()
    job.run(5)
    assert job.count(Cleared) == 1


def test_the_report_says_who_is_where_and_who_waits(watched):
    job = watched(ranks=8)
    job.hang(0, "program")
    job.run(20)
    (report,) = job.silences()
    assert report.place == "upload (train.py:7)"
    assert report.places == ("upload train.py:7", "<module> train.py:7")
    assert (report.waiting, report.timeout_s, report.step) == (7, 1800.0, job.steps[0])


def test_a_place_is_what_all_stacks_of_a_silence_have_in_common(watched):
    job = watched()
    job.hang(0, "poll")
    job.changing.add(0)
    job.run(40)
    assert not job.confirmed()
    assert job.silences()[-1].place == "upload (train.py:7)"


def test_a_rank_of_which_nobody_has_heard_may_be_the_one_that_all_wait_for(watched):
    job = watched(ranks=3)
    job.world = 4
    job.hang(2, "collective")
    job.waits_from[2] = job.now
    job.run(120)
    assert not job.confirmed()


def test_a_thread_of_the_script_may_work_for_a_rank_that_waits_in_a_collective(watched):
    job = watched()
    job.hang(1, "recv")
    job.others[1] = 1
    job.run(120)
    assert not job.confirmed()


@pytest.mark.parametrize("what", ["cpu", "bytes", "network"])
def test_a_collective_that_moves_something_is_none_that_hangs(watched, what):
    job = watched()
    job.hang(1, "collective")
    job.waits_from[1] = job.now
    for _ in range(120):
        job.run(1)
        if what == "cpu":
            job.cpu_s[0] += 0.9
        elif what == "network":
            job.sending.add(0)
        else:
            job.io_bytes[0] += 1 << 20
    assert not job.confirmed()


def test_the_first_collective_of_all_takes_its_time(watched):
    """With thousands of ranks a communicator is set up for a minute or more."""
    job = watched(warm_s=0)
    job.hang(1, "collective")
    job.waits_from[1] = job.now
    job.run(120)
    assert not job.confirmed()
    assert job.silences()


def test_a_deadlock_beside_ranks_that_make_progress_is_left_alone(watched):
    job = watched()
    job.locked_from[1] = job.now
    job.run(60)
    assert not job.notices


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_lock_that_is_held_for_a_moment_is_no_deadlock(watched, seconds):
    job = watched()
    job.hang(1, "future")
    job.locked_from[1] = job.now
    job.run(seconds)
    job.go_on()
    job.run(5)
    assert not job.confirmed()


def test_what_ranks_write_themselves_is_no_finding_of_a_device(watched):
    job = watched()
    job.watch.note_findings([finding(1, source="output")])
    job.hang(1, "sleep")
    job.run(60)
    assert not job.confirmed()


# ----- devices after whose failure no step is expected -----


def failing(rank, **more):
    return msgspec.structs.replace(finding(rank, **more), outlook="fails")


@pytest.mark.parametrize(("step_s", "within_s"), [(0.1, 3.2), (2.0, 4.5), (20.0, 24.0)])
def test_one_slow_step_without_progress_is_enough(watched, step_s, within_s):
    job = watched(ranks=4, step_s=step_s, warm_s=15 * max(step_s, 2.0))
    job.watch.note_findings([failing(1)])
    job.hang(1, "busy", state="D")
    job.run(within_s)
    (report,) = job.confirmed()
    assert (report.kind, report.ranks, report.early) == ("device", (1,), True)
    assert job.first(Confirmed) <= within_s
    assert report.quiet_s >= step_s


@pytest.mark.parametrize("step_s", [0.1, 2.0, 20.0])
def test_ranks_that_train_on_are_not_restarted_for_it(watched, step_s):
    job = watched(ranks=4, step_s=step_s, warm_s=15 * max(step_s, 2.0))
    job.watch.note_findings([failing(1)])
    job.run(100)
    assert not job.confirmed()


def test_a_pause_long_after_it_is_none_of_its_devices(watched):
    """Its ranks have trained on: an evaluation that nothing tells of is not held against them for ever."""
    job = watched(ranks=4)
    job.watch.note_findings([failing(1)])
    job.run(60)
    job.hang(1, "busy")
    job.run(2.5)
    assert not job.confirmed()
    job.watch.note_findings([failing(1)])
    job.run(0.5)
    assert job.confirmed(), "told once more, it counts anew"


def test_a_finding_on_the_node_is_about_all_of_its_ranks(watched):
    job = watched(ranks=4)
    of_node = msgspec.structs.replace(failing(None), scope="node")
    job.watch.note_findings([of_node], ranks=[2, 3])
    job.hang(3, "busy", state="D")
    job.run(4)
    (report,) = job.confirmed()
    assert report.early
    assert set(report.ranks) == {2, 3}


@pytest.mark.parametrize(
    ("source", "rank", "hint", "warm_s"),
    [("output", 1, "", 30), ("kernel", None, "", 30), ("kernel", 1, "checkpoint", 30), ("kernel", 1, "", 1)],
    ids=["in a rank's output", "on a GPU that no rank uses", "while it saves", "before the pace is known"],
)
def test_what_the_usual_limits_are_for(watched, source, rank, hint, warm_s):
    job = watched(ranks=4, warm_s=warm_s)
    job.watch.note_findings([failing(rank, source=source)])
    job.hints = [hint] * 4
    job.hang(1, "sleep", state="D")
    job.run(3.5)
    assert not job.confirmed()


# ----- proofs: confirmed within seconds of the fault -----


def finding(rank, source="kernel", severity="fatal"):
    return Finding(
        rule="xid",
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        confidence=0.9,
        scope="gpu",
        severity=severity,
        evidence=Evidence(text="NVRM: Xid 79", source=source),
        rank=rank,
    )


def deadlock(job):
    job.hang(1, "future")
    job.locked_from[1] = job.now


def gone(job):
    job.hang(1, "sleep", state="Z")


def struck(job):
    job.watch.note_findings([finding(1)])
    job.hang(1, "busy", state="D")


def left(job):
    job.hang(1, "destroy")


def behind(job):
    job.hang(1, "collective")
    job.waits_from[1] = job.now
    job.steps[1] -= 1


def stuck_together(job):
    job.hang(1, "collective")
    job.waits_from[1] = job.now


def crossed_receives(job):
    job.hang(1, "recv")
    job.places = ["recv"] * len(job.places)
    job.waits_from = [None] * len(job.places)


@pytest.mark.parametrize(
    ("fault", "kind", "ranks"),
    [
        (deadlock, "deadlock", (1,)),
        (gone, "dead", (1,)),
        (struck, "device", (1,)),
        (left, "teardown", (1,)),
        (behind, "mismatch", (1,)),
        (stuck_together, "all_waiting", ()),
        (crossed_receives, "all_waiting", ()),
    ],
)
@pytest.mark.parametrize("warm_s", [3, 30])
def test_a_proven_hang_is_confirmed_within_seconds(watched, fault, kind, ranks, warm_s):
    job = watched(ranks=4, warm_s=warm_s)
    fault(job)
    job.run(9)
    (report,) = job.confirmed()
    assert (report.kind, report.ranks, report.proven) == (kind, ranks, True)
    assert job.first(Confirmed) <= 6.5


def test_different_collectives_are_told_by_the_flight_recorders(watched):
    job = watched()
    job.hang(1, "collective")
    job.waits_from[1] = job.now

    def entry(op):
        return CollectiveEntry(group="[0, 1]", seq=41, op=op, sizes="[[4]]", dtypes="['Float']", name="0")

    flights = [RankFlight(rank=rank, entries=(entry(op),)) for rank, op in ((0, "all_reduce"), (1, "broadcast"))]
    job.run(3)
    job.watch.note_flights(job.now, flights)
    job.run(5)
    (report,) = job.confirmed()
    assert report.kind == "mismatch"
    assert "broadcast" in report.why


def crossed_flights(*calls):
    """Each rank stands in the first collective of one of these groups of all ranks."""
    members = str(list(range(len(calls))))
    return [
        RankFlight(rank=rank, entries=(CollectiveEntry(group=members, seq=1, op="gloo:all_reduce", name=name),))
        for rank, name in enumerate(calls)
    ]


@pytest.mark.parametrize(("calls", "odd"), [("12", ()), ("121", (1,)), ("1110", (3,))])
@pytest.mark.parametrize("warm_s", [0, 30])
def test_ranks_that_wait_for_each_other_are_proven_at_a_groups_first_collective(watched, calls, odd, warm_s):
    job = watched(ranks=len(calls), warm_s=warm_s)
    job.hang(1, "collective")
    job.waits_from[1] = job.now
    job.run(4)
    job.watch.note_flights(job.now, crossed_flights(*calls))
    job.run(5)
    (report,) = job.confirmed()
    assert (report.kind, report.ranks, report.proven) == ("mismatch", odd, True)
    assert job.first(Confirmed) <= 6.5


@pytest.mark.parametrize("what", ["elsewhere", "threads", "late", "moved on"])
def test_who_may_come_yet_waits_for_nobody_for_ever(watched, what):
    job = watched(warm_s=0)
    job.hang(1, "sleep" if what == "elsewhere" else "collective")
    job.waits_from[1] = job.now
    job.others = [0, 1] if what == "threads" else [0, 0]
    job.run(4)
    job.watch.note_flights(job.now, crossed_flights(*("11" if what == "late" else "12")))
    if what == "moved on":  # just when its recorder was read
        job.steps[1], job.moved_at[1] = job.steps[1] + 1, job.now
    job.run(3)
    assert not any("wait for each other" in report.why for report in job.confirmed())


def test_what_still_runs_when_others_have_ended_well_is_at_its_end_where_no_output_tells_of_one(watched):
    job = watched(last_step=None)
    job.end(1)
    job.hang(0, "poll")
    job.waits_from = [None, None]
    job.run(60)
    assert job.silences()[-1].kind == "exit_hang"


@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.0, 4.0])
def test_slow_steps_stretch_the_time_before_it_is_looked(watched, step_s):
    job = watched(step_s=step_s, warm_s=60)
    assert not job.confirmed()
    assert not job.silences()
    stuck_together(job)
    job.run(40)
    assert job.first(Suspected) <= max(3.0, 5 * step_s)
    assert job.first(Confirmed) - job.first(Suspected) <= 3.5


def test_a_silent_script_that_hangs_in_its_first_seconds_is_found_as_fast(watched):
    job = watched(warm_s=0)
    job.hang(1, "future")
    job.run(3)
    job.locked_from[1] = job.now
    job.fault_at = job.now
    job.run(7)
    assert job.confirmed()[0].kind == "deadlock"
    assert job.first(Confirmed) <= 6.0


def test_a_pause_does_not_slow_down_what_comes_after_it(watched):
    job = watched()
    job.hang(0, "checkpoint")
    job.run(50)
    job.go_on()
    job.run(10)
    job.notices.clear()
    stuck_together(job)
    job.run(8)
    assert job.first(Suspected) <= 3.0
    assert job.confirmed()


# ----- stopped ranks -----


def test_five_seconds_of_sigstop_are_no_reason_to_act(watched):
    job = watched()
    job.hang(1, "sleep", state="T")
    job.run(5)
    job.go_on()
    job.run(10)
    assert job.count(Suspected) == 1
    assert not job.confirmed()
    assert not job.count(Wake)


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


def test_a_debugger_is_reported_and_left_alone(watched):
    job = watched()
    job.hang(1, "sleep", state="t")
    job.run(900)
    kinds = [notice.report.kind for _, notice in job.notices if isinstance(notice, Suspected)]
    assert "traced" in kinds
    assert not job.confirmed()
    assert not job.count(Wake)


# ----- the rest -----


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


def test_an_end_that_may_be_honest_is_told(watched):
    """Others have ended, rank 0 does something: it may upload what came of the whole run."""
    job = watched(last_step=100)
    job.end(1)
    job.hang(0, "poll")
    job.run(900)
    assert not job.confirmed()
    report = job.silences()[-1]
    assert (report.kind, report.ranks, report.proven) == ("exit_hang", (0,), False)


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
