"""Is there room on the disks? Which of them are full when ranks fail, and whether one has room again.

The controller asks for the second while a job waits for space. A look asks the file systems, and writes a little into a
file without a name that is gone at once: a quota shows nowhere else. Looks are seconds apart and run beside the agent's
loop: a file system that hangs delays nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from diagnosis.signals import Signal
from supervisor.agent.state import AgentState
from supervisor.blocking import BlockingCalls
from supervisor.messages import SpaceReported, SpaceWanted

FIRST_LOOK_S: Final = 1.0
LONGEST_PAUSE_S: Final = 15.0
LOOK_LIMIT_S: Final = 10.0
LOCAL_BYTES: Final = 1 << 20
"""An attempt begins with a few files of each rank."""
FOLDERS: Final = 16
FULL_BYTES: Final = 64 * 1024
"""With less than this free nothing of use can be written any more."""
TRIAL_BYTES: Final = 64 * 1024
_NO_ROOM: Final = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}


def full_disks(folders: Iterable[Path], at: float, node: str) -> list[Signal]:
    """One signal for each file system among `folders` that is full. Asks the file systems, so it may block.

    The ranks' own messages often do not mention it: torch writes `unexpected pos`.
    """
    found: dict[int, Signal] = {}
    for folder in folders:
        try:
            device, state = os.stat(folder).st_dev, os.statvfs(folder)
        except OSError:
            continue  # not there (yet), or not ours to see
        free = state.f_bavail * state.f_frsize
        if state.f_blocks and free < FULL_BYTES:
            what = f"No space left on device: {free} bytes are free in {folder}"
        elif state.f_files and not state.f_favail:
            what = f"out of inodes: none is free in {folder}"
        elif why := refused(folder):
            what = f"{why}: a little cannot be written in {folder}"
        else:
            continue
        found.setdefault(device, Signal(source="storage", text=what, at=at, node=node))
    return list(found.values())


def refused(folder: Path) -> str:
    """Why a little cannot be written there for want of room; empty where it can, or fails for another reason.

    Writes a file without a name, or with one for a moment where there is no other way: a quota shows nowhere else.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".unbroken-space-", buffering=0) as file:
            file.write(bytes(TRIAL_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return _NO_ROOM.get(error.errno or 0, "")
    return ""


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


class SpaceMonitor:
    """Keeps `state.space` while the controller asks for it."""

    def __init__(self, state: AgentState) -> None:
        self._state = state
        self._cwd, self._local = Path(state.plan.cwd), state.paths.folder
        self._disks = BlockingCalls("room on disks")
        self._next, self._pause = 0.0, FIRST_LOOK_S
        self._number = 0
        """Of the newest request."""

    def follow(self, wanted: SpaceWanted | None) -> None:
        """Look again where it is time to. `wanted`: of the newest assignment."""
        if wanted is None:
            self._state.space, self._number = None, 0
            return
        now = time.monotonic()
        if wanted.number != self._number:
            self._number, self._state.space = wanted.number, None
            self._pause, self._next = FIRST_LOOK_S, now
        if now >= self._next:
            self._state.work.start("space", self._look_once(wanted), wakes=False)

    async def _look_once(self, wanted: SpaceWanted) -> None:
        saved = self._state.written_folders
        named = [self._cwd / folder for folder in wanted.folders]
        others = named or ([] if saved else [self._cwd])

        def look() -> tuple[str, ...]:
            full = (*without_room(saved, wanted.need_bytes), *without_room(others, TRIAL_BYTES))
            return (*full, *without_room([self._local], LOCAL_BYTES))

        try:
            space = SpaceReported(number=wanted.number, full=await self._disks.run(look, LOOK_LIMIT_S))
        except asyncio.TimeoutError:
            space = SpaceReported(number=wanted.number, full=("a file system does not answer",))
        self._next = time.monotonic() + self._pause
        self._pause = min(LONGEST_PAUSE_S, 1.5 * self._pause)
        if wanted.number == self._number and space != self._state.space:
            self._state.space = space
            self._state.wakeup.set()
