"""Small checkpoints that the real libraries wrote (`record`; `versions.txt` says which versions)."""

from __future__ import annotations

import tarfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz")))


def unpack(name: str, folder: Path) -> Path:
    """The folder of a run with two checkpoints, of steps 10 and 20."""
    target = folder / name
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target
