"""The checkpoints among what ranks were seen to write. Nothing else is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from recovery.formats.base import CheckpointFormat
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER
from recovery.formats.registry import recognize, seen_formats
from recovery.formats.walk import may_be_one
from recovery.provenance import Item, Provenance

FILES: Final = 512
FOLDERS: Final = 256
"""The newest of so many written files, and made folders, are looked at."""
LEVELS: Final = 3
_TRACKERS: Final = (MEGATRON_TRACKER, DEEPSPEED_TRACKER)

Takes = Callable[[str, os.stat_result, int], bool]


class Found(NamedTuple):
    checkpoints: dict[str, int]
    """Path -> when it was changed, ns."""
    pointers: list[Path]
    copies: list[Path]


class _Written(NamedTuple):
    """What is made of the items; the same until they change."""

    changes: int
    files: list[tuple[str, Item]]
    """The newest first, and so of the folders."""
    folders: list[str]
    touched: dict[str, int]
    """Folder -> when something in it was written last."""
    others: dict[str, int]


class Seen:
    """`find` what may be a checkpoint, by what `provenance` knows."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance
        self.formats: Sequence[CheckpointFormat] = seen_formats(
            lambda path: provenance.owns(str(path)), lambda path: self._filled_once(str(path))
        )
        self._distinct = [one for one in self.formats if one.name not in ("folder", "torch_save", "safetensors")]
        self._written = _Written(-1, [], [], {}, {})

    def find(self, takes: Takes) -> Found:
        """`takes`: whether a format recognizes the path, asked again when the number has changed."""
        written = self._sorted()
        checkpoints: dict[str, int] = {}
        for path in written.folders[:FOLDERS]:
            at = self._taken(path, takes, written.touched.get(path, 0))
            if at is not None:
                checkpoints[path] = at
        for path in [path for path in checkpoints if within(path, checkpoints)]:
            del checkpoints[path]
        for path, item in written.files[:FILES]:
            if item.copy_of or not may_be_one(os.path.basename(path)) or within(path, written.others):
                continue
            at = None if within(path, checkpoints) else self._taken(path, takes, 0)
            if at is not None:
                checkpoints[path] = at
        pointers = [path for path, _ in written.files if os.path.basename(path) in _TRACKERS][:FOLDERS]
        copies = [path for path, item in written.files if item.copy_of][:FOLDERS]
        owns = self.provenance.owns
        return Found(
            checkpoints, [Path(path) for path in pointers if owns(path)], list(map(Path, filter(owns, copies)))
        )

    def _sorted(self) -> _Written:
        items, changes = self.provenance.items, self.provenance.changes
        if self._written.changes != changes:
            newest = sorted(items.items(), key=lambda pair: pair[1].at_ns, reverse=True)
            files = [(path, item) for path, item in newest if item.kind == "file"]
            touched: dict[str, int] = {}
            for path, item in reversed(files):
                touched.update(dict.fromkeys(_above(path), item.at_ns))
            folders = [path for path, item in newest if item.kind == "folder"]
            self._written = _Written(changes, files, folders, touched, self._others(files[:FILES]))
        return self._written

    def _taken(self, path: str, takes: Takes, touched_ns: int) -> int | None:
        """When it was changed; None when it is no checkpoint, or not what a rank left there."""
        if not self.provenance.owns(path):
            return None
        try:
            stat = os.stat(path)
        except OSError:
            return None
        return stat.st_mtime_ns if takes(path, stat, touched_ns) else None

    def _others(self, files: Sequence[tuple[str, Item]]) -> dict[str, int]:
        """Folders that are a checkpoint by what is in them, made by somebody else: a file in one is none by itself."""
        items = self.provenance.items
        around = {folder for path, _ in files for folder in _above(path)}
        strange = [folder for folder in around if folder not in items]
        return {folder: 0 for folder in strange if recognize(Path(folder), self._distinct) is not None}

    def _filled_once(self, folder: str) -> bool:
        """Nothing in it was written again, nor twice of one kind by the same process."""
        kinds: set[tuple[str, str]] = set()
        for path, item in self.provenance.items.items():
            if item.kind != "file" or not path.startswith(folder + "/") or not may_be_one(os.path.basename(path)):
                continue
            kind = (item.by, "".join("#" if letter.isdigit() else letter for letter in path))
            if item.times > 1 or kind in kinds:
                return False
            kinds.add(kind)
        return True


def within(path: str, folders: dict[str, int]) -> bool:
    """Whether it is part of one of them."""
    return any(above in folders for above in _above(path))


def _above(path: str) -> list[str]:
    found: list[str] = []
    for _ in range(LEVELS):
        path = os.path.dirname(path)
        found.append(path)
    return found
