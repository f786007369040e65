"""Waiting for room on disks: the next attempt starts once each of its nodes says that there is room."""

from __future__ import annotations

from supervisor.job import wants as w
from supervisor.job.attempts import Attempts
from supervisor.job.core import Core
from supervisor.job.nodes import Nodes
from supervisor.job.wants import Wants
from supervisor.messages import SpaceSeen, SpaceWanted
from supervisor.notes import note

ROOM_BYTES = 64 * 1024
"""Besides a checkpoint."""


class Space:
    def __init__(self, core: Core, nodes: Nodes, attempts: Attempts) -> None:
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self.wanted: SpaceWanted | None = None
        """None: the job does not wait for room."""
        self._number = 0
        self._full: dict[str, tuple[str, ...]] = {}
        """Node -> its folders without room, as it said last; none: there is room."""

    @property
    def text(self) -> str:
        """What there is no room in; empty: the job does not wait for that."""
        if self.wanted is None:
            return ""
        full = sorted({folder for folders in self._full.values() for folder in folders})
        return "; ".join(full[:4]) or "the nodes are asked whether there is room"

    def wait(self, folders: tuple[str, ...]) -> None:
        newest = self._attempts.checkpoints.newest_complete()
        self._number += 1
        self.wanted = SpaceWanted(
            number=self._number,
            folders=folders,
            need_bytes=ROOM_BYTES + (newest.size_bytes if newest is not None else 0),
        )
        self._full.clear()

    def stop_waiting(self) -> None:
        self.wanted = None

    def seen(self, event: SpaceSeen) -> Wants:
        """A node says whether its disks have room."""
        if self.wanted is None or event.number != self.wanted.number or self._core.state != "RECOVERING":
            return
        before = self._full.get(event.node)
        self._full[event.node] = event.full
        if event.full and event.full != before:
            yield note("no_room", node=event.node, what="; ".join(event.full)[:300])
        yield from self.go_on_with_room()

    def go_on_with_room(self) -> Wants:
        """Once every member says so: each may write to disks of its own."""
        attempt = self._attempts.current
        if self.wanted is None or attempt is None or self._core.paused or "backoff" in self._core.timers:
            return
        there = [name for name in attempt.members if self._nodes.is_present(name)]
        if not there or any(self._full.get(name) != () for name in there):
            return
        self.wanted = None
        yield w.cancel("hold")
        yield w.CountRestart()
        yield note("room_again", loud=True)
        yield w.ReassignAll()
        yield w.Proceed()
