"""One pass over a folder of checkpoints: names only, bounded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from diagnosis.signals import clean_text
from recovery.actions import Checkpoint
from recovery.checkpoint import POINTER
from recovery.formats.base import COPIES, final_suffix, step_in_name
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER, read_pointer
from recovery.formats.torch_files import SUFFIXES
from recovery.formats.trees import NOT_TORCH

ENTRIES: Final = 4000
"""Names looked at in one folder and the folders in it."""
OPEN_SUFFIXES: Final = frozenset((".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".bin"))
_DEPTH: Final = 3
_TELLING: Final = (".metadata", "trainer_state.json", "random_states_0.pkl", "mp_rank_00", "mp_rank_00_model_states.pt")
_FILE_SUFFIXES: Final = frozenset((*SUFFIXES, ".safetensors"))


class Walk:
    """What is in a folder: paths that a format takes for checkpoints, tracker files, safe copies."""

    def __init__(self, takes: Callable[[str, os.stat_result], bool]) -> None:
        self._takes = takes
        self._left = ENTRIES
        self.found: dict[str, int] = {}
        """Path -> when it was changed, ns."""
        self.pointers: list[Path] = []
        self.copies: list[Path] = []

    def enter(self, folder: Path, depth: int = 0) -> None:
        """Look at a folder given by the user or guessed; it may be one checkpoint itself, or even a file."""
        if depth == 0 and self._takes_itself(folder):
            return
        later: list[Path] = []
        for entry in self._entries(folder):
            if entry.is_symlink() and _points_beside(entry.path):
                continue  # `latest -> step-100`: that is found under its own name
            if entry.is_dir():
                if entry.name == COPIES:
                    self.copies += self._copies_in(entry.path)
                elif not entry.name.startswith(".") and not self._take(entry):
                    later.append(Path(entry.path))
            elif entry.name in (MEGATRON_TRACKER, DEEPSPEED_TRACKER):
                self.pointers.append(Path(entry.path))
            elif _may_be_one(entry.name):
                self._take(entry)
        for path in later if depth < _DEPTH else ():
            self.enter(path, depth + 1)

    def _take(self, entry: os.DirEntry[str]) -> bool:
        try:
            stat = entry.stat()
        except OSError:
            return False
        if not self._takes(entry.path, stat):
            return False
        self.found[entry.path] = stat.st_mtime_ns
        return True

    def _takes_itself(self, folder: Path) -> bool:
        """`folder` as a name with a step (`step_100`) is more likely a run's own name, unless its content says so."""
        telling = any((folder / name).exists() for name in _TELLING)
        try:
            stat = folder.stat()
        except OSError:
            return False
        if not (telling or folder.is_file()) or not self._takes(str(folder), stat):
            return False
        self.found[str(folder)] = stat.st_mtime_ns
        return True

    def _entries(self, folder: str | Path) -> list[os.DirEntry[str]]:
        listing: list[os.DirEntry[str]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._left <= 0:
                        break
                    self._left -= 1
                    listing.append(entry)
        except OSError:
            pass  # it went, or may not be read
        return listing

    def _copies_in(self, folder: str) -> list[Path]:
        copies: list[Path] = []
        for entry in self._entries(folder):
            if entry.is_dir():
                copies += [Path(copy.path) for copy in self._entries(entry.path) if copy.name[0] != "."]
        return copies


def copied_from(copy: Path) -> Path:
    """The file that a safe copy `.unbroken-copies/<name>/<time><suffix>` was made from."""
    return copy.parent.parent.parent / copy.parent.name


def stale_pointer(path: Path) -> Checkpoint | None:
    """A tracker file that is empty or names a checkpoint which is not there, as a broken checkpoint."""
    text = read_pointer(path)
    if text is None:
        return None
    if path.name == MEGATRON_TRACKER:
        target = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() and len(text) < 13 else text
    elif step_in_name(text) is None and text:
        return None  # `latest` may mean anything outside DeepSpeed
    else:
        target = text
    if target and "/" not in target and (path.parent / target).is_dir():
        return None
    try:
        modified_at = path.stat().st_mtime
    except OSError:
        return None
    why = f"it names {target[:80]}, which is not there" if target else "it is empty"
    return Checkpoint(
        path=str(path),
        step=None,
        format=POINTER,
        complete=False,
        why=clean_text(why),
        modified_at=modified_at,
        size_bytes=len(text),
    )


def _points_beside(link: str) -> bool:
    folder = os.path.dirname(link)
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return os.path.dirname(os.path.join(folder, target)) == folder


@functools.lru_cache(maxsize=2 * ENTRIES)
def _may_be_one(name: str) -> bool:
    return final_suffix(name) in _FILE_SUFFIXES and not name.startswith(".") and not NOT_TORCH.search(name)
