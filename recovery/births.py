"""When a file was made: `statx` of the C library, which `os.stat` does not show."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final, NamedTuple

_AT_FDCWD: Final = -100
_NOT_THROUGH_LINKS: Final = 0x100
_BORN: Final = 0x800
_SIZE: Final = 256
_MASK: Final = struct.Struct("=I")
_TIME: Final = struct.Struct("=qI")
_BORN_AT: Final = 80

_libc = ctypes.CDLL(None, use_errno=True)


class Birth(NamedTuple):
    inode: int
    device: int
    born_ns: int
    """0 where the file system does not tell."""


def born(path: str) -> Birth:
    """Links are not followed; zeros for nothing there."""
    try:
        about = os.lstat(path)
    except OSError:
        return Birth(0, 0, 0)
    buffer = ctypes.create_string_buffer(_SIZE)
    statx = getattr(_libc, "statx", None)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), _NOT_THROUGH_LINKS, _BORN, buffer) != 0:
        return Birth(about.st_ino, about.st_dev, 0)
    (mask,) = _MASK.unpack_from(buffer)
    seconds, ns = _TIME.unpack_from(buffer, _BORN_AT)
    return Birth(about.st_ino, about.st_dev, seconds * 1_000_000_000 + ns if mask & _BORN else 0)
