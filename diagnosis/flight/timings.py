"""When ranks came to collectives, out of flight recorder dumps: what `diagnosis.trends.arrivals` asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from diagnosis.flight.dumps import Channel, RankDump
from diagnosis.flight.picture import join
from diagnosis.trends.meetings import RankTiming


def of_dumps(dumps: Iterable[RankDump]) -> list[RankTiming]:
    """One for each rank and group; nothing is copied. Ranks that send to each other are told by `p2p a->b`."""
    found = []
    for group in join(dumps).groups:
        name = str(group)
        found += [_of(rank, name, group.kind, one) for rank, one in group.calls.items()]
        for pair in itertools.pairwise(sorted(group.p2p)):
            found += [_of(rank, "p2p {}->{}".format(*pair), "p2p", group.p2p[rank]) for rank in pair]
    return found


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
