"""Incidents, from the first sign to the first step afterwards: what was seen, concluded, done, and how long it took."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Literal

from diagnosis.incident import HangReport, Incident, Opinion, Verdict
from diagnosis.signals import Finding, NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.actions import Plan
from supervisor.job.attempt import Attempt
from supervisor.view import IncidentView, utc

KEPT = 200
WINDOW_BEFORE_S = 600.0
WINDOW_AFTER_S = 300.0
FINDINGS_KEPT = 500

Trigger = Literal["exit", "hang", "node_lost", "launcher", "signal", "setup", "device"]
"""`signal` (numbers) and `device` stop nothing: the attempt goes on."""


@dataclasses.dataclass
class Case:
    """One incident while it is worked on. Times are Unix seconds."""

    id: str
    opened_at: float
    failed_at: float
    """When it broke, as near as is known."""
    trigger: Trigger
    attempt: int
    what: str
    step: int | None
    """The newest that the attempt had made."""
    hang: HangReport | None = None
    opinion: Opinion | None = None
    """A language model's; never looked at by anything that decides."""
    opinions: int = 0
    opinion_failed: Opinion | None = None
    """A later try that gave none."""
    opinion_wanted: bool = False
    """Asked for and not answered."""
    opinion_decided: bool = False
    """Whether to ask for one by itself."""
    lost_nodes: list[str] = dataclasses.field(default_factory=list)
    launcher_exits: dict[str, str] = dataclasses.field(default_factory=dict)
    launcher_code: int | None = None
    """The exit code of the first launcher that ended by itself."""
    before_ranks: bool = False
    """A launcher ended before any rank of the attempt was started."""
    evidence: list[NodeEvidence] = dataclasses.field(default_factory=list)
    folders: tuple[str, ...] = ()
    """`node:folder` where agents kept the whole evidence."""
    awaiting: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    """(node, evidence request) still to be answered before it is concluded."""
    waited: bool = False
    """Its evidence was waited for longer than usual: a node that does not answer may be gone."""
    more: int = 0
    """Further failures that belong to it."""
    lasts: bool = False
    """It was left alone once and did not go away."""
    stood_still: bool = False
    """A proven hang that was left alone: the time until progress came back, or the job ended, was lost."""
    verdict: Verdict | None = None
    plan: Plan | None = None
    of: Attempt | None = None
    """The attempt that broke, once there is a verdict, while that may still be looked at again."""
    looks: int = 0
    """How often that was done."""
    late_told: bool = False
    """What came late wants another plan, and may not have it."""
    revised: str = ""
    """Verdict and plan before evidence that came late, in words."""
    replanned: bool = False
    """It has another plan since: that happens once."""
    counted_as: FailureClass | None = None
    """What it was when its class was first counted: counters never go back."""
    next_attempt: int | None = None
    marks: dict[str, float] = dataclasses.field(default_factory=dict)
    """When each phase ended."""
    redo_s: float = 0.0
    """From the step that the next attempt began after, as it was first made, to the failure: training that is lost."""
    redo_steps: int = 0
    """Steps that the next attempt did again."""
    closed_at: float | None = None
    closed_why: str = ""

    @property
    def goes_on(self) -> bool:
        """It stopped nothing: what it is about goes on with the attempt."""
        return self.trigger in ("signal", "device")

    def mark(self, phase: str, at: float) -> None:
        """`phase` ended at `at`; the first time counts."""
        self.marks.setdefault(phase, at)

    def take(self, evidence: Iterable[NodeEvidence]) -> None:
        self.evidence = list(evidence)
        self.folders = tuple(f"{piece.node}:{piece.folder}" for piece in self.evidence if piece.folder)

    def close(self, at: float, why: str) -> None:
        """The verdict keeps what was telling; the rest of the evidence lies in its folders."""
        self.closed_at, self.closed_why = at, why
        self.evidence.clear()
        self.of = None

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, in the order in which they ended."""
        found: dict[str, float] = {"detect": max(0.0, self.opened_at - self.failed_at)}
        before = self.opened_at
        for phase, at in self.marks.items():
            found[phase] = max(0.0, at - before)
            before = max(before, at)
        return found

    @property
    def recovery_s(self) -> float | None:
        """What the restart took, without what it was decided by and waited for; None: there was none."""
        seconds = self.seconds()
        if self.next_attempt is None or "first_step" not in seconds:
            return None
        return sum(seconds.get(phase, 0.0) for phase in ("stop", "rendezvous", "start", "first_step"))

    def down(self, now: float) -> tuple[float, float] | None:
        """From when until when nothing was trained for it; None: it stopped nothing."""
        false_alarm = self.trigger == "hang" and self.closed_at is not None and self.next_attempt is None
        stood_still = self.stood_still or (self.hang is not None and self.hang.kind == "stopped")
        if (false_alarm and not stood_still) or self.goes_on:
            return None
        end = self.marks.get("first_step", self.closed_at if self.closed_at is not None else now)
        return self.failed_at, max(self.failed_at, end)

    def lost_s(self, now: float) -> float:
        """Down time plus the work done again. An incident that stopped nothing cost nothing."""
        span = self.down(now)
        return span[1] - span[0] + self.redo_s if span is not None else 0.0

    def incident(self, findings: tuple[Finding, ...], rank_nodes: dict[int, str], world_size: int) -> Incident:
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
            ranks_started=not self.before_ranks,
            evidence=tuple(self.evidence),
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
            next_attempt=self.next_attempt,
            seconds={phase: round(s, 3) for phase, s in self.seconds().items()},
            lost_s=round(self.lost_s(now), 3),
            folders=self.folders,
            opinion=self.opinion,
            opinions=self.opinions,
            opinion_failed=self.opinion_failed,
            opinion_wanted=self.opinion_wanted,
        )


class Sums:
    """What incidents add up to, for counters: each adds to them once, and nothing is ever taken back."""

    def __init__(self) -> None:
        self.incidents: Counter[FailureClass] = Counter()
        """By the verdict's class."""
        self.recoveries: Counter[str] = Counter()
        """Phase -> how many closed incidents went through it to a first step."""
        self.recovery_s: dict[str, float] = {}
        """Phase -> their seconds."""
        self.badput_s: dict[str, float] = {}
        """Phase in which closed incidents kept the run from training, `redo`, `other` -> seconds."""
        self.redo_steps = 0
        self._down_until = 0.0

    def add(self, case: Case) -> None:
        if case.verdict is not None:
            case.counted_as = case.counted_as or case.verdict.failure_class
            self.incidents[case.counted_as] += 1
        elif case.closed_at is not None:
            self.incidents[FailureClass.UNKNOWN] += 1
        if case.closed_at is None:
            return
        self.redo_steps += case.redo_steps
        seconds = case.seconds()
        if "first_step" in seconds:
            self.recoveries.update(seconds.keys())
            _add(self.recovery_s, seconds)
        self._add_badput(case, case.closed_at)

    def _add_badput(self, case: Case, now: float) -> None:
        """A failure in the recovery from another one: the time that both lasted counts once."""
        span = case.down(now)
        if span is None:
            return
        at = max(case.failed_at, self._down_until)
        ends = {"detect": case.opened_at, **case.marks, "other": span[1]}
        for kind, end in ends.items():
            _add(self.badput_s, {kind: max(0.0, min(end, span[1]) - at)})
            at = max(at, end)
        _add(self.badput_s, {"redo": case.redo_s})
        self._down_until = max(self._down_until, span[1])


def _add(sums: dict[str, float], seconds: Mapping[str, float]) -> None:
    for kind, more in seconds.items():
        sums[kind] = sums.get(kind, 0.0) + more


class Casebook:
    """All incidents of a job; the newest `KEPT` with everything, older ones as a sum."""

    def __init__(self) -> None:
        self.cases: deque[Case] = deque()
        self.total = 0
        self._old_lost_s = 0.0
        self._old_down_since: float | None = None
        self._old = Sums()
        self._findings: deque[Finding] = deque(maxlen=FINDINGS_KEPT)

    def get(self, incident: str) -> Case | None:
        """None: there was none of that id, or it is too old."""
        return next((case for case in reversed(self.cases) if case.id == incident), None)

    def open(self, case: Case) -> None:
        self.total += 1
        self.cases.append(case)
        if len(self.cases) > KEPT:
            with_it, self._old_down_since = self.lost_s(case.opened_at), self.down_since
            self._old.add(self.cases.popleft())
            self._old_lost_s += with_it - self.lost_s(case.opened_at)

    def sums(self) -> Sums:
        """Over all incidents, those that are no longer kept included."""
        found = copy.deepcopy(self._old)
        for case in self.cases:
            found.add(case)
        return found

    def next_id(self) -> str:
        return f"i-{self.total + 1}"

    def unclosed(self) -> list[Case]:
        """Those that broke an attempt."""
        return [case for case in self.cases if case.closed_at is None and not case.goes_on]

    def standing(self) -> list[Case]:
        """Those that stopped nothing, and last."""
        return [case for case in self.cases if case.closed_at is None and case.goes_on]

    @property
    def down_since(self) -> float | None:
        """When training stood still for the first time."""
        starts = [case.failed_at for case in self.cases if case.down(case.failed_at) is not None]
        return min([*starts, *([] if self._old_down_since is None else [self._old_down_since])], default=None)

    def lost_s(self, now: float) -> float:
        """Of all incidents; what one lasted while another did counts once."""
        total, until = self._old_lost_s + sum(case.redo_s for case in self.cases), 0.0
        for start, end in sorted(span for case in self.cases if (span := case.down(now)) is not None):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    def note_finding(self, finding: Finding) -> None:
        self._findings.append(finding)

    def findings_near(self, at: float, attempt: int) -> tuple[Finding, ...]:
        """Findings of the attribution window around `at`; not what the ranks of other attempts wrote."""
        return tuple(
            finding
            for finding in self._findings
            if finding.attempt in (0, attempt) and at - WINDOW_BEFORE_S <= finding.at <= at + WINDOW_AFTER_S
        )
