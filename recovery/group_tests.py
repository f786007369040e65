"""Which nodes are tested together, and what that says of each: pairs in two rounds, then the group, then halves. Pure.

Round one: neighbours in pairs; of an odd number the last three together. Whoever was in a group that went well is
proven good. Round two: each suspect with another node, one that is proven good. Whoever fails there, too, is bad, for
by then its first partner has done well with somebody else. If both of a failing pair do well with others, it was what
is between them. Pairs of a round share no node, so they run at the same time, and two rounds are enough for any number
of nodes. More follow where two bad nodes met in round one, or where suspects outnumber the good.

A group that went through but took longer than others is treated alike ("slow"). A healthy node beside a bad one is
never blamed: only who has failed with two different partners, both proven good, is.

Everything is worked out anew from the outcomes of all rounds, in their order; nothing is kept in between.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, Literal, NamedTuple

from diagnosis.signals import Frozen, clean_line
from recovery.ledger import TestResult, TestVerdict

NEAR: Final = 16
"""Partners are looked for among so many good nodes on either side."""
MOST_ROUNDS: Final = 8
"""Two, where at least half of the pairs of round one go well."""
FAST_SHARE: Final = 0.125
"""Where up to half of the nodes may be slow, only the fastest groups of round one surely have none of them."""
PROOFS: Final = 2
"""In so many groups of otherwise good nodes a node must have failed."""
CONTROLS: Final = 3
"""So many groups of good nodes in the same round are enough to compare with."""
SPREADS: Final = 3.0 * 1.4826
"""Three standard deviations, as a multiple of the median deviation."""

How = Literal["fails", "slow"]
Group = tuple[str, ...]


class Margin(NamedTuple):
    """What is slow: so much more time than others, by both measures."""

    share: float
    least_s: float = 0.0
    products_s: float = 0.0
    """`least_s` of matrix products, where it is another one."""


class GroupOutcome(Frozen, frozen=True, kw_only=True):
    """What one group's test gave."""

    nodes: tuple[str, ...]
    failed: str = ""
    """Why, in words; empty: it went through, with right results."""
    seconds: dict[str, float] = {}
    """Test -> seconds, of the slowest rank."""
    throttled: dict[str, float] = {}
    """Node -> the share of its time that its own CPU quota kept it waiting, where that was much."""
    busy: str = ""
    """The CPUs of all its nodes were busy with others: that it failed or was slow says nothing of them. In words."""


class GroupPart(Frozen, frozen=True, kw_only=True):
    """What the ranks of one node say of their group's test."""

    failed: str = ""
    """Why, in words; empty: they went through, with right results."""
    wrong: bool = False
    """Data was wrong, however busy the CPUs were."""
    seconds: dict[str, float] = {}
    """Test -> seconds, of the slowest of them."""
    waited: float = 0.0
    """The share of its time that one of them waited for a CPU that others had."""
    throttled: float = 0.0
    """The share of its time that the CPU quota of their own control group kept one of them waiting."""
    stalled_waited: float = 1.0
    """The same of the exchange that failed, once all had met. 1: not known."""
    unknown: str = ""
    """Why nothing is known of it, for a reason that is not the node's devices or network: in words."""


BUSY: Final = 0.2
"""Who waits so much of its time for a CPU is slow because of others."""
EXPLAINS: Final = 0.5
"""An exchange failed for want of CPUs if its nodes together waited for one so much of its time."""


def group_outcome(nodes: Sequence[str], parts: Mapping[str, GroupPart | None]) -> GroupOutcome:
    """What the nodes together say of their group. None: the node was not heard of again."""
    silent = [node for node in nodes if parts.get(node) is None]
    if silent:
        return GroupOutcome(nodes=tuple(nodes), failed=f"{', '.join(silent)} was not heard of again")
    here = {node: part for node in nodes if (part := parts[node]) is not None}
    if unknown := [f"{node}: {part.unknown}" for node, part in here.items() if part.unknown]:
        why = clean_line("; ".join(unknown), 400)
        return GroupOutcome(nodes=tuple(nodes), failed=why, busy="it was not made as it should be")
    least, busy = min((part.waited for part in here.values()), default=0.0), ""
    idle = all(part.failed for part in here.values()) and sum(one.stalled_waited for one in here.values()) < EXPLAINS
    if least >= BUSY and not idle and not any(part.wrong for part in here.values()):
        busy = f"the CPUs of all its nodes are busy: ranks waited for one {100 * least:.0f} % of their time or more"
    throttled = {node: part.throttled for node, part in here.items() if part.throttled >= BUSY}
    if words := [f"{node}: {part.failed}" for node, part in here.items() if part.failed]:
        if len(throttled) == len(nodes) and not any(part.wrong for part in here.values()):
            busy = busy or "all its nodes are throttled by their CPU quotas: its time was too short"
        return GroupOutcome(
            nodes=tuple(nodes), failed=clean_line("; ".join(words), 400), throttled=throttled, busy=busy
        )
    seconds: dict[str, float] = {}
    for part in here.values():
        for test, took in part.seconds.items():
            seconds[test] = max(seconds.get(test, 0.0), took)
    return GroupOutcome(nodes=tuple(nodes), seconds=seconds, throttled=throttled, busy=busy)


def throttled_nodes(rounds: Iterable[Iterable[GroupOutcome]]) -> dict[str, float]:
    """Node -> the largest share of its time that its CPU quota kept it waiting, where that was much. A quota is there
    whether or not it made a pair slow beside others; none where all nodes have one: that is how they are built.
    """
    nodes: set[str] = set()
    found: dict[str, float] = {}
    for outcome in (one for some in rounds for one in some):
        nodes.update(outcome.nodes)
        for node, share in outcome.throttled.items():
            found[node] = max(share, found.get(node, 0.0))
    return found if len(found) < len(nodes) else {}


def throttled_words(share: float) -> str:
    return f"it was throttled by its CPU quota {100 * share:.0f} % of the time"


class Blamed(Frozen, frozen=True, kw_only=True):
    """A node that failed with several partners, all of which do well with others."""

    node: str
    how: How
    why: str
    partners: tuple[str, ...]
    """With whom it failed: all are proven good."""


class PairConclusion(Frozen, frozen=True, kw_only=True):
    """What the rounds say."""

    good: tuple[str, ...] = ()
    bad: tuple[Blamed, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    """Groups that did not go well although each member does with others: it is what is between them."""
    unproven: tuple[str, ...] = ()
    """No partner was proven good, or the rounds were used up: nothing is known of them."""
    most: bool = False
    """More nodes are bad, or not proven, than good: it may be the test, or what all share. Nobody is to be blamed."""
    domain: str = ""
    """All bad nodes are of this domain (a rack, a switch), and none of its nodes is good: the domain is what is bad."""
    rounds: int = 0

    @property
    def named(self) -> tuple[Blamed, ...]:
        """The nodes that may be taken out for it."""
        return () if self.most or self.domain else self.bad


class _Known(NamedTuple):
    """What is known after some rounds."""

    good: frozenset[str]
    bad: dict[str, Blamed]
    links: tuple[Group, ...]


def next_groups(nodes: Sequence[str], rounds: Sequence[Sequence[GroupOutcome]], margin: Margin) -> tuple[Group, ...]:
    """Who is to be tested next, all at once; empty: it is known what can be known.

    `nodes`: in an order in which neighbours are close.
    """
    if len(nodes) < 2 or len(rounds) >= MOST_ROUNDS:
        return ()
    if not rounds:
        return _in_pairs(nodes)
    known = _known(rounds, margin)
    suspects = [node for node in nodes if node not in known.good and node not in known.bad]
    if not suspects:
        return ()
    if not known.good:
        return _turned(nodes, len(rounds)) if len(nodes) > 2 and len(rounds) < len(nodes) else ()
    met = {(one, other) for some in rounds for done in some for one in done.nodes for other in done.nodes}
    return _with_good(nodes, suspects, known.good, met)


def conclude(
    nodes: Sequence[str],
    rounds: Sequence[Sequence[GroupOutcome]],
    margin: Margin,
    domains: Mapping[str, str] | None = None,
) -> PairConclusion:
    """What the rounds so far say. `domains`: node -> rack or switch, where that is known."""
    known = _known(rounds, margin)
    bad = tuple(known.bad[node] for node in nodes if node in known.bad)
    unproven = tuple(node for node in nodes if node not in known.good and node not in known.bad)
    return PairConclusion(
        good=tuple(node for node in nodes if node in known.good),
        bad=bad,
        links=known.links,
        unproven=unproven,
        most=len(bad) + len(unproven) > len(known.good) and bool(rounds),
        domain=_shared_domain(known, nodes, domains or {}),
        rounds=len(rounds),
    )


def _shared_domain(known: _Known, nodes: Iterable[str], domains: Mapping[str, str]) -> str:
    found = {domains.get(node, "") for node in known.bad}
    if len(known.bad) < 2 or len(found) != 1:
        return ""
    (domain,) = found
    return domain if not any(domains.get(node) == domain for node in nodes if node not in known.bad) else ""


PAIR_TEST: Final = "pairs"
PRODUCTS: Final = "group_matmul"
CPU_PAIR_MARGIN: Final = Margin(1.0, 0.05, products_s=0.5)
GPU_PAIR_MARGIN: Final = Margin(0.1, 0.000_02)
NEVER_SLOW: Final = Margin(0.0, math.inf)
"""Nodes of different kinds: one that is slower than others is as it was built."""


def pair_margin(kinds: Iterable[str]) -> Margin:
    """How much slower than others is slow. Gloo between shared CPUs is no measure for less than twice,
    nor are products on CPUs that others use one for less than half a second."""
    found = set(kinds)
    if len(found) > 1:
        return NEVER_SLOW
    return CPU_PAIR_MARGIN if any(kind.endswith(" CPU") for kind in found) else GPU_PAIR_MARGIN


def pair_results(conclusion: PairConclusion, rounds: Sequence[Sequence[GroupOutcome]], at: float) -> list[TestResult]:
    """A result for each node."""
    partners: dict[str, dict[str, None]] = {}
    failed: dict[str, str] = {}
    for outcome in (one for some in rounds for one in some):
        for node in outcome.nodes:
            why = "; ".join(text for text in (outcome.failed, outcome.busy) if text)
            failed[node] = why or failed.get(node, "")
            partners.setdefault(node, {}).update(dict.fromkeys(other for other in outcome.nodes if other != node))
    named = {one.node: one for one in conclusion.named}
    bad = {one.node: one for one in conclusion.bad}
    throttled = throttled_nodes(rounds)
    found = []
    for node, others in partners.items():
        verdict: TestVerdict
        if node in named:
            one = named[node]
            verdict, reason = "fail", f"{one.how} with {' and with '.join(one.partners)}, which do well: {one.why}"
        elif node in bad:
            shared = f"so does all of {conclusion.domain}" if conclusion.domain else "so do most nodes"
            verdict, reason = "unknown", f"{bad[node].how}, and {shared}: {bad[node].why}"
        elif node in conclusion.good:
            verdict, reason = "pass", f"did well with {', '.join(others)}"
            reason += f"; {throttled_words(throttled[node])}" if node in throttled else ""
        else:
            verdict, reason = "unknown", f"no partner is proven good; {failed[node] or 'it was slow'}"
        found.append(
            TestResult(
                node=node, test=PAIR_TEST, verdict=verdict, reason=clean_line(reason, 500), peers=tuple(others), at=at
            )
        )
    return found


FEWEST: Final = 3
"""Of two nodes nobody can say which one is bad."""
CONTROLLED: Final = 2
"""Beside a good node for each suspect, so many more: what they take is usual."""


def with_partners(suspects: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Who is tested because of these suspects: they first, so that they meet each other in round one, then as many of
    the `others` as are needed, the first ones first. Empty: there are too few to say anything.
    """
    wanted = len(suspects) + CONTROLLED
    wanted += (len(suspects) + wanted) % 2
    found = (*suspects, *others[:wanted])
    return found if suspects and len(found) >= FEWEST else ()


# ----- what is known -----


def _known(rounds: Sequence[Sequence[GroupOutcome]], margin: Margin) -> _Known:
    """A later round may show that what seemed usual in an earlier one was slow: each is judged by all of them."""
    known = _Known(frozenset(), {}, ())
    for number in range(len(rounds)):
        seen = rounds[: number + 1]
        everywhere = [one for some in seen for one in some]
        quick = _quick(everywhere, margin)
        controls = [[one for one in some if quick.issuperset(one.nodes) and not one.failed] for some in seen]
        limits = [_limits(everywhere, of_round, margin) for of_round in controls]
        # What a quota takes is known not to be others': products need no wide margin then, beside nodes without one.
        compared = everywhere if any(not one.throttled for one in everywhere) else []
        own = [_limits(compared, of_round, margin._replace(products_s=0.0)) for of_round in controls]
        judged = [
            (one, *_trouble(one, limits[at] | own[at] if one.throttled else limits[at]))
            for at, some in enumerate(seen)
            for one in some
        ]
        good = frozenset(node for one, why, _ in judged if not why for node in one.nodes)
        troubles = [(one, why, how) for one, why, how in judged if why and not one.busy]
        links = tuple(dict.fromkeys(one.nodes for one, _, _ in troubles if good.issuperset(one.nodes)))
        known = _Known(good, _blamed(troubles, good), links)
    return known


def _quick(everywhere: Sequence[GroupOutcome], margin: Margin) -> frozenset[str]:
    """Who was once about as quick as the fastest of all: only these are compared with. Where every group of round one
    has a slow node, what is usual in it is slow."""
    limits = _limits(everywhere, (), margin)
    return frozenset(node for one in everywhere if not _trouble(one, limits)[0] for node in one.nodes)


def _blamed(troubles: Sequence[tuple[GroupOutcome, str, How]], good: frozenset[str]) -> dict[str, Blamed]:
    """Whoever has failed in two different groups of which all others are good."""
    of_node: dict[str, list[tuple[GroupOutcome, str, How]]] = {}
    for trouble in troubles:
        for node in trouble[0].nodes:
            of_node.setdefault(node, []).append(trouble)
    bad = {}
    for node, found in of_node.items():
        proof = [one for one in found if good.issuperset(set(one[0].nodes) - {node})]
        if node in good or len({one[0].nodes for one in proof}) < PROOFS:
            continue
        last, why, how = proof[-1]
        if share := last.throttled.get(node, 0.0):
            why = clean_line(f"{why}; {throttled_words(share)}", 500)
        others = dict.fromkeys(other for one in proof for other in one[0].nodes if other != node)
        bad[node] = Blamed(node=node, how=how, why=why, partners=tuple(others))
    return bad


def _limits(seen: Sequence[GroupOutcome], controls: Sequence[GroupOutcome], margin: Margin) -> dict[str, float]:
    """Test -> seconds from which on it is slow.

    Compared with good nodes that were tested in the same way and at the same time, where there are enough; else with
    the fastest of all. With a single group there is nothing to compare.
    """
    compared = controls if len(controls) >= CONTROLS else [one for one in seen if not one.failed]
    values: dict[str, list[float]] = {}
    for outcome in compared:
        for test, seconds in outcome.seconds.items():
            values.setdefault(test, []).append(seconds)
    limits = {}
    for test, all_seconds in values.items():
        if len(all_seconds) < 2:
            continue
        least_s = max(margin.least_s, margin.products_s if test == PRODUCTS else 0.0)
        if compared is controls:
            middle = statistics.median(all_seconds)
            spread = statistics.median(abs(one - middle) for one in all_seconds)
        else:
            fastest, spread = min(all_seconds), 0.0
            middle = sorted(all_seconds)[int(len(all_seconds) * FAST_SHARE)]
            if middle > fastest + max(fastest * margin.share, least_s):  # only the fastest has no slow node
                middle = fastest
        limits[test] = middle + max(middle * margin.share, least_s, SPREADS * spread)
    return limits


def _trouble(outcome: GroupOutcome, limits: Mapping[str, float]) -> tuple[str, How]:
    """Why it did not go well, and how; an empty reason: it did."""
    if outcome.failed:
        return outcome.failed, "fails"
    over = {
        test: seconds / limits[test] for test, seconds in outcome.seconds.items() if seconds > limits.get(test, seconds)
    }
    if not over:
        return "", "slow"
    worst = max(over, key=lambda test: over[test])
    return f"{worst} took {outcome.seconds[worst]:.3g} s, more than {limits[worst]:.3g} s", "slow"


# ----- who is next -----


def _in_pairs(nodes: Sequence[str]) -> tuple[Group, ...]:
    """Neighbours; of an odd number the last three together."""
    pairs = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2:
        pairs[-1] = (*pairs[-1], nodes[-1])
    return tuple(pairs)


def _turned(nodes: Sequence[str], turn: int) -> tuple[Group, ...]:
    """Other pairs than before: the first stays, the others go round the table. Of an odd number one rests."""
    table: list[str] = [*nodes, *([""] if len(nodes) % 2 else [])]
    rest = table[1:]
    turned = [table[0], *rest[turn % len(rest) :], *rest[: turn % len(rest)]]
    half = len(turned) // 2
    pairs = zip(turned[:half], reversed(turned[half:]), strict=True)
    return tuple((one, other) for one, other in pairs if one and other)


def _with_good(
    nodes: Sequence[str], suspects: Sequence[str], good: Set[str], met: Set[tuple[str, str]]
) -> tuple[Group, ...]:
    """Each suspect with a good node that is near, and that it has not `met`. Good ones that are left over are paired
    alike, to compare with; a suspect that has met all of them waits.
    """
    free = [at for at, node in enumerate(nodes) if node in good]
    place = {node: at for at, node in enumerate(nodes)}
    groups: list[Group] = []
    for suspect in suspects:
        middle = bisect.bisect(free, place[suspect])
        near = [at for at in range(middle - NEAR, middle + NEAR) if 0 <= at < len(free)]
        fresh = [at for at in near if (suspect, nodes[free[at]]) not in met]
        if fresh:
            partner = free.pop(min(fresh, key=lambda at: abs(free[at] - place[suspect])))
            groups.append((suspect, nodes[partner]))
    if not groups:
        return ()
    half = len(free) // 2
    groups.extend((nodes[one], nodes[other]) for one, other in zip(free[:half], free[half : 2 * half], strict=True))
    return tuple(groups)


# ----- the whole group, and the last resort -----


class Narrowed(Frozen, frozen=True, kw_only=True):
    """The smallest groups that still fail."""

    groups: tuple[tuple[str, ...], ...]
    steps: int


def next_halves(failing: Sequence[str], steps: Sequence[Sequence[GroupOutcome]]) -> tuple[Group, ...]:
    """The halves to be tested next, all at once; empty: it gets no narrower.

    `failing`: a group that fails although its pairs do well.
    """
    return tuple(half for group in _open(failing, steps) for half in _halves(group))


def narrowed(failing: Sequence[str], steps: Sequence[Sequence[GroupOutcome]]) -> Narrowed:
    """The smallest failing groups that are known. One whose halves both do well fails only as a whole."""
    return Narrowed(groups=tuple(_smallest(failing, steps)[0]), steps=len(steps))


def _open(failing: Sequence[str], steps: Sequence[Sequence[GroupOutcome]]) -> list[Group]:
    return _smallest(failing, steps)[1]


def _smallest(failing: Sequence[str], steps: Sequence[Sequence[GroupOutcome]]) -> tuple[list[Group], list[Group]]:
    """All smallest failing groups, and those of them whose halves are not tested yet."""
    outcome = {tuple(one.nodes): one for step in steps for one in step}
    final: list[Group] = []
    still_open: list[Group] = []
    waiting = [tuple(failing)]
    while waiting:
        group = waiting.pop()
        halves = _halves(group)
        if not halves:
            final.append(group)
        elif any(half not in outcome for half in halves):
            final.append(group)
            still_open.append(group)
        elif failed := [half for half in halves if outcome[half].failed]:
            waiting.extend(failed)
        else:
            final.append(group)
    return final, still_open


def _halves(group: Group) -> tuple[Group, ...]:
    """None for fewer than four nodes: one alone exchanges nothing."""
    middle = len(group) // 2
    return (group[:middle], group[middle:]) if len(group) >= 4 else ()
