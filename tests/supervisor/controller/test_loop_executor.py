from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from recovery.schedulers import Local
from recovery.scheduling import Answer, Scheduler
from supervisor.controller.loop import Executor
from supervisor.messages import AnyEvent, JobSpec, SchedulerAnswered, SchedulerComment, SchedulerRequest


class Told(Local):
    """Answers what it is told to, and keeps what it was asked."""

    name = "told"

    def __init__(self, answer: Callable[[str], Answer] | None = None, takes_s: float = 0.0) -> None:
        self.asked: list[tuple[object, ...]] = []
        self._answer = answer or (lambda node: Answer(outcome="done", text=node))
        self._takes_s = takes_s

    async def drain(self, node: str, reason: str) -> Answer:
        self.asked.append(("drain", node, reason))
        await asyncio.sleep(self._takes_s if node == "slow" else 0)
        return self._answer(node)

    async def undrain(self, node: str, job: str) -> Answer:
        self.asked.append(("undrain", f"{node} of {job}"))
        return self._answer(node)

    async def requeue(self, job: str, exclude: tuple[str, ...], avoid: tuple[str, ...] = ()) -> Answer:
        self.asked.append(("requeue", job, exclude, avoid))
        return self._answer(job)

    async def cancel(self, job: str) -> Answer:
        self.asked.append(("cancel", job))
        return self._answer(job)


def run(
    orders: list[SchedulerRequest],
    scheduler: Scheduler | None,
    schedulers: Mapping[str, Scheduler] | None = None,
    request_s: float = 60.0,
) -> list[SchedulerAnswered]:
    """The answers to `orders`, in the order in which they came."""
    events: list[AnyEvent] = []

    async def give() -> None:
        named = {scheduler.name: scheduler} if scheduler is not None else schedulers
        spec = JobSpec(name="j", scheduler=scheduler.name if scheduler else "local", scheduler_job="77")
        errands = Executor(events.append, lambda: 5.0, lambda: spec, named, request_s=request_s)
        for order in orders:
            errands.start(order)
        while len(events) < len({order.number for order in orders}):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(give(), 60))
    return [event for event in events if isinstance(event, SchedulerAnswered)]


def test_orders_are_carried_out_in_their_order_and_answered_by_number() -> None:
    scheduler = Told(takes_s=0.05)
    answers = run(
        [
            SchedulerRequest(number=1, kind="drain", node="slow", reason="unbroken: why"),
            SchedulerRequest(number=1, kind="drain", node="slow", reason="unbroken: why"),
            SchedulerRequest(number=2, kind="undrain", node="slow"),
            SchedulerRequest(number=3, kind="requeue", exclude=("n1",), avoid=("n2",)),
            SchedulerRequest(number=4, kind="cancel"),
        ],
        scheduler,
    )
    assert scheduler.asked == [
        ("drain", "slow", "unbroken: why"),
        ("undrain", "slow of 77"),
        ("requeue", "77", ("n1",), ("n2",)),
        ("cancel", "77"),
    ]
    assert [(a.at, a.number, a.outcome, a.text) for a in answers] == [
        (5.0, 1, "done", "slow"),
        (5.0, 2, "done", "slow"),
        (5.0, 3, "done", "77"),
        (5.0, 4, "done", "77"),
    ]


def test_of_comments_the_newest_is_made_and_orders_do_not_wait_for_it() -> None:
    class Slow(Told):
        async def comment(self, job: str, text: str) -> Answer:
            self.asked.append(("comment", job, text))
            await asyncio.sleep(0.05)
            return self._answer(text)

    scheduler = Slow()

    async def give() -> None:
        spec = JobSpec(name="j", scheduler="told", scheduler_job="77")
        errands = Executor(lambda _: None, lambda: 5.0, lambda: spec, {"told": scheduler})
        errands.start(SchedulerComment(text="first"))
        errands.start(SchedulerRequest(number=1, kind="cancel"))
        while len(scheduler.asked) < 2:
            await asyncio.sleep(0.001)
        for text in ("second", "third"):
            errands.start(SchedulerComment(text=text))
        while ("comment", "77", "third") not in scheduler.asked:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(give(), 60))
    assert scheduler.asked == [("comment", "77", "first"), ("cancel", "77"), ("comment", "77", "third")]


def test_a_scheduler_that_fails_or_hangs_is_an_answer() -> None:
    def bug(node: str) -> Answer:
        raise KeyError(node)

    (answer,) = run([SchedulerRequest(number=1, kind="drain", node="n1")], Told(bug))
    assert (answer.outcome, answer.text) == ("failed", "KeyError: 'n1'")
    (answer,) = run([SchedulerRequest(number=1, kind="drain", node="slow")], Told(takes_s=100), request_s=0.05)
    assert (answer.outcome, answer.text) == ("unavailable", "no answer within 0.05 s")


@pytest.mark.parametrize(("again", "outcome"), [(True, "done"), (False, "failed"), (None, "unavailable")])
def test_whether_the_job_starts_again_is_asked_until_that_is_known(again: bool | None, outcome: str) -> None:
    class Asked(Told):
        async def starts_again(self, job: str, requeues: int) -> bool | None:
            self.asked.append((job, requeues))
            return again

    scheduler = Asked()
    (answer,) = run([SchedulerRequest(number=1, kind="look")], scheduler)
    assert (answer.outcome, scheduler.asked) == (outcome, [("77", 0)])


def test_an_order_to_requeue_is_not_carried_out_again_in_the_life_that_it_led_to() -> None:
    """Its answer may not have been written down: the job gives it again before it hears that it was started again."""
    scheduler = Told()

    async def give() -> None:
        spec = JobSpec(name="j", scheduler="told", scheduler_job="77", requeues=1)
        for life in (2, 1):
            errands = Executor(lambda _: None, lambda: 0.0, lambda: spec, {"told": scheduler}, life=life)
            errands.start(SchedulerRequest(number=life, kind="requeue"))
            for _ in range(100):
                await asyncio.sleep(0)

    asyncio.run(give())
    assert scheduler.asked == [("requeue", "77", (), ())]
