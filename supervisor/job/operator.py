"""What operators command, what happens when a run is to be stopped, and what the job waits for.

Operators win: what they command is done even while the job is paused, and policy never undoes it. A run that is stopped
on request ends with 130 (SIGINT) or 143 (SIGTERM and `unbroken stop`): it is not complete, so it is never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from diagnosis.incident import RULE_PREFIX
from recovery.checkpoint import ResumeSituation
from recovery.cordon import Cordon
from recovery.policy import Mode
from supervisor import messages as m
from supervisor.job.attempts import Attempts, Space
from supervisor.job.core import (
    STOP_GRACE_S,
    Core,
    EndJob,
    NextAttempt,
    Proceed,
    RefreshAndProceed,
    Timer,
    Wants,
    WantsAnd,
    cancel,
)
from supervisor.job.incident_log import IncidentRecord
from supervisor.job.incidents import Incidents
from supervisor.job.ledger import ClusterLedger
from supervisor.job.loss import LossGuard
from supervisor.job.memory import Memory
from supervisor.job.node_tests import NodeTests
from supervisor.job.nodes import Nodes
from supervisor.job.scheduler import SchedulerRequests
from supervisor.job.swaps import Swaps
from supervisor.job.traces import Traces
from supervisor.notes import note
from supervisor.view import utc

MOST_SKIPPED = 1_000_000
"""Batches that agents agree to leave out."""
STOPPED_EXIT = {"SIGINT": 130, "SIGTERM": 143}


class Operator:
    def __init__(
        self,
        core: Core,
        nodes: Nodes,
        attempts: Attempts,
        incidents: Incidents,
        scheduler: SchedulerRequests,
        space: Space,
        guard: LossGuard,
        swaps: Swaps,
        traces: Traces,
        tests: NodeTests,
        ledger: ClusterLedger,
        memory: Memory,
    ) -> None:
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self._incidents, self._scheduler, self._space, self._guard = incidents, scheduler, space, guard
        self._swaps, self._tests, self._ledger = swaps, tests, ledger
        self.commands: dict[str, Callable[[m.OperatorCommand], Wants]] = {
            "pause": self._pause,
            "resume": self._resume,
            "restart": self._restart,
            "stop": self._stop,
            "cordon": self._cordon,
            "uncordon": self._uncordon,
            "mode": self._mode,
            "approve": self._approve,
            "reject": self._reject,
            "rollback": self._rollback,
            "swap": self._swap,
            "trace": traces.asked,
            "qualify": tests.asked,
            "correct": memory.correct,
        }

    # ----- what the job waits for -----

    @property
    def waiting(self) -> str:
        """What the job waits for, and until when, in words."""
        core, incidents = self._core, self._incidents
        if core.is_over:
            return ""
        if incidents.held:
            return f"an operator: {incidents.held}{self._held_until('resume`, `restart` or `stop')}"
        if self._space.wanted is not None and not core.paused:
            return f"room on disks{self._held_until('resume`, `restart` or `stop')}: {self._space.text}"
        if incidents.approval_wanted:
            until = self._held_until("approve")
            return "`unbroken resume`" if core.paused else f"`unbroken approve {incidents.approves}` or `reject`{until}"
        if core.state in ("IDLE", "RECOVERING"):
            return self._waiting_to_start()
        return "evidence" if core.state == "DIAGNOSING" else ""

    @property
    def forming(self) -> str:
        """What the attempt that starts waits for, in words."""
        attempt = self._attempts.current
        if self._core.state != "STARTING" or attempt is None or attempt.workers_started_at is not None:
            return ""
        since, count = f"since {utc(attempt.formed_at):%H:%M:%S} UTC", len(attempt.members)
        of = f"{count} node{'s' * (count != 1)}"
        if attempt.round is None:
            return f"torchrun on {len(attempt.offers)} of {of} to come to the rendezvous, {since}"
        return f"the ranks: {len(attempt.started_members)} of {of} have started theirs, {since}"

    def _waiting_to_start(self) -> str:
        core, scheduler = self._core, self._scheduler
        if core.defined_at is None:
            return "the first node to join"
        if core.paused and not self._attempts.by_operator:
            return "`unbroken resume`"
        if scheduler.wants_requeue:
            return f"{core.spec.scheduler}, to start the job again"
        if "backoff" in core.timers:
            return "the back-off"
        if self._tests.is_awaited:
            return "active tests of suspected nodes"
        refused = f"; {core.spec.scheduler} does not start the job again: {scheduler.requeue_refused}"
        at, found = core.timers.get("nodes"), len(self._attempts.next_members())
        until = "" if at is None or core.paused else f" (until {utc(at):%Y-%m-%d %H:%M} UTC)"
        nodes = f"nodes: {found} of {core.spec.nodes_max} can be used{until}"
        return nodes + (refused if scheduler.requeue_refused else "")

    def _held_until(self, what: str) -> str:
        """Since when it waits for an operator, and when that ends it."""
        since, at = utc(self._incidents.waits_for_operator_since), self._core.timers.get("hold")
        told = f" (held since {since:%Y-%m-%d %H:%M} UTC"
        if self._core.paused:
            return f"{told})"
        if at is None:
            return f"{told}, without a limit)"
        if self._incidents.may_go_on:
            return f"{told}; without a word the attempt goes on as it is at {utc(at):%Y-%m-%d %H:%M} UTC)"
        return f"{told}; the job ends at {utc(at):%Y-%m-%d %H:%M} UTC unless `unbroken {what}`)"

    # ----- stops -----

    def stop_requested(self, event: m.StopRequested) -> Wants:
        """Ctrl-C, or a signal of the scheduler."""
        if self._core.is_over or self._attempts.is_finishing:
            return
        if self._scheduler.is_requeuing and event.signal != "SIGINT":
            yield from self._scheduler.end_requeued()  # the scheduler's way to begin it
            return
        yield from self._stop_job(
            event.signal, f"stopped by {event.signal} on {event.node}{self._scheduler.near_limit()}"
        )
        if event.signal == "SIGTERM":
            self._scheduler.look_whether_again()

    def _stop_job(self, signal: str, line: str) -> Wants:
        """Exit code 130 for SIGINT, else 143: a stopped run is not complete, so it is never 0."""
        self._core.stop_signal = signal if signal in STOPPED_EXIT else "SIGTERM"
        outcome = m.Outcome(state="stopped", exit_code=STOPPED_EXIT[self._core.stop_signal], line=line)
        yield EndJob(outcome, grace_s=STOP_GRACE_S)

    # ----- commands -----

    def given(self, event: m.OperatorCommand) -> Wants:
        core, attempts = self._core, self._attempts
        if core.is_over and event.command != "correct" and not event.argument.startswith(RULE_PREFIX):
            yield _refuse("command_too_late", command=event.command)
            return
        yield note("command", command=event.command, argument=event.argument, by=event.by, reason=event.reason)
        if event.unrecorded:
            yield note("command_unrecorded", loud=True, command=event.command, why=event.unrecorded)
        before = attempts.current if core.state == "STARTING" else None
        yield from self.commands[event.command](event)
        if core.state == "STARTING" and attempts.current is not None and attempts.current is not before:
            yield note("attempt_forming", attempt=attempts.current.number, nodes=attempts.current.members)

    def _pause(self, event: m.OperatorCommand) -> Wants:
        pause = self._core.pause
        if pause is not None:
            yield note("paused_already", at=pause.at, by=pause.by)
        else:
            yield from self.pause_job(event)

    def pause_job(self, command: m.OperatorCommand) -> Wants:
        self._core.pause = command
        self._attempts.pause()
        self._nodes.forget_wakes()
        yield cancel("hold")
        self._nodes.touch_all()
        yield note(f"paused_{self._core.state.lower()}")

    def _resume(self, _: m.OperatorCommand) -> Wants:
        core, incidents, space = self._core, self._incidents, self._space
        if not (core.paused or incidents.held or incidents.approval_wanted or space.wanted is not None):
            yield note("nothing_paused")
            return
        if space.wanted is not None and not core.paused:
            yield note("room_doubted")
            space.stop_waiting()
            yield cancel("backoff")
        if incidents.breaker_tripped:
            self._nodes.cordons.start_anew()
            yield note("breaker_reset")
        if incidents.held:
            self._guard.start_anew()
        if incidents.may_go_on and (incidents.held or not core.paused):
            core.pause = None
            self._nodes.touch_all()
            yield from self._guard.let_go_on("an operator resumed it")
            return
        core.pause = None
        incidents.end_hold()
        yield cancel("hold", "nodes", "gather")
        self._nodes.touch_all()
        if core.mode == "enforce" and not incidents.approval_wanted:
            yield from incidents.reevaluate()
        record = incidents.active
        if incidents.approval_wanted and record is not None and record.plan is not None:
            if core.mode != "enforce":
                plan = record.plan
                yield note("approval_awaited", about=record.id, plan=plan.kind, why=plan.why)
                yield from incidents.wait_for_operator()
            else:
                yield from incidents.carry_out()
        elif core.state == "RECOVERING" and record is not None:
            yield NextAttempt()  # a hold leaves the broken attempt as it is
        else:
            yield RefreshAndProceed()

    def _ends_by_itself(self) -> bool:
        """Its work is done: a restart would do it again, and a stop would call it incomplete."""
        attempt = self._attempts.current
        return attempt is not None and attempt.finishing and not attempt.over

    def _restart(self, _: m.OperatorCommand) -> Wants:
        core = self._core
        if self._ends_by_itself():
            yield _refuse("ends_by_itself")
        elif self._attempts.current is None or core.state == "IDLE":
            yield Proceed(by_operator=True)
            if core.state == "IDLE" and core.paused:
                yield note("first_attempt_waits", what=self.waiting)
            elif core.state == "IDLE":
                yield _refuse("nothing_runs_yet", what=self.waiting)
        else:
            self._incidents.restart_by_operator()
            self._attempts.count_restart()
            yield NextAttempt(by_operator=True)

    def _rollback(self, event: m.OperatorCommand) -> Wants:
        """Back to the checkpoint of a step, or (`--undo`) to before the last rollback.

        Without a step: to the one that the loss guard recommends, else to the one before the newest.
        """
        checkpoints, members = self._attempts.checkpoints, self._attempts.next_members()
        ways = checkpoints.ways_back(members)
        seen = [one for one in checkpoints.candidates(members) if one.step]
        newest = max((one.step or 0 for one in seen if one.complete), default=0)
        if not any((one.step or 0) < newest for one in ways):  # the newest may have been written a moment ago
            newest = max((one.step or 0 for one in seen), default=0)
        wanted, skip = _step_and_skip(event.argument)
        advice = self._guard.recommended if not wanted else None
        if advice is not None and advice.step is not None:
            wanted, skip = str(advice.step), advice.skip_batches if skip == 0 else skip
        chosen = next((one for one in ways if str(one.step) == wanted), None)
        if not wanted:
            chosen = next((one for one in ways if one.step is not None and one.step < newest), None)
        if self._ends_by_itself():
            yield _refuse("ends_by_itself")
        elif wanted == "--undo" and not checkpoints.moved_by_rollback:
            yield _refuse("no_rollback")
        elif wanted == "--undo":
            self._guard.overrule()
            yield from self._attempts.undo_rollback()
            yield from self._restart(event)
        elif not ways:
            yield _refuse("no_checkpoint")
        elif skip is None or (chosen is None and wanted):
            yield _refuse("no_such_step", step=wanted or event.argument, steps=tuple(one.step or 0 for one in ways))
        elif chosen is None:
            yield _refuse("one_checkpoint", checkpoint=ways[0].path)
        else:
            self._guard.start_anew()
            yield from self._attempts.roll_back(ResumeSituation(kind="operator", step=chosen.step), skip)
            yield from self._restart(event)

    def _stop(self, event: m.OperatorCommand) -> Wants:
        if self._ends_by_itself():
            yield _refuse("ends_by_itself")
            return
        yield from self._scheduler.take_back_requeue()
        yield from self._stop_job("SIGTERM", f"stopped by an operator{f': {event.reason}' if event.reason else ''}")

    def _cordon(self, event: m.OperatorCommand) -> Wants:
        name, _, gpu = event.argument.partition("/")
        if not name:
            yield _refuse("needs_a_node", command="cordon")
            return
        reason, by = event.reason or "an operator's command", event.by or "operator"
        if not self._scheduler.was_ever_ours(name):
            yield note("node_unknown", loud=True, unknown_node=True, node=name)
        cordon = Cordon(node=name, gpu=gpu, reason=reason, by=by, at=self._core.now)
        yield from self._scheduler.cordon(cordon)
        attempt = self._attempts.current
        if attempt is None or attempt.over or name not in attempt.member_set:
            return
        known, bad = self._nodes.get(name), self._nodes.bad_gpu(name)
        if self._core.spec.fewer_processes and gpu and bad is None and known is not None:
            why = known.gpus.problem or f"{gpu} is not one that its processes have, or not the only bad one"
            yield note("gpu_not_left_out", loud=True, node=name, why=why)
        if attempt.round is not None and bad is not None:
            n = len(bad.others)
            yield note("gpu_in_use", loud=True, node=name, gpu=bad.uuid, processes=n, of=n + 1)
        elif attempt.round is not None:
            yield note("node_in_use", loud=True, node=name)
        elif self._core.state == "STARTING":
            yield NextAttempt()
        else:
            yield RefreshAndProceed()

    def _swap(self, event: m.OperatorCommand) -> Wants:
        """`NODE`: at the next checkpoint; `NODE --now`: at once."""
        name, _, when = event.argument.partition(" ")
        if not name:
            yield _refuse("needs_a_node", command="swap")
            return
        now = when.strip() == "--now"
        yield from self._swaps.ordered(self._nodes.named(name), event.by, event.reason, now=now)

    def _uncordon(self, event: m.OperatorCommand) -> Wants:
        name, _, gpu = event.argument.partition("/")
        cordons, now = self._nodes.cordons, self._core.now
        if not name:
            yield _refuse("needs_a_node", command="uncordon")
            return
        if gpu and cordons.on(name, gpu) is None:
            other = cordons.of(name, now)
            where = _place(other) if other is not None else ""
            why = other.reason if other is not None else ""
            yield _refuse("gpu_not_cordoned", place=event.argument, where=where, why=why)
            return
        yield from self._scheduler.lift_cordon(name, gpu)
        self._swaps.forgive(name)
        yield from self._ledger.lifted(name, event.by or "operator", event.reason)
        left = cordons.of(name, now)
        if left is not None:
            for_all = cordons.is_of_cluster(left)
            yield note("still_left_out", node=name, place=_place(left), reason=left.reason, cluster=for_all)
        self._nodes.touch_all()
        yield RefreshAndProceed()

    def _mode(self, event: m.OperatorCommand) -> Wants:
        core, incidents = self._core, self._incidents
        if event.argument not in get_args(Mode):
            yield _refuse("mode_unknown", mode=event.argument)
            return
        core.mode = event.argument  # type: ignore[assignment]
        self._nodes.touch_all()
        record = incidents.active
        if core.mode == "enforce":
            if incidents.hung is not None or "again" in core.timers:
                yield Timer("again", core.now)  # a hang that was only watched
            if not incidents.approval_wanted:
                yield from incidents.reevaluate()
            elif not core.paused and record is not None and record.plan is not None:
                yield from incidents.carry_out()
        elif core.state == "RECOVERING":
            if incidents.approval_wanted:
                yield note("plan_needs_approval")
            elif not incidents.held:
                yield note("restart_completes")

    def _waiting_plan(self, event: m.OperatorCommand) -> WantsAnd[IncidentRecord | None]:
        """The incident whose plan the command is about; a command that names another is refused."""
        record = self._incidents.active
        if not self._incidents.approval_wanted or record is None or record.plan is None:
            yield _refuse("nothing_waits_for_approval", what=self.waiting)
            return None
        named, _, version = event.argument.partition("@")
        if named and record.id not in (named, f"i-{named}"):
            yield _refuse("other_incident_waits", named=event.argument, waits=record.id, why=record.plan.why)
            return None
        if version and f"{record.id}@{version}" != self._incidents.approves:
            yield _refuse("plan_changed", about=record.id, why=record.plan.why, now=self._incidents.approves)
            return None
        return record

    def _swap_meant(self, event: m.OperatorCommand) -> str:
        """The node whose proposed swap is approved or rejected: it is named, or nothing else waits for a word."""
        if event.argument:
            return self._swaps.recommended(self._nodes.named(event.argument))
        return "" if self._incidents.approval_wanted else self._swaps.recommended()

    def _approve(self, event: m.OperatorCommand) -> Wants:
        if event.argument.startswith(RULE_PREFIX):
            return  # that it was decided is on record; the rule is in a file of the job folder
        if name := self._swap_meant(event):
            yield from self._swaps.approve(name, event.by)
            return
        if (yield from self._waiting_plan(event)) is not None:
            yield from self._incidents.carry_out(by_operator=True)

    def _reject(self, event: m.OperatorCommand) -> Wants:
        if event.argument.startswith(RULE_PREFIX):
            return
        if name := self._swap_meant(event):
            yield from self._swaps.reject(name)
            return
        if (yield from self._waiting_plan(event)) is not None:
            why = f"the plan was rejected{f': {event.reason}' if event.reason else ''}"
            if self._incidents.may_go_on:
                yield from self._guard.let_go_on(why)
            else:
                yield from self._incidents.reject_plan(why)


def _step_and_skip(argument: str) -> tuple[str, int | None]:
    """`1000 --skip 50`, each part of which may be missing; None: the number is none, or too large."""
    words = argument.split()
    if "--skip" not in words:
        return argument, 0
    at = words.index("--skip")
    number = " ".join(words[at + 1 :])
    whole = number.isascii() and number.isdigit() and int(number) <= MOST_SKIPPED
    return " ".join(words[:at]), int(number) if whole else None


def _refuse(kind: str, **arguments: Any) -> m.Note:
    return note(kind, refused=True, **arguments)


def _place(cordon: Cordon) -> str:
    return f"{cordon.node}/{cordon.gpu}" if cordon.gpu else cordon.node
