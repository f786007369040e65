"""Is there room again? Asked by the controller while a job waits for space, and of what this node writes to.

A look asks the file systems, and writes a little into a file without a name that is gone at once: a quota shows nowhere
else. Looks are seconds apart and run beside the agent's loop: a file system that hangs delays nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from supervisor.agent.disk import TRIAL_BYTES, refused
from supervisor.blocking import Aside
from supervisor.messages import SpaceTold, SpaceWanted

FIRST_LOOK_S: Final = 1.0
LONGEST_PAUSE_S: Final = 15.0
LOOK_LIMIT_S: Final = 10.0
LOCAL_BYTES: Final = 1 << 20
"""An attempt begins with a few files of each rank."""
FOLDERS: Final = 16


def without_room(folders: Iterable[Path], need_bytes: int) -> tuple[str, ...]:
    """Those in which `need_bytes` cannot be written now, and why, in words. Asks the file systems, so it may block."""
    full = []
    for folder in list(dict.fromkeys(folders))[:FOLDERS]:
        try:
            state = os.statvfs(folder)
        except OSError:
            continue  # not there, or not ours to see
        free = state.f_bavail * state.f_frsize
        if state.f_blocks and free < need_bytes:
            full.append(f"{folder}: {_size(free)} are free, {_size(need_bytes)} are needed")
        elif state.f_files and not state.f_favail:
            full.append(f"{folder}: no inode is free")
        elif why := refused(folder):
            full.append(f"{folder}: {why}")
    return tuple(full)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


class SpaceWatch:
    """`tend` now and then; `told` is what is known."""

    def __init__(
        self, cwd: str, local: Path, folders: Callable[[], Iterable[Path]], on_change: Callable[[], None]
    ) -> None:
        """`local`: the node's local folder, with the ranks' output. `folders`: what else the ranks write to."""
        self._cwd, self._local = Path(cwd), local
        self._folders = folders
        self._on_change = on_change
        self._aside = Aside("room on disks")
        self._look: asyncio.Task[None] | None = None
        self._next, self._pause = 0.0, FIRST_LOOK_S
        self._number = 0
        self.told: SpaceTold | None = None

    def tend(self, wanted: SpaceWanted | None) -> None:
        if wanted is None:
            self.told, self._number = None, 0
            return
        now = time.monotonic()
        if wanted.number != self._number:
            self._number, self.told = wanted.number, None
            self._pause, self._next = FIRST_LOOK_S, now
        if now < self._next or (self._look is not None and not self._look.done()):
            return
        self._look = asyncio.create_task(self._look_once(wanted))

    async def _look_once(self, wanted: SpaceWanted) -> None:
        saved = [*self._folders()]
        named = [self._cwd / folder for folder in wanted.folders]
        others = named or ([] if saved else [self._cwd])

        def look() -> tuple[str, ...]:
            full = (*without_room(saved, wanted.need_bytes), *without_room(others, TRIAL_BYTES))
            return (*full, *without_room([self._local], LOCAL_BYTES))

        try:
            told = SpaceTold(number=wanted.number, full=await self._aside.run(look, LOOK_LIMIT_S))
        except asyncio.TimeoutError:
            told = SpaceTold(number=wanted.number, full=("a file system does not answer",))
        self._next = time.monotonic() + self._pause
        self._pause = min(LONGEST_PAUSE_S, 1.5 * self._pause)
        if wanted.number == self._number and told != self.told:
            self.told = told
            self._on_change()
