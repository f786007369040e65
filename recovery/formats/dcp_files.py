"""Folders of torch.distributed.checkpoint: `.metadata` (a pickle, renamed into place last) and `__R_S.distcp` files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from diagnosis.pickles import InertObject, PickleDamaged, PickleTooLong, read_inert
from recovery.formats.base import Budget

METADATA: Final = ".metadata"
SHARD_SUFFIX: Final = ".distcp"
_SHARD: Final = re.compile(rb"__\d{1,7}_\d{1,7}\.distcp")


def inspect_dcp(folder: Path, sizes: dict[str, int], budget: Budget) -> str:
    """Why the folder is not a whole checkpoint; empty when it is. `sizes`: its files. Raises OSError."""
    if METADATA not in sizes:
        return "it has no .metadata, which is written last"
    if sizes[METADATA] == 0:
        return ".metadata is empty"
    if sizes[METADATA] > 16 * budget.limits.pickle_bytes:
        return ""
    data = (folder / METADATA).read_bytes()
    try:
        extents = _extents(data, budget)
    except PickleDamaged as error:
        return f".metadata is damaged: {error}"
    missing = sorted(name for name in extents if name not in sizes)
    if missing:
        return f"{missing[0]} is missing ({len(missing)} of {len(extents)} files)"
    for name, extent in sorted(extents.items()):
        if sizes[name] < extent:
            return f"{name} has {sizes[name]} bytes instead of {extent}"
    return ""


def _extents(data: bytes, budget: Budget) -> dict[str, int]:
    """File name -> the least size that it must have. When the pickle is too long to follow, its names alone."""
    try:
        content = read_inert(data, budget.out_of_time).value
    except PickleTooLong:
        return {name.decode(): 1 for name in set(_SHARD.findall(data))}
    storage = content.get("storage_data") if isinstance(content, InertObject) else None
    extents: dict[str, int] = {}
    for _, info in storage.pairs() if isinstance(storage, InertObject) else ():
        if not isinstance(info, InertObject) or not isinstance(info.state, InertObject):
            continue
        fields = dict(pair for pair in info.state.pairs() if isinstance(pair[0], str))
        name, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
        if isinstance(name, str) and isinstance(offset, int) and isinstance(length, int) and "/" not in name:
            extents[name] = max(extents.get(name, 0), offset + length)
    return extents
