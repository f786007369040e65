"""The memory that holds a rank's snapshots: two slots, which outlive the rank. Standard library only, Python 3.9.

`unbroken run` makes the slots (memfds: files without a name) and keeps them open. Ranks and the agent open them by
`/proc/<pid>/fd/<n>`. So they are there while `unbroken run` lives, whoever else is killed, and the kernel frees them
with the last process that has them.

Whatever a rank starts inherits its environment: a data loader's worker, an evaluation, a batch job on another node.
There the path may lead to any file. So an address has a random word, which is also in the name of the memory, and only
the rank's own process (`UNBROKEN_SNAPSHOT_PID`) uses it.

One slot, from its start:

    page 0   header: who wrote what (JSON, with a checksum); its commit word is written last
    page 1   sums of the content, added a little later; without them the snapshot counts all the same
    page 2.. the tensors, then a table of them

The slot that is written next is never the one that would be loaded. Who writes it takes the commit word out first.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import struct
import time
import zlib
from typing import Any, Iterable, MutableMapping, NamedTuple, Optional, Sequence  # noqa: UP035 (Python 3.9)

FILES_VARIABLE = "UNBROKEN_SNAPSHOT_FILES"
"""The slots of a node: two for each rank, in the order of the local ranks, with colons between."""
CHOSEN_VARIABLE = "UNBROKEN_SNAPSHOT"
"""`ATTEMPT:STEP` of the snapshot that all ranks hold, where this attempt is to start from it."""

PID_VARIABLE = "UNBROKEN_SNAPSHOT_PID"
"""The process of the rank. All others that inherit these variables leave the slots alone."""

NAME = "unbroken-snapshot-"
"""Of the memory; the random word follows."""
PAGE = 4096
DATA_AT = 2 * PAGE
SLOTS = 2
"""For each rank."""
MAX_LOCAL_RANKS = 64
KEPT_FREE = 0.05
"""Of the memory that is free, this part stays free."""

_HEAD = struct.Struct("<8sQQII")
"""Magic, commit word, sequence, length of the JSON and its checksum."""
_COMMIT_AT = 8
_MAGIC = b"UNBSNAP1"
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000)


class Header(NamedTuple):
    """What a slot says of itself. The agent sends it on: only numbers."""

    sequence: int
    rank: int
    world: int
    attempt: int
    step: int
    at: float
    """Unix time."""
    size_bytes: int
    """Of the tensors."""
    table_at: int
    table_bytes: int
    table_sum: int

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.at)


class MemoryRoom(NamedTuple):
    """Whether there is memory for two copies of this rank's state and of its neighbours'."""

    wanted_bytes: int
    """By all ranks of the node, on top of what they have."""
    free_bytes: int

    @property
    def enough(self) -> bool:
        return self.wanted_bytes <= self.free_bytes * (1.0 - KEPT_FREE)


def make_slots(local_ranks: int) -> list[int]:
    """Descriptors of empty slots, which the caller keeps open. Raises OSError where the kernel has no memfds."""
    name = NAME + secrets.token_hex(8)
    made: list[int] = []
    try:
        while len(made) < SLOTS * min(local_ranks, MAX_LOCAL_RANKS):
            made.append(os.memfd_create(name, os.MFD_CLOEXEC))
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        raise
    return made


def addresses(descriptors: Iterable[int]) -> list[str]:
    """`/proc/PID/fd/N#WORD` of slots that this process made: what `Slot` opens."""
    found = []
    for descriptor in descriptors:
        word = os.readlink(f"/proc/self/fd/{descriptor}").partition(NAME)[2].partition(" ")[0]
        found.append(f"/proc/{os.getpid()}/fd/{descriptor}#{word}")
    return found


def is_rank(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process is the rank itself. Where nobody has said which one is, the first that asks is."""
    return environment.setdefault(PID_VARIABLE, str(os.getpid())) == str(os.getpid())


def _opened(path: str, word: str, flags: int) -> int:
    """The memory at `path`, if it is what `unbroken run` made. Nothing else is opened: a device may act on it."""
    looked = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{looked}"
        if not word or os.readlink(own) != f"/memfd:{NAME}{word} (deleted)":
            raise OSError(f"{path} is not the memory that `unbroken run` made for this job")
        return os.open(own, flags | os.O_CLOEXEC)
    finally:
        os.close(looked)


class Slot:
    """One slot, opened by whoever reads or writes it, by its address. Raises OSError, also if another file is there."""

    def __init__(self, address: str, *, writable: bool = False) -> None:
        self.path, _, word = address.partition("#")
        self.descriptor = _opened(self.path, word, os.O_RDWR if writable else os.O_RDONLY)
        self.map: Optional[mmap.mmap] = None  # noqa: UP045

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512

    def reserve(self, size: int) -> mmap.mmap:
        """Memory for `size` bytes, all of it there before it is written to. The slot holds no snapshot then.

        A file that is much too large is cut first. Nobody may use the memory of the map before.
        """
        size = -(-size // PAGE) * PAGE
        length = os.fstat(self.descriptor).st_size
        if self.map is not None and len(self.map) == length and size <= length <= 2 * size:
            return self.map
        self.map = None
        if length > 2 * size:
            os.ftruncate(self.descriptor, size)
        os.posix_fallocate(self.descriptor, 0, size)
        length = os.fstat(self.descriptor).st_size
        self.map = mmap.mmap(self.descriptor, length, flags=mmap.MAP_SHARED | _MAP_POPULATE)
        return self.map

    def mapped(self) -> mmap.mmap:
        """What is there, for reading; private, so that nothing written to it comes into the slot."""
        length = os.fstat(self.descriptor).st_size
        return mmap.mmap(self.descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def header(self) -> Optional[Header]:  # noqa: UP045
        """None where the slot holds no whole snapshot."""
        try:
            page = os.pread(self.descriptor, PAGE, 0)
            return read_header(page, os.fstat(self.descriptor).st_size)
        except (OSError, ValueError, TypeError):
            return None

    # ----- writing: `void`, then the content, then `commit` -----

    def void(self) -> None:
        """From now on the slot holds no snapshot."""
        if os.fstat(self.descriptor).st_size >= DATA_AT:
            os.pwrite(self.descriptor, bytes(8), _COMMIT_AT)
            os.pwrite(self.descriptor, bytes(PAGE), PAGE)

    def commit(self, header: Header) -> None:
        """The content is there: say so. The word that counts is written last."""
        text = json.dumps(header).encode()
        head = _HEAD.pack(_MAGIC, 0, header.sequence, len(text), zlib.crc32(text))
        os.pwrite(self.descriptor, head + text, 0)
        memory = self.map
        assert memory is not None
        ctypes.c_uint64.from_buffer(memory, _COMMIT_AT).value = header.sequence

    def write_sums(self, sequence: int, sums: dict[str, Any]) -> None:
        """Of the content, for the snapshot of this sequence. Of a torn page its checksum does not hold."""
        text = json.dumps(sums, separators=(",", ":")).encode()
        if len(text) <= PAGE - _HEAD.size:
            head = _HEAD.pack(_MAGIC, sequence, sequence, len(text), zlib.crc32(text))
            os.pwrite(self.descriptor, head + text, PAGE)

    def sums(self, sequence: int) -> dict[str, Any]:
        """Empty where there are none (yet)."""
        try:
            text = _checked(os.pread(self.descriptor, PAGE, PAGE), sequence)
            found = json.loads(text) if text else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _checked(page: bytes, sequence: int = 0) -> bytes:
    """The text of a page; empty where it is not whole, or not of this sequence."""
    if len(page) < PAGE:
        return b""
    magic, committed, own, length, checksum = _HEAD.unpack_from(page)
    text = page[_HEAD.size : _HEAD.size + length]
    whole = magic == _MAGIC and committed == own != 0 and sequence in (0, own) and length == len(text)
    return text if whole and zlib.crc32(text) == checksum else b""


def read_header(page: bytes, length: int) -> Optional[Header]:  # noqa: UP045
    """Of a slot, or a copy of one, of this length. Raises ValueError, TypeError."""
    text = _checked(page)
    if not text:
        return None
    try:
        found = json.loads(text)
    except RecursionError:
        return None
    if not isinstance(found, list) or len(found) != len(Header._fields):
        return None
    header = Header(*found)
    numbers = all(type(value) is int for value in header._replace(at=0)) and type(header.at) in (int, float)
    if not numbers or not header.at < float("inf"):
        return None
    inside = DATA_AT + header.size_bytes <= header.table_at and header.table_at + header.table_bytes <= length
    return header if inside and min(header) >= 0 else None


def next_slot(headers: Sequence[Optional[Header]], keep: Optional[int]) -> int:  # noqa: UP045
    """Which slot is written next: an empty one, else the older one, and never `keep`, from which the run came back."""
    others = [number for number in range(len(headers)) if number != keep]

    def age(number: int) -> int:
        header = headers[number]
        return header.sequence if header is not None else 0

    return min(others, key=age)


# ----- which slots are a rank's -----


def addresses_of(files: str, local_rank: int) -> list[str]:
    """The slots of one rank; none where there are too few."""
    found = [address for address in files.split(":") if address]
    return found[SLOTS * local_rank : SLOTS * local_rank + SLOTS] if local_rank >= 0 else []


def chosen(value: str) -> Optional[tuple[int, int]]:  # noqa: UP045
    """(attempt, step) of `UNBROKEN_SNAPSHOT`."""
    attempt, _, step = value.partition(":")
    return (int(attempt), int(step)) if attempt.isdigit() and step.isdigit() else None


# ----- room -----


def room(files: str, local_rank: int, local_world: int, size: int) -> MemoryRoom:
    """For two copies of `size` bytes in each rank of this node, as far as they do not have it yet. Raises OSError."""
    wanted = 0
    for rank in range(max(local_world, local_rank + 1)):
        for address in addresses_of(files, rank):
            wanted += max(0, size - os.stat(address.partition("#")[0]).st_blocks * 512)
    return MemoryRoom(wanted, free_bytes())


def free_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Memory that may be taken: what the kernel has, and what this process' groups are let have."""
    free = 0
    with open(f"{proc}/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    for used, limit, cache in _groups(proc, cgroups):
        free = min(free, max(0, limit - used + cache))
    return free


def _groups(proc: str, cgroups: str) -> list[tuple[int, int, int]]:
    """(used, limit, what of it is page cache of files) of each memory group above this process."""
    found: list[tuple[int, int, int]] = []
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names, cache = cgroups, ("memory.current", "memory.max"), ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root = f"{cgroups}/memory"
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes")
            cache = ("total_inactive_file", "total_active_file")
        else:
            continue
        while True:
            one = _group(root + path.rstrip("/"), names, cache)
            if one is not None:
                found.append(one)
            if path in ("", "/"):
                break
            path = path.rpartition("/")[0]
    return found


def _group(folder: str, names: tuple[str, str], cache: tuple[str, str]) -> Optional[tuple[int, int, int]]:  # noqa: UP045
    try:
        values = []
        for name in names:
            with open(f"{folder}/{name}", encoding="ascii") as file:
                values.append(int(file.read()))
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            stat = dict(line.split() for line in file)
        return values[0], values[1], sum(int(stat.get(name, 0)) for name in cache)
    except (OSError, ValueError):  # no limit ("max"), or not readable
        return None
