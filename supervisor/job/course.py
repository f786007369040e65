"""How an attempt goes, from rendezvous to its end: the layer of `Job` above `oversight`."""

from __future__ import annotations

from diagnosis import exits
from recovery.actions import Checkpoint
from supervisor import messages as m
from supervisor.job.attempt import Attempt
from supervisor.job.casebook import Case
from supervisor.job.casework import CRASH_BUDGET_S, EVIDENCE_NODES, Conclude
from supervisor.job.damage import Damage
from supervisor.job.lifecycle import Choose

STAND_S = 1.0
"""Workers that all stood this long are running, whether or not progress can be seen."""
SETTLE_S = 600.0
"""An incident closes after this even if no progress can be seen in the new attempt."""
FINISH_LIMIT_S = 60.0
"""Launchers get this long to end after every rank ended well."""
BEGAN_AGAIN = 0.5
"""A first step below this part of the step resumed from means that the script began again from nothing."""


class Course(Damage):
    """Launchers, workers, steps, ends."""

    def __init__(self, choose: Choose, conclude: Conclude) -> None:
        super().__init__(choose, conclude)
        self._began_at: int | None = None
        """The first step of the first attempt."""
        self._may_begin_again = False
        """An operator knows that the script begins anew."""
        self._step_when_saved: dict[str, int] = {}
        """Checkpoints that do not tell their step: the run's step when they appeared."""

    def _launcher_ready(self, event: m.LauncherReady) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is not None or event.node not in attempt.members:
            return
        attempt.offers[event.node] = event.offer
        if attempt.prepare_error.startswith(f"{event.node} could not prepare "):
            attempt.prepare_error = ""  # a later try succeeded
        for case in self.casebook.unclosed():
            if case.next_attempt is not None:
                case.mark("stop", self.now)
        self._form_round()

    def _preparation_failed(self, event: m.PreparationFailed) -> None:
        attempt = self.attempt
        if attempt is None or attempt.over or attempt.round is not None or event.attempt > attempt.number:
            return
        attempt.prepare_error = f"{event.node} could not prepare attempt {event.attempt}: {event.error}"
        if self.state == "STARTING":
            self._setup_fault(attempt.prepare_error)

    def _begin_attempt(self, attempt: Attempt) -> None:
        super()._begin_attempt(attempt)
        if attempt.prepare_error:
            self._setup_fault(attempt.prepare_error)

    def _workers_started(self, event: m.WorkersStarted) -> None:
        if self._adopted(event):
            return
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None or event.node not in attempt.offers:
            return
        attempt.note_workers(event.node, event.ranks)
        self._ranks_ran, self._launcher_failures = True, 0
        if attempt.stood_at is None and attempt.all_stand:
            attempt.stood_at = self.now
            self._mark_restarted("start")
            self._cancel("start")
            if self.state == "STARTING":
                self._set_timer("stood", self.now + STAND_S)

    def _mark_restarted(self, phase: str) -> None:
        for case in self.casebook.unclosed():
            if case.next_attempt is not None:
                case.mark(phase, self.now)

    def _run(self) -> None:
        if self.state != "STARTING":
            return
        self._enter("RUNNING")
        self._cancel("stood", "start")
        assert self.attempt is not None
        self._note(f"attempt {self.attempt.number} runs")
        self._set_timer("settle", self.now + SETTLE_S)

    def _progress(self, event: m.Progressed) -> None:
        attempt = self._current(event.attempt)
        if attempt is None or attempt.round is None:
            return
        attempt.moved_at = self.now if attempt.moved_at is None else attempt.moved_at
        self.first_moved_at = self.now if self.first_moved_at is None else self.first_moved_at
        self._run()
        attempt.note_step(event.step, event.last_step, self.now if event.step_at is None else event.step_at)
        if event.step is not None:
            self.first_step_at = self.now if self.first_step_at is None else self.first_step_at
            if not attempt.compared:
                self._compare(attempt, event.step)
            if not attempt.over:
                self._reached(event.step)

    def _reached(self, step: int | None) -> None:
        """Further than ever is progress."""
        if step is not None and (self.furthest is None or step > self.furthest):
            self.furthest = step
            self._progressed()

    def _saved(self, seen: tuple[Checkpoint, ...]) -> None:
        """Where no step is shown, a checkpoint of a higher step than ever is progress. One of a step that was made
        before, which a script saves anew when it has resumed, is none."""
        attempt = self.attempt
        if attempt is None or attempt.over or attempt.stood_at is None:
            return
        ours = (one for one in seen if one.complete and one.modified_at >= attempt.stood_at)
        step = max((one.step for one in ours if one.step is not None), default=None)
        if step is None:
            return
        known = [one for one in (self.furthest_saved, self.furthest, attempt.resume.step) if one is not None]
        further = all(step > one for one in known)
        self.furthest_saved = max(step, self.furthest_saved or 0)
        if further and attempt.step is None:
            self._progressed()
            self._recovered(attempt, f"attempt {attempt.number} saved a checkpoint of step {step}")

    def _compare(self, attempt: Attempt, step: int) -> None:
        """Did the script go on where it should? Until that is clear its first step is not believed."""
        if attempt.number == 1:
            self._began_at = step
        expected = self._expected_step(attempt) if attempt.number > 1 else None
        early = expected is not None and step + 2 < expected
        may_stop = self.mode == "enforce" and not self.paused and not self._may_begin_again
        first = step if attempt.first_step is None else min(step, attempt.first_step)
        if expected is not None and early and first < expected * BEGAN_AGAIN and may_stop:
            if step > first:
                self._began_again(attempt, first, expected)
            return  # a single low number: a progress bar is drawn from 0 before it jumps to where the run is
        attempt.compared = True
        if early:
            self._note(f"the run goes on at step {step}, before the checkpoint of step {expected}", loud=True)
        elif expected is not None and attempt.first_step is not None and attempt.first_step < expected - 2:
            attempt.first_step, attempt.first_at = step, self.now
        self._recovered(attempt, f"attempt {attempt.number} reached step {step}")

    def _expected_step(self, attempt: Attempt) -> int | None:
        """The step of the checkpoint that the attempt should have started from; None: unknown, or no measure."""
        path = attempt.resume.path
        found = next((c for c in self.candidates() if c.path == path), None)
        if not path or found is None or self.started_at is None:
            return None
        step = attempt.resume.step if attempt.resume.step is not None else self._step_when_saved.get(path)
        ours = found.modified_at >= self.started_at
        # An older one counts only if the first attempt started from it: else the user means to begin anew.
        if step is None or not (ours or (self._began_at is not None and self._began_at + 2 >= step)):
            return None
        if self.furthest is None or step > self.furthest + max(2, self.furthest // 10):
            return None  # no attempt ever showed such a number: the checkpoint counts something else (samples, tokens)
        return step

    def _began_again(self, attempt: Attempt, step: int, expected: int) -> None:
        """Stop it before it overwrites a good checkpoint."""
        self._note(
            f"attempt {attempt.number} began again at step {step}, although {attempt.resume.path} holds "
            f"step {expected}: stopped before that is overwritten. Tell the script how to resume (`--restart-args`)",
            loud=True,
        )
        self._enter("RECOVERING")
        self._form(self._members())
        self._may_begin_again = True  # whoever lets it go on has read this
        self._hold(f"the script does not resume from its checkpoint (it began at step {step} instead of {expected})")

    def _recovered(self, attempt: Attempt, how: str) -> None:
        for case in self.casebook.unclosed():
            if case.next_attempt is None:
                continue
            began = attempt.moved_at if attempt.step is None else attempt.first_at
            further_s = self._count_redone(case, attempt)
            case.mark("first_step", (self.now if began is None else began) - further_s)
            self._close(case, how)
            if case.trigger != "signal":
                self._note(self._recovery_told(case, attempt), incident=case.id, loud=True)

    def _recovery_told(self, case: Case, attempt: Attempt) -> str:
        """`recovered at step 203 in 2.1 s, 3 steps lost (i-2: rank 1 was killed); resumed from /ckpt/step_200.pt`."""
        first, broke, resume = attempt.first_step, self._broke, attempt.resume
        known = resume.step is not None and first is not None and resume.step < first
        at = "" if first is None else f" at step {attempt.done_before + 1 if known else first}"
        lost = ""
        if first is not None and broke is not None and broke.step is not None:
            lost = f", {case.redo_steps or 'no'} {'step' if case.redo_steps <= 1 else 'steps'} lost"
        took_s = sum(case.seconds().values())
        told = f"recovered{at} in {took_s:.{1 if took_s < 100 else 0}f} s{lost} ({case.id}: {case.what})"
        if not resume.path:
            return f"{told}; resumed from what the script finds itself"
        if first is None or resume.step is None:
            return f"{told}; the script was offered {resume.path}"
        return f"{told}; {'resumed from' if first > resume.step else 'it did not resume from'} {resume.path}"

    def _count_redone(self, case: Case, attempt: Attempt) -> float:
        """From when the first step of `attempt` was first made to the failure: that training is done again.

        The attempt that broke may have been followed by others that made no step. Seconds of new training where the
        first step that is seen is further than that one ever came.
        """
        broke, first = self._broke, attempt.first_step
        if broke is None or broke.step is None or first is None:
            return 0.0
        case.redo_steps = max(0, broke.step - attempt.done_before)
        made_at, broke_at = broke.reached_at(first), broke.broke_at
        if made_at is None:
            return 0.0
        lost_s = (case.failed_at if broke_at is None else broke_at) - max(made_at, self.started_at or 0.0)
        case.redo_s = max(0.0, lost_s)
        return max(0.0, -lost_s)

    def _rank_ended(self, event: m.RankEnded) -> None:
        attempt = self._current(event.attempt)
        record = event.exit
        if self.is_over and self.attempt is not None and self.attempt.number == event.attempt:
            self.attempt.note_step(event.step, event.last_step, self.now)  # done while it was being stopped
        if attempt is None or attempt.round is None or record.rank in attempt.exits or record.stopped_by_us:
            return
        attempt.exits[record.rank] = record
        attempt.note_step(event.step, event.last_step, self.now)
        self._reached(event.step)
        if record.code == 0:
            self._ended_well(attempt)
            return
        first = self.state in ("STARTING", "RUNNING")
        case = self._fault("exit", f"rank {record.rank} on {event.node} {exits.describe(record)}", record.ended_at)
        if case is None or self.state != "DIAGNOSING":
            return
        if (event.node, 0) not in attempt.evidence and len(case.awaiting) < 2 * EVIDENCE_NODES:
            case.awaiting.add((event.node, 0))
        if first:
            self._gather(case, [n for n in self._witnesses() if n != event.node], CRASH_BUDGET_S)
        elif "evidence" not in self.timers:
            self._conclude_when_ready()

    def _ended_well(self, attempt: Attempt) -> None:
        if attempt.adopted and len(attempt.members) < self.spec.nodes_min:
            return  # not all of its nodes have told of it yet
        if not attempt.ended_well or self.state not in ("STARTING", "RUNNING", "DIAGNOSING", "RECOVERING"):
            return
        if self.state == "STARTING":
            self._run()
        if self._case is not None:
            self._go_on(self._case, "false alarm: every rank ended well")
        attempt.finishing = True
        self._cancel("again", "stacks", "silence")
        self._recovered(attempt, "every rank ended well")
        for case in self.casebook.unclosed():
            self._close(case, "every rank ended well")
        self._note("every rank ended with code 0")
        self._set_timer("finish", self.now + FINISH_LIMIT_S)
        self._touch_all()
        self._finished(attempt)

    def _finished(self, attempt: Attempt, late: bool = False) -> None:
        waiting = [
            name
            for name in attempt.members
            if name not in attempt.launchers_ended and (node := self.roster.get(name)) and node.standing
        ]
        if late or not waiting:
            self._end(m.Outcome(state="succeeded", exit_code=0, line="the run is complete"), "the run is complete")

    def _launcher_ended(self, event: m.LauncherEnded) -> None:
        attempt = self.attempt
        if attempt is None or attempt.over or event.node not in attempt.members:
            return
        if attempt.round is None or event.attempt < attempt.number:
            # It may be the one of the attempt before; only one that is known to have ended just now counts.
            if event.fresh and self.state == "STARTING" and event.attempt <= attempt.number:
                self._launcher_ended_early(attempt, event)
            return
        if event.attempt > attempt.number or event.node in attempt.launchers_ended:
            return
        if attempt.finishing:
            attempt.launchers_ended[event.node] = event.how
            self._finished(attempt)
            return
        self._launcher_fault(attempt, event)

    def _launcher_ended_early(self, attempt: Attempt, event: m.LauncherEnded) -> None:
        """Before it joined. The first end may be that of the attempt before: agents start another, with a new store."""
        first_of_round = attempt.round is not None and event.node == attempt.members[0]
        if attempt.number == 1 or event.node in attempt.early_ends or first_of_round:
            self._launcher_fault(attempt, event)
        elif attempt.round is None:
            attempt.offers.pop(event.node, None)
        attempt.early_ends.add(event.node)

    def _launcher_fault(self, attempt: Attempt, event: m.LauncherEnded) -> None:
        attempt.launchers_ended[event.node] = event.how
        by_itself = event.code is not None and not attempt.ranks and not attempt.exits
        self._launcher_failures += by_itself
        # What it has to say stands on the terminal already.
        quiet = by_itself and self._would_fail_again
        case = self._fault("launcher", f"the launcher on {event.node} ended ({event.how})", self.now, quiet=quiet)
        if case is not None:
            case.launcher_exits[event.node] = event.how
            case.before_ranks = not attempt.ranks and not attempt.exits
            if case.launcher_code is None:
                case.launcher_code = event.code
            self._look_into(case)

    def _look_into(self, case: Case) -> None:
        """Ask everybody, unless they have been asked, or nothing has run yet that could tell."""
        if self.state != "DIAGNOSING":
            return
        if "evidence" in self.timers or self.attempt is None or self.attempt.round is None:
            self._conclude_when_ready()
        else:
            self._gather(case, self._witnesses(), CRASH_BUDGET_S)

    def _setup_fault(self, what: str) -> None:
        case = self._fault("setup", what, self.now)
        if case is not None:
            self._look_into(case)

    def _stood_due(self) -> None:
        self._run()

    def _settle_due(self) -> None:
        if self.attempt is not None and not self.attempt.over:
            self._recovered(self.attempt, f"attempt {self.attempt.number} has run for {SETTLE_S:.0f} s")

    def _finish_due(self) -> None:
        if self.attempt is not None and self.attempt.finishing:
            self._note("launchers do not end although every rank did: they are ended")
            self._finished(self.attempt, late=True)

    def _form_due(self) -> None:
        assert self.attempt is not None
        absent = [name for name in self.attempt.members if name not in self.attempt.offers]
        self._setup_fault(f"no launcher came to rendezvous on {', '.join(absent[:8])}")

    def _start_due(self) -> None:
        assert self.attempt is not None
        absent = [n for n in self.attempt.members if len(self.attempt.ranks.get(n, ())) == 0]
        self._setup_fault(f"workers did not start on {', '.join(absent[:8]) or 'some nodes'}")
