from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.agent import fence as module
from supervisor.agent.fence import Fencing
from supervisor.controller.fence import FenceWriter
from supervisor.paths import Fence


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """What is killed of attempt 2 (assigned in epoch 3) on a node without a controller."""
    monkeypatch.setattr(module, "LOOK_S", 0.0)

    def looked(attempt: int = 2, connected: bool = False) -> list[int]:
        killed: list[int] = []

        async def kill(up_to: int) -> None:
            killed.append(up_to)

        async def scenario() -> None:
            fencing = Fencing(tmp_path, lambda: 3, lambda: attempt, kill)
            for now in (10.0, 10.5, 12.5):
                assert killed == []
                fencing.look(connected, now)
            if fencing._task is not None:
                await asyncio.wait({fencing._task}, timeout=60)

        asyncio.run(scenario())
        return killed

    return looked


@pytest.mark.parametrize(
    ("written", "killed"),
    [
        (Fence(epoch=3, attempt=4), [3]),
        (Fence(epoch=5, attempt=3), [2]),
        (Fence(epoch=3, attempt=2), []),
        (Fence(epoch=2, attempt=4), []),  # of a controller that was replaced, or of a job before
        (None, []),
    ],
)
def test_a_node_without_controller_ends_what_is_of_an_older_attempt(
    tmp_path: Path,
    looked: Callable[..., list[int]],
    written: Fence | None,
    killed: list[int],
) -> None:
    if written is not None:
        written.write(tmp_path)
    assert looked() == killed
    assert looked(connected=True) == []
    assert looked(attempt=0) == []


def test_a_folder_that_cannot_be_read_ends_nothing(tmp_path: Path, looked: Callable[..., list[int]]) -> None:
    (tmp_path / "fence.json").write_text("{")
    assert looked() == []
    (tmp_path / "fence.json").unlink()
    (tmp_path / "fence.json").mkdir()
    assert looked() == []


def test_the_controller_writes_each_new_attempt_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = FenceWriter(tmp_path, 7)
        for attempt in (1, 1, 2, 1):
            writer.raise_to(attempt)
            if writer._task is not None:
                await writer._task

    asyncio.run(scenario())
    assert Fence.read(tmp_path) == Fence(epoch=7, attempt=2)
