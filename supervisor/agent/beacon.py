"""Reading a rank's progress beacon (docs/architecture.md, "Beacon"): one pread of a small mapped file."""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec

from diagnosis.signals import Frozen, Phase

_HEADER = struct.Struct("<8sIIddI")
_MAGIC = b"UBEACON1"
MAX_GROUPS = 32


class Beacon(NamedTuple):
    wall_time: float
    monotonic: float
    """CLOCK_MONOTONIC of the node when the beacon thread last ran."""
    groups: dict[str, tuple[int, int]]
    """Not to be changed: others have the same one."""
    step: int | None
    phase: Phase
    world: int = 0
    """WORLD_SIZE; 0: not told."""
    thread: int = 0
    """The beacon's own thread."""
    timeout_s: float | None = None
    """The time-out of collectives in the group of all ranks, where torch tells."""
    members: dict[str, str] = {}
    """Name of a process group -> its ranks, as `CollectiveEntry.group` has them. Not to be changed, either."""


class _Payload(Frozen, frozen=True, kw_only=True):
    groups: dict[str, tuple[int, int]] = {}
    step: int | None = None
    phase: Phase = ""
    world: int = 0
    thread: int = 0
    timeout_s: float | None = None
    members: dict[str, str] = {}


_decode = msgspec.json.Decoder(_Payload).decode


class BeaconFile:
    """Keeps the file open; `read()` gives None while there is nothing whole to read."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._descriptor: int | None = None

    def read(self) -> Beacon | None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._descriptor, 4096, 0)
        except OSError:
            return None
        return parse(data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def parse(data: bytes) -> Beacon | None:
    """A beacon, or None when it is torn, half-written or none at all."""
    if len(data) < _HEADER.size:
        return None
    magic, sequence, _pid, wall_time, monotonic, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or sequence % 2 or length > len(data) - _HEADER.size:
        return None
    told = _payload(data[_HEADER.size : _HEADER.size + length])
    return None if told is None else Beacon(wall_time, monotonic, *told)


@functools.lru_cache(32)
def _payload(
    text: bytes,
) -> tuple[dict[str, tuple[int, int]], int | None, Phase, int, int, float | None, dict[str, str]] | None:
    """Most ranks say the same at the same time, and what they said before while they wait."""
    try:
        told = _decode(text)
    except msgspec.DecodeError:
        return None
    groups = dict(list(told.groups.items())[:MAX_GROUPS])
    members = dict(list(told.members.items())[:MAX_GROUPS])
    return groups, told.step, told.phase, told.world, told.thread, told.timeout_s, members
