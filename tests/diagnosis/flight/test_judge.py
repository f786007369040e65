"""Who held the others up: exact ranks, kinds, groups and numbers."""

from __future__ import annotations

import pytest

from diagnosis.flight import analyse, from_rank_flights, read_dump, timings
from diagnosis.flight.dumps import read_reduced as read_reduced
from diagnosis.signals import CollectiveEntry, Frame, RankFlight, RankStack
from tests.bench import flight as bench
from tests.bench.flight import case
from tests.bench.flight_jobs import FAULTS, Shape, break_it, build, dump, dumps, run


def judged(rings, **more):
    return analyse([one.dump() for one in rings.values()], **more)


def stack(rank, function, file="/job/train.py"):
    return RankStack(rank=rank, frames=(Frame(function=function, file=file, line=7),))


def test_nothing_is_wrong(world):
    assert judged(world()) is None
    assert analyse([]) is None


def test_a_rank_that_did_not_come(world):
    report = judged(world(waiting=(0, 1, 3)))
    assert (report.kind, report.culprit_ranks, report.collective_seq) == ("missing_rank", (2,), 5)
    assert report.process_group == "default_pg (ranks 0, 1, 2, 3)"
    assert report.waiting_ranks == (0, 1, 3)
    assert report.confidence >= 0.8
    assert "rank 2 did not come to collective 5" in report.why
    assert [one.rank for one in report.evidence] == [2, 0]
    assert "step (train.py:15)" in report.evidence[1].text


def test_stacks_are_shown_where_they_are_known(world):
    report = judged(world(waiting=(0, 1, 3)), stacks=[stack(2, "load_batch"), stack(0, "all_reduce")])
    assert "load_batch" in report.evidence[0].text
    assert report.evidence[0].source == "stacks"


def test_two_that_did_not_come(world):
    assert judged(world(waiting=(0, 2))).culprit_ranks == (1, 3)


def test_a_rank_without_a_dump_is_blamed_only_when_waited_for(world):
    rings = world(waiting=(0, 1, 3))
    del rings[2]
    report = judged(rings)
    assert (report.kind, report.culprit_ranks) == ("dead_rank", (2,))
    rings = world(waiting=(0, 3))
    del rings[2]
    report = judged(rings)
    assert report.culprit_ranks == (1,)  # the end of rank 2, if it is one, does not explain where rank 1 is
    assert report.confidence < 0.8
    rings = world(waiting=(0, 3), backend="gloo")
    del rings[2]
    assert judged(rings).culprit_ranks == (2,)  # there it does: calls of peers fail at once
    rings = world()
    del rings[2]
    assert judged(rings) is None


PIPELINE = {"0": ("default_pg", tuple(range(8)))} | {f"{1 + at}": (f"TP_{at}", (2 * at, 2 * at + 1)) for at in range(4)}


@pytest.mark.parametrize("dead", [0, 1, 2, 5])
def test_a_dead_rank_is_suspected_before_a_neighbour_that_lost_it_in_a_send(ring, dead):
    """The neighbour in the pipeline lost the dead one, and waits for nobody: gloo does not record where."""
    neighbour = (dead + 4) % 8
    rings = {rank: ring(rank, PIPELINE, "gloo") for rank in range(8) if rank != dead}
    for rank, one in rings.items():
        one.calls("all_reduce", group=f"{1 + rank // 2}", count=6)
        if rank // 2 == neighbour // 2 and rank != neighbour:
            one.waits(group=f"{1 + rank // 2}")
        elif rank // 2 != dead // 2 and rank != neighbour:
            one.waits(group="0")
    report = judged(rings)
    assert (report.kind, report.culprit_ranks) == ("dead_rank", (dead,))


def test_dumps_of_a_few_ranks_say_little(world):
    rings = world(waiting=(0,))
    report = judged({0: rings[0]})
    assert report.kind == "dead_rank"
    assert report.confidence < 0.5
    assert "1 of 4 ranks only" in report.why


@pytest.mark.parametrize(
    ("kind", "op", "more"),
    [
        ("collective_type_mismatch", "all_gather", {}),
        ("size_mismatch", "all_reduce", {"sizes": ((4, 9),)}),
        ("dtype_mismatch", "all_reduce", {"dtype": "Half"}),
    ],
)
def test_one_calls_something_else(world, kind, op, more):
    rings = world(waiting=(1, 2, 3))
    rings[0].waits(op, **more)
    report = judged(rings)
    assert (report.kind, report.culprit_ranks, report.collective_seq) == (kind, (0,), 5)
    assert "called" in report.evidence[0].text
    assert report.evidence[0].rank == 0


def test_a_mismatch_outranks_a_missing_dump(world):
    rings = world(waiting=(0, 3))
    rings[1].waits("broadcast")
    del rings[2]
    assert judged(rings).culprit_ranks == (1,)


def test_ranks_that_always_differ_honestly(ring):
    rings = {rank: ring(rank).calls("all_to_all", sizes=((rank, 4),), count=5) for rank in range(4)}
    for rank in (0, 1, 2):
        rings[rank].waits("all_to_all", sizes=((rank, 4),))
    assert judged(rings).culprit_ranks == (3,)
    uneven = {rank: ring(rank).calls("all_gather", sizes=((rank, 4),), count=5) for rank in range(4)}
    assert judged(uneven) is None


def test_a_pair_that_disagrees_is_settled_by_pairs_like_it(ring):
    groups = {str(n): (f"TP_{n}", (2 * n, 2 * n + 1)) for n in range(3)}
    rings = {rank: ring(rank, groups).calls("all_reduce", group=str(rank // 2), count=3) for rank in range(6)}
    for rank in range(6):
        rings[rank].waits("all_gather" if rank == 2 else "all_reduce", group=str(rank // 2))
    report = judged(rings)
    assert (report.culprit_ranks, report.kind) == ((2,), "collective_type_mismatch")
    assert "as all groups of its kind" in report.why


def test_a_pair_that_nobody_can_settle(ring):
    pair = {"0": ("default_pg", (0, 1))}
    report = judged({0: ring(0, pair).waits("broadcast"), 1: ring(1, pair).waits("all_reduce")})
    assert (report.kind, report.culprit_ranks) == ("collective_type_mismatch", ())


MESH = {
    "0": ("default_pg", (0, 1, 2, 3)),
    "1": ("TP_0", (0, 1)),
    "2": ("TP_1", (2, 3)),
    "3": ("DP_0", (0, 2)),
    "4": ("DP_1", (1, 3)),
}


def tensor(rank):
    return "1" if rank < 2 else "2"


def data(rank):
    return "3" if rank % 2 == 0 else "4"


def test_the_group_in_which_all_wait_is_not_the_guilty_one(ring):
    rings = {}
    for rank in range(4):
        one = rings[rank] = ring(rank, MESH)
        for _ in range(3):
            one.calls("all_reduce", group=tensor(rank)).calls("all_gather", group=data(rank))
    rings[1].waits(group="1")  # rank 0 is stuck before its tensor-parallel call
    rings[2].calls("all_reduce", group="2").waits("all_gather", group="3")
    rings[3].calls("all_reduce", group="2").waits("all_gather", group="4")
    report = judged(rings)
    assert (report.kind, report.culprit_ranks) == ("missing_rank", (0,))
    assert report.process_group == "TP_0 (ranks 0, 1)"
    assert report.collective_seq == 4


def test_a_gpu_that_does_not_complete_what_its_peers_completed(world):
    rings = world(done=5)
    rings[3].entries[-1]["state"] = "started"
    report = judged(rings)
    assert (report.kind, report.culprit_ranks, report.collective_seq) == ("stalled_rank", (3,), 5)


def test_a_gpu_that_does_not_begin(world):
    rings = world(waiting=(0, 1, 2))
    rings[3].waits(state="scheduled")
    report = judged(rings)
    assert (report.kind, report.culprit_ranks) == ("stalled_rank", (3,))


def test_all_are_there_and_nothing_completes(world):
    report = judged(world(waiting=range(4)))
    assert (report.kind, report.culprit_ranks) == ("stalled_rank", ())
    assert report.confidence < 0.5


def test_a_straggler_while_the_job_goes_on(ring):
    start = 1_795_000_000_000_000_000
    rings = {rank: ring(rank) for rank in range(4)}
    for step in range(30):
        for rank, one in rings.items():
            one.calls("all_reduce", at=start + step * 200_000_000 + (150_000_000 if rank == 3 else rank * 1_000_000))
    assert judged(rings) is None
    slow = timings.slowdowns(timings.of_dumps([one.dump() for one in rings.values()]))
    report = judged(rings, slow=slow)
    assert (report.kind, report.culprit_ranks, report.why) == ("straggler", (3,), slow[0].why)
    for rank in range(3):
        rings[rank].waits()
    assert judged(rings).kind == "missing_rank"
    assert judged(rings, slow=slow).kind == "straggler"  # they wait for it as ever
    rings[3].waits()
    assert judged(rings, slow=slow).kind == "stalled_rank"


@pytest.mark.parametrize("op", ["all_to_all", "alltoall_base", "allgather_into_tensor_coalesced"])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_tensors_that_may_have_other_sizes(ring, op, backend):
    for state in ("scheduled", "completed"):
        rings = [ring(rank, backend=backend).calls("all_reduce", count=3) for rank in range(4)]
        for one in rings:
            one.calls(op, sizes=((8 + one.rank,),), state=state)
        sent = [
            RankFlight(
                rank=one.rank,
                entries=(CollectiveEntry(group="[0, 1, 2, 3]", seq=4, op=f"{backend}:{op}", sizes=str(8 + one.rank)),),
            )
            for one in rings
        ]
        for report in (judged(dict(enumerate(rings))), analyse(from_rank_flights(sent))):
            assert report is None or (report.kind, report.culprit_ranks) == ("stalled_rank", ())


def test_gloo_without_its_groups(world):
    report = judged(world(waiting=(0, 1, 3), backend="gloo"))
    assert (report.kind, report.culprit_ranks) == ("missing_rank", (2,))


def test_gloo_records_no_receive_but_stacks_show_it(ring):
    rings = {
        rank: ring(rank, MESH, backend="gloo").calls("all_reduce", group=tensor(rank), count=3) for rank in range(4)
    }
    rings[0].waits(group="1")  # waits for rank 1, which receives from rank 3, which is in its data loader
    stacks = [
        stack(0, "all_reduce", "torch/distributed/x.py"),
        stack(1, "recv", "torch/distributed/x.py"),
        stack(3, "load_batch"),
    ]
    assert judged(rings).culprit_ranks == (1,)
    assert judged(rings).confidence < 0.6  # two others wait for nobody, either
    assert judged(rings, stacks=stacks).culprit_ranks == (3,)


def test_a_rank_that_is_not_told_is_found_by_its_groups(ring):
    rings = {rank: ring(rank, MESH).calls("all_reduce", group=tensor(rank)) for rank in range(4)}
    for rank in (0, 1, 3):
        rings[rank].calls("all_gather", group=data(rank)).waits()
    nameless = [
        read_dump(
            one.calls("all_gather", group=data(rank)).pickled() if rank == 2 else one.pickled(),
            None if rank == 2 else rank,
        )
        for rank, one in rings.items()
    ]
    assert analyse(nameless).culprit_ranks == (2,)


def test_a_rank_with_two_dumps_counts_once(world):
    rings = world(waiting=(0, 1, 3))
    report = analyse([*(one.dump() for one in rings.values()), rings[0].dump()])
    assert report.culprit_ranks == (2,)
    assert report.ranks_seen == 4
    assert report.problems == ("rank 0 has several dumps: the newest is used",)


def test_the_recorders_of_two_backends_are_one(ring):
    groups = {"0": ("default_pg", (0, 1)), "1": ("metrics", (0, 1))}
    rings = [ring(rank, groups, backend) for rank in (0, 1) for backend in ("nccl", "gloo")]
    for one in rings:
        one.calls("all_reduce", group="0" if one.backend == "nccl" else "1", count=3)
    rings[0].waits(group="0")
    rings[3].waits(group="1")
    report = analyse(one.dump() for one in rings)
    assert report.problems == ()
    assert report.ranks_seen == 2
    assert report.kind == "order_inversion"  # each waits for the other, in groups of different backends


def test_worlds_that_lie(ring):
    lies = {"0": ("default_pg", (0, 1, 9_999_999))}
    assert judged({rank: ring(rank, lies).waits() for rank in (0, 1)}).culprit_ranks == (9_999_999,)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_larger_jobs(fault):
    for seed in (70, 71):
        job = case(fault, seed)
        report = bench.judged([read_dump(data, rank) for rank, data in dumps(job).items()])
        assert (report.culprit_ranks if report else ()) == job.culprits, (fault, seed, report)


@pytest.mark.parametrize("fault", ["stuck", "dead", "GPU does not begin", "other collective", "other dtype"])
def test_what_agents_send_on_is_enough_for_most(fault):
    job = case(fault, 80)
    sent = [read_reduced(data, rank) for rank, data in dumps(job).items()]
    report = analyse(from_rank_flights(sent))
    assert (report.culprit_ranks if report else ()) == job.culprits


def test_active_entries_only():
    import pickle
    import random

    job = break_it(build(Shape(2, 2, 2)), "stuck", random.Random(3))
    run(job)
    active = [read_dump(pickle.dumps(dump(job, rank, active=True)), rank) for rank in job.programs]
    assert analyse(active).culprit_ranks == job.culprits
