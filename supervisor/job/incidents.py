"""Incidents: from the first sign of a failure to what is done about it.

The way of one: `open_incident`, `_gather` (evidence of the nodes), `_conclude_when_ready`, `_conclude` (verdict and
plan), `_consider` (may the job act?), `_carry_out`, `_restart`; then the next attempt, and `recovered` when it makes
its first step. Nothing is torn down before the evidence is in or its time is up. Whatever the conclusion says or
raises, the job goes on: it restarts, ends, or waits for an operator with a reason.

A GPU's last words may come some milliseconds after those of its rank, and the start that was ordered meanwhile would
use it again. So until the next attempt has made a step, and for a minute at most, late evidence leads to a new verdict
(`_reevaluate`). Where that wants other nodes left out, the start that has begun goes on without them: once an incident,
charged once, and never against an operator's word.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import msgspec

from diagnosis.flight.who_waits import who_waits
from diagnosis.incident import Culprit, HangReport, Incident, Verdict, WaitGraph
from diagnosis.signals import Evidence, Finding, NodeEvidence, rank_names
from diagnosis.taxonomy import TAXONOMY, FailureClass
from recovery import policy
from recovery.checkpoint import ResumeSituation
from recovery.cordon import Cordon
from recovery.fewer_processes import BadGpu
from recovery.group_tests import Blamed, PairConclusion
from recovery.policy import Plan, RestartBudget
from recovery.swaps import have_a_common_cause
from supervisor import messages as m
from supervisor.job.alerts import Alerts
from supervisor.job.attempts import Attempt, Attempts, Space
from supervisor.job.core import (
    Core,
    EndJob,
    Enter,
    Form,
    NextAttempt,
    OpenIncident,
    Proceed,
    SuspectsTested,
    Timer,
    Trigger,
    Wants,
    WantsAnd,
    cancel,
)
from supervisor.job.incident_log import IncidentLog, IncidentRecord
from supervisor.job.ledger import ClusterLedger
from supervisor.job.node_tests import NodeTests
from supervisor.job.nodes import Nodes
from supervisor.job.scheduler import SchedulerRequests
from supervisor.messages import JobRequeued, Note, Outcome
from supervisor.notes import note, text_of
from supervisor.view import SuspectTestsView

CRASH_BUDGET_S = 0.1
HANG_BUDGET_S = 5.0
EVIDENCE_SLACK_S = 1.0
"""For the way there and back; then the job diagnoses without the evidence that is missing."""
SILENCE_S = 6.5
"""After so long the controller has called a node lost that went with its ranks (`SILENT_S` and a heartbeat)."""
EARLY_EVIDENCE_S = 0.5
"""One stack of each rank, taken when a device has failed: two a second apart would hold up the restart."""
EVIDENCE_NODES = 64
UNSEEN_PROGRESS_S = 300.0
"""Where no step is known, an attempt that ran this long has made progress."""
SHORT_LIFE_S = 60.0
"""Where no step is known, only attempts that ended this soon count as having failed at the same point."""
FURTHER_SHOWN = 16
"""Further failures of one incident that are told one by one."""
CULPRIT_WINDOW_S = 300.0
EXAMINE_AGAIN_S = 600.0
"""A hang that was left alone and lasts this much longer is none to be left alone."""
AWAKE_S = 30.0
"""Ranks that were continued late get this long, and three steps, to show progress."""
TESTED_SHOWN: Final = 16
TESTS_SURE: Final = 0.9
"""How sure a verdict is whose culprits failed in active tests, relative to others and twice."""
WORKER_FAILED = 1
"""torchrun's own exit code for any failed worker."""
REVIEW_S = 60.0
"""After its verdict; an incident whose next attempt has not been started yet may be re-evaluated later, too."""
SLACK_S = 5.0
"""Clocks of nodes differ, and a driver may tell seconds later what a rank has felt at once."""
REVIEWS = 16
"""Of one incident: a diagnosis takes milliseconds, and all nodes may tell of a broken fabric one after the other."""
OLDEST_FAILURE_S = 3600.0
"""Clocks of nodes differ: no failure is older than this, or in the future."""
_NAMED_FOLDER = re.compile(r"'((?:/|\.{0,2}/|[\w.-])[^'\n]{0,400})/[^/'\n]*'|(?:free|written) in (/\S{1,400})")
"""Where something could not be written, as an exception or our own look at disks names it."""

Conclude = Callable[[Incident], Verdict]


ALERTED = 3
"""So many of the newest incidents take alerts."""
ALERT_LATE_S = 600.0
"""From an incident to the alerts that may still be about it."""
ALERTS_KEPT = 16
PLACES_KEPT = 128
NEAR_STEPS = 1
"""Ranks are not seen at the very same moment: a step of the same number may be one off."""


class Lessons:
    """What earlier silences turned out to be, by place. Kept over attempts; replaying the journal brings them back."""

    def __init__(self) -> None:
        self._needed_s: dict[str, float] = {}
        self._no_help: dict[tuple[str, int | None], int] = {}

    def was_honest(self, report: HangReport, seconds: float) -> None:
        """Progress came back by itself."""
        for place in report.places:
            self._needed_s[place] = round(max(seconds, self._needed_s.pop(place, 0.0)), 1)
        _forget_oldest(self._needed_s)

    def needed_s(self, report: HangReport) -> float:
        """The longest honest wait at this place; 0: there was none."""
        return max((self._needed_s.get(place, 0.0) for place in report.places), default=0.0)

    def restarted(self, report: HangReport) -> None:
        """A restart is ordered. If the next attempt stops at this place again, the restart did not help."""
        for place in _where(report):
            key = (place, report.step)
            self._no_help[key] = self._no_help.pop(key, 0) + 1
        _forget_oldest(self._no_help)

    def did_not_help(self, report: HangReport) -> int:
        """Restarts at this place and step."""
        step = report.step
        steps = [None] if step is None else range(step - NEAR_STEPS, step + NEAR_STEPS + 1)
        return max(sum(self._no_help.get((place, one), 0) for one in steps) for place in _where(report))


def _where(report: HangReport) -> tuple[str, ...]:
    """The places of a silence. For a proven hang, each place with what is proven: another proof is another problem."""
    if not report.proven:
        return report.places or ("",)
    return tuple(f"{report.kind}: {place}" for place in report.places or (report.place,))


def _forget_oldest(kept: dict[str, float] | dict[tuple[str, int | None], int]) -> None:
    while len(kept) > PLACES_KEPT:
        del kept[next(iter(kept))]  # type: ignore[arg-type]


class Incidents:
    def __init__(
        self,
        core: Core,
        nodes: Nodes,
        attempts: Attempts,
        space: Space,
        scheduler: SchedulerRequests,
        tests: NodeTests,
        alerts: Alerts,
        ledger: ClusterLedger,
        conclude: Conclude,
    ) -> None:
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self._space, self._scheduler, self._tests, self._ledger = space, scheduler, tests, ledger
        self._alerts = alerts
        self._conclude_by = conclude
        self.log = IncidentLog()
        self.lessons = Lessons()
        self.budget = RestartBudget(core.spec.max_restarts)
        self.active: IncidentRecord | None = None
        """The incident being handled; set only while DIAGNOSING or RECOVERING."""
        self.approval_wanted = False
        """Its plan waits for an operator's `approve`, or for the end of a pause."""
        self.held = ""
        """Why an operator has to say how to go on; empty when none has to."""
        self.waits_for_operator_since = 0.0
        self._breaker_holds = False
        self._left_alone: HangReport | None = None
        """A hang that nobody acted on: it is examined again after a while."""
        self._hung: IncidentRecord | None = None
        self._failed_at: deque[tuple[str, int | None]] = deque(maxlen=50)
        """(fingerprint, step) of earlier failures."""
        self._classes: dict[FailureClass, int] = {}
        """Incidents by class since the last progress."""
        self._blamed: deque[tuple[float, str]] = deque(maxlen=200)
        """(time, node) of culprits."""

    # ----- queries -----

    @property
    def hung(self) -> IncidentRecord | None:
        """The open incident of a hang that nobody acts on, while the attempt goes on standing."""
        record, attempt = self._hung, self._attempts.current
        lasts = record is not None and record.closed_at is None and attempt is not None and not attempt.over
        return record if lasts else None

    @property
    def hung_or_waiting(self) -> IncidentRecord | None:
        """The open incident of a hang that nobody acts on, or that waits for an operator."""
        if self.hung is not None:
            return self.hung
        waits = self.approval_wanted or self.held
        return next((one for one in self.log.open_failures() if one.hang is not None and waits), None)

    @property
    def breaker_tripped(self) -> bool:
        return self._breaker_holds and bool(self.held)

    @property
    def _numbers_wait(self) -> bool:
        """What an operator is asked about is a loss that went wrong, or replicas that differ: nothing has stopped."""
        waits = self.approval_wanted or bool(self.held)
        return self.active is not None and self.active.trigger in ("loss", "replicas") and waits

    @property
    def may_go_on(self) -> bool:
        """The attempt trains while an operator is asked about its numbers: without a word it goes on."""
        attempt = self._attempts.current
        lives = attempt is not None and not attempt.over and not self._attempts.cannot_go_on(attempt)
        return self._numbers_wait and lives

    def note_alerts(self) -> None:
        """Keep what fires beside incidents of now: monitoring is minutes late."""
        for record in itertools.islice(reversed(self.log.records), ALERTED):
            if record.closed_at is None or self._core.now - record.opened_at < ALERT_LATE_S:
                for one in self._alerts.firing.values():
                    if one.key in record.alerts or len(record.alerts) < ALERTS_KEPT:
                        record.alerts[one.key] = one

    def suspects(self) -> dict[str, str]:
        """Node -> which open incident blames it."""
        found: dict[str, str] = {}
        for record in [*self.log.open_failures(), *self.log.open_degradations()]:
            for culprit in record.verdict.culprits if record.verdict is not None else ():
                assert record.verdict is not None
                found.setdefault(culprit.node, f"{record.id}: {record.verdict.failure_class.value}")
        return found

    def degraded_by(self, trigger: Trigger) -> IncidentRecord | None:
        """The open incident of the current attempt that began so, and stopped nothing."""
        return next((one for one in self.log.open_degradations() if one.trigger == trigger), None)

    # ----- opening and closing -----

    def open_incident(self, want: OpenIncident) -> Wants:
        """Something broke the current attempt. One incident takes all that belongs together."""
        attempt, core = self._attempts.current, self._core
        if attempt is None or attempt.over or core.state not in ("STARTING", "RUNNING", "DIAGNOSING", "RECOVERING"):
            return
        if attempt.finishing or (core.state == "RECOVERING" and self.active is None):
            return  # a run whose ranks all ended well cannot break any more
        if self._numbers_wait:
            yield from self._run_on()  # what breaks the attempt does not wait for an answer about its numbers
        first = core.state in ("STARTING", "RUNNING")
        record = self.active
        if first or record is None:
            record = yield from self._diagnose(want, attempt)
        else:
            record.hang = want.hang if record.hang is None else record.hang
            record.further_failures += 1
            if record.further_failures <= FURTHER_SHOWN:
                yield record.note("incident_grows", what=want.text)
        record.lost_nodes += want.nodes
        if want.launcher is not None:
            record.launcher_exits[want.launcher.node] = want.launcher.how
            record.failed_before_ranks = not attempt.ranks and not attempt.exits
            if record.launcher_code is None:
                record.launcher_code = want.launcher.code
        if core.state != "DIAGNOSING":
            return
        if want.trigger == "exit":
            yield from self._gather_after_exit(record, attempt, want.node, first)
        elif want.trigger == "hang":
            yield from self._gather_after_hang(record, attempt, want.hang)
        else:
            yield from self._gather_or_conclude(record, attempt)

    def is_storm(self, at: float, failure_class: FailureClass | None = None) -> bool:
        """Devices of so many nodes failed within moments, or got worse in the same way within minutes, that no node by
        itself is to blame."""
        worse = self.log.worse_nodes(failure_class, at) if failure_class is not None else set()
        domains = {node.name: node.domain for node in self._nodes}
        return any(have_a_common_cause(nodes, domains) for nodes in (self.log.failing_nodes(at), worse))

    @property
    def early(self) -> IncidentRecord | None:
        """The open incident of a failed device whose ranks may make no further step."""
        return next((one for one in self.log.open_degradations() if one.early), None)

    def _diagnose(self, want: OpenIncident, attempt: Attempt) -> WantsAnd[IncidentRecord]:
        """A new incident, or that of a failed device that it comes of, to be diagnosed now."""
        if self.early is not None and want.trigger in ("hang", "exit", "node_lost"):
            record = yield from self._has_struck(self.early, want, attempt)
        else:
            record = yield from self._open(want, attempt)
        self.active, attempt.broke_at = record, record.failed_at
        yield Enter("DIAGNOSING")
        yield cancel("form", "start", "stood", "settle")
        return record

    def _has_struck(self, record: IncidentRecord, want: OpenIncident, attempt: Attempt) -> WantsAnd[IncidentRecord]:
        """The failed device has broken the attempt: what is known of it already goes on as this failure."""
        yield from self.close_failures(f"attempt {attempt.number} failed too: {record.id}")
        record.trigger, record.hang, record.early = want.trigger, want.hang, False
        record.failed_at = min(self._core.now, max(want.failed_at, attempt.formed_at))
        record.verdict, record.plan = None, None
        record.phase_ends.clear()
        for old in self.log.open_degradations():
            yield from self.close(old, f"the attempt broke: {record.id}")
        yield record.note("incident_grows", loud=True, what=want.text)
        return record

    def _open(self, want: OpenIncident, attempt: Attempt, cured: bool = False) -> WantsAnd[IncidentRecord]:
        """`cured`: the attempt goes on, and so does what is wrong with it otherwise."""
        now, new = self._core.now, self.log.next_id()
        if want.trigger not in ("signal", "device"):
            yield from self.close_failures(f"attempt {attempt.number} failed too: {new}")
            for old in () if cured else self.log.open_degradations():
                yield from self.close(old, f"the attempt broke: {new}")
        record = IncidentRecord(
            id=new,
            opened_at=now,
            failed_at=min(now, max(want.failed_at, now - OLDEST_FAILURE_S, attempt.formed_at)),
            trigger=want.trigger,
            attempt=attempt.number,
            what=want.text,
            step=attempt.step,
            hang=want.hang,
        )
        self.log.open(record)
        yield record.note("incident_opened", loud=not (want.quiet or record.stops_nothing), what=want.text)
        return record

    def open_with_plan(
        self, want: OpenIncident, why: str, then: Literal["degraded", "left_to_people", "cured"], further: int = 0
    ) -> Wants:
        """An incident that stops nothing: diagnosed at once, and nothing more is done, for the reason `why`.

        `then`: it lasts and the run goes on; it lasts until somebody acts; what it needed is done already. `further`:
        failures of the same kind that it takes along.
        """
        attempt = self._attempts.current
        assert attempt is not None
        record = yield from self._open(want, attempt, then == "cured")
        record.verdict = self._verdict(record, attempt, () if then == "cured" else attempt.evidence.values())
        record.waits = _waits(record, record.verdict, attempt.world_size)
        record.mark("diagnose", self._core.now)
        record.plan = Plan(kind="ignore", why=why, counts=False)
        record.further_failures = further
        if then == "degraded":
            yield record.note("incident_goes_on", loud=True, what=record.verdict.why.rstrip("."), why=why)
        elif then == "left_to_people":
            yield record.note("left_waiting", loud=True, why=why)
            self._hung = record
        else:
            yield from self.close(record, why, loud=True)

    def act_at_once(
        self,
        want: OpenIncident,
        verdict: Verdict,
        plan: Plan | None = None,
        rollback: ResumeSituation | None = None,
        by_operator: bool = False,
    ) -> Wants:
        """An incident whose verdict is there already: its plan is carried out, or waits for an operator.

        Without a plan policy makes it; `rollback`: how far back that restart goes. `by_operator`: one has ordered it.
        """
        attempt = self._attempts.current
        assert attempt is not None
        record = yield from self._open(want, attempt)
        self.active, attempt.broke_at = record, record.failed_at
        yield Enter("DIAGNOSING")
        yield cancel("form", "start", "stood", "settle")
        record.keep_evidence(attempt.evidence.values())
        record.verdict = verdict
        record.mark("diagnose", self._core.now)
        if want.trigger != "swap":  # nothing has failed
            yield record.note("verdict", loud=True, **_of_verdict(verdict))
        if plan is None:
            plan = policy.plan(verdict, self._situation(record, verdict, attempt))
            plan = msgspec.structs.replace(plan, rollback=rollback)
        cordons = tuple(msgspec.structs.replace(one, incident=record.id) for one in plan.cordons)
        record.plan = plan = msgspec.structs.replace(plan, cordons=cordons)
        self._remember(verdict, attempt, self._core.now)
        yield record.note("plan", loud=True, plan=plan.kind, why=plan.why, observe=False)
        if by_operator:
            yield from self.carry_out(by_operator=True)
        else:
            yield from self._consider(record, plan, attempt)

    def degraded_further(self, record: IncidentRecord, count: int, text: str) -> Wants:
        """More of the same within an open incident that stops nothing."""
        attempt = self._attempts.current
        assert attempt is not None
        record.further_failures += count
        record.verdict = self._verdict(record, attempt)
        yield record.note("incident_more", loud=True, what=text)

    def close(self, record: IncidentRecord, why: str, loud: bool = False) -> Wants:
        if record.closed_at is None:
            record.close(self._core.now, why)
            yield record.note("incident_closed", loud=loud, why=why)
            yield from self._ledger.failed(record.id, record.verdict)

    def close_failures(self, text: str) -> Wants:
        for record in self.log.open_failures():
            yield from self.close(record, text)

    def go_on(self, text: str) -> Wants:
        """The active incident was a false alarm, or nothing is to be done: the attempt goes on."""
        if self.active is not None:
            yield from self.close(self.active, text)
            yield from self._run_on()

    def _run_on(self) -> Wants:
        """The attempt goes on, and nobody is asked anything."""
        self.active, self.approval_wanted, self.held = None, False, ""
        yield cancel("evidence", "hold")
        yield Enter("RUNNING")

    def node_back(self, name: str) -> Wants:
        """A node was only silent. If nothing has been decided yet, no restart is needed."""
        record, attempt = self.active, self._attempts.current
        if record is None or attempt is None or self._core.state != "DIAGNOSING" or name not in record.lost_nodes:
            return
        record.lost_nodes.remove(name)
        only_silent = record.trigger == "node_lost" and record.hang is None and attempt.all_started
        if only_silent and not record.lost_nodes and not self._attempts.cannot_go_on(attempt):
            yield from self.go_on(f"false alarm: {name} is back")

    # ----- evidence -----

    def evidence_arrived(self, event: m.EvidenceArrived) -> Wants:
        piece, attempt = event.evidence, self._attempts.current
        if attempt is None or self._nodes.get(piece.node) is None:
            return
        if piece.attempt != attempt.number:
            yield from self._late_evidence(piece)
            return
        self._nodes.acknowledge_evidence(piece.node, piece.request)
        if attempt.keep_evidence(piece):
            yield from self._attempts.steps_in_evidence(piece)
            if self.active is not None and self.active.verdict is None:
                self.active.keep_evidence(attempt.evidence.values())
            for finding in piece.findings:
                self.log.add_finding(finding)
            yield from self._late_evidence(piece)
            yield from self._conclude_when_ready()

    def finding_arrived(self, finding: Finding) -> Wants:
        self.log.add_finding(finding)
        yield from self._late_finding(finding)

    def take_stacks(self, ranks: tuple[int, ...], budget_s: float = HANG_BUDGET_S) -> None:
        """Of all members, those with these ranks first.

        Only a stack that stays the same tells something, so they are taken again while a suspicion lasts.
        """
        attempt = self._attempts.current
        assert attempt is not None
        attempt.drop_evidence_between(1, attempt.stacks_request)
        witnesses = self._witnesses(attempt, ranks)
        attempt.stacks_request = self._nodes.ask_for_evidence(witnesses, budget_s, flight=True)

    def _witnesses(self, attempt: Attempt, ranks: Iterable[int] = ()) -> list[str]:
        """Members to be asked, those with these ranks first."""
        rank_nodes = attempt.rank_nodes
        first = [rank_nodes[rank] for rank in ranks if rank in rank_nodes]
        members = [name for name in dict.fromkeys([*first, *attempt.members]) if name in attempt.member_set]
        return [name for name in members if self._nodes.is_present(name)][:EVIDENCE_NODES]

    def _gather_after_exit(self, record: IncidentRecord, attempt: Attempt, node: str, first: bool) -> Wants:
        if (node, 0) not in attempt.evidence and len(record.awaiting) < 2 * EVIDENCE_NODES:
            record.awaiting.add((node, 0))
        if first:
            others = [name for name in self._witnesses(attempt) if name != node]
            yield from self._gather(record, others, CRASH_BUDGET_S)
        elif "evidence" not in self._core.timers:
            yield from self._conclude_when_ready()

    def _gather_after_hang(self, record: IncidentRecord, attempt: Attempt, hang: HangReport | None) -> Wants:
        """Stacks were taken already, while it was only suspected: who has not answered is waited for."""
        if "evidence" in self._core.timers:
            return
        if hang is not None and hang.early:
            yield from self._gather_early(record, attempt)
            return
        have = {name for name, number in attempt.evidence if number}
        asked = self._witnesses(attempt, hang.ranks if hang is not None else ())
        missing = [name for name in asked if name not in have]
        if not missing or not attempt.stacks_request:
            yield from self._gather(record, missing, HANG_BUDGET_S, flight=True)
            return
        record.awaiting.update((name, attempt.stacks_request) for name in missing)
        yield from self._gather(record, (), HANG_BUDGET_S)

    def _gather_early(self, record: IncidentRecord, attempt: Attempt) -> Wants:
        """The kernel's word is the proof. What was asked for when it came has had its time, or nearly so."""
        have = {name for name, number in attempt.evidence if number}
        missing = [name for name in self._witnesses(attempt) if name not in have]
        due = record.opened_at + EARLY_EVIDENCE_S
        if missing and self._core.now < due:
            record.awaiting.update((name, attempt.stacks_request) for name in missing)
            yield Timer("evidence", due)
        yield from self._conclude_when_ready()

    def _gather_or_conclude(self, record: IncidentRecord, attempt: Attempt) -> Wants:
        """Ask everybody, unless they have been asked, or nothing has run yet that could tell."""
        if "evidence" in self._core.timers or attempt.round is None:
            yield from self._conclude_when_ready()
        else:
            yield from self._gather(record, self._witnesses(attempt), CRASH_BUDGET_S)

    def _gather(self, record: IncidentRecord, asked: Iterable[str], budget_s: float, flight: bool = False) -> Wants:
        nodes = list(asked)
        if nodes:
            number = self._nodes.ask_for_evidence(nodes, budget_s, flight)
            record.awaiting.update((name, number) for name in nodes)
        yield Timer("evidence", self._core.now + budget_s + EVIDENCE_SLACK_S)
        yield from self._conclude_when_ready()

    def evidence_due(self) -> Wants:
        yield from self._conclude_when_ready(late=True)

    def _conclude_when_ready(self, late: bool = False) -> Wants:
        """Conclude when the evidence is in (or `late`: when its time is up)."""
        record, attempt = self.active, self._attempts.current
        if record is None or attempt is None or self._core.state != "DIAGNOSING":
            return
        record.awaiting -= attempt.evidence.keys()
        record.awaiting = {key for key in record.awaiting if self._nodes.is_present(key[0])}
        if record.awaiting:
            longer = False
            if late:
                longer = yield from self._waits_for_silence(record, attempt)
            if not late or longer:
                return
            missing = sorted({name for name, _ in record.awaiting})[:8]
            yield record.note("evidence_missing", nodes=tuple(missing))
        yield cancel("evidence")
        yield from self._conclude(record, attempt)

    def _waits_for_silence(self, record: IncidentRecord, attempt: Attempt) -> WantsAnd[bool]:
        """Ranks feel at once that a node is gone, silence tells later: the network is not blamed before that."""
        if record.trigger != "exit" or record.waited_longer:
            return False
        if self._verdict(record, attempt).failure_class is not FailureClass.NCCL_NETWORK:
            return False
        record.waited_longer = True
        yield Timer("evidence", record.opened_at + SILENCE_S)
        return True

    # ----- concluding and planning -----

    def _conclude(self, record: IncidentRecord, attempt: Attempt) -> Wants:
        now = self._core.now
        record.step = attempt.step
        record.verdict = verdict = self._verdict(record, attempt)
        record.waits = _waits(record, verdict, attempt.world_size)
        record.mark("diagnose", now)
        loud = self._launcher_code(record) is None  # torchrun has said itself what is wrong
        said = _of_verdict(verdict)
        yield record.note("verdict", loud=loud, **said)
        yield from self._scheduler.comment(text_of(record.note("verdict", **said)))
        if self._ran_long_unseen(attempt):
            self.progress_made()
        situation = self._situation(record, verdict, attempt)
        record.plan = plan = policy.plan(verdict, situation)
        record.suspects = policy.suspects(verdict, situation, plan, self._alerts.suspects(attempt.member_set))
        self.note_alerts()
        record.attempt_under_review = attempt
        self._remember(verdict, attempt, now)
        observe = self._core.mode == "observe"
        yield record.note("plan", loud=loud, plan=plan.kind, why=plan.why, observe=observe)
        yield from self._consider(record, plan, attempt)

    def _verdict(
        self, record: IncidentRecord, attempt: Attempt, evidence: Iterable[NodeEvidence] | None = None
    ) -> Verdict:
        """`evidence` None: all of the attempt that has come so far."""
        record.keep_evidence(attempt.evidence.values() if evidence is None else evidence)
        findings = self._not_settled(record, self.log.findings_near(record.failed_at, record.attempt))
        try:
            unsettled = [
                msgspec.structs.replace(one, findings=self._not_settled(record, one.findings, one.node))
                for one in record.evidence
            ]
            incident = record.incident(unsettled, findings, attempt.rank_nodes, attempt.world_size)
            verdict = self._conclude_by(incident)
        except Exception as error:  # the diagnoser may be wrong or broken: the run has to come back all the same
            return Verdict(
                failure_class=FailureClass.UNKNOWN,
                culprits=(),
                confidence=0.0,
                why=f"the diagnosis itself failed ({type(error).__name__}: {error})"[:300],
                action="restart",
            )
        # Ranks name each other by address.
        named = tuple(msgspec.structs.replace(one, node=self._nodes.named(one.node)) for one in verdict.culprits)
        return msgspec.structs.replace(verdict, culprits=named) if named != verdict.culprits else verdict

    def _not_settled(
        self, record: IncidentRecord, findings: tuple[Finding, ...], node: str = ""
    ) -> tuple[Finding, ...]:
        """Without what an operator knew of a node that was given back since (its GPU was reset)."""
        opened, covers = record.opened_at, self._nodes.cordons.covers
        return tuple(one for one in findings if not covers(one.node or node, one.at or opened, opened))

    def _situation(self, record: IncidentRecord, verdict: Verdict, attempt: Attempt) -> policy.Situation:
        now, nodes = self._core.now, self._nodes
        culprits = {culprit.node for culprit in verdict.culprits if culprit.node}
        members = len(attempt.members)
        lost = tuple(name for name in attempt.members if not nodes.is_present(name))
        free = sum(node.name not in attempt.member_set for node in nodes.usable())
        from_memory = attempt.round is not None and attempt.round.snapshot is not None
        did_not_help = 0
        if record.hang is not None and record.trigger == "hang" and not self._attempts.cannot_go_on(attempt):
            did_not_help = self.lessons.did_not_help(record.hang)
        return policy.Situation(
            incident=record.id,
            at=now,
            mode=self._core.mode,
            broken=attempt.is_broken or bool(lost) or record.persists or record.trigger in ("setup", "launcher"),
            work_may_be_complete=_may_be_complete(attempt),
            launcher_code=self._launcher_code(record),
            deterministic=self._is_deterministic(verdict, attempt),
            repeats=self._classes.get(verdict.failure_class, 0),
            culprit_repeats=sum(1 for at, name in self._blamed if name in culprits and at >= now - CULPRIT_WINDOW_S),
            delay_s=self.budget.next_delay_s(now),
            nodes=members - len(lost),
            replacements=free,
            nodes_min=self._core.spec.nodes_min,
            lost=lost,
            loaded=attempt.resume.path if attempt.first_step is None and not from_memory else "",
            may_cordon=()
            if self.is_storm(record.failed_at)
            else nodes.cordons.allowed_together(sorted(culprits), members, now),
            vouched=nodes.cordons.vouched_since(record.opened_at),
            on_probation=tuple(sorted(filter(self._ledger.on_probation, culprits))),
            without_gpu=self._can_do_without(verdict, attempt),
            fewer_failed=self._fewer_failed(verdict, attempt),
            may_requeue=self._scheduler.may_requeue,
            unproven=record.hang is not None and not record.hang.proven,
            did_not_help=did_not_help,
        )

    def _can_do_without(self, verdict: Verdict, attempt: Attempt) -> tuple[str, ...]:
        """Culprit nodes that go on without a GPU, where no other can take their place."""
        found = {name: bad for name, bad in self._of_one_gpu(verdict).items() if name not in attempt.without}
        members = tuple(name for name in attempt.members if self._nodes.is_present(name))
        return () if self._attempts.why_not_fewer(members, {**attempt.without, **found}) else tuple(found)

    def _of_one_gpu(self, verdict: Verdict) -> dict[str, BadGpu]:
        """Culprit nodes of which one GPU alone is bad."""
        if not self._core.spec.fewer_processes:
            return {}
        cordons: dict[str, list[Cordon]] = {}
        for one in verdict.culprits:
            cordon = Cordon(node=one.node, gpu=one.gpu, reason=verdict.why, failure_class=verdict.failure_class)
            cordons.setdefault(one.node, []).append(cordon)
        found = ((name, self._nodes.bad_gpu(name, *held)) for name, held in cordons.items())
        return {name: bad for name, bad in found if bad is not None}

    def _fewer_failed(self, verdict: Verdict, attempt: Attempt) -> tuple[str, ...]:
        """Nodes whose missing process may be what kept the attempt from its first step."""
        made_none = attempt.step is None and not attempt.counted
        ours = TAXONOMY[verdict.failure_class].retry in ("same", "back", "never")
        return tuple(attempt.without) if made_none and ours else ()

    def _launcher_code(self, record: IncidentRecord) -> int | None:
        """The run's exit code, where torchrun's own error ends it: nothing ran, and nothing will."""
        return record.launcher_code if record.failed_before_ranks and self._attempts.would_fail_again else None

    def _ran_long_unseen(self, attempt: Attempt) -> bool:
        """Where no step tells, having run for long is progress."""
        if attempt.step is not None or attempt.progress_seen_at is None or attempt.workers_started_at is None:
            return False
        return self._core.now - attempt.workers_started_at >= UNSEEN_PROGRESS_S

    def _is_deterministic(self, verdict: Verdict, attempt: Attempt) -> bool:
        if not verdict.fingerprint or (verdict.fingerprint, attempt.step) not in self._failed_at:
            return False
        began = attempt.workers_started_at
        return attempt.step is not None or began is None or self._core.now - began < SHORT_LIFE_S

    def _remember(self, verdict: Verdict, attempt: Attempt, at: float) -> None:
        self._classes[verdict.failure_class] = self._classes.get(verdict.failure_class, 0) + 1
        if verdict.fingerprint:
            self._failed_at.append((verdict.fingerprint, attempt.step))
        for name in {culprit.node for culprit in verdict.culprits if culprit.node}:
            self._blamed.append((at, name))

    def _forget(self, verdict: Verdict, attempt: Attempt, at: float) -> None:
        """As if what was remembered `at` that time had not been concluded."""
        self._classes[verdict.failure_class] = max(0, self._classes.get(verdict.failure_class, 0) - 1)
        if (failed := (verdict.fingerprint, attempt.step)) in self._failed_at:
            self._failed_at.remove(failed)
        for name in {culprit.node for culprit in verdict.culprits if culprit.node}:
            if (at, name) in self._blamed:
                self._blamed.remove((at, name))

    @property
    def approves(self) -> str:
        """The plan that waits for approval, with a digest of what it is: `i-3@5f0c...`; empty: none waits."""
        record = self.active
        if not self.approval_wanted or record is None or record.plan is None:
            return ""
        return f"{record.id}@{hashlib.sha256(msgspec.json.encode(record.plan)).hexdigest()[:12]}"

    # ----- acting -----

    def _consider(self, record: IncidentRecord, plan: Plan, attempt: Attempt) -> Wants:
        """May the job act, or must it wait?"""
        if plan.until == "progress":
            yield record.note("left_waiting", loud=True)
            yield from self._leave_hung(record)
        elif plan.kind == "ignore":
            yield from self.go_on(f"left alone: {plan.why}")
            if record.hang is not None and record.hang.kind != "traced":
                self._left_alone = record.hang
                yield Timer("again", self._core.now + EXAMINE_AGAIN_S)
        elif self._core.mode == "observe" and not self._core.paused:
            yield from self._only_watch(record, plan, attempt)
        elif self._core.paused or plan.needs_approval:
            self.approval_wanted = True
            yield Enter("RECOVERING")
            yield from self.wait_for_operator()
            kind = "plan_waits_paused" if self._core.paused else "plan_waits"
            yield record.note(kind, loud=True)
        else:
            yield from self.carry_out()

    def _only_watch(self, record: IncidentRecord, plan: Plan, attempt: Attempt) -> Wants:
        """Mode `observe`: what torchrun alone would do happens, and nothing else."""
        never_ran = attempt.round is None or record.trigger in ("setup", "launcher")
        if plan.kind == "succeed" or not (never_ran or self._attempts.cannot_go_on(attempt)):
            if record.hang is not None:
                yield from self._leave_hung(record)
            else:
                yield from self.go_on(f"mode observe: would {plan.kind}")
            return
        why = f"mode observe: would {plan.kind} ({plan.why})"
        yield EndJob(_failure(record, why, record.launcher_code), "ends as torchrun would")

    def _leave_hung(self, record: IncidentRecord) -> Wants:
        """A hang that nobody acts on: the incident stays open until progress comes back, or somebody acts."""
        assert record.hang is not None
        record.stood_still = record.hang.proven
        self._hung = record
        yield from self._run_on()

    def again_due(self) -> Wants:
        """A hang that was left alone lasts. (Progress would have cancelled this timer.)"""
        attempt, report, hung = self._attempts.current, self._left_alone, self.hung
        if attempt is None or attempt.over or self._core.state != "RUNNING":
            return
        if hung is not None:
            self._hung, self.active, hung.persists, hung.stood_still = None, hung, True, False
            yield Enter("DIAGNOSING")
            yield from self._gather_or_conclude(hung, attempt)
        elif report is not None and not attempt.finishing:
            text, since = f"the hang that was left alone lasts: {report.why}", self._core.now - report.quiet_s
            record = yield from self._diagnose(OpenIncident("hang", text, since, hang=report), attempt)
            record.persists = True
            yield from self._gather_or_conclude(record, attempt)

    def carry_out(self, *, by_operator: bool = False) -> Wants:
        """The plan of the active incident."""
        record, attempt = self.active, self._attempts.current
        if record is None or record.plan is None:
            return
        plan = record.plan
        if attempt is not None and plan.kind == "restart" and not by_operator:
            stopped = () if attempt.over else self._nodes.left_stopped(attempt.number)
            if stopped and not self._attempts.cannot_go_on(attempt):
                yield from self._continue_first(record, attempt, stopped)
                return
        self.approval_wanted = False
        yield cancel("hold")
        if plan.kind == "succeed":
            outcome = Outcome(state="succeeded", exit_code=0, line=f"the run is complete: {plan.why}")
            yield EndJob(outcome, plan.why)
        elif plan.kind == "stop":
            yield EndJob(_failure(record, plan.why, plan.exit_code), f"stopped: {plan.why}")
        elif plan.kind == "hold" and plan.until == "space":
            yield from self._wait_for_space(record, plan)
        elif plan.kind == "hold":
            yield from self.hold(plan.why)
            self._breaker_holds = plan.breaker
        else:
            yield from self._restart(record, plan, by_operator)

    def _continue_first(self, record: IncidentRecord, attempt: Attempt, ranks: tuple[int, ...]) -> Wants:
        """Ranks that were not to be continued before are continued first: that may be all that they need."""
        self._nodes.wake(ranks, attempt.number, attempt.ranks)
        record.plan = Plan(kind="ignore", why=f"{rank_names(ranks)} continued with SIGCONT, no restart", counts=False)
        self._left_alone = record.hang
        yield from self.go_on(record.plan.why)
        yield Timer("again", self._core.now + AWAKE_S + 3 * (attempt.seconds_per_step or 0.0))

    def _restart(self, record: IncidentRecord, plan: Plan, by_operator: bool) -> Wants:
        now = self._core.now
        if record.hang is not None and record.trigger == "hang":
            self.lessons.restarted(record.hang)
        if plan.counts:
            if self.budget.next_delay_s(now) is None:
                why = "the restart budget is spent without progress"
                yield EndJob(_failure(record, why, policy.BUDGET_SPENT), why)
                return
            self.budget.charge(now)
        self._attempts.count_restart()
        if plan.rollback is not None:
            yield from self._attempts.roll_back(plan.rollback, plan.skip_batches)
        self._scheduler.approve_requeue(by_operator and plan.kind == "requeue")
        yield from self._leave_out(record, plan, by_operator)
        tested = record.suspects and not by_operator and self._core.mode == "enforce"
        if tested and (yield from self._tests.begin(record.id, record.suspects)):  # the next attempt waits for them
            text = f"{', '.join(record.suspects)}: the tests are under way"
            record.tests = SuspectTestsView(suspects=record.suspects, text=text)
        at_once = by_operator and self._core.paused  # nothing would go on by itself after a back-off
        yield NextAttempt(0.0 if at_once else plan.delay_s, by_operator)

    def _leave_out(self, record: IncidentRecord, plan: Plan, by_operator: bool = False) -> Wants:
        cordons = self._nodes.cordons
        vouched = cordons.vouched_since(record.opened_at)
        attempt, verdict = self._attempts.current, record.verdict
        fewer = attempt.without if attempt is not None else {}
        alone = self._of_one_gpu(verdict) if verdict is not None else {}
        failed = self._fewer_failed(verdict, attempt) if attempt is not None and verdict is not None else ()
        for name in failed:
            self._nodes.use_whole(name)
            yield record.note("fewer_given_up", loud=True, node=name, why="with a process less no step was made")
        for cordon in plan.cordons:
            if cordon.node in vouched:
                yield record.note("cordon_vouched", node=cordon.node)
            elif cordons.of(cordon.node, self._core.now) is None or cordon.node in fewer:
                yield record.note("cordoned", loud=True, node=cordon.node, reason=cordon.reason)
                self._nodes.use_whole(cordon.node, cordon.node not in alone or cordon.node in fewer)
                yield from self._scheduler.cordon(cordon, approved=by_operator)

    # ----- active tests of suspects -----

    def tested(self, want: SuspectsTested) -> Wants:
        """Who failed with two good partners is left out, as far as policy may; whatever came of it, the job goes on."""
        record, found = self.log.get(want.incident), want.conclusion
        if record is None:
            return
        named = found.named if found is not None else ()
        good = set(found.good) if found is not None else set()
        record.tests = SuspectTestsView(
            suspects=want.suspects,
            partners=want.partners[:TESTED_SHOWN],
            rounds=found.rounds if found is not None else 0,
            took_s=round(want.took_s, 1),
            failed={one.node: f"{one.how} with {' and with '.join(one.partners)}: {one.why}" for one in named},
            passed=tuple(name for name in want.suspects if name in good),
            between=found.links[:TESTED_SHOWN] if found is not None else (),
            unknown=want.unknown or _why_unknown(found),
        )
        told = record.note(
            "suspects_known",
            loud=True,
            failed=tuple(record.tests.failed),
            passed=record.tests.passed,
            between=tuple(" and ".join(link) for link in record.tests.between),
            why="; ".join(record.tests.failed.values()),
            unknown=record.tests.unknown,
            took_s=want.took_s,
        )
        record.tests = msgspec.structs.replace(record.tests, text=text_of(told, behind_id=True))
        yield told
        if named and record.closed_at is None and not record.replanned:
            yield from self._leave_out_tested(record, named)
        yield Proceed()

    def _leave_out_tested(self, record: IncidentRecord, named: tuple[Blamed, ...]) -> Wants:
        attempt, before = record.attempt_under_review, record.verdict
        if attempt is None or before is None:
            return
        names = " and ".join(one.node for one in named)
        texts = [
            Evidence(text=f"{one.node} {one.how} in active tests: {one.why}"[:300], source="tests", node=one.node)
            for one in named
        ]
        verdict = msgspec.structs.replace(
            before,
            culprits=tuple(Culprit(node=one.node) for one in named),
            confidence=max(before.confidence, TESTS_SURE),
            action="cordon_node_and_restart",
            why=f"{before.why.rstrip('.')}; {names} failed active tests with two good partners",
            evidence=(*texts, *before.evidence)[: len(before.evidence) + TESTED_SHOWN],
        )
        situation = self._situation_under_review(record, verdict, attempt)
        plan = policy.plan(verdict, msgspec.structs.replace(situation, failed_tests=True))
        said = _of_verdict(verdict)
        if refused := self._may_not_act():
            yield record.note("reviewed_refused", loud=True, **said, plan=plan.why, because=refused)
        elif plan.cordons:
            self._revise(record, verdict)
            yield record.note("reviewed", loud=True, **said, plan=plan.why)
            yield from self._replan(record, plan)
        else:
            self._revise(record, verdict)
            yield record.note("reviewed_plan_stays", loud=True, **said, plan=plan.why if plan.breaker else "")
            if plan.breaker:
                record.plan = plan
                yield from self.hold(plan.why)
                self._breaker_holds = True

    def _wait_for_space(self, record: IncidentRecord, plan: Plan) -> Wants:
        """What is left of the attempt ends; nothing is prepared, moved or started before there is room."""
        yield Enter("RECOVERING")
        self.active = None
        self._space.wait(_folders_named(record.verdict))
        yield Form(self._attempts.next_members())
        yield from self.wait_for_operator()
        yield Timer("backoff", self._core.now + plan.delay_s)

    # ----- waiting for an operator -----

    def hold(self, why: str) -> Wants:
        yield Enter("RECOVERING")
        self.held, self._breaker_holds = why, False
        yield from self.wait_for_operator()
        yield note("held", loud=True, why=why, ends_at=self._core.timers.get("hold"))

    def wait_for_operator(self) -> Wants:
        """Not for ever, unless one has paused it: that holds until the next word."""
        limit_s = self._core.spec.hold_limit_s
        self.waits_for_operator_since = self._core.now
        if not self._core.paused and limit_s > 0:
            yield Timer("hold", self._core.now + limit_s)

    def end_hold(self) -> None:
        self.held = ""

    def reject_plan(self, why: str) -> Wants:
        self.approval_wanted = False
        yield from self.hold(why)

    # ----- the next attempt -----

    def attempt_begins(self, number: int) -> None:
        """The next attempt is given out."""
        for record in self.log.open_failures():
            if record.plan is not None:
                record.mark("decide", self._core.now)
                record.next_attempt = number

    def mark_phase(self, phase: str) -> None:
        """A phase of the recovery has ended."""
        for record in self.log.open_failures():
            if record.next_attempt is not None:
                record.mark(phase, self._core.now)

    def progress_made(self) -> None:
        """The run got further than ever before."""
        self.budget.progressed()
        self._classes.clear()
        if self._scheduler.progress_made():
            self._nodes.touch_all()

    def recovered(self, text: str) -> Wants:
        """The attempt does what it should: what it was restarted for is closed."""
        attempt = self._attempts.current
        assert attempt is not None
        for record in self.log.open_failures():
            if record.next_attempt is None:
                continue
            began = attempt.first_at
            if attempt.step is None:
                began = attempt.progress_seen_at if attempt.first_counted_at is None else attempt.first_counted_at
            further_s = self._count_redone(record, attempt)
            record.mark("first_step", (self._core.now if began is None else began) - further_s)
            yield from self.close(record, text)
            yield self._recovered(record, attempt)

    def _recovered(self, record: IncidentRecord, attempt: Attempt) -> Note:
        first, broke, resume = attempt.first_step, self._attempts.last_with_steps, attempt.resume
        lost = record.redone_steps > 0 or (first is not None and broke is not None and broke.step is not None)
        compared = bool(resume.path) and resume.step is not None and first is not None
        resumed = compared and first is not None and resume.step is not None and first > resume.step
        checkpoint, snapshot = resume.path, attempt.round.snapshot if attempt.round is not None else None
        if snapshot is not None and (first is None or first > snapshot[1]):
            checkpoint = f"the snapshot of step {snapshot[1]} in memory"
            compared = resumed = first is not None
        return note(
            "recovered",
            incident=record.id,
            loud=True,
            step=attempt.first_made,
            took_s=sum(record.seconds().values()),
            lost_steps=record.redone_steps if lost else None,
            what=record.what,
            checkpoint=checkpoint,
            offered=bool(checkpoint) and not compared,
            resumed=resumed,
            ignored=compared and not resumed,
        )

    def _count_redone(self, record: IncidentRecord, attempt: Attempt) -> float:
        """From when the first step of `attempt` was first made to the failure: that training is done again.

        The attempt that broke may have been followed by others that made no step. Seconds of new training where the
        first step that is seen is further than that one ever came.
        """
        broke, first = self._attempts.last_with_steps, attempt.first_step
        if broke is None:
            return 0.0
        if broke.newest_step is None or first is None:
            if not attempt.resume.path and attempt.round is not None and attempt.round.snapshot is None:
                record.redone_steps = broke.counted  # it begins anew: all that the clock has counted
            return 0.0
        record.redone_steps = max(0, broke.newest_step - attempt.done_before)
        made_at, broke_at = broke.reached_at(first), broke.broke_at
        if made_at is None:
            return 0.0
        lost_s = (record.failed_at if broke_at is None else broke_at) - max(made_at, self._attempts.started_at or 0.0)
        record.redone_s = max(0.0, lost_s)
        return max(0.0, -lost_s)

    # ----- re-evaluation, when evidence comes late -----

    def _late_finding(self, finding: Finding) -> Wants:
        """What the kernel, a GPU or the host told may be about what has been concluded already."""
        record = self._open_to_review()
        if record is None or finding.severity == "warning" or finding.evidence.source == "output":
            return
        if finding.attempt in (0, record.attempt) and finding.at <= record.opened_at + SLACK_S:
            yield from self._reevaluate(record)

    def _late_evidence(self, piece: NodeEvidence) -> Wants:
        """Evidence of an attempt that is over, which its verdict could not wait for."""
        record = self._open_to_review()
        attempt = record.attempt_under_review if record is not None else None
        if record is None or attempt is None or attempt.number != piece.attempt:
            return
        if attempt is self._attempts.current or attempt.keep_evidence(piece):
            yield from self._reevaluate(record)

    def _open_to_review(self) -> IncidentRecord | None:
        """The incident whose plan is being carried out, or waits for an operator."""
        record, attempt = next(reversed(self.log.open_failures()), None), self._attempts.current
        if self._core.is_over or attempt is None or record is None:
            return None
        if record.attempt_under_review is None or record.plan is None:
            return None
        if record.replanned or record.review_count >= REVIEWS or record.plan.kind not in ("restart", "requeue"):
            return None
        if self.approval_wanted:
            return record if record is self.active else None
        if self.active is not None or attempt is record.attempt_under_review or attempt.finishing:
            return None
        late = self._core.now > record.phase_ends["diagnose"] + REVIEW_S
        return None if attempt.round is not None and late else record

    def reevaluate(self) -> Wants:
        """An operator lets policy act again: late evidence may want another plan."""
        record = self._open_to_review()
        if record is not None and record.late_evidence_reported:
            yield from self._reevaluate(record)

    def _reevaluate(self, record: IncidentRecord) -> Wants:
        attempt, before, plan_before = record.attempt_under_review, record.verdict, record.plan
        if attempt is None or before is None or plan_before is None:
            return
        record.review_count += 1
        self._forget(before, attempt, record.phase_ends["diagnose"])
        verdict = self._verdict(record, attempt)
        plan = policy.plan(verdict, self._situation_under_review(record, verdict, attempt))
        known = {cordon.node for cordon in plan_before.cordons}
        cordons, now = self._nodes.cordons, self._core.now
        fresh = [one for one in plan.cordons if one.node not in known and cordons.of(one.node, now) is None]
        surer = verdict.failure_class is not before.failure_class and verdict.confidence > before.confidence
        refused = "" if self.approval_wanted else self._may_not_act()
        said = _of_verdict(verdict)
        if fresh and refused:
            if not record.late_evidence_reported:
                record.late_evidence_reported = True
                yield record.note("reviewed_refused", loud=True, **said, plan=plan.why, because=refused)
        elif fresh:
            self._revise(record, verdict)
            yield record.note("reviewed", loud=True, **said, plan=plan.why)
            yield from self._replan(record, plan)
            yield from self._tests.stop("late evidence tells more")
        elif surer:
            self._revise(record, verdict)
            stays = plan.why if plan.breaker else ""
            yield record.note("reviewed_plan_stays", loud=True, **said, plan=stays)
        self._remember(record.verdict or before, attempt, record.phase_ends["diagnose"])

    def _situation_under_review(self, record: IncidentRecord, verdict: Verdict, attempt: Attempt) -> policy.Situation:
        """Members that the first plan left out are not there for the start that has begun."""
        situation, now = self._situation(record, verdict, attempt), self._core.now
        blamed, lost = {culprit.node for culprit in verdict.culprits}, set(situation.lost)
        there = [name for name in attempt.members if name not in lost]
        there = [name for name in there if name in blamed or self._nodes.cordons.of(name, now) is None]
        situation = msgspec.structs.replace(situation, nodes=len(there))
        if not self.approval_wanted:
            situation = msgspec.structs.replace(situation, delay_s=0.0)  # this restart is charged already
        return situation

    def _may_not_act(self) -> str:
        """Why what has begun is not changed now; empty: it may be."""
        if self._core.paused:
            return "the job is paused"
        if self._core.mode != "enforce":
            return f"mode {self._core.mode}"
        asked = self._scheduler.may_have_been_asked
        return f"{self._core.spec.scheduler} was asked already to start the job again" if asked else ""

    def _revise(self, record: IncidentRecord, verdict: Verdict) -> None:
        if record.verdict is not None and record.plan is not None and not record.revised:
            before = record.verdict
            record.revised = f"{before.failure_class.value} ({before.confidence:.0%} sure): {record.plan.why}"
        record.verdict = verdict

    def _replan(self, record: IncidentRecord, plan: Plan) -> Wants:
        """For the same incident: what was charged for the first plan stays charged."""
        charged = record.plan.counts if record.plan is not None and not self.approval_wanted else plan.counts
        record.plan, record.replanned = msgspec.structs.replace(plan, counts=charged), True
        if not self.approval_wanted:
            yield from self._leave_out(record, plan)
            yield from self._start_without(record, {cordon.node for cordon in plan.cordons})

    def _start_without(self, record: IncidentRecord, left_out: set[str]) -> Wants:
        attempt = self._attempts.current
        assert attempt is not None
        if not left_out & attempt.member_set:
            return
        for phase in ("decide", "stop", "rendezvous", "start"):
            record.phase_ends.pop(phase, None)  # of the start that is given up
        record.next_attempt = None
        if attempt.round is not None:
            yield NextAttempt()
            return
        yield Enter("RECOVERING")  # nothing of it has run: the same attempt on other nodes
        yield cancel("form")
        yield from self._attempts.refresh()
        yield Proceed()

    # ----- what happens to the job -----

    def define(self) -> None:
        self.budget = RestartBudget(self._core.spec.max_restarts)

    def restart_by_operator(self) -> None:
        """An operator may be faster than the diagnosis."""
        self.held = ""
        if self.active is not None and self.active.plan is None:
            self.active.plan = Plan(kind="restart", why="an operator restarted the run", counts=False)

    def hand_over(self, by_operator: bool) -> None:
        """The next attempt is on its way."""
        if by_operator:
            self._end_reviews()  # it starts as an operator ordered it
        self.active, self.approval_wanted = None, False

    def _end_reviews(self) -> None:
        for record in self.log.open_failures():
            record.attempt_under_review = None

    def end(self, outcome: Outcome) -> None:
        self.held = ""
        failures = self.log.open_failures() if outcome.state != "requeued" else []  # what it costs goes on
        for record in [*failures, *self.log.open_degradations()]:
            record.close(self._core.now, f"the job ended: {outcome.line}")

    def forget_attempt(self, why: str) -> None:
        """The journal has lost how it went on."""
        self.active, self.approval_wanted, self.held = None, False, ""
        for record in self.log.open_failures():
            record.close(self._core.now, why)

    def started_again(self, event: JobRequeued, lost: str) -> Wants:
        """The scheduler has started the job again. Where nothing told why, the reason is an incident all the same."""
        attempt = self._attempts.current
        if not self._core.is_over and attempt is not None and not self.log.open_failures():
            yield from self._open_started_again(attempt, event, lost)
        for record in self.log.open_failures():
            if record.plan is None:
                record.plan = Plan(kind="requeue", why="the scheduler started the job again", counts=False)
        self.held, self.active, self._left_alone, self.approval_wanted = "", None, None, False
        self._end_reviews()  # its nodes are others

    def _open_started_again(self, attempt: Attempt, event: JobRequeued, lost: str) -> Wants:
        """No controller lived to tell why it ended; one of the nodes may have."""
        core = self._core
        text = f"attempt {attempt.number} ended with all its nodes, and nothing was told before"
        why = "the scheduler started the job again while it ran: most likely the node of its controller was lost"
        if lost:
            text = f"node {lost}, the first one, was lost with the controller"
            why = f"the scheduler has lost {lost}, where the controller was, says {event.by}"
        failed_at = core.previous_event_at if event.lost_at is None else event.lost_at
        record = yield from self._open(OpenIncident("node_lost", text, core.previous_event_at), attempt)
        record.failed_at = attempt.broke_at = min(core.now, max(attempt.formed_at, failed_at))
        record.verdict = Verdict(
            failure_class=FailureClass.NODE_FAILURE,
            culprits=(Culprit(node=lost),) if lost else (),
            confidence=0.9 if lost else 0.5,
            why=why,
            action="requeue",
        )
        record.mark("diagnose", core.now)


def _waits(record: IncidentRecord, verdict: Verdict, world: int) -> WaitGraph | None:
    """It is only shown: what is wrong with it must not keep the run from coming back."""
    if record.hang is None:
        return None
    flights = [one for piece in record.evidence for one in piece.flights]
    stacks = [one for piece in record.evidence for one in piece.stacks]
    suspects = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    try:
        return who_waits(flights, stacks, record.hang, suspects or set(record.hang.ranks), world)
    except Exception:  # dumps are what a broken process wrote
        return None


def _of_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "failure_class": verdict.failure_class.value,
        "confidence": verdict.confidence,
        "why": verdict.why.rstrip("."),
    }


def _why_unknown(found: PairConclusion | None) -> str:
    """Why nobody could be named although some did not do well, in words."""
    if found is None or not (found.bad or found.unproven):
        return ""
    if found.domain:
        return f"all that fail are of {found.domain}"
    if found.most:
        return f"only {len(found.good)} of {len(found.good) + len(found.bad) + len(found.unproven)} nodes do well"
    return f"no two good partners for {', '.join(found.unproven[:8])}" if found.unproven else ""


def _may_be_complete(attempt: Attempt) -> bool:
    if attempt.is_broken:
        return False
    # Steps are printed every so often: the last one that was seen may be well before the last one that was done.
    return attempt.last_step is None or attempt.step is None or attempt.step >= 0.9 * attempt.last_step


def _failure(record: IncidentRecord, why: str, exit_code: int | None = None) -> Outcome:
    verdict = record.verdict
    reason = f"{verdict.failure_class.value}: {verdict.why}" if verdict is not None else record.what
    return Outcome(
        state="failed",
        exit_code=WORKER_FAILED if exit_code is None else exit_code,
        line=f"{reason} ({why})"[:500],
        first_failure=record.what,
    )


def _folders_named(verdict: Verdict | None) -> tuple[str, ...]:
    texts = [one.text for one in verdict.evidence] if verdict is not None else []
    found = (match for text in texts for match in _NAMED_FOLDER.finditer(text))
    return tuple(dict.fromkeys(next(filter(None, match.groups())) for match in found))[:8]
