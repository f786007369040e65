"""Which mirrored snapshot an attempt may start from, and which step is copied next."""

from __future__ import annotations

import math
import random

import pytest

from recovery.snapshot_choice import NodeSnapshot, SnapshotPart, common
from recovery.snapshot_mirrors import (
    LEAD_S,
    MISSED_S,
    SEND_LIMIT_S,
    CommonStep,
    Mirrored,
    MirrorTarget,
    bring_to,
    is_needed,
    joined,
    next_target,
    of_all,
    to_bring,
)
from recovery.tiers import SnapshotOrders


def part(owner: str, step: int = 40, *, attempt: int = 1, ranks: int = 2, world: int = 4) -> SnapshotPart:
    first = ranks * "ab".index(owner)
    return SnapshotPart(
        attempt=attempt, step=step, world=world, first_rank=first, ranks=ranks, owner=owner, at=float(step)
    )


def both(*steps: int, attempt: int = 1) -> dict[str, list[SnapshotPart]]:
    """a and b have their own, c has a's, d has b's."""
    own = {owner: [part(owner, step, attempt=attempt) for step in steps] for owner in "ab"}
    return {**own, "c": own["a"], "d": own["b"]}


def test_every_part_must_be_somewhere() -> None:
    [one] = joined(both(40))
    assert (one.step, one.world, one.holders, one.safe) == (40, 4, (("a", "c"), ("b", "d")), True)
    for lost in "abcd":
        [left] = joined({node: parts for node, parts in both(40).items() if node != lost})
        assert (left.step, left.safe) == (40, False)
    assert joined({node: parts for node, parts in both(40).items() if node in "ac"}) == []
    assert joined({node: parts for node, parts in both(40).items() if node in "bd"}) == []


@pytest.mark.parametrize(
    "other",
    [part("b", 41), part("b", attempt=2), part("b", world=6), part("b", ranks=1), part("b", ranks=3)],
)
def test_parts_of_two_snapshots_never_become_one(other: SnapshotPart) -> None:
    assert joined({"a": [part("a")], "b": [other]}) == []


def test_two_that_claim_the_same_ranks_are_none() -> None:
    again = SnapshotPart(attempt=1, step=40, world=4, first_rank=2, ranks=2, owner="d")
    assert joined({"a": [part("a")], "b": [part("b")], "d": [again]}) == []


def test_the_newest_of_the_attempt_that_ended_is_brought_where_a_node_was_replaced() -> None:
    found = joined(both(40, 50))
    chosen = to_bring(found, ("a", "c"), 1)
    assert chosen is not None
    assert chosen.step == 50
    assert to_bring(found, ("a", "b"), 1) is None  # what they hold themselves is newer
    assert to_bring(found, ("a", "c"), 2) is None  # another attempt has begun from somewhere else
    assert to_bring(found, ("a",), 1) is None
    assert to_bring(found, ("a", "c", "d"), 1) is None


def test_what_is_brought_is_what_the_rendezvous_would_choose() -> None:
    """To whoever takes the places: common() finds it if everybody got his part, and only then."""
    chosen = to_bring(joined(both(40)), ("c", "a"), 1)
    assert chosen is not None
    brought = [bring_to(chosen, place, {"a": ("h", 1, False), "d": ("i", 2, True)}) for place in (0, 1)]
    assert [[source.node for source in one.sources] for one in brought] == [["a"], ["d"]]
    held = [
        NodeSnapshot(attempt=one.attempt, step=one.step, first_rank=one.first_rank, ranks=one.ranks, world=one.world)
        for one in brought
    ]
    offers = [(2, (one,)) for one in held]
    [found] = common(offers)
    assert found.world == of_all(chosen).world == 4
    assert (found.attempt, found.step) == (1, 40)
    assert common([offers[0], (2, ())]) == ()
    assert common([offers[0], (3, offers[1][1])]) == ()  # a node with another number of ranks


def test_only_what_may_be_used_takes_memory() -> None:
    orders = SnapshotOrders(attempt=2, from_step=60, keep=((1, 40),))
    parts = [part("a", 40), part("a", 50), part("a", 59, attempt=2), part("a", 60, attempt=2), part("a", 99)]
    assert [is_needed(one, orders) for one in parts] == [True, False, False, True, False]
    assert not any(is_needed(one, SnapshotOrders()) for one in parts)


# ----- which step is next -----

BEFORE, SEEN = CommonStep(1, 20, 100.0), CommonStep(1, 40, 110.0)  # two steps a second


def target(step: int, passed_at: float | None = None) -> MirrorTarget:
    return MirrorTarget(1, step, passed_at)


def whole(step: int, *, safe: bool) -> Mirrored:
    holders = (("a", "c"), ("b", "d") if safe else ("b",))
    return Mirrored(1, step, 4, 0.0, (part("a", step), part("b", step)), holders)


def test_a_step_that_is_still_to_come_is_named() -> None:
    named = next_target(None, BEFORE, SEEN, [], 110.0)
    assert named == target(40 + math.ceil(2 * LEAD_S))
    assert next_target(None, CommonStep(1, 20, 50.0), CommonStep(1, 40, 250.0), [], 250.0) == target(41)


@pytest.mark.parametrize("before", [None, CommonStep(2, 20, 100.0), CommonStep(1, 40, 100.0), CommonStep(1, 20, 110.0)])
def test_none_is_named_while_the_pace_is_not_known(before: CommonStep | None) -> None:
    assert next_target(None, before, SEEN, [], 110.0) is None
    assert next_target(target(45), before, SEEN, [], 110.0) == target(45)
    assert next_target(MirrorTarget(7, 45), before, SEEN, [], 110.0) is None


def test_the_next_one_is_named_when_this_one_is_mirrored_or_was_missed() -> None:
    assert next_target(target(45), BEFORE, SEEN, [], 110.0) == target(45)  # it is still to come
    assert next_target(target(45), BEFORE, SEEN, [whole(46, safe=True)], 110.0) == target(52)
    passed = next_target(target(39), BEFORE, SEEN, [], 110.0)
    assert passed == target(39, 110.0)
    assert next_target(passed, BEFORE, SEEN, [], 110.0 + MISSED_S) == target(46)
    sending = [whole(39, safe=False)]
    assert next_target(passed, BEFORE, SEEN, sending, 110.0 + MISSED_S) == passed
    assert next_target(passed, BEFORE, SEEN, sending, 110.0 + SEND_LIMIT_S) == target(46)
    assert next_target(target(39), BEFORE, SEEN, [whole(38, safe=True)], 110.0) == target(39, 110.0)  # an older one


def test_whatever_is_told_no_choice_lacks_a_part() -> None:
    """Seeded: nodes tell any mixture of parts."""
    for seed in range(3000):
        dice = random.Random(seed)
        held = {
            node: [
                part(
                    dice.choice("ab"), dice.choice((40, 41)), attempt=dice.choice((1, 2)), ranks=dice.choice((1, 2, 4))
                )
                for _ in range(dice.randrange(4))
            ]
            for node in "abcd"
        }
        for one in joined(held):
            ranks = [rank for own in one.parts for rank in range(own.first_rank, own.first_rank + own.ranks)]
            assert ranks == list(range(one.world))
            for own, nodes in zip(one.parts, one.holders, strict=True):
                assert nodes
                assert all(own in held[node] for node in nodes)
                assert (own.attempt, own.step) == (one.attempt, one.step)
