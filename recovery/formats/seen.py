"""The checkpoints among what ranks were seen to write. Nothing else is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from recovery.actions import Checkpoint
from recovery.formats.base import Budget, CheckpointFormat, names_a_save, says_step, shape
from recovery.formats.dcp_files import METADATA, SHARD_SUFFIX
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER
from recovery.formats.registry import inspect, recognize, seen_formats
from recovery.formats.torch_files import SUFFIXES
from recovery.formats.trees import inspect_file, list_tree
from recovery.formats.walk import may_be_one
from recovery.provenance import Item, Provenance

ENTRIES: Final = 20_000
FILES: Final = 512
FOLDERS: Final = 256
"""The newest of so many written files, and made folders, are looked at."""
LEVELS: Final = 3
_LOADED: Final = (*SUFFIXES, ".safetensors", SHARD_SUFFIX, ".index.json", METADATA, "trainer_state.json")
"""How names end that a script may load with a checkpoint: put there by somebody else, they make it doubtful."""
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
    alike: dict[tuple[str, str], int]
    """Folders whose names differ in numbers only -> when something in one of them was written last."""
    inside: dict[str, list[str]]
    """Folder -> the files in it that may be checkpoints."""
    others: dict[str, int]


class Seen:
    """`find` what may be a checkpoint, by what `provenance` knows."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance
        self.formats: Sequence[CheckpointFormat] = seen_formats(
            lambda path: provenance.owns(str(path)), lambda path: self._filled_once(str(path))
        )
        self._distinct = [one for one in self.formats if one.name not in ("folder", "torch_save", "safetensors")]
        self._written = _Written(-1, [], [], {}, {}, {})

    def find(self, takes: Takes) -> Found:
        """`takes`: whether a format recognizes the path, asked again when the number has changed."""
        written = self._sorted()
        checkpoints: dict[str, int] = {}
        for path in written.folders[:FOLDERS]:
            at = self._taken(path, takes, written.alike.get(_alike(path), 0))
            if at is not None:
                checkpoints[path] = at
        for path in [path for path in checkpoints if within(path, checkpoints)]:
            del checkpoints[path]
        for path, item in written.files[:FILES]:
            if item.copy_of or not may_be_one(os.path.basename(path)) or within(path, written.others):
                continue
            at = None if within(path, checkpoints) or self.is_one_of_several(path) else self._taken(path, takes, 0)
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
            alike: dict[tuple[str, str], int] = {}
            for path in folders:
                alike[_alike(path)] = max(alike.get(_alike(path), 0), touched.get(path, 0))
            inside: dict[str, list[str]] = {}
            for path, item in files[:FILES]:
                if not item.copy_of and may_be_one(os.path.basename(path)):
                    inside.setdefault(os.path.dirname(path), []).append(path)
            self._written = _Written(changes, files, folders, alike, inside, self._others(files[:FILES]))
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

    # ----- what belongs together -----

    def is_one_of_several(self, path: str) -> bool:
        """Whether it is part of one save in a folder of its own (`tick-10/model.pt`): it is no checkpoint by itself."""
        folder = os.path.dirname(path)
        beside = self._sorted().inside.get(folder, [])
        if len(beside) < 2 or not shape(os.path.basename(folder)) or not self.provenance.owns(folder):
            return False
        return not any(says_step(os.path.basename(one)) for one in beside) and self._filled_once(folder)

    def is_in_a_saves_folder(self, path: str) -> bool:
        """Whether no save will overwrite it: the next one makes another folder (`tick-20`)."""
        folder = os.path.dirname(path)
        name = os.path.basename(folder)
        numbered = shape(name) and (says_step(name) or not names_a_save(name))
        return bool(numbered) and self.provenance.owns(folder) and self._filled_once(folder)

    def in_part(self, path: Path) -> Checkpoint | None:
        """A folder of ours in which somebody else wrote, judged by what our ranks wrote; None for anything else."""
        if not path.is_dir() or not self.provenance.owns(str(path)):
            return None
        found = inspect(path, self.formats)
        if found is None:
            return None
        try:
            files = [str(path / name) for name in list_tree(path, entries=ENTRIES).files]
        except OSError:
            return None
        ours = [file for file in files if self.provenance.owns(file)]
        strange = set(files) - set(ours)
        doubtful = any(file in self.provenance.items or file.endswith(_LOADED) for file in strange)
        if not doubtful or (not found.complete and any(map(_is_torn, ours))):
            return found
        why = "somebody else wrote in it, and what this job wrote does not tell whether it is whole"
        return msgspec.structs.replace(found, complete=False, in_doubt=True, why=why)

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


def _is_torn(path: str) -> bool:
    try:
        report = inspect_file(Path(path), Budget())
    except OSError:
        return False
    return report is not None and bool(report.why)


def _alike(path: str) -> tuple[str, str]:
    folder, name = os.path.split(path)
    return folder, shape(name) or name


def within(path: str, folders: dict[str, int]) -> bool:
    """Whether it is part of one of them."""
    return any(above in folders for above in _above(path))


def _above(path: str) -> list[str]:
    found: list[str] = []
    for _ in range(LEVELS):
        path = os.path.dirname(path)
        found.append(path)
    return found
