"""File systems without space: a writer's own words often do not tell (torch's say `unexpected pos`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from diagnosis.signals import Signal

FULL_BYTES = 64 * 1024
"""With less than this free nothing of use can be written any more."""


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
        else:
            continue
        found.setdefault(device, Signal(source="storage", text=what, at=at, node=node))
    return list(found.values())
