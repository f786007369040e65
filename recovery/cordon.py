"""Which nodes this job must not use, and how it asks for their drain.

A diagnosis that is wrong in the same way ten times must not take ten nodes: the circuit breaker lets policy cordon at
most 2 nodes, or a tenth of the job if that is more, within an hour; after that an operator decides. Operators are not
limited, and what they said of a node is never undone by policy.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import Frozen, clean_line
from diagnosis.taxonomy import FailureClass
from recovery.scheduling import PREFIX

WINDOW_S = 3600.0
ALWAYS_ALLOWED = 2
SHARE_OF_JOB = 0.1
REASON_LIMIT = 200
VOUCHED_KEPT = 1000
_KEY = re.compile(r"(gpu|incident|job|by)=")
"""What comes before the reason itself, which is free text."""


class Cordon(Frozen, frozen=True, kw_only=True):
    """A node (or one of its GPUs) that this job must not use."""

    node: str
    gpu: str = ""
    reason: str
    by: str = "policy"
    """`policy`, or the operator's name."""
    failure_class: FailureClass | None = None
    incident: str = ""
    at: float = 0.0
    until: float | None = None
    culprit_gpu: str = ""
    """The GPU that gave the reason, where the node as a whole is cordoned for it."""

    @property
    def follows_scheduler(self) -> bool:
        """The scheduler takes the node out of service itself: it is not asked to drain it."""
        return self.failure_class is FailureClass.PREEMPTED_OR_CANCELLED


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


class Cordons:
    """The cordons in force. Mutable; owned by the job. Times are Unix seconds."""

    def __init__(self) -> None:
        self._cordons: dict[tuple[str, str], Cordon] = {}
        self._of_cluster: tuple[Cordon, ...] = ()
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

    def set_cluster(self, cordons: tuple[Cordon, ...]) -> None:
        """What the ledger of all jobs says, in place of what it said before."""
        self._of_cluster = cordons

    def on(self, node: str, gpu: str) -> Cordon | None:
        """The cordon of just this GPU."""
        return self._cordons.get((node, gpu))

    def of(self, node: str, now: float) -> Cordon | None:
        """A cordon that keeps the job off `node` now. One of its GPUs is enough: torchrun uses a node as a whole."""
        return next((one for one in self.all(now) if one.node == node), None)

    def of_job(self, node: str, now: float) -> Cordon | None:
        """One that this job has made, and can lift."""
        mine = self._cordons.values()
        return next((one for one in mine if one.node == node and (one.until is None or one.until > now)), None)

    def of_cluster(self, now: float) -> dict[str, Cordon]:
        """By node: those that only the ledger of all jobs says."""
        held = (one for one in self._of_cluster if one.until is None or one.until > now)
        return {one.node: one for one in held if self.of_job(one.node, now) is None}

    def for_all_jobs(self, now: float) -> set[str]:
        """Nodes that the ledger of all jobs cordons, whatever this job says of them."""
        return {one.node for one in self._of_cluster if one.until is None or one.until > now}

    def is_of_cluster(self, cordon: Cordon) -> bool:
        """The ledger of all jobs says so, and only there it is lifted."""
        return any(one is cordon for one in self._of_cluster)

    def all(self, now: float) -> tuple[Cordon, ...]:
        every = (*self._cordons.values(), *self._of_cluster)
        return tuple(c for c in every if c.until is None or c.until > now)


# ----- requests to drain a node, from jobs whose user may not, to root's programs on that node -----
#
# Such a job leaves a file in a folder of the node; what root runs there (Slurm's Epilog and HealthCheckProgram) reads
# it. Any user can write one, so root believes little of it: only jobs that Slurm has on this node, only this node, only
# this boot, only what looks as we write it, and only so many nodes within an hour.

DRAIN_FOLDER: Final = "/var/spool/unbroken"
REQUEST_BYTES: Final = 4096
REQUEST_AGE_S: Final = 7 * 86400.0
"""An Epilog may come as late as the end of the job."""
AHEAD_S: Final = 60.0
"""A time that lies further ahead than this is none."""
DRAINS_PER_HOUR: Final = 2

_CLASSES: Final = frozenset(one.value for one in FailureClass)


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    schema: Literal[1] = 1
    job: str
    node: str
    """As the scheduler calls it."""
    reason: str
    """As `drain_reason` makes it."""
    boot_id: str
    at: float
    """Unix time."""


class Drained(NamedTuple):
    """A drained node, as the scheduler reports it."""

    node: str
    at: float
    reason: str
    """May be cut."""


def request_file(job: str, uid: int) -> str:
    """Of the one request that a job has on a node: root looks for the names that can be, and lists nothing."""
    return f"{job}.{uid}.json"


def may_be_asked(reason: str, job: str) -> bool:
    """Whether root's programs accept this reason: a verdict of this job, not somebody else's command."""
    return is_drain_of(reason, job) and reason.split()[1] in _CLASSES


def read_request(data: bytes, *, job: str, node: str, boot_id: str, now: float) -> DrainRequest | str:
    """The request, or why it is none, in words."""
    if len(data) > REQUEST_BYTES:
        return f"it is longer than {REQUEST_BYTES} bytes"
    try:
        request = msgspec.json.decode(data, type=DrainRequest)
    except (msgspec.DecodeError, RecursionError):
        return "its format is not ours"
    if (request.job, request.node) != (job, node):
        return "it is about another job or node"
    if request.boot_id != boot_id:
        return "the node was booted since"
    if not now - REQUEST_AGE_S <= request.at <= now + AHEAD_S:
        return "it is too old"
    if request.reason != clean_reason(request.reason) or not may_be_asked(request.reason, job):
        return "its reason is not one of our verdicts"
    return request


def clean_reason(text: str) -> str:
    return clean_line(text, REASON_LIMIT).replace('"', "'")


def too_many(drained: Iterable[Drained], node: str, per_hour: int, now: float) -> int:
    """How many nodes were drained by us within the hour, where `node` is, or would be, one too many; else 0.

    Several nodes look at the same time. So each looks again after it was drained, and those that came last step back.
    """
    ours = {one.node: one.at for one in drained if one.reason.startswith(PREFIX) and one.at > now - WINDOW_S}
    order = sorted(ours, key=lambda name: (ours[name], name))
    place = order.index(node) if node in ours else len(order)
    return len(order) if place >= per_hour else 0
