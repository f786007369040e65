"""Replicas that differ: silent corruption, found by the digests of snapshots. What the job does about it.

The controller compares the digests (`recovery.snapshot_choice.ReplicaWatch`). `recovery.rollback` says what to do, and
setting `loss.guard` whether that is only told. What is done goes through an incident with a verdict and a plan, as for
a loss that went wrong: mode, pause, restart budget and circuit breaker hold.
"""

from __future__ import annotations

from typing import Final

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Evidence, Finding, rank_names
from diagnosis.taxonomy import FailureClass
from recovery import rollback
from recovery.checkpoint import ResumeSituation
from supervisor import messages as m
from supervisor.job.attempts import Attempt, Attempts
from supervisor.job.core import Core, OpenIncident, Wants
from supervisor.job.incidents import Incidents
from supervisor.notes import note

RULE: Final = "replica_digests"
SURE: Final = 0.9
UNSURE: Final = 0.4
"""Where it may be the script, or more than one node. Nobody is cordoned for that."""
ODD_KEPT: Final = 64
"""Ranks that once differed."""
NOT_TRUSTED: Final = "Checkpoints written since the replicas were the same are used only if no other is left."


class ReplicaGuard:
    """What it knows lasts as long as the job; replaying the journal brings it back."""

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
                rule=RULE,
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
