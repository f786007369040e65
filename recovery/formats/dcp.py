"""torch.distributed.checkpoint: `.metadata` (a pickle, renamed into place last) says which chunk of which tensor lies
where in the `__R_S.distcp` files. Each chunk is a file of `torch.save` of its own, with its own checksums.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

from diagnosis.pickles import InertObject, PickleDamaged, PickleTooLong, read_inert
from recovery.formats.files import METADATA, Budget, Limits, PartOfFile, why_no_archive

_SHARD: Final = re.compile(rb"__\d{1,7}_\d{1,7}\.distcp")
_RANK: Final = re.compile(r"__(\d{1,7})_\d{1,7}\.distcp")
_ZIP, _END = b"PK\x03\x04", b"PK\x05\x06"
_END_SIZE: Final = 22
CHECKSUMS: Final = Limits(read_bytes=64 << 20, seconds=0.5)
"""While a job runs; `verify` reads all."""


class Chunk(NamedTuple):
    """A part of a tensor, or of something else, in one file."""

    name: str
    file: str
    offset: int
    length: int
    is_tensor: bool
    is_packed: bool
    """Compressed, or changed in another way: its bytes are not looked at."""


class DcpMetadata(NamedTuple):
    """What `.metadata` says."""

    chunks: list[Chunk]
    missing: str = ""
    """A name without any chunk; empty for none."""

    def extents(self) -> dict[str, int]:
        """File name -> the least size that it must have."""
        extents: dict[str, int] = {}
        for chunk in self.chunks:
            extents[chunk.file] = max(extents.get(chunk.file, 0), chunk.offset + chunk.length)
        return extents


def read_metadata(data: bytes, budget: Budget) -> DcpMetadata:
    """Raises PickleDamaged, PickleTooLong."""
    content = read_inert(data, budget.out_of_time).value
    told = content.get("state_dict_metadata") if isinstance(content, InertObject) else None
    storage = content.get("storage_data") if isinstance(content, InertObject) else None
    kinds = {
        name: isinstance(one, InertObject) and one.name.endswith("TensorStorageMetadata")
        for name, one in (told.pairs() if isinstance(told, InertObject) else ())
        if isinstance(name, str)
    }
    chunks: list[Chunk] = []
    for index, info in storage.pairs() if isinstance(storage, InertObject) else ():
        chunk = _chunk(index, info, kinds)
        if chunk is not None:
            chunks.append(chunk)
    held = {chunk.name for chunk in chunks}
    return DcpMetadata(chunks, next((name for name in kinds if name not in held), "") if chunks else "")


def _chunk(index: object, info: object, kinds: dict[str, bool]) -> Chunk | None:
    if not isinstance(info, InertObject) or not isinstance(info.state, InertObject):
        return None
    fields = dict(pair for pair in info.state.pairs() if isinstance(pair[0], str))
    name, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if not (isinstance(name, str) and type(offset) is int and type(length) is int) or "/" in name:
        return None
    if offset < 0 or length < 0:
        raise PickleDamaged("a chunk before the beginning of its file")
    fqn = index.get("fqn") if isinstance(index, InertObject) else None
    label = fqn if isinstance(fqn, str) else ""
    return Chunk(label, name, offset, length, kinds.get(label, False), bool(fields.get("transform_descriptors")))


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
        metadata, extents = _read(data, budget)
    except PickleDamaged as error:
        return f".metadata is damaged: {error}"
    missing = sorted(name for name in extents if name not in sizes)
    if missing:
        return f"{missing[0]} is missing ({len(missing)} of {len(extents)} files)"
    for name, extent in sorted(extents.items()):
        if sizes[name] < extent:
            return f"{name} has {sizes[name]} bytes instead of {extent}"
    if metadata.missing:
        return f".metadata is damaged: nothing is stored for {metadata.missing[-80:]}"
    return _damaged_chunk(folder, metadata.chunks, budget)


def _read(data: bytes, budget: Budget) -> tuple[DcpMetadata, dict[str, int]]:
    """And file name -> the least size that it must have. When the pickle is too long to follow, its names alone.

    Raises PickleDamaged.
    """
    try:
        metadata = read_metadata(data, budget)
    except PickleTooLong:
        return DcpMetadata([]), {name.decode(): 1 for name in set(_SHARD.findall(data))}
    return metadata, metadata.extents()


def dcp_needs(folder: Path) -> dict[str, int]:
    """What `.metadata` says must be there: file name -> the least size. Empty where it cannot be read safely.

    Raises OSError.
    """
    budget = Budget()
    with open(folder / METADATA, "rb") as file:
        data = file.read(16 * budget.limits.pickle_bytes + 1)
    try:
        return _read(data, budget)[1] if len(data) <= 16 * budget.limits.pickle_bytes else {}
    except PickleDamaged:
        return {}


def _damaged_chunk(folder: Path, chunks: Sequence[Chunk], budget: Budget) -> str:
    """Why a chunk is not what it must be: the ends of all, and the checksums of as many as the budget allows.

    Other writers may store chunks in other ways: only what differs from the other chunks of a file is damaged.
    """
    of_file: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        if not chunk.is_packed:
            of_file.setdefault(chunk.file, []).append(chunk)
    torn, known = "", False
    deep = math.isinf(budget.limits.seconds)
    sums = budget if deep else Budget(CHECKSUMS)
    for name in sorted(of_file):
        with open(folder / name, "rb") as file:
            for chunk in of_file[name]:
                if budget.out_of_time():
                    break
                if not _is_framed(file, chunk):
                    torn = torn or f"{name}: the bytes of {chunk.name[-80:]} are not there"
                    continue
                known = True
                if sums.spent:
                    continue
                part = PartOfFile(file, chunk.offset, chunk.length)
                why = why_no_archive(cast("IO[bytes]", part), chunk.length, sums)
                if why:
                    return f"{name}: {chunk.name[-80:]}: {why}"
    return torn if known else ""


def _is_framed(file: IO[bytes], chunk: Chunk) -> bool:
    file.seek(chunk.offset)
    if file.read(4) != _ZIP or chunk.length < _END_SIZE:
        return False
    file.seek(chunk.offset + chunk.length - _END_SIZE)
    return file.read(4) == _END


def ranks_of(names: Sequence[str]) -> int | None:
    """How many ranks wrote the files; None where their names do not say."""
    found = {int(match.group(1)) for name in names if (match := _RANK.fullmatch(name)) is not None}
    return len(found) or None
