"""Which nodes this job must not use, and the circuit breaker that keeps policy from emptying a cluster.

A diagnosis that is wrong in the same way ten times must not take ten nodes: policy may cordon at most 2 nodes, or a
tenth of the job if that is more, within an hour; after that an operator decides. Operators are not limited, and what
they said of a node is never undone by policy.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable

from diagnosis.signals import clean_line
from recovery.actions import Cordon
from recovery.scheduling import PREFIX

WINDOW_S = 3600.0
ALWAYS_ALLOWED = 2
SHARE_OF_JOB = 0.1
REASON_LIMIT = 200
VOUCHED_KEPT = 1000
_KEY = re.compile(r"(gpu|incident|job|by)=")
"""What stands before the reason itself, which is somebody's free text."""


def breaker_limit(job_nodes: int) -> int:
    """How many nodes policy may cordon within the window."""
    return max(ALWAYS_ALLOWED, int(job_nodes * SHARE_OF_JOB))


def drain_reason(cordon: Cordon, job: str) -> str:
    """What the scheduler shows beside the node, in one line: `unbroken: CLASS gpu=... incident=JOB/ID WHY`."""
    words = [PREFIX, cordon.failure_class.value if cordon.failure_class is not None else "operator"]
    gpu = cordon.gpu or cordon.culprit_gpu
    words += [f"gpu={gpu}"] if gpu else []
    words += [f"incident={job}/{cordon.incident}"] if cordon.incident else [f"job={job}"]
    words += [f"by={cordon.by}"] if cordon.by != "policy" else []
    return clean_line(" ".join([*words, cordon.reason]).replace('"', "'"), REASON_LIMIT)


def is_drain_of(reason: str, job: str) -> bool:
    """Whether `reason`, as the scheduler shows it, is one that `drain_reason` made for this job."""
    words = reason.split()
    if len(words) < 3 or words[0] != PREFIX:
        return False
    ours = [word for word in itertools.takewhile(_KEY.match, words[2:]) if not word.startswith(("gpu=", "by="))]
    return bool(ours) and (ours[0] == f"job={job}" or ours[0].startswith(f"incident={job}/"))


class CordonLedger:
    """The cordons in force. Mutable; owned by the job. Times are Unix seconds."""

    def __init__(self) -> None:
        self._cordons: dict[tuple[str, str], Cordon] = {}
        self._by_policy: deque[tuple[float, str]] = deque(maxlen=10_000)
        self._vouched: dict[str, float] = {}

    def _taken(self, now: float) -> set[str]:
        return {name for at, name in self._by_policy if at > now - WINDOW_S}

    def start_anew(self) -> None:
        """Forget what policy took: an operator has looked at it."""
        self._by_policy.clear()

    def vouch(self, node: str, now: float) -> None:
        """An operator says that `node` may be used."""
        self._vouched.pop(node, None)
        self._vouched[node] = now
        while len(self._vouched) > VOUCHED_KEPT:
            del self._vouched[next(iter(self._vouched))]

    def vouched_since(self, at: float) -> tuple[str, ...]:
        """Nodes that an operator said may be used, at `at` or later."""
        return tuple(node for node, said_at in self._vouched.items() if said_at >= at)

    def covers(self, node: str, at: float, opened_at: float) -> bool:
        """Whether an operator, who vouched for `node` before an incident opened, knew by then what was seen `at`."""
        said_at = self._vouched.get(node)
        return said_at is not None and at <= said_at < opened_at

    def allowed_together(self, nodes: Iterable[str], job_nodes: int, now: float) -> tuple[str, ...]:
        """As many of `nodes` as policy may cordon now. One that it cordoned within the window costs nothing again."""
        allowed: list[str] = []
        fresh = 0
        taken = self._taken(now)
        for node in nodes:
            fresh += node not in taken
            if node in taken or len(taken) + fresh <= breaker_limit(job_nodes):
                allowed.append(node)
        return tuple(allowed)

    def taken(self, now: float) -> int:
        """How many nodes policy has cordoned within the window."""
        return len(self._taken(now))

    def add(self, cordon: Cordon) -> None:
        """Operators win: policy never replaces a cordon that an operator set."""
        key = (cordon.node, cordon.gpu)
        held = self._cordons.get(key)
        if held is not None and held.by != "policy" and cordon.by == "policy":
            return
        self._cordons[key] = cordon
        if cordon.by == "policy":
            self._by_policy.append((cordon.at, cordon.node))

    def lift(self, node: str, gpu: str = "") -> bool:
        """Remove all cordons of `node`, or the one of its `gpu`; False when there were none."""
        keys = [key for key in self._cordons if key[0] == node and gpu in ("", key[1])]
        for key in keys:
            del self._cordons[key]
        return bool(keys)

    def on(self, node: str, gpu: str) -> Cordon | None:
        """The cordon of just this GPU."""
        return self._cordons.get((node, gpu))

    def of(self, node: str, now: float) -> Cordon | None:
        """A cordon that keeps the job off `node` now. One of its GPUs is enough: torchrun uses a node as a whole."""
        for cordon in self._cordons.values():
            if cordon.node == node and (cordon.until is None or cordon.until > now):
                return cordon
        return None

    def all(self, now: float) -> tuple[Cordon, ...]:
        return tuple(c for c in self._cordons.values() if c.until is None or c.until > now)
