"""The ranks' output on the user's terminal, as fast as torchrun would show it.

Ranks write to files; `Terminal` copies them to stdout and stderr as raw bytes. Whole lines go out at once, the start of
a line waits a moment for its end (so that two ranks do not share one line), and is shown all the same when the end does
not come: progress bars live on such lines. What waits stays in its file: a blocked terminal costs no memory.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import select
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.paths import LocalPaths

# ----- output that would look like a line of ours is marked with the rank that wrote it -----
#
# Our lines begin with `unbroken:`. A rank's line that begins so, or that moves the cursor and then says so, gets its
# rank before the word; nothing else of it is changed. Control sequences and invisible characters hide nothing. (Who may
# write to a terminal may move up and overwrite what stands there: against that only a file helps.)

WORD: Final = b"unbroken:"
_CONTROL: Final = (
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|\x1b"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
)
_INVISIBLE: Final = rb"\xc2\xad|\xe2\x80[\x8b-\x8f\xaa-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf|\xef\xb8[\x80-\x8f]"
_BETWEEN: Final = b"(?:" + _CONTROL + b"|" + _INVISIBLE + b"){0,64}"
_CUT: Final = rb"(?:\x1b\[[0-?]{0,60}[ -/]{0,9}|\x1b[ -/]{0,9}|\xe2[\x80\x81]?|\xef[\xbb\xb8]?|\xc2)?"
"""A control sequence or an invisible character of which the end is yet to come."""
_CUT_AT_END: Final = re.compile(_CUT + rb"\Z")
_LETTERS: Final = [bytes([letter]) for letter in WORD]
_WORD: Final = re.compile(_BETWEEN.join(_LETTERS))
_BEGUN: Final = re.compile(
    b"(?:".join(letter + _BETWEEN for letter in _LETTERS[:-1]) + b")?" * (len(_LETTERS) - 2) + _CUT + rb"\Z"
)
"""The word's beginning at the end of what there is."""
_COLOUR: Final = re.compile(rb"\x1b\[[0-9;:]*m")
_ANY: Final = re.compile(_CONTROL)
_UNSEEN: Final = re.compile(b"(?:" + _CONTROL + b"|" + _INVISIBLE + rb"|\s)+")


class Marker:
    """What one stream of a rank is shown as; lines may come in pieces."""

    def __init__(self, rank: int) -> None:
        self._mark = b"[rank%d] " % rank
        self._text = False
        """The line so far shows something."""
        self._moved = False
        """The cursor was moved in it: what comes next may be shown at its beginning."""
        self._cut = b""

    def shown(self, data: bytes) -> bytes:
        """`data` with the mark where it is needed."""
        parts: list[bytes] = []
        at = 0
        for match in self._words(data):
            start = match.start()
            self._pass(data[at:start])
            parts.append(data[at:start])
            hidden = match[0] != WORD[: len(match[0])]
            if hidden or self._moved or not self._text:
                parts.append(self._mark)
            at = start
        self._pass(data[at:])
        parts.append(data[at:])
        return b"".join(parts)

    @staticmethod
    def _words(data: bytes) -> list[re.Match[bytes]]:
        found = list(_WORD.finditer(data))
        begun = _BEGUN.search(data, max(found[-1].end() if found else 0, data.rfind(b"\n") + 1))
        return [*found, begun] if begun is not None else found

    def _pass(self, data: bytes) -> None:
        """What is before the next place that is looked at."""
        if not data:
            return
        data = self._cut + data
        line = data[data.rfind(b"\n") + 1 :]
        if len(line) < len(data):
            self._text = self._moved = False
        end = _CUT_AT_END.search(line)
        self._cut = end[0] if end is not None else b""
        line = line[: len(line) - len(self._cut)]
        self._text = self._text or bool(_UNSEEN.sub(b"", line))
        self._moved = self._moved or _ANY.search(_COLOUR.sub(b"", line)) is not None


# ----- the terminal -----

HOLD_S = 0.02
"""How long the start of a line waits for its end."""

CHUNK = 65536
_AT_ONCE = 4096
"""PIPE_BUF: a pipe that polls writable takes this much without blocking."""

_RESCAN_S = 0.25
_POLL_S = 0.02
"""Seconds between looks at the files where inotify does not work."""

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_IN_Q_OVERFLOW = 0x4000
_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000
_EVENT = struct.Struct("iIII")
UNSEEN, ABSENT = -1, -2


class Changes:
    """Wakes a `poll` when watched files change (inotify). Without inotify `fd` is -1 and one must look regularly."""

    def __init__(self) -> None:
        self.fd = -1
        self._libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(self._libc, "inotify_init1"):
            self.fd = self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)

    def watch(self, path: Path, *, folder: bool = False) -> int:
        """Wake on new content of a file, or on new names in a folder: the number that `drain` gives then.

        UNSEEN: one must look regularly. ABSENT: there is no such path yet.
        """
        if self.fd < 0:
            return UNSEEN
        mask = _IN_CREATE | _IN_MOVED_TO if folder else _IN_MODIFY
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask)
        if number >= 0:
            return number
        if ctypes.get_errno() == errno.ENOENT:
            return ABSENT
        self.close()  # no more watches to be had: look regularly from now on
        return UNSEEN

    def drain(self) -> dict[int, None] | None:
        """What has changed since the last time, in the order of the first changes; None: it may be anything."""
        changed: dict[int, None] = {}
        known = self.fd >= 0
        try:
            while self.fd >= 0 and (data := os.read(self.fd, CHUNK)):
                at = 0
                while at < len(data):
                    number, mask, _, length = _EVENT.unpack_from(data, at)
                    at += _EVENT.size + length
                    known = known and not mask & _IN_Q_OVERFLOW
                    changed[number] = None
        except BlockingIOError:
            pass
        return changed if known else None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@dataclass
class _Stream:
    """One file of output, and how much of it was shown."""

    path: Path
    target: int
    """The descriptor it is copied to: 1 or 2."""
    attempt: int = 0
    prefix: bytes = b""
    marker: Marker | None = None
    """Marks output that would look like a line of ours."""
    offset: int = 0
    """Everything before it was read for display."""
    keep: int = 0
    """So much of what was shown stays on disk, for evidence; the rest is given back. 0: everything stays."""
    freed: int = 0
    partial_at: float | None = None
    """Since when there is the start of a line beyond `offset`."""
    fd: int = -1
    watch: int = ABSENT
    """Its number among the changes."""
    left: bool = True
    """There may be more to show, even if the file has not changed."""

    def take(self, now: float, flush: bool) -> bytes:
        """The next bytes to be shown: whole lines, or the start of one that has waited long enough."""
        data = self._read()
        self.left = len(data) == CHUNK
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        hold = end < len(data) < CHUNK and not flush
        if hold and not self.prefix:
            if end or self.partial_at is None:
                self.partial_at = now
            hold = now - self.partial_at < HOLD_S
        if hold:
            data = data[:end]
        else:
            self.partial_at = None
        self.offset += len(data)
        if self.keep and self.offset - self.freed > 2 * self.keep:
            self.free()
        if self.marker is not None:
            return self.marker.shown(data)
        return b"".join(self.prefix + line for line in data.splitlines(keepends=True)) if self.prefix else data

    def free(self) -> None:
        """Weeks of output must not fill the node's disk: a hole where it was; offsets stay as they are."""
        self.freed = max(self.freed, self.offset - self.keep)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            ctypes.CDLL(None).fallocate(
                descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(self.freed)
            )
        finally:
            os.close(descriptor)

    def _read(self) -> bytes:
        try:
            if self.fd < 0:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self.fd, CHUNK, self.offset)
            if not data and os.fstat(self.fd).st_size < self.offset:
                self.offset = 0  # truncated: a logging set-up of the user's own
                data = os.pread(self.fd, CHUNK, 0)
        except OSError:
            return b""
        return data

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
KEEP_BYTES = 32 << 20
KEEP_WHEN_LOW_BYTES = 1 << 20
LOW_BYTES = 64 << 20
"""With less free in the local folder, less of what was shown is kept: a rank that cannot write its output ends."""
NOTICES_BYTES = 64 * 1024
"""Bytes kept on disk for notices, so that 'the disk is full' can be one."""


def _reserve(path: Path) -> None:
    """Make the file, with room for what is to come where the file system can."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(NOTICES_BYTES))
    finally:
        os.close(descriptor)


class Terminal:
    """Copies streams and notices to stdout and stderr until everything is shown.

    A descriptor that nobody reads any more (`| head`, a closed window) is given up: the run goes on.
    """

    def __init__(self, paths: LocalPaths, *, notices: bool = True, out: int = 1, err: int = 2) -> None:
        self._paths = paths
        self._targets = {"out": out, "err": err}
        self._pending: dict[int, bytes] = {out: b"", err: b""}
        self._gone: set[int] = set()
        self._streams: list[_Stream] = []
        self._attempt = 0
        self._next_scan = 0.0
        self.took = False
        """Whether there was anything new at the last `pump`."""
        self.changes = Changes()
        attempts = paths.attempt(0).parent
        attempts.mkdir(exist_ok=True)
        self._folders = {self.changes.watch(folder, folder=True) for folder in (paths.folder, attempts)}
        if notices:
            _reserve(paths.notices)
            self._streams.append(_Stream(paths.notices, err, prefix=b"unbroken: "))

    @property
    def blocked(self) -> list[int]:
        """Descriptors that have output waiting: poll them for writing."""
        return [fd for fd, data in self._pending.items() if data]

    def pump(self, now: float, *, flush: bool = False) -> float:
        """Show what there is, without blocking. Seconds after which to come again at the latest (0: at once).

        `flush`: also show starts of lines now.
        """
        changed = self.changes.drain()
        if flush or changed is None or now >= self._next_scan:
            self._next_scan = now + _RESCAN_S
            changed = None
            self._keep_less_when_low()
        if changed is None or not self._folders.isdisjoint(changed):
            self._find_streams()
        self.took = False
        for stream in self._streams if changed is None else self._touched(changed):
            if stream.watch == ABSENT:
                stream.watch = self.changes.watch(stream.path)
            if len(self._pending[stream.target]) < _AT_ONCE or self._write(stream.target):
                taken = stream.take(now, flush)
                self._pending[stream.target] += taken
                self.took = self.took or bool(taken)
            else:
                stream.left = True
        taking = [target for target in self._pending if self._write(target)]
        if any(stream.left and stream.target in taking for stream in self._streams):
            return 0.0
        begun = [s.partial_at for s in self._streams if s.partial_at is not None and s.target in taking]
        waits = [HOLD_S - (now - at) for at in begun]
        idle = _RESCAN_S if self.changes.fd >= 0 else _POLL_S
        return max(0.001, min([idle, *waits]))

    def _keep_less_when_low(self) -> None:
        try:
            state = os.statvfs(self._paths.folder)
        except OSError:
            return
        low = state.f_bavail * state.f_frsize < LOW_BYTES
        for stream in self._streams:
            if stream.keep:
                stream.keep = KEEP_WHEN_LOW_BYTES if low else KEEP_BYTES

    def _touched(self, changed: dict[int, None]) -> list[_Stream]:
        """In the order in which they were written: a rank that fails comes before those that complain about it."""
        order = {number: at for at, number in enumerate(changed)}
        touched = [s for s in self._streams if s.watch in order or s.left or s.partial_at is not None or s.watch < 0]
        return sorted(touched, key=lambda stream: order.get(stream.watch, -1))

    def drain(self, now: float) -> bool:
        """Show everything that the files hold; True when done, False when the terminal must take more first."""
        while self.pump(now, flush=True) == 0.0:
            pass
        return not self.blocked

    def say(self, text: str) -> None:
        """One line of our own on stderr, after what waits there already."""
        self.write(f"unbroken: {text}")

    def write(self, line: str) -> None:
        self._pending[self._targets["err"]] += f"{line}\n".encode(errors="replace")
        self._write(self._targets["err"])

    def _keep(self, path: str) -> int:
        """Free disk space only of our own files: files that the user's options named are the user's."""
        return KEEP_BYTES if Path(path).is_relative_to(self._paths.folder) else 0

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self.changes.close()

    def _write(self, fd: int) -> bool:
        """Write what waits for `fd`; False when it takes no more now."""
        while data := self._pending[fd]:
            if fd in self._gone:
                self._pending[fd] = b""
                break
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            if not poll.poll(0):
                return False
            try:
                written = os.write(fd, data[:_AT_ONCE])
            except BlockingIOError:
                return False
            except OSError:
                self._gone.add(fd)
                continue
            self._pending[fd] = data[written:]
        return True

    def _find_streams(self) -> None:
        """Open the streams of the newest attempt; close those of older ones once it has begun."""
        try:
            numbers = sorted(int(name) for name in os.listdir(self._paths.attempt(0).parent) if name.isdigit())
        except OSError:
            return
        for number in numbers:
            if number > self._attempt:
                self._folders.add(self.changes.watch(self._paths.attempt(number), folder=True))
                self._begin(number)

    def _begin(self, number: int) -> None:
        try:
            streams = json.loads(self._paths.streams(number).read_bytes())
            found = [
                _Stream(
                    Path(entry["path"]),
                    self._targets[entry["stream"]],
                    number,
                    keep=self._keep(entry["path"]),
                    marker=Marker(int(entry["rank"])),
                )
                for entry in streams
                if entry["terminal"]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            return  # not written yet, or half written: the next change brings us here again
        ended = [stream for stream in self._streams if 0 < stream.attempt < self._attempt]
        for stream in ended:
            if stream.keep == KEEP_WHEN_LOW_BYTES:
                stream.free()
            stream.close()
        self._streams = [stream for stream in self._streams if stream not in ended] + found
        self._attempt = number
