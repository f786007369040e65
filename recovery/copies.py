"""Safe copies of single files that a script overwrites in place, in `.unbroken-copies/` next to them."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from recovery.actions import Checkpoint
from recovery.formats.base import COPIES, step_in_name
from recovery.formats.registry import inspect
from recovery.held import NotOurFolder, own_folder

COPIES_KEPT: Final = 2
_PASSING: Final = ".tmp-"
_ABANDONED_S: Final = 900.0
"""After so long, what another node began to copy is no reason to wait."""
_FICLONE: Final = 0x40049409
_FREE_SHARE: Final = 0.1
"""Share of the file system that copies leave free."""


def keep_copy(
    path: Path, into: Path | None = None, is_own: Callable[[Path], bool] = lambda _: True
) -> Checkpoint | None:
    """A copy of a complete single file that is overwritten in place; None when none was made, or there is one already.

    It is a reflink where the file system can, else a plain copy where space allows. The file must not change
    meanwhile, and the copy is read like any checkpoint before it counts. The two newest copies are kept, so one is
    always whole. `into`: the folder for copies, by default `.unbroken-copies/` next to the file. `is_own`:
    whether an earlier copy is this job's, and may be deleted. Never raises OSError: without space or permission the
    run goes on without a copy.
    """
    folder = into if into is not None else path.parent / COPIES
    try:
        with own_folder(folder) as held:
            return _kept(path, folder, held / path.name, is_own)
    except (OSError, NotOurFolder):
        return None


def _kept(path: Path, folder: Path, home: Path, is_own: Callable[[Path], bool]) -> Checkpoint | None:
    """`home`: in `folder`, which is held."""
    passing = passing_folder(home)
    try:
        before = path.stat()
        target = home / f"{before.st_mtime_ns}{path.suffix}"
        if os.path.lexists(target) or _another_copies(home):
            return None
        passing.mkdir(parents=True, exist_ok=True)
        temporary = passing / f"copy{path.suffix}"
        if not copy_file(path, temporary, before) or _changed(path, before):
            return None
        found = inspect(temporary)
        if found is None or not found.complete:
            return None
        os.rename(temporary, target)
        named = folder / path.name
        _drop_old_copies(home, target, lambda copy: is_own(named / copy.name))
        step = found.step if found.step is not None else step_in_name(path.name)
        return msgspec.structs.replace(found, path=str(named / target.name), step=step, copy_of=str(path))
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def passing_folder(home: Path) -> Path:
    """Where this process writes before it renames; agents of other nodes may use the same shared folder."""
    return home / f"{_PASSING}{os.uname().nodename}-{os.getpid()}"


def _another_copies(home: Path) -> bool:
    """Whether another node copies the same file just now. What an agent that died left behind is cleared away."""
    own = f"{_PASSING}{os.uname().nodename}-"
    busy = False
    for folder in home.glob(_PASSING + "*"):
        if folder.name.startswith(own) and not os.path.exists(f"/proc/{folder.name.removeprefix(own)}"):
            shutil.rmtree(folder, ignore_errors=True)
        elif time.time() - folder.stat().st_mtime < _ABANDONED_S:
            busy = True
    return busy


def copy_file(source: Path, target: Path, stat: os.stat_result, spare_space: bool = True) -> bool:
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


def same_version(copy: os.stat_result, path: Path) -> bool:
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (copy.st_size, copy.st_mtime_ns)


def _drop_old_copies(home: Path, newest: Path, is_own: Callable[[Path], bool]) -> None:
    """Keep the newest copies by the time in their names."""
    copies = [entry for entry in home.iterdir() if not entry.name.startswith(".") and entry.stem.isdigit()]
    copies = [entry for entry in copies if entry == newest or is_own(entry)]
    copies.sort(key=lambda entry: int(entry.stem), reverse=True)
    for old in copies[COPIES_KEPT:]:
        old.unlink(missing_ok=True)
