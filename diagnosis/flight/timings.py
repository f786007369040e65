"""When ranks came to collectives, out of flight recorder dumps: what `diagnosis.stragglers.collectives` asks for."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import Final

from diagnosis.flight.dumps import Call, Channel, RankDump
from diagnosis.flight.waits import Joined, join
from diagnosis.stragglers.collectives import LINK, RankTiming

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
