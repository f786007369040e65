"""Which snapshot all ranks start from, and whether replicas agree. Pure: nodes tell what their ranks hold.

A snapshot is used only if every rank of the new attempt has its own of the same attempt and step, on the node where it
will run: same world, same places. Anything else falls back to a checkpoint on storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from diagnosis.signals import Frozen

MAJORITY_OF: Final = 3
"""Among fewer replicas nobody can say who is right."""
REPORTS_KEPT: Final = 8
"""Of each group: snapshots whose digests are still awaited."""
COMPARED_KEPT: Final = 10_000


class RankSnapshot(Frozen, frozen=True, kw_only=True):
    """What a rank holds in memory, as its agent reads it."""

    rank: int
    world: int
    attempt: int
    step: int
    at: float
    """Unix time."""
    size_bytes: int = 0
    group: str = ""
    """A name for the ranks whose replicated tensors are equal by the script's declaration; empty: it declared none."""
    members: int = 0
    """How many ranks those are."""
    digests: tuple[str, ...] = ()
    """Of those tensors."""


class NodeSnapshot(Frozen, frozen=True, kw_only=True, order=True):
    """A snapshot that all ranks of one node hold."""

    attempt: int
    step: int
    first_rank: int
    ranks: int
    world: int
    at: float = 0.0
    """When the last of them was written."""


class SnapshotPart(Frozen, frozen=True, kw_only=True, order=True):
    """A copy of what the ranks of one node held."""

    attempt: int
    step: int
    world: int
    first_rank: int
    ranks: int
    owner: str
    """The node that wrote it."""
    at: float = 0.0
    size_bytes: int = 0


class ReplicasCompared(Frozen, frozen=True, kw_only=True):
    """Replicated tensors that are not the same on all ranks of a group."""

    attempt: int
    step: int
    ranks: int
    """How many were compared."""
    odd: tuple[int, ...]
    """Those that differ from the majority; empty where there is none."""
    contents: int
    """How many different ones there are."""
    agreed_at: float | None = None
    """When the newest snapshot before was written in which they were the same, by whichever attempt."""
    agreed_step: int | None = None
    """Its step, if this attempt wrote it."""


def of_node(held: Iterable[RankSnapshot]) -> tuple[NodeSnapshot, ...]:
    """The snapshots that all ranks of a node hold, newest first. They are neighbours: rank 8 to 15."""
    together: dict[tuple[int, int, int], dict[int, float]] = {}
    for one in held:
        together.setdefault((one.attempt, one.step, one.world), {})[one.rank] = one.at
    found = [
        NodeSnapshot(
            attempt=attempt, step=step, first_rank=min(ranks), ranks=len(ranks), world=world, at=max(ranks.values())
        )
        for (attempt, step, world), ranks in together.items()
        if max(ranks) - min(ranks) + 1 == len(ranks)
    ]
    return tuple(sorted(found, reverse=True))


def one_world(held: RankSnapshot) -> NodeSnapshot:
    """What all ranks hold, by what one of them tells of it."""
    return NodeSnapshot(
        attempt=held.attempt, step=held.step, first_rank=0, ranks=held.world, world=held.world, at=held.at
    )


def common(offers: Sequence[tuple[int, tuple[NodeSnapshot, ...]]]) -> tuple[NodeSnapshot, ...]:
    """Those that every rank holds, newest first: by the attempt that wrote them, then by step.

    `offers`: of the nodes in the order of their ranks, how many ranks each will run and what it holds. An attempt that
    went back to an earlier step wrote the later truth, so its snapshots come first.
    """
    world = sum(ranks for ranks, _ in offers)
    found: Counter[tuple[int, int]] = Counter()
    newest: dict[tuple[int, int], float] = {}
    first = 0
    for ranks, held in offers:
        for one in held:
            if (one.first_rank, one.ranks, one.world) == (first, ranks, world):
                key = one.attempt, one.step
                found[key] += 1
                newest[key] = max(one.at, newest.get(key, 0.0))
        first += ranks
    whole = sorted((key for key, count in found.items() if count == len(offers)), reverse=True)
    return tuple(
        NodeSnapshot(attempt=attempt, step=step, first_rank=0, ranks=world, world=world, at=newest[attempt, step])
        for attempt, step in whole
    )


def choose(candidates: Iterable[NodeSnapshot], *, checkpoint: bool, checkpoint_step: int | None) -> NodeSnapshot | None:
    """The snapshot to start from. None: the checkpoint on storage is as new, or its step is not known."""
    for one in candidates:
        if not checkpoint or (checkpoint_step is not None and one.step > checkpoint_step):
            return one
    return None


class ReplicaWatch:
    """Compares the digests of each group once all of its ranks have told theirs of a step. Mutable."""

    def __init__(self) -> None:
        self._reports: dict[tuple[int, int, str], dict[int, tuple[str, ...]]] = {}
        self._compared: dict[tuple[int, int, str], None] = {}
        self._agreed: dict[str, list[tuple[int, int, float]]] = {}
        """By group: attempt and step of the newest snapshots in which they were the same, and when those were written.
        A node that was not heard for a while may tell of an earlier step after a later one."""

    def observe(self, held: Iterable[RankSnapshot]) -> list[ReplicasCompared]:
        """What a node tells; the groups that it completes and that differ."""
        found: list[ReplicasCompared] = []
        for one in sorted(held, key=lambda one: (one.attempt, one.step)):
            key = (one.attempt, one.step, one.group)
            if not one.digests or not one.group or key in self._compared:
                continue
            told = self._reports.setdefault(key, {})
            told[one.rank] = one.digests
            if one.members <= 1 or len(told) < one.members:
                continue
            del self._reports[key]
            self._compared[key] = None
            if len(set(told.values())) == 1:
                agreed = [*self._agreed.get(one.group, ()), (one.attempt, one.step, one.at)]
                self._agreed[one.group] = sorted(agreed)[-REPORTS_KEPT:]
                continue
            before = [known for known in self._agreed.get(one.group, ()) if known[:2] < (one.attempt, one.step)]
            attempt, step, at = before[-1] if before else (-1, None, None)
            found.append(
                ReplicasCompared(
                    attempt=one.attempt,
                    step=one.step,
                    ranks=len(told),
                    odd=odd_ranks(told),
                    contents=len(set(told.values())),
                    agreed_at=at,
                    agreed_step=step if attempt == one.attempt else None,
                )
            )
        limit = REPORTS_KEPT * max(1, len({group for _, _, group in self._reports}))
        for key in list(self._reports)[:-limit]:
            del self._reports[key]
        for key in list(self._compared)[:-COMPARED_KEPT]:
            del self._compared[key]
        for group in list(self._agreed)[:-COMPARED_KEPT]:
            del self._agreed[group]
        return found


def odd_ranks(told: Mapping[int, tuple[str, ...]]) -> tuple[int, ...]:
    """The ranks that differ where more than half of at least three replicas agree; none where nobody can say."""
    digests, count = Counter(told.values()).most_common(1)[0]
    if len(told) < MAJORITY_OF or 2 * count <= len(told):
        return ()
    return tuple(sorted(rank for rank, own in told.items() if own != digests))
