"""From the first sign of a failure to what is done about it: the layer of `Job` above `dealings`.

Nothing is torn down here before the evidence is in or its time is up, and whatever the conclusion says or raises, the
job goes on: it restarts, ends, or waits for an operator with a reason.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from diagnosis.incident import HangReport, Incident, Verdict
from diagnosis.signals import Finding
from diagnosis.taxonomy import FailureClass
from recovery import policy
from recovery.actions import Plan
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Case, Trigger
from supervisor.job.dealings import Dealings
from supervisor.job.lifecycle import Choose
from supervisor.messages import EvidenceRequest, Outcome, SpaceSeen, SpaceWanted
from supervisor.view import utc

CRASH_BUDGET_S = 0.1
HANG_BUDGET_S = 5.0
EVIDENCE_SLACK_S = 1.0
"""For the way there and back; then it is concluded without the evidence that is missing."""
SILENCE_S = 6.5
"""After so long the observer has called a node lost that went with its ranks (`SILENT_S` and a heartbeat)."""
EVIDENCE_NODES = 64
"""Nodes asked for evidence in one incident."""
UNSEEN_PROGRESS_S = 300.0
"""Where no step is known, an attempt that ran this long has made progress."""
SHORT_LIFE_S = 60.0
"""Where no step is known, only attempts that ended this soon count as having failed at the same point."""
MORE_TOLD = 16
"""Further failures of one incident that are told one by one."""
CULPRIT_WINDOW_S = 300.0
LOOK_AGAIN_S = 600.0
"""A hang that was left alone and lasts this much longer is none to be left alone."""
ROOM_BYTES = 64 * 1024
"""Besides a checkpoint."""
_NAMED_FOLDER = re.compile(r"'((?:/|\.{0,2}/|[\w.-])[^'\n]{0,400})/[^/'\n]*'|(?:free|written) in (/\S{1,400})")
"""Where something could not be written, as an exception or our own look at disks names it."""
WORKER_FAILED = 1
"""torchrun's own exit code for any failed worker."""

Conclude = Callable[[Incident], Verdict]


class Casework(Dealings):
    """Incidents: open, collect evidence, conclude, plan, act."""

    def __init__(self, choose: Choose, conclude: Conclude) -> None:
        super().__init__(choose)
        self._conclude_by = conclude
        self._case: Case | None = None
        """The incident in the hands of DIAGNOSING or RECOVERING."""
        self._wants_approval = False
        """Its plan waits for `approve`, or for the end of a pause."""
        self._tripped = False
        self._left_alone: HangReport | None = None
        """A hang that was not to be acted on: looked at again after a while."""
        self._hung: Case | None = None
        self._request_number = 0
        self._space_number = 0
        self._space_told: dict[str, tuple[str, ...]] = {}
        """Node -> its folders without room, as told last; none: there is room."""
        self._ranks_ran = False
        """Any attempt had ranks."""
        self._launcher_failures = 0
        """Launchers that ended by themselves since ranks were started last."""
        self._failed_at: deque[tuple[str, int | None]] = deque(maxlen=50)
        """(fingerprint, step) of earlier failures."""
        self._classes: dict[FailureClass, int] = {}
        """Incidents by class since the last progress."""
        self._blamed: deque[tuple[float, str]] = deque(maxlen=200)

    def _approval_wanted(self) -> bool:
        return self._wants_approval

    @property
    def hung(self) -> Case | None:
        """The open incident of a hang that nobody acts on, while the attempt goes on standing."""
        case, attempt = self._hung, self.attempt
        lasts = case is not None and case.closed_at is None and attempt is not None and not attempt.over
        return case if lasts else None

    @property
    def tripped(self) -> bool:
        """The circuit breaker holds the job."""
        return self._tripped and bool(self.held)

    def blamed_now(self, name: str) -> str:
        """Why a node is suspect: an open incident names it."""
        for case in [*self.casebook.unclosed(), *self.casebook.standing()]:
            verdict = case.verdict
            if verdict is not None and any(culprit.node == name for culprit in verdict.culprits):
                return f"{case.id}: {verdict.failure_class.value}"
        return ""

    def _begin_life(self) -> None:
        super()._begin_life()
        self._case, self._left_alone, self._wants_approval = None, None, False

    # ----- opening -----

    def _fault(
        self, trigger: Trigger, what: str, failed_at: float, hang: HangReport | None = None, *, quiet: bool = False
    ) -> Case | None:
        """Something broke the current attempt. One incident takes all that belongs together; None: it is too late."""
        attempt = self.attempt
        if attempt is None or attempt.over or self.state not in ("STARTING", "RUNNING", "DIAGNOSING", "RECOVERING"):
            return None
        if attempt.finishing or (self.state == "RECOVERING" and self._case is None):
            return None  # a run whose ranks all ended well cannot break any more
        if self.state in ("DIAGNOSING", "RECOVERING") and self._case is not None:
            if hang is not None and self._case.hang is None:
                self._case.hang = hang
            self._case.more += 1
            if self._case.more <= MORE_TOLD:
                self._note(what, incident=self._case.id)
            return self._case
        case = self._open(trigger, what, failed_at, attempt, hang, quiet=quiet)
        self._case, attempt.broke_at = case, case.failed_at
        self._enter("DIAGNOSING")
        self._cancel("form", "start", "stood", "settle")
        return case

    def _open(
        self,
        trigger: Trigger,
        what: str,
        failed_at: float,
        attempt: Attempt,
        hang: HangReport | None,
        *,
        quiet: bool = False,
    ) -> Case:
        new = self.casebook.next_id()
        if trigger not in ("signal", "device"):
            for old in self.casebook.unclosed():
                self._close(old, f"attempt {attempt.number} failed too: {new}")
            for old in self.casebook.standing():
                self._close(old, f"the attempt broke: {new}")
        case = Case(
            id=new,
            opened_at=self.now,
            # Clocks of nodes differ: a failure is never in the future, nor ages ago.
            failed_at=min(self.now, max(failed_at, self.now - 3600.0, attempt.formed_at)),
            trigger=trigger,
            attempt=attempt.number,
            what=what,
            step=attempt.step,
            hang=hang,
        )
        self.casebook.open(case)
        self._note(f"{case.id}: {what}", incident=case.id, loud=not (quiet or case.goes_on))
        return case

    def _close(self, case: Case, why: str, loud: bool = False) -> None:
        if case.closed_at is None:
            case.close(self.now, why)
            self._note(f"{case.id} closed: {why}", incident=case.id, loud=loud)

    # ----- evidence -----

    def _ask(self, names: Iterable[str], budget_s: float, flight: bool = False) -> int:
        """Ask nodes for evidence; the number of the request."""
        self._request_number += 1
        request = EvidenceRequest(number=self._request_number, budget_s=budget_s, flight=flight)
        for name in names:
            node = self.roster.get(name)
            if node is not None:
                node.request = request
                self._touched.add(name)
        return self._request_number

    def _witnesses(self, first: Iterable[str] = ()) -> list[str]:
        """Members to be asked, the most interesting first."""
        attempt = self.attempt
        assert attempt is not None
        names = [name for name in dict.fromkeys([*first, *attempt.members]) if name in attempt.members]
        return [name for name in names if (node := self.roster.get(name)) and node.standing][:EVIDENCE_NODES]

    def _gather(self, case: Case, asked: Iterable[str], budget_s: float, flight: bool = False) -> None:
        names = list(asked)
        if names:
            number = self._ask(names, budget_s, flight)
            case.awaiting.update((name, number) for name in names)
        self._set_timer("evidence", self.now + budget_s + EVIDENCE_SLACK_S)
        self._conclude_when_ready()

    def _conclude_when_ready(self, late: bool = False) -> None:
        """Conclude when the evidence is in (or `late`: when its time is up)."""
        case, attempt = self._case, self.attempt
        if case is None or attempt is None or self.state != "DIAGNOSING":
            return
        case.awaiting -= attempt.evidence.keys()
        case.awaiting = {key for key in case.awaiting if (node := self.roster.get(key[0])) and node.standing}
        if case.awaiting and (not late or self._waits_for_silence(case, attempt)):
            return
        if case.awaiting:
            missing = ", ".join(sorted({name for name, _ in case.awaiting})[:8])
            self._note(f"concludes without the evidence of {missing}: its time is up", incident=case.id)
        self._cancel("evidence")
        self._conclude(case, attempt)

    def _waits_for_silence(self, case: Case, attempt: Attempt) -> bool:
        """Ranks feel at once that a node is gone, silence tells later: the network is not blamed before that."""
        if case.trigger != "exit" or case.waited:
            return False
        case.evidence = list(attempt.evidence.values())
        if self._verdict(case, attempt).failure_class is not FailureClass.NCCL_NETWORK:
            return False
        case.waited = True
        self._set_timer("evidence", case.opened_at + SILENCE_S)
        return True

    # ----- concluding and planning -----

    def _conclude(self, case: Case, attempt: Attempt) -> None:
        case.take(attempt.evidence.values())
        case.step = attempt.step
        case.verdict = self._verdict(case, attempt)
        case.mark("diagnose", self.now)
        verdict = case.verdict
        told = f"{case.id}: {verdict.failure_class.value} ({verdict.confidence:.0%} sure): {verdict.why}"
        loud = self._launcher_code(case) is None  # torchrun has said itself what is wrong
        self._note(told, incident=case.id, loud=loud)
        self._comment(told)
        self._credit(attempt)
        case.plan = policy.plan(verdict, self._situation(case, verdict, attempt))
        case.of = attempt
        self._remember(verdict, attempt, self.now)
        what = f"would {case.plan.kind} (mode observe)" if self.mode == "observe" else case.plan.kind
        self._note(f"{case.id}: {what}: {case.plan.why}", incident=case.id, loud=loud)
        self._consider(case, case.plan, attempt)

    def _verdict(self, case: Case, attempt: Attempt) -> Verdict:
        findings = self._news(case, self.casebook.findings_near(case.failed_at, case.attempt))
        try:
            incident = case.incident(findings, attempt.rank_nodes, attempt.world_size)
            told = [
                msgspec.structs.replace(one, findings=self._news(case, one.findings, one.node)) for one in case.evidence
            ]
            verdict = self._conclude_by(msgspec.structs.replace(incident, evidence=tuple(told)))
        except Exception as error:  # the diagnoser may be wrong or broken: the run has to come back all the same
            return Verdict(
                failure_class=FailureClass.UNKNOWN,
                culprits=(),
                confidence=0.0,
                why=f"the diagnosis itself failed ({type(error).__name__}: {error})"[:300],
                action="restart",
            )
        # Ranks name each other by address.
        named = tuple(msgspec.structs.replace(one, node=self.roster.named(one.node)) for one in verdict.culprits)
        return msgspec.structs.replace(verdict, culprits=named) if named != verdict.culprits else verdict

    def _news(self, case: Case, findings: tuple[Finding, ...], node: str = "") -> tuple[Finding, ...]:
        """Without what an operator knew of a node that was given back since (its GPU was reset)."""
        opened, covers = case.opened_at, self.cordons.covers
        return tuple(one for one in findings if not covers(one.node or node, one.at or opened, opened))

    def _situation(self, case: Case, verdict: Verdict, attempt: Attempt) -> policy.Situation:
        culprits = {culprit.node for culprit in verdict.culprits if culprit.node}
        members = len(attempt.members)
        lost = tuple(name for name in attempt.members if not (node := self.roster.get(name)) or not node.standing)
        free = [n for n in self.roster if n.name not in attempt.members and self._usable(n)]
        return policy.Situation(
            incident=case.id,
            at=self.now,
            mode=self.mode,
            broken=attempt.broken or bool(lost) or case.lasts or case.trigger in ("setup", "launcher"),
            work_may_be_complete=self._may_be_complete(attempt),
            launcher_code=self._launcher_code(case),
            deterministic=self._is_deterministic(verdict, attempt),
            repeats=self._classes.get(verdict.failure_class, 0),
            culprit_repeats=sum(
                1 for at, name in self._blamed if name in culprits and at >= self.now - CULPRIT_WINDOW_S
            ),
            delay_s=self.budget.next_delay_s(self.now),
            nodes=members - len(lost),
            replacements=len(free),
            nodes_min=self.spec.nodes_min,
            lost=lost,
            may_cordon=self.cordons.allowed_together(sorted(culprits), members, self.now),
            vouched=self.cordons.vouched_since(case.opened_at),
            may_requeue=self.may_requeue,
            unproven=case.hang is not None and not case.hang.proven,
        )

    @property
    def _would_fail_again(self) -> bool:
        """Launchers end by themselves before they start a rank: at the first start, or for the second time."""
        return self._launcher_failures > (1 if self._ranks_ran else 0)

    def _launcher_code(self, case: Case) -> int | None:
        """The run's exit code, where torchrun's own error ends it: nothing ran, and nothing will."""
        return case.launcher_code if case.before_ranks and self._would_fail_again else None

    def _credit(self, attempt: Attempt) -> None:
        """Where no step tells, having run for long is progress."""
        if attempt.step is not None or attempt.moved_at is None or attempt.stood_at is None:
            return
        if self.now - attempt.stood_at >= UNSEEN_PROGRESS_S:
            self._progressed()

    def _progressed(self) -> None:
        if not self._moved_since_requeue:
            self._moved_since_requeue = True
            self._touch_all()
        self.budget.progressed()
        self._classes.clear()

    def _may_be_complete(self, attempt: Attempt) -> bool:
        if attempt.broken:
            return False
        # Steps are printed every so often: the last one that was seen may be well before the last one that was done.
        return attempt.last_step is None or attempt.step is None or attempt.step >= 0.9 * attempt.last_step

    def _is_deterministic(self, verdict: Verdict, attempt: Attempt) -> bool:
        if not verdict.fingerprint or (verdict.fingerprint, attempt.step) not in self._failed_at:
            return False
        stood = attempt.stood_at
        return attempt.step is not None or stood is None or self.now - stood < SHORT_LIFE_S

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

    # ----- acting -----

    def _consider(self, case: Case, plan: Plan, attempt: Attempt) -> None:
        if plan.until == "progress":
            self._note(f"{case.id}: left waiting (`unbroken restart`, `stop`)", incident=case.id, loud=True)
            self._leave_hung(case)
        elif plan.kind == "ignore":
            self._go_on(case, f"left alone: {plan.why}")
            self._look_again(case)
        elif self.mode == "observe" and not self.paused:
            self._only_watch(case, plan, attempt)
        elif self.paused or plan.needs_approval:
            self._wants_approval = True
            self._enter("RECOVERING")
            self._wait_for_operator()
            how = "paused: nothing is done until `unbroken resume`" if self.paused else "waits for `unbroken approve`"
            self._note(f"{case.id}: {how}", incident=case.id, loud=True)
        else:
            self._carry_out(case, plan)

    def _wait_for_operator(self) -> None:
        """Not for ever, unless one has paused it: that holds until the next word."""
        self.asked_at = self.now
        if not self.paused and self.spec.hold_limit_s > 0:
            self._set_timer("hold", self.now + self.spec.hold_limit_s)

    def _look_again(self, case: Case) -> None:
        """A hang that nobody acts on may last."""
        if case.hang is not None and case.hang.kind != "traced":
            self._left_alone = case.hang
            self._set_timer("again", self.now + LOOK_AGAIN_S)

    def _only_watch(self, case: Case, plan: Plan, attempt: Attempt) -> None:
        """Mode `observe`: what torchrun alone would do happens, and nothing else."""
        never_ran = attempt.round is None or case.trigger in ("setup", "launcher")
        if plan.kind == "succeed" or not (never_ran or self._is_broken(attempt)):
            if case.hang is not None:
                self._leave_hung(case)
            else:
                self._go_on(case, f"mode observe: would {plan.kind}")
            return
        failure = self._failure(case, f"mode observe: would {plan.kind} ({plan.why})", case.launcher_code)
        self._end(failure, "ends as torchrun would")

    def _leave_hung(self, case: Case) -> None:
        """A hang that is not acted on: the incident stays open until progress comes back, or somebody acts."""
        assert case.hang is not None
        case.stood_still = case.hang.proven
        self._hung, self._case, self._wants_approval, self.held = case, None, False, ""
        self._cancel("evidence", "hold")
        self._enter("RUNNING")

    def _is_broken(self, attempt: Attempt) -> bool:
        return attempt.broken or any(not n.standing for n in self.roster if n.name in attempt.members)

    def _go_on(self, case: Case, why: str) -> None:
        """False alarm, or nothing to be done: the attempt goes on."""
        self._close(case, why)
        self._case = None
        self._wants_approval = False
        self.held = ""
        self._cancel("evidence", "hold")
        self._enter("RUNNING")

    def _carry_out(self, case: Case, plan: Plan, by_operator: bool = False) -> None:
        self._wants_approval = False
        self._cancel("hold")
        if plan.kind == "succeed":
            self._end(Outcome(state="succeeded", exit_code=0, line=f"the run is complete: {plan.why}"), plan.why)
        elif plan.kind == "stop":
            self._end(self._failure(case, plan.why, plan.exit_code), f"stopped: {plan.why}")
        elif plan.kind == "hold" and plan.until == "space":
            self._wait_for_space(case, plan)
        elif plan.kind == "hold":
            self._hold(plan.why)
            self._tripped = plan.breaker
        else:
            self._restart(case, plan, by_operator)

    def _failure(self, case: Case, why: str, exit_code: int | None = None) -> Outcome:
        verdict = case.verdict
        reason = f"{verdict.failure_class.value}: {verdict.why}" if verdict is not None else case.what
        return Outcome(
            state="failed",
            exit_code=WORKER_FAILED if exit_code is None else exit_code,
            line=f"{reason} ({why})"[:500],
            first_failure=case.what,
        )

    def _hold(self, why: str) -> None:
        self._enter("RECOVERING")
        self.held, self._tripped = why, False
        self._wait_for_operator()
        at = self.timers.get("hold")
        ends = f"; it ends at {utc(at):%Y-%m-%d %H:%M} UTC if nobody does" if at is not None else ""
        self._note(f"held: {why}. Go on with `unbroken resume`, `restart` or `stop`{ends}", loud=True)

    def _wait_for_space(self, case: Case, plan: Plan) -> None:
        """What is left of the attempt ends; nothing is prepared, moved or started before there is room."""
        self._enter("RECOVERING")
        self._case = None
        saved = [one for one in self.candidates() if one.complete]
        newest = max(saved, key=lambda one: one.modified_at, default=None)
        self._space_number += 1
        self._space = SpaceWanted(
            number=self._space_number,
            folders=_folders_named(case.verdict),
            need_bytes=ROOM_BYTES + (newest.size_bytes if newest is not None else 0),
        )
        self._space_told.clear()
        self._form(self._members())
        self._wait_for_operator()
        self._set_timer("backoff", self.now + plan.delay_s)

    def _space_seen(self, event: SpaceSeen) -> None:
        if self._space is None or event.number != self._space.number or self.state != "RECOVERING":
            return
        before = self._space_told.get(event.node)
        self._space_told[event.node] = event.full
        if event.full and event.full != before:
            self._note(f"{event.node}: no room yet: {'; '.join(event.full)[:300]}")
        self._go_on_with_room()

    def _go_on_with_room(self) -> None:
        """Once every member says so: each may write to disks of its own."""
        attempt = self.attempt
        if self._space is None or attempt is None or self.paused or "backoff" in self.timers:
            return
        there = [name for name in attempt.members if (node := self.roster.get(name)) and node.standing]
        if not there or any(self._space_told.get(name) != () for name in there):
            return
        self._space = None
        self._cancel("hold")
        self.restarts += 1
        self._note("there is room on disks again: the run goes on", loud=True)
        self._touch_all()
        self._proceed()

    @property
    def waits_for_space(self) -> str:
        """What there is no room in, in words; empty: it does not wait for that."""
        if self._space is None:
            return ""
        full = sorted({one for told in self._space_told.values() for one in told})
        return "; ".join(full[:4]) or "the nodes are asked whether there is room"

    def _restart(self, case: Case, plan: Plan, by_operator: bool = False) -> None:
        if plan.counts:
            if self.budget.next_delay_s(self.now) is None:
                why = "the restart budget is spent without progress"
                self._end(self._failure(case, why, policy.BUDGET_SPENT), why)
                return
            self.budget.charge(self.now)
        self.restarts += 1
        self._requeue_approved = by_operator and plan.kind == "requeue"
        self._leave_out(case, plan, by_operator)
        at_once = by_operator and self.paused  # nothing would go on by itself after a back-off
        self._next_attempt(0.0 if at_once else plan.delay_s, by_operator)

    def _leave_out(self, case: Case, plan: Plan, by_operator: bool = False) -> None:
        vouched = self.cordons.vouched_since(case.opened_at)
        for cordon in plan.cordons:
            if cordon.node in vouched:
                self._note(f"{cordon.node} is not cordoned: an operator said that it may be used", incident=case.id)
            elif self.cordons.of(cordon.node, self.now) is None:
                self._note(f"cordoned {cordon.node}: {cordon.reason}", incident=case.id, loud=True)
                self._cordon(cordon, approved=by_operator)

    def _next_attempt(self, delay_s: float = 0.0, by_operator: bool = False) -> None:
        """End what is left of the current attempt and start the next, after `delay_s`."""
        self._enter("RECOVERING")
        self._case = None
        self._wants_approval = False
        self._space = None
        self._cancel("backoff", "gather", "nodes", "hold", "evidence")
        self._form(self._members())
        if delay_s > 0:
            self._set_timer("backoff", self.now + delay_s)
            self._note(f"waits {delay_s:.0f} s before the next attempt")
        self._proceed(by_operator)


def _folders_named(verdict: Verdict | None) -> tuple[str, ...]:
    texts = [one.text for one in verdict.evidence] if verdict is not None else []
    found = (match for text in texts for match in _NAMED_FOLDER.finditer(text))
    return tuple(dict.fromkeys(next(filter(None, match.groups())) for match in found))[:8]
