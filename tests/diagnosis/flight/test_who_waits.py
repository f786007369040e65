"""Who waits for whom, collapsed until it can be drawn."""

from __future__ import annotations

from diagnosis.flight import waits
from diagnosis.flight.dumps import from_rank_flights
from diagnosis.flight.who_waits import MAX_EDGES, MAX_NODES, who_waits
from diagnosis.incident import HangReport
from diagnosis.signals import CollectiveEntry, Frame, RankFlight, RankStack

ALL = "[0-4095:1]"


def flight(rank: int, members: str, seq: int, *, op: str = "all_reduce", open_: bool = True) -> RankFlight:
    done = CollectiveEntry(group=members, name="0", desc="default_pg", seq=seq - 1, op=f"gloo:{op}", completed=True)
    entries = [done]
    if open_:
        entries.append(CollectiveEntry(group=members, name="0", desc="default_pg", seq=seq, op=f"gloo:{op}"))
    return RankFlight(rank=rank, entries=tuple(entries))


def report(*ranks: int, waiting: int = 0) -> HangReport:
    return HangReport(kind="missing", ranks=ranks, quiet_s=9.0, limit_s=0.0, phase="", why="", waiting=waiting)


def test_thousands_that_wait_for_one_are_one_node() -> None:
    flights = [flight(rank, ALL, 1034, open_=rank != 17) for rank in range(512)]
    stack = RankStack(rank=17, frames=(Frame(function="upload", file="/home/me/train.py", line=88),))
    graph = who_waits(flights, [stack], report(17, waiting=4095), {17}, world=4096)
    assert graph is not None
    assert [(one.count, one.suspect, one.place) for one in graph.nodes] == [
        (1, True, "upload (train.py:88)"),
        (4095, False, ""),
    ]
    assert [(one.waiting, one.waited) for one in graph.edges] == [(1, 0)]
    assert graph.edges[0].text == "4,095 ranks wait for rank 17 in all_reduce 1034 of default_pg"
    assert graph.unseen == 0


def test_of_ranks_that_were_not_asked_nothing_is_said() -> None:
    flights = [flight(rank, ALL, 5, open_=rank != 3) for rank in range(16)]
    graph = who_waits(flights, [], None, {3}, world=4096)
    assert graph is not None
    assert [one.count for one in graph.nodes] == [1, 15]
    assert graph.unseen == 4096 - 16


def test_ranks_that_called_different_collectives_wait_for_each_other() -> None:
    flights = [flight(0, "[0-2:1]", 9), flight(1, "[0-2:1]", 9, op="barrier"), flight(2, "[0-2:1]", 9)]
    graph = who_waits(flights, [], None, {1}, world=3)
    assert graph is not None
    assert {(one.waiting, one.waited) for one in graph.edges} == {(0, 1), (1, 0)}
    assert graph.nodes[0].ranks == (1,)
    assert graph.nodes[1].ranks == (0, 2)


def test_a_ring_of_groups_is_drawn_as_a_ring() -> None:
    groups = ["[0, 1]", "[1, 2]", "[0, 2]"]
    flights = [
        RankFlight(rank=rank, entries=(CollectiveEntry(group=group, name=str(rank), seq=4, op="gloo:barrier"),))
        for rank, group in enumerate(groups)
    ]
    graph = who_waits(flights, [], None, set(), world=3)
    assert graph is not None
    ring = {(graph.nodes[one.waiting].ranks[0], graph.nodes[one.waited].ranks[0]) for one in graph.edges}
    assert ring == {(0, 1), (1, 2), (2, 0)}


def test_without_recorders_the_hang_watch_tells() -> None:
    graph = who_waits([], [], report(17, waiting=4095), {17}, world=4096)
    assert graph is not None
    assert graph.edges[0].text == "4,095 ranks wait for rank 17 in a collective"
    assert who_waits([], [], report(17), {17}) is None
    assert who_waits([], [], None, set()) is None


def test_many_groups_are_cut_off_and_counted() -> None:
    flights = [
        RankFlight(rank=rank, entries=(CollectiveEntry(group=f"[{rank}, {rank + 1}]", name=str(rank), seq=1, op="x"),))
        for rank in range(400)
    ]
    graph = who_waits(flights, [], None, {399}, world=401)
    assert graph is not None
    assert len(graph.nodes) <= MAX_NODES
    assert len(graph.edges) <= MAX_EDGES
    assert graph.left_out + sum(one.count for one in graph.nodes) == 401 - graph.unseen
    assert graph.nodes[0].suspect


def test_the_graph_grows_with_the_ranks_and_not_with_their_pairs() -> None:
    """A call is a node: its ranks are not joined with each of those that they wait for."""

    def edges(count: int) -> int:
        world, busy = f"[0-{count - 1}:1]", f"[0-{count // 2 - 1}:1]"
        flights = [
            RankFlight(
                rank=rank,
                entries=(
                    *[CollectiveEntry(group=busy, name="1", desc="half", seq=4, op="x:barrier")] * (rank < count // 2),
                    CollectiveEntry(group=world, name="0", desc="default_pg", seq=9, op="x:all_reduce"),
                ),
            )
            for rank in range(count)
        ]
        graph = who_waits(flights, [], None, set(), world=count)
        assert graph is not None
        assert [one.count for one in graph.nodes] == [count // 2, count // 2]
        return sum(map(len, waits.build(waits.join(from_rank_flights(flights)), fronts_only=True).edges.values()))

    assert edges(256) == 2 * edges(128)


def test_calls_that_all_differ_are_told_apart_up_to_a_bound() -> None:
    flights = [flight(rank, "[0-299:1]", 9, op=f"op{rank}") for rank in range(300)]
    graph = who_waits(flights, [], None, {7}, world=300)
    assert graph is not None
    assert graph.left_out + sum(one.count for one in graph.nodes) == 300
    assert graph.nodes[0].ranks == (7,)
