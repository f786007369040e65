"""Which files are this job's: those that its ranks were seen to write, and that nobody has touched since.

`Provenance` takes what ranks did (from `supervisor.training.writes` and open descriptors) and looks at what is there
now. A name proves nothing here. A file without proof is not ours: it is not offered, read, moved or copied.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import Frozen

_AT_FDCWD: Final = -100
_NOT_THROUGH_LINKS: Final = 0x100
_BORN: Final = 0x800
_SIZE: Final = 256
_MASK: Final = struct.Struct("=I")
_TIME: Final = struct.Struct("=qI")
_BORN_AT: Final = 80

_libc = ctypes.CDLL(None, use_errno=True)


class Birth(NamedTuple):
    inode: int
    device: int
    born_ns: int
    """0 where the file system does not tell."""


def born(path: str) -> Birth:
    """Links are not followed; zeros for nothing there."""
    try:
        about = os.lstat(path)
    except OSError:
        return Birth(0, 0, 0)
    buffer = ctypes.create_string_buffer(_SIZE)
    statx = getattr(_libc, "statx", None)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), _NOT_THROUGH_LINKS, _BORN, buffer) != 0:
        return Birth(about.st_ino, about.st_dev, 0)
    (mask,) = _MASK.unpack_from(buffer)
    seconds, ns = _TIME.unpack_from(buffer, _BORN_AT)
    return Birth(about.st_ino, about.st_dev, seconds * 1_000_000_000 + ns if mask & _BORN else 0)


Kind = Literal["file", "folder", "link"]
ITEMS_KEPT: Final = 20_000
TREE_ENTRIES: Final = 20_000
DEPTH: Final = 6
REMEMBERED: Final = 1000
FORGET_S: Final = 600.0
"""What was opened and not changed is forgotten after this."""
ABSENT_S: Final = 30.0
"""Likewise where nothing is to be seen."""
DYING_NS: Final = 3_000_000_000
"""A rank that died so shortly after something was written in the folder that it was filling, was writing it."""
UNSEEN: Final = re.compile(r".*\.(?:safetensors|model)|(?:tokenizer[\w.-]*|vocab)\.json|(?:merges|vocab)\.txt")
"""What libraries in Rust and C++ write beside what is seen: weights, tokenizers."""
END_SLACK_NS: Final = 1_000_000_000
OPENS_NS: Final = 75_000_000
"""A new file is there so soon after the record of its `open`."""
TICK_NS: Final = 20_000_000
"""File systems take the time of the last tick."""


class FileState(NamedTuple):
    """The file, folder or link at a path, as it is now."""

    kind: Kind | Literal["other"]
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    uid: int


Look = Callable[[str], "FileState | None"]


class Write(NamedTuple):
    """One thing that a rank did: a line of its record (`supervisor.training.writes` describes kinds and `more`)."""

    at_ns: int
    pid: int
    kind: str
    path: str
    more: object = None


class Item(Frozen, frozen=True, kw_only=True):
    """Something that a rank of this job wrote or made, as it was when that was done."""

    kind: Kind
    at_ns: int
    """When it was done last."""
    inode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    times: int = 1
    """How often it was written, each time from the start or in addition."""
    settled: bool = False
    """Seen after it was closed: whatever changes it now is somebody else."""
    shared: bool = False
    """A folder in which something was found that is not ours: for good."""
    by: str = ""
    """Node and pid of the process that wrote it first."""
    copy_of: str = ""
    """A safe copy that the agent made of this file."""

    @property
    def version(self) -> tuple[int, int, int]:
        return (self.inode, self.size, self.mtime_ns)


class _Pending(NamedTuple):
    pid: int
    before: object
    """The file that was there before it was opened; None: nothing; True: whatever is there is ours."""
    renamed_from: str = ""
    inode: int = 0
    """Of the file that the rank has opened, where that is known."""
    since_ns: int = 0
    """When it was opened first, of several times that nobody has looked at yet."""


def look(path: str) -> FileState | None:
    """Links are not followed."""
    try:
        about = os.lstat(path)
    except (OSError, ValueError):
        return None
    mode = about.st_mode
    kind: Kind | Literal["other"] = (
        "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "other"
    )
    return FileState(kind, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_uid)


class Provenance:
    """Items by path. Not thread-safe; never raises OSError."""

    def __init__(self, node: str = "", look: Look = look) -> None:
        self._node = node
        self._look = look
        self.items: dict[str, Item] = {}
        self._pending: dict[str, _Pending] = {}
        self._last: dict[int, str] = {}
        """Pid -> the path that it wrote last."""
        self._ended: dict[int, int] = {}
        """Pid of a rank -> when it ended."""
        self._gone: dict[str, int] = {}
        """Path -> when a rank renamed or removed what it had written there."""
        self.changes = 0
        """Grows with everything that is worth being kept."""

    def copy(self) -> Provenance:
        """As it is now, for another thread."""
        other = Provenance(self._node, self._look)
        other.items, other._pending, other._last = dict(self.items), dict(self._pending), dict(self._last)
        other._ended = dict(self._ended)
        return other

    # ----- what ranks did -----

    def note(self, writes: Iterable[Write]) -> None:
        """Record what ranks did, in that order. What was recorded before changes nothing."""
        for write in writes:
            self._last.pop(write.pid, None)
            self._last[write.pid] = write.path
            if write.kind == "w":
                self._written(write)
            elif write.kind == "i":
                self._is_open(write)
            elif write.kind == "d":
                self._new(write.path, write, "folder", None)
            elif write.kind == "l":
                self._new(write.path, write, "link", None)
            elif write.kind == "x":
                self._removed(write)
            elif write.kind in ("r", "h") and isinstance(write.more, list) and len(write.more) == 4:
                self._renamed(write, str(write.more[0]), tuple(write.more[1:]))
        while len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def ended(self, pid: int, at_ns: int) -> None:
        self._ended[pid] = at_ns
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def opened(self, path: str, pid: int, began_ns: int, now_ns: int) -> None:
        """A process that began at `began_ns`, a rank or what it started, was seen with the file open for writing."""
        held, found = self.items.get(path), self._look(path)
        if found is None or found.kind != "file":
            return
        if held is not None and (path in self._pending or (found.inode, found.size, found.mtime_ns) == held.version):
            return
        changed = found.mtime_ns >= began_ns
        self._written(Write(now_ns, pid, "w", path, True if changed else [found.inode, found.size, found.mtime_ns]))

    def _written(self, write: Write) -> None:
        self._new(write.path, write, "file", write.more)

    def _is_open(self, write: Write) -> None:
        waiting = self._pending.get(write.path)
        if waiting is not None and waiting.pid == write.pid and isinstance(write.more, list) and write.more:
            self._pending[write.path] = waiting._replace(inode=write.more[0])

    def _new(self, path: str, write: Write, kind: Kind, before: object) -> None:
        held = self.items.get(path)
        if (held is not None and held.at_ns >= write.at_ns) or self._gone.get(path, 0) >= write.at_ns:
            return
        times, by = 1, f"{self._node} {write.pid}"
        if held is not None and held.kind == kind == "file":
            times, by = held.times + (1 if held.settled else 0), held.by
        inode = before[0] if isinstance(before, list) and before and isinstance(before[0], int) else 0
        since_ns = write.at_ns
        if path in self._pending and kind == "file":
            before = self._pending[path].before  # of the first of several that nobody has looked at yet
            inode, since_ns = self._pending[path].inode or inode, self._pending[path].since_ns
        pending = _Pending(write.pid, before, inode=inode, since_ns=since_ns)
        self._put(path, Item(kind=kind, at_ns=write.at_ns, times=times, by=by), pending)

    def _removed(self, write: Write) -> None:
        held = self.items.get(write.path)
        if held is None or held.at_ns <= write.at_ns:
            self._gone[write.path] = write.at_ns
            if held is not None and held.kind != "folder":  # what is below a folder tells by itself
                self.items.pop(write.path)
                self._pending.pop(write.path, None)
                self.changes += 1

    def _put(self, path: str, item: Item, pending: _Pending | None) -> None:
        self.items.pop(path, None)
        self.items[path] = item
        if pending is not None:
            self._pending[path] = pending
        else:
            self._pending.pop(path, None)
        self.changes += 1

    def _renamed(self, write: Write, target: str, was: tuple[object, ...]) -> None:
        source, held, there = write.path, self.items.get(write.path), self.items.get(target)
        if held is not None and held.at_ns > write.at_ns:
            return  # noted before, and written again since
        if there is not None and there.at_ns >= write.at_ns:
            self._removed(write)  # noted before
            return
        waiting = self._pending.get(source)
        if held is not None and not _is_it(held, waiting, was):
            held = None  # somebody else's had taken its place
        if write.kind == "r":
            self._move_below(source, target)
            self.items.pop(source, None)
            self._pending.pop(source, None)
            self._gone[source] = write.at_ns
        self.items.pop(target, None)
        self._pending.pop(target, None)
        self.changes += 1
        if held is not None:
            inode, size, mtime_ns = (value if isinstance(value, int) else 0 for value in was)
            item = msgspec.structs.replace(
                held, at_ns=write.at_ns, inode=inode, size=size, mtime_ns=mtime_ns, settled=False
            )
            self._put(target, item, _Pending(waiting.pid if waiting else write.pid, True, source))

    def _move_below(self, source: str, target: str) -> None:
        inside = [path for path in self.items if path.startswith(source + "/")]
        moved = [(target + path[len(source) :], self.items.pop(path), self._pending.pop(path, None)) for path in inside]
        for path in [path for path in self.items if path.startswith(target + "/")]:
            del self.items[path]  # what was there before went with it, or the rename has failed
            self._pending.pop(path, None)
        for path, item, waiting in moved:
            self._put(path, item, waiting)

    def adopt(self, path: str, at_ns: int, copy_of: str = "") -> None:
        """The agent itself has put it there."""
        found = self._look(path)
        if found is not None:
            self._put(path, _settled(Item(kind=_kind(found), at_ns=at_ns, copy_of=copy_of), found), None)

    def learn(self, items: dict[str, Item]) -> None:
        """Take items from another record of the same job; the newer item counts."""
        for path, item in items.items():
            held = self.items.get(path)
            if held is None or (path not in self._pending and _age(held) < _age(item)):
                self.items[path] = item
                self.changes += 1

    # ----- what became of it -----

    def settle(self, is_open: Callable[[int, str], bool], now_ns: int) -> None:
        """Look at what was written since the last time. `is_open`: whether a process has the file open for writing."""
        for path, waiting in list(self._pending.items()):
            item, found = self.items.get(path), self._look(path)
            writes = item is not None and item.kind == "file" and is_open(waiting.pid, path)
            if item is None:
                del self._pending[path]
            elif not self._is_done(item, waiting, found, writes) or not _is_opened_one(path, item, waiting, writes):
                patience_s = ABSENT_S if found is None else FORGET_S
                if now_ns - item.at_ns > patience_s * 1e9 and not writes:
                    del self._pending[path]
                    self._return(path, item, waiting)
            elif found is not None:
                known = self.changes + (0 if writes and item.inode else 1)  # that it grows is not worth being kept
                now = msgspec.structs.replace(_settled(item, found), settled=not writes)
                still = waiting._replace(before=True, renamed_from="", inode=found.inode)
                self._put(path, now, None if not writes else still)
                self.changes = known
        self._bound()

    @staticmethod
    def _is_done(item: Item, waiting: _Pending, found: FileState | None, is_open: bool) -> bool:
        """Whether the file that is there is the one that the rank made."""
        if found is None or found.kind != item.kind:
            return False
        if waiting.renamed_from:
            same = (found.inode, found.size, found.mtime_ns) == item.version
            return same or (found.inode == item.inode and (item.kind == "folder" or is_open))
        return [found.inode, found.size, found.mtime_ns] != waiting.before

    def _return(self, path: str, item: Item, waiting: _Pending) -> None:
        """The rename has failed: the source is as it was."""
        del self.items[path]
        found = self._look(waiting.renamed_from) if waiting.renamed_from else None
        if found is not None and waiting.renamed_from not in self.items:
            item = msgspec.structs.replace(item, settled=True)
            if (found.inode, found.size, found.mtime_ns) == item.version:
                self.items[waiting.renamed_from] = item
        self.changes += 1

    def _bound(self) -> None:
        """Forget what no longer exists first, then what was written longest ago."""
        too_many = len(self.items) - ITEMS_KEPT
        if too_many <= 0:
            return
        gone = [path for path in self.items if self._look(path) is None]
        oldest = sorted(self.items, key=lambda path: self.items[path].at_ns)
        for path in [*gone, *oldest][: max(too_many, ITEMS_KEPT // 10)]:
            self.items.pop(path, None)
            self._pending.pop(path, None)
        self.changes += 1

    # ----- what is ours -----

    def owns(self, path: str) -> bool:
        """Whether the file there now is as our ranks left it (a folder: whether they made it)."""
        item, found = self.items.get(path), self._look(path)
        return item is not None and found is not None and _same(item, found)

    def why_not_ours(self, path: str) -> str:
        """Why a checkpoint (a file, or a folder with everything in it) is not ours alone; empty when it is."""
        item, found = self.items.get(path), self._look(path)
        if item is None or found is None:
            return "no rank of this job was seen to write it"
        if not _same(item, found):
            return "somebody else has replaced or changed it since this job wrote it"
        if item.kind != "folder":
            return ""
        if item.shared:
            return "something in it is not this job's"
        return self._why_shared(path, item, found)

    def why_not_offered(self, path: str) -> str:
        """Why a script may not be sent to it: of a folder, what others added to it is no reason."""
        item, found = self.items.get(path), self._look(path)
        if item is None or item.kind != "folder" or found is None or not _same(item, found):
            return self.why_not_ours(path)
        for inside, known in self.items.items():
            if inside.startswith(path + "/") and (there := self._look(inside)) is not None and not _same(known, there):
                return f"{inside[len(path) + 1 :]} in it was changed by somebody else"
        return ""

    def _why_shared(self, folder: str, item: Item, about: FileState) -> str:
        strange: list[tuple[str, FileState]] = []
        last_ns, again = 0, False
        for number, path in enumerate(_below(folder)):
            found = self._look(path)
            if number >= TREE_ENTRIES:
                return "it holds more than is looked at"
            if found is None:
                continue
            known = self.items.get(path)
            if known is None:
                strange.append((path, found))
            elif _same(known, found):
                last_ns = max(last_ns, known.ctime_ns)
                again |= known.times > 1
            else:
                self._put(folder, msgspec.structs.replace(item, shared=True), None)
                return f"{path[len(folder) + 1 :]} in it was changed by somebody else"
        died_ns = self._died_in(folder)
        if any(died_ns - DYING_NS <= found.ctime_ns <= died_ns + END_SLACK_NS for _, found in strange):
            last_ns = max(last_ns, died_ns + END_SLACK_NS)
        for path, found in strange:
            beside = (
                found.kind == "file" and UNSEEN.fullmatch(os.path.basename(path)) is not None and found.uid == about.uid
            )
            if again or not beside or found.ctime_ns > last_ns:
                return f"no rank of this job was seen to write {path[len(folder) + 1 :]} in it"
        for path, found in strange:  # while the folder was filled for the first and only time
            self._put(path, _settled(Item(kind=_kind(found), at_ns=item.at_ns), found), None)
        return ""

    def _died_in(self, folder: str) -> int:
        """When a rank ended whose last write was in this folder; 0 for none."""
        inside = (pid for pid, path in self._last.items() if path == folder or path.startswith(folder + "/"))
        return max((self._ended.get(pid, 0) for pid in inside), default=0)


def _is_it(item: Item, waiting: _Pending | None, was: tuple[object, ...]) -> bool:
    """Whether the file that was renamed is the one that a rank had written."""
    if waiting is not None and waiting.before == list(was):
        return False  # opened, and not changed
    if waiting is not None and waiting.inode and not waiting.renamed_from and waiting.inode != was[0]:
        return False  # somebody else's is in its place
    if not item.inode:
        return True
    return item.inode == was[0] and (item.kind != "file" or not item.settled or item.version == was)


def _is_opened_one(path: str, item: Item, waiting: _Pending, is_open: bool) -> bool:
    """Whether a file is the one that the rank has opened: another may have been put in its place since."""
    if item.kind != "file" or waiting.renamed_from or is_open:
        return True
    about = born(path)
    if waiting.inode:
        return about.inode == waiting.inode
    if waiting.before is not None or not about.born_ns or not os.major(about.device):
        return True  # file systems of other machines, and in memory, have a clock of their own, or no such time
    return waiting.since_ns - TICK_NS <= about.born_ns <= waiting.since_ns + OPENS_NS


def _age(item: Item) -> tuple[int, bool]:
    return (item.at_ns, item.settled)


def _kind(found: FileState) -> Kind:
    return found.kind if found.kind != "other" else "file"


def _settled(item: Item, found: FileState) -> Item:
    return msgspec.structs.replace(
        item, inode=found.inode, size=found.size, mtime_ns=found.mtime_ns, ctime_ns=found.ctime_ns, settled=True
    )


def _same(item: Item, found: FileState) -> bool:
    if item.kind != found.kind or item.inode != found.inode:
        return False
    return item.kind == "folder" or not item.settled or item.version == (found.inode, found.size, found.mtime_ns)


def _below(folder: str) -> Iterator[str]:
    pending = [(folder, 0)]
    while pending:
        current, depth = pending.pop()
        try:
            with os.scandir(current) as entries:
                listing = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError:
            continue
        for path, is_folder in listing:
            yield path
            if is_folder and depth < DEPTH:
                pending.append((path, depth + 1))
