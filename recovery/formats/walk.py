"""One pass over a folder of checkpoints: names only, bounded."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from diagnosis.signals import clean_text
from recovery.actions import Checkpoint
from recovery.checkpoint import POINTER
from recovery.formats.base import COPIES, final_suffix, step_in_name
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER, read_pointer
from recovery.formats.torch_files import SUFFIXES
from recovery.formats.trees import NOT_TORCH

ENTRIES: Final = 4000
"""Checkpoints and folders looked at in one pass."""
NAMES: Final = 50_000
"""Names read in one pass: reading a name costs a microsecond, looking at a file ten."""
NEWEST: Final = 256
"""Of more numbered files (or folders) than that in one folder, so many with the highest numbers are looked at."""
_SETTLED_S: Final = 2.0
"""A folder that has not changed for so long need not be listed again: its time tells of the next change."""
_DEPTH: Final = 3
_TELLING: Final = (".metadata", "trainer_state.json", "random_states_0.pkl", "mp_rank_00", "mp_rank_00_model_states.pt")
_FILE_SUFFIXES: Final = frozenset((*SUFFIXES, ".safetensors"))
_POINTERS: Final = (MEGATRON_TRACKER, DEEPSPEED_TRACKER)


class Name(NamedTuple):
    """One name in a folder."""

    name: str
    is_folder: bool
    is_link: bool


class _Listing(NamedTuple):
    made_of: tuple[int, int]
    """The folder's time (ns) and inode."""
    names: tuple[Name, ...]
    read: int
    """How many names there were."""


class Listings:
    """What is in folders, read again only when they have changed; of very many names, those that may matter."""

    def __init__(self) -> None:
        self._kept: dict[str, _Listing] = {}

    def of(self, folder: str, limit: int) -> tuple[tuple[Name, ...], int]:
        """Names in a folder and how many were read, at most `limit`; none when it went or may not be read."""
        try:
            stat = os.stat(folder)
            made_of = (stat.st_mtime_ns, stat.st_ino)
            kept = self._kept.get(folder)
            if kept is not None and kept.made_of == made_of:
                return kept.names, kept.read
            names = _listed(folder, limit)
        except OSError:
            self._kept.pop(folder, None)
            return (), 0
        listing = _Listing(made_of, tuple(_worth_a_look(names)), len(names))
        self._kept.pop(folder, None)
        if abs(time.time() - stat.st_mtime) > _SETTLED_S:
            self._kept[folder] = listing
            while len(self._kept) > ENTRIES:
                del self._kept[next(iter(self._kept))]
        return listing.names, listing.read


def _listed(folder: str, limit: int) -> list[Name]:
    names: list[Name] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(names) >= limit:
                break
            try:
                names.append(Name(entry.name, entry.is_dir(), entry.is_symlink()))
            except OSError:
                continue  # it went, or a link that leads nowhere for us
    return names


def _worth_a_look(names: list[Name]) -> list[Name]:
    """Folders, files that may be checkpoints, tracker files; of very many numbered ones the highest."""
    folders = [name for name in names if name.is_folder]
    files = [name for name in names if not name.is_folder and (name.name in _POINTERS or may_be_one(name.name))]
    return [*_highest(folders), *_highest(files)]


def _highest(names: list[Name]) -> list[Name]:
    if len(names) <= NEWEST:
        return names
    numbered = [(step, name) for name in names if (step := step_in_name(name.name)) is not None]
    if len(numbered) <= NEWEST:
        return names
    numbered.sort(key=lambda pair: pair[0], reverse=True)
    kept = {name for _, name in numbered[:NEWEST]}
    return [name for name in names if name in kept or step_in_name(name.name) is None]


class Walk:
    """What is in a folder: paths that a format takes for checkpoints, tracker files, safe copies."""

    def __init__(self, takes: Callable[[str, os.stat_result], bool], listings: Listings | None = None) -> None:
        self._takes = takes
        self._listings = listings or Listings()
        self._left, self._names_left = ENTRIES, NAMES
        self.found: dict[str, int] = {}
        """Path -> when it was changed, ns."""
        self.pointers: list[Path] = []
        self.copies: list[Path] = []
        self.cut_short = False
        """There were more names than are read."""

    def enter(self, folder: Path) -> None:
        """Look at a folder that the user gave; it may be one checkpoint itself, or even a file."""
        if not self._takes_itself(folder):
            self._enter(str(folder), 0)

    def _enter(self, folder: str, depth: int) -> None:
        later: list[str] = []
        for name, is_folder, is_link in self._entries(folder):
            path = os.path.join(folder, name)
            if is_link and _points_beside(path):
                continue  # `latest -> step-100`: that is found under its own name
            if is_folder:
                if name == COPIES:
                    self.copies += self._copies_in(path)
                elif not name.startswith(".") and not self._take(path):
                    later.append(path)
            elif name in _POINTERS:
                self.pointers.append(Path(path))
            else:
                self._take(path)
        for path in later if depth < _DEPTH else ():
            self._enter(path, depth + 1)

    def _take(self, path: str) -> bool:
        if self._left <= 0:
            self.cut_short = True
            return False
        self._left -= 1
        try:
            stat = os.stat(path)
        except OSError:
            return False
        if not self._takes(path, stat):
            return False
        self.found[path] = stat.st_mtime_ns
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

    def _entries(self, folder: str) -> tuple[Name, ...]:
        names, read = self._listings.of(folder, self._names_left)
        self._names_left -= read
        self.cut_short |= self._names_left <= 0
        return names

    def _copies_in(self, folder: str) -> list[Path]:
        copies: list[Path] = []
        for name in self._entries(folder):
            if name.is_folder:
                inside = os.path.join(folder, name.name)
                copies += [Path(inside, copy.name) for copy in self._entries(inside) if copy.name[0] != "."]
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
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 13 else None
        target = text if number is None else f"iter_{number:07d}"
        if number is not None and not (path.parent / target).is_dir() and _has_step(path.parent, number):
            return None  # not Megatron's, but with its tracker (verl's `global_step_40`)
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


def _has_step(folder: Path, step: int) -> bool:
    return any(name.is_folder and step_in_name(name.name) == step for name in Listings().of(str(folder), NAMES)[0])


def _points_beside(link: str) -> bool:
    folder = os.path.dirname(link)
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return os.path.dirname(os.path.normpath(os.path.join(folder, target))) == folder


@functools.lru_cache(maxsize=2 * ENTRIES)
def may_be_one(name: str) -> bool:
    return final_suffix(name) in _FILE_SUFFIXES and not name.startswith(".") and not NOT_TORCH.search(name)
