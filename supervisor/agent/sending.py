"""Whether bytes of a process are on their way: a slow network is not a collective that hangs."""

from __future__ import annotations

import os
from typing import Final

TABLE_BYTES: Final = 4 << 20
MOST_DESCRIPTORS: Final = 4096
GIVEN_UP: Final = 4
"""So often sent again without an answer, nothing is on its way any more: the other end, or the way there, is gone."""


def sends(pid: int) -> bool:
    """Some connection of it has bytes that the other end has not acknowledged yet, and is not given up."""
    try:
        loaded = {
            inode
            for table in ("tcp", "tcp6")
            for inode in unacknowledged(_read(f"/proc/{pid}/net/{table}").decode(errors="replace"))
        }
        if not loaded:
            return False
        descriptors = os.listdir(f"/proc/{pid}/fd")[:MOST_DESCRIPTORS]
    except OSError:
        return False
    return any(_target(f"/proc/{pid}/fd/{one}") in loaded for one in descriptors)


def unacknowledged(table: str) -> set[str]:
    """The sockets of this text of /proc/PID/net/tcp with bytes on their way, as links of descriptors name them."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and int(fields[4].partition(":")[0], 16) and int(fields[6], 16) < GIVEN_UP:
            found.add(f"socket:[{fields[9]}]")
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(TABLE_BYTES)
    except FileNotFoundError:
        return b""
