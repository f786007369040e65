"""The snapshots that this node's ranks hold in memory: read from their slots, never written.

A look costs two small reads a slot. A slot is the ranks' memory: whatever is in it is checked, and nothing of it is
executed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

from recovery.snapshot_choice import RankSnapshot
from recovery.snapshot_memory import PAGE, Header, Slot

DIGESTS_KEPT = 16
LETTERS = 32
"""Of a digest or a group's name."""
_WORDS = struct.Struct("<8sQQ")


class SnapshotMonitor:
    """`held` is what the ranks hold now; `changes` counts how often that has changed."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._slots: list[Slot] = []
        self._words: list[tuple[bytes, bytes]] = []
        self.held: tuple[RankSnapshot, ...] = ()
        self.changes = 0

    def look(self) -> None:
        if len(self._slots) < len(self._paths):
            self._open()
        changed = False
        for number, slot in enumerate(self._slots):
            words = _words(slot)
            changed = changed or words != self._words[number]
            self._words[number] = words
        if not changed:
            return
        held = tuple(found for slot in self._slots if (found := _snapshot(slot)) is not None)
        if held != self.held:
            self.held = held
            self.changes += 1

    def _open(self) -> None:
        """Slots that cannot be opened (the front is gone) are none."""
        try:
            self._slots = [Slot(path) for path in self._paths]
        except OSError:
            self._slots, self._paths = [], ()
        self._words = [(b"", b"")] * len(self._slots)


def _words(slot: Slot) -> tuple[bytes, bytes]:
    try:
        own = slot.descriptor
        return os.pread(own, _WORDS.size, 0), os.pread(own, _WORDS.size, PAGE)
    except OSError:
        return b"", b""


def _snapshot(slot: Slot) -> RankSnapshot | None:
    header = slot.header()
    if header is None or not _sane(header):
        return None
    sums = slot.sums(header.sequence)
    group, members, digests = sums.get("group"), sums.get("members"), sums.get("replicas")
    declared = isinstance(group, str) and isinstance(members, int) and isinstance(digests, dict)
    return RankSnapshot(
        rank=int(header.rank),
        world=int(header.world),
        attempt=int(header.attempt),
        step=int(header.step),
        at=round(float(header.at), 3),
        size_bytes=int(header.size_bytes),
        group=str(group)[:LETTERS] if declared else "",
        members=_count(members, header) if declared else 0,
        digests=tuple(str(one)[:LETTERS] for one in list((digests or {}).values())[:DIGESTS_KEPT]) if declared else (),
    )


def _count(members: Any, header: Header) -> int:
    return max(0, min(int(members), int(header.world)))


def _sane(header: Header) -> bool:
    return 0 <= header.rank < header.world <= 1 << 24 and header.step < 1 << 53 and header.attempt < 1 << 31
