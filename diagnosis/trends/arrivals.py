"""Slow ranks and links by the times of collectives: who comes last again and again, and what its peers lose by that.

Where GPUs timed the collectives (`duration_us`) the one that came last has the shortest duration, whatever clocks
say; else the times of the calls tell, as far as peers really waited: a CPU that runs ahead of its GPU waits for nobody.
A rank that is late because another made it wait is early there by as much: what counts is the sum of both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from diagnosis.signals import Evidence
from diagnosis.story import Slowness
from diagnosis.stuck import names
from diagnosis.trends.meetings import CLOCK_NS, LINK, P2P, Group, RankTiming, read

COST: Final = 0.05
"""Share of the time that peers must lose."""
WINDOWS: Final = 12
"""What is late in most parts of the time is steadily late."""
ONE_SIDED: Final = 0.75
"""Share of the parts in which a slow rank is late."""
GAP: Final = 0.5
GAP_OF_STAGES: Final = 0.75
"""Who is not slow has at most so much of a slow one's lateness; more where stages of a pipeline wait for it, too."""
TIMED_S: Final = 0.0005
CALLED_S: Final = 0.01
"""A lateness that can be told where GPUs timed it, and where clocks of several nodes did."""
LINK_SLOWER: Final = 1.6
"""Times the median of groups alike."""
LINK_SLOWER_OF_FEW: Final = 2.5
"""Where only two others are there to compare with: the links of a pipeline of four stages."""
SIBLINGS: Final = 3


def judge(timings: Iterable[RankTiming], nodes: Mapping[int, str] | None = None) -> tuple[Slowness, ...]:
    """Ranks that others wait for at each step, and groups whose transfers are slow, the costliest first."""
    meetings = read(timings)
    groups, span = meetings.groups, meetings.span_s
    if not groups or span <= 0:
        return ()
    links = _slow_links(groups, span, nodes or {})
    pipelines = _pipelines(meetings.all_groups)
    telling = [  # the groups in which ranks do the same work
        group for group in groups if len({pipelines.get(rank, rank) for rank in group.ranks}) == len(group.ranks)
    ]
    slow = _late_ranks(telling, span, pipelines, nodes or {}, meetings.unsure)
    if not slow:  # it may have begun in the midst of what was recorded
        slow = _late_ranks([_newer_half(group) for group in telling], span / 2, pipelines, nodes or {}, meetings.unsure)
    if links and slow and set(slow[0].ranks) <= set(links[0].ranks):
        slow = []  # they come late from their slow transfers
    return tuple(sorted([*slow, *links], key=lambda one: -one.cost_percent))


def place_of(
    ranks: Collection[int], nodes: Mapping[int, str], among: Collection[int]
) -> tuple[Literal["rank", "node", "input"], str]:
    """Whether these are all ranks of one node, and its name where they are on one."""
    on = {nodes.get(rank, "") for rank in ranks}
    node = on.pop() if len(on) == 1 else ""
    whole = [rank for rank in among if nodes.get(rank) == node] if node else []
    return ("node" if len(ranks) > 1 and whole and set(whole) == set(ranks) else "rank"), node


# ----- ranks -----


def _late_ranks(
    telling: Sequence[Group],
    span: float,
    pipelines: Mapping[int, int],
    nodes: Mapping[int, str],
    unsure: Collection[int],
) -> list[Slowness]:
    """`unsure`: ranks whose clocks were corrected."""
    late: dict[int, list[float]] = {}
    for group in telling:
        for rank, values in _blame(group):
            known = late.setdefault(rank, [0.0] * WINDOWS)
            late[rank] = [a + b for a, b in zip(known, _windows(values), strict=True)]
    if len(late) < 2:
        return []
    scores = {rank: _steady(windows) / span for rank, windows in late.items()}
    one_sided = {rank for rank, windows in late.items() if _one_sided(windows)}
    leaders = _leaders(scores, GAP_OF_STAGES if pipelines else GAP)
    slow = one_sided.intersection(_first_of_pipelines(leaders, pipelines, nodes))
    if not slow or 3 * len(slow) > max(3, len(late)):
        return []
    costs = {group.name: _lost(group, slow) / span for group in telling if not slow.isdisjoint(group.ranks)}
    group = max((one for one in telling if one.name in costs), key=lambda one: costs[one.name])
    cost = min(costs[group.name], 0.99)
    if cost < COST:
        return []
    worst = max(slow.intersection(group.ranks), key=lambda rank: scores[rank])
    kind, node = place_of(slow, nodes, late)
    others = [of for rank, of in group.late.items() if rank not in slow]
    values = [at - statistics.median(row) for at, *row in zip(group.late[worst], *others, strict=True)]
    typical = statistics.median([value for value in values if value > 0] or [0.0])
    if typical < (TIMED_S if group.shortest else CLOCK_NS / 1e9 if worst in unsure else CALLED_S):
        return []
    share = sum(value >= 0.5 * typical and value > 0 for value in values) / len(values)
    since = f" since about collective {group.since}" if group.since is not None else ""
    why = (
        f"{names(slow)} came {1000 * typical:.0f} ms after the others to {100 * share:.0f} % of the collectives "
        f"of group {group.name}{since}: without {'it' if len(slow) == 1 else 'them'} "
        f"steps would take {100 * cost:.0f} % less time"
    )
    return [
        Slowness(
            kind=kind,
            ranks=tuple(sorted(slow)),
            cost_percent=round(100 * cost, 1),
            why=why,
            # Where stages wait for each other, who began it is less sure.
            confidence=0.6 if pipelines else 0.9 if cost >= 2 * COST and len(late) > 2 else 0.7,
            node=node,
            evidence=(_evidence(group, worst, nodes),),
        )
    ]


def _pipelines(groups: Iterable[str]) -> dict[int, int]:
    """Rank that sends or receives -> the least rank of its pipeline. Its stages wait for each other by nature."""
    found: dict[int, int] = {}

    def first(rank: int) -> int:
        while found.setdefault(rank, rank) != rank:
            rank = found[rank]
        return rank

    for name in groups:
        ends = P2P.fullmatch(name)
        if ends is not None:
            a, b = sorted((first(int(ends[1])), first(int(ends[2]))))
            found[b] = a
    return {rank: first(rank) for rank in found}


def _first_of_pipelines(
    leaders: Sequence[int], pipelines: Mapping[int, int], nodes: Mapping[int, str]
) -> Iterator[int]:
    """Of the latest ranks, the latest one of each pipeline: it makes the others late, unless they share its node."""
    taken: dict[int, int] = {}
    for rank in leaders:
        latest = taken.setdefault(pipelines.get(rank, rank), rank)
        if latest == rank or (rank in nodes and nodes[rank] == nodes.get(latest)):
            yield rank


def _leaders(scores: Mapping[int, float], gap: float) -> list[int]:
    """The ranks before the first gap: those after it have less than this share."""
    ordered = sorted(scores, key=lambda rank: -scores[rank])
    for count, (rank, following) in enumerate(itertools.pairwise(ordered), 1):
        if scores[rank] < COST / 2 or 3 * count > max(3, len(ordered)):
            break
        if scores[following] < gap * scores[rank]:
            return ordered[:count]
    return []


def _blame(group: Group) -> Iterator[tuple[int, list[float]]]:
    """Of each rank and collective, by how much it was late, less what it waited for others."""
    last = [max(row) for row in zip(*group.late.values(), strict=True)]
    for rank, values in group.late.items():
        yield rank, [max(0.0, value) - (most - value) for value, most in zip(values, last, strict=True)]


def _newer_half(group: Group) -> Group:
    half = len(group.seqs) // 2
    late = {rank: values[half:] for rank, values in group.late.items()}
    return group._replace(seqs=group.seqs[half:], late=late, since=group.seqs[half])


def _windows(values: Sequence[float]) -> list[float]:
    """Sums of equal parts of a sequence, none of its values larger than those that most parts have."""
    cuts = [len(values) * number // WINDOWS for number in range(WINDOWS + 1)]
    parts = [values[start:end] for start, end in itertools.pairwise(cuts)]
    most = 3 * statistics.median_low(max(map(abs, part), default=0.0) for part in parts)
    return [sum(max(-most, min(most, value)) for value in part) for part in parts]


def _steady(windows: Sequence[float]) -> float:
    """The whole as if all parts were like the middle one: rank 0 saves a checkpoint now and then, somebody compiles."""
    return statistics.median_low(windows) * WINDOWS


def _one_sided(windows: Sequence[float]) -> bool:
    """Late in nearly all parts, and much alike in them."""
    bar = 0.3 * statistics.median_low(windows)
    return bar > 0 and sum(one >= bar for one in windows) >= ONE_SIDED * WINDOWS


def _lost(group: Group, slow: Collection[int]) -> float:
    """Seconds that would be saved if these ranks came like the last of the others."""
    rest = [group.late[rank] for rank in group.ranks if rank not in slow]
    bad = [group.late[rank] for rank in group.ranks if rank in slow]
    if not rest:
        return 0.0
    saved = [max(0.0, max(of[index] for of in bad) - max(of[index] for of in rest)) for index in range(len(group.seqs))]
    return _steady(_windows(saved))


def _evidence(group: Group, rank: int, nodes: Mapping[int, str]) -> Evidence:
    values = group.late[rank]
    worst = max(range(len(values)), key=lambda index: values[index])
    text = (
        f"group {group.name}, {len(values)} collectives: rank {rank} is {1000 * statistics.fmean(values):.1f} ms late "
        f"on average, {1000 * values[worst]:.0f} ms at collective {group.seqs[worst]}"
    )
    return Evidence(text=text, source="flight recorder", rank=rank, node=nodes.get(rank, ""))


# ----- links -----


def _slow_links(groups: Sequence[Group], span: float, nodes: Mapping[int, str]) -> list[Slowness]:
    """Groups that need longer for their transfers than groups that do the same."""
    kinds: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        if group.shortest:
            kinds.setdefault((group.kind, len(group.ranks)), []).append(group)
    slow: list[tuple[float, float, Group]] = []
    for alike in kinds.values():
        few = len(alike) <= SIBLINGS
        if few and (len(alike) < SIBLINGS or alike[0].kind != LINK):
            continue
        typical = {group.name: statistics.median(group.shortest) for group in alike}
        middle = statistics.median(typical.values())
        slower = LINK_SLOWER_OF_FEW if few else LINK_SLOWER
        bar = max(slower * middle, middle + 6 * _spread(list(typical.values())))
        for group in alike:
            over = typical[group.name] - middle
            cost = over * len(group.shortest) / span
            if typical[group.name] >= bar and cost >= COST / 2:
                slow.append((cost, typical[group.name] / middle, group))
    if not slow or 3 * len(slow) > len(groups):
        return []
    cost, ratio, group = max(slow, key=lambda one: one[0])
    shared = set.intersection(*(set(one.ranks) for _, _, one in slow)) if len(slow) > 1 else set()
    ranks = tuple(sorted(shared or group.ranks))
    which = f"all {len(slow)} slow groups have {names(ranks)} in common" if shared else f"between {names(ranks)}"
    share = min(cost, 0.99)
    why = (
        f"transfers of group {group.name} take {ratio:.1f} times as long as those of groups alike, {which}: "
        f"as fast as theirs, they would spare {100 * share:.0f} % of the time"
    )
    _, node = place_of(ranks, nodes, ranks)
    text = f"group {group.name}: {1000 * statistics.median(group.shortest):.2f} ms a collective once all are there"
    return [
        Slowness(
            kind="link",
            ranks=ranks,
            cost_percent=round(100 * share, 1),
            why=why,
            confidence=0.7,
            node=node,
            evidence=(Evidence(text=text, source="flight recorder", rank=ranks[0], node=nodes.get(ranks[0], "")),),
        )
    ]


def _spread(values: Sequence[float]) -> float:
    """Median distance from the median; 0 for no values."""
    if not values:
        return 0.0
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
