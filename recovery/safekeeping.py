"""The only part of recovery that changes files: moving bad checkpoints aside, mending tracker files, keeping copies.

Only what `Bounds` says is the job's, looked at again in the moment of the change. Nothing is ever deleted but our own
superseded copies, and a torn file when another torn one of its name comes. What is moved can be moved back: beside it
lies a record that `undo` takes. Every step may be cut off at any moment and repeated.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from recovery.actions import Preparation, Restore, SetAside
from recovery.bounds import Bounds, GivenFolders, SeenByRanks, user_of
from recovery.checkpoint import INCOMPLETE, newest
from recovery.copies import copy_file, keep_copy, passing_folder, same_version
from recovery.formats.registry import inspect
from recovery.held import NotOurFolder, around_of, own_folder
from recovery.moves import PreparationError, Record, read_records, set_aside, sync_folder, undo
from recovery.pointers import TRACKERS, mend_pointers

WRITER_WAIT_S: Final = 10.0
"""How long a checkpoint that a live process writes is waited for."""


__all__ = [
    "Bounds",
    "GivenFolders",
    "PreparationError",
    "Record",
    "SeenByRanks",
    "keep_copy",
    "mend_pointers",
    "prepare",
    "read_records",
    "restore",
    "set_aside",
    "undo",
]


def restore(copy: Path, path: Path, bounds: Bounds | None = None) -> bool:
    """Put a safe copy where the script expects its checkpoint; the copy stays. Raises OSError, PreparationError.

    What stands there now is moved aside first. Repeating it changes nothing: False.
    """
    bounds = bounds or GivenFolders()
    if same_version(copy.stat(), path):
        return False
    with own_folder(copy.parents[1], make=False) as held, around_of(path) as there:
        kept_in = held / copy.parent.name
        passing = passing_folder(kept_in)
        passing.mkdir(exist_ok=True)
        try:
            temporary = passing / f"restored{path.suffix}"
            kept = os.stat(kept_in / copy.name, follow_symlinks=False)
            if not copy_file(kept_in / copy.name, temporary, kept, spare_space=False):
                raise PreparationError(f"the safe copy {copy} changed while it was read: is another job using it?")
            if os.path.lexists(path):
                set_aside(path, f"replaced by its safe copy {copy.name}", bounds)
            _place(temporary, there)
            bounds.changed(path)
            sync_folder(there.parent)
        finally:
            shutil.rmtree(passing, ignore_errors=True)
    return True


def _place(temporary: Path, path: Path) -> None:
    """Never over what somebody else has put there meanwhile."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if not os.path.lexists(path):
            os.rename(temporary, path)


# ----- before a restart -----


def prepare(preparations: Sequence[Preparation], bounds: Bounds | None = None) -> list[str]:
    """Carry out preparations in their order, then mend tracker files; what was done, one sentence each.

    What is outside `bounds`, whoever asked for it, is left in place, and so is what a process of somebody else's has
    open. May be repeated after a crash in the middle. The ranks must be dead: a checkpoint that a live process of the
    job still writes is refused. Raises PreparationError.
    """
    bounds = bounds or GivenFolders()
    done: list[str] = []
    mend: set[Path] = set()
    left: set[str] = set()
    restored = {step.path: Path(step.copy) for step in preparations if isinstance(step, Restore)}
    for step in preparations:
        path = Path(step.path)
        try:
            if isinstance(step, Restore):
                done += _bring_back(step, bounds) if step.path not in left else []
            elif path.name in TRACKERS:
                strange = bounds.why_not(path) if os.path.lexists(path) else "it is not there"
                done += [f"{path} was left in place: {strange}"] if strange else []
                mend |= set() if strange else {path.parent}
            else:
                said, moved = _put_aside(path, step, restored.get(step.path), bounds)
                done += said
                mend |= {path.parent} if moved or not bounds.why_not(path) else set()
                left |= set() if moved else {step.path}
        except OSError as error:
            raise _explained(step, error) from error
    for folder in sorted(mend):
        try:
            done += [_told(record) for record in mend_pointers(folder, newest(bounds.inside(folder)), bounds)]
        except NotOurFolder as error:
            done.append(f"the tracker files in {folder} were left as they are: {error}")
        except OSError as error:
            raise PreparationError(f"could not mend the tracker files in {folder}: {error}") from error
    return done


def _bring_back(step: Restore, bounds: Bounds) -> list[str]:
    copy, path = Path(step.copy), Path(step.path)
    strange = bounds.why_not(copy) or bounds.why_not_placed(copy, path)
    strange = strange or (bounds.why_not(path) if os.path.lexists(path) else "")
    if strange:
        return [f"{path} was left in place, and not replaced by {copy}: {strange}"]
    try:
        if not restore(copy, path, bounds):
            return []
    except NotOurFolder as error:
        return [f"{path} was left in place, and not replaced by {copy}: {error}"]
    return [f"{path} was restored from its safe copy {copy}"]


def _put_aside(path: Path, step: SetAside, copy: Path | None, bounds: Bounds) -> tuple[list[str], bool]:
    """What was done, in words, and whether nothing stands in the way any more."""
    if not os.path.lexists(path) or (copy is not None and copy.exists() and same_version(copy.stat(), path)):
        return [], True
    until = time.monotonic() + WRITER_WAIT_S
    while True:
        strange = bounds.why_not(path)
        writer, is_ours = ("", True) if strange else user_of(path, bounds.marks)
        if strange or not is_ours:
            return [f"{path} was left in place: {strange or f'{writer} has it open'}"], False
        if not writer:
            break
        if time.monotonic() > until:
            raise PreparationError(
                f"{path} is still being written by {writer}: wait for it or end it, then `unbroken restart`"
            )
        time.sleep(0.1)  # a process that saves in the background may outlive its rank
    why = step.why
    if why.startswith(INCOMPLETE):
        found = inspect(path)
        if found is not None and found.complete:
            return [f"{path} was left in place: it is complete by now"], False
        why = INCOMPLETE + found.why if found is not None else why
    path = bounds.smallest(path)
    try:
        target = set_aside(path, why, bounds)
    except NotOurFolder as error:
        return [f"{path} was left in place, although it is of no use ({why}): {error}"], False
    return [f"{path} was moved to {target}: {why}"], True


def _told(record: Record) -> str:
    if record.done != "set_aside":
        return f"{record.path} names {record.after} now; before: {record.before or 'nothing'}"
    return f"{record.path} was moved to {record.moved_to}: no complete checkpoint is left for it to name"


def _explained(step: Preparation, error: OSError) -> PreparationError:
    what = "put back the safe copy for" if isinstance(step, Restore) else "move aside"
    hint = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some of your quota",
        errno.EACCES: "give this user write permission to its folder",
        errno.EPERM: "give this user write permission to its folder",
        errno.EROFS: "the file system is mounted read-only",
        errno.ENOENT: "it is gone: choose another checkpoint",
    }.get(error.errno or 0, "see to the storage")
    return PreparationError(f"could not {what} {step.path}: {error.strerror or error}; {hint}, then `unbroken restart`")
