"""Comparing flight recorders."""

from __future__ import annotations

from diagnosis import blame
from diagnosis.signals import CollectiveEntry, RankFlight


def flight(rank, *calls):
    entries = tuple(CollectiveEntry(group="0", seq=seq, op=op, sizes=sizes) for seq, op, sizes in calls)
    return RankFlight(rank=rank, entries=entries)


def test_a_different_operation_is_a_mismatch_of_the_minority():
    same = [flight(rank, (4, "gloo:all_reduce", "[8]"), (5, "gloo:all_reduce", "[8]")) for rank in (0, 2)]
    odd, why = blame.mismatch([*same, flight(1, (4, "gloo:all_reduce", "[8]"), (5, "gloo:barrier", ""))])
    assert odd == (1,)
    assert "collective 5" in why
    assert "all_reduce [8] (rank 0, 2) against gloo:barrier (rank 1)" in why


def test_one_against_one_names_nobody():
    odd, why = blame.mismatch([flight(0, (5, "gloo:all_reduce", "[8]")), flight(1, (5, "gloo:all_reduce", "[4]"))])
    assert odd == ()
    assert "[8]" in why
    assert "[4]" in why


def test_gathers_may_differ_in_size():
    assert blame.mismatch([flight(0, (5, "nccl:all_to_all", "[8]")), flight(1, (5, "nccl:all_to_all", "[4]"))]) == (
        (),
        "",
    )


def test_laggards():
    flights = [flight(rank, (5 - (rank == 2), "gloo:all_reduce", "[8]")) for rank in range(4)]
    assert blame.laggards(flights) == (2,)
    assert blame.laggards([flight(0, (5, "x", "")), flight(1, (5, "x", ""))]) == ()
    assert blame.laggards([]) == ()


def test_stack_evidence_names_the_odd_ones_first(at):
    lines = blame.stack_evidence([at("collective", 0), at("collective", 1), at("sleep", 2)], {2: "n1"})
    assert lines[0].text.startswith("rank 2: sleep")
    assert (lines[0].rank, lines[0].node) == (2, "n1")
