"""What the job takes from the ledger of all jobs, and what it adds to it.

Nodes that the ledger cordons are not used. Those that were repaired lately, or fail again and again, are used where
there are no others: that is known, and not proof. What this job learns of a node is written there; a proven fault of
its hardware is a proposal to all jobs, or a cordon, as the job's settings say.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.incident import Verdict
from diagnosis.taxonomy import TAXONOMY, FailureClass
from recovery.cordon import Cordon
from recovery.ledger import (
    TEXT_LIMIT,
    CordonLifted,
    CordonScope,
    LedgerRecord,
    NodeCordoned,
    NodeFailed,
    TestResult,
)
from recovery.policy import SURE_ENOUGH
from supervisor import messages as m
from supervisor.job.core import Core, Wants, WantsAnd
from supervisor.job.nodes import Nodes
from supervisor.notes import note

UNWRITTEN_KEPT: Final = 500
"""Records that the ledger has not taken yet; of more, the newest."""
WRITTEN_KEPT: Final = 200
"""Nodes of which the job knows what it has written."""
BAD_POINTS: Final = 4.0
"""From here on a node is used where there are no others: two outages within 28 days."""


def proves_hardware(failure_class: FailureClass | None) -> bool:
    """Whether it is the node itself, for every job that would run there."""
    if failure_class is None:
        return False
    entry = TAXONOMY[failure_class]
    return entry.kind == "cause" and entry.retry == "exclude" and entry.domain in ("accelerator", "host")


class ClusterLedger:
    def __init__(self, core: Core, nodes: Nodes) -> None:
        self._core, self._nodes = core, nodes
        self._known: dict[str, m.LedgerNode] = {}
        """By the scheduler's name."""
        self._fleet = 0
        self._problem = self._unwritable = ""
        self._number = 0
        self._unwritten: dict[int, m.LedgerWrite] = {}
        self._written: dict[str, tuple[str, ...]] = {}
        """Node -> the entries in which this job has cordoned it."""

    # ----- queries -----

    @property
    def is_on(self) -> bool:
        return bool(self._core.spec.ledger)

    def of(self, name: str) -> m.LedgerNode | None:
        """What the ledger says of a node of the job, where it says anything."""
        node = self._nodes.get(name)
        return self._known.get(node.scheduler_name or name if node is not None else name)

    def on_probation(self, name: str) -> bool:
        """It was repaired, and the first bad word about it is not the first: there was one before the repair."""
        known = self.of(name)
        return known is not None and known.probation_until is not None and known.probation_until > self._core.now

    @property
    def lemons(self) -> tuple[str, ...]:
        """Of the whole cluster."""
        return tuple(sorted(one.node for one in self._known.values() if one.lemon))

    # ----- what it says -----

    def seen(self, event: m.LedgerSeen) -> WantsAnd[tuple[str, ...]]:
        """Nodes of the job that must not be used any more."""
        before, self._known = self._known, {one.node: one for one in event.nodes}
        if event.problem != self._problem:
            self._problem = event.problem
            yield note("ledger_unreadable", loud=True, why=event.problem) if event.problem else note("ledger_read")
        if event.problem:
            self._known = before
            return ()
        self._fleet = event.fleet
        if event.unwritten != self._unwritable:
            self._unwritable = event.unwritten
            why = event.unwritten
            yield note("ledger_unwritable", loud=True, why=why) if why else note("ledger_written")
        out = []
        for node in self._nodes:
            name = node.scheduler_name or node.name
            was, now = before.get(name), self._known.get(name)
            yield from self._tell(node.name, was, now)
            if now is not None and now.cordon and (was is None or not was.cordon):
                out.append(node.name)
        self._apply()
        self._nodes.touch_all()
        return tuple(out)

    def joined(self, name: str) -> Wants:
        """A node registered: from now on it has the ledger's word about it."""
        known = self.of(name)
        if known is not None:
            yield from self._tell(name, None, known)
            self._apply()

    def begin_life(self) -> None:
        self._apply()

    def _tell(self, name: str, was: m.LedgerNode | None, now: m.LedgerNode | None) -> Wants:
        if now is not None and now.cordon:
            known = self._nodes.cordons.of_job(name, self._core.now) is not None  # most often: this job wrote it
            if not known and (was is None or was.cordon != now.cordon):
                yield note("cluster_cordoned", loud=True, node=name, reason=now.cordon, by=now.by, until=now.until)
            return
        if was is not None and was.cordon:
            yield note("cluster_cordon_over", loud=True, node=name)
        if now is None:
            return
        if now.probation_until is not None and (was is None or was.probation_until is None):
            yield note("on_probation", node=name, until=now.probation_until)
        if now.retest_due and (was is None or not was.retest_due):
            yield note("retest_due", loud=True, node=name)
        if now.lemon and (was is None or not was.lemon):
            yield note("lemon_proposed", loud=True, node=name, points=now.points, why="; ".join(now.why))

    def _apply(self) -> None:
        ours = {node.scheduler_name or node.name: node.name for node in self._nodes}
        held = [one for one in self._known.values() if one.cordon]
        self._nodes.cordons.set_cluster(tuple(_cordon(one, ours.get(one.node, one.node)) for one in held))
        doubtful = (one for one in self._known.values() if one.probation_until is not None or one.points >= BAD_POINTS)
        self._nodes.last_choice = frozenset(ours.get(one.node, one.node) for one in doubtful)

    # ----- what the job adds -----

    def cordoned(self, cordon: Cordon, *, approved: bool) -> Wants:
        """`approved`: by policy, and an operator approved it."""
        scope: CordonScope = "job"
        if proves_hardware(cordon.failure_class):
            scope = "cluster" if self._core.spec.ledger == "cordon" else "proposal"
        name = self._name(cordon.node)
        what = NodeCordoned(
            node=name,
            gpu=cordon.gpu or cordon.culprit_gpu,
            scope=scope,
            failure_class=cordon.failure_class.value if cordon.failure_class is not None else "",
            incident=cordon.incident,
            reason=cordon.reason[:TEXT_LIMIT],
            until=cordon.until,
            fleet=max(self._fleet, len(self._nodes)),
        )
        by = "an operator approved" if approved else cordon.by
        entry = yield from self._write(what, by)
        if entry:
            self._written[cordon.node] = (*self._written.pop(cordon.node, ()), entry)[-8:]
            while len(self._written) > WRITTEN_KEPT:
                del self._written[next(iter(self._written))]
        if entry and scope != "job":
            yield note("ledger_cordon", incident=cordon.incident, node=cordon.node, proposal=scope == "proposal")

    def lifted(self, name: str, by: str, reason: str) -> Wants:
        """An operator says that the job may use the node: what the job wrote against it does not hold."""
        if self._nodes.cordons.of_job(name, self._core.now) is not None:
            return  # for another GPU
        entries = self._written.pop(name, ())
        if entries:
            yield from self._write(CordonLifted(node=self._name(name), lifts=entries, repair=reason[:TEXT_LIMIT]), by)

    def failed(self, incident: str, verdict: Verdict | None) -> Wants:
        """An incident is closed: nodes that it proves to be the cause have failed. One whose `unbroken run` somebody
        has killed is as good as before."""
        if verdict is None or verdict.confidence < SURE_ENOUGH or TAXONOMY[verdict.failure_class].retry != "exclude":
            return
        told: set[str] = set()
        for culprit in verdict.culprits:
            known = self._nodes.get(culprit.node) if culprit.node else None
            killed = verdict.failure_class is FailureClass.NODE_FAILURE and known is not None and known.front_ended
            if culprit.node and culprit.node not in told and not killed:
                told.add(culprit.node)
                what = NodeFailed(
                    node=self._name(culprit.node),
                    gpu=culprit.gpu,
                    failure_class=verdict.failure_class.value,
                    incident=incident,
                    reason=verdict.why[:TEXT_LIMIT],
                )
                yield from self._write(what, "policy")

    def tested(self, result: TestResult) -> Wants:
        """What an active test said of a node of this job."""
        names = {"node": self._name(result.node), "peers": tuple(map(self._name, result.peers))}
        yield from self._write(msgspec.structs.replace(result, **names), "policy")

    def _name(self, name: str) -> str:
        node = self._nodes.get(name)
        return node.scheduler_name or name if node is not None else name

    def _write(self, what: LedgerRecord, by: str) -> WantsAnd[str]:
        """The entry's id; empty where there is no ledger."""
        core = self._core
        if not self.is_on:
            return ""
        self._number += 1
        job = core.spec.scheduler_job or core.spec.name
        name = f"{job[:60]}-{core.defined_at or 0.0:.3f}-{self._number}"
        write = m.LedgerWrite(number=self._number, id=name, at=core.now, by=by, job=job[:120], what=what)
        self._unwritten[self._number] = write
        while len(self._unwritten) > UNWRITTEN_KEPT:
            del self._unwritten[next(iter(self._unwritten))]
        yield write
        return name

    def written(self, event: m.LedgerWritten) -> None:
        self._unwritten.pop(event.number, None)

    def give_again(self) -> Wants:
        """The controller was replaced: what it was to write may be lost."""
        yield from tuple(self._unwritten.values())


def _cordon(known: m.LedgerNode, name: str) -> Cordon:
    classes = {one.value: one for one in FailureClass}
    return Cordon(
        node=name,
        gpu=known.gpu,
        reason=known.cordon,
        by=known.by,
        failure_class=classes.get(known.failure_class),
        at=known.cordoned_at,
        until=known.until,
    )
