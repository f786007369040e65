"""The guards of the numbers: what the job does when the loss that ranks print went wrong (`LossGuard`), and when
replicas of one state differ, which is silent corruption (`ReplicaGuard`). `recovery.rollback` decides.

Setting `loss.guard`: `off` does nothing, `recommend` tells what to do, `enforce` does it. Where it does not act, a
spike makes no checkpoint suspect: a false alarm would cost all of them at the next crash. All that a guard does goes
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
from supervisor.notes import note

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
REPLICA_RULE: Final = "replica_digests"
UNSURE: Final = 0.4
"""Where it may be the script, or more than one node. Nobody is cordoned for that."""
ODD_KEPT: Final = 64
"""Ranks that once differed."""
NOT_TRUSTED: Final = "Checkpoints written since the replicas were the same are used only if no other is left."


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
        self.recommended: rollback.LossPlan | None = None
        """The rollback that it has told, and nobody has carried out: the numbers are still wrong."""
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
        self.recommended = decided
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
        known = self._replicas.situation if finding.rule == REPLICA_RULE else None
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
        told, self._told, self._let_go_on, self.recommended = self._told, False, 0, None
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
        self._told, self._reported, self.recommended = False, 0, None


class ReplicaGuard:
    """Replicas that differ: the controller compares the digests (`recovery.snapshot_choice.ReplicaWatch`).

    What it knows lasts as long as the job, as with `LossGuard`.
    """

    def __init__(self, core: Core, attempts: Attempts, incidents: Incidents) -> None:
        self._core, self._attempts, self._incidents = core, attempts, incidents
        self.situation: ResumeSituation | None = None
        """Where the run would go back to: replicas of the current attempt differ, which does not go away."""
        self._rollbacks = 0
        self._odd_on: dict[int, str] = {}
        """Ranks that differed -> the node of each."""
        self._planned = False
        """The run goes back, unless an operator rejects it."""
        self._overruled = False
        """An operator has undone a rollback: until one orders a rollback, the guard only tells."""

    def differ(self, event: m.ReplicasDiffer) -> Wants:
        attempt, core = self._attempts.live(event.attempt), self._core
        if attempt is None or core.state != "RUNNING" or self.situation is not None:
            return
        situation = rollback.before_corruption(event.attempt, attempt.formed_at, event.since, event.since_step)
        self.situation = situation
        checkpoints = self._attempts.checkpoints
        elsewhere = self._differed_elsewhere(event, attempt)
        by_script = elsewhere or event.compared == event.contents > 2  # of a bad rank the others are the same
        distrusted = event.since is not None and not by_script
        if distrusted and event.since is not None:
            checkpoints.suspect_from("replicas", event.since, event.step, event.since_step)
        checkpoint, _ = checkpoints.preview(situation, attempt.members)
        trusted = checkpoint is not None and checkpoint.complete and not checkpoint.suspect
        case = rollback.ReplicaCase(
            named=bool(event.odd),
            seen_equal=event.since is not None,
            nodes=len({attempt.rank_nodes.get(rank, "") for rank in event.odd}),
            elsewhere=elsewhere,
            situation=situation,
            step=checkpoint.step if trusted and checkpoint is not None else None,
            before=self._rollbacks,
        )
        decided = rollback.plan_for_replicas(case)
        findings = self._findings(event, attempt, UNSURE if case.doubt else SURE)
        yield from self._act_or_tell(event, attempt, decided, findings, distrusted=distrusted)

    def _differed_elsewhere(self, event: m.ReplicasDiffer, attempt: Attempt) -> bool:
        """Whether one of these ranks differed in an earlier attempt, on another node."""
        if event.since is None:
            return False
        nodes = {rank: attempt.rank_nodes.get(rank, "") for rank in event.odd}
        found = any(self._odd_on.get(rank, node) != node for rank, node in nodes.items())
        self._odd_on = dict([*self._odd_on.items(), *nodes.items()][-ODD_KEPT:])
        return found

    def _act_or_tell(
        self,
        event: m.ReplicasDiffer,
        attempt: Attempt,
        decided: rollback.LossPlan,
        findings: list[Finding],
        *,
        distrusted: bool,
    ) -> Wants:
        core, what = self._core, _what(event)
        acts = core.spec.loss_guard == "enforce" and core.mode != "observe" and not self._overruled
        spent = self._incidents.budget.next_delay_s(core.now) is None
        if acts and decided.kind == "rollback" and not spent and not attempt.finishing:
            yield from self._go_back(what, decided, findings)
            return
        why = "" if core.spec.loss_guard == "off" else f" {_advice(decided, findings)}"
        why += "; the restart budget is spent without progress" if acts and spent else ""
        if not findings:
            yield note("replicas_differ", loud=True, what=what, advice=why)
            return
        want = OpenIncident("device", _named(what, findings), core.now)
        yield from self._incidents.open_with_plan(
            want, f"No restart.{f' {NOT_TRUSTED}' if distrusted else ''}{why}", "degraded"
        )

    def _go_back(self, what: str, decided: rollback.LossPlan, findings: list[Finding]) -> Wants:
        """Without their nodes, if others can take their places."""
        verdict = Verdict(
            failure_class=FailureClass.SILENT_DATA_CORRUPTION,
            culprits=tuple(Culprit(node=one.node, gpu=one.gpu, rank=one.rank) for one in findings),
            confidence=SURE,
            why=_named(what, findings),
            action="cordon_node_and_restart",
            evidence=tuple(one.evidence for one in findings[:4]),
        )
        self._planned = True
        want = OpenIncident("replicas", verdict.why, self._core.now)
        yield from self._incidents.act_at_once(want, verdict, rollback=decided.situation)

    def _findings(self, event: m.ReplicasDiffer, attempt: Attempt, confidence: float) -> list[Finding]:
        nodes = attempt.rank_nodes
        found = [
            Finding(
                rule=REPLICA_RULE,
                failure_class=FailureClass.SILENT_DATA_CORRUPTION,
                confidence=confidence,
                scope="rank",
                severity="error",
                evidence=Evidence(text=f"{_what(event)}: rank {rank} differs from the majority", source="agent"),
                node=nodes.get(rank, ""),
                rank=rank,
                at=self._core.now,
                attempt=event.attempt,
                step=event.step,
            )
            for rank in event.odd
        ]
        for one in found:
            self._incidents.log.add_finding(one)
        return found

    # ----- what becomes of it -----

    def start_anew(self) -> None:
        """An operator has taken over: what was done before does not bind the guard."""
        self._rollbacks, self._overruled = 0, False

    def overrule(self) -> None:
        """An operator has undone a rollback."""
        self._overruled = True

    def let_go_on(self) -> None:
        """Nobody has approved the plan, and the attempt trains."""
        self._planned = False

    def attempt_ends(self) -> None:
        """The next one is formed."""
        if self._planned and self._attempts.checkpoints.rolls_back:
            self._rollbacks += 1
        self._planned, self.situation = False, None


def _what(event: m.ReplicasDiffer) -> str:
    return f"the replicated tensors of {event.compared} ranks are not the same at step {event.step}"


def _named(what: str, findings: list[Finding]) -> str:
    where = ", ".join(dict.fromkeys(one.node for one in findings if one.node)) or "an unknown node"
    differ = "differs" if len(findings) == 1 else "differ"
    who = rank_names([one.rank for one in findings if one.rank is not None])
    return f"{what}: {who} on {where} {differ} from the others"


def _advice(decided: rollback.LossPlan, findings: list[Finding]) -> str:
    """The commands that would do it."""
    if decided.step is None:
        return f"No rollback is advised: {decided.why}"
    nodes = dict.fromkeys(one.node for one in findings if one.node)
    commands = [*(f"`unbroken cordon {node}`" for node in nodes), f"`unbroken rollback {decided.step}`"]
    return f"Recommended: {', '.join(commands)} ({decided.why})"
