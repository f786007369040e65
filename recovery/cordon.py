"""Which nodes this job must not use, and the circuit breaker that keeps policy from emptying a cluster.

A diagnosis that is wrong in the same way ten times must not take ten nodes: policy may cordon at most 2 nodes, or a
tenth of the job if that is more, within an hour; after that an operator decides. Operators are not limited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from recovery.actions import Cordon

WINDOW_S = 3600.0
ALWAYS_ALLOWED = 2
SHARE_OF_JOB = 0.1


def breaker_limit(job_nodes: int) -> int:
    """How many nodes policy may cordon within the window."""
    return max(ALWAYS_ALLOWED, int(job_nodes * SHARE_OF_JOB))


class CordonLedger:
    """The cordons in force. Mutable; owned by the job. Times are Unix seconds."""

    def __init__(self) -> None:
        self._cordons: dict[tuple[str, str], Cordon] = {}
        self._by_policy: deque[tuple[float, str]] = deque(maxlen=10_000)

    def allowed_together(self, nodes: Iterable[str], job_nodes: int, now: float) -> tuple[str, ...]:
        """As many of `nodes` as policy may cordon now. One that it cordoned within the window costs nothing again."""
        allowed: list[str] = []
        fresh = 0
        taken = {name for at, name in self._by_policy if at > now - WINDOW_S}
        for node in nodes:
            fresh += node not in taken
            if node in taken or len(taken) + fresh <= breaker_limit(job_nodes):
                allowed.append(node)
        return tuple(allowed)

    def taken(self, now: float) -> int:
        """How many nodes policy has cordoned within the window."""
        return len({name for at, name in self._by_policy if at > now - WINDOW_S})

    def add(self, cordon: Cordon) -> None:
        """Operators win: policy never replaces a cordon that an operator set."""
        key = (cordon.node, cordon.gpu)
        held = self._cordons.get(key)
        if held is not None and held.by != "policy" and cordon.by == "policy":
            return
        self._cordons[key] = cordon
        if cordon.by == "policy":
            self._by_policy.append((cordon.at, cordon.node))

    def lift(self, node: str) -> bool:
        """Remove all cordons of `node`; False when there were none."""
        keys = [key for key in self._cordons if key[0] == node]
        for key in keys:
            del self._cordons[key]
        return bool(keys)

    def of(self, node: str, now: float) -> Cordon | None:
        """A cordon that keeps the job off `node` now. One of its GPUs is enough: torchrun uses a node as a whole."""
        for cordon in self._cordons.values():
            if cordon.node == node and (cordon.until is None or cordon.until > now):
                return cordon
        return None

    def all(self, now: float) -> tuple[Cordon, ...]:
        return tuple(c for c in self._cordons.values() if c.until is None or c.until > now)
