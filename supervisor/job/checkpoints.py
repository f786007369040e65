"""The checkpoints that nodes have seen, which of them are suspect, and from which one the next attempt resumes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from recovery.actions import Checkpoint, Preparation, Resume
from recovery.checkpoint import newest
from supervisor.job.core import Core
from supervisor.messages import CheckpointsSeen

CHECKPOINTS_EACH = 8
FOLDERS_KEPT = 16
REPORTS_KEPT = 64
"""Nodes whose reports are remembered: on a shared file system they all say the same."""
STEPS_KEPT = 64
SUSPECTS_KEPT = 64
SPANS_KEPT = 8

Choose = Callable[[Sequence[Checkpoint]], tuple[Checkpoint | None, tuple[Preparation, ...]]]


class Checkpoints:
    def __init__(self, core: Core, choose: Choose) -> None:
        self._core = core
        self._choose = choose
        self._reports: dict[str, tuple[Checkpoint, ...]] = {}
        """By the node that saw them, the newest report last."""
        self.folders: tuple[str, ...] = ()
        """Where ranks were seen to write them: a node that never wrote one must know where to look."""
        self.last_good = ""
        """A complete checkpoint that was seen last."""
        self._suspect_spans: list[tuple[float, float | None]] = []
        """Checkpoints modified within are suspect."""
        self._suspect_after: int | None = None
        """The step at which the numbers were seen to be wrong."""
        self._suspects: deque[tuple[str, float]] = deque(maxlen=SUSPECTS_KEPT)
        """Path and time of those of a later step that came while the numbers were wrong: storage has its own clock."""
        self._step_when_saved: dict[str, int] = {}
        """Checkpoints that do not tell their step: the run's step when they appeared."""

    # ----- queries -----

    @property
    def suspect_open(self) -> bool:
        """What is written now is suspect."""
        return bool(self._suspect_spans) and self._suspect_spans[-1][1] is None

    def candidates(self, members: tuple[str, ...] = ()) -> list[Checkpoint]:
        """All that are known, each once, with those marked that are suspect.

        What `members` see counts alone, if one of them has looked: they look again before each attempt, and another
        node's older report may still list what was set aside since.
        """
        found: dict[str, Checkpoint] = {}
        wanted = set(members)
        reports = [seen for node, seen in self._reports.items() if node in wanted] or self._reports.values()
        for seen in reports:
            for checkpoint in seen:
                known = found.get(checkpoint.path)
                if known is None or _preference(checkpoint) > _preference(known):
                    found[checkpoint.path] = checkpoint
        return [self._marked(checkpoint) for checkpoint in found.values()]

    def _marked(self, checkpoint: Checkpoint) -> Checkpoint:
        at = checkpoint.modified_at
        within = any(since <= at and (until is None or at <= until) for since, until in self._suspect_spans)
        if within or (checkpoint.path, at) in self._suspects:
            return msgspec.structs.replace(checkpoint, suspect=True)
        return checkpoint

    def newest_complete(self) -> Checkpoint | None:
        complete = [one for one in self.candidates() if one.complete]
        return max(complete, key=lambda one: one.modified_at, default=None)

    def step_of(self, path: str) -> int | None:
        """Of a checkpoint that does not tell it: the run's step when it appeared."""
        return self._step_when_saved.get(path)

    def choose(self, members: tuple[str, ...]) -> tuple[Resume, tuple[Preparation, ...]]:
        """Where the next attempt resumes, and what is to be prepared for that. Raises whatever the choice raises."""
        checkpoint, prepare = self._choose(self.candidates(members))
        if checkpoint is None:
            return Resume(prepare=prepare), prepare
        return Resume(path=checkpoint.path, step=checkpoint.step, prepare=prepare), prepare

    # ----- changes -----

    def add(self, event: CheckpointsSeen, step: int | None) -> bool:
        """What a node sees now; `step`: of the run. True: the folders are others."""
        before = self._reports.pop(event.node, ())
        known = {(one.path, one.modified_at) for one in before}
        new = [one for one in event.checkpoints if (one.path, one.modified_at) not in known]
        if self.suspect_open and self._suspect_after is not None:
            later = [one for one in new if one.step is not None and one.step > self._suspect_after]
            self._suspects.extend((one.path, one.modified_at) for one in later)
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

    def suspect_from(self, at: float, step: int | None) -> None:
        self._suspect_spans.append((at, None))
        self._suspect_after = step

    def trust_again(self) -> None:
        if self.suspect_open:
            since, _ = self._suspect_spans[-1]
            self._suspect_spans[-1] = (since, self._core.now)

    def begin_attempt(self) -> None:
        """The next attempt starts with good numbers."""
        now = self._core.now
        closed: list[tuple[float, float | None]] = [(since, until or now) for since, until in self._suspect_spans]
        self._suspect_spans = closed[-SPANS_KEPT:]

    def begin_life(self) -> None:
        self._reports.clear()


def _preference(checkpoint: Checkpoint) -> tuple[bool, float]:
    """Of what several nodes tell of one path: one that knows all its writers has no doubt."""
    return (not checkpoint.in_doubt, checkpoint.modified_at)


def _keep_newest(kept: dict[str, int] | dict[str, tuple[Checkpoint, ...]], limit: int) -> None:
    while len(kept) > limit:
        del kept[next(iter(kept))]
