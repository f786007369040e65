"""Reading a checkpoint that is a folder: every file of a known kind in it must be whole."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from recovery.formats.base import OURS, Budget, Report, is_temporary
from recovery.formats.dcp_files import METADATA, SHARD_SUFFIX, inspect_dcp
from recovery.formats.safetensors_files import inspect_safetensors
from recovery.formats.torch_files import SUFFIXES, inspect_torch_file

DEPTH: Final = 4
_INDEX_LIMIT: Final = 64 << 20
NOT_TORCH: Final = re.compile(r"(?:tokenizer|vocab|args)\w*\.(?:bin|pkl)$")


class Tree:
    """What is in the folder of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, os.stat_result] = {}
        """By path relative to the folder, with slashes."""
        self.truncated = False
        """There are more files than the limits allow."""
        self.numbers: dict[str, int] = {}
        self.step: int | None = None

    @property
    def size(self) -> int:
        return sum(stat.st_size for stat in self.files.values())

    @property
    def modified_at(self) -> float:
        """Of the file written last; of the folder when it is empty."""
        times = [stat.st_mtime for stat in self.files.values()]
        return max(times) if times else self.folder.stat().st_mtime

    def any(self, pattern: str) -> bool:
        """Whether a relative path matches the whole pattern."""
        return any(re.fullmatch(pattern, name) for name in self.files)


def list_tree(folder: Path, entries: int) -> Tree:
    """The files of a checkpoint folder. Raises OSError when the folder itself cannot be read."""
    tree = Tree(folder)
    pending = [(folder, "", 0)]
    while pending:
        current, prefix, depth = pending.pop()
        try:
            listing = list(os.scandir(current))
        except OSError:
            if current == folder:
                raise
            continue
        for entry in listing:
            if len(tree.files) >= entries:
                tree.truncated = True
                return tree
            try:
                if entry.is_dir():
                    if entry.name not in OURS and depth < DEPTH:
                        pending.append((Path(entry.path), f"{prefix}{entry.name}/", depth + 1))
                elif entry.is_file():
                    tree.files[prefix + entry.name] = entry.stat()
            except OSError:
                continue  # it went while we looked
    return tree


def inspect_tree(tree: Tree, budget: Budget) -> str:
    """Why the files are not whole; empty when they are. Fills in the tree's step and numbers. Raises OSError."""
    if not tree.files:
        return "the folder is empty"
    for name in sorted(tree.files):
        base = PurePosixPath(name).name
        if is_temporary(base):
            return f"{name} is still being written"
    for folder in sorted({name.rpartition("/")[0] for name in tree.files}):
        why = _inspect_folder(tree, folder, budget)
        if why:
            return why
    for name in sorted(tree.files):
        try:
            report = inspect_file(tree.folder / name, budget)
        except FileNotFoundError:
            return f"{name} went while it was read"
        if report is None:
            continue
        if report.why:
            return f"{name}: {report.why}"
        if tree.step is None:
            tree.step = report.step
        tree.numbers.update(report.numbers)
    return ""


def inspect_file(path: Path, budget: Budget) -> Report | None:
    """What one file of a known kind is like; None for any other file. Raises OSError."""
    if path.suffix == ".safetensors":
        return inspect_safetensors(path)
    if path.suffix in SUFFIXES and not NOT_TORCH.search(path.name):
        return inspect_torch_file(path, budget)
    return None


def _inspect_folder(tree: Tree, folder: str, budget: Budget) -> str:
    """Torch's distributed checkpoint and sharded weights: files that name other files."""
    prefix = f"{folder}/" if folder else ""
    sizes = {
        name.removeprefix(prefix): stat.st_size
        for name, stat in tree.files.items()
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
    }
    if METADATA in sizes or any(name.endswith(SHARD_SUFFIX) for name in sizes):
        why = inspect_dcp(tree.folder / folder, sizes, budget)
        if why:
            return f"{folder}: {why}" if folder else why
    for name in sizes:
        if name.endswith(".index.json"):
            missing = _missing_shards(tree.folder / folder / name, sizes)
            if missing:
                return missing
    return ""


def _missing_shards(index: Path, sizes: dict[str, int]) -> str:
    if sizes[index.name] > _INDEX_LIMIT:
        return ""
    try:
        weights = msgspec.json.decode(index.read_bytes())["weight_map"]
        named = sorted({str(shard) for shard in weights.values()})
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return f"{index.name} is damaged"
    missing = [shard for shard in named if shard not in sizes]
    return f"{missing[0][:80]} is missing ({len(missing)} of {len(named)} shards)" if missing else ""
