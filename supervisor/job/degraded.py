"""Failures with which an attempt goes on: a loss that is not a number, a device that failed while its rank lives.

Each is an incident that stops nothing. It is reported, shown and counted; the job restarts nothing and cordons no node.
It stays open while it lasts. If a rank then makes no progress any more, that is a hang, with the finding as evidence.
"""

from __future__ import annotations

from typing import Final

import msgspec

from diagnosis.signals import Evidence, Finding, clean_line
from diagnosis.stuck import names
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.job import wants as w
from supervisor.job.attempts import Attempts
from supervisor.job.core import Core
from supervisor.job.incidents import Incidents
from supervisor.job.wants import Wants
from supervisor.notes import note

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
"""A rank that dies of a device failure dies within moments: then the crash is the incident, and this is evidence."""
DEVICE_LASTS_S = 3600.0
"""An attempt that has trained for this long after the last finding is not degraded any more."""
DEVICES_KEPT = 64
NUMBERS_REPORTED = 8
"""At most so many incidents in one attempt about a loss that is NaN again and again."""
TEXT_LIMIT = 200


class Degraded:
    def __init__(self, core: Core, attempts: Attempts, incidents: Incidents) -> None:
        self._core, self._attempts, self._incidents = core, attempts, incidents
        self._bad_from: int | None = None
        """The step at which the loss was first not a number; None: it is a number, or no step is known."""
        self._numbers_reported = 0
        self._failed_devices: dict[tuple[str, str, FailureClass], Finding] = {}
        """By node, device and class: in the current attempt, reported or to be reported."""
        self._devices_reported = 0

    # ----- numbers -----

    def numerics_finding(self, finding: Finding) -> Wants:
        """A rank's output says that the numbers went wrong. A warning (about a skipped step) does not count."""
        if finding.severity != "warning":
            yield from self._numbers_bad(finding, "")

    def numbers_seen(self, event: m.NumbersSeen) -> Wants:
        if self._attempts.live(event.attempt) is None:
            return
        if not event.bad:
            yield from self._numbers_good(event.step)
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
            at=self._core.now,
            attempt=event.attempt,
            step=event.step,
        )
        yield w.AddFinding(finding)
        self._bad_from = event.step if self._bad_from is None else self._bad_from
        yield from self._numbers_bad(finding, since)

    def _numbers_bad(self, finding: Finding, since: str) -> Wants:
        """Open an incident; checkpoints from now on are suspect. No restart."""
        attempt, core = self._attempts.current, self._core
        if attempt is None or attempt.over or core.state != "RUNNING" or self._attempts.checkpoints.suspect_open:
            return
        at = min(core.now, max(finding.at, attempt.formed_at))
        yield w.SuspectFrom(at, attempt.step)
        self._numbers_reported += 1
        if self._numbers_reported > NUMBERS_REPORTED:
            return
        text = finding.evidence.text or finding.rule
        if not since and attempt.step is not None:
            text = f"{text} (step {attempt.step})"
        why = "No restart. Checkpoints written from now on are used only if no other is left"
        yield w.OpenWithPlan("signal", text, at, why=why, then="degraded")

    def _numbers_good(self, step: int | None) -> Wants:
        """NaN weights never give a number again, so checkpoints from now on are as good as before."""
        self._bad_from = None
        yield w.TrustAgain()
        record = self._incidents.degraded_by("signal")
        if record is not None:
            yield w.Close(record, "the loss is a number again" + ("" if step is None else f" (step {step})"))

    def end(self, outcome: m.Outcome) -> w.WantsAnd[m.Outcome]:
        """A run that ends with NaN weights says so, whatever its exit code is."""
        record = self._incidents.degraded_by("signal")
        suspect = self._attempts.checkpoints.suspect_open
        if record is None or not suspect or outcome.state not in ("succeeded", "stopped"):
            return outcome
        since = "" if self._bad_from is None else f" from step {self._bad_from} on"
        text = f"the loss was no number{since}, to the end"
        yield w.Close(record, text)
        yield note("bad_numbers_to_the_end", incident=record.id, loud=True, from_step=self._bad_from)
        return msgspec.structs.replace(outcome, line=f"{outcome.line}; but {text} ({record.id})"[:500])

    # ----- devices -----

    def device_finding(self, finding: Finding, node: str) -> Wants:
        """A device failed. It becomes an incident of its own, unless a rank dies of it within moments."""
        attempt, core = self._attempts.current, self._core
        if attempt is None or attempt.over or attempt.round is None or core.state not in ("STARTING", "RUNNING"):
            return
        if finding.failure_class not in DEVICE_CLASSES or finding.severity == "warning" or attempt.finishing:
            return
        node = finding.node or node
        if finding.evidence.source == "output" or node not in attempt.member_set:
            return  # anybody can write of a driver
        if finding.scope == "gpu" and finding.rank is None:
            return  # no rank uses it, as far as is known
        key = (node, finding.gpu or finding.fields.get("device", ""), finding.failure_class)
        if key in self._failed_devices or len(self._failed_devices) >= DEVICES_KEPT:
            return
        self._failed_devices[key] = finding
        if "device" not in core.timers:
            yield w.Timer("device", core.now + DEVICE_WAIT_S)

    def device_due(self) -> Wants:
        """All devices that failed within moments are one incident; a storm of failures cordons no node."""
        attempt, core = self._attempts.current, self._core
        found = list(self._failed_devices.items())
        fresh, self._devices_reported = found[self._devices_reported :], len(found)
        if attempt is None or attempt.over or core.state not in ("STARTING", "RUNNING") or not fresh:
            return
        (node, device, failure_class), first = fresh[0]
        where = " ".join(filter(None, (node, device, "" if first.rank is None else f"(rank {first.rank})")))
        text = f"{failure_class.value} on {where}: {clean_line(first.evidence.text, TEXT_LIMIT)}"
        if len(fresh) > 1:
            nodes = len({key[0] for key, _ in fresh})
            text += f"; and {len(fresh) - 1} more within moments" + (f", on {nodes} nodes" if nodes > 1 else "")
        yield w.Timer("degraded", core.now + DEVICE_LASTS_S)
        record = self._incidents.degraded_by("device")
        if record is not None:
            yield w.DegradedFurther(record, len(fresh), text)
            return
        why = "No restart: its ranks live and train on. If a rank hangs because of it, the job restarts"
        at = min(one.at or core.now for _, one in fresh)
        yield w.OpenWithPlan("device", text, at, why=why, then="degraded", further=len(fresh) - 1)

    def degraded_due(self) -> Wants:
        record = self._incidents.degraded_by("device")
        if record is not None:
            yield w.Close(record, f"the attempt has trained on for {DEVICE_LASTS_S / 60:.0f} min")

    # ----- both -----

    def attempt_ends(self) -> Wants:
        for record in self._incidents.log.open_degradations():
            yield w.Close(record, f"attempt {record.attempt} has ended")
        self._failed_devices.clear()
        self._devices_reported, self._numbers_reported, self._bad_from = 0, 0, None
        yield w.cancel("device", "degraded")
