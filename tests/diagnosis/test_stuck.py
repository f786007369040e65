"""Whom the others wait for, by stacks; and where everybody is, in words."""

from __future__ import annotations

import pytest

from diagnosis.incident import FlightReport
from diagnosis.signals import Frame, RankStack
from diagnosis.verdict import candidates


def of(rank, *frames):
    return RankStack(rank=rank, frames=tuple(Frame(function=name, file=file, line=3) for name, file in frames))


@pytest.mark.parametrize(
    ("place", "activity"),
    [("sleep", "sleep"), ("checkpoint", "checkpoint"), ("evaluation", "evaluation"), ("busy", "compute")],
)
def test_the_rank_that_is_not_in_the_collective(at, place, activity):
    ranks, doing, why = candidates.waited_for([at("collective", 0), at(place, 1), at("collective", 2)])
    assert (ranks, doing) == ((1,), activity)
    assert "rank 1 is " in why
    assert "ranks 0, 2 are waiting in all_reduce" in why


@pytest.mark.parametrize(
    "places", [[], ["sleep"], ["busy"] * 4, ["collective"] * 4, ["collective", "busy", "busy", "sleep"]]
)
def test_nobody_is_named_where_stacks_do_not_tell(at, places):
    assert candidates.waited_for([at(place, rank) for rank, place in enumerate(places)]) is None


def test_a_rank_that_comes_and_goes_holds_nobody_up(at):
    samples = [at("collective", rank, sample=sample) for rank in range(4) for sample in (0, 1)]
    assert candidates.waited_for([*samples, at("busy", 2, sample=2)]) is None
    assert candidates.waited_for([*samples, at("busy", 4, sample=0), at("busy", 4, sample=1)])[0] == (4,)


def test_one_rank_in_another_collective():
    torch = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    seen = [of(rank, ("all_reduce", torch), ("step", "train.py")) for rank in range(7)]
    seen.append(of(7, ("all_gather", torch), ("log", "train.py")))
    ranks, doing, why = candidates.waited_for(seen)
    assert (ranks, doing) == ((7,), "collective")
    assert "all_gather (log (train.py:3))" in why
    pipeline = [of(rank, ("recv", torch), ("forward", "pipe.py")) for rank in range(4)]
    assert candidates.waited_for(seen[:4] + [RankStack(rank=r.rank + 8, frames=r.frames) for r in pipeline]) is None


def test_a_process_that_is_no_known_rank_is_only_told_of(at):
    ranks, _, why = candidates.waited_for([at("collective", 0), at("collective", 1), at("sleep", -4312)])
    assert ranks == ()
    assert why.startswith("process 4312 is sleeping")


def test_waiting_for_the_gpu_is_waiting(at):
    sync = ("synchronize", "/env/lib/python3.11/site-packages/torch/cuda/__init__.py")
    seen = [of(0, sync, ("step", "train.py")), of(1, sync, ("step", "train.py")), at("sleep", 2)]
    assert candidates.waited_for(seen)[0] == (2,)
    assert "waiting for the GPU" in candidates.waited_for(seen)[2]


def test_thousands_of_ranks_in_a_few_lines_the_culprit_first(at):
    flight = FlightReport(
        kind="missing_rank", culprit_ranks=(77,), process_group="dp_1", collective_seq=41, why="", confidence=0.9
    )
    seen = [at("sleep" if rank == 77 else "evaluation" if rank == 5 else "collective", rank) for rank in range(4096)]
    lines = candidates.where_ranks_are(seen, flight, {77: "n9"})
    assert [line.rank for line in lines] == [77, 5, 0]
    assert lines[0].node == "n9"
    assert lines[0].text == "rank 77: sleep in sleep (train.py:7); it did not enter collective 41 of group dp_1"
    assert lines[2].text.startswith("ranks 0, 1, 2, 3, 4, 6 and 4088 more: collective in train (train.py:7)")
    assert candidates.waited_for(seen)[0] == (5,)
