"""Which folders are a run's folders of checkpoints, worked out from the files that it wrote.

Names alone cannot tell `save40/` (one checkpoint of many) from `run7/` (a run of many, the others being somebody
else's): to look into the folder around a run would offer other runs' checkpoints, and move them aside. So the folder
around is taken only where the name can mean nothing but a save, or where this run wrote two that differ in a number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from recovery.formats.base import step_in_name

OPEN_SUFFIXES: Final = frozenset((".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".bin"))
"""Of files that may belong to a checkpoint, when a rank writes them."""
FOLLOWED: Final = 8
"""Folders of checkpoints of one run."""
_REMEMBERED: Final = 64
_LEVELS: Final = 3
"""Folders above a file that may be the checkpoint it belongs to (`step-40/actor/optim/x.pt`)."""
_NEVER: Final = frozenset((("/", "proc"), ("/", "dev"), ("/", "sys")))
_UNFINISHED: Final = re.compile(r"\.(?:tmp|temp|part|partial|incomplete|\d+)")
_WORD: Final = re.compile(r"[a-z]+")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_OF_SAVES: Final = frozenset(
    ("checkpoint", "chkpt", "ckpt", "cp", "save", "saved", "snapshot", "snap", "global", "globalstep", "step", "steps",
     "iteration", "iter", "it", "batch", "epoch", "ep", "update")
)  # fmt: skip
_BESIDES: Final = frozenset(("tmp", "temp", "pt", "pth"))
_OF_RUNS: Final = frozenset(
    ("run", "runs", "exp", "experiment", "version", "v", "trial", "job", "seed", "fold", "attempt", "try", "rank",
     "node", "worker", "gpu", "stage", "phase", "b", "m")
)  # fmt: skip
"""Also `7b` and `350m`: a model's size."""


def names_a_save(name: str) -> bool:
    """Whether a folder's name can mean nothing but one checkpoint of several (`save40`, `epoch=0-step=40.ckpt`)."""
    words = set(_WORD.findall(name.lower())) - _BESIDES
    return bool(words) and words <= _OF_SAVES and _NUMBER.search(name) is not None


def shape(name: str) -> str:
    """The name with a `#` for each number, where two such folders of one run are two checkpoints; else empty."""
    words, numbers = _WORD.findall(name.lower()), _NUMBER.findall(name)
    if not numbers or not _OF_RUNS.isdisjoint(words) or (not words and len(numbers) > 1):
        return ""  # without a word, several numbers are a date
    return _NUMBER.sub("#", name)


def file_written(name: str, cwd: str | Path) -> Path | None:
    """The whole path of a file that a rank has open for writing, if it may belong to a checkpoint.

    Names under which it is written before it is renamed count (`ckpt.pt.tmp.4711`).
    """
    path = Path(os.path.abspath(Path(cwd) / name.removesuffix(" (deleted)")))
    return path if may_be_checkpoint(path.name) and path.parent.parts[:2] not in _NEVER else None


def may_be_checkpoint(name: str) -> bool:
    """By its name."""
    base, suffix = os.path.splitext(name)
    while suffix not in OPEN_SUFFIXES and _UNFINISHED.fullmatch(suffix):
        base, suffix = os.path.splitext(base)
    return suffix in OPEN_SUFFIXES


def guess_folders(written: Iterable[Path]) -> list[Path]:
    """The folders that hold checkpoints, from the files that ranks wrote, in their order, each once.

    For a file inside one checkpoint (`save40/state.pt`) it is the folder around that.
    """
    numbered: dict[Path, bool] = {}
    for path in written:
        before = numbered.pop(path.parent, True)
        numbered[path.parent] = before and step_in_name(path.name) is not None
    shapes: dict[tuple[Path, str], set[str]] = {}
    for one in {above for folder in numbered for above in (folder, folder.parent)}:
        shapes.setdefault((one.parent, shape(one.name)), set()).add(one.name)
    return list(dict.fromkeys(_around(folder, numbered[folder], shapes) for folder in numbered))


def _around(folder: Path, numbered: bool, shapes: dict[tuple[Path, str], set[str]]) -> Path:
    """`numbered`: its files tell their steps, so that what is farther out is no checkpoint."""
    above = [folder, *folder.parents][: 1 if numbered else _LEVELS]
    for save in above:
        if names_a_save(save.name):
            return save.parent
    for save in above[:2]:
        kind = shape(save.name)
        if kind and len(shapes[save.parent, kind]) > 1:
            return save.parent
    return folder


class Written:
    """The files that a run was seen to write, as far as they tell where its checkpoints are."""

    def __init__(self) -> None:
        self._files: dict[Path, Path] = {}
        """One of each folder, the folder written to last at the end; rather one without a number than one with it."""
        self.folders: tuple[Path, ...] = ()
        """Where checkpoints come, the one written to last at the end; at most `FOLLOWED`."""

    def note(self, files: Iterable[Path]) -> None:
        """Files that were written just now."""
        for file in files:
            before = self._files.pop(file.parent, file)
            self._files[file.parent] = file if step_in_name(before.name) is not None else before
        while len(self._files) > _REMEMBERED:
            del self._files[next(iter(self._files))]
        self.folders = tuple(guess_folders(self._files.values())[-FOLLOWED:])
