"""Safetensors files: an eight-byte header length, a JSON header, tensor bytes up to the very end."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

import msgspec

from recovery.actions import Checkpoint
from recovery.formats.base import Report, final_suffix, made_of_file

HEADER_LIMIT: Final = 100_000_000
"""As in the safetensors library."""


class SafetensorsFile:
    """One `.safetensors` file."""

    name = "safetensors"

    def recognize(self, path: Path) -> bool:
        return final_suffix(path.name) == ".safetensors" and path.is_file()

    def inspect(self, path: Path) -> Checkpoint:
        return made_of_file(path, self.name, inspect_safetensors(path))


def inspect_safetensors(path: Path) -> Report:
    """Whether header and length agree. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            return Report("the file is empty" if not prefix else "the file ends within its header")
        length = struct.unpack("<Q", prefix)[0]
        if length > min(HEADER_LIMIT, size - 8):
            return Report("the file ends within its header")
        data = file.read(length)
    try:
        header = msgspec.json.decode(data)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, AttributeError, ValueError):
        return Report("its header is damaged")
    if wanted != size:
        return Report(f"it has {size} bytes instead of {wanted}")
    return Report(step=_step(header.get("__metadata__")))


def _step(metadata: object) -> int | None:
    if not isinstance(metadata, dict):
        return None
    for key in ("global_step", "iteration", "step"):
        value = str(metadata.get(key, ""))
        if value.isascii() and value.isdigit() and len(value) <= 12:
            return int(value)
    return None
