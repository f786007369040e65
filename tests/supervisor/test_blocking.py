"""Deadlines, and calls that may block on their own threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from supervisor.blocking import BlockingCalls, timeout


def test_a_call_that_hangs_is_begun_once_and_again_when_it_has_returned():
    async def story():
        calls, free, began = BlockingCalls("disks"), threading.Event(), []

        def hang():
            began.append(1)
            free.wait()

        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await calls.run(hang, 0.05)
        assert len(began) == 1
        free.set()
        while True:
            try:
                assert await calls.run(lambda: 5, 1.0) == 5
                break
            except asyncio.TimeoutError:
                await asyncio.sleep(0.01)

    asyncio.run(story())


def test_an_exception_of_the_call_is_raised():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(BlockingCalls("x").run(lambda: 1 // 0, 1.0))


def test_without_a_thread_there_is_a_timeout_at_once(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    calls = BlockingCalls("x")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(asyncio.TimeoutError, match="new thread"):
            asyncio.run(calls.run(lambda: 1, 1.0))
    assert asyncio.run(calls.run(lambda: 1, 1.0)) == 1


def test_a_cancellation_in_the_moment_of_the_answer_is_not_lost() -> None:
    """asyncio.wait_for of Python 3.11 swallows it, and an agent that should end stays for ever."""

    async def scenario() -> None:
        answer = asyncio.get_running_loop().create_future()

        async def ask() -> None:
            async with timeout(60.0):
                await answer

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        answer.set_result(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(scenario())
