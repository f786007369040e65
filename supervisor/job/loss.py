"""The loss guard: what the job does when the loss that ranks print went wrong (`recovery.rollback` decides).

Setting `loss.guard`: `off` does nothing, `recommend` tells what to do, `enforce` does it. Where it does not act, a
spike makes no checkpoint suspect: a false alarm would cost all of them at the next crash. All that the guard does goes
through an incident with a verdict and a plan, so mode, pause and the restart budget hold for it as for every other
restart. Where it finds no way back it only tells: an attempt that is held would have lost its fault tolerance as well.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

import msgspec

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Evidence, Finding, LossAlarm, rank_names
from diagnosis.taxonomy import FailureClass
from recovery import rollback
from recovery.checkpoint import ResumeSituation, says_step
from recovery.policy import SURE_ENOUGH, Plan
from supervisor import messages as m
from supervisor.job.attempts import Attempt, Attempts
from supervisor.job.core import Core, GoOn, OpenIncident, Wants
from supervisor.job.incidents import Incidents
from supervisor.job.replicas import RULE as DIGESTS
from supervisor.job.replicas import ReplicaGuard

ROLLBACKS_KEPT: Final = 16
CORRUPTION_UNSEEN_S: Final = 1800.0
"""Silent corruption may have gone unseen for so long: checkpoints from that time are not trusted."""
ALARMS_REPORTED: Final = 8
"""At most so many incidents in one attempt about a loss that goes wrong and comes back again and again."""
SURE: Final = 0.9
RULE: Final = "loss_guard"
_IN_WORDS: Final = {"nan": "is NaN or infinite", "spike": "has leapt", "divergence": "diverges"}
_VERDICT: Final = {
    "nan": "a loss that stays NaN or infinite",
    "spike": "a loss spike that does not pass by itself",
    "divergence": "a loss that diverges",
}


class LossGuard:
    """What it knows lasts as long as the job; replaying the journal brings it back."""

    def __init__(self, core: Core, attempts: Attempts, incidents: Incidents, replicas: ReplicaGuard) -> None:
        self._core, self._attempts, self._incidents, self._replicas = core, attempts, incidents, replicas
        self._rollbacks: deque[rollback.Rollback] = deque(maxlen=ROLLBACKS_KEPT)
        self._decided: tuple[int, str] = (0, "")
        """Attempt and kind of the alarm on which it was decided last."""
        self._suspects: Literal["", "nan", "spike"] = ""
        """What is saved now is suspect because of this alarm."""
        self._let_go_on = 0
        """An attempt that goes on in spite of its alarm: nobody has approved the plan."""
        self._told = False
        """The incident that stops nothing is the guard's."""
        self._reported = 0
        """Such incidents in this attempt."""
        self._overruled = False
        """An operator has undone a rollback: until an operator orders one, the guard only tells."""
        self._planned: rollback.Rollback | None = None
        """It is done unless an operator rejects it, or the loss comes back before that."""

    def seen(self, event: m.LossSeen) -> Wants:
        attempt, core = self._attempts.live(event.attempt), self._core
        if attempt is None or core.is_over:
            return
        if event.alarm is None:
            yield from self._is_well_again(event)
            return
        decided = (attempt.number, event.alarm.kind)
        if event.alarm.kind == "nan" and self._suspects:
            self._suspects = "nan"
        if core.spec.loss_guard == "off" or core.state != "RUNNING" or decided == self._decided:
            return
        self._decided = decided
        self._attempts.checkpoints.remember_good()
        if event.alarm.kind == "nan":
            self._distrust(event.alarm, attempt)
        yield from self._decide(event, event.alarm, attempt)

    def _distrust(self, alarm: LossAlarm, attempt: Attempt) -> None:
        """Checkpoints since the first bad step are used only when nothing else is left."""
        checkpoints = self._attempts.checkpoints
        if not checkpoints.suspect_open("numbers"):
            since = attempt.reached_at(alarm.step) if alarm.step is not None else None
            at = self._core.now if since is None else min(self._core.now, max(since, attempt.formed_at))
            good = None if alarm.step is None else max(0, alarm.step - alarm.interval)
            checkpoints.suspect_from("numbers", at, good, good)
            self._suspects = "nan" if alarm.kind == "nan" else "spike"

    def _decide(self, event: m.LossSeen, alarm: LossAlarm, attempt: Attempt) -> Wants:
        core, found = self._core, self._finding(event, alarm)
        if alarm.kind != "nan":
            self._incidents.log.add_finding(found)
        corruption = self._corruption(attempt)
        ways = self._attempts.checkpoints.ways_back(attempt.members)
        step = attempt.step if attempt.step is not None else alarm.step or 0
        bad_at = attempt.reached_at(alarm.step) if alarm.step is not None else None
        if bad_at is not None:  # the number in a name may count epochs, or saves
            ways = [one for one in ways if one.modified_at <= bad_at or says_step(one.path.rpartition("/")[2])]
        steps = tuple(one.step for one in ways if one.step is not None)
        case = rollback.LossCase(
            alarm=alarm,
            step=step,
            steps=steps,
            bad_at=bad_at,
            before=tuple(self._rollbacks),
            skipped_after=self._attempts.checkpoints.skipped_after,
        )
        decided = rollback.plan_for(case)
        at = min(core.now, max(found.at, attempt.formed_at))
        only_tells = core.spec.loss_guard == "recommend" or core.mode == "observe" or self._overruled
        if only_tells or self._let_go_on == attempt.number:
            yield from self._tell(found, decided, at)
            return
        if corruption is not None:
            yield from self._leave_the_corrupt(corruption, decided, at, attempt)
            return
        delay_s = self._incidents.budget.next_delay_s(core.now)
        if decided.kind == "hold" or delay_s is None:
            spent = "" if delay_s is not None else "; the restart budget is spent without progress"
            yield from self._tell(found, msgspec.structs.replace(decided, why=f"{decided.why}{spent}"), at)
            return
        if core.mode == "enforce":
            self._distrust(alarm, attempt)
        verdict = Verdict(
            failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
            culprits=(),
            confidence=SURE,
            why=_VERDICT[alarm.kind],
            action="rollback_and_restart",
            evidence=(found.evidence,),
        )
        plan = Plan(
            kind="restart",
            why=decided.why,
            rollback=decided.situation,
            skip_batches=decided.skip_batches,
            needs_approval=core.mode == "recommend",
            delay_s=delay_s,
        )
        first = alarm.step or 0
        self._planned = rollback.Rollback(first_bad=first, last_bad=max(first, step), skipped=decided.skip_batches)
        yield from self._incidents.act_at_once(OpenIncident("loss", found.evidence.text, at), verdict, plan)

    def _tell(self, found: Finding, decided: rollback.LossPlan, at: float) -> Wants:
        """The verdict, and the command that would do it."""
        if decided.step is not None:
            skip = f" --skip {decided.skip_batches}" if decided.skip_batches else ""
            why = f"Recommended: `unbroken rollback {decided.step}{skip}` ({decided.why})"
        else:
            why = f"No rollback is possible: {decided.why}"
        record = self._incidents.degraded_by("signal")
        if record is not None:
            yield record.note("loss_advice", loud=True, why=why)
            return
        want = OpenIncident("signal", found.evidence.text, at)
        why = f"No restart (loss.guard). {why}"
        if self._reported >= ALARMS_REPORTED:
            return
        self._told, self._reported = True, self._reported + 1
        yield from self._incidents.open_with_plan(want, why, "degraded")

    def _finding(self, event: m.LossSeen, alarm: LossAlarm) -> Finding:
        who = rank_names(event.ranks)
        since = "" if alarm.step is None else f" since step {alarm.step}"
        level = f" from {alarm.usual:.4g} to {alarm.level:.4g}" if alarm.kind != "nan" else ""
        return Finding(
            rule=RULE,
            failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
            confidence=SURE,
            scope="job",
            severity="error",
            evidence=Evidence(text=f"the loss of {who} {_IN_WORDS[alarm.kind]}{level}{since}", source="output"),
            at=self._core.now,
            attempt=event.attempt,
            step=alarm.step,
        )

    # ----- a rank that computes wrong numbers -----

    def _corruption(self, attempt: Attempt) -> Finding | None:
        """The finding that names the node whose replica differs from the others; never a line of output."""
        near = self._incidents.log.findings_near(self._core.now, attempt.number)
        named = (
            one
            for one in near
            if one.failure_class is FailureClass.SILENT_DATA_CORRUPTION
            if one.node in attempt.member_set and one.evidence.source != "output" and one.severity != "warning"
            if one.confidence >= SURE_ENOUGH
        )
        return next(named, None)

    def _leave_the_corrupt(self, finding: Finding, decided: rollback.LossPlan, at: float, attempt: Attempt) -> Wants:
        """That node's fault: back to before it can have begun, without the node; no data is to blame."""
        known = self._replicas.situation if finding.rule == DIGESTS else None
        situation = known or ResumeSituation(kind="corruption", before=finding.at - CORRUPTION_UNSEEN_S)
        checkpoint, _ = self._attempts.checkpoints.preview(situation, attempt.members)
        verdict = Verdict(
            failure_class=FailureClass.SILENT_DATA_CORRUPTION,
            culprits=(Culprit(node=finding.node, gpu=finding.gpu, rank=finding.rank),),
            confidence=finding.confidence,
            why=finding.evidence.text or finding.rule,
            action="cordon_node_and_restart",
            evidence=(finding.evidence,),
        )
        yield from self._incidents.act_at_once(
            OpenIncident("loss", f"{finding.node}: {verdict.why}", at),
            verdict,
            rollback=situation if checkpoint is not None else decided.situation,
        )

    # ----- what becomes of it -----

    def start_anew(self) -> None:
        """An operator has taken over: what was done before does not bind the guard."""
        self._rollbacks.clear()
        self._overruled = False
        self._replicas.start_anew()

    def overrule(self) -> None:
        """An operator has undone a rollback."""
        self._overruled = True
        self._replicas.overrule()

    def let_go_on(self, why: str) -> Wants:
        """Nobody has approved the plan, and the attempt trains: it goes on. Until it is well, the guard only tells."""
        attempt, active = self._attempts.current, self._incidents.active
        if active is not None and active.trigger == "replicas":
            self._replicas.let_go_on()
        else:
            self._let_go_on, self._planned = attempt.number if attempt is not None else 0, None
            self._trust_again()
        yield GoOn(f"{why}: the attempt goes on as it is")

    def _trust_again(self) -> None:
        """After a false alarm all is as good as before; what was written while the loss was NaN is not."""
        of, self._suspects = self._suspects, ""
        if of == "spike":
            self._attempts.checkpoints.was_false_alarm()
        elif of == "nan":
            self._attempts.checkpoints.trust_again("numbers")

    def _is_well_again(self, event: m.LossSeen) -> Wants:
        """The loss came back by itself."""
        self._decided, self._planned = (0, ""), None
        self._incidents.log.forget_findings(RULE)
        told, self._told, self._let_go_on = self._told, False, 0
        self._trust_again()
        at = "" if event.step is None else f" (step {event.step})"
        active = self._incidents.active
        if active is not None and active.trigger == "loss":
            yield GoOn(f"the loss came back, or is steady at a new level{at}")
        record = self._incidents.degraded_by("signal")
        if record is not None and told:
            yield from self._incidents.close(record, f"the loss came back, or is steady at a new level{at}")

    def attempt_ends(self) -> None:
        """The next one is formed."""
        if self._planned is not None and self._attempts.checkpoints.rolls_back:
            self._rollbacks.append(self._planned)
        self._suspects, self._planned, self._let_go_on = "", None, 0
        self._told, self._reported = False, 0
