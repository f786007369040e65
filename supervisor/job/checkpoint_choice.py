"""The checkpoints of a job: which are known, which of them are suspect, and from which the next attempt resumes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from recovery.checkpoint import (
    CRASH,
    ROLLED_BACK,
    SUSPECT,
    Checkpoint,
    Preparation,
    PutBack,
    Resume,
    ResumeSituation,
    SetAside,
    going_on,
    newest,
    says_step,
)
from recovery.snapshot_choice import NodeSnapshot
from supervisor.job.core import Core
from supervisor.job.tiers import Tiers
from supervisor.messages import CheckpointsSeen

CHECKPOINTS_EACH = 8
FOLDERS_KEPT = 16
REPORTS_KEPT = 64
"""Nodes whose reports are remembered: on a shared file system they all say the same."""
STEPS_KEPT = 64
SUSPECTS_KEPT = 64
OFTEN_S = 10.0
"""Saves so close to each other: one may be gone again before it is used."""
REMEMBERED = 64
"""Good checkpoints that are known although no node reports them any more."""
SPANS_KEPT = 8
MOVED_KEPT = 4096
SuspectCause = Literal["numbers", "replicas"]
"""NaN or a loss that went wrong, which may be over by itself; replicas that differ, which never is."""

Choose = Callable[[Sequence[Checkpoint], ResumeSituation], tuple[Checkpoint | None, tuple[Preparation, ...]]]


class SuspectSpan(NamedTuple):
    """Checkpoints modified within are suspect."""

    cause: SuspectCause
    since: float
    until: float | None = None
    """None: still open."""
    good_until: int | None = None
    """The step up to which they are good all the same."""
    after: int | None = None
    """The run's step when it was seen."""


def _is_open(span: SuspectSpan, cause: SuspectCause) -> bool:
    return span.cause == cause and span.until is None


def _joined(one: SuspectSpan, other: SuspectSpan) -> SuspectSpan:
    """Both in one, which is open where one of them is; that of replicas stays so."""
    still = [span for span in (one, other) if span.until is None]
    goods = [span.good_until for span in (one, other) if span.good_until is not None]
    steps = [span.after for span in still if span.after is not None]
    return SuspectSpan(
        cause="replicas" if any(span.cause == "replicas" for span in still or (one, other)) else "numbers",
        since=min(one.since, other.since),
        until=None if still else max(one.until or 0.0, other.until or 0.0),
        good_until=min(goods) if len(goods) == 2 else None,
        after=min(steps, default=None),
    )


class Checkpoints:
    """The checkpoints that nodes have seen, which of them are suspect, and from which one the next attempt resumes."""

    def __init__(self, core: Core, choose: Choose, tiers: Tiers) -> None:
        self._core = core
        self._choose = choose
        self.tiers = tiers
        tiers.is_bad = self._is_bad
        self._reports: dict[str, tuple[Checkpoint, ...]] = {}
        """By the node that saw them, the newest report last."""
        self.folders: tuple[str, ...] = ()
        """Where ranks were seen to write them: a node that never wrote one must know where to look."""
        self.last_good = ""
        """A complete checkpoint that was seen last."""
        self._suspect_spans: list[SuspectSpan] = []
        self._suspects: deque[tuple[str, float]] = deque(maxlen=SUSPECTS_KEPT)
        """Path and time of those of a later step that came while the numbers were wrong: storage has its own clock."""
        self._doubted: deque[tuple[str, float]] = deque(maxlen=SUSPECTS_KEPT)
        """Those of them that the newest span has made suspect."""
        self._step_when_saved: dict[str, int] = {}
        """Checkpoints that do not tell their step: the run's step when they appeared."""
        self._situation = CRASH
        """Which checkpoints the attempt that is being formed may resume from."""
        self._moved: dict[str, None] = {}
        """What the last rollback has moved aside, or is about to."""
        self._ordered: tuple[Preparation, ...] = ()
        """What is to be done before the attempt that goes back: more may be found, and what is done stays ordered."""
        self._before: tuple[Checkpoint, ...] = ()
        """Good ones from before the numbers went wrong: a node reports only its newest."""
        self.gave_up = False
        """A rollback found no checkpoint in the end."""
        self._put_back: tuple[PutBack, ...] = ()
        """To be done before the attempt that is being formed: that rollback is undone."""
        self._not_brought: dict[str, None] = {}
        """Whole ones that were moved aside because a node could not get them. They are put back once it can."""
        self._vouched: deque[str] = deque(maxlen=SUSPECTS_KEPT)
        """An operator has put these back: they are as good as others."""
        self._skip: tuple[str, int | None, int] = ("", None, 0)
        """Path and step of the checkpoint of the last rollback, and how many batches after it are left out."""
        self._skip_until: int | None = None
        """While an attempt goes back: the step up to which data are left out, from whichever checkpoint it resumes."""
        self._skip_before: tuple[str, int | None, int] = self._skip
        """As it was before this rollback: what was left out after its checkpoint still is."""
        self._members: tuple[str, ...] = ()
        """For whom the newest choice was made."""
        self._member_set: frozenset[str] = frozenset()

    # ----- queries -----

    def suspect_open(self, cause: SuspectCause) -> bool:
        """What is written now is suspect, for this cause."""
        return any(_is_open(span, cause) for span in self._suspect_spans)

    def candidates(self, members: tuple[str, ...] = (), *, remembered: bool = False) -> list[Checkpoint]:
        """All that are known, each once, with those marked that are suspect.

        What `members` see counts alone, if one of them has looked: they look again before each attempt, and another
        node's older report may still list what was set aside since. `remembered`: with good ones that are not reported
        any more; the look before an attempt that goes back tells whether they are still there.
        """
        found: dict[str, Checkpoint] = {}
        if self._members is not members:  # the same at each report of a node: a set of all of them costs the square
            self._members, self._member_set = members, frozenset(members)
        reports = [seen for node, seen in self._reports.items() if node in self._member_set] or self._reports.values()
        for seen in reports:
            for checkpoint in seen:
                known = found.get(checkpoint.path)
                if known is None or _preference(checkpoint) > _preference(known):
                    found[checkpoint.path] = checkpoint
        for checkpoint in self._before if remembered else ():
            if checkpoint.path not in found and all(_has_fallen_out_of(seen, checkpoint) for seen in reports):
                found[checkpoint.path] = checkpoint
        every = [*found.values(), *(one for seen in reports for one in seen)] if self.tiers.are_on else found.values()
        return [self._marked(checkpoint) for checkpoint in self.tiers.judged([self._marked(one) for one in every])]

    def _marked(self, checkpoint: Checkpoint) -> Checkpoint:
        at = checkpoint.modified_at
        step = checkpoint.step if says_step(checkpoint.path.rpartition("/")[2]) else None  # not of an epoch, or a save
        if (
            self.is_suspect(at, step) or (checkpoint.path, at) in self._suspects
        ) and checkpoint.path not in self._vouched:
            return msgspec.structs.replace(checkpoint, suspect=True)
        return checkpoint

    def _is_bad(self, path: str) -> bool:
        """Whether a node has found its part of it changed, or it is suspect."""
        same = (one for seen in self._reports.values() for one in seen if one.path == path)
        return any(one.changed or self._marked(one).suspect for one in same)

    def is_suspect(self, at: float, step: int | None) -> bool:
        """Whether what was written at this time, of this step, was written while something was wrong."""
        return any(
            span.since <= at
            and (span.until is None or at <= span.until)
            and (span.good_until is None or step is None or step > span.good_until)
            for span in self._suspect_spans
        )

    def newest_complete(self) -> Checkpoint | None:
        complete = [one for one in self.candidates() if one.complete]
        return max(complete, key=lambda one: one.modified_at, default=None)

    def step_of(self, path: str) -> int | None:
        """Of a checkpoint that does not tell it: the run's step when it appeared."""
        return self._step_when_saved.get(path)

    def choose(self, members: tuple[str, ...]) -> tuple[Resume, tuple[Preparation, ...]]:
        """Where the next attempt resumes, and what is to be prepared for that. Raises whatever the choice raises."""
        candidates = self.candidates(members, remembered=self.rolls_back)
        checkpoint, prepare = self._choose(candidates, self._situation)
        if checkpoint is None and self._situation != CRASH:
            self.undo_rollback()  # nothing is moved away for the sake of nothing
            self.gave_up = True
            return Resume(prepare=self._put_back), self._put_back
        prepare = self._while_not_brought(prepare)
        for one in prepare:
            rolled = self._situation != CRASH and isinstance(one, SetAside) and one.why.startswith(ROLLED_BACK)
            if rolled or (isinstance(one, SetAside) and one.why.startswith(SUSPECT)):
                self._moved[one.path] = None
        _keep_newest(self._moved, MOVED_KEPT)
        self._distrust(candidates, self._moved if self._situation != CRASH else ())
        if self._situation != CRASH:
            prepare = self._ordered = (*self._ordered, *(one for one in prepare if one not in self._ordered))
        prepare = (*self._put_back, *self._to_put_back(), *prepare)
        if checkpoint is None:
            return Resume(prepare=prepare), prepare
        if self._skip_until is not None and checkpoint.step is not None:
            batches = max(0, self._skip_until - checkpoint.step) + _left_out(self._skip_before, checkpoint)
            self._skip = (checkpoint.path, checkpoint.step, batches)
        skip = _left_out(self._skip, checkpoint)
        return Resume(path=checkpoint.path, step=checkpoint.step, prepare=prepare, skip_batches=skip), prepare

    def _while_not_brought(self, prepare: tuple[Preparation, ...]) -> tuple[Preparation, ...]:
        """What a node could not get is whole: where it has to make way for an older one, that can be undone."""
        lacking = self.tiers.not_brought()
        told: list[Preparation] = []
        for one in prepare:
            if isinstance(one, SetAside) and one.path in lacking and not one.why.startswith(ROLLED_BACK):
                self._not_brought[one.path] = None
                one = SetAside(path=one.path, why=f"{ROLLED_BACK}{lacking[one.path]}")
            told.append(one)
        _keep_newest(self._not_brought, STEPS_KEPT)
        return tuple(told)

    def _to_put_back(self) -> tuple[PutBack, ...]:
        lacking = self.tiers.not_brought() if self._not_brought else {}
        return tuple(
            PutBack(path=path) for path in self._not_brought if path not in lacking and path not in self._moved
        )

    def would_choose(self, members: tuple[str, ...]) -> Checkpoint | None:
        """What a restart would resume from now; changes nothing. Raises whatever the choice raises."""
        return self._choose(self.candidates(members), self._situation)[0]

    def is_seen_by(self, nodes: Iterable[str], path: str) -> bool:
        """One of these nodes sees it, or none of them has looked; tiers bring it to every node."""
        reports = [self._reports[node] for node in nodes if node in self._reports]
        return self.tiers.are_on or not reports or any(one.path == path for seen in reports for one in seen)

    def may_go(self, checkpoint: Checkpoint, members: tuple[str, ...]) -> bool:
        """Whether the next look may well find it gone: nobody sees it now, or the script saves often and keeps few."""
        times = sorted(one.modified_at for one in self.candidates(members))[-2:]
        often = len(times) == 2 and times[1] - times[0] < OFTEN_S
        return often or not self.is_seen_by(members, checkpoint.path)

    def ways_back(self, members: tuple[str, ...]) -> list[Checkpoint]:
        """Good ones of different steps, the newest first."""
        return going_on(self.candidates(members, remembered=True))

    def preview(
        self, situation: ResumeSituation, members: tuple[str, ...]
    ) -> tuple[Checkpoint | None, tuple[str, ...]]:
        """Where a rollback would lead (None: nowhere), and which checkpoints it would move aside."""
        checkpoint, prepare = self._choose(self.candidates(members, remembered=True), situation)
        rolled = (one for one in prepare if isinstance(one, SetAside) and one.why.startswith(ROLLED_BACK))
        return checkpoint, tuple(one.path for one in rolled)

    @property
    def moved_by_rollback(self) -> tuple[str, ...]:
        """What the last rollback moved aside, and suspects that a restart did, as far as it has not been undone."""
        return tuple(self._moved)

    # ----- changes -----

    def add(self, event: CheckpointsSeen, step: int | None) -> bool:
        """What a node sees now; `step`: of the run. True: the folders are others."""
        before = self._reports.pop(event.node, ())
        known = {(one.path, one.modified_at) for one in before}
        new = [one for one in event.checkpoints if (one.path, one.modified_at) not in known]
        after = [span.after for span in self._suspect_spans if span.until is None and span.after is not None]
        if after:
            later = [one for one in new if one.step is not None and one.step > min(after)]
            self._suspects.extend((one.path, one.modified_at) for one in later)
            self._doubted.extend((one.path, one.modified_at) for one in later)
        if step is not None:
            self._step_when_saved.update({one.path: step for one in new if one.step is None})
        _keep_newest(self._step_when_saved, STEPS_KEPT)
        self._reports[event.node] = event.checkpoints[:CHECKPOINTS_EACH]
        _keep_newest(self._reports, REPORTS_KEPT)
        good = newest(event.checkpoints)
        self.last_good = good.path if good is not None else self.last_good
        others = [folder for folder in self.folders if folder not in event.folders]
        folders = (*others, *event.folders)[-FOLDERS_KEPT:]
        changed = set(folders) != set(self.folders)
        self.folders = folders
        return changed

    def roll_back(self, situation: ResumeSituation, members: tuple[str, ...], skip_batches: int = 0) -> None:
        """The next attempt resumes from an older one. What is newer now is used only when nothing else is left."""
        checkpoint, moved = self.preview(situation, members)
        self._situation, self._ordered, self._put_back, self._moved = situation, (), (), {}
        self._distrust(self.candidates(members), moved)
        self._vouched.clear()
        self._skip_before, self._skip_until, self._skip = self._skip, None, ("", None, 0)
        if checkpoint is not None and checkpoint.step is not None and skip_batches:
            self._skip_until = checkpoint.step + skip_batches - _left_out(self._skip_before, checkpoint)

    def _distrust(self, candidates: Iterable[Checkpoint], paths: Container[str]) -> None:
        """These stay where they are if they may not be moved, and some node may report them although they were."""
        new = ((one.path, one.modified_at) for one in candidates if one.path in paths)
        self._suspects.extend(one for one in new if one not in self._suspects)
        self.tiers.take_out_of_use(paths)

    def undo_rollback(self) -> None:
        """What the last rollback moved aside is put back before the next attempt, and counts as before."""
        self._put_back = tuple(PutBack(path=path) for path in self._moved)
        self._vouched.extend(self._moved)
        self.tiers.use_again(self._moved)
        self._situation, self._moved, self._skip, self._skip_until = CRASH, {}, ("", None, 0), None

    @property
    def skipped_after(self) -> tuple[int | None, int]:
        """Step of the checkpoint of the last rollback, and how many batches after it are left out."""
        return self._skip[1:]

    @property
    def rolls_back(self) -> bool:
        """The attempt that is being formed goes back."""
        return self._situation != CRASH

    def keeps(self, snapshot: NodeSnapshot) -> bool:
        """The attempt that is being formed may start from it: no rollback speaks against it."""
        return not self.rolls_back or self._situation.snapshot == (snapshot.attempt, snapshot.step)

    def attempt_starts(self) -> None:
        """All that was to be prepared is done."""
        for one in self._to_put_back():
            del self._not_brought[one.path]
        self._situation, self._ordered, self._put_back, self._skip_until = CRASH, (), (), None

    def suspect_from(self, cause: SuspectCause, at: float, step: int | None, good_until: int | None = None) -> None:
        """`step`: of the run. `good_until`: the last step of which it is known that all was well."""
        self.remember_good()
        self._suspect_spans.append(SuspectSpan(cause, at, None, good_until, step))
        while len(self._suspect_spans) > SPANS_KEPT:
            self._suspect_spans[:2] = [_joined(*self._suspect_spans[:2])]
        if cause == "numbers":
            self._doubted.clear()

    def remember_good(self) -> None:
        """What is good now can be gone back to, even if no node reports it any more."""
        self._before = tuple(self.ways_back(()))[:REMEMBERED]

    def was_false_alarm(self) -> None:
        """The numbers were well: what was written meanwhile is as good as the rest, unless replicas differed."""
        if not self.suspect_open("numbers"):
            return
        newest = max(number for number, span in enumerate(self._suspect_spans) if _is_open(span, "numbers"))
        del self._suspect_spans[newest]
        if not self.suspect_open("replicas"):
            for one in self._doubted:
                if one in self._suspects:
                    self._suspects.remove(one)
        self._doubted.clear()

    def trust_again(self, *causes: SuspectCause) -> None:
        """What is written from now on is as good as before, as far as these causes go; without any: all of them."""
        self._suspect_spans = [
            span._replace(until=self._core.now) if span.until is None and (not causes or span.cause in causes) else span
            for span in self._suspect_spans
        ]

    def begin_attempt(self) -> None:
        """The next attempt starts with good numbers."""
        self.trust_again()

    def begin_life(self) -> None:
        self._reports.clear()
        self.tiers.begin_life()


def _has_fallen_out_of(seen: tuple[Checkpoint, ...], checkpoint: Checkpoint) -> bool:
    """Whether a node that reports these may still have an older one."""
    steps = [one.step for one in seen if one.step is not None]
    return len(seen) >= CHECKPOINTS_EACH and checkpoint.step is not None and checkpoint.step < min(steps, default=0)


def _left_out(skip: tuple[str, int | None, int], checkpoint: Checkpoint) -> int:
    path, step, batches = skip
    return batches if (path, step) == (checkpoint.path, checkpoint.step) else 0


def _preference(checkpoint: Checkpoint) -> tuple[bool, float, bool]:
    """Of what several nodes tell of one path: one that knows all its writers has no doubt; one that has read its
    content knows more."""
    return (not checkpoint.in_doubt, checkpoint.modified_at, checkpoint.changed or checkpoint.suspect)


def _keep_newest(kept: dict[str, int] | dict[str, None] | dict[str, tuple[Checkpoint, ...]], limit: int) -> None:
    while len(kept) > limit:
        del kept[next(iter(kept))]
