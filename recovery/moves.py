"""Moving aside with a record from which it is undone, and small files replaced whole."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.signals import Frozen
from recovery.bounds import Bounds, GivenFolders
from recovery.checkpoint import INCOMPLETE
from recovery.formats.base import SET_ASIDE
from recovery.formats.registry import inspect
from recovery.held import NotOurFolder, around_of, own_folder

RECORD_SUFFIX: Final = ".why.json"


class PreparationError(Exception):
    """A preparation could not be done. The message says which, why, and what a person can do."""


class Record(Frozen, frozen=True, kw_only=True):
    """What was done to a path, kept as JSON beside what was moved; `undo` reverses it."""

    done: str
    """`set_aside`, `pointer` (a tracker file) or `link`."""
    path: str
    """Where it was."""
    moved_to: str = ""
    why: str = ""
    before: str | None = None
    """For `pointer` and `link`: its text or target before; None when there was none."""
    after: str | None = None
    at: float = 0.0
    job: str = ""
    """The job's folder."""


def set_aside(path: Path, why: str, bounds: Bounds | None = None) -> Path:
    """Move a checkpoint to `.unbroken-set-aside/` next to it; the new path. Raises OSError.

    The record is written first, so that whatever has been moved can be explained and moved back. A torn file takes
    the place of an earlier torn one of the same name, which the script would have overwritten: on a full disk every
    attempt leaves another. Should it turn out to be somebody else's in the moment of the move, it is put back.
    Raises NotOurFolder where that folder cannot be used.
    """
    bounds = bounds or GivenFolders()
    home = path.parent / SET_ASIDE
    with own_folder(home) as held, around_of(path) as there:
        again = why.startswith(INCOMPLETE) and path.is_file() and _is_torn(held / path.name, bounds.job)
        name = path.name if again else _unused(held, path.name)
        target = home / name
        record = Record(done="set_aside", path=str(path), moved_to=str(target), why=why, at=time.time(), job=bounds.job)
        note = held / (name + RECORD_SUFFIX)
        try:
            replace(note, msgspec.json.encode(record))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # on a full disk the move itself still works
        strange, before = bounds.why_not(path), os.lstat(path)
        try:
            if strange:
                raise PreparationError(f"{path} is not this job's any more: {strange}")
            os.rename(there, held / name)
        except (OSError, PreparationError):
            note.unlink(missing_ok=True)
            raise
        if not _same_file(before, os.lstat(held / name)):
            _put_back(held / name, there)
            note.unlink(missing_ok=True)
            raise PreparationError(f"{path} was written by somebody else just now")
        sync_folder(held)
        sync_folder(there.parent)
    return target


def point(link: Path, target: str) -> None:
    """Point a symbolic link elsewhere, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def undo(record: Record) -> None:
    """Reverse what a record tells. Raises PreparationError when something stands in its place."""
    path = Path(record.path)
    if record.done == "set_aside":
        home, name = Path(record.moved_to).parent, Path(record.moved_to).name
        try:
            with own_folder(home, make=False) as held, around_of(path) as there:
                if os.path.lexists(there) and os.path.lexists(held / name):
                    raise PreparationError(f"{path} is there again: move it away first, then undo")
                if os.path.lexists(held / name):
                    os.rename(held / name, there)
                (held / (name + RECORD_SUFFIX)).unlink(missing_ok=True)
        except NotOurFolder as error:
            raise PreparationError(f"{path} is not put back: {error}") from error
    elif record.done == "pointer" and record.before is not None:
        replace(path, record.before.encode())
    elif record.done == "link" and record.before is not None:
        point(path, record.before)


def read_records(folder: Path) -> list[Record]:
    """The records in a folder's `.unbroken-set-aside/`, oldest first."""
    records = []
    try:
        with own_folder(folder / SET_ASIDE, make=False) as held:
            for note in held.glob("*" + RECORD_SUFFIX):
                try:
                    records.append(msgspec.json.decode(note.read_bytes(), type=Record))
                except (OSError, msgspec.DecodeError):
                    continue
    except (OSError, NotOurFolder):
        return []  # there are none of ours
    return sorted(records, key=lambda record: record.at)


# ----- small file operations -----


def _same_file(one: os.stat_result, other: os.stat_result) -> bool:
    same = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    return same and (stat.S_ISDIR(one.st_mode) or one.st_mtime_ns == other.st_mtime_ns)


def _put_back(moved: Path, path: Path) -> None:
    """Where it was, unless something stands there again."""
    if not os.path.lexists(path):
        os.rename(moved, path)


def _is_torn(moved: Path, job: str) -> bool:
    """Whether what this job moved aside under this name is a file that is of no use."""
    note = moved.with_name(moved.name + RECORD_SUFFIX)
    try:
        if msgspec.json.decode(note.read_bytes(), type=Record).job != job:
            return False
    except (OSError, msgspec.DecodeError):
        return False
    found = inspect(moved) if moved.is_file() else None
    return found is not None and not found.complete


def _unused(home: Path, name: str) -> str:
    unused, number = name, 1
    while os.path.lexists(home / unused):
        number += 1
        unused = f"{name}.{number}"
    return unused


def replace(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # never through a link that somebody has put there
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def keep_record(folder: Path, name: str, record: Record) -> None:
    with own_folder(folder / SET_ASIDE) as held:
        replace(held / _unused(held, f"{name}{RECORD_SUFFIX}"), msgspec.json.encode(record))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse it
    finally:
        os.close(descriptor)
