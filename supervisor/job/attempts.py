"""The attempts of a job, one after the other: from the checkpoints to resume from to the end of all ranks.

`Job._next_attempt` leads to a new attempt, by `form` (who takes part, from which checkpoint), `gather` (are there
enough nodes?) and `begin` (nodes are told). From there events go on, in the order of this file: `launcher_ready` for
each node, `_form_round` (all launchers wait in rendezvous: let them go), `workers_started` for each node, and `_run`
with the first progress.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from diagnosis.signals import ExitRecord, NodeEvidence
from recovery.checkpoint import (
    Checkpoint,
    Preparation,
    Resume,
    ResumeSituation,
)
from recovery.fewer_processes import BadGpu, why_not_loaded
from recovery.snapshot_choice import NodeSnapshot, common
from recovery.snapshot_choice import choose as choose_snapshot
from recovery.snapshot_mirrors import Mirrored, of_all, to_bring
from recovery.tiers import BringBack
from supervisor import messages as m
from supervisor.job.checkpoint_choice import Checkpoints
from supervisor.job.core import (
    CloseFailures,
    Core,
    EndJob,
    Enter,
    Form,
    GoOn,
    Hold,
    Mark,
    OpenIncident,
    Proceed,
    ProgressMade,
    RanksSaved,
    Recovered,
    Timer,
    Wants,
    WantsAnd,
    cancel,
)
from supervisor.job.mirrors import SnapshotMirrors, SnapshotPlan
from supervisor.job.nodes import Nodes
from supervisor.messages import Round, SpaceSeen, SpaceWanted, StoreOffer
from supervisor.notes import note

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
    bring: BringBack | None = None
    """What every member must have on its own disk before ranks start."""
    restore: Mirrored | None = None
    """What every member may have in memory before ranks start, from another node's."""
    without: dict[str, BadGpu] = dataclasses.field(default_factory=dict)
    """Members that run one process less."""
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
    counted: int = 0
    """Steps of the optimizers since its ranks started, by the step clock; 0: not counted."""
    counted_step: int | None = None
    """Which step of the run that is, where the output and the clock go together."""
    first_counted_at: float | None = None
    counted_at: float = 0.0
    """When the newest of them was made."""
    progress_seen_at: float | None = None
    """When the first sign of progress was seen: collectives, output, or a step."""
    workers_started_at: float | None = None
    """When the workers of all members had started."""
    asked: bool = False
    """Its ranks were asked for a checkpoint: where all end well after that, work may be left."""
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
        if self.round is not None and self.round.snapshot is not None:
            return f"; all ranks hold a snapshot of step {self.round.snapshot[1]} in memory"
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
    def newest_step(self) -> int | None:
        """The newest step: the clock may know one that the output has not told. None: the output tells none."""
        return None if self.step is None else max(self.step, self.counted_step or 0)

    @property
    def resumed_step(self) -> int | None:
        """The step of the snapshot that its ranks could start from, if its first is later; else the checkpoint's."""
        held = self.round.snapshot if self.round is not None else None
        if held is not None and self.first_step is not None and self.first_step > held[1]:
            return held[1]
        return self.resume.step

    @property
    def done_before(self) -> int:
        """The last step that was done when its own steps began. (Scripts may show only every tenth step.)"""
        first = self.first_step if self.first_step is not None else 0
        resumed = self.resumed_step
        return resumed if resumed is not None and resumed < first else max(0, first - 1)

    @property
    def first_made(self) -> int | None:
        """Its own first step, as far as known: the one after the checkpoint's, or the first one that was seen."""
        resumed, first = self.resumed_step, self.first_step
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

    def add_count(self, event: m.Progressed, at: float) -> None:
        """What the step clock has counted. It decides nothing: it tells how far it is, and what is lost."""
        if event.counted and self.first_counted_at is None:
            self.first_counted_at = at
        if event.counted > self.counted:
            self.counted, self.counted_at = event.counted, at
        if event.counted_step is not None:
            self.counted_step = max(event.counted_step, self.counted_step or 0)

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


FORM_LIMIT_S = 600.0
"""All launchers must have come to rendezvous, preparations done, within this."""
BRING_LIMIT_S = 1800.0
"""So much more where a checkpoint is brought to nodes' own disks."""
START_LIMIT_S = 120.0
"""All workers must have started within this after the round was formed."""
SNAPSHOT_TRIES = 2
"""So many attempts may start from one snapshot and break before their first step."""
STAND_S = 1.0
"""Workers that have all lived this long are running, whether or not progress can be seen."""
SETTLE_S = 600.0
"""An incident closes after this even if no progress can be seen in the new attempt."""
FINISH_LIMIT_S = 60.0
"""Launchers get this long to end after every rank ended well."""
BEGAN_AGAIN = 0.5
"""A first step below this part of the step resumed from means that the script began again from nothing."""


class Attempts:
    """Forming, starting, running, finishing."""

    def __init__(self, core: Core, nodes: Nodes, checkpoints: Checkpoints) -> None:
        self._core, self._nodes, self.checkpoints = core, nodes, checkpoints
        self.mirrors = SnapshotMirrors(core, nodes, checkpoints.tiers)
        self.current: Attempt | None = None
        self.last_with_steps: Attempt | None = None
        """The newest attempt before this one that made steps."""
        self.restarts = 0
        self.by_operator = False
        """An operator asked for the next attempt: a pause does not keep it back."""
        self.would_begin_again = False
        """An operator has let the script begin from nothing."""
        self.numbers_from = 0
        """Attempts up to this number have been, as far as is known: the journal may have lost some."""
        self.started_at: float | None = None
        """When the first attempt was given out."""
        self.first_progress_at: float | None = None
        self.first_step_at: float | None = None
        self.first_counted_at: float | None = None
        """The same by the step clock."""
        self.furthest: int | None = None
        """The highest step that any attempt reached."""
        self._furthest_saved: int | None = None
        """The highest step of a checkpoint that an attempt wrote which shows no steps."""
        self._first_step_of_job: int | None = None
        self._places: tuple[str, ...] = ()
        """The members of the last attempt whose workers ran, in the order of their ranks."""
        self._snapshots_from = 0
        """No attempt starts from a snapshot that an earlier one than this wrote."""
        self._no_step_from: tuple[int, int] | None = None
        """The snapshot from which the last attempts could start that made no step, and how many they were."""
        self._no_step_attempts = 0
        self._gather_until = 0.0
        """Before this it starts only with all nodes."""
        self._last_started = 0
        """The number of the newest attempt whose round was formed."""
        self._said_back = ""
        """The checkpoint that a rollback has named: the nodes look again before the attempt starts."""
        self._ranks_ran = False
        self._launcher_failures = 0
        """Launchers that ended by themselves since ranks were started last."""

    # ----- queries -----

    def live(self, number: int) -> Attempt | None:
        """The current attempt, if this is its number and it is not over."""
        attempt = self.current
        return attempt if attempt is not None and attempt.number == number and not attempt.over else None

    @property
    def trains_since(self) -> float | None:
        """When training began: the first step, or where steps are not shown the first sign of life."""
        steps = [at for at in (self.first_step_at, self.first_counted_at) if at is not None]
        return min(steps, default=self.first_progress_at)

    def cannot_go_on(self, attempt: Attempt) -> bool:
        """A rank or launcher of it ended badly, or a member is lost."""
        return attempt.is_broken or any(not n.present for name in attempt.members if (n := self._nodes.get(name)))

    @property
    def would_fail_again(self) -> bool:
        """Launchers end by themselves before they start a rank: at the first start, or for the second time."""
        return self._launcher_failures > (1 if self._ranks_ran else 0)

    @property
    def is_finishing(self) -> bool:
        return self.current is not None and self.current.finishing

    def next_members(self) -> tuple[str, ...]:
        """A node with a bad GPU fills up what no other can, if the checkpoint can be loaded by fewer ranks."""
        size, fewer = self._core.spec.nodes_max, self._nodes.with_bad_gpu()
        chosen = self._nodes.choose(self._places, size, fewer)
        if fewer and self.why_not_fewer(chosen, self._without(chosen)):
            return self._nodes.choose(self._places, size)
        return chosen

    def _without(self, members: Iterable[str]) -> dict[str, BadGpu]:
        """Those of them that run fewer processes."""
        fewer = self._nodes.with_bad_gpu()
        return {name: bad for name in members if name in fewer and (bad := self._nodes.bad_gpu(name)) is not None}

    def why_not_fewer(self, members: tuple[str, ...], without: Mapping[str, BadGpu]) -> str:
        """Why the checkpoint that they would resume from does not let them be fewer ranks, in words."""
        if not without:
            return ""
        try:
            newest = self.checkpoints.would_choose(members)
        except Exception as error:  # what would be lost is not known either
            return f"which checkpoint to resume from is not known ({error})"
        return why_not_loaded(newest, sum(self._processes(name, without) for name in members))

    def _processes(self, name: str, without: Mapping[str, BadGpu]) -> int:
        """How many the node runs; 0: not known."""
        node = self._nodes.get(name)
        return len(without[name].others) if name in without else len(node.gpus.gpus) if node is not None else 0

    # ----- forming -----

    def form(self, members: tuple[str, ...]) -> Wants:
        """A new attempt: from now on no worker of an older one may live."""
        old = self.current
        number = 1 + max(self.numbers_from, old.number if old is not None else 0)
        if old is not None:
            old.over = True
            self._count_tries(old)
            last = self.last_with_steps
            if old.step is not None or (old.counted and (last is None or last.step is None)):
                self.last_with_steps = old
        resume, prepare = yield from self._resume(members)
        self.current = Attempt(
            number=number,
            members=members,
            formed_at=self._core.now,
            resume=resume,
            bring=self.checkpoints.tiers.bring(resume.path),
            without=self._without(members),
            prepare=prepare,
            preparer=members[0] if members and prepare else "",
        )
        self.current.restore = self._to_restore(members, resume)
        self.checkpoints.begin_attempt()
        self._nodes.begin_attempt()
        yield cancel("form", "start", "stood", "settle", "evidence", "finish", "again", "stacks", "silence")
        self._nodes.touch_all()

    def _resume(self, members: tuple[str, ...]) -> WantsAnd[tuple[Resume, tuple[Preparation, ...]]]:
        try:
            resume = self.checkpoints.choose(members)
            if self.checkpoints.gave_up:
                self.checkpoints.gave_up = False
                yield note("rollback_given_up", loud=True)
            return resume
        except Exception as error:  # which checkpoint to use must never decide whether the run comes back at all
            yield note("resume_unknown", why=str(error))
            return Resume(), ()

    def roll_back(self, situation: ResumeSituation, skip_batches: int = 0) -> Wants:
        """The next attempt resumes from an older checkpoint: which one, and what that costs."""
        attempt, members = self.current, self.next_members()
        checkpoint, aside = self.checkpoints.preview(situation, members)
        self.checkpoints.roll_back(situation, members, skip_batches)
        if checkpoint is None:
            return
        self._said_back = checkpoint.path
        other_nodes = attempt is not None and set(members) != attempt.member_set
        steps = lost_s = None
        if attempt is not None and attempt.step is not None and checkpoint.step is not None:
            steps = max(0, attempt.step - checkpoint.step)
            lost_s = None if attempt.pace is None else steps * attempt.pace
        yield note(
            "rolled_back",
            loud=True,
            checkpoint=checkpoint.path,
            step=checkpoint.step,
            lost_steps=steps,
            lost_min=None if lost_s is None else max(1, round(lost_s / 60)),
            aside=len(aside) or None,
            skip=skip_batches or None,
            unsure=other_nodes or self.checkpoints.may_go(checkpoint, members) or None,
        )

    def undo_rollback(self) -> Wants:
        """What the last rollback moved aside is put back, and the next attempt resumes from the newest again."""
        yield note("rollback_undone", loud=True, checkpoints=self.checkpoints.moved_by_rollback)
        self.checkpoints.undo_rollback()

    def refresh(self) -> Wants:
        """Checkpoints or members changed while an attempt is being formed: bring it up to date.

        Preparations are done once for each attempt number, so other preparations, or another node to do them, make
        a new attempt.
        """
        attempt, core = self.current, self._core
        if attempt is None or attempt.round is not None or core.is_over:
            return
        members = self.next_members() if core.state == "RECOVERING" else attempt.members
        if core.state == "RECOVERING" and attempt.without != (without := self._without(members)):
            for name in attempt.without.keys() ^ without.keys():
                attempt.offers.pop(name, None)
            attempt.without = without
            self._nodes.touch_all()
        resume, prepare = yield from self._resume(members)
        if not attempt.preparer and members and prepare:
            attempt.preparer = members[0]
        bring = self.checkpoints.tiers.bring(resume.path)
        renewed = bring is not None and attempt.bring is not None and bring != attempt.bring
        other = (bring.save.key if bring else None) != (attempt.bring.save.key if attempt.bring else None)
        if prepare != attempt.prepare or other or (attempt.preparer and attempt.preparer not in members):
            yield Form(members)
            if core.state == "STARTING":
                yield Timer("form", core.now + self._form_limit_s())
        elif (members is not attempt.members and members != attempt.members) or resume != attempt.resume:
            changed = attempt.member_set.symmetric_difference(members) | {*attempt.members[:1], *members[:1]}
            same = resume == attempt.resume
            attempt.members, attempt.resume = members, resume
            attempt.offers = {name: offer for name, offer in attempt.offers.items() if name in attempt.member_set}
            if same:
                self._nodes.touch_members(changed)
            else:
                self._nodes.touch_all()
        if attempt is self.current and attempt.restore != (restore := self._to_restore(members, resume)):
            attempt.restore = restore
            self._nodes.touch_all()
        if renewed and not other and attempt is self.current:  # a source has gone, or answers at another port
            attempt.bring = bring
            self._nodes.touch_all()

    def gather(self) -> WantsAnd[Literal["enough", "too few", "more to come"]]:
        """Whether there are enough nodes for the next attempt; else see that something will happen in time."""
        core = self._core
        wanted = core.spec.nodes_max
        # Spares do not begin while other nodes are on their way. Counting is quick; to choose among all nodes is not.
        here = self._nodes.ordinary if core.state == "IDLE" else len(self._nodes)
        if "nodes" in core.timers and here < wanted and core.now < self._gather_until:
            return "more to come"
        members = self.next_members()
        # A spare that happens to come first does not take the place of a node that is on its way.
        early = core.state == "IDLE" and any((node := self._nodes.get(name)) and node.spare for name in members)
        if early and self._nodes.last_choice:  # a doubtful node is there, and left to be a spare
            early = sum(node.present and not node.spare for node in self._nodes) < wanted
        fewer = len(self._without(members))
        if early or fewer or len(members) < wanted:
            enough = yield from self._gathered(len(members), fewer)
            if not enough:
                return "too few"
        yield cancel("gather", "nodes", "hold")
        return "enough"

    def _gathered(self, found: int, fewer: int) -> WantsAnd[bool]:
        """Whether to go on with what there is: fewer than `nodes_max` nodes, or spares among them, or (`fewer`) such as
        run fewer processes."""
        core, spec = self._core, self._core.spec
        if "nodes" not in core.timers:
            yield Timer("nodes", core.now + spec.wait_for_nodes_s)
            if found or self.current is not None:
                yield note("nodes_awaited", found=found - fewer, wanted=spec.nodes_max)
        deadline = core.timers["nodes"]
        may_be_fewer = core.state == "IDLE" or spec.nodes_min < spec.nodes_max or fewer > 0
        self._gather_until = deadline - spec.wait_for_nodes_s + spec.gather_s if may_be_fewer else deadline
        if core.now < self._gather_until:
            if may_be_fewer:
                yield Timer("gather", self._gather_until)
            return False
        return found >= max(1, spec.nodes_min)

    # ----- starting -----

    def begin(self, attempt: Attempt) -> Wants:
        """Nodes are told of the attempt that was formed."""
        now = self._core.now
        yield Enter("STARTING")
        self.by_operator = False
        self.started_at = now if self.started_at is None else self.started_at
        yield Timer("form", now + self._form_limit_s())
        self._nodes.touch_all()
        yield from self._tell_fewer(attempt)
        yield from self._form_round()
        if attempt.prepare_error:
            yield OpenIncident("setup", attempt.prepare_error, now)

    def _tell_fewer(self, attempt: Attempt) -> Wants:
        """Before any rank starts: the world is smaller, and what that may change."""
        sizes = [self._processes(name, attempt.without) for name in attempt.members]
        for name, bad in attempt.without.items():
            yield note(
                "fewer_processes",
                loud=True,
                node=name,
                gpu=bad.uuid,
                reason=bad.reason,
                processes=len(bad.others),
                of=len(bad.others) + 1,
                world=sum(sizes) if all(sizes) else None,
                full=sum(sizes) + len(attempt.without) if all(sizes) else None,
            )

    def _form_limit_s(self) -> float:
        attempt = self.current
        brings = attempt is not None and (attempt.bring is not None or attempt.restore is not None)
        return FORM_LIMIT_S + (BRING_LIMIT_S if brings else 0.0)

    def launcher_ready(self, event: m.LauncherReady) -> Wants:
        """A launcher waits in rendezvous."""
        attempt = self.live(event.attempt)
        if attempt is None or attempt.round is not None or event.node not in attempt.member_set:
            return
        expected = self._processes(event.node, attempt.without) if self._core.spec.fewer_processes else 0
        if expected not in (0, event.offer.local_world_size):
            return  # the launcher of the attempt before: the next one starts as many as it should
        attempt.offers[event.node] = event.offer
        if attempt.prepare_error.startswith(f"{event.node} could not prepare "):
            attempt.prepare_error = ""  # a later try succeeded
        yield Mark("stop")
        yield from self._form_round()

    def _form_round(self) -> Wants:
        """All launchers wait in rendezvous: let them go."""
        attempt, now = self.current, self._core.now
        if attempt is None or self._core.state != "STARTING" or attempt.round is not None or not attempt.all_offered:
            return
        if self.checkpoints.tiers.has_news:
            yield from self.checkpoints.tiers.work_out()
            yield from self.refresh()
            if self.current is not attempt or not attempt.all_offered:
                return
        attempt.world_size = sum(offer.local_world_size for offer in attempt.offers.values())
        offer = attempt.offers[attempt.members[0]]
        snapshot = self._snapshot(attempt)
        attempt.round = m.Round(
            attempt=attempt.number,
            nodes=attempt.members,
            store_host=offer.host,
            store_port=offer.port,
            snapshot=None if snapshot is None else (snapshot.attempt, snapshot.step),
        )
        self._places = attempt.members
        said, self._said_back = self._said_back, ""
        elsewhere = self.checkpoints.rolls_back and said and attempt.resume.path != said
        self.checkpoints.attempt_starts()
        self.checkpoints.tiers.begin(attempt.number, attempt.members)
        last_good, first = self.checkpoints.last_good, self._last_started + 1
        moved = {step.path for step in attempt.prepare}
        gone = last_good if attempt.number > 1 and not attempt.resume.path and last_good not in moved else ""
        yield note(
            "attempt_starts",
            loud=bool(gone),
            attempt=attempt.number,
            count=len(attempt.members),
            nodes=attempt.members,
            checkpoint=attempt.resume.path,
            no_checkpoint=attempt.number > 1 and not attempt.resume.path and (snapshot is None or bool(gone)),
            gone=gone,
            given_up=first if first == attempt.number - 1 else None,
            given_up_from=first if first < attempt.number - 1 else None,
            given_up_to=attempt.number - 1,
        )
        if elsewhere:
            now_to = attempt.resume
            yield note("rolled_back_elsewhere", loud=True, step=now_to.step, checkpoint=now_to.path, said=said)
        if snapshot is not None:
            yield note("snapshot_held", attempt=attempt.number, step=snapshot.step)
        yield from self._world_size_note(attempt)
        self._last_started = attempt.number
        yield Mark("rendezvous")
        yield cancel("form")
        yield Timer("start", now + START_LIMIT_S)
        self._nodes.touch_all()

    def _snapshot(self, attempt: Attempt) -> NodeSnapshot | None:
        """The snapshot in memory that all ranks of the attempt hold, if it is newer than the checkpoint and trusted.

        After a rollback, and where one is not trusted, no later attempt may start from what was there before either.
        """
        offers = [(attempt.offers[name].local_world_size, attempt.offers[name].snapshots) for name in attempt.members]
        held = [one for one in common(offers) if one.attempt >= self._snapshots_from]
        trusted = [one for one in held if not self.checkpoints.is_suspect(one.at, one.step)]
        if len(trusted) < len(held) or self.checkpoints.rolls_back:
            self._snapshots_from = attempt.number
        trusted = [one for one in trusted if self.checkpoints.keeps(one)]
        return self._newer(filter(self._may_load, trusted), attempt.resume.path, attempt.resume.step)

    def _may_load(self, snapshot: NodeSnapshot) -> bool:
        """Not one from which attempts started and made no step: the script may be unable to load it."""
        tried = self._no_step_attempts if (snapshot.attempt, snapshot.step) == self._no_step_from else 0
        return tried < SNAPSHOT_TRIES

    def _count_tries(self, over: Attempt) -> None:
        held = over.round.snapshot if over.round is not None else None
        if held is None or not over.is_broken or over.newest_step is not None or over.counted:
            return
        self._no_step_attempts = self._no_step_attempts + 1 if held == self._no_step_from else 1
        self._no_step_from = held

    def _to_restore(self, members: Sequence[str], resume: Resume) -> Mirrored | None:
        """The mirrored snapshot from which the next attempt may start, where a node was replaced."""
        if self.checkpoints.rolls_back:
            return None
        found = to_bring(self.mirrors.candidates(), members, self._last_started)
        if found is None or found.attempt < self._snapshots_from:
            return None
        held = of_all(found)
        trusted = not self.checkpoints.is_suspect(held.at, held.step) and self._may_load(held)
        return found if trusted and self._newer((held,), resume.path, resume.step) is not None else None

    def work_out_mirrors(self) -> None:
        if self.current is not None:
            self.mirrors.work_out(self._last_started)

    def snapshot_plan(self) -> SnapshotPlan | None:
        """What nodes are asked to do with snapshots."""
        attempt = self.current
        if attempt is None or not self.mirrors.are_on:
            return None
        begun = attempt.round is not None and attempt.all_offered
        sizes = [attempt.offers[name].local_world_size for name in attempt.members] if begun else []
        chosen = attempt.restore if attempt.round is None else None
        return self.mirrors.plan(attempt.members, sizes, self._last_started, chosen)

    def _newer(self, held: Iterable[NodeSnapshot], path: str, step: int | None) -> NodeSnapshot | None:
        """The one of them that is newer than this checkpoint."""
        step = step if step is not None else self.checkpoints.step_of(path)
        return choose_snapshot(held, checkpoint=bool(path), checkpoint_step=step)

    def would_start_from(self, held: NodeSnapshot, path: str, step: int | None) -> bool:
        """Whether a restart now would start from what all ranks hold, and not from this checkpoint. Changes nothing."""
        trusted = held.attempt >= self._snapshots_from and not self.checkpoints.is_suspect(held.at, held.step)
        trusted = trusted and self._may_load(held)
        return trusted and not self.checkpoints.rolls_back and self._newer((held,), path, step) is not None

    def _world_size_note(self, attempt: Attempt) -> Wants:
        """Tell where the checkpoint's format cannot be loaded by another number of data-parallel ranks."""
        seen = self.checkpoints.candidates(attempt.members)
        found = next((one for one in seen if attempt.resume.path in (one.path, one.copy_of)), None)
        layout = found.layout if found is not None and attempt.resume.path else None
        if found is not None and layout is not None and layout.fixed and layout.world_size != attempt.world_size:
            yield note(
                "world_size_differs",
                loud=True,
                path=attempt.resume.path,
                format=found.format,
                saved=layout.world_size,
                now=attempt.world_size,
            )

    def preparation_failed(self, event: m.PreparationFailed) -> Wants:
        attempt = self.current
        if attempt is None or attempt.over or attempt.round is not None or event.attempt > attempt.number:
            return
        attempt.prepare_error = f"{event.node} could not prepare attempt {event.attempt}: {event.error}"
        if self._core.state == "STARTING":
            yield OpenIncident("setup", attempt.prepare_error, self._core.now)

    def form_due(self) -> Wants:
        assert self.current is not None
        absent = [name for name in self.current.members if name not in self.current.offers]
        text = f"no launcher came to rendezvous on {', '.join(absent[:8])}"
        yield OpenIncident("setup", text, self._core.now)

    def workers_started(self, event: m.WorkersStarted) -> Wants:
        attempt, now = self.live(event.attempt), self._core.now
        if attempt is None or attempt.round is None or event.node not in attempt.offers:
            return
        attempt.add_workers(event.node, event.ranks)
        self._ranks_ran, self._launcher_failures = True, 0
        if attempt.workers_started_at is None and attempt.all_started:
            attempt.workers_started_at = now
            yield Mark("start")
            yield cancel("start")
            if self._core.state == "STARTING":
                yield Timer("stood", now + STAND_S)

    def start_due(self) -> Wants:
        assert self.current is not None
        absent = [name for name in self.current.members if len(self.current.ranks.get(name, ())) == 0]
        text = f"workers did not start on {', '.join(absent[:8]) or 'some nodes'}"
        yield OpenIncident("setup", text, self._core.now)

    # ----- running -----

    def stood_due(self) -> Wants:
        yield from self._run()

    def _run(self) -> Wants:
        if self._core.state != "STARTING":
            return
        yield Enter("RUNNING")
        yield cancel("stood", "start")
        assert self.current is not None
        yield note("attempt_runs", attempt=self.current.number)
        yield Timer("settle", self._core.now + SETTLE_S)

    def progressed(self, event: m.Progressed) -> Wants:
        attempt, now = self.live(event.attempt), self._core.now
        if attempt is None or attempt.round is None:
            return
        attempt.progress_seen_at = now if attempt.progress_seen_at is None else attempt.progress_seen_at
        self.first_progress_at = now if self.first_progress_at is None else self.first_progress_at
        yield from self._run()
        attempt.add_step(event.step, event.last_step, now if event.step_at is None else event.step_at)
        first_count = event.counted > 0 and not attempt.counted
        attempt.add_count(event, now if event.counted_at is None else event.counted_at)
        self.first_counted_at = attempt.first_counted_at if self.first_counted_at is None else self.first_counted_at
        if event.step is None:
            if first_count and self.first_step_at is None:  # and no attempt has shown any
                yield Recovered(f"attempt {attempt.number} made its first step")
            return
        self.first_step_at = now if self.first_step_at is None else self.first_step_at
        if not attempt.resume_checked:
            yield from self._check_resume(attempt, event.step)
        if not attempt.over:
            yield from self._reached(event.step)

    def _reached(self, step: int | None) -> Wants:
        """Further than ever is progress."""
        if step is not None and (self.furthest is None or step > self.furthest):
            self.furthest = step
            yield ProgressMade()

    def steps_in_evidence(self, piece: NodeEvidence) -> Wants:
        """What ranks wrote last may tell a later step than the newest heartbeat."""
        attempt = self.current
        for sample in piece.samples:
            if sample.step is not None and attempt is not None and not attempt.over:
                attempt.add_step(sample.step, sample.last_step, self._core.now - sample.moved_age_s)
                yield from self._reached(sample.step)

    def saved(self, seen: tuple[Checkpoint, ...]) -> Wants:
        """Where no step is shown, a checkpoint of a higher step than ever is progress. One of a step that was made
        before, which a script saves anew when it has resumed, is none."""
        attempt = self.current
        if attempt is None or attempt.over or attempt.workers_started_at is None:
            return
        ours = (one for one in seen if one.complete and one.modified_at >= attempt.workers_started_at)
        step = max((one.step for one in ours if one.step is not None), default=None)
        if step is None:
            return
        known = [one for one in (self._furthest_saved, self.furthest, attempt.resume.step) if one is not None]
        further = all(step > one for one in known)
        self._furthest_saved = max(step, self._furthest_saved or 0)
        if further and attempt.step is None:
            yield ProgressMade()
            yield Recovered(f"attempt {attempt.number} saved a checkpoint of step {step}")

    def _check_resume(self, attempt: Attempt, step: int) -> Wants:
        """Did the script go on where it should? Until that is clear its first step is not believed."""
        if attempt.number == 1:
            self._first_step_of_job = step
        core = self._core
        expected = self._expected_step(attempt) if attempt.number > 1 else None
        early = expected is not None and step + 2 < expected
        may_stop = core.mode == "enforce" and not core.paused and not self.would_begin_again
        first = step if attempt.first_step is None else min(step, attempt.first_step)
        if expected is not None and early and first < expected * BEGAN_AGAIN and may_stop:
            if step > first:
                yield from self._stop_before_overwriting(attempt, first, expected)
            return  # a single low number: a progress bar is drawn from 0 before it jumps to where the run is
        attempt.resume_checked = True
        if early:
            yield note("resumed_early", loud=True, step=step, expected=expected)
        elif expected is not None and attempt.first_step is not None and attempt.first_step < expected - 2:
            attempt.first_step, attempt.first_at = step, core.now
        yield Recovered(f"attempt {attempt.number} reached step {attempt.first_made}")

    def _expected_step(self, attempt: Attempt) -> int | None:
        """The step of the checkpoint that the attempt should have started from; None: unknown, or no measure."""
        path, began = attempt.resume.path, self._first_step_of_job
        found = next((one for one in self.checkpoints.candidates() if one.path == path), None)
        if not path or found is None or self.started_at is None:
            return None
        step = attempt.resume.step if attempt.resume.step is not None else self.checkpoints.step_of(path)
        ours = found.modified_at >= self.started_at
        # An older one counts only if the first attempt started from it: else the user means to begin anew.
        if step is None or not (ours or (began is not None and began + 2 >= step)):
            return None
        if self.furthest is None or step > self.furthest + max(2, self.furthest // 10):
            return None  # no attempt ever showed such a number: the checkpoint counts something else (samples, tokens)
        return step

    def _stop_before_overwriting(self, attempt: Attempt, step: int, expected: int) -> Wants:
        """The script began from nothing: stop it before it overwrites a good checkpoint."""
        path = attempt.resume.path
        yield note("began_again", loud=True, attempt=attempt.number, step=step, path=path, expected=expected)
        yield Enter("RECOVERING")
        yield Form(self.next_members())
        self.would_begin_again = True  # whoever lets it go on has read this
        yield Hold(f"the script does not resume from its checkpoint (it began at step {step} instead of {expected})")

    def settle_due(self) -> Wants:
        if self.current is not None and not self.current.over:
            yield Recovered(f"attempt {self.current.number} has run for {SETTLE_S:.0f} s")

    # ----- ending -----

    def rank_ended(self, event: m.RankEnded) -> Wants:
        attempt, core, record = self.live(event.attempt), self._core, event.exit
        if core.is_over and self.current is not None and self.current.number == event.attempt:
            self.current.add_step(event.step, event.last_step, core.now)  # done while it was being stopped
        if attempt is None or attempt.round is None or record.rank in attempt.exits or record.stopped_by_us:
            return
        attempt.exits[record.rank] = record
        attempt.add_step(event.step, event.last_step, core.now)
        yield from self._reached(event.step)
        if record.code == 0:
            yield from self._rank_ended_well(attempt)
        else:
            text = f"rank {record.rank} on {event.node} {record.how}"
            yield OpenIncident("exit", text, record.ended_at, node=event.node)

    def ranks_stopped(self, event: m.RanksStopped) -> None:
        if self._core.is_over and self.current is not None and self.current.number == event.attempt:
            self.current.add_step(event.step, event.last_step, self._core.now)  # done while it was being stopped

    def _rank_ended_well(self, attempt: Attempt) -> Wants:
        core = self._core
        if attempt.adopted and len(attempt.members) < core.spec.nodes_min:
            return  # not all of its nodes have reported yet
        if not attempt.ended_well or core.state not in ("STARTING", "RUNNING", "DIAGNOSING", "RECOVERING"):
            return
        yield from self._run()
        if attempt.asked and not (attempt.step is not None and attempt.step + 1 >= (attempt.last_step or math.inf)):
            yield RanksSaved()
            return
        yield GoOn("false alarm: every rank ended well")
        attempt.finishing = True
        yield cancel("again", "stacks", "silence")
        yield Recovered("every rank ended well")
        yield CloseFailures("every rank ended well")
        yield note("ranks_ended_well")
        yield Timer("finish", core.now + FINISH_LIMIT_S)
        self._nodes.touch_all()
        yield from self.finish()

    def finish(self, *, late: bool = False) -> Wants:
        """The run is complete once the launchers of all members have ended, too."""
        attempt = self.current
        assert attempt is not None
        waiting = any(name not in attempt.launchers_ended and self._nodes.is_present(name) for name in attempt.members)
        if late or not waiting:
            outcome = m.Outcome(state="succeeded", exit_code=0, line="the run is complete")
            yield EndJob(outcome)

    def finish_due(self) -> Wants:
        if self.is_finishing:
            yield note("launchers_ended")
            yield from self.finish(late=True)

    def launcher_ended(self, event: m.LauncherEnded) -> Wants:
        attempt = self.current
        if attempt is None or attempt.over or event.node not in attempt.member_set:
            return
        if attempt.round is None or event.attempt < attempt.number:
            # It may be the one of the attempt before; only one that is known to have ended just now counts.
            if event.fresh and self._core.state == "STARTING" and event.attempt <= attempt.number:
                yield from self._launcher_ended_early(attempt, event)
            return
        if event.attempt > attempt.number or event.node in attempt.launchers_ended:
            return
        if attempt.finishing:
            attempt.launchers_ended[event.node] = event.how
            yield from self.finish()
            return
        yield from self._launcher_failed(attempt, event)

    def _launcher_ended_early(self, attempt: Attempt, event: m.LauncherEnded) -> Wants:
        """Before it joined. The first end may be that of the attempt before: agents start another, with a new store."""
        first_of_round = attempt.round is not None and event.node == attempt.members[0]
        if attempt.number == 1 or event.node in attempt.early_ends or first_of_round:
            yield from self._launcher_failed(attempt, event)
        elif attempt.round is None:
            attempt.offers.pop(event.node, None)
        attempt.early_ends.add(event.node)

    def _launcher_failed(self, attempt: Attempt, event: m.LauncherEnded) -> Wants:
        attempt.launchers_ended[event.node] = event.how
        by_itself = event.code is not None and not attempt.ranks and not attempt.exits
        self._launcher_failures += by_itself
        # Its own error is on the terminal already.
        quiet = by_itself and self.would_fail_again
        text = f"the launcher on {event.node} ended ({event.how})"
        yield OpenIncident("launcher", text, self._core.now, launcher=event, quiet=quiet)

    # ----- what happens to the job -----

    def start_by_operator(self) -> None:
        self.by_operator = True

    def pause(self) -> None:
        self.by_operator = False

    def ranks_asked(self) -> None:
        if self.current is not None:
            self.current.asked = True

    def count_restart(self) -> None:
        self.restarts += 1

    def end(self) -> None:
        if self.current is not None:
            self.current.over = True

    def begin_life(self) -> None:
        """The scheduler has started the job again on other nodes; numbers count on."""
        self.end()
        self._places, self._gather_until = (), 0.0
        self.mirrors.begin_life()

    def set_numbers_from(self, number: int) -> None:
        self.numbers_from = max(self.numbers_from, number)

    def forget_current(self) -> None:
        """The journal has lost how it went on."""
        if self.current is not None:
            self.set_numbers_from(self.current.number)
            self.current.over = True
        self.current = None

    def begin_adopted(self, number: int) -> None:
        """Ranks of an attempt run of which the journal does not tell: it goes on as it is."""
        now = self._core.now
        self.current = Attempt(
            number=number, members=(), formed_at=now, resume=Resume(), adopted=True, resume_checked=True
        )
        self.set_numbers_from(number)
        self.started_at = now if self.started_at is None else self.started_at

    def adopt(self, event: m.WorkersStarted) -> None:
        """A node tells of its ranks of the adopted attempt."""
        attempt, node, now = self.current, self._nodes.get(event.node), self._core.now
        assert attempt is not None
        attempt.adopt(event.node, event.ranks, node.address if node is not None else "")
        attempt.workers_started_at = now if attempt.workers_started_at is None else attempt.workers_started_at
        self._places = attempt.members


ROOM_BYTES = 64 * 1024
"""Besides a checkpoint."""


class Space:
    """Waiting for room on disks: the next attempt starts once each of its nodes says that there is room."""

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
        yield cancel("hold")
        self._attempts.count_restart()
        yield note("room_again", loud=True)
        self._nodes.touch_all()
        yield Proceed()
