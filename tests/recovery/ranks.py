"""Ranks that write to real folders, and somebody else who does, with what would be recorded of the ranks."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from recovery.provenance import Provenance, Write

_CLOCK = itertools.count(time.time_ns())


def now_ns() -> int:
    """Never twice the same."""
    return max(next(_CLOCK), time.time_ns())


def before(path: Path) -> object:
    """As the recorder tells what stands at a path."""
    try:
        about = path.stat()
    except OSError:
        return None
    return [about.st_ino, about.st_size, about.st_mtime_ns]


class Ranks:
    """What they do is noted in `provenance`; what `Path` does is done by others."""

    def __init__(self, pid: int = 4711) -> None:
        self.pid = pid
        self.provenance = Provenance()

    def _note(self, kind: str, path: Path, more: object = None) -> None:
        self.provenance.note([Write(now_ns(), self.pid, kind, str(path), more)])

    def make(self, folder: Path) -> Path:
        """As os.makedirs(folder, exist_ok=True)."""
        for one in (*reversed(folder.parents), folder):
            if not one.exists():
                self._note("d", one)
                one.mkdir()
        return folder

    def write(self, path: Path, data: bytes) -> Path:
        self._note("w", path, before(path))
        path.write_bytes(data)
        return path

    def replace(self, path: Path, target: Path) -> Path:
        about = path.lstat()
        self._note("r", path, [str(target), about.st_ino, about.st_size, about.st_mtime_ns])
        os.replace(path, target)
        return target

    def link(self, path: Path, target: str) -> Path:
        if path.is_symlink():
            self.remove(path)
        self._note("l", path, target)
        path.symlink_to(target)
        return path

    def remove(self, path: Path) -> None:
        self._note("x", path)
        path.unlink()

    def die(self) -> None:
        self.provenance.ended(self.pid, time.time_ns())

    def looked_at(self) -> Provenance:
        """The agent has looked, and nothing is open."""
        self.provenance.settle(lambda _pid, _path: False, time.time_ns())
        return self.provenance
