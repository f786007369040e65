"""Reads whole checkpoints: every checksum, every tensor. For `unbroken checkpoints verify`; a job reads samples."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.signals import Frozen, clean_text
from recovery.checkpoint import Checkpoint
from recovery.formats import DEEP, CheckpointFormat, inspect, recognize
from recovery.formats.content import ContentReader, holders
from recovery.formats.files import DEEP_LIMITS, Budget
from recovery.formats.scan import FolderWalk, Listings
from recovery.formats.tensors import TensorPlace, is_weight, non_finite, places_in, why_non_finite

REMARKS: Final = 8
PIECE: Final = 1 << 20


class VerifiedCheckpoint(Frozen, frozen=True, kw_only=True):
    """What the reading of a whole checkpoint has found."""

    checkpoint: Checkpoint
    tensors: int = 0
    """Of floating point numbers, whose place in the files is known."""
    tensor_bytes: int = 0
    remarks: tuple[str, ...] = ()
    """What may be honest: numbers that are not finite outside the weights."""


class NotVerifiable(Exception):
    """There is nothing at a path that could be verified. The text says why."""


def find_checkpoints(path: Path, formats: Sequence[CheckpointFormat] = DEEP) -> tuple[list[Path], str]:
    """The path itself if it is a checkpoint, else those in the folder; and a folder that has more than is looked at.

    Raises NotVerifiable.
    """
    try:
        about = os.stat(path)
        if not stat.S_ISDIR(about.st_mode) and not stat.S_ISREG(about.st_mode):
            raise NotVerifiable(f"{path} is {_kind(about.st_mode)}, no checkpoint")
        if stat.S_ISDIR(about.st_mode):
            os.scandir(path).close()
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        raise NotVerifiable(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise NotVerifiable(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if recognize(path, formats) is not None:
        return [path], ""
    if not stat.S_ISDIR(about.st_mode):
        names = ", ".join(dict.fromkeys(one.name for one in formats))
        raise NotVerifiable(f"{path} is no checkpoint of a known format ({names})")
    walk = FolderWalk(lambda one, _: recognize(Path(one), formats) is not None, Listings())
    found = walk.find([path]).checkpoints
    if not found:
        where = "it holds more than is looked at" if walk.cut_short else "nor three levels below it"
        raise NotVerifiable(f"no checkpoint was found in {path}, {where}")
    return [Path(one) for one in sorted(found, key=lambda one: (found[one], one))], walk.cut_short


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"))
    return next((name for test, name in kinds if test(mode)), "a device")


def verify(path: Path, formats: Sequence[CheckpointFormat] = DEEP) -> VerifiedCheckpoint | None:
    """Read the checkpoint at `path` as a whole; None when it is none any more. Never raises OSError."""
    found = inspect(path, formats)
    if found is None or not found.complete:
        return None if found is None else VerifiedCheckpoint(checkpoint=found)
    try:
        places = [place for one in holders(str(path)) for place in places_in(one, Budget(DEEP_LIMITS), weights=False)]
        why, remarks = _looked_at(places)
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        return VerifiedCheckpoint(checkpoint=msgspec.structs.replace(found, complete=False, why=why))
    if why:
        found = msgspec.structs.replace(found, suspect=True, why=clean_text(why))
    return VerifiedCheckpoint(
        checkpoint=found,
        tensors=len(places),
        tensor_bytes=sum(place.size for place in places),
        remarks=tuple(map(clean_text, remarks[:REMARKS])),
    )


def _looked_at(places: list[TensorPlace]) -> tuple[str, list[str]]:
    """Why weights are not finite, and which other tensors are not. Raises OSError."""
    reader = ContentReader()
    why, remarks = "", []
    for place in places:
        nan = infinite = 0
        with reader.opened(place.file) as descriptor:
            for begin in range(0, place.size, PIECE):
                data = reader.read(descriptor, place.offset + begin, min(PIECE, place.size - begin))
                if is_weight(place) and not why:
                    why = why_non_finite(place, data)
                found = non_finite(data, place.dtype)
                nan, infinite = nan + found.nan, infinite + found.infinite
        if (nan or infinite) and not is_weight(place):
            remarks.append(
                f"{place.name[-120:]} has {nan} NaN and {infinite} infinite numbers; it need not be a weight"
            )
    return why, remarks
