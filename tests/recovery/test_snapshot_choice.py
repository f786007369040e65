"""Which snapshot all ranks start from, and which replica is the odd one."""

from __future__ import annotations

import pytest

from recovery.snapshot_choice import NodeSnapshot, RankSnapshot, ReplicaWatch, choose, common, odd_ranks, of_node


def held(rank: int, step: int, *, attempt: int = 1, world: int = 4, at: float = 0.0) -> RankSnapshot:
    return RankSnapshot(rank=rank, world=world, attempt=attempt, step=step, at=at)


def node(
    first: int, *steps: int, attempt: int = 1, ranks: int = 2, world: int = 4
) -> tuple[int, tuple[NodeSnapshot, ...]]:
    both = [held(first + number, step, attempt=attempt, world=world) for number in range(ranks) for step in steps]
    return ranks, of_node(both)


def steps(offers: list[tuple[int, tuple[NodeSnapshot, ...]]]) -> list[tuple[int, int]]:
    return [(one.attempt, one.step) for one in common(offers)]


def test_a_node_tells_what_all_its_ranks_hold() -> None:
    """Rank 3 was killed while it wrote step 30."""
    found = of_node([held(2, 20), held(2, 30), held(3, 20, at=5.0), held(3, 10)])
    assert [(one.step, one.first_rank, one.ranks, one.at) for one in found if one.ranks == 2] == [(20, 2, 2, 5.0)]


def test_every_rank_must_hold_it() -> None:
    assert steps([node(0, 20, 30), node(2, 20, 30)]) == [(1, 30), (1, 20)]
    assert steps([node(0, 20, 30), node(2, 10, 20)]) == [(1, 20)]
    assert steps([node(0, 30), node(2, 20)]) == []
    assert steps([node(0, 20), (2, ())]) == []


def test_ranks_must_be_where_they_were() -> None:
    assert steps([node(2, 20), node(0, 20)]) == []
    assert steps([node(0, 20)]) == []  # the other node is gone: the world is another
    assert steps([node(0, 20), node(2, 20), node(0, 20)]) == []
    assert steps([node(0, 20, ranks=4)]) == [(1, 20)]
    assert steps([(3, node(0, 20, ranks=4)[1]), (1, ())]) == []


def test_attempts_do_not_mix_and_the_newest_counts() -> None:
    assert steps([node(0, 20), node(2, 20, attempt=2)]) == []
    two = [(2, node(first, 60)[1] + node(first, 12, attempt=3)[1]) for first in (0, 2)]
    assert steps(two) == [(3, 12), (1, 60)]  # the run went back to 10: step 60 is of another past


@pytest.mark.parametrize(
    ("checkpoint", "checkpoint_step", "expected"),
    [(False, None, 30), (True, 25, 30), (True, 30, None), (True, 40, None), (True, None, None)],
)
def test_a_checkpoint_that_is_as_new_wins(checkpoint: bool, checkpoint_step: int | None, expected: int | None) -> None:
    found = choose(common([node(0, 20, 30), node(2, 20, 30)]), checkpoint=checkpoint, checkpoint_step=checkpoint_step)
    assert (found.step if found is not None else None) == expected


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("aab", (2,)), ("ab", ()), ("aabb", ()), ("abc", ()), ("aaabc", (3, 4)), ("baaaaaaa", (0,)), ("aaa", ())],
)
def test_a_majority_of_three_names_the_odd_rank(digests: str, odd: tuple[int, ...]) -> None:
    assert odd_ranks({rank: (digest,) for rank, digest in enumerate(digests)}) == odd


def replica(rank: int, step: int, digest: str, *, members: int = 3, group: str = "g", attempt: int = 1) -> RankSnapshot:
    return RankSnapshot(
        rank=rank,
        world=8,
        attempt=attempt,
        step=step,
        at=float(step),
        group=group,
        members=members,
        digests=("same", digest),
    )


def test_groups_are_compared_when_all_have_told_and_once() -> None:
    watch = ReplicaWatch()
    assert watch.observe([replica(0, 10, "a"), replica(1, 10, "a"), replica(2, 10, "a")]) == []
    assert watch.observe([replica(0, 20, "a"), replica(1, 20, "b")]) == []
    [found] = watch.observe([replica(2, 20, "a")])
    assert (found.step, found.odd, found.ranks) == (20, (1,), 3)
    assert (found.agreed_at, found.agreed_step) == (10.0, 10)
    assert watch.observe([replica(0, 20, "a"), replica(1, 20, "b"), replica(2, 20, "a")]) == []


def test_what_an_earlier_attempt_agreed_on_is_no_step_of_this_one() -> None:
    watch = ReplicaWatch()
    watch.observe([replica(rank, 10, "a") for rank in range(3)])
    [found] = watch.observe([replica(rank, 5, "aab"[rank], attempt=2) for rank in range(3)])
    assert (found.attempt, found.odd, found.agreed_at, found.agreed_step) == (2, (2,), 10.0, None)


def test_an_earlier_snapshot_that_is_told_late_is_not_excused_by_a_later_one() -> None:
    """A wrong gradient of step 20 is in all replicas at step 30: they are the same, and wrong."""
    watch = ReplicaWatch()
    watch.observe([replica(rank, 10, "a") for rank in range(3)])
    late = [replica(2, 30, "c"), replica(2, 20, "b")]  # of one node that was not heard, by the places in its memory
    watch.observe([replica(rank, step, text) for rank in range(2) for step, text in ((20, "a"), (30, "c"))])
    [found] = watch.observe(late)
    assert (found.step, found.odd, found.agreed_step, found.contents) == (20, (2,), 10, 2)
    assert watch.observe([replica(rank, 15, "a") for rank in range(3)]) == []
    [found] = watch.observe([replica(rank, 40, "aab"[rank]) for rank in range(3)])
    assert found.agreed_step == 30, "the newest one counts, whatever is told last"
    [back] = watch.observe([replica(rank, 25, "aab"[rank]) for rank in range(3)])
    assert back.agreed_step == 15, "the script went back by itself"


def test_other_groups_and_shards_are_not_compared() -> None:
    watch = ReplicaWatch()
    assert watch.observe([replica(0, 10, "a", members=1), replica(1, 10, "b", members=2, group="h")]) == []
    assert watch.observe([held(rank, 10) for rank in range(4)]) == []


def test_what_is_awaited_is_bounded() -> None:
    watch = ReplicaWatch()
    for step in range(1000):
        watch.observe([replica(0, step, "a")])
    assert len(watch._reports) < 20
