"""What a name says, and single files of checkpoints: read and never unpickled.

Files of `torch.save` (zip archives, and the format before torch 1.6), safetensors files (an eight-byte header length,
a JSON header, tensor bytes up to the very end), and NeMo 1's tar archives.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import struct
import tarfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import msgspec

from diagnosis.pickles import BoundedReader, InertObject, InertPickle, PickleDamaged, PickleTooLong, read_inert
from diagnosis.signals import clean_text
from recovery.checkpoint import STEP_IN_NAME, TEMPORARY, Checkpoint, RankLayout
from recovery.tiers import MIRRORS, PUBLISHING

SET_ASIDE: Final = ".unbroken-set-aside"
COPIES: Final = ".unbroken-copies"
OURS: Final = frozenset((SET_ASIDE, COPIES, MIRRORS, PUBLISHING))
"""Folders of ours next to checkpoints; never taken for one."""


class Limits(NamedTuple):
    """How much of one checkpoint is read. Sizes, names and pickles are always looked at; tensor bytes within this."""

    read_bytes: int = 256 << 20
    seconds: float = 2.0
    pickle_bytes: int = 64 << 20
    entries: int = 20_000
    """Files of one folder."""


DEFAULT_LIMITS: Final = Limits()
DEEP_LIMITS: Final = Limits(read_bytes=1 << 62, seconds=math.inf, pickle_bytes=1 << 30, entries=1_000_000)
"""Everything is read: `unbroken checkpoints verify`."""


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
    """Integers at the top level of a pickled dictionary; those of Megatron-LM's arguments as `args.NAME`."""


# ----- what a name says -----

_STEP_PATTERNS: Final = (
    STEP_IN_NAME,
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


@functools.lru_cache(maxsize=16384)
def step_in_name(name: str) -> int | None:
    """The training step in the name of a file or folder (`checkpoint-10`, `iter_0000100`, `epoch=0-step=7.ckpt`)."""
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


def made(
    path: Path, format_name: str, report: Report, size: int, modified_at: float, layout: RankLayout | None = None
) -> Checkpoint:
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
        layout=layout,
    )


def made_of_file(path: Path, format_name: str, report: Report) -> Checkpoint:
    """The same for a single file; the step is from its name where its content has none."""
    if report.step is None:
        report = report._replace(step=step_in_name(path.name))
    stat = os.stat(path)
    return made(path, format_name, report, stat.st_size, stat.st_mtime)


# ----- torch.save -----

SUFFIXES: Final = frozenset((".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl"))
STEP_KEYS: Final = (
    "iter_num",
    "global_step",
    "global_steps",
    "iteration",
    "step",
    "steps",
    "num_steps",
    "train_step",
    "current_step",
    "step_num",
    "step_idx",
    "n_iter",
    "it",
    "iter",
)
"""Keys under which trainers keep the step, the clearest first (nanoGPT, Lightning, DeepSpeed, Megatron-LM)."""
_NESTED: Final = frozenset(
    ("state", "trainer", "trainer_state", "train_state", "progress", "meta", "metadata", "extra")
)
_ZIP: Final = b"PK\x03\x04"
MEMBER_ERRORS: Final = (
    zipfile.BadZipFile, EOFError, ValueError, struct.error, zlib.error, NotImplementedError, RuntimeError, KeyError,
)  # fmt: skip
"""What `zipfile` raises for a damaged archive."""
_LEGACY: Final = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
"""The pickled magic number with which a file of the old format begins."""
_LEGACY_PICKLES: Final = 5
"""Magic number, protocol version, system, content, keys of the storages."""
_BLOCK: Final = 1 << 20
_ITEM_SIZES: Final = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "Untyped": 1, "ComplexFloat": 8, "ComplexDouble": 16, "QInt8": 1, "QUInt8": 1, "QInt32": 4,
}  # fmt: skip


class TorchFile:
    """One file written by `torch.save` (also Lightning's `.ckpt` and nanoGPT's `ckpt.pt`)."""

    name = "torch_save"

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits

    def recognize(self, path: Path) -> bool:
        try:
            return final_suffix(path.name) in SUFFIXES and path.is_file() and _looks_like_torch(path)
        except OSError:
            return False

    def inspect(self, path: Path) -> Checkpoint:
        return made_of_file(path, self.name, inspect_torch_file(path, Budget(self.limits)))


def inspect_torch_file(path: Path, budget: Budget) -> Report:
    """Whether a torch file is whole, and the step in it. Raises OSError."""
    with open(path, "rb") as file:
        before = os.fstat(file.fileno())
        if before.st_size == 0:
            return Report("the file is empty")
        head = file.read(len(_LEGACY))
        file.seek(0)
        try:
            if head.startswith(_ZIP):
                report = inspect_zip(file, before.st_size, budget)
            elif _LEGACY.startswith(head) or head.startswith(_LEGACY):
                report = _inspect_legacy(file, before.st_size, budget)
            elif not head.strip(b"\0"):
                report = Report("it begins with zeros: its data never reached the storage")
            else:
                report = _inspect_plain(file, before.st_size, budget)
        except PickleDamaged as error:
            report = Report(f"its pickle is damaged: {error}")
        except PickleTooLong:
            report = Report()
        after = os.stat(path)
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        return Report("it is being written")
    return report


def _looks_like_torch(path: Path) -> bool:
    """By content; an empty or zeroed file by a name that only checkpoints have."""
    with open(path, "rb") as file:
        head = file.read(512)
    suffix = final_suffix(path.name)
    named = (
        suffix in (".pt", ".pth", ".ckpt")
        or ".pth." in path.name
        or path.name.startswith(("pytorch_model", "optimizer", "scheduler"))
    )
    if head.startswith(_ZIP):
        return b"/data.pkl" in head or b"/.format_version" in head or b"/byteorder" in head or len(head) < 80
    if head.startswith(_LEGACY):
        return True
    if suffix in (".pkl", ".tar", ".bin") and not named:
        return False
    if named and _ZIP.startswith(head):  # cut after a byte or three
        return True
    return not head.strip(b"\0") or _LEGACY.startswith(head) or (head[0] == 0x80 and head[1:2] <= b"\x05")


class _Archive(NamedTuple):
    archive: zipfile.ZipFile
    members: list[zipfile.ZipInfo]
    why: str


def why_no_archive(file: IO[bytes], size: int, budget: Budget) -> str:
    """Why a zip archive of `torch.save` is not whole, without a look at its pickle. Raises OSError."""
    found = _opened(file, size, budget)
    return found if isinstance(found, str) else found.why


def _opened(file: IO[bytes], size: int, budget: Budget) -> _Archive | str:
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return f"its zip directory, which is written last, is missing or damaged ({size} bytes are there)"
    members = archive.infolist()
    file.seek(max(0, size - 22 - len(archive.comment)))
    end = file.read(12)
    if len(end) < 12 or struct.unpack("<H", end[10:])[0] not in (len(members), 0xFFFF):
        return "its zip directory is damaged: it does not hold as many members as it says"
    if not any(member.filename.endswith("/data.pkl") for member in members):
        return "it has no data.pkl"
    return _Archive(archive, members, _damaged_member(file, members, size, budget))


def inspect_zip(file: IO[bytes], size: int, budget: Budget) -> Report:
    """Whether a zip archive of `torch.save` is whole; the file may be a part of another one. Raises OSError."""
    opened = _opened(file, size, budget)
    if isinstance(opened, str):
        return Report(opened)
    pickle = next(member for member in opened.members if member.filename.endswith("/data.pkl"))
    root = pickle.filename.removesuffix("data.pkl")
    if opened.why or pickle.file_size > budget.limits.pickle_bytes:
        return Report(opened.why)
    try:
        data = stored(file, pickle) if pickle.compress_type == zipfile.ZIP_STORED else opened.archive.read(pickle)
    except MEMBER_ERRORS as error:
        return Report(f"data.pkl cannot be read: {error}")
    content = read_inert(data, budget.out_of_time)
    missing = _missing_storage(content, {member.filename: member.file_size for member in opened.members}, root)
    return _report_of(content, missing)


def _damaged_member(file: IO[bytes], members: list[zipfile.ZipInfo], size: int, budget: Budget) -> str:
    """Why a member is not what the directory says; all headers, and as many bytes as the budget allows."""
    for member in members:
        file.seek(max(0, member.header_offset))
        header = file.read(30)
        if member.header_offset < 0 or len(header) < 30 or not header.startswith(_ZIP):
            return f"member {member.filename[-80:]} is not where the zip directory says"
        length, extra = struct.unpack("<HH", header[26:30])
        if file.read(length).decode(errors="replace") != member.orig_filename:
            return f"member {member.filename[-80:]} has another name than the zip directory says"
        if struct.unpack("<HH", header[6:10]) != (member.flag_bits, member.compress_type):
            return f"member {member.filename[-80:]} is packed in another way than the zip directory says"
        if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
            return f"member {member.filename[-80:]} has two sizes in the zip directory"
        begin = member.header_offset + 30 + length + extra
        if begin + member.compress_size > size:
            return f"member {member.filename[-80:]} reaches beyond the end of the file"
        if budget.spent:
            continue
        # torch can be told not to compute checksums; then the directory holds zeros, and torch.load checks none.
        if member.CRC and member.compress_type == zipfile.ZIP_STORED:
            file.seek(begin)
            if not _checksum_holds(file, member, budget):
                return f"the checksum of member {member.filename[-80:]} is wrong"
    return ""


def _checksum_holds(file: IO[bytes], member: zipfile.ZipInfo, budget: Budget) -> bool:
    """False when the bytes contradict the checksum; True also when the budget ran out first."""
    left, crc = member.file_size, 0
    while left:
        if budget.spent:
            return True
        block = file.read(min(_BLOCK, left))
        if not block:
            return False
        crc = zlib.crc32(block, crc)
        left -= len(block)
        budget.bytes_left -= len(block)
    return crc == member.CRC


def stored(file: IO[bytes], member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member that is not compressed."""
    file.seek(member.header_offset)
    file.seek(member.header_offset + 30 + sum(struct.unpack("<HH", file.read(30)[26:30])))
    return file.read(member.file_size)


class Storage(NamedTuple):
    """A block of tensor bytes that a pickle refers to."""

    key: str
    size: int
    kind: str
    """`Float`, `BFloat16`, ..."""


def storage_of(pid: object) -> Storage | None:
    """The storage that a persistent id names; None for one of an unknown kind."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or not isinstance(pid[1], InertObject):
        return None
    kind = str(pid[1].args[0]).rpartition(".")[2].removesuffix("Storage") if pid[1].args else ""
    item = _ITEM_SIZES.get(kind)
    return Storage(str(pid[2]), pid[4] * item, kind) if item and isinstance(pid[4], int) else None


def _missing_storage(content: InertPickle, sizes: dict[str, int], root: str) -> str:
    for pid in content.persistent:
        storage = storage_of(pid)
        if storage is None:
            continue
        key, size = storage.key, storage.size
        held = sizes.get(f"{root}data/{key}", sizes.get(f"{root}{key}"))
        if held is None:
            return f"tensor data {key[:40]} is missing"
        if held < size:
            return f"tensor data {key[:40]} has {held} bytes instead of {size}"
    return ""


def _inspect_legacy(file: IO[bytes], size: int, budget: Budget) -> Report:
    """Five pickles, then for each storage its length and its bytes."""
    bounded = BoundedReader(file, size, budget.limits.pickle_bytes)
    contents = [read_inert(bounded, budget.out_of_time) for _ in range(_LEGACY_PICKLES)]
    content = contents[3]
    sizes = {one.key: one.size for one in map(storage_of, content.persistent) if one is not None}
    keys = contents[4].value
    for key in keys.items if isinstance(keys, InertObject) else ():
        length = file.read(8)
        if len(length) < 8:
            return Report("the file ends before its tensor data")
        wanted = sizes.get(str(key))
        if wanted is None:
            break  # a kind of storage that is not known here: nothing more can be said
        if file.seek(wanted, os.SEEK_CUR) > size:
            return Report("the file ends within its tensor data")
    return _report_of(content, "")


def _inspect_plain(file: IO[bytes], size: int, budget: Budget) -> Report:
    """A pickle under the name of a torch file."""
    if size > budget.limits.pickle_bytes:
        return Report()
    return _report_of(read_inert(file.read(), budget.out_of_time), "")


def _report_of(content: InertPickle, why: str) -> Report:
    numbers = top_numbers(content.value)
    return Report(why, next((numbers[key] for key in STEP_KEYS if numbers.get(key, -1) >= 0), None), numbers)


def top_numbers(value: object) -> dict[str, int]:
    """Integers under string keys of a pickled dictionary, and of a few telling dictionaries in it."""
    if not isinstance(value, InertObject):
        return {}
    numbers: dict[str, int] = {}
    for key, item in value.pairs():
        if isinstance(key, str) and type(item) is int:
            numbers[key] = item
        elif key == "param_shapes" and isinstance(
            item, InertObject
        ):  # DeepSpeed's ZeRO, which has parts of the optimizer
            numbers[key] = len(item.items)
        elif key == "args" and isinstance(item, InertObject) and isinstance(item.state, InertObject):
            for name, number in item.state.pairs():
                if isinstance(name, str) and type(number) is int:
                    numbers[f"args.{name}"] = number
        elif key in _NESTED and isinstance(item, InertObject):
            for name, number in item.pairs():
                if isinstance(name, str) and type(number) is int:
                    numbers.setdefault(name, number)
    return numbers


class PartOfFile:
    """A part of a file as a file of its own, for `zipfile`."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the file's beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._begin + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


# ----- safetensors -----

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
        wanted = 8 + length + _laid_out({name: one for name, one in header.items() if name != "__metadata__"})
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, AttributeError, ValueError):
        return Report("its header is damaged")
    if wanted != size:
        return Report(f"it has {size} bytes instead of {wanted}")
    return Report(step=_step(header.get("__metadata__")))


_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64,
    "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def _laid_out(tensors: dict[str, Any]) -> int:
    """Where the last tensor ends. Raises ValueError where tensors overlap, leave gaps, or have another size than
    their shape says: the library refuses such a file, too."""
    end = 0
    for begin, until, entry in sorted(((*entry["data_offsets"], entry) for entry in tensors.values()), key=_BY_PLACE):
        bits = _BITS.get(entry["dtype"])
        if begin != end or until < begin:
            raise ValueError("tensors overlap, or leave a gap")
        if bits is not None and (until - begin) * 8 != math.prod(entry["shape"]) * bits:
            raise ValueError("a tensor has another size than its shape says")
        end = until
    return end


_BY_PLACE: Final = operator.itemgetter(0, 1)


def _step(metadata: object) -> int | None:
    if not isinstance(metadata, dict):
        return None
    for key in ("global_step", "iteration", "step"):
        value = str(metadata.get(key, ""))
        if value.isascii() and value.isdigit() and len(value) <= 12:
            return int(value)
    return None


# ----- NeMo 1 -----


class NemoFile:
    """One `.nemo` file: a tar archive of a YAML file and a file of `torch.save`."""

    name = "nemo"

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits

    def recognize(self, path: Path) -> bool:
        return final_suffix(path.name) == ".nemo" and path.is_file()

    def inspect(self, path: Path) -> Checkpoint:
        return made_of_file(path, self.name, inspect_nemo(path, Budget(self.limits)))


def inspect_nemo(path: Path, budget: Budget) -> Report:
    """Whether every header and all bytes of the archive are there, and its weights are whole. Raises OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(3)
        if not head.strip(b"\0"):
            return Report("it begins with zeros: its data never reached the storage" if size else "the file is empty")
        if head.startswith(b"\x1f\x8b"):
            return Report()  # packed by gzip: nothing is unpacked here
        file.seek(0)
        try:
            members = _tar_members(file)
        except (tarfile.TarError, EOFError, ValueError):
            return Report("its tar headers are damaged")
        end = max((member.offset_data + (member.size + 511) // 512 * 512 for member in members), default=0)
        file.seek(end)
        if end + 1024 > size or file.read(1024).strip(b"\0"):
            return Report(f"the file ends within its archive ({size} bytes are there)")
        weights = [member for member in members if member.name.endswith(".ckpt")]
        if not weights and not any(member.name.endswith("weights") for member in members):
            return Report("it has no weights")
        for member in weights:
            part = PartOfFile(file, member.offset_data, member.size)
            if part.read(4) == _ZIP:
                why = why_no_archive(cast("IO[bytes]", part), member.size, budget)
                if why:
                    return Report(f"{member.name[-80:]}: {why}")
    return Report()


_TAR_MEMBERS: Final = 1000


def _tar_members(file: IO[bytes]) -> list[tarfile.TarInfo]:
    """Raises tarfile.TarError."""
    members: list[tarfile.TarInfo] = []
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while len(members) < _TAR_MEMBERS and (member := archive.next()) is not None:
            members.append(member)
    return members


# ----- torch.distributed.checkpoint -----

METADATA: Final = ".metadata"
SHARD_SUFFIX: Final = ".distcp"
