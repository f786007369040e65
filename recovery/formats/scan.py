"""Finding the newest checkpoints of a run, again and again, for next to nothing.

In folders that were given, or among what this job's ranks were seen to write (`WrittenCheckpoints`): then
nothing else is opened. A checkpoint that has not changed since it was read is not read again. Only names and times are
looked at once a second; a folder that was complete is listed again only when its own time changes, or once a minute.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from diagnosis.signals import clean_text
from recovery.checkpoint import POINTER, Checkpoint, is_beside, says_step
from recovery.formats import BUILT_IN, CheckpointFormat, inspect, recognize, written_formats
from recovery.formats.files import (
    COPIES,
    METADATA,
    SHARD_SUFFIX,
    SUFFIXES,
    Budget,
    final_suffix,
    is_temporary,
    names_a_save,
    shape,
    step_in_name,
)
from recovery.formats.folders import (
    MEGATRON_TRACKER,
    NOT_TORCH,
    TRACKERS,
    inspect_file,
    list_tree,
    read_pointer,
)
from recovery.provenance import Item, Provenance

# ----- among what ranks were seen to write -----

TREE_ENTRIES: Final = 20_000
FILES: Final = 512
FOLDERS: Final = 256
"""The newest of so many written files, and made folders, are looked at."""
LEVELS: Final = 3
_LOADED: Final = (*SUFFIXES, ".safetensors", SHARD_SUFFIX, ".index.json", METADATA, "trainer_state.json")
"""How names end that a script may load with a checkpoint: put there by somebody else, they make it doubtful."""

Takes = Callable[[str, os.stat_result, int], bool]


class FoundPaths(NamedTuple):
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


class WrittenCheckpoints:
    """`find` what may be a checkpoint, by what `provenance` knows."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance
        self.formats: Sequence[CheckpointFormat] = written_formats(
            lambda path: provenance.owns(str(path)), lambda path: self._filled_once(str(path))
        )
        self._distinct = [one for one in self.formats if one.name not in ("folder", "torch_save", "safetensors")]
        self._written = _Written(-1, [], [], {}, {}, {})

    def find(self, takes: Takes) -> FoundPaths:
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
        pointers = [path for path, _ in written.files if os.path.basename(path) in TRACKERS][:FOLDERS]
        copies = [path for path, item in written.files if item.copy_of][:FOLDERS]
        owns = self.provenance.owns
        return FoundPaths(
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

    def began_at(self, path: str) -> float | None:
        """Unix time at which the oldest file of it was opened; None where that is not known."""
        items, below = self.provenance.items, path + "/"
        alone = items.get(path)
        if alone is not None and alone.kind == "file":
            return alone.at_ns / 1e9
        opened = (item.at_ns for file, item in items.items() if item.kind == "file" and file.startswith(below))
        first = min(opened, default=None)
        return None if first is None else first / 1e9

    def is_in_a_saves_folder(self, path: str) -> bool:
        """Whether no save will overwrite it: the next one makes another folder (`tick-20`)."""
        folder = os.path.dirname(path)
        name = os.path.basename(folder)
        numbered = shape(name) and (says_step(name) or not names_a_save(name))
        return bool(numbered) and self.provenance.owns(folder) and self._filled_once(folder)

    def without_foreign_step(self, read: list[Checkpoint], found: Iterable[str]) -> list[Checkpoint]:
        """The checkpoints that were read, without the step of one that a rank copied from another run.

        A base model has the step of its own run, which would win over all saves of this one. It is known by this: of
        all checkpoints (`found`) it was written first, and once, and every later save has a lower step.
        """
        items = self.provenance.items
        first = min((path for path in found if not is_beside(path)), key=lambda path: items[path].at_ns, default="")
        step = next((one.step for one in read if one.path == first), None)
        if step is None:
            return read
        foreign = [one.path for one in read if one.step == step]
        later = [one for one in read if one.complete and one.step is not None and one.path not in foreign]
        later = [one for one in later if not is_beside(one.path)]
        if not later or any(one.step is not None and one.step > step for one in later):
            return read
        latest, earliest = max(items[path].at_ns for path in foreign), min(items[one.path].at_ns for one in later)
        if latest > earliest or not all(map(self._was_written_once, foreign)):
            return read
        return [msgspec.structs.replace(one, step=None) if one.path in foreign else one for one in read]

    def _was_written_once(self, path: str) -> bool:
        item = self.provenance.items[path]
        return self._filled_once(path) if item.kind == "folder" else item.times == 1

    def in_part(self, path: Path) -> Checkpoint | None:
        """A folder of ours in which somebody else wrote, judged by what our ranks wrote; None for anything else."""
        if not path.is_dir() or not self.provenance.owns(str(path)):
            return None
        found = inspect(path, self.formats)
        if found is None:
            return None
        try:
            files = [str(path / name) for name in list_tree(path, entries=TREE_ENTRIES).files]
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


# ----- in given folders: names only, bounded -----

WALK_ENTRIES: Final = 4000
"""Checkpoints and folders looked at in one pass."""
NAMES: Final = 50_000
"""Names read in one pass: reading a name costs a microsecond, looking at a file ten."""
NEWEST: Final = 256
"""Of more numbered files (or folders) than that in one folder, so many with the highest numbers are looked at."""
_SETTLED_S: Final = 2.0
"""A folder that has not changed for so long need not be listed again: its time changes with the next change."""
_DEPTH: Final = 3
_TELLING: Final = (".metadata", "trainer_state.json", "random_states_0.pkl", "mp_rank_00", "mp_rank_00_model_states.pt")
_FILE_SUFFIXES: Final = frozenset((*SUFFIXES, ".safetensors", ".nemo"))


class Name(NamedTuple):
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
            while len(self._kept) > WALK_ENTRIES:
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
    files = [name for name in names if not name.is_folder and (name.name in TRACKERS or may_be_one(name.name))]
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


class FolderWalk:
    """What is in a folder: paths that a format takes for checkpoints, tracker files, safe copies."""

    def __init__(self, takes: Callable[[str, os.stat_result], bool], listings: Listings) -> None:
        self._takes = takes
        self._listings = listings
        self._left = self._names_left = 0
        self._found = FoundPaths({}, [], [])
        self.cut_short = ""
        """A folder with more names than are read; empty for none."""

    def find(self, folders: Iterable[str | Path]) -> FoundPaths:
        """Look at folders that the user gave; one may be a checkpoint itself, or even a file."""
        for folder in sorted({Path(os.path.abspath(folder)) for folder in folders}):
            self._left, self._names_left = WALK_ENTRIES, NAMES
            if not self._takes_itself(folder):
                self._enter(str(folder), 0)
            if self._left < 0 or self._names_left <= 0:
                self.cut_short = str(folder)
        found, pointers, copies = self._found
        return FoundPaths({path: at for path, at in found.items() if not within(path, found)}, pointers, copies)

    def _enter(self, folder: str, depth: int) -> None:
        later: list[str] = []
        for name, is_folder, is_link in self._entries(folder):
            path = os.path.join(folder, name)
            if is_link and _points_beside(path):
                continue  # `latest -> step-100`: that is found under its own name
            if is_folder:
                if name == COPIES:
                    self._found.copies.extend(self._copies_in(path))
                elif not name.startswith(".") and not self._take(path):
                    later.append(path)
            elif name in TRACKERS:
                self._found.pointers.append(Path(path))
            else:
                self._take(path)
        for path in later if depth < _DEPTH else ():
            self._enter(path, depth + 1)

    def _take(self, path: str) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        try:
            stat = os.stat(path)
        except OSError:
            return False
        if not self._takes(path, stat):
            return False
        self._found.checkpoints[path] = stat.st_mtime_ns
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
        self._found.checkpoints[str(folder)] = stat.st_mtime_ns
        return True

    def _entries(self, folder: str) -> tuple[Name, ...]:
        names, read = self._listings.of(folder, self._names_left)
        self._names_left -= read
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


@functools.lru_cache(maxsize=2 * WALK_ENTRIES)
def may_be_one(name: str) -> bool:
    return final_suffix(name) in _FILE_SUFFIXES and not name.startswith(".") and not NOT_TORCH.search(name)


# ----- again and again -----

REPORTED: Final = 8
"""Checkpoints reported by a scan, safe copies included."""
_READ_AT_MOST: Final = 32
"""Checkpoints read in one scan when the newest ones are all incomplete."""
_SMALL: Final = 1 << 30
"""A file up to this size is copied even if nothing shows that this run wrote it."""
_OFFER_AGAIN_S: Final = 1.0
_OFFER_AT_LEAST_S: Final = 600.0
_STILL_S: Final = 1.0
_RELIST_S: Final = 60.0
_WRITTEN_IN_ORDER: Final = frozenset(("torch_save", "dcp", "hf", "megatron"))
"""Formats whose completeness is proved by what is written last; others must have stood still for a moment."""

_LAST: Final = re.compile(r"(?<![a-z])(?:last|latest|current|newest)(?![a-z])", re.IGNORECASE)
"""In the name of a file that the next save overwrites."""

Fingerprint = tuple[int, ...]


class _Known(NamedTuple):
    """What the last scans found out about one path."""

    fingerprint: Fingerprint
    checkpoint: Checkpoint | None
    since: float
    """When this fingerprint was first seen."""
    listed_at: float
    strange: str
    """Why it is not this job's alone; empty when it is."""
    rewritten: bool
    """It was complete before, and has been written again under the same name."""


class CheckpointScanner:
    """Looks for checkpoints once a second. Not thread-safe; never raises OSError."""

    def __init__(self, formats: Sequence[CheckpointFormat] = BUILT_IN, seen: WrittenCheckpoints | None = None) -> None:
        """`seen`: what ranks were seen to write is looked at, in place of folders."""
        self._formats = formats if seen is None else seen.formats
        self._seen = seen
        self.left: dict[str, str] = {}
        """Checkpoints that are left alone -> why: this job wrote in them, and somebody else did."""
        self._known: dict[str, _Known] = {}
        self._taken: dict[str, tuple[Fingerprint, bool]] = {}
        """Path -> whether a format recognizes it."""
        self._newest: list[Checkpoint] = []
        self._copied: set[tuple[str, int]] = set()
        """Path and time (ns) of every version that there is a copy of."""
        self._offered: dict[str, tuple[float, float, int]] = {}
        """Path -> when it was last offered for copying, how long to wait before it is again, and its time (ns) then."""
        self._listings = Listings()
        self.cut_short = ""
        """A folder of the last scan with more names than are read; empty for none."""
        self._now, self._at_rest = 0.0, False
        self._began = math.inf
        """When the first scan was made: what appears later was written by this run."""

    def scan(self, folders: Iterable[str | Path], now: float, *, at_rest: bool = False) -> list[Checkpoint]:
        """The newest checkpoints of all folders, newest first, then the safe copies. `now`: Unix time.

        `at_rest`: nothing writes there any more, so that a checkpoint need not have stood still.
        """
        self._began, self._now = min(self._began, now), now
        self._at_rest = at_rest
        self.left = {}
        if at_rest:
            self._listings = Listings()  # to open a folder asks a network file system anew, its time may be cached
        found, trackers, copies = self._walked(folders) if self._seen is None else self._seen.find(self._takes)
        pointers = [stale for path in trackers if (stale := stale_pointer(path)) is not None]
        in_place = self._read_newest(_likely_newest(found), now)
        if self._seen is not None:
            in_place = sorted(self._seen.without_foreign_step(in_place, found), key=_age, reverse=True)
        copied = [copy for path in sorted(set(copies)) if (copy := self._read_copy(path, now))]
        copied.sort(key=_age, reverse=True)
        self._forget({*found, *map(str, copies)})
        self._newest = in_place
        self._copied = {(copy.copy_of, _time(Path(copy.path))) for copy in copied}
        kept = copied[: REPORTED // 2]
        pointers = pointers[:2]
        return [*pointers, *_cut(in_place, REPORTED - len(kept) - len(pointers)), *kept]

    def _walked(self, folders: Iterable[str | Path]) -> FoundPaths:
        walk = FolderWalk(self._takes, self._listings)
        found = walk.find(folders)
        self.cut_short = walk.cut_short
        return found

    def files_to_copy(self) -> list[Path]:
        """Complete single files of the last scan that their next save will overwrite in place, not copied yet.

        Those that were seen to be written again under the same name, and those under a name without a step that are
        the only checkpoint in their folder (nanoGPT's `ckpt.pt`) or are called the last (Lightning's `last.ckpt`). A
        file of which no copy succeeds (it changes faster than it is copied, there is no space) is offered less and
        less often, at least once in ten minutes.
        """
        return [path for path in self._overwritten() if self._may_be_offered(path)]

    def _may_be_offered(self, path: Path) -> bool:
        version = _time(path)
        at, delay, offered = self._offered.get(str(path), (-math.inf, 0.0, 0))
        if (str(path), offered) in self._copied:
            delay = 0.0
        if (str(path), version) in self._copied or self._now - at < delay:
            return False
        self._offered[str(path)] = (self._now, min(2 * delay or _OFFER_AGAIN_S, _OFFER_AT_LEAST_S), version)
        return True

    def _overwritten(self) -> list[Path]:
        chosen: list[Path] = []
        for found in self._newest:
            path, known = Path(found.path), self._known.get(found.path)
            if not found.complete or known is None or not path.is_file():
                continue
            if self._seen is not None and not known.rewritten and self._seen.is_in_a_saves_folder(found.path):
                continue
            alone = not any(other != found and Path(other.path).parent == path.parent for other in self._newest)
            ours = found.step is not None or known.since > self._began or found.size_bytes <= _SMALL
            again = alone or _LAST.search(path.name) is not None
            if known.rewritten or (again and ours and step_in_name(path.name) is None):
                chosen.append(path)
        return chosen

    def _takes(self, path: str, stat: os.stat_result, touched_ns: int = 0) -> bool:
        """Whether a format recognizes the path; asked again only when it has changed."""
        fingerprint = (stat.st_mtime_ns, stat.st_size, stat.st_ino, touched_ns)
        before = self._taken.get(path)
        if before is None or before[0] != fingerprint:
            if len(self._taken) > 4 * WALK_ENTRIES:
                self._taken.clear()
            before = (fingerprint, recognize(Path(path), self._formats) is not None)
            self._taken[path] = before
        return before[1]

    def _read_newest(self, paths: list[Path], now: float) -> list[Checkpoint]:
        """The newest, and further ones until one of them is complete."""
        read: list[Checkpoint] = []
        for path in paths[:_READ_AT_MOST]:
            if len(read) >= REPORTED and any(found.complete for found in read):
                break
            found = self._read(path, now)
            if found is not None:
                read.append(found)
        return sorted(read, key=_age, reverse=True)

    def _read(self, path: Path, now: float) -> Checkpoint | None:
        key = str(path)
        before = self._known.get(key)
        fingerprint = self._fingerprint(path, before, now)
        if fingerprint is None:
            return None
        if before is None or before.fingerprint != fingerprint:
            rewritten = before is not None and (
                before.rewritten or bool(before.checkpoint and before.checkpoint.complete)
            )
            strange = self._strange(key)
            before = _Known(fingerprint, self._judged(path, strange), now, now, strange, rewritten)
            self._known[key] = before
        elif self._seen is not None and (before.strange or self._at_rest):  # more may be known by now, or have come
            strange = self._strange(key)
            if strange != before.strange:
                before = self._known[key] = before._replace(strange=strange, checkpoint=self._judged(path, strange))
        found = before.checkpoint
        if before.strange:
            self.left[key] = before.strange + _what_of(found)
            if found is not None and found.in_doubt and not self._at_rest:
                return None  # more may be known soon
        if found is None or not found.complete or found.format in _WRITTEN_IN_ORDER or self._at_rest:
            return found
        if now - before.since < _STILL_S and not now - found.modified_at >= _STILL_S:
            return msgspec.structs.replace(found, complete=False, why="it changed less than a second ago")
        return found

    def _judged(self, path: Path, strange: str) -> Checkpoint | None:
        found = inspect(path, self._formats) if not strange else None
        if self._seen is None:
            return found
        found = self._seen.in_part(path) if strange else found
        return None if found is None else msgspec.structs.replace(found, began_at=self._seen.began_at(found.path))

    def _strange(self, path: str) -> str:
        return "" if self._seen is None else self._seen.provenance.why_not_ours(path)

    def _fingerprint(self, path: Path, before: _Known | None, now: float) -> Fingerprint | None:
        """Changes when the checkpoint does; None when it is gone."""
        try:
            stat = path.stat()
            if not path.is_dir():
                return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            outside = tuple(_time(path.parent / name) for name in TRACKERS)
            own = (stat.st_mtime_ns, stat.st_ino, *outside)
            if before is not None and before.fingerprint[: len(own)] == own:
                settled = before.checkpoint is not None and before.checkpoint.complete
                if settled and now - before.listed_at < _RELIST_S and not self._at_rest:
                    return before.fingerprint
                self._known[str(path)] = before._replace(listed_at=now)
            tree = list_tree(path, TREE_ENTRIES)
        except OSError:
            return None
        inside = hash(tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in sorted(tree.files.items())))
        return (*own, inside)

    def _read_copy(self, path: Path, now: float) -> Checkpoint | None:
        found = self._read(path, now)
        if found is None or is_temporary(path.name):
            return None
        original = self._original(path)
        step = found.step if found.step is not None else step_in_name(original.name)
        return msgspec.structs.replace(found, copy_of=str(original), step=step)

    def _original(self, copy: Path) -> Path:
        if self._seen is None:
            return copied_from(copy)
        return Path(self._seen.provenance.items[str(copy)].copy_of)

    def _forget(self, seen: set[str]) -> None:
        for key in [key for key in self._known if key not in seen]:
            del self._known[key]


def _what_of(found: Checkpoint | None) -> str:
    if found is None:
        return ""
    if found.in_doubt:
        return "; whether it is whole is in doubt, so nothing older is offered: the script decides"
    return f"; what this job wrote in it is {'whole' if found.complete else 'not whole'}"


def _age(found: Checkpoint) -> tuple[int, float]:
    return (found.step if found.step is not None else -1, found.modified_at)


def _cut(found: list[Checkpoint], limit: int) -> list[Checkpoint]:
    """The first `limit`, with a complete one among them if there is any."""
    if not any(checkpoint.complete for checkpoint in found[:limit]):
        whole = [checkpoint for checkpoint in found[limit:] if checkpoint.complete][:1]
        return found[: limit - len(whole)] + whole
    return found[:limit]


def _likely_newest(times: dict[str, int]) -> list[Path]:
    """The two written last, then by the step in the name and the time: nothing is opened for it."""
    latest = sorted(times, key=lambda path: (times[path], path), reverse=True)

    def key(path: str) -> tuple[int, int]:
        step = step_in_name(os.path.basename(path))
        return (-1 if step is None else step, times[path])

    return [Path(path) for path in (*latest[:2], *sorted(latest[2:], key=key, reverse=True)[:_READ_AT_MOST])]


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
