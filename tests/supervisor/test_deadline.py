"""The one way the daemons put a deadline on an await."""

import asyncio

import pytest

from supervisor.deadline import timeout


def test_what_takes_too_long_is_given_up() -> None:
    async def scenario() -> None:
        async with timeout(0.01):
            await asyncio.Event().wait()

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(scenario())


def test_a_cancellation_in_the_moment_of_the_answer_is_heard() -> None:
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
