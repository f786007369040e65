"""Who waits for whom in a hang, small enough to be drawn. It is only shown: `judge` decides who is to blame.

Ranks that wait in the same calls, and are waited for in the same calls, are one node: 4,095 ranks in one collective are
drawn as one. What flight recorders do not show is taken from the hang watch's report: who waits, and for whom.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from diagnosis import stacks as stack_reading
from diagnosis.flight import waits
from diagnosis.flight.dumps import Call, from_rank_flights
from diagnosis.flight.waits import Picture, Wait, join
from diagnosis.incident import HangReport, WaitEdge, WaitGraph, WaitNode
from diagnosis.signals import RankFlight, RankStack, rank_names

MAX_NODES: Final = 24
MAX_EDGES: Final = 48
MAX_NAMED: Final = 64
MAX_CALLS: Final = 4096
MAX_DIFFERENT: Final = 64
"""Different calls of one number that are told apart."""


class _Group(NamedTuple):
    """Ranks that wait in one call, and those that they wait for."""

    waiting: frozenset[int]
    waited: frozenset[int]
    call: str


def who_waits(
    flights: Iterable[RankFlight],
    stacks: Sequence[RankStack],
    hang: HangReport | None,
    suspects: Collection[int],
    world: int = 0,
) -> WaitGraph | None:
    """None where nobody is known to wait for anybody."""
    picture = join(from_rank_flights(flights))
    groups = [*_disagreeing(picture), *_missing(picture, suspects)][:MAX_CALLS] or _of_report(stacks, hang, suspects)
    if not groups:
        return None
    told = hang.waiting if hang is not None and len(groups) == 1 else 0
    atoms: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    waits_in = _memberships([one.waiting for one in groups])
    waited_in = _memberships([one.waited for one in groups])
    for rank in sorted({*waits_in, *waited_in}):
        atoms[rank in suspects, waits_in.get(rank, ()), waited_in.get(rank, ())].append(rank)
    if told and not groups[0].waiting:
        atoms[False, (0,), ()] = []
    drawn = sorted(atoms.items(), key=lambda one: (not one[0][0], -len(one[0][2]), -len(one[1])))
    kept, rest = drawn[:MAX_NODES], drawn[MAX_NODES:]
    places = {one.rank: stack_reading.place(one) for one in reversed(stacks) if one.frames and not one.sample}
    nodes = tuple(
        WaitNode(
            count=max(len(ranks), told) if key[1] else len(ranks),
            ranks=tuple(ranks[:MAX_NAMED]),
            suspect=key[0],
            place=next((places[rank] for rank in ranks if rank in places), ""),
        )
        for key, ranks in kept
    )
    return WaitGraph(
        nodes=nodes,
        edges=_edges(groups, [key for key, _ in kept], nodes),
        left_out=sum(len(ranks) for _, ranks in rest),
        unseen=max(0, world - sum(one.count for one in nodes) - sum(len(ranks) for _, ranks in rest)),
    )


def _memberships(groups: Iterable[Iterable[int]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(groups):
        for rank in ranks:
            found[rank].append(number)
    return {rank: tuple(numbers) for rank, numbers in found.items()}


def _edges(
    groups: Sequence[_Group], keys: Sequence[tuple[bool, tuple[int, ...], tuple[int, ...]]], nodes: Sequence[WaitNode]
) -> tuple[WaitEdge, ...]:
    found: dict[tuple[int, int], WaitEdge] = {}
    sources, targets = _memberships(key[1] for key in keys), _memberships(key[2] for key in keys)
    for number, group in enumerate(groups):
        for source in sources.get(number, ()):
            for target in targets.get(number, ()):
                if source == target or (source, target) in found or len(found) >= MAX_EDGES:
                    continue
                one = nodes[source].count == 1
                text = f"{_who(nodes[source])} wait{'s' if one else ''} for {_who(nodes[target])} in {group.call}"
                found[source, target] = WaitEdge(waiting=source, waited=target, call=group.call, text=text)
    return tuple(found.values())


def _who(node: WaitNode) -> str:
    return rank_names(node.ranks) if 0 < node.count <= 6 and node.ranks else f"{node.count:,} ranks"


def _missing(picture: Picture, suspects: Collection[int]) -> Iterable[_Group]:
    """The calls that ranks stand in, and who has not come to them. A rank without a dump may only not have been asked:
    it counts where the verdict names it."""
    graph = waits.build(picture, fronts_only=True)
    waiting: dict[int, set[int]] = defaultdict(set)
    pairs: dict[tuple[int, str], set[int]] = defaultdict(set)
    for rank, targets in graph.edges.items():
        if rank >= graph.base:
            continue
        for target in targets:
            if target < graph.base and picture.absent(target) and target not in suspects:
                continue
            if target >= graph.base:
                waiting[target].add(rank)
            else:
                pairs[target, _call(picture, graph.waiting.get(rank))].add(rank)
    for node, ranks in waiting.items():
        call = _call(picture, graph.waiting.get(min(ranks)))
        waited = {one for one in graph.edges[node] - ranks if not picture.absent(one) or one in suspects}
        if waited:
            yield _Group(frozenset(ranks), frozenset(waited), call)
    for (target, call), ranks in pairs.items():
        yield _Group(frozenset(ranks), frozenset({target}), call)


def _disagreeing(picture: Picture) -> Iterable[_Group]:
    """Ranks that stand in the same number of a group's collectives, and called different ones: each waits for all."""
    for group in picture.groups:
        called: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, channel in group.calls.items():
            if channel.pending is not None:
                called[channel.seqs[channel.pending]][channel.calls[channel.pending]].append(rank)
        for seq, by_call in called.items():
            everyone = frozenset(rank for ranks in by_call.values() for rank in ranks)
            for ranks in islice(by_call.values(), MAX_DIFFERENT) if len(by_call) > 1 else ():
                call = _call(picture, Wait(ranks[0], group, seq, False))
                yield _Group(frozenset(ranks), everyone - frozenset(ranks), call)


def _call(picture: Picture, wait: Wait | None) -> str:
    """`all_reduce 1034 of default_pg`."""
    if wait is None:
        return "a call"
    channel = (wait.group.p2p if wait.p2p else wait.group.calls).get(wait.rank)
    called: Call | None = None
    if channel is not None and channel.pending is not None:
        called = picture.dumps[wait.rank].known.get(channel.calls[channel.pending])
    number = "" if wait.seq < 0 else f" {wait.seq}"
    return f"{called.kind if called is not None else 'collective'}{number} of {str(wait.group).partition(' (')[0]}"


def _of_report(stacks: Sequence[RankStack], hang: HangReport | None, suspects: Collection[int]) -> list[_Group]:
    """What the hang watch knows without recorders."""
    if hang is None:
        return []
    waited = frozenset(hang.ranks or suspects)
    waiting = frozenset(one.rank for one in stacks if stack_reading.waits_in_collective(one)) - waited
    return [_Group(waiting, waited, "a collective")] if waited and (waiting or hang.waiting) else []
