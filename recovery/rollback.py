"""What is done about a loss that went wrong, or replicas that differ: where the run goes back to, and which data it
leaves out. Pure.

A spike, a divergence or a loss that stays NaN is not cured by a restart from the newest checkpoint: that one was
written when the model was on its way there. So the run goes back to a checkpoint from well before, and leaves out the
batches in which it happened, as others have done by hand. Each rule here has a bound: how far back the margin reaches,
how many batches are left out, how often that is done. Beyond it a person decides.

Replicas that differ are the fault of a node, so no data is left out. They were the same in an earlier snapshot: what is
older than that one is older than the fault. Where they were never seen to be the same, nothing is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from diagnosis.signals import Frozen, LossAlarm
from recovery.checkpoint import ResumeSituation

Guard = Literal["off", "recommend", "enforce"]

LONGEST_MARGIN: Final = 100
"""Steps before the first bad one that are not trusted either."""
MARGIN_SHARE: Final = 20
"""A young run has a smaller margin: one in so many of its steps."""
MOST_SKIPPED: Final = 2000
"""Batches that are left out at once."""
PLACES: Final = 2
"""Places in the data that the run was taken back from by itself; at the next one a person decides."""
TRIES: Final = 2
"""How often batches are left out at one place, and how often the run goes back because replicas differ."""


class Rollback(Frozen, frozen=True, kw_only=True):
    """One that was done, by the guard or by an operator."""

    first_bad: int
    last_bad: int
    """The newest step at that time."""
    skipped: int = 0


class LossCase(Frozen, frozen=True, kw_only=True):
    """A loss that went wrong, and what is known besides."""

    alarm: LossAlarm
    step: int
    """The newest."""
    steps: tuple[int, ...]
    """Of the good checkpoints."""
    bad_at: float | None = None
    """When the first bad step was made: a number that counts epochs or saves is no step."""
    before: tuple[Rollback, ...] = ()
    skipped_after: tuple[int | None, int] = (None, 0)
    """Step of a checkpoint, and how many batches after it are left out already."""


class ReplicaCase(Frozen, frozen=True, kw_only=True):
    """Replicas that differ, and what is known besides."""

    named: bool
    """A majority tells which."""
    seen_equal: bool
    """They were the same before."""
    nodes: int = 1
    """Of how many nodes those are that differ from the majority."""
    elsewhere: bool = False
    """The same rank differed before, on another node."""
    situation: ResumeSituation
    step: int | None
    """Of the newest good checkpoint that fits the situation; None: there is none."""
    before: int = 0
    """How often the run has gone back for this reason."""

    @property
    def doubt(self) -> str:
        """Why it may be no node's fault; empty: nothing says so."""
        if not self.seen_equal:
            return "they were never seen to be the same, so it may be how this script trains"
        if self.elsewhere:
            return "the same rank differed before, on another node, so it may be how this script trains"
        if self.nodes > 1:
            return f"ranks on {self.nodes} nodes differ at once, which is hardly the fault of one of them"
        return ""


class LossPlan(Frozen, frozen=True, kw_only=True):
    """`rollback`: to `situation`, and `skip_batches` after that checkpoint are left out. `hold`: a person decides."""

    kind: Literal["rollback", "hold"]
    why: str
    situation: ResumeSituation | None = None
    step: int | None = None
    """Of the checkpoint."""
    skip_batches: int = 0


def margin(alarm: LossAlarm) -> int:
    """Steps before the first bad one that are not trusted. A loss is printed every so often: it began before."""
    since = (alarm.step or 0) // MARGIN_SHARE
    return max(2 * alarm.interval, min(LONGEST_MARGIN, since))


def plan_for(case: LossCase) -> LossPlan:
    """What to do about it."""
    alarm, first = case.alarm, case.alarm.step
    if first is None:
        return LossPlan(kind="hold", why="no steps are known, so nobody knows which checkpoint is from before")
    situation = _situation(alarm, case.steps, case.bad_at)
    limit = situation.not_after_step if situation is not None else None
    if situation is None or limit is None:
        return LossPlan(kind="hold", why=f"no good checkpoint is from before step {first}")
    step = max(one for one in case.steps if one <= limit)
    same = [one for one in case.before if _is_same_place(one, alarm)]
    places = _places(case.before)
    skipped = [one.skipped for one in same if one.skipped]
    if not same and places >= PLACES:
        why = f"it went wrong at {places} other places before, and the run was taken back each time"
        return LossPlan(kind="hold", why=why, situation=situation, step=step)
    if len(skipped) >= TRIES:
        why = f"it goes wrong at the same place again, although up to {max(skipped)} batches were left out there"
        return LossPlan(kind="hold", why=why, situation=situation, step=step)
    in_force = case.skipped_after[1] if case.skipped_after[0] == step else 0
    newest = max(case.step, first)
    after = max(margin(alarm), newest - first)  # the bad place may reach further than what was seen of it
    wanted = newest + after - step + in_force
    if wanted <= MOST_SKIPPED:
        again = "it went wrong at the same place before" if same else f"the loss went wrong at step {first}"
        why = f"{again}: back to step {step}, and the {wanted} batches after it are left out"
        return LossPlan(kind="rollback", why=why, situation=situation, step=step, skip_batches=wanted)
    if same:
        why = f"it goes wrong at the same place again, and {wanted} batches are too many to be left out by themselves"
        return LossPlan(kind="hold", why=why, situation=situation, step=step)
    why = f"the loss went wrong at step {first}: back to step {step}; that is {wanted} batches before: none is left out"
    return LossPlan(kind="rollback", why=why, situation=situation, step=step)


def before_corruption(
    attempt: int, formed_at: float, agreed_at: float | None, agreed_step: int | None
) -> ResumeSituation:
    """What is from before replicas began to differ in this attempt: `agreed_step`, if it has seen them equal itself."""
    if agreed_step is None or agreed_at is None:
        return ResumeSituation(kind="corruption", before=formed_at)  # what it resumed from was there
    snapshot = (attempt, agreed_step)
    return ResumeSituation(kind="corruption", step=agreed_step + 1, before=agreed_at, snapshot=snapshot)


def plan_for_replicas(case: ReplicaCase) -> LossPlan:
    """What to do about them."""
    if case.doubt:
        return LossPlan(kind="hold", why=case.doubt)
    if case.step is None:
        return LossPlan(kind="hold", why="no good checkpoint is from before they differed")
    back = f"back to step {case.step}, from before they differed"
    if not case.named:
        why = f"{back}; nobody knows which of them is right"
        return LossPlan(kind="hold", why=why, situation=case.situation, step=case.step)
    if case.before >= TRIES:
        why = f"{back}; the run was taken back for this {case.before} times, and they differ again"
        return LossPlan(kind="hold", why=why, situation=case.situation, step=case.step)
    return LossPlan(kind="rollback", why=back, situation=case.situation, step=case.step)


def _situation(alarm: LossAlarm, steps: Sequence[int], bad_at: float | None) -> ResumeSituation | None:
    """The limit with its margin; without it where no checkpoint is so old. None: none is from before at all."""
    assert alarm.step is not None
    kind: Literal["spike", "bad_numbers"] = "bad_numbers" if alarm.kind == "nan" else "spike"
    first = max(1, alarm.step - alarm.interval + 1)
    limits = [ResumeSituation(kind=kind, step=first, before=bad_at)]
    if kind == "spike":
        limits.insert(0, ResumeSituation(kind=kind, step=alarm.step, margin=margin(alarm), before=bad_at))
    for one in limits:
        if any(step <= (one.not_after_step or 0) for step in steps):
            return one
    return None


def _is_same_place(one: Rollback, alarm: LossAlarm) -> bool:
    assert alarm.step is not None
    near = margin(alarm)
    return one.first_bad - near <= alarm.step <= one.last_bad + near


def _places(before: Sequence[Rollback]) -> int:
    """Rollbacks whose bad steps overlap are of one place."""
    count, until = 0, -1
    for one in sorted(before, key=lambda one: one.first_bad):
        count += one.first_bad > until
        until = max(until, one.last_bad)
    return count
