"""What this node wrote of each save: which files, of which attempt, and whether they stand still.

The agent names the saves that it sees; nothing else in the folder is looked at. Files that were brought from elsewhere
are not this node's part: a note of them is kept beside our mirrors.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from recovery.checkpoint import Checkpoint
from recovery.formats import PartReport
from recovery.formats.dcp import dcp_needs
from recovery.formats.files import METADATA, OURS, is_temporary
from recovery.tiers import DEPTH, FILES_IN_PART, MIRRORS, SINGLE_FILES, PartFile, Save, SavePart, why_bad_name
from supervisor.files import write_atomically
from supervisor.mover.copying import PARTIAL

STILL_S: Final = 2.0
"""Files of a part that no format calls whole must not have changed for so long, while ranks live."""
NOTES_BYTES: Final = 16 << 20
NOTES_KEPT: Final = 64
SKIPPED: Final = frozenset((*OURS, MIRRORS))

Version = tuple[int, int]
"""Size and time (ns) of a file."""


class Seen(NamedTuple):
    """A save as it is on this disk."""

    part: SavePart
    movable: bool
    """It stands still, and nothing in it is half written: it may be copied."""
    versions: dict[str, Version]
    """Of the part's files."""
    still: bool = True
    """It may be reported."""
    odd_name: str = ""
    """A file whose name cannot be copied: the part is not."""


class Judged(NamedTuple):
    versions: object
    """Its files as they were when they were read."""
    verdict: Checkpoint | None = None
    needs: dict[str, int] = {}
    whole: bool = False
    """Also if others have what it `lacks`."""
    lacks: tuple[str, ...] = ()
    torn: str = ""


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """A save whose missing files were brought here."""

    save: Save
    versions: dict[str, Version]
    """Of the files that were brought."""


class Notes(msgspec.Struct, kw_only=True):
    """What the next mover of this node must know."""

    brought: dict[str, Brought] = {}
    """By the save's name."""
    attempts: dict[str, tuple[int, int]] = {}
    """Save -> the attempt that wrote it, and the time (ns) of its newest file then."""
    rewritten: dict[str, int] = {}
    """Save -> the attempt that wrote files of it again."""


class LocalParts:
    """`look` again and again."""

    def __init__(
        self,
        folder: Path,
        home: Path,
        node: str,
        inspect: Callable[[Path], Checkpoint | None],
        inspect_part: Callable[[Path, Container[str]], PartReport | None] = lambda _, __: None,
    ) -> None:
        """`home`: where this job keeps its notes."""
        self._inspect_part = inspect_part
        self.folder = folder
        self._node = node
        self._inspect = inspect
        self._file = home / f"notes-{node}.json"
        self._notes = self._read_notes()
        self._stood: dict[str, tuple[object, float]] = {}
        """Save -> its files as they were seen, and since when."""
        self._judged: dict[str, Judged] = {}
        """By the save's name."""
        self._moved: dict[str, tuple[int, bool, dict[str, Version]]] = {}
        """Save -> the attempt that wrote it, whether it was whole, and its files as they stood still."""

    def look(
        self, paths: Sequence[str], attempt: int, since: float, now: float, *, at_rest: bool = False
    ) -> list[Seen]:
        """`paths`: of the saves, the newest first. `attempt`: whose ranks write `since` (Unix time). `now`: monotonic.
        `at_rest`: no rank is left that could write."""
        found: list[Seen] = []
        names: set[str] = set()
        for path in paths:
            name = os.path.relpath(path, self.folder)
            if why_bad_name(name) or name in names:
                continue
            seen = self._one(name, attempt, since, now, at_rest)
            if seen is not None:
                names.add(name)
                found.append(seen)
        for kept in (self._stood, self._judged, self._moved):
            for name in [name for name in kept if name not in names]:
                del kept[name]
        return found

    def _one(self, name: str, attempt: int, since: float, now: float, at_rest: bool) -> Seen | None:
        versions = _versions(self.folder, name)
        if versions is None:
            return None
        brought = self._notes.brought.get(name)
        foreign = brought.versions if brought is not None else {}
        own = {file: version for file, version in versions.items() if foreign.get(file) != version}
        if not own and foreign:
            return None  # all of it came from elsewhere
        odd = next((file for file in own if why_bad_name(file)), "")
        files = {
            file: version
            for file, version in own.items()
            if not is_temporary(os.path.basename(file)) and not why_bad_name(file)
        }
        single = name in versions
        stood_s = self._stood_s(name, versions, now)
        judged = self._judge(name, versions, own, stood_s > 0 or at_rest)
        verdict = judged.verdict
        newest_ns = max((at for _, at in files.values()), default=0)
        whole = judged.whole and judged.versions == versions and not foreign
        still = at_rest or whole or stood_s >= STILL_S
        too_many = len(files) > FILES_IN_PART
        format_name = verdict.format if verdict is not None else "folder"
        half = len(files) < len(own) or not files or (format_name in SINGLE_FILES and not whole)
        movable = still and not half and not too_many and not odd
        writer = self._attempt(name, newest_ns, attempt, since)
        part = SavePart(
            name=name,
            owner=self._node,
            attempt=writer,
            stamp=newest_ns // 1000 if single else 0,
            format=format_name,
            step=verdict.step if verdict is not None else None,
            modified_at=newest_ns / 1e9,
            files=tuple(PartFile(name=file, size=size) for file, (size, _) in sorted(files.items())[:FILES_IN_PART]),
            whole=whole,
            why=_as_text(verdict.why if verdict is not None else "") or ("" if whole else "it is being written"),
            needs=tuple(PartFile(name=file, size=size) for file, size in sorted(judged.needs.items())),
            lacks=judged.lacks if whole else (),
            torn=judged.torn,
            rewritten=not single and self._is_rewritten(name, writer, files, movable, whole),
        )
        return Seen(part, movable and not part.rewritten, files, still, _as_text(odd))

    def _is_rewritten(self, name: str, writer: int, files: dict[str, Version], movable: bool, whole: bool) -> bool:
        """Whether what stood still was written again. Files that come later are no rewriting, nor is a file that goes
        on to grow after a pause, unless the part was whole."""
        before, was_whole, known = self._moved.get(name, (writer, False, {}))
        again = [
            version[0] <= old[0] or was_whole for file, old in known.items() if (version := files.get(file, old)) != old
        ]
        if before == writer and any(again):
            self._notes.rewritten[name] = writer
            self._write_notes()
        if movable:
            self._moved[name] = (writer, whole, files)
        return self._notes.rewritten.get(name) == writer

    def _stood_s(self, name: str, versions: dict[str, Version], now: float) -> float:
        before = self._stood.get(name)
        if before is None or before[0] != versions:
            self._stood[name] = (versions, now)
            return 0.0
        return now - before[1]

    def _judge(self, name: str, versions: dict[str, Version], own: Container[str], may_read: bool) -> Judged:
        """Read again only when the files have changed, and not while they change with each look."""
        known = self._judged.get(name)
        if known is not None and (known.versions == versions or not may_read):
            return known
        if not may_read:
            return Judged(None)
        verdict = self._inspect(self.folder / name)
        whole = verdict is not None and verdict.complete
        found = Judged(versions, verdict, self._needs(versions), whole)
        if verdict is not None and not whole:  # by itself; ranks elsewhere may have the rest
            names = {file[len(name) + 1 :] for file in versions if file in own}
            part = self._inspect_part(self.folder / name, names)
            if part is not None:
                lacks = tuple(f"{name}/{one}" for one in part.lacks[:FILES_IN_PART])
                found = found._replace(whole=not part.why, lacks=lacks, torn=_as_text(part.torn))
        self._judged[name] = found
        return found

    def _needs(self, versions: dict[str, Version]) -> dict[str, int]:
        needs: dict[str, int] = {}
        for file in versions:
            folder, _, base = file.rpartition("/")
            if base == METADATA:
                try:
                    found = dcp_needs(self.folder / folder)
                except OSError:
                    continue
                named = {f"{folder}/{one}" if folder else one: size for one, size in found.items()}
                needs.update({one: size for one, size in named.items() if not why_bad_name(one)})
        return needs

    def _attempt(self, name: str, newest_ns: int, attempt: int, since: float) -> int:
        known = self._notes.attempts.get(name)
        if known is not None and known[1] == newest_ns:
            return known[0]
        if not newest_ns:
            return attempt
        writer = attempt if newest_ns / 1e9 >= since - 1.0 else known[0] if known is not None else 0
        self._notes.attempts.pop(name, None)
        self._notes.attempts[name] = (writer, newest_ns)
        self._write_notes()
        return writer

    # ----- what was brought -----

    @property
    def brought(self) -> dict[str, Brought]:
        return self._notes.brought

    def note_brought(self, save: Save, names: Sequence[str]) -> None:
        """These files of the save came from elsewhere."""
        there = _versions(self.folder, save.name) or {}
        before = self._notes.brought.pop(save.name, None)
        versions = dict(before.versions) if before is not None and before.save.key == save.key else {}
        versions |= {name: there[name] for name in names if name in there}
        self._notes.brought[save.name] = Brought(save=save, versions=versions)
        self._write_notes()

    def has_all(self, save: Save) -> bool:
        """Whether every file of the save is here with its size."""
        there = _versions(self.folder, save.name) or {}
        return bool(save.files) and all(there.get(file.name, (-1, 0))[0] == file.size for file in save.files)

    def _read_notes(self) -> Notes:
        try:
            with open(self._file, "rb") as file:
                return msgspec.json.decode(file.read(NOTES_BYTES), type=Notes)
        except (OSError, msgspec.DecodeError):
            return Notes()

    def _write_notes(self) -> None:
        for kept in (self._notes.brought, self._notes.attempts, self._notes.rewritten):
            while len(kept) > NOTES_KEPT:
                del kept[next(iter(kept))]
        try:
            write_atomically(self._file, msgspec.json.encode(self._notes), 0o600)
        except OSError:
            pass  # written again with the next change


def _as_text(text: str) -> str:
    """What can be sent: names of files need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _versions(base: Path, name: str) -> dict[str, Version] | None:
    """The regular files of a save by their names relative to `base`; None when it is gone. Links are not followed."""
    top = base / name
    try:
        found = os.lstat(top)
    except OSError:
        return None
    if stat.S_ISREG(found.st_mode):
        return {name: (found.st_size, found.st_mtime_ns)}
    if not stat.S_ISDIR(found.st_mode):
        return None
    versions: dict[str, Version] = {}
    pending = [(name, 1)]
    while pending:
        current, depth = pending.pop()
        try:
            entries = list(os.scandir(base / current))
        except OSError:
            continue
        for entry in entries:
            if entry.name in SKIPPED or entry.name.endswith(PARTIAL) or len(versions) > FILES_IN_PART:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth < DEPTH:
                        pending.append((f"{current}/{entry.name}", depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    versions[f"{current}/{entry.name}"] = (about.st_size, about.st_mtime_ns)
            except OSError:
                continue  # it went while we looked
    return versions
