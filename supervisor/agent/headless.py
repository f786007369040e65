"""What a node does when the job has lost its head: the first node, with the controller.

Under Slurm a job that may lose nodes (`--no-kill`) runs on without its first one, and nobody decides any more. A node
whose ranks have stood still since then asks the scheduler, and has the job started again if that is really so. A node
that is merely cut off from the controller does nothing: the scheduler then says that the first node is there.

A node that no controller ever came to ends after a quarter of an hour: the first node could not start, and nobody else
would give the nodes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from diagnosis.signals import RankSample
from recovery.scheduling import Answer, Scheduler
from supervisor.deadline import timeout
from supervisor.node import NodePlan

log = logging.getLogger("unbroken.headless")

PATIENCE_S = 60.0
"""So long a controller may be away, and ranks may stand still: the front starts a dead one again within seconds."""
APART_S = 2.0
"""Nodes ask one after the other: the first one's order ends the others."""
LONGEST_S = 600.0
NEVER_S = 900.0
LOOK_S = 5.0
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
    ) -> None:
        """`allowed`: what the controller said last (`Assignment.may_requeue`): not while paused, not once too often.
        `give_up`: ends this node, with why."""
        self._spec = plan.spec
        self._connected = connected
        self._samples = samples
        self._say = say
        self._scheduler = scheduler
        self._patience_s = patience_s
        self._turn_s = min(LONGEST_S, patience_s + APART_S * (plan.order or 0))
        self._look_s = look_s
        self._allowed = allowed
        self._give_up = give_up
        self._never_s = never_s

    async def watch(self) -> None:
        if not self._spec.scheduler_job:
            await asyncio.Event().wait()  # nothing to be done, ever
        began, met = time.monotonic(), False
        alone_since: float | None = None
        while True:
            await asyncio.sleep(self._look_s)
            now = time.monotonic()
            alone_since = None if self._connected() else now if alone_since is None else alone_since
            met = met or alone_since is None
            if not met and now - began >= self._never_s and not self._samples():
                self._give_up(f"no controller came within {self._never_s:.0f} s: see what the first node says")
            if alone_since is None or now - alone_since < self._turn_s:
                continue
            if self._spec.mode == "enforce" and self._allowed() and stands_still(self._samples(), self._patience_s):
                await self._ask()
            alone_since = time.monotonic()  # and again after as long

    async def _ask(self) -> None:
        if self._scheduler is None:
            from recovery.schedulers import load_schedulers  # for most agents never

            self._scheduler = load_schedulers()[0].get(self._spec.scheduler)
        scheduler, job = self._scheduler, self._spec.scheduler_job
        if scheduler is None or not hasattr(scheduler, "headless"):
            return
        try:
            async with timeout(ASK_S):
                if not await scheduler.headless(job):
                    return
                self._say(f"the job has lost its first node, with the controller: {scheduler.name} starts it again")
                answer = await scheduler.requeue(job, ())
        except Exception as error:  # asyncio.TimeoutError, a plug-in's bug: the training is not ours to end
            answer = Answer(outcome="failed", text=f"{type(error).__name__}: {str(error)[:200]}")
        log.warning("asked to start job %s again: %s: %s", job, answer.outcome, answer.text)
        if answer.outcome not in ("done", "already"):
            self._say(f"{scheduler.name} does not start the job again: {answer.text}")
