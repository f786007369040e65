"""Snapshots in memory that other nodes have a copy of: which one, who has what of it, and who gets what. Pure.

A node copies its part of a step, its ranks' snapshots, before the ranks write over it, and sends the copy to its peer.
All nodes copy the same step, without a word to each other: the controller names a step that is still to come, and each
takes its first snapshot from there on. So whatever is joined here is of one attempt and one step.

A copy is used only where a node was replaced, and only that of the attempt that has just ended: what every rank still
holds itself is newer, and what an attempt has gone back behind is not the run's any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from recovery.snapshot_choice import NodeSnapshot, SnapshotPart
from recovery.tiers import PartSource, SnapshotBring, SnapshotOrders

LEAD_S: Final = 3.0
"""So long before a step is made, nodes are told to copy it."""
MISSED_S: Final = 15.0
"""So long after it, every node should have its own copy. Where one has not, another step is tried."""
SEND_LIMIT_S: Final = 1800.0
"""So long the copies may be under way to the peers."""


class Mirrored(NamedTuple):
    """A snapshot of which every part is somewhere."""

    attempt: int
    step: int
    world: int
    at: float
    """When the last of its ranks wrote it."""
    parts: tuple[SnapshotPart, ...]
    """In the order of the ranks."""
    holders: tuple[tuple[str, ...], ...]
    """Of each part: the nodes that have it, its owner first."""

    @property
    def safe(self) -> bool:
        """The loss of one node leaves all of it."""
        return all(len(nodes) > 1 for nodes in self.holders)


def joined(held: Mapping[str, Sequence[SnapshotPart]]) -> list[Mirrored]:
    """Those of which the nodes have every part, the newest first: by attempt, then by step.

    `held`: what each node that is there has copied, of its own ranks or of others'.
    """
    together: dict[tuple[int, int, int], dict[SnapshotPart, set[str]]] = {}
    for node, parts in held.items():
        for part in parts:
            together.setdefault((part.attempt, part.step, part.world), {}).setdefault(part, set()).add(node)
    found: list[Mirrored] = []
    for (attempt, step, world), copies in together.items():
        parts = tuple(sorted(copies, key=lambda one: (one.first_rank, one.owner)))
        if not _covers(parts, world):
            continue
        holders = tuple(
            tuple(sorted(copies[part], key=lambda node, owner=part.owner: (node != owner, node)))  # type: ignore[misc]
            for part in parts
        )
        found.append(Mirrored(attempt, step, world, max(part.at for part in parts), parts, holders))
    return sorted(found, key=lambda one: (one.attempt, one.step), reverse=True)


def _covers(parts: Sequence[SnapshotPart], world: int) -> bool:
    """Each rank is in one part and no more."""
    first = 0
    for part in parts:
        if part.first_rank != first or part.ranks < 1:
            return False
        first += part.ranks
    return first == world


def of_all(one: Mirrored) -> NodeSnapshot:
    """As if all ranks held it."""
    return NodeSnapshot(attempt=one.attempt, step=one.step, first_rank=0, ranks=one.world, world=one.world, at=one.at)


def to_bring(candidates: Iterable[Mirrored], members: Sequence[str], attempt: int) -> Mirrored | None:
    """The newest that the next attempt may start from, where one of its members is not who wrote its place's part.

    `members`: in the order of their ranks. `attempt`: the one that has ended.
    """
    for one in candidates:
        if one.attempt == attempt and len(one.parts) == len(members):
            same = [part.owner for part in one.parts] == list(members)
            return None if same else one
    return None


def bring_to(chosen: Mirrored, place: int, addresses: Mapping[str, tuple[str, int, bool]]) -> SnapshotBring:
    """What the member of that place needs. `addresses`: host, port and TLS of the nodes whose movers answer."""
    part = chosen.parts[place]
    sources = tuple(
        PartSource(owner=part.owner, node=node, address=host, port=port, tls=tls)
        for node in chosen.holders[place]
        if node in addresses
        for host, port, tls in (addresses[node],)
    )
    return SnapshotBring(
        attempt=chosen.attempt,
        step=chosen.step,
        world=chosen.world,
        first_rank=part.first_rank,
        ranks=part.ranks,
        size_bytes=part.size_bytes,
        sources=sources,
    )


# ----- which step is copied next -----


class MirrorTarget(NamedTuple):
    """The step that nodes are to copy."""

    attempt: int
    from_step: int
    passed_at: float | None = None
    """When all ranks had written a snapshot of it."""


def is_needed(part: SnapshotPart, orders: SnapshotOrders) -> bool:
    """Whether a copy is kept: of an older step that nothing has replaced yet, or of what is copied now."""
    current = part.attempt == orders.attempt > 0 and part.step >= orders.from_step
    return current or (part.attempt, part.step) in orders.keep


class CommonStep(NamedTuple):
    """The newest snapshot that all ranks have written."""

    attempt: int
    step: int
    at: float


def next_target(
    target: MirrorTarget | None, before: CommonStep | None, seen: CommonStep, candidates: Sequence[Mirrored], now: float
) -> MirrorTarget | None:
    """What is to be copied from now on. None: the pace is not known yet.

    A step that is still to come: its snapshots are in the ranks' memory when the nodes look for them.
    """
    if target is not None and target.attempt != seen.attempt:
        target = None
    if before is None or before.attempt != seen.attempt or seen.step <= before.step or seen.at <= before.at:
        return target
    current = [one for one in candidates if target and one.attempt == target.attempt and one.step >= target.from_step]
    done = [one.step for one in current if one.safe]
    lead = max(1, math.ceil((seen.step - before.step) * LEAD_S / (seen.at - before.at)))
    anew = MirrorTarget(seen.attempt, max([seen.step, *done]) + lead)
    if target is None or done:
        return anew
    if seen.step < target.from_step and not current:
        return target
    passed_at = now if target.passed_at is None else target.passed_at
    limit_s = SEND_LIMIT_S if current else MISSED_S
    return anew if now - passed_at >= limit_s else target._replace(passed_at=passed_at)
