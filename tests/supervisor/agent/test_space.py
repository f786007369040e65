"""Whether a disk has room: asked of real file systems."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.agent.space import SpaceWatch, without_room
from supervisor.messages import SpaceTold, SpaceWanted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], check=True, timeout=10)
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=10)


def test_a_folder_with_room_is_not_told_of_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    assert without_room([tmp_path, tmp_path / "not-there"], 1000) == ()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_for_a_checkpoint_is_told_of(tmp_path: Path) -> None:
    state = os.statvfs(tmp_path)
    (told,) = without_room([tmp_path], 2 * state.f_bavail * state.f_frsize)
    assert str(tmp_path) in told


@pytest.mark.root
@pytest.mark.parametrize("which", ["local", "saved"])
def test_a_full_disk_is_told_of_until_somebody_makes_room(tmp_path: Path, small_disk: Path, which: str) -> None:
    """The disk of checkpoints, or of the local folder, where the ranks' output goes."""
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True, timeout=10)
    local = small_disk if which == "local" else tmp_path

    def saved() -> list[Path]:
        return [tmp_path if which == "local" else small_disk]

    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(4 << 20))
    rang: list[bool] = []

    async def story() -> None:
        watch = SpaceWatch(str(tmp_path), local, saved, lambda: rang.append(True))
        wanted = SpaceWanted(number=3, folders=("gone",), need_bytes=100_000)

        async def until(full: bool) -> None:
            while watch.told is None or bool(watch.told.full) is not full:
                watch.tend(wanted)
                await asyncio.sleep(0.05)

        await asyncio.wait_for(until(full=True), 30)
        assert [entry.name for entry in small_disk.iterdir()] == ["filler"]
        filler.unlink()
        await asyncio.wait_for(until(full=False), 60)
        assert watch.told == SpaceTold(number=3)
        watch.tend(None)
        assert watch.told is None

    asyncio.run(story())
    assert rang == [True, True]
