"""Slow ranks and links by the times of collectives: which rank comes last again and again, and what its peers lose.

If GPUs timed the collectives (`duration_us`), the rank that came last has the shortest duration, whatever the clocks
say. Else the times of the calls count, as far as peers really waited: a CPU that runs ahead of its GPU makes no peer
wait. A rank that is late because another rank made it wait is early there by as much: the sum of both counts.
"""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from diagnosis.flight.dumps import Call, Channel, RankDump
from diagnosis.flight.waits import Joined, join
from diagnosis.incident import Slowdown
from diagnosis.signals import Evidence, Frozen, rank_names

LEAST: Final = 16
"""Fewer collectives than this show nothing."""
MAX_ENTRIES: Final = 600_000
"""The newest entries are read: some 5 s of CPU."""
CLOCK_NS: Final = 30_000_000
"""A smaller difference between clocks does not matter."""
HIDDEN_NS: Final = 50_000_000
"""A collective that ends this much later than its last rank comes is not held up by that rank."""


P2P: Final = re.compile(r"p2p (\d{1,9})->(\d{1,9})")
"""Name of a group of two ranks that send to each other: their calls have other numbers, only their times count."""


LINK: Final = "link"
"""Kind of a group of two ranks whose sends and receives were put together: their times tell of the way between them."""


class RankTiming(Frozen, frozen=True, kw_only=True):
    """When one rank came to the collectives of one process group (flight recorder), oldest first.

    The sequences are of one length, or empty (tuples, or arrays: nothing is copied). Times are of the rank's own clock;
    0 is a time not known.
    """

    rank: int
    group: str
    """Equal on every member (by its ranks, else its name)."""
    seqs: Sequence[int]
    """`collective_seq_id`; ascending. Point-to-point entries are a group of their own: `p2p 3->4`, told by both."""
    created_ns: Sequence[int]
    """Enqueued by the CPU."""
    completed_ns: Sequence[int] = ()
    """When it was seen to be complete; empty if no entry has it."""
    duration_us: Sequence[int] = ()
    """As the GPU measured it (`duration_ms`); empty if timing was off."""
    kind: str = ""
    """Equal for groups that do the same in the job: all tensor-parallel ones, all data-parallel ones."""


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    seqs: list[int]
    """Those that all its known ranks have come to."""
    late: dict[int, list[float]]
    """Of each rank and collective, seconds after the median of the ranks; 0 where nobody waited."""
    shortest: list[float]
    """Of each collective, the shortest duration in seconds; empty where none is known."""
    kind: str
    since: int | None = None
    """The first collective looked at, where earlier ones were left out."""


class CollectiveTimeline(NamedTuple):
    """The collectives of all groups on one clock."""

    groups: list[Group]
    span_s: float
    """Seconds that all of it took."""
    unsure: frozenset[int]
    """Ranks whose clocks were corrected."""
    all_groups: frozenset[str]
    """The names of all groups, also of those that are left out."""


def collective_timeline(timings: Iterable[RankTiming]) -> CollectiveTimeline:
    """Groups of two ranks and more with enough collectives that all of these ranks came to."""
    by_group: dict[str, list[RankTiming]] = {}
    known = list(timings)
    newest = max(LEAST * 2, MAX_ENTRIES // max(1, len(known)))
    for timing in known:
        if len(timing.seqs) == len(timing.created_ns):
            by_group.setdefault(timing.group, []).append(timing)
    offsets = _clock_offsets(by_group)
    following = _Following(known, offsets, newest)
    groups = [
        group
        for name, members in sorted(by_group.items())
        if len(members) >= 2 and not P2P.fullmatch(name)
        if (group := _group(name, members, offsets, following, newest)) is not None
    ]
    return CollectiveTimeline(groups, _span_s(known, newest), frozenset(offsets), frozenset(by_group))


def _span_s(timings: Sequence[RankTiming], newest: int) -> float:
    """Seconds that the looked at collectives took, of the rank in the middle."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for timing in timings:
        part = [at for at in timing.created_ns[-newest:] if at > 0]
        if part:
            first[timing.rank] = min(first.get(timing.rank, part[0]), part[0])
            last[timing.rank] = max(last.get(timing.rank, 0), part[-1])
    return statistics.median(last[rank] - first[rank] for rank in first) / 1e9 if first else 0.0


def _clock_offsets(by_group: Mapping[str, Sequence[RankTiming]]) -> dict[int, float]:
    """How far each rank's clock is ahead, in ns: a collective ends everywhere at once. Larger groups count more."""
    found: dict[int, float] = {}
    for members in sorted(by_group.values(), key=len, reverse=True):
        if len(members) < 2 or not all(one.completed_ns for one in members) or all(m.rank in found for m in members):
            continue
        ends = [{seq: at for seq, at in zip(one.seqs, one.completed_ns, strict=False) if at > 0} for one in members]
        shared = sorted(set.intersection(*map(set, ends)))[-200:]
        if len(shared) < LEAST:
            continue
        middle = {seq: statistics.median(of[seq] for of in ends) for seq in shared}
        ahead = [statistics.median(of[seq] - middle[seq] for seq in shared) for of in ends]
        agreed = [found[one.rank] - by for one, by in zip(members, ahead, strict=True) if one.rank in found]
        shift = statistics.median(agreed) if agreed else 0.0
        for one, by in zip(members, ahead, strict=True):
            found.setdefault(one.rank, by + shift)
    return {rank: offset for rank, offset in found.items() if abs(offset) > CLOCK_NS}


class _Following:
    """When each rank came to its next call."""

    def __init__(self, timings: Sequence[RankTiming], offsets: Mapping[int, float], newest: int) -> None:
        self._times: dict[int, list[float]] = {}
        for timing in timings:
            offset = offsets.get(timing.rank, 0.0)
            times = self._times.setdefault(timing.rank, [])
            times.extend(at - offset for at in timing.created_ns[-newest:] if at > 0)
        for times in self._times.values():
            times.sort()

    def waited(self, ranks: Sequence[int], came: Sequence[float]) -> bool:
        """Most of the ranks that came earlier made no other call until the last one was there."""
        last = max(came)
        early = [(rank, at) for rank, at in zip(ranks, came, strict=True) if at < last]
        return 2 * sum(self._after(rank, at) >= last for rank, at in early) >= len(early)

    def _after(self, rank: int, came: float) -> float:
        times = self._times.get(rank, [])
        at = bisect.bisect_right(times, came)
        return times[at] if at < len(times) else 0.0


def _group(
    name: str, members: Sequence[RankTiming], offsets: Mapping[int, float], following: _Following, newest: int
) -> Group | None:
    timed = all(one.duration_us and len(one.duration_us) == len(one.seqs) for one in members)
    came: list[dict[int, float]] = []
    for one in members:
        offset = offsets.get(one.rank, 0.0)
        times = (-1000.0 * took for took in one.duration_us[-newest:]) if timed else None
        values = times or (at - offset if at > 0 else 0.0 for at in one.created_ns[-newest:])
        came.append({seq: at for seq, at in zip(one.seqs[-newest:], values, strict=False) if at})
    seqs = sorted(set.intersection(*map(set, came)))
    if len(seqs) < LEAST:
        return None
    ranks = tuple(one.rank for one in members)
    rows = [[of[seq] for of in came] for seq in seqs]
    hidden = not timed and _hidden(seqs, rows, _first_end(members, offsets, newest))
    late: dict[int, list[float]] = {rank: [] for rank in ranks}
    for row in rows:
        middle = statistics.median(row)
        counts = timed or (not hidden and following.waited(ranks, row))
        for rank, at in zip(ranks, row, strict=True):
            late[rank].append((at - middle) / 1e9 if counts else 0.0)
    shortest = [-max(row) / 1e9 for row in rows] if timed else []
    return Group(name, ranks, seqs, late, shortest, members[0].kind)


def _hidden(seqs: Sequence[int], rows: Sequence[Sequence[float]], ends: Mapping[int, float]) -> bool:
    """Collectives end long after their last call: GPUs have work queued, and a late CPU holds no rank up."""
    known = [
        (ends[seq] - max(row), max(row) - statistics.median(row))
        for seq, row in zip(seqs, rows, strict=True)
        if seq in ends
    ]
    if not known:
        return False
    after = statistics.median(one for one, _ in known)
    lateness = statistics.median(one for _, one in known)
    return after > max(HIDDEN_NS, lateness)


def _first_end(members: Sequence[RankTiming], offsets: Mapping[int, float], newest: int) -> dict[int, float]:
    """When the first rank saw a collective complete."""
    ends: dict[int, float] = {}
    for one in members:
        offset = offsets.get(one.rank, 0.0)
        for seq, at in zip(one.seqs[-newest:], one.completed_ns[-newest:], strict=False):
            if at > 0:
                ends[seq] = min(ends.get(seq, at - offset), at - offset)
    return ends


COST: Final = 0.05
"""Share of the time that peers must lose."""
WINDOWS: Final = 12
"""What is late in most parts of the time is steadily late."""
ONE_SIDED: Final = 0.75
"""Share of the parts in which a slow rank is late."""
GAP: Final = 0.5
GAP_OF_STAGES: Final = 0.75
"""A rank that is not slow has at most this share of a slow rank's lateness; more if stages of a pipeline wait."""
TIMED_S: Final = 0.0005
CALLED_S: Final = 0.01
"""The least lateness that counts: timed by GPUs, and by the clocks of several nodes."""
LINK_SLOWER: Final = 1.6
"""Times the median of groups alike."""
LINK_SLOWER_OF_FEW: Final = 2.5
"""With only two others to compare with: the links of a pipeline of four stages."""
SIBLINGS: Final = 3


def slowdowns(timings: Iterable[RankTiming], nodes: Mapping[int, str] | None = None) -> tuple[Slowdown, ...]:
    """Ranks that others wait for at each step, and groups whose transfers are slow, the costliest first."""
    meetings = collective_timeline(timings)
    groups, span = meetings.groups, meetings.span_s
    if not groups or span <= 0:
        return ()
    links = _slow_links(groups, span, nodes or {})
    pipelines = _pipelines(meetings.all_groups)
    telling = [  # the groups in which ranks do the same work
        group for group in groups if len({pipelines.get(rank, rank) for rank in group.ranks}) == len(group.ranks)
    ]
    slow = _late_ranks(telling, span, pipelines, nodes or {}, meetings.unsure)
    if not slow:  # it may have begun in the middle of the recording
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
) -> list[Slowdown]:
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
        f"{rank_names(slow)} came {1000 * typical:.0f} ms after the others to {100 * share:.0f} % of the collectives "
        f"of group {group.name}{since}: without {'it' if len(slow) == 1 else 'them'} "
        f"steps would take {100 * cost:.0f} % less time"
    )
    return [
        Slowdown(
            kind=kind,
            ranks=tuple(sorted(slow)),
            cost_percent=round(100 * cost, 1),
            why=why,
            # If stages wait for each other, it is less sure which rank began it.
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


def _slow_links(groups: Sequence[Group], span: float, nodes: Mapping[int, str]) -> list[Slowdown]:
    """Groups whose transfers take longer than those of groups that do the same."""
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
    which = (
        f"all {len(slow)} slow groups have {rank_names(ranks)} in common" if shared else f"between {rank_names(ranks)}"
    )
    share = min(cost, 0.99)
    why = (
        f"transfers of group {group.name} take {ratio:.1f} times as long as those of groups alike, {which}: "
        f"as fast as theirs, they would spare {100 * share:.0f} % of the time"
    )
    _, node = place_of(ranks, nodes, ranks)
    text = f"group {group.name}: {1000 * statistics.median(group.shortest):.2f} ms a collective once all are there"
    return [
        Slowdown(
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


SMALL: Final = 16
"""In larger groups only neighbours are taken for pairs that send to each other."""
NEWEST: Final = 500
"""Sends and receives of a rank that are looked at."""
_Calls = dict[int, list[int]]
"""Digest of an operation -> indices of a rank's calls of it."""


def of_dumps(dumps: Iterable[RankDump]) -> list[RankTiming]:
    """One for each rank and group; nothing is copied. Ranks that send to each other are told by `p2p a->b`."""
    found = []
    for group in join(dumps).groups:
        name = str(group)
        found += [_of(rank, name, group.kind, one) for rank, one in group.calls.items()]
        for pair in itertools.pairwise(sorted(group.p2p)):
            found += [_of(rank, "p2p {}->{}".format(*pair), "p2p", group.p2p[rank]) for rank in pair]
        found += _links(group)
    return found


def _links(group: Joined) -> Iterator[RankTiming]:
    """Pairs that send to each other, where GPUs timed it: the n-th last send of the one is the n-th last receive of the
    other. As `LINK a-b` they are groups in which nobody is late: which of them waits is the pipeline's nature.
    """
    calls: dict[int, _Calls] = {}
    for rank, channel in group.p2p.items():
        if channel.durations_us and rank in group.members:
            known = calls[rank] = {}
            timed = len(channel.durations_us)
            for index in range(max(0, timed - NEWEST), timed):
                known.setdefault(channel.ops[index], []).append(index)
    for a, b in itertools.combinations([at for at, rank in enumerate(group.members) if rank in calls], 2):
        if len(group.members) > SMALL and b - a not in (1, len(group.members) - 1):
            continue
        one, other = group.members[a], group.members[b]
        pairs = [
            *_paired(calls[one], f"send {a}->{b}", calls[other], f"recv {b}<-{a}"),
            *_paired(calls[one], f"recv {a}<-{b}", calls[other], f"send {b}->{a}"),
        ]
        both = [pair for pair in sorted(pairs) if all(_took(group, pair, (one, other)))]
        for rank, indices in zip((one, other), zip(*both, strict=True), strict=False):
            channel = group.p2p[rank]
            yield RankTiming(
                rank=rank,
                group=f"LINK {one}-{other}",
                kind=LINK,
                seqs=range(len(indices)),
                created_ns=array("q", [channel.times[index] for index in indices]),
                duration_us=array("q", [channel.durations_us[index] for index in indices]),
            )


def _paired(one: _Calls, op: str, other: _Calls, counterpart: str) -> Iterator[tuple[int, int]]:
    """Indices of calls that belong together, the newest first."""
    mine, theirs = (calls.get(Call(f"nccl:{name}").digest(), []) for calls, name in ((one, op), (other, counterpart)))
    return zip(reversed(mine), reversed(theirs), strict=False)


def _took(group: Joined, pair: tuple[int, int], ranks: tuple[int, int]) -> Iterator[bool]:
    return (group.p2p[rank].durations_us[index] > 0 for rank, index in zip(ranks, pair, strict=True))


def _of(rank: int, group: str, kind: str, channel: Channel) -> RankTiming:
    return RankTiming(
        rank=rank,
        group=group,
        kind=kind,
        seqs=channel.seqs,
        created_ns=channel.times,
        completed_ns=channel.ended,
        duration_us=channel.durations_us,
    )
