"""Slow ranks and links by the times of collectives: who comes last again and again, and what its peers lose by that.

Where GPUs timed the collectives (`duration_us`) the one that came last has the shortest duration, whatever clocks
say; else the times of the calls tell, as far as peers really waited: a CPU that runs ahead of its GPU waits for nobody.
A rank that is late because another made it wait is early there by as much: what counts is the sum of both.
"""

from __future__ import annotations

import bisect
import itertools
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from diagnosis import series
from diagnosis.signals import Evidence, Word
from diagnosis.story import Slowness
from diagnosis.stuck import names

LEAST: Final = 16
"""Collectives that anything is told from at least."""
MAX_ENTRIES: Final = 600_000
"""The newest are looked at: some 5 s of CPU."""
COST: Final = 0.05
"""Share of the time that peers must lose."""
ONE_SIDED: Final = 0.75
"""So much of what sets a rank apart must be lateness."""
GAP: Final = 0.5
TIMED_S: Final = 0.0005
CALLED_S: Final = 0.005
"""A lateness that can be told where GPUs timed it, and where clocks of several nodes did."""
CLOCK_NS: Final = 30_000_000
"""Clocks that differ by less are as good as equal."""
LINK_SLOWER: Final = 1.6
"""Times the median of groups alike."""
SIBLINGS: Final = 3
HIDDEN_NS: Final = 50_000_000
"""A collective that ends so much later than its last rank came, and later than that one's lateness, was not held up."""
_P2P: Final = re.compile(r"p2p (\d{1,9})->(\d{1,9})")


class RankTiming(Word, frozen=True, kw_only=True):
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
    started_ns: Sequence[int] = ()
    """Seen to run."""
    completed_ns: Sequence[int] = ()
    """Seen to be complete; empty where no entry tells."""
    duration_us: Sequence[int] = ()
    """As the GPU measured it (`duration_ms`); empty where timing was off."""
    ops: tuple[str, ...] = ()
    """`nccl:all_reduce`, ...: the names of these collectives (one for all, or one for each)."""


class _Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]
    seqs: list[int]
    """Those that all its known ranks have come to."""
    late: dict[int, list[float]]
    """Of each rank and collective, seconds after the median of the ranks; 0 where nobody waited."""
    shortest: list[float]
    """Of each collective, the shortest duration in seconds; empty where none is known."""
    kind: tuple[object, ...]
    """Groups that do the same in the job are equal in this."""


def judge(timings: Iterable[RankTiming], nodes: Mapping[int, str] | None = None) -> tuple[Slowness, ...]:
    """Ranks that others wait for at each step, and groups whose transfers are slow, the costliest first."""
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
        if len(members) >= 2 and (group := _group(name, members, offsets, following, newest)) is not None
    ]
    span = _span_s(known, newest)
    if not groups or span <= 0:
        return ()
    links = _slow_links(groups, span, nodes or {})
    slow = _late_ranks(_within_stages(groups, by_group), span, nodes or {})
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


# ----- reading -----


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
    """How far each rank's clock is ahead, in ns, by the largest group: a collective ends everywhere at once."""
    timed = [members for members in by_group.values() if len(members) > 1 and all(one.completed_ns for one in members)]
    if not timed:
        return {}
    members = max(timed, key=len)
    ends = [{seq: at for seq, at in zip(one.seqs, one.completed_ns, strict=False) if at > 0} for one in members]
    shared = sorted(set.intersection(*map(set, ends)))[-200:]
    if len(shared) < LEAST:
        return {}
    middle = {seq: statistics.median(of[seq] for of in ends) for seq in shared}
    found = {}
    for one, of in zip(members, ends, strict=True):
        offset = statistics.median(of[seq] - middle[seq] for seq in shared)
        if abs(offset) > CLOCK_NS:
            found[one.rank] = offset
    return found


class _Following:
    """When each rank came to whatever it did next."""

    def __init__(self, timings: Sequence[RankTiming], offsets: Mapping[int, float], newest: int) -> None:
        self._times: dict[int, list[float]] = {}
        for timing in timings:
            offset = offsets.get(timing.rank, 0.0)
            times = self._times.setdefault(timing.rank, [])
            times.extend(at - offset for at in timing.created_ns[-newest:] if at > 0)
        for times in self._times.values():
            times.sort()

    def waited(self, rank: int, came: float, last: float) -> bool:
        """It came, and did nothing more until the last one was there."""
        times = self._times.get(rank, [])
        at = bisect.bisect_right(times, came)
        return at < len(times) and times[at] >= last


def _group(
    name: str, members: Sequence[RankTiming], offsets: Mapping[int, float], following: _Following, newest: int
) -> _Group | None:
    timed = all(one.duration_us and len(one.duration_us) == len(one.seqs) for one in members)
    came: list[dict[int, float]] = []
    for one in members:
        offset = offsets.get(one.rank, 0.0)
        times = (-1000.0 * took for took in one.duration_us[-newest:]) if timed else None
        values = times or (at - offset if at > 0 else 0.0 for at in one.created_ns[-newest:])
        came.append({seq: at for seq, at in zip(one.seqs[-newest:], values, strict=False) if at})
    ends = _first_end(members, offsets, newest) if not timed else {}
    seqs = sorted(set.intersection(*map(set, came)))
    if len(seqs) < LEAST:
        return None
    ranks = tuple(one.rank for one in members)
    late: dict[int, list[float]] = {rank: [] for rank in ranks}
    for seq in seqs:
        times_of = [of[seq] for of in came]
        last, middle = max(times_of), statistics.median(times_of)
        early = [(rank, at) for rank, at in zip(ranks, times_of, strict=True) if at < last]
        counts = timed or (
            ends.get(seq, last) - last <= max(HIDDEN_NS, last - middle)
            and 2 * sum(following.waited(rank, at, last) for rank, at in early) >= len(early)
        )
        for rank, at in zip(ranks, times_of, strict=True):
            late[rank].append((at - middle) / 1e9 if counts else 0.0)
    shortest = [min(-of[seq] for of in came) / 1e9 for seq in seqs] if timed else []
    ops = frozenset(op for one in members[:1] for op in one.ops)
    return _Group(name, ranks, seqs, late, shortest, (len(ranks), ops, name.startswith("p2p")))


def _first_end(members: Sequence[RankTiming], offsets: Mapping[int, float], newest: int) -> dict[int, float]:
    """When the first rank saw a collective complete."""
    ends: dict[int, float] = {}
    for one in members:
        offset = offsets.get(one.rank, 0.0)
        for seq, at in zip(one.seqs[-newest:], one.completed_ns[-newest:], strict=False):
            if at > 0:
                ends[seq] = min(ends.get(seq, at - offset), at - offset)
    return ends


# ----- ranks -----


def _late_ranks(telling: Sequence[_Group], span: float, nodes: Mapping[int, str]) -> list[Slowness]:
    late: dict[int, list[float]] = {}
    for group in telling:
        for rank, values in group.late.items():
            late.setdefault(rank, []).extend(values)
    if len(late) < 2:
        return []
    scores = {rank: _trimmed(values) / span for rank, values in late.items()}
    slow = {rank for rank in _leaders(scores) if _one_sided(late[rank])}
    if not slow or 3 * len(slow) > max(3, len(late)):
        return []
    costs = {group.name: _lost(group, slow) / span for group in telling if not slow.isdisjoint(group.ranks)}
    group = max((one for one in telling if one.name in costs), key=lambda one: costs[one.name])
    cost = min(costs[group.name], 0.99)
    if cost < COST:
        return []
    worst = max(slow.intersection(group.ranks), key=lambda rank: scores[rank])
    kind, node = place_of(slow, nodes, late)
    values = group.late[worst]
    typical = statistics.median([value for value in values if value > 0] or [0.0])
    if typical < (TIMED_S if group.shortest else CALLED_S):
        return []
    share = sum(value >= 0.5 * typical and value > 0 for value in values) / len(values)
    why = (
        f"{names(slow)} came {1000 * typical:.0f} ms after the others to {100 * share:.0f} % of the collectives "
        f"of group {group.name}: without {'it' if len(slow) == 1 else 'them'} steps would take "
        f"{100 * cost:.0f} % less time"
    )
    return [
        Slowness(
            kind=kind,
            ranks=tuple(sorted(slow)),
            cost_percent=round(100 * cost, 1),
            why=why,
            confidence=0.9 if cost >= 2 * COST and len(late) > 2 else 0.7,
            node=node,
            evidence=(_evidence(group, worst, nodes),),
        )
    ]


def _within_stages(groups: Sequence[_Group], names_of_all: Iterable[str]) -> list[_Group]:
    """The groups in which ranks do the same work. Stages of a pipeline wait for each other by its nature."""
    pipeline: dict[int, int] = {}
    """Rank -> the least rank of its pipeline."""

    def first(rank: int) -> int:
        while pipeline.setdefault(rank, rank) != rank:
            rank = pipeline[rank]
        return rank

    for name in names_of_all:
        ends = _P2P.fullmatch(name)
        if ends is not None:
            a, b = sorted((first(int(ends[1])), first(int(ends[2]))))
            pipeline[b] = a
    same_work = [group for group in groups if len({first(rank) for rank in group.ranks}) == len(group.ranks)]
    return [group for group in same_work if not _P2P.fullmatch(group.name)]


def _leaders(scores: Mapping[int, float]) -> list[int]:
    """The ranks before the first gap: those after it have less than half."""
    ordered = sorted(scores, key=lambda rank: -scores[rank])
    for count, (rank, following) in enumerate(itertools.pairwise(ordered), 1):
        if scores[rank] < COST / 2 or 3 * count > max(3, len(ordered)):
            break
        if scores[following] < GAP * scores[rank]:
            return ordered[:count]
    return []


def _trimmed(values: Sequence[float]) -> float:
    """Their sum without the few largest: rank 0 saves a checkpoint, somebody compiles again."""
    ordered = sorted(values, key=abs)
    return sum(ordered[: len(ordered) - max(1, len(ordered) // 20)])


def _one_sided(values: Sequence[float]) -> bool:
    usual = sorted(values, key=abs)[: len(values) - max(1, len(values) // 20)]
    total = sum(map(abs, usual))
    return total > 0 and sum(value for value in usual if value > 0) >= ONE_SIDED * total


def _lost(group: _Group, slow: Collection[int]) -> float:
    """Seconds that would be saved if these ranks came like the last of the others."""
    rest = [group.late[rank] for rank in group.ranks if rank not in slow]
    bad = [group.late[rank] for rank in group.ranks if rank in slow]
    if not rest:
        return 0.0
    saved = [max(0.0, max(of[index] for of in bad) - max(of[index] for of in rest)) for index in range(len(group.seqs))]
    return _trimmed(saved)


def _evidence(group: _Group, rank: int, nodes: Mapping[int, str]) -> Evidence:
    values = group.late[rank]
    worst = max(range(len(values)), key=lambda index: values[index])
    text = (
        f"group {group.name}, {len(values)} collectives: rank {rank} is {1000 * statistics.fmean(values):.1f} ms late on "
        f"average, {1000 * values[worst]:.0f} ms at collective {group.seqs[worst]}"
    )
    return Evidence(text=text, source="flight recorder", rank=rank, node=nodes.get(rank, ""))


# ----- links -----


def _slow_links(groups: Sequence[_Group], span: float, nodes: Mapping[int, str]) -> list[Slowness]:
    """Groups that need longer for their transfers than groups that do the same."""
    kinds: dict[tuple[object, ...], list[_Group]] = {}
    for group in groups:
        if group.shortest:
            kinds.setdefault(group.kind, []).append(group)
    slow: list[tuple[float, float, _Group]] = []
    for alike in kinds.values():
        if len(alike) <= SIBLINGS:
            continue
        typical = {group.name: statistics.median(group.shortest) for group in alike}
        middle = statistics.median(typical.values())
        bar = max(LINK_SLOWER * middle, middle + 6 * series.spread(list(typical.values())))
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
    why = f"transfers of group {group.name} take {ratio:.1f} times as long as those of groups alike: {which}"
    _, node = place_of(ranks, nodes, ranks)
    text = f"group {group.name}: {1000 * statistics.median(group.shortest):.2f} ms a collective once all are there"
    return [
        Slowness(
            kind="link",
            ranks=ranks,
            cost_percent=round(100 * min(cost, 0.99), 1),
            why=why,
            confidence=0.7,
            node=node,
            evidence=(Evidence(text=text, source="flight recorder", rank=ranks[0], node=nodes.get(ranks[0], "")),),
        )
    ]
