"""Whether a disk has room: asked of real file systems."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.space import SpaceMonitor, full_disks, without_room
from supervisor.messages import SpaceReported, SpaceWanted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], check=True, timeout=10)
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=10)


def test_neither_a_disk_with_space_nor_one_that_is_not_there_is_full(tmp_path: Path) -> None:
    """Full file systems: tests/e2e/test_surroundings.py has real ones."""
    assert full_disks([tmp_path, tmp_path / "absent"], 1.0, "n1") == []


def test_a_file_system_without_blocks_is_not_full() -> None:
    assert full_disks([Path("/proc"), Path("/sys")], 1.0, "n1") == []


def test_a_folder_with_room_is_not_reported_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert without_room([tmp_path, tmp_path / "not-there"], 1000) == ()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_for_a_checkpoint_is_reported(tmp_path: Path) -> None:
    state = os.statvfs(tmp_path)
    (told,) = without_room([tmp_path], 2 * state.f_bavail * state.f_frsize)
    assert str(tmp_path) in told


@pytest.mark.root
@pytest.mark.parametrize("which", ["local", "saved"])
def test_a_full_disk_is_reported_until_somebody_makes_room(
    tmp_path: Path, small_disk: Path, which: str, make_state: Any
) -> None:
    """The disk of checkpoints, or of the local folder, where the ranks' output goes."""
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True, timeout=10)
    state = make_state(local_dir=str(small_disk if which == "local" else tmp_path))
    state.written_folders = (tmp_path if which == "local" else small_disk,)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(4 << 20))
    wakeups = 0

    async def story() -> None:
        nonlocal wakeups
        monitor = SpaceMonitor(state)
        wanted = SpaceWanted(number=3, folders=("gone",), need_bytes=100_000)

        async def until(full: bool) -> None:
            nonlocal wakeups
            while state.space is None or bool(state.space.full) is not full:
                monitor.follow(wanted)
                await state.wakeup.wait(0.05)
                wakeups += state.wakeup.is_set
                state.wakeup.clear()

        await asyncio.wait_for(until(full=True), 30)
        assert [entry.name for entry in small_disk.iterdir()] == ["filler"]
        filler.unlink()
        await asyncio.wait_for(until(full=False), 60)
        assert state.space == SpaceReported(number=3)
        monitor.follow(None)
        assert state.space is None

    asyncio.run(story())
    assert wakeups == 2
