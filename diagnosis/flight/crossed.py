"""Ranks of which each waits for another one that waits for it: that ends never, first collective of its group or not.

Stricter than `waits`, which looks for whom to name once it is known that something hangs. A rank counts only where its
recorder tells of exactly one open call: of several any may be the one that it stands in. Groups whose members nobody
tells do not count, nor do ranks without a recorder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from diagnosis.flight import online
from diagnosis.flight.dumps import COMPLETED, RankDump
from diagnosis.flight.picture import Joined, Picture, join
from diagnosis.flight.waits import components
from diagnosis.signals import RankFlight
from diagnosis.stuck import names


class Crossed(NamedTuple):
    ranks: tuple[int, ...]
    """They wait for each other, in a ring or in several."""
    odd: tuple[int, ...]
    """Those that most others wait for; nobody where it is one against one."""
    why: str


class _Call(NamedTuple):
    group: Joined
    seq: int
    here: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that have not come."""


def find(flights: Iterable[RankFlight], standing: Collection[int], unrecorded: Collection[int] = ()) -> Crossed | None:
    """`standing`: ranks that stand in a collective and do nothing else. `unrecorded`: those of them that stand in a
    send or receive, which gloo does not record: for whom they wait is not known.
    """
    picture = join(online.from_rank_flights(flights))
    stands = {rank for rank in standing if rank in picture.dumps}
    calls = _calls(picture, stands)
    edges: dict[int, set[int]] = {}
    for call in calls:
        for rank in call.here:
            edges[rank] = {one for one in call.missing if one in stands}
    _add_unrecorded(picture, edges, [rank for rank in unrecorded if rank in stands], set(standing))
    ring = {rank for part in components(edges) if len(part) > 1 for rank in part}
    if not ring:
        return None
    involved = [call for call in calls if ring & set(call.here)]
    first = min(involved, key=lambda call: len(call.missing))
    fewest = [call for call in involved if len(call.missing) == len(first.missing)]
    odd = first.missing if len(fewest) == 1 and len(first.missing) < len(first.here) else ()
    told = "; ".join(f"{names(one.here)} in collective {one.seq} of {one.group}" for one in involved[:3])
    more = f"; and {len(involved) - 3} others" if len(involved) > 3 else ""
    who = names(ring)
    why = f"{who} wait for each other in different collectives: {told}{more}"
    alone = ring - {rank for call in calls for rank in call.here}
    return Crossed(tuple(sorted(ring)), odd, why + (f"; {names(alone)} in a send or receive" if alone else ""))


def _calls(picture: Picture, stands: set[int]) -> list[_Call]:
    """The calls that standing ranks stand in, and who has not come to them."""
    here: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(stands):
        at = _only_open(picture.dumps[rank])
        if at is not None:
            here.setdefault((picture.of[rank, at[0]], at[1]), []).append(rank)
    calls = []
    for (number, seq), ranks in here.items():
        group = picture.groups[number]
        missing = tuple(one for one in group.members if not picture.absent(one) and group.enqueued(one) < seq)
        calls.append(_Call(group, seq, tuple(ranks), missing))
    return calls


def _only_open(dump: RankDump) -> tuple[int, int] | None:
    """Channel and number of the one call that is not completed; None for none, for several, and for sends."""
    found = [
        (number, seq)
        for number, channel in enumerate(dump.channels)
        for seq, state in zip(channel.seqs, channel.states, strict=True)
        if state != COMPLETED
    ]
    if len(found) != 1 or dump.channels[found[0][0]].p2p:
        return None
    return found[0]


def _add_unrecorded(picture: Picture, edges: dict[int, set[int]], ranks: list[int], everyone: set[int]) -> None:
    """It waits for some other rank: where all others wait for it, for one that waits for it."""
    if len(ranks) != 1 or ranks[0] in edges or any(_opens(picture.dumps[ranks[0]])):
        return
    reached, todo = {ranks[0]}, [ranks[0]]
    while todo:
        target = todo.pop()
        for source, targets in edges.items():
            if target in targets and source not in reached:
                reached.add(source)
                todo.append(source)
    if len(everyone) > 1 and reached == everyone:
        edges[ranks[0]] = everyone - {ranks[0]}


def _opens(dump: RankDump) -> Iterable[bool]:
    return (state != COMPLETED for channel in dump.channels for state in channel.states)
