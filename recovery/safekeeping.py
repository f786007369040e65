"""The only part of recovery that changes files: moving bad checkpoints aside, mending tracker files, keeping copies.

Nothing is ever deleted except our own superseded copies, and a torn file when another torn one of its name comes. What
is moved can be moved back: beside it lies a record that `undo` takes. Every step may be cut off at any moment and
repeated.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.signals import Word
from recovery.actions import Checkpoint, Preparation, Restore, SetAside
from recovery.checkpoint import INCOMPLETE, newest
from recovery.copies import copy_file, keep_copy, passing_folder, same_version
from recovery.formats.base import SET_ASIDE
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER, read_pointer
from recovery.formats.registry import inspect
from recovery.formats.scan import discover
from recovery.formats.walk import stale_pointer

TRACKERS: Final = (MEGATRON_TRACKER, DEEPSPEED_TRACKER)
RECORD_SUFFIX: Final = ".why.json"
WRITER_WAIT_S: Final = 10.0
"""How long a checkpoint that a live process writes is waited for."""


__all__ = [
    "PreparationError",
    "Record",
    "keep_copy",
    "mend_pointers",
    "prepare",
    "read_records",
    "restore",
    "set_aside",
    "undo",
]


class PreparationError(Exception):
    """A preparation could not be done. The message says which, why, and what a person can do."""


class Record(Word, frozen=True, kw_only=True):
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


def set_aside(path: Path, why: str) -> Path:
    """Move a checkpoint to `.unbroken-set-aside/` next to it; the new path. Raises OSError.

    The record is written first, so that whatever has been moved can be explained and moved back. A torn file takes
    the place of an earlier torn one of the same name, which the script would have overwritten: on a full disk every
    attempt leaves another.
    """
    home = path.parent / SET_ASIDE
    home.mkdir(exist_ok=True)
    again = why.startswith(INCOMPLETE) and path.is_file() and _is_torn(home / path.name)
    target = home / path.name if again else _unused(home, path.name)
    record = Record(done="set_aside", path=str(path), moved_to=str(target), why=why, at=time.time())
    note = target.with_name(target.name + RECORD_SUFFIX)
    try:
        _write(note, msgspec.json.encode(record))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise  # on a full disk the move itself still works
    try:
        os.rename(path, target)
    except OSError:
        note.unlink(missing_ok=True)
        raise
    _sync(home)
    _sync(path.parent)
    return target


def mend_pointers(folder: Path, chosen: Checkpoint | None) -> list[Record]:
    """Make the tracker files of a folder name `chosen`, else move aside those that name nothing. Raises OSError.

    Tracker files that are missing are written where the format needs one (`chosen.format`). So are symbolic links
    (`latest -> step-100`) mended whose target was moved aside.
    """
    inside = chosen is not None and Path(chosen.path).parent == folder
    records = [*_mend_links(folder, chosen), *_mend_markers(folder, chosen if inside else None)]
    for name, format_name in ((MEGATRON_TRACKER, "megatron"), (DEEPSPEED_TRACKER, "deepspeed")):
        pointer = folder / name
        before = read_pointer(pointer)
        text = ""
        if chosen is not None and inside and chosen.format == format_name:
            text = str(chosen.step) if format_name == "megatron" else Path(chosen.path).name
        elif chosen is not None and inside and before and chosen.step is not None and stale_pointer(pointer):
            text = str(chosen.step) if before.isdigit() else Path(chosen.path).name  # others use these names, too
        if (text or None) == before or (before is None and not text):
            continue
        if text:
            _write(pointer, text.encode())
            record = Record(done="pointer", path=str(pointer), before=before, after=text, at=time.time())
            _write_record(folder, name, record)
            records.append(record)
        elif stale_pointer(pointer) is not None:
            target = set_aside(pointer, "it names a checkpoint that is not there, and there is no complete one")
            records.append(Record(done="set_aside", path=str(pointer), moved_to=str(target), at=time.time()))
    return records


def _mend_links(folder: Path, chosen: Checkpoint | None) -> list[Record]:
    aside = {record.path for record in read_records(folder) if record.done == "set_aside"}
    records: list[Record] = []
    for link in sorted(folder.iterdir()) if aside else ():
        if not link.is_symlink() or link.exists() or str(folder / os.readlink(link)) not in aside:
            continue
        before = os.readlink(link)
        if chosen is None or Path(chosen.path).parent != folder:
            target = set_aside(link, f"it points to {before}, which was moved aside")
            records.append(Record(done="set_aside", path=str(link), moved_to=str(target), at=time.time()))
            continue
        record = Record(done="link", path=str(link), before=before, after=Path(chosen.path).name, at=time.time())
        _link(link, Path(chosen.path).name)
        _write_record(folder, link.name, record)
        records.append(record)
    return records


def _mend_markers(folder: Path, chosen: Checkpoint | None) -> list[Record]:
    """Small files (`latest.txt`) that name a checkpoint which was moved aside."""
    aside = {os.path.basename(record.path) for record in read_records(folder) if record.done == "set_aside"}
    records: list[Record] = []
    for path in sorted(folder.iterdir()) if aside else ():
        if path.suffix not in ("", ".txt") or path.name in TRACKERS or path.is_symlink() or not path.is_file():
            continue
        before = read_pointer(path) or ""
        named = os.path.basename(before)
        if named not in aside or os.path.lexists(folder / named):
            continue
        if chosen is None:
            target = set_aside(path, f"it names {named}, which was moved aside, and there is no complete one")
            records.append(Record(done="set_aside", path=str(path), moved_to=str(target), at=time.time()))
            continue
        after = before.removesuffix(named) + os.path.basename(chosen.path)
        _write(path, after.encode())
        record = Record(done="pointer", path=str(path), before=before, after=after, at=time.time())
        _write_record(folder, path.name, record)
        records.append(record)
    return records


def _link(link: Path, target: str) -> None:
    """Point a symbolic link elsewhere, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def undo(record: Record) -> None:
    """Reverse what a record tells. Raises PreparationError when something stands in its place."""
    path = Path(record.path)
    if record.done == "set_aside":
        moved = Path(record.moved_to)
        if path.exists() and moved.exists():
            raise PreparationError(f"{path} is there again: move it away first, then undo")
        if moved.exists():
            os.rename(moved, path)
        moved.with_name(moved.name + RECORD_SUFFIX).unlink(missing_ok=True)
    elif record.done == "pointer" and record.before is not None:
        _write(path, record.before.encode())
    elif record.done == "link" and record.before is not None:
        _link(path, record.before)


def read_records(folder: Path) -> list[Record]:
    """The records in a folder's `.unbroken-set-aside/`, oldest first."""
    records = []
    for note in (folder / SET_ASIDE).glob("*" + RECORD_SUFFIX):
        try:
            records.append(msgspec.json.decode(note.read_bytes(), type=Record))
        except (OSError, msgspec.DecodeError):
            continue
    return sorted(records, key=lambda record: record.at)


def restore(copy: Path, path: Path) -> bool:
    """Put a safe copy where the script expects its checkpoint; the copy stays. Raises OSError, PreparationError.

    What stands there now is moved aside first. Repeating it changes nothing: False.
    """
    kept = copy.stat()
    if same_version(kept, path):
        return False
    passing = passing_folder(copy.parent)
    passing.mkdir(exist_ok=True)
    try:
        temporary = passing / f"restored{path.suffix}"
        if not copy_file(copy, temporary, kept, spare_space=False):
            raise PreparationError(f"the safe copy {copy} changed while it was read: is another job using it?")
        if os.path.lexists(path):
            set_aside(path, f"replaced by its safe copy {copy.name}")
        os.rename(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(passing, ignore_errors=True)
    return True


# ----- before a restart -----


def prepare(preparations: Sequence[Preparation]) -> list[str]:
    """Carry out preparations in their order, then mend tracker files; what was done, one sentence each.

    May be repeated after a crash in the middle. The ranks must be dead: a checkpoint that a live process still
    writes is refused. Raises PreparationError.
    """
    done: list[str] = []
    mend: set[Path] = set()
    restored = {step.path: Path(step.copy) for step in preparations if isinstance(step, Restore)}
    for step in preparations:
        path = Path(step.path)
        try:
            if isinstance(step, Restore):
                if restore(Path(step.copy), path):
                    done.append(f"{path} was restored from its safe copy {step.copy}")
            elif path.name in TRACKERS:
                mend.add(path.parent)
            else:
                said = _put_aside(path, step, restored.get(step.path))
                done += said
                mend.add(path.parent)
        except OSError as error:
            raise _explained(step, error) from error
    for folder in sorted(mend):
        try:
            inside = [found for found in discover(folder, at_rest=True) if Path(found.path).parent == folder]
            done += [_told(record) for record in mend_pointers(folder, newest(inside))]
        except OSError as error:
            raise PreparationError(f"could not mend the tracker files in {folder}: {error}") from error
    return done


def _put_aside(path: Path, step: SetAside, copy: Path | None) -> list[str]:
    if not os.path.lexists(path) or (copy is not None and copy.exists() and same_version(copy.stat(), path)):
        return []
    until = time.monotonic() + WRITER_WAIT_S
    while (writer := _writer_of(path)) and time.monotonic() < until:
        time.sleep(0.1)  # a process that saves in the background may outlive its rank
    if writer:
        raise PreparationError(
            f"{path} is still being written by {writer}: wait for it or end it, then `unbroken restart`"
        )
    why = step.why
    if why.startswith(INCOMPLETE):
        found = inspect(path)
        if found is not None and found.complete:
            return [f"{path} was left in place: it is complete by now"]
        why = INCOMPLETE + found.why if found is not None else why
    target = set_aside(path, why)
    return [f"{path} was moved to {target}: {why}"]


def _told(record: Record) -> str:
    if record.done != "set_aside":
        return f"{record.path} names {record.after} now; before: {record.before or 'nothing'}"
    return f"{record.path} was moved to {record.moved_to}: no complete checkpoint is left for it to name"


def _explained(step: Preparation, error: OSError) -> PreparationError:
    what = "put back the safe copy for" if isinstance(step, Restore) else "move aside"
    hint = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some of your quota",
        errno.EACCES: "give this user write permission to its folder",
        errno.EPERM: "give this user write permission to its folder",
        errno.EROFS: "the file system is mounted read-only",
        errno.ENOENT: "it is gone: choose another checkpoint",
    }.get(error.errno or 0, "see to the storage")
    return PreparationError(f"could not {what} {step.path}: {error.strerror or error}; {hint}, then `unbroken restart`")


def _writer_of(path: Path) -> str:
    """A live process of this node that has the checkpoint open for writing, in words; empty for none."""
    target = os.path.realpath(path)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            for descriptor in os.scandir(folder / "fd"):
                opened = os.readlink(descriptor.path)
                if (opened == target or opened.startswith(target + "/")) and _is_writing(folder, descriptor.name):
                    return f"process {folder.name} ({(folder / 'comm').read_text(errors='replace').strip()})"
        except OSError:
            continue  # not ours, or gone
    return ""


def _is_writing(process: Path, descriptor: str) -> bool:
    for line in (process / "fdinfo" / descriptor).read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))
    return False


# ----- small file operations -----


def _is_torn(moved: Path) -> bool:
    """Whether what was moved aside under this name is a file that is of no use."""
    found = inspect(moved) if moved.is_file() else None
    return found is not None and not found.complete


def _unused(home: Path, name: str) -> Path:
    target, number = home / name, 1
    while os.path.lexists(target):
        number += 1
        target = home / f"{name}.{number}"
    return target


def _write(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_record(folder: Path, name: str, record: Record) -> None:
    home = folder / SET_ASIDE
    home.mkdir(exist_ok=True)
    _write(_unused(home, f"{name}{RECORD_SUFFIX}"), msgspec.json.encode(record))


def _sync(folder: Path) -> None:
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
