"""Epochs: which controller of a job is the newest, agreed on through file names alone (docs/adr/0001)."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec

from supervisor.files import create_exclusively


class Superseded(Exception):
    """Another controller has claimed a newer epoch: whatever this one wanted to do, it must not."""

    def __init__(self, epoch: int, newer: int) -> None:
        super().__init__(f"a controller with epoch {newer} has taken over from this one (epoch {epoch})")
        self.newer = newer


def claim_epoch(job_dir: Path) -> int:
    """Take the next free epoch number; no two callers ever get the same one. Raises OSError."""
    folder = job_dir / "epochs"
    folder.mkdir(parents=True, exist_ok=True)
    claim = msgspec.json.encode({"host": socket.gethostname(), "pid": os.getpid(), "at": time.time_ns() / 1e9})
    epoch = newest_epoch(job_dir) + 1
    while not create_exclusively(folder / str(epoch), claim):
        epoch += 1
    sync_folder(folder)
    return epoch


def newest_epoch(job_dir: Path, known: int = 0) -> int:
    """The highest epoch claimed so far; `known` when there is none higher. Raises OSError."""
    with os.scandir(job_dir / "epochs") as entries:
        claimed = (int(entry.name) for entry in entries if entry.name.isdigit())
        return max(claimed, default=known)


def sync_folder(folder: Path) -> None:
    """Make new names in `folder` durable, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system can; the file itself is synced
    finally:
        os.close(fd)
