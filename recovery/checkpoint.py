"""Which checkpoint to resume from, and what to do before a restart so that the script picks the same one by itself.

Pure: it judges `Checkpoint` values that `recovery.formats` read; `recovery.quarantine` carries the preparations out.
Two things are never done here: deleting, and moving anything older than the checkpoint that was chosen.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from diagnosis.signals import Frozen


class RankLayout(Frozen, frozen=True, kw_only=True):
    """Over how many ranks a checkpoint is spread, as far as it tells; None: it does not."""

    world_size: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    fixed: bool = False
    """It is proven that the format cannot be loaded with another number of data-parallel ranks."""


class Checkpoint(Frozen, frozen=True, kw_only=True):
    """One checkpoint on storage, as a `CheckpointFormat` read it without executing anything in it."""

    path: str
    step: int | None
    """None when neither name nor content says it."""
    format: str
    """`torch_save`, `dcp`, `hf`, `megatron`, ..."""
    complete: bool
    why: str = ""
    """Why it is not complete, or suspect, in words."""
    modified_at: float = 0.0
    size_bytes: int = 0
    in_doubt: bool = False
    """Somebody else wrote in it, and what our ranks wrote does not prove it whole or torn: it is neither offered nor
    touched, and nothing older is offered."""
    suspect: bool = False
    """Written after a numerics incident, or its weights are not finite: used only when nothing else is left."""
    copy_of: str = ""
    """For a safe copy: the file it was copied from (overwritten in place)."""
    began_at: float | None = None
    """Unix time at which a rank of this node began to write it; None: nobody saw that."""
    layout: RankLayout | None = None
    changed: bool = False
    """Its bytes are not those that were there when it was first seen complete: it is not `complete` for that."""


Judgement = Literal["whole", "incomplete", "changed", "suspect", "in doubt"]


def judgement(found: Checkpoint) -> Judgement:
    """The verdict on a checkpoint in a word; its `why` says the rest."""
    if found.in_doubt:
        return "in doubt"
    if found.changed:
        return "changed"
    if not found.complete:
        return "incomplete"
    return "suspect" if found.suspect else "whole"


class SetAside(Frozen, frozen=True, kw_only=True, tag="set_aside"):
    """Move a bad checkpoint out of the way before a restart, and mend its pointer files. Never deletes."""

    path: str
    why: str


class Restore(Frozen, frozen=True, kw_only=True, tag="restore"):
    """Put a safe copy back where the script expects its checkpoint."""

    copy: str
    path: str


class PutBack(Frozen, frozen=True, kw_only=True, tag="put_back"):
    """Put a checkpoint that a rollback moved aside back where it was, unless something else is there now."""

    path: str


Preparation = SetAside | Restore | PutBack


class Resume(Frozen, frozen=True, kw_only=True):
    """Where the next attempt starts: what the script gets."""

    path: str = ""
    """Empty: from the beginning."""
    step: int | None = None
    prepare: tuple[Preparation, ...] = ()
    skip_batches: int = 0
    """So many batches after this checkpoint are to be left out: the loss went wrong in them."""


class ResumeSituation(Frozen, frozen=True, kw_only=True):
    """Why a checkpoint is chosen, and with that which ones are too new to be resumed from."""

    kind: Literal["crash", "spike", "bad_numbers", "corruption", "mismatch", "operator"] = "crash"
    step: int | None = None
    """`spike`, `bad_numbers`, `corruption`: the first step that may be bad. `operator`: the step to go back to, at
    most."""
    margin: int = 0
    """`spike`: so many steps before the first bad one are left out as well."""
    before: float | None = None
    """Only what was written until this time can be good (Unix seconds). `corruption`: when all was well for the last
    time, as far as is known. `spike`, `bad_numbers`: when the first bad step was made. Where a step is given, this
    decides only where the name does not call its number a step."""
    path: str = ""
    """`mismatch`: the checkpoint that ranks could not read. It and newer ones are left out."""
    snapshot: tuple[int, int] | None = None
    """`corruption`: attempt and step of the snapshot in memory in which all replicas were the same. It may be used."""

    @property
    def not_after_step(self) -> int | None:
        """The newest step that may be resumed from; None: steps do not matter."""
        if self.step is None or self.kind in ("crash", "mismatch"):
            return None
        if self.kind == "operator":
            return self.step
        return self.step - 1 - (self.margin if self.kind == "spike" else 0)


CRASH = ResumeSituation()


INCOMPLETE = "incomplete: "
"""Begins the reason of a `SetAside` that holds only while the checkpoint is incomplete: it is looked at once more
before it is moved, because a rank that was still alive when it was read may have finished it."""


TEMPORARY = "its name says that it is still being written"
"""The reason why `tmp-checkpoint-10` is incomplete."""
ROLLED_BACK = "rolled back: "
"""Begins the reason of a `SetAside` of a whole checkpoint that is too new: `PutBack` undoes it."""
SUSPECT = "suspect: "
"""Begins the reason of a `SetAside` of a whole checkpoint that is not trusted: `PutBack` undoes it, too."""
POINTER = "pointer"
"""The `format` of a tracker file (`latest`) that is empty or names a checkpoint which is not there."""


OF_OTHERS = ", which belongs to the same step"
_OTHERS = (OF_OTHERS, ", which every earlier step has")
"""Ends the reason of a file that is whole, and useless without others."""
_FILES = frozenset(("torch_save", "safetensors"))
_BESIDE = re.compile(r"(?<![a-z])(?:best|ema|opt|optim[a-z]*|sched[a-z]*|scaler|rng|lr)(?![a-z])", re.IGNORECASE)
"""Names of what is written beside a checkpoint, or for another purpose."""
STEP_IN_NAME = re.compile(r"(?:global_?step|step|iter|iteration|batch)s?[=_\-.]?(\d{1,12})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def says_step(name: str) -> bool:
    """Whether the number in the name is called a step: others may count saves, or epochs."""
    return STEP_IN_NAME.search(name) is not None


def choose(
    candidates: Sequence[Checkpoint], situation: ResumeSituation = CRASH
) -> tuple[Checkpoint | None, tuple[Preparation, ...]]:
    """The checkpoint to resume from (None: from the beginning) and the preparations, in their order.

    The newest complete one that is not suspect and not too new for the situation; a suspect one only when nothing else
    is left. What is returned is the checkpoint as it will be after the preparations: a safe copy is returned under the
    path it is restored to. None as well where a newer one is in doubt: what is older than that is not offered, the
    script decides. An empty list of candidates is normal.
    """
    candidates = _judged_together(candidates)
    too_new = {found: _why_too_new(found, situation, candidates) for found in candidates}
    usable = [found for found in candidates if found.complete and not too_new[found]]
    trusted = [found for found in usable if not found.suspect]
    chosen = max(_to_go_on(trusted or usable), key=_age, default=None)
    in_place = [found for found in candidates if not found.copy_of]
    doubtful = [found for found in in_place if found.in_doubt and not too_new[found]]
    doubt = max(doubtful, key=_age, default=None)
    if doubt is not None and (chosen is None or _newer(doubt, chosen)):
        newer = [(found, _why_not(found, doubt, too_new[found])) for found in in_place if not found.in_doubt]
        return None, tuple(SetAside(path=found.path, why=why) for found, why in newer if why)
    preparations: list[Preparation] = []
    restored: set[str] = set()
    if chosen is not None and chosen.copy_of:
        preparations.extend(_bring_back(chosen, in_place, too_new))
        restored.add(chosen.copy_of)
    for found in sorted(in_place, key=lambda found: found.path):
        if found.path in restored or found == chosen:
            continue
        why = _why_not(found, chosen, too_new[found])
        copy = None if found.complete else _copy_for(found, trusted)
        if copy is not None:
            preparations += [SetAside(path=found.path, why=_fault(found)), Restore(copy=copy.path, path=found.path)]
        elif why:
            preparations.append(SetAside(path=found.path, why=why))
    if chosen is not None and chosen.copy_of:
        chosen = msgspec.structs.replace(chosen, path=chosen.copy_of, copy_of="")
    return chosen, tuple(preparations)


def going_on(candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The complete and trusted ones that a run may go back to, one for each step, the newest first."""
    whole = [one for one in _judged_together(candidates) if one.complete and not one.suspect and one.step is not None]
    found: dict[int, Checkpoint] = {}
    for one in sorted(_to_go_on(whole), key=_age):
        found[one.step or 0] = one
    return sorted(found.values(), key=_age, reverse=True)


def newest(candidates: Iterable[Checkpoint]) -> Checkpoint | None:
    """The newest complete checkpoint in place, suspect ones included; None when there is none."""
    return max(_to_go_on([c for c in candidates if c.complete and not c.copy_of]), key=_age, default=None)


def _judged_together(candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Files of one step in one folder (`model_10.pt` and `optim_10.pt`, one for each rank) stand or fall together.

    A kind of file that at least two earlier steps have, and all of them, must be there as often.
    """
    candidates = _with_steps_of_others(candidates)
    groups: dict[tuple[str, int], list[Checkpoint]] = {}
    for found in candidates:
        folder, _, name = found.path.rpartition("/")
        if found.format in _FILES and not found.copy_of and found.why != TEMPORARY and str(found.step) in name:
            groups.setdefault((folder, found.step or 0), []).append(found)
    kinds = {key: Counter(map(_kind, members)) for key, members in groups.items()}
    faults: dict[str, str] = {}
    for (folder, step), members in groups.items():
        torn = next((found.path.rpartition("/")[2] for found in members if not found.complete), "")
        earlier = [counts for (other, at), counts in kinds.items() if other == folder and at < step]
        everywhere = functools.reduce(operator.and_, earlier) if len(earlier) > 1 else Counter[str]()
        lacking = everywhere - kinds[folder, step]
        for found in members:
            if found.complete and torn:
                faults[found.path] = f"{torn} is incomplete{_OTHERS[0]}"
            elif found.complete and lacking:
                faults[found.path] = f"a file like {min(lacking)} is missing{_OTHERS[1]}"
    return [
        msgspec.structs.replace(found, complete=False, why=faults[found.path]) if found.path in faults else found
        for found in candidates
    ]


def _with_steps_of_others(candidates: Sequence[Checkpoint]) -> list[Checkpoint]:
    """`optim_40.pt` is of step 40 where `model_40.pt` lies beside it."""
    steps: dict[str, set[int]] = {}
    for found in candidates:
        if found.step is not None and not found.copy_of:
            steps.setdefault(found.path.rpartition("/")[0], set()).add(found.step)
    judged: list[Checkpoint] = []
    for found in candidates:
        folder, _, name = found.path.rpartition("/")
        if found.step is None and found.format in _FILES and not found.copy_of:
            same = {int(number) for number in re.findall(r"\d{1,12}", name)} & steps.get(folder, set())
            found = msgspec.structs.replace(found, step=same.pop()) if len(same) == 1 else found
        judged.append(found)
    return judged


def _kind(found: Checkpoint) -> str:
    """Its name with a `#` for each number."""
    return _NUMBER.sub("#", found.path.rpartition("/")[2])


def _why_too_new(found: Checkpoint, situation: ResumeSituation, candidates: Sequence[Checkpoint]) -> str:
    """Why it must not be resumed from although it is whole; empty when it may be."""
    limit, before = situation.not_after_step, situation.before
    if limit is not None and found.step is None:
        return f"{ROLLED_BACK}it does not tell its step, and the run goes back to step {limit} at the latest"
    if limit is not None and found.step is not None and found.step > limit:
        return f"{ROLLED_BACK}it holds step {found.step}, the run goes back to step {limit} at the latest"
    sure = limit is not None and says_step(found.path.rpartition("/")[2])
    if before is not None and found.modified_at > before and not sure:
        return f"{ROLLED_BACK}it was written when the run may have gone wrong already"
    if situation.kind != "mismatch":
        return ""
    misfit = next((one for one in candidates if one.path == situation.path), None)
    if found.path == situation.path or (misfit is not None and not _newer(misfit, found)):
        return f"{ROLLED_BACK}{situation.path} could not be read, and the one before it is used"
    return ""


def _to_go_on(candidates: list[Checkpoint]) -> list[Checkpoint]:
    """Those that a script would go on from. A file without a step is as likely a tokenizer or a final export, and the
    best so far, or an optimizer's state, is not what it looks for; they count when there is nothing else."""
    stepped = [found for found in candidates if found.step is not None] or candidates
    return [found for found in stepped if not is_beside(found.copy_of or found.path)] or stepped


def is_beside(path: str) -> bool:
    """Whether its name, or its folder's, says that it is written beside checkpoints: the best so far, an optimizer."""
    return _BESIDE.search("/".join(path.split("/")[-2:])) is not None


def _age(found: Checkpoint) -> tuple[int, float, bool]:
    return (found.step if found.step is not None else -1, found.modified_at, not found.copy_of)


def _newer(found: Checkpoint, chosen: Checkpoint) -> bool:
    """Whether a script that looks for the newest one would prefer `found`."""
    if found.step is not None and chosen.step is not None:
        return found.step > chosen.step
    return found.modified_at > chosen.modified_at


def _fault(found: Checkpoint) -> str:
    if found.changed or found.why.endswith(_OTHERS):
        return found.why  # itself it is whole: to look at it once more would leave it in place
    return INCOMPLETE + (found.why or "it cannot be read")


def _why_not(found: Checkpoint, chosen: Checkpoint | None, too_new: str) -> str:
    """Why `found` must be out of the way when `chosen` is resumed from; empty when it may stay."""
    if chosen is not None and found.format != POINTER and not _newer(found, chosen):
        return ""
    if not found.complete:
        return _fault(found)
    if too_new and (found.step is not None or (chosen is not None and chosen.step is None)):
        return too_new  # beside checkpoints with steps, a file without one is a tokenizer or an export
    if found.suspect and chosen is not None and not chosen.suspect:
        return f"{SUSPECT}{found.why or 'it was written after the numerics went wrong'}"
    return ""


def _bring_back(copy: Checkpoint, in_place: list[Checkpoint], too_new: dict[Checkpoint, str]) -> Iterable[Preparation]:
    """Put the chosen copy where the script looks, and move aside what is there now."""
    for found in in_place:
        if found.path == copy.copy_of:
            why = _why_not(found, copy, too_new[found]) or (_fault(found) if not found.complete else "")
            yield SetAside(path=found.path, why=why or f"{ROLLED_BACK}the copy of an earlier step is used")
    yield Restore(copy=copy.path, path=copy.copy_of)


def _copy_for(found: Checkpoint, trusted: list[Checkpoint]) -> Checkpoint | None:
    return max((copy for copy in trusted if copy.copy_of == found.path), key=_age, default=None)
