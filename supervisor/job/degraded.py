"""What is wrong with an attempt that goes on: the layer of `Job` above `hangs`.

A loss that is no number, or a device that failed under a rank which lives: an incident that stops nothing. It is told,
shown and counted; nothing is restarted and nobody cordoned for it. It stays open while it lasts. A rank that then makes
no progress any more is a hang like others, with the finding as its evidence.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.signals import Evidence, Finding, clean_line
from diagnosis.stuck import names
from diagnosis.taxonomy import FailureClass
from recovery.actions import Plan
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Case
from supervisor.job.casework import Conclude
from supervisor.job.hangs import Hangs
from supervisor.job.lifecycle import FAILURE_GRACE_S, Choose

DEVICE_CLASSES: Final = frozenset(
    {
        FailureClass.GPU_ECC_UNCORRECTABLE,
        FailureClass.GPU_FALLEN_OFF_BUS,
        FailureClass.GPU_HANG,
        FailureClass.GPU_DRIVER,
        FailureClass.NVLINK_ERROR,
        FailureClass.PCIE_ERROR,
        FailureClass.CPU_OR_MEMORY_HW,
        FailureClass.KERNEL_FAULT,
    }
)
DEVICE_WAIT_S = 3.0
"""A rank that dies of its device does so within moments: then the crash is the incident, and this its evidence."""
DEVICE_LASTS_S = 3600.0
"""An attempt that trains on for so long after the last finding is not degraded any more."""
DEVICES_KEPT = 64
NUMBERS_TOLD = 8
"""Incidents of an attempt about a loss that comes and goes."""
SAID = 200


class Degraded(Hangs):
    """Bad numbers, failed devices."""

    def __init__(self, choose: Choose, conclude: Conclude) -> None:
        super().__init__(choose, conclude)
        self._suspect_after: int | None = None
        """The step at which the numerics were seen to be wrong."""
        self._bad_from: int | None = None
        """The step of the first report whose loss is no number; None: it is one, or no step is known."""
        self._numbers_told = 0
        self._failed_devices: dict[tuple[str, str, FailureClass], Finding] = {}
        """By node, device and class: of the current attempt, told or to be told."""
        self._devices_told = 0

    def degraded_by(self, trigger: str) -> Case | None:
        """The open incident of the current attempt that began so."""
        return next((case for case in self.casebook.standing() if case.trigger == trigger), None)

    # ----- numbers -----

    def _numerics(self, finding: Finding) -> None:
        """A rank's words say that the numbers went wrong. A warning (a step that was skipped) is none of it."""
        if finding.severity != "warning":
            self._numbers_bad(finding, "")

    def _numbers_seen(self, event: m.NumbersSeen) -> None:
        attempt = self._current(event.attempt)
        if attempt is None:
            return
        if not event.bad:
            self._numbers_good(event.step)
            return
        who = f"{names(event.ranks)} print" + ("s" if len(event.ranks) == 1 else "")
        since = "" if event.step is None else f" from step {event.step} on"
        finding = Finding(
            rule="bad_numbers",
            failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
            confidence=0.9,
            scope="job",
            severity="error",
            evidence=Evidence(text=f"{who} a loss that is no number{since}", source="output"),
            at=self.now,
            attempt=event.attempt,
            step=event.step,
        )
        self.casebook.note_finding(finding)
        self._bad_from = event.step if self._bad_from is None else self._bad_from
        self._numbers_bad(finding, since)

    def _numbers_bad(self, finding: Finding, since: str) -> None:
        """An incident, and what is saved from now on is suspect. No restart."""
        attempt = self.attempt
        if attempt is None or attempt.over or self.state != "RUNNING" or self.suspect_open:
            return
        at = min(self.now, max(finding.at, attempt.formed_at))
        self.suspect_spans.append((at, None))
        self._suspect_after = attempt.step
        self._numbers_told += 1
        if self._numbers_told > NUMBERS_TOLD:
            return
        what = finding.evidence.text or finding.rule
        self._degrade(
            "signal",
            what if since or attempt.step is None else f"{what} (step {attempt.step})",
            at,
            attempt,
            "no restart: checkpoints written from now on are suspect and used last",
        )

    def _numbers_good(self, step: int | None) -> None:
        """Weights that are NaN never give a number again: what is saved from now on is as good as before."""
        self._bad_from = None
        if self.suspect_open:
            since, _ = self.suspect_spans[-1]
            self.suspect_spans[-1] = (since, self.now)
        case = self.degraded_by("signal")
        if case is not None:
            self._close(case, "the loss is a number again" + ("" if step is None else f" (step {step})"))

    def _end(self, outcome: m.Outcome, why: str, *, grace_s: float = FAILURE_GRACE_S) -> None:
        """A run whose weights are NaN says so, whatever its exit code."""
        case = self.degraded_by("signal")
        if case is not None and self.suspect_open and outcome.state in ("succeeded", "stopped"):
            since = "" if self._bad_from is None else f" from step {self._bad_from} on"
            told = f"the loss was no number{since}, to the end"
            self._close(case, told)
            self._note(f"{case.id}: {told}", incident=case.id, loud=True)
            outcome = msgspec.structs.replace(outcome, line=f"{outcome.line}; but {told} ({case.id})"[:500])
        super()._end(outcome, why, grace_s=grace_s)

    # ----- devices -----

    def _device_finding(self, finding: Finding, node: str) -> None:
        """A device failed: an incident of its own, unless a rank dies of it in a moment."""
        attempt = self.attempt
        if attempt is None or attempt.over or attempt.round is None or self.state not in ("STARTING", "RUNNING"):
            return
        if finding.failure_class not in DEVICE_CLASSES or finding.severity == "warning" or attempt.finishing:
            return
        node = finding.node or node
        if finding.evidence.source == "output" or node not in attempt.members:
            return  # what a rank says of its driver anybody can say
        if finding.scope == "gpu" and finding.rank is None:
            return  # no rank uses it, as far as is known
        key = (node, finding.gpu or finding.fields.get("device", ""), finding.failure_class)
        if key in self._failed_devices or len(self._failed_devices) >= DEVICES_KEPT:
            return
        self._failed_devices[key] = finding
        if "device" not in self.timers:
            self._set_timer("device", self.now + DEVICE_WAIT_S)

    def _device_due(self) -> None:
        """All that failed in one moment is one incident: a storm cordons nobody."""
        attempt = self.attempt
        found = list(self._failed_devices.items())
        fresh, self._devices_told = found[self._devices_told :], len(found)
        if attempt is None or attempt.over or self.state not in ("STARTING", "RUNNING") or not fresh:
            return
        (node, device, failure_class), first = fresh[0]
        where = " ".join(filter(None, (node, device, "" if first.rank is None else f"(rank {first.rank})")))
        what = f"{failure_class.value} on {where}: {clean_line(first.evidence.text, SAID)}"
        if len(fresh) > 1:
            nodes = len({key[0] for key, _ in fresh})
            what += f"; and {len(fresh) - 1} more within moments" + (f", on {nodes} nodes" if nodes > 1 else "")
        self._set_timer("degraded", self.now + DEVICE_LASTS_S)
        case = self.degraded_by("device")
        if case is not None:
            case.more += len(fresh)
            case.verdict = self._verdict(case, attempt)
            self._note(f"{case.id}: {what}", incident=case.id, loud=True)
            return
        why = "no restart, its ranks live and train on; a rank that stands still for it is restarted as a hang"
        at = min(one.at or self.now for _, one in fresh)
        self._degrade("device", what, at, attempt, why).more = len(fresh) - 1

    def _degraded_due(self) -> None:
        case = self.degraded_by("device")
        if case is not None:
            self._close(case, f"the attempt has trained on for {DEVICE_LASTS_S / 60:.0f} min")

    # ----- both -----

    def _degrade(self, trigger: str, what: str, at: float, attempt: Attempt, why: str) -> Case:
        case = self._open(trigger, what, at, attempt, None)  # type: ignore[arg-type]  # a literal of the callers
        case.take(attempt.evidence.values())
        case.verdict = self._verdict(case, attempt)
        case.mark("diagnose", self.now)
        case.plan = Plan(kind="ignore", why=why, counts=False)
        self._note(f"{case.id}: {case.verdict.why}. {why}", incident=case.id, loud=True)
        return case

    def _form(self, members: tuple[str, ...]) -> None:
        for case in self.casebook.standing():
            self._close(case, f"attempt {case.attempt} has ended")
        self._failed_devices.clear()
        self._devices_told, self._numbers_told, self._bad_from = 0, 0, None
        self._cancel("device", "degraded")
        super()._form(members)
