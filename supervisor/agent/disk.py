"""File systems without space: a writer's own words often do not tell (torch's say `unexpected pos`)."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from diagnosis.signals import Signal

FULL_BYTES = 64 * 1024
"""With less than this free nothing of use can be written any more."""


TRIAL_BYTES: Final = 64 * 1024
_NO_ROOM: Final = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}


def refused(folder: Path) -> str:
    """Why a little cannot be written there; empty where it can, or where it is no want of room that refuses it.

    Into a file without a name, or with one for a moment where there is no other way: a quota shows nowhere else.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".unbroken-space-", buffering=0) as file:
            file.write(bytes(TRIAL_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return _NO_ROOM.get(error.errno or 0, "")
    return ""


def full_disks(folders: Iterable[Path], at: float, node: str) -> list[Signal]:
    """One signal for each file system among `folders` that is full. Asks the file systems, so it may block."""
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
