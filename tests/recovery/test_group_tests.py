"""Pairs in two rounds, simulated: bad nodes are found, healthy ones are never named."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import pytest

from recovery.group_tests import (
    GroupOutcome,
    Margin,
    PairConclusion,
    conclude,
    narrowed,
    next_groups,
    next_halves,
    pair_margin,
    pair_results,
    throttled_nodes,
)

MARGIN = Margin(0.1)


class Fleet:
    """Nodes with faults. `slow`: node -> factor. `cut`: pairs that cannot talk."""

    def __init__(
        self,
        count: int,
        failing: Collection[str] = (),
        slow: Mapping[str, float] | None = None,
        cut: Collection[frozenset[str]] = (),
        seed: int = 1,
    ) -> None:
        self.nodes = [f"n{number}" for number in range(count)]
        self.failing, self.slow, self.cut = set(failing), dict(slow or {}), set(cut)
        self.random = random.Random(seed)
        self.most_at_once = 0

    def outcome(self, group: tuple[str, ...]) -> GroupOutcome:
        links = {frozenset((one, other)) for one in group for other in group if one < other}
        if self.failing & set(group) or links & self.cut:
            return GroupOutcome(nodes=group, failed="all_reduce: timeout")
        noise = self.random.gauss(1.0, 0.02)
        factor = max(self.slow.get(node, 1.0) for node in group)
        return GroupOutcome(nodes=group, seconds={"all_reduce": 0.1 * factor * noise, "matmul": 0.2 * noise})

    def conclusion(self, domains: Mapping[str, str] | None = None) -> PairConclusion:
        rounds: list[list[GroupOutcome]] = []
        while groups := next_groups(self.nodes, rounds, MARGIN):
            members = [node for group in groups for node in group]
            assert len(members) == len(set(members)), "groups of a round share no node"
            rounds.append([self.outcome(group) for group in groups])
        return conclude(self.nodes, rounds, MARGIN, domains)


def named(conclusion: PairConclusion) -> set[str]:
    return {one.node for one in conclusion.named}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 64, 1023, 1024])
def test_healthy_fleets_take_one_round_or_two(count: int) -> None:
    """A pair that was slow by chance is tried again; nobody is named."""
    conclusion = Fleet(count).conclusion()
    assert named(conclusion) == set()
    assert len(conclusion.good) == count
    assert conclusion.rounds <= 2
    assert not conclusion.most


@pytest.mark.parametrize(
    ("count", "slow", "seed"),
    [
        (7, {"n1": 3.7879, "n2": 3.8014, "n5": 3.4954}, 2),
        (11, {"n4": 3.18, "n7": 3.29, "n8": 3.28, "n2": 3.49, "n0": 3.79}, 1),
        *((11, {"n4": 3.18, "n7": 3.29, "n8": 3.28, "n2": 3.49, "n0": 3.79}, seed) for seed in range(2, 12)),
    ],
)
def test_slow_groups_of_round_one_are_not_what_is_usual(count: int, slow: dict[str, float], seed: int) -> None:
    """No group of round one was without a slow node, or only one was."""
    assert named(Fleet(count, (), slow, seed=seed).conclusion()) <= slow.keys()


@pytest.mark.parametrize("count", [8, 9, 33, 1024])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bad_nodes_are_found_and_healthy_ones_never_named(count: int, share: float, seed: int) -> None:
    """Failing and slow ones, mixed; up to half of all. (Of four, a slow and a failing one leave nothing to compare.)"""
    chosen = random.Random(seed).sample(range(count), max(1, int(count * share)))
    failing = {f"n{number}" for number in chosen[::2]}
    slow = {f"n{number}": 1.5 for number in chosen[1::2]}
    conclusion = Fleet(count, failing, slow, seed=seed).conclusion()
    assert {one.node for one in conclusion.bad} == failing | slow.keys()
    assert {one.node for one in conclusion.bad if one.how == "slow"} <= slow.keys()
    assert not conclusion.unproven
    assert not conclusion.most
    assert conclusion.rounds <= (3 if share <= 0.1 else 6)  # two where no two bad ones met


@pytest.mark.parametrize("seed", range(40))
def test_small_fleets_at_random(seed: int) -> None:
    """Healthy nodes are never named, whatever the faults; bad ones are where at most half are bad."""
    chance = random.Random(seed)
    count = chance.randint(2, 12)
    nodes = [f"n{number}" for number in range(count)]
    bad = set(chance.sample(nodes, chance.randint(0, count)))
    slow = {node: chance.uniform(1.3, 9.0) for node in bad if chance.random() < 0.5}
    conclusion = Fleet(count, bad - slow.keys(), slow, seed=seed).conclusion()
    assert named(conclusion) <= bad
    assert not set(conclusion.good) & (bad - slow.keys())
    if len(bad) * 2 > count:
        assert conclusion.named == () or len(conclusion.bad) * 2 <= count
    elif not slow and count > 3:
        assert named(conclusion) | set(conclusion.unproven) == bad


@pytest.mark.parametrize("bad", [4, 6, 7, 8])
def test_where_most_are_bad_nobody_is_named(bad: int) -> None:
    conclusion = Fleet(8, {f"n{number}" for number in range(bad)}).conclusion()
    assert conclusion.most == (bad > 4)
    assert len(named(conclusion)) == (4 if bad == 4 else 0)


def test_a_pair_of_which_one_fails_says_nothing_of_either() -> None:
    conclusion = Fleet(2, {"n1"}).conclusion()
    assert named(conclusion) == set()
    assert set(conclusion.unproven) == {"n0", "n1"}
    assert conclusion.most


def test_of_three_nodes_the_bad_one_is_found() -> None:
    conclusion = Fleet(3, {"n1"}).conclusion()
    assert named(conclusion) == {"n1"}
    assert conclusion.bad[0].partners[-1] in {"n0", "n2"}


def test_bad_and_good_ones_in_turn_leave_no_good_pair_at_first() -> None:
    conclusion = Fleet(16, {f"n{number}" for number in range(0, 16, 2)}).conclusion()
    assert named(conclusion) == {f"n{number}" for number in range(0, 16, 2)}


def test_what_is_between_two_nodes_is_no_fault_of_either() -> None:
    conclusion = Fleet(8, cut=[frozenset(("n2", "n3"))]).conclusion()
    assert named(conclusion) == set()
    assert conclusion.links == (("n2", "n3"),)
    assert len(conclusion.good) == 8


def test_a_bad_domain_is_called_a_domain() -> None:
    domains = {f"n{number}": f"rack{number // 4}" for number in range(16)}
    conclusion = Fleet(16, {"n4", "n5", "n6", "n7"}).conclusion(domains)
    assert conclusion.domain == "rack1"
    assert named(conclusion) == set()
    assert {one.node for one in conclusion.bad} == {"n4", "n5", "n6", "n7"}
    part = Fleet(16, {"n4", "n5", "n6"}).conclusion(domains)
    assert part.domain == ""
    assert named(part) == {"n4", "n5", "n6"}


@pytest.mark.parametrize("count", [5, 8, 100, 1000])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.99])
def test_a_group_that_fails_while_its_pairs_do_well_is_narrowed(count: int, at: float) -> None:
    """Here: two neighbours that fail only together with a third."""
    nodes = [f"n{number}" for number in range(count)]
    first = min(int(count * at), count - 2)
    together = set(nodes[first : first + 2])
    steps: list[list[GroupOutcome]] = []
    while halves := next_halves(nodes, steps):
        members = [node for half in halves for node in half]
        assert len(members) == len(set(members))
        steps.append([GroupOutcome(nodes=half, failed="x" if together <= set(half) else "") for half in halves])
    (smallest,) = narrowed(nodes, steps).groups
    assert together <= set(smallest)
    assert len(steps) <= count.bit_length()


def test_a_group_that_fails_only_as_a_whole_stays_whole() -> None:
    nodes = [f"n{number}" for number in range(8)]
    steps = [[GroupOutcome(nodes=half) for half in next_halves(nodes, [])]]
    assert next_halves(nodes, steps) == ()
    assert narrowed(nodes, steps).groups == (tuple(nodes),)


@pytest.mark.parametrize(("test", "named_too"), [("group_matmul", False), ("all_reduce_large", True)])
def test_products_on_busy_cpus_blame_nobody(test: str, named_too: bool) -> None:
    def pair(*nodes: str, took: float) -> GroupOutcome:
        return GroupOutcome(nodes=nodes, seconds={test: took})

    first = [pair("n1", "n2", took=0.18), pair("n3", "n4", took=0.05), pair("n5", "n6", took=0.05)]
    second = [pair("n1", "n4", took=0.18), pair("n2", "n3", took=0.05), pair("n5", "n6", took=0.05)]
    nodes = [f"n{number}" for number in range(1, 7)]
    found = conclude(nodes, [first, second], pair_margin(["torch 2.13 CPU"]))
    assert named(found) == ({"n1"} if named_too else set())


@pytest.mark.parametrize(("throttled", "names"), [(("n2",), {"n2"}), ((), set()), (("n0", "n1", "n2", "n3"), set())])
def test_products_are_slow_by_little_where_only_its_own_quota_slows_a_node(
    throttled: tuple[str, ...], names: set[str]
) -> None:
    margin = pair_margin(["EPYC CPU"])
    nodes = [f"n{number}" for number in range(4)]
    rounds: list[list[GroupOutcome]] = []
    while groups := next_groups(nodes, rounds, margin):
        rounds.append(
            [
                GroupOutcome(
                    nodes=group,
                    seconds={"group_matmul": 0.25 if "n2" in group else 0.05},
                    throttled={node: 0.7 for node in group if node in throttled},
                )
                for group in groups
            ]
        )
    found = conclude(nodes, rounds, margin)
    assert named(found) == names
    assert all("70 %" in one.why for one in found.named)


@pytest.mark.parametrize(("throttled", "told"), [({"n2": 0.48}, {"n2"}), (dict.fromkeys(("n1", "n2"), 0.5), set())])
def test_a_quota_that_makes_no_pair_slow_is_told_all_the_same(throttled: dict[str, float], told: set[str]) -> None:
    """On busy CPUs a node with half of one is no slower than others; one that all have is how they are built."""
    rounds = [[GroupOutcome(nodes=("n1", "n2"), seconds={"group_matmul": 0.1}, throttled=throttled)]]
    assert set(throttled_nodes(rounds)) == told
    found = conclude(["n1", "n2"], rounds, pair_margin(["EPYC CPU"]))
    assert named(found) == set()
    results = {one.node: one for one in pair_results(found, rounds, 5.0)}
    assert {one.verdict for one in results.values()} == {"pass"}
    assert {node for node, one in results.items() if "%" in one.reason} == told
