"""What a node does while it has no controller: an orphan.

`due` (pure) says what is to be done now. `OrphanHandler` does it:

- The job may have gone on without this node. The controller writes the newest attempt into the job folder
  (`fence.json`): ranks of older attempts are killed. They only wait for ranks that are gone, and may still write a
  checkpoint. Where the folder cannot be read either, they live until the node has a connection again.
- Under Slurm a job that may lose nodes (`--no-kill`) runs on when it has lost its first node, and the controller with
  it. A node whose ranks have made no progress since then asks the scheduler, and requeues the job if the first node is
  really gone. A node that is merely cut off does nothing: the scheduler then says that the first node is there. Who
  requeued the job leaves a record in the job folder (`requeue.json`) for the journal of the next controller.
- The front received a signal, and no controller can end the node: the node ends by itself. Slurm's own requeue begins
  with a signal, too.
- No controller ever came: the first node could not start. The node ends, or nobody would give it back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from diagnosis.signals import Frozen, RankSample
from recovery.scheduling import Answer, Scheduler
from supervisor.agent.link import Link
from supervisor.agent.ranks import RankMonitor
from supervisor.agent.state import AgentState
from supervisor.blocking import BlockingCalls, timeout
from supervisor.errors import KeeperError
from supervisor.keeper_client import KeeperClient
from supervisor.messages import JobSpec, Outcome
from supervisor.paths import Fence, RequeueRecord

EXIT_REQUEUED = 75
EXIT_NO_CONTROLLER = 70
"""The front uses the same code where one of our processes cannot be started (`supervisor.run.front`)."""

log = logging.getLogger("unbroken.orphan")


class OrphanTimeouts(Frozen, frozen=True, kw_only=True):
    read_fence_after_s: float = 2.0
    """A controller that is started again is back before that."""
    between_fence_reads_s: float = 1.0
    end_after_signal_s: float = 10.0
    """A controller that was away for less may be on its way back, and ends the node itself."""
    silent_after_signal_s: float = 6.0
    """A controller that is connected and has not answered for so long then counts as away since it was last heard.
    Slurm kills what is left 30 s after its signal; without one a silent controller has longer (`PONG_WITHIN`)."""
    no_controller_notice_s: float = 20.0
    """After so long without any controller the user gets to know why there is none."""
    ask_scheduler_after_s: float = 60.0
    """Without a controller, and without progress. The front starts a dead controller again within seconds."""
    between_nodes_s: float = 2.0
    """The nodes ask the scheduler one after the other: the first one's request ends the others."""
    between_questions_s: float = 10.0
    """Slurm itself needs `SlurmdTimeout` to see that a node is gone."""
    longest_wait_s: float = 600.0
    """Of a node with a high number, before its first question and between two."""
    give_up_after_s: float = 900.0
    """Without any controller since the start, and without ranks."""
    scheduler_s: float = 60.0
    """For the scheduler's answers."""
    files_s: float = 5.0
    """For reading and writing in the job folder."""


TIMEOUTS = OrphanTimeouts()


class OrphanSituation(Frozen, frozen=True, kw_only=True):
    """A node without a connection, at one moment. Times are monotonic."""

    now: float
    started_at: float
    alone_since: float
    """When the connection was lost, or the start."""
    had_controller: bool
    """This agent has had a connection before."""
    samples: tuple[RankSample, ...] = ()
    living_attempt: int = 0
    stop_request: str = ""
    may_requeue: bool = False
    """As the controller said last (`Assignment.may_requeue`): not while the job is paused, and not once too often."""
    requeued: bool = False
    """The scheduler starts the job again."""
    fence_read_at: float | None = None
    question_at: float | None = None
    """When this node could ask the scheduler last."""


class OrphanDuties(Frozen, frozen=True, kw_only=True):
    """What is to be done now."""

    notify: bool
    """The user is told that there is no controller, and why."""
    read_fence: bool
    question_due: bool
    """It is this node's turn to ask the scheduler; it asks where its ranks make no progress."""
    ask_scheduler: bool
    end: bool
    """The node ends as the front's signal wants it."""
    give_up: bool


def due(one: OrphanSituation, spec: JobSpec, index: int, limits: OrphanTimeouts = TIMEOUTS) -> OrphanDuties:
    """`index`: the node's number in the job."""
    lived_s, alone_s = one.now - one.started_at, one.now - one.alone_since
    scheduled = bool(spec.scheduler_job)
    never = not one.had_controller
    turn_s = limits.between_nodes_s * index
    if one.question_at is None:
        next_question_at = one.alone_since + min(limits.longest_wait_s, limits.ask_scheduler_after_s + turn_s)
    else:
        between_s = max(limits.between_questions_s, turn_s)
        next_question_at = one.question_at + min(limits.longest_wait_s, limits.ask_scheduler_after_s, between_s)
    end = scheduled and bool(one.stop_request) and alone_s >= limits.end_after_signal_s
    question_due = scheduled and not end and not one.requeued and one.now >= next_question_at
    may_ask = spec.mode == "enforce" and one.may_requeue
    fence_age_s = one.now - one.fence_read_at if one.fence_read_at is not None else float("inf")
    return OrphanDuties(
        notify=never and lived_s >= limits.no_controller_notice_s,
        read_fence=(
            one.living_attempt > 0
            and alone_s >= limits.read_fence_after_s
            and fence_age_s >= limits.between_fence_reads_s
        ),
        question_due=question_due,
        ask_scheduler=question_due and may_ask and makes_no_progress(one.samples, limits.ask_scheduler_after_s),
        end=end,
        give_up=scheduled and never and lived_s >= limits.give_up_after_s and not one.samples,
    )


def makes_no_progress(samples: Sequence[RankSample], seconds: float) -> bool:
    """Whether this node has ranks, and none of them has made progress for so long, or has ended well."""
    return bool(samples) and all(
        sample.exit.code != 0 if sample.exit is not None else sample.moved_age_s >= seconds for sample in samples
    )


class OrphanHandler:
    """`look` is called with each look of the agent."""

    def __init__(
        self,
        state: AgentState,
        link: Link,
        ranks: RankMonitor,
        keeper: KeeperClient,
        *,
        scheduler: Scheduler | None = None,
        limits: OrphanTimeouts = TIMEOUTS,
    ) -> None:
        """`scheduler`: None stands for the one that the job names."""
        self._state = state
        self._plan = state.plan
        self._spec = state.plan.spec
        self._job_dir = Path(state.plan.job_dir)
        self._link = link
        self._ranks = ranks
        self._keeper = keeper
        self._scheduler = scheduler
        self._limits = limits
        self._fence_file, self._requeue_file = BlockingCalls("fence"), BlockingCalls("requeue")
        self._started_at: float | None = None
        self._alone_since: float | None = None
        self._fence_read_at: float | None = None
        self._question_at: float | None = None
        self._had_controller = False
        self._notified = False
        self._shown: deque[str] = deque(maxlen=8)
        self._requeued = ""
        """What the scheduler was asked for, in words; empty unless it does that, or may be doing it."""

    def look(self, now: float) -> Outcome | None:
        """Start what is due. The outcome with which this node must end now, if it must."""
        self._started_at = now if self._started_at is None else self._started_at
        self._had_controller |= self._link.connected
        self._alone_since = self._without_controller_since(now)
        if self._alone_since is None:
            self._question_at = None
            return None
        duties = due(
            self._situation(now, self._started_at, self._alone_since), self._spec, self._plan.index or 0, self._limits
        )
        if duties.notify and not self._notified:
            self._notified = True
            self._state.notices.show(
                f"{self._plan.node} has found no controller for {self._limits.no_controller_notice_s:.0f} s "
                f"({self._link.problem}): does every node see the same folder {self._job_dir}?"
            )
        work = self._state.work
        if duties.read_fence and not work.is_running("fence"):
            self._fence_read_at = now
            work.start("fence", self._kill_older_attempts())
        if duties.question_due and not work.is_running("question"):
            self._question_at = now
            if duties.ask_scheduler:
                work.start("question", self._ask_scheduler(time.time() - now + self._alone_since))
        if duties.end:
            return self._stopped()
        if duties.give_up:
            line = f"no controller came within {self._limits.give_up_after_s:.0f} s: see the output of the first node"
            return Outcome(state="failed", exit_code=EXIT_NO_CONTROLLER, line=line)
        return None

    def _without_controller_since(self, now: float) -> float | None:
        if not self._link.connected:
            return now if self._alone_since is None else self._alone_since
        heard_at, signalled = self._link.heard_at, bool(self._state.saved.stop_request)
        return heard_at if signalled and now - heard_at >= self._limits.silent_after_signal_s else None

    def _situation(self, now: float, started_at: float, alone_since: float) -> OrphanSituation:
        assignment = self._state.assignment
        return OrphanSituation(
            now=now,
            started_at=started_at,
            alone_since=alone_since,
            had_controller=self._had_controller,
            samples=self._ranks.samples(),
            living_attempt=self._state.living_attempt,
            stop_request=self._state.saved.stop_request,
            may_requeue=assignment is not None and assignment.may_requeue,
            requeued=bool(self._requeued),
            fence_read_at=self._fence_read_at,
            question_at=self._question_at,
        )

    def _stopped(self) -> Outcome:
        if self._requeued:  # Slurm's requeue begins with a signal
            return Outcome(state="requeued", exit_code=EXIT_REQUEUED, line=self._requeued)
        signal = self._state.saved.stop_request
        line = f"stopped by {signal}, and there was no controller"
        return Outcome(state="stopped", exit_code=130 if signal == "SIGINT" else 143, line=line)

    # ----- the job goes on without this node -----

    async def _kill_older_attempts(self) -> None:
        try:
            newest = await self._fence_file.run(lambda: Fence.read(self._job_dir), self._limits.files_s)
            living = self._state.living_attempt
            if newest is None or not living or newest.epoch < self._state.saved.epoch or newest.attempt <= living:
                return
            log.warning("attempt %d runs without this node, which has no controller: killing its ranks", newest.attempt)
            await self._keeper.request(op="kill", attempt=newest.attempt - 1)
        except KeeperError as error:
            log.warning("%s", error)
        except (OSError, asyncio.TimeoutError) as error:
            log.info("cannot read whether the job has gone on without this node: %r", error)

    # ----- the job has lost its first node -----

    async def _ask_scheduler(self, lost_at: float) -> None:
        """`lost_at`: Unix time at which the connection was lost."""
        if self._scheduler is None:
            from recovery.schedulers import load_schedulers  # most agents never need it

            self._scheduler = load_schedulers()[0].get(self._spec.scheduler)
        scheduler, job = self._scheduler, self._spec.scheduler_job
        if scheduler is None:
            return
        try:
            async with timeout(self._limits.scheduler_s):
                lost = await scheduler.headless(job)
                if not lost:
                    return
                text = f"the job has lost its first node, {lost}, with the controller: {scheduler.name} starts it again"
                self._show_once(text)
                await self._write_record(lost, lost_at)
                self._requeued = f"requeued: {text}"  # the signal of the requeue may come before the answer
                answer = await scheduler.requeue(job, (), (lost,))
        except Exception as error:  # asyncio.TimeoutError, or a bug of a plug-in: the training must go on
            answer = Answer(outcome="failed", text=f"{type(error).__name__}: {str(error)[:200]}")
        log.warning("asked to start job %s again: %s: %s", job, answer.outcome, answer.text)
        if answer.outcome in ("done", "already"):
            self._requeued = f"requeued: {text} ({answer.text})"[:500]
        elif not self._state.saved.stop_request:
            self._requeued = ""
            self._show_once(f"{scheduler.name} does not start the job again: {answer.text}")
            await self._on_record(lambda: RequeueRecord.forget(self._job_dir))

    def _show_once(self, line: str) -> None:
        """The scheduler is asked again and again."""
        if line not in self._shown:
            self._shown.append(line)
            self._state.notices.show(line)

    async def _write_record(self, lost: str, lost_at: float) -> None:
        """For the controller of the job's next life."""
        record = RequeueRecord(
            job=self._spec.scheduler_job,
            requeues=self._spec.requeues,
            by=self._plan.node,
            lost=lost,
            at=time.time(),
            lost_at=lost_at,
        )
        await self._on_record(lambda: record.write(self._job_dir))

    async def _on_record(self, work: Callable[[], None]) -> None:
        try:
            await self._requeue_file.run(work, self._limits.files_s)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the record of the requeue cannot be written: %r", error)
