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

import msgspec

from diagnosis.signals import Frozen


class Checkpoint(Frozen, frozen=True, kw_only=True):
    """One checkpoint on storage, as a `CheckpointFormat` read it without executing anything in it."""

    path: str
    step: int | None
    """None when neither name nor content says it."""
    format: str
    """`torch_save`, `dcp`, `hf`, `megatron`, ..."""
    complete: bool
    why: str = ""
    """Why it is not complete, in words."""
    modified_at: float = 0.0
    size_bytes: int = 0
    in_doubt: bool = False
    """Somebody else wrote in it, and what our ranks wrote does not prove it whole or torn: it is neither offered nor
    touched, and nothing older is offered."""
    suspect: bool = False
    """Written after a numerics incident: used only when nothing else is left."""
    copy_of: str = ""
    """For a safe copy: the file it was copied from (overwritten in place)."""


class SetAside(Frozen, frozen=True, kw_only=True, tag="set_aside"):
    """Move a bad checkpoint out of the way before a restart, and mend its pointer files. Never deletes."""

    path: str
    why: str


class Restore(Frozen, frozen=True, kw_only=True, tag="restore"):
    """Put a safe copy back where the script expects its checkpoint."""

    copy: str
    path: str


Preparation = SetAside | Restore


class Resume(Frozen, frozen=True, kw_only=True):
    """Where the next attempt starts: what the script gets."""

    path: str = ""
    """Empty: from the beginning."""
    step: int | None = None
    prepare: tuple[Preparation, ...] = ()


INCOMPLETE = "incomplete: "
"""Begins the reason of a `SetAside` that holds only while the checkpoint is incomplete: it is looked at once more
before it is moved, because a rank that was still alive when it was read may have finished it."""


TEMPORARY = "its name says that it is still being written"
"""The reason why `tmp-checkpoint-10` is incomplete."""
POINTER = "pointer"
"""The `format` of a tracker file (`latest`) that is empty or names a checkpoint which is not there."""


OF_OTHERS = ", which belongs to the same step"
_OTHERS = (OF_OTHERS, ", which every earlier step has")
"""Ends the reason of a file that is whole, and useless without others."""
_FILES = frozenset(("torch_save", "safetensors"))
_BESIDE = re.compile(r"(?<![a-z])(?:best|ema|opt|optim[a-z]*|sched[a-z]*|scaler|rng|lr)(?![a-z])", re.IGNORECASE)
"""Names of what is written beside a checkpoint, or for another purpose."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def choose(
    candidates: Sequence[Checkpoint], *, not_after_step: int | None = None
) -> tuple[Checkpoint | None, tuple[Preparation, ...]]:
    """The checkpoint to resume from (None: from the beginning) and the preparations, in their order.

    The newest complete one that is not suspect; a suspect one only when nothing else is left. With `not_after_step`,
    none of a later (or of an unknown) step is used. What is returned is the checkpoint as it will be after the
    preparations: a safe copy is returned under the path it is restored to. None as well where a newer one is in doubt:
    what is older than that is not offered, the script decides. An empty list of candidates is normal.
    """
    candidates = _judged_together(candidates)
    usable = [found for found in candidates if found.complete and _allowed(found, not_after_step)]
    trusted = [found for found in usable if not found.suspect]
    chosen = max(_to_go_on(trusted or usable), key=_age, default=None)
    in_place = [found for found in candidates if not found.copy_of]
    doubtful = [found for found in in_place if found.in_doubt and _allowed(found, not_after_step)]
    doubt = max(doubtful, key=_age, default=None)
    if doubt is not None and (chosen is None or _newer(doubt, chosen)):
        newer = [(found, _why_not(found, doubt, not_after_step)) for found in in_place if not found.in_doubt]
        return None, tuple(SetAside(path=found.path, why=why) for found, why in newer if why)
    preparations: list[Preparation] = []
    restored: set[str] = set()
    if chosen is not None and chosen.copy_of:
        preparations.extend(_bring_back(chosen, in_place, not_after_step))
        restored.add(chosen.copy_of)
    for found in sorted(in_place, key=lambda found: found.path):
        if found.path in restored or found == chosen:
            continue
        why = _why_not(found, chosen, not_after_step)
        copy = None if found.complete else _copy_for(found, trusted)
        if copy is not None:
            preparations += [SetAside(path=found.path, why=_fault(found)), Restore(copy=copy.path, path=found.path)]
        elif why:
            preparations.append(SetAside(path=found.path, why=why))
    if chosen is not None and chosen.copy_of:
        chosen = msgspec.structs.replace(chosen, path=chosen.copy_of, copy_of="")
    return chosen, tuple(preparations)


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


def _allowed(found: Checkpoint, not_after_step: int | None) -> bool:
    return not_after_step is None or (found.step is not None and found.step <= not_after_step)


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
    if found.why.endswith(_OTHERS):
        return found.why  # itself it is whole: to look at it once more would leave it in place
    return INCOMPLETE + (found.why or "it cannot be read")


def _why_not(found: Checkpoint, chosen: Checkpoint | None, not_after_step: int | None) -> str:
    """Why `found` must be out of the way when `chosen` is resumed from; empty when it may stay."""
    if chosen is not None and found.format != POINTER and not _newer(found, chosen):
        return ""
    if not found.complete:
        return _fault(found)
    if not_after_step is not None and found.step is not None and found.step > not_after_step:
        return f"rolled back: it holds step {found.step}, the run goes back to step {not_after_step} at the latest"
    if found.suspect and chosen is not None and not chosen.suspect:
        return "suspect: it was written after the numerics went wrong"
    return ""


def _bring_back(copy: Checkpoint, in_place: list[Checkpoint], not_after_step: int | None) -> Iterable[Preparation]:
    """Put the chosen copy where the script looks, and move aside what is there now."""
    for found in in_place:
        if found.path == copy.copy_of:
            why = _why_not(found, copy, not_after_step) or (_fault(found) if not found.complete else "")
            yield SetAside(path=found.path, why=why or "rolled back to the copy of an earlier step")
    yield Restore(copy=copy.path, path=copy.copy_of)


def _copy_for(found: Checkpoint, trusted: list[Checkpoint]) -> Checkpoint | None:
    return max((copy for copy in trusted if copy.copy_of == found.path), key=_age, default=None)
