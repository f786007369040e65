from __future__ import annotations

import asyncio
import time

from supervisor.agent.bell import Bell


def test_it_wakes_who_waits_and_whoever_comes_next() -> None:
    async def run() -> None:
        bell = Bell()
        waiting = asyncio.create_task(bell.wait(60))
        await asyncio.sleep(0)
        bell.ring()
        await asyncio.wait_for(waiting, 60)
        assert bell.rung
        await asyncio.wait_for(bell.wait(60), 60)
        bell.hush()
        began = time.monotonic()
        await bell.wait(0.02)
        assert time.monotonic() - began >= 0.019
        assert not bell.rung
        await bell.wait(-1.0)

    asyncio.run(run())


def test_who_is_cancelled_waits_no_more() -> None:
    async def run() -> None:
        bell = Bell()
        waiting = asyncio.create_task(bell.wait(60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        bell.ring()
        await asyncio.wait_for(bell.wait(60), 60)

    asyncio.run(run())
