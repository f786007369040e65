"""Records which files this rank writes, so that the agent can tell its checkpoints from everybody else's.

Python tells each `open`, rename, new folder and link before it happens (an audit hook); torch's own writer, which opens
files in C++, tells the name that it was given. A line goes to `rank<r>.writes` for each. What neither shows (writers in
C++ or Rust) the agent sees by the open descriptors.

It must never disturb the script: it keeps no lock, starts no thread, swallows its own errors, and forked children
record themselves. A script cannot see it in a traceback.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

LIMIT = 1 << 20
"""Of the file; then it becomes `.1`, in place of an earlier one. The agent reads it every second or so."""
LONGEST = 4096
WRITING = os.O_WRONLY | os.O_RDWR
WRITTEN, FOLDER, RENAMED, LINK, HARD_LINK, REMOVED, IS_OPEN = "w", "d", "r", "l", "h", "x", "i"
EVENTS = {
    "open": WRITTEN,
    "os.mkdir": FOLDER,
    "os.rename": RENAMED,
    "os.symlink": LINK,
    "os.link": HARD_LINK,
    "os.remove": REMOVED,
    "os.rmdir": REMOVED,
    "import": "import",
}
NOT_FILES = ("/dev/", "/proc/", "/sys/")
TORCH = "torch.serialization"
TORCH_WRITER = "_open_zipfile_writer_file"


class WriteRecorder:
    """Appends to `path` from `start` on. A line: `[time_ns, pid, kind, path, more]`.

    `w`: opened for writing; more: what stood there before, `[inode, size, mtime_ns]` or null; `true`: it is open and
    empty by now. `d`: a folder was made, where nothing was. `r`: renamed; more: `[to, inode, size, mtime_ns]`. `l`: a
    symbolic link was made; more: to what. `h`: a hard link; more: as for a rename. `x`: removed.
    `i`: what was told by `w` is open by now; more: what stands there, as for `w`.
    """

    def __init__(self, path: str, other: str = "", clock: Any = None) -> None:
        """`other`: another file of ours. `clock`: a `StepClock` or None, which hears of imports here."""
        self.path = path
        self.other = other
        self.clock = clock
        self.writer_is_told = self.torch_is_told = False
        """`torch_is_told`: no import is waited for any more."""

    def start(self) -> None:
        own, other, note, let_pass = self.path, self.other, self._note, self._let_pass_what_is_not_ours

        def heard(event: str, args: tuple[Any, ...]) -> None:  # a method would take ten times as long to be called
            if event not in EVENTS:
                return
            try:
                if event == "open":
                    if not args[2] & WRITING or args[0] is own or args[0] is other:
                        return
                elif event == "import" and self.torch_is_told:
                    return
                note(EVENTS[event], args)
            except Exception as error:
                let_pass(error)

        sys.addaudithook(heard)
        self._listen_to_torch()

    @staticmethod
    def _let_pass_what_is_not_ours(error: Exception) -> None:
        """The script's signal handler may have raised it while this was running."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and trace.tb_frame.f_code.co_filename not in OUR_FILES:
            raise error

    def _note(self, kind: str, args: tuple[Any, ...]) -> None:
        if kind == "import":
            self._listen_to_torch()
            return
        if kind is WRITTEN:
            path = whole(args[0], args[1] is None)
            if path:
                self.write(kind, path, state(path))
        elif kind is FOLDER:
            path = whole(args[0], args[2] != -1)
            if path and state(path) is None:
                self.write(kind, path, None)
        elif kind is REMOVED:
            path = whole(args[0], args[1] != -1)
            if path:
                self.write(kind, path, None)
        elif kind is LINK:
            path, target = whole(args[1], args[2] != -1), text(args[0])
            if path and target:
                self.write(kind, path, target)
        elif args[0] is not self.path:
            path, target = whole(args[0], args[2] != -1), whole(args[1], args[3] != -1)
            if path and target and len(target) <= LONGEST:
                about = os.lstat(path)
                self.write(kind, path, [target, about.st_ino, about.st_size, about.st_mtime_ns])

    def write(self, kind: str, path: str, more: object) -> None:
        if path.startswith(NOT_FILES) or len(path) > LONGEST:
            return
        line = json.dumps([time.time_ns(), os.getpid(), kind, path, more], separators=(",", ":")).encode() + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
            full = os.fstat(descriptor).st_size > LIMIT
        finally:
            os.close(descriptor)
        if full and os.stat(self.path).st_size > LIMIT:  # another thread, or a child, may have done it
            os.replace(self.path, self.path + ".1")

    # ----- torch.save to a path -----

    def _listen_to_torch(self) -> None:
        listens = self.clock is None or self.clock.listen()
        writer = getattr(sys.modules.get(TORCH), TORCH_WRITER, None)
        self.torch_is_told = listens and (writer is not None or self.writer_is_told)
        if writer is None or self.writer_is_told:
            return
        self.writer_is_told = True
        for attribute in ("name", "file_like"):
            if attribute not in vars(writer):
                setattr(writer, attribute, Told(attribute, self))

    def torch_opens(self, writer: Any, attribute: str, value: Any) -> None:
        """`name` is set before the file is opened; where torch is older, `file_like` when it is open."""
        try:
            if attribute == "name":
                path = whole(value)
                if path:
                    self.write(WRITTEN, path, state(path))
            elif "name" not in vars(writer):
                path = whole(sys._getframe(3).f_locals.get("name"))
                if path:
                    self.write(WRITTEN, path, True)
            else:
                path = whole(vars(writer)["name"])
                if path:
                    self.write(IS_OPEN, path, state(path))
        except Exception as error:
            self._let_pass_what_is_not_ours(error)


class Told:
    """An attribute of torch's writer that tells what it is set to. Nothing of ours is called while torch works."""

    def __init__(self, attribute: str, recorder: WriteRecorder) -> None:
        self.attribute = attribute
        self.recorder = recorder

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self.attribute]
        except KeyError:
            raise AttributeError(self.attribute) from None

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.attribute] = value
        self.recorder.torch_opens(instance, self.attribute, value)


def text(path: Any) -> str:
    """A path as the script gave it; empty for what is none (a descriptor, an object of the script's own)."""
    if isinstance(path, bytes):
        return os.fsdecode(path)
    if isinstance(path, pathlib.PurePath):
        return str(path)
    return path if type(path) is str else ""


def whole(path: Any, needs_root: bool = False) -> str:
    """The absolute path, not normalized; empty where it is not known (`needs_root`: relative to an open folder)."""
    name = text(path)
    if not name or name.startswith("/"):
        return name
    return "" if needs_root else os.path.join(os.getcwd(), name)


def state(path: str) -> list[int] | None:
    """What stands at the path, links followed; None for nothing."""
    try:
        about = os.stat(path)
    except OSError:
        try:
            os.lstat(path)
        except OSError:
            return None
        return [0, 0, 0]
    return [about.st_ino, about.st_size, about.st_mtime_ns]


OUR_FILES = {__file__, os.path.__file__, json.__file__, pathlib.__file__, sys.modules["json.encoder"].__file__}
