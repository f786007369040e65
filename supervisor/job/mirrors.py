"""Snapshots in memory that other nodes have a copy of: which step is copied, what is kept, what is brought back.

Nothing here happens unless the user asked for it (`JobSpec.mirror_snapshots`). The rules are in
`recovery.snapshot_mirrors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from recovery.snapshot_mirrors import CommonStep, Mirrored, MirrorTarget, bring_to, joined, next_target
from recovery.tiers import SnapshotOrders
from supervisor import messages as m
from supervisor.job.core import Core, Wants
from supervisor.job.nodes import Nodes
from supervisor.job.tiers import Tiers

EVERY_S: Final = 10.0
"""A step is named at most so often, and later by ..."""
NODE_S: Final = 0.2
"""... for each node."""


class SnapshotMirrors:
    """What nodes have copied, and the orders that follow."""

    def __init__(self, core: Core, nodes: Nodes, tiers: Tiers) -> None:
        self._core, self._nodes, self._tiers = core, nodes, tiers
        self._before: CommonStep | None = None
        self._seen: CommonStep | None = None
        self._target: MirrorTarget | None = None
        self._named_at = 0.0
        """When the step was named."""
        self._told: tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]] = (None, ())

    @property
    def are_on(self) -> bool:
        return self._core.spec.mirror_snapshots and self._tiers.are_on

    def candidates(self) -> list[Mirrored]:
        """Of the nodes that are there, the newest first."""
        if not self.are_on:
            return []
        return joined({node: report.snapshots for node, report in self._tiers.reports().items()})

    @property
    def newest(self) -> Mirrored | None:
        """The newest of which the loss of any node leaves all."""
        return next((one for one in self.candidates() if one.safe), None)

    def _kept(self, attempt: int) -> tuple[tuple[int, int], ...]:
        """Older copies of that attempt which are not replaced yet."""
        found = [one for one in self.candidates() if one.attempt == attempt]
        kept = next((one for one in found if one.safe), found[0] if found else None)
        return ((kept.attempt, kept.step),) if kept is not None else ()

    # ----- orders -----

    def orders(
        self, place: int | None, sizes: tuple[int, ...], last: int, bring: Mirrored | None
    ) -> SnapshotOrders | None:
        """`place`: of the node among the members; None: it is none. `sizes`: how many ranks each member has; none
        where that is not known. `last`: the newest attempt that had ranks. `bring`: what the next one may start from.
        None: snapshots are not mirrored."""
        if not self.are_on:
            return None
        if self._core.is_over:
            return SnapshotOrders()
        target = self._target
        kept = self._kept(last)
        found = SnapshotOrders(keep=kept if bring is None else tuple({*kept, (bring.attempt, bring.step)}))
        if target is not None:
            found = SnapshotOrders(
                attempt=target.attempt,
                from_step=target.from_step,
                first_rank=sum(sizes[:place]) if place is not None and sizes else 0,
                ranks=sizes[place] if place is not None and sizes else 0,
                world=sum(sizes),
                keep=found.keep,
            )
        if bring is None or place is None:
            return found
        return SnapshotOrders(
            attempt=found.attempt,
            from_step=found.from_step,
            keep=found.keep,
            bring=bring_to(bring, place, self._addresses()),
        )

    def _addresses(self) -> Mapping[str, tuple[str, int, bool]]:
        reports = self._tiers.reports()
        return {
            node.name: (node.address, report.port, report.tls)
            for node in self._nodes
            if (report := reports.get(node.name)) is not None and report.port
        }

    # ----- changes -----

    def seen(self, event: m.SnapshotSeen) -> Wants:
        if self.are_on:
            self._before, self._seen = self._seen, CommonStep(event.attempt, event.step, event.at)
            self.work_out(event.attempt)
        yield from ()

    def work_out(self, attempt: int) -> None:
        """What nodes have, or what their ranks wrote, has changed."""
        if not self.are_on:
            return
        if self._seen is not None and self._seen.attempt == attempt:
            candidates = self.candidates()
            self._aim(next_target(self._target, self._before, self._seen, candidates, self._core.now))
        target = self._target
        told = (target.attempt, target.from_step) if target is not None else None, self._kept(attempt)
        if told != self._told:
            self._told = told
            self._nodes.touch_all()

    def _aim(self, target: MirrorTarget | None) -> None:
        """Each step costs all nodes some reports: on many nodes it is named less often."""
        held, now = self._target, self._core.now
        anew = target is not None and (held is None or target[:2] != held[:2])
        soon = held is not None and target is not None and held.attempt == target.attempt
        if anew and soon and now - self._named_at < EVERY_S + NODE_S * len(self._nodes):
            return
        self._named_at = now if anew else self._named_at
        self._target = target

    def begin_life(self) -> None:
        self._before = self._seen = self._target = None
