"""Planned swaps: a node that degrades leaves when a checkpoint has just become complete, and a spare takes its place.

Who proposes one: a finding with an outlook (`diagnosis.signals.Outlook`), a device that failed while its rank trains
on, a straggler, the scheduler, the ledger of all jobs, an alert where a rule of the site says so, an operator.
`recovery.swaps` says what becomes of it; that is asked again at each checkpoint, and shown before it happens. If the
run restarts for another reason meanwhile, the node leaves with that restart.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Finding, clean_line
from diagnosis.taxonomy import FailureClass
from recovery import swaps
from recovery.cordon import Cordon, breaker_limit
from recovery.policy import Plan
from recovery.swaps import Cause, SwapDecision
from supervisor import messages as m
from supervisor.job.alerts import Alerts
from supervisor.job.attempts import Attempt, Attempts
from supervisor.job.core import Core, NextAttempt, OpenIncident, Wants, WantsAnd
from supervisor.job.incidents import Incidents
from supervisor.job.ledger import proves_hardware
from supervisor.job.nodes import Nodes
from supervisor.job.scheduler import SchedulerRequests
from supervisor.notes import note, text_of
from supervisor.view import SwapView, utc

TEXT_LIMIT: Final = 160
SURE: Final = 0.9
INTERVALS: Final = 4
"""Of the newest saves: they tell when the next is to be expected."""
REJECTED_KEPT: Final = 256
PROPOSED_MOST: Final = 16
"""Where more nodes should leave at once (maintenance of a whole cluster), swaps are no answer."""
ASKED_S: Final = 60.0
"""A run that breaks so soon after it was asked for a checkpoint, and has not saved, broke of that."""
MADE_KEPT: Final = 2000
"""More than a day allows."""
TELLS: Final = {"planned": "swap_planned", "recommended": "swap_recommended", "blocked": "swap_blocked"}
"""State of a proposal -> the kind of note that tells it."""


class SavedAs(NamedTuple):
    """A checkpoint, as far as it tells it from the next."""

    path: str
    step: int | None
    at: float

    def is_newer_than(self, other: SavedAs | None) -> bool:
        """What has gone, or a copy of the same step elsewhere, is no new checkpoint."""
        if other is None:
            return True
        return self.at > other.at and (self.step is None or self.step != other.step)


@dataclasses.dataclass
class ProposedSwap:
    """A node that should leave. Mutable; `Swaps` owns it."""

    node: str
    cause: Cause
    what: str
    """Why, in a few words."""
    failure_class: FailureClass
    since: float
    text: str = ""
    """What was seen, in full."""
    proven: bool = False
    gpu: str = ""
    rank: int | None = None
    share: float = 0.0
    """Of each step: what it costs the others; 0: not known."""
    wanted_by: str = ""
    """The operator who asked for it, or approved it."""
    found_at: float = 0.0
    """When the finding was made."""
    before: SavedAs | None = None
    """The checkpoint that a restart would have resumed from when it was proposed, or last could not be done."""
    holds_it_alone: bool = False
    """No other node sees the newest checkpoint: it is on a disk of its own."""
    reported: str = ""
    """The state that people were told last."""


class Swaps:
    def __init__(
        self,
        core: Core,
        nodes: Nodes,
        attempts: Attempts,
        scheduler: SchedulerRequests,
        incidents: Incidents,
        alerts: Alerts,
        saved_at: Callable[[int], list[float]],
    ) -> None:
        """`saved_at`: when the newest checkpoints of an attempt were complete."""
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self._scheduler, self._incidents, self._saved_at = scheduler, incidents, saved_at
        self._alerts = alerts
        self.proposed: dict[str, ProposedSwap] = {}
        """By node."""
        self._rejected: dict[tuple[str, Cause, FailureClass], None] = {}
        self._alerted: dict[str, float] = {}
        """Node -> when alerts that want it out began to fire, within the last quarter of an hour."""
        self._alerting: frozenset[str] = frozenset()
        """Nodes for whom they fire now."""
        self._alerts_at_once: set[str] = set()
        """Of those for whom they fire: the nodes whose alerts began together with too many others'."""
        self._out_of_service: frozenset[str] = frozenset()
        """Nodes of the job that the scheduler takes away now, members or not."""
        self._made_at: deque[float] = deque(maxlen=MADE_KEPT)
        """Those that nobody had asked for."""
        self._left: dict[str, None] = {}
        """Nodes that left without an operator's word, the newest last."""
        self._asked_after: SavedAs | None = None
        """The newest checkpoint when the ranks were asked for one."""
        self._asked_at = 0.0
        self._signal_harms = False
        """The run broke after it, and had not saved: it is not sent again."""
        self.made: dict[str, int] = {}
        """Cause -> how many were made."""

    # ----- queries -----

    def _live(self) -> Attempt | None:
        attempt = self._attempts.current
        return attempt if attempt is not None and not attempt.over and not attempt.finishing else None

    @property
    def _spares(self) -> int:
        attempt = self._live()
        if attempt is None:
            return 0
        usable = self._nodes.usable()
        idle = [node for node in usable if node.name not in attempt.member_set]
        free = sum(node.quiet_since is None and not self._stays_idle(node.name) for node in idle)
        missing = len(attempt.members) - sum(node.name in attempt.member_set for node in usable)
        return free - missing

    def _stays_idle(self, name: str) -> bool:
        """It takes nobody's place while the run trains."""
        return name in self._out_of_service or self._nodes.is_unwell(name)

    def took_s(self) -> float | None:
        """From the order to restart to the first step, the last time; None: there was no restart."""
        took = [one.recovery_s for one in self._incidents.log.records if one.recovery_s is not None]
        return took[-1] if took else None

    def cost_s(self) -> float | None:
        """The same; where there was none, what the first start took, which is more."""
        if (took := self.took_s()) is not None:
            return took
        since, started = self._attempts.trains_since, self._attempts.started_at
        return None if since is None or started is None else max(0.0, since - started)

    def next_save_at(self, now: float) -> float | None:
        """About when the next checkpoint is complete; None: saves tell no rhythm yet."""
        attempt = self._live()
        mine = self._saved_at(attempt.number) if attempt is not None else []
        gaps = [later - earlier for earlier, later in itertools.pairwise(mine)][-INTERVALS:]
        return max(now, mine[-1] + statistics.median(gaps)) if gaps else None

    def decision(self, swap: ProposedSwap, spares: int | None = None) -> SwapDecision:
        core, attempt = self._core, self._live()
        now, left_s = core.now, None
        if attempt is not None and attempt.last_step is not None and attempt.step is not None and attempt.pace:
            left_s = (attempt.last_step - attempt.step) * attempt.pace
        members = len(attempt.members) if attempt is not None else 1
        case = swaps.SwapCase(
            cause=swap.cause,
            proven=swap.proven,
            wanted=bool(swap.wanted_by),
            setting=core.spec.swap_mode,
            mode=core.mode,
            paused=core.paused,
            spares=(self._spares if spares is None else spares) + (swap.node in self._nodes.cordoned()),
            storm=self._is_of_a_storm(swap),
            within_day=sum(at > now - swaps.DAY_S for at in self._made_at),
            per_day=breaker_limit(members),
            holds_checkpoint=swap.holds_it_alone,
            may_cordon=self._may_cordon(swap, members),
            left_s=left_s,
            cost_s=self.took_s(),
        )
        return swaps.decide(case)

    def _is_of_a_storm(self, swap: ProposedSwap) -> bool:
        if swap.cause == "alert":
            return swap.node in self._alerts_at_once
        if swap.cause in swaps.BY_SCHEDULER:
            domains = {node.name: node.domain for node in self._nodes}
            return swaps.have_a_common_cause(self._out_of_service, domains)
        return swap.cause == "device" and self._incidents.is_storm(swap.found_at, swap.failure_class)

    def _may_cordon(self, swap: ProposedSwap, members: int) -> bool:
        """The circuit breaker's word. Of nodes that the ledger cordons all leave with the next attempt, or none."""
        together = self._cordoned_members() if swap.cause == "cordoned" else [swap.node]
        return len(self._nodes.cordons.allowed_together(together, members, self._core.now)) == len(together)

    def _cordoned_members(self) -> list[str]:
        """Of the live attempt; by the ledger of all jobs, and not by this one."""
        attempt, cordoned = self._live(), self._nodes.cordons.of_cluster(self._core.now)
        return [name for name in cordoned if attempt is not None and name in attempt.member_set]

    @property
    def to_drain(self) -> set[str]:
        """Nodes that the scheduler is asked to drain at the next checkpoint."""
        return {one.node for one in self.proposed.values() if one.reported == "planned" and self._drains(one)}

    def _drains(self, swap: ProposedSwap) -> bool:
        return self._core.has_scheduler and self._takes_spare(swap) and swap.cause not in swaps.BY_SCHEDULER

    def _takes_spare(self, swap: ProposedSwap) -> bool:
        """A node that is cordoned already is not used from the next attempt on in any case: its place is counted."""
        return swap.node not in self._nodes.cordoned()

    def view(self, now: float) -> tuple[SwapView, ...]:
        spares = self._spares
        return tuple(self._view(swap, now, spares) for swap in self.proposed.values())

    def _view(self, swap: ProposedSwap, now: float, spares: int) -> SwapView:
        decision, about, cost_s = self.decision(swap, spares), self.next_save_at(now), self.cost_s()
        shown = self._arguments(swap, decision)
        return SwapView(
            node=swap.node,
            state=decision.state,
            cause=swap.cause,
            why=swap.what,
            because=decision.because,
            since=utc(swap.since),
            about=None if about is None or decision.state != "planned" else utc(about),
            cost_s=None if cost_s is None else round(cost_s, 1),
            share_percent=round(100 * swap.share, 1) if swap.share else None,
            asked_by=swap.wanted_by,
            text=text_of(note(TELLS[decision.state], **shown)),
        )

    # ----- who should leave -----

    def finding_arrived(self, finding: Finding, node: str) -> Wants:
        """A device works on, and is slower or about to fail. (`fails` is for `Degraded` to follow first.)"""
        if finding.outlook in ("degrades", "slows", "repair"):
            yield from self.device(finding, node)
        yield from self._spare_unwell(finding, finding.node or node)

    def _spare_unwell(self, finding: Finding, name: str) -> Wants:
        """A run that trains does not move to a node whose hardware is worse than what it leaves."""
        attempt = self._attempts.current
        if attempt is None or name in attempt.member_set or name in self._nodes.cordoned():
            return
        if finding.outlook not in ("fails", "degrades") or finding.severity == "warning":
            return
        if finding.evidence.source != "output" and self._nodes.set_unwell(name):
            what = swaps.WORDS.get(finding.failure_class, finding.failure_class.value)
            seen = clean_line(finding.evidence.text, TEXT_LIMIT)
            yield note("spare_unwell", loud=True, node=name, why=what, seen=seen)

    def device(self, finding: Finding, node: str) -> Wants:
        """The node of this device should leave; `node`: whose agent has found it."""
        attempt, name = self._live(), finding.node or node
        if attempt is None or attempt.round is None or name not in attempt.member_set:
            return
        of_gpu = finding.scope == "gpu" or bool(finding.gpu)
        if finding.evidence.source == "output" or (of_gpu and finding.rank is None):
            return  # anybody can write of a device; one that no rank uses is no reason
        # Whether the job needs a disk or a network device to be fast is not known.
        proven = finding.outlook in swaps.PROVEN and (finding.outlook != "slows" or finding.rank is not None)
        swap = ProposedSwap(
            node=name,
            cause="device",
            what=swaps.WORDS.get(finding.failure_class, finding.failure_class.value),
            failure_class=finding.failure_class,
            since=self._core.now,
            text=clean_line(finding.evidence.text, TEXT_LIMIT),
            proven=proven and finding.severity != "warning",
            found_at=finding.at or self._core.now,
            gpu=finding.gpu,
            rank=finding.rank,
        )
        yield from self._propose(swap)

    def stragglers_seen(self, event: m.StragglersSeen, why: str, *, confirmed: bool) -> Wants:
        """`why`: what a check told of a slow rank's device. `confirmed`: it tells so of this rank's, and no other's."""
        attempt = self._live()
        if attempt is None or attempt.number != event.attempt:
            return
        slow = {attempt.rank_nodes[rank]: rank for rank in event.ranks if rank in attempt.rank_nodes}
        for name in [one.node for one in self.proposed.values() if one.cause == "straggler" and not one.wanted_by]:
            if name not in slow:
                yield from self._withdraw(name, "it no longer slows the others down")
        for name, rank in slow.items():
            known = self.proposed.get(name)
            if known is not None and (known.proven or not confirmed):
                known.share = event.cost
                continue
            swap = ProposedSwap(
                node=name,
                cause="straggler",
                what=f"rank {rank} slows the others down{why}",
                failure_class=FailureClass.STRAGGLER_OR_SLOW,
                since=self._core.now,
                proven=confirmed,
                rank=rank,
                share=event.cost,
            )
            yield from self._propose(swap)

    def leaving(self, event: m.NodesLeaving) -> Wants:
        """What the scheduler says of the job's nodes now."""
        attempt = self._live()
        members = attempt.member_set if attempt is not None else frozenset()
        leaving = {self._job_name(one.node): one for one in event.nodes}
        for name in sorted(self._out_of_service - leaving.keys()):
            cordon = self._nodes.cordons.of_job(name, self._core.now)
            if cordon is not None and cordon.by == "policy" and cordon.follows_scheduler:
                self._nodes.cordons.lift(name)
                self._nodes.touch(name)
                yield note("swap_undone", loud=True, node=name, why="the scheduler has put it back in service")
        self._out_of_service = frozenset(leaving)
        for name, swap in list(self.proposed.items()):
            if swap.cause in swaps.BY_SCHEDULER and name not in leaving and not swap.wanted_by:
                yield from self._withdraw(name, "the scheduler keeps it in service")
        for name, one in leaving.items():
            if name not in members or name in self.proposed:
                continue
            swap = ProposedSwap(
                node=name,
                cause=one.kind,
                what=clean_line(one.why, TEXT_LIMIT),
                failure_class=FailureClass.PREEMPTED_OR_CANCELLED,
                since=self._core.now,
                proven=True,
            )
            yield from self._propose(swap)

    def alerts_seen(self) -> Wants:
        """Members leave at a checkpoint for an alert where a rule of the site says so. It proves nothing: its class is
        none, so no other job is told to leave the node out."""
        wanted, attempt = {one.node: one for one in self._alerts.firing.values() if one.swap}, self._live()
        self._note_alerted(wanted)
        for name in [one.node for one in self.proposed.values() if one.cause == "alert" and not one.wanted_by]:
            if name not in wanted:
                yield from self._withdraw(name, "its alert has ended")
        for name, alert in wanted.items():
            if attempt is not None and attempt.round is not None and name in attempt.member_set:
                swap = ProposedSwap(
                    node=name,
                    cause="alert",
                    what=f"alert {alert.name} ({alert.failure_class.value})",
                    failure_class=FailureClass.NONE,
                    since=self._core.now,
                    text=alert.text,
                    proven=True,
                )
                yield from self._propose(swap)

    def _note_alerted(self, wanted: Collection[str]) -> None:
        """Three nodes within a quarter of an hour stay together until their alerts end, however long that is."""
        now, domains = self._core.now, {node.name: node.domain for node in self._nodes}
        began = dict.fromkeys((name for name in wanted if name not in self._alerting), now)
        self._alerting = frozenset(wanted)
        self._alerted = {n: at for n, at in (self._alerted | began).items() if now - at < swaps.SHARED_S}
        if began and swaps.have_a_common_cause(self._alerted.keys(), domains):
            self._alerts_at_once |= self._alerted.keys()
        self._alerts_at_once &= self._alerting
        kept = {key[0] for key in self._rejected if key[1] == "alert"}
        self._nodes.set_doubted(self._alerting - self._alerts_at_once - kept)

    def ledger_seen(self) -> WantsAnd[set[str]]:
        """Members that no job is to use leave at a checkpoint. Which of them have been told about so."""
        yield from self._forget_lifted()
        now, members = self._core.now, self._cordoned_members()
        cordoned = self._nodes.cordons.of_cluster(now)
        for name in members:
            cordon = cordoned[name]
            swap = ProposedSwap(
                node=name,
                cause="cordoned",
                what=f"cordoned for the cluster by {cordon.by or 'another job'}",
                failure_class=FailureClass.NONE,  # what another has seen is no failure of this job
                since=now,
                text=clean_line(cordon.reason, TEXT_LIMIT),
                proven=True,
            )
            yield from self._propose(swap)
        return {name for name in members if name in self.proposed}

    def _forget_lifted(self) -> Wants:
        """A cordon for the cluster was lifted, or its time is over: no reason to leave any more."""
        cordoned = self._nodes.cordons.for_all_jobs(self._core.now)
        for name in [one.node for one in self.proposed.values() if one.cause == "cordoned" and not one.wanted_by]:
            if name not in cordoned:
                yield from self._withdraw(name, "it is no longer cordoned for the cluster")

    def _job_name(self, scheduler_node: str) -> str:
        return next((node.name for node in self._nodes if node.scheduler_name == scheduler_node), scheduler_node)

    def _propose(self, swap: ProposedSwap) -> Wants:
        known = self.proposed.get(swap.node)
        by_alert = swap.cause == "alert"  # it keeps no room from others, and proves less than they do
        others = sum(by_alert or one.cause != "alert" for one in self.proposed.values())
        off = self._core.spec.swap_mode == "off" or (known is None and others >= PROPOSED_MOST)
        proven = known is not None and known.proven and (by_alert or known.cause != "alert")
        if off or proven or (known is not None and not swap.proven) or self._key(swap) in self._rejected:
            return
        swap.before = self._newest()
        swap.wanted_by = known.wanted_by if known is not None else ""
        self.proposed[swap.node] = swap
        yield from self._tell(swap)

    def _look_as_usual(self) -> None:
        """Unless another swap waits for a checkpoint."""
        self._nodes.await_save(any(one.reported == "planned" for one in self.proposed.values()))

    def _key(self, swap: ProposedSwap) -> tuple[str, Cause, FailureClass]:
        return swap.node, swap.cause, swap.failure_class

    def _withdraw(self, name: str, why: str) -> Wants:
        if self.proposed.pop(name, None) is not None:
            self._look_as_usual()
            yield note("swap_withdrawn", loud=True, node=name, why=why)

    def _tell(self, swap: ProposedSwap, spares: int | None = None) -> Wants:
        decision = self.decision(swap, spares)
        if decision.state != swap.reported:
            swap.reported = decision.state
            if decision.state == "planned":
                self._ask_for_checkpoint(of_ranks=swap.cause != "alert" or bool(swap.wanted_by))
            yield note(TELLS[decision.state], loud=True, **self._arguments(swap, decision))

    def _arguments(self, swap: ProposedSwap, decision: SwapDecision) -> dict[str, Any]:
        cost_s = self.cost_s()
        return {
            "node": swap.node,
            "why": swap.what,
            "seen": swap.text or None,
            "because": decision.because or None,
            "about": self.next_save_at(self._core.now),
            "cost_s": None if cost_s is None else max(1, round(cost_s)),
            "percent": round(100 * swap.share) or None,
            "drained_by": self._core.spec.scheduler if self._drains(swap) else None,
        }

    # ----- operators -----

    def ordered(self, name: str, by: str, reason: str, *, now: bool) -> Wants:
        """`unbroken swap NODE [--now]`."""
        attempt = self._live()
        if attempt is None or attempt.round is None or name not in attempt.member_set:
            yield note("swap_no_member", refused=True, node=name)
            return
        if now and self._core.state not in ("STARTING", "RUNNING"):
            yield note("swap_not_now", refused=True, node=name, state=self._core.state)
            return
        if self._spares + (name in self._nodes.cordoned()) < 1:
            yield note("swap_no_spare", refused=True, node=name)
            return
        known = self.proposed.get(name)
        swap = known or ProposedSwap(
            node=name,
            cause="operator",
            what=reason or "an operator wants it out",
            failure_class=FailureClass.NONE,
            since=self._core.now,
            before=self._newest(),
        )
        swap.wanted_by = by or "operator"
        self.proposed[name] = swap
        if now:
            yield from self._make([swap], at_once=True)
            return
        yield from self._tell(swap)

    def recommended(self, name: str = "") -> str:
        """The node whose swap an operator may approve or reject: this one, or the only one."""
        if name:
            return name if name in self.proposed else ""
        return next(iter(self.proposed)) if len(self.proposed) == 1 else ""

    def approve(self, name: str, by: str) -> Wants:
        swap = self.proposed[name]
        swap.wanted_by = by or "operator"
        yield from self._tell(swap)

    def reject(self, name: str) -> Wants:
        swap = self.proposed.pop(name)
        self._look_as_usual()
        self._rejected |= dict.fromkeys([self._key(swap), (name, "alert", FailureClass.NONE)])
        while len(self._rejected) > REJECTED_KEPT:
            del self._rejected[next(iter(self._rejected))]
        yield note("swap_rejected", node=name, why=swap.what)

    def forgive(self, name: str) -> None:
        """An operator has uncordoned it: what is found from now on counts again."""
        self._rejected = {key: None for key in self._rejected if key[0] != name}
        self._nodes.well_again(name)

    # ----- checkpoints -----

    def _newest(self) -> SavedAs | None:
        """What a restart would resume from."""
        attempt = self._attempts.current
        try:
            found = self._attempts.checkpoints.would_choose(attempt.members if attempt is not None else ())
        except Exception:  # a choice that fails is told when the next attempt is formed
            return None
        return SavedAs(found.path, found.step, found.modified_at) if found is not None else None

    def _holds_alone(self, node: str, path: str) -> bool:
        attempt = self._attempts.current
        others = [name for name in attempt.members if name != node] if attempt is not None else []
        return bool(others) and not self._attempts.checkpoints.is_seen_by(others, path)

    def _ask_for_checkpoint(self, *, of_ranks: bool) -> None:
        """Or at least have the nodes look for one. Alerts come and go: ranks that end when they are asked would restart
        for each."""
        attempt, signal, newest = self._live(), self._core.spec.swap_signal, self._newest()
        self._nodes.await_save(True)
        if attempt is None or not signal or self._signal_harms or not of_ranks:
            return
        if not attempt.asked or (newest is not None and newest.is_newer_than(self._asked_after)):
            self._asked_after, self._asked_at = newest, self._core.now
            self._attempts.ranks_asked()
            self._nodes.ask_to_save(signal, attempt.members)

    def _learn_of_signal(self) -> Wants:
        """The attempt is over: did it break soon after its ranks were asked for a checkpoint, and without one?"""
        attempt, newest = self._attempts.current, self._newest()
        if attempt is None or not attempt.asked or (newest is not None and newest.is_newer_than(self._asked_after)):
            return
        broke = [one for one in self._incidents.log.records if one.attempt == attempt.number]
        broke = [one for one in broke if one.trigger in ("exit", "hang")]
        others = [one for one in broke if one.verdict is None or not proves_hardware(one.verdict.failure_class)]
        if any(0.0 <= one.failed_at - self._asked_at < ASKED_S for one in others):
            self._signal_harms = True
            yield note("swap_signal_harms", loud=True, signal=self._core.spec.swap_signal)

    def ranks_saved(self) -> Wants:
        """All ranks have ended after they were asked to save: the run goes on with the next attempt in any case."""
        yield from self._forget_lifted()
        due, spares = [], self._spares
        for swap in self.proposed.values():
            if self.decision(swap, spares).state == "planned":
                due.append(swap)
                spares -= self._takes_spare(swap)
        if due:
            yield from self._make(due)
        else:
            yield NextAttempt()

    def checkpoints_seen(self) -> Wants:
        """A node reports its checkpoints: is there one that is newer than a proposal?"""
        if self._core.state != "RUNNING" or self._incidents.active is not None:
            return
        yield from self.alerts_seen()  # one may have ended by its time
        if not self.proposed:
            return
        yield from self.ledger_seen()  # a cordon may have ended by its time
        newest = self._newest()
        due, spares = [], self._spares
        for swap in self.proposed.values():
            if newest is None or not newest.is_newer_than(swap.before):
                continue
            swap.holds_it_alone = self._holds_alone(swap.node, newest.path)
            if self.decision(swap, spares).state == "planned":
                due.append(swap)
                spares -= self._takes_spare(swap)
            else:
                swap.before = newest  # what is approved, or gets a spare, later waits for the next one
        if due:
            yield from self._make(due)
            return
        free = self._spares
        for swap in self.proposed.values():
            yield from self._tell(swap, free)

    # ----- making one -----

    def _make(self, due: list[ProposedSwap], *, at_once: bool = False) -> Wants:
        """These leave now, all with one restart."""
        core, attempt = self._core, self._live()
        assert attempt is not None
        names, first = ", ".join(swap.node for swap in due), due[0]
        by_operator = at_once or any(swap.wanted_by for swap in due)
        self._count(due)
        why = "; ".join(f"{swap.node}: {swap.what}" for swap in due)
        when = "at once" if at_once else "a checkpoint is complete"
        verdict = Verdict(
            failure_class=first.failure_class,
            culprits=tuple(Culprit(node=swap.node, gpu=swap.gpu, rank=swap.rank) for swap in due),
            confidence=SURE,
            why=why,
            action="restart_excluding",
        )
        plan = Plan(
            kind="restart",
            why=f"planned swap, {when}: without {names}",
            cordons=tuple(self._cordon(swap) for swap in due if self._takes_spare(swap)),
            counts=False,
        )
        want = OpenIncident("swap", f"planned swap of {why}", core.now)
        yield from self._incidents.act_at_once(want, verdict, plan, by_operator=by_operator)

    def _count(self, due: Iterable[ProposedSwap]) -> None:
        for swap in due:
            self.proposed.pop(swap.node, None)
            self.made[swap.cause] = self.made.get(swap.cause, 0) + 1
            if not swap.wanted_by:
                self._made_at.append(self._core.now)
                self._left[swap.node] = None
        self._look_as_usual()

    def _cordon(self, swap: ProposedSwap) -> Cordon:
        return Cordon(
            node=swap.node,
            culprit_gpu=swap.gpu,
            reason=f"planned swap: {swap.what}" + (f" ({swap.text})" if swap.text else ""),
            by=swap.wanted_by or "policy",
            failure_class=None if swap.failure_class is FailureClass.NONE else swap.failure_class,
            at=self._core.now,
        )

    def begin_life(self) -> None:
        """The scheduler has started the job again: its nodes are others."""
        self.proposed.clear()
        self._left.clear()
        self._out_of_service = frozenset()
        self._signal_harms = False  # the script may have been changed
        self._look_as_usual()

    def give_back(self) -> WantsAnd[bool]:
        """Too few nodes are left, a spare has failed: those that left while they trained go on instead.

        Only the job's own cordon ends: the scheduler and the ledger keep what they were told.
        """
        missing, given = max(1, self._core.spec.nodes_min) - len(self._attempts.next_members()), 0
        for name in reversed(list(self._left)):
            cordon = self._nodes.cordons.of_job(name, self._core.now)
            if given >= missing or not self._nodes.is_present(name) or cordon is None or cordon.by != "policy":
                continue
            self._nodes.cordons.lift(name)
            del self._left[name]
            if name in self._nodes.cordoned():
                continue  # all jobs leave it out
            given += 1
            self._nodes.touch(name)
            yield note("swap_undone", loud=True, node=name, why="too few other nodes are left")
        return given > 0

    def next_attempt_forms(self) -> Wants:
        """The run restarts for another reason: who should leave, leaves with it. What is known of nodes that have gone,
        or are cordoned, is forgotten."""
        yield from self._learn_of_signal()
        yield from self._forget_lifted()
        attempt, spares = self._attempts.current, self._spares
        members = attempt.member_set if attempt is not None else frozenset()
        cordoned = self._nodes.cordoned()
        for swap in list(self.proposed.values()):
            gone = swap.node not in members or swap.node in cordoned or not self._nodes.is_present(swap.node)
            if gone:
                del self.proposed[swap.node]
                self._look_as_usual()
            elif self.decision(swap, spares).state == "planned":
                spares -= self._takes_spare(swap)
                self._count([swap])
                cordon = self._cordon(swap)
                yield note("cordoned", loud=True, node=swap.node, reason=cordon.reason)
                yield from self._scheduler.cordon(cordon)
