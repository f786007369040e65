"""What a node does when the job has lost its head: the first node, with the controller.

Under Slurm a job that may lose nodes (`--no-kill`) runs on without its first one, and nobody decides any more. A node
whose ranks have stood still since then asks the scheduler, and has the job started again if that is really so. A node
that is merely cut off from the controller does nothing: the scheduler then says that the first node is there. Who had
it started again leaves a record in the job folder (`requeue.json`), for the next controller's journal; and a signal
that comes meanwhile (Slurm's own way to begin the new start) ends the node in order: nobody else would.

A node that no controller ever came to ends after a quarter of an hour: the first node could not start, and nobody else
would give the nodes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from diagnosis.signals import RankSample
from recovery.scheduling import Answer, Scheduler
from supervisor.blocking import Aside
from supervisor.deadline import timeout
from supervisor.messages import Outcome
from supervisor.paths import NodePlan, RequeueRecord

log = logging.getLogger("unbroken.headless")

PATIENCE_S = 60.0
"""So long a controller may be away, and ranks may stand still: the front starts a dead one again within seconds."""
APART_S = 2.0
"""Nodes ask one after the other: the first one's order ends the others."""
LONGEST_S = 600.0
NEVER_S = 900.0
AGAIN_S = 10.0
"""Between two questions, once it is time to ask: Slurm itself needs `SlurmdTimeout` to see that a node is gone."""
LOOK_S = 1.0
WHILE_WELL = 5
"""With a controller it is looked so much more seldom."""
ALONE_S = 10.0
"""A controller that was away for less may be on its way back, and ends the node itself."""
FIRST_S = 20.0
"""A user who waits for the first sign of life is told why there is none."""
WRITE_S = 5.0
END_GRACE_S = 5.0
"""For ranks that stand still there is nothing left to be saved."""
EXIT_REQUEUED = 75
ASK_S = 60.0


def stands_still(samples: Sequence[RankSample], seconds: float) -> bool:
    """Whether this node has ranks in the job, and none of them has made progress for so long, or has ended well."""
    return bool(samples) and all(
        sample.exit.code != 0 if sample.exit is not None else sample.moved_age_s >= seconds for sample in samples
    )


class Headless:
    """Runs beside the agent's loop; ends never."""

    def __init__(
        self,
        plan: NodePlan,
        connected: Callable[[], bool],
        samples: Callable[[], Sequence[RankSample]],
        say: Callable[[str], None],
        scheduler: Scheduler | None = None,
        patience_s: float = PATIENCE_S,
        look_s: float = LOOK_S,
        allowed: Callable[[], bool] = lambda: True,
        give_up: Callable[[str], None] = lambda _: None,
        never_s: float = NEVER_S,
        stopped_by: Callable[[], str] = lambda: "",
        end: Callable[[Outcome], None] = lambda _: None,
        alone_s: float = ALONE_S,
        problem: Callable[[], str] = lambda: "",
        first_s: float = FIRST_S,
    ) -> None:
        """`allowed`: what the controller said last (`Assignment.may_requeue`): not while paused, not once too often.
        `give_up`: ends this node, with why. `stopped_by`: the signal that this node's front got; without a controller
        for `alone_s`, `end` then ends the node in order. `problem`: why there is no connection, told after `first_s`.
        """
        self._plan = plan
        self._spec = plan.spec
        self._connected = connected
        self._samples = samples
        self._say = say
        self._scheduler = scheduler
        self._patience_s = patience_s
        order = plan.order or 0
        self._turn_s = min(LONGEST_S, patience_s + APART_S * order)
        self._again_s = min(LONGEST_S, patience_s, max(AGAIN_S, APART_S * order))
        self._look_s = look_s
        self._allowed = allowed
        self._give_up = give_up
        self._never_s = never_s
        self._stopped_by = stopped_by
        self._end = end
        self._alone_s = alone_s
        self._problem = problem
        self._first_s = first_s
        self._folder = Aside("requeue")
        self._alone_since: float | None = None
        self._told: deque[str] = deque(maxlen=8)
        self._requeued = ""
        """What is being done, in words."""
        self._asking: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        began, met, wondered, ended = time.monotonic(), False, False, False
        ask_at = 0.0
        while True:
            await asyncio.sleep(self._look_s if self._alone_since is not None else self._look_s * WHILE_WELL)
            now = time.monotonic()
            if self._connected():
                self._alone_since, met = None, True
                continue
            if self._alone_since is None:
                self._alone_since, ask_at = now, now + self._turn_s
            if not met and not wondered and now - began >= self._first_s:
                wondered = True
                self._tell(
                    f"{self._plan.node} has found no controller for {self._first_s:.0f} s ({self._problem()}): "
                    f"does every node see the same folder {self._plan.job_dir}?"
                )
            if not self._spec.scheduler_job:
                continue
            if not met and now - began >= self._never_s and not self._samples():
                self._give_up(f"no controller came within {self._never_s:.0f} s: see what the first node says")
            if self._stopped_by() and not ended and now - self._alone_since >= self._alone_s:
                ended = True
                self._end(self._outcome(self._stopped_by()))
            asking = self._asking is not None and not self._asking.done()
            if now < ask_at or ended or asking or self._requeued:
                continue
            ask_at = now + self._again_s
            if self._spec.mode == "enforce" and self._allowed() and stands_still(self._samples(), self._patience_s):
                self._asking = asyncio.get_running_loop().create_task(self._ask())

    def _outcome(self, signal: str) -> Outcome:
        """Of this node: Slurm ends what it starts again with a signal, too."""
        if self._requeued:
            return Outcome(state="requeued", exit_code=EXIT_REQUEUED, line=self._requeued)
        line = f"stopped by {signal}, and there was no controller"
        return Outcome(state="stopped", exit_code=130 if signal == "SIGINT" else 143, line=line)

    async def _ask(self) -> None:
        if self._scheduler is None:
            from recovery.schedulers import load_schedulers  # for most agents never

            self._scheduler = load_schedulers()[0].get(self._spec.scheduler)
        scheduler, job = self._scheduler, self._spec.scheduler_job
        if scheduler is None:
            return
        try:
            async with timeout(ASK_S):
                lost = await scheduler.headless(job)
                if not lost:
                    return
                text = f"the job has lost its first node, {lost}, with the controller: {scheduler.name} starts it again"
                self._tell(text)
                await self._leave_word(lost)
                self._requeued = f"requeued: {text}"  # the signal with which it begins may be faster than the answer
                answer = await scheduler.requeue(job, (), (lost,))
        except Exception as error:  # asyncio.TimeoutError, a plug-in's bug: the training is not ours to end
            answer = Answer(outcome="failed", text=f"{type(error).__name__}: {str(error)[:200]}")
        log.warning("asked to start job %s again: %s: %s", job, answer.outcome, answer.text)
        if answer.outcome in ("done", "already"):
            self._requeued = f"requeued: {text} ({answer.text})"[:500]
        elif not self._stopped_by():
            self._requeued = ""
            self._tell(f"{scheduler.name} does not start the job again: {answer.text}")
            await self._on_folder(lambda: RequeueRecord.forget(Path(self._plan.job_dir)))

    def _tell(self, line: str) -> None:
        """Once: it is asked again and again."""
        if line not in self._told:
            self._told.append(line)
            self._say(line)

    async def _leave_word(self, lost: str) -> None:
        """For the controller of the job's next life."""
        now = time.time()
        alone_s = time.monotonic() - (self._alone_since or time.monotonic())
        record = RequeueRecord(
            job=self._spec.scheduler_job,
            requeues=self._spec.requeues,
            by=self._plan.node,
            lost=lost,
            at=now,
            lost_at=now - alone_s,
        )
        await self._on_folder(lambda: record.write(Path(self._plan.job_dir)))

    async def _on_folder(self, work: Callable[[], None]) -> None:
        try:
            await self._folder.run(work, WRITE_S)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the record of the new start cannot be written: %r", error)
