"""What this job may change on storage, whoever asks for it, and who else uses a file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from recovery.actions import Checkpoint
from recovery.formats.base import shape
from recovery.formats.places import Seen
from recovery.formats.scan import CheckpointScanner
from recovery.provenance import Provenance


class Bounds(Protocol):
    """What of the files on storage this job may change, whoever asks for it."""

    job: str
    """Its folder; empty where it does not matter."""
    marks: tuple[bytes, ...]
    """One of these stands in the command line, or the environment, of each process of the job; none: all are its."""

    def why_not(self, path: Path) -> str:
        """Why a checkpoint, or a file beside it, may not be touched; empty when it may."""

    def why_not_placed(self, copy: Path, path: Path) -> str:
        """Why a safe copy may not be put at `path`; empty when it may."""

    def smallest(self, path: Path) -> Path:
        """What has to go for `path` to be out of the way: itself, or the folder that was made for it alone."""

    def inside(self, folder: Path) -> list[Checkpoint]:
        """The job's checkpoints in a folder."""

    def changed(self, path: Path) -> None:
        """It was put there for the job."""


class GivenFolders:
    """Everything below folders that the user gave; no link leads out of them."""

    def __init__(self, folders: Sequence[str | Path] = ("/",), job: str = "", marks: tuple[bytes, ...] = ()) -> None:
        self.job, self.marks = job, marks
        self._folders = [os.path.realpath(folder) for folder in folders]

    def why_not(self, path: Path) -> str:
        folder = os.path.realpath(path.parent)
        there = os.path.join(folder, path.name)
        if path.name in ("", ".", "..") or not any(_is_in(there, given) for given in self._folders):
            return "it is not in a folder given by --checkpoint-dir"
        return ""

    def why_not_placed(self, copy: Path, path: Path) -> str:
        return "the copy is a link" if copy.is_symlink() else self.why_not(path)

    def smallest(self, path: Path) -> Path:
        return path

    def inside(self, folder: Path) -> list[Checkpoint]:
        found = CheckpointScanner().scan([folder], time.time(), at_rest=True)
        return [one for one in found if Path(one.path).parent == folder]

    def changed(self, path: Path) -> None:
        pass


class SeenByRanks:
    """What ranks of the job were seen to write, as long as nobody else has touched it."""

    def __init__(self, provenance: Provenance, job: str = "", marks: tuple[bytes, ...] = ()) -> None:
        self.job, self.marks = job, marks
        self._provenance = provenance
        self.placed: list[str] = []
        """The paths given to `changed`."""

    def why_not(self, path: Path) -> str:
        return self._provenance.why_not_ours(str(path))

    def why_not_placed(self, copy: Path, path: Path) -> str:
        item = self._provenance.items.get(str(copy))
        return "" if item is not None and item.copy_of == str(path) else "the copy is not of this file"

    def smallest(self, path: Path) -> Path:
        """A folder with nothing else in it, which was made for this save (`save40/state.pt`), would be picked empty."""
        folder = path.parent
        if path.is_dir() or not shape(folder.name) or self.why_not(folder):
            return path
        return folder if os.listdir(folder) == [path.name] else path

    def inside(self, folder: Path) -> list[Checkpoint]:
        scanner = CheckpointScanner(seen=Seen(self._provenance))
        found = scanner.scan([], time.time(), at_rest=True)
        return [one for one in found if Path(one.path).parent == folder and not one.copy_of]

    def changed(self, path: Path) -> None:
        self.placed.append(str(path))
        self._provenance.adopt(str(path), time.time_ns())


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def user_of(path: Path, marks: tuple[bytes, ...]) -> tuple[str, bool]:
    """A live process of this node that stands in the way of a move, in words (empty for none), and whether it is ours.

    Of ours it is one that writes there; of somebody else's one that has anything of it open.
    """
    target = os.path.realpath(path)
    found = ""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            for descriptor in os.scandir(folder / "fd"):
                opened = os.readlink(descriptor.path)
                if opened != target and not opened.startswith(target + "/"):
                    continue
                ours = not marks or _is_of(folder, marks)
                if not ours or _is_writing(folder, descriptor.name):
                    name = f"process {folder.name} ({(folder / 'comm').read_text(errors='replace').strip()})"
                    if not ours:
                        return name, False
                    found = name
        except OSError:
            continue  # not ours to look into, or gone
    return found, True


def _is_of(process: Path, marks: tuple[bytes, ...]) -> bool:
    """A fork of the keeper has its command line, what a rank starts has the rank's environment."""
    words = (process / "cmdline").read_bytes().split(b"\0") + (process / "environ").read_bytes().split(b"\0")
    return not set(marks).isdisjoint(words)


def _is_writing(process: Path, descriptor: str) -> bool:
    for line in (process / "fdinfo" / descriptor).read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))
    return False
