"""One attempt: one life of the worker group, and what was seen of it."""

from __future__ import annotations

import bisect
import dataclasses

from diagnosis.signals import ExitRecord, NodeEvidence
from recovery.actions import Preparation, Resume
from supervisor.messages import Round, StoreOffer

EVIDENCE_KEPT = 256


@dataclasses.dataclass
class Attempt:
    """Mutable. `Attempts` owns it, except for what `Incidents` collects about a failure. Times are Unix seconds."""

    number: int
    members: tuple[str, ...]
    """In the order of their ranks."""
    formed_at: float
    resume: Resume
    prepare: tuple[Preparation, ...] = ()
    preparer: str = ""
    """The member that does the preparations."""
    offers: dict[str, StoreOffer] = dataclasses.field(default_factory=dict)
    prepare_error: str = ""
    round: Round | None = None
    world_size: int = 0
    """Ranks of all members; 0 before the round was formed."""
    ranks: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    started_members: set[str] = dataclasses.field(default_factory=set)
    """Members whose ranks were all started."""
    exits: dict[int, ExitRecord] = dataclasses.field(default_factory=dict)
    launchers_ended: dict[str, str] = dataclasses.field(default_factory=dict)
    early_ends: set[str] = dataclasses.field(default_factory=set)
    """Members whose launcher ended while the attempt was being formed."""
    adopted: bool = False
    """The journal has no record of its start: its members are the nodes that report ranks of it."""
    finishing: bool = False
    """Every rank ended well."""
    over: bool = False
    """Its workers have ended, or are to end."""
    first_step: int | None = None
    first_at: float | None = None
    step: int | None = None
    step_at: float = 0.0
    last_step: int | None = None
    progress_seen_at: float | None = None
    """When the first sign of progress was seen: collectives, output, or a step."""
    workers_started_at: float | None = None
    """When the workers of all members had started."""
    resume_checked: bool = False
    """Its first steps were compared with the checkpoint it should have started from."""

    evidence: dict[tuple[str, int], NodeEvidence] = dataclasses.field(default_factory=dict)
    """(node, request) -> its answer; request 0: the node sent it without being asked. Only `Incidents` changes it."""
    stacks_request: int = 0
    """The newest evidence request of a suspected hang; 0 for none. Only `Incidents` changes it."""
    broke_at: float | None = None
    """When it failed. Only `Incidents` changes it."""
    _set_of: tuple[str, ...] | None = None
    _set: frozenset[str] = frozenset()

    @property
    def member_set(self) -> frozenset[str]:
        if self._set_of is not self.members:
            self._set_of, self._set = self.members, frozenset(self.members)
        return self._set

    @property
    def resume_text(self) -> str:
        """The end of a sentence on its start: where it may resume (the script decides)."""
        if self.resume.path:
            return f"; newest good checkpoint: {self.resume.path}"
        return "; no good checkpoint was found" if self.number > 1 else ""

    @property
    def all_offered(self) -> bool:
        """Launchers of all members wait in rendezvous (only members' offers are kept)."""
        return 0 < len(self.members) <= len(self.offers)

    def add_workers(self, node: str, ranks: tuple[int, ...]) -> None:
        self.ranks[node] = ranks
        if len(ranks) >= self.offers[node].local_world_size:
            self.started_members.add(node)

    def adopt(self, node: str, ranks: tuple[int, ...], host: str) -> None:
        """A node reports its ranks of this attempt; the journal knows nothing else about it."""
        known = node in self.ranks
        self.world_size += len(ranks) - len(self.ranks.get(node, ()))
        self.ranks[node] = ranks
        self.offers[node] = StoreOffer(host=host, port=0, local_world_size=len(ranks))

        def first_rank(name: str) -> int:
            return min(self.ranks[name], default=0)

        if known:
            self.members = tuple(sorted(self.ranks, key=first_rank))
        else:
            members = list(self.members)
            bisect.insort(members, node, key=first_rank)
            self.members = tuple(members)
        self.started_members.add(node)
        self.round = Round(attempt=self.number, nodes=self.members, store_host=host, store_port=0)

    @property
    def rank_nodes(self) -> dict[int, str]:
        return {rank: name for name, ranks in self.ranks.items() for rank in ranks}

    @property
    def all_started(self) -> bool:
        """All ranks of all members were started."""
        return len(self.started_members) == len(self.members)

    @property
    def ended_well(self) -> bool:
        """Every rank of the job ended with code 0."""
        return 0 < self.world_size <= len(self.exits) and all(record.code == 0 for record in self.exits.values())

    @property
    def is_broken(self) -> bool:
        """A rank or a launcher failed: the attempt cannot go on."""
        return bool(self.launchers_ended) or any(record.code != 0 for record in self.exits.values())

    def reached_at(self, step: int) -> float | None:
        """About when `step` was made, by this attempt's pace; None: unknown."""
        if self.step is None:
            return None
        pace = self.pace
        return self.step_at if step == self.step else None if pace is None else self.step_at + (step - self.step) * pace

    @property
    def pace(self) -> float | None:
        """Seconds per step, even if only one step was ever seen."""
        pace = self.seconds_per_step
        began = self.workers_started_at
        if pace is None and self.step is not None and began is not None and self.step > self.done_before:
            pace = max(0.0, self.step_at - began) / (self.step - self.done_before)
        return pace

    @property
    def seconds_per_step(self) -> float | None:
        if self.first_at is None or self.first_step is None or self.step is None or self.step <= self.first_step:
            return None
        return (self.step_at - self.first_at) / (self.step - self.first_step)

    @property
    def done_before(self) -> int:
        """The last step that was done when its own steps began. (Scripts may show only every tenth step.)"""
        first = self.first_step if self.first_step is not None else 0
        resumed = self.resume.step
        return resumed if resumed is not None and resumed < first else max(0, first - 1)

    @property
    def first_made(self) -> int | None:
        """Its own first step, as far as known: the one after the checkpoint's, or the first one that was seen."""
        resumed, first = self.resume.step, self.first_step
        return resumed + 1 if resumed is not None and first is not None and resumed < first else first

    def add_step(self, step: int | None, last_step: int | None, at: float) -> None:
        if last_step is not None:
            self.last_step = last_step
        elif step is not None and self.last_step is not None and step > self.last_step:
            self.last_step = None  # that was the end of an epoch
        if step is None:
            return
        if self.first_step is None:
            self.first_step, self.first_at = step, at
        if self.step is None or step > self.step:
            self.step, self.step_at = step, at

    def keep_evidence(self, piece: NodeEvidence) -> bool:
        """False: it is known already, or there is too much evidence."""
        key = (piece.node, piece.request)
        if key in self.evidence or len(self.evidence) >= EVIDENCE_KEPT:
            return False
        self.evidence[key] = piece
        return True

    def drop_evidence_between(self, first: int, end: int) -> None:
        """Drop the answers to requests from `first` to before `end`: newer answers replace them."""
        for key in [key for key in self.evidence if first <= key[1] < end]:
            del self.evidence[key]
