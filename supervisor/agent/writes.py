"""What the ranks of this node wrote: from their own records and their open files; and the job's record of it.

The job's record has a file for each node in the job folder (`written/<node>.json`). From it another node, and the job's
next life after a requeue, know what the job wrote before.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from recovery.provenance import Item, Provenance, Write
from supervisor.agent.procfs import descendants, files_open_for_writing
from supervisor.files import start_time

FOLDER: Final = "written"
READ_BYTES: Final = 4 << 20
"""Of all records in one look."""
RECORD_BYTES: Final = 64 << 20
NODES_READ: Final = 4096
ATTEMPTS_READ: Final = 2
"""The newest ones, but for the first look."""
_KINDS: Final = frozenset("wdrlhxi")

log = logging.getLogger("unbroken.agent")


class RankRecords:
    """Follows the records that ranks write in the local folder (`attempts/<n>/rank<r>.writes`)."""

    def __init__(self, attempts: Path) -> None:
        self._attempts = attempts
        self._read: dict[int, int] = {}
        """Inode of a record -> how much of it was read."""
        self._looks = 0

    def new(self) -> list[Write]:
        """What was added since the last time, in the order in which it was done."""
        left = READ_BYTES
        found: list[Write] = []
        there: set[int] = set()
        for path in self._records():
            try:
                with open(path, "rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    there.add(inode)
                    file.seek(self._read.get(inode, 0))
                    data = file.read(left)
            except OSError:
                continue
            whole = data.rfind(b"\n") + 1
            self._read[inode] = self._read.get(inode, 0) + whole
            left -= whole
            found += filter(None, map(parsed, data[:whole].splitlines()))
        self._looks += 1
        self._read = {inode: at for inode, at in self._read.items() if inode in there or self._looks > 1}
        while len(self._read) > 50_000:
            del self._read[next(iter(self._read))]
        found.sort(key=lambda write: write.at_ns)
        return _canonical(found)

    def _records(self) -> list[Path]:
        """Of the oldest attempt first, and of one rank the part that was full first."""
        try:
            numbers = sorted(int(name) for name in os.listdir(self._attempts) if name.isdigit())
        except OSError:
            return []
        records: list[Path] = []
        for number in numbers if self._looks == 0 else numbers[-ATTEMPTS_READ:]:
            try:
                names = os.listdir(self._attempts / str(number))
            except OSError:
                continue
            full = sorted(name for name in names if name.endswith(".writes.1"))
            records += [
                self._attempts / str(number) / name
                for name in (*full, *sorted(name for name in names if name.endswith(".writes")))
            ]
        return records


def parsed(line: bytes) -> Write | None:
    """A line of a record; None when it is damaged, or when the file's name is no UTF-8."""
    try:
        at_ns, pid, kind, path, more = json.loads(line)
        path.encode()
        if isinstance(more, list) and kind in "rh":
            more[0].encode()
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    sound = isinstance(at_ns, int) and isinstance(pid, int) and kind in _KINDS and path.startswith("/")
    return Write(at_ns, pid, kind, path, more) if sound else None


def _canonical(writes: list[Write]) -> list[Write]:
    """Under the names that the files have without links; of what is written, its last part is followed, too."""
    folders: dict[str, str] = {}

    def placed(path: str) -> str:
        folder, name = os.path.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            return os.path.realpath(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        return os.path.join(folders[folder], name)

    found: list[Write] = []
    for write in writes:
        path, more = placed(write.path), write.more
        if write.kind in "wi" and os.path.islink(path):
            path = os.path.realpath(path)
        elif write.kind in "rh" and isinstance(more, list):
            more = [placed(str(more[0])), *more[1:]]
        found.append(write._replace(path=path, more=more))
    return found


class OpenFiles:
    """The files that ranks, and the processes that they started, have open for writing."""

    def __init__(self) -> None:
        self._of: dict[int, set[str]] = {}

    def forget(self) -> None:
        """Before each look."""
        self._of.clear()

    def of(self, pid: int) -> set[str]:
        if pid not in self._of:
            self._of[pid] = set(files_open_for_writing(pid))
        return self._of[pid]

    def began_ns(self, pid: int) -> int:
        """When the process began, Unix time; now when it is gone."""
        try:
            ticks = start_time(pid)
        except OSError:
            ticks = None
        if ticks is None:
            return time.time_ns()
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return time.time_ns() - since_boot_ns + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    def has(self, pid: int, path: str) -> bool:
        return path in self.of(pid)

    def of_family(self, pid: int) -> Iterable[tuple[int, str]]:
        for one in (pid, *descendants(pid)):
            for path in self.of(one):
                yield one, path


class JobRecord:
    """This node's part of the job's record, and the parts of the other nodes."""

    def __init__(self, job_dir: Path, node: str) -> None:
        self._folder = job_dir / FOLDER
        self._own = self._folder / f"{node}.json"
        self._kept = -1
        self._known: dict[str, tuple[int, int, int]] = {}
        """Part -> its inode, size and time when it was read last."""
        self._problems: dict[str, str] = {}
        """Part -> why it could not be read last: logged once."""

    def keep(self, provenance: Provenance) -> str:
        """Write this node's part if it has changed. Why that failed, in words; empty when it did not."""
        changes = provenance.changes
        if changes == self._kept:
            return ""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _replace(self._own, msgspec.json.encode(provenance.items))
        except OSError as error:
            return f"which files this job wrote cannot be kept in {self._own}: {error.strerror}"
        self._kept = changes
        return ""

    def read_all(self, provenance: Provenance) -> None:
        """What every node of the job wrote."""
        try:
            names = sorted(os.listdir(self._folder))[:NODES_READ]
        except OSError:
            return
        for name in names:
            if name.endswith(".json"):
                provenance.learn(self._read(self._folder / name))

    def of(self, node: str) -> dict[str, Item]:
        self._known.pop(str(self._folder / f"{node}.json"), None)
        return self._read(self._folder / f"{node}.json")

    def _read(self, path: Path) -> dict[str, Item]:
        """Nothing where it is unchanged since it was read, or not ours."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                about = os.fstat(file.fileno())
                version = (about.st_ino, about.st_size, about.st_mtime_ns)
                trusted = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
                if not trusted or about.st_size > RECORD_BYTES or self._known.get(str(path)) == version:
                    return {}
                self._known[str(path)] = version
                items = msgspec.json.decode(file.read(), type=dict[str, Item])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if self._problems.get(str(path)) != str(error):
                log.warning("the record %s cannot be read: %s", path, error)
            self._problems[str(path)] = str(error)
            return {}
        self._problems.pop(str(path), None)
        return items


def _replace(path: Path, data: bytes) -> None:
    """As `write_atomically`, and only this user may write it: the job acts on what it says."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
