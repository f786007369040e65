"""What the controller's loop remembers of the nodes from all events so far, beyond what the watch has seen itself."""

from __future__ import annotations

import msgspec

from supervisor.messages import (
    AnyEvent,
    Heartbeat,
    JobDefined,
    JobSpec,
    LauncherEnded,
    NodeDone,
    NodeJoined,
    NodeLost,
    NodesLost,
    WorkersStarted,
)

SPECS = 16
"""Different job specs that are told apart (a node with one more says so at each connection)."""


class Memory:
    """Told of every event, replayed or new."""

    def __init__(self) -> None:
        self.replaying = True
        self.unheard: set[str] = set()
        """Nodes that an earlier controller knew, neither lost nor done, of which no heartbeat came to this one."""
        self.specs: list[JobSpec] = []
        self._ran: dict[str, int] = {}

    def note(self, event: AnyEvent) -> None:
        if isinstance(event, JobDefined):
            self.is_new(event.spec)
        elif isinstance(event, NodeJoined):
            if self.replaying:
                self.unheard.add(event.node)
        elif isinstance(event, WorkersStarted):
            self._ran[event.node] = event.attempt
        elif isinstance(event, NodeLost | NodesLost | NodeDone):
            for node in event.nodes if isinstance(event, NodesLost) else (event.node,):
                self.unheard.discard(node)
                self._ran.pop(node, None)

    def is_new(self, spec: JobSpec) -> bool:
        """Whether this spec is seen for the first time. The name is the first node's to give."""
        if any(msgspec.structs.replace(spec, name=known.name) == known for known in self.specs):
            return False
        self.specs = [*self.specs, spec][-SPECS:]
        return True

    def heard(self, heartbeat: Heartbeat, now: float) -> LauncherEnded | None:
        """What only this memory can tell of a heartbeat: its node ran workers, and now its keeper knows of none.

        It was started anew then (power cut, requeue); neither the agent nor the watch was there before.
        """
        self.unheard.discard(heartbeat.node)
        ran = self._ran.get(heartbeat.node, 0)
        if not ran or heartbeat.attempt != 0 or heartbeat.keeper not in ("starting", "ready"):
            return None
        del self._ran[heartbeat.node]
        return LauncherEnded(at=now, node=heartbeat.node, attempt=ran, how="its node was started anew", fresh=False)
