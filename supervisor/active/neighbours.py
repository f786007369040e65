"""Who else computes on this node. Active tests beside a job would take memory that it needs, and slow it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from diagnosis.signals import clean_line

PROC = Path("/proc")
ENVIRON_BYTES: Final = 1 << 18
MAPS_BYTES: Final = 8 << 20
SHOWN: Final = 4
OUR_OUTPUT: Final = re.compile(r"/attempts/\d+/rank(\d+)\.out$")
"""Where a rank of `unbroken run` prints. It is forked, so /proc shows the environment of the process it came from."""


def ranks_here(proc: Path = PROC) -> list[str]:
    """Processes that torchrun, its like or `unbroken run` has started and that have loaded torch, in words: of this
    user, for root of all users. Who started this process is none of them.
    """
    own = ancestors(proc)
    return [words for pid in _pids(proc) if pid not in own and (words := _rank(proc / str(pid)))]


def _pids(proc: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isdigit())
    except OSError:
        return []


def ancestors(proc: Path) -> set[int]:
    pid, found = os.getpid(), set[int]()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def _rank(process: Path) -> str:
    try:
        with open(process / "environ", "rb") as file:
            entries = file.read(ENVIRON_BYTES).split(b"\0")
        variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
        ours = OUR_OUTPUT.search(os.readlink(process / "fd" / "1")) if b"RANK" not in variables else None
        if ours is None and (b"RANK" not in variables or b"WORLD_SIZE" not in variables):
            return ""
        with open(process / "maps", "rb") as file:
            if b"libtorch" not in file.read(MAPS_BYTES):
                return ""
        name = (process / "comm").read_text(errors="replace")
    except OSError:
        return ""
    if ours is not None:
        return clean_line(f"{name.strip()} (process {process.name}, rank {ours[1][:10]} of an `unbroken run`)", 100)
    rank, world = (variables[key].decode(errors="replace")[:10] for key in (b"RANK", b"WORLD_SIZE"))
    return clean_line(f"{name.strip()} (process {process.name}, rank {rank} of {world})", 100)


def why_occupied(busy_gpus: dict[str, str], proc: Path = PROC) -> str:
    """What runs here, in words; empty: nothing that is seen. `busy_gpus`: GPU -> who uses it."""
    found = [*(f"{gpu}: {words}" for gpu, words in busy_gpus.items()), *ranks_here(proc)]
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more
