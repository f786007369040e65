"""The nodes of a job, and which of them make the next attempt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from supervisor.messages import Assignment, EvidenceRequest, NodeJoined


@dataclasses.dataclass
class Node:
    """One registered node. Mutable; owned by the job."""

    name: str
    host: str
    address: str
    order: int | None
    spare: bool
    joined: int
    """Position in the order of registration."""
    standing: bool = True
    """False: lost."""
    why: str = ""
    """Why it was lost."""
    ours_ended: bool = False
    """Lost with its `unbroken run`, by the word of its agent: the node itself is there, and as good as before."""
    quiet_since: float | None = None
    """It has missed heartbeats since then; None: it is heard."""
    done: bool = False
    sent: Assignment | None = None
    """The newest assignment, as it was given out."""
    request: EvidenceRequest | None = None
    wake: tuple[int, ...] = ()
    wake_number: int = 0
    evidence_seen: int = -1
    findings_seen: int = 0
    scheduler_name: str = ""
    """What the scheduler calls it."""


class Roster:
    """All nodes that ever registered, in order of registration."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def named(self, name: str) -> str:
        """The node of this name, or the only one of this host or address; else the name as it is."""
        if name in self._nodes:
            return name
        found = [node.name for node in self._nodes.values() if name in (node.host, node.address)]
        return found[0] if len(found) == 1 else name

    def join(self, event: NodeJoined) -> Node:
        """Register a node, or note that it is back. It keeps its place; without a host nothing else is known of it."""
        node = self._nodes.get(event.node)
        if node is None:
            node = Node(event.node, event.host, event.address, event.order, event.spare, joined=len(self._nodes))
            self._nodes[event.node] = node
        if event.host:
            node.host, node.address = event.host, event.address
            node.order, node.spare = event.order, event.spare
            node.scheduler_name = event.scheduler_node or node.name
        node.standing, node.why, node.ours_ended, node.quiet_since = True, "", False, None
        return node

    def choose(self, previous: tuple[str, ...], size: int, usable: Callable[[Node], bool]) -> tuple[str, ...]:
        """The members of the next attempt, at most `size`, in the order of their ranks.

        Members of the previous attempt keep their places; a node that replaces a lost one takes its place, so that
        ranks move as little as possible. Ordinary nodes come before spares. Those that are silent just now come last,
        and of them first the one that was heard last.
        """
        free = [node for node in self._nodes.values() if node.name not in previous and usable(node)]
        free.sort(key=lambda node: (-math.inf if node.quiet_since is None else -node.quiet_since, *_place(node)))
        if not previous:
            return tuple(node.name for node in sorted(free[:size], key=_place))
        names = [node.name for node in free]
        members: list[str] = []
        for name in previous:
            node = self._nodes.get(name)
            if node is not None and usable(node):
                members.append(name)
            elif names:
                members.append(names.pop(0))
        members += names[: max(0, size - len(members))]
        return tuple(members[:size])


def _place(node: Node) -> tuple[bool, int, int]:
    return (node.spare, node.order if node.order is not None else 1 << 30, node.joined)
