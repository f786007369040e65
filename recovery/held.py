"""Our folders beside checkpoints, held open: whoever may write in the folder around them could plant a link there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotOurFolder(Exception):
    """What stands under the name of a folder of ours is none that may be used. The message says why."""


@contextmanager
def own_folder(path: Path, *, make: bool = True) -> Iterator[Path]:
    """A name for the folder at `path` that no rename and no link leads elsewhere, while it is held.

    Only a real folder of this user that nobody else may write to; `make`: made, for this user alone, where nothing
    is. Raises NotOurFolder, OSError.
    """
    around = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if make:
            try:
                os.mkdir(path.name, 0o700, dir_fd=around)
            except FileExistsError:
                pass
        held = _opened(path, around)
    finally:
        os.close(around)
    try:
        about = os.fstat(held)
        if about.st_uid != os.geteuid():
            raise NotOurFolder(f"{path} belongs to user {about.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(about.st_mode) & 0o022:
            raise NotOurFolder(f"{path} can be written to by others: remove it, or `chmod go-w` it")
        yield Path(f"/proc/self/fd/{held}")
    finally:
        os.close(held)


@contextmanager
def around_of(path: Path) -> Iterator[Path]:
    """The same for a path in a folder of whatever owner: it stays the folder that it is now."""
    held = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{held}") / path.name
    finally:
        os.close(held)


def _opened(path: Path, around: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path.name, flags, dir_fd=around)
    except OSError:
        found = os.stat(path.name, dir_fd=around, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
            raise NotOurFolder(f"{path} is {what}, which this job did not put there") from None
        raise
