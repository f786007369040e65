"""What every checkpoint format shares: the protocol, how much may be read, and steps in names."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from diagnosis.signals import clean_text
from recovery.actions import Checkpoint
from recovery.checkpoint import TEMPORARY

SET_ASIDE: Final = ".unbroken-set-aside"
COPIES: Final = ".unbroken-copies"
OURS: Final = frozenset((SET_ASIDE, COPIES))
"""Folders of ours next to checkpoints; never taken for one."""


class Limits(NamedTuple):
    """How much of one checkpoint is read. Sizes, names and pickles are always looked at; tensor bytes within this."""

    read_bytes: int = 256 << 20
    seconds: float = 2.0
    pickle_bytes: int = 64 << 20
    entries: int = 20_000
    """Files of one folder."""


DEFAULT_LIMITS: Final = Limits()


class Budget:
    """What is left of the limits while one checkpoint is read."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.bytes_left = limits.read_bytes
        self._deadline = time.monotonic() + limits.seconds

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    @property
    def spent(self) -> bool:
        return self.bytes_left <= 0 or self.out_of_time()


class Report(NamedTuple):
    """What was found out about one file. `why` is empty when it is complete."""

    why: str = ""
    step: int | None = None
    numbers: dict[str, int] = {}
    """Integers at the top level of a pickled dictionary."""


class CheckpointFormat(Protocol):
    """One way in which trainers write checkpoints: built in or plugged in (group `unbroken.checkpoint_formats`)."""

    name: str

    def recognize(self, path: Path) -> bool:
        """Whether the file or folder is of this format, complete or not. Cheap: names and a few bytes."""

    def inspect(self, path: Path) -> Checkpoint:
        """Read it without executing anything in it. Raises OSError only."""


_STEP_PATTERNS: Final = (
    re.compile(r"(?:global_?step|step|iter|iteration|batch)s?[=_\-.]?(\d{1,12})(?!\d)", re.IGNORECASE),
    re.compile(
        r"(?<![a-z])(?:checkpoint|ckpt|model|state|save|snapshot)[=_\-.]?(\d{1,12})(?![a-z\d]|-of-)", re.IGNORECASE
    ),
    re.compile(r"^(\d{1,12})(?:\.\w+)?$"),
)
_TEMPORARY: Final = re.compile(
    r"^(?:tmp|temp)[-_.]|^\.tmp|[-_.](?:tmp|temp|partial|incomplete|part)$|[-_.](?:tmp|temp)[-_.][\w-]*$", re.IGNORECASE
)
_EPOCH_FOLLOWS: Final = re.compile(r"epoch", re.IGNORECASE)


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


def says_step(name: str) -> bool:
    """Whether the number in the name is called a step: others may count saves, or epochs."""
    return _STEP_PATTERNS[0].search(name) is not None


@functools.lru_cache(maxsize=16384)
def step_in_name(name: str) -> int | None:
    """The training step that a file or folder name tells (`checkpoint-10`, `iter_0000100`, `epoch=0-step=7.ckpt`)."""
    for position, pattern in enumerate(_STEP_PATTERNS):
        found = pattern.search(name)
        if found and (position == 0 or not _EPOCH_FOLLOWS.search(name)):
            return int(found.group(1))
    return None


def final_suffix(name: str) -> str:
    """The suffix that the file will have once it is written (`.pt` of `ckpt.pt.tmp`)."""
    for ending in (".tmp", ".partial", ".incomplete"):
        name = name.removesuffix(ending)
    return os.path.splitext(name)[1]


def is_temporary(name: str) -> bool:
    """Whether the name says that it is still being written (`tmp-checkpoint-10`, `ckpt.pt.tmp`)."""
    return bool(_TEMPORARY.search(name))


def made(path: Path, format_name: str, report: Report, size: int, modified_at: float) -> Checkpoint:
    """The checkpoint that a report describes."""
    why = report.why
    if not why and is_temporary(path.name):
        why = TEMPORARY
    return Checkpoint(
        path=str(path),
        step=report.step,
        format=format_name,
        complete=not why,
        why=clean_text(why),
        modified_at=modified_at,
        size_bytes=size,
    )


def made_of_file(path: Path, format_name: str, report: Report) -> Checkpoint:
    """The same for a single file; its name tells the step where its content does not."""
    if report.step is None:
        report = report._replace(step=step_in_name(path.name))
    stat = os.stat(path)
    return made(path, format_name, report, stat.st_size, stat.st_mtime)
