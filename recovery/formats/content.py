"""Whether a checkpoint still holds the bytes that it held when it was first seen complete, and whether its weights are
finite. Only a bounded sample of each file is read: the same blocks each time.

A file whose size, times and inode are the same is not read again until its turn comes. What is changed is *proven*:
bytes that differ although nobody wrote the file; one file of several that was written anew, when the others were not; a
part of a numbered file without checksums, when at least half of it is the same, since a training step changes all of
it. What was written anew as a whole is a new version, and is seen for the first time again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import Frozen, clean_text
from recovery.checkpoint import Checkpoint
from recovery.formats.files import METADATA, SHARD_SUFFIX, SUFFIXES, Budget, Limits, step_in_name
from recovery.formats.folders import NOT_TORCH, list_tree
from recovery.formats.tensors import TensorPlace, is_weight, places_in, why_non_finite

SAMPLE_BYTES: Final = 256 << 20
"""Of one checkpoint, for the digests; smaller checkpoints are read as a whole."""
WEIGHT_BYTES: Final = 64 << 20
"""Of one checkpoint, for the look at its numbers."""
BLOCKS: Final = 64
"""Of one file."""
FEWEST_BLOCKS: Final = 8
"""Of each file where there are thousands."""
SMALLEST_BLOCK: Final = 512
PIECE: Final = 256 << 10
"""Read at once: between two pieces the rate is kept."""
OPEN_COST: Final = 64 << 10
"""To the rate, opening a file counts as so many bytes: a server of files answers for each."""
FILES: Final = 4096
"""Of one checkpoint."""
RECORDS: Final = 32
"""Checkpoints that are remembered: those verified last."""
_DATA: Final = (*SUFFIXES, ".safetensors", SHARD_SUFFIX, METADATA, ".nemo")
PLACES: Final = Limits(seconds=10.0)


class FileRecord(Frozen, frozen=True, kw_only=True):
    """One file as it was."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    blocks: tuple[str, ...]
    """A digest of each block, in order."""

    def is_as(self, stat: os.stat_result) -> bool:
        """Whether nothing has touched the file."""
        return self.was_not_written(stat) and stat.st_ctime_ns == self.ctime_ns

    def was_not_written(self, stat: os.stat_result) -> bool:
        """As far as its size, time and inode tell."""
        return (stat.st_size, stat.st_mtime_ns, stat.st_ino) == (self.size, self.mtime_ns, self.inode)


class ContentRecord(Frozen, frozen=True, kw_only=True):
    """One checkpoint as it was when it was first seen complete."""

    at: float
    """Unix time."""
    files: dict[str, FileRecord]
    """By path relative to the checkpoint; `` for a single file."""
    changed: str = ""
    """Why it is not what it was; empty as long as it is."""
    non_finite: str = ""
    """Why its weights are not finite; empty when they are, or when nothing was proven."""


class Comparison(NamedTuple):
    """What became of a checkpoint since its record was made."""

    kind: Literal["same", "new", "changed", "mixed"]
    """Mixed: some files were written anew, others not; when all are, it is new."""
    why: str = ""


Wait = Callable[[int], bool]
"""Called with the bytes that were just read, to keep a rate; False: stop, somebody is in a hurry."""


class Stopped(Exception):
    """The reading was stopped before its end."""


def no_wait(_: int) -> bool:
    """As fast as it goes."""
    return True


class ContentReader:
    """Reads samples of files. Raises OSError, Stopped."""

    def __init__(self, wait: Wait = no_wait) -> None:
        self._wait = wait

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A descriptor, for `read`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._keep_rate(OPEN_COST)
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, descriptor: int, offset: int, size: int) -> bytes:
        pieces: list[bytes] = []
        while size > 0:
            piece = os.pread(descriptor, min(PIECE, size), offset)
            if not piece:
                break
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
            self._keep_rate(len(piece))
        return b"".join(pieces)

    def _keep_rate(self, size: int) -> None:
        if not self._wait(size):
            raise Stopped

    def blocks(self, path: str, size: int, count: int, budget: int) -> tuple[str, ...]:
        """Digests of the blocks of a file: all of it where the budget allows, else evenly spread ones."""
        length = max(SMALLEST_BLOCK, -(-size // count))
        held = min(length, max(SMALLEST_BLOCK, budget // count))
        found: list[str] = []
        with self.opened(path) as descriptor:
            for number, begin in enumerate(range(0, size, length)):
                end = min(begin + length, size)
                free = max(0, end - begin - held)
                at = end - held if end == size and free else begin
                if number and end != size:  # the first block is the beginning, the last the end; others lie anywhere
                    at += random.Random(f"{size} {number}").randrange(free + 1)
                data = self.read(descriptor, at, min(held, end - begin))
                found.append(hashlib.blake2b(data, digest_size=8).hexdigest())
        return tuple(found)

    def recorded(self, path: str, now: float) -> ContentRecord:
        """What the checkpoint is like now. It is looked at again whether somebody wrote meanwhile: then Stopped."""
        files = _files(path)
        count = max(FEWEST_BLOCKS, min(BLOCKS, FILES // max(1, len(files))))
        total = sum(stat.st_size for stat in files.values()) or 1
        records: dict[str, FileRecord] = {}
        for name, stat in files.items():
            budget = SAMPLE_BYTES if total <= SAMPLE_BYTES else SAMPLE_BYTES * stat.st_size // total
            blocks = self.blocks(os.path.join(path, name) if name else path, stat.st_size, count, budget)
            records[name] = _record(stat, blocks)
        _nobody_wrote(path, files)
        return ContentRecord(at=now, files=records)

    def compared(self, path: str, record: ContentRecord, again: bool = False) -> tuple[Comparison, ContentRecord]:
        """What became of it, and the record with the times that the files have now.

        Only what was touched is read, unless `again`. A file that has gone, or come, is judged by its format.
        Raises Stopped when somebody wrote meanwhile.
        """
        files = _files(path)
        count = max(FEWEST_BLOCKS, min(BLOCKS, FILES // max(1, len(record.files))))
        total = sum(one.size for one in record.files.values()) or 1
        differing: dict[str, list[bool]] = {}
        known = dict(record.files)
        for name, was in record.files.items():
            stat = files.get(name)
            if stat is None or (was.is_as(stat) and not again):
                continue
            if stat.st_size != was.size:
                differing[name] = [True] * len(was.blocks)
                continue
            budget = SAMPLE_BYTES if total <= SAMPLE_BYTES else SAMPLE_BYTES * was.size // total
            blocks = self.blocks(os.path.join(path, name) if name else path, was.size, count, budget)
            if blocks == was.blocks:
                known[name] = _record(stat, blocks)
            else:
                differing[name] = [one != other for one, other in zip(blocks, was.blocks, strict=True)]
        _nobody_wrote(path, files)
        comparison = _compare(path, record, files, differing)
        if comparison.kind == "changed":  # only when all is written once more it is another one
            known = {name: _record(files[name], was.blocks) if name in files else was for name, was in known.items()}
        return comparison, msgspec.structs.replace(record, files=known)

    def why_non_finite(self, path: str) -> str:
        """Why its weights are not finite, by a sample; empty when nothing is proven."""
        budget = Budget(PLACES)
        weights: list[TensorPlace] = []
        for one in holders(path):
            weights += [place for place in places_in(one, budget) if is_weight(place) and place.size]
        return self.why_not_finite(weights, WEIGHT_BYTES)

    def why_not_finite(self, weights: list[TensorPlace], limit: int) -> str:
        """The first of `weights` that is not finite: of each a part, so that no more than `limit` bytes are read."""
        total = sum(place.size for place in weights) or 1
        for file, places in itertools.groupby(sorted(weights, key=_file_of), key=_file_of):
            with self.opened(file) as descriptor:
                for place in places:
                    share = place.size if total <= limit else max(4096, limit * place.size // total // 8 * 8)
                    why = self._why_not_finite(place, descriptor, min(share, place.size))
                    if why:
                        return clean_text(why)
        return ""

    def _why_not_finite(self, place: TensorPlace, descriptor: int, share: int) -> str:
        at = random.Random(f"{place.name} {place.size}").randrange(0, place.size - share + 1, 8)
        for begin in range(at, at + share, PIECE):
            why = why_non_finite(place, self.read(descriptor, place.offset + begin, min(PIECE, at + share - begin)))
            if why:
                return why
        return ""


def _compare(
    path: str, record: ContentRecord, files: dict[str, os.stat_result], differing: dict[str, list[bool]]
) -> Comparison:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.at))
    for name in differing:
        if record.files[name].was_not_written(files[name]):
            what = name or os.path.basename(path)
            return Comparison(
                "changed", f"the bytes of {what} are not those of {when}, although its size and time are the same"
            )
    untouched = [name for name, was in record.files.items() if name in files and was.was_not_written(files[name])]
    data = [name for name in untouched if _is_data(name)]
    anew = [name for name in differing if _is_data(name)]
    if anew and data:
        why = f"{anew[0]} was written anew after {when}, when this checkpoint was complete, and {data[0]} was not"
        return Comparison("mixed", why)
    gone = [name for name in record.files if _is_data(name) and name not in files]
    if gone and data and not any(_is_data(name) for name in files.keys() - record.files.keys()):
        return Comparison("mixed", f"{gone[0]}, which it had at {when}, is gone")
    if not differing:
        return Comparison("same")
    was = record.files.get("")
    if (
        was is not None
        and "" in differing
        and not _has_checksums(path)
        and step_in_name(os.path.basename(path)) is not None
    ):
        same_place = (was.inode, was.size) == (files[""].st_ino, files[""].st_size)
        if same_place and 2 * sum(differing[""]) <= len(differing[""]):
            return Comparison("changed", f"a part of it was changed after {when}, when it was complete")
    return Comparison("new")


def _has_checksums(path: str) -> bool:
    """A zip archive of torch: that it is whole was proven when it was read."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _is_data(name: str) -> bool:
    """Whether the file's format shows that it was whole, so that a change is not the rest of the same save."""
    return name.endswith(_DATA) and NOT_TORCH.search(name) is None


def _record(stat: os.stat_result, blocks: tuple[str, ...]) -> FileRecord:
    return FileRecord(
        size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino, blocks=blocks
    )


def _key(stat: os.stat_result) -> tuple[int, int, int, int]:
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def _file_of(place: TensorPlace) -> str:
    return place.file


def _nobody_wrote(path: str, before: dict[str, os.stat_result]) -> None:
    """Raises Stopped when a file of the checkpoint is not as it was before the reading."""
    after = _files(path)
    if {name: _key(one) for name, one in after.items()} != {name: _key(one) for name, one in before.items()}:
        raise Stopped


def _files(path: str) -> dict[str, os.stat_result]:
    """The files of a checkpoint, the first by name. Raises OSError."""
    if not os.path.isdir(path):
        return {"": os.stat(path)}
    tree = list_tree(Path(path), FILES)
    return {name: tree.files[name] for name in sorted(tree.files)}


_HOLDS: Final = re.compile(r".*\.(?:safetensors|pt|pth|ckpt|bin)")
_HOLDS_NONE: Final = re.compile(r"(?:optimizer|scheduler|scaler|rng_|random_states|training_args|distrib_optim)", re.I)


def holders(path: str) -> Iterable[str]:
    """The files and folders in a checkpoint in which weights may be."""
    if not os.path.isdir(path):
        return [path]
    tree = list_tree(Path(path), FILES)
    folders = {name.rpartition("/")[0] for name in tree.files if name.endswith(METADATA)}
    files = [name for name in tree.files if _HOLDS.fullmatch(name)]
    files = [name for name in files if not _HOLDS_NONE.match(os.path.basename(name))]
    return [os.path.join(path, name) for name in (*sorted(folders), *sorted(files))]


class ContentLedger:
    """The records of the checkpoints of a job, by path. Not thread-safe."""

    def __init__(self) -> None:
        self.records: dict[str, ContentRecord] = {}
        self.changes = 0
        """Grows with every change."""

    def judged(self, found: Checkpoint) -> Checkpoint:
        """A complete checkpoint with what is known of its content."""
        record = self.records.get(found.path)
        if record is None or not found.complete:
            return found
        if record.changed:
            return msgspec.structs.replace(found, complete=False, changed=True, why=record.changed)
        if record.non_finite:
            return msgspec.structs.replace(found, suspect=True, why=record.non_finite)
        return found

    def look(self, path: str, reader: ContentReader, now: float, *, again: bool = False) -> None:
        """See it for the first time, or compare it. `again`: read what nobody has touched, too. Raises OSError,
        Stopped: then nothing is known that was not known before."""
        record = self.records.get(path)
        if record is not None and not record.changed:
            comparison, record = reader.compared(path, record, again)
            if comparison.kind in ("changed", "mixed"):
                self._keep(path, msgspec.structs.replace(record, changed=clean_text(comparison.why)))
                return
            if comparison.kind == "same":
                self._keep(path, record)
                return
        elif record is not None and not self._is_new(path, record):
            return
        seen = reader.recorded(path, now)
        self._keep(path, msgspec.structs.replace(seen, non_finite=reader.why_non_finite(path)))

    @staticmethod
    def _is_new(path: str, record: ContentRecord) -> bool:
        """Whether every file of a changed checkpoint was written since: then it is another one."""
        files = _files(path)
        data = {name: was for name, was in record.files.items() if (not name or _is_data(name)) and name in files}
        return bool(data) and not any(was.was_not_written(files[name]) for name, was in data.items())

    def _keep(self, path: str, record: ContentRecord) -> None:
        if self.records.get(path) != record:
            self.changes += 1
        self.records.pop(path, None)
        self.records[path] = record
        while len(self.records) > RECORDS:
            del self.records[next(iter(self.records))]

    def is_known(self, path: str) -> bool:
        return path in self.records

    def touched(self, path: str) -> bool:
        """Whether something has happened to it since it was recorded. Names and times only; raises OSError."""
        record = self.records.get(path)
        if record is None:
            return False
        files = _files(path)
        return any(name not in files or not was.is_as(files[name]) for name, was in record.files.items())
