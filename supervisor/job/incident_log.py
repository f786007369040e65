"""What the job remembers of its incidents: a record of each, their findings, sums for counters. It decides nothing."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Mapping

import msgspec

from diagnosis.incident import HangReport, Incident, Opinion, Verdict, WaitGraph
from diagnosis.signals import Finding, NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.incident_memory import Correction, Recurrence
from recovery.policy import Plan
from recovery.swaps import PROVEN, SHARED_S, STORM_S
from supervisor.job.attempts import Attempt
from supervisor.job.core import Trigger
from supervisor.messages import Note, NoteValue, OutsideAlert
from supervisor.notes import note
from supervisor.view import IncidentView, SuspectTestsView, utc

RECORDS_KEPT = 200
WINDOW_BEFORE_S = 600.0
WINDOW_AFTER_S = 300.0
FINDINGS_KEPT = 500
OPINIONS_ASKED_AGAIN = 8
"""As many as may wait (`supervisor.opinion`)."""


@dataclasses.dataclass
class IncidentRecord:
    """One incident while it is handled. Times are Unix seconds."""

    id: str
    opened_at: float
    failed_at: float
    """When the failure happened, as precisely as is known."""
    trigger: Trigger
    attempt: int
    what: str
    step: int | None
    """The newest step of the attempt."""
    hang: HangReport | None = None
    opinion: Opinion | None = None
    """A language model's. No decision uses it."""
    opinions: int = 0
    opinion_failed: Opinion | None = None
    """A later request that failed."""
    opinion_wanted: bool = False
    """Requested, and not answered yet."""
    opinion_decided: bool = False
    """The job has decided whether to ask for one by itself."""
    recurrences: tuple[Recurrence, ...] = ()
    """What it has in common with earlier incidents. No decision uses it."""
    corrections: list[Correction] = dataclasses.field(default_factory=list)
    """What operators say that it was. No decision uses it."""
    lost_nodes: list[str] = dataclasses.field(default_factory=list)
    launcher_exits: dict[str, str] = dataclasses.field(default_factory=dict)
    launcher_code: int | None = None
    """The exit code of the first launcher that ended by itself."""
    failed_before_ranks: bool = False
    """A launcher ended before any rank of the attempt was started."""
    evidence: list[NodeEvidence] = dataclasses.field(default_factory=list)
    folders: tuple[str, ...] = ()
    """`node:folder` where agents kept the whole evidence."""
    awaiting: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """(node, evidence request) that the diagnosis still waits for."""
    waited_longer: bool = False
    """The job waited for its evidence longer than usual: a node that does not answer may be gone."""
    further_failures: int = 0
    early: bool = False
    """A device has failed, and it is not known yet whether its ranks make another step."""
    persists: bool = False
    """The job left it alone once, and it did not go away."""
    stood_still: bool = False
    """A proven hang that was left alone: the time until progress came back, or the job ended, was lost."""
    verdict: Verdict | None = None
    waits: WaitGraph | None = None
    """Of a hang: who waits for whom. No decision uses it."""
    plan: Plan | None = None
    attempt_under_review: Attempt | None = None
    """The attempt that broke, from the verdict on, while late evidence may still change that verdict."""
    review_count: int = 0
    late_evidence_reported: bool = False
    """Late evidence asked for a different plan that the job was not allowed to carry out."""
    revised: str = ""
    """Verdict and plan before late evidence changed them, in words."""
    replanned: bool = False
    """Late evidence has changed its plan: that happens once."""
    counted_as: FailureClass | None = None
    """Its class when it was first counted: counters never go back."""
    alerts: dict[str, OutsideAlert] = dataclasses.field(default_factory=dict)
    """Of others' monitoring, that fired beside it, by key. No verdict uses them."""
    suspects: tuple[str, ...] = ()
    """Nodes that are to be tested before the restart."""
    tests: SuspectTestsView | None = None
    """Active tests of the nodes that its verdict suspects."""
    next_attempt: int | None = None
    phase_ends: dict[str, float] = dataclasses.field(default_factory=dict)
    """Phase of the recovery -> when it ended."""
    redone_s: float = 0.0
    """Training that was lost: from the step after which the next attempt began, when it was first made, to the
    failure."""
    redone_steps: int = 0
    """Steps that the next attempt did again."""
    closed_at: float | None = None
    closed_why: str = ""

    @property
    def stops_nothing(self) -> bool:
        """The attempt goes on with it."""
        return self.trigger in ("signal", "device")

    def note(self, kind: str, *, loud: bool = False, **arguments: NoteValue) -> Note:
        return note(kind, incident=self.id, loud=loud, refused=False, unknown_node=False, **arguments)

    def mark(self, phase: str, at: float) -> None:
        """`phase` ended at `at`; the first time counts."""
        self.phase_ends.setdefault(phase, at)

    def add_opinion(self, opinion: Opinion) -> None:
        """A failed request does not replace an opinion; it is shown beside it."""
        self.opinions += 1
        self.opinion_wanted = False
        if opinion.problem and self.opinion is not None and not self.opinion.problem:
            self.opinion_failed = opinion
        else:
            self.opinion, self.opinion_failed = opinion, None

    def keep_evidence(self, evidence: Iterable[NodeEvidence]) -> None:
        self.evidence = list(evidence)
        self.folders = tuple(f"{piece.node}:{piece.folder}" for piece in self.evidence if piece.folder)

    def close(self, at: float, why: str) -> None:
        """The verdict keeps the evidence that it is based on; the rest stays in its folders."""
        self.closed_at, self.closed_why = at, why
        if self.tests is not None and not self.tests.took_s:
            self.tests = None  # they were given up with the attempt that waited for them
        self.evidence.clear()
        self.attempt_under_review = None

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, in the order in which they ended."""
        found: dict[str, float] = {"detect": max(0.0, self.opened_at - self.failed_at)}
        before = self.opened_at
        for phase, at in self.phase_ends.items():
            found[phase] = max(0.0, at - before)
            before = max(before, at)
        return found

    @property
    def recovery_s(self) -> float | None:
        """How long the restart took, without diagnosis and waiting; None: there was no restart."""
        seconds = self.seconds()
        if self.next_attempt is None or "first_step" not in seconds:
            return None
        return sum(seconds.get(phase, 0.0) for phase in ("stop", "rendezvous", "start", "first_step"))

    def down_span(self, now: float) -> tuple[float, float] | None:
        """From when until when it kept the run from training; None: it did not."""
        if self.trigger in ("loss", "replicas") and self.next_attempt is None:
            return None  # the attempt trains on until its plan is carried out
        false_alarm = self.trigger == "hang" and self.closed_at is not None and self.next_attempt is None
        stood_still = self.stood_still or (self.hang is not None and self.hang.kind == "stopped")
        if (false_alarm and not stood_still) or self.stops_nothing:
            return None
        end = self.phase_ends.get("first_step", self.closed_at if self.closed_at is not None else now)
        return self.failed_at, max(self.failed_at, end)

    def lost_s(self, now: float) -> float:
        """Down time plus the time of the steps that were done again. Nothing for an incident that stopped nothing."""
        span = self.down_span(now)
        return span[1] - span[0] + self.redone_s if span is not None else 0.0

    def incident(
        self,
        evidence: Iterable[NodeEvidence],
        findings: tuple[Finding, ...],
        rank_nodes: dict[int, str],
        world_size: int,
    ) -> Incident:
        return Incident(
            id=self.id,
            opened_at=self.opened_at,
            attempt=self.attempt,
            trigger=self.trigger,
            step=self.step,
            hang=self.hang,
            lost_nodes=tuple(self.lost_nodes),
            launcher_exits=dict(self.launcher_exits),
            launcher_code=self.launcher_code,
            ranks_started=not self.failed_before_ranks,
            evidence=tuple(evidence),
            findings=findings,
            rank_nodes=dict(rank_nodes),
            world_size=world_size,
        )

    def view(self, now: float) -> IncidentView:
        return IncidentView(
            id=self.id,
            trigger=self.trigger,
            attempt=self.attempt,
            opened_at=utc(self.opened_at),
            closed_at=None if self.closed_at is None else utc(self.closed_at),
            closed_why=self.closed_why,
            what=self.what,
            step=self.step,
            verdict=self.verdict,
            plan=self.plan,
            revised=self.revised,
            tests=self.tests if self.tests is not None else msgspec.UNSET,
            next_attempt=self.next_attempt,
            seconds={phase: round(s, 3) for phase, s in self.seconds().items()},
            lost_s=round(self.lost_s(now), 3),
            folders=self.folders,
            opinion=self.opinion,
            opinions=self.opinions,
            opinion_failed=self.opinion_failed,
            opinion_wanted=self.opinion_wanted,
            recurrences=self.recurrences or msgspec.UNSET,
            corrections=tuple(self.corrections) or msgspec.UNSET,
            waits=self.waits if self.waits is not None else msgspec.UNSET,
            alerts=tuple(self.alerts.values()) or msgspec.UNSET,
        )


class IncidentTotals:
    """Sums over incidents, for counters. Each incident is added once; sums never fall."""

    def __init__(self) -> None:
        self.incidents: Counter[FailureClass] = Counter()
        """By the verdict's class."""
        self.recoveries: Counter[str] = Counter()
        """Phase -> how many closed incidents went through it to a first step."""
        self.recovery_s: dict[str, float] = {}
        """Phase -> their seconds."""
        self.badput_s: dict[str, float] = {}
        """Phase in which closed incidents kept the run from training, `redo`, `other` -> seconds."""
        self.redone_steps = 0
        self._down_until = 0.0

    def add(self, record: IncidentRecord) -> None:
        if record.verdict is not None:
            record.counted_as = record.counted_as or record.verdict.failure_class
            self.incidents[record.counted_as] += 1
        elif record.closed_at is not None:
            self.incidents[FailureClass.UNKNOWN] += 1
        if record.closed_at is None:
            return
        self.redone_steps += record.redone_steps
        seconds = record.seconds()
        if "first_step" in seconds:
            self.recoveries.update(seconds.keys())
            _add(self.recovery_s, seconds)
        self._add_badput(record, record.closed_at)

    def _add_badput(self, record: IncidentRecord, now: float) -> None:
        """If one incident happens during the recovery from another, their common time counts once."""
        span = record.down_span(now)
        if span is None:
            return
        at = max(record.failed_at, self._down_until)
        ends = {"detect": record.opened_at, **record.phase_ends, "other": span[1]}
        for kind, end in ends.items():
            _add(self.badput_s, {kind: max(0.0, min(end, span[1]) - at)})
            at = max(at, end)
        _add(self.badput_s, {"redo": record.redone_s})
        self._down_until = max(self._down_until, span[1])


def _add(sums: dict[str, float], seconds: Mapping[str, float]) -> None:
    for kind, more in seconds.items():
        sums[kind] = sums.get(kind, 0.0) + more


@dataclasses.dataclass
class OpinionUse:
    """What opinions took, of all incidents."""

    answered: int = 0
    failed: int = 0
    took_s: float = 0.0
    tokens_read: int = 0
    tokens_written: int = 0
    cost: float = 0.0

    def add(self, opinion: Opinion) -> None:
        self.answered += not opinion.problem
        self.failed += bool(opinion.problem)
        self.took_s += opinion.took_s
        self.tokens_read += opinion.tokens_read
        self.tokens_written += opinion.tokens_written
        self.cost += opinion.cost


class IncidentLog:
    """All incidents of a job: the newest `RECORDS_KEPT` as records, older ones only in the sums."""

    def __init__(self) -> None:
        self.records: deque[IncidentRecord] = deque()
        self.total = 0
        self.opinion_use = OpinionUse()
        self._old_lost_s = 0.0
        self._old_down_since: float | None = None
        self._old = IncidentTotals()
        self._findings: deque[Finding] = deque(maxlen=FINDINGS_KEPT)

    def get(self, incident: str) -> IncidentRecord | None:
        """None: no incident has that id, or its record is not kept any more."""
        return next((record for record in reversed(self.records) if record.id == incident), None)

    def open(self, record: IncidentRecord) -> None:
        self.total += 1
        self.records.append(record)
        if len(self.records) > RECORDS_KEPT:
            with_it, self._old_down_since = self.lost_s(record.opened_at), self.down_since
            self._old.add(self.records.popleft())
            self._old_lost_s += with_it - self.lost_s(record.opened_at)

    def totals(self) -> IncidentTotals:
        """Over all incidents, including those whose records are not kept."""
        found = copy.deepcopy(self._old)
        for record in self.records:
            found.add(record)
        return found

    def next_id(self) -> str:
        return f"i-{self.total + 1}"

    def open_failures(self) -> list[IncidentRecord]:
        """The open ones that broke an attempt."""
        return [record for record in self.records if record.closed_at is None and not record.stops_nothing]

    def open_degradations(self) -> list[IncidentRecord]:
        """The open ones that stopped nothing."""
        return [record for record in self.records if record.closed_at is None and record.stops_nothing]

    @property
    def down_since(self) -> float | None:
        """When training stood still for the first time."""
        starts = [record.failed_at for record in self.records if record.down_span(record.failed_at) is not None]
        return min([*starts, *([] if self._old_down_since is None else [self._old_down_since])], default=None)

    def lost_s(self, now: float) -> float:
        """Of all incidents; time that two have in common counts once."""
        total, until = self._old_lost_s + sum(record.redone_s for record in self.records), 0.0
        for start, end in sorted(span for record in self.records if (span := record.down_span(now)) is not None):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    @property
    def newest(self) -> IncidentRecord:
        return self.records[-1]

    # ----- opinions: which incidents a language model is asked about; nothing that decides reads any of it -----

    def opinions_wanted(self, below: float, is_over: bool) -> list[str]:
        """Incidents with verdicts less sure than `below`, and failures without a verdict: an operator or the end of
        the job came first. To be called after each event; each incident is decided on once."""
        found: list[str] = []
        for record in reversed(self.records):
            if record.opinion_decided:
                break  # so are those before it
            moved_on = record.next_attempt is not None or record.plan is not None or is_over
            if record.verdict is None and record.closed_at is None and not moved_on:
                continue
            record.opinion_decided = True
            verdict = record.verdict
            unsure = verdict.confidence < below if verdict is not None else moved_on and record.trigger != "signal"
            if unsure and below > 0.0 and record.opinion is None:
                record.opinion_wanted = True
                found.append(record.id)
        return found

    def opinions_unanswered(self) -> list[str]:
        """The newest incidents about which an earlier controller asked without an answer."""
        return [record.id for record in self.records if record.opinion_wanted][-OPINIONS_ASKED_AGAIN:]

    def give_up_opinions(self) -> None:
        """The controller goes with the job: nobody is left to receive an answer."""
        for record in self.records:
            if record.opinion_wanted:
                why = f"the job ended before it came: `unbroken why {record.id} --ask` asks now"
                record.add_opinion(Opinion(failure_class=FailureClass.UNKNOWN, problem=why))

    # ----- findings -----

    def failing_nodes(self, at: float) -> set[str]:
        """Nodes of which a device failed within moments of this."""
        near = (one for one in self._findings if one.outlook == "fails" and abs(one.at - at) < STORM_S)
        return {one.node for one in near if one.node}

    def worse_nodes(self, failure_class: FailureClass, at: float) -> set[str]:
        """Nodes of which a device got worse in the same way within minutes of this."""
        near = (one for one in self._findings if one.failure_class is failure_class and abs(one.at - at) < SHARED_S)
        return {one.node for one in near if one.outlook in PROVEN and one.severity != "warning" and one.node}

    def add_finding(self, finding: Finding) -> None:
        self._findings.append(finding)

    def forget_findings(self, rule: str) -> None:
        """What they told is over: it explains no later failure."""
        kept = [one for one in self._findings if one.rule != rule]
        self._findings.clear()
        self._findings.extend(kept)

    def findings_near(self, at: float, attempt: int) -> tuple[Finding, ...]:
        """Findings of the attribution window around `at`; not what the ranks of other attempts wrote."""
        return tuple(
            finding
            for finding in self._findings
            if finding.attempt in (0, attempt) and at - WINDOW_BEFORE_S <= finding.at <= at + WINDOW_AFTER_S
        )
