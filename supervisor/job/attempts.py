"""The attempts of a job, one after the other: forming, starting, running, finishing.

The way to a new attempt: `form` (who takes part, from which checkpoint), `start_next` (are there enough nodes?),
`_begin` (nodes are told), `launcher_ready` for each node, `_form_round` (all launchers wait in rendezvous: let them
go), `workers_started` for each node, and `_run` with the first progress.
"""

from __future__ import annotations

from diagnosis import exits
from diagnosis.signals import NodeEvidence
from recovery.actions import Checkpoint, Preparation, Resume
from supervisor import messages as m
from supervisor.job import wants as w
from supervisor.job.attempt import Attempt
from supervisor.job.checkpoints import Checkpoints
from supervisor.job.core import Core
from supervisor.job.nodes import Nodes
from supervisor.job.wants import Wants
from supervisor.notes import note

FORM_LIMIT_S = 600.0
"""All launchers must have come to rendezvous, preparations done, within this."""
START_LIMIT_S = 120.0
"""All workers must have started within this after the round was formed."""
STAND_S = 1.0
"""Workers that have all lived this long are running, whether or not progress can be seen."""
SETTLE_S = 600.0
"""An incident closes after this even if no progress can be seen in the new attempt."""
FINISH_LIMIT_S = 60.0
"""Launchers get this long to end after every rank ended well."""
BEGAN_AGAIN = 0.5
"""A first step below this part of the step resumed from means that the script began again from nothing."""


class Attempts:
    def __init__(self, core: Core, nodes: Nodes, checkpoints: Checkpoints) -> None:
        self._core, self._nodes, self.checkpoints = core, nodes, checkpoints
        self.current: Attempt | None = None
        self.last_with_steps: Attempt | None = None
        """The newest attempt before this one that made steps."""
        self.restarts = 0
        self.ordered = False
        """An operator asked for the next attempt: a pause does not keep it back."""
        self.would_begin_again = False
        """An operator has let the script begin from nothing."""
        self.numbers_from = 0
        """Attempts up to this number have been, as far as is known: the journal may have lost some."""
        self.started_at: float | None = None
        """When the first attempt was given out."""
        self.first_progress_at: float | None = None
        self.first_step_at: float | None = None
        self.furthest: int | None = None
        """The highest step that any attempt reached."""
        self._furthest_saved: int | None = None
        """The highest step of a checkpoint that an attempt wrote which shows no steps."""
        self._first_step_of_job: int | None = None
        """The first step of the first attempt."""
        self._places: tuple[str, ...] = ()
        """The members of the last attempt whose workers ran, in the order of their ranks."""
        self._gather_until = 0.0
        """Before this it starts only with all nodes."""
        self._last_started = 0
        """The number of the newest attempt whose round was formed."""
        self._ranks_ran = False
        """Any attempt had ranks."""
        self._launcher_failures = 0
        """Launchers that ended by themselves since ranks were started last."""

    # ----- queries -----

    def live(self, number: int) -> Attempt | None:
        """The current attempt, if this is its number and it is not over."""
        attempt = self.current
        return attempt if attempt is not None and attempt.number == number and not attempt.over else None

    @property
    def trains_since(self) -> float | None:
        """When training began: the first step, or where steps are not shown the first sign of life."""
        return self.first_step_at if self.first_step_at is not None else self.first_progress_at

    def cannot_go_on(self, attempt: Attempt) -> bool:
        """A rank or launcher of it ended badly, or a member is lost."""
        return attempt.is_broken or any(not n.present for name in attempt.members if (n := self._nodes.get(name)))

    @property
    def would_fail_again(self) -> bool:
        """Launchers end by themselves before they start a rank: at the first start, or for the second time."""
        return self._launcher_failures > (1 if self._ranks_ran else 0)

    @property
    def is_finishing(self) -> bool:
        return self.current is not None and self.current.finishing

    def next_members(self) -> tuple[str, ...]:
        return self._nodes.choose(self._places, self._core.spec.nodes_max)

    # ----- forming -----

    def form(self, members: tuple[str, ...]) -> Wants:
        """A new attempt: from now on no worker of an older one may live."""
        old = self.current
        number = 1 + max(self.numbers_from, old.number if old is not None else 0)
        if old is not None:
            old.over = True
            if old.step is not None:
                self.last_with_steps = old
        resume, prepare = yield from self._resume(members)
        self.current = Attempt(
            number=number,
            members=members,
            formed_at=self._core.now,
            resume=resume,
            prepare=prepare,
            preparer=members[0] if members and prepare else "",
        )

    def _resume(self, members: tuple[str, ...]) -> w.WantsAnd[tuple[Resume, tuple[Preparation, ...]]]:
        try:
            return self.checkpoints.choose(members)
        except Exception as error:  # which checkpoint to use must never decide whether the run comes back at all
            yield note("resume_unknown", why=str(error))
            return Resume(), ()

    def refresh(self, _: w.Refresh) -> Wants:
        """Checkpoints or members changed while an attempt is being formed: bring it up to date.

        Preparations are done once for each attempt number, so other preparations, or another node to do them, make
        a new attempt.
        """
        attempt, core = self.current, self._core
        if attempt is None or attempt.round is not None or core.is_over:
            return
        members = self.next_members() if core.state == "RECOVERING" else attempt.members
        resume, prepare = yield from self._resume(members)
        if not attempt.preparer and members and prepare:
            attempt.preparer = members[0]
        if prepare != attempt.prepare or (attempt.preparer and attempt.preparer not in members):
            yield w.Form(members)
            if core.state == "STARTING":
                yield w.Timer("form", core.now + FORM_LIMIT_S)
        elif members != attempt.members or resume != attempt.resume:
            changed = attempt.member_set.symmetric_difference(members) | {*attempt.members[:1], *members[:1]}
            same = resume == attempt.resume
            attempt.members, attempt.resume = members, resume
            attempt.offers = {name: offer for name, offer in attempt.offers.items() if name in attempt.member_set}
            yield w.ReassignMembers(tuple(changed)) if same else w.ReassignAll()

    def start_next(self) -> Wants:
        """Start the next attempt if there are enough nodes; else see that something will happen in time."""
        core = self._core
        wanted = core.spec.nodes_max
        if "nodes" in core.timers and len(self._nodes) < wanted and core.now < self._gather_until:
            return
        members = self.next_members()
        # A spare that happens to come first does not take the place of a node that is on its way.
        early = core.state == "IDLE" and any((node := self._nodes.get(name)) and node.spare for name in members)
        if early or len(members) < wanted:
            enough = yield from self._gathered(len(members))
            if not enough:
                yield w.ShortOfNodes(len(members))
                return
        yield w.cancel("gather", "nodes", "hold")
        if self.current is None or self.current.over:
            yield w.Form(members)
        else:
            yield w.Refresh()
        assert self.current is not None
        yield from self._begin(self.current)

    def _gathered(self, found: int) -> w.WantsAnd[bool]:
        """Whether to go on with what there is: fewer than `nodes_max` nodes, or spares among them."""
        core, spec = self._core, self._core.spec
        if "nodes" not in core.timers:
            yield w.Timer("nodes", core.now + spec.wait_for_nodes_s)
            if found or self.current is not None:
                yield note("nodes_awaited", found=found, wanted=spec.nodes_max)
        deadline = core.timers["nodes"]
        may_be_fewer = core.state == "IDLE" or spec.nodes_min < spec.nodes_max
        self._gather_until = deadline - spec.wait_for_nodes_s + spec.gather_s if may_be_fewer else deadline
        if core.now < self._gather_until:
            if may_be_fewer:
                yield w.Timer("gather", self._gather_until)
            return False
        return found >= max(1, spec.nodes_min)

    # ----- starting -----

    def _begin(self, attempt: Attempt) -> Wants:
        now = self._core.now
        yield w.AttemptBegins(attempt.number)
        yield w.Enter("STARTING")
        self.ordered = False
        self.started_at = now if self.started_at is None else self.started_at
        yield w.Timer("form", now + FORM_LIMIT_S)
        yield w.ReassignAll()
        yield from self._form_round()
        if attempt.prepare_error:
            yield w.OpenIncident("setup", attempt.prepare_error, now)

    def launcher_ready(self, event: m.LauncherReady) -> Wants:
        """A launcher waits in rendezvous."""
        attempt = self.live(event.attempt)
        if attempt is None or attempt.round is not None or event.node not in attempt.member_set:
            return
        attempt.offers[event.node] = event.offer
        if attempt.prepare_error.startswith(f"{event.node} could not prepare "):
            attempt.prepare_error = ""  # a later try succeeded
        yield w.Mark("stop")
        yield from self._form_round()

    def _form_round(self) -> Wants:
        """All launchers wait in rendezvous: let them go."""
        attempt, now = self.current, self._core.now
        if attempt is None or self._core.state != "STARTING" or attempt.round is not None or not attempt.all_offered:
            return
        attempt.world_size = sum(offer.local_world_size for offer in attempt.offers.values())
        offer = attempt.offers[attempt.members[0]]
        attempt.round = m.Round(
            attempt=attempt.number, nodes=attempt.members, store_host=offer.host, store_port=offer.port
        )
        self._places = attempt.members
        last_good, first = self.checkpoints.last_good, self._last_started + 1
        moved = {step.path for step in attempt.prepare}
        gone = last_good if attempt.number > 1 and not attempt.resume.path and last_good not in moved else ""
        yield note(
            "attempt_starts",
            loud=bool(gone),
            attempt=attempt.number,
            count=len(attempt.members),
            nodes=attempt.members,
            checkpoint=attempt.resume.path,
            no_checkpoint=attempt.number > 1 and not attempt.resume.path,
            gone=gone,
            given_up=first if first == attempt.number - 1 else None,
            given_up_from=first if first < attempt.number - 1 else None,
            given_up_to=attempt.number - 1,
        )
        self._last_started = attempt.number
        yield w.Mark("rendezvous")
        yield w.cancel("form")
        yield w.Timer("start", now + START_LIMIT_S)
        yield w.ReassignAll()

    def preparation_failed(self, event: m.PreparationFailed) -> Wants:
        attempt = self.current
        if attempt is None or attempt.over or attempt.round is not None or event.attempt > attempt.number:
            return
        attempt.prepare_error = f"{event.node} could not prepare attempt {event.attempt}: {event.error}"
        if self._core.state == "STARTING":
            yield w.OpenIncident("setup", attempt.prepare_error, self._core.now)

    def form_due(self) -> Wants:
        assert self.current is not None
        absent = [name for name in self.current.members if name not in self.current.offers]
        text = f"no launcher came to rendezvous on {', '.join(absent[:8])}"
        yield w.OpenIncident("setup", text, self._core.now)

    def workers_started(self, event: m.WorkersStarted) -> Wants:
        attempt, now = self.live(event.attempt), self._core.now
        if attempt is None or attempt.round is None or event.node not in attempt.offers:
            return
        attempt.add_workers(event.node, event.ranks)
        self._ranks_ran, self._launcher_failures = True, 0
        if attempt.workers_started_at is None and attempt.all_started:
            attempt.workers_started_at = now
            yield w.Mark("start")
            yield w.cancel("start")
            if self._core.state == "STARTING":
                yield w.Timer("stood", now + STAND_S)

    def start_due(self) -> Wants:
        assert self.current is not None
        absent = [name for name in self.current.members if len(self.current.ranks.get(name, ())) == 0]
        text = f"workers did not start on {', '.join(absent[:8]) or 'some nodes'}"
        yield w.OpenIncident("setup", text, self._core.now)

    # ----- running -----

    def stood_due(self) -> Wants:
        yield from self._run()

    def _run(self) -> Wants:
        if self._core.state != "STARTING":
            return
        yield w.Enter("RUNNING")
        yield w.cancel("stood", "start")
        assert self.current is not None
        yield note("attempt_runs", attempt=self.current.number)
        yield w.Timer("settle", self._core.now + SETTLE_S)

    def progressed(self, event: m.Progressed) -> Wants:
        attempt, now = self.live(event.attempt), self._core.now
        if attempt is None or attempt.round is None:
            return
        attempt.progress_seen_at = now if attempt.progress_seen_at is None else attempt.progress_seen_at
        self.first_progress_at = now if self.first_progress_at is None else self.first_progress_at
        yield from self._run()
        attempt.add_step(event.step, event.last_step, now if event.step_at is None else event.step_at)
        if event.step is None:
            return
        self.first_step_at = now if self.first_step_at is None else self.first_step_at
        if not attempt.resume_checked:
            yield from self._check_resume(attempt, event.step)
        if not attempt.over:
            yield from self._reached(event.step)

    def _reached(self, step: int | None) -> Wants:
        """Further than ever is progress."""
        if step is not None and (self.furthest is None or step > self.furthest):
            self.furthest = step
            yield w.ProgressMade()

    def steps_in_evidence(self, piece: NodeEvidence) -> Wants:
        """What ranks wrote last may tell a later step than the newest heartbeat."""
        attempt = self.current
        for sample in piece.samples:
            if sample.step is not None and attempt is not None and not attempt.over:
                attempt.add_step(sample.step, sample.last_step, self._core.now - sample.moved_age_s)
                yield from self._reached(sample.step)

    def saved(self, seen: tuple[Checkpoint, ...]) -> Wants:
        """Where no step is shown, a checkpoint of a higher step than ever is progress. One of a step that was made
        before, which a script saves anew when it has resumed, is none."""
        attempt = self.current
        if attempt is None or attempt.over or attempt.workers_started_at is None:
            return
        ours = (one for one in seen if one.complete and one.modified_at >= attempt.workers_started_at)
        step = max((one.step for one in ours if one.step is not None), default=None)
        if step is None:
            return
        known = [one for one in (self._furthest_saved, self.furthest, attempt.resume.step) if one is not None]
        further = all(step > one for one in known)
        self._furthest_saved = max(step, self._furthest_saved or 0)
        if further and attempt.step is None:
            yield w.ProgressMade()
            yield w.Recovered(f"attempt {attempt.number} saved a checkpoint of step {step}")

    def _check_resume(self, attempt: Attempt, step: int) -> Wants:
        """Did the script go on where it should? Until that is clear its first step is not believed."""
        if attempt.number == 1:
            self._first_step_of_job = step
        core = self._core
        expected = self._expected_step(attempt) if attempt.number > 1 else None
        early = expected is not None and step + 2 < expected
        may_stop = core.mode == "enforce" and not core.paused and not self.would_begin_again
        first = step if attempt.first_step is None else min(step, attempt.first_step)
        if expected is not None and early and first < expected * BEGAN_AGAIN and may_stop:
            if step > first:
                yield from self._stop_before_overwriting(attempt, first, expected)
            return  # a single low number: a progress bar is drawn from 0 before it jumps to where the run is
        attempt.resume_checked = True
        if early:
            yield note("resumed_early", loud=True, step=step, expected=expected)
        elif expected is not None and attempt.first_step is not None and attempt.first_step < expected - 2:
            attempt.first_step, attempt.first_at = step, core.now
        yield w.Recovered(f"attempt {attempt.number} reached step {attempt.first_made}")

    def _expected_step(self, attempt: Attempt) -> int | None:
        """The step of the checkpoint that the attempt should have started from; None: unknown, or no measure."""
        path, began = attempt.resume.path, self._first_step_of_job
        found = next((one for one in self.checkpoints.candidates() if one.path == path), None)
        if not path or found is None or self.started_at is None:
            return None
        step = attempt.resume.step if attempt.resume.step is not None else self.checkpoints.step_of(path)
        ours = found.modified_at >= self.started_at
        # An older one counts only if the first attempt started from it: else the user means to begin anew.
        if step is None or not (ours or (began is not None and began + 2 >= step)):
            return None
        if self.furthest is None or step > self.furthest + max(2, self.furthest // 10):
            return None  # no attempt ever showed such a number: the checkpoint counts something else (samples, tokens)
        return step

    def _stop_before_overwriting(self, attempt: Attempt, step: int, expected: int) -> Wants:
        """The script began from nothing: stop it before it overwrites a good checkpoint."""
        path = attempt.resume.path
        yield note("began_again", loud=True, attempt=attempt.number, step=step, path=path, expected=expected)
        yield w.Enter("RECOVERING")
        yield w.Form(self.next_members())
        self.would_begin_again = True  # whoever lets it go on has read this
        yield w.Hold(f"the script does not resume from its checkpoint (it began at step {step} instead of {expected})")

    def settle_due(self) -> Wants:
        if self.current is not None and not self.current.over:
            yield w.Recovered(f"attempt {self.current.number} has run for {SETTLE_S:.0f} s")

    # ----- ending -----

    def rank_ended(self, event: m.RankEnded) -> Wants:
        attempt, core, record = self.live(event.attempt), self._core, event.exit
        if core.is_over and self.current is not None and self.current.number == event.attempt:
            self.current.add_step(event.step, event.last_step, core.now)  # done while it was being stopped
        if attempt is None or attempt.round is None or record.rank in attempt.exits or record.stopped_by_us:
            return
        attempt.exits[record.rank] = record
        attempt.add_step(event.step, event.last_step, core.now)
        yield from self._reached(event.step)
        if record.code == 0:
            yield from self._rank_ended_well(attempt)
        else:
            text = f"rank {record.rank} on {event.node} {exits.describe(record)}"
            yield w.OpenIncident("exit", text, record.ended_at, node=event.node)

    def ranks_stopped(self, event: m.RanksStopped) -> None:
        if self._core.is_over and self.current is not None and self.current.number == event.attempt:
            self.current.add_step(event.step, event.last_step, self._core.now)  # done while it was being stopped

    def _rank_ended_well(self, attempt: Attempt) -> Wants:
        core = self._core
        if attempt.adopted and len(attempt.members) < core.spec.nodes_min:
            return  # not all of its nodes have reported yet
        if not attempt.ended_well or core.state not in ("STARTING", "RUNNING", "DIAGNOSING", "RECOVERING"):
            return
        yield from self._run()
        yield w.GoOn("false alarm: every rank ended well")
        attempt.finishing = True
        yield w.cancel("again", "stacks", "silence")
        yield w.Recovered("every rank ended well")
        yield w.CloseFailures("every rank ended well")
        yield note("ranks_ended_well")
        yield w.Timer("finish", core.now + FINISH_LIMIT_S)
        yield w.ReassignAll()
        yield from self.finish()

    def finish(self, *, late: bool = False) -> Wants:
        """The run is complete once the launchers of all members have ended, too."""
        attempt = self.current
        assert attempt is not None
        waiting = any(name not in attempt.launchers_ended and self._nodes.is_present(name) for name in attempt.members)
        if late or not waiting:
            outcome = m.Outcome(state="succeeded", exit_code=0, line="the run is complete")
            yield w.EndJob(outcome, note("job_ended", why="the run is complete"))

    def finish_due(self) -> Wants:
        if self.is_finishing:
            yield note("launchers_ended")
            yield from self.finish(late=True)

    def launcher_ended(self, event: m.LauncherEnded) -> Wants:
        attempt = self.current
        if attempt is None or attempt.over or event.node not in attempt.member_set:
            return
        if attempt.round is None or event.attempt < attempt.number:
            # It may be the one of the attempt before; only one that is known to have ended just now counts.
            if event.fresh and self._core.state == "STARTING" and event.attempt <= attempt.number:
                yield from self._launcher_ended_early(attempt, event)
            return
        if event.attempt > attempt.number or event.node in attempt.launchers_ended:
            return
        if attempt.finishing:
            attempt.launchers_ended[event.node] = event.how
            yield from self.finish()
            return
        yield from self._launcher_failed(attempt, event)

    def _launcher_ended_early(self, attempt: Attempt, event: m.LauncherEnded) -> Wants:
        """Before it joined. The first end may be that of the attempt before: agents start another, with a new store."""
        first_of_round = attempt.round is not None and event.node == attempt.members[0]
        if attempt.number == 1 or event.node in attempt.early_ends or first_of_round:
            yield from self._launcher_failed(attempt, event)
        elif attempt.round is None:
            attempt.offers.pop(event.node, None)
        attempt.early_ends.add(event.node)

    def _launcher_failed(self, attempt: Attempt, event: m.LauncherEnded) -> Wants:
        attempt.launchers_ended[event.node] = event.how
        by_itself = event.code is not None and not attempt.ranks and not attempt.exits
        self._launcher_failures += by_itself
        # Its own error is on the terminal already.
        quiet = by_itself and self.would_fail_again
        text = f"the launcher on {event.node} ended ({event.how})"
        yield w.OpenIncident("launcher", text, self._core.now, launcher=event, quiet=quiet)

    # ----- what happens to the job -----

    def order_next(self) -> None:
        """An operator asks for the next attempt."""
        self.ordered = True

    def pause(self) -> None:
        self.ordered = False

    def count_restart(self) -> None:
        self.restarts += 1

    def end(self) -> None:
        if self.current is not None:
            self.current.over = True

    def begin_life(self) -> None:
        """The scheduler has started the job again on other nodes; numbers count on."""
        self.end()
        self._places, self._gather_until = (), 0.0

    def set_numbers_from(self, number: int) -> None:
        self.numbers_from = max(self.numbers_from, number)

    def forget_current(self) -> None:
        """The journal has lost how it went on."""
        if self.current is not None:
            self.set_numbers_from(self.current.number)
            self.current.over = True
        self.current = None

    def begin_adopted(self, number: int) -> None:
        """Ranks of an attempt run of which the journal does not tell: it goes on as it is."""
        now = self._core.now
        self.current = Attempt(
            number=number, members=(), formed_at=now, resume=Resume(), adopted=True, resume_checked=True
        )
        self.set_numbers_from(number)
        self.started_at = now if self.started_at is None else self.started_at

    def adopt(self, event: m.WorkersStarted) -> None:
        """A node tells of its ranks of the adopted attempt."""
        attempt, node, now = self.current, self._nodes.get(event.node), self._core.now
        assert attempt is not None
        attempt.adopt(event.node, event.ranks, node.address if node is not None else "")
        attempt.workers_started_at = now if attempt.workers_started_at is None else attempt.workers_started_at
        self._places = attempt.members
