"""When ranks came to collectives, out of flight recorder dumps: what `diagnosis.slow` asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from diagnosis.flight.dumps import RankDump
from diagnosis.flight.picture import join
from diagnosis.meetings import RankTiming


def of_dumps(dumps: Iterable[RankDump]) -> list[RankTiming]:
    """One for each rank and group; nothing is copied. Ranks that send to each other are told by `p2p a->b`."""
    found = []
    for group in join(dumps).groups:
        name = str(group)
        found += [
            RankTiming(rank=rank, group=name, seqs=one.seqs, created_ns=one.times) for rank, one in group.calls.items()
        ]
        for a, b in itertools.pairwise(sorted(group.p2p)):
            ends = ((rank, group.p2p[rank]) for rank in (a, b))
            found += [RankTiming(rank=r, group=f"p2p {a}->{b}", seqs=one.seqs, created_ns=one.times) for r, one in ends]
    return found
