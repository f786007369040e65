"""Checkpoints as trainers write them, read without executing anything in them: the list of formats.

`files` reads single files (torch, safetensors, DCP's metadata), and what a name says. `folders` reads checkpoints that
are folders. `scan` finds the newest again and again for next to nothing: in folders that were given (`FolderWalk`), or
among what ranks were seen to write (`WrittenCheckpoints`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, Protocol

from recovery.checkpoint import Checkpoint
from recovery.formats.files import DEEP_LIMITS, DEFAULT_LIMITS, Limits, NemoFile, SafetensorsFile, TorchFile
from recovery.formats.folders import (
    AccelerateFolder,
    AnyFolder,
    DcpFolder,
    DeepSpeedFolder,
    HuggingFaceFolder,
    MegatronFolder,
    NemoFolder,
    PartReport,
    Trusts,
    WrittenFolder,
    everything,
)

__all__ = [
    "BUILT_IN",
    "DEEP",
    "CheckpointFormat",
    "Limits",
    "PartReport",
    "inspect",
    "inspect_part",
    "load_formats",
    "recognize",
    "written_formats",
]


class CheckpointFormat(Protocol):
    """One way in which trainers write checkpoints: built in or plugged in (group `unbroken.checkpoint_formats`)."""

    name: str

    def recognize(self, path: Path) -> bool:
        """Whether the file or folder is of this format, complete or not. Cheap: names and a few bytes."""

    def inspect(self, path: Path) -> Checkpoint:
        """Read it without executing anything in it. Raises OSError only."""


GROUP: Final = "unbroken.checkpoint_formats"


def _formats(trusts: Trusts, any_folder: AnyFolder, limits: Limits = DEFAULT_LIMITS) -> tuple[CheckpointFormat, ...]:
    """A path has the first format that recognizes it: the most specific come first."""
    return (
        MegatronFolder(limits, trusts),
        HuggingFaceFolder(limits, trusts),
        DeepSpeedFolder(limits, trusts),
        NemoFolder(limits, trusts),
        DcpFolder(limits, trusts),
        AccelerateFolder(limits, trusts),
        any_folder,
        SafetensorsFile(),
        NemoFile(limits),
        TorchFile(limits),
    )


BUILT_IN: Final = _formats(everything, AnyFolder())
DEEP: Final = _formats(everything, AnyFolder(DEEP_LIMITS), DEEP_LIMITS)
"""The same without a limit on what is read."""


def written_formats(trusts: Trusts, filled_once: Trusts) -> tuple[CheckpointFormat, ...]:
    """Those for what ranks were seen to write, among much that may be somebody else's."""
    return _formats(trusts, WrittenFolder(trusts, filled_once))


def load_formats(
    points: Iterable[EntryPoint] | None = None, built_in: Sequence[CheckpointFormat] = BUILT_IN
) -> tuple[tuple[CheckpointFormat, ...], tuple[str, ...]]:
    """Plugged-in formats, then the built-in ones; and in words, which plug-ins were skipped and why.

    An entry point names a class without arguments, or an instance. A broken plug-in never stops anything.
    """
    formats: list[CheckpointFormat] = []
    skipped: list[str] = []
    for point in entry_points(group=GROUP) if points is None else points:
        try:
            loaded = point.load()
            plugged: CheckpointFormat = loaded() if isinstance(loaded, type) else loaded
            if not (isinstance(plugged.name, str) and callable(plugged.recognize) and callable(plugged.inspect)):
                raise TypeError("it is no CheckpointFormat")
            formats.append(plugged)
        except (Exception, SystemExit) as error:
            skipped.append(f"checkpoint format {point.name} was skipped: {type(error).__name__}: {str(error)[:200]}")
    return (*formats, *built_in), tuple(skipped)


def recognize(path: Path, formats: Sequence[CheckpointFormat] = BUILT_IN) -> CheckpointFormat | None:
    """The first format that takes the path for a checkpoint of its own."""
    for candidate in formats:
        try:
            if candidate.recognize(path):
                return candidate
        except Exception:
            continue
    return None


def inspect(path: Path, formats: Sequence[CheckpointFormat] = BUILT_IN) -> Checkpoint | None:
    """The checkpoint at `path`; None when it is not one, or is gone. Never raises."""
    known = recognize(path, formats)
    if known is None:
        return None
    try:
        return known.inspect(path)
    except Exception as error:  # I/O errors, a plug-in's bug
        if not path.exists():
            return None
        why = f"it cannot be read: {type(error).__name__}: {str(error)[:200]}"
        return Checkpoint(path=str(path), step=None, format=known.name, complete=False, why=why)


SPLIT: Final = (HuggingFaceFolder, MegatronFolder, DeepSpeedFolder, AccelerateFolder, AnyFolder)
"""Formats without one file that names all others. (Those of DCP are named by `.metadata`.)"""


def inspect_part(
    path: Path, names: Container[str], formats: Sequence[CheckpointFormat] = BUILT_IN
) -> PartReport | None:
    """What one node has of a save, where ranks on several nodes write it: of the files with these names (relative to
    it). None where the format does not split saves so, or nothing can be read."""
    known = recognize(path, formats)
    try:
        return known.inspect_part(path, names) if isinstance(known, SPLIT) else None
    except OSError:
        return None
