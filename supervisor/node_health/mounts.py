"""The storage probe's side of its child process: questions to file systems, and how long they have been open.

One child for all mounts, one open question for each: a mount that does not answer is never asked again before it has.
The child stays while a question is open (it may not be killable) and still asks the others; with none it is let go, so
that between looks nothing of it is left.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from supervisor.node_health.contract import ProbeContext

TABLE_LIMIT: Final = 1 << 20
"""A node with thousands of container mounts has a table of some hundred KiB."""
_NETWORK: Final = frozenset(
    "nfs nfs4 lustre gpfs wekafs weka beegfs ceph cifs smb3 glusterfs 9p afs orangefs pvfs2 panfs vastfs".split()
)
_LOCAL_FUSE: Final = tuple(
    (
        "fuse.lxcfs fuse.portal fuse.gvfsd fuse.snapfuse fuse.squashfuse fuse.fuse-overlayfs fuse.rootlesskit"
        " fuse.vmware- fuse.archivemount fuse.encfs fuse.gocryptfs fuse.unionfs fuse.mergerfs fuse.AppImage fuse.xrdp"
    ).split()
)
"""How the names of FUSE file systems without a server far away begin; all others are taken to have one."""
_JOURNALED: Final = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}
_FAILED_OPTIONS: Final = {"emergency_ro", "shutdown"}
"""What ext4 says of itself since Linux 6.12 once an error made it stop."""


class Mount(NamedTuple):
    point: str
    device: str
    """`major:minor`: the same for every mount of one file system."""
    fstype: str
    source: str
    options: frozenset[str]
    """Of this mount."""
    super_options: frozenset[str]
    """Of the file system."""

    @property
    def read_only(self) -> bool:
        return "ro" in self.options or "ro" in self.super_options or bool(_FAILED_OPTIONS & self.super_options)

    @property
    def failed(self) -> bool:
        """Turned read-only by the kernel after an error: asked for read and write, and does not have it."""
        if _FAILED_OPTIONS & self.super_options:
            return True
        return self.fstype in _JOURNALED and "rw" in self.options and "ro" in self.super_options

    @property
    def disk(self) -> bool:
        """A file system of this node that is written to."""
        return self.fstype in _JOURNALED and not self.read_only

    @property
    def network(self) -> bool:
        """Whether a server far away answers for it."""
        if self.fstype.startswith("fuse."):
            return not self.fstype.startswith(_LOCAL_FUSE)
        return self.fstype in _NETWORK


def read_mounts(place: ProbeContext) -> list[Mount] | None:
    """None when there is no table to be read."""
    for path in ("proc/self/mountinfo", "proc/1/mountinfo"):
        text = place.text(path, TABLE_LIMIT)
        if text:
            return parse_mountinfo(text) or None  # there is always a root
    if place.live:
        return None
    text = place.text("proc/mounts", TABLE_LIMIT) or place.text("proc/self/mounts", TABLE_LIMIT)
    return (parse_mounts(text) or None) if text else None


def parse_mountinfo(text: str) -> list[Mount]:
    """proc(5): `36 35 98:0 /root /point rw,noatime [optional fields] - ext3 /dev/root rw,errors=continue`."""
    found = []
    for line in text.split("\n"):
        before, dash, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or not more[0]:
            continue
        found.append(
            Mount(
                point=_unescaped(fields[4]),
                device=fields[2],
                fstype=more[0],
                source=_unescaped(more[1]) if len(more) > 1 else "",
                options=frozenset(fields[5].split(",")),
                super_options=frozenset(more[2].split(",")) if len(more) > 2 else frozenset(),
            )
        )
    return found


def parse_mounts(text: str) -> list[Mount]:
    """`/proc/mounts`, where a captured tree has no better: `/dev/root / ext4 rw,relatime 0 0`."""
    found = []
    for number, line in enumerate(text.split("\n")):
        fields = line.split(" ")
        if len(fields) >= 4:
            options = frozenset(fields[3].split(","))
            found.append(
                Mount(_unescaped(fields[1]), f"?:{number}", fields[2], _unescaped(fields[0]), options, options)
            )
    return found


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word) if "\\" in word else word


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds `path` (without following links); the last one at a point hides those before it."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_at(point: str, mounts: Sequence[Mount]) -> Mount | None:
    """What is mounted exactly there, but for an automounter that still waits."""
    at = point.rstrip("/") or "/"
    return next((mount for mount in reversed(mounts) if mount.point == at and mount.fstype != "autofs"), None)


def automounted(point: str, mounts: Sequence[Mount]) -> bool:
    """Whether an automounter has it: then it comes when it is used, and may go when it is not."""
    return any(
        mount.fstype == "autofs" and (point == mount.point or point.startswith(mount.point.rstrip("/") + "/"))
        for mount in mounts
    )


CHILD: Final = Path(__file__).with_name("mount_child.py")
QUESTIONS: Final = 64
LINE_LIMIT: Final = 16 * 1024

Kind = Literal["stat", "real", "write"]


class MountSpace(NamedTuple):
    """What statvfs says, and what the path is without its links."""

    size_bytes: int
    free_bytes: int
    files: int
    files_available: int
    real_path: str


class MountAnswer(NamedTuple):
    error: int = 0
    """errno, 0 when it went well."""
    space: MountSpace | None = None
    lost: bool = False
    """The child ended before it could tell."""


class MountQuestion(NamedTuple):
    key: str
    path: str
    since: float
    """Monotonic."""
    pid: int
    tid: int = 0
    """Thread that waits; 0: it was not begun yet."""


class Asker:
    def __init__(self, child: Path = CHILD) -> None:
        self.open: dict[str, MountQuestion] = {}
        """Key -> the question that was not answered yet."""
        self.answers: dict[str, MountAnswer] = {}
        """Those since the last `clear`."""
        self.problem = ""
        """Why nothing can be asked."""
        self._path = child
        self._child: subprocess.Popen[bytes] | None = None
        self._numbers: dict[str, str] = {}
        self._count = 0
        self._rest = b""

    def ask(self, key: str, kind: Kind, path: str) -> None:
        """Ask unless a question of this key is open."""
        if key in self.open or len(self.open) >= QUESTIONS or not self._start():
            return
        assert self._child is not None
        assert self._child.stdin is not None
        self._count += 1
        number = str(self._count)
        try:
            self._child.stdin.write(f"{number} {kind} {os.fsencode(path).hex()}\n".encode())
            self._child.stdin.flush()
        except OSError:
            self._ended()
            return
        self._numbers[number] = key
        self.open[key] = MountQuestion(key, path, time.monotonic(), self._child.pid)

    def collect(self, patience_s: float) -> None:
        """Take answers until those to the questions that are still young are all there, or they are young no more."""
        while self._child is not None:
            now = time.monotonic()
            waits = [patience_s - (now - question.since) for question in self.open.values()]
            wait_s = max((left for left in waits if left > 0), default=0.0)
            if not self._read(wait_s) and wait_s <= 0:
                break
            if not self.open:
                break
        if not self.open:
            self._drop()

    def clear(self) -> None:
        self.answers.clear()

    def _start(self) -> bool:
        if self._child is not None:
            return True
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        except OSError as error:
            self.problem = f"no process can be started to ask file systems: {error.strerror}"
            return False
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self.problem, self._rest = "", b""
        return True

    def _read(self, wait_s: float) -> bool:
        """Take what the child says within `wait_s`; whether it said anything."""
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, wait_s) * 1000):
            return False
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._ended()
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_LIMIT]
        for line in lines:
            self._take(line.decode(errors="replace").split(" "))
        return True

    def _take(self, words: list[str]) -> None:
        number, what, *more = words
        key = self._numbers.get(number)
        question = self.open.get(key) if key is not None else None
        if key is None or question is None:
            return
        if what == "began":
            self.open[key] = question._replace(tid=int(more[0]))
            return
        del self._numbers[number], self.open[key]
        if what == "error":
            self.answers[key] = MountAnswer(error=int(more[0]))
        elif len(more) == 5:
            size, free, files, files_available = map(int, more[:4])
            real_path = os.fsdecode(bytes.fromhex(more[4]))
            self.answers[key] = MountAnswer(space=MountSpace(size, free, files, files_available, real_path))
        else:
            self.answers[key] = MountAnswer()

    def _ended(self) -> None:
        """The child is gone, and with it what it was asked."""
        for key in self.open:
            self.answers[key] = MountAnswer(lost=True)
        self.open.clear()
        self._drop()

    def _drop(self) -> None:
        """Close its standard input, which ends it."""
        child, self._child = self._child, None
        self._numbers.clear()
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not written yet cannot be any more
                pass
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # subprocess itself looks after it when the next one is started
