"""Ranks that wait for each other, in the words that agents send while a job hangs."""

from __future__ import annotations

import pytest

from diagnosis.flight.dumps import with_members
from diagnosis.flight.waits import find_ring
from diagnosis.signals import CollectiveEntry, RankFlight

ALL = "[0, 1, 2]"
Call = tuple[str, str, int]


def flight(rank: int, *open_calls: Call, done: tuple[Call, ...] = (("0", ALL, 60),)) -> RankFlight:
    """Calls: name of the group, its members, number."""
    entries = [
        CollectiveEntry(group=members, name=name, seq=seq, op="gloo:all_reduce", completed=call in done)
        for call in (*done, *open_calls)
        for name, members, seq in [call]
    ]
    return RankFlight(rank=rank, entries=tuple(entries))


@pytest.mark.parametrize(
    ("calls", "ranks", "odd"),
    [
        ([("1", "[0, 1]", 1), ("2", "[0, 1]", 1)], (0, 1), ()),
        ([("1", ALL, 1), ("2", ALL, 1), ("1", ALL, 1)], (0, 1, 2), (1,)),
        ([("1", ALL, 1), ("1", ALL, 1), ("0", ALL, 61)], (0, 1, 2), (2,)),
        ([("1", "[0, 1]", 1), ("2", "[1, 2]", 1), ("3", "[0, 2]", 1)], (0, 1, 2), ()),
        # It skipped a collective of a few, for which all others wait in one of all.
        ([("0", "[0-5:1]", 61)] * 2 + [("1", "[2-5:1]", 1)] * 3 + [("0", "[0-5:1]", 61)], (2, 3, 4, 5), (5,)),
    ],
)
def test_ranks_that_wait_for_each_other_never_end(calls, ranks, odd) -> None:
    flights = [flight(rank, call) for rank, call in enumerate(calls)]
    found = find_ring(flights, range(len(calls)))
    assert set(ranks) <= set(found.ranks)
    assert found.odd == odd


@pytest.mark.parametrize(
    "flights",
    [
        pytest.param([flight(0, ("1", "[0, 1]", 1)), flight(1, ("1", "[0, 1]", 1))], id="all have come"),
        pytest.param(
            [flight(0, ("1", "[0, 1]", 1)), flight(1, ("2", "[1, 2]", 1)), flight(2, ("2", "[1, 2]", 1))],
            id="one comes late: its own group connects for the first time",
        ),
        pytest.param([flight(0, ("1", "", 1)), flight(1, ("2", "", 1))], id="nobody tells who is in the groups"),
        pytest.param(
            [flight(0, ("1", "[0, 1]", 1), ("2", "[0, 1]", 1)), flight(1, ("2", "[0, 1]", 1), ("1", "[0, 1]", 1))],
            id="in another order, but none waits in the first",
        ),
        pytest.param(
            [flight(0, ("1", "[0, 1]", 1)), flight(1, ("3", "[1, 2]", 1)), flight(2, ("3", "[1, 2]", 1))], id="a chain"
        ),
        pytest.param([flight(0, ("1", "[0, 1]", 1)), RankFlight(rank=1, error="no answer")], id="one is not known"),
        pytest.param([], id="no recorder"),
    ],
)
def test_a_wait_that_may_end_is_no_proof(flights) -> None:
    assert find_ring(flights, [0, 1, 2]) is None


def test_a_rank_that_does_something_else_may_come_yet() -> None:
    flights = [flight(0, ("1", "[0, 1]", 1)), flight(1, ("2", "[0, 1]", 1))]
    assert find_ring(flights, [0]) is None


def test_a_receive_is_for_one_of_those_that_all_wait_for_it() -> None:
    flights = [flight(0, ("1", ALL, 1)), flight(1, ("1", ALL, 1)), flight(2)]
    found = find_ring(flights, [0, 1, 2], [2])
    assert (found.ranks, found.odd) == ((0, 1, 2), (2,))
    assert find_ring(flights, [0, 1, 2]) is None
    assert find_ring([flights[0], flight(1), flights[2]], [0, 1, 2], [1, 2]) is None
    pair = [flight(0, ("1", "[0, 2]", 1)), flight(1), flight(2)]
    assert find_ring(pair, [0, 1, 2], [2]) is None  # it may wait for rank 1


def test_a_rank_tells_who_is_in_its_groups() -> None:
    told = with_members(flight(0, ("1", "1", 1), ("2", "[0, 2]", 1), ("3", "3", 1)), {"1": "[0-6:2]", "2": "[7]"})
    assert [one.group for one in told.entries[1:]] == ["[0-6:2]", "[0, 2]", "3"]
    assert with_members(flight(0, ("1", "1", 1)), {"1": "lies"}).entries[1].group == "1"
