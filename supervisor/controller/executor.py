"""What the job asks others to do: requests to the scheduler, a model's opinion. Answers come back as events.

Nothing in the controller waits for such an answer, and no failure here ends the controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from recovery.schedulers import load_schedulers
from recovery.scheduling import Answer, Scheduler
from supervisor.blocking import timeout
from supervisor.messages import AnyEvent, JobSpec, OpinionWanted, SchedulerAnswered, SchedulerComment, SchedulerRequest

log = logging.getLogger("unbroken.executor")

REQUEST_S = 60.0
"""For one request; a scheduler has deadlines of its own, a plug-in may not."""
_AGAIN = ("does not start", "starts")
WAITING_LIMIT = 1000
"""Requests under way at a time; one too many is answered `unavailable`, and given again by the job."""


class Executor:
    """Takes `ControlLoop.outside`'s actions. Requests are carried out one after the other, as they were given."""

    def __init__(
        self,
        post: Callable[[AnyEvent], None],
        now: Callable[[], float],
        spec: Callable[[], JobSpec],
        schedulers: Mapping[str, Scheduler] | None = None,
        opinion: Callable[[OpinionWanted], None] = lambda _: None,
        life: int = 0,
    ) -> None:
        """`spec`: the job's, which names its scheduler and its id there. `schedulers` None: all that are known.
        `life`: how often the scheduler has started the job again by now."""
        self._post = post
        self._now = now
        self._spec = spec
        self._schedulers = schedulers
        self._opinion = opinion
        self._life = life
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turn: asyncio.Lock | None = None
        self._comment = ""
        """The newest that has not been made."""
        self._commenting: asyncio.Task[None] | None = None

    def __call__(self, action: SchedulerRequest | SchedulerComment | OpinionWanted) -> None:
        if isinstance(action, OpinionWanted):
            self._opinion(action)
        elif isinstance(action, SchedulerComment):
            self._comment = action.text
            if self._commenting is None or self._commenting.done():
                self._commenting = asyncio.get_running_loop().create_task(self._make_comment())
        elif action.kind == "requeue" and self._life > self._spec().requeues:
            log.info("request %d has been carried out: it is why this process is here", action.number)
        elif action.number in self._tasks:
            log.info("request %d is under way", action.number)
        elif len(self._tasks) >= WAITING_LIMIT:
            self._post_answer(action, Answer(outcome="unavailable", text="too many requests are waiting"))
        else:
            task = asyncio.get_running_loop().create_task(self._carry_out(action))
            self._tasks[action.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(action.number, None))

    async def _carry_out(self, request: SchedulerRequest) -> None:
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            answer = await self._within(lambda scheduler: self._ask(scheduler, request))
        self._post_answer(request, answer)

    async def _make_comment(self) -> None:
        """The newest one; requests do not wait for it. What stands between is not missed."""
        while self._comment:
            text, self._comment = self._comment, ""
            answer = await self._within(lambda scheduler: scheduler.comment(self._spec().scheduler_job, text))  # noqa: B023
            log.info("comment: %s: %s", answer.outcome, answer.text)

    async def _within(self, ask: Callable[[Scheduler], Awaitable[Answer]]) -> Answer:
        """What the job's scheduler answers, or why it does not."""
        try:
            async with timeout(REQUEST_S):
                if self._schedulers is None:
                    self._schedulers, problems = load_schedulers()
                    for problem in problems:
                        log.warning("%s", problem)
                name = self._spec().scheduler
                scheduler = self._schedulers.get(name)
                if scheduler is None:
                    return Answer(outcome="unsupported", text=f"there is no scheduler {name!r}")
                return await ask(scheduler)
        except asyncio.TimeoutError:
            return Answer(outcome="unavailable", text=f"no answer within {REQUEST_S:g} s")
        except Exception as error:  # a plug-in's bug is told and costs nothing else
            log.exception("the scheduler")
            return Answer(outcome="failed", text=f"{type(error).__name__}: {str(error)[:200]}")

    async def _ask(self, scheduler: Scheduler, request: SchedulerRequest) -> Answer:
        spec = self._spec()
        if request.kind == "drain":
            return await scheduler.drain(request.node, request.reason)
        if request.kind == "undrain":
            return await scheduler.undrain(request.node, spec.scheduler_job or spec.name)
        if request.kind == "cancel":
            return await scheduler.cancel(spec.scheduler_job)
        if request.kind == "look":
            again = await scheduler.starts_again(spec.scheduler_job, spec.requeues)
            return Answer(outcome="done" if again else "failed", text=f"it {_AGAIN[again]} the job again")
        if request.kind == "end_step":
            return await scheduler.end_step(spec.scheduler_job, request.avoid)
        return await scheduler.requeue(spec.scheduler_job, request.exclude, request.avoid)

    def _post_answer(self, request: SchedulerRequest, answer: Answer) -> None:
        what = f"{request.kind} {request.node}".strip()
        log.info("request %d (%s): %s: %s", request.number, what, answer.outcome, answer.text)
        self._post(
            SchedulerAnswered(at=self._now(), number=request.number, outcome=answer.outcome, text=answer.text[:500])
        )
