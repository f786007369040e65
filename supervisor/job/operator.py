"""What operators command, what happens when a run is to be stopped, and what the job waits for.

Operators win: what they command is done even while the job is paused, and policy never undoes it. A run that is stopped
on request ends with 130 (SIGINT) or 143 (SIGTERM and `unbroken stop`): it is not complete, so it is never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from diagnosis.incident import RULE_PREFIX
from recovery.cordon import Cordon
from recovery.policy import Mode
from supervisor import messages as m
from supervisor.job import wants as w
from supervisor.job.attempts import Attempts, Space
from supervisor.job.core import Core
from supervisor.job.incidents import IncidentRecord, Incidents
from supervisor.job.nodes import Nodes
from supervisor.job.scheduler import SchedulerRequests
from supervisor.job.wants import Wants, WantsAnd
from supervisor.notes import note
from supervisor.view import utc

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
    ) -> None:
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self._incidents, self._scheduler, self._space = incidents, scheduler, space
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
            return "`unbroken resume`" if core.paused else f"`unbroken approve` or `reject`{until}"
        if core.state in ("IDLE", "RECOVERING"):
            return self._waiting_to_start()
        return "evidence" if core.state == "DIAGNOSING" else ""

    def _waiting_to_start(self) -> str:
        core, scheduler = self._core, self._scheduler
        if core.paused and not self._attempts.by_operator:
            return "`unbroken resume`"
        if scheduler.wants_requeue:
            return f"{core.spec.scheduler}, to start the job again"
        if "backoff" in core.timers:
            return "the back-off"
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
        return f"{told}; the job ends at {utc(at):%Y-%m-%d %H:%M} UTC unless `unbroken {what}`)"

    # ----- stops -----

    def stop_requested(self, event: m.StopRequested) -> Wants:
        """Ctrl-C, or a signal of the scheduler."""
        if self._core.is_over or self._attempts.is_finishing:
            return
        if self._scheduler.is_requeuing and event.signal != "SIGINT":
            yield w.EndRequeued()  # the scheduler's way to begin it
            return
        yield w.StopJob(event.signal, f"stopped by {event.signal} on {event.node}{self._scheduler.near_limit()}")
        if event.signal == "SIGTERM":
            yield w.LookWhetherAgain()

    # ----- commands -----

    def given(self, event: m.OperatorCommand) -> Wants:
        core, attempts = self._core, self._attempts
        if core.is_over and not event.argument.startswith(RULE_PREFIX):
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
            yield w.Pause(event)

    def _resume(self, _: m.OperatorCommand) -> Wants:
        core, incidents, space = self._core, self._incidents, self._space
        if not (core.paused or incidents.held or incidents.approval_wanted or space.wanted is not None):
            yield note("nothing_paused")
            return
        if space.wanted is not None and not core.paused:
            yield note("room_doubted")
            yield w.EndWaitForSpace()
            yield w.cancel("backoff")
        if incidents.breaker_tripped:
            yield w.StartBreakerAnew()
            yield note("breaker_reset")
        yield w.ResumeJob()
        yield w.cancel("hold", "nodes", "gather")
        yield w.ReassignAll()
        if core.mode == "enforce" and not incidents.approval_wanted:
            yield w.Reevaluate()
        record = incidents.active
        if incidents.approval_wanted and record is not None and record.plan is not None:
            if core.mode != "enforce":
                plan = record.plan
                yield note("approval_awaited", about=record.id, plan=plan.kind, why=plan.why)
                yield w.WaitForOperator()
            else:
                yield w.CarryOut()
        elif core.state == "RECOVERING" and record is not None:
            yield w.NextAttempt()  # a hold leaves the broken attempt as it is
        else:
            yield w.RefreshAndProceed()

    def _ends_by_itself(self) -> bool:
        """Its work is done: a restart would do it again, and a stop would call it incomplete."""
        attempt = self._attempts.current
        return attempt is not None and attempt.finishing and not attempt.over

    def _restart(self, _: m.OperatorCommand) -> Wants:
        core = self._core
        if self._ends_by_itself():
            yield _refuse("ends_by_itself")
        elif self._attempts.current is None or core.state == "IDLE":
            yield w.Proceed(by_operator=True)
            if core.state == "IDLE" and core.paused:
                yield note("first_attempt_waits", what=self.waiting)
            elif core.state == "IDLE":
                yield _refuse("nothing_runs_yet", what=self.waiting)
        else:
            yield w.RestartByOperator()
            yield w.CountRestart()
            yield w.NextAttempt(by_operator=True)

    def _stop(self, event: m.OperatorCommand) -> Wants:
        if self._ends_by_itself():
            yield _refuse("ends_by_itself")
            return
        yield w.TakeBackRequeue()
        yield w.StopJob("SIGTERM", f"stopped by an operator{f': {event.reason}' if event.reason else ''}")

    def _cordon(self, event: m.OperatorCommand) -> Wants:
        name, _, gpu = event.argument.partition("/")
        if not name:
            yield _refuse("needs_a_node", command="cordon")
            return
        reason, by = event.reason or "an operator's order", event.by or "operator"
        if not self._scheduler.was_ever_ours(name):
            yield note("node_unknown", loud=True, unknown_node=True, node=name)
        yield w.AddCordon(Cordon(node=name, gpu=gpu, reason=reason, by=by, at=self._core.now))
        attempt = self._attempts.current
        if attempt is None or attempt.over or name not in attempt.member_set:
            return
        if attempt.round is not None:
            yield note("node_in_use", loud=True, node=name)
        elif self._core.state == "STARTING":
            yield w.NextAttempt()
        else:
            yield w.RefreshAndProceed()

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
        yield w.LiftCordon(name, gpu)
        left = cordons.of(name, now)
        if left is not None:
            yield note("still_left_out", node=name, place=_place(left), reason=left.reason)
        yield w.ReassignAll()
        yield w.RefreshAndProceed()

    def _mode(self, event: m.OperatorCommand) -> Wants:
        core, incidents = self._core, self._incidents
        if event.argument not in get_args(Mode):
            yield _refuse("mode_unknown", mode=event.argument)
            return
        yield w.SetMode(event.argument)  # type: ignore[arg-type]
        yield w.ReassignAll()
        record = incidents.active
        if core.mode == "enforce":
            if incidents.hung is not None or "again" in core.timers:
                yield w.Timer("again", core.now)  # a hang that was only watched
            if not incidents.approval_wanted:
                yield w.Reevaluate()
            elif not core.paused and record is not None and record.plan is not None:
                yield w.CarryOut()
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
        named = event.argument if event.argument.startswith("i-") else f"i-{event.argument}"
        if event.argument and named != record.id:
            yield _refuse("other_incident_waits", named=event.argument, waits=record.id, why=record.plan.why)
            return None
        return record

    def _approve(self, event: m.OperatorCommand) -> Wants:
        if event.argument.startswith(RULE_PREFIX):
            return  # that it was decided is on record; the rule is in a file of the job folder
        if (yield from self._waiting_plan(event)) is not None:
            yield w.CarryOut(by_operator=True)

    def _reject(self, event: m.OperatorCommand) -> Wants:
        if event.argument.startswith(RULE_PREFIX):
            return
        if (yield from self._waiting_plan(event)) is not None:
            yield w.RejectPlan(f"the plan was rejected{f': {event.reason}' if event.reason else ''}")


def _refuse(kind: str, **arguments: Any) -> m.Note:
    return note(kind, refused=True, **arguments)


def _place(cordon: Cordon) -> str:
    return f"{cordon.node}/{cordon.gpu}" if cordon.gpu else cordon.node
