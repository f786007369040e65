"""Failures with which an attempt goes on: a loss that is not a number, a device that failed while its rank lives.

Each is an incident that stops nothing (`Incidents.open_with_plan`). Whether the ranks of a failed device make another
step decides what becomes of it: without one the hang watch has the run restarted, else the node should leave at a
checkpoint (`ProposeSwap`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from diagnosis.signals import Evidence, Finding, clean_line, rank_names
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.job.attempts import Attempt, Attempts
from supervisor.job.core import Core, OpenIncident, ProposeSwap, Timer, Wants, WantsAnd, cancel
from supervisor.job.incidents import EARLY_EVIDENCE_S, Incidents

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
STEPS_ON = 2
"""Steps after a device's failure: the first of them may have been under way."""
NUMBERS_REPORTED = 8
"""At most so many incidents in one attempt about a loss that is NaN again and again."""
TEXT_LIMIT = 200
_NUMBERS: Final = "bad_numbers"


class Degraded:
    """Failures with which an attempt goes on: a loss that is not a number, a device that failed while its rank lives.

    Each is an incident that stops nothing. It is reported, shown and counted; the job restarts nothing and cordons no
    node. It stays open while it lasts. If a rank then makes no progress any more, that is a hang, with the finding as
    evidence.
    """

    def __init__(self, core: Core, attempts: Attempts, incidents: Incidents) -> None:
        self._core, self._attempts, self._incidents = core, attempts, incidents
        self._is_bad = False
        """The loss is no number."""
        self._bad_from: int | None = None
        """The step at which the loss was first not a number; None: it is a number, or no step is known."""
        self._numbers_reported = 0
        self._failed_devices: dict[tuple[str, str, FailureClass], Finding] = {}
        """By node, device and class: in the current attempt, reported or to be reported."""
        self._devices_reported = 0
        self._awaited: tuple[int | None, float] = (None, float("inf"))
        """Step and time of the newest finding after which no further step is expected."""

    def finding_arrived(self, finding: Finding, node: str) -> Wants:
        """`node`: whose agent has found it. A warning (about a skipped step, say) does not count."""
        if finding.severity == "warning":
            return
        if finding.failure_class is FailureClass.LOSS_SPIKE_OR_NAN:
            yield from self._numbers_bad(finding, "")
        if finding.failure_class in DEVICE_CLASSES or finding.outlook == "fails":
            yield from self._device_failed(finding, finding.node or node)

    # ----- numbers -----

    def numbers_seen(self, event: m.NumbersSeen) -> Wants:
        if self._attempts.live(event.attempt) is None:
            return
        if not event.bad:
            yield from self._numbers_good(event.step)
            return
        who = f"{rank_names(event.ranks)} print" + ("s" if len(event.ranks) == 1 else "")
        since = "" if event.step is None else f" from step {event.step} on"
        finding = Finding(
            rule=_NUMBERS,
            failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
            confidence=0.9,
            scope="job",
            severity="error",
            evidence=Evidence(text=f"{who} a loss that is no number{since}", source="output"),
            at=self._core.now,
            attempt=event.attempt,
            step=event.step,
        )
        self._incidents.log.add_finding(finding)
        self._bad_from = event.step if self._bad_from is None else self._bad_from
        yield from self._numbers_bad(finding, since)

    def _numbers_bad(self, finding: Finding, since: str) -> Wants:
        """Open an incident; checkpoints from now on are suspect. No restart."""
        attempt, core = self._attempts.current, self._core
        if attempt is None or attempt.over or core.state != "RUNNING":
            return
        if self._attempts.checkpoints.suspect_open("numbers"):
            return
        at = min(core.now, max(finding.at, attempt.formed_at))
        self._attempts.checkpoints.suspect_from("numbers", at, attempt.step)
        self._is_bad = True
        self._numbers_reported += 1
        if self._numbers_reported > NUMBERS_REPORTED:
            return
        text = finding.evidence.text or finding.rule
        if not since and attempt.step is not None:
            text = f"{text} (step {attempt.step})"
        why = "No restart. Checkpoints written from now on are used only if no other is left"
        yield from self._incidents.open_with_plan(OpenIncident("signal", text, at), why, "degraded")

    def _numbers_good(self, step: int | None) -> Wants:
        """NaN weights never give a number again, so checkpoints from now on are as good as before."""
        self._bad_from, self._is_bad = None, False
        self._incidents.log.forget_findings(_NUMBERS)
        self._attempts.checkpoints.trust_again("numbers")
        record = self._incidents.degraded_by("signal")
        if record is not None:
            at = "" if step is None else f" (step {step})"
            yield from self._incidents.close(record, f"the loss is a number again{at}")

    def end(self, outcome: m.Outcome) -> WantsAnd[m.Outcome]:
        """A run that ends with NaN weights says so, whatever its exit code is."""
        record = self._incidents.degraded_by("signal")
        suspect = self._attempts.checkpoints.suspect_open("numbers")
        if record is None or not (suspect and self._is_bad) or outcome.state not in ("succeeded", "stopped"):
            return outcome
        since = "" if self._bad_from is None else f" from step {self._bad_from} on"
        text = f"the loss was no number{since}, to the end"
        yield from self._incidents.close(record, text)
        yield record.note("bad_numbers_to_the_end", loud=True, from_step=self._bad_from)
        return msgspec.structs.replace(outcome, line=f"{outcome.line}; but {text} ({record.id})"[:500])

    # ----- devices -----

    def _device_failed(self, finding: Finding, node: str) -> Wants:
        """It becomes an incident of its own, unless a rank dies of it within moments."""
        attempt, core = self._attempts.current, self._core
        if attempt is None or attempt.over or attempt.finishing or attempt.round is None:
            return
        if core.state not in ("STARTING", "RUNNING"):
            return
        if finding.evidence.source == "output" or node not in attempt.member_set:
            return  # anybody can write of a driver
        if finding.scope == "gpu" and finding.rank is None:
            return  # no rank uses it, as far as is known
        key = (node, finding.gpu or finding.fields.get("device", ""), finding.failure_class)
        if not self._is_news(key, finding) or len(self._failed_devices) >= DEVICES_KEPT:
            return
        self._failed_devices[key] = finding
        if finding.outlook == "fails" and core.state == "RUNNING":
            yield cancel("device")
            yield from self.device_due()
        elif "device" not in core.timers:
            yield Timer("device", core.now + DEVICE_WAIT_S)

    def _is_news(self, key: tuple[str, str, FailureClass], finding: Finding) -> bool:
        """Its first failure; or one more, after which its ranks may make no further step, once they have trained on."""
        if key not in self._failed_devices:
            return True
        reported = key in list(self._failed_devices)[: self._devices_reported]
        if not reported or finding.outlook != "fails" or self._incidents.early is not None:
            return False
        del self._failed_devices[key]
        self._devices_reported -= 1
        return True

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
        yield Timer("degraded", core.now + DEVICE_LASTS_S)
        failing = [one for _, one in fresh if one.outlook == "fails" and core.state == "RUNNING"]
        record = self._incidents.degraded_by("device")
        if record is not None:
            yield from self._incidents.degraded_further(record, len(fresh), text)
        else:
            why = "No restart: its ranks live and train on. If a rank hangs because of it, the job restarts"
            if failing:
                why = "No further step is expected of its ranks: without one the job restarts"
            at = min(one.at or core.now for _, one in fresh)
            yield from self._incidents.open_with_plan(OpenIncident("device", text, at), why, "degraded", len(fresh) - 1)
        if failing:
            self._await_a_step(failing, attempt)

    def _await_a_step(self, failing: Iterable[Finding], attempt: Attempt) -> None:
        """Evidence is collected while it can be. Whether the ranks make another step decides what is done."""
        record = self._incidents.degraded_by("device")
        assert record is not None
        record.early, self._awaited = True, (attempt.step, self._core.now)
        ranks = tuple(one.rank for one in failing if one.rank is not None)
        self._incidents.take_stacks(ranks, EARLY_EVIDENCE_S)

    def progressed(self, event: m.Progressed) -> Wants:
        """Two steps later than the finding: the ranks train on without their device's help."""
        step, at = self._awaited
        made_at = event.at if event.step_at is None else event.step_at
        if step is not None and event.step is not None and event.step >= step + STEPS_ON and made_at > at:
            yield from self._train_on()

    def saved(self, event: m.CheckpointsSeen) -> Wants:
        """The same, where no steps are shown."""
        step, at = self._awaited
        if step is None and any(one.complete and one.modified_at > at for one in event.checkpoints):
            yield from self._train_on()

    def _train_on(self) -> Wants:
        record, attempt = self._incidents.early, self._attempts.current
        if record is None or attempt is None or self._core.state != "RUNNING":
            return
        record.early = False
        yield record.note("device_trains_on", step=attempt.step)
        for (node, _, _), finding in list(self._failed_devices.items()):
            if finding.outlook == "fails":
                yield ProposeSwap(finding, node)

    def degraded_due(self) -> Wants:
        record = self._incidents.degraded_by("device")
        if record is not None:
            yield from self._incidents.close(record, f"the attempt has trained on for {DEVICE_LASTS_S / 60:.0f} min")

    # ----- both -----

    def attempt_ends(self) -> Wants:
        for record in self._incidents.log.open_degradations():
            yield from self._incidents.close(record, f"attempt {record.attempt} has ended")
        self._failed_devices.clear()
        self._devices_reported, self._numbers_reported, self._bad_from, self._is_bad = 0, 0, None, False
        self._awaited = (None, float("inf"))
        yield cancel("device", "degraded")
