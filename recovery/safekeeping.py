"""The only part of recovery that changes files: moving bad checkpoints aside, mending tracker files, keeping copies.

Nothing is ever deleted except our own superseded copies. What is moved can be moved back: beside it lies a record
that `undo` takes. Every step may be cut off at any moment and repeated.
"""

from __future__ import annotations

import errno
import fcntl
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
from recovery.formats.base import COPIES, SET_ASIDE, step_in_name
from recovery.formats.folders import DEEPSPEED_TRACKER, MEGATRON_TRACKER, read_pointer
from recovery.formats.registry import inspect
from recovery.formats.scan import discover

COPIES_KEPT: Final = 2
TRACKERS: Final = (MEGATRON_TRACKER, DEEPSPEED_TRACKER)
RECORD_SUFFIX: Final = ".why.json"
WRITER_WAIT_S: Final = 10.0
"""How long a checkpoint that a live process writes is waited for."""
_FICLONE: Final = 0x40049409
_FREE_SHARE: Final = 0.1
"""Share of the file system that copies leave free."""


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

    The record is written first, so that whatever has been moved can be explained and moved back.
    """
    home = path.parent / SET_ASIDE
    home.mkdir(exist_ok=True)
    target = _unused(home, path.name)
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
    """Make the tracker files of a folder name `chosen`, or move them aside when there is none. Raises OSError.

    Tracker files that are missing are written where the format needs one (`chosen.format`). So are symbolic links
    (`latest -> step-100`) mended whose target was moved aside.
    """
    records = _mend_links(folder, chosen)
    inside = chosen is not None and Path(chosen.path).parent == folder
    for name, format_name in ((MEGATRON_TRACKER, "megatron"), (DEEPSPEED_TRACKER, "deepspeed")):
        pointer = folder / name
        before = read_pointer(pointer)
        text = ""
        if chosen is not None and inside and chosen.format == format_name:
            text = str(chosen.step) if format_name == "megatron" else Path(chosen.path).name
        if (text or None) == before or (before is None and not text):
            continue
        if text:
            _write(pointer, text.encode())
            record = Record(done="pointer", path=str(pointer), before=before, after=text, at=time.time())
            _write_record(folder, name, record)
            records.append(record)
        elif _is_tracker(name, before):
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


def _link(link: Path, target: str) -> None:
    """Point a symbolic link elsewhere, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _is_tracker(name: str, text: str | None) -> bool:
    """`latest` may be anyone's file: DeepSpeed's names a step, or is empty."""
    return name == MEGATRON_TRACKER or not text or step_in_name(text) is not None


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


# ----- safe copies -----


def keep_copy(path: Path, into: Path | None = None) -> Checkpoint | None:
    """A copy of a complete single file that is overwritten in place; None when none was made, or there is one already.

    It is a reflink where the file system can, else a plain copy where space allows. The file must not change
    meanwhile, and the copy is read like any checkpoint before it counts. The two newest copies are kept, so one is
    always whole. `into`: the folder for copies, by default `.unbroken-copies/` next to the file. Never raises OSError:
    without space or permission the run goes on without a copy.
    """
    home = (into if into is not None else path.parent / COPIES) / path.name
    passing = home / f".tmp-{os.getpid()}"
    try:
        before = path.stat()
        target = home / f"{before.st_mtime_ns}{path.suffix}"
        if target.exists():
            return None
        passing.mkdir(parents=True, exist_ok=True)
        temporary = passing / f"copy{path.suffix}"
        if not _copy(path, temporary, before) or _changed(path, before):
            return None
        found = inspect(temporary)
        if found is None or not found.complete:
            return None
        os.rename(temporary, target)
        _drop_old_copies(home)
        step = found.step if found.step is not None else step_in_name(path.name)
        return msgspec.structs.replace(found, path=str(target), step=step, copy_of=str(path))
    except OSError:
        return None
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def restore(copy: Path, path: Path) -> None:
    """Put a safe copy where the script expects its checkpoint; the copy stays. Raises OSError, PreparationError.

    What stands there now is moved aside first. Repeating it changes nothing.
    """
    kept = copy.stat()
    if _same(kept, path):
        return
    passing = copy.parent / f".tmp-{os.getpid()}"
    passing.mkdir(exist_ok=True)
    try:
        temporary = passing / f"restored{path.suffix}"
        if not _copy(copy, temporary, kept, spare_space=False):
            raise PreparationError(f"the safe copy {copy} changed while it was read: is another job using it?")
        if os.path.lexists(path):
            set_aside(path, f"replaced by its safe copy {copy.name}")
        os.rename(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def _copy(source: Path, target: Path, stat: os.stat_result, spare_space: bool = True) -> bool:
    """Copy content, mode and times; False when there is no space for it or the length differs.

    Not synced: that would take ten times as long, and whatever a crash of the node leaves is read before it is used.
    """
    if not _clone(source, target):
        if spare_space and not _has_space(target, stat.st_size):
            return False
        shutil.copyfile(source, target)
    os.chmod(target, stat.st_mode & 0o777)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return os.stat(target).st_size == stat.st_size


def _clone(source: Path, target: Path) -> bool:
    """Share the file's blocks, where the file system can (btrfs, XFS): no time, no space."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            return False
    return True


def _has_space(near: Path, size: int) -> bool:
    """Whether the file system stays a tenth free, or holds two more of these."""
    usage = os.statvfs(near.parent)
    left = usage.f_bavail * usage.f_frsize - size
    return left >= min(_FREE_SHARE * usage.f_blocks * usage.f_frsize, 2 * size)


def _changed(path: Path, before: os.stat_result) -> bool:
    now = path.stat()
    return (now.st_mtime_ns, now.st_size, now.st_ino) != (before.st_mtime_ns, before.st_size, before.st_ino)


def _same(copy: os.stat_result, path: Path) -> bool:
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (copy.st_size, copy.st_mtime_ns)


def _drop_old_copies(home: Path) -> None:
    """Keep the newest copies by the time in their names."""
    copies = [entry for entry in home.iterdir() if not entry.name.startswith(".") and entry.stem.isdigit()]
    copies.sort(key=lambda entry: int(entry.stem), reverse=True)
    for old in copies[COPIES_KEPT:]:
        old.unlink(missing_ok=True)


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
                restore(Path(step.copy), path)
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
            done += [_told(record) for record in mend_pointers(folder, newest(discover(folder, at_rest=True)))]
        except OSError as error:
            raise PreparationError(f"could not mend the tracker files in {folder}: {error}") from error
    return done


def _put_aside(path: Path, step: SetAside, copy: Path | None) -> list[str]:
    if not os.path.lexists(path) or (copy is not None and copy.exists() and _same(copy.stat(), path)):
        return []
    until = time.monotonic() + WRITER_WAIT_S
    while (writer := _writer_of(path)) and time.monotonic() < until:
        time.sleep(0.1)  # a process that saves in the background may outlive its rank
    if writer:
        raise PreparationError(
            f"{path} is still being written by {writer}: wait for it or end it, then `unbroken restart`"
        )
    if step.why.startswith(INCOMPLETE):
        found = inspect(path)
        if found is not None and found.complete:
            return [f"{path} was left in place: it is complete by now"]
    target = set_aside(path, step.why)
    return [f"{path} was moved to {target}: {step.why}"]


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
