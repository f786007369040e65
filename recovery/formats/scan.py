"""Finding the newest checkpoints of a run, again and again, for next to nothing.

In folders that were given, or among what this job's ranks were seen to write (`Seen`): then nothing else is opened.
A checkpoint that has not changed since it was read is not read again. Only names and times are looked at once a
second; a folder that was complete is listed again only when its own time changes, or once a minute.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from recovery.actions import Checkpoint
from recovery.formats.base import CheckpointFormat, is_temporary, step_in_name
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER, list_tree
from recovery.formats.places import WALK_ENTRIES, FoundPaths, Listings, Seen, Walk, copied_from, stale_pointer, within
from recovery.formats.registry import BUILT_IN, inspect, recognize

REPORTED: Final = 8
"""Checkpoints reported by a scan, safe copies included."""
_READ_AT_MOST: Final = 32
"""Checkpoints read in one scan when the newest ones are all incomplete."""
_TREE_ENTRIES: Final = 20_000
_SMALL: Final = 1 << 30
"""A file up to this size is copied even if nothing tells that this run wrote it."""
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


def discover(
    folder: Path, formats: Sequence[CheckpointFormat] = BUILT_IN, *, at_rest: bool = False
) -> list[Checkpoint]:
    """The newest checkpoints in a folder (of checkpoints, or with a single file), newest first.

    `at_rest`: nothing writes there any more, so that a checkpoint need not have stood still.
    """
    return CheckpointScanner(formats).scan([folder], time.time(), at_rest=at_rest)


class CheckpointScanner:
    """Looks for checkpoints once a second. Not thread-safe; never raises OSError."""

    def __init__(self, formats: Sequence[CheckpointFormat] = BUILT_IN, seen: Seen | None = None) -> None:
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
        found: dict[str, int] = {}
        pointers: list[Path] = []
        copies: list[Path] = []
        self.cut_short = ""
        for folder in sorted({Path(os.path.abspath(folder)) for folder in folders}):
            walk = Walk(self._takes, self._listings)
            walk.enter(folder)
            found |= walk.found
            copies += walk.copies
            pointers += walk.pointers
            self.cut_short = str(folder) if walk.cut_short else self.cut_short
        return FoundPaths({path: at for path, at in found.items() if not within(path, found)}, pointers, copies)

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
        if not strange:
            return inspect(path, self._formats)
        return None if self._seen is None else self._seen.in_part(path)

    def _strange(self, path: str) -> str:
        return "" if self._seen is None else self._seen.provenance.why_not_ours(path)

    def _fingerprint(self, path: Path, before: _Known | None, now: float) -> Fingerprint | None:
        """Changes when the checkpoint does; None when it is gone."""
        try:
            stat = path.stat()
            if not path.is_dir():
                return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            outside = tuple(_time(path.parent / name) for name in (MEGATRON_TRACKER, DEEPSPEED_TRACKER))
            own = (stat.st_mtime_ns, stat.st_ino, *outside)
            if before is not None and before.fingerprint[: len(own)] == own:
                settled = before.checkpoint is not None and before.checkpoint.complete
                if settled and now - before.listed_at < _RELIST_S and not self._at_rest:
                    return before.fingerprint
                self._known[str(path)] = before._replace(listed_at=now)
            tree = list_tree(path, _TREE_ENTRIES)
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
