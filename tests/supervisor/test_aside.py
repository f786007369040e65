"""Work on threads of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from supervisor.blocking import Aside


def test_what_hangs_is_begun_once_only_and_again_when_it_has_returned():
    async def story():
        aside, free, began = Aside("disks"), threading.Event(), []

        def hang():
            began.append(1)
            free.wait()

        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await aside.run(hang, 0.05)
        assert len(began) == 1
        free.set()
        while True:
            try:
                assert await aside.run(lambda: 5, 1.0) == 5
                break
            except asyncio.TimeoutError:
                await asyncio.sleep(0.01)

    asyncio.run(story())


def test_what_it_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Aside("x").run(lambda: 1 // 0, 1.0))


def test_without_a_thread_nothing_is_begun(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    aside = Aside("x")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(asyncio.TimeoutError, match="new thread"):
            asyncio.run(aside.run(lambda: 1, 1.0))
    assert asyncio.run(aside.run(lambda: 1, 1.0)) == 1
