"""What the job has measured of its saves, restarts and failures, and what follows from that (`recovery.cadence`).

Pure. No decision of the job uses it: it is told to people.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from diagnosis.signals import Frozen
from diagnosis.taxonomy import TAXONOMY
from recovery.cadence import DAY_S, Advice, Costs, Figures, advise, observed_node_rate, observed_rate
from recovery.checkpoint import POINTER, Checkpoint, is_beside
from supervisor.job import view
from supervisor.job.attempts import Attempt
from supervisor.job.incident_log import IncidentRecord
from supervisor.messages import CheckpointsSeen

SAVES_KEPT = 128
SAMPLES_KEPT = 128
KNOWN_KEPT = 512
LOOKED_BACK = 16
"""Saves that may be of the same step, or in the same time."""
SAME_SAVE_S = 2.0
"""Files without a step that nodes finish so shortly one after the other are one save."""
SLACK_S = 3.0
"""After its last write a save may still hold training up: a barrier, old files that are removed. And steps are seen up
to a second late."""
LEAST_WINDOWS = 3
"""Of undisturbed training, before its pace is known."""
ENOUGH = 3
"""Failures, and saves, before `status` gives advice."""
LEAST_TRAINED_S = 1800.0
"""And training: failures within seconds tell of the start, and no rate."""
MATTERS = 0.01
"""And so much useful time to gain, whatever the likely failure rate."""


@dataclasses.dataclass
class ObservedSave:
    """One save. Times are Unix seconds."""

    attempt: int
    step: int | None
    began_at: float | None
    """When its first file was opened; None: nobody saw it."""
    completed_at: float
    stall_s: float | None = None
    """How much longer the steps around it took than others; None: not known."""
    looked: bool = False
    """Whether that was tried."""

    @property
    def write_s(self) -> float | None:
        return None if self.began_at is None else max(0.0, self.completed_at - self.began_at)

    def overlaps(self, since: float, until: float) -> bool:
        began = self.completed_at if self.began_at is None else self.began_at
        return began <= until and self.completed_at + SLACK_S >= since


class Saves:
    """The saves of a job, and how long they held training up. Bounded; a replay gives the same."""

    def __init__(self) -> None:
        self.newest: deque[ObservedSave] = deque(maxlen=SAVES_KEPT)
        self.total = 0
        self._known: dict[tuple[str, float], None] = {}
        """Path and time of every complete checkpoint that was looked at."""
        self._begun: dict[str, float] = {}
        """Path -> when it was first seen incomplete."""
        self._attempt = 0
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_KEPT)
        """When which step was made, in this attempt."""

    def checkpoints_seen(self, event: CheckpointsSeen, attempt: Attempt | None) -> None:
        began_at = attempt.workers_started_at if attempt is not None else None
        for found in event.checkpoints:
            if found.copy_of or found.format == POINTER or is_beside(found.path):
                continue
            if attempt is None or began_at is None or found.modified_at < began_at:
                continue  # of an earlier attempt, or of another run
            if not found.complete:
                self._begun.setdefault(found.path, event.at if found.began_at is None else found.began_at)
            elif (found.path, found.modified_at) not in self._known:
                self._known[found.path, found.modified_at] = None
                self._add(found, attempt, event.at)
        while len(self._known) > KNOWN_KEPT:
            del self._known[next(iter(self._known))]
        while len(self._begun) > KNOWN_KEPT:
            del self._begun[next(iter(self._begun))]

    def _add(self, found: Checkpoint, attempt: Attempt, now: float) -> None:
        completed_at = min(found.modified_at, now)
        seen_at = self._begun.pop(found.path, None)
        began_at = found.began_at if found.began_at is not None else seen_at
        if began_at is not None and not (attempt.workers_started_at or 0.0) <= began_at <= completed_at:
            began_at = None  # it was renamed when it was whole, or has files of an older save
        for save in itertools.islice(reversed(self.newest), LOOKED_BACK):
            same_time = abs(save.completed_at - completed_at) <= SAME_SAVE_S
            if save.attempt == attempt.number and save.step == found.step and (found.step is not None or same_time):
                save.completed_at = max(save.completed_at, completed_at)
                save.began_at = min((at for at in (save.began_at, began_at) if at is not None), default=None)
                return
        if began_at is not None and self.newest and began_at < self.newest[-1].completed_at:
            began_at = None  # one folder for all saves has files of the one before
        self.newest.append(ObservedSave(attempt.number, found.step, began_at, completed_at))
        self.total += 1

    def progressed(self, attempt: Attempt | None) -> None:
        """The attempt has made a step; saves that were complete before it are looked at now."""
        if attempt is None or attempt.step is None:
            return
        if attempt.number != self._attempt:
            self._attempt = attempt.number
            self._samples.clear()
        if self._samples and attempt.step <= self._samples[-1][1]:
            return
        self._samples.append((attempt.step_at, attempt.step))
        for save in itertools.islice(reversed(self.newest), LOOKED_BACK):
            over = save.completed_at + SLACK_S < attempt.step_at
            if save.attempt == attempt.number and not save.looked and over:
                self._look(save)

    def _look(self, save: ObservedSave) -> None:
        """How long it held training up: the time around it, without that of the steps which were made in it."""
        save.looked = True
        pace = self.pace
        began = save.completed_at if save.began_at is None else save.began_at
        before = [place for place, (at, _) in enumerate(self._samples) if at <= began]
        if pace is None or not before:
            return
        first_at, first = self._samples[max(0, before[-1] - 1)]
        last_at, last = self._samples[-1]
        near = itertools.islice(reversed(self.newest), LOOKED_BACK)
        within = [other for other in near if first_at < other.completed_at <= last_at]
        stall_s = (last_at - first_at - pace * (last - first)) / max(1, len(within))
        for other in (save, *within):
            other.looked, other.stall_s = True, stall_s

    @property
    def pace(self) -> float | None:
        """Seconds per step while nothing is saved; None: not known."""
        near = list(itertools.islice(reversed(self.newest), LOOKED_BACK))
        oldest = min((save.completed_at for save in near), default=0.0) if len(near) == LOOKED_BACK else 0.0
        paces = [
            (until - since) / (last - first)
            for (since, first), (until, last) in itertools.pairwise(self._samples)
            if since >= oldest and not any(save.overlaps(since, until) for save in near)
        ]
        return statistics.median(paces) if len(paces) >= LEAST_WINDOWS else None

    def intervals(self) -> Iterator[tuple[float, int | None]]:
        """Seconds and steps between two saves of one attempt."""
        for before, after in itertools.pairwise(self.newest):
            if before.attempt == after.attempt and after.completed_at > before.completed_at:
                known = before.step is not None and after.step is not None
                steps = after.step - before.step if known else None  # type: ignore[operator]
                yield after.completed_at - before.completed_at, steps


# ----- what was measured -----


class Measured(Frozen, frozen=True, kw_only=True):
    """What a job has seen of itself. None: nothing of the kind was seen."""

    nodes: int
    gpus: int
    """Ranks."""
    on_gpus: bool = False
    """Each of them has a GPU; False also where that is not known."""
    trained_s: float
    """Since the first step, without the time in which it stood still."""
    failures: dict[str, int]
    """Failures that count for the rate, by class: those that struck while it trained."""
    not_counted: dict[str, int]
    """Others: of the user's code, of the scheduler, of the numbers; during a start; without a verdict."""
    node_failures: int
    """Of those that count: such that a node was to be taken out."""
    saves: int
    stall_s: float | None = None
    stall_error_s: float = 0.0
    """How far off that may be (one standard error); a shorter stall cannot be seen."""
    stalls_seen: int = 0
    write_s: float | None = None
    """From the first write of a save to its end."""
    interval_s: float | None = None
    """Training time between two saves."""
    interval_steps: int | None = None
    restart_s: float | None = None
    """From a failure to the first new step, on average."""
    restarts_seen: int = 0
    redone_steps: int = 0
    """Steps that were done again after failures that count."""
    redone_s: float = 0.0
    """And the training time of it."""
    start_s: float | None = None
    """From the first attempt to its first step."""
    step_s: float | None = None
    ettr: float | None = None
    """As measured, with all that was lost."""

    @property
    def failures_seen(self) -> int:
        return sum(self.failures.values())

    @property
    def node_days(self) -> float:
        return self.nodes * self.trained_s / DAY_S


class MeasuredJob(view.Parts, Protocol):
    """What is read of a job."""

    saves: Saves


NOT_COUNTED = ("user", "scheduler", "numerics", "performance", "none")
"""Domains of the taxonomy: what more saves, or other nodes, do not cure."""


def measured(job: MeasuredJob, now: float) -> Measured:
    """At `now`: of the 200 incidents that are kept, and the newest saves."""
    core, attempts, attempt = job.core, job.attempts, job.attempts.current
    records, end = list(job.incidents.log.records), core.ended_at if core.ended_at is not None else max(now, core.now)
    since = attempts.trains_since if attempts.trains_since is not None else end
    if job.incidents.log.total > len(records):
        since = max(since, records[0].failed_at)
    outages = _Outages(records, since, end)
    saves = job.saves
    stalls = [save.stall_s for save in saves.newest if save.stall_s is not None]
    stall_s, stall_error_s = _middle(stalls)
    writes = [save.write_s for save in saves.newest if save.write_s is not None]
    write_s = statistics.median(writes) if writes else None
    intervals = list(saves.intervals())
    step_s = saves.pace or (attempt.seconds_per_step if attempt is not None else None)
    interval_s = None
    if intervals:
        held_up_s = stall_s if stall_s is not None else write_s or 0.0
        interval_s = max(step_s or 0.0, statistics.median(seconds for seconds, _ in intervals) - held_up_s)
    steps = [steps for _, steps in intervals if steps is not None]
    started_at, first_at = attempts.started_at, attempts.trains_since
    return Measured(
        nodes=len(attempt.members) if attempt is not None and attempt.members else core.spec.nodes_max,
        gpus=attempt.world_size if attempt is not None else 0,
        on_gpus=core.spec.on_gpus,
        trained_s=round(max(0.0, end - since - outages.down_s), 3),
        failures=dict(outages.counted),
        not_counted=dict(outages.others),
        node_failures=outages.of_nodes,
        saves=saves.total,
        stall_s=stall_s,
        stall_error_s=stall_error_s,
        stalls_seen=len(stalls),
        write_s=write_s,
        interval_s=interval_s,
        interval_steps=round(statistics.median(steps)) if steps else None,
        restart_s=statistics.fmean(outages.restarts) if outages.restarts else None,
        restarts_seen=len(outages.restarts),
        redone_steps=outages.redone_steps,
        redone_s=round(outages.redone_s, 3),
        start_s=first_at - started_at if started_at is not None and first_at is not None else None,
        step_s=step_s,
        ettr=view.ettr(job, now),
    )


def _middle(stalls: list[float]) -> tuple[float | None, float]:
    """The median, which evaluations and slow steps do not move, and its standard error."""
    if not stalls:
        return None, 0.0
    middle = statistics.median(stalls)
    spread_s = 1.4826 * statistics.median(abs(one - middle) for one in stalls)
    return max(0.0, middle), 1.2533 * spread_s / math.sqrt(len(stalls))


class _Outages:
    """What kept the run from training between two times, sorted into what counts for the failure rate and what not."""

    def __init__(self, records: list[IncidentRecord], since: float, end: float) -> None:
        self.counted: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.of_nodes = 0
        self.restarts: list[float] = []
        """Seconds from each failure that counts to the first new step."""
        self.redone_steps, self.redone_s = 0, 0.0
        self.down_s = 0.0
        down_until = since
        for record in sorted(records, key=lambda one: one.failed_at):
            span = record.down_span(end)
            if span is None:
                continue
            self._sort(record, while_training=span[0] >= down_until)
            self.down_s += max(0.0, span[1] - max(span[0], down_until))
            down_until = max(down_until, span[1])

    def _sort(self, record: IncidentRecord, while_training: bool) -> None:
        if record.verdict is None:
            self.others["no verdict"] += 1
            return
        failure_class = record.verdict.failure_class
        entry = TAXONOMY[failure_class]
        if not while_training:
            self.others[f"{failure_class.value} during a start"] += 1
        elif entry.domain in NOT_COUNTED:
            self.others[failure_class.value] += 1
        else:
            self.counted[failure_class.value] += 1
            self.of_nodes += entry.retry == "exclude"
            self.redone_steps += record.redone_steps
            self.redone_s += record.redone_s
            if "first_step" in record.phase_ends:
                self.restarts.append(record.phase_ends["first_step"] - record.failed_at)


# ----- what follows -----


class JobAdvice(Frozen, frozen=True, kw_only=True):
    """`unbroken advise --json`, for a job."""

    measured: Measured
    figures: Figures | None
    """None: too little is known."""
    advice: Advice | None
    lacks: tuple[str, ...]
    """What is not known, or known too little, in words."""
    enough: bool
    """There is enough data: a save's stall, and three failures and saves in half an hour of training or more."""
    matters: bool
    """And enough to gain: `status` tells."""


def advice_of(seen: Measured) -> JobAdvice:
    """What follows from what was measured."""
    lacks: list[str] = []
    stall_s = max(seen.stall_s, seen.stall_error_s) if seen.stall_s is not None else seen.write_s
    if not seen.saves:
        lacks.append("no checkpoint of this job was seen to be completed, so what a save costs is not known")
    elif stall_s is None:
        lacks.append("how long a save takes was not seen")
    elif seen.stall_s is None:
        lacks.append("how long a save holds training up was not seen: it is taken for as long as the writing")
    elif seen.stall_s < seen.stall_error_s:
        lacks.append(f"a save holds training up for less than can be seen: it is taken for {seen.stall_error_s:.2g} s")
    elif seen.saves < ENOUGH:
        lacks.append(f"only {seen.saves} saves were seen")
    if seen.saves and seen.interval_s is None:
        lacks.append("how much time lies between two saves was not seen")
    restart_s = seen.restart_s if seen.restart_s is not None else seen.start_s
    if restart_s is None:
        lacks.append("the run has not made a step yet, so what a restart costs is not known")
    elif seen.restart_s is None:
        lacks.append("no restart was seen: one is taken for as long as the first start")
    if seen.trained_s < LEAST_TRAINED_S:
        lacks.append(
            f"too little data: the job has trained for {seen.trained_s:.3g} s, and less than half an hour tells no "
            "rate of failures"
        )
    elif seen.failures_seen < ENOUGH:
        lacks.append(
            f"too little data: failures of this job so far: {seen.failures_seen} in {seen.node_days:.3g} node-days; "
            "the rate is largely that of published fleets"
        )
    told = JobAdvice(measured=seen, figures=None, advice=None, lacks=tuple(lacks), enough=False, matters=False)
    if stall_s is None or restart_s is None:
        return told
    figures = Figures(
        nodes=max(1, seen.nodes),
        gpus=seen.gpus,
        rate=observed_rate(seen.failures_seen, seen.node_days),
        node_rate=observed_node_rate(seen.node_failures, seen.node_days),
        costs=Costs(
            stall_s=stall_s,
            durable_s=max(stall_s, seen.write_s or 0.0),
            restart_s=restart_s,
            step_s=seen.step_s or 0.0,
        ),
        interval_s=seen.interval_s,
    )
    advice = advise(figures)
    counted = min(seen.saves, seen.failures_seen) >= ENOUGH and seen.trained_s >= LEAST_TRAINED_S
    enough = seen.stall_s is not None and counted
    matters = enough and advice.gain_low is not None and advice.gain_low >= MATTERS
    return msgspec.structs.replace(told, figures=figures, advice=advice, enough=enough, matters=matters)


EVERY_S = 60.0


class OnlineAdvice:
    """The advice of a job that runs: computed when somebody asks, and at most once a minute."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._advice: JobAdvice | None = None

    def of(self, job: MeasuredJob, now: float) -> JobAdvice:
        if self._advice is None or not 0.0 <= now - self._at < EVERY_S:
            self._at, self._advice = now, advice_of(measured(job, now))
        return self._advice
